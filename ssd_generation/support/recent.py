"""Dictionaries that retain what was used most recently."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

__all__ = ["recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def recent(known: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """Return the value of a key, made where there is none; the least recently used are dropped.

    Args:
        known: values by key, the most recently used last.
        key: the key.
        make: makes its value.
        most: number of values to retain, ≥ 1.
    """
    known[key] = value = known.pop(key) if key in known else make()
    while len(known) > most:
        del known[next(iter(known))]
    return value
