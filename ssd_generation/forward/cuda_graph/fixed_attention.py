"""Attention over a cache of fixed address: slots are numbers in a tensor, and a mask hides what a token may not see."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cache.arena import Arena
from ..captured.cache_attention import attended_in_groups, attended_latents

__all__ = ["FixedAttention"]


class FixedAttention:
    """Attention that writes keys and values into slots of an arena and attends to a bucket of them.

    Shapes as in `fx_graph.Attention`, where the tokens of B rows follow each other: n = B · k. Nothing here reads a
    value on the host: slots and mask are computed from tensors. Query heads that share a key head are treated as
    further queries, so that no key is repeated.

    Args:
        arena: arena of B rows, whose buffers are read and written in place.
        bucket: number of slots that are read, from the first one on.
        slots (`torch.LongTensor` of shape `(n,)`): slots that the tokens of the pass are written into. A token sees the
            slots before its own, and its own.
        windows: number of slots that each layer sees; `None`: all.
        starts (`torch.LongTensor` of shape `(B,)`): the first slot that the tokens of each row see; `None`: slot 0.
    """

    def __init__(
        self,
        arena: Arena,
        bucket: int,
        slots: torch.Tensor,
        windows: Sequence[int | None],
        starts: torch.Tensor | None = None,
    ) -> None:
        self._keys = list(arena.keys)
        self._values = list(arena.values)
        self._bucket, self._rows = bucket, arena.rows
        self._slots, self._starts = slots, starts
        self._windows = list(windows)
        self._columns = torch.arange(bucket, device=slots.device)
        self._each = torch.arange(arena.rows, device=slots.device)[:, None]
        self._masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a pass, whose slots are others."""
        self._masks.clear()

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `(B, 1, groups · k, bucket)`, made once per pass for all layers that are alike."""
        key = (window, groups, dtype)
        if key not in self._masks:
            own = self._slots.view(self._rows, -1, 1)
            seen = self._columns <= own
            if window is not None:
                seen &= self._columns > own - window
            if self._starts is not None:
                seen &= self._columns >= self._starts[:, None, None]
            mask = torch.where(seen, 0.0, -torch.inf).to(dtype)
            self._masks[key] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[key]

    def slots(self, length: int) -> torch.Tensor:
        """Return the slots of the tokens, as in `fx_graph.Attention`."""
        return self._slots

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
        """Write keys and values into the slots and attend, as in `fx_graph.Attention`."""
        keys, values = self._written(layer, key, value)
        mask = self._mask(self._windows[layer], query.shape[1] // keys.shape[1], keys.dtype)
        return attended_in_groups(self._by_row(query), keys, values, mask, scaling, softcap, sinks).flatten(0, 1)[None]

    def attend_latents(
        self,
        query: torch.Tensor,
        query_rotated: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """Write latents and rotated keys into the slots and attend, as in `fx_graph.Attention`."""
        latents, keys = (held[0, 0] if self._rows == 1 else held for held in self._written(layer, latent, rotated))
        mask = self._mask(self._windows[layer], 1, latents.dtype)
        found = attended_latents(self._by_row(query), self._by_row(query_rotated), latents, keys, mask, scaling)
        return found.transpose(0, 1).flatten(1, 2)[None]

    def _by_row(self, given: torch.Tensor) -> torch.Tensor:
        """Return `(1, H, n, D)` as `(B, H, k, D)`."""
        return given[0].reshape(given.shape[1], self._rows, -1, given.shape[3]).transpose(0, 1)

    def _written(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values into the slots; return those of the bucket."""
        held = self._keys[layer], self._values[layer]
        for buffer, new in zip(held, (key, value), strict=True):
            if self._rows == 1:
                buffer.index_copy_(2, self._slots, new.to(buffer.dtype))
            else:
                # The indexed dimensions come first: `(B, k, G, D)`.
                new = self._by_row(new).transpose(1, 2).to(buffer.dtype)
                buffer[self._each, :, self._slots.view(self._rows, -1)] = new
        keys, values = (buffer.narrow(2, 0, self._bucket) for buffer in held)
        return keys, values
