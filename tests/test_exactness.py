"""Batch-invariant passes: the check that certifies them, and the result of decoding with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured import passes
from ssd_generation.forward.captured.batch_invariance import WIDTHS, BatchInvariance
from ssd_generation.forward.captured.cache_attention import CacheAttention
from ssd_generation.forward.captured.passes import CapturedPasses
from ssd_generation.forward.forward import Forward
from ssd_generation.forward.pass_plan import PassPlan
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.support.timing import Stopwatch
from ssd_generation.tuning import exactness
from ssd_generation.tuning.exactness import Certificate, certificate_of, cost_of
from ssd_generation.tuning.plan_passes import batch_invariance_of
from tiny_models import WINDOW, even_model, left_padded, prompt, tiny_model

pytestmark = pytest.mark.measures

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEW = 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "_SECONDS", 0.01)


def fixed(length: int, **options: Any) -> SelfSpeculativeConfig:
    return SelfSpeculativeConfig(
        SkipConfig(attention=[1], mlp=[2]),
        DraftingConfig(policy="fixed", max_draft_length=length),
        exactness="bitwise",
        **options,
    )


UNDRAFTED = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness="bitwise")
WAYS = {
    **{f"fixed {length}": fixed(length) for length in range(1, 9)},
    "int8": dataclasses.replace(fixed(5), skip=SkipConfig(), precision="int8"),  # type: ignore[arg-type]
    "lookup": fixed(3, lookup=LookupConfig(max_ngram=2, min_ngram=1, max_tokens=10)),
    "wide": SelfSpeculativeConfig(
        drafting=DraftingConfig(policy="fixed", max_draft_length=48),
        lookup=LookupConfig(max_ngram=1, min_ngram=1, max_tokens=48),
        exactness="bitwise",
    ),
    "cost": dataclasses.replace(fixed(6), drafting=DraftingConfig()),
}


def model_of(family: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    return enable_self_speculative(even_model(family, **changes).to(dtype))


def decode(model: Any, config: Any, ids: torch.Tensor | None = None, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Return the tokens, and the logits of every step."""
    ids = prompt(9) if ids is None else ids
    torch.manual_seed(4)
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True,
        self_speculative=config, **asked,
    )  # fmt: skip
    return out.sequences[0].tolist(), torch.stack(out.logits)


def assert_same_bits(model: Any, ways: list[str], **options: Any) -> None:
    tokens, logits = decode(model, UNDRAFTED, **options)
    assert model.last_speculation.exactness == "bitwise", model.last_speculation.exactness_reason
    for way in ways:
        own, bits = decode(model, WAYS[way], **options)
        assert model.last_speculation.exactness == "bitwise" and model.last_speculation.exactness_reason is None
        assert own == tokens and torch.equal(bits, logits), way


# --- bitwise equality
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drafting_changes_no_bit(dtype: torch.dtype) -> None:
    few = ["fixed 1", "fixed 4", "fixed 7", "int8", "lookup", "cost"]
    assert_same_bits(model_of("llama", dtype), list(WAYS) if dtype == torch.bfloat16 else few)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt2", "phi3", "opt", "granite"])
def test_other_families(family: str) -> None:
    assert_same_bits(model_of(family, torch.bfloat16), ["fixed 1", "fixed 4", "lookup", "wide"])


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2-sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_across_a_sliding_window(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    for length in (3, 4 * WINDOW):
        assert_same_bits(model, ["fixed 4", "lookup", "wide"], ids=prompt(length))
    # It is also plain `generate`'s text: the passes see exactly the model's window.
    plain = even_model(family)
    ids = prompt(4 * WINDOW)
    text = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                          eos_token_id=None)  # fmt: skip
    assert decode(model_of(family, torch.float32), WAYS["fixed 4"], ids=ids)[0] == text[0].tolist()


def test_sampled_texts_too() -> None:
    model = model_of("llama", torch.bfloat16)
    options = {"do_sample": True, "top_k": 0, "temperature": 1.2, "repetition_penalty": 1.2}
    assert_same_bits(model, ["fixed 1", "fixed 6", "lookup", "int8"], **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_it_a_plain_step_is_the_models_own(dtype: torch.dtype) -> None:
    # Bitwise: without drafts no captured pass decides a token in half precision.
    numeric = dataclasses.replace(UNDRAFTED, exactness="numeric")
    for family in ("llama", "qwen2", "gpt2", "gemma2", "mistral"):
        model = model_of(family, dtype)
        tokens, logits = decode(model, None)
        own, bits = decode(model, numeric)
        assert own == tokens and torch.equal(bits, logits)
        assert model.last_speculation.exactness == "numeric"
        assert model.last_speculation.exactness_reason == 'exactness="numeric" was requested'


# --- certification
# ----------------------------------------------------------------------------------------------------------------------


def test_the_certificate_is_stored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.bfloat16)
    found = certificate_of(model)
    assert found.batch_invariance is not None and found.refusal is None
    assert set(found.batch_invariance.widths) <= set(WIDTHS)
    assert list(cache.rglob("*.json"))
    monkeypatch.setattr(exactness, "_find_out", lambda model: pytest.fail("checked again"))
    assert certificate_of(model_of("llama", torch.bfloat16)) == found
    assert Certificate.from_dict(found.to_dict()) == found


def test_the_cost_of_exact_passes_is_a_ratio_of_times_and_is_stored(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[BatchInvariance | None] = []

    class Noted(Forward):
        def __init__(self, model: Any, *, plan: PassPlan) -> None:
            super().__init__(model, plan=plan)
            self.given = plan.batch_invariance

        def target(self, *args: Any) -> Any:
            ran.append(self.given)
            return super().target(*args)

    class Given(Stopwatch):
        """Mock stopwatch: exact passes take 1.5 times as long as others, on a machine that gets slower with each."""

        def seconds(self) -> float:
            return (3.0 if ran[-1] is not None else 2.0) * (1 + len(ran) / 1000)

    monkeypatch.setattr(exactness, "Forward", Noted)
    monkeypatch.setattr(exactness, "Stopwatch", Given)
    found = cost_of(model_of("llama", torch.bfloat16))
    assert found == pytest.approx(1.5, rel=0.01) and {way is None for way in ran} == {True, False}
    assert list(cache.rglob("*.json"))
    monkeypatch.setattr(exactness, "_cost", lambda model: pytest.fail("measured again"))
    assert cost_of(model_of("llama", torch.bfloat16)) == found


@pytest.mark.parametrize(
    "stored",
    [
        {"linear": "secret", "widths": [2]},
        {"linear": "linear", "widths": []},
        {"linear": "linear", "widths": [9]},
        {"linear": "linear", "widths": [4, 2]},
        {"linear": "linear"},
        [],
    ],
)
def test_a_certificate_that_cannot_be_is_not_read(stored: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Certificate.from_dict(stored)


def by_width(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Make a kernel that sums in another order from five rows on."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2] < 5:
            return functional.linear(x, weight, bias)
        half = weight.shape[1] // 2
        y = functional.linear(x[..., half:], weight[:, half:]) + functional.linear(x[..., :half], weight[:, :half])
        return y if bias is None else y + bias

    return linear


def by_place(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Make a kernel that rounds its last row differently."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, weight, bias)
        other = by_width(weight, bias)(x.repeat_interleave(5, dim=-2))[..., ::5, :]
        return torch.cat((y[..., :-1, :], other[..., -1:, :]), dim=-2)

    return linear


def by_neighbours(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Make a kernel that scales by the largest entry of all rows and back."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() * 1.7
        return functional.linear(x / scale, weight, bias) * scale

    return linear


@pytest.fixture
def only_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def put(kernel: Any) -> None:
        for module in (exactness, passes):
            monkeypatch.setattr(module, "LINEARS", {"linear": kernel})

    return put


def test_a_kernel_that_looks_at_the_width_is_noticed(only_kernel: Any) -> None:
    only_kernel(by_width)
    model = model_of("llama", torch.bfloat16)
    found = certificate_of(model)
    # One kernel runs below five rows and another from there on: only widths on one side agree.
    assert found.batch_invariance is not None
    assert len({width < 5 for width in found.batch_invariance.widths}) == 1
    assert_same_bits(model, ["fixed 1", "fixed 6", "lookup"])


@pytest.mark.parametrize("kernel", [by_place, by_neighbours])
def test_a_kernel_that_looks_at_other_rows_is_noticed(only_kernel: Any, kernel: Any) -> None:
    only_kernel(kernel)
    model = model_of("llama", torch.bfloat16)
    found = certificate_of(model)
    assert found.batch_invariance is None and "the same bits" in str(found.refusal)
    with pytest.warns(UserWarning, match="cannot decode bitwise here: no kernel here"):
        decode(model, WAYS["fixed 4"])
    assert model.last_speculation.exactness == "numeric"
    assert model.last_speculation.exactness_reason == found.refusal


def test_sizes_that_vectors_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch computes the remainder of a tensor by other instructions than its whole vectors.
    model = model_of("llama", torch.bfloat16, intermediate_size=48)
    if why_not() is None:
        assert_same_bits(model, ["fixed 6", "lookup"])
    for module in (exactness, passes):
        monkeypatch.setattr(module, "why_not", lambda: "of the test")
    model = model_of("llama", torch.bfloat16, intermediate_size=48)
    found = certificate_of(model)
    assert found.batch_invariance is None and "silu may round a token differently, depending on its place" in str(
        found.refusal
    )
    with pytest.warns(UserWarning, match="bitwise here: .*silu"):
        decode(model, UNDRAFTED)


def test_attention_over_the_whole_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Attention of passes that need not be exact: all tokens in one call.
    class Whole(CacheAttention):
        def attend(self, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> torch.Tensor:
            count, width = self.count, query.shape[2]
            out = super().attend(query[:, :, :count], key[:, :, :count], value[:, :, :count], *rest, **options)
            return functional.pad(out, (0, 0, 0, 0, 0, width - count))

    monkeypatch.setattr(CapturedPasses, "_new_attention", lambda self: Whole())
    for module in (exactness, passes):  # JIT-compiled kernels compute attention themselves
        monkeypatch.setattr(module, "why_not", lambda: "of the test")
    model = model_of("llama", torch.bfloat16)
    found = certificate_of(model)
    assert found.batch_invariance is None or len(found.batch_invariance.widths) < len(WIDTHS)


# --- when decoding is exact
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "cost", "is_exact"),
    [
        (torch.bfloat16, 1.04, True),
        (torch.bfloat16, 1.06, False),
        (torch.float32, 1.01, True),
        (torch.float32, 1.04, False),
        (torch.float16, 0.9, True),
    ],
)
def test_by_default_where_it_is_nearly_free(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cost: float, is_exact: bool
) -> None:
    found = Certificate(BatchInvariance("linear", (2, 3)))
    monkeypatch.setattr(exactness, "certificate_of", lambda model: found)
    monkeypatch.setattr(exactness, "cost_of", lambda model: cost)
    monkeypatch.setattr(exactness, "is_free", lambda model: False)
    model = model_of("llama", dtype)
    way, reason = batch_invariance_of(model, None)
    assert (way is not None) == is_exact == (reason is None)
    assert is_exact or 'exactness="bitwise" requests them' in str(reason)
    assert batch_invariance_of(model, "bitwise") == (found.batch_invariance, None)
    assert batch_invariance_of(model, "numeric") == (None, 'exactness="numeric" was requested')


@pytest.mark.skipif(why_not() is not None, reason="no kernels are compiled here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_free_is_not_measured(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(exactness, "_cost", lambda model: pytest.fail("measured"))
    for family in ("llama", "qwen2"):
        assert batch_invariance_of(model_of(family, dtype), None)[0] is not None
    # Attention that is code of its own is computed by torch, one token after the other.
    assert not exactness.is_free(model_of("bloom", dtype))
    for module in (exactness, passes):
        monkeypatch.setattr(module, "why_not", lambda: "of the test")
    assert not exactness.is_free(model_of("llama", dtype))


def test_what_cannot_be_exact_says_why() -> None:
    model = model_of("llama", torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "self_speculative": fixed(2)}
    model.generate(**left_padded([7, 9]), **options)
    assert model.last_speculation.exactness == "bitwise"
    other = enable_self_speculative(tiny_model("bloom"))
    with pytest.warns(UserWarning, match="bitwise here: its passes run by the model's own code"):
        other.generate(**left_padded([7, 9]), **options)
    assert "code of its own" in other.last_speculation.exactness_reason
    model.generate(prompt(9), **options, output_hidden_states=True, return_dict_in_generate=True)
    assert "hidden states" in model.last_speculation.exactness_reason
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="bitwise here: its passes run by the model's own code"):
        model.generate(prompt(9), **options)
    assert "a hook is installed" in model.last_speculation.exactness_reason
    own = enable_self_speculative(tiny_model("mpt"))
    with pytest.warns(UserWarning, match="cannot decode bitwise"):
        own.generate(prompt(9), **options)
    assert own.last_speculation.to_dict()["exactness"] == "numeric"


def test_a_pass_that_falls_back_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.float32)
    decode(model, UNDRAFTED)  # checks of the model run passes, too
    calls = iter(range(10**9))
    original = CapturedPasses.run

    def run(self: CapturedPasses, *args: Any, **kwargs: Any) -> Any:
        return None if next(calls) == 5 else original(self, *args, **kwargs)

    monkeypatch.setattr(CapturedPasses, "run", run)
    decode(model, UNDRAFTED)
    assert model.last_speculation.exactness == "numeric"
    assert model.last_speculation.exactness_reason == "a pass was run by the model's own code"
