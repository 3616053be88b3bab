"""The interface of a draft-length policy, and the match of prompt lookup that it is told about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NO_MATCH", "DraftPolicy", "Match"]


class Match(NamedTuple):
    """Offer of prompt lookup.

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
    the outcome of each row to `update`, always in the order of the rows. A policy retains its state from round to round
    and from call to call.

    Attributes:
        needs_probability: whether `keep_drafting` wants the probability of the drafted token. Where it does not, the
            draft loop never waits for the device, and need not ask.
    """

    needs_probability: bool = False

    def begin_round(self, lengths: Sequence[int]) -> None:  # noqa: B027 - a policy may ignore it
        """Begin a round of a batch; called before the first question.

        Args:
            lengths: tokens of each row that still drafts.
        """

    @abstractmethod
    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        """Return the most tokens to self-draft in this round.

        Args:
            limit: the most that can be of use (tokens left until the maximum length, less the one that verification
                adds), ≥ 0.
            match: what lookup offers right now, before any self-drafted token.

        Returns:
            A number from 0 to `limit`. 0 makes the round a plain decoding step, unless `lookup_length` asks for
            looked-up tokens.
        """

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        """Decide whether to self-draft another token.

        Args:
            depth: tokens self-drafted so far in this round, ≥ 1.
            probability: of the token drafted last, under the draft's distribution after all logits processors;
                meaningless where `needs_probability` is false. The token itself is always verified: dropping a drawn
                token for its probability would bias sampling.
            match: what lookup offers after the tokens drafted so far.
        """
        return True

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        """Return how many looked-up tokens to append to the draft of a row.

        By default lookup comes first, and the draft itself where it offers nothing: all that fit if nothing was
        self-drafted, else none.

        Args:
            depth: tokens self-drafted in this round, 0 = none.
            match: what lookup offers after them.
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
            reached_end: whether self-drafting continued to the length that `draft_length` gave.
            looked_up: looked-up tokens appended after the self-drafted ones.
            match: where these came from.
        """

    def state(self) -> dict[str, float]:
        """Return what the policy has learnt, as plain numbers."""
        return {}
