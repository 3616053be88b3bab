"""Folder of one run: its arguments, the machine, a line per measurement, and a summary.

    config.json        the arguments; a run with other arguments is refused
    environment.json   machine and versions, once per session
    rows.jsonl         one line per measurement, appended as it is made
    summary.json, summary.md, plot.png
    .lock              held by the process that writes there; the file remains

Files appear whole or not at all, by a rename; only rows.jsonl grows. What a killed process has left, an incomplete last
line and temporary files, is removed when the run continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...support import reading
from ...support.display import visible
from ...support.files import Lock, is_temporary, temporary_name, write_whole

__all__ = ["RunFolder", "read_rows"]

CONFIG, ENVIRONMENT, ROWS = "config.json", "environment.json", "rows.jsonl"
SUMMARY, TABLE, PLOT = "summary.json", "summary.md", "plot.png"
_LOCK = ".lock"
# In the order in which they are removed with their folder: what remains is always a run that can continue, or nothing.
_FILES = (ROWS, ENVIRONMENT, SUMMARY, TABLE, CONFIG, _LOCK)
# Names that earlier versions gave to files being written.
_OLD_TEMPORARY = re.compile(rf"\.[0-9a-f]{{32}}\.({'|'.join(map(re.escape, _FILES[:-1]))}|\w+\.png)")
_MOST_SHOWN = 3  # problems of a folder in an error message
_MOST_TRIES = 100
_Result = TypeVar("_Result")


class RunFolder:
    """Files of a run. Use it as a context manager: one process at a time may write there.

    Only a folder that is new, empty or of this very run is written to.

    Args:
        path: the folder, created if it does not exist.
        arguments: arguments that define the run, as plain JSON types.
        option: command-line option that names the folder.

    Raises:
        OSError: the folder cannot be created or written.
        ValueError: the folder holds another run, something else, or rows that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], arguments: Mapping[str, Any], option: str = "--output") -> None:
        self.path = Path(os.path.expanduser(path))
        self.arguments = json.loads(json.dumps(arguments))  # as it will be read
        self.rows: list[dict[str, Any]] = []
        self._lock = Lock(self.path / _LOCK)
        self._option = option
        self._advice = f"Choose another folder with {option}."
        self._is_new = False
        self._is_done_with = False
        self._check_ownership()  # before anything is written
        self._with_folder(self._check_writable)

    def __enter__(self) -> RunFolder:
        if not self._with_folder(self._lock.acquire):
            raise ValueError(
                f"Another run is in progress in {str(self.path)!r}. Wait for it, or choose another folder."
            )
        try:
            self._check_ownership()  # again: another run may have begun here meanwhile
            self._remove_temporary_files()
            file = self.path / ROWS
            self.rows, size = _parse_rows(file)
            if file.exists() and size < file.stat().st_size:
                os.truncate(file, size)
            if not (self.path / CONFIG).exists():
                self.write_json(CONFIG, self.arguments)
        except BaseException:
            self._release((_LOCK,) if self._is_new else ())
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Where nothing was measured, for example because the model was not found, no folder remains.
        nothing = self._is_new and not self.rows
        self._release(_FILES if nothing or self._is_done_with else ())

    def _with_folder(self, do: Callable[[], _Result]) -> _Result:
        """Create the folder if needed, and run `do` there."""
        for tries_left in reversed(range(_MOST_TRIES)):
            try:
                self._make()
                return do()
            except FileNotFoundError as error:  # a run without rows has just removed its folder
                if not tries_left:
                    raise self._cannot_write(error) from error
            except FileExistsError as error:
                raise FileExistsError(
                    f"The results need a folder, but {str(self.path)!r} is a file. {self._advice}"
                ) from error
            except OSError as error:
                if self._is_new:
                    with contextlib.suppress(OSError):
                        self.path.rmdir()
                raise self._cannot_write(error) from error
        raise AssertionError("the last try returns or raises")

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True)
            self._is_new = True
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(self.path).st_mode):
                raise

    def _check_writable(self) -> None:
        # Where the file has a name for a moment, it is one that other runs ignore.
        with tempfile.TemporaryFile(dir=self.path, prefix=temporary_name(".")):
            pass

    def _remove_temporary_files(self) -> None:
        """Remove the temporary files of killed runs."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                    Path(entry.path).unlink(missing_ok=True)

    def _release(self, files: tuple[str, ...]) -> None:
        """Release the folder; first remove it if it holds nothing but some of these files."""
        try:
            with contextlib.suppress(OSError):
                found = {name for name in os.listdir(self.path) if not _is_temporary(name)}
                if files and found <= set(files):
                    for name in files:  # the lock last: after it, another run may begin
                        (self.path / name).unlink(missing_ok=True)
                    self.path.rmdir()
        finally:
            self._lock.release()

    def done_with(self) -> None:
        """Mark the contents as stored elsewhere: the folder is removed on exit, unless it holds something else."""
        self._is_done_with = True

    def _cannot_write(self, error: OSError) -> OSError:
        reason = error.strerror or str(error)
        return type(error)(f"The results cannot be written to {str(self.path)!r}: {reason}. {self._advice}")

    def _check_ownership(self) -> None:
        """Raise if the folder is neither empty nor of this very run; nothing is written."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._cannot_write(error) from error
        file = self.path / CONFIG
        if CONFIG not in names:
            others = sorted(name for name in names if name != _LOCK and not _is_temporary(name))
            if others:
                raise ValueError(
                    f"{str(self.path)!r} holds {_some(map(visible, others), ', ')} without a {CONFIG}: these are not "
                    f"the results of a run that can be continued, so they are left unchanged. {self._advice}"
                )
            return
        try:
            before = reading.read_json(file, reading.RESULT)
        except FileNotFoundError:
            if file.is_symlink():
                raise
            return  # just removed, with its folder
        except ValueError as error:
            raise ValueError(f"{error} {self._advice}") from error
        if not isinstance(before, dict):
            raise ValueError(f"{str(file)!r} does not hold the arguments of a run. {self._advice}")
        changed = [
            f"{visible(key)}: {json.dumps(before.get(key))} there, {json.dumps(self.arguments.get(key))} now"
            for key in {**before, **self.arguments}
            if before.get(key) != self.arguments.get(key)
        ]
        if changed:
            shown = (text if len(text) < 200 else f"{text[:200]}…" for text in changed)
            raise ValueError(
                f"{str(self.path)!r} holds a run with other arguments ({_some(shown, '; ')}). Choose another folder "
                f"with {self._option}, or repeat the arguments to continue that run."
            )

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, written to the file before this returns; if that fails, nothing of it remains there."""
        # A lone surrogate (of a file name, for example) could not be read back.
        line = json.dumps(row, allow_nan=False, ensure_ascii=False).encode("utf-8", errors="replace")
        with (self.path / ROWS).open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                waiting = memoryview(line + b"\n")
                while waiting:
                    waiting = waiting[file.write(waiting) :]
            except BaseException:
                file.truncate(size)
                raise
        self.rows.append(json.loads(line))

    def write_json(self, name: str, document: Any) -> None:
        """Write a file of the folder, whole or not at all."""
        self.write_text(name, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the folder, whole or not at all."""
        write_whole(self.path / name, text)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the rows of a run's folder; none where it has none. Another process may be writing there.

    Raises:
        ValueError: a row cannot be read.
    """
    return _parse_rows(Path(path) / ROWS)[0]


def _is_temporary(name: str) -> bool:
    return is_temporary(name) or _OLD_TEMPORARY.fullmatch(name) is not None


def _some(things: Iterable[str], between: str) -> str:
    found = list(things)
    more = len(found) - _MOST_SHOWN
    return between.join(found[:_MOST_SHOWN]) + (f"{between}and {more} more" if more > 0 else "")


def _parse_rows(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows, and the number of bytes that they take."""
    try:
        content = reading.read_bytes(file, reading.ROWS)
    except FileNotFoundError:
        return [], 0
    # A row ends with its newline; after the last newline is the part of a row that a killed process has left.
    size = content.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(content[:size].split(b"\n")[:-1], start=1):
        try:
            row = reading.parse_json(line.decode())
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise damaged_row(file, number, error) from error
        rows.append(row)
    return rows, size


def damaged_row(file: Path, number: int, reason: object) -> ValueError:
    """Make the error of a row that cannot be what a run has written."""
    return ValueError(
        f"{str(file)!r}, line {number} is damaged ({str(reason).rstrip('.')}). Remove that line, or choose another "
        "folder."
    )
