"""Write docs/models.md: which model families of the installed transformers can be decoded, and in which ways.

    python -m tests.lab.families [--only NAME ...] [--json] [--rows FOLDER] [-o docs/models.md]

Each family is built as a tiny random model from its config class, and its text with `self_speculative=` is compared
with that of plain `generate`. What is tried are a family's layers, cache and masks, not trained weights, and nothing is
timed. It takes minutes; each family is tried in a child process, so that one that crashes or hangs ends only its row.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

import transformers

from ..program import Program, finish
from ..tables import WRONG, kind_of, stored_rows
from .children import try_families
from .models import KINDS_OF_MODELS, known_families
from .page import page
from .trial import Row

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.

    Raises:
        SystemExit: with status 1 if a text differs, so that it is not overlooked.
    """
    program = Program("families", __doc__)
    program.add_page("model types, instead of all")
    arguments = program.parsed(words)
    families = [(family, kind) for kind in KINDS_OF_MODELS for family in known_families(kind)]
    if arguments.only is not None:
        known = {family for family, _ in families}
        if unknown := [family for family in dict.fromkeys(arguments.only) if family not in known]:
            program.error(f"transformers {transformers.__version__} has no model type {', '.join(unknown)}")
        families = [(family, kind) for family, kind in families if family in arguments.only]
    with contextlib.ExitStack() as stack:
        try:
            what = {"benchmark": "families", "families": [list(each) for each in families]}
            found, store = stack.enter_context(stored_rows(arguments.rows, what))
        except (OSError, ValueError) as error:
            program.error(str(error))
        rows = [Row(**row) for row in found]
        done = {(row.family, row.kind) for row in rows}
        # Read by the child processes: nothing is downloaded, and measurements of tiny models are not retained.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ.update(HF_HUB_OFFLINE="1", SSD_GENERATION_CACHE=folder, OMP_NUM_THREADS="1")
        for row in try_families([each for each in families if each not in done]):
            store(asdict(row))
            rows.append(row)
            wrong = " ".join(f"{key}: {cell}" for key, cell in row.cells.items() if kind_of(cell) in (WRONG, "crashed"))
            print(f"{len(rows)}/{len(families)} {row.family} {wrong}".rstrip(), file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row.kind, row.family))
    finish(arguments, rows, lambda: page(rows))


if __name__ == "__main__":
    main()
