"""The pass over a prompt: the model's own code, with faster kernels for large linear layers, experts and scans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import SkipConfig
from ...support.machine import is_intel
from ...support.structure import modules_of
from ..captured.conditions import why_not_captured
from ..captured.linear_kernels import linear_of_few_rows, onednn_takes
from ..structure.expert_layers import computes_all_experts, form_of, has_experts
from ..structure.skip_mode import SkipMode
from .few_rows import forward_of_experts
from .prompt_scans import prompt_scans

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["prompt_mode"]

_MANY_ROWS = 256
_LARGE = 2**21

_PER_EXPERT = 32
"""Tokens per expert up to which the JIT-compiled kernels are ahead of torch's grouped products."""


def prompt_mode(model: PreTrainedModel, rows: int, own_kernels: bool = False) -> AbstractContextManager[Any]:
    """Return a mode in which large linear layers, experts and scans run by the faster kernel for a prompt.

    In half precision there is none, and a prompt's pass has the bits of the model's own, with two exceptions: experts
    stored by input where torch has no fast product of the type, and takes a second for a few tokens; and scans.

    On processors other than Intel's, `linear_of_few_rows` is ahead with large weights until the arithmetic takes all
    the time (on an AMD EPYC, 8960 × 1536: 2.7 times as fast at 16 rows, 1.6 at 64, 1.2 at 256, the same beyond).
    Experts take a few tokens each (there, 128 experts of 768 × 2048, 8 chosen: 1.8 times as fast at 64 tokens, 1.3 at
    256, 0.7 at 1,024). The model's own code runs all the same; what is replaced is restored at the end.

    Drafts are judged in it as well: skip mode goes inside.

    Args:
        model: the target model.
        rows: tokens in the pass, of all rows of the batch.
        own_kernels: whether the model's own kernels are requested in half precision.
    """
    exchanged: list[tuple[nn.Module, Callable[..., Any]]] = []
    if rows <= _MANY_ROWS and not is_intel() and why_not_captured(model) is None:
        exchanged += _linears(model, rows)
    exchanged += _experts(model, own_kernels)
    mode = SkipMode(model, SkipConfig(), exchanged) if exchanged else nullcontext()
    scans = prompt_scans(model, own_kernels)
    return mode if scans is None else _both(mode, scans)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _linears(model: nn.Module, rows: int) -> list[tuple[nn.Module, Callable[..., Any]]]:
    found = [
        (module, linear_of_few_rows(module.weight, module.bias, rows))
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.numel() >= _LARGE
    ]
    return [(module, kernel) for module, kernel in found if kernel is not None]


def _experts(model: nn.Module, own_kernels: bool) -> list[tuple[nn.Module, Callable[..., Any]]]:
    if torch.is_autocast_enabled("cpu"):
        return []
    found: list[tuple[nn.Module, Callable[..., Any]]] = []
    for module in modules_of(model):
        if not has_experts(module):
            continue
        layer: Any = module
        dtype = layer.down_proj.dtype
        most = _PER_EXPERT * len(layer.down_proj)
        if dtype is not torch.float32:
            is_slow = computes_all_experts(module) or form_of(module).is_transposed
            if own_kernels or not is_slow or onednn_takes(dtype):
                continue
            most = sys.maxsize
        is_patched = "forward" in vars(module) or module._compiled_call_impl is not None
        forward = None if is_patched else forward_of_experts(module, partial(_fits, most))
        if forward is not None:
            found.append((module, forward))
    return found


def _fits(most: int, chosen: torch.Tensor) -> bool:
    return chosen.numel() <= most
