"""Weights that move a little at a time, as a trainer updates them: learnt state is retained, and copies follow."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..forward.copies.low_bit import MOST_DRIFT, CopiesPart, LowBitCopies, rewrite_copies
from ..forward.structure.adapters import adapters_in_use, few_numbers_of, numbers_of
from ..support.model_state import Part, state_of
from ..support.once import looked_at_once
from .speedup import seconds_saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = ["SECONDS_PER_WEIGHT", "MovingWeightsPart", "follow_weights", "origin_of", "weights_in_use"]

_MOST_ORIGINS = 16
"""Number of sets of weights that are remembered, as adapters are switched."""

_TOLERANCE = {"int8": 0.003, "int4": 0.02}
"""Drift of the weights, relative to their size, from which their copies are quantised again: a third of the change that
rounding to so many bits makes."""

SECONDS_PER_WEIGHT = 2.5e-9
"""Time of quantising a weight. A constant: with stored costs no decision depends on the clock."""


@dataclass(eq=False)
class _Origin:
    """Weights, as they were when a call last met them, and their fingerprint when the first call did."""

    adapters: Hashable
    numbers: tuple[torch.Tensor, torch.Tensor]
    fingerprint: str

    def has_become(self, adapters: Hashable, numbers: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Tell whether these may be the same weights, updated."""
        return self.adapters == adapters and all(map(_is_near, self.numbers, numbers))


class MovingWeightsPart(Part):
    """Weights of a model that calls have met, the latest at the end.

    Attributes:
        origins: sets of weights, each with the adapters that were in use.
        forgone: upper bound on the seconds that calls would have saved with copies of the present weights.
    """

    def __init__(self) -> None:
        self.origins: list[_Origin] = []
        self.forgone = 0.0

    def drop(self) -> None:
        self.origins, self.forgone = [], 0.0


def weights_in_use(model: PreTrainedModel) -> Hashable:
    """Return a key of the weights that a model computes with: it changes with other weights, adapters or a merge.

    It stays the same while weights are updated a little at a time.
    """
    origin = _origin(model)
    return origin.adapters, origin.fingerprint


def origin_of(model: PreTrainedModel) -> str:
    """Return a fingerprint of the weights in use that holds across processes, and while the weights are updated.

    It does not depend on which adapters are in use.
    """
    return _origin(model).fingerprint


@looked_at_once
def _origin(model: PreTrainedModel) -> _Origin:
    """Return the weights in use, as first met."""
    part = state_of(model).get(MovingWeightsPart)
    adapters, numbers = adapters_in_use(model), few_numbers_of(model)
    found = next((one for one in part.origins if one.has_become(adapters, numbers)), None)
    if found is None:
        found = _Origin(adapters, numbers, numbers_of(model))
    else:
        found.numbers = numbers
    # A new list: other threads may be looking at this one.
    part.origins = [*(one for one in part.origins if one is not found), found][-_MOST_ORIGINS:]
    return found


def _is_near(before: torch.Tensor, now: torch.Tensor) -> bool:
    return before.shape == now.shape and bool((now - before).norm() <= MOST_DRIFT * before.norm())


def follow_weights(model: PreTrainedModel, config: SelfSpeculativeConfig, new_tokens: int | None) -> None:
    """Quantise weights again that have drifted from the copies that a call is going to draft from, where it pays.

    Copies of weights from before a small update draft nearly as well, and drafts are verified. So nothing is done
    before the update shows at so few bits, nor before calls are long enough to save the time that quantising takes.

    Args:
        model: the target model.
        config: the config that the call drafts with.
        new_tokens: number of tokens that the call requests; `None` where that is not known.
    """
    if config.precision is None:
        return
    part = state_of(model).get(MovingWeightsPart)
    copies = state_of(model).get(CopiesPart).low_bit_drafts.get((config.skip, config.precision))
    if copies is None or not _tolerance(copies) < copies.drift(model) <= MOST_DRIFT:
        return
    if new_tokens is not None and config.costs is not None:
        part.forgone += new_tokens * seconds_saved(config)
        if part.forgone < copies.num_weights() * SECONDS_PER_WEIGHT:
            return
    part.forgone = 0.0
    rewrite_copies(model, copies)


def _tolerance(copies: LowBitCopies) -> float:
    return min((_TOLERANCE[precision] for precision in copies.precisions()), default=MOST_DRIFT)
