"""`ssd search`: what a model is best to leave out while it drafts."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import DEMO, DeviceMapOption, DeviceOption, DtypeOption, JsonOption, ModelArgument, ThreadsOption

HELP = """Find what a model is best to leave out while it drafts, and in which precision to keep the rest.

Drafts are judged on the model's own text in a few forward passes each, by the speed-up that their acceptance and this \
machine's costs promise; the best is confirmed by timed generation. The study is an Optuna study: the same command \
with the same folder goes on after an interruption, and several may run at once on one --storage.

[bold]Examples[/bold]

  ssd search demo --trials 100
  ssd search demo --skip-only -o skip-only
  ssd search MODEL --storage postgresql://user@host/studies --study coder-1.5b
  ssd search --from skip-only --costs other-machine.json -o for-the-other-machine
  ssd generate --config FOLDER --compare
"""

_WHAT = "What to search"
_JUDGE = "What to judge on"
_HOW = "How to search"
_RESULTS = "Results"


def search(
    model: ModelArgument = DEMO,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    threads: ThreadsOption = None,
    trials: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Drafts to judge in all, those of other workers counted.", rich_help_panel=_HOW
        ),
    ] = 120,
    skip_only: Annotated[
        bool, typer.Option("--skip-only", help="No low-bit copies, as in the paper.", rich_help_panel=_WHAT)
    ] = False,
    draft_memory: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SHARE",
            help="The most that low-bit copies of a draft may take, as a share of the weights' bytes. (While "
            "searching, those of all precisions are held.)",
            rich_help_panel=_WHAT,
        ),
    ] = 0.3,
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="speedup (theoretical, at the best draft length), acceptance (of drafts within --budget), "
            "tokens-per-second (measured, as in the paper).",
            rich_help_panel=_WHAT,
        ),
    ] = "speedup",
    budget: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="With --objective acceptance: the most a draft step may take, of a plain one.",
            rich_help_panel=_WHAT,
        ),
    ] = 0.6,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|ID",
            help="Calibration prompts: a .jsonl or .txt file, or a data set of the Hub as "
            "ID\\[:CONFIG]\\[@SPLIT]\\[#COLUMN]. Default: a small mixed set of the package.",
            rich_help_panel=_JUDGE,
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that drafts are judged on.", rich_help_panel=_JUDGE)
    ] = 8,
    held_out: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Further prompts that only the best meets.", rich_help_panel=_JUDGE),
    ] = 6,
    new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens of each text.", rich_help_panel=_JUDGE)
    ] = 32,
    no_chat_template: Annotated[
        bool,
        typer.Option("--no-chat-template", help="Continue the prompts as they are.", rich_help_panel=_JUDGE),
    ] = False,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A profile of `ssd profile`. Default: measured now.", rich_help_panel=_JUDGE),
    ] = None,
    sampler: Annotated[
        str, typer.Option(metavar="NAME", help="tpe, gp, nsga2, random or forward.", rich_help_panel=_HOW)
    ] = "tpe",
    no_warm_start: Annotated[
        bool, typer.Option("--no-warm-start", help="Leave all proposals to the sampler.", rich_help_panel=_HOW)
    ] = False,
    start_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIG",
            help="A config to try first (file, folder, preset); may be repeated.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    no_prune: Annotated[
        bool, typer.Option("--no-prune", help="Judge every draft to the end.", rich_help_panel=_HOW)
    ] = False,
    depth: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Tokens of a round in which drafts are judged.", rich_help_panel=_HOW),
    ] = 6,
    exact_depth: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="So many of these are judged behind exactly what generation would have there, in passes so many times "
            "as long; deeper ones as if they were the last of these.",
            rich_help_panel=_HOW,
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampler.", rich_help_panel=_HOW)] = 0,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Of the study: sqlite:///FILE, postgresql://…, mysql://…, journal:FILE. Default: a file in --output.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the study. Default: search.", rich_help_panel=_HOW)
    ] = None,
    from_study: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STUDY",
            help="Pick the best draft of this study (folder, file or URL) for --costs; nothing is searched.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    confirm: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Time so many of the best in generation; 0: none.", rich_help_panel=_HOW),
    ] = 1,
    no_lookup: Annotated[
        bool,
        typer.Option(
            "--no-lookup",
            help="Leave prompt lookup out of the config that is written. It costs nothing, and is neither searched nor "
            "timed.",
            rich_help_panel=_RESULTS,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Where config, figures and plots go.", rich_help_panel=_RESULTS
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search, or pick for another machine."""
    from .console import err, out, print_json, quiet_libraries

    if from_study is not None:
        _retarget(from_study, study, costs, output, not no_lookup, as_json)
        return
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        from ..config import SelfSpeculativeConfig
        from ..search.profile import CostProfile
        from ..search.runner import search as run_search
        from ..search.settings import CalibrationSettings, ResultSettings, SearchSettings
        from .options import default_folder, load, set_threads
        from .search_view import View

        settings = SearchSettings(
            objective=objective,
            sampler=sampler,
            warm_start=not no_warm_start,
            prune=not no_prune,
            depth=depth,
            exact_depth=exact_depth,
            budget=budget,
            seed=seed,
            draft_memory=0.0 if skip_only else draft_memory,
            start_from=tuple(SelfSpeculativeConfig.from_pretrained(name) for name in start_from or ()),
        )
        texts = CalibrationSettings(prompts, num_prompts, held_out, new_tokens, not no_chat_template)
        given = None if costs is None else CostProfile.load(costs)
        folder = default_folder("search", model) if output is None else output
        set_threads(threads)
        target, tokenizer = load(model, dtype, device, device_map)
        try:
            with View(f"Results go to {folder}") as view:
                result = run_search(
                    target,
                    tokenizer,
                    trials,
                    settings=settings,
                    texts=texts,
                    results=ResultSettings(folder, storage, study or "search", confirm, not no_lookup),
                    profile=given,
                    observer=view,
                )
        except KeyboardInterrupt:
            err().print(
                f"Interrupted. What was judged is kept; the same command with --output {folder} goes on from there.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
        plotted = _plot(result, folder)
    if as_json:
        print_json({**result.to_dict(), "folder": str(folder)})
        return
    from .search_view import result_view

    console = out()
    for part in result_view(result, result.profile.num_layers):
        console.print(part, soft_wrap=isinstance(part, str))
    options = {
        "dtype": None if dtype == "auto" else dtype,
        "device": device,
        "device-map": device_map,
        "threads": threads,
    }
    as_here = "".join(f" --{name} {value}" for name, value in options.items() if value is not None)
    command = f"ssd generate --model {model}{as_here} --config {folder} --compare"
    console.print(f"\n  {command}", soft_wrap=True)
    err().print(f"\nWritten to {folder} ({plotted})", style="dim", soft_wrap=True)


def _plot(result: Any, folder: Path) -> str:
    from ..search.plots import plot_all

    try:
        return "with " + ", ".join(path.name for path in plot_all(result.found, result.profile, result.space, folder))
    except ImportError as error:
        return f"no plots: {error}"


def _retarget(
    source: str, study: str | None, costs: Path | None, output: Path | None, lookup: bool, as_json: bool
) -> None:
    from .console import err, out, print_json, quiet_libraries

    if costs is None:
        raise ValueError("--from picks a draft for other costs: name them with --costs (see `ssd profile`).")
    with quiet_libraries():
        from ..config import LookupConfig
        from ..search.profile import CostProfile
        from ..search.runner import retarget
        from ..search.study import found_config

        profile = CostProfile.load(costs)
        found, stored = retarget(source, profile, study)
        best = found[0]
        config = found_config(
            stored.space,
            best,
            profile,
            stored.context,
            stored.provenance,
            lookup=LookupConfig() if lookup else None,
        )
        if output is not None:
            config.save_pretrained(output)
    if as_json:
        print_json({"trial": best.number, "speedup": best.speedup, "config": config.to_dict()})
        return
    from .search_view import describe_draft, describe_tried

    console = out()
    console.print(f"For {profile.measured_on}:", soft_wrap=True)
    console.print(f"  trial {best.number}, {describe_tried(best)}", soft_wrap=True)
    if best.pruned:
        texts = "It was given up early there, so that its acceptance is that of a part of the texts."
        console.print(f"  {texts}", soft_wrap=True)
    if best.speedup <= 1:
        console.print("  No draft of the study pays there: with this one, generate decodes plainly.")
    for line in describe_draft(config, profile.num_layers):
        console.print(f"  {line}", soft_wrap=True)
    if output is not None:
        err().print(f"Written to {output}", style="dim", soft_wrap=True)
