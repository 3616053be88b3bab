"""Choice of the code for products of a few rows with a matrix of weights: by types and by the processor."""

from __future__ import annotations

from .products_code import Dots, Pairs, Products
from .tiles_code import Tiles

__all__ = ["linear_module", "products_of"]


def linear_module(weight: str, activation: str, registers: int, sums: str) -> str:
    """Return the text of a module for layers with these types of weights and activations.

    Its kernel's record (`builder.Task`) has the address of a layer's (`LAYER_FIELDS`) at 2, the operands x `(rows, K)`
    at 3 and y `(rows, N)` at 5, both without gaps.

    Args:
        weight: `"float32"`, `"bfloat16"`, `"float16"` or `"int8"`; for int4 see `int4_code`.
        activation: one of the first three.
        registers: number of the processor's registers of 16 numbers each, 8 or 32.
        sums: how products of bfloat16 numbers are added, as `compiler.bfloat16_sums` returns it.
    """
    return products_of(weight, activation, registers, sums).build()


def products_of(weight: str, activation: str, registers: int, sums: str) -> Products:
    """Return the functions for these types; arguments as in `linear_module`."""
    if not weight == activation == "bfloat16":
        return Products(weight, activation, registers)
    return {"pairs": Pairs, "dots": Dots, "tiles": Tiles}[sums](weight, activation, registers)
