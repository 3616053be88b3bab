"""Memoised queries about a model that preparing a call needs several times, each of which takes milliseconds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["is_looking_once", "looked_at_once", "looking_once"]

T = TypeVar("T")


class _Looks(threading.local):
    found: dict[Any, Any] | None = None


_looks = _Looks()


@contextmanager
def looking_once() -> Iterator[None]:
    """Memoise queries about a model on this thread, on the promise that no other code changes it meanwhile.

    Leave this before any foreign code runs: a streamer, a logits processor.
    """
    before, _looks.found = _looks.found, {} if _looks.found is None else _looks.found
    try:
        yield
    finally:
        _looks.found = before


def is_looking_once() -> bool:
    """Tell whether this thread is inside `looking_once`."""
    return _looks.found is not None


def looked_at_once(function: Callable[..., T]) -> Callable[..., T]:
    """Compute a function of a model, or a part of it, and further hashable arguments once inside `looking_once`."""

    @functools.wraps(function)
    def looked(model: Any, *args: Any) -> T:
        if _looks.found is None:
            return function(model, *args)
        key = (function, id(model), args)
        if key not in _looks.found:
            _looks.found[key] = function(model, *args)
        found: T = _looks.found[key]
        return found

    return looked
