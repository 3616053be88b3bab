"""The folder of one run: its arguments, the machine, a line per measurement, and what they amount to.

    config.json        the arguments; another run with others is refused
    environment.json   machine and versions, once per session
    rows.jsonl         one line per measurement, appended as it is made
    summary.json, summary.md, plot.png

Files appear whole or not at all, by a rename; only rows.jsonl grows. What a kill leaves of its last line is dropped
when the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import write_whole

__all__ = ["RunFolder", "read_json", "read_rows"]

CONFIG, ENVIRONMENT, ROWS = "config.json", "environment.json", "rows.jsonl"
SUMMARY, TABLE, PLOT = "summary.json", "summary.md", "plot.png"


class RunFolder:
    """The files of a run. Use it as a context manager: one process at a time may write there.

    Args:
        path: made if it does not exist.
        arguments: what defines the run, as plain JSON types.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: it holds another run, something else, or rows that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], arguments: Mapping[str, Any]) -> None:
        self.path = Path(path).expanduser()
        self.arguments = json.loads(json.dumps(arguments))  # as it will be read
        self.rows: list[dict[str, Any]] = []
        self._lock: Any = None
        self._is_new = not self.path.exists()
        self._check_writable()
        self._check_arguments()

    def __enter__(self) -> RunFolder:
        from filelock import FileLock, Timeout  # torch and huggingface_hub both bring it

        self._lock = FileLock(self.path / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"Another run is going on in {str(self.path)!r}. Wait for it, or choose another folder."
            ) from None
        try:
            file = self.path / ROWS
            self.rows, size = _parse_rows(file)
            if file.exists() and size < file.stat().st_size:
                os.truncate(file, size)
            if not (self.path / CONFIG).exists():
                self.write_json(CONFIG, self.arguments)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        # Not on Windows, where another process may be waiting for it.
        with contextlib.suppress(OSError):
            (self.path / ".lock").unlink()
        if self._is_new and not self.rows:
            # Nothing was measured, say because the model was not found: no folder is left behind for that.
            with contextlib.suppress(OSError):
                for name in (CONFIG, ENVIRONMENT, SUMMARY, TABLE):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    def _check_writable(self) -> None:
        advice = "Choose another folder with --output."
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"The results need a folder, but {str(self.path)!r} is a file. {advice}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            raise type(error)(f"The results cannot be written to {str(self.path)!r}: {reason}. {advice}") from error

    def _check_arguments(self) -> None:
        file = self.path / CONFIG
        if not file.exists():
            others = [entry.name for entry in self.path.iterdir() if entry.name in (ROWS, SUMMARY)]
            if others:
                raise ValueError(
                    f"{str(self.path)!r} holds {', '.join(others)} without a {CONFIG}: these are not the results of a "
                    "run that could go on. Choose another folder with --output."
                )
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{str(file)!r} is not readable: {error}. Choose another folder with --output.") from error
        if not isinstance(before, dict):
            before = {}
        changed = [
            f"{key}: {json.dumps(before.get(key))} there, {json.dumps(self.arguments.get(key))} now"
            for key in {**before, **self.arguments}
            if before.get(key) != self.arguments.get(key)
        ]
        if changed:
            shown = "; ".join(text if len(text) < 200 else f"{text[:200]}…" for text in changed)
            raise ValueError(
                f"{str(self.path)!r} holds a run with other arguments ({shown}). Choose another folder with --output, "
                "or repeat the arguments to go on with that run."
            )

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, on disk before this returns."""
        line = json.dumps(row, allow_nan=False)
        with (self.path / ROWS).open("ab") as file:
            file.write(line.encode() + b"\n")
        self.rows.append(json.loads(line))

    def write_json(self, name: str, document: Any) -> None:
        """Write a file of the folder, whole or not at all."""
        self.write_text(name, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """A file of the folder; `None` where there is none, or it is not JSON."""
        return read_json(self.path / name)

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the folder, whole or not at all."""
        write_whole(self.path / name, text)


def read_json(file: Path) -> Any:
    """What a file holds; `None` where there is none, or it is not JSON."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a run's folder; none where it has none. Another process may be writing there.

    Raises:
        ValueError: a row cannot be read.
    """
    return _parse_rows(Path(path) / ROWS)[0]


def _parse_rows(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows, and how many bytes they take."""
    if not file.exists():
        return [], 0
    content = file.read_bytes()
    # A row ends with its newline; behind the last one stands what a kill has left of a row.
    whole = content[: content.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(whole.decode("utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise ValueError(
                f"{str(file)!r}, line {number} is damaged ({error}). Take that line out, or choose another folder."
            ) from error
        rows.append(row)
    return rows, len(whole)
