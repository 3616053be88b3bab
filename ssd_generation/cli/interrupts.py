"""Ctrl-C that stops an answer, not the program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..decoding.ends import StopRequest

__all__ = ["stops_at_interrupt"]


@contextlib.contextmanager
def stops_at_interrupt(stop: StopRequest) -> Iterator[None]:
    """Let the first Ctrl-C request a stop, and a second one raise `KeyboardInterrupt` at once.

    Args:
        stop: stopping criterion of the enclosed call.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.ask()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
