"""A default device that is not the model's: the library makes no tensor there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from tiny_models import even_model, left_padded, prompt

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
REQUESTS: dict[str, Any] = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED),
    "int4": SelfSpeculativeConfig(precision="int4", drafting=FIXED),
    "lookup": SelfSpeculativeConfig(lookup=True),
    "auto": "auto",
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 40},
    "batch": {"do_sample": False},
    "sampled batch": {"do_sample": True},
    "stops": {"do_sample": False, "eos_token_id": [5, 10, 36], "repetition_penalty": 1.3},
}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def assert_text_of_plain(model: Any, request: Any, name: str) -> None:
    inputs = left_padded([12, 7, 10]) if "batch" in name else {"input_ids": prompt(7).repeat(1, 2)}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    texts = []
    for is_drafted in (False, True):
        torch.manual_seed(3)
        with default_device("meta"):
            options = {"self_speculative": request} if is_drafted else {}
            texts.append(model.generate(**inputs, **CALLS[name], max_new_tokens=24, **options))
    assert texts[1].device.type == "cpu" and torch.equal(*texts)
    assert model.last_speculation.refusal is None


@pytest.mark.parametrize("name", REQUESTS)
def test_text_is_plains_whatever_the_default_device(name: str) -> None:
    # The first call too, which checks the model and measures.
    model = enable_self_speculative(even_model("llama"))
    for call in CALLS:
        assert_text_of_plain(model, REQUESTS[name], call)
    if name != "auto":  # it may find that no draft is faster
        assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "opt"])
def test_families(family: str) -> None:
    model = enable_self_speculative(even_model(family))
    assert_text_of_plain(model, REQUESTS["skip"], "greedy")
    assert_text_of_plain(model, REQUESTS["int8"], "batch")


@pytest.mark.measures
def test_what_is_measured_is_so_on_the_models_device() -> None:
    model = enable_self_speculative(even_model("llama"))
    assert_text_of_plain(model, "auto", "greedy")


def test_where_plain_fails_its_error_is_given_and_nothing_is_remembered() -> None:
    # Sliding windows: transformers makes a tensor of its own on the default device.
    model = enable_self_speculative(even_model("gemma2"))
    ids = prompt(12)
    inputs: dict[str, Any] = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    with default_device("meta"):
        with pytest.raises(NotImplementedError, match="meta tensor"):
            model.generate(**inputs)
        with (
            pytest.raises(NotImplementedError, match="meta tensor"),
            pytest.warns(UserWarning, match="plain decoding of a few tokens fails"),
        ):
            model.generate(**inputs, self_speculative=REQUESTS["skip"])
    model.generate(**inputs, self_speculative=REQUESTS["skip"])
    assert model.last_speculation.refusal is None


def test_a_model_that_was_checked_before_does_not_kill_the_process() -> None:
    model = enable_self_speculative(even_model("llama"))
    model.generate(prompt(12), max_new_tokens=8, do_sample=False, self_speculative=REQUESTS["skip"])
    assert_text_of_plain(model, REQUESTS["skip"], "greedy")
