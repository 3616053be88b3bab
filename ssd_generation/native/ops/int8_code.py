"""Code for linear layers whose weights are stored in 8 bits, w = q · s with a scale for each row of W.

As in int4_code.py sixteen rows of W lie side by side, and each 32 numbers of x are made integers of 8 bits; only for
processors that have an instruction for sums of four of their products (others: linear_code.py). A byte is q + 128, as
the instruction wants one of its factors without a sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codegen.builder import FLOAT, FLOATS
from .int4_code import Integers
from .linear_code import Layer

__all__ = ["int8_module"]


class _Bytes(Integers):
    """Of each four bytes of a row and 64 of a line, those of columns 4 j … 4 j + 3 for line j."""

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


def int8_module(activation: str) -> str:
    """The text of a module for layers in 8 bits, whose kernel is called as that of `linear_code.linear_module`.

    N is a multiple of 16 and K of `int4_code.COLUMNS`. Scales are `(N,)` float32.

    Args:
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
    """
    return _Bytes(activation, 0).build()
