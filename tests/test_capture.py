"""Captured passes: models that have them, obstacles to capture, and how they follow every change of the model."""

from __future__ import annotations

import gc
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging import version
from torch import nn
from transformers import PreTrainedModel, masking_utils, modeling_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.cache import buffered_layers as cache
from ssd_generation.forward.captured import model_calls, replacing
from ssd_generation.forward.captured.capture import CannotCapture, capture_pass
from ssd_generation.forward.captured.conditions import why_not_captured, windows_of
from ssd_generation.forward.captured.fx_graph import CapturedPass, at_length, of_any_length, same_pass
from ssd_generation.forward.captured.passes import CapturedPasses, captured_target
from ssd_generation.forward.captured.rewrites import share_results
from ssd_generation.support.versions import CACHE
from tiny_models import FAMILIES, WINDOW, forget_measurements, left_padded, prompt, tiny_model

CONFIG = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[0]), DraftingConfig(policy="fixed", max_draft_length=2))
NEW = 10


@pytest.fixture
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model("llama", num_hidden_layers=2))


def texts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plain and the self-speculative text."""
    options = {"max_new_tokens": NEW, "do_sample": False}
    return model.generate(prompt(9), **options), model.generate(prompt(9), **options, self_speculative=CONFIG)


def same_text(model: Any) -> bool:
    return torch.equal(*texts(model))


def refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why the model's passes are not captured; `None` if they are."""
    reason = why_not_captured(model)
    if reason is None:
        passes = CapturedPasses(model)
        if passes.program(3) is None:
            reason = passes.refusal or "no reason given"
    return reason


# --- captured families
# --------------------------------------------------------------------------------------------------

OWN_ATTENTION = "code of its own"
WINDOWED = ("gemma2", "gemma3", "gpt_oss", "mistral", "qwen2-sliding")
# `None`: captured. Only speed depends on a family's entry here, but a change should be noticed.
REFUSALS = {
    **dict.fromkeys(FAMILIES),
    **dict.fromkeys(("bloom", "bloom-post-residual", "mpt"), OWN_ATTENTION),
    "falcon-alibi": "mask",
}


OF_TODAYS_CODE = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.24"), reason="the table is of today's modelling code"
)


@OF_TODAYS_CODE
@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_are_captured(family: str) -> None:
    reason, expected = refusal(tiny_model(family)), REFUSALS[family]
    if expected is None:
        assert reason is None
    else:
        assert reason is not None
        with pytest.raises(CannotCapture, match=expected):
            raise CannotCapture(reason)


@pytest.mark.measures  # the bits of passes over several rows
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "kind"), [*itertools.product(WINDOWED, ("int8", "skip")), ("llama4", "skip")])
def test_drafts_beyond_a_sliding_window_are_captured(family: str, kind: str, rows: int, passes: dict[str, int]) -> None:
    drafting = DraftingConfig(policy="fixed", max_draft_length=WINDOW + 3)
    config = SelfSpeculativeConfig(precision="int8", drafting=drafting)
    if kind == "skip":
        config = SelfSpeculativeConfig(skip=SkipConfig(attention=[1]), drafting=drafting)
    model: Any = enable_self_speculative(tiny_model(family))
    model.generation_config.eos_token_id = None
    options = {**left_padded([21, 15, 18][:rows]), "max_new_tokens": 40, "do_sample": False}
    undrafted = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
    expected = model.generate(**options, self_speculative=undrafted)  # the model's check, too
    passes.update(dict.fromkeys(passes, 0))
    assert torch.equal(model.generate(**options, self_speculative=config), expected)
    assert passes["captured drafts"] > 5 and not passes["drafts by own code"]
    if kind == "int8":
        assert model.last_speculation.acceptance_rate > 0.4


@pytest.mark.measures
@pytest.mark.parametrize("rows", [1, 3])
def test_gpt_neos_own_attention_is_captured(rows: int, passes: dict[str, int]) -> None:
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=128, max_position_embeddings=128,
        attention_types=[[["global", "local"], 2]], window_size=WINDOW, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    enable_self_speculative(model)
    options = {**left_padded([21, 15, 18][:rows]), "max_new_tokens": 40, "do_sample": False, "no_repeat_ngram_size": 2}
    plain = model.generate(**options)
    assert len(plain[0, 21:].unique()) > 5
    for config in (
        SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")),
        SelfSpeculativeConfig(precision="int8", drafting=DraftingConfig(policy="fixed", max_draft_length=4)),
    ):
        passes.update(dict.fromkeys(passes, 0))
        assert torch.equal(model.generate(**options, self_speculative=config), plain)
        assert passes["captured"] and not passes["drafts by own code"]
    assert passes["captured drafts"] and not passes["own code"]
    assert model.last_speculation.acceptance_rate > 0.5


def test_capturing_runs_no_large_product_and_leaves_no_trace(model: PreTrainedModel) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = capture_pass(model, 3, 7)
    assert made.length == 3 and len([node for node in made.nodes if node.target == "attend"]) == 2
    assert made.nodes[-1].op == "output" and made.nodes[-1].args[0].meta["shape"] == (1, 3, 64)
    made.graph.lint()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert len(made.constants) > 15 and all(id(tensor) in known for tensor in made.constants.values())


# --- obstacles to capture
# --------------------------------------------------------------------------------------------------

arange: Any = torch.arange  # it takes a tensor, despite its annotations
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "item": lambda x: x * (2.0 if x.sum().item() > 0 else 0.5),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "int": lambda x: x * (int(x.sum()) % 2),
    "float": lambda x: x * float(x[0, 0, 0]),
    "index": lambda x: x * [1.0, 0.5][(x[0, 0, 0] > 0).long()],
    "list": lambda x: x * x.flatten().tolist()[0],
    "NumPy": lambda x: x * float(np.asarray(x.detach()).sum()),
    "numpy": lambda x: x * float(x.numpy().sum()),
    "equality": lambda x: x if x.equal(x.abs()) else -x,
    "closeness": lambda x: x if torch.allclose(x, x.abs()) else -x,
    "membership": lambda x: x if 0.0 in x else -x,
    "nonzero": lambda x: x * (x > 0).nonzero().shape[0],
    "positions": lambda x: x * torch.where(x > 0)[0].shape[0],
    "unique": lambda x: x * x.sign().unique().shape[0],
    "boolean index": lambda x: x + x[x > 0].sum(),
    "masked": lambda x: x + x.masked_select(x > 0).sum(),
    "repeated": lambda x: x + x.repeat_interleave((x[0, 0] > 0).long(), dim=-1).sum(),
    "range": lambda x: x + arange((x[0, 0] > 0).sum()).sum(),
}
RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: x + torch.rand(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randperm": lambda x: x[..., torch.randperm(x.shape[-1])],
    "normal": lambda x: x + torch.normal(x, 1.0),
    "multinomial": lambda x: x + torch.multinomial(x[0].softmax(-1), 1).sum(),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=True),
    "dropout, by place": lambda x: nn.functional.dropout(x, 0.5, True),
}
OUTSIDE = torch.zeros(())


def set_entry(x: torch.Tensor) -> torch.Tensor:
    OUTSIDE[...] = 1.0
    return x


WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": lambda x: x + OUTSIDE.add_(1),
    "by operator": lambda x: x + OUTSIDE.__iadd__(1),
    "an entry": set_entry,
    "out": lambda x: x + torch.sum(x, (0, 1, 2), out=OUTSIDE),
}


def changed_mlp(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change llama's MLP within its own class: the change is invisible from outside."""
    original = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: original(self, change(x)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[pytest.param(change, "depends on values", id=name) for name, change in READS.items()],
        *[pytest.param(change, "depends on values|random", id=name) for name, change in RANDOM.items()],
        *[pytest.param(change, "tensor that outlives it", id=name) for name, change in WRITES.items()],
    ],
)
def test_what_a_capture_could_not_follow_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    OUTSIDE.zero_()
    changed_mlp(monkeypatch, change)
    with pytest.raises(CannotCapture, match=message):
        capture_pass(tiny_model("llama", num_hidden_layers=2), 1, 7)
    assert OUTSIDE == 0, "something outside was written to"


def by_token(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([token * (2.0 if token[0].item() > 0 else 0.5) for token in x[0]])[None]


def by_element(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0] = 2 * x[x > 0]
    return x


@pytest.mark.parametrize("change", [by_token, by_element])
def test_a_refused_model_gives_its_own_text(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, change: Any
) -> None:
    before, _ = texts(model)
    changed_mlp(monkeypatch, change)
    plain, ours = texts(model)
    assert torch.equal(plain, ours) and not torch.equal(plain, before)
    passes = captured_target(model)
    assert passes is not None and passes.refusal is not None and "depends on values" in passes.refusal


def test_harmless_calls_are_captured(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    def harmless(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(x, 0.5, training=False).clone()
        y = nn.functional.dropout(nn.functional.dropout(y, 0.0, training=True), p=0.0)
        y[..., :2] *= 2
        y.add_(x.shape[-1] / 100).mul_(torch.ones_like(y))
        return y.to(x.dtype).contiguous().split(8, -1)[0].repeat(1, 1, 4) + torch.where(y > 0, y, 0.5 * y)

    changed_mlp(monkeypatch, harmless)
    assert refusal(model) is None and same_text(model)


def test_numbers_from_the_caches_length_are_seen(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    assert same_pass(capture_pass(model, 2, 7), capture_pass(model, 2, 19))
    assert not same_pass(capture_pass(model, 2, 7), capture_pass(model, 3, 7))  # other shapes
    original = modeling_llama.LlamaAttention.forward

    def by_length(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = original(self, *args, **kwargs)
        return output * (1 + kwargs[CACHE].get_seq_length() / 10), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", by_length)
    assert not same_pass(capture_pass(model, 2, 7), capture_pass(model, 2, 19))
    assert same_pass(capture_pass(model, 2, 7), capture_pass(model, 2, 7))
    assert "depends on the length of the text" in str(refusal(model))


def longer(model: PreTrainedModel) -> CapturedPass | None:
    windows = windows_of(model)
    lengths = (2, 7), (3, 19), (33, 11)
    return of_any_length([capture_pass(model, length, cached, windows) for length, cached in lengths])


@OF_TODAYS_CODE
@pytest.mark.parametrize("family", [family for family in FAMILIES if REFUSALS[family] is None])
def test_a_pass_of_any_length_is_the_one_that_the_model_gives(family: str) -> None:
    model = tiny_model(family)
    common = longer(model)
    assert common is not None
    for length in (2, 4, 7, 13, 32):
        made, recorded = at_length(common, length), capture_pass(model, length, 5, windows_of(model))
        assert made.length == length and same_pass(made, recorded)
        assert made.constants.keys() == recorded.constants.keys()
    assert not same_pass(at_length(common, 4), capture_pass(model, 5, 5, windows_of(model)))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x if x.shape[1] <= 8 else x.clone(),
        lambda x: x + torch.zeros(x.shape[1] ** 2).sum(),
        lambda x: x + 0 * float(x.shape[1]) * x + x.shape[1] / 1e9,
        lambda x: x.reshape(tuple(x.shape)) if x.shape[1] != 3 else x.reshape(list(x.shape)),
    ],
    ids=["other operations", "a square", "a fraction", "another type"],
)
def test_lengths_that_differ_are_captured_one_by_one(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    changed_mlp(monkeypatch, change)
    assert longer(model) is None
    passes = CapturedPasses(model)
    assert passes.program(4) is not None and passes.program(12) is not None and passes.refusal is None


def test_a_context_too_short_for_the_longest_pass() -> None:
    model = tiny_model("gpt2", n_positions=32)
    passes = CapturedPasses(model)
    assert passes.program(4) is not None and passes.program(9) is not None and passes.refusal is None


def test_what_hangs_on_the_cache_is_of_no_length(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    original = modeling_llama.LlamaAttention.forward

    def by_length(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = original(self, *args, **kwargs)
        return output + torch.zeros(kwargs[CACHE].get_seq_length()).sum(), weights

    assert longer(model) is not None
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", by_length)
    assert longer(model) is None


def test_a_wrong_capture_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    from ssd_generation.forward.captured import passes

    def wrong(made: Any) -> None:
        gate = next(node for node in made.nodes if node.target is nn.functional.silu)
        gate.target = nn.functional.relu
        share_results(made)

    monkeypatch.setattr(passes, "share_results", wrong)
    assert "different logits" in str(refusal(model))


def test_a_capture_in_the_middle_of_a_call_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel
) -> None:
    seen: list[Any] = []
    original = modeling_llama.LlamaModel.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.rope_deltas)
        self.rope_deltas = torch.tensor([[len(seen)]])  # as models do that take pictures
        return original(self, *args, **kwargs)

    counting.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", counting)
    found: Any = model
    found.model.rope_deltas = left = torch.tensor([[-3]])
    state = torch.get_rng_state()
    assert CapturedPasses(model).program(3) is not None and len(seen) > 3
    assert found.model.rope_deltas is left and torch.equal(torch.get_rng_state(), state)


@pytest.mark.measures
def test_a_later_process_compares_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tmp_path: Path
) -> None:
    from ssd_generation.forward.captured import passes, trial

    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    compared: list[int] = []
    agrees = trial._agrees

    def counted(*args: Any) -> bool:
        compared.append(0)
        return agrees(*args)

    monkeypatch.setattr(trial, "_agrees", counted)

    def times(of: PreTrainedModel) -> int:
        """Return how often a pass was compared, as in a new process."""
        forget_measurements()
        compared.clear()
        assert refusal(of) is None
        return len(compared)

    assert times(model) >= 2
    assert times(model) == 0
    for length in (1, 2, 5):  # one capture gives all of them
        forget_measurements()
        compared.clear()
        assert CapturedPasses(model).program(length) is not None
        assert not compared
    other = enable_self_speculative(tiny_model("llama", num_hidden_layers=2))
    assert times(other) == 0, "the same numbers"
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    assert times(other) >= 2
    monkeypatch.setattr(trial, "code_of_package", lambda: "another version")
    assert times(model) >= 2

    def wrong(made: Any) -> None:
        gate = next(node for node in made.nodes if node.target is nn.functional.silu)
        gate.target = nn.functional.relu
        share_results(made)

    monkeypatch.setattr(passes, "share_results", wrong)
    for _ in range(2):  # what is wrong is not stored
        forget_measurements()
        assert "different logits" in str(refusal(model))


def test_attention_has_no_gaps(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    # Some models view the result as rows of all heads.
    original = replacing.own_attention

    def viewing(make: Callable[..., Any], own_mask: Any) -> Any:
        function = make(None)
        return original(
            lambda _: (
                lambda *args, **kwargs: (lambda out, w: (out.view(*out.shape[:2], -1), w))(*function(*args, **kwargs))
            ),
            own_mask,
        )

    monkeypatch.setattr(model_calls, "own_attention", viewing)
    passes = CapturedPasses(model)
    assert passes.program(1) is not None and passes.program(5) is not None


# --- models whose passes are not captured
# --------------------------------------------------------------------------------------------------


class ForeignNorm(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.inner(x)  # type: ignore[no-any-return]


def add_hook(model: Any) -> Any:
    return model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 0.5 * output)


def add_pre_hook(model: Any) -> Any:
    return model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))


def add_global_hook(model: Any) -> Any:
    def halve(module: nn.Module, args: Any, output: Any) -> Any:
        return 0.5 * output if type(module).__name__ == "LlamaMLP" else None

    return nn.modules.module.register_module_forward_hook(halve)


class Undo:
    """Stand-in for a hook's handle: `remove` undoes the change."""

    def __init__(self, remove: Callable[[], Any]) -> None:
        self.remove = remove


def patch_forward(model: Any) -> Any:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 0.5 * type(mlp).forward(mlp, x)
    return Undo(lambda: mlp.__dict__.pop("forward"))


def put_in_a_foreign_module(model: Any) -> Any:
    layer = model.model.layers[1]
    inner = layer.input_layernorm
    layer.input_layernorm = ForeignNorm(inner).eval()
    return Undo(lambda: setattr(layer, "input_layernorm", inner))


def use_another_attention(model: Any) -> Any:
    transformers.AttentionInterface.register("another", ALL_ATTENTION_FUNCTIONS["sdpa"])
    transformers.AttentionMaskInterface.register("another", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("another")
    return Undo(lambda: model.set_attn_implementation("sdpa"))


@pytest.mark.parametrize(
    ("change", "message", "same"),
    [
        (add_hook, "hook is installed on LlamaMLP", False),
        (add_pre_hook, "hook is installed on LlamaMLP", False),
        (add_global_hook, "global module hooks", False),
        (patch_forward, "forward of LlamaMLP is patched", False),
        (put_in_a_foreign_module, "ForeignNorm is not a class of torch, transformers or PEFT", False),
        (use_another_attention, "not sdpa", True),
    ],
)
def test_changed_models_are_run_as_they_are(model: Any, change: Any, message: str, same: bool) -> None:
    before, _ = texts(model)
    handle = change(model)
    try:
        assert message in str(why_not_captured(model)) and captured_target(model) is None
        plain, ours = texts(model)
        assert torch.equal(plain, ours)
        assert torch.equal(plain, before) == same
    finally:
        handle.remove()
    assert why_not_captured(model) is None
    assert all(torch.equal(text, before) for text in texts(model))


def add_fused_head(model: Any) -> None:
    """Wrap the forward as TRL does, whose wrapper is known by the module and the name of its code."""
    code = """
def add(model, types):
    original_forward = model.forward
    def _fused_forward(self, *args, fused_lm_head=False, **kwargs):
        assert not fused_lm_head
        return original_forward(*args, **kwargs)
    model.forward = types.MethodType(_fused_forward, model)
"""
    names: dict[str, Any] = {"__name__": "trl.trainer.utils"}
    exec(code, names)
    names["add"](model, types)


@pytest.mark.parametrize("change", [add_fused_head, lambda model: model.enable_input_require_grads()])
def test_models_in_training_are_captured(model: Any, change: Any) -> None:
    before, _ = texts(model)
    change(model)
    model.train()
    assert why_not_captured(model) is None and captured_target(model) is not None
    assert all(torch.equal(text, before) for text in texts(model))
    assert same_text(model) and refusal(model) is None


def test_a_wrapper_hides_no_patch(model: Any) -> None:
    model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
    add_fused_head(model)
    assert "forward of LlamaForCausalLM is patched" in str(why_not_captured(model))


def test_other_things_in_the_way(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in str(why_not_captured(model))
    assert why_not_captured(model) is None
    with torch.device("meta"):
        away = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    assert "not on the CPU" in str(why_not_captured(away))
    model.model.layers[0]._compiled_call_impl = lambda *args, **kwargs: None  # as set by `layer.compile()`
    assert "compiled" in str(why_not_captured(model))


# --- a model that changes
# --------------------------------------------------------------------------------------------------


def other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)).to(tensor.dtype)


def in_place(module: Any) -> None:
    with torch.no_grad():
        module.weight.copy_(other(module.weight))


def in_place_unseen(module: Any) -> None:
    module.weight.data.copy_(other(module.weight))  # no version counter shows this


def replaced(module: Any) -> None:
    module.weight = nn.Parameter(other(module.weight))


def new_data(module: Any) -> None:
    module.weight.data = other(module.weight)


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def exchange_module(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    new = type(mlp)(model.config).eval()
    for parameter in new.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    model.model.layers[1].mlp = new


def load_others(model: Any) -> None:
    model.load_state_dict(tiny_model("llama", seed=7, num_hidden_layers=2).state_dict())


def rescale_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def exchange_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU().eval()


CHANGES: dict[str, Callable[[Any], None]] = {
    **{
        f"{place}, {how.__name__}": (lambda model, how=how, place=place: how(model.get_submodule(place)))  # type: ignore[misc]
        for place in ("model.norm", "model.layers.1.input_layernorm", "model.layers.0.mlp.down_proj")
        for how in (in_place, in_place_unseen, replaced, new_data)
    },
    "embedding in place": lambda model: in_place(model.model.embed_tokens),
    "layers swapped": swap_layers,
    "a module exchanged": exchange_module,
    "state loaded": load_others,
    "a number": rescale_attention,
    "an activation": exchange_activation,
    "another dtype": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_text_is_that_of_the_changed_model(model: Any, name: str) -> None:
    before, ours = texts(model)
    assert torch.equal(before, ours)
    CHANGES[name](model)
    plain, ours = texts(model)
    assert torch.equal(plain, ours)
    assert name == "another dtype" or not torch.equal(plain, before), "the change changed nothing"
    passes = captured_target(model)
    assert passes is not None and passes.refusal is None and any(passes._programs.values()), "not captured any more"


def test_a_patched_class_is_captured_anew(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    before, _ = texts(model)
    changed_mlp(monkeypatch, lambda x: 0.5 * x)
    plain, ours = texts(model)
    assert torch.equal(plain, ours) and not torch.equal(plain, before)


def test_an_unchanged_model_is_not_captured_again(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    from ssd_generation.forward.captured import any_length

    lengths = []

    def watched(model: Any, length: int, *args: Any) -> Any:
        lengths.append(length)
        return capture_pass(model, length, *args)

    monkeypatch.setattr(any_length, "capture_pass", watched)
    texts(model)
    # Passes of three lengths, from which all others are derived, for the model and for its draft.
    assert sorted(lengths) == [2, 2, 3, 3, 33, 33]
    lengths.clear()
    texts(model)
    assert lengths == []


# --- transformers' attention functions
# --------------------------------------------------------------------------------------------------


def mappings() -> list[dict[str, Any]]:
    return [
        {**dict(functions._global_mapping), **dict(functions._local_mapping)}
        for functions in (modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    ] + [
        dict(functions._local_mapping)
        for functions in (modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    ]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("users_own", [False, True])
def test_attention_functions_are_as_before(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, breaks: bool, users_own: bool
) -> None:
    if users_own:
        known = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setitem(
            modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping,
            "sdpa",
            lambda *args, **kwargs: known(*args, **kwargs),
        )
    before = mappings()
    inside = []

    def look(x: torch.Tensor) -> torch.Tensor:
        inside.append(mappings())
        if breaks:
            raise KeyboardInterrupt
        return x

    changed_mlp(monkeypatch, look)
    try:
        capture_pass(model, 1, 7)
    except KeyboardInterrupt:
        assert breaks
    assert mappings() == before
    assert inside and all(seen != before for seen in inside)


def test_other_threads_attention_is_their_own(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    second = tiny_model("qwen2")
    with torch.no_grad():
        expected = second(prompt(9)).logits
    seen: list[Any] = []

    def run() -> None:
        try:
            with torch.no_grad():
                seen.append(second(prompt(9)).logits)
        except BaseException as error:
            seen.append(error)

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        return x

    changed_mlp(monkeypatch, elsewhere)
    capture_pass(model, 1, 7)
    assert len(seen) == 2
    for logits in seen:
        assert isinstance(logits, torch.Tensor) and torch.equal(logits, expected)


def test_two_threads_that_record() -> None:
    # The second waits for the first, and must not mistake the first one's attention for transformers' own.
    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS
    original = functions["sdpa"]
    leave, first_left, done = (threading.Event() for _ in range(3))
    found: list[Any] = []

    def second() -> None:
        with replacing.own_attention(lambda _: lambda *args: "the second one's", lambda *_: None):
            first_left.wait(60)
            found.append(functions["sdpa"]())
            done.set()
            leave.wait(60)

    # The first runs in this thread, so that this thread's attention can be checked afterwards.
    with replacing.own_attention(lambda _: lambda *args: "the first one's", lambda *_: None):
        other_thread = threading.Thread(target=second)
        other_thread.start()
        other_thread.join(0.1)  # it is waiting for the first by now
        assert functions["sdpa"]() == "the first one's"
    first_left.set()
    assert done.wait(60)
    with pytest.raises(TypeError):  # transformers' own, which needs arguments
        functions["sdpa"]()
    leave.set()
    other_thread.join(60)
    assert found == ["the second one's"] and functions["sdpa"] is original


def test_no_cache_outlives_its_call(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Check that growth frees old buffers too: the buffers that captured passes read are held by the cache alone."""
    rooms: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original = cache._new_buffer

    def new_buffer(like: torch.Tensor, slots: int) -> torch.Tensor:
        room = original(like, slots)
        alive.append(sum(other() is not None for other in rooms))
        rooms.append(weakref.ref(room))
        return room

    ids = prompt(9)
    model.generate(ids, max_new_tokens=40, do_sample=False, self_speculative=CONFIG)  # type: ignore[operator]
    # Everything is captured now.
    monkeypatch.setattr(cache, "_new_buffer", new_buffer)
    monkeypatch.setattr(cache, "_MIN_SPARE", 1)
    model.generate(ids, max_new_tokens=40, do_sample=False, self_speculative=CONFIG)  # type: ignore[operator]
    gc.collect()
    assert len(rooms) > 20 and captured_target(model) is not None
    assert not [room for room in rooms if room() is not None]
    # Keys and values of two layers, and one more buffer of the layer that is growing.
    assert max(alive) <= 2 * 2 + 1
