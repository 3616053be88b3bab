"""Methods timed in turns: the order of the calls, the clock around a call, and what the times come to.

A machine is slower in one minute than in the next. So methods are not timed one after the other: each round calls all
of them, the next round begins with another one, and a method's speed counts relative to that of the reference in the
same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..support.devices import wait_for

__all__ = ["Timing", "Timings", "Turn", "interleaved", "rotated", "spread", "timed"]

M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True)
class Turn(Generic[M]):
    """A call that is due.

    Attributes:
        method: what to call.
        round: number of the round, from 0; 0 while warming up.
        is_warm_up: whether the call is only to warm up, so that its time does not count.
    """

    method: M
    round: int
    is_warm_up: bool = False


def rotated(methods: Sequence[M], number: int) -> list[M]:
    """The methods in the order of a round: each comes first in one round out of as many as there are methods."""
    first = number % len(methods)
    return [*methods[first:], *methods[:first]]


def interleaved(methods: Sequence[M], rounds: int, warm_up: int = 1) -> Iterator[Turn[M]]:
    """The calls to make, in order.

    Args:
        methods: at least one, unless there is no round.
        rounds: how often each is timed, ≥ 0.
        warm_up: rounds before these that do not count, ≥ 0. They are rounds too: what the first call of one method
            makes for itself may cost another what it had made.
    """
    for _ in range(warm_up):
        for method in methods:
            yield Turn(method, 0, is_warm_up=True)
    for number in range(rounds):
        for method in rotated(methods, number):
            yield Turn(method, number)


def timed(device: torch.device, call: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[T, float]:
    """Make a call: its result, and the seconds until the device has done all that it was given.

    Args:
        device: where the work runs.
        call: what to time.
        *args: its arguments.
        **kwargs: likewise.
    """
    wait_for(device)
    started = time.perf_counter()
    result = call(*args, **kwargs)
    wait_for(device)
    return result, time.perf_counter() - started


@dataclass(frozen=True)
class Timing:
    """How long a call took.

    Attributes:
        tokens: that it generated.
        seconds: of the whole call.
    """

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed."""
        return self.tokens / self.seconds

    def ratio_to(self, reference: Timing) -> float:
        """Speed relative to that of another call; above 1 is faster."""
        return self.tokens_per_second / reference.tokens_per_second


class Timings:
    """Timings of several methods, round by round.

    Args:
        methods: their names.
        reference: the one that the others are compared with.
    """

    def __init__(self, methods: Iterable[str], reference: str) -> None:
        self.by_method: dict[str, list[Timing]] = {name: [] for name in methods}
        self.reference = reference

    def add(self, method: str, tokens: int, seconds: float) -> None:
        """Note a method's call in the round under way."""
        self.by_method[method].append(Timing(tokens, seconds))

    def seconds(self, method: str) -> tuple[float, ...]:
        """Of each round."""
        return tuple(timing.seconds for timing in self.by_method[method])

    def ratios(self, method: str) -> tuple[float, ...]:
        """Speed relative to the reference of the same round, of each round."""
        pairs = zip(self.by_method[method], self.by_method[self.reference], strict=True)
        return tuple(timing.ratio_to(reference) for timing, reference in pairs)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, quartiles, least and greatest value, and how many there are; `None` where there are none."""
    if not values:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {
        "n": len(values),
        "median": statistics.median(values),
        "q1": low,
        "q3": high,
        "min": min(values),
        "max": max(values),
    }
