"""Files that appear whole or not at all, and files of lines."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["filled_lines", "replacing", "write_whole"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside a file, to write to; it takes the file's place when that has gone well.

    Args:
        path: the file; one that exists is replaced.
    """
    # Not `tempfile`, whose files are readable by their owner only.
    temporary = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file of text so that nobody ever sees a part of it."""
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def filled_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file that hold anything, numbered from 1.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text: {error}.") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
