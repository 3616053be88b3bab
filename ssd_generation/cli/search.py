"""`ssd search`: the sub-layers and precisions with which a model drafts best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .option_groups import with_option_groups
from .options import MAX_SEED, JsonOption, ModelArgumentOptions

if TYPE_CHECKING:
    from ..search.run_search import SearchResult
    from .search_view import Picked

HELP = """Search which sub-layers a model best leaves out while it drafts, and the precision of the rest.

Each draft is judged on the model's own text in a few forward passes: its acceptance rate and this machine's costs \
give a theoretical speed-up. The best draft is confirmed by timed generation. The study is an Optuna study: the same \
command with the same folder continues after an interruption, and several processes can work on one --storage at once.

[bold]Examples[/bold]

  ssd search demo --trials 100
  ssd search demo --skip-only -o skip-only
  ssd search MODEL --storage postgresql://user@host/studies --study coder-1.5b
  ssd search --from skip-only --costs other-machine.json -o for-the-other-machine
  ssd generate --config FOLDER --compare
"""


@dataclass(frozen=True)
class SpaceOptions:
    """Search space of drafts, and the objective."""

    panel: ClassVar[str] = "What to search"

    skip_only: Annotated[bool, typer.Option("--skip-only", help="No low-bit copies, as in the paper.")] = False
    draft_memory: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SHARE",
            help="The most memory that a draft's low-bit copies may take, as a share of the weights' bytes. (The "
            "search itself holds the copies of all precisions.)",
        ),
    ] = 0.3
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="speedup (theoretical, at the best draft length), acceptance (of drafts within --budget), "
            "tokens-per-second (measured, as in the paper).",
        ),
    ] = "speedup"
    budget: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="With --objective acceptance: the most a draft step may cost, as a share of a plain step.",
        ),
    ] = 0.6


@dataclass(frozen=True)
class CalibrationOptions:
    """Texts and costs by which drafts are judged."""

    panel: ClassVar[str] = "What to judge on"

    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|ID",
            help="Calibration prompts: a .jsonl or .txt file, or a data set of the Hub as "
            "ID\\[:CONFIG]\\[@SPLIT]\\[#COLUMN]. Default: a small mixed set of the package.",
        ),
    ] = None
    num_prompts: Annotated[int, typer.Option(min=1, metavar="N", help="How many prompts every draft is judged on.")] = 8
    held_out: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many further prompts the best draft alone is tested on.")
    ] = 6
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "--max-new-tokens", min=2, metavar="N", help="Tokens of each text.")
    ] = 32
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompts as they are, not as chats.")
    ] = False
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A profile of `ssd profile`. Default: measured now.")
    ] = None


@dataclass(frozen=True)
class SamplerOptions:
    """Settings of the sampler and its trials."""

    panel: ClassVar[str] = "How to search"

    trials: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="How many drafts to judge in all, other workers' included."),
    ] = 120
    sampler: Annotated[str, typer.Option(metavar="NAME", help="tpe, gp, nsga2, random or forward.")] = "tpe"
    no_warm_start: Annotated[bool, typer.Option("--no-warm-start", help="Leave all proposals to the sampler.")] = False
    start_from: Annotated[
        list[str] | None,
        typer.Option(metavar="CONFIG", help="A config to try first (file, folder, preset); may be repeated."),
    ] = None
    no_prune: Annotated[bool, typer.Option("--no-prune", help="Judge every draft to the end.")] = False
    depth: Annotated[int, typer.Option(min=1, metavar="N", help="How many drafted tokens of a round are judged.")] = 6
    exact_depth: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="How many of these are judged exactly, after the same prefix as in generation. The passes take as "
            "many times longer. Later tokens are judged as if they were the last of these.",
        ),
    ] = 1
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the sampler.")] = 0


@dataclass(frozen=True)
class StudyOptions:
    """Storage of the study, and its use."""

    panel: ClassVar[str] = "How to search"

    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Storage of the study: sqlite:///FILE, postgresql://…, mysql://…, journal:FILE. Default: a file in "
            "--output.",
        ),
    ] = None
    study: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the study. Default: search.")] = None
    from_study: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STUDY",
            help="Pick the best draft of this study (folder, file or URL) for --costs; nothing is searched.",
        ),
    ] = None
    confirm: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="How many of the best drafts are timed in generation; 0: none."),
    ] = 1


@dataclass(frozen=True)
class FoundOptions:
    """Files and output of the search."""

    panel: ClassVar[str] = "Results"

    no_lookup: Annotated[
        bool,
        typer.Option(
            "--no-lookup",
            help="Write a config without prompt lookup. (Lookup costs nothing; it is not part of the search, nor of "
            "what is timed.)",
        ),
    ] = False
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for config, figures and plots.")
    ] = None
    as_json: JsonOption = False


@with_option_groups
def search(
    model: ModelArgumentOptions,
    space: SpaceOptions,
    calibration: CalibrationOptions,
    sampler: SamplerOptions,
    study: StudyOptions,
    results: FoundOptions,
) -> None:
    """Search for a draft, or pick one for another machine."""
    from .console import at_work

    if study.from_study is not None:
        if calibration.costs is None:
            raise ValueError("--from picks a draft for other costs: name them with --costs (see `ssd profile`).")
        picked = _pick(study.from_study, study.study, calibration.costs, results)
        _print_picked(picked, results)
        return
    with at_work(results.as_json):
        result, folder, plotted = _search(model, space, calibration, sampler, study, results)
    _print_result(result, model, folder, plotted, results.as_json)


def _search(
    model: ModelArgumentOptions,
    space: SpaceOptions,
    calibration: CalibrationOptions,
    sampler: SamplerOptions,
    study: StudyOptions,
    results: FoundOptions,
) -> tuple[SearchResult, Path, str]:
    """Run the search; return its result, its folder, and a note on the plots in it."""
    from ..config import SelfSpeculativeConfig
    from ..search.cost_profile import CostProfile
    from ..search.run_search import search as run_search
    from ..search.settings import CalibrationSettings, ResultSettings, SearchSettings
    from .console import resumable
    from .resolve_options import default_folder, load, set_threads
    from .search_view import View

    # Invalid options are rejected before anything slow begins.
    settings = SearchSettings(
        objective=space.objective,
        sampler=sampler.sampler,
        warm_start=not sampler.no_warm_start,
        prune=not sampler.no_prune,
        depth=sampler.depth,
        exact_depth=sampler.exact_depth,
        budget=space.budget,
        seed=sampler.seed,
        draft_memory=0.0 if space.skip_only else space.draft_memory,
        start_from=tuple(SelfSpeculativeConfig.from_pretrained(name) for name in sampler.start_from or ()),
    )
    texts = CalibrationSettings(
        calibration.prompts,
        calibration.num_prompts,
        calibration.held_out,
        calibration.new_tokens,
        not calibration.no_chat_template,
    )
    profile = None if calibration.costs is None else CostProfile.load(calibration.costs)
    folder = default_folder("search", model.model) if results.output is None else results.output
    set_threads(model.threads)
    target, tokenizer = load(model)
    with resumable(folder, lambda: "The drafts judged so far are stored"), View(f"Results go to {folder}") as view:
        result = run_search(
            target,
            tokenizer,
            sampler.trials,
            settings=settings,
            texts=texts,
            results=ResultSettings(
                folder, study.storage, study.study or "search", study.confirm, not results.no_lookup
            ),
            profile=profile,
            observer=view,
        )
    return result, folder, _plot(result, folder)


def _plot(result: Any, folder: Path) -> str:
    from ..search.plots import plot_all

    try:
        return "with " + ", ".join(path.name for path in plot_all(result.found, result.profile, result.space, folder))
    except ImportError as error:
        return f"no plots: {error}"


def _print_result(result: SearchResult, model: ModelArgumentOptions, folder: Path, plotted: str, as_json: bool) -> None:
    from .console import err, out, print_json
    from .search_view import result_view

    if as_json:
        print_json({**result.to_dict(), "folder": str(folder)})
        return
    console = out()
    for part in result_view(result, result.profile.num_layers):
        console.print(part, soft_wrap=isinstance(part, str))
    options = {
        "dtype": None if model.dtype == "auto" else model.dtype,
        "device": model.device,
        "device-map": model.device_map,
        "threads": model.threads,
    }
    as_here = "".join(f" --{name} {value}" for name, value in options.items() if value is not None)
    command = f"ssd generate --model {model.model}{as_here} --config {folder} --compare"
    console.print(f"\n  {command}", soft_wrap=True)
    err().print(f"\nWritten to {folder} ({plotted})", style="dim", soft_wrap=True)


# ----------------------------------------------------------------------------------------------------------------------
# for another machine


def _pick(source: str, name: str | None, costs: Path, results: FoundOptions) -> Picked:
    """Pick a draft from a study, and write its config where a folder is given for it.

    Args:
        source: folder, file or URL of the study.
        name: name of the study, where the source holds several.
        costs: file of the other machine's profile.
        results: destination of the config, and whether it has prompt lookup.
    """
    from .console import quiet_libraries
    from .search_view import Picked

    with quiet_libraries():
        from ..config import LookupConfig
        from ..search.cost_profile import CostProfile
        from ..search.run_search import retarget
        from ..search.study import found_config

        profile = CostProfile.load(costs)
        found, stored = retarget(source, profile, name)
        lookup = None if results.no_lookup else LookupConfig()
        config = found_config(stored.space, found[0], profile, stored.context, stored.provenance, lookup=lookup)
        if results.output is not None:
            config.save_pretrained(results.output)
    return Picked(profile, found[0], config)


def _print_picked(picked: Picked, results: FoundOptions) -> None:
    from .console import err, out, print_json
    from .search_view import picked_view

    if results.as_json:
        best = picked.best
        print_json({"trial": best.number, "speedup": best.speedup, "config": picked.config.to_dict()})
        return
    for line in picked_view(picked):
        out().print(line, soft_wrap=True)
    if results.output is not None:
        err().print(f"Written to {results.output}", style="dim", soft_wrap=True)
