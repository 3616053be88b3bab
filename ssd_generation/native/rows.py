"""Norms, gates and rotary embeddings of a few rows by code made for this processor (rows_code.py)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from .compiler import address_of
from .linear import NAMES, source

__all__ = ["gated_silu", "rms_norm", "rotary"]

_SIGNATURES: dict[str, list[Any]] = {
    "norm": [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float],
    "gate": [ctypes.c_void_p] * 3 + [ctypes.c_int64],
    "rotary": [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 5,
}


@functools.cache
def _function(what: str, dtype: torch.dtype) -> Callable[..., None]:
    activation = NAMES[dtype]

    def text() -> str:
        from .rows_code import rows_module

        return rows_module(what, activation)

    prototype: Callable[..., Callable[..., None]] = ctypes.CFUNCTYPE(None, *_SIGNATURES[what])
    described = f"{what} {activation} {source('rows_code.py')}"
    return prototype(address_of(f"{what}-{activation}", described, text))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm as in llama, w · (x / √(mean(x²) + ε)): the mean in float32, both products rounded to the type of x.

    Args:
        x: `(…, K)`.
        weight: `(K,)`.
        epsilon: ε.
    """
    x = x.contiguous()
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    y = torch.empty_like(x)
    columns = weight.shape[0]
    _function("norm", x.dtype)(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // columns, columns, epsilon)
    return y


def gated_silu(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gates) · up, silu rounded to their type.

    Args:
        gates: of any shape.
        up: of the same shape and type.
    """
    gates, up = gates.contiguous(), up.contiguous()
    y = torch.empty_like(gates)
    _function("gate", gates.dtype)(gates.data_ptr(), up.data_ptr(), y.data_ptr(), gates.numel())
    return y


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x₁, x₂ being the halves of the last dimension, x · cos + (−x₂, x₁) · sin; every product and the sum is rounded.

    Args:
        x: `(1, H, n, D)`, of any strides but the last.
        cos: `(1, 1, n, D)`.
        sin: as cos.
    """
    _, heads, rows, size = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    cos, sin = cos.to(x.dtype).contiguous(), sin.to(x.dtype).contiguous()
    y = x.new_empty(x.shape)
    _function("rotary", x.dtype)(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows, heads, size, x.stride(2), x.stride(1)
    )
    return y
