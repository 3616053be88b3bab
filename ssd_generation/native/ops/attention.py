"""Attention of a text's tokens to each other by a JIT-compiled kernel (attention_code.py), outside of a pass."""

from __future__ import annotations

import ctypes

import torch

from ..cache_table import ONE_TEXT, LayerPlace, cache_table
from ..sequence import Block, Operand, Step, make_list
from .kernels import NAMES, bits_of, flags, kernel

__all__ = ["attend_to_themselves"]


class _Cache:
    """A cache of one layer that holds the tokens of a pass."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens = keys.shape[2]
        self._table = cache_table([tokens, 0, tokens, -1], [LayerPlace(keys, values, 0, None, 0)], ONE_TEXT)

    def table(self) -> int:
        return ctypes.addressof(self._table)


def attend_to_themselves(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute the causal attention of a text's tokens.

    Args:
        query: `(1, n, H, D)` of one of the three floating point types, without gaps.
        keys: `(1, H_kv, n, D)` of the same type, without gaps.
        values: likewise.

    Returns:
        `(1, n, H, D)`.

    Raises:
        RuntimeError: no code can be compiled here.
    """
    _, tokens, heads, size = query.shape
    name = NAMES[query.dtype]
    given, cache, result = Block(tuple(query.shape), 0), Block((1,)), Block(tuple(query.shape))
    fields = [0, heads, heads // keys.shape[1], heads * size, size, bits_of(size**-0.5), bits_of(0.0), 0]
    address = kernel("attention", "attend", name, name, size, size, False, False)
    operands: list[int | Operand] = [Operand(given), Operand(result, 0, True), *fields, Operand(cache)]
    step = Step("attend", address, flags(tokens * heads, 4), operands)
    attended: torch.Tensor = make_list([step], [result], 1, tokens, query.dtype)(_Cache(keys, values), query)
    return attended
