"""Search methods side by side: what each finds, and how many forward passes of the model it takes.

    python -m tests.lab.search_methods [--model demo] -o FOLDER [--methods default,paper,…] [--trials 120]
    python -m tests.lab.search_methods --compare FOLDER… -o FOLDER

All methods use the same texts and the same costs. The best draft of each is judged on held-out texts, and timed in
generation, interleaved with plain decoding. Each method is a study in one SQLite file of the folder, so that the same
command continues after an interruption. `--compare` puts such runs, of several models, on one page and into one plot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ssd_generation.models import load_model
from ssd_generation.search.calibration import calibrate, calibration_prompts
from ssd_generation.search.cost_profile import CostProfile, measure_profile
from ssd_generation.search.settings import CalibrationSettings, check_sampler
from ssd_generation.support.display import visible
from ssd_generation.support.files import replacing, write_whole

from ..program import Program
from .methods import METHODS, ComparisonSettings, check_methods, compare_methods
from .page import plot_methods, put_together, table

__all__ = ["main"]


def _methods_named(named: str | None) -> list[str]:
    """Return the methods of the command line, or the default ones that can run here."""
    if named is not None:
        methods = named.split(",")
        check_methods(methods)
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
    program.add_argument("--compare", nargs="+", type=Path, metavar="FOLDER", help="search nothing: put these together")
    arguments = program.parsed(words)

    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.compare:
        try:
            print(visible(put_together(arguments.compare, folder), keep="\n"))
        except (ImportError, ValueError) as error:
            program.error(visible(error))
        return
    try:
        methods = _methods_named(arguments.methods)
    except (ImportError, ValueError) as error:
        program.error(visible(error))
    _compare(arguments, methods)


def _compare(arguments: argparse.Namespace, methods: Sequence[str]) -> None:
    folder: Path = arguments.output
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
        profile = measure_profile(model, progress=lambda text, done, total: _progress(f"{text}, {done} of {total}"))
        profile.save(file)
    rows, founds = compare_methods(
        model,
        texts,
        held_out,
        profile,
        str(folder / "studies.db"),
        ComparisonSettings(methods, arguments.trials, timed=not arguments.no_timing),
        _progress,
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


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
