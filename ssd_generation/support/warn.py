"""Warnings that point at the line of the user's own code."""

from __future__ import annotations

import sys
import warnings

from torch import nn

from .model_state import Part, state_of

__all__ = ["WarningsPart", "warn_once", "warn_user"]

_PASSED_THROUGH = (__package__.partition(".")[0], "transformers", "torch", "contextlib")
"""Packages whose code is between the user's call and a warning."""


class WarningsPart(Part):
    """Warnings about a model that were given once."""

    def __init__(self) -> None:
        self.warnings: set[str] = set()

    def drop(self) -> None:
        self.warnings = set()


def warn_user(message: str) -> None:
    """Warn at the line of the user's code that called into this library, however many frames of others are in between.

    Args:
        message: description of the problem and its remedy.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_THROUGH and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_once(model: nn.Module, message: str) -> None:
    """Warn once per model and message.

    Args:
        model: the target model.
        message: as in `warn_user`.
    """
    given = state_of(model).get(WarningsPart).warnings
    if message not in given:
        given.add(message)
        warn_user(message)
