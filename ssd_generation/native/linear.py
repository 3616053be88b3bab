"""Linear layers of a few rows by code made for this processor (linear_code.py)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from .compiler import address_of, why_not

__all__ = ["NAMES", "Linear", "layer", "native_linear", "pack_int4", "source", "takes", "unpack_int4"]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x `(…, K)` ↦ `(…, N)`."""

NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_SHARE = 1 << 15
"""Weights that are worth a thread."""

_Run = Callable[[int, int, int, int, int], None]
_PROTOTYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
)  # which lets go of Python's lock while it runs


@functools.cache
def source(name: str) -> str:
    """What the code of a module depends on: a digest of the file that makes it and of what that is made with."""
    files = (Path(__file__).with_name(file).read_bytes() for file in ("builder.py", name))
    return hashlib.sha256(b"".join(files)).hexdigest()


@functools.cache
def _function(weight: str, activation: str, group: int) -> _Run:
    """The compiled function of a kind of layers."""

    def text() -> str:
        from .linear_code import linear_module

        return linear_module(weight, activation, group)

    described = f"{weight} {activation} {group} {source('linear_code.py')}"
    return _PROTOTYPE(address_of(f"linear-{weight}-{activation}", described, text))


def layer(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: torch.dtype,
    scales: torch.Tensor | None = None,
    group: int = 0,
) -> Linear:
    """A layer whose every row depends on that row and the layer alone, to the last bit.

    Args:
        weight: `(N, K)` of one of the three kinds of floating point numbers, or int8, or int4 packed (`(N, K / 4)`
            int16; see `linear_code`); without gaps, and read where it lies.
        bias: `(N,)`, of the activations' type, or `None`.
        activation: the type of x, which is cast where it is another, and of the result.
        scales: int8: `(N,)` float32; int4: `(N, groups)` float32.
        group: columns that share a scale under int4.

    Raises:
        RuntimeError: no code can be made here.
    """
    kind = "int4" if group else "int8" if weight.dtype is torch.int8 else NAMES[weight.dtype]
    rows, columns = weight.shape
    columns *= 4 if group else 1
    run = _function(kind, NAMES[activation], group or 32)
    held = weight, bias, scales  # as long as their addresses are used
    fields = (*(0 if tensor is None else tensor.data_ptr() for tensor in held), columns, rows)
    record = (ctypes.c_int64 * len(fields))(*fields)
    address = ctypes.addressof(record)
    most = max(1, rows * columns // _SHARE)
    threads = torch.get_num_threads

    def linear(x: torch.Tensor, _held: object = (held, record)) -> torch.Tensor:
        if x.dtype is not activation:
            x = x.to(activation)
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], rows))
        count = x.numel() // columns
        if count:
            run(address, x.data_ptr(), y.data_ptr(), count, min(threads(), most))
        return y

    return linear


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
    return layer(weight, bias, weight.dtype) if why_not() is None and takes(weight, bias) else None
