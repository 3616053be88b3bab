"""Models wholly or partly in training mode: drafts as in eval mode without active dropout, no drafts with it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.conditions import why_not_captured
from ssd_generation.forward.captured.passes import captured_target
from ssd_generation.forward.structure.dropout import active_dropout
from tiny_models import FAMILIES, even_model, left_padded, prompt, small, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
REQUESTS: dict[str, Any] = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED),
    "lookup": SelfSpeculativeConfig(lookup=True),
    "auto": "auto",
}
LAYOUTS = ({"input_ids": prompt(7).repeat(1, 2)}, left_padded([12, 7]))


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def without_dropout(model: PreTrainedModel) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    for name, value in vars(model.config).items():
        if "drop" in name and isinstance(value, float):
            setattr(model.config, name, 0.0)
    return model


def texts(model: Any, request: Any, inputs: dict[str, Any], sampled: bool = False) -> tuple[Any, Any]:
    found = []
    for options in ({}, {"self_speculative": request}):
        torch.manual_seed(1)
        found.append(model.generate(**inputs, max_new_tokens=20, do_sample=sampled, **options))
    return found[0], found[1]


@pytest.mark.parametrize("name", REQUESTS)
def test_without_dropout_it_drafts_as_in_eval_mode(name: str) -> None:
    model = enable_self_speculative(even_model("llama")).train()
    before = flags(model)
    for inputs in LAYOUTS:
        for sampled in (False, True):
            plain, ours = texts(model, REQUESTS[name], inputs, sampled)
            assert torch.equal(plain, ours)
            statistics = model.last_speculation
            assert statistics.refusal is None
            if name in ("skip", "int8"):
                assert statistics.drafted_tokens > 0
    assert flags(model) == before and all(before.values())
    assert why_not_captured(model) is None
    passes = captured_target(model)
    assert passes is not None
    assert passes.program(3) is not None, passes.refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_rates_of_0_are_no_dropout(family: str) -> None:
    model = without_dropout(tiny_model(family)).train()
    assert active_dropout(model) is None
    ids = prompt(12)
    with torch.no_grad():
        trained, logits = model(ids).logits, model.eval()(ids).logits
    assert torch.equal(trained, logits)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_families_with_dropout_layers_of_rate_0(family: str) -> None:
    model = enable_self_speculative(without_dropout(even_model(family))).train()
    plain, ours = texts(model, REQUESTS["skip"], LAYOUTS[0])
    assert torch.equal(plain, ours) and model.last_speculation.drafted_tokens > 0
    passes = captured_target(model)
    assert passes is not None
    assert passes.program(3) is not None, passes.refusal


def in_attention(model: Any) -> str:
    model.model.layers[2].self_attn.attention_dropout = 0.4
    model.train()
    return r"model\.layers\.2\.self_attn \(LlamaAttention\) is in training mode, with attention_dropout=0\.4"


def in_one_part(model: Any) -> str:
    model.model.layers[1].self_attn.attention_dropout = 0.4
    model.model.layers[1].self_attn.train()
    assert not model.training
    return r"model\.layers\.1\.self_attn \(LlamaAttention\) is in training mode"


class Noisy(nn.Module):
    """A user's own module, noisy in training mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y + torch.randn_like(y) if self.training else y


def in_a_foreign_module(model: Any) -> str:
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp)
    model.train()
    return r"model\.layers\.0\.mlp \(Noisy\) is in training mode, and its code depends on that"


def in_a_layer_put_in(model: Any) -> str:
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.2))
    return r"model\.layers\.0\.mlp\.1 \(Dropout\) is in training mode, with a dropout rate of 0\.2"


@pytest.mark.parametrize("change", [in_attention, in_one_part, in_a_foreign_module, in_a_layer_put_in])
def test_with_dropout_it_is_decoded_as_transformers_does(change: Callable[[Any], str]) -> None:
    model: Any = enable_self_speculative(tiny_model())
    reason = change(model)
    before = flags(model)
    with pytest.warns(UserWarning, match=f"without drafts, as transformers decodes it: {reason}"):
        plain, ours = texts(model, REQUESTS["skip"], LAYOUTS[0])
    assert torch.equal(plain, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is given only once
        for inputs in LAYOUTS:
            for request in (*REQUESTS.values(),):
                plain, ours = texts(model, request, inputs, sampled=True)
                assert torch.equal(plain, ours)  # same draws as plain `generate`
                assert model.last_speculation.drafted_tokens == 0
                assert model.last_speculation.refusal is not None
    assert flags(model) == before
    model.eval()
    plain, ours = texts(model, REQUESTS["skip"], LAYOUTS[0])
    assert torch.equal(plain, ours) and model.last_speculation.refusal is None


def test_noise_of_a_router() -> None:
    for noise in (0.0, 0.3):
        model: Any = tiny_model("mixtral", router_jitter_noise=noise).train()
        assert (active_dropout(model) is None) is (noise == 0.0)
        with torch.no_grad():
            assert torch.equal(*(model(prompt(9)).logits for _ in range(2))) is (noise == 0.0)
    assert "router_jitter_noise" in str(active_dropout(model)) or "jitter_noise" in str(active_dropout(model))


def test_layerdrop_and_batch_norm() -> None:
    model: Any = without_dropout(tiny_model("opt")).train()
    assert active_dropout(model) is None
    model.model.decoder.layerdrop = 0.5
    assert "layerdrop=0.5" in str(active_dropout(model))
    model.model.decoder.layerdrop = 0.0
    model.model.decoder.layers[0].extra = nn.BatchNorm1d(4)
    assert "BatchNorm1d" in str(active_dropout(model))
    assert active_dropout(model.eval()) is None


def test_embeddings_that_were_resized() -> None:
    """Resized embeddings are new modules in training mode, which does not change the model."""
    model: Any = enable_self_speculative(even_model("llama"))
    model.resize_token_embeddings(80, mean_resizing=False)
    model.config.vocab_size = 80
    assert not model.training and any(flags(model).values())
    assert why_not_captured(model) is None
    plain, ours = texts(model, REQUESTS["skip"], LAYOUTS[0])
    assert torch.equal(plain, ours) and model.last_speculation.drafted_tokens > 0


def test_a_layer_that_was_replaced_by_hand() -> None:
    model: Any = enable_self_speculative(even_model("llama"))
    old, new = model.model.layers[0].mlp, LlamaMLP(model.config)
    new.load_state_dict(old.state_dict())
    model.model.layers[0].mlp = new
    assert new.training and not model.training
    assert why_not_captured(model) is None
    plain, ours = texts(model, REQUESTS["skip"], LAYOUTS[0])
    assert torch.equal(plain, ours)


@pytest.mark.filterwarnings("ignore")  # peft's warnings
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_adapters_while_they_are_trained(rate: float) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=rate, init_lora_weights=False)
    model = peft.get_peft_model(even_model("llama"), settings)
    enable_self_speculative(model)
    model.train()
    plain, ours = texts(model, REQUESTS["skip"], LAYOUTS[0])
    assert torch.equal(plain, ours)
    statistics = model.base_model.model.last_speculation
    if rate:
        assert "lora_dropout" in str(statistics.refusal)
    else:
        assert statistics.refusal is None and statistics.drafted_tokens > 0


def test_a_remote_module_that_does_not_mind() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 0.5  # type: ignore[no-any-return]

    model: Any = tiny_model()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    model.train()
    assert active_dropout(model) is None


def test_a_config_is_looked_at_where_the_code_does() -> None:
    """falcon's code reads its dropout rates from the config in each pass."""
    model: Any = tiny_model("falcon").train()
    assert active_dropout(model) is None
    other: Any = copy.deepcopy(model)
    other.config.hidden_dropout = 0.3
    assert "hidden_dropout=0.3" in str(active_dropout(other))


def test_phimoe_routes_at_random_in_training_mode() -> None:
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**small(num_local_experts=4)))
    assert "router_jitter_noise" in str(active_dropout(model.train()))
