"""Norms, gates and rotary embeddings of a few rows by JIT-compiled kernels (rows_code.py)."""

from __future__ import annotations

import ctypes

import torch

from .kernels import NAMES, bits_of, flags, kernel, record, run_once

__all__ = ["gated_silu", "rms_norm", "rotary"]


def _run(what: str, dtype: torch.dtype, rows: int, addresses: tuple[int, ...], *fields: int) -> None:
    """Run one kernel on a single thread, given its operands and the fields that follow them in the record."""
    places = (number for at in range(len(addresses)) for number in (3 + at, 0))
    own = record(kernel("rows", what, NAMES[dtype]), flags(), *places, *fields)
    run_once()(ctypes.addressof(own), rows, *(*addresses, 0, 0)[:4], 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute RMSNorm as in llama, w · (x / √(mean(x²) + ε)): the mean in float32, both products rounded to x's type.

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
    fields = (weight.data_ptr(), columns, bits_of(epsilon), 1, columns)
    _run("norm", x.dtype, x.numel() // columns, (x.data_ptr(), y.data_ptr()), *fields)
    return y


def gated_silu(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gates) · up, with silu rounded to their type.

    Args:
        gates: tensor of any shape.
        up: tensor of the same shape and type.
    """
    gates, up = gates.contiguous(), up.contiguous()
    y = torch.empty_like(gates)
    count = gates.numel()
    _run("gate", gates.dtype, 1, (gates.data_ptr(), up.data_ptr(), y.data_ptr()), count, count, count)
    return y


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute x · cos + (−x₂, x₁) · sin, x₁, x₂ being the halves of the last dimension; products and sum are rounded.

    Args:
        x: `(1, H, n, D)`, with any strides but the last.
        cos: `(1, 1, n, D)`.
        sin: same shape as cos.
    """
    _, heads, rows, size = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    cos, sin = cos.to(x.dtype).contiguous(), sin.to(x.dtype).contiguous()
    y = x.new_empty(x.shape)
    addresses = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr())
    _run("rotary", x.dtype, rows, addresses, heads, size, x.stride(2), x.stride(1))
    return y
