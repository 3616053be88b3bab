"""Layers of experts: their kernels, their place in captured passes and in passes of the model's own code."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from lab import experts as program
from lab.families.models import build
from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.batch_invariance import NATIVE, TEXT_WIDTHS, BatchInvariance, uneven
from ssd_generation.forward.captured.capture import CannotCapture, capture_pass
from ssd_generation.forward.captured.fx_graph import CapturedPass
from ssd_generation.forward.captured.passes import CapturedPasses
from ssd_generation.forward.captured.rewrites import share_results, without_writes
from ssd_generation.forward.eager import few_rows
from ssd_generation.forward.eager import prompt_mode as prompts
from ssd_generation.forward.structure import expert_layers
from ssd_generation.forward.structure.expert_layers import (
    experts_of,
    has_experts,
    native_experts,
    run_experts,
    shape_of_gate,
)
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops.experts import ExpertWeights, NativeExperts
from ssd_generation.tuning import prompt_kernels
from tiny_models import left_padded, prompt, tiny_model

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
THREE = DraftingConfig(policy="fixed", max_draft_length=3)
REQUESTS = {
    "nothing": NOTHING,
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1]), drafting=THREE),
    "lookup": SelfSpeculativeConfig(lookup=LookupConfig(min_ngram=1), drafting=THREE),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=THREE),
}


# --- kernels


class Layer:
    """Random experts, and what they compute by torch's own functions, one token and expert at a time."""

    def __init__(
        self, dtype: torch.dtype, experts: int, columns: int, middle: int, rows: int = 0, by_input: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(experts + columns)

        def made(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        up, down = (2 * middle, columns), (rows or columns, middle)
        shapes = (up[::-1], down[::-1]) if by_input else (up, down)
        self.up, self.down = (made(experts, *shape) for shape in shapes)
        self.biases = (made(experts, up[0]), made(experts, down[0])) if by_input else (None, None)
        self.dtype, self.columns, self.by_input = dtype, columns, by_input

    def gate(self, opened: torch.Tensor) -> torch.Tensor:
        if not self.by_input:
            gate, up = opened.chunk(2, -1)
            return functional.silu(gate) * up
        return (opened[..., 1::2].clamp(-1, 1) + 1) * torch.sigmoid(opened[..., ::2])

    def native(self) -> NativeExperts:
        up, down = (ExpertWeights(*pair) for pair in zip((self.up, self.down), self.biases, strict=True))
        return NativeExperts(up, down, self.gate if self.by_input else None, self.by_input)

    def product(self, x: torch.Tensor, which: int, expert: int) -> torch.Tensor:
        weight, bias = (self.up, self.down)[which][expert], self.biases[which]
        product = x @ weight if self.by_input else functional.linear(x, weight)
        return product if bias is None else product + bias[expert]

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = torch.zeros(*chosen.shape, self.product(self.gate(self.product(x[:1], 0, 0)), 1, 0).shape[1]).to(x)
        for token, experts in enumerate(chosen.tolist()):
            for slot, expert in enumerate(experts):
                if 0 <= expert < len(self.up):
                    opened = self.product(x[token][None], 0, expert)
                    outputs[token, slot] = self.product(self.gate(opened), 1, expert)[0]
        return (outputs * weights[..., None]).sum(1).to(x.dtype)

    def inputs(self, tokens: int, slots: int, kind: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        x = torch.randn(tokens, self.columns).to(self.dtype)
        chosen = torch.stack([torch.randperm(len(self.up))[:slots] for _ in range(tokens)])
        return x, chosen, torch.rand(tokens, slots).to(kind or self.dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    precision = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[found.dtype]
    return torch.allclose(found.float(), expected.float(), rtol=precision, atol=precision)


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("kind", ["own", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("experts", "columns", "middle", "tokens", "slots"),
    [
        (8, 64, 48, 1, 2),
        (5, 70, 32, 7, 3),
        (1, 32, 16, 4, 1),
        (16, 128, 96, 64, 4),
        (256, 32, 32, 3, 8),
        (5, 24, 3300, 9, 2),
    ],
)
def test_kernels_compute_what_torch_computes(
    by_input: bool, kind: str, dtype: torch.dtype, experts: int, columns: int, middle: int, tokens: int, slots: int
) -> None:
    layer = Layer(dtype, experts, columns, middle, by_input=by_input)
    inputs = layer.inputs(tokens, slots, torch.float32 if kind == "float32" else None)
    assert close(layer.native()(*inputs), layer(*inputs))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])  # with biases, stored by input; without
def test_drafts_in_bfloat16_of_experts_in_float32(family: str) -> None:
    layer: Any = experts_of(with_experts(family))[0]
    native = native_experts(layer, torch.bfloat16)
    assert native is not None
    x = torch.randn(3, layer.down_proj.shape[2 if family == "gpt_oss" else 1])
    chosen, weights = torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.rand(3, 2)
    with torch.no_grad():
        found, true = native(x.bfloat16(), chosen, weights), run_experts(layer, x, chosen, weights)
    assert found.dtype is torch.bfloat16
    assert (found.float() - true).abs().max() < 0.03 * true.abs().max()


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_a_token_does_not_depend_on_the_others(tokens: int, slots: int, seed: int, by_input: bool) -> None:
    torch.manual_seed(seed)
    layer = Layer(torch.bfloat16, 4, 48, 64, by_input=by_input)
    native, (x, chosen, weights) = layer.native(), layer.inputs(tokens, slots)
    together = native(x, chosen, weights)
    alone = [native(x[at : at + 1], chosen[at : at + 1], weights[at : at + 1]) for at in range(tokens)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("by_input", [False, True])
def test_only_chosen_experts_are_read(by_input: bool) -> None:
    layer = Layer(torch.float32, 6, 32, 32, by_input=by_input)
    x, chosen, weights = layer.inputs(64, 2)
    chosen = torch.where(chosen == 3, 5, chosen)
    expected = layer(x, chosen, weights)
    layer.up[3], layer.down[3] = torch.nan, torch.nan
    assert close(layer.native()(x, chosen, weights), expected)
    chosen[1, 0] = 3
    found = layer.native()(x, chosen, weights)
    assert found[1].isnan().all() and not found[0].isnan().any() and not found[2:].isnan().any()


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("missing", [-1, 6, 2**40])
def test_an_expert_that_does_not_exist_adds_nothing(by_input: bool, missing: int) -> None:
    layer = Layer(torch.float32, 6, 32, 32, by_input=by_input)
    x, chosen, weights = layer.inputs(5, 3)
    chosen[2] = missing
    chosen[4, 1] = missing
    found = layer.native()(x, chosen, weights)
    assert close(found, layer(x, chosen, weights)) and not found[2].any()


def test_weights_of_another_type_are_cast() -> None:
    layer = Layer(torch.bfloat16, 4, 32, 32)
    x, chosen, weights = layer.inputs(5, 2, torch.float64)
    assert torch.equal(layer.native()(x, chosen, weights), layer.native()(x, chosen, weights.float()))


def test_one_expert_for_all_tokens_and_no_token_at_all() -> None:
    layer = Layer(torch.float32, 4, 32, 32)
    x, chosen, weights = layer.inputs(64, 2)
    chosen[:] = 2  # both times
    assert close(layer.native()(x, chosen, weights), layer(x, chosen, weights))
    assert layer.native()(x[:0], chosen[:0], weights[:0]).shape == (0, 32)


# --- layers of models


def with_experts(family: str = "mixtral", **options: Any) -> Any:
    return tiny_model(family, num_hidden_layers=2, **options)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_models_layer_by_kernels(family: str, dtype: torch.dtype) -> None:
    layers: list[Any] = experts_of(with_experts(family).to(dtype))
    assert len(layers) == (1 if family == "deepseek_v3" else 2)
    kernel = native_experts(layers[0])
    assert kernel is not None and (kernel.gate is None) == (family != "gpt_oss")
    columns = layers[0].down_proj.shape[2 if layers[0].is_transposed else 1]
    x, chosen = torch.randn(5, columns).to(dtype), torch.tensor([[0, 1], [3, 2], [1, 3], [0, 3], [2, 1]])
    weights = torch.rand(5, 2).to(dtype)
    with torch.no_grad():
        assert close(kernel(x, chosen, weights), run_experts(layers[0], x, chosen, weights))


def test_layers_without_kernels() -> None:
    layer: Any = experts_of(with_experts())[0]
    layer.has_post_expert_norm = True
    assert native_experts(layer) is None
    layer.has_post_expert_norm, layer._is_expert_parallel = False, True
    assert native_experts(layer) is None
    layer._is_expert_parallel = False
    layer.down_proj = nn.Parameter(layer.down_proj.transpose(1, 2).contiguous().transpose(1, 2))
    assert native_experts(layer) is None, "it has gaps"
    computed: Any = experts_of(with_experts())[0]
    torch.nn.utils.parametrize.register_parametrization(computed, "down_proj", nn.Identity())
    assert native_experts(computed) is None, "what a parametrization computes has no place of its own"
    layer.down_proj = nn.Parameter(layer.down_proj.contiguous().to(torch.float64))
    assert native_experts(layer) is None


def test_another_activation_is_torchs() -> None:
    layer: Any = experts_of(with_experts(hidden_act="gelu"))[0]
    kernel = native_experts(layer)
    assert kernel is not None and kernel.gate is not None and shape_of_gate(layer, 6) == (6, kernel.middle)
    x, chosen, weights = torch.randn(3, 32), torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.rand(3, 2)
    with torch.no_grad():
        assert close(kernel(x, chosen, weights), run_experts(layer, x, chosen, weights))


# --- captured passes


def nodes(captured: CapturedPass, target: Any) -> list[Any]:
    return [node for node in captured.nodes if node.target is target]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_a_layer_is_one_node(implementation: str) -> None:
    model: Any = with_experts("qwen3_moe")
    model.set_experts_implementation(implementation)
    captured = capture_pass(model, 3, 7)
    assert len(nodes(captured, run_experts)) == 2
    assert not any("grouped" in str(node.target) or node.target is torch.bmm for node in captured.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_in_the_lists_of_kernels(dtype: torch.dtype) -> None:
    model = with_experts("qwen3_moe", head_dim=32).to(dtype)
    passes = CapturedPasses(model, batch_invariance=BatchInvariance(NATIVE, TEXT_WIDTHS))
    for length in (1, 3, 8):
        program = passes.program(length)
        assert program is not None, passes.refusal
        # before the first layer's experts, between them and the second's, and from there on
        assert program.source.count("sequence_kernels") == 3 and "experts_experts" not in program.source


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_width(family: str, dtype: torch.dtype) -> None:
    model = with_experts(family, head_dim=32).to(dtype)
    assert prompt_kernels._keeps_bits(model, BatchInvariance(NATIVE, TEXT_WIDTHS))


def test_ties_are_decided_alike_at_every_width() -> None:
    model: Any = with_experts("qwen3_moe", head_dim=32).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()  # all experts are as likely
    assert prompt_kernels._keeps_bits(model, BatchInvariance(NATIVE, TEXT_WIDTHS))


@pytest.mark.parametrize(("implementation", "is_captured"), [("batched_mm", True), ("eager", False)])
def test_an_unknown_call_is_captured_by_its_operations_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, implementation: str, is_captured: bool
) -> None:
    model: Any = with_experts()
    model.set_experts_implementation(implementation)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", _by_name)
    if is_captured:
        captured = capture_pass(model, 3, 7)
        assert not nodes(captured, run_experts) and nodes(captured, torch.bmm)
    else:
        with pytest.raises(CannotCapture, match="depends on values"):
            capture_pass(model, 3, 7)


def _by_name(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.flatten(0, 1)
    _, weights, chosen = self.gate(flat)
    return self.experts(flat, top_k_index=chosen, top_k_weights=weights).view_as(hidden_states)  # type: ignore[no-any-return]


def test_a_gate_of_torchs_may_be_uneven() -> None:
    model: Any = with_experts(hidden_act="gelu", intermediate_size=33)
    assert uneven(capture_pass(model, 1, 7)) == "gate of experts"
    assert uneven(capture_pass(with_experts(intermediate_size=33), 1, 7)) is None  # computed by a kernel


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_texts_are_plains(family: str, request_: SelfSpeculativeConfig) -> None:
    model: Any = enable_self_speculative(with_experts(family))
    options: Any = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for inputs in ({"input_ids": prompt(9)}, left_padded([11, 6])):
        plain = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, self_speculative=request_), plain)


def test_experts_that_change_between_calls() -> None:
    model: Any = enable_self_speculative(with_experts())
    options: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = []
    for change in (None, "replaced", "written"):
        for layer in experts_of(model):
            weights: Any = layer.down_proj
            if change == "replaced":
                weights.data = torch.randn_like(weights) / 4
            elif change == "written":
                with torch.no_grad():
                    weights.mul_(-3)
        plain = model.generate(prompt(9), **options)
        assert torch.equal(model.generate(prompt(9), **options, self_speculative=NOTHING), plain)
        texts.append(plain)
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[1], texts[2])


# --- passes of the model's own code


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the tokens of each call of kernels for experts outside captured passes; all layers are large enough."""
    seen: list[int] = []
    original = NativeExperts.__call__

    def call(self: NativeExperts, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return original(self, x, *routing)

    monkeypatch.setattr(NativeExperts, "__call__", call)
    monkeypatch.setattr(few_rows, "_SMALL", 1)
    return seen


def test_passes_that_are_not_captured_use_the_kernels(counted: list[int]) -> None:
    model: Any = with_experts("gpt_oss")
    mode = few_rows.few_rows(model)
    assert mode is not None
    with torch.no_grad():
        expected, wide = model(input_ids=prompt(9)).logits, model(input_ids=prompt(few_rows.MOST_ROWS + 1)).logits
        with mode:
            assert torch.allclose(model(input_ids=prompt(9)).logits, expected, atol=1e-4)
            assert counted == [9, 9]
            assert model(input_ids=prompt(few_rows.MOST_ROWS + 1)).logits.shape == wide.shape
    assert counted == [9, 9], "wider passes are torch's"
    assert not any("forward" in vars(module) for module in model.modules())


def test_moved_experts_are_left_to_torch(counted: list[int]) -> None:
    model: Any = with_experts("gpt_oss")
    mode = few_rows.few_rows(model)
    assert mode is not None
    for layer in experts_of(model):
        weights: Any = layer.down_proj
        weights.data = weights.data.clone()
    with torch.no_grad(), mode:
        model(input_ids=prompt(9))
    assert counted == []


@pytest.mark.parametrize(("tokens", "is_ours"), [(20, True), (80, False)])
def test_a_prompt_in_float32(counted: list[int], tokens: int, is_ours: bool) -> None:
    model: Any = with_experts("mixtral")  # 4 experts, 2 of which each token takes
    with torch.no_grad():
        expected = model(input_ids=prompt(tokens)).logits
        with prompts.prompt_mode(model, tokens):
            found = model(input_ids=prompt(tokens)).logits
    assert torch.allclose(found, expected, atol=1e-4) and counted == [tokens] * (2 * is_ours)
    counted.clear()
    with torch.no_grad(), prompts.prompt_mode(model.to(torch.bfloat16), tokens):
        model(input_ids=prompt(tokens))
    assert counted == [], "in half precision a prompt's pass is the model's own"


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_prompt_in_half_precision_through_experts_stored_by_input(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(prompts, "onednn_takes", lambda dtype: is_fast)
    model: Any = with_experts("gpt_oss").to(torch.bfloat16)
    with torch.no_grad():
        expected = model(input_ids=prompt(90)).logits
        with prompts.prompt_mode(model, 90):
            found = model(input_ids=prompt(90)).logits
        assert counted == [90] * (0 if is_fast else 2) and close(found, expected)
        with prompts.prompt_mode(model, 90, own_kernels=True):
            assert torch.equal(model(input_ids=prompt(90)).logits, expected)


def test_the_cost_of_a_prompt_counts_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_experts().to(torch.bfloat16)
    timed: list[Any] = []
    original = prompt_kernels._times_of_experts

    def times(layer: Any) -> Any:
        timed.append(original(layer))
        return [8.0], [800.0]

    monkeypatch.setattr(prompt_kernels, "_times_of_experts", times)
    ours, torchs, _ = prompt_kernels._times(model)
    assert len(timed) == 1 and all(seconds > 0 for found in timed[0] for seconds in found)
    # two layers of four experts, of which two were timed
    assert 32 < ours < 40 and 3200 < torchs < 3300


# --- the program that measures mixtures


def test_layers_are_timed() -> None:
    rows = program.measure_layers(with_experts(), 1)
    assert [row["tokens"] for row in rows] == [1, 2, 4, 8, 64]
    matrices = 3 * 32 * 48 * 4  # bytes of an expert
    assert rows[0]["bytes"] == 2 * matrices and rows[-1]["bytes"] == 4 * matrices
    assert all(row["ours"] > 0 and row["torch"] > 0 for row in rows)


def test_measured_shapes_survive_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, measured = list(program.SHAPES)[:2], list[str]()

    def measure(name: str, arguments: Namespace) -> dict[str, Any]:
        if measured == names[:1]:
            measured.clear()
            raise MemoryError(name)
        measured.append(name)
        return {"name": name, "repeats": arguments.repeats}

    monkeypatch.setattr(program, "_measured", measure)
    words = ["--only", *names, "--rows", str(tmp_path / "rows"), "--json"]
    with pytest.raises(MemoryError):
        program.main(words)
    program.main(words)
    assert measured == names[1:]
    assert json.loads(capsys.readouterr().out) == [{"name": name, "repeats": 5} for name in names]
    with pytest.raises(ValueError, match="repeats"):
        program.main([*words, "--repeats", "3"])


@pytest.mark.parametrize("name", program.SHAPES)
def test_shapes_are_those_of_models(name: str) -> None:
    with torch.device("meta"):
        model = program.random_model(name, torch.bfloat16)
    layers = [module for module in model.modules() if has_experts(module)]
    assert len(layers) == model.config.num_hidden_layers
    assert sum(parameter.nbytes for parameter in model.parameters()) < 9e9


# --- writes


def captured_of(change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> CapturedPass:
    model = tiny_model("llama", num_hidden_layers=1)
    mlp: Any = type(model.model.layers[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: original(self, change(x)))
    return capture_pass(model, 3, 7)


def test_what_is_only_read_once_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        largest, _ = (x * 2).topk(4, dim=-1)
        largest /= largest.sum(-1, keepdim=True)
        return x + largest.sum(-1, keepdim=True)

    captured = captured_of(parts, monkeypatch)
    share_results(captured)
    assert len(nodes(captured, "div_")) == 1
    without_writes(captured)
    assert len(nodes(captured, "div_")) == 0 and len(nodes(captured, torch.div)) == 1
    assert not any(node.meta["writes"] for node in captured.nodes if node.target is torch.div)


def _seen_by_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    part = y[..., :4]
    y.mul_(3)
    return x + part.sum()


def _through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[..., :4].mul_(3)
    return x + y


def _through_parts(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    first, _ = y.chunk(2, -1)
    first.mul_(3)
    return x + y


@pytest.mark.parametrize("change", [_seen_by_a_view, _through_a_view, _through_parts])
def test_writes_that_others_see_stay(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of(change, monkeypatch)
    without_writes(captured)
    assert len(nodes(captured, "mul_")) == 1


def layer_of_all(dtype: torch.dtype = torch.float32, experts: int = 5) -> Any:
    """Return Llama 4's layer of experts, which computes all of them for every token."""
    config = tf.Llama4TextConfig(hidden_size=48, intermediate_size=40, num_local_experts=experts)
    layer = Llama4TextExperts(config)
    torch.manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return layer.to(dtype)


def chosen_rows(tokens: int, experts: int, slots: int) -> torch.Tensor:
    """Return the inputs of all experts for all tokens `(E · n, H)`: zeros where a token has not chosen an expert."""
    torch.manual_seed(tokens)
    x = torch.randn(experts, tokens, 48)
    chosen = torch.rand(experts, tokens).argsort(0) < slots
    return (x * chosen[..., None]).flatten(0, 1)


@pytest.mark.skipif(why_not() is not None, reason="kernels cannot be compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "slots"), [(1, 5, 1), (7, 5, 1), (4, 3, 2), (3, 1, 1), (2, 5, 0)])
def test_of_all_experts_the_chosen_ones_are_computed(tokens: int, experts: int, slots: int, dtype: torch.dtype) -> None:
    layer = layer_of_all(dtype, experts)
    forward = few_rows.forward_of_all_experts(layer, lambda chosen: True)
    assert forward is not None
    x = chosen_rows(tokens, experts, slots).to(dtype)
    with torch.no_grad():
        found, expected = forward(x), layer(x)
    assert found.dtype == dtype and found.shape == expected.shape
    atol = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(found, expected, atol=atol, rtol=10 * atol)
    assert not found[~x.any(dim=1)].any()


@pytest.mark.skipif(why_not() is not None, reason="kernels cannot be compiled")
def test_of_all_experts_others_are_not_read() -> None:
    layer, x = layer_of_all(), chosen_rows(3, 5, 1)
    with torch.no_grad():
        expected = layer(x)
        unused = [expert for expert in range(5) if not x.view(5, 3, 48)[expert].any()]
        assert unused
        layer.gate_up_proj[unused] = float("nan")
        forward = few_rows.forward_of_all_experts(layer, lambda chosen: len(chosen) == 3)
        assert forward is not None
        torch.testing.assert_close(forward(x), expected, atol=1e-6, rtol=1e-5)
        # More tokens than fit, and weights that have moved, are the model's own code's.
        assert torch.isnan(forward(torch.cat((x.view(5, 3, 48), x.view(5, 3, 48)), dim=1).flatten(0, 1))).any()
        layer.down_proj = torch.nn.Parameter(layer.down_proj.clone())
        assert torch.isnan(forward(x)).any()


@pytest.mark.skipif(why_not() is not None, reason="kernels cannot be compiled")
def test_a_model_that_computes_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    made = expert_layers.native_experts_of_all

    def counting(module: Any) -> Any:
        kernel = made(module)
        call = type(kernel).__call__

        class Counting(type(kernel)):  # type: ignore[misc]
            def __call__(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
                rows.append(len(x))
                return call(self, x, *others)  # type: ignore[no-any-return]

        kernel.__class__ = Counting
        return kernel

    monkeypatch.setattr(few_rows, "native_experts_of_all", counting)
    monkeypatch.setattr(few_rows, "_SMALL", 0)
    model: Any = enable_self_speculative(tiny_model("llama4"))
    model.model.norm.register_forward_hook(lambda *_: None)  # so that no pass is captured
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    drafting = DraftingConfig(policy="fixed", max_draft_length=3)
    found = model.generate(
        prompt(12), **options, self_speculative=SelfSpeculativeConfig(lookup=True, drafting=drafting)
    )
    assert torch.equal(found, model.generate(prompt(12), **options))
    assert rows and 12 in rows and 1 in rows  # the prompt's tokens, and single ones: not four times as many


# --- layers that go through the chosen experts in a loop


def looping(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a layer of four experts of 40 × 48; LongCat's has two more, which return their input."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if family == "longcat_flash":
        sizes: dict[str, Any] = {
            "hidden_size": 48,
            "expert_ffn_hidden_size": 40,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
        }
        layer = modeling.LongcatFlashExperts(tf.LongcatFlashConfig(**{**sizes, "hidden_act": "silu", **changes}))
    else:
        sizes = {"num_local_experts": 4, "hidden_size": 48, "moe_intermediate_size": 40, "hidden_act": "silu"}
        layer = modeling.Step3p7Experts(SimpleNamespace(**sizes), **{"swiglu_limit": 0.05, **changes})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)


def routing(experts: int, tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three different experts of each token, and their weights, in float32 as routers compute them."""
    chosen = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)])
    return chosen, torch.rand(tokens, 3)


@pytest.mark.parametrize("changes", [{}, {"zero_expert_num": 0}, {"hidden_act": "gelu"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_that_return_their_input(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    layer = looping("longcat_flash", dtype, **changes)
    forward = few_rows.forward_of_experts(layer, lambda chosen: True)
    x, (chosen, weights) = torch.randn(6, 48).to(dtype), routing(layer.total_experts)
    assert forward is not None
    with torch.no_grad():
        found, expected = forward(x, chosen, weights), run_experts(layer, x, chosen, weights)
    assert close(found, expected) and expected.abs().max() > 1


@pytest.mark.parametrize("limit", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_with_a_clamped_gate_in_a_loop(dtype: torch.dtype, limit: float | None) -> None:
    layer = looping("step3p7", dtype, swiglu_limit=limit)
    kernel = native_experts(layer)
    x, (chosen, weights) = torch.randn(6, 48).to(dtype), routing(5)  # the fifth is on another device: it adds nothing
    assert kernel is not None and shape_of_gate(layer, 18) == (18, 40)
    with torch.no_grad():
        assert close(kernel(x, chosen, weights), run_experts(layer, x, chosen, weights))


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_model_with_experts_that_return_their_input(request_: SelfSpeculativeConfig) -> None:
    model: Any = enable_self_speculative(build("longcat_flash"))
    layers: list[Any] = experts_of(model)
    assert layers and all(layer.zero_expert_num for layer in layers)
    assert len(nodes(capture_pass(model, 3, 7), run_experts)) == len(layers)
    options: Any = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for inputs in ({"input_ids": prompt(9)}, left_padded([11, 6])):
        plain = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, self_speculative=request_), plain)
