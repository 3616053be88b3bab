"""int4 weights on a GPU: ATen's kernel for CUDA, which has a layout of its own."""

from __future__ import annotations

import torch

__all__ = ["linear_int4", "pack_int4", "why_not_int4"]

_TILES = (8, 4, 2)
"""Groups of 16 input channels that the kernel reads at once, the best number first."""


def why_not_int4(rows: int, columns: int) -> str | None:
    """Return why the kernel does not take a weight of shape `(rows, columns)`; `None` if it does."""
    if columns % (16 * _TILES[-1]):
        return f"its {columns} input channels are not a multiple of {16 * _TILES[-1]}"
    return f"its {rows} output channels are not a multiple of 8" if rows % 8 else None


def pack_int4(quantised: torch.Tensor) -> torch.Tensor:
    """Pack quantised weights into the layout of the kernel.

    Args:
        quantised (`torch.IntTensor` of shape `(N, K)`): numbers from 0 to 15.
    """
    tiles = next(tiles for tiles in _TILES if quantised.shape[1] % (16 * tiles) == 0)
    # The first of two columns is in the upper half of a byte.
    both = (quantised[:, ::2] << 4 | quantised[:, 1::2]).to(torch.uint8)
    return torch._convert_weight_to_int4pack(both, tiles)


def linear_int4(x: torch.Tensor, weight: torch.Tensor, group_size: int, scales: torch.Tensor) -> torch.Tensor:
    """Compute x · Wᵀ.

    Args:
        x (`torch.BFloat16Tensor` of shape `(n, K)`): the activations.
        weight: result of `pack_int4`.
        group_size: input channels that share a scale and an offset.
        scales (`torch.BFloat16Tensor` of shape `(K / group_size, N, 2)`): scales and offsets; w is (q − 8) · s + z.

    Returns:
        `(n, N)` in bfloat16.
    """
    return torch._weight_int4pack_mm(x, weight, group_size, scales)
