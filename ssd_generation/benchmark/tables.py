"""Tables of what was tried: what is in a cell, what a text that is another one is called, notes below the table.

And the folder that rows are kept in as they come, so that a run of them can go on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from ..config import SkipConfig
from ..harness.results import RunFolder
from ..support.display import for_markdown
from ..support.messages import clipped

__all__ = [
    "CRASHED",
    "KINDS",
    "PACKAGE",
    "WRONG",
    "YES",
    "Notes",
    "counted",
    "is_refusal",
    "judged",
    "kept_rows",
    "kind_of",
    "short",
    "versions",
]

# The name of a module is another one where it is run by `python -m`.
PACKAGE = SkipConfig.__module__.partition(".")[0]

YES, WRONG = "yes", "WRONG"
CRASHED = "crashed: "

KINDS = ("yes", "refused", "WRONG", "crashed")


def kind_of(cell: str) -> str:
    """Which of `KINDS` a cell is."""
    if cell in (YES, WRONG):
        return cell
    return "crashed" if cell.startswith(CRASHED) else "refused"


def short(error: BaseException | str) -> str:
    """A message in one line, cut off where it is long."""
    return clipped(" ".join(str(error).split()) or "no message", 500)


def is_refusal(error: BaseException) -> bool:
    """Whether this library says that it cannot: not a ValueError that a model raised on its way."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = "" if frames is None else frames.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and module.partition(".")[0] == PACKAGE


def judged(model: Any, plain: torch.Tensor, decode: Callable[[], torch.Tensor]) -> tuple[str, int]:
    """What is said in a cell of a text that the library made, and the tokens that were drafted.

    Args:
        model: an enabled model.
        plain: its plain text, token ids.
        decode: makes the same text by the library.
    """
    try:
        drafted = decode()
    except Exception as error:
        return short(error if is_refusal(error) else f"{CRASHED}{type(error).__name__}: {error}"), 0
    statistics = model.last_speculation
    if not torch.equal(drafted, plain):
        return WRONG, statistics.drafted_tokens
    return YES if statistics.refusal is None else short(statistics.refusal), statistics.drafted_tokens


class Notes:
    """Reasons, numbered in the order in which they come up, with those that they hold for."""

    def __init__(self) -> None:
        self._of: dict[str, list[str]] = {}

    def shown(self, cell: str, reason: str, who: str) -> str:
        """What stands in the table for a cell.

        Args:
            cell: what was found.
            reason: the same without what differs from one to the next.
            who: what it was found of.
        """
        kind = kind_of(cell)
        if not cell or kind == YES:
            return cell
        if kind == WRONG:
            return f"**{cell}**"
        names = self._of.setdefault(reason, [])
        if who not in names:
            names.append(who)
        number = list(self._of).index(reason) + 1
        return f"{'crashed' if kind == 'crashed' else 'no'} ({number})"

    def lines(self, title: str) -> list[str]:
        """The notes as lines of Markdown; `title` is what they call those that they hold for."""
        return [
            f"{n}. {for_markdown(why)}. {title}: {', '.join(of)}." for n, (why, of) in enumerate(self._of.items(), 1)
        ]


def counted(columns: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table of how many cells of each column are of which kind, as lines of Markdown.

    Args:
        columns: headings by name.
        rows: cells by column.
    """
    lines = [f"| | {' | '.join(columns.values())} |", "|---|" + "---|" * len(columns)]
    for kind, heading in zip(KINDS, ("yes", "no (refused)", "WRONG", "crashed"), strict=True):
        numbers = [sum(kind_of(row[name]) == kind for row in rows if name in row) for name in columns]
        lines.append(f"| {heading} | {' | '.join(map(str, numbers))} |")
    return lines


def versions() -> str:
    """Versions of what a page was made with."""
    return (
        f"ssd_generation {version('ssd_generation')}, transformers {transformers.__version__}, "
        f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    )


@contextmanager
def kept_rows(
    folder: Path | None, run: Mapping[str, Any]
) -> Iterator[tuple[list[dict[str, Any]], Callable[[Mapping[str, Any]], None]]]:
    """The rows that an earlier run has left in a folder, and what puts another one there, at once on the disk.

    Args:
        folder: made where there is none; `None`: nothing is kept.
        run: what is tried with what, as plain JSON types: rows of another run are not gone on with.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: it holds another run, something else, or rows that cannot be read.
    """
    if folder is None:
        yield [], lambda row: None
        return
    with RunFolder(folder, {**run, "versions": versions()}, "--rows") as kept:
        yield list(kept.rows), kept.append
