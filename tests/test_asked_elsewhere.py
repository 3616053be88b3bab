"""Drafting requested where it has no effect: the call warns once, and decodes as in transformers."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from ssd_generation import PrecisionConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.passes import CapturedPart
from ssd_generation.forward.copies.low_bit import CopiesPart
from ssd_generation.generation import call, prepare, request
from ssd_generation.support.model_state import state_of
from tiny_models import prompt, tiny_model

SKIP = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]))


def generate(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
    return model.generate(prompt(9), *args, **{"max_new_tokens": 8, "do_sample": False, **options})


def test_a_generation_config_that_asks() -> None:
    model = enable_self_speculative(tiny_model())
    plain = generate(model)
    config = GenerationConfig(self_speculative="auto")
    with pytest.warns(UserWarning, match=r"asks for `self_speculative='auto'`, but this call decodes plainly.*=True"):
        assert torch.equal(plain, generate(model, config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(plain, generate(model, generation_config=config)), "said once"
        assert torch.equal(plain, generate(enable_self_speculative(tiny_model()), config, self_speculative=False))
        assert torch.equal(plain, generate(model, config, self_speculative=True))
    assert model.last_speculation is not None


def test_a_default_that_a_call_does_not_ask_for_is_no_request() -> None:
    model = enable_self_speculative(tiny_model(), default=SKIP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model)
        generate(model, generation_config=model.generation_config)
    assert model.last_speculation is None


def test_continuous_batching_refuses() -> None:
    model = enable_self_speculative(tiny_model())
    with pytest.raises(ValueError, match=r"`generate_batch` .continuous batching.*call `generate` with a batch"):
        model.generate_batch([prompt(9)[0].tolist()], self_speculative="auto")


def test_captured_drafts_are_bounded() -> None:
    model = enable_self_speculative(tiny_model())
    for index in range(15):
        generate(model, self_speculative=SkipConfig(attention=[index % 4], mlp=[index // 4]))
    assert 1 <= len(state_of(model).get(CapturedPart).of(model).drafts) <= 4
    for index in range(12):
        precision = PrecisionConfig(default="int8", attention={index % 4: None, (index + 1) % 3: None})
        generate(model, self_speculative=SelfSpeculativeConfig(SkipConfig(mlp=[index // 3]), precision=precision))
    assert 1 <= len(state_of(model).get(CopiesPart).low_bit_drafts) <= 8


@pytest.mark.parametrize("request_", [SKIP, SelfSpeculativeConfig(precision=PrecisionConfig(default="int8"))])
def test_what_was_taken_out_of_a_model_does_not_live_on(request_: SelfSpeculativeConfig) -> None:
    model = enable_self_speculative(tiny_model())
    generate(model, self_speculative=request_)
    mlp = model.model.layers[1].mlp
    gone = [weakref.ref(weight) for weight in (mlp.up_proj.weight, mlp.down_proj.weight)]
    model.model.layers[1].mlp = tiny_model(seed=9).model.layers[1].mlp
    del mlp
    plain = generate(model)
    assert torch.equal(plain, generate(model, self_speculative=request_))
    gc.collect()
    assert all(reference() is None for reference in gone)


@pytest.mark.parametrize("request_", ["auto", SKIP, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_short_call_is_not_prepared_for_drafts(request_: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model(), default=SKIP)
    plain = generate(model, max_new_tokens=tokens)

    def prepared(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("prepared")

    monkeypatch.setattr(request, "automatic_config", prepared)
    monkeypatch.setattr(call, "Forward", prepared)
    for name in ("check_model", "weights_in_use"):
        monkeypatch.setattr(prepare, name, prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(plain, generate(model, max_new_tokens=tokens, self_speculative=request_))
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False)
        assert torch.equal(plain, model.generate(prompt(9), config, self_speculative=request_))
    assert "too few tokens" in str(model.last_speculation.refusal)
    assert model.last_speculation.generated_tokens == tokens
    with pytest.raises(AssertionError, match="prepared"):
        # Few tokens are not worth measuring for what "auto" drafts by.
        generate(model, max_new_tokens=9 if request_ == "auto" else 3, self_speculative=request_)
    with pytest.raises(ValueError, match="9"):
        generate(model, max_new_tokens=tokens, self_speculative=SkipConfig(attention=[9]))
