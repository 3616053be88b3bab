"""Processes forked from one that has imported torch and transformers, so that each need not import them.

The parent is started afresh (multiprocessing's fork server), so it has none of the tests' locks, threads and patches.
Its children are ordinary processes, which can be killed by their id.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
PRELOADED = ["search_worker", "lock_worker", "weights_worker"]
SECONDS = 240
"""Seconds without a message after which a process counts as hung."""


class Died(AssertionError):
    """The process was ended by a signal.

    Attributes:
        calls: the call stack of the thread that received it, innermost first, as `faulthandler` writes it.
    """

    def __init__(self, report: str) -> None:
        super().__init__(report or "it died without a report")
        _, _, current = report.partition("Current thread ")
        self.calls = re.findall(r'^  File "(.*)", line', current.partition("\n\n")[0], re.MULTILINE)


@dataclass
class Forked:
    process: BaseProcess
    pipe: Connection
    report: Path

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, content = self.pipe.recv()
        except EOFError:
            raise Died(self.report.read_text()) from None
        assert kind != "failed", content
        return kind, content

    def hear(self) -> Any:
        """Return the next message of the process; fail with its traceback if its work raised an error."""
        assert self.pipe.poll(SECONDS), "it says nothing"
        return self._receive()[1]

    def ends_well(self) -> Any:
        """Return the result of the work, once the process has ended.

        Raises:
            Died: a signal ended the process.
        """
        while True:
            assert self.pipe.poll(SECONDS), "it does not end"
            kind, content = self._receive()
            if kind == "returned":
                self.process.join(SECONDS)
                assert self.process.exitcode == 0
                return content


class Saying:
    """Child's end of the pipe: sends messages to the test and waits for it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: Any) -> None:
        self._pipe.send(("said", what))

    def wait(self) -> None:
        """Wait until the test sends something, so that the process may continue."""
        self._pipe.recv()


def _run(pipe: Connection, report: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with open(report, "w") as file:
        faulthandler.enable(file)
        try:
            pipe.send(("returned", work(Saying(pipe), *arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            raise
        finally:
            faulthandler.disable()


@contextlib.contextmanager
def forked(work: Callable[..., Any], *arguments: Any) -> Iterator[Forked]:
    """Run `work(saying, *arguments)` in a process of its own, which is killed at the end of the block.

    Args:
        work: function of one of the modules in `PRELOADED`.
        arguments: further arguments of `work`, which can be pickled.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system does not fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    handle, name = tempfile.mkstemp(suffix=".fault")
    os.close(handle)
    report = Path(name)
    process = context.Process(target=_run, args=(theirs, name, work, arguments))
    with pytest.MonkeyPatch.context() as patch:
        # The first call starts the server, which looks for its modules here.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
        process.start()
    theirs.close()
    try:
        yield Forked(process, ours, report)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        report.unlink()
