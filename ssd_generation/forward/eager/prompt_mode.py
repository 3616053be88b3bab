"""The pass over a prompt: the model's own code, with faster kernels for its large linear layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import SkipConfig
from ...support.machine import is_intel
from ..captured.conditions import why_not_captured
from ..captured.linear_kernels import linear_of_few_rows
from ..structure.skip_mode import SkipMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["prompt_mode"]

_MANY_ROWS = 256
_LARGE = 2**21


def prompt_mode(model: PreTrainedModel, rows: int) -> AbstractContextManager[Any]:
    """Return a mode in which a model's large linear layers run by the faster kernel for a prompt, where there is one.

    In half precision there is none: a prompt's pass has the bits of the model's own.

    On processors other than Intel's, `linear_of_few_rows` is ahead with large weights until the arithmetic takes all
    the time (on an AMD EPYC, 8960 × 1536: 2.7 times as fast at 16 rows, 1.6 at 64, 1.2 at 256, the same beyond). The
    model's own code runs all the same; what is replaced is restored at the end.

    Drafts are judged in it as well: skip mode goes inside.

    Args:
        model: the target model.
        rows: tokens in the pass, of all rows of the batch.
    """
    if rows > _MANY_ROWS or is_intel() or why_not_captured(model) is not None:
        return nullcontext()
    kernels = [
        (module, linear_of_few_rows(module.weight, module.bias, rows))
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.numel() >= _LARGE
    ]
    exchanged = [(module, kernel) for module, kernel in kernels if kernel is not None]
    return SkipMode(model, SkipConfig(), exchanged) if exchanged else nullcontext()
