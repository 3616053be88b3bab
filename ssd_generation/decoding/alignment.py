"""Alignment of a batch's rows in the KV cache: shifts, mask and positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.buffered_layers import BufferedLayer, move_rows, reaches_back
from ..forward.context import Context, move_mask
from ..support.devices import sent

__all__ = ["Alignment"]


class Alignment:
    """Alignment of B texts in the KV cache.

    Kernels for several texts leave each row in the columns of the output; a row then ends `shifts[r]` slots before the
    longest (`Context.lags`). The model's own code needs rows that end at one slot: there a row that lags has as many
    masked slots on its left, which every model supports as padding.

    Args:
        context: context that the next pass continues; its cache, mask and positions are the prompt's.
        batch: number of rows, B.
        device: device of the texts.

    Attributes:
        context: the given context, updated after each pass.
        shifts: cache slots by which each row lags the longest.
        prompt_slots: number of slots of the prompt.
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
        """Return the number of tokens in a row's text, including padding and the pending token."""
        return self.context.length - self.shifts[row] + 1

    def move_on(self, added: Sequence[int]) -> None:
        """Remove the rejected tokens of a pass from the cache, and advance mask and positions.

        Args:
            added: number of tokens that each row has taken since the pass.
        """
        context = self.context
        # A row's slots end where its accepted tokens do, and all rows end where the longest does.
        lengths = [context.length - shift + count for shift, count in zip(self.shifts, added, strict=True)]
        longest = max(lengths)
        shifts = [longest - length for length in lengths]
        stays = context.lags is not None or (self._batch > 1 and not any(self.shifts) and context.may_lag)
        moves = [0 if stays else now - before for now, before in zip(shifts, self.shifts, strict=True)]
        move_rows(context.cache, moves, longest)
        if context.mask is None and any(shifts):
            context.mask = torch.ones((self._batch, context.length + 1), dtype=torch.long, device=self._device)
        if context.mask is not None:
            # The mask covers the pending token, too.
            context.mask = torch.nn.functional.pad(context.mask, (0, longest - context.length), value=1)
            move_mask(context.mask, moves)
        context.lags = shifts if stays and any(shifts) else None
        context.length, self.shifts = longest, shifts
        if context.positions is not None:
            if len(set(added)) == 1:
                context.positions = context.positions + added[0]
            else:
                context.positions = context.positions + sent(added, context.positions.device)[:, None]

    def roll_back(self, ahead: int) -> bool:
        """Roll a single text back by `ahead` tokens; return `False` for a batch or a too short window."""
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
        """Crop the cache to `slots` slots after an exception, which may have interrupted a pass."""
        if self.context.checkpoint is not None:
            self.context.checkpoint.end(self.context.cache, slots)
            return
        moves = self._moves_back()
        for layer in self.context.cache.layers:  # each layer separately
            if isinstance(layer, BufferedLayer):
                layer.move_rows(moves, slots)
            elif layer.get_seq_length() > slots:
                layer.crop(slots - layer.get_seq_length())

    def align(self, slots: int) -> None:
        """Align the cache as plain decoding leaves it: `slots` slots, in the columns of the output."""
        moves = self._moves_back()
        move_rows(self.context.cache, moves, slots)
        if self.context.mask is not None:
            move_mask(self.context.mask, moves)
        self.shifts, self.context.lags = [0] * self._batch, None

    def _moves_back(self) -> list[int]:
        """Return the moves that bring each row into the columns of the output."""
        return [0 if self.context.lags is not None else -shift for shift in self.shifts]

    def go_to(self, slot: int, mask: torch.Tensor | None) -> None:
        """Go back to a slot of the aligned cache, to run a pass over the tokens from there on.

        Args:
            slot: slot of the pending token.
            mask: mask over all slots.
        """
        context = self.context
        context.length = slot
        if mask is not None:
            context.mask = mask[:, : slot + 1]
        if self._prompt_positions is not None:
            positions = self._prompt_positions[..., -1:] + (slot - self.prompt_slots + 1)
            context.positions = positions.expand(*positions.shape[:-2], self._batch, 1)

    def all_positions(self) -> torch.Tensor | None:
        """Return the positions of the whole text, `(B, text)`; `None` for a model that counts them itself."""
        if self._prompt_positions is None:
            return None
        count = self.context.length + 1 - self.prompt_slots
        later = self._prompt_positions[..., -1:] + torch.arange(1, count + 1, device=self._device)
        return torch.cat((self._prompt_positions, later), dim=-1)
