"""Write docs/quantised.md: one model in every form of its weights, quantised or with adapters, and how each drafts.

    python -m tests.lab.targets --model FOLDER [--gguf FILE] [--only NAME ...]
                                               [--folders] [--rows FOLDER] [-o docs/quantised.md]

Each form's text with `self_speculative=` is compared with that of the same form without. A form whose library is not
installed is left out, and the page says so. With --folders each is also saved, exported, loaded by transformers, and
served. Nothing is timed. It takes minutes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from ..program import Program, finish
from ..tables import kind_of, stored_rows
from .forms import TARGETS
from .page import page
from .trial import Row, try_target

__all__ = ["main"]

_TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef",
    "Once upon a time there was",
)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.

    Raises:
        SystemExit: with status 1 if a text differs, so that it is not overlooked.
    """
    names = [target.name for target in TARGETS]
    program = Program("targets", __doc__)
    program.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a model in float32, as saved")
    program.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file of a model, for that form")
    program.add_argument("--folders", action="store_true", help="try each form as a folder, too")
    program.add_page(f"forms, instead of all: {'; '.join(names)}")
    arguments = program.parsed(words)
    if not (arguments.model / "config.json").is_file():
        program.error(f"{arguments.model} is no folder with a model: it has no config.json")
    if unknown := [name for name in arguments.only or () if name not in names]:
        program.error(f"there is no form {', '.join(unknown)}; there are: {'; '.join(names)}")
    _hush()
    targets = [target for target in TARGETS if arguments.only is None or target.name in arguments.only]
    prompts = _prompts(arguments.model)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        try:
            what = {
                "benchmark": "targets",
                "model": str(arguments.model.resolve()),
                "gguf": str(arguments.gguf.resolve()) if arguments.gguf else None,
                "forms": [target.name for target in targets],
                "folders": arguments.folders,
            }
            found, store = stack.enter_context(stored_rows(arguments.rows, what))
        except (OSError, ValueError) as error:
            program.error(str(error))
        for target in targets:
            if target.reads_gguf and arguments.gguf is None:
                rows.append(Row(target.name, untried="no file was given (--gguf)"))
                continue
            stored = next((each["rows"] for each in found if each["form"] == target.name), None)
            if stored is not None:
                rows += [Row(**row) for row in stored]
                continue
            source = arguments.gguf if target.reads_gguf else arguments.model
            of_form = []
            for row in try_target(target, str(source), prompts, arguments.model if arguments.folders else None):
                of_form.append(row)
                cells = {**row.cells, **row.folders}
                other = row.untried or {column: cell for column, cell in cells.items() if kind_of(cell) != "yes"}
                print(f"{row.name}: {other or 'yes'}", file=sys.stderr, flush=True)
            store({"form": target.name, "rows": [asdict(row) for row in of_form]})
            rows += of_form
            gc.collect()
    needed = sorted({package for target in targets for package in target.needs})
    finish(arguments, rows, lambda: page(rows, arguments.model.resolve().name, needed))


def _hush() -> None:
    """Silence transformers, and the messages of quantisers about each layer."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def _prompts(model: Path) -> list[dict[str, torch.Tensor]]:
    """Return the prompts as arguments of `generate`: a single text, and a batch."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return [dict(tokenizer(list(texts), return_tensors="pt", padding=True)) for texts in (_TEXTS[:1], _TEXTS)]


if __name__ == "__main__":
    main()
