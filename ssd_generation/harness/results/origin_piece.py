"""Piece of an answer, and its origin."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DECIDED", "DRAFTED", "LOOKED_UP", "OriginPiece"]

DRAFTED = "drafted and accepted"
LOOKED_UP = "looked up and accepted"
DECIDED = "decided by the target"


@dataclass(frozen=True)
class OriginPiece:
    """Piece of text that is shown as one: a token, or several that only together make whole characters.

    Attributes:
        text: the text; for a special token, its name.
        drafted: whether it was drafted and accepted (else the target decided it). Of several tokens, the last one
            counts.
        looked_up: whether the draft was copied from the text by prompt lookup.
        first: number of its first token among the new ones, from 0.
        tokens: number of its tokens, ≥ 1.
        round: number of the round that added it; 0 is the pass over the prompt.
        special: whether it is a special token, such as the one that ends the answer.
    """

    text: str
    drafted: bool
    first: int
    tokens: int = 1
    round: int = 0
    special: bool = False
    looked_up: bool = False

    @property
    def origin(self) -> str:
        """Origin in words."""
        return LOOKED_UP if self.looked_up else DRAFTED if self.drafted else DECIDED
