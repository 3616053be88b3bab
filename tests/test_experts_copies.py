"""Low-bit copies of experts: their kernels, drafts that compute from them, and when they are not made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lab.expert_drafts import round_to_int4
from ssd_generation import DraftingConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.config import Costs
from ssd_generation.forward.captured.passes import draft_of
from ssd_generation.forward.copies.copied_layers import estimated_bytes
from ssd_generation.forward.copies.experts_copy import ExpertsCopy, matrices_of_experts
from ssd_generation.forward.copies.layer_copy import LowBitCopy
from ssd_generation.forward.copies.low_bit import CopiesPart, LowBitCopies, copies_of, copy_bytes
from ssd_generation.forward.structure.expert_layers import experts_of
from ssd_generation.native.codegen.compiler import integer_products, why_not
from ssd_generation.native.ops import experts, linear
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning import automatic
from test_experts import Layer
from tiny_models import prompt, tiny_model

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")

FIXED = DraftingConfig(policy="fixed", max_draft_length=3)
NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
SIZES: dict[str, dict[str, int]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},  # stored by input, with biases and a gate of its own
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 40},
}


def drafted(precision: str) -> SelfSpeculativeConfig:
    return SelfSpeculativeConfig(drafting=FIXED, precision=PrecisionConfig(default=precision))


def mixture(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return enable_self_speculative(tiny_model(family, **SIZES[family]).to(dtype))


def text(model: Any, config: SelfSpeculativeConfig | None) -> torch.Tensor:
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(prompt(9), **options, self_speculative=config)  # type: ignore[no-any-return]


class Stored(nn.Module):
    """A layer of experts in the form of transformers' interface."""

    num_experts, has_gate = 5, True

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(layer.up), nn.Parameter(layer.down)
        self.has_bias, self.is_transposed = layer.biases[0] is not None, layer.by_input
        if self.has_bias:
            self.gate_up_proj_bias, self.down_proj_bias = map(nn.Parameter, layer.biases)  # type: ignore[arg-type]
        self.act_fn, self.own = nn.SiLU(), layer.gate

    def _apply_gate(self, opened: torch.Tensor) -> torch.Tensor:
        return self.own(opened)


# --- kernels


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("precision", "group"), [("int8", 0), ("int4", 32), ("int4", 64)])
@pytest.mark.parametrize(
    ("tokens", "slots", "middle"), [(1, 2, 128), (3, 1, 128), (7, 4, 128), (40, 2, 128), (3, 2, 144)]
)  # 144 is not a multiple of 32: int8 is packed in the first product alone
def test_an_expert_is_its_own_two_copies(
    tokens: int, slots: int, middle: int, precision: str, group: int, dtype: torch.dtype, by_input: bool
) -> None:
    if middle % max(32, group) and precision == "int4":
        pytest.skip("no copy can be made of it")
    layer = Layer(dtype, 5, 192, middle, rows=80, by_input=by_input)
    stored = Stored(layer)
    copy = ExpertsCopy(matrices_of_experts(stored), stored, precision, group or 32)
    x, chosen, weights = layer.inputs(tokens, slots, torch.float32)
    x = x.bfloat16()
    single = [
        [LowBitCopy([(w[e], None if b is None else b[e])], precision, group or 32) for e in range(5)]
        for w, b in matrices_of_experts(stored)
    ]
    expected = torch.zeros(tokens, 80)
    for token, its in enumerate(chosen.tolist()):
        for slot, expert in enumerate(its):
            opened = single[0][expert].whole(x[token][None])
            expected[token] += single[1][expert].whole(layer.gate(opened))[0].float() * weights[token, slot]
    found = copy.native(x, chosen, weights)
    assert found.dtype is torch.bfloat16 and (found.float() - expected).norm() < 0.01 * expected.norm()
    assert torch.equal(found, expected.bfloat16())  # with torch's gate in both
    alone = torch.cat([copy.native(x[at][None], chosen[at][None], weights[at][None]) for at in range(tokens)])
    assert torch.equal(found, alone)
    exact = layer(x.to(dtype), chosen, weights.to(dtype)).float()
    assert (found.float() - exact).norm() < (0.03 if precision == "int8" else 0.25) * exact.norm()


@pytest.mark.parametrize("products", ["avx2", ""])  # without AVX-512's instruction; with none for integers
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_other_processors(precision: str, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if products == "avx2" and integer_products() == "":
        pytest.skip("this processor has no AVX2")
    layer = Layer(torch.float32, 5, 96, 64, by_input=True)
    stored = Stored(layer)
    here = ExpertsCopy(matrices_of_experts(stored), stored, precision)
    for module in (linear, experts):
        monkeypatch.setattr(module, "integer_products", lambda: products)
    there = ExpertsCopy(matrices_of_experts(stored), stored, precision)
    x, chosen, weights = layer.inputs(6, 2, torch.float32)
    found, expected = (copy.native(x.bfloat16(), chosen, weights).float() for copy in (there, here))
    assert (found - expected).norm() < 0.03 * expected.norm()
    exact = layer(x, chosen, weights)
    assert (found - exact).norm() < (0.03 if precision == "int8" else 0.25) * exact.norm()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_expert_nobody_chose_is_not_read(precision: str) -> None:
    layer = Layer(torch.float32, 5, 64, 32)
    stored = Stored(layer)
    copy = ExpertsCopy(matrices_of_experts(stored), stored, precision)
    x, _, weights = layer.inputs(2, 2, torch.float32)
    chosen = torch.tensor([[0, 2], [2, 4]])
    before = copy.native(x.bfloat16(), chosen, weights)
    with torch.inference_mode():
        for matrices in copy._products:
            assert matrices.scales is not None
            matrices.scales[[1, 3]] = torch.nan
    assert torch.equal(before, copy.native(x.bfloat16(), chosen, weights)) and before.isfinite().all()
    assert copy.native(x.bfloat16(), torch.tensor([[0, 1], [2, 4]]), weights)[0].isnan().any()
    none = torch.tensor([[-1, 7], [-1, 7]])
    assert not copy.native(x.bfloat16(), none, weights).any()


# --- drafts


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("family", SIZES)
def test_drafts_compute_from_copies_of_experts(
    family: str, precision: str, dtype: torch.dtype, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture(family, dtype)
    config = drafted(precision)
    if not is_captured:
        model.model.norm.register_forward_hook(lambda *_: None)
    undrafted = text(model, NOTHING)
    copies = copies_of(model, config.skip, config.precision)  # type: ignore[arg-type]
    layers = experts_of(model)
    assert layers and copies.experts.keys() == {id(layer) for layer in layers}
    found = text(model, config)
    assert torch.equal(found, undrafted) or dtype is torch.bfloat16  # tiny sizes are not the same at all widths
    rate = model.last_speculation.acceptance_rate
    assert rate > (0.7 if precision == "int8" else 0.15)
    assert (draft_of(model, config)[1] is not None) is is_captured
    # With other numbers in the copies, other tokens are drafted, and the text is the same.
    with torch.inference_mode():
        for copy in copies.experts.values():
            for matrices in copy._products:
                assert matrices.scales is not None
                matrices.scales.zero_()
    assert torch.equal(text(model, config), undrafted) or dtype is torch.bfloat16
    assert model.last_speculation.acceptance_rate < rate


def test_layers_that_are_called_otherwise_run_as_they_are() -> None:
    model = mixture("mixtral")
    layer: Any = experts_of(model)[0]
    copy = ExpertsCopy(matrices_of_experts(layer), layer, "int8")
    forward = copy.forward_of(layer)
    x, chosen, weights = torch.randn(3, 64), torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2)
    exact = layer(x, chosen, weights)
    assert not torch.equal(forward(x, chosen, weights), exact)
    assert torch.equal(forward(x, chosen, top_k_weights=weights), exact)


def test_skipped_layers_have_no_copies() -> None:
    model = mixture("mixtral")
    precision = PrecisionConfig(default="int4", mlp={0: None, 1: "int8"})
    copies = LowBitCopies(model, SkipConfig(mlp=[2]), precision)
    layers = experts_of(model)
    assert {at for at, layer in enumerate(layers) if id(layer) in copies.experts} == {1, 3}
    assert [copies.experts[id(layers[at])].precision for at in (1, 3)] == ["int8", "int4"]
    assert copies.precisions() == {"int4", "int8"} and copies.left == []


@pytest.mark.parametrize("precision", [PrecisionConfig(default="int8"), PrecisionConfig(default="int4", group_size=64)])
@pytest.mark.parametrize("family", SIZES)
def test_the_estimate_is_what_the_copies_take(family: str, precision: PrecisionConfig) -> None:
    model = mixture(family)
    estimate = estimated_bytes(model, SkipConfig(), precision)
    copies = copies_of(model, SkipConfig(), precision)
    assert estimate == copy_bytes(model) == copies.num_bytes()


def test_experts_that_are_not_copied_are_reported() -> None:
    model = mixture("mixtral")
    first, second, third, _ = experts_of(model)
    nn.utils.parametrize.register_parametrization(first, "down_proj", nn.Identity())
    second.double()
    third.gate_up_proj = nn.Parameter(third.gate_up_proj[:, :-8].clone())  # type: ignore[index]
    left = LowBitCopies(model, SkipConfig(), PrecisionConfig(default="int8")).left
    reasons = ["in a form that has no kernels", "these are float64", "in a form that has no kernels"]
    assert [reason in one for one, reason in zip(left, reasons, strict=True)] == [True] * 3
    odd = enable_self_speculative(tiny_model("mixtral", intermediate_size=40))
    left = LowBitCopies(odd, SkipConfig(), PrecisionConfig(default="int4")).left
    assert len(left) == 4 and all("experts (its 40 input channels are not a multiple" in one for one in left)


def test_experts_that_move_are_quantised_again() -> None:
    model = mixture("qwen3_moe")
    config = drafted("int8")
    text(model, config)
    copies = copies_of(model, config.skip, config.precision)  # type: ignore[arg-type]
    assert copies.is_current(model) and copies.drift(model) == 0
    layer: Any = experts_of(model)[1]
    held = copies.experts[id(layer)]._products[1]
    with torch.no_grad():
        layer.down_proj.mul_(1.01)
    assert not copies.is_current(model) and 0 < copies.drift(model) < 0.02
    assert held.scales is not None
    before, address = held.scales.clone(), held.weight.data_ptr()
    copies.rewrite(model)
    assert copies.drift(model) == 0 and held.weight.data_ptr() == address
    assert torch.allclose(held.scales, before * 1.01, rtol=0.01) and not torch.equal(held.scales, before)
    with torch.no_grad():
        layer.down_proj.copy_(layer.down_proj.flip(0))
    assert torch.equal(text(model, config), text(model, NOTHING))
    assert model.last_speculation is not None
    assert copies_of(model, config.skip, config.precision) is not copies  # type: ignore[arg-type]


def test_copies_are_made_again_from_their_tensors() -> None:
    stored = Stored(Layer(torch.float32, 5, 64, 32, by_input=True))
    for precision in ("int8", "int4"):
        copy = ExpertsCopy(matrices_of_experts(stored), stored, precision)
        tensors = {name: tensor.clone() for name, tensor in copy.tensors().items()}
        again = ExpertsCopy.of_tensors(tensors, stored, precision, 32)
        assert (again.num_bytes(), again.num_weights) == (copy.num_bytes(), copy.num_weights)
        x, chosen, weights = torch.randn(3, 64).bfloat16(), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
        assert torch.equal(again.native(x, chosen, weights), copy.native(x, chosen, weights))
        for name in tensors:
            with pytest.raises((KeyError, ValueError)):
                ExpertsCopy.of_tensors({**tensors, name: tensors[name][1:]}, stored, precision, 32)
            with pytest.raises((KeyError, ValueError)):
                ExpertsCopy.of_tensors({k: v for k, v in tensors.items() if k != name}, stored, precision, 32)


def test_drafts_of_rounded_weights_are_accepted() -> None:
    for family in ("mixtral", "gpt_oss"):
        model = mixture(family)
        text(model, drafted("int4"))
        before = model.last_speculation.acceptance_rate
        model = mixture(family)
        round_to_int4(model)
        text(model, drafted("int4"))
        assert model.last_speculation.acceptance_rate > max(before, 0.6)


# --- offloaded weights


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # older versions of transformers
def test_experts_of_offloaded_models_are_copied(tmp_path: Path) -> None:
    from test_offloaded import draft_of as resident_of
    from test_offloaded import on_disk

    made = []
    for _ in range(2):
        model = on_disk(tmp_path, tiny_model("gpt_oss", **SIZES["gpt_oss"]))
        plain = text(model, None)
        assert torch.equal(plain, text(model, drafted("int4")))
        assert model.last_speculation.accepted_tokens > 4
        resident = resident_of(model)
        (copies,) = state_of(resident.model).get(CopiesPart).low_bit_drafts.values()
        assert len(copies.experts) == 4
        # No expert is in memory as it was loaded.
        assert all(p.untyped_storage().nbytes() < 100 for one in experts_of(resident.model) for p in one.parameters())
        made.append((resident.made, resident.read))
    assert made[0][1] == 0 and made[1] == (0, made[0][0])


# --- choosing


@pytest.mark.parametrize(("each", "is_tried"), [(0.9, False), (0.6, True)])
def test_no_copies_are_made_where_no_draft_can_pay(
    each: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture("mixtral")
    costs = Costs(plain_step=1.0, draft_step=0.5, verify=[(n, 1 + each * (n - 1)) for n in range(1, 14)])
    monkeypatch.setattr(automatic, "costs_of", lambda *_, **__: costs)
    made = []
    original = ExpertsCopy.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(1)
        original(self, *args)

    monkeypatch.setattr(ExpertsCopy, "__init__", counted)
    choice = automatic._choose(model, ["int8", "int4"], prompt(20))
    assert bool(made) is is_tried and choice["precision"] is None
    assert choice["tried"]["int4"]["of"] == (20 if is_tried else 0)
    assert copy_bytes(model) == 0 or is_tried
    dense = enable_self_speculative(tiny_model("llama"))
    assert automatic._choose(dense, ["int8"], prompt(20))["tried"]["int8"]["of"] == 20
