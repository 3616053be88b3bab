"""What code made here knows of a KV cache: a table of numbers, whose layout is set down here.

The table begins with `HEADER`, goes on with the `FIELDS` of each layer, and ends with the `TEXT_FIELDS` of each text
of the pass. Nothing here needs llvmlite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["FIELDS", "HEADER", "ONE_TEXT", "TEXT_FIELDS", "LayerPlace", "TextPlace", "cache_table"]

HEADER = ("tokens", "ahead", "tokens per text", "texts")
"""Tokens of the pass; tokens of each text before them that the layers' ends do not count; tokens of the pass that each
text has; and the place in the table where the texts' fields begin."""

FIELDS = ("keys", "values", "key head", "value head", "end", "window", "key row", "value row", "dropped")
"""Of a layer: addresses; numbers from a head to the next; the first free slot; tokens that a token sees, 0 for all;
numbers from a row of the cache to the next; and how many slots of a text are no longer in the layer."""

TEXT_FIELDS = ("row", "start")


class TextPlace(NamedTuple):
    """Where a text is in the cache.

    Attributes:
        row: of the cache.
        start: the first slot that it sees; the slots before are padding.
    """

    row: int
    start: int


ONE_TEXT = (TextPlace(0, 0),)
"""A single text, in a cache of one row."""


class LayerPlace(NamedTuple):
    """Where keys and values of a layer are.

    Attributes:
        keys, values: buffers `(rows, heads, slots, size)`, the slots of a head without gaps; `None`: the pass has no
            attention in this layer.
        end: the first free slot.
        window: tokens that a token sees; `None`: all.
        dropped: slots of each text that are no longer in the layer.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None
    end: int
    window: int | None
    dropped: int

    def fields(self) -> list[int]:
        """As `FIELDS`."""
        if self.keys is None or self.values is None:
            return [0] * len(FIELDS)
        states = self.keys, self.values
        return [
            *(x.data_ptr() for x in states),
            *(x.stride(1) for x in states),
            self.end,
            self.window or 0,
            *(x.stride(0) for x in states),
            self.dropped,
        ]


def cache_table(counts: Sequence[int], layers: Sequence[LayerPlace], texts: Sequence[TextPlace]) -> Any:
    """The table, as an array of 64-bit numbers.

    Args:
        counts: the numbers of the header but the last.
        layers: of the cache.
        texts: of the pass.
    """
    fields = [number for layer in layers for number in layer.fields()]
    numbers = [*counts, len(HEADER) + len(fields), *fields, *(number for text in texts for number in text)]
    return (ctypes.c_int64 * len(numbers))(*numbers)
