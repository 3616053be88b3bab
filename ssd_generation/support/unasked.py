"""Drafting that a call does not request: switched on for a model by `always`, and off inside other calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from .contexts import holding

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
    return holding(_ONLY_ASKED, True)


def drafts_unasked() -> AbstractContextManager[None]:
    """Let calls on this thread draft without requesting it, though inside a call that does not.

    Used for the code that a call with `custom_generate="folder"` runs in place of `generate`'s own.
    """
    return holding(_ONLY_ASKED, False)
