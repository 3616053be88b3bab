"""Prices of passes and rounds, in plain decoding steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...config import Costs

__all__ = ["LONGEST_COPY", "Prices"]

LONGEST_COPY = 16
"""Largest number of looked-up tokens appended to the draft of a row."""


@dataclass(frozen=True)
class Prices:
    """Prices in plain steps, for rounds up to a longest draft and a longest copy.

    Attributes:
        draft: price of a draft step, c.
        verify: price of a verification pass over n tokens, v(n), by n from 1 on; entry 0 is never used.
        rounds: price of a round with k self-drafted tokens, C(k, 0) = k c + v(1 + k), by k; entry 0 is a plain step.
    """

    draft: float
    verify: Sequence[float]
    rounds: Sequence[float]

    @classmethod
    def of(cls, costs: Costs, longest: int) -> Prices:
        """Return the prices that measured costs amount to.

        Args:
            costs: costs of a plain step, a draft step and verification.
            longest: largest number of self-drafted tokens; verification is priced for `LONGEST_COPY` more.
        """
        draft = costs.draft_step / costs.plain_step
        passes = range(1, 1 + longest + LONGEST_COPY + 1)
        verify = [0.0, *(costs.verify_seconds(n) / costs.plain_step for n in passes)]
        return cls(draft, verify, [1.0, *(k * draft + verify[1 + k] for k in range(1, longest + 1))])

    def of_pass(self, tokens: int, rows: int) -> float:
        """Return the price of a pass with so many tokens of all rows: that of one that has as many for each row."""
        return self.verify[min(max(-(-tokens // rows), 1), len(self.verify) - 1)]

    def last_pass(self, depth: int) -> float:
        """Return the price of the target's pass if nothing is appended to `depth` drafted tokens."""
        return self.verify[1 + depth] if depth else 1.0
