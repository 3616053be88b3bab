"""How a search goes: objective, sampler, and how drafts are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .trials import Worth

__all__ = ["OBJECTIVES", "SAMPLERS", "SearchSettings", "check_sampler"]

SAMPLERS: Mapping[str, str] = {
    "tpe": "tree-structured Parzen estimator",
    "gp": "Gaussian process (needs scipy)",
    "nsga2": "NSGA-II on two objectives, acceptance and draft cost",
    "random": "at random, a baseline",
    "forward": "greedy forward selection, a baseline: the best single addition to the best set so far",
}
OBJECTIVES: Mapping[str, str] = {
    "speedup": "theoretical speed-up at the best draft length, free of timing noise",
    "acceptance": "acceptance among drafts that keep to a cost (--budget)",
    "tokens-per-second": "measured, of timed generation, as in the paper",
}


@dataclass(frozen=True)
class SearchSettings:
    """How a search goes.

    Args:
        objective: one of `OBJECTIVES`.
        sampler: one of `SAMPLERS`.
        warm_start: propose uniform precisions, each sub-layer on its own, and the sets that these promise, before the
            sampler has its say.
        prune: give a draft up as soon as it is behind the best by more than chance.
        depth: tokens of a round in which drafts are judged, ≥ 1.
        exact_depth: so many of these are judged exactly, at so many times the cost; 1 to `depth`, see `judge`.
        budget: for the objective "acceptance": the greatest cost of a draft step, relative to a plain one.
        seed: of sampler and proposals.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """

    objective: str = "speedup"
    sampler: str = "tpe"
    warm_start: bool = True
    prune: bool = True
    depth: int = 6
    exact_depth: int = 1
    budget: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        for value, allowed, what in (
            (self.objective, OBJECTIVES, "objective"),
            (self.sampler, SAMPLERS, "sampler"),
        ):
            if value not in allowed:
                raise ValueError(f"There is no {what} {value!r}. Choose from {', '.join(allowed)}.")
        if self.depth < 1:
            raise ValueError(f"Rounds need a depth of at least 1, but got {self.depth}.")
        if not 1 <= self.exact_depth <= self.depth:
            raise ValueError(f"Rounds are judged exactly up to token 1 to {self.depth}, but got {self.exact_depth}.")
        if self.sampler == "nsga2" and self.objective != "speedup":
            raise ValueError(
                f"The sampler nsga2 looks for the best acceptance at every cost, so it cannot go by the objective "
                f"{self.objective!r}. Choose another sampler, or leave the objective out."
            )
        if not 0 < self.budget <= 1:
            raise ValueError(f"The budget is a share of a plain step, above 0 and up to 1, but got {self.budget}.")

    @property
    def worth(self) -> Worth:
        """What drafts are proposed and given up by; where speed is measured, the theoretical speed-up."""
        return Worth(self.budget if self.objective == "acceptance" else None)

    @property
    def directions(self) -> list[Any]:
        """Of the study's values, as optuna has them."""
        return ["maximize", "minimize"] if self.sampler == "nsga2" else ["maximize"]


def check_sampler(sampler: str) -> None:
    """That the packages of a sampler are installed.

    Raises:
        ImportError: one is not.
    """
    if sampler == "gp":
        try:
            import scipy  # noqa: F401
        except ImportError as error:
            raise ImportError("The sampler gp needs scipy: pip install 'ssd_generation[gp]'") from error
