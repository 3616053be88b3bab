"""Reading of all files that come from outside: configs, results, prompts, measurements, journals.

Each is a regular file of a bounded size and, where it is JSON, of bounded depth; any problem with it is an error that
names the file. Reading never writes, never waits for another process (a FIFO, a terminal) and never touches a device.
Files that this library has stored for itself are opened by `trusted`, in addition.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .display import path_shown
from .trusted import UntrustedError, opened

__all__ = [
    "CODE",
    "CONFIG",
    "DATA",
    "DATABASE",
    "JOURNAL",
    "MEASUREMENT",
    "PROFILE",
    "RESULT",
    "ROWS",
    "Kind",
    "check_file",
    "filled_lines",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
]

MiB = 2**20


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name in errors, and the most bytes that one may have.

    Attributes:
        name: name with its article, such as "a config".
        most_bytes: maximum size of the file, and of its unpacked content.
    """

    name: str
    most_bytes: int


CONFIG = Kind("a config", 1 * MiB)
CODE = Kind("compiled code", 64 * MiB)
MEASUREMENT = Kind("a measurement", 1 * MiB)
PROFILE = Kind("a profile", 16 * MiB)
RESULT = Kind("a result", 32 * MiB)
DATA = Kind("a data file", 128 * MiB)
ROWS = Kind("a file of rows", 128 * MiB)
JOURNAL = Kind("a journal", 256 * MiB)
DATABASE = Kind("a database", 256 * MiB)

_DEEPEST = 64
"""Maximum nesting of objects and lists; this library's own files have up to eight levels."""

_LONGEST_NUMBER = 40
"""Maximum number of digits of an integer; any that is meant fits 64 bits."""

_NOT_REGULAR = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_bytes(path: str | os.PathLike[str], kind: Kind, within: Path | None = None) -> bytes:
    """Return the content of a file.

    Args:
        path: the file; links are followed, unless `within` is given.
        kind: kind of file, which limits its size.
        within: for a file that this library has stored: the outermost folder that has to be trusted (`opened`).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file (a folder, a FIFO, a socket, a device), too large, or cannot be read; the
            message names it. An `UntrustedError`: another user may have written it.
    """
    shown = path_shown(path)
    if within is not None:
        with _named_errors(shown), opened(Path(path), within) as file:
            _check_size(os.fstat(file.fileno()).st_size, shown, kind)
            content = file.read(kind.most_bytes + 1)
        _check_size(len(content), shown, kind)
        return content
    with _named_errors(shown):
        # Checked before it is opened: opening alone may wait (a FIFO) or have an effect (a device).
        _check_regular(os.stat(path), shown, kind)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            _check_regular(os.fstat(descriptor), shown, kind)
            content = file.read(kind.most_bytes + 1)  # it may be growing
    _check_size(len(content), shown, kind)
    return content


def check_file(path: str | os.PathLike[str], kind: Kind) -> int:
    """Check that a file may be opened by another reader, such as SQLite.

    Args:
        path: the file; links are followed.
        kind: kind of file.

    Returns:
        Its size in bytes.

    Raises:
        FileNotFoundError, ValueError: as `read_bytes`, of which it is the first half.
    """
    shown = path_shown(path)
    with _named_errors(shown):
        status = os.stat(path)
        _check_regular(status, shown, kind)
    return status.st_size


def read_text(path: str | os.PathLike[str], kind: Kind, within: Path | None = None) -> str:
    """Return the text of a UTF-8 file, unpacked where its name ends in `.gz`, without a byte-order mark.

    Args:
        path: the file.
        kind: kind of file.
        within: as for `read_bytes`.

    Raises:
        FileNotFoundError, ValueError: as `read_bytes`; or it is not UTF-8, or not written by gzip.
    """
    content = read_bytes(path, kind, within)
    if os.fspath(path).endswith(".gz"):
        content = _unpacked(content, path_shown(path), kind)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path_shown(path)} is not UTF-8 text: {error}.") from error


def read_json(path: str | os.PathLike[str], kind: Kind, unique_keys: bool = False, within: Path | None = None) -> Any:
    """Return the JSON document in a file.

    Args:
        path: the file.
        kind: kind of file.
        unique_keys: refuse an object that has a key twice.
        within: as for `read_bytes`.

    Raises:
        FileNotFoundError, ValueError: as `read_text`, or as `parse_json`; the message names the file.
    """
    text = read_text(path, kind, within)
    try:
        return parse_json(text, unique_keys)
    except ValueError as error:
        raise ValueError(f"{path_shown(path)} is not JSON that can be read: {error}") from error


def parse_json(text: str, unique_keys: bool = False) -> Any:
    """Parse a JSON document from outside.

    Args:
        text: the document.
        unique_keys: refuse an object that has a key twice.

    Raises:
        ValueError: it is not JSON (RFC 8259: `NaN` and `Infinity` are none), goes deeper than 64 levels, or holds a
            number of more than 40 digits or a character that is none (a lone surrogate).
    """
    try:
        document = json.loads(
            text,
            object_pairs_hook=_unique if unique_keys else None,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: malformed JSON ({error.msg}).") from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels.") from error
    if text.count("[") + text.count("{") > _DEEPEST or "\\ud" in text or "\\uD" in text:
        _check_document(document)
    return document


def filled_lines(path: str | os.PathLike[str], kind: Kind) -> Iterator[tuple[int, str]]:
    """Return the lines of a text file that are not blank, numbered from 1.

    Args:
        path: the file.
        kind: kind of file.

    Raises:
        FileNotFoundError, ValueError: as `read_text`.
    """
    text = io.StringIO(read_text(path, kind), newline="\n")
    return ((number, line.rstrip("\n")) for number, line in enumerate(text, start=1) if line.strip())


# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _named_errors(shown: str) -> Iterator[None]:
    """Raise whatever prevents reading a file as an error that names it."""
    try:
        yield
    except UntrustedError:
        raise
    except ValueError as error:  # from the name itself: a null byte
        if str(error).startswith(shown):
            raise
        raise ValueError(f"{shown} cannot be the name of a file: {error}.") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(f"There is no file {shown}. Check the path.") from error
        raise ValueError(f"{shown} cannot be read: {error.strerror or error}.") from error
    except MemoryError as error:
        raise ValueError(f"{shown} does not fit into the memory that is left.") from error


def _check_regular(status: os.stat_result, shown: str, kind: Kind) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = next((name for test, name in _NOT_REGULAR if test(status.st_mode)), "not a regular file")
        raise ValueError(f"{shown} is {what}; {kind.name} is a regular file.")
    _check_size(status.st_size, shown, kind)


def _check_size(size: int, shown: str, kind: Kind) -> None:
    if size > kind.most_bytes:
        raise ValueError(f"{shown} is too large for {kind.name}, which has at most {kind.most_bytes // MiB} MiB.")


def _unpacked(content: bytes, shown: str, kind: Kind) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(kind.most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{shown} is not a whole gzip file: {error}.") from error
    _check_size(len(unpacked), shown, kind)
    return unpacked


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits; at most {_LONGEST_NUMBER} can be read.")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large.")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} occurs twice in one object. Keep one of the two.")
            seen.add(key)
    return document


def _check_document(document: Any) -> None:
    """Check depth and strings of a document, without recursion."""
    waiting = [(document, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("a text has a lone surrogate, half of a character.")
            continue
        if not isinstance(value, (dict, list)):
            continue
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels.")
        waiting += [(entry, depth + 1) for entry in (value.values() if isinstance(value, dict) else value)]
        if isinstance(value, dict):
            waiting += [(key, depth) for key in value]
