"""Passes that read prompts with the kernels used for decoding, so that a token's bits are those of decoding.

A prompt is bound by arithmetic, a decoding step by memory. The kernels of captured passes (native/ops/products_code.py)
add up each row in one fixed order, whatever the other rows are. So a prompt may be read in parts of any length, at once
or after a cached prefix, and its keys and values are those that decoding it token by token would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache

from ...cache.buffered_layers import append_written
from ...cache.prefix_cache import Start
from ...native.cache_table import TextPlace
from .batch_invariance import NATIVE, PROMPT_WIDTHS, BatchInvariance
from .passes import captured_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PromptPasses", "RowPrefixes", "prompt_passes"]


class RowPrefixes(Protocol):
    """Keys and values of earlier texts, for prompts; each layer's are `(1, heads, tokens, size)`.

    Attributes:
        filled: number of tokens that the cache of a call with a single text began with.
    """

    filled: int

    def take(self, tokens: torch.Tensor) -> Start:
        """Return those of the first of these tokens, as far as they are stored."""

    def note_states(self, cache: Cache, count: int, of: int) -> None:
        """Note the recurrent states after `count` of the `of` tokens of a prompt, for `add`."""

    def add(self, tokens: torch.Tensor, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Store those of tokens that were read."""

    def take_ending(self, tokens: torch.Tensor, count: int) -> tuple[Start, torch.Tensor] | None:
        """Return those of the last `count` of a prompt's tokens, and its logits, if the same prompt was read before."""

    def add_ending(self, tokens: torch.Tensor, cache: Cache, count: int, logits: torch.Tensor) -> None:
        """Store those of the last `count` tokens of a prompt that was read, and the logits `(1, 1, V)` after it."""


class PromptPasses:
    """Passes that read prompts of one model.

    Args:
        model: the target model; its passes can be captured.
        batch_invariance: means by which decoding is batch-invariant.
    """

    def __init__(self, model: PreTrainedModel, batch_invariance: BatchInvariance) -> None:
        self._wide = captured_target(model, BatchInvariance(NATIVE, PROMPT_WIDTHS), of_prompts=True)
        self._decoding = captured_target(model, batch_invariance)

    def read(self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Read tokens of a single text.

        Args:
            cache: cache with buffers; it may be empty. The tokens are appended to it.
            ids (`torch.LongTensor` of shape `(1, n)`): the tokens, n ≥ 1.
            positions (`torch.LongTensor` of shape `(1, n)`): their positions.

        Returns:
            The logits of the last one, `(1, 1, V)`; `None` where there are no such passes, or the cache is of another
            kind: nothing has happened then.
        """
        wide, decoding = self._wide, self._decoding
        if wide is None or decoding is None:
            return None
        decoding.begin_cache(cache)
        if not decoding.can_run(cache, 1):
            return None
        if ids.shape[1] < PROMPT_WIDTHS[0]:
            logits = decoding.run(cache, ids, positions)
            return None if logits is None else logits[:, -1:]
        if (head := wide.head()) is not None:
            hidden = wide.run(cache, ids, positions)
            return None if hidden is None else head(hidden[:, -1:])
        # The last one is decoded like any token: its logits are the ones that count.
        if wide.run(cache, ids[:, :-1], positions[:, :-1]) is None:
            return None
        return decoding.run(cache, ids[:, -1:], positions[:, -1:])

    def read_rows(
        self,
        cache: Cache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        starts: Sequence[int],
        prefixes: RowPrefixes | None = None,
    ) -> torch.Tensor | None:
        """Read the prompts of a batch: without `prefixes` together, so that weights are read once for all of them.

        Args:
            cache: cache with buffers; it is empty.
            ids (`torch.LongTensor` of shape `(B, n)`): the prompts, padded at the left; n ≥ 1.
            positions (`torch.LongTensor` of shape `(B, n)`): their positions.
            starts: index of the first token of each row that is not padding.
            prefixes: what each row begins with if it is stored there. Rows are then read one after the other, each
                stored for the next.

        Returns:
            The logits of the last tokens, `(B, 1, V)`; `None` where there are no such passes, or the cache is of
            another kind: it is still empty then.
        """
        wide, decoding, (batch, count) = self._wide, self._decoding, ids.shape
        if wide is None or decoding is None:
            return None
        decoding.begin_cache(cache, batch)
        if not decoding.can_run(cache, 1):
            return None
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.reserve(count)
        buffers = [
            [(layer.key_buffer[row : row + 1], layer.value_buffer[row : row + 1]) for layer in layers]
            for row in range(batch)
        ]
        rows = range(batch)
        for together in [rows] if prefixes is None else [rows[row : row + 1] for row in rows]:
            unread = [
                TextPlace(row, starts[row], slot)
                for row in together
                for slot in range(_begin_row(buffers[row], ids[row, :-1], starts[row], prefixes), count - 1)
            ]
            if unread and not wide.write(cache, ids, positions, unread):
                return None
            if prefixes is not None:
                for row in together:
                    read = slice(starts[row], count - 1)
                    states = [(keys[:, :, read], values[:, :, read]) for keys, values in buffers[row]]
                    prefixes.add(ids[row, read], states)
        append_written(cache, count - 1)
        # The last ones are decoded like any token: their logits are the ones that count.
        places = [TextPlace(row, start) for row, start in enumerate(starts)]
        return decoding.run(cache, ids[:, -1:], positions[:, -1:], texts=places)


def _begin_row(
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor, start: int, prefixes: RowPrefixes | None
) -> int:
    """Fill a row's padding and the beginning of its prompt, as far as it is stored.

    Args:
        buffers: each layer's keys and values of the row, `(1, heads, slots, size)`.
        ids (`torch.LongTensor` of shape `(n,)`): the row's tokens.
        start: index of the first that is not padding.
        prefixes: as in `PromptPasses.read_rows`.

    Returns:
        Index of the first token to read.
    """
    for buffer in chain.from_iterable(buffers):
        buffer[:, :, :start] = 0  # masked numbers count in the model's own code if they are not finite
    begun, end = () if prefixes is None else prefixes.take(ids[start:]).states, start
    for own, states in zip(buffers, begun, strict=False):
        end = start + states[0].shape[2]
        for buffer, state in zip(own, states, strict=True):
            buffer[:, :, start:end] = state
    return end


def prompt_passes(model: PreTrainedModel, batch_invariance: BatchInvariance | None) -> PromptPasses | None:
    """Return passes that read prompts with the bits of decoding; `None` where decoding does not use such kernels.

    Args:
        model: the target model.
        batch_invariance: means by which decoding is batch-invariant.
    """
    if batch_invariance is None or batch_invariance.linear != NATIVE:
        return None
    return PromptPasses(model, batch_invariance)
