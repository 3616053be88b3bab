"""Pace of the rows of a batch: how far each advances in a round."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..cache.buffered_layers import BufferedSlidingLayer
from ..cache.recurrent import MOST_OWED, REACH
from .alignment import Alignment
from .choice import Choice
from .ends import Ends
from .rotary import RotarySwitch
from .row_tokens import RowTokens

__all__ = ["Pace"]

_MAX_LEAD = 64
"""Largest lead, in tokens, over the slowest row of a batch whose cache is returned, so that sliding layers can be
rolled back."""


class Pace:
    """Bounds on each row's advance in a round: its end, its lead, and a change of the model's rotary embedding.

    Args:
        texts: tokens of the rows.
        alignment: alignment of the rows in the cache.
        ends: record of the rows that have ended.
        choice: rule that picks tokens from scores.
        rotary: length at which the model's rotary embedding changes.
        cache_is_returned: whether the caller sees the cache afterwards.
    """

    def __init__(
        self,
        texts: RowTokens,
        alignment: Alignment,
        ends: Ends,
        choice: Choice,
        rotary: RotarySwitch,
        cache_is_returned: bool,
    ) -> None:
        self._texts, self._alignment, self._ends, self._choice, self._rotary = texts, alignment, ends, choice, rotary
        layers = alignment.context.cache.layers
        is_sliding = any(isinstance(layer, BufferedSlidingLayer) for layer in layers)
        is_bound = texts.batch > 1 and cache_is_returned and is_sliding
        self._max_lead = _MAX_LEAD if is_bound else ends.limits.max_length

    def active(self, committed: int) -> list[bool]:
        """Return, per row, whether it is active in this round: it has not ended, and need not wait for others."""
        going = [self._ends.goes_on(row) for row in range(self._texts.batch)]
        for row, spare in enumerate(self._spare(committed)):
            going[row] = going[row] and spare > 0
        if self._rotary and any(going):
            rows = [row for row in range(self._texts.batch) if going[row]]
            if min(map(self._alignment.columns, rows)) < self._rotary.length:
                for row in rows:  # until the last one has reached the length at which the embedding changes
                    going[row] = self._alignment.columns(row) < self._rotary.length
        return going

    def draft_limits(self, active: Sequence[bool], committed: int) -> list[int]:
        """Return, per row, the most tokens worth drafting: one less than it may add, since one is the target's own."""
        # The position of the pending token is that of its slot, or less where there is padding on the left.
        most = min(
            self._longest_draft(active), max(self._ends.limits.most_positions - self._alignment.context.length - 1, 0)
        )
        checkpoint = self._alignment.context.checkpoint
        if checkpoint is not None:
            most = min(most, REACH - MOST_OWED - 1)
            if checkpoint.has_no_room or checkpoint.owed(self._alignment.context.length) >= MOST_OWED:
                most = 0  # a pass in which nothing can be rejected advances the checkpoint
        return [min(spare - 1, most) if active[row] else 0 for row, spare in enumerate(self._spare(committed))]

    def _spare(self, committed: int) -> list[int]:
        """Return the number of tokens that each row may still add."""
        lead = min(self._max_lead, self._choice.longest_lead)
        last = min(self._ends.limits.max_length, self._last_common_length())
        return [min(last - length, lead - (length - committed)) for length in self._texts.lengths]

    def _last_common_length(self) -> int:
        """Return the length at which rows wait for one another: beyond it passes need positions that the model lacks.

        Resting rows take part in each pass as well, at the position of their pending token.
        """
        last = self._ends.limits.most_positions - self._alignment.prompt_slots + self._texts.prompt_length
        going = [length for row, length in enumerate(self._texts.lengths) if self._ends.goes_on(row)]
        return sys.maxsize if self._texts.batch == 1 or min(going, default=last) >= last else last

    def _longest_draft(self, active: Sequence[bool]) -> int:
        """Return the longest draft, in tokens, that does not cross the length at which the rotary embedding changes."""
        if not self._rotary or not any(active):
            return sys.maxsize
        slowest = min(self._alignment.columns(row) for row in range(self._texts.batch) if active[row])
        if slowest < self._rotary.length:
            # Resting rows are in the pass as well, and share its end; the leading row may come to rest at the switch
            # with a token of the target's own.
            return max(self._rotary.length - self._alignment.context.length - (1 if self._texts.batch == 1 else 2), 0)
        padding = 0
        if (positions := self._alignment.context.positions) is not None:
            padding = min(
                self._alignment.columns(row) - 1 - int(positions[..., row, 0].max()) for row in range(self._texts.batch)
            )
        return sys.maxsize if self._rotary.changes_once and slowest - padding > self._rotary.length + 1 else 0
