"""Lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shared_prefix"]


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many equal tokens two texts begin with."""
    count = min(len(one), len(other))
    one, other = list(one[:count]), list(other[:count])
    if one == other:
        return count
    # Bisection: comparing lists takes no Python loop.
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
