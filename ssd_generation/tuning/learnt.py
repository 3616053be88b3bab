"""Draft-length policies and refinements of a model's weights, carried from call to call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..drafting.policy import DraftPolicy
from ..support.model_state import Part

if TYPE_CHECKING:
    from ..config import SelfSpeculativeConfig
    from .refinement import Refinement

__all__ = ["LearntPart"]

_MOST_WEIGHTS = 16
"""Number of other sets of weights, as adapters are switched, whose learnt state is retained."""


class LearntPart(Part):
    """Learnt state of a model, for the weights in use.

    Attributes:
        policies: draft-length policies, by config, and for a batch also by its approximate size.
        refinements: drafts that improve themselves, by config.
    """

    def __init__(self) -> None:
        self.policies: dict[Any, DraftPolicy] = {}
        self.refinements: dict[SelfSpeculativeConfig, Refinement] = {}
        self._of: tuple[Hashable, ...] = ()  # the weights in use; empty before the first call
        self._of_others: dict[Hashable, tuple[dict[Any, DraftPolicy], dict[SelfSpeculativeConfig, Refinement]]] = {}

    def drop(self) -> None:
        self.policies, self.refinements, self._of, self._of_others = {}, {}, (), {}

    def learn_of(self, weights: Hashable) -> None:
        """Continue with the state learnt for these weights (adapters in use included); start empty for new ones.

        Args:
            weights: identity of the weights, as returned by `weights_in_use`.
        """
        if self._of == (weights,):
            return
        found = self.policies, self.refinements
        if self._of:
            self._of_others[self._of[0]] = found
            found = self._of_others.pop(weights, ({}, {}))
            while len(self._of_others) >= _MOST_WEIGHTS:
                del self._of_others[next(iter(self._of_others))]
        self.policies, self.refinements = found
        self._of = (weights,)
