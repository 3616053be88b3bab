"""The command line of a program: its help, and options that several programs have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ssd_generation.support.machine import cpu_name

from .tables import versions

__all__ = ["Program", "conditions"]


class Program(argparse.ArgumentParser):
    """Parser of a program's command line.

    Args:
        name: of the module.
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
            **defaults: by name, such as `new_tokens`.
        """
        for name, default in defaults.items():
            self._counts.append(name)
            self.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)

    def add_json(self, help: str = "print one JSON document") -> None:  # noqa: A002 - argparse's own name
        """Add `--json`."""
        self.add_argument("--json", action="store_true", help=help)

    def parsed(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line, and end the program where a count is below 1.

        Args:
            words: the command line; `None` for that of the process.
        """
        arguments = self.parse_args(words)
        for name in self._counts:
            if getattr(arguments, name) < 1:
                self.error(f"--{name.replace('_', '-')} should be at least 1, but got {getattr(arguments, name)}")
        return arguments


def conditions(arguments: argparse.Namespace) -> str:
    """Versions, model, type, processor and threads of a run, in one line."""
    where = f"{arguments.model}, {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads"
    return f"{versions()}; {where}."
