"""Image-text models: with a picture in the prompt, the text is plain `generate`'s, and the picture is encoded once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from lab.families.models import build, prompts
from lab.families.pictures import Picture, find_picture
from ssd_generation import LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.config import Costs, DraftingConfig
from ssd_generation.forward import forward as forward_module
from ssd_generation.forward.captured.passes import CapturedPasses
from ssd_generation.forward.structure.sublayers import layout_of
from ssd_generation.support.versions import CACHE

FAMILIES = ["gemma3", "qwen2_5_vl", "qwen3_vl", "llava", "idefics3", "smolvlm"]
WITH_AXES = ["qwen2_5_vl", "qwen3_vl"]
ACROSS = "mllama"
"""Family that reads pictures by cross-attention, whose cache layers hold no text."""

OLDER = Version(transformers.__version__) < Version("5.23")

_TOLD: dict[str, Any] = {
    "costs": Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)]),
    "exactness": "numeric",
    "drafting": DraftingConfig(policy="fixed", max_draft_length=4),
}
SKIP = SkipConfig(attention=[1], mlp=[2])
CONFIGS = {
    "nothing": SelfSpeculativeConfig(**{**_TOLD, "drafting": DraftingConfig(policy="none")}),
    "lookup": SelfSpeculativeConfig(lookup=LookupConfig(), **_TOLD),
    "low bits": SelfSpeculativeConfig(precision="int8", **_TOLD),
    "skipping": SelfSpeculativeConfig(skip=SKIP, **_TOLD),
    "all": SelfSpeculativeConfig(skip=SKIP, precision="int8", lookup=LookupConfig(), **_TOLD),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0}


@cache
def model_of(family: str) -> Any:
    if family == ACROSS and OLDER:
        pytest.skip("a tiny model of this transformers says the same of any picture")
    return build(family, "image-text")


@cache
def picture_of(family: str) -> Picture:
    return find_picture(model_of(family))


def enabled(family: str) -> Any:
    model = enable_self_speculative(model_of(family))
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None  # left by an earlier test
    return model


def with_picture(family: str) -> dict[str, torch.Tensor]:
    picture = picture_of(family)
    return picture.inputs(picture.prompt(torch.tensor([[11, 47, 29]]), torch.tensor([[31, 8, 44, 31, 8]])))


def same_text(model: Any, inputs: dict[str, Any], config: Any, **options: Any) -> None:
    texts = []
    for request in (None, config):
        torch.manual_seed(5)
        texts.append(model.generate(**inputs, **{**OPTIONS, **options}, self_speculative=request))
    assert torch.equal(*texts)
    assert model.last_speculation.refusal is None


# --- The same text --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family: str, name: str) -> None:
    model = enabled(family)
    same_text(model, with_picture(family), CONFIGS[name])
    assert (model.last_speculation.drafted_tokens > 0) == (name != "nothing")


@pytest.mark.parametrize("family", [*FAMILIES, ACROSS])
def test_sampled(family: str) -> None:
    name = "low bits" if family == ACROSS else "all"
    same_text(enabled(family), with_picture(family), CONFIGS[name], **SAMPLED)


@pytest.mark.parametrize("name", ["lookup", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_in_one_row_of_a_batch(family: str, name: str) -> None:
    model = enabled(family)
    same_text(model, prompts(picture_of(family)), CONFIGS[name])
    assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", ACROSS])
def test_a_picture_in_each_row_of_a_batch(family: str) -> None:
    same_text(enabled(family), prompts(picture_of(family), in_both=True), CONFIGS["low bits"])


@pytest.mark.parametrize("name", ["lookup", "low bits"])
def test_a_picture_that_is_looked_at_across(name: str) -> None:
    model = enabled(ACROSS)
    same_text(model, with_picture(ACROSS), CONFIGS[name])
    assert model.last_speculation.drafted_tokens > 0


def test_auto(known_costs: Any) -> None:
    same_text(enabled("qwen3_vl"), with_picture("qwen3_vl"), "auto")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_half_precision(family: str) -> None:
    # The text is not compared with plain `generate`'s, since kernels round differently. Drafts must not change it.
    model = enable_self_speculative(build(family, "image-text").to(torch.bfloat16))
    inputs = with_picture(family)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    texts = [model.generate(**inputs, **OPTIONS, self_speculative=CONFIGS[name]) for name in ("nothing", "lookup")]
    assert texts[0].shape == texts[1].shape
    assert model.last_speculation.refusal is None and model.last_speculation.drafted_tokens > 0


# --- A second turn --------------------------------------------------------------------------------


def two_turns(model: Any, family: str, first: Any, second: Any) -> list[torch.Tensor]:
    """Return the texts of two turns, the first about a picture, each drafted as its request says."""
    output = model.generate(**with_picture(family), **OPTIONS, return_dict_in_generate=True, self_speculative=first)
    ids = torch.cat((output.sequences, torch.tensor([[9, 31, 8, 44]])), dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: output[CACHE]}
    if family == ACROSS:  # transformers requires the mask of the whole text
        mask = with_picture(family)["cross_attention_mask"]
        inputs["cross_attention_mask"] = torch.cat((mask, mask[:, -1:].expand(-1, 24, -1, -1)), dim=1)
    return [output.sequences, model.generate(**inputs, **OPTIONS, self_speculative=second)]


@pytest.mark.parametrize("family", [*FAMILIES, ACROSS])
def test_a_second_turn_after_a_picture(family: str) -> None:
    config = CONFIGS["lookup"]
    plain = two_turns(enabled(family), family, None, None)
    for first, second in ((config, config), (config, None), (None, config)):
        texts = two_turns(enabled(family), family, first, second)
        for expected, text in zip(plain, texts, strict=True):
            assert torch.equal(expected, text), (first is None, second is None)


@pytest.mark.parametrize("family", WITH_AXES)
def test_the_check_of_a_model_leaves_where_text_continues_after_a_picture(family: str) -> None:
    # A model is checked in its first self-speculative call: here one that continues a plain call about a picture.
    plain = two_turns(build(family, "image-text"), family, None, None)
    model = enable_self_speculative(build(family, "image-text"))
    for expected, text in zip(plain, two_turns(model, family, None, CONFIGS["lookup"]), strict=True):
        assert torch.equal(expected, text)


# --- Once, and by captured passes -----------------------------------------------------------------


def counting(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, counts: Callable[[Any, Any], bool]) -> list[Any]:
    """Record the calls of a class's method for which `counts` holds, while a test runs."""
    calls: list[Any] = []
    original = getattr(kind, method)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if counts(self, result):
            calls.append(self)
        return result

    monkeypatch.setattr(kind, method, counted)
    return calls


@pytest.mark.parametrize("family", [*FAMILIES, ACROSS])
def test_a_picture_is_looked_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled(family)
    names = ("vision_tower", "vision_model", "visual")
    tower = next(module for name, module in model.named_modules() if name.rpartition(".")[2] in names)
    name = "low bits" if family == ACROSS else "all"
    model.generate(**with_picture(family), **OPTIONS, self_speculative=CONFIGS[name])
    looks = counting(monkeypatch, type(tower), "forward", lambda self, result: True)
    model.generate(**with_picture(family), **OPTIONS, self_speculative=CONFIGS[name])
    assert model.last_speculation.draft_passes > 0 and model.last_speculation.target_passes > 1
    assert len(looks) == 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "idefics3", "smolvlm"])
def test_passes_after_a_picture_are_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled(family)
    played = counting(monkeypatch, CapturedPasses, "run", lambda self, result: result is not None)
    same_text(model, with_picture(family), CONFIGS["low bits"])
    played.clear()
    same_text(model, with_picture(family), CONFIGS["low bits"])
    statistics = model.last_speculation
    # All passes but the prompt's; all draft passes but the first round's, which were compared with the model's own.
    assert sum(not passes.is_draft for passes in played) == statistics.target_passes - 1
    assert sum(passes.is_draft for passes in played) >= statistics.draft_passes - 4


@pytest.mark.measures
def test_passes_with_exact_bits_after_a_picture() -> None:
    config = SelfSpeculativeConfig(lookup=LookupConfig(), **{**_TOLD, "exactness": "bitwise"})
    for family in ("qwen2_5_vl", "llava"):
        model = enabled(family)
        with warnings.catch_warnings():
            # With such small heads, torch computes part of cos by other instructions on processors with AVX2 alone.
            warnings.filterwarnings("ignore", message=".* cannot decode bitwise here: cos may round")
            same_text(model, with_picture(family), config)
        is_even = "cos may round" not in str(model.last_speculation.exactness_reason)
        assert (model.last_speculation.exactness == "bitwise") is is_even, model.last_speculation.exactness_reason


def test_a_captured_pass_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled("qwen2_5_vl")
    model.generate(**with_picture("qwen2_5_vl"), **OPTIONS, self_speculative=CONFIGS["lookup"])

    # As if the model used the first axis differently from the captured pass.
    def tilted(self: Any) -> torch.Tensor:
        return self.positions[-1] + 3  # type: ignore[no-any-return]

    monkeypatch.setattr(forward_module.Context, "flat_positions", property(tilted))
    played = counting(monkeypatch, CapturedPasses, "run", lambda self, result: result is not None)
    same_text(model, with_picture("qwen2_5_vl"), CONFIGS["lookup"])
    assert len(played) == 1  # tried once, and found to differ


# --- What is found, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "llava", "video_llava", "qwen2_5_omni_thinker"])
def test_the_layers_of_the_text_decoder_are_found_next_to_towers_as_deep(family: str) -> None:
    model = model_of(family)
    decoder = model.get_decoder()
    layout = layout_of(model)
    inside = {id(module) for module in decoder.modules()}
    assert len(layout) == model.config.get_text_config().num_hidden_layers
    assert layout.refusal is None and all(id(layer.module) in inside for layer in layout.layers)


def test_a_model_whose_decoding_happens_inside_says_which_to_enable() -> None:
    model = model_of("blip-2")
    with pytest.raises(ValueError, match=r"enable_self_speculative\(model\.language_model\)"):
        enable_self_speculative(model)
    enable_self_speculative(model.language_model)
    texts = [
        model.generate(**with_picture("blip-2"), **OPTIONS, **request)
        for request in ({}, {"self_speculative": CONFIGS["low bits"]})
    ]
    assert torch.equal(*texts)
    assert model.language_model.last_speculation.drafted_tokens > 0
