"""Under autocast the text is plain `generate`'s: transformers decodes it, with one warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from tiny_models import even_model, left_padded, prompt

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
REQUESTS: dict[str, Any] = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED),
    "lookup": SelfSpeculativeConfig(lookup=True),
    "auto": "auto",
}


def texts(model: Any, request: Any, inputs: dict[str, Any], sampled: bool) -> tuple[Any, Any]:
    found = []
    for options in ({}, {"self_speculative": request}):
        torch.manual_seed(1)
        found.append(model.generate(**inputs, max_new_tokens=20, do_sample=sampled, **options))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_is_plains_and_the_reason_is_given_once(dtype: torch.dtype) -> None:
    model: Any = enable_self_speculative(even_model("llama").to(dtype))
    single = {"input_ids": prompt(7).repeat(1, 2)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(UserWarning, match="without drafts, as transformers decodes it: autocast is on"):
            texts(model, REQUESTS["skip"], single, False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for request in REQUESTS.values():
                for inputs in (single, left_padded([12, 7])):
                    for sampled in (False, True):
                        plain, ours = texts(model, request, inputs, sampled)
                        assert torch.equal(plain, ours)
                        assert "autocast" in model.last_speculation.refusal
                        assert model.last_speculation.drafted_tokens == 0
    plain, ours = texts(model, REQUESTS["skip"], single, False)
    assert model.last_speculation.refusal is None and model.last_speculation.drafted_tokens > 0
    if dtype is torch.float32:
        assert torch.equal(plain, ours)


def test_autocast_that_is_off_or_of_another_device_is_none() -> None:
    model: Any = enable_self_speculative(even_model("llama"))
    with torch.autocast("cpu", enabled=False):
        texts(model, REQUESTS["skip"], {"input_ids": prompt(9)}, False)
    assert model.last_speculation.refusal is None
