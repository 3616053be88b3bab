"""Packed weights as torch makes and reads them, to compare with what kernels do."""

from __future__ import annotations

import torch


def pack_int8(quantised: torch.Tensor) -> torch.Tensor:
    """Pack 8-bit weights `(N, K)` int8 as `quantise_int8` does: `(N, K)` uint8."""
    rows, columns = quantised.shape
    words = quantised.view(torch.int32).view(rows // 16, 16, columns // 4).transpose(1, 2)
    return words.contiguous().view(torch.uint8).bitwise_xor_(128).view(rows, columns)  # q + 128


def pack_int4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights `(N, K)` to 4 bits as `quantise_int4` does."""
    rows, columns = weight.shape
    w = weight.float().reshape(rows, columns // group, group)
    least, greatest = w.amin(dim=2), w.amax(dim=2)
    offset = least.to(torch.bfloat16)
    step = ((greatest - offset.float()) / 15).clamp(min=1e-9).to(torch.bfloat16)
    upper, lower = (part.view(torch.int16).to(torch.int32) for part in (step, offset))
    scales = ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)
    q = (w - offset.float()[..., None]).div_(scales[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    lower, upper = q.view(rows // 16, 16, columns // 32, 2, 4, 4).unbind(3)
    packed = (lower | (upper << 4)).permute(0, 2, 3, 1, 4).reshape(rows, columns // 2)
    return packed, scales.view(rows // 16, 16, -1).transpose(1, 2).contiguous()


def unpack_int8(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a packed layer, `(N, K)` int8.

    Args:
        packed: packed weights as `quantise_int8` returns them.
    """
    rows, columns = packed.shape
    words = packed.bitwise_xor(128).view(torch.int32).view(rows // 16, columns // 4, 16).transpose(1, 2)
    return words.contiguous().view(torch.int8).view(rows, columns)


def unpack_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights that a packed layer computes with, `(N, K)` float32.

    Args:
        packed: weights as `quantise_int4` returns them.
        scales: scales as `quantise_int4` returns them.
    """
    rows = packed.shape[0]
    bytes_ = packed.view(rows // 16, -1, 4, 16, 4).permute(0, 3, 1, 2, 4)
    scales = scales.transpose(1, 2).reshape(rows, -1)
    q = torch.stack((bytes_ & 15, bytes_ >> 4), dim=3).reshape(rows, scales.shape[1], -1).float()
    offsets = (scales.view(torch.int32) << 16).view(torch.float32)
    return (q * scales[..., None] + offsets[..., None]).view(rows, -1)
