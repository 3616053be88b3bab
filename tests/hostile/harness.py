"""Checks of every malformed input: it has to succeed, or to raise an error of an allowed kind, in good time."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ALLOWED = (ValueError, TypeError, FileNotFoundError)
SECONDS = 2.0
"""Seconds of this process's own time: other work on the machine does not count."""
PATIENCE = 30
"""Seconds of wall-clock time after which an input counts as hung."""
GIGABYTE = 2**20  # in the kibibytes of `getrusage`
LONGEST_MESSAGE = 2_000


class Hangs(Exception):
    """An input took longer than `PATIENCE`."""


@contextmanager
def limits(told: str, seconds: Callable[[], float]) -> Iterator[None]:
    """Fail if the block takes more than the seconds and the gigabyte that an input may take."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hangs(told)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    started, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    spent = time.process_time() - started
    assert spent <= seconds(), f"{spent:.1f} s: {told}"
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert more <= GIGABYTE, f"{more / 1024:.0f} MiB more: {told}"


def outcome(work: Callable[[], Any], told: str, works_on: bool = False) -> str:
    """Return "success", or the name of the allowed kind of error that an input raised; check that it has a message.

    Args:
        work: function that uses the input.
        told: description of the input, to reproduce it.
        works_on: whether an accepted input starts work, such as measuring, that may take longer.
    """
    raised: BaseException | None = None
    with limits(told, lambda: PATIENCE if works_on and raised is None else SECONDS):
        try:
            work()
        except Hangs:
            raise
        except BaseException as error:
            raised = error
    if raised is None:
        return "success"
    message = str(raised)
    if not isinstance(raised, ALLOWED):
        raise AssertionError(f"{type(raised).__name__}: {message[:300]}: {told}") from raised
    assert len(message) <= LONGEST_MESSAGE, f"a message of {len(message)} characters: {told}"
    assert message.strip(), f"an error without a message ({type(raised).__name__}): {told}"
    return next(kind.__name__ for kind in (FileNotFoundError, ValueError, TypeError) if isinstance(raised, kind))


EMPTY = hashlib.sha256(b"").hexdigest()


def snapshot(folder: Path) -> dict[str, Any]:
    """Return everything in a folder: contents by digest, kinds of file, and targets of links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = os.lstat(path)
        name = str(path.relative_to(folder))
        if stat.S_ISREG(status.st_mode):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = os.readlink(path) if stat.S_ISLNK(status.st_mode) else stat.S_IFMT(status.st_mode)
    return found


def said(counts: Counter[str]) -> str:
    """Return the outcomes in one line."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
