"""Where the rows of a batch stand in the KV cache: shifts, mask and positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.buffered_layers import BufferedLayer, move_rows, reaches_back
from ..forward.context import Context
from ..support.devices import sent

__all__ = ["Alignment"]


class Alignment:
    """The KV cache of B texts, aligned at the right: all rows end where the longest does.

    A row that lags `shifts[r]` slots has as many masked slots at its left, which every model supports as left padding.

    Args:
        context: what the next pass follows; its cache holds the prompt, its mask and positions are the prompt's.
        batch: rows, B.
        device: of the texts.

    Attributes:
        context: as given, kept up to date.
        shifts: slots of the cache by which each row lags behind the longest.
        prompt_slots: slots that the prompt takes.
    """

    def __init__(self, context: Context, batch: int, device: torch.device) -> None:
        self.context, self._batch, self._device = context, batch, device
        self.shifts = [0] * batch
        self.prompt_slots = context.length
        self._prompt_positions: torch.Tensor | None = None
        if context.positions is not None:
            self._prompt_positions = context.positions[..., : context.length]
            context.positions = context.positions[..., -1:].expand(*context.positions.shape[:-2], batch, 1).clone()

    def columns(self, row: int) -> int:
        """Tokens in the text of a row, the pending one and padding included."""
        return self.context.length - self.shifts[row] + 1

    def move_on(self, added: Sequence[int]) -> None:
        """Take the rejected tokens of a pass out of the cache; mask and positions move on.

        Args:
            added: tokens that each row has taken since the pass.
        """
        context = self.context
        # A row's slots end where its accepted tokens do, and all rows end where the longest does.
        lengths = [context.length - shift + count for shift, count in zip(self.shifts, added, strict=True)]
        longest = max(lengths)
        shifts = [longest - length for length in lengths]
        moves = [now - before for now, before in zip(shifts, self.shifts, strict=True)]
        move_rows(context.cache, moves, longest)
        if context.mask is None and any(moves):
            context.mask = torch.ones((self._batch, context.length + 1), dtype=torch.long, device=self._device)
        if context.mask is not None:
            # It covers the pending token, too.
            context.mask = torch.nn.functional.pad(context.mask, (0, longest - context.length), value=1)
            _move_mask(context.mask, moves)
        context.length, self.shifts = longest, shifts
        if context.positions is not None:
            if len(set(added)) == 1:
                context.positions = context.positions + added[0]
            else:
                context.positions = context.positions + sent(added, context.positions.device)[:, None]

    def roll_back(self, ahead: int) -> bool:
        """Take the last tokens of a single text out; `False` where a window no longer reaches back so far."""
        context = self.context
        if self._batch > 1 or not reaches_back(context.cache, ahead):
            return False
        move_rows(context.cache, [0], context.length - ahead)
        context.length -= ahead
        if context.mask is not None:
            context.mask = context.mask[:, : context.length + 1]
        if context.positions is not None:
            context.positions = context.positions - ahead
        return True

    def leave(self, slots: int) -> None:
        """Leave so many slots in the cache, after an exception that may have come in the middle of a pass."""
        if self.context.checkpoint is not None:
            self.context.checkpoint.end(self.context.cache, slots)
            return
        for layer in self.context.cache.layers:  # each by itself
            if isinstance(layer, BufferedLayer):
                layer.move_rows([-shift for shift in self.shifts], slots)
            elif layer.get_seq_length() > slots:
                layer.crop(slots - layer.get_seq_length())

    def align(self, slots: int) -> None:
        """Leave the cache as plain decoding does: so many slots, in the columns of the output."""
        moves = [-shift for shift in self.shifts]
        move_rows(self.context.cache, moves, slots)
        if self.context.mask is not None:
            _move_mask(self.context.mask, moves)
        self.shifts = [0] * self._batch

    def go_to(self, slot: int, mask: torch.Tensor | None) -> None:
        """Go back to a slot of the aligned cache, for a pass over what follows.

        Args:
            slot: of the pending token.
            mask: over all slots.
        """
        context = self.context
        context.length = slot
        if mask is not None:
            context.mask = mask[:, : slot + 1]
        if self._prompt_positions is not None:
            positions = self._prompt_positions[..., -1:] + (slot - self.prompt_slots + 1)
            context.positions = positions.expand(*positions.shape[:-2], self._batch, 1)

    def all_positions(self) -> torch.Tensor | None:
        """Positions of the whole text, `(B, text)`; `None` for a model that counts them itself."""
        if self._prompt_positions is None:
            return None
        count = self.context.length + 1 - self.prompt_slots
        later = self._prompt_positions[..., -1:] + torch.arange(1, count + 1, device=self._device)
        return torch.cat((self._prompt_positions, later), dim=-1)


def _move_mask(mask: torch.Tensor, moves: Sequence[int]) -> None:
    """Move each row of a mask over slots as `move_rows` moves the slots, in place."""
    for row, move in enumerate(moves):
        if move > 0:
            mask[row, move:] = mask[row, :-move].clone()
            mask[row, :move] = 0
        elif move < 0:
            mask[row, :move] = mask[row, -move:].clone()
            mask[row, move:] = 1
