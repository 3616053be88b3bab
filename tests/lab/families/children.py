"""Child processes that try families, so that one that crashes or hangs ends only its row."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection, wait

import torch
import transformers

from ..tables import CRASHED
from .models import Kind, class_name
from .trial import COLUMNS, Row, try_family

__all__ = ["Child", "try_families"]

SECONDS = 150.0
"""Seconds after which a family counts as hung."""


def _work(pipe: Connection) -> None:
    """Send a row for each family that arrives, until killed."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # some models print
        while True:
            family, kind = pipe.recv()
            pipe.send(try_family(family, kind=kind))


class Child:
    """Process that tries one family after the other; another replaces it when it dies or hangs."""

    def __init__(self) -> None:
        self.family: tuple[str, Kind] | None = None
        self.since = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, family: str, kind: Kind = "causal") -> None:
        self.family, self.since = (family, kind), time.monotonic()
        self.pipe.send(self.family)

    def outcome(self) -> Row | None:
        """Return the row of the current family, also if the process died or hangs; `None` while it is being tried."""
        assert self.family is not None
        (family, kind), row = self.family, None
        problem = None
        try:
            if self.pipe.poll():
                self.family, row = None, self.pipe.recv()
                assert isinstance(row, Row)
                return row
        except (EOFError, OSError):
            self.process.join()
            problem = f"its process ended with exit code {self.process.exitcode}"
        if problem is None and time.monotonic() - self.since > SECONDS:
            problem = f"no end within {SECONDS:.0f} s"
        if problem is None:
            return None
        row = Row(family, class_name(family, kind), dict.fromkeys(COLUMNS, CRASHED + problem), kind=kind)
        self.family = None
        self.stop()
        self._start()
        return row

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def try_families(families: Sequence[tuple[str, Kind]], processes: int = 2) -> Iterator[Row]:
    """Run `try_family` for each family, in child processes.

    Args:
        families: model types, each with a kind of model.
        processes: number of child processes.

    Yields:
        Rows in the order in which they are ready. A family whose process crashes or hangs has a row that reports it.
    """
    waiting = list(reversed(families))
    children = [Child() for _ in range(min(processes, len(waiting)))]
    try:
        while waiting or any(child.family is not None for child in children):
            for child in children:
                if child.family is None and waiting:
                    child.give(*waiting.pop())
            busy = [child for child in children if child.family is not None]
            wait([child.pipe for child in busy], timeout=1.0)
            for child in busy:
                row = child.outcome()
                if row is not None:
                    yield row
    finally:
        for child in children:
            child.stop()
