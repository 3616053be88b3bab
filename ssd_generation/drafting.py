"""How many tokens to draft in a round: pure numbers in, a decision out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["ConfidencePolicy", "DraftPolicy", "FixedPolicy", "make_policy"]


class DraftPolicy(ABC):
    """Decides the draft length of each round.

    A round asks `draft_length` once, then `keep_drafting` after each drafted token, and reports the outcome to
    `update`. A policy keeps its state from round to round and from call to call.

    Attributes:
        needs_probability: whether `keep_drafting` wants the probability of the drafted token. Where it does not, the
            draft loop never waits for the device.
    """

    needs_probability: bool = False

    @abstractmethod
    def draft_length(self, limit: int) -> int:
        """The most tokens to draft in this round.

        Args:
            limit: the most that can be of use (tokens left until the maximum length, less the one that verification
                adds), ≥ 0.

        Returns:
            A number from 0 to `limit`. 0 makes the round a plain decoding step.
        """

    def keep_drafting(self, depth: int, probability: float) -> bool:
        """Whether to draft another token.

        Args:
            depth: tokens drafted so far in this round, ≥ 1.
            probability: of the token drafted last, under the draft's distribution after all logits processors;
                meaningless where `needs_probability` is false. The token itself is always verified: dropping a drawn
                token for its probability would bias sampling.
        """
        return True

    def update(self, drafted: int, accepted: int, reached_end: bool) -> None:  # noqa: B027 - a policy may ignore it
        """Learn from a round.

        Args:
            drafted: tokens drafted (of all rows of a batch).
            accepted: how many of them the target accepted.
            reached_end: whether drafting went on to the length that `draft_length` gave.
        """

    def state(self) -> dict[str, float]:
        """What the policy has learnt, as plain numbers."""
        return {}


class FixedPolicy(DraftPolicy):
    """Always the same draft length.

    Args:
        length: tokens per round, ≥ 1.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"The draft length must be at least 1, but got {length}.")
        self.length = length

    def draft_length(self, limit: int) -> int:
        return min(self.length, limit)


class ConfidencePolicy(DraftPolicy):
    """Adaptive draft exiting (Draft & Verify, Zhang et al., ACL 2024, arXiv 2309.08168).

    Drafting stops after a token whose draft probability is below a threshold γ. After each round, with the share of
    drafted tokens that matched, `m ← β1·m + (1 − β1)·share`; then γ' = γ + ε if m < α, γ' = γ if the round drafted the
    maximum, else γ' = γ − ε; and `γ ← β2·γ + (1 − β2)·γ'`.

    Args:
        max_length: the most tokens per round, ≥ 1.
        threshold: γ at the start, in [0, 1].
        target_acceptance: α, the acceptance rate aimed at, in [0, 1].
        acceptance_smoothing: β1, in [0, 1].
        threshold_smoothing: β2, in [0, 1].
        step: ε, ≥ 0.
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
        if max_length < 1:
            raise ValueError(f"The draft length must be at least 1, but got {max_length}.")
        self.max_length = max_length
        self.threshold = threshold
        self.target_acceptance = target_acceptance
        self.acceptance_smoothing = acceptance_smoothing
        self.threshold_smoothing = threshold_smoothing
        self.step = step
        self.acceptance: float | None = None

    def draft_length(self, limit: int) -> int:
        return min(self.max_length, limit)

    def keep_drafting(self, depth: int, probability: float) -> bool:
        return probability >= self.threshold

    def update(self, drafted: int, accepted: int, reached_end: bool) -> None:
        if drafted == 0:
            return
        share = accepted / drafted
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


def make_policy(drafting: Any) -> DraftPolicy:
    """The policy that a `DraftingConfig` describes.

    Args:
        drafting: a `DraftingConfig` (any object with its attributes).

    Raises:
        ValueError: unknown policy.
    """
    if drafting.policy == "fixed":
        return FixedPolicy(drafting.max_draft_length)
    if drafting.policy == "confidence":
        return ConfidencePolicy(
            max_length=drafting.max_draft_length,
            threshold=drafting.threshold,
            target_acceptance=drafting.target_acceptance,
            acceptance_smoothing=drafting.acceptance_smoothing,
            threshold_smoothing=drafting.threshold_smoothing,
            step=drafting.threshold_step,
        )
    raise ValueError(f"Unknown draft-length policy {drafting.policy!r}; use 'fixed' or 'confidence'.")
