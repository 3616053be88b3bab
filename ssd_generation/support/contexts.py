"""Values of context variables for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["holding"]

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable, and restore its value at the end.

    Args:
        variable: the variable; it has a value or a default.
        value: its value inside.
    """
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        # Not `reset`, which raises where a generator is closed in another context.
        variable.set(before)
