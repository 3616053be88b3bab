"""A worker process that answers requests, one JSON object per line each way, and ends with its owner."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Child"]


class Child:
    """A worker process. It is started at once; use it as a context manager, or call `close`.

    Args:
        name: what errors call it.
        script: the program. It reads requests from stdin, each with the field `do`, and answers on stdout.
        environment: variables of its own, besides those of this process.
    """

    def __init__(self, name: str, script: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
            # Ctrl-C should reach this process only, which then ends the worker.
            start_new_session=True,
        )

    def request(self, do: str, **message: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            RuntimeError: the worker has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **message}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise RuntimeError(
                f"The worker {self.name!r} ended with exit status {self._process.wait()}. Its last words:\n"
                + "\n".join(f"  {text}" for text in self.last_words())
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> list[str]:
        """The last lines that it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", errors="replace").strip().splitlines()[-8:]

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
