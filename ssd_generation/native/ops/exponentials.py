"""Exponentials of torch's generator of a CPU by a JIT-compiled kernel (exponentials_code.py): the same numbers."""

from __future__ import annotations

import ctypes
import functools
import math
import struct

import torch

from .kernels import flags, kernel, record, run_once

__all__ = ["draw_exponentials"]

_BLOCK = 624
"""Words of the generator's state."""

_CHUNK = 4 * _BLOCK
"""Words that a thread generates before it converts any: they stay in the first-level cache."""

_WORK = _CHUNK + _BLOCK + 32

_LISTED = 64
"""Most numbers that a thread leaves to the C library; of ten million there is one."""

_STATE, _HEAD, _LEFT, _NEXT = 5056, 24, slice(8, 12), slice(16, 24)
"""Bytes of a generator's state in torch, and of what precedes its words: there are the number of words that are left,
and the index of the next one."""

_WINDOW = 32
"""Units in the last place of float64 by which two logarithms may differ, with room: each is right to two."""

_LEAST = 4096
"""Fewer numbers are drawn by torch: the call takes some 30 microseconds."""


def draw_exponentials(numbers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a tensor as `numbers.exponential_(generator=generator)` does, with the same numbers, and return it.

    On a CPU, in float32, a kernel draws them, if it was found to draw torch's; anything else is left to torch.
    """
    if not _takes(numbers, generator.device) or not _draws_as_torch():
        return numbers.exponential_(generator=generator)
    state = generator.get_state()
    after = _fill(numbers, state, _WINDOW)
    if after is None:
        return numbers.exponential_(generator=generator)
    generator.set_state(after)
    return numbers


def _takes(numbers: torch.Tensor, device: torch.device) -> bool:
    """Tell whether the kernel draws such numbers."""
    is_plain = numbers.dtype is torch.float32 and numbers.is_contiguous() and numbers.numel() >= _LEAST
    return is_plain and numbers.device.type == device.type == "cpu"


def _fill(numbers: torch.Tensor, state: torch.Tensor, window: int) -> torch.Tensor | None:
    """Fill a tensor with the numbers that follow a state; return the state after them.

    Args:
        window: distance from a middle within which the C library computes a number.

    Returns:
        `None` where too many numbers lie within that distance; those of the tensor are then not torch's.
    """
    count, threads = numbers.numel(), torch.get_num_threads()
    used = _BLOCK + 1 - int(state[_LEFT].view(torch.int32))
    after = state.clone()
    work = torch.zeros((threads, _WORK), dtype=torch.int32, device="cpu")
    lists = torch.zeros((threads, 1 + 2 * _LISTED), dtype=torch.int64, device="cpu")
    places = (numbers.data_ptr(), state.data_ptr() + _HEAD, after.data_ptr() + _HEAD, work.data_ptr(), lists.data_ptr())
    own = record(kernel("exponentials", _CHUNK, _WORK, _LISTED), flags(threads), *places, count, used, window)
    run_once()(ctypes.addressof(own), count, 0, 0, 0, 0, threads)
    flat = numbers.view(-1)
    for found, *pairs in lists.tolist():
        if found > _LISTED:
            return None
        for index, bits in zip(pairs[: 2 * found : 2], pairs[1 : 2 * found : 2], strict=True):
            rest = struct.unpack("<d", struct.pack("<q", bits))[0]
            flat[index] = -math.log1p(rest - 1.0)
    used = (used + 2 * count - 1) % _BLOCK + 1
    after[_LEFT].view(torch.int32).fill_(_BLOCK + 1 - used)
    after[_NEXT].view(torch.int64).fill_(used)
    return after


@functools.cache
def _draws_as_torch() -> bool:
    """Tell whether the kernel draws torch's numbers and leaves its state; asked once a process."""
    generator = torch.Generator("cpu").manual_seed(0x5EED)
    try:
        for count in (_LEAST + 1, 2 * _LEAST):
            state = generator.get_state()
            if len(state) != _STATE:
                return False
            expected = torch.empty(count, device="cpu").exponential_(generator=generator)
            found = torch.empty(count, device="cpu")
            after = _fill(found, state, _WINDOW)
            if after is None or not torch.equal(found, expected) or not torch.equal(after, generator.get_state()):
                return False
            # An odd number of words, which the second draw begins after.
            torch.empty(1, dtype=torch.int32, device="cpu").random_(generator=generator)
    except RuntimeError:  # no code can be compiled here
        return False
    return True
