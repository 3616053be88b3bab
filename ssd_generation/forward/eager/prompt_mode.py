"""The pass over a prompt: the model's own code, with faster kernels for its large linear layers and its experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import SkipConfig
from ...support.machine import is_intel
from ..captured.conditions import why_not_captured
from ..captured.expert_layers import experts_of
from ..captured.linear_kernels import linear_of_few_rows
from ..structure.skip_mode import SkipMode
from .few_rows import forward_of_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["prompt_mode"]

_MANY_ROWS = 256
_LARGE = 2**21

_PER_EXPERT = 32
"""Tokens per expert up to which the JIT-compiled kernels are ahead of torch's grouped products."""


def prompt_mode(model: PreTrainedModel, rows: int) -> AbstractContextManager[Any]:
    """Return a mode in which large linear layers and experts run by the faster kernel for a prompt, where there is one.

    In half precision there is none: a prompt's pass has the bits of the model's own.

    On processors other than Intel's, `linear_of_few_rows` is ahead with large weights until the arithmetic takes all
    the time (on an AMD EPYC, 8960 × 1536: 2.7 times as fast at 16 rows, 1.6 at 64, 1.2 at 256, the same beyond).
    Experts take a few tokens each (there, 128 experts of 768 × 2048, 8 chosen: 1.8 times as fast at 64 tokens, 1.3 at
    256, 0.7 at 1,024). The model's own code runs all the same; what is replaced is restored at the end.

    Drafts are judged in it as well: skip mode goes inside.

    Args:
        model: the target model.
        rows: tokens in the pass, of all rows of the batch.
    """
    if why_not_captured(model) is not None:
        return nullcontext()
    kernels = [] if rows > _MANY_ROWS or is_intel() else _linears(model, rows)
    kernels += [(module, forward_of_experts(module, _fits(module))) for module in _experts(model)]
    exchanged = [(module, kernel) for module, kernel in kernels if kernel is not None]
    return SkipMode(model, SkipConfig(), exchanged) if exchanged else nullcontext()


def _linears(model: nn.Module, rows: int) -> list[tuple[nn.Module, Callable[..., Any] | None]]:
    return [
        (module, linear_of_few_rows(module.weight, module.bias, rows))
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.numel() >= _LARGE
    ]


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in experts_of(model) if module.down_proj.dtype is torch.float32]


def _fits(module: Any) -> Callable[[torch.Tensor], bool]:
    return lambda chosen: chosen.numel() <= _PER_EXPERT * module.num_experts
