"""Linear layers of a few rows by JIT-compiled kernels (products_code.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ..codegen.compiler import bfloat16_sums, integer_products, registers, why_not
from .kernels import NAMES, flags, kernel, record, run_once

__all__ = [
    "Linear",
    "NativeLinear",
    "can_pack_int8",
    "linear_kernel",
    "native_linear",
    "packs_int8",
    "takes",
]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x `(…, K)` ↦ `(…, N)`."""

_SHARE = 1 << 15
"""Least number of weights in a work item."""

_WIDEST_INT8 = 29_696
"""Number of columns up to which eight prepared rows of x fit on any thread's stack."""


class NativeLinear:
    """A batch-invariant layer, each of whose rows depends on that row and the layer alone: x `(…, K)` ↦ `(…, N)`.

    Args:
        weight: `(N, K)` of one of the three floating point types, or int8, or packed as in quantise.py: in 8 bits
            (`(N, K)` uint8), in 4 (`(N, K / 2)` uint8); without gaps, and read in place.
        bias: `(N,)`, of the activations' type, or `None`.
        activation: type of x, which is cast where it is another, and of the result.
        scales: int8: `(N,)` float32; int4: `(N / 16, groups, 16)` float32.
        group: number of columns that share a scale under int4.

    Attributes:
        activation: as given.
        columns: K.
        rows: N.

    Raises:
        RuntimeError: no code can be compiled here.
    """

    __slots__ = (
        "_address",
        "_kernel",
        "_layer",
        "_most",
        "_once",
        "_own",
        "_per_thread",
        "activation",
        "columns",
        "held",
        "rows",
    )

    __name__ = "linear"  # in the generated code of a pass

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: torch.dtype,
        scales: torch.Tensor | None = None,
        group: int = 0,
    ) -> None:
        self.activation = activation
        self.rows, columns = weight.shape
        self.columns = columns * 2 if group else columns
        # Aliases: a parameter's own memory is freed when a thread replaces it, even while a kernel reads it.
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in (weight, bias, scales))
        fields = (*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), self.columns, self.rows)
        self._layer = (ctypes.c_int64 * len(fields))(*fields)
        self.held: tuple[Any, ...] = (*tensors, self._layer)  # for as long as their addresses are used
        self._most = max(1, self.rows * self.columns // _SHARE)
        self._per_thread = 2 if weight.dtype is torch.uint8 else 4  # packed: each item prepares x first
        self._kernel = linear_kernel(weight.dtype, activation, group)
        address, how, layer = self.parts()
        self._own = record(address, how, layer, 3, 0, 4, 0)
        self._address = ctypes.addressof(self._own)
        self._once = run_once()

    def parts(self) -> tuple[int, int, int]:
        """Return the parts of a record besides operands: the kernel, how it is run, and the layer."""
        return self._kernel, flags(self._most, self._per_thread), ctypes.addressof(self._layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output."""
        if x.dtype is not self.activation:
            x = x.to(self.activation)
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.rows))
        count = x.numel() // self.columns
        if count:
            threads = min(torch.get_num_threads(), self._most)
            self._once(self._address, count, x.data_ptr(), y.data_ptr(), 0, 0, threads)
        return y


def linear_kernel(stored: torch.dtype, activation: torch.dtype, group: int = 0) -> int:
    """Return the address of the kernel of linear layers, with arguments as in `NativeLinear`.

    Args:
        stored: type of the weight; `torch.uint8` where it is packed.
        activation: type of inputs and outputs.
        group: number of columns that share a scale under int4.

    Raises:
        RuntimeError: no code can be compiled here.
    """
    if group:
        return kernel("int4", NAMES[activation], group, integer_products())
    if stored is torch.uint8:
        return kernel("int8", NAMES[activation])
    name = "int8" if stored is torch.int8 else NAMES[stored]
    return kernel("linear", name, NAMES[activation], registers(), bfloat16_sums())


def packs_int8() -> bool:
    """Tell whether the kernel for packed 8-bit layers runs on this processor."""
    return integer_products() == "avx512"


def can_pack_int8(rows: int, columns: int) -> bool:
    """Tell whether there is a kernel here for a packed 8-bit layer of this shape."""
    return packs_int8() and rows % 16 == 0 and columns % 32 == 0 and columns <= _WIDEST_INT8


def takes(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Tell whether there is a kernel for a layer of these floating point weights, whatever the processor."""
    tensors = (weight,) if bias is None else (weight, bias)
    return (
        weight.ndim == 2
        and weight.numel() > 0
        and weight.dtype in NAMES
        and all(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.device.type == "cpu"
            and tensor.dtype is weight.dtype
            and tensor.is_contiguous()
            for tensor in tensors
        )
    )


def native_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
    """Build a layer of floating point weights with a JIT-compiled kernel; `None` where there is none for it.

    Args:
        weight: as in `NativeLinear`.
        bias: as there.
    """
    return NativeLinear(weight, bias, weight.dtype) if why_not() is None and takes(weight, bias) else None
