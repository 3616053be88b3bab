"""Models of a family with random weights, for programs that measure speed alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["VOCABULARY", "random_model"]

VOCABULARY: dict[str, Any] = {"vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def random_model(family: str, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build a model of a family.

    Args:
        family: model type in transformers.
        settings: settings of its config, next to `VOCABULARY`.
        dtype: type of its weights.
    """
    config = AutoConfig.for_model(family, **VOCABULARY, **settings)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(before)
