"""Drafts that were tried, and their scores in a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..tuning.speedup import share_within_chance, speedup_within_chance, theoretical_speedup

if TYPE_CHECKING:
    from ..config import Costs
    from ..tuning.acceptance import Acceptance

__all__ = [
    "PRIOR",
    "SPEEDUP",
    "Found",
    "Scoring",
    "Tried",
    "acceptance_rate",
    "mean_acceptance",
    "predicted_speedup",
]

PRIOR = 4.0
"""Weight of the previous depth's rate in the acceptance rate at a depth, in observations."""


@dataclass(frozen=True)
class Tried:
    """Draft that was judged.

    Attributes:
        number: number of the trial.
        choices: choice for each sub-layer.
        acceptance: counts by depth.
        draft_cost: time of a draft step / of a plain step.
        speedup: the theoretical speed-up.
        draft_length: the draft length that yields it.
        origin: name of the strategy that proposed the draft.
        pruned: whether judging was stopped early.
        value: value of the objective; `None` if pruned, or if the study has two objectives.
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
    """Drafts that a search has tried.

    Attributes:
        tried: every draft that was judged, in the order of the trials.
        passes: forward passes of the model for each trial, calibration not included.
    """

    tried: Sequence[Tried] = field(default_factory=tuple)
    passes: Sequence[int] = field(default_factory=tuple)

    def best(self, count: int = 1) -> list[Tried]:
        """Return the drafts with the best values of the objective, pruned ones left out."""
        whole = [t for t in self.tried if not t.pruned]
        return sorted(whole, key=lambda t: (-(t.speedup if t.value is None else t.value), t.number))[:count]

    def frontier(self) -> list[Tried]:
        """Return the Pareto frontier of acceptance rate and draft cost, by ascending cost."""
        frontier: list[Tried] = []
        for t in sorted((t for t in self.tried if not t.pruned), key=lambda t: (t.draft_cost, -mean_acceptance(t))):
            if not frontier or mean_acceptance(t) > mean_acceptance(frontier[-1]):
                frontier.append(t)
        return frontier


def acceptance_rate(acceptance: Acceptance) -> float:
    """Return accepted / drafted tokens of all rounds, each ending at its first rejection; 0 if nothing was drafted."""
    return sum(acceptance.accepted) / max(1, sum(acceptance.tried))


def mean_acceptance(tried: Tried) -> float:
    """Return the acceptance rate of a draft that was tried."""
    return acceptance_rate(tried.acceptance)


def predicted_speedup(acceptance: Acceptance, costs: Costs) -> tuple[float, int]:
    """Return the theoretical speed-up from counted acceptance, and the draft length that yields it."""
    return theoretical_speedup(acceptance.by_depth(PRIOR), costs)


@dataclass(frozen=True)
class Scoring:
    """Score of a draft, which the search maximises, from acceptance rate and costs.

    Args:
        budget: the greatest cost of a draft step, relative to a plain one. Within it the score is the acceptance rate,
            beyond it the score falls with the cost. `None`: the score is the theoretical speed-up.
    """

    budget: float | None = None

    def score(self, acceptance: float, costs: Costs) -> float:
        """Return the score of a draft with one acceptance rate at every depth."""
        if self.budget is None:
            return theoretical_speedup([acceptance], costs)[0]
        cost = costs.draft_step / costs.plain_step
        return acceptance if cost <= self.budget else self.budget - cost

    def optimistic_score(self, acceptance: Acceptance, costs: Costs, errors: float) -> float:
        """Return the score of a draft with its acceptance rate `errors` standard errors above the one counted."""
        if self.budget is None:
            return speedup_within_chance(acceptance.tried, acceptance.accepted, costs, errors)[0]
        return self.score(share_within_chance(sum(acceptance.tried), sum(acceptance.accepted), errors), costs)

    def score_of(self, tried: Tried) -> float:
        """Return the score of a draft that was tried."""
        return tried.speedup if self.budget is None or tried.value is None else tried.value


SPEEDUP = Scoring()
