"""Linear layers of a few rows by code made for this processor (linear_code.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .compiler import why_not
from .kernels import NAMES, kernel, record, run_once

__all__ = ["Linear", "NativeLinear", "native_linear", "pack_int4", "takes", "unpack_int4"]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x `(…, K)` ↦ `(…, N)`."""

_SHARE = 1 << 15
"""Weights that are worth a thread."""


class NativeLinear:
    """A layer whose every row depends on that row and the layer alone, to the last bit: x `(…, K)` ↦ `(…, N)`.

    Args:
        weight: `(N, K)` of one of the three kinds of floating point numbers, or int8, or int4 packed (`(N, K / 4)`
            int16; see `linear_code`); without gaps, and read where it lies.
        bias: `(N,)`, of the activations' type, or `None`.
        activation: the type of x, which is cast where it is another, and of the result.
        scales: int8: `(N,)` float32; int4: `(N, groups)` float32.
        group: columns that share a scale under int4.

    Attributes:
        activation: as given.
        columns: K.
        rows: N.

    Raises:
        RuntimeError: no code can be made here.
    """

    __slots__ = ("_address", "_kernel", "_layer", "_most", "_once", "_own", "activation", "columns", "held", "rows")

    __name__ = "linear"  # in the code of a pass

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: torch.dtype,
        scales: torch.Tensor | None = None,
        group: int = 0,
    ) -> None:
        kind = "int4" if group else "int8" if weight.dtype is torch.int8 else NAMES[weight.dtype]
        self.activation = activation
        self.rows, columns = weight.shape
        self.columns = columns * 4 if group else columns
        tensors = weight, bias, scales
        fields = (*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), self.columns, self.rows)
        self._layer = (ctypes.c_int64 * len(fields))(*fields)
        self.held = *tensors, self._layer  # as long as their addresses are used
        self._most = max(1, self.rows * self.columns // _SHARE)
        self._kernel = kernel("linear", kind, NAMES[activation], group or 32)
        address, layer, most = self.parts()
        self._own = record(address, layer, 3, 0, 4, 0, most)
        self._address = ctypes.addressof(self._own)
        self._once = run_once()

    def parts(self) -> tuple[int, int, int]:
        """What a record of its kernel is made of beside the operands: the kernel, the layer, how many threads."""
        return self._kernel, ctypes.addressof(self._layer), self._most

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        if x.dtype is not self.activation:
            x = x.to(self.activation)
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.rows))
        count = x.numel() // self.columns
        if count:
            threads = min(torch.get_num_threads(), self._most)
            self._once(self._address, count, x.data_ptr(), y.data_ptr(), 0, 0, threads)
        return y


def pack_int4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in 4 bits as `layer` reads them: w ≈ q · s + z.

    The upper half of a scale's 32 bits is a bfloat16 number and the lower half the offset, another; the scale is what
    all of them are as a float32 number, so that a kernel takes it as it lies.

    Args:
        weight: `(N, K)` float32; K is a multiple of 64 and of `group`.
        group: columns that share a scale.

    Returns:
        `(N, K / 4)` int16, in which digit j of number 16 b + l is that of column 64 b + 16 j + l; and the scales,
        `(N, K / group)` float32.
    """
    rows, columns = weight.shape
    w = weight.reshape(rows, columns // group, group)
    least, greatest = w.amin(dim=2), w.amax(dim=2)
    offset = least.to(torch.bfloat16)
    step = ((greatest - offset.float()) / 15).clamp(min=1e-9).to(torch.bfloat16)
    upper, lower = (part.view(torch.int16).to(torch.int32) for part in (step, offset))
    scales = ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)
    q = (w - offset.float()[..., None]).div_(scales[..., None]).round_().clamp_(0, 15).to(torch.int32)
    digits = q.view(rows, columns // 64, 4, 16)
    digits <<= torch.arange(0, 16, 4, dtype=torch.int32)[:, None]
    return digits.sum(dim=2, dtype=torch.int32).to(torch.int16).view(rows, columns // 4), scales


def unpack_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights that a packed layer computes with, `(N, K)` float32.

    Args:
        packed: as of `pack_int4`.
        scales: as of `pack_int4`.
    """
    rows, groups = scales.shape
    numbers = packed.to(torch.int32).view(rows, -1, 1, 16) >> torch.arange(0, 16, 4, dtype=torch.int32)[:, None]
    q = (numbers & 15).view(rows, groups, -1).float()
    offsets = (scales.view(torch.int32) << 16).view(torch.float32)
    return (q * scales[..., None] + offsets[..., None]).view(rows, -1)


def takes(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether there is code for a layer of these floating point weights, whatever the processor."""
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
    """A layer of floating point weights by code made here; `None` where there is none for it."""
    return NativeLinear(weight, bias, weight.dtype) if why_not() is None and takes(weight, bias) else None
