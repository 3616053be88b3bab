"""Tables of outcomes: their cells, the notes below them, and the folder that stores rows for an interrupted run."""

from __future__ import annotations

import gc
import platform
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from ssd_generation.harness.results import RunFolder
from ssd_generation.harness.results.environment import commit_of
from ssd_generation.support.display import for_markdown
from ssd_generation.support.messages import clipped

__all__ = [
    "CRASHED",
    "KINDS",
    "WRONG",
    "YES",
    "Notes",
    "as_markdown",
    "counted",
    "is_refusal",
    "judged",
    "kind_of",
    "measured_rows",
    "short",
    "stored_rows",
    "versions",
]

YES, WRONG = "yes", "WRONG"
CRASHED = "crashed: "

KINDS = ("yes", "refused", "WRONG", "crashed")


def kind_of(cell: str) -> str:
    """Return the kind of a cell, of `KINDS`."""
    if cell in (YES, WRONG):
        return cell
    return "crashed" if cell.startswith(CRASHED) else "refused"


def short(error: BaseException | str) -> str:
    """Return a message in one line, cut off where it is long."""
    return clipped(" ".join(str(error).split()) or "no message", 500)


def is_refusal(error: BaseException) -> bool:
    """Tell whether an error is a refusal by this library: a ValueError from its own code, not from a model's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = "" if frames is None else frames.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and module.partition(".")[0] == "ssd_generation"


def judged(model: Any, plain: torch.Tensor, decode: Callable[[], torch.Tensor]) -> tuple[str, int]:
    """Return the cell of a text that the library made, and the number of drafted tokens.

    Args:
        model: an enabled model.
        plain: token ids of its plain text.
        decode: function that makes the same text with the library.
    """
    try:
        drafted = decode()
    except Exception as error:
        return short(error if is_refusal(error) else f"{CRASHED}{type(error).__name__}: {error}"), 0
    statistics = model.last_speculation
    if not torch.equal(drafted, plain):
        return WRONG, statistics.drafted_tokens
    return YES if statistics.refusal is None else short(statistics.refusal), statistics.drafted_tokens


def as_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown.

    Args:
        head: headings of the columns.
        rows: cells of each row, one for each heading.
    """
    heading = "|".join(f" {name} " if name else " " for name in head)
    return [f"|{heading}|", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


class Notes:
    """Notes: reasons, numbered in the order of their first use, with the names of the rows that they apply to."""

    def __init__(self) -> None:
        self._of: dict[str, list[str]] = {}

    def shown(self, cell: str, reason: str, who: str) -> str:
        """Return the text of a cell in the table, and note its reason.

        Args:
            cell: outcome.
            reason: the outcome without details that differ from row to row.
            who: name of its row.
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
        """Return the notes as lines of Markdown; `title` is the word before the names that a note applies to."""
        return [
            f"{n}. {for_markdown(why)}. {title}: {', '.join(of)}." for n, (why, of) in enumerate(self._of.items(), 1)
        ]


def counted(columns: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a table with the number of cells of each kind in each column, as lines of Markdown.

    Args:
        columns: headings by name.
        rows: cells by column.
    """
    rows_of_kinds = []
    for kind, heading in zip(KINDS, ("yes", "no (refused)", "WRONG", "crashed"), strict=True):
        numbers = [sum(kind_of(row[name]) == kind for row in rows if name in row) for name in columns]
        rows_of_kinds.append([heading, *map(str, numbers)])
    return as_markdown(["", *columns.values()], rows_of_kinds)


def versions() -> str:
    """Return the versions of the software that a page was made with, and the commit where git knows it."""
    return (
        f"ssd_generation {version('ssd_generation')}{_commit()}, transformers {transformers.__version__}, "
        f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    )


@cache
def _commit() -> str:
    """Return ` (commit …)`, or nothing where this is no checkout."""
    commit = commit_of(Path(__file__).parents[2])
    if commit is None:
        return ""
    name, _, dirty = commit.partition("-")
    return f" (commit {name[:7]}{dirty and f', {dirty}'})"


@contextmanager
def stored_rows(
    folder: Path | None, run: Mapping[str, Any]
) -> Iterator[tuple[list[dict[str, Any]], Callable[[Mapping[str, Any]], None]]]:
    """Open the folder of a run; yield its stored rows, and a function that writes another row to the disk at once.

    Args:
        folder: folder of the run, created if missing; `None`: nothing is stored.
        run: description of the run, as plain JSON types; rows of a run with another description are not continued.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: it holds another run, something else, or rows that cannot be read.
    """
    if folder is None:
        yield [], lambda row: None
        return
    with RunFolder(folder, {**run, "versions": versions()}, "--rows") as opened:
        yield list(opened.rows), opened.append


def measured_rows(arguments: Namespace, measure: Callable[[str, Namespace], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each name in `arguments.only`; those that `arguments.rows` stores are not measured again.

    Args:
        arguments: parsed options of a program with `--only` and `--rows`.
        measure: function that makes the row of a name, with its `name`; the options are its second argument.

    Raises:
        OSError, ValueError: as in `stored_rows`.
    """
    what = {key: value for key, value in vars(arguments).items() if key not in ("only", "rows", "json")}
    with stored_rows(arguments.rows, what) as (rows, store):
        found = {row["name"]: row for row in rows}
        for name in arguments.only:
            if name not in found:
                found[name] = measure(name, arguments)
                store(found[name])
                gc.collect()  # a model is part of cycles, and the next one may not fit into memory with it
        return [found[name] for name in arguments.only]
