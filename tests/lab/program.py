"""Command line of a program: its help, and options that several programs share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ssd_generation.support.files import write_whole
from ssd_generation.support.machine import cpu_name

from .tables import WRONG, kind_of, versions

__all__ = ["Program", "conditions", "finish"]

_ROWS = "store rows there; the same command continues after an interruption"


class Program(argparse.ArgumentParser):
    """Parser of a program's command line.

    Args:
        name: name of the module.
        about: the module's docstring, which is the help.
    """

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"python -m tests.lab.{name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._counts: list[str] = []

    def add_model(self, dtype: str = "float32") -> None:
        """Add `--model` and `--dtype`, for `load_model`."""
        self.add_argument("--model", default="demo", help="Hub id, folder, GGUF file or 'demo' (SmolLM2-135M-Instruct)")
        self.add_argument("--dtype", default=dtype)

    def add_counts(self, **defaults: int) -> None:
        """Add options that are whole numbers from 1 on.

        Args:
            **defaults: default values by name, such as `new_tokens`.
        """
        for name, default in defaults.items():
            self._counts.append(name)
            self.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)

    def add_json(self, help: str = "print one JSON document") -> None:  # noqa: A002 - argparse's own name
        """Add `--json`."""
        self.add_argument("--json", action="store_true", help=help)

    def add_rows(self) -> None:
        """Add `--rows`, for `stored_rows`."""
        self.add_argument("--rows", type=Path, metavar="FOLDER", help=_ROWS)

    def add_page(self, only: str) -> None:
        """Add the options of a program that writes a page from rows: `--only`, `--rows`, `--json` and `--output`.

        Args:
            only: description of the names that `--only` takes, for the help.
        """
        self.add_argument("--only", nargs="+", metavar="NAME", help=f"these {only}")
        self.add_rows()
        self.add_json("all rows with all reasons as JSON, instead of a page")
        self.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to the terminal")

    def parsed(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line; exit with an error if a count is below 1.

        Args:
            words: the command line; `None` for that of the process.
        """
        arguments = self.parse_args(words)
        for name in self._counts:
            if getattr(arguments, name) < 1:
                self.error(f"--{name.replace('_', '-')} should be at least 1, but got {getattr(arguments, name)}")
        return arguments


def conditions(arguments: argparse.Namespace) -> str:
    """Return versions, model, data type, processor and threads of a run, in one line."""
    where = f"{arguments.model}, {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads"
    return f"{versions()}; {where}."


def finish(arguments: argparse.Namespace, rows: Sequence[Any], page: Callable[[], str]) -> None:
    """Write all rows, as a page or as JSON, to the file or terminal that the command line chooses.

    Args:
        arguments: parsed options of `Program.add_page`.
        rows: dataclasses with `cells`.
        page: function that makes the page.

    Raises:
        SystemExit: with status 1 if a text differs, so that it is not overlooked.
    """
    text = json.dumps([asdict(row) for row in rows], indent=2) + "\n" if arguments.json else page()
    if arguments.output is None:
        print(text, end="")
    else:
        write_whole(arguments.output, text)
    if any(kind_of(cell) == WRONG for row in rows for cell in row.cells.values()):
        raise SystemExit(1)
