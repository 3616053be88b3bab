"""Interleaved methods: the order of their calls, and the clock around a call.

A machine's speed varies from minute to minute. So methods are not timed one after the other: each round calls all of
them, the next round begins with another one, and a method's speed counts relative to that of the reference in the same
round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ...support.devices import wait_for

__all__ = ["Turn", "interleaved", "rotated", "timed"]

M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True)
class Turn(Generic[M]):
    """Call to make.

    Attributes:
        method: method to call.
        round: number of the round, from 0; 0 while warming up.
        is_warm_up: whether the call is only to warm up, so that its time does not count.
    """

    method: M
    round: int
    is_warm_up: bool = False


def rotated(methods: Sequence[M], number: int) -> list[M]:
    """Return the methods in the order of a round: each comes first in one round out of as many as there are methods."""
    first = number % len(methods)
    return [*methods[first:], *methods[:first]]


def interleaved(methods: Sequence[M], rounds: int, warm_up: int = 1) -> Iterator[Turn[M]]:
    """Yield the calls to make, in order.

    Args:
        methods: methods to call; at least one, unless there is no round.
        rounds: number of timed rounds, ≥ 0.
        warm_up: number of rounds before these that do not count, ≥ 0. They call all methods, too: what one method's
            first call builds may displace what another has built.
    """
    for _ in range(warm_up):
        for method in methods:
            yield Turn(method, 0, is_warm_up=True)
    for number in range(rounds):
        for method in rotated(methods, number):
            yield Turn(method, number)


def timed(device: torch.device, call: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[T, float]:
    """Make a call, and return its result and the seconds until the device has finished all its work.

    Args:
        device: device that runs the work.
        call: function to time.
        *args: positional arguments of the function.
        **kwargs: keyword arguments of the function.
    """
    wait_for(device)
    started = time.perf_counter()
    result = call(*args, **kwargs)
    wait_for(device)
    return result, time.perf_counter() - started
