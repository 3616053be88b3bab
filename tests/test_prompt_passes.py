"""Prompts read by the kernels of decoding: the same bits however a prompt is split, and only where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from prompt_reading import read_by_kernels
from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.cache.buffered_layers import add_buffers
from ssd_generation.forward.captured import prompt_passes as prompt_passes_module
from ssd_generation.forward.captured.batch_invariance import NATIVE, PROMPT_WIDTHS, WIDTHS, BatchInvariance
from ssd_generation.forward.captured.passes import CapturedPasses
from ssd_generation.forward.captured.prompt_passes import prompt_passes
from ssd_generation.forward.forward import Forward
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops.attention import attend_to_themselves
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning import plan_passes, prompt_kernels
from ssd_generation.tuning.prompt_kernels import prompt_cost, reads_prompts
from tiny_models import WINDOW, even_model, left_padded, prompt, tiny_model

pytestmark = [
    pytest.mark.measures,
    pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here"),
]

INVARIANT = BatchInvariance(NATIVE, WIDTHS)
NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
OWN = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=4))
LOOKUP = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=5), lookup=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_kernels(monkeypatch)


def model_of(family: str, dtype: torch.dtype, **changes: Any) -> Any:
    return enable_self_speculative(even_model(family, **changes).to(dtype))


def read(model: PreTrainedModel, ids: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, DynamicCache]:
    """Read a text in parts that end at `ends`; return the last token's logits and the cache."""
    cache = DynamicCache(config=model.config)
    add_buffers(cache)
    passes = prompt_passes(model, INVARIANT)
    assert passes is not None
    logits, at = torch.empty(0), 0
    with torch.inference_mode():
        for end in (*ends, ids.shape[1]):
            found = passes.read(cache, ids[:, at:end], torch.arange(at, end)[None])
            assert found is not None and found.shape[:2] == (1, 1)
            logits, at = found, end
    return logits, cache


def states_of(cache: Any) -> list[torch.Tensor]:
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "granite", "opt", "mistral", "gemma3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_has_the_same_bits_in_whatever_parts(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    ids = prompt(2 * PROMPT_WIDTHS[-1] - 70)
    logits, cache = read(model, ids, [])
    for ends in ([1], [ids.shape[1] - 1], [17, 18, 300], list(range(1, 40)), [PROMPT_WIDTHS[-1]]):
        others, parts = read(model, ids, ends)
        assert torch.equal(others, logits), ends
        assert all(map(torch.equal, states_of(parts), states_of(cache))), ends
    # The result is the model's own.
    own = DynamicCache(config=model.config)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=True, **{CACHE: own}).logits[:, -1:]
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert (expected.float() - logits.float()).abs().max() <= tolerance * expected.float().std()


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_the_last_token_is_decoded_where_the_head_is_not_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of(family, torch.bfloat16), prompt(50)
    logits, cache = read(model, ids, [])
    monkeypatch.setattr(model, "get_output_embeddings", lambda: torch.nn.Linear(2, 2))
    passes = CapturedPasses(model, batch_invariance=BatchInvariance("native", PROMPT_WIDTHS), of_prompts=True)
    assert passes.head() is None and passes.program(16) is None
    monkeypatch.setattr(CapturedPasses, "head", lambda self: None)
    others, parts = read(model, ids, [])
    assert torch.equal(others, logits) and all(map(torch.equal, states_of(parts), states_of(cache)))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_prompt_has_the_bits_of_decoding(family: str, dtype: torch.dtype, always_faster: None) -> None:
    """A text decoded from a short prompt equals the one decoded from a prompt that includes its beginning."""
    model = model_of(family, dtype)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    ids = prompt(5)
    for drafts in (NOTHING, OWN, LOOKUP):
        text = model.generate(ids, max_new_tokens=4 * WINDOW, self_speculative=drafts, **options)
        assert model.last_speculation.exactness == "bitwise"
        for at in (7, 20, 3 * WINDOW):
            longer = text.sequences[:, : 5 + at]
            continued = model.generate(
                longer,
                attention_mask=torch.ones_like(longer),
                max_new_tokens=4 * WINDOW - at,
                self_speculative=drafts,
                **options,
            )
            assert model.last_speculation.exactness == "bitwise"
            assert torch.equal(continued.sequences, text.sequences)
            assert all(map(torch.equal, continued.logits, text.logits[at:]))


@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.parametrize("sampled", [False, True])
def test_texts_in_float32_are_plain_generates(drafts: Any, sampled: bool, always_faster: None) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": sampled, "eos_token_id": None, "pad_token_id": 0}
    for family in ("llama", "qwen2-sliding", "gemma3", "phi3"):
        model, ids = model_of(family, torch.float32), prompt(90)
        found = []
        for asked in (None, drafts):
            torch.manual_seed(3)
            found.append(model.generate(ids, self_speculative=asked, **options).tolist())
        assert found[0] == found[1]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the lengths of the prompts read by these passes."""
    found: list[int] = []
    original = Forward.read_prompt

    def watched(self: Forward, cache: Any, ids: torch.Tensor, *others: Any) -> Any:
        logits = original(self, cache, ids, *others)
        if logits is not None:
            found.append(ids.shape[1])
        return logits

    monkeypatch.setattr(Forward, "read_prompt", watched)
    return found


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(ids, self_speculative=options.pop("drafts", NOTHING), **options)


def test_which_prompts_they_read(always_faster: None, reads: list[int]) -> None:
    model, ids = model_of("llama", torch.bfloat16), prompt(40)
    generate(model, ids)
    assert reads == [40]
    generate(model, ids[:, :1])
    assert reads == [40, 1]
    # After a user's own cache, only the new tokens are read.
    cache: Any = generate(model, ids, return_dict_in_generate=True)[CACHE]
    held = cache.get_seq_length()
    generate(model, torch.cat((ids, prompt(30)), dim=1), **{CACHE: cache})
    assert reads[2:] == [40, 70 - held]
    del reads[:]
    for options in (
        {"prefill_chunk_size": 16},
        {"inputs_embeds": model.get_input_embeddings()(ids).detach()},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"drafts": SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness="numeric")},
        {"input_ids": prompt(40, rows=2), "attention_mask": torch.arange(40).ne(3).long().repeat(2, 1)},
    ):  # fmt: skip
        asked = {"input_ids": ids, **options}
        if "inputs_embeds" in asked:
            del asked["input_ids"]
        with torch.no_grad():
            generate(model, asked.pop("input_ids", None), **asked)
        assert reads == [], options
    batch = left_padded([33, 40])
    generate(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    generate(model, batch["input_ids"][:1], attention_mask=batch["attention_mask"][:1])
    assert reads == [40, 40]


def test_other_models_read_their_own_prompts(always_faster: None, reads: list[int]) -> None:
    for family in ("gemma2", "falcon"):
        model = enable_self_speculative(tiny_model(family).to(torch.bfloat16))
        generate(model, prompt(40))
    model = enable_self_speculative(tiny_model("llama", attn_implementation="eager").to(torch.bfloat16))
    generate(model, prompt(40))
    assert reads == []


@pytest.mark.parametrize(
    ("linear", "whole", "is_used"),
    [(0.5, 0.9, True), (1.5, 0.9, True), (0.5, 1.1, False), (1.7, 0.1, False)],
)
def test_they_are_used_where_they_are_faster(
    linear: float, whole: float, is_used: bool, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    """A whole prompt decides, and is timed only if the linear layers do not take far longer."""
    timed: list[int] = []

    def times_of_prompts(model: Any, invariance: Any) -> tuple[int, list[list[float]]]:
        timed.append(1)
        return 64, [[whole], [1.0]]

    monkeypatch.setattr(prompt_kernels, "_times", lambda model: (linear / 2, 0.5, [[1.0, 1.0]]))
    monkeypatch.setattr(prompt_kernels, "_times_of_attention", lambda model: [[1.0], [1.0]])
    monkeypatch.setattr(prompt_kernels, "_times_of_prompts", times_of_prompts)
    model = model_of("llama", torch.bfloat16)
    generate(model, prompt(40))
    assert bool(reads) == is_used and bool(timed) == (linear < 1.6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_they_may_take_longer_where_prefixes_are_reused(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    monkeypatch.setattr(plan_passes, "part_of_prompts", lambda model: None)
    for ours, is_used in ((3.9, True), (4.1, False)):
        monkeypatch.setattr(prompt_kernels, "_times", lambda model, ours=ours: (ours, 1.0, [[1.0, 1.0]]))
        monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / str(ours)))
        model = enable_self_speculative(model_of("llama", dtype), prefix_cache=True)
        text = generate(model, prompt(60))
        # A single text in float32 begins after what torch read.
        assert bool(reads) == (is_used and dtype != torch.float32)
        assert torch.equal(generate(model, prompt(60)), text)
        assert model.last_speculation.reused_tokens == (59 if is_used or dtype == torch.float32 else 0)
        del reads[:]
        batch = left_padded([60, 70])
        generate(model, batch["input_ids"], attention_mask=batch["attention_mask"])
        assert bool(reads) == is_used
        del reads[:]


def test_where_bits_differ_they_are_not_used(monkeypatch: pytest.MonkeyPatch, reads: list[int]) -> None:
    monkeypatch.setattr(prompt_kernels, "_times", lambda model: (0.1, 1.0, [[1.0, 1.0]]))
    original = prompt_passes_module.PromptPasses.read

    def wrong(self: Any, cache: Any, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        logits = original(self, cache, ids, positions)
        if ids.shape[1] == 40:
            cache.layers[0].keys[:, :, 3] += 0.01
        return logits

    monkeypatch.setattr(prompt_passes_module.PromptPasses, "read", wrong)
    model = model_of("llama", torch.bfloat16)
    assert prompt_cost(model) == 0.1 and not reads_prompts(model, INVARIANT)
    generate(model, prompt(40))
    assert reads == []


def test_the_cost_is_measured_once_and_kept() -> None:
    model = model_of("llama", torch.bfloat16)
    calls: list[int] = []
    original: Callable[..., Any] = prompt_kernels._times

    def counted(model: Any) -> Any:
        calls.append(1)
        return original(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_kernels, "_times", counted)
        cost, looks = prompt_cost(model), len(calls)
        assert cost > 0 and prompt_cost(model) == cost and len(calls) == looks >= 1
    assert not reads_prompts(model, None) and not reads_prompts(model, BatchInvariance("linear", (1, 2)))


@pytest.mark.parametrize(
    ("ratios", "cost", "looks"),
    [((0.2, 0.3, 0.25), 0.3, 3), ((0.3, 1.7, 0.3), 1.7, 2), ((1.9, 0.2), 1.9, 1), ((), 1.0, 1)],
)
def test_kernels_have_to_be_faster_each_time(
    ratios: tuple[float, ...], cost: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def times(model: Any) -> tuple[float, float, list[list[float]]]:
        seen.append(0)
        return (ratios[len(seen) - 1], 1.0, [[1.0]]) if ratios else (0.0, 0.0, [])

    monkeypatch.setattr(prompt_kernels, "_times", times)
    assert prompt_kernels._measure(tiny_model()) == cost and len(seen) == looks


def test_the_longest_prompt_follows_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_kernels, "_LONG", 1.0)

    def longest(linear: float, attending: float, whole: float, seconds: float = 1.0) -> float:
        times = (linear * seconds, seconds, [[1.0, 1.0]])
        monkeypatch.setattr(prompt_kernels, "_times", lambda model: times)
        monkeypatch.setattr(prompt_kernels, "_times_of_attention", lambda model: [[attending, attending], [1.0, 1.0]])
        monkeypatch.setattr(prompt_kernels, "_times_of_prompts", lambda *_: (64, [[whole, whole], [1.0, 1.0]]))
        found: float = prompt_kernels._measure_longest(tiny_model(), INVARIANT)
        return found

    # 0.5 s are gained with 64 tokens; with n, 0.5 / 128 (n - 64) are lost or gained, and 1 / 512² (n² - 64²) lost.
    assert longest(1.5, 1.0, 0.5) == 64 + 128
    assert longest(1.0, 2.0, 0.5) == pytest.approx((64**2 + 0.5 * 512**2) ** 0.5)
    assert longest(0.5, 2.0, 0.5) == 1088
    assert longest(0.5, 1.0, 0.5) == longest(1.0, 0.5, 0.5) == longest(1.01, 0.5, 0.5) == prompt_kernels._ANY
    assert longest(0.5, 0.5, 1.0) == 0
    # Two seconds of linear layers are too long for a whole prompt: these decide.
    assert longest(0.9, 1.0, 100.0, seconds=2.1) == prompt_kernels._ANY and longest(1.06, 1.0, 0.1, seconds=2.1) == 0


@given(
    probe=st.integers(1, 512), gain=st.floats(1e-4, 1), by_token=st.floats(-0.1, 0.1), by_pair=st.floats(-1e-4, 1e-4)
)
def test_losses_break_even_at_the_longest_prompt(probe: int, gain: float, by_token: float, by_pair: float) -> None:
    def loss(length: float) -> float:
        return by_token * (length - probe) + by_pair * (length**2 - probe**2)

    longest = prompt_kernels._break_even(probe, gain, by_token, by_pair)
    assert longest >= probe
    if longest < 1e6:
        assert loss(longest) == pytest.approx(gain, rel=1e-3)
    end = min(longest, 1e6)
    assert all(loss(probe + (end - probe) * part / 16) <= gain * 1.001 for part in range(17))


def test_longer_prompts_are_torchs(monkeypatch: pytest.MonkeyPatch, reads: list[int]) -> None:
    monkeypatch.setattr(prompt_kernels, "_times", lambda model: (0.1, 1.0, [[1.0, 1.0]]))
    monkeypatch.setattr(plan_passes, "longest_by_kernels", lambda model, invariance: 50)
    model = model_of("llama", torch.bfloat16)
    for length, is_read in ((50, True), (51, False)):
        generate(model, prompt(length))
        assert bool(reads) == is_read
        del reads[:]
    batch = left_padded([60, 20])
    generate(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    assert reads == []  # all rows are read in the same way


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_attention_is_timed_where_a_config_describes_it(name: str) -> None:
    ours, torchs = prompt_kernels._times_of_attention(model_of(name, torch.bfloat16))
    assert len(ours) == len(torchs) and all(seconds > 0 for seconds in (*ours, *torchs))


def test_attention_outside_of_a_pass_is_torchs() -> None:
    query, keys, values = (torch.randn(1, heads, 40, 24) for heads in (6, 2, 2))
    found = attend_to_themselves(query.transpose(1, 2).contiguous(), keys, values)
    expected = functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    assert torch.allclose(found.transpose(1, 2), expected, atol=1e-5)
