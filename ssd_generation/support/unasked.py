"""Drafting that a call does not request: switched on for a model by `always`, and off inside other calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

__all__ = ["drafts_unasked", "may_draft_unasked", "only_asked_drafts"]

_ONLY_ASKED: ContextVar[bool] = ContextVar("ssd_generation_only_asked_drafts", default=False)


def may_draft_unasked() -> bool:
    """Tell whether a call may draft without requesting it: not inside `only_asked_drafts`."""
    return not _ONLY_ASKED.get()


def only_asked_drafts() -> AbstractContextManager[None]:
    """Let calls on this thread draft only where they request it.

    Used inside a `generate` call, since its processors, streamers and checks expect the model as it is; and around the
    baselines that drafting is compared with.
    """
    return _with_only_asked(True)


def drafts_unasked() -> AbstractContextManager[None]:
    """Let calls on this thread draft without requesting it, though inside a call that does not.

    Used for the code that a call with `custom_generate="folder"` runs in place of `generate`'s own.
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
