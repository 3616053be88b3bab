"""Keys and values of one text at fixed addresses, for passes that are replayed as they were recorded.

A cache is lent the arena for a call: what it holds is copied in, and its layers' buffers are the arena's from then on.
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
"""Slots that a pass reads: the next of these, so that there are few kinds of passes and none reads much for nothing."""


def bucket_of(slots: int) -> int | None:
    """The bucket for a text of so many slots; `None` where it is longer than any."""
    return next((bucket for bucket in BUCKETS if bucket >= slots), None)


class Arena:
    """Buffers for the layers of one cache at a time.

    Attributes:
        keys, values: by layer, `(1, heads, capacity, size)`.
        capacity: slots of each.
        version: another one where the addresses are others.
    """

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.capacity = 0
        self.version = 0
        self._borrower: weakref.ref[Cache] | None = None
        self._guard = threading.Lock()

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def holds(self, cache: Cache) -> bool:
        """Whether the buffers of this cache are the arena's."""
        layers: list[Any] = cache.layers
        if self._borrower is None or self._borrower() is not cache or len(layers) != len(self.keys):
            return False
        # A layer that had to grow has left for a buffer of its own.
        return all(getattr(layer, "key_buffer", None) is mine for layer, mine in zip(layers, self.keys, strict=True))

    def lend(self, cache: Cache, slots: int, expected: int = 0) -> bool:
        """Let a cache of a single text have these buffers, with room for so many slots.

        Args:
            cache: with buffers (`add_buffers`), and something in each of its layers.
            slots: at the least. Where there is less room, buffers are made anew, the next bucket's: what was recorded
                with the old ones is then of no use.
            expected: slots that the text will come to, for buffers that are made now.

        Returns:
            Whether it has them: not while another cache has, nor where it has layers of a kind of their own, or is
            longer than any bucket.
        """
        if slots <= self.capacity and self.holds(cache):
            return True
        with self._guard:
            borrower = None if self._borrower is None else self._borrower()
            if borrower is not None and borrower is not cache:
                return False
            layers: list[Any] = cache.layers
            if not layers or bucket_of(slots) is None or not all(map(_suits, layers)):
                return False
            if slots > self.capacity or not self._fits(layers):
                like = [(layer.key_buffer, layer.value_buffer) for layer in layers]
                try:
                    self._make(like, bucket_of(max(slots, expected)) or BUCKETS[-1])
                except torch.OutOfMemoryError:
                    self._make(like, bucket_of(slots) or BUCKETS[-1])
            elif borrower is None:
                # What another text left behind is multiplied by 0 where it is masked, and must be a number.
                for buffer in (*self.keys, *self.values):
                    buffer.zero_()
            for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
                if layer.key_buffer is not keys:
                    _move(layer, keys, values, at=layer.get_seq_length() - (layer.end - layer.start))
            self._borrower = weakref.ref(cache)
            return True

    def alike(self, capacity: int) -> Arena:
        """Another one, with buffers of the same kind for so many slots, which nobody has borrowed."""
        made = Arena()
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
            shape = (1, buffer.shape[1], capacity, buffer.shape[3])
            return torch.zeros(shape, dtype=buffer.dtype, device=buffer.device)

        with torch.inference_mode(False):  # written in any mode
            self.keys, self.values = [made(keys) for keys, _ in like], [made(values) for _, values in like]
        self.capacity = capacity
        self.version += 1

    def take_back(self, cache: Cache, keeps: bool = True) -> None:
        """A call is over: a cache that has these buffers gets its own again.

        Args:
            cache: any.
            keeps: whether anybody will look at what it holds.
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
        """Hold nothing any more, unless a cache has it just now."""
        with self._guard:
            if self._borrower is None or self._borrower() is None:
                self.keys, self.values, self.capacity = [], [], 0
                self.version += 1


def _move(layer: Any, keys: torch.Tensor, values: torch.Tensor, at: int) -> None:
    """Have a layer's slots in other buffers, from slot `at` on."""
    length = layer.end - layer.start
    for buffer, mine in ((layer.key_buffer, keys), (layer.value_buffer, values)):
        mine[:, :, at : at + length] = buffer[:, :, layer.start : layer.end]
    layer.key_buffer, layer.value_buffer = keys, values
    layer.start, layer.end = at, at + length


def _suits(layer: Any) -> bool:
    if type(layer) not in (BufferedLayer, BufferedSlidingLayer) or not layer.is_initialized:
        return False
    if layer.key_buffer is None or layer.key_buffer.shape[0] != 1:
        return False
    return type(layer) is BufferedSlidingLayer or layer.start == 0
