"""Search methods side by side: what each finds, and how many forward passes of the model it takes.

    python -m tests.lab.search_methods [--model demo] -o FOLDER [--methods default,paper,…] [--trials 120]
    python -m tests.lab.search_methods --beside FOLDER… -o FOLDER

All methods use the same texts and the same costs. The best draft of each is judged on held-out texts, and timed in
generation, interleaved with plain decoding. Each method is a study in one SQLite file of the folder, so that
the same command continues after an interruption. `--beside` puts such runs, of several models, on one page and into one
plot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from ssd_generation.forward.copies.low_bit import drop_copies
from ssd_generation.models import load_model
from ssd_generation.search.calibration import Calibration, calibrate, calibration_prompts, describe_weights
from ssd_generation.search.confirm import confirm
from ssd_generation.search.plots import plot_progress
from ssd_generation.search.profile import CostProfile, measure_profile
from ssd_generation.search.settings import CalibrationSettings, SearchSettings, check_sampler
from ssd_generation.search.space import Space, space_of
from ssd_generation.search.storage import storage_of, storage_to_read
from ssd_generation.search.study import Search, explain_unreadable, found_config, open_study, tried_in
from ssd_generation.search.trials import Found, Tried, acceptance_rate, mean_acceptance, predicted_speedup
from ssd_generation.support.display import for_markdown, for_plot, visible
from ssd_generation.support.files import replacing, write_whole
from ssd_generation.support.reading import RESULT, read_json
from ssd_generation.tuning.acceptance import judge_all
from ssd_generation.tuning.automatic import DRAFT_MEMORY

from .program import Program

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["METHODS", "ComparisonSettings", "SearchMethod", "compare_methods", "plot_methods", "put_together", "table"]


@dataclass(frozen=True)
class SearchMethod:
    """A way of searching.

    Attributes:
        what: description in a few words.
        settings: of the search.
        skip_only: whether sub-layers are only skipped or not, never in low bits.
        share: number of trials relative to the one asked for; the paper's search takes many.
    """

    what: str
    settings: SearchSettings
    skip_only: bool = True
    share: float = 1.0


def _cold(**settings: Any) -> SearchSettings:
    return SearchSettings(warm_start=False, prune=False, **settings)


METHODS: Mapping[str, SearchMethod] = {
    "default": SearchMethod("what `ssd search` does", SearchSettings(), skip_only=False),
    "skip-only": SearchMethod("the same, without low-bit copies", SearchSettings()),
    "exact": SearchMethod("the same, whole rounds judged exactly", SearchSettings(exact_depth=SearchSettings().depth)),
    "gp": SearchMethod("the same, Gaussian process", SearchSettings(sampler="gp")),
    "nsga2": SearchMethod("the same, NSGA-II on acceptance and cost", SearchSettings(sampler="nsga2")),
    "forward": SearchMethod("greedy forward selection", SearchSettings(sampler="forward", prune=False)),
    "tpe": SearchMethod("TPE from nothing", _cold()),
    "random": SearchMethod("at random", _cold(sampler="random")),
    "paper": SearchMethod(
        "Draft & Verify: measured tokens per second, from nothing", _cold(objective="tokens-per-second"), share=2.5
    ),
    "paper-judged": SearchMethod(
        "the paper's number of trials from nothing, drafts judged instead of timed", _cold(), share=2.5
    ),
}


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a comparison.

    Args:
        methods: names in `METHODS`.
        trials: of each method, times its share, ≥ 1.
        draft_memory: share of the weights' bytes that low-bit copies may take, where a method makes any.
        timed: time the winners in generation.
    """

    methods: Sequence[str]
    trials: int = 120
    draft_memory: float = DRAFT_MEMORY
    timed: bool = True


def compare_methods(
    model: PreTrainedModel,
    texts: Calibration,
    held_out: Calibration,
    profile: CostProfile,
    storage: str,
    settings: ComparisonSettings,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], dict[str, Found]]:
    """Search by each method, then judge and time the best draft of each.

    Args:
        model: the target model.
        texts: that drafts are judged on.
        held_out: texts that the best drafts are judged and timed on.
        profile: costs.
        storage: URL of the storage of the studies.
        settings: which methods, and how long each searches.
        progress: callback with a line of text.

    Returns:
        By method: trials, forward passes, the theoretical speed-up of the best draft on both sets of texts and its
        measured one, and the passes until it was as good as the best of each other method; and everything that was
        tried.

    Raises:
        ImportError: a package that one of the methods needs is not installed.
        ValueError: an unknown method.
    """
    _check(settings.methods)
    founds: dict[str, Found] = {}
    winners: dict[str, tuple[Tried, Space]] = {}
    for name in settings.methods:
        method = METHODS[name]
        space = space_of(model, 0.0 if method.skip_only else settings.draft_memory)
        about = {"method": name, "weights": describe_weights(model), "texts": texts.digest, "space": space.describe()}
        study = open_study(name, storage_of(storage), method.settings, about)
        search = Search(model, texts, profile, space, study, method.settings)
        wanted = max(1, round(settings.trials * method.share))

        def observe(found: Found, name: str = name, wanted: int = wanted) -> None:
            best = max((t.speedup for t in found.tried if not t.pruned), default=0.0)
            progress(f"{name}: {len(found.tried)} of {wanted} drafts, {sum(found.passes)} passes, best {best:.3f}×")

        found = search.run(wanted, observe)
        founds[name] = found
        winners[name] = found.best()[0], space
    rows: dict[str, Any] = {}
    configs = {}
    for name, (best, space) in winners.items():
        config = configs[name] = found_config(space, best, profile, texts.context())
        again = judge_all(model, config, held_out.texts, SearchSettings().depth, SearchSettings().depth)
        costs = profile.costs(config, texts.context())
        rows[name] = {
            "what": METHODS[name].what,
            "trials": len(founds[name].tried),
            "passes": sum(founds[name].passes),
            "speedup": best.speedup,
            "draft_length": best.draft_length,
            "draft_cost": best.draft_cost,
            "acceptance": mean_acceptance(best),
            "held_out_speedup": predicted_speedup(again, costs)[0],
            "held_out_acceptance": acceptance_rate(again),
            "skip": config.skip.to_dict(),
            "passes_to_reach": {other: _passes_until(founds[name], row[0].speedup) for other, row in winners.items()},
        }
    if settings.timed:
        result = confirm(model, configs, held_out, progress)
        for name, ratios in result.ratios.items():
            rows[name] |= {
                "measured": result.median(name),
                "measured_from": min(ratios),
                "measured_to": max(ratios),
                "identical": result.identical[name],
                "texts": len(ratios),
            }
    drop_copies(model)
    return rows, founds


def _check(methods: Sequence[str]) -> None:
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"There is no search method {unknown[0]!r}. Choose from {', '.join(METHODS)}.")
    for name in methods:
        check_sampler(METHODS[name].settings.sampler)


def _passes_until(found: Found, speedup: float) -> int | None:
    """Return the forward passes until a draft had this theoretical speed-up; `None` where none has it."""
    spent = 0
    for t, passes in zip(found.tried, found.passes, strict=True):
        spent += passes
        if not t.pruned and t.speedup >= speedup:
            return spent
    return None


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the methods as a Markdown table; with the paper's search among them, also the passes to get as far."""
    paper = next((name for name in ("paper", "paper-judged") if name in rows), None)
    head = ["method", "drafts", "passes", *([f"until as good as {paper}"] if paper else []), "promised"]
    head += ["on texts held back", "measured", "draft step", "acceptance"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        measured = "–"
        if "measured" in row:
            measured = f"{row['measured']:.2f} ({row['measured_from']:.2f}–{row['measured_to']:.2f})"
        promised = f"{row['speedup']:.2f} at {row['draft_length']}"
        reached = ""
        if paper is not None:
            passes = row["passes_to_reach"].get(paper)
            reached = f" {'never' if passes is None else passes} |"
        lines.append(
            f"| {name} ({row['what']}) | {row['trials']} | {row['passes']} |{reached} {promised} "
            f"| {row['held_out_speedup']:.2f} | {measured} | {row['draft_cost']:.2f} | {row['acceptance']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def plot_methods(founds: Mapping[str, Mapping[str, Found]], path: Path) -> None:
    """Plot the progress of several search methods, see `plot_progress`, a panel for each model.

    Args:
        founds: by model and method.
        path: of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'ssd_generation[plots]'") from error
    several = len(founds) > 1
    figure = Figure(figsize=(2 + 4.6 * len(founds), 5.6 if several else 4), layout="constrained")
    names = list(dict.fromkeys(name for found in founds.values() for name in found))
    for place, (model, found) in enumerate(founds.items()):
        ax = figure.add_subplot(1, len(founds), place + 1)
        plot_progress(found, ax=ax, names=names)
        ax.set_title(for_plot(model), fontsize=12)
        if several:  # below, where it covers no line
            ax.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, frameon=False)
        if place > 0:
            ax.set_ylabel("")
    figure.savefig(path, dpi=130, format="png")


def put_together(folders: Sequence[Path], output: Path) -> str:
    """Put runs for several models on one page (methods.md), and in one plot (methods.png).

    Args:
        folders: that earlier runs have written.
        output: folder of the page and the plot.

    Returns:
        The page.

    Raises:
        ImportError: matplotlib is not installed; the page is written then.
        ValueError: a folder holds no finished run, or one that cannot be read.
    """
    pages, founds = [], {}
    for folder in folders:
        file = folder / "methods.json"
        try:
            data = read_json(file, RESULT)
            storage = storage_to_read(str(folder / "studies.db"))
        except FileNotFoundError as error:
            raise ValueError(
                f"{str(folder)!r} holds no finished comparison of methods: {file.name} or studies.db is missing there."
            ) from error
        with explain_unreadable(f"The comparison of methods in {str(folder)!r}"):
            names = {name: optuna.load_study(study_name=name, storage=storage) for name in data["methods"]}
            texts = data["texts"]
            pages.append(
                f"## {for_markdown(data['model'])}\n\n{for_markdown(data['measured_on'])}; chosen on "
                f"{texts['chosen_on']} texts of {texts['new_tokens']} tokens, {texts['held_back']} held back\n\n"
                f"{table(data['methods'])}"
            )
            founds[data["model"]] = {name: tried_in(study) for name, study in names.items()}
    page = "# Ways of searching\n\n" + "\n".join(pages)
    write_whole(output / "methods.md", page)
    with replacing(output / "methods.png") as path:
        plot_methods(founds, path)
    return page


def _methods_named(named: str | None) -> list[str]:
    """Return the methods of the command line, or the default ones that can run here."""
    if named is not None:
        methods = named.split(",")
        _check(methods)
        return methods
    methods = [name for name in METHODS if name != "paper"]
    try:
        check_sampler("gp")
    except ImportError as error:
        print(f"{error} (left out)", file=sys.stderr)
        methods.remove("gp")
    return methods


def main(words: Sequence[str] | None = None) -> None:
    """Search by all methods, and write the comparison.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("search_methods", __doc__)
    program.add_model()
    program.add_argument("-o", "--output", required=True, type=Path)
    program.add_argument(
        "--methods", help=f"of {','.join(METHODS)} (default: all but paper, and gp only where scipy is installed)"
    )
    program.add_counts(
        trials=ComparisonSettings.trials,
        num_prompts=CalibrationSettings.num_prompts,
        held_out=CalibrationSettings.held_out_prompts,
        new_tokens=CalibrationSettings.new_tokens,
    )
    program.add_argument("--no-timing", action="store_true", help="do not time the winners in generation")
    program.add_argument("--beside", nargs="+", type=Path, metavar="FOLDER", help="search nothing: put these together")
    arguments = program.parsed(words)

    def progress(text: str) -> None:
        print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
        if not sys.stderr.isatty():
            print(file=sys.stderr)

    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.beside:
        try:
            print(visible(put_together(arguments.beside, folder), keep="\n"))
        except (ImportError, ValueError) as error:
            program.error(visible(error))
        return
    try:
        methods = _methods_named(arguments.methods)
    except (ImportError, ValueError) as error:
        program.error(visible(error))
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    # The prompts after the first ones are held out.
    texts, held_out = (
        calibrate(model, tokenizer, calibration_prompts(None, count, skip=skip), arguments.new_tokens)
        for count, skip in ((arguments.num_prompts, 0), (arguments.held_out, arguments.num_prompts))
    )
    file = folder / "profile.json"
    if file.exists():
        profile = CostProfile.load(file)
    else:
        profile = measure_profile(model, progress=lambda text, done, total: progress(f"{text}, {done} of {total}"))
        profile.save(file)
    rows, founds = compare_methods(
        model,
        texts,
        held_out,
        profile,
        str(folder / "studies.db"),
        ComparisonSettings(methods, arguments.trials, timed=not arguments.no_timing),
        progress,
    )
    page = table(rows)
    name = Path(model.config.name_or_path or arguments.model).name
    data = {
        "model": name,
        "measured_on": profile.measured_on,
        "texts": {"chosen_on": len(texts), "held_back": len(held_out), "new_tokens": arguments.new_tokens},
        "methods": rows,
    }
    write_whole(folder / "methods.json", json.dumps(data, indent=2))
    write_whole(folder / "methods.md", page)
    try:
        with replacing(folder / "methods.png") as path:
            plot_methods({name: founds}, path)
    except ImportError as error:
        print(f"\n{error}", file=sys.stderr)
    print(f"\n{visible(profile.measured_on)}; {len(texts)} texts, {len(held_out)} held back\n\n{page}")


if __name__ == "__main__":
    main()
