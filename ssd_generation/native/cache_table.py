"""Description of a KV cache for JIT-compiled kernels: a table of numbers, whose layout is defined here.

The table consists of `HEADER`, then the `FIELDS` of each layer, then the `TEXT_FIELDS` of each text of the pass, then
the addresses of recurrent states.
Nothing here needs llvmlite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["FIELDS", "HEADER", "ONE_TEXT", "STATE_FIELDS", "TEXT_FIELDS", "LayerPlace", "TextPlace", "cache_table"]

HEADER = ("tokens", "ahead", "tokens per text", "saved after", "texts")
"""Number of tokens of the pass; number of tokens of each text before them that the layers' ends do not count; number of
tokens of the pass per text; tokens of each text after which states are saved, -1 for never; and the index in the table
at which the texts' fields begin."""

FIELDS = ("keys", "values", "key head", "value head", "end", "window", "key row", "value row", "dropped", "states")
"""Fields of a layer: addresses; strides from a head to the next, in numbers; the first free slot; tokens that a token
sees, 0 for all, or less than 0: minus the size of the chunks of a text, of which it sees its own; strides from a row of
the cache to the next; number of slots of a text no longer in the layer; and the index in the table at which the
addresses of its states begin, three for each (`STATE_FIELDS`)."""

STATE_FIELDS = ("source", "working", "saved")
"""Addresses of a state before the pass, of the one that it leaves, and of the one that it saves, 0 for none."""

TEXT_FIELDS = ("row", "start", "before")


class TextPlace(NamedTuple):
    """Place of a text in the cache.

    Attributes:
        row: row of the cache.
        start: the first slot that the text sees; the slots before are padding.
        before: slots between the end of the layer and the first of these tokens: the tokens of the same text before it
            in the pass, where texts are divided into single tokens, less those by which its row lags others.
    """

    row: int
    start: int
    before: int = 0


ONE_TEXT = (TextPlace(0, 0),)
"""A single text, in a cache of one row."""


class LayerPlace(NamedTuple):
    """Place of a layer's keys and values.

    Attributes:
        keys, values: buffers `(rows, heads, slots, size)`, the slots of a head without gaps; `None`: the pass has no
            attention in this layer.
        end: the first free slot.
        window: tokens that a token sees, or minus the size of chunks; `None`: all.
        dropped: slots of each text that are no longer in the layer.
        states: `STATE_FIELDS` of each recurrent state of the layer, as tensors `(rows, …)` without gaps.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None
    end: int
    window: int | None
    dropped: int
    states: Sequence[Sequence[torch.Tensor | None]] = ()

    def fields(self, first: int) -> list[int]:
        """Return the layer's `FIELDS`.

        Args:
            first: index in the table at which the addresses of its states begin.
        """
        if self.keys is None or self.values is None:
            return [*[0] * (len(FIELDS) - 1), first]
        states = self.keys, self.values
        return [
            *(x.data_ptr() for x in states),
            *(x.stride(1) for x in states),
            self.end,
            self.window or 0,
            *(x.stride(0) for x in states),
            self.dropped,
            first,
        ]


def cache_table(counts: Sequence[int], layers: Sequence[LayerPlace], texts: Sequence[TextPlace]) -> Any:
    """Return the table, as an array of 64-bit numbers.

    Args:
        counts: the numbers of the header but the last.
        layers: layers of the cache.
        texts: texts of the pass.
    """
    of_texts = len(HEADER) + len(FIELDS) * len(layers)
    at = of_texts + len(TEXT_FIELDS) * len(texts)
    fields: list[int] = []
    states: list[int] = []
    for layer in layers:
        fields += layer.fields(at + len(states))
        states += [0 if one is None else one.data_ptr() for state in layer.states for one in state]
    numbers = [*counts, of_texts, *fields, *(number for text in texts for number in text), *states]
    return (ctypes.c_int64 * len(numbers))(*numbers)
