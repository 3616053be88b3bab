"""Norms, gated activations and rotary embeddings of a pass, each compiled once for all layers by torch's inductor.

Replaying a pass leaves nothing to the host, but the device still reads and writes memory for every small operation.
Compiled, each of these is one kernel. Compiling takes seconds for each width; torch stores the code on disk.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from ..captured.rewrites import RowFunctions

__all__ = ["fused_rows"]


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute RMSNorm as in llama, w · (x / √(mean(x²) + ε)); x is `(…, K)`, the weight `(K,)`."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def gate(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gates) · up."""
    return functional.silu(gates) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute x · cos + (−x₂, x₁) · sin, x₁ and x₂ being the halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@cache
def fused_rows() -> RowFunctions:
    """Return these functions, each compiled on its first call with tensors of a shape."""
    return RowFunctions(*(torch.compile(function, dynamic=False) for function in (norm, gate, rotary)))
