"""Drafting that a call does not ask for: switched on for a model by `always`, and off inside of other calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

__all__ = ["drafts_unasked", "may_draft_unasked", "only_asked_drafts"]

_ONLY_ASKED: ContextVar[bool] = ContextVar("ssd_generation_only_asked_drafts", default=False)


def may_draft_unasked() -> bool:
    """Tell whether a call may draft without being asked to: not inside of `only_asked_drafts`."""
    return not _ONLY_ASKED.get()


def only_asked_drafts() -> AbstractContextManager[None]:
    """Have calls on this thread draft only where they ask for it.

    Inside of a `generate` call, since its processors, streamers and checks expect the model as it is; and around the
    baselines that drafting is compared with.
    """
    return _with_only_asked(True)


def drafts_unasked() -> AbstractContextManager[None]:
    """Have calls on this thread draft without being asked to, though inside of a call that does not.

    For the code that a call with `custom_generate="folder"` runs in its own place.
    """
    return _with_only_asked(False)


@contextmanager
def _with_only_asked(value: bool) -> Iterator[None]:
    before = _ONLY_ASKED.get()
    _ONLY_ASKED.set(value)
    try:
        yield
    finally:
        # Not `reset`, which raises where a generator is closed in another context.
        _ONLY_ASKED.set(before)
