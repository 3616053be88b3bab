"""Progress bar of work that this library does once per model or machine."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from transformers.utils import logging as hf_logging

from .contexts import holding

__all__ = ["progress_bar", "without_bars"]

_HIDES: ContextVar[bool] = ContextVar("ssd_generation_hides_bars", default=False)

_PERCENT = "{desc}: {percentage:3.0f}% |{bar}| {remaining} left"


def progress_bar(total: int, desc: str, shows: bool = True, bar_format: str = _PERCENT) -> Any:
    """Return transformers' progress bar, a context manager, on stderr.

    It shows on a terminal and in a notebook, unless transformers' progress bars are disabled, and not inside
    `without_bars`. A log file stays free of it.

    Args:
        total: number of steps.
        desc: the work.
        shows: `False` hides it.
        bar_format: its format, as tqdm reads it.
    """
    is_seen = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return hf_logging.tqdm(
        total=total, desc=desc, leave=False, disable=not (shows and is_seen and not _HIDES.get()), bar_format=bar_format
    )


def without_bars() -> AbstractContextManager[None]:
    """Show no bars meanwhile: a text is being shown."""
    return holding(_HIDES, True)
