"""Hashes of weights by a JIT-compiled kernel (block_hashes_code.py)."""

from __future__ import annotations

import ctypes

import torch

from .kernels import flags, kernel, record, run_once

__all__ = ["BLOCK", "block_hashes"]

BLOCK = 16384
"""Bytes of a block."""

_LANES = 16
_SHARE = 8
"""Least number of blocks in a work item."""


def block_hashes(numbers: torch.Tensor) -> torch.Tensor:
    """Hash the whole blocks of a tensor's bytes; bytes after the last whole block are ignored.

    Args:
        numbers (`torch.ByteTensor` of shape `(bytes,)`): contiguous, on the CPU.

    Returns:
        `(blocks, 16)` int32: each lane depends on every 32-bit word that it covers and on its place in the block.

    Raises:
        RuntimeError: no code can be compiled here.
    """
    blocks = len(numbers) // BLOCK
    hashes = torch.empty((blocks, _LANES), dtype=torch.int32, device="cpu")
    if blocks:
        own = record(kernel("block_hashes", BLOCK), flags(max(1, blocks // _SHARE), 4), 3, 0, 4, 0)
        places = numbers.data_ptr(), hashes.data_ptr()
        run_once()(ctypes.addressof(own), blocks, *places, 0, 0, torch.get_num_threads())
    return hashes
