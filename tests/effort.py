"""Limits on work that also hold on a busy machine: of processor time, not of wall-clock time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


@contextlib.contextmanager
def little_work(seconds: float = 2.0) -> Iterator[None]:
    """Fail if the block takes this thread more processor time; other work on the machine does not count.

    Args:
        seconds: limit, some hundred times the usual time, so that only work of another order of magnitude fails.
    """
    begun = time.thread_time()
    yield
    taken = time.thread_time() - begun
    assert taken < seconds, f"{taken:.1f} s of processor time"
