"""Pauses of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the collector while many objects are made that stay.

    Each collection goes through all objects of the process, which are more than a million once transformers is
    imported. Pauses of several threads, or within each other, count as one. A collector that is off stays off.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
