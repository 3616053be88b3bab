"""Settings of a search: space and method, texts, and destination of the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import SelfSpeculativeConfig
from ..tuning.automatic import DRAFT_MEMORY
from .trials import Scoring

__all__ = ["OBJECTIVES", "SAMPLERS", "CalibrationSettings", "ResultSettings", "SearchSettings", "check_sampler"]

SAMPLERS: Mapping[str, str] = {
    "tpe": "tree-structured Parzen estimator",
    "gp": "Gaussian process (needs scipy)",
    "nsga2": "NSGA-II on two objectives, acceptance and draft cost",
    "random": "at random, a baseline",
    "forward": "greedy forward selection, a baseline: the best single addition to the best set so far",
}
OBJECTIVES: Mapping[str, str] = {
    "speedup": "theoretical speed-up at the best draft length, free of timing noise",
    "acceptance": "acceptance among drafts within a cost (--budget)",
    "tokens-per-second": "measured, of timed generation, as in the paper",
}


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the space and the method of a search.

    Args:
        objective: one of `OBJECTIVES`.
        sampler: one of `SAMPLERS`.
        warm_start: whether to propose uniform precisions, single sub-layers skipped, and the sets that follow from
            these, before the sampler takes over (see `proposals.warm_start`).
        prune: whether to stop judging a draft as soon as it is significantly worse than the best.
        depth: draft length of the rounds in which drafts are judged, ≥ 1.
        exact_depth: number of tokens of a round that are judged exactly, at proportional cost; 1 to `depth`, see
            `judge`.
        budget: for the objective "acceptance": the greatest cost of a draft step, relative to a plain one.
        seed: seed of sampler and proposals.
        draft_memory: share of the weights' bytes that low-bit copies may take, ≥ 0; 0: skipping alone.
        precisions: precisions to search; `None`: those supported here.
        start_from: drafts to try first.

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
    draft_memory: float = DRAFT_MEMORY
    precisions: tuple[str, ...] | None = None
    start_from: tuple[SelfSpeculativeConfig, ...] = ()

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
                "The sampler nsga2 looks for the best acceptance at every cost, so it cannot optimise the objective "
                f"{self.objective!r}. Choose another sampler, or leave the objective out."
            )
        if not 0 < self.budget <= 1:
            raise ValueError(f"The budget is a share of a plain step, above 0 and up to 1, but got {self.budget}.")

    @property
    def scoring(self) -> Scoring:
        """Score by which drafts are proposed and pruned; where speed is measured, the theoretical speed-up."""
        return Scoring(self.budget if self.objective == "acceptance" else None)

    @property
    def directions(self) -> list[Any]:
        """Directions of the study's values, as Optuna takes them."""
        return ["maximize", "minimize"] if self.sampler == "nsga2" else ["maximize"]


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of the texts that drafts are judged on.

    Args:
        prompts: source of the calibration prompts, see `calibration.calibration_prompts`.
        num_prompts: number of prompts that drafts are judged on, ≥ 1.
        held_out_prompts: number of further prompts that only the best drafts are judged on; 0: none.
        new_tokens: tokens of each continuation, ≥ 2.
        use_chat_template: whether to apply the tokenizer's chat template to the prompts, if it has one.
    """

    prompts: str | None = None
    num_prompts: int = 8
    held_out_prompts: int = 6
    new_tokens: int = 32
    use_chat_template: bool = True


@dataclass(frozen=True)
class ResultSettings:
    """Destination of the study and the results, and use of the best drafts.

    Args:
        output: folder for the config, the figures, and the study if there is no `storage`; `None`: nothing is
            written, and the study is held in memory.
        storage: URL of the study's storage, see `storage.storage_of`.
        study_name: name of the study.
        confirmed: number of the best drafts that are timed in generation, interleaved with plain decoding; 0: none.
        lookup: whether the resulting config drafts by prompt lookup too, which costs nothing. The search and the
            timing do not use it.
    """

    output: str | Path | None = None
    storage: str | None = None
    study_name: str = "search"
    confirmed: int = 1
    lookup: bool = True


def check_sampler(sampler: str) -> None:
    """Check that the packages of a sampler are installed.

    Raises:
        ImportError: one of them is not.
    """
    if sampler == "gp":
        try:
            import scipy  # noqa: F401
        except ImportError as error:
            raise ImportError("The sampler gp needs scipy: pip install 'ssd_generation[gp]'") from error
