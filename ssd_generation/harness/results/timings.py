"""Times of calls: their speed, relative to that of the reference in the same round, and its spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Timing", "Timings", "spread"]


@dataclass(frozen=True)
class Timing:
    """Duration of a call.

    Attributes:
        tokens: number of generated tokens.
        seconds: duration of the whole call.
    """

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of the call."""
        return self.tokens / self.seconds

    def ratio_to(self, reference: Timing) -> float:
        """Return the speed relative to that of another call; above 1 is faster."""
        return self.tokens_per_second / reference.tokens_per_second


class Timings:
    """Timings of several methods, round by round.

    Args:
        methods: names of the methods.
        reference: name of the method that the others are compared with.
    """

    def __init__(self, methods: Iterable[str], reference: str) -> None:
        self.by_method: dict[str, list[Timing]] = {name: [] for name in methods}
        self.reference = reference

    def add(self, method: str, tokens: int, seconds: float) -> None:
        """Record a method's call in the current round."""
        self.by_method[method].append(Timing(tokens, seconds))

    def seconds(self, method: str) -> tuple[float, ...]:
        """Return the seconds of each round."""
        return tuple(timing.seconds for timing in self.by_method[method])

    def ratios(self, method: str) -> tuple[float, ...]:
        """Return the speed of each round, relative to the reference of the same round."""
        pairs = zip(self.by_method[method], self.by_method[self.reference], strict=True)
        return tuple(timing.ratio_to(reference) for timing, reference in pairs)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, quartiles, least and greatest value, and the number of values; `None` where there are none."""
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
