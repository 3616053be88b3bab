"""Quantisation of weights by JIT-compiled kernels (quantise_code.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .kernels import NAMES, flags, kernel, record, run_once

__all__ = ["quantise_int4", "quantise_int8"]

_SHARE = 1 << 15
"""Least number of weights in a work item."""


def quantise_int4(weights: Sequence[torch.Tensor], group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise concatenated weights to 4 bits as `int4_code` reads them: w ≈ q · s + z.

    The upper half of a scale's 32 bits is a bfloat16 number, and the lower half is the offset, another; the scale is
    the float32 number that all the bits form, so that a kernel needs no conversion.

    Args:
        weights: `(N_i, K)` each, floating point; N_i is a multiple of 16, K of `group`. N is their sum.
        group: number of columns that share a scale, a multiple of 32.

    Returns:
        Numbers and scales: `(N, K / 2)` uint8 and `(N / 16, K / group, 16)` float32.
    """
    rows, columns = _shape(weights)
    numbers = torch.empty((rows, columns // 2), dtype=torch.uint8, device="cpu")
    scales = torch.empty((rows // 16, columns // group, 16), dtype=torch.float32, device="cpu")
    _run("int4", group, weights, numbers, scales)
    return numbers, scales


def quantise_int8(weights: Sequence[torch.Tensor], is_packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise concatenated weights to 8 bits: w ≈ q · s, with a bfloat16 number s for each row.

    Args:
        weights: `(N_i, K)` each, floating point; K is a multiple of 16. N is the sum of N_i.
        is_packed: whether numbers are to be as `int8_code` reads them; N_i is a multiple of 16 then, K of 32.

    Returns:
        Numbers and scales: `(N, K)` int8 (packed: uint8, q + 128) and `(N,)` float32.
    """
    numbers = torch.empty(_shape(weights), dtype=torch.uint8 if is_packed else torch.int8, device="cpu")
    scales = torch.empty(len(numbers), dtype=torch.float32, device="cpu")
    _run("int8 packed" if is_packed else "int8", 0, weights, numbers, scales)
    return numbers, scales


def _shape(weights: Sequence[torch.Tensor]) -> tuple[int, int]:
    return sum(len(weight) for weight in weights), int(weights[0].shape[1])


def _run(layout: str, group: int, weights: Sequence[torch.Tensor], numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise weights one after the other, into the rows that are theirs."""
    place, rows = 0, len(numbers)
    for given in weights:
        weight = given.detach()
        weight = (weight if weight.dtype in NAMES else weight.float()).contiguous()
        count, columns = weight.shape
        places = tuple(whole.data_ptr() + place * (whole.nbytes // rows if rows else 0) for whole in (numbers, scales))
        address = kernel("quantise", layout, NAMES[weight.dtype], group)
        own = record(address, flags(max(1, weight.numel() // _SHARE), 4), 3, 0, 4, 0, 5, 0, columns)
        run_once()(ctypes.addressof(own), count, weight.data_ptr(), *places, 0, torch.get_num_threads())
        place += count
