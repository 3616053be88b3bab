"""Files that appear whole or not at all, files of lines, and where this library keeps its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["default_cache_dir", "filled_lines", "replacing", "write_whole"]


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


def default_cache_dir() -> Path:
    """The directory where this library keeps what it fetches.

    `$SSD_GENERATION_CACHE`, else `ssd_generation` under `%LOCALAPPDATA%` (Windows) or under `$XDG_CACHE_HOME`, else
    `~/.cache/ssd_generation`.
    """
    if own := os.environ.get("SSD_GENERATION_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ssd_generation"
