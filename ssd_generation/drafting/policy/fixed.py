"""Policies that learn nothing: no draft at all, and the same draft length in every round."""

from __future__ import annotations

from ...support.bounds import DRAFT_LENGTH
from .base import NO_MATCH, DraftPolicy, Match

__all__ = ["FixedPolicy", "NoDraftPolicy"]


class NoDraftPolicy(DraftPolicy):
    """Policy that never drafts: every round is a plain decoding step."""

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return 0

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        return False

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        return 0


class FixedPolicy(DraftPolicy):
    """Policy of a constant draft length; where lookup has a match, that is the draft instead.

    Args:
        length: number of tokens per round, 1 to 128.

    Raises:
        ValueError: a length out of range.
    """

    def __init__(self, length: int) -> None:
        self.length = DRAFT_LENGTH.check("The draft length", length)

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return 0 if match.tokens else min(self.length, limit)
