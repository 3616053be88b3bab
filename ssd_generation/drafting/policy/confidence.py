"""Draft length by the draft's own confidence: the rule of Draft & Verify."""

from __future__ import annotations

from ...support.bounds import DRAFT_LENGTH
from .base import NO_MATCH, DraftPolicy, Match

__all__ = ["ConfidencePolicy"]


class ConfidencePolicy(DraftPolicy):
    """Adaptive draft exiting (Draft & Verify, Zhang et al., ACL 2024, arXiv 2309.08168).

    Drafting stops after a token whose draft probability is below a threshold γ. After each round, with the share of
    drafted tokens that matched, `m ← β1·m + (1 − β1)·share`; then γ' = γ + ε if m < α, γ' = γ if the round drafted the
    maximum, else γ' = γ − ε; and `γ ← β2·γ + (1 − β2)·γ'`. Where lookup has a match, that is the draft instead, and
    nothing is learnt from it.

    Args:
        max_length: largest number of tokens per round, 1 to 128.
        threshold: initial γ, in [0, 1].
        target_acceptance: α, the target acceptance rate, in [0, 1].
        acceptance_smoothing: β1, in [0, 1].
        threshold_smoothing: β2, in [0, 1].
        step: ε, ≥ 0.

    Raises:
        ValueError: a length out of range.
    """

    needs_probability = True

    def __init__(
        self,
        max_length: int = 12,
        threshold: float = 0.6,
        target_acceptance: float = 0.9,
        acceptance_smoothing: float = 0.5,
        threshold_smoothing: float = 0.9,
        step: float = 0.01,
    ) -> None:
        self.max_length = DRAFT_LENGTH.check("The draft length", max_length)
        self.threshold = threshold
        self.target_acceptance = target_acceptance
        self.acceptance_smoothing = acceptance_smoothing
        self.threshold_smoothing = threshold_smoothing
        self.step = step
        self.acceptance: float | None = None

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return 0 if match.tokens else min(self.max_length, limit)

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        return probability >= self.threshold

    def update(
        self, drafted: int, accepted: int, reached_end: bool, looked_up: int = 0, match: Match = NO_MATCH
    ) -> None:
        if drafted == 0:
            return
        share = min(accepted, drafted) / drafted
        # The paper leaves the first value open; a moving average that starts at its first sample has no bias.
        beta = self.acceptance_smoothing
        self.acceptance = share if self.acceptance is None else beta * self.acceptance + (1 - beta) * share
        if self.acceptance < self.target_acceptance:
            proposal = self.threshold + self.step
        elif reached_end:
            proposal = self.threshold
        else:
            proposal = self.threshold - self.step
        blended = self.threshold_smoothing * self.threshold + (1 - self.threshold_smoothing) * proposal
        self.threshold = min(max(blended, 0.0), 1.0)

    def state(self) -> dict[str, float]:
        state = {"threshold": self.threshold}
        if self.acceptance is not None:
            state["acceptance"] = self.acceptance
        return state
