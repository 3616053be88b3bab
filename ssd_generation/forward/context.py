"""Inputs of a pass other than its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..cache.buffered_layers import BufferedLayer, move_rows
from ..cache.recurrent import Checkpoint
from ..native.cache_table import ONE_TEXT, TextPlace
from ..support.padding import padding_at_left
from ..support.versions import CACHE_NAMES

__all__ = ["NOT_FOR_DRAFTS", "Context", "move_mask"]

# Arguments that a draft's pass has no use for, or receives anew in each pass.
NOT_FOR_DRAFTS = frozenset(
    (
        *CACHE_NAMES,
        "attention_mask",
        "position_ids",
        "inputs_embeds",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "token_type_ids",
        "mm_token_type_ids",
        "next_sequence_length",
        "is_first_iteration",
    )
)


@dataclass
class Context:
    """State that a pass continues from: the KV cache, and the model's other arguments.

    Attributes:
        cache: the target's; it holds `length` slots of each row.
        length: slots in the cache, up to the end of the longest row.
        mask (`torch.LongTensor` of shape `(B, length + 1)`): mask over the cached slots and the pending token; `None`
            while nothing is masked.
        positions (`torch.LongTensor` of shape `(…, B, 1)`): position of the pending token; `None` for a model that
            counts positions itself.
        arguments: further keyword arguments of the model's passes.
        columns: arguments of which the model wants a column per token, such as `token_type_ids`: the column of any
            token after the prompt, and the dimension of the tokens.
        lags: slots by which each row ends before slot `length`, where rows stay in their own columns, and there is a
            mask; `None` where all rows end at that slot, as the model's own code requires (`align_rows`).
        limit: most slots that the text may fill.
        checkpoint: point to which the recurrent states of a cache can be restored; `None` where it has none.
        has_been_passed: whether the model's own code has run a pass after the prompt.
        is_as_flat: whether a captured pass, which knows neither axes of positions nor further arguments, was found to
            compute the same as the model does with them here; `None`: not tried yet.
    """

    cache: Cache
    length: int
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    lags: Sequence[int] | None = None
    limit: int = 0
    checkpoint: Checkpoint | None = None
    has_been_passed: bool = False
    is_as_flat: bool | None = None

    def __post_init__(self) -> None:
        # For a single row this never changes: nothing after the prompt is masked.
        is_unmasked = self.mask is None or bool(self.mask.all())
        self._is_flat = is_unmasked and (self.positions is None or self.positions.ndim == 2)
        # After a picture, the axes of time, height and width advance together; the first of four counts tokens.
        axes = None if self._is_flat or self.positions is None else self.positions[1:, ..., -1]
        self._may_be_flat = is_unmasked and (axes is None or bool((axes == axes[:1]).all()))
        self._ahead: int | None = None
        self._is_in_rows: bool | None = None
        self.draft_arguments = {key: value for key, value in self.arguments.items() if key not in NOT_FOR_DRAFTS}
        self._has_tensors = any(isinstance(value, torch.Tensor) for value in self.arguments.values())
        self._draft_has_tensors = any(isinstance(value, torch.Tensor) for value in self.draft_arguments.values())
        self._draft_is_plain = self._is_flat and not self._draft_has_tensors

    def is_plain(self, rows: int) -> bool:
        """Tell whether a pass has one row, and no arguments with an effect but tokens and positions."""
        if rows != 1:
            return False
        return self.is_as_flat is True or (self._is_flat and not self.columns and not self._has_tensors)

    def places(self, rows: int) -> Sequence[TextPlace] | None:
        """Return the place of each row in the cache.

        Returns:
            The places; `None` where a pass has arguments besides tokens and positions, or masks more than padding.
        """
        if self.is_plain(rows):
            return ONE_TEXT
        return None if self.columns or self._has_tensors else self._places_in_rows(rows)

    def is_in_rows(self, rows: int) -> bool:
        """Tell whether a pass has several rows, attention alone, and no arguments but tokens, positions and padding.

        The mask is read once: what follows a prompt is not masked, and moving rows adds padding at their left.
        """
        if rows == 1 or self.columns or self._has_tensors or self.checkpoint is not None:
            return False
        if self._is_in_rows is None:
            self._is_in_rows = self._places_in_rows(rows) is not None
        return self._is_in_rows

    def places_for_drafts(self, rows: int) -> Sequence[TextPlace] | None:
        """Return `places` for a pass of the draft, which does not receive all of the arguments."""
        if rows == 1 and (self._draft_is_plain or self.is_as_flat is True):
            return ONE_TEXT
        return None if self.columns or self._draft_has_tensors else self._places_in_rows(rows)

    def _places_in_rows(self, rows: int) -> Sequence[TextPlace] | None:
        if self.positions is None:
            # A model of states alone has no positions, and its states no padding.
            return None if self.checkpoint is None else [TextPlace(row, 0) for row in range(rows)]
        if self.positions.ndim != 2:
            return None
        starts = [0] * rows if self.mask is None else padding_at_left(self.mask)
        if starts is None:
            return None
        lags = [0] * rows if self.lags is None else self.lags
        return [TextPlace(row, start, -lag) for row, (start, lag) in enumerate(zip(starts, lags, strict=True))]

    @property
    def may_lag(self) -> bool:
        """Tell whether rows may stay in their own columns: each slot of the cache is a column of all rows."""
        return self.checkpoint is None and all(type(layer) is BufferedLayer for layer in self.cache.layers)

    def align_rows(self) -> None:
        """Make all rows end at slot `length`, for a pass of the model's own code."""
        if self.lags is None:
            return
        assert self.mask is not None
        move_rows(self.cache, self.lags, self.length)
        move_mask(self.mask, self.lags)
        self.lags = None

    def is_to_be_tried(self, rows: int) -> bool:
        """Tell whether a pass may turn out to be plain: pictures affect the prompt alone in most models."""
        return rows == 1 and self._may_be_flat and self.is_as_flat is None and self.checkpoint is None

    @property
    def flat_positions(self) -> torch.Tensor | None:
        """Positions `(B, 1)`, for a pass that is plain."""
        return self.positions if self.positions is None or self.positions.ndim == 2 else self.positions[-1]

    @property
    def position(self) -> int:
        """Position of the pending token of a single row, which moves along with its slot."""
        if self._ahead is None:
            positions = self.flat_positions
            self._ahead = 0 if positions is None else int(positions[..., -1]) - self.length
        return self.length + self._ahead

    def positions_of(self, count: int) -> torch.Tensor | None:
        """Return the positions of the pending token and those after it, `(…, B, count)`."""
        if self.positions is None or count == 1:
            return self.positions
        return self.positions + torch.arange(count, device=self.positions.device)


def move_mask(mask: torch.Tensor, moves: Sequence[int]) -> None:
    """Move each row of a mask over slots as `move_rows` moves the slots, in place."""
    for row, move in enumerate(moves):
        if move > 0:
            mask[row, move:] = mask[row, :-move].clone()
            mask[row, :move] = 0
        elif move < 0:
            mask[row, :move] = mask[row, -move:].clone()
            mask[row, move:] = 1
