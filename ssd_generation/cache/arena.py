"""Keys and values of one text or batch at fixed addresses, for passes that are replayed as CUDA graphs.

A cache is lent the arena for a call: its contents are copied in, and its layers' buffers are the arena's from then on.
They append, crop and give views as they always do, so that any other pass works on them too. A layer with a sliding
window has slots for the whole text here, each at the number of its token.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from .buffered_layers import BufferedLayer, BufferedSlidingLayer

__all__ = ["BUCKETS", "Arena", "bucket_of"]

BUCKETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Numbers of slots that passes read, rounded up to: there are few kinds of passes, and none reads many unused slots."""


def bucket_of(slots: int) -> int | None:
    """Return the bucket for a text of `slots` slots; `None` where it is longer than any."""
    return next((bucket for bucket in BUCKETS if bucket >= slots), None)


class Arena:
    """Buffers for the layers of one cache at a time.

    Args:
        rows: number of rows of the cache, B.

    Attributes:
        keys, values: buffers by layer, `(B, heads, capacity, size)`.
        capacity: number of slots of each buffer.
        version: number that changes with the addresses.
    """

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.capacity = 0
        self.version = 0
        self._borrower: weakref.ref[Cache] | None = None
        self._guard = threading.Lock()

    @property
    def bytes(self) -> int:
        """Size of the buffers in bytes."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def holds(self, cache: Cache) -> bool:
        """Tell whether the buffers of this cache are the arena's."""
        layers: list[Any] = cache.layers
        if self._borrower is None or self._borrower() is not cache or len(layers) != len(self.keys):
            return False
        # A layer that had to grow has moved to a separate buffer.
        return all(getattr(layer, "key_buffer", None) is mine for layer, mine in zip(layers, self.keys, strict=True))

    def lend(self, cache: Cache, slots: int, expected: int = 0) -> bool:
        """Back a cache by these buffers, at least `slots` long.

        Args:
            cache: cache with buffers (`add_buffers`), and something in each of its layers.
            slots: smallest number of slots. Where there is less room, new buffers of the next bucket are made: graphs
                captured with the old ones are then of no use.
            expected: number of slots that the text will reach, for new buffers.

        Returns:
            Whether the cache has the buffers: not while another cache has them, nor where its layers are of another
            kind, it has another number of rows, or it is longer than any bucket.
        """
        if slots <= self.capacity and self.holds(cache):
            return True
        with self._guard:
            borrower = None if self._borrower is None else self._borrower()
            if borrower is not None and borrower is not cache:
                return False
            layers: list[Any] = cache.layers
            if not layers or bucket_of(slots) is None or not all(_suits(layer, self.rows) for layer in layers):
                return False
            if slots > self.capacity or not self._fits(layers):
                like = [(layer.key_buffer, layer.value_buffer) for layer in layers]
                try:
                    self._make(like, bucket_of(max(slots, expected)) or BUCKETS[-1])
                except torch.OutOfMemoryError:
                    self._make(like, bucket_of(slots) or BUCKETS[-1])
            elif borrower is None:
                # Leftovers of another text are multiplied by 0 where they are masked, and must be numbers.
                for buffer in (*self.keys, *self.values):
                    buffer.zero_()
            for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
                if layer.key_buffer is not keys:
                    _move(layer, keys, values, at=layer.get_seq_length() - (layer.end - layer.start))
            self._borrower = weakref.ref(cache)
            return True

    def alike(self, capacity: int) -> Arena:
        """Return another arena, with buffers of the same kind for `capacity` slots, which is not lent."""
        made = Arena(self.rows)
        made._make(list(zip(self.keys, self.values, strict=True)), capacity)
        return made

    def _fits(self, layers: Sequence[Any]) -> bool:
        return len(layers) == len(self.keys) and all(
            mine.shape[1] == buffer.shape[1]
            and mine.shape[3] == buffer.shape[3]
            and mine.dtype is buffer.dtype
            and mine.device == buffer.device
            for layer, *own in zip(layers, self.keys, self.values, strict=True)
            for mine, buffer in zip(own, (layer.key_buffer, layer.value_buffer), strict=True)
        )

    def _make(self, like: Sequence[tuple[torch.Tensor, torch.Tensor]], capacity: int) -> None:
        def made(buffer: torch.Tensor) -> torch.Tensor:
            shape = (self.rows, buffer.shape[1], capacity, buffer.shape[3])
            return torch.zeros(shape, dtype=buffer.dtype, device=buffer.device)

        with torch.inference_mode(False):  # buffers that can be written in any mode
            self.keys, self.values = [made(keys) for keys, _ in like], [made(values) for _, values in like]
        self.capacity = capacity
        self.version += 1

    def take_back(self, cache: Cache, keeps: bool = True) -> None:
        """Give a cache that has these buffers separate ones again, at the end of a call.

        Args:
            cache: any cache.
            keeps: whether its contents are still needed.
        """
        layers: list[Any] = cache.layers
        if self._borrower is None or self._borrower() is not cache:
            return
        for layer, mine in zip(layers, self.keys, strict=False):
            if getattr(layer, "key_buffer", None) is mine:
                end = layer.end if keeps else layer.start
                own = [buffer[:, :, layer.start : end].clone() for buffer in (layer.key_buffer, layer.value_buffer)]
                layer.key_buffer, layer.value_buffer = own
                layer.start, layer.end = 0, end - layer.start
        self._borrower = None

    def free(self) -> None:
        """Free the buffers, unless they are lent to a cache."""
        with self._guard:
            if self._borrower is None or self._borrower() is None:
                self.keys, self.values, self.capacity = [], [], 0
                self.version += 1


def _move(layer: Any, keys: torch.Tensor, values: torch.Tensor, at: int) -> None:
    """Move a layer's slots into other buffers, from slot `at` on."""
    length = layer.end - layer.start
    for buffer, mine in ((layer.key_buffer, keys), (layer.value_buffer, values)):
        mine[:, :, at : at + length] = buffer[:, :, layer.start : layer.end]
    layer.key_buffer, layer.value_buffer = keys, values
    layer.start, layer.end = at, at + length


def _suits(layer: Any, rows: int) -> bool:
    if type(layer) not in (BufferedLayer, BufferedSlidingLayer) or not layer.is_initialized:
        return False
    if layer.key_buffer is None or layer.key_buffer.shape[0] != rows:
        return False
    return type(layer) is BufferedSlidingLayer or layer.start == 0
