"""All that the library knows about one model, in one place."""

from __future__ import annotations

import weakref
from typing import TypeVar, cast

from torch import nn

from .forks import ForkSafeRLock

__all__ = ["ModelState", "Part", "state_of"]


class Part:
    """What one module of this package knows about a model: attributes of its own, made without arguments.

    None of them holds the model. Of these methods a part defines those that concern it.
    """

    def drop(self) -> None:
        """Free what takes memory, and forget what was learnt; what was measured and found out stays."""

    def drop_captures(self) -> None:
        """Forget captured passes and kernels, which hold the weights that they were made of."""

    def drop_copies(self) -> None:
        """Free the low-bit copies of weights, and what computes from them."""


PartT = TypeVar("PartT", bound=Part)


class ModelState:
    """What the library knows about one model, for as long as the model lives. Nothing of it is on the model itself.

    Attributes:
        lock: held while the model's modules are patched.
    """

    def __init__(self) -> None:
        self.lock = ForkSafeRLock()
        self._parts: dict[type[Part], Part] = {}

    def get(self, kind: type[PartT]) -> PartT:
        """Return the part of a kind, made when it is first asked for.

        Args:
            kind: the class of the part.
        """
        part = self._parts.get(kind)
        if part is None:
            part = self._parts.setdefault(kind, kind())
        return cast("PartT", part)

    def drop(self) -> None:
        """Have every part do what `Part.drop` says; and so below."""
        for part in list(self._parts.values()):
            part.drop()

    def drop_captures(self) -> None:
        """See `Part.drop_captures`."""
        for part in list(self._parts.values()):
            part.drop_captures()

    def drop_copies(self) -> None:
        """See `Part.drop_copies`."""
        for part in list(self._parts.values()):
            part.drop_copies()


_STATES: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
_GUARD = ForkSafeRLock()


def state_of(model: nn.Module) -> ModelState:
    """What is known about a model; nothing at first."""
    state = _STATES.get(model)
    if state is None:
        with _GUARD:
            state = _STATES.setdefault(model, ModelState())
    return state
