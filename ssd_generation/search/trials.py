"""Drafts that were tried, and what they are worth to a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..tuning.speedup import share_within_chance, speedup_within_chance, theoretical_speedup

if TYPE_CHECKING:
    from ..config import Costs
    from ..tuning.acceptance import Acceptance

__all__ = ["PRIOR", "SPEEDUP", "Found", "Tried", "Worth", "mean_acceptance"]

PRIOR = 4.0
"""How many observations the depth before counts for in acceptance by depth."""


@dataclass(frozen=True)
class Tried:
    """A draft that was judged.

    Attributes:
        number: of the trial.
        choices: what becomes of each sub-layer.
        acceptance: by depth, counted.
        draft_cost: a draft step / a plain step.
        speedup: the theoretical speed-up.
        draft_length: that it is reached with.
        origin: what proposed it.
        pruned: whether it was given up early.
        value: of the objective; `None` where it was given up.
    """

    number: int
    choices: Mapping[str, str]
    acceptance: Acceptance
    draft_cost: float
    speedup: float
    draft_length: int
    origin: str
    pruned: bool
    value: float | None = None


@dataclass(frozen=True)
class Found:
    """What a search has come to.

    Attributes:
        tried: every draft that was judged, in the order of the trials.
        passes: forward passes of the model, by trial, calibration left out.
    """

    tried: Sequence[Tried] = field(default_factory=tuple)
    passes: Sequence[int] = field(default_factory=tuple)

    def best(self, count: int = 1) -> list[Tried]:
        """The drafts with the best values of the objective, that were not given up."""
        whole = [t for t in self.tried if not t.pruned]
        return sorted(whole, key=lambda t: (-(t.speedup if t.value is None else t.value), t.number))[:count]

    def frontier(self) -> list[Tried]:
        """The drafts that no other beats in both acceptance and cost, by ascending cost."""
        frontier: list[Tried] = []
        for t in sorted((t for t in self.tried if not t.pruned), key=lambda t: (t.draft_cost, -mean_acceptance(t))):
            if not frontier or mean_acceptance(t) > mean_acceptance(frontier[-1]):
                frontier.append(t)
        return frontier


def mean_acceptance(tried: Tried) -> float:
    """Accepted / drafted tokens of all rounds, each ending at its first rejection."""
    drafted = sum(tried.acceptance.tried)
    return sum(tried.acceptance.accepted) / drafted if drafted else 0.0


@dataclass(frozen=True)
class Worth:
    """What a draft is worth to a search, by the share of its tokens that are accepted and by its costs.

    Args:
        budget: the greatest cost of a draft step, relative to a plain one. Within it a draft is worth its acceptance,
            beyond it the less the dearer it is. `None`: the theoretical speed-up.
    """

    budget: float | None = None

    def of(self, acceptance: float, costs: Costs) -> float:
        """The worth of a draft of which so many tokens are accepted, at every depth alike."""
        if self.budget is None:
            return theoretical_speedup([acceptance], costs)[0]
        cost = costs.draft_step / costs.plain_step
        return acceptance if cost <= self.budget else self.budget - cost

    def within_chance(self, acceptance: Acceptance, costs: Costs, errors: float) -> float:
        """The worth of a draft, were its acceptance so many standard errors above what was counted."""
        if self.budget is None:
            return speedup_within_chance(acceptance.tried, acceptance.accepted, costs, errors)[0]
        return self.of(share_within_chance(sum(acceptance.tried), sum(acceptance.accepted), errors), costs)

    def found(self, tried: Tried) -> float:
        """What a draft that was tried is worth."""
        return tried.speedup if self.budget is None or tried.value is None else tried.value


SPEEDUP = Worth()
