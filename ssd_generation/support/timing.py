"""Time spent in parts of a loop, without making the host wait for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from .devices import is_asynchronous

__all__ = ["Stopwatch"]


class Stopwatch:
    """A stopwatch that sums the time between `start` and `stop`.

    On CUDA the work queued in between is timed, by events that are read only at the end: the host runs ahead of the
    device, and its clock would charge one part with waiting for another.

    Args:
        device: device on which the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[tuple[Any, Any]] | None = [] if is_asynchronous(device) else None
        self._total = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Start measuring."""
        if self._events is None:
            self._started = time.perf_counter()
            return
        event: Any = torch.cuda.Event
        pair = (event(enable_timing=True), event(enable_timing=True))
        pair[0].record()
        self._events.append(pair)

    def stop(self) -> None:
        """Stop measuring."""
        if self._events is None:
            self._total += time.perf_counter() - self._started
        else:
            self._events[-1][1].record()

    def seconds(self) -> float:
        """Return the sum so far; on CUDA this waits for the device."""
        if not self._events:
            return self._total
        self._events[-1][1].synchronize()
        return float(sum(first.elapsed_time(second) for first, second in self._events)) / 1e3
