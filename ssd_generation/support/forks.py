"""What must not be carried into a forked child: locks that another thread held, and what it was about to undo.

`fork()` copies the thread that calls it and no other. A lock that another thread held stays locked in the child for
ever, and what that thread had put in place for a moment (a stub on a module, an entry in a table of transformers) stays
in place.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

__all__ = ["ForkSafeRLock", "forget_undo", "note_undo", "undone_in_child"]

_locks: weakref.WeakSet[ForkSafeRLock] = weakref.WeakSet()

_undoing: dict[object, tuple[int, Callable[[], None]]] = {}
"""Thread and what is to be undone, by a key of its own, in the order in which it was done."""


class ForkSafeRLock:
    """A `threading.RLock` that a forked child finds free, unless the thread that forked held it itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def acquire(self) -> None:
        """Wait until the lock is free, and take it."""
        self._lock.acquire()

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> ForkSafeRLock:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def begin_child(self) -> None:
        """Let go of whoever held the lock and is not there any more."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()


def note_undo(undo: Callable[[], None]) -> object:
    """From now on, a child that another thread forks begins with `undo()`; returns a key for `forget_undo`.

    Args:
        undo: what this thread will do at the end anyway; it takes no lock.
    """
    key = object()
    _undoing[key] = threading.get_ident(), undo
    return key


def forget_undo(key: object) -> None:
    """It has been undone, or is about to be by this thread."""
    _undoing.pop(key, None)


@contextmanager
def undone_in_child(undo: Callable[[], None]) -> Iterator[None]:
    """`note_undo` while this is entered."""
    key = note_undo(undo)
    try:
        yield
    finally:
        forget_undo(key)


def _begin_child() -> None:
    for lock in list(_locks):
        lock.begin_child()
    here = threading.get_ident()
    for key, (thread, undo) in reversed(list(_undoing.items())):
        if thread != here:
            del _undoing[key]
            undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
