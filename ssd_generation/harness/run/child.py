"""Worker process that answers requests, one JSON object per line each way, and ends with its owner.

`Child` is the owner's end of the pipe. The other end is this file too, run as a program with the worker's file as its
argument: the class `Worker` there answers, each of its methods named `do_…` one kind of request; requests for the peak
memory are answered by this file. So that process imports nothing of the package but what the worker imports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Child", "first_line"]

_PEAK = "peak_bytes"


class Child:
    """Worker process. It is started at once; use it as a context manager, or call `close`.

    Args:
        name: name of the worker in errors.
        worker: file of its class `Worker`.
        environment: environment variables in addition to those of this process.
    """

    def __init__(self, name: str, worker: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(worker)],
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
                f"The worker {self.name!r} ended with exit status {self._process.wait()}. Its last output:\n"
                + "\n".join(f"  {text}" for text in self.last_words())
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def peak_bytes(self) -> int:
        """Return the peak resident memory of the process.

        Raises:
            RuntimeError: the worker has ended.
        """
        peak: int = self.request(_PEAK)["bytes"]
        return peak

    def last_words(self) -> list[str]:
        """Return the last lines that the worker wrote to stderr."""
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


def first_line(error: BaseException) -> str:
    """Return an error in one line: its kind and the beginning of its message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0][:400]}{'…' if len(lines[0]) > 400 else ''}"


# ----------------------------------------------------------------------------------------------------------------------
# the other end


def _serve(file: str) -> None:
    """Answer requests by the `Worker` of a file, until stdin ends."""
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _load(file).Worker()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["do"] == _PEAK:
                answer: dict[str, Any] = {"bytes": _peak_resident_bytes()}
            else:
                answer = getattr(worker, f"do_{message['do']}")(message)
        except Exception as error:  # for the owner to judge
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _peak_resident_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        # On Linux, `ru_maxrss` includes the memory of the process that started this one.
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("ssd_worker", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # The folder of this file comes first on the path; its modules are the package's, not top-level ones.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    _serve(sys.argv[1])
    # A normal exit would wait for the threads of the worker's libraries.
    os._exit(0)
