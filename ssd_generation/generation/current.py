"""Current self-speculative call of this thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ..support.unasked import only_asked_drafts

if TYPE_CHECKING:
    from .call import Call

__all__ = ["current_call", "under_way"]

_CALL: ContextVar[Call | None] = ContextVar("ssd_generation_call", default=None)


def current_call() -> Call | None:
    """Return the current call of this thread."""
    return _CALL.get()


@contextmanager
def under_way(call: Call | None) -> Iterator[None]:
    """Make a call the current one; `None` for a plain call, maybe inside another, such as from a logits processor."""
    token = _CALL.set(call)
    try:
        with only_asked_drafts():
            yield
    finally:
        _CALL.reset(token)
