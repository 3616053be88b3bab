"""Linear layers of a few rows by code made for this processor (linear_code.py)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from .compiler import address_of, why_not

__all__ = ["layer", "native_linear", "takes"]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x `(…, K)` ↦ `(…, N)`."""

_NAMES = {
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
def _source() -> str:
    return hashlib.sha256(Path(__file__).with_name("linear_code.py").read_bytes()).hexdigest()


@functools.cache
def _function(weight: str, activation: str, group: int) -> _Run:
    """The compiled function of a kind of layers."""

    def text() -> str:
        from .linear_code import linear_module

        return linear_module(weight, activation, group)

    described = f"{weight} {activation} {group} {_source()}"
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
    kind = "int4" if group else "int8" if weight.dtype is torch.int8 else _NAMES[weight.dtype]
    rows, columns = weight.shape
    columns *= 4 if group else 1
    run = _function(kind, _NAMES[activation], group or 32)
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


def takes(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether there is code for a layer of these floating point weights, whatever the processor."""
    tensors = (weight,) if bias is None else (weight, bias)
    return (
        weight.ndim == 2
        and weight.numel() > 0
        and weight.dtype in _NAMES
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
