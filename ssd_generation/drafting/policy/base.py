"""Interface of draft-length policies, and the match of prompt lookup that they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LEAD", "NO_MATCH", "DraftPolicy", "Match"]

LEAD = 8
"""Default lead, in tokens, over the slowest row of a batch up to which a row drafts; also the number of rounds within
which the slowest row would have to catch up."""


class Match(NamedTuple):
    """Offer of prompt lookup.

    Attributes:
        tokens: number of looked-up tokens available, 0 = no match.
        length: length of the n-gram that matched, 0 = no match.
    """

    tokens: int
    length: int


NO_MATCH = Match(0, 0)


class DraftPolicy(ABC):
    """Policy that decides the draft length of each round.

    A round of a batch begins with `begin_round`. A round calls `draft_length` once for each row, then per row of the
    batch `keep_drafting` after each self-drafted token and `lookup_length` when self-drafting has ended, and reports
    the outcome of each row to `update`, always in the order of the rows. A policy retains its state from round to round
    and from call to call.

    Attributes:
        needs_probability: whether `keep_drafting` uses the probability of the drafted token. Where it does not, the
            draft loop never waits for the device, and need not call it.
    """

    needs_probability: bool = False

    def begin_round(self, lengths: Sequence[int], packed: int = 0) -> None:  # noqa: B027 - may ignore it
        """Begin a round of a batch; called before any other method.

        Args:
            lengths: number of tokens of each row that still drafts.
            packed: number of rows of the batch, where the target's pass has the tokens of each row and no more; 0 where
                it is as wide for all rows as for the one with the most.
        """

    @property
    def lead(self) -> int:
        """Largest lead over the slowest row of a batch, in tokens, with which a row drafts."""
        return LEAD

    @abstractmethod
    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        """Return the largest number of tokens to self-draft in this round.

        Args:
            limit: largest useful number (tokens left until the maximum length, less the one that verification adds),
                ≥ 0.
            match: what lookup offers right now, before any self-drafted token.

        Returns:
            A number from 0 to `limit`. 0 makes the round a plain decoding step, unless `lookup_length` adds looked-up
            tokens.
        """

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        """Decide whether to self-draft another token.

        Args:
            depth: number of tokens self-drafted so far in this round, ≥ 1.
            probability: probability of the token drafted last, under the draft's distribution after all logits
                processors; meaningless where `needs_probability` is false. The token itself is always verified:
                dropping a drawn token for its probability would bias sampling.
            match: what lookup offers after the tokens drafted so far.
        """
        return True

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        """Return how many looked-up tokens to append to the draft of a row.

        By default lookup comes first, and self-drafting where it offers nothing: all that fit if nothing was
        self-drafted, else none.

        Args:
            depth: number of tokens self-drafted in this round, 0 = none.
            match: what lookup offers after them.
            limit: largest useful number of looked-up tokens, ≥ 0.

        Returns:
            A number from 0 to `min(match.tokens, limit)`.
        """
        return 0 if depth else max(min(match.tokens, limit), 0)

    def update(  # noqa: B027 - a policy may ignore it
        self, drafted: int, accepted: int, reached_end: bool, looked_up: int = 0, match: Match = NO_MATCH
    ) -> None:
        """Learn from a row's round.

        Args:
            drafted: number of tokens self-drafted.
            accepted: how many tokens the target accepted, of the self-drafted and then of the looked-up ones.
            reached_end: whether self-drafting continued to the length that `draft_length` gave.
            looked_up: number of looked-up tokens appended after the self-drafted ones.
            match: match that these came from.
        """

    def state(self) -> dict[str, float]:
        """Return what the policy has learnt, as plain numbers."""
        return {}
