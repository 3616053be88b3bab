"""The model check: what it must detect, what it must tolerate, and that texts are right in any case."""

from __future__ import annotations

import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from odd_models import COUNT_FROM_THE_CACHE, NOT_RECORDED, NOT_SEVERAL_AT_ONCE, odd_model
from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.conditions import why_not_captured
from ssd_generation.generation import require_drafts
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning import model_check
from ssd_generation.tuning.model_check import ModelCheck, _difference, _forced_text, _moved_by_rounding
from tiny_models import FAMILIES, VOCAB, forget_measurements, left_padded, prompt, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
DRAFTS = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "lookup": SelfSpeculativeConfig(lookup=True),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED),
}
# Text that repeats itself, so that lookup finds matches.
SINGLE = {"input_ids": prompt(7).repeat(1, 2)}
RAGGED = left_padded([12, 7, 10])
GREEDY = {"do_sample": False}


def checked(model: PreTrainedModel, is_batch: bool = False) -> ModelCheck:
    return enable_self_speculative(model)._check(is_batch)  # type: ignore[attr-defined, no-any-return]


def assert_text_of_plain(
    model: PreTrainedModel, config: SelfSpeculativeConfig, inputs: dict[str, Any], new_tokens: int = 24
) -> Any:
    enable_self_speculative(model)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    plain = model.generate(**inputs, **options)
    drafted = model.generate(**inputs, **options, self_speculative=config)
    assert torch.equal(plain, drafted)
    return model.last_speculation


# --- families


@pytest.mark.parametrize("number", range(len(COUNT_FROM_THE_CACHE)), ids=list(COUNT_FROM_THE_CACHE))
def test_positions_counted_from_the_cache(number: int) -> None:
    model = enable_self_speculative(odd_model(list(COUNT_FROM_THE_CACHE.values())[number]))
    single, ragged = (model.generate(**inputs, **GREEDY, max_new_tokens=24) for inputs in (SINGLE, RAGGED))
    # Every draft with every family, and both layouts with every family and every draft.
    for place, draft in enumerate(DRAFTS.values()):
        is_single = (number + place) % 2 == 0
        inputs, plain = (SINGLE, single) if is_single else (RAGGED, ragged)
        drafted = model.generate(**inputs, **GREEDY, max_new_tokens=24, self_speculative=draft)
        assert torch.equal(plain, drafted)
        statistics = model.last_speculation
        assert statistics.drafted_tokens > 0 and statistics.refusal is None
        for accepted in statistics.round_accepted[1:]:  # lockstep
            assert accepted == statistics.round_accepted[0][: len(accepted)]
    assert checked(model, is_batch=True).uneven_refusal is not None


@pytest.mark.parametrize("number", range(len(NOT_SEVERAL_AT_ONCE)), ids=list(NOT_SEVERAL_AT_ONCE))
def test_not_several_at_once(number: int) -> None:
    model = enable_self_speculative(odd_model(list(NOT_SEVERAL_AT_ONCE.values())[number]))
    # Texts longer than the windows.
    single = model.generate(**SINGLE, **GREEDY, max_new_tokens=90)
    ragged = model.generate(**RAGGED, **GREEDY, max_new_tokens=24)
    for place, draft in enumerate(DRAFTS.values()):
        length = 90 if place == number % len(DRAFTS) else 12
        # Once per model and reason.
        with pytest.warns(UserWarning, match="without drafts.* as transformers") if not place else nullcontext():
            text = model.generate(**SINGLE, **GREEDY, max_new_tokens=length, self_speculative=draft)
        assert torch.equal(text, single[:, : SINGLE["input_ids"].shape[1] + length])
        statistics = model.last_speculation
        assert statistics.refusal and statistics.drafted_tokens == 0
        assert (statistics.generated_tokens, statistics.new_tokens) == (length, [length])
        assert f"nothing was drafted: {statistics.refusal}" in str(statistics)
        if length == 90:
            assert torch.equal(ragged, model.generate(**RAGGED, **GREEDY, max_new_tokens=24, self_speculative=draft))
            statistics = model.last_speculation
            assert statistics.refusal and statistics.new_tokens == [24, 24, 24]


def test_a_model_without_a_cache_is_told_by_that() -> None:
    model = enable_self_speculative(odd_model(NOT_SEVERAL_AT_ONCE["openai-gpt"]))
    with pytest.warns(UserWarning, match="has no KV cache"):
        model.generate(**SINGLE, **GREEDY, max_new_tokens=4, self_speculative=DRAFTS["lookup"])


def test_refused_where_nothing_but_drafting_was_asked_for() -> None:
    from ssd_generation.search.cost_profile import measure_profile

    model = odd_model(NOT_SEVERAL_AT_ONCE["doge with experts"])
    before = type(model)
    for work in (require_drafts, measure_profile):
        with pytest.raises(ValueError, match="DogeForCausalLM cannot draft for itself: its pass over several tokens"):
            work(model)
    assert type(model) is before
    require_drafts(tiny_model())


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_not_recorded(name: str) -> None:
    model = odd_model(NOT_RECORDED[name])
    for draft in DRAFTS.values():
        statistics = assert_text_of_plain(model, draft, SINGLE)
        assert statistics.drafted_tokens > 0 and statistics.refusal is None
        assert assert_text_of_plain(model, draft, RAGGED).refusal is None
    assert "gives different logits" in str(why_not_captured(model))


def test_rows_in_step_end_at_different_places() -> None:
    model = enable_self_speculative(odd_model(COUNT_FROM_THE_CACHE["bart"]))
    plain = model.generate(**RAGGED, max_new_tokens=24, do_sample=False)
    ends = [int(plain[1, 16]), int(plain[2, 20])]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": ends}
    options |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    plain = model.generate(**RAGGED, **options)
    drafted = model.generate(**RAGGED, **options, self_speculative=DRAFTS["int8"])
    assert torch.equal(plain.sequences, drafted.sequences)
    assert (plain.sequences[:, -1] == 0).any(), "a row should end before the others"
    for key in ("keys", "values"):
        for one, other in zip(plain[CACHE].layers, drafted[CACHE].layers, strict=True):
            torch.testing.assert_close(getattr(one, key), getattr(other, key))
    texts = drafted.sequences[:, 12:]
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in texts.tolist()]
    assert drafted.speculation.new_tokens == lengths


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=FAMILIES)
def test_families_that_draft(number: int) -> None:
    # Every family in every dtype and in both layouts, and every dtype in both layouts.
    for place, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        assert checked(tiny_model(FAMILIES[number]).to(dtype), (number + place) % 2 == 1) == ModelCheck()


# --- injected faults


class ByWidth(nn.Module):
    """Layer that depends on the number of tokens in its pass."""

    def __init__(self, inner: nn.Module, least: int = 2) -> None:
        super().__init__()
        self.inner, self.least = inner, least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1.0 if x.shape[1] < self.least else 1.2)  # type: ignore[no-any-return]


class OfWholePass(ByWidth):
    """Layer that scales by the greatest activation of the whole pass, as dynamic quantisation does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / x.abs().max()  # type: ignore[no-any-return]


class CountsCalls(ByWidth):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.least += 1
        return self.inner(x) * (1 + 0.1 * (self.least % 5))  # type: ignore[no-any-return]


class LooksAhead(ByWidth):
    """Layer that sees the tokens after its own, as attention without a causal mask does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.3 * x.mean(dim=1, keepdim=True)  # type: ignore[no-any-return]


def differs(found: ModelCheck) -> bool:
    """Tell whether logits were found to differ, in passes of the model's own code."""
    return found.refusal is not None and "different logits" in found.refusal


@pytest.mark.parametrize("fault", [ByWidth, OfWholePass, CountsCalls, LooksAhead])
@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("place", [0, 3])
def test_layers_that_depend_on_the_pass_are_noticed(fault: type[ByWidth], is_batch: bool, place: int) -> None:
    model = tiny_model()
    model.model.layers[place].mlp = fault(model.model.layers[place].mlp).eval()
    assert differs(checked(model, is_batch))
    # Also in half precision, despite rounding. As in a call, a batch is checked if a single text may draft.
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model().to(dtype)
        model.model.layers[place].mlp = fault(model.model.layers[place].mlp).eval()
        assert differs(checked(model)) or differs(checked(model, is_batch))


@pytest.mark.parametrize("least", [4, 13, 14])
def test_widths_are_tried(least: int) -> None:
    model = tiny_model()
    model.model.layers[1].mlp = ByWidth(model.model.layers[1].mlp, least).eval()
    found = checked(model)
    if least > 13:  # wider than any pass of a round
        assert found.refusal is None
        return
    assert found.refusal is not None
    with pytest.warns(UserWarning, match="decoded without drafts"):
        assert_text_of_plain(model, DRAFTS["skip"], SINGLE)


class ByRows(nn.Module):
    """Layer whose product of more than so many rows rounds otherwise, as on a GPU."""

    def __init__(self, inner: nn.Module, noise: torch.Tensor, most: int) -> None:
        super().__init__()
        self.inner, self.noise, self.most = inner, noise, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found if x.shape[0] * x.shape[1] <= self.most else found * self.noise


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize(("noise", "refused"), [(0.1, False), (3.0, True)])
def test_products_of_many_rows_may_be_rounded_otherwise(
    noise: float, refused: bool, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "_own_code", lambda: f"noise {noise}")  # the store's key knows no weights
    model = tiny_model().to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    factors = (1 + noise * torch.randn(model.config.hidden_size, generator=generator)).to(torch.bfloat16)
    model.model.layers[1].mlp = ByRows(model.model.layers[1].mlp, factors, most=4 if is_batch else 2).eval()
    assert differs(checked(model, is_batch)) is refused


def test_layers_that_ignore_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.LlamaModel.forward

    def forward(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)  # positions then follow from the cache's length

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    model = tiny_model()
    assert checked(model).refusal is None
    found = checked(model, is_batch=True)
    assert found.refusal is None and found.uneven_refusal is not None
    for config in DRAFTS.values():
        assert_text_of_plain(model, config, RAGGED)


def test_passes_that_fail_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.LlamaModel.forward

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length() and input_ids.shape[1] > 1:
            raise NotImplementedError("one token at a time")
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    model = tiny_model()
    assert "NotImplementedError: one token at a time" in str(checked(model).refusal)
    for is_first, config in zip((True, False, False), DRAFTS.values(), strict=True):
        with pytest.warns(UserWarning, match="one token at a time") if is_first else warnings.catch_warnings():
            assert_text_of_plain(model, config, SINGLE)
    # "auto" measures nothing that is impossible.
    plain = model.generate(**SINGLE, max_new_tokens=9, do_sample=False)
    assert torch.equal(plain, model.generate(**SINGLE, max_new_tokens=9, do_sample=False, self_speculative="auto"))


def test_recorded_passes_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.forward.captured import passes

    run = passes.CapturedPasses.run

    def wrong(self: Any, cache: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = run(self, cache, ids, *args, **kwargs)
        return logits if logits is None or self.is_draft else logits.roll(1, dims=-1)

    monkeypatch.setattr(passes.CapturedPasses, "run", wrong)
    model = tiny_model(seed=5, rms_norm_eps=3e-6)
    found = checked(model)
    assert found.refusal is None and found.capture_refusal is not None
    assert why_not_captured(model) == found.capture_refusal
    for config in DRAFTS.values():
        statistics = assert_text_of_plain(model, config, SINGLE)
        assert statistics.drafted_tokens > 0


def test_what_is_installed_later_is_noticed() -> None:
    model = enable_self_speculative(tiny_model())
    assert_text_of_plain(model, DRAFTS["skip"], SINGLE)
    mlp = model.model.layers[1].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: output * (1 + 0.1 * args[0].shape[1]))
    with pytest.warns(UserWarning, match="decoded without drafts"):
        assert_text_of_plain(model, DRAFTS["skip"], SINGLE)
    handle.remove()
    assert assert_text_of_plain(model, DRAFTS["skip"], SINGLE).drafted_tokens > 0
    own = mlp.forward
    mlp.forward = types.MethodType(lambda self, x: own(x) * (1 + 0.1 * x.shape[1]), mlp)
    assert assert_text_of_plain(model, DRAFTS["skip"], SINGLE).refusal is not None


# --- what it costs


def counted(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    check = model_check._check

    def counting(model: PreTrainedModel, is_batch: bool, *rest: Any) -> ModelCheck:
        calls.append(is_batch)
        return check(model, is_batch, *rest)

    monkeypatch.setattr(model_check, "_check", counting)
    return calls


def test_once_per_model_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model(rms_norm_eps=7e-6))
    calls = counted(model, monkeypatch)
    for inputs in (SINGLE, SINGLE, RAGGED, SINGLE, RAGGED):
        model.generate(**inputs, max_new_tokens=4, do_sample=False, self_speculative=DRAFTS["skip"])
    assert calls == [False, True]
    # Another process finds it on the disk; so does another model of the same architecture.
    twin = enable_self_speculative(tiny_model(seed=3, rms_norm_eps=7e-6))
    twin.generate(**RAGGED, max_new_tokens=4, do_sample=False, self_speculative=DRAFTS["skip"])
    assert calls == [False, True]
    # Weights of another dtype make another model.
    model.to(torch.bfloat16).generate(**SINGLE, max_new_tokens=4, do_sample=False, self_speculative=DRAFTS["skip"])
    assert calls == [False, True, False]


def test_plain_calls_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model(rms_norm_eps=8e-6))
    calls = counted(model, monkeypatch)
    model.generate(**SINGLE, max_new_tokens=4, do_sample=False)
    assert calls == []


def test_the_random_state_is_left_alone() -> None:
    model = enable_self_speculative(tiny_model(rms_norm_eps=9e-6))
    before = torch.get_rng_state()
    checked(model)
    checked(model, is_batch=True)
    assert torch.equal(before, torch.get_rng_state())


def test_settings_of_the_model_do_not_matter() -> None:
    model = tiny_model(rms_norm_eps=11e-6)
    settings = model.generation_config
    assert settings is not None
    settings.do_sample, settings.temperature, settings.num_beams, settings.repetition_penalty = True, 0.3, 4, 1.4
    settings.eos_token_id, settings.max_length, settings.no_repeat_ngram_size = [5, 9], 40, 2
    assert checked(model) == ModelCheck()
    assert checked(model, is_batch=True) == ModelCheck()


SPOILT: list[Any] = [{"refusal": 3}, {"surprise": None}, [], None, "no"]


@pytest.mark.parametrize("answer", SPOILT, ids=str)
def test_a_spoilt_answer_on_the_disk_is_found_anew(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    from ssd_generation.support import measurements

    written: list[Path] = []
    write = measurements._write

    def spoil(key: str, content: Any) -> None:
        written.append(measurements._file(key))
        write(key, {**content, "result": answer})

    model = enable_self_speculative(tiny_model(rms_norm_eps=12e-6))
    calls = counted(model, monkeypatch)
    forget_measurements()
    with monkeypatch.context() as patched:
        patched.setattr(measurements, "_write", spoil)
        checked(model)
    forget_measurements()
    assert checked(model) == ModelCheck()
    assert calls == [False, False]
    written[0].unlink()


def test_another_version_of_the_check_tries_a_model_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model(rms_norm_eps=13e-6))
    calls = counted(model, monkeypatch)
    for code, tried in ((None, 1), (None, 1), ("other", 2), ("other", 2)):
        forget_measurements()
        if code is not None:
            monkeypatch.setattr(model_check, "_own_code", lambda code=code: code)
        checked(model)
        assert len(calls) == tried


@pytest.mark.parametrize(("depends_on_width", "refused"), [(False, False), (True, True)])
def test_a_single_row_may_be_rounded_otherwise(depends_on_width: bool, refused: bool) -> None:
    """Check rounding as torch's in bfloat16 on processors without instructions for that dtype."""
    model = tiny_model().to(torch.bfloat16)
    text = _forced_text(model, 1)
    moved = 4 * float(_moved_by_rounding(model, text).median())
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn((1, VOCAB), generator=generator) for _ in range(8)]
    noise = min(max(0.8 * moved, 0.03), 0.09)
    single = [step + noise * torch.randn((1, VOCAB), generator=generator) for step in wide]

    def decode(tried: Any, is_drafted: bool, lockstep: bool) -> Any:
        if not is_drafted:  # copies of a text get the logits of the text alone
            count = len(tried.tokens)
            return types.SimpleNamespace(logits=[step.repeat(count, 1) for step in single])
        is_single = not tried.is_drafted
        return types.SimpleNamespace(logits=single if is_single and depends_on_width else wide)

    assert moved > 0.02
    assert (_difference(model, text, single, decode) is not None) is refused


def is_refused(rows: int, apart: float, by_width: float, moved: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell whether `_difference` refuses a model in bfloat16 whose logits lie so far from those of wide passes.

    Args:
        rows: number of rows, B.
        apart: how far those of plain decoding lie, in standard deviations.
        by_width: how far those of this library's passes over one token lie.
        moved: how far those of embeddings that are rounded differently lie.
        monkeypatch: of the test.
    """
    model = tiny_model().to(torch.bfloat16)
    text = _forced_text(model, rows)
    monkeypatch.setattr(model_check, "_moved_by_rounding", lambda model, text: torch.full((8, rows), moved))
    generator = torch.Generator().manual_seed(0)
    wide, noise = ([torch.randn((rows, VOCAB), generator=generator) for _ in range(8)] for _ in range(2))
    plain, narrow = (
        [one + far * other / other.std() for one, other in zip(wide, noise, strict=True)] for far in (apart, by_width)
    )

    def decode(tried: Any, is_drafted: bool, lockstep: bool) -> Any:
        if not is_drafted:
            times = len(tried.tokens) // rows
            return types.SimpleNamespace(logits=[step.repeat_interleave(times, 0) for step in plain])
        return types.SimpleNamespace(logits=wide if tried.is_drafted else narrow)

    return _difference(model, text, plain, decode) is not None


@pytest.mark.parametrize(
    ("apart", "by_width", "refused"), [(0.2, 0.0, False), (0.4, 0.0, True), (0.2, 0.01, True), (0.09, 0.01, False)]
)
def test_kernels_may_round_as_far_as_embeddings_where_the_width_changes_nothing(
    apart: float, by_width: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a model that amplifies rounding, as recurrent states of random weights do."""
    assert is_refused(1, apart, by_width, 0.3, monkeypatch) is refused


@pytest.mark.parametrize(("by_width", "refused"), [(0.05, False), (0.08, True)])
def test_rounding_by_width_may_be_that_of_the_embeddings(
    by_width: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check rounding as torch's in bfloat16 on processors with instructions for that dtype."""
    assert is_refused(2, 0.09, by_width, 0.06, monkeypatch) is refused
