"""Limits on work that hold on a busy machine: of processor time, not of the clock on the wall."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


@contextlib.contextmanager
def little_work(seconds: float = 2.0) -> Iterator[None]:
    """Fail if the block takes this thread more processor time; what else the machine does is not counted.

    Args:
        seconds: some hundred times what it takes, so that only work of another order is noticed.
    """
    begun = time.thread_time()
    yield
    taken = time.thread_time() - begun
    assert taken < seconds, f"{taken:.1f} s of processor time"
