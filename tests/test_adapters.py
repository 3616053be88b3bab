"""Adapters (PEFT): drafts follow those in use and use nothing of others, whatever was switched and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.batch_invariance import NATIVE, BatchInvariance
from ssd_generation.forward.captured.passes import captured_target, draft_of
from ssd_generation.forward.copies.low_bit import CopiesPart
from ssd_generation.forward.structure.adapters import AdapterWatch, numbers_of
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning.learnt import LearntPart
from ssd_generation.tuning.moving_weights import weights_in_use
from tiny_models import prompt, tiny_model

peft = pytest.importorskip("peft")
# peft's own use of a renamed transformers property, and its warnings about merging and adding adapters
pytestmark = pytest.mark.filterwarnings("ignore")

needs_kernels = pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
REQUESTS: dict[str, Any] = {
    "lookup": SelfSpeculativeConfig(lookup=True, drafting=FIXED),
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED),
}
NEW = 24


def lora(*modules: str, rank: int = 4) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(modules), r=rank, lora_alpha=16)


def randomise(model: Any, seed: int = 0) -> None:
    """Give every adapter that is still the identity random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and not parameter.any():
                parameter.normal_(0, 0.6, generator=generator)


@pytest.fixture
def model() -> Any:
    """Build a llama with two adapters, the first of them active."""
    base = tiny_model("llama", hidden_size=64, intermediate_size=128)
    base.generation_config.eos_token_id = None
    wrapped = peft.get_peft_model(base, lora("q_proj", "down_proj"), adapter_name="first")
    wrapped.add_adapter("second", lora("v_proj", "up_proj", rank=8))
    randomise(wrapped)
    return enable_self_speculative(wrapped.eval())


def texts(model: Any, request: Any = None, **extra: Any) -> torch.Tensor:
    torch.manual_seed(3)
    keys = {} if request is None else {"self_speculative": request}
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **extra, **keys}
    return model.generate(input_ids=prompt(8), **options)  # type: ignore[no-any-return]


def merge_and_unload(model: Any) -> Any:
    return model.merge_and_unload()


def changes(model: Any) -> Iterator[tuple[str, Any]]:
    """Bring a model to one state after the other; yield the state's name and the model to call."""
    yield "first", model
    with model.disable_adapter():
        yield "disabled", model
    model.set_adapter("second")
    yield "second", model
    model.base_model.set_adapter(["first", "second"])
    yield "both", model
    model.add_adapter("third", lora("o_proj"))
    randomise(model, seed=1)
    model.set_adapter("third")
    yield "third, added in between", model
    model.delete_adapter("third")
    model.set_adapter("first")
    yield "third, deleted", model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A.first" in name:
                parameter.mul_(-1)
    yield "first, other weights", model
    model.merge_adapter(["first"])
    yield "merged", model
    model.unmerge_adapter()
    yield "unmerged", model
    model.set_adapter("second")
    yield "merged for good", merge_and_unload(model)


@pytest.mark.parametrize("name", REQUESTS)
def test_text_of_plain_in_every_state(model: Any, name: str) -> None:
    seen = set()
    for state, caller in changes(model):
        plain = texts(caller)
        seen.add(tuple(plain[0].tolist()))
        assert torch.equal(plain, texts(caller, REQUESTS[name])), state
        inner = caller if caller is not model else model.get_base_model()
        assert inner.last_speculation.refusal is None and inner.last_speculation.drafted_tokens > 0, state
    assert len(seen) == 6  # the adapters make a difference


@pytest.mark.parametrize("name", REQUESTS)
def test_drafts_are_of_the_adapter_in_use(model: Any, name: str) -> None:
    # With nothing skipped, or int8 copies, drafts are nearly always right; those of other adapters would not be.
    config = SelfSpeculativeConfig(SkipConfig(), FIXED, precision="int8" if name == "int8" else None)
    if name == "lookup":
        pytest.skip("lookup has no weights")
    for state, caller in changes(model):
        texts(caller, config)
        inner = caller if caller is not model else model.get_base_model()
        accepted = inner.last_speculation.accepted_tokens / inner.last_speculation.drafted_tokens
        assert accepted > (0.6 if name == "int8" else 0.99), state


def test_copies_are_of_merged_weights(model: Any) -> None:
    base = model.get_base_model()
    texts(model, REQUESTS["int8"])
    (before,) = state_of(base).get(CopiesPart).low_bit_drafts.values()
    model.set_adapter("second")
    texts(model, REQUESTS["int8"])
    (switched,) = state_of(base).get(CopiesPart).low_bit_drafts.values()
    assert switched is before  # adapters are computed alongside the copies
    model.merge_adapter(["second"])  # writes into the same weights, unseen by torch's version counters
    texts(model, REQUESTS["int8"])
    (merged,) = state_of(base).get(CopiesPart).low_bit_drafts.values()
    assert merged is not before
    model.unmerge_adapter()
    model.unload()
    plain = base
    assert not merged.is_current(plain)


def test_what_was_learnt_is_of_the_adapter_in_use(model: Any) -> None:
    base = model.get_base_model()
    config = SelfSpeculativeConfig(lookup=True, precision="int8", adapt=True)
    texts(model, config)
    first, refined = state_of(base).get(LearntPart).policies, state_of(base).get(LearntPart).refinements
    assert first and refined
    model.set_adapter("second")
    texts(model, config)
    assert (
        state_of(base).get(LearntPart).policies is not first
        and state_of(base).get(LearntPart).refinements is not refined
    )
    model.set_adapter("first")
    texts(model, config)
    assert state_of(base).get(LearntPart).policies is first and state_of(base).get(LearntPart).refinements is refined


def test_weights_are_told_apart(model: Any) -> None:
    base = model.get_base_model()
    known, numbers = {weights_in_use(base)}, {numbers_of(base)}
    model.set_adapter("second")
    known.add(weights_in_use(base))
    with model.disable_adapter():
        known.add(weights_in_use(base))
    assert len(known) == 3
    model.merge_adapter(["second"])
    assert weights_in_use(base) not in known and numbers_of(base) not in numbers
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_A.first" in name).add_(1)
    assert len(numbers | {numbers_of(base)}) == 2


# --- captured passes

KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: lora("q_proj", "v_proj"),
    "LoRA, all layers": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4),
    "LoRA with a bias": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], lora_bias=True, use_rslora=True
    ),
    "LoRA and a whole layer": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
    "LoRA on embeddings": lambda: lora("q_proj", "embed_tokens"),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
    "LoHa": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
    "HRA": lambda: peft.HRAConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),  # its linear has keywords
}


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a llama with one adapter, none of whose weights are zeros, under a PEFT model that is enabled."""
    base = tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32).to(dtype)
    base.generation_config.eos_token_id = None
    torch.manual_seed(1)
    model = peft.get_peft_model(base, KINDS[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return enable_self_speculative(model.eval())


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_captured_whatever_the_adapter(kind: str) -> None:
    model = adapted(kind)
    base = model.get_base_model()
    passes = captured_target(base, BatchInvariance(NATIVE, (1, 2, 4)))
    assert passes is not None
    assert all(passes.program(tokens) is not None for tokens in (1, 4)), passes.refusal
    plain = texts(model)
    with model.disable_adapter():
        assert not torch.equal(plain, texts(model)), "the adapter makes no difference"
    for name in REQUESTS:
        assert torch.equal(plain, texts(model, REQUESTS[name])), name


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_with_adapters_is_one_list_of_kernels(dtype: torch.dtype) -> None:
    # In bfloat16, PEFT's own weights are float32: two types in one list.
    base = adapted("LoRA, all layers", dtype).get_base_model()
    assert base.model.layers[0].mlp.up_proj.lora_A["default"].weight.dtype is torch.float32
    target = captured_target(base, BatchInvariance(NATIVE, (1, 2, 4)))
    _, draft = draft_of(base, SelfSpeculativeConfig(precision="int8"))
    for passes in (target, draft):
        assert passes is not None and (program := passes.program(1)) is not None
        assert program.source.count("kernels(") == 1 and "linear" not in program.source, program.source


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_drafts_next_to_an_adapter_are_accepted(dtype: torch.dtype) -> None:
    model = adapted("LoRA, all layers", dtype)
    base = model.get_base_model()
    texts(model, REQUESTS["int8"])
    assert base.last_speculation.accepted_tokens > 0.6 * base.last_speculation.drafted_tokens
    with torch.no_grad():  # as in training: the draft follows
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    plain = texts(model)
    assert dtype is torch.float16 or torch.equal(plain, texts(model, REQUESTS["int8"]))
    texts(model, REQUESTS["int8"])
    assert base.last_speculation.accepted_tokens > 0.6 * base.last_speculation.drafted_tokens


def test_passes_are_retained_when_adapters_are_switched(model: Any) -> None:
    base = model.get_base_model()

    def passes() -> list[Any]:
        texts(model, REQUESTS["int8"])
        draft = draft_of(base, REQUESTS["int8"])[1]
        return [captured_target(base), draft]

    first = passes()
    model.set_adapter("second")
    second = passes()
    assert all(one is not None and one is not other for one, other in zip(first, second, strict=True))
    with model.disable_adapter():
        assert all(one not in (*first, *second) for one in passes())
    model.set_adapter("first")
    assert passes() == first
    model.merge_adapter(["first"])
    assert all(one not in (*first, *second) for one in passes())


# --- changes in the middle of a text


class Switches(BaseStreamer):
    """Streamer that performs an action after the given number of new tokens."""

    def __init__(self, after: int, action: Any) -> None:
        self.after, self.action = after, action
        self.tokens = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == self.after:
            self.action()

    def end(self) -> None: ...


ACTIONS = {
    "switch": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["first", "second"]),
    "off": lambda model: model.base_model.disable_adapter_layers(),
    "merge": lambda model: model.merge_adapter(["first"]),
    "write": lambda model: [p.data.mul_(-2) for n, p in model.named_parameters() if "lora_B.first" in n],
    "unload": lambda model: model.unload(),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("sampled", [False, True])
def test_changed_by_a_streamer(name: str, action: str, sampled: bool) -> None:
    found = []
    for request in (None, REQUESTS[name]):
        base = tiny_model("llama", hidden_size=64, intermediate_size=128)
        base.generation_config.eos_token_id = None
        model = peft.get_peft_model(base, lora("q_proj", "down_proj"), adapter_name="first")
        model.add_adapter("second", lora("v_proj", "up_proj", rank=8))
        randomise(model)
        enable_self_speculative(model.eval())
        for after in (1, 6, 11):
            if action == "unload" and after > 1:
                break
            streamer = Switches(after, lambda model=model: ACTIONS[action](model))
            options: dict[str, Any] = {"do_sample": True, "top_k": 0} if sampled else {}
            found.append(texts(model, request, streamer=streamer, output_scores=True, **options).tolist())
            if action == "merge":
                model.unmerge_adapter()
            elif action != "unload":
                model.base_model.enable_adapter_layers()
                model.set_adapter("first")
    half = len(found) // 2
    assert found[:half] == found[half:]


def test_a_batch_that_is_changed_in_the_middle_is_an_error(model: Any) -> None:
    ids = prompt(8, rows=2)
    mask = torch.ones_like(ids)
    request = SelfSpeculativeConfig(drafting=FIXED)  # its drafts are right
    with pytest.raises(RuntimeError, match=r"weights of the model, or its adapters.*change weights between calls"):
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            self_speculative=request,
            stopping_criteria=[_switching(model, 10)],
        )


def _switching(model: Any, columns: int) -> Any:
    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] == columns:
            model.set_adapter("second")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return criterion


class SwitchesAt(LogitsProcessor):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 12:
            self.model.set_adapter("second")
        return scores


class SaysThatItDoesNot(SwitchesAt):
    supports_speculation = True


def test_changed_by_a_processor(model: Any) -> None:
    request = SelfSpeculativeConfig(drafting=FIXED)
    plain = texts(model, logits_processor=[SwitchesAt(model)])
    model.set_adapter("first")
    assert not torch.equal(plain, texts(model)), "the switch changes nothing"
    assert torch.equal(plain, texts(model, request, logits_processor=[SwitchesAt(model)]))


def test_changed_while_tokens_are_verified_is_an_error(model: Any) -> None:
    request = SelfSpeculativeConfig(drafting=FIXED)
    with pytest.raises(RuntimeError, match="by a logits processor or another thread"):
        texts(model, request, logits_processor=[SaysThatItDoesNot(model)])


def test_looking_is_for_models_with_adapters() -> None:
    watch = AdapterWatch(tiny_model("llama"))
    assert watch.state == () and not watch.has_changed()
