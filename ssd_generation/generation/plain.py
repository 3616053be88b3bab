"""Calls that decode without drafts, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.ends import end_tokens
from ..decoding.loop_request import LoopRequest
from ..decoding.statistics import SpeculationStatistics
from ..support.warn import warn_once

__all__ = ["MEASURED_MEANWHILE", "NOT_MEASURED", "TOO_SHORT", "decode_plainly", "warn_undrafted"]

TOO_SHORT = "it requests too few tokens for drafting to pay"

MEASURED_MEANWHILE = "it is the first call for this model on this machine, which was measured between its tokens"

NOT_MEASURED = "it requests few tokens, and drafting has not been measured on this machine yet"

_EXPECTED = frozenset({TOO_SHORT, MEASURED_MEANWHILE, NOT_MEASURED})
"""Refusals without a warning."""


def decode_plainly(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    request: LoopRequest,
    sample: Callable[[], Any],
    refusal: str,
) -> Any:
    """Decode as transformers does, and record why.

    Args:
        model: the target model.
        input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts.
        request: request to transformers' loop.
        sample: transformers' own loop.
        refusal: why nothing is drafted.

    Returns:
        Output of transformers' loop.

    Warns:
        Once per model and reason, unless the reason is one of `_EXPECTED`.
    """
    if refusal not in _EXPECTED:
        warn_undrafted(model, refusal)
    started, prompt = time.perf_counter(), input_ids.shape[1]
    output = sample()
    seconds = time.perf_counter() - started
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    model.last_speculation = SpeculationStatistics.of_plain(
        sequences[:, prompt:].tolist(), prompt, end_tokens(request.criteria), refusal, seconds
    )
    return output


def warn_undrafted(model: PreTrainedModel, refusal: str) -> None:
    """Warn, once per model and reason, that a call decodes without drafts."""
    warn_once(model, f"{type(model).__name__} is decoded without drafts, as transformers decodes it: {refusal}.")
