"""Waiting of torch's threads for one another, where other processes work on the same cores.

OpenMP's threads wait by spinning, for milliseconds, which is fastest as long as each has a core to itself. Next to
another process it is the slowest: the thread that all wait for has no core, because those that wait do not release
theirs, and a step of a small model takes ten times as long. The system counts how often it took a core away from a
thread that could have continued. While that happens often in a call, OpenMP is made to wait by sleeping: GNU's library
does so where a process has more OpenMP threads than there are cores, so that a few idle ones are enough; LLVM's and
Intel's have a function for it. Numbers of threads, and with them all bits, stay as they are.

Alone on a machine that sleep would cost about a tenth, and other code must not be affected: it ends with the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from .codegen.pool import openmp_library

__all__ = ["ThreadsAtWork", "sleeping_threads"]

_LOOK = 0.25
"""Seconds between two readings of the system's count."""


def _is_often(taken: int, seconds: float) -> bool:
    """Tell whether cores were taken away as often as they are where other processes work on them.

    Measured with two threads: 30 to 50 times a second alone, 90 to 450 next to a process for one core or for both; once
    threads sleep, 10 to 80 and 110 to 7,500.
    """
    return taken > (65 + 10 * torch.get_num_threads()) * seconds


class ThreadsAtWork:
    """torch's threads during one call: they sleep while waiting, as long as others work on the same cores.

    A call starts with the way of waiting, spinning or sleeping, that the previous call ended with.

    Args:
        device: device of the model; nothing is done unless it is a CPU.
        clock: returns the time in seconds.
        taken: returns how often a core has been taken from this process; `None` where the system does not count that.
    """

    _crowded = False

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        taken: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock = clock
        self._taken = taken or _cores_taken
        self._is_used = device.type == "cpu" and torch.get_num_threads() > 1 and self._taken() is not None
        self._sleeping = contextlib.ExitStack()
        self._is_sleeping = False
        self._before, self._since = 0, 0.0

    def __enter__(self) -> ThreadsAtWork:
        if self._is_used:
            self._before, self._since = self._taken() or 0, self._clock()
            self._sleep(ThreadsAtWork._crowded)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_used:
            self._note(self._clock())
        self._is_sleeping = False
        self._sleeping.close()

    def look(self) -> None:
        """Change the way of waiting between two rounds, if it is time to check and the load has changed."""
        if self._is_used and (now := self._clock()) - self._since >= _LOOK:
            self._note(now)
            self._sleep(ThreadsAtWork._crowded)

    def _note(self, now: float) -> None:
        taken, seconds = self._taken() or 0, now - self._since
        if seconds >= _LOOK / 2:
            ThreadsAtWork._crowded = _is_often(taken - self._before, seconds)
            self._before, self._since = taken, now

    def _sleep(self, wanted: bool) -> None:
        if wanted != self._is_sleeping:
            self._is_sleeping = wanted
            if wanted:
                self._sleeping.enter_context(sleeping_threads())
            else:
                self._sleeping.close()


@contextlib.contextmanager
def sleeping_threads() -> Iterator[None]:
    """Let this process's OpenMP threads sleep while they wait (with LLVM's library: the team of this thread)."""
    library = openmp_library()
    if library is None:
        yield
    elif hasattr(library, "kmp_set_blocktime"):
        before = library.kmp_get_blocktime()
        library.kmp_set_blocktime(0)
        try:
            yield
        finally:
            library.kmp_set_blocktime(before)
    else:
        begun, end = threading.Event(), threading.Event()
        # A team that does nothing (its function only returns a number) and has one thread more than there are cores,
        # torch's own counted. It belongs to the thread that started it and ends with that one.
        nothing = ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p)
        size = max(2, library.omp_get_num_procs() - torch.get_num_threads() + 2)

        def hold() -> None:
            try:
                library.GOMP_parallel(nothing, None, size, 0)
            finally:
                begun.set()
            end.wait()

        holder = threading.Thread(target=hold, name="ssd-generation-waiting", daemon=True)
        holder.start()
        begun.wait()
        try:
            yield
        finally:
            end.set()
            holder.join()


def _cores_taken() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
