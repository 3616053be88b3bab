"""Low-bit copies that a process does not have yet: made between the tokens of a call, once they promise to pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..forward.copies.low_bit import CopiesPart, missing_copies
from ..forward.structure.offloaded import is_offloaded
from ..forward.structure.sublayers import input_device
from ..support.model_state import Part, state_of
from .moving_weights import SECONDS_PER_WEIGHT
from .speedup import seconds_saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = ["PendingCopies", "PendingCopiesPart", "pending_copies"]

_STEPS = 2
"""Time for copies in a round, in plain steps: a reader sees tokens come at a steady pace."""

_TO_COME = 4
"""Tokens that a process is expected to decode in all, as a multiple of those up to the end of the present call."""


class PendingCopiesPart(Part):
    """Low-bit copies that a model lacks, and the time that its calls would have saved with them.

    Attributes:
        forgone: upper bound on the seconds that the calls so far would have saved with copies.
        missing: number of weights whose copies are missing, by skip set and precision, so that a call that is too short
            does not look for them.
    """

    def __init__(self) -> None:
        self.forgone = 0.0
        self.missing: dict[Any, int] = {}

    def drop(self) -> None:
        self.forgone, self.missing = 0.0, {}


class PendingCopies:
    """Copies that are not there yet.

    Args:
        parts: numbers of weights, and functions that copy them; `None` where none are to be made.
        each: number of weights to copy at a time, at least.
    """

    def __init__(self, parts: Sequence[tuple[int, Callable[[], None]]] | None, each: int = 0) -> None:
        self._parts = None if parts is None else list(parts)
        self._each = each

    def make_some(self) -> bool:
        """Make a part of the copies; return whether all are there."""
        left = self._each
        while self._parts and left > 0:
            weights, make = self._parts.pop(0)
            make()
            left -= weights
        return self._parts == []


def pending_copies(
    model: PreTrainedModel, config: SelfSpeculativeConfig, new_tokens: int | None
) -> PendingCopies | None:
    """Return the copies that a call makes between its tokens; `None` where it has all, or makes them beforehand.

    No copies are made while the calls so far, this one included, are too short for copies to pay: these draft by lookup
    alone. With stored costs, no decision depends on the clock. A config without costs, or with a policy other than
    `"cost"`, has its copies made beforehand.

    Args:
        model: the target model.
        config: the config that the call drafts with.
        new_tokens: number of tokens that the call requests; `None` where that is not known.

    Raises:
        ValueError: low-bit copies cannot be made of the model.
    """
    if config.precision is None or config.costs is None or config.drafting.policy != "cost":
        return None
    saved = seconds_saved(config)
    if saved <= 0 or is_offloaded(model) or input_device(model).type != "cpu":
        return None
    asked, part = (config.skip, config.precision), state_of(model).get(PendingCopiesPart)
    if asked in state_of(model).get(CopiesPart).low_bit_drafts:
        return None
    if new_tokens is not None:
        part.forgone += new_tokens * saved
        if _is_too_short(part, asked):
            return PendingCopies(None)
    parts = missing_copies(model, config.skip, config.precision)
    if not parts:
        return None
    part.missing[asked] = sum(weights for weights, _ in parts)
    if new_tokens is not None and _is_too_short(part, asked):
        return PendingCopies(None)
    part.forgone = 0.0
    del part.missing[asked]  # fewer from now on
    return PendingCopies(parts, int(_STEPS * config.costs.plain_step / SECONDS_PER_WEIGHT) + 1)


def _is_too_short(part: PendingCopiesPart, asked: Any) -> bool:
    """Tell whether the calls so far, and as many to come as they suggest, save less than the missing copies take."""
    return _TO_COME * part.forgone < SECONDS_PER_WEIGHT * part.missing.get(asked, 0)
