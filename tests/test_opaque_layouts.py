"""Models whose layers have other parts than attention and MLP, which are skipped with these or stay in the draft; and
models in which nothing can be skipped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import PreTrainedModel

from ssd_generation import (
    DraftingConfig,
    PrecisionConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    draft_mode,
    enable_self_speculative,
    is_self_speculative,
)
from ssd_generation.cli import main
from ssd_generation.forward.copies.copied_layers import places_of
from ssd_generation.forward.structure import sublayers
from ssd_generation.forward.structure.sublayers import layout_of, locate_sublayers
from ssd_generation.search.layerwise import layerwise_skips
from ssd_generation.search.space import space_of
from ssd_generation.tuning.acceptance import verify_text
from tiny_models import VOCAB, prompt, small, tiny_model

_ALTERNATING = ["sliding_attention", "full_attention"] * 3

FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **small(num_hidden_layers=6, intermediate_size=[48] * 6),
        head_dim=8,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        layer_types=_ALTERNATING,
        sliding_window=8,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(
        **small(),
        head_dim=8,
        global_head_dim=8,
        sliding_window=8,
        layer_types=_ALTERNATING[:4],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
    ),
    "granitemoeshared": lambda: tf.GraniteMoeSharedConfig(
        **small(),
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
    ),
}
_OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
_FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
REQUESTS: dict[str, Any] = {
    "nothing": SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")),
    "lookup": SelfSpeculativeConfig(lookup=True, drafting=_FIXED),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=_FIXED),
    "int8 and lookup": SelfSpeculativeConfig(precision="int8", lookup=True, drafting=_FIXED),
    "skipping": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[0]), drafting=_FIXED),
    "a layer skipped": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[1]), precision="int8", drafting=_FIXED),
    "refined": SelfSpeculativeConfig(precision="int8", adapt=True),
    "auto": "auto",
}


def opaque_model(family: str = "granitemoeshared") -> PreTrainedModel:
    if family == "gated":  # a part that no known family has
        model = tiny_model()
        for layer in model.model.layers:
            layer.gate = nn.Linear(32, 32)
            layer.gate.weight.data.normal_(std=0.3)
            layer.register_forward_pre_hook(lambda module, args: (module.gate(args[0]) + args[0], *args[1:]))
        return model
    if family == "twice":
        model = tiny_model()
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: output + module.mlp(output))
        return model
    torch.manual_seed(0)
    if not hasattr(tf, f"{type(FAMILIES[family]()).__name__}"):
        pytest.skip("this transformers does not know it")
    return tf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("family", [*FAMILIES, "gated", "twice"])
def test_every_draft_gives_plain_text(family: str, request_: str) -> None:
    model: Any = enable_self_speculative(opaque_model(family))
    assert is_self_speculative(model)
    request = REQUESTS[request_]
    if "skip" in request_ and family == "twice":
        request = dataclasses.replace(request, skip=SkipConfig(attention=[1]))  # its MLP, run twice, cannot be skipped
    if "skip" in request_ and 1 in layout_of(model).shares_kv:  # gemma3n in transformers 5.18
        request = dataclasses.replace(request, skip=SkipConfig(attention=[5], mlp=[5]))
    for sampled in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9}):
        texts = []
        for extra in ({}, {"self_speculative": request}):
            torch.manual_seed(2)
            texts.append(model.generate(prompt(9), **_OPTIONS, **sampled, **extra))
        assert torch.equal(*texts)
    assert model.last_speculation.refusal is None
    if request_.startswith("int8"):
        assert model.last_speculation.acceptance_rate > 0.2  # chance level: 1 of 64


@pytest.mark.parametrize("family", ["gemma4", "granitemoeshared"])
def test_batches_too(family: str) -> None:
    model: Any = enable_self_speculative(opaque_model(family))
    ids = prompt(9, rows=3)
    plain = model.generate(ids, **_OPTIONS, do_sample=False)
    drafted = model.generate(ids, **_OPTIONS, do_sample=False, self_speculative=REQUESTS["int8 and lookup"])
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize(
    "request_",
    [SkipConfig(mlp=[1]), SelfSpeculativeConfig(SkipConfig(attention=[0], mlp=[1]), precision="int8", lookup=True)],
    ids=["alone", "with int8"],
)
def test_skipping_is_refused_where_it_is_not_safe(request_: Any) -> None:
    model: Any = enable_self_speculative(opaque_model("twice"))
    with pytest.raises(ValueError, match=r"mlp of layer 1 .* ran 2 times.*Leave mlp 1 out of the skip set"):
        model.generate(prompt(9), max_new_tokens=4, self_speculative=request_)
    with pytest.raises(ValueError, match="ran 2 times"), draft_mode(model, SkipConfig(mlp=[1])):
        pass
    assert all(layer.attention is not None and layer.mlp is None for layer in locate_sublayers(model).layers)
    assert not any("mlp" in name for name in space_of(model).choices)
    assert model.generate(prompt(9), max_new_tokens=4).shape == (1, 13), "the model still works"


def test_what_runs_alongside_the_mlp_goes_with_it() -> None:
    layer = layout_of(opaque_model()).layers[1]
    assert layer.mlp is not None and layer.mlp.name == "block_sparse_moe + shared_mlp" and layer.can_be_bypassed
    for module, stub in layer.mlp.stubs():
        if module in layer.mlp.modules:
            hidden = torch.ones(1, 2, 32)
            output = stub(hidden)
            assert torch.equal(output[0] if isinstance(output, tuple) else output, torch.zeros(1, 2, 32))


def test_other_parts_stay_in_the_draft() -> None:
    model = opaque_model("gated")
    layer = layout_of(model).layers[1]
    assert not layer.can_be_bypassed
    ids = prompt(9)
    with torch.no_grad(), draft_mode(model, SkipConfig(attention=[1], mlp=[1])):
        skipped = model(input_ids=ids).logits
        model.model.layers[1].gate.weight.zero_()
        assert not torch.allclose(skipped, model(input_ids=ids).logits)


def test_zeros_of_another_shape_are_not_handed_on() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp, layer.back = nn.Linear(32, 16), nn.Linear(16, 32)
        layer.forward = _through_back.__get__(layer)
    with pytest.raises(
        ValueError, match=r"mlp of layer 2.*does not return what it receives.*other parts \(back: Linear"
    ):
        layout_of(model).sublayer("mlp", 2)
    assert layout_of(model).sublayer("attention", 2).name == "self_attn"


def _through_back(layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + attended
    return hidden_states + layer.back(layer.mlp(layer.post_attention_layernorm(hidden_states)))  # type: ignore[no-any-return]


def test_copies_are_made_of_all_linear_layers_by_the_default() -> None:
    model = opaque_model("twice")
    whole = sum(isinstance(module, nn.Linear) for module in model.model.modules())
    places = [place.name for place in places_of(model, SkipConfig(), PrecisionConfig.named("int8"))[0]]
    assert len(set(places)) == len(places) == whole + 1  # including the head
    by_name = PrecisionConfig(attention={0: "int8"})
    assert len(places_of(model, SkipConfig(), by_name)[0]) == 4
    skipped = [place.name for place in places_of(model, SkipConfig(attention=[1]), PrecisionConfig.named("int8"))[0]]
    assert len(skipped) == len(places) - 4 and not any("layers.1.self_attn" in name for name in skipped)


def test_nothing_to_skip_is_a_reason() -> None:
    model = opaque_model("twice")
    for layer in model.model.layers:
        attention = layer.self_attn
        layer.register_forward_hook(
            lambda module, args, kwargs, output, attention=attention: (
                output + attention(output, **{k: v for k, v in kwargs.items() if k != "hidden_states"})[0]
            ),
            with_kwargs=True,
        )
    assert "ran 2 times" in str(layout_of(model).refusal) and "No other sub-layer" in str(layout_of(model).refusal)
    with pytest.raises(ValueError, match="prompt lookup and low-bit copies"):
        layout_of(model).sublayer("attention", 0)


def test_a_layer_of_two_attentions_counts_as_two() -> None:
    config = tf.LongcatFlashConfig(
        **small(num_hidden_layers=None, intermediate_size=None, num_key_value_heads=4), num_layers=2,
        ffn_hidden_size=48, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        head_dim=8, moe_topk=2, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = enable_self_speculative(tf.AutoModelForCausalLM.from_config(config).eval())
    layout = layout_of(model)
    assert [layer.module for layer in layout.layers] == [module for module in model.model.layers for _ in range(2)]
    # The experts run alongside the first of the two MLPs.
    assert [layer.mlp and layer.mlp.name for layer in layout.layers] == ["mlps + mlp", "mlps"] * 2
    ids = prompt(9)
    for skip in (SkipConfig(attention=[1, 2]), SkipConfig(mlp=[0, 3]), SkipConfig(attention=[0, 1, 2], mlp=[1, 2])):
        draft = SelfSpeculativeConfig(skip, drafting=_FIXED)
        plain, drafted = (
            model.generate(ids, **_OPTIONS, do_sample=False, **extra) for extra in ({}, {"self_speculative": draft})
        )
        assert torch.equal(plain, drafted)
    # A skipped part adds nothing, and the other attention of the layer still runs.
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        with draft_mode(model, SkipConfig(attention=[1], mlp=[0])):
            skipped = model(input_ids=ids).logits
        for part in (attention[1].o_proj, model.model.layers[0].mlps[0].down_proj):
            part.weight.zero_()
        experts = model.model.layers[0].mlp
        experts.forward = torch.zeros_like
        assert torch.allclose(skipped, model(input_ids=ids).logits, atol=1e-5)
    with pytest.raises(ValueError, match="several attentions each"):
        layerwise_skips(model, verify_text(model, prompt(20), 10))


def test_inspect_says_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opaque_model().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 layers" in shown and "shared_mlp" in shown
    monkeypatch.setattr(sublayers, "_mlp_of", lambda layer: None)
    monkeypatch.setattr(sublayers, "_attention_of", lambda layer: None)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "It drafts by prompt lookup and from low-bit copies" in shown
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["depth"] == 4 and "decoder layers" in document["cannot_skip"]


class _Telling(nn.Module):
    """An MLP that passes a later part a second value besides its output."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mlp(hidden), hidden.mean(-1, keepdim=True)


def test_what_others_are_told_by_a_sublayer_cannot_be_left_out() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp, layer.gain = _Telling(layer.mlp), nn.Linear(1, 32)
        layer.forward = _with_gain.__get__(layer)
    with pytest.raises(ValueError, match=r"mlp of layer 0 .* passes more than its output to other parts"):
        locate_sublayers(model).sublayer("mlp", 0)


def _with_gain(layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + attended
    output, told = layer.mlp(layer.post_attention_layernorm(hidden_states))
    return hidden_states + output * layer.gain(told)  # type: ignore[no-any-return]
