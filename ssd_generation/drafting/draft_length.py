"""How many tokens to draft in a round: pure numbers in, a decision out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ..support.bounds import DRAFT_LENGTH

__all__ = [
    "NO_MATCH",
    "ConfidencePolicy",
    "DraftPolicy",
    "FixedPolicy",
    "Match",
    "NoDraftPolicy",
]


class Match(NamedTuple):
    """What prompt lookup offers.

    Attributes:
        tokens: how many looked-up tokens are available, 0 = no match.
        length: length of the n-gram that matched, 0 = no match.
    """

    tokens: int
    length: int


NO_MATCH = Match(0, 0)


class DraftPolicy(ABC):
    """Decides the draft length of each round.

    A round of a batch begins with `begin_round`. A round asks `draft_length` once for each row, then per row of the
    batch `keep_drafting` after each self-drafted token and `lookup_length` when self-drafting has ended, and reports
    the outcome of each row to `update`, always in the order of the rows. A policy keeps its state from round to round
    and from call to call.

    Attributes:
        needs_probability: whether `keep_drafting` wants the probability of the drafted token. Where it does not, the
            draft loop never waits for the device, and need not ask.
    """

    needs_probability: bool = False

    def begin_round(self, lengths: Sequence[int]) -> None:  # noqa: B027 - a policy may ignore it
        """Said before the first question of a round of a batch.

        Args:
            lengths: tokens of each row that still drafts.
        """

    @abstractmethod
    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        """The most tokens to self-draft in this round.

        Args:
            limit: the most that can be of use (tokens left until the maximum length, less the one that verification
                adds), ≥ 0.
            match: what lookup offers right now, before any self-drafted token.

        Returns:
            A number from 0 to `limit`. 0 makes the round a plain decoding step, unless `lookup_length` asks for
            looked-up tokens.
        """

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        """Whether to self-draft another token.

        Args:
            depth: tokens self-drafted so far in this round, ≥ 1.
            probability: of the token drafted last, under the draft's distribution after all logits processors;
                meaningless where `needs_probability` is false. The token itself is always verified: dropping a drawn
                token for its probability would bias sampling.
            match: what lookup offers behind the tokens drafted so far.
        """
        return True

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        """How many looked-up tokens to append to the draft of a row.

        By default lookup comes first, and the draft itself where it offers nothing: all that fit if nothing was
        self-drafted, else none.

        Args:
            depth: tokens self-drafted in this round, 0 = none.
            match: what lookup offers behind them.
            limit: the most looked-up tokens that can be of use, ≥ 0.

        Returns:
            A number from 0 to `min(match.tokens, limit)`.
        """
        return 0 if depth else max(min(match.tokens, limit), 0)

    def update(  # noqa: B027 - a policy may ignore it
        self, drafted: int, accepted: int, reached_end: bool, looked_up: int = 0, match: Match = NO_MATCH
    ) -> None:
        """Learn from a row's round.

        Args:
            drafted: tokens self-drafted.
            accepted: how many tokens the target accepted, of the self-drafted and then of the looked-up ones.
            reached_end: whether self-drafting went on to the length that `draft_length` gave.
            looked_up: looked-up tokens appended behind the self-drafted ones.
            match: where these came from.
        """

    def state(self) -> dict[str, float]:
        """What the policy has learnt, as plain numbers."""
        return {}


class NoDraftPolicy(DraftPolicy):
    """Never drafts: every round is a plain decoding step."""

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return 0

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        return False

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        return 0


class FixedPolicy(DraftPolicy):
    """Always the same draft length; where lookup has a match, that is the draft instead.

    Args:
        length: tokens per round, 1 to 128.
    """

    def __init__(self, length: int) -> None:
        self.length = DRAFT_LENGTH.check("The draft length", length)

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return 0 if match.tokens else min(self.length, limit)


class ConfidencePolicy(DraftPolicy):
    """Adaptive draft exiting (Draft & Verify, Zhang et al., ACL 2024, arXiv 2309.08168).

    Drafting stops after a token whose draft probability is below a threshold γ. After each round, with the share of
    drafted tokens that matched, `m ← β1·m + (1 − β1)·share`; then γ' = γ + ε if m < α, γ' = γ if the round drafted the
    maximum, else γ' = γ − ε; and `γ ← β2·γ + (1 − β2)·γ'`. Where lookup has a match, that is the draft instead, and
    nothing is learnt from it.

    Args:
        max_length: the most tokens per round, 1 to 128.
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
