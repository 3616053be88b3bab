"""Processes that do not each import torch and transformers: forked from one that has.

That one is started afresh (multiprocessing's fork server), so it holds no lock of the tests, none of their threads and
nothing of what they have patched. Its children are processes like any others, to be killed by their number.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
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
"""After which a process hangs."""


@dataclass
class Forked:
    process: BaseProcess
    pipe: Connection

    def hear(self) -> Any:
        """What it says next; an error of its own, should it fail."""
        assert self.pipe.poll(SECONDS), "it says nothing"
        kind, content = self.pipe.recv()
        assert kind != "failed", content
        return content

    def ends_well(self) -> Any:
        """What its work returned."""
        while True:
            assert self.pipe.poll(SECONDS), "it does not end"
            kind, content = self.pipe.recv()
            assert kind != "failed", content
            if kind == "returned":
                self.process.join(SECONDS)
                assert self.process.exitcode == 0
                return content


class Saying:
    """The other end: `say` and `wait` of the process itself."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: Any) -> None:
        self._pipe.send(("said", what))

    def wait(self) -> None:
        """Until it is told to go on."""
        self._pipe.recv()


def _run(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("returned", work(Saying(pipe), *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


@contextlib.contextmanager
def forked(work: Callable[..., Any], *arguments: Any) -> Iterator[Forked]:
    """`work(saying, *arguments)` in a process of its own, that is killed at the end of the block.

    Args:
        work: a function of one of the modules in `PRELOADED`.
        arguments: what can be pickled.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system does not fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, work, arguments))
    with pytest.MonkeyPatch.context() as patch:
        # The first call starts the server, which looks for its modules here.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
        process.start()
    theirs.close()
    try:
        yield Forked(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
