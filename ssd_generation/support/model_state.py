"""State of one model: all that the library knows about it, in one place."""

from __future__ import annotations

import weakref
from typing import TypeVar, cast

from torch import nn

from .forks import ForkSafeRLock

__all__ = ["ModelState", "Part", "state_of"]


class Part:
    """State that one module of this package holds about a model: its own attributes, created without arguments.

    None of them holds the model. A part overrides those of these methods that concern it.
    """

    def drop(self) -> None:
        """Free memory, and forget what was learnt; results of measurements and checks stay."""

    def drop_captures(self) -> None:
        """Forget captured passes and kernels, which hold the weights that they were built from."""

    def drop_copies(self) -> None:
        """Free the low-bit copies of weights, and whatever computes from them."""


PartT = TypeVar("PartT", bound=Part)


class ModelState:
    """State of one model, for as long as the model lives. Nothing of it is stored on the model itself.

    Attributes:
        lock: held while the model's modules are patched.
    """

    def __init__(self) -> None:
        self.lock = ForkSafeRLock()
        self._parts: dict[type[Part], Part] = {}

    def get(self, kind: type[PartT]) -> PartT:
        """Return the part of a kind, created on first use.

        Args:
            kind: the class of the part.
        """
        part = self._parts.get(kind)
        if part is None:
            part = self._parts.setdefault(kind, kind())
        return cast("PartT", part)

    def drop(self) -> None:
        """Call `Part.drop` of every part."""
        for part in list(self._parts.values()):
            part.drop()

    def drop_captures(self) -> None:
        """Call `Part.drop_captures` of every part."""
        for part in list(self._parts.values()):
            part.drop_captures()

    def drop_copies(self) -> None:
        """Call `Part.drop_copies` of every part."""
        for part in list(self._parts.values()):
            part.drop_copies()


_STATES: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
_GUARD = ForkSafeRLock()


def state_of(model: nn.Module) -> ModelState:
    """Return the state of a model; empty at first."""
    state = _STATES.get(model)
    if state is None:
        with _GUARD:
            state = _STATES.setdefault(model, ModelState())
    return state
