"""Code for linear layers whose weights are stored in 8 bits, w = q · s with a scale for each row of W.

Sixteen rows of W are interleaved and each 32 numbers of x are quantised to 8-bit integers as in int4_code.py; only for
processors that have an instruction for sums of four of their products (others: products_code.py). A byte is q + 128, as
the instruction needs one unsigned factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codegen.builder import FLOAT, FLOATS
from .int4_code import Integers
from .products_code import Layer

__all__ = ["int8_module", "int8_products"]


class _Bytes(Integers):
    """8-bit weights: line j, 64 bytes, has four bytes of each row, which are those of columns 4 j … 4 j + 3."""

    name = "int8"
    bits = 8
    most_rows = 8
    least = -128
    has_offsets = False

    def scaling(self, b: Any, layer: Layer, block: Any, k: Any) -> Callable[..., Any]:
        def add(total: Any, x_scale: Any, x_sum: Any, before: Any) -> Any:
            return self.fma(b, total, self.number(b, x_scale), before)

        return add

    def factors(self, b: Any, j: int, word: Any) -> list[tuple[int, Any]]:
        return [(4 * j, word)]

    def scaled_rows(self, b: Any, layer: Layer, sums: Any, row: Any) -> Any:
        return b.fmul(sums, b.load(self.at(b, layer.scales, row, FLOAT), typ=FLOATS, align=4))


def int8_products(activation: str) -> Integers:
    """Return the functions for packed 8-bit layers with activations of a type."""
    return _Bytes(activation, 0)


def int8_module(activation: str) -> str:
    """Return the text of a module for 8-bit layers, whose kernel is called like that of `linear_code.linear_module`.

    N is a multiple of 16 and K of `int4_code.COLUMNS`. Scales are `(N,)` float32.

    Args:
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
    """
    return int8_products(activation).build()
