"""Progress bar of work that this library does once per model or machine."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from transformers.utils import logging as hf_logging

from .contexts import holding

__all__ = ["progress_bar", "with_bars", "without_bars"]

_SHOWS: ContextVar[bool | None] = ContextVar("ssd_generation_shows_bars", default=None)

_PERCENT = "{desc}: {percentage:3.0f}% |{bar}| {remaining} left"


def progress_bar(total: int, desc: str, shows: bool = True, bar_format: str = _PERCENT) -> Any:
    """Return transformers' progress bar, a context manager, on stderr.

    It shows inside `with_bars`, and where transformers' verbosity is "info" or more; only on a terminal and in a
    notebook, unless transformers' progress bars are disabled, and not inside `without_bars`. A log file stays free of
    it.

    Args:
        total: number of steps.
        desc: the work.
        shows: `False` hides it.
        bar_format: its format, as tqdm reads it.
    """
    is_seen = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    asked = _SHOWS.get()
    if asked is None:
        asked = hf_logging.get_verbosity() <= hf_logging.INFO
    return hf_logging.tqdm(
        total=total, desc=desc, leave=False, disable=not (shows and is_seen and asked), bar_format=bar_format
    )


def with_bars() -> AbstractContextManager[None]:
    """Show bars meanwhile, regardless of transformers' verbosity: a program is being run that waits for the work."""
    return holding(_SHOWS, True)


def without_bars() -> AbstractContextManager[None]:
    """Show no bars meanwhile: a text is being shown."""
    return holding(_SHOWS, False)
