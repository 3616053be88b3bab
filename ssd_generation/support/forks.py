"""State that must not be carried into a forked child: locks that another thread held, and changes it was about to undo.

`fork()` copies the thread that calls it and no other. A lock that another thread held stays locked in the child for
ever, and that thread's temporary changes (a stub on a module, an entry in a table of transformers) stay in place.
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
"""Thread and function that undoes its change, by a unique key, in the order of the changes."""


class ForkSafeRLock:
    """A `threading.RLock` that a forked child finds free, unless the thread that forked held it itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; wait until it is free, or return `False` where it is not and `blocking` is not set."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> ForkSafeRLock:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def begin_child(self) -> None:
        """Replace the lock if it was held by a thread that does not exist in the child."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()


def note_undo(undo: Callable[[], None]) -> object:
    """Make a child that another thread forks from now on begin with `undo()`; return a key for `forget_undo`.

    Args:
        undo: function that this thread will call at the end anyway; it takes no lock.
    """
    key = object()
    _undoing[key] = threading.get_ident(), undo
    return key


def forget_undo(key: object) -> None:
    """Forget an undo that has been done, or is about to be done by this thread."""
    _undoing.pop(key, None)


@contextmanager
def undone_in_child(undo: Callable[[], None]) -> Iterator[None]:
    """Apply `note_undo` while this context is entered."""
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
