"""Attention over a cache of fixed address: slots are numbers in a tensor, and a mask hides what a token may not see."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cache.arena import Arena
from ..captured.cache_attention import attended_in_groups, attended_latents

__all__ = ["FixedAttention"]


class FixedAttention:
    """Attention that writes keys and values into slots of an arena and attends to a bucket of them.

    One row; shapes as in `fx_graph.Attention`. Nothing here reads a value on the host: slots and mask are computed from
    a tensor. Query heads that share a key head are treated as further queries, so that no key is repeated.

    Args:
        arena: arena whose buffers are read and written in place.
        bucket: number of slots that are read, from the first one on.
        slots (`torch.LongTensor` of shape `(n,)`): slots that the tokens of the pass are written into. A token sees the
            slots before its own, and its own.
        windows: number of slots that each layer sees; `None`: all.
    """

    def __init__(self, arena: Arena, bucket: int, slots: torch.Tensor, windows: Sequence[int | None]) -> None:
        self._keys = list(arena.keys)
        self._values = list(arena.values)
        self._bucket = bucket
        self._slots = slots
        self._windows = list(windows)
        self._columns = torch.arange(bucket, device=slots.device)
        self._masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a pass, whose slots are others."""
        self._masks.clear()

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `(groups · n, bucket)`, made once per pass for all layers that are alike."""
        key = (window, groups, dtype)
        if key not in self._masks:
            own = self._slots[:, None]
            seen = self._columns <= own
            if window is not None:
                seen &= self._columns > own - window
            mask = torch.where(seen, 0.0, -torch.inf).to(dtype)
            self._masks[key] = mask.repeat(groups, 1)
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
        """Write latents and rotated keys into the slots and attend, as in `fx_graph.Attention`."""
        latents, keys = (held[0, 0] for held in self._written(layer, latent, rotated))
        mask = self._mask(self._windows[layer], 1, latents.dtype)
        return attended_latents(query[0], query_rotated[0], latents, keys, mask, scaling)[None]

    def _written(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values into the slots; return those of the bucket."""
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(2, self._slots, key.to(keys.dtype))
        values.index_copy_(2, self._slots, value.to(values.dtype))
        return keys.narrow(2, 0, self._bucket), values.narrow(2, 0, self._bucket)
