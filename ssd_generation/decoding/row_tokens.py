"""Tokens of B texts, on the device and, as far as they are known there, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..support.devices import sent

__all__ = ["RowTokens"]

_SPARE = 64
"""Smallest number of columns allocated at a time."""


class RowTokens:
    """Tokens of B texts, aligned at the left: row r holds `lengths[r]` tokens, column t is step t of every row.

    Args:
        prompt (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.

    Attributes:
        batch: number of rows, B.
        prompt_length: number of columns of the prompts.
        lengths: number of tokens per row.
    """

    def __init__(self, prompt: torch.Tensor) -> None:
        self.batch, self.prompt_length = prompt.shape
        self.device = prompt.device
        self.lengths = [self.prompt_length] * self.batch
        self._ids = prompt.new_zeros((self.batch, self.prompt_length + _SPARE), dtype=torch.long)
        self._ids[:, : self.prompt_length] = prompt
        # The host's copy of them, so that it need not wait for the device.
        self._prompt: list[list[int]] = []
        self._generated: list[list[int]] = [[] for _ in range(self.batch)]
        self._unwritten = 0  # number of a single row's last tokens that are on the host alone

    @property
    def ids(self) -> torch.Tensor:
        """Token ids of the texts, `(B, ≥ longest)`; drafted tokens may follow a row's own."""
        if self._unwritten:
            generated = self._generated[0]
            length, last = self.prompt_length + len(generated), generated[-self._unwritten :]
            self._widen(length)
            self._ids[0, length - len(last) : length] = sent(last, self.device)
            self._unwritten = 0
        return self._ids

    @property
    def pending(self) -> torch.Tensor:
        """Last token of each row, `(B, 1)`, not in the cache yet."""
        if len(set(self.lengths)) == 1:
            return self.ids[:, self.lengths[0] - 1 : self.lengths[0]]
        last = sent(self.lengths, self.device)[:, None] - 1
        return self.ids.gather(1, last)

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return the tokens of a row from `start` on, including the prompt's and their padding."""
        if start >= self.prompt_length:
            return self._generated[row][start - self.prompt_length :]
        if not self._prompt:
            self._prompt = self._ids[:, : self.prompt_length].tolist()
        return self._prompt[row][start:] + self._generated[row]

    def generated(self, row: int, place: int) -> int:
        """Return the token of a row at a place after its prompt."""
        return self._generated[row][place]

    def write_ahead(self, drafted: torch.Tensor, is_padded: Callable[[int], bool]) -> None:
        """Write drafted tokens after each row's own, for the processors to see; accepted ones overwrite them.

        Args:
            drafted (`torch.LongTensor` of shape `(B, k)`): the tokens.
            is_padded: predicate of the rows that hold padding there, which stays.
        """
        count = drafted.shape[1]
        self._widen(max(self.lengths) + count)
        for row, length in enumerate(self.lengths):
            if not is_padded(row):
                self.ids[row, length : length + count] = drafted[row]

    def append(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Append new tokens to each row.

        Args:
            known: the tokens of each row, `added[r]` of them.
            new (`torch.LongTensor` of shape `(B, ≥ max(added))`): the same on the device, and anything after them;
                `None` for a single row: they are sent there when they are first read.
        """
        added = [len(tokens) for tokens in known]
        if new is None:
            self._unwritten += added[0]
        else:
            self._widen(max(self.lengths) + new.shape[1])
            written = self.ids  # earlier tokens included
            if len(set(self.lengths)) == 1 and len(set(added)) == 1:
                written[:, self.lengths[0] : self.lengths[0] + added[0]] = new[:, : added[0]]
            else:
                for row, count in enumerate(added):
                    written[row, self.lengths[row] : self.lengths[row] + count] = new[row, :count]
        for generated, tokens in zip(self._generated, known, strict=True):
            generated.extend(tokens)
        self.lengths = [length + count for length, count in zip(self.lengths, added, strict=True)]

    def pad(self, rows: Sequence[int], column: int, token: int) -> None:
        """Write padding into a column of some rows, which have ended before it."""
        if rows:
            self._widen(column + 1)
            for row in rows:
                self._ids[row, column] = token

    def cut(self, count: int) -> None:
        """Remove the last `count` tokens of a single text."""
        del self._generated[0][-count:]
        self._unwritten = max(self._unwritten - count, 0)
        self.lengths = [self.lengths[0] - count]

    def _widen(self, columns: int) -> None:
        if columns > self._ids.shape[1]:
            spare = max(_SPARE, columns // 8)
            self._ids = torch.nn.functional.pad(self._ids, (0, columns + spare - self._ids.shape[1]))
