"""Unpacking of packed weights: the numbers that the low-bit kernels compute with."""

from __future__ import annotations

import torch


def unpack_int8(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a packed layer, `(N, K)` int8.

    Args:
        packed: weights as `pack_int8` returns them.
    """
    rows, columns = packed.shape
    words = packed.bitwise_xor(128).view(torch.int32).view(rows // 16, columns // 4, 16).transpose(1, 2)
    return words.contiguous().view(torch.int8).view(rows, columns)


def unpack_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights that a packed layer computes with, `(N, K)` float32.

    Args:
        packed: weights as `pack_int4` returns them.
        scales: scales as `pack_int4` returns them.
    """
    rows = packed.shape[0]
    bytes_ = packed.view(rows // 16, -1, 4, 16, 4).permute(0, 3, 1, 2, 4)
    scales = scales.transpose(1, 2).reshape(rows, -1)
    q = torch.stack((bytes_ & 15, bytes_ >> 4), dim=3).reshape(rows, scales.shape[1], -1).float()
    offsets = (scales.view(torch.int32) << 16).view(torch.float32)
    return (q * scales[..., None] + offsets[..., None]).view(rows, -1)
