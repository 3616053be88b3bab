"""Attention of captured passes, in place on a KV cache with spare slots."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from ...cache.buffered_layers import BufferedLayer, BufferedStatesLayer
from ...cache.recurrent import PassStates, has_no_keys
from ...native.cache_table import ONE_TEXT, LayerPlace, TextPlace, cache_table

__all__ = ["CacheAttention", "attended", "attended_in_groups", "attended_latents", "live_layers"]


_NO_STATES = PassStates([])


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute softmax(q Kᵀ · scale + mask) V by torch.

    Args:
        query: `(B, G, n, D)`: queries that share keys are further queries.
        keys: `(B, G, slots, D)`.
        values: `(B, G, slots, D)`.
        mask: additive mask, `(n, slots)` or `(B, 1, n, slots)`, or `None`.
        scaling: the scale.
        softcap: limit of the scores, as in `fx_graph.Attention`.
        sinks: score of each query's sink, `(G, n)`.
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[None, :, :, None].expand(len(scores), -1, -1, -1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)


def attended_in_groups(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the attention of queries `(B, H, n, D)`, several heads of which may share keys; others as in `attended`.

    Args:
        query: the queries.
        keys: `(B, G, slots, D)`.
        values: `(B, G, slots, D)`.
        mask: additive mask, `(H / G · n, slots)` or `(B, 1, H / G · n, slots)`, or `None`.
        scaling: the scale.
        softcap: limit of the scores.
        sinks: score of each head's sink, `(H,)`.

    Returns:
        `(B, n, H, D)`, without gaps.
    """
    (rows, heads, count, _), kv_heads = query.shape, keys.shape[1]
    if sinks is not None:
        sinks = sinks.repeat_interleave(count).view(kv_heads, -1)
    query = query.to(keys.dtype).reshape(rows, kv_heads, heads // kv_heads * count, -1)
    result = attended(query, keys, values, mask, scaling, softcap, sinks)
    return result.reshape(rows, heads, count, -1).transpose(1, 2).contiguous()


def attended_latents(
    query: torch.Tensor,
    query_rotated: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Compute sums of latents, weighted by attention, by torch.

    Args:
        query: `(…, H, n, R)`; all arguments may have further dimensions at their left, which are broadcast.
        query_rotated: `(…, H, n, D)`.
        latents: `(…, slots, R)`.
        rotated: `(…, slots, D)`.
        mask: additive mask `(…, n, slots)`, or `None`.
        scaling: the scale.

    Returns:
        `(…, H, n, R)`.
    """
    scores = torch.matmul(query.to(latents.dtype), latents.mT)
    scores = scores + torch.matmul(query_rotated.to(rotated.dtype), rotated.mT)
    scores = scores.float() * scaling
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(latents.dtype), latents)


class CacheAttention:
    """Attention that writes keys and values into the spare slots of a cache and attends to all before them.

    Shapes as in `fx_graph.Attention`. Query heads that share a key head are treated as further queries, so that no key
    is repeated. `attend` handles a single text; JIT-compiled kernels, which read `table`, handle several as well: their
    tokens follow each other in the pass.
    """

    __slots__ = (
        "_begun", "_dropped", "_table", "at", "count", "ends", "key_buffers", "mask", "states", "texts",
        "value_buffers", "windows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.mask: dict[Any, torch.Tensor] = {}
        self._table: Any = None

    def begin(
        self,
        layers: Sequence[Any],
        at: int,
        count: int,
        texts: Sequence[TextPlace] = ONE_TEXT,
        states: PassStates | None = None,
    ) -> None:
        """Begin a pass over some tokens, for which the buffers must be large enough.

        Args:
            layers: layers of the cache.
            at: the slot of the first token of each text.
            count: tokens of each text.
            texts: places of the texts in the cache.
            states: recurrent states of the pass, where these are others than those of the layers.
        """
        self.texts = texts
        self.states = PassStates.of(layers) if states is None else states
        ends = [getattr(layer, "end", 0) for layer in layers]
        self._dropped = [
            getattr(layer, "cumulative_length", end) - end for layer, end in zip(layers, ends, strict=True)
        ]
        self.key_buffers: list[Any] = [getattr(layer, "key_buffer", None) for layer in layers]
        self.value_buffers: list[Any] = [getattr(layer, "value_buffer", None) for layer in layers]
        self.ends, self.windows = self._ends_and_windows(layers, at)
        self._table, self._begun = None, at
        self._stand_at(at, count)

    def _ends_and_windows(self, layers: Sequence[Any], at: int) -> tuple[list[int], list[int | None]]:
        """Return, by layer, the slot of the first token, and the window, as in `LayerPlace`."""
        return [at] * len(layers), [None] * len(layers)

    def move_to(self, at: int, count: int) -> None:
        """Continue with `count` tokens of each text, the first of them at slot `at`."""
        self._stand_at(at, count)
        if any(self.states.layers):
            self.states, self._table = self.states.go_on(), None

    def _stand_at(self, at: int, count: int) -> None:
        self.at, self.count = at, count
        self.mask.clear()
        if self._table is not None:
            self._table[:4] = self._counts()

    def _counts(self) -> list[int]:
        """Return the numbers of the table's header that depend on the pass."""
        return [self.count * len(self.texts), self.at - self._begun, self.count, self.states.saved_after]

    def table(self) -> int:
        """Return the address of the table of the cache that JIT-compiled kernels read (native/cache_table.py)."""
        if self._table is None:
            places = self.key_buffers, self.value_buffers, self.ends, self.windows, self._dropped, self.states.layers
            layers = zip(*places, strict=True)
            self._table = cache_table(self._counts(), [LayerPlace(*layer) for layer in layers], self.texts)
        return ctypes.addressof(self._table)

    def slots(self, length: int) -> torch.Tensor:
        """Return the slot of each token, counted from the beginning of its text's row."""
        dropped = next((d for d, keys in zip(self._dropped, self.key_buffers, strict=True) if keys is not None), 0)
        first = self.at + dropped
        own = torch.arange(first, first + self.count, device="cpu").repeat(len(self.texts))
        if any(text.before for text in self.texts):
            own += torch.tensor([text.before for text in self.texts], device="cpu").repeat_interleave(self.count)
        return functional.pad(own, (0, length - len(own)))

    def let_go(self) -> None:
        """Release all tensors of a cache, which may be about to grow, or to be dropped."""
        self.key_buffers = self.value_buffers = []
        self.states, self._table = _NO_STATES, None
        self.mask.clear()

    def _mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `(groups · n, slots)`: token i sees the slots before it and its own."""
        known = self.mask.get((groups, dtype))
        if known is None:
            shape = self.count, self.at + self.count
            known = torch.full(shape, float("-inf"), dtype=dtype, device="cpu").triu_(self.at + 1)
            known = self.mask[groups, dtype] = known.repeat(groups, 1)
        return known

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        at, count = self.at, self.count
        key_buffer, value_buffer = self.key_buffers[layer], self.value_buffers[layer]
        key_buffer.narrow(2, at, count).copy_(key)
        value_buffer.narrow(2, at, count).copy_(value)
        keys, values = key_buffer.narrow(2, 0, at + count), value_buffer.narrow(2, 0, at + count)
        mask = None if count == 1 else self._mask(query.shape[1] // keys.shape[1], keys.dtype)
        return attended_in_groups(query, keys, values, mask, scaling, softcap, sinks)

    def attend_latents(
        self,
        query: torch.Tensor,
        query_rotated: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        at, count, width = self.at, self.count, query.shape[2]
        held = self.key_buffers[layer], self.value_buffers[layer]
        for buffer, given in zip(held, (latent, rotated), strict=True):
            buffer.narrow(2, at, count).copy_(given[:, :, :count])
        rows = []
        for place in range(count):  # each token by itself, so that its bits depend on nothing else in the pass
            own, seen = slice(place, place + 1), at + place + 1
            latents, keys = (buffer[0, 0, :seen] for buffer in held)
            rows.append(attended_latents(query[0, :, own], query_rotated[0, :, own], latents, keys, None, scaling))
        rows += rows[-1:] * (width - count)
        return torch.cat(rows, dim=1)[None]


def live_layers(cache: Cache, skipped: frozenset[int]) -> list[BufferedLayer] | None:
    """Return the layers whose keys and values a pass writes, or `None` where one is not of the plain kind."""
    live = [layer for index, layer in enumerate(cache.layers) if index not in skipped and not has_no_keys(layer)]
    plain = BufferedLayer, BufferedStatesLayer
    if any(type(layer) not in plain or not layer.is_initialized or layer.start != 0 for layer in live):
        return None
    return live
