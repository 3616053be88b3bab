"""What is asked of a model several times while a call is prepared, and takes milliseconds to tell: looked at once."""

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
    """While this is entered, by this thread, nothing that somebody else does comes between two looks at a model.

    To be left before anybody's own code runs: a streamer, a logits processor.
    """
    before, _looks.found = _looks.found, {} if _looks.found is None else _looks.found
    try:
        yield
    finally:
        _looks.found = before


def is_looking_once() -> bool:
    """Whether this thread is inside `looking_once`."""
    return _looks.found is not None


def looked_at_once(function: Callable[..., T]) -> Callable[..., T]:
    """A function of a model and of further arguments that can be told apart, computed once inside `looking_once`."""

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
