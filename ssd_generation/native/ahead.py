"""Kernels that are compiled in a thread, while a first call does something else.

Two or three large kernels take most of the time that compiling takes: 3 seconds, once per machine. LLVM and torch
both run without Python's lock.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from .codegen.compiler import why_not
from .ops.kernels import NAMES
from .ops.linear import linear_kernel, packs_int8

__all__ = ["compile_ahead"]

_begun: set[torch.dtype] = set()

_GROUP = 32
"""Columns that share a scale in int4 copies, unless a config changes it."""


def compile_ahead(dtype: torch.dtype) -> None:
    """Begin to compile the kernels of a model's linear layers, and of their low-bit copies; once per process.

    Where no code can be compiled, nothing happens.

    Args:
        dtype: type of the model's weights.
    """
    if dtype in NAMES and dtype not in _begun:
        _begun.add(dtype)
        # Not a daemon: LLVM must not be at work when the process ends.
        threading.Thread(target=_compile, args=(dtype,), name="ssd_generation: kernels").start()


def _compile(dtype: torch.dtype) -> None:
    if why_not() is not None:
        return
    with contextlib.suppress(Exception):  # the thread that needs a kernel meets the error, too
        linear_kernel(dtype, dtype)
        linear_kernel(torch.uint8, torch.bfloat16, _GROUP)
        if dtype is torch.float32:  # in 16 bits, int8 copies take more memory than is allowed by default
            linear_kernel(torch.uint8 if packs_int8() else torch.int8, torch.bfloat16)
