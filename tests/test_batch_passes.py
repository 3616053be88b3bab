"""Captured passes over the rows of a batch: each row has the bits it has alone, and no row is computed in vain."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from ssd_generation import (
    Draft,
    Drafter,
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from ssd_generation.drafting.drafter import Texts
from ssd_generation.forward.captured.batch_invariance import NATIVE, WIDTHS, BatchInvariance
from ssd_generation.forward.captured.passes import CapturedPasses, captured_target
from ssd_generation.forward.context import Context
from ssd_generation.native import cache_table
from ssd_generation.native.cache_table import FIELDS, HEADER, ONE_TEXT, LayerPlace, TextPlace
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.support.padding import padding_at_left
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning import plan_passes
from tiny_models import VOCAB, WINDOW, even_model, left_padded, prompt

pytestmark = [
    pytest.mark.measures,
    pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here"),
]

NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
NUMERIC = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness="numeric")
LOOKUP = SelfSpeculativeConfig(
    lookup=LookupConfig(min_ngram=1), drafting=DraftingConfig(policy="fixed", max_draft_length=5)
)
OWN = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=3))
INT8 = SelfSpeculativeConfig(precision="int8", drafting=DraftingConfig(policy="fixed", max_draft_length=3))
MIXED = SelfSpeculativeConfig(
    SkipConfig(attention=[2]), DraftingConfig(policy="fixed", max_draft_length=3), precision="int8"
)
FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "granite", "opt", "mistral", "gemma3"]
HALVES = [torch.bfloat16, torch.float16]
LENGTHS = [21, 9, 16]


@pytest.fixture(params=[False, True], ids=["prompts by torch", "prompts by kernels"])
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Set whether the decoding kernels read prompts, so that no test depends on what is faster on this machine."""
    reads: bool = request.param
    monkeypatch.setattr(plan_passes, "longest_by_kernels", lambda model, invariance: None if reads else 0)
    return reads


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_passes, "longest_by_kernels", lambda model, invariance: None)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each captured draft pass that runs."""
    found: list[int] = []
    run = CapturedPasses.run

    def noted(self: Any, cache: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_draft:
            found.append(len(ids))
        return run(self, cache, ids, *args, **kwargs)

    monkeypatch.setattr(CapturedPasses, "run", noted)
    return found


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the numbers of rows and tokens of each captured target pass that runs."""
    found: list[tuple[int, int]] = []
    run = CapturedPasses.run

    def noted(self: Any, cache: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = run(self, cache, ids, *args, **kwargs)
        if logits is not None and not self.is_draft:
            found.append((ids.shape[0], ids.shape[1]))
        return logits

    monkeypatch.setattr(CapturedPasses, "run", noted)
    return found


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return enable_self_speculative(even_model(family, **changes).to(dtype))


def decoded(model: Any, batch: dict[str, torch.Tensor], new: int = 40, request: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new, **options}
    if request is not None:
        options["self_speculative"] = request
    return model.generate(**batch, **options)


def alone(batch: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    start = int((batch["attention_mask"][row] == 0).sum())
    return {name: value[row : row + 1, start:] for name, value in batch.items()}


class Lies(Drafter):
    """Drafter for known texts whose drafts are right up to a scripted length, different in each row."""

    SCRIPT = ((4, 1), (3, 3), (5, 0), (0, 0), (6, 6), (2, 1))

    def __init__(self, texts: torch.Tensor) -> None:
        self.texts, self.rounds = texts.tolist(), 0

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        drafts = []
        for row, known in enumerate(self.texts):
            count, right = self.SCRIPT[(self.rounds + row) % len(self.SCRIPT)]
            at = len(texts.text(row))
            wanted = known[at : at + min(count, limits[row])]
            drafts.append([token if place < right else (token + 1) % VOCAB for place, token in enumerate(wanted)])
        self.rounds += 1
        return Draft.of_tokens(drafts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_decodings(family: str, prompts: bool, passes: list[tuple[int, int]]) -> None:
    model, batch = model_of(family), left_padded(LENGTHS)
    plain = decoded(model, batch)
    assert len(set(plain[:, 21:].flatten().tolist())) > 20
    for request in (NOTHING, LOOKUP, Lies(plain), OWN):
        passes.clear()
        assert torch.equal(decoded(model, batch, request=request), plain)
        done = model.last_speculation
        assert done.refusal is None and done.exactness == "bitwise"
        assert len(passes) >= done.target_passes - 1
    assert decoded(model, batch, do_sample=True).equal(decoded(model, batch, request=Lies(plain), do_sample=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_text_of_that_row_alone(
    family: str, dtype: torch.dtype, by_kernels: None, passes: list[tuple[int, int]]
) -> None:
    model, batch = model_of(family, dtype), left_padded(LENGTHS)
    together = decoded(model, batch, request=NOTHING)
    assert model.last_speculation.exactness == "bitwise" and (3, 1) in passes
    for row in range(3):
        text = decoded(model, alone(batch, row), request=NOTHING)[0]
        assert text[-40:].equal(together[row, -40:])
    for request in (LOOKUP, Lies(together), OWN, INT8):
        assert decoded(model, batch, request=request).equal(together)
    seeded = decoded(model, batch, request=NOTHING, do_sample=True, top_k=30)
    assert decoded(model, batch, request=Lies(seeded), do_sample=True, top_k=30).equal(seeded)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompts_that_take_several_passes(family: str, by_kernels: None) -> None:
    lengths = [190, 1, 130]  # one pass holds 256 tokens
    model, batch = model_of(family, torch.bfloat16), left_padded(lengths)
    together = decoded(model, batch, new=12, request=NOTHING)
    for row in range(3):
        assert decoded(model, alone(batch, row), new=12, request=NOTHING)[0, -12:].equal(together[row, -12:])


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_of_rows_that_run_at_their_own_speed(family: str, prompts: bool) -> None:
    model, batch = model_of(family), left_padded([3 * WINDOW, WINDOW - 2, 2 * WINDOW])
    plain = decoded(model, batch, new=5 * WINDOW)
    assert decoded(model, batch, new=5 * WINDOW, request=Lies(plain)).equal(plain)
    assert model.last_speculation.exactness == "bitwise"


@pytest.mark.parametrize("request_", [OWN, INT8, MIXED], ids=["skip", "int8", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_of_rows_are_captured(dtype: torch.dtype, request_: Any, drafts: list[int], by_kernels: None) -> None:
    model, batch = model_of("llama", dtype), left_padded(LENGTHS)
    text = decoded(model, batch, request=NOTHING)
    assert decoded(model, batch, request=request_).equal(text)
    together = model.last_speculation
    assert len(drafts) == together.draft_passes and set(drafts) == {3}
    # A row gets the drafts it would get alone: the draft sees the row's tokens and no padding.
    counted = [0, 0]
    for row in range(3):
        decoded(model, alone(batch, row), request=request_)
        counted[0] += model.last_speculation.accepted_tokens
        counted[1] += model.last_speculation.drafted_tokens
    assert together.accepted_tokens / together.drafted_tokens == pytest.approx(counted[0] / counted[1], abs=0.15)


def test_rows_that_have_ended_or_wait_are_not_computed(passes: list[tuple[int, int]]) -> None:
    model, batch = model_of("llama"), left_padded(LENGTHS)
    text = decoded(model, batch, 16, no_repeat_ngram_size=1)
    # One row ends after a few tokens.
    end = next(token for token in text[1, 24:30].tolist() if token not in text[(0, 2), 21:])
    options = {"eos_token_id": end, "no_repeat_ngram_size": 1}
    plain = decoded(model, batch, 16, **options)
    length = text[1].tolist().index(end, 21) - 21
    decoded(model, batch, 4, NOTHING)  # runs the model check
    passes.clear()
    assert decoded(model, batch, 16, NOTHING, **options).equal(plain)
    assert passes == [(3, 1)] * length + [(2, 1)] * (15 - length)
    passes.clear()
    assert decoded(model, batch, 16, Lies(plain), **options).equal(plain)
    assert min(rows * tokens for rows, tokens in passes) < 3


def test_a_pass_has_the_tokens_of_each_row_and_no_more(passes: list[tuple[int, int]]) -> None:
    model, batch = model_of("llama"), left_padded(LENGTHS)
    plain = decoded(model, batch)
    decoded(model, batch, 4, NOTHING)  # runs the model check
    passes.clear()
    assert decoded(model, batch, request=Lies(plain)).equal(plain)
    (first, *_), *_ = Lies.SCRIPT
    assert passes[0] == (first + 3 + 5 + 3, 1)
    assert passes[1] == (3 + 5 + 0 + 3, 1), "rows of other lengths than each other"


@pytest.mark.parametrize("after", [1, 4])
def test_rows_are_aligned_for_a_pass_of_the_models_own_code(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of("llama"), left_padded(LENGTHS)
    plain = decoded(model, batch)
    decoded(model, batch, 4, NOTHING)
    run, counted, lags = CapturedPasses.run, [0], []
    align = Context.align_rows

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return run(self, *args, **kwargs) if counted[0] <= after or counted[0] % 3 == 0 else None

    def noted(self: Context) -> None:
        lags.append(self.lags)
        align(self)

    monkeypatch.setattr(CapturedPasses, "run", fails)
    monkeypatch.setattr(Context, "align_rows", noted)
    assert decoded(model, batch, request=Lies(plain)).equal(plain)
    assert any(lags)


def test_equal_prompts_are_read_once(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("llama", torch.bfloat16), prompt(30)
    written: list[list[TextPlace]] = []
    write = CapturedPasses.write

    def noted(self: Any, cache: Any, ids: Any, positions: Any, places: list[TextPlace]) -> bool:
        written.append(places)
        return write(self, cache, ids, positions, places)

    monkeypatch.setattr(CapturedPasses, "write", noted)
    options = {"num_return_sequences": 4, "do_sample": True, "top_k": 20}
    several = decoded(model, {"input_ids": ids}, request=NOTHING, **options)
    once = [(0, 0, slot) for slot in range(29)]
    assert written == [once]
    written.clear()
    assert decoded(model, {"input_ids": ids.repeat(4, 1)}, request=NOTHING, do_sample=True, top_k=20).equal(several)
    assert written == [once]
    written.clear()
    decoded(model, left_padded([30, 12, 30]), request=NOTHING)  # three prompts, in one pass
    second, third = ([(row, start, slot) for slot in range(start, 29)] for row, start in ((1, 18), (2, 0)))
    assert written == [[*once, *second, *third]]


@pytest.mark.parametrize("new", [12, 13, 14])
def test_the_cache_is_given_back_as_plain_leaves_it(new: int, prompts: bool) -> None:
    model, batch = model_of("llama"), left_padded(LENGTHS)
    text = decoded(model, batch, 16, no_repeat_ngram_size=1)
    options = {"eos_token_id": int(text[1, 25]), "no_repeat_ngram_size": 1, "return_dict_in_generate": True}
    plain = decoded(model, batch, new, **options)
    drafted = decoded(model, batch, new, Lies(plain.sequences), **options)
    assert drafted.sequences.equal(plain.sequences)
    seen = torch.nn.functional.pad(batch["attention_mask"], (0, new - 1), value=1).bool()[:, None, :, None]
    for one, other in zip(plain[CACHE].layers, drafted[CACHE].layers, strict=True):
        for known, states in ((one.keys, other.keys), (one.values, other.values)):
            assert known.shape == states.shape
            torch.testing.assert_close(states.where(seen, 0), known.where(seen, 0), rtol=1e-3, atol=1e-4)


class Counts(LogitsProcessor):
    """Logits processor whose effect depends on all rows and on the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (self.calls * int(input_ids[:, -1].sum())) % VOCAB] += 3.0
        return scores


def test_a_processor_sees_plain_decodings_calls(passes: list[tuple[int, int]]) -> None:
    model, batch = model_of("llama"), left_padded(LENGTHS)
    plain = decoded(model, batch, logits_processor=LogitsProcessorList([Counts()]))
    processor = Counts()
    drafted = decoded(model, batch, request=Lies(plain), logits_processor=LogitsProcessorList([processor]))
    assert drafted.equal(plain) and processor.calls == 40
    assert {rows for rows, _ in passes} >= {3}


@pytest.mark.parametrize("why", ["a gap in the mask", "numeric", "hidden states", "the check"])
def test_what_is_left_to_the_models_own_code(
    why: str, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, batch, request, options = model_of("llama"), left_padded(LENGTHS), NOTHING, {}
    if why == "a gap in the mask":
        batch["attention_mask"][0, 7] = 0
    elif why == "numeric":
        request = NUMERIC
    elif why == "hidden states":
        options = {"return_dict_in_generate": True, "output_hidden_states": True}
    else:
        monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))  # the result must not be stored
        original = cache_table.cache_table

        def shifted(counts: Any, layers: Any, texts: Sequence[TextPlace]) -> Any:
            """Let each row see one token of padding."""
            return original(counts, layers, [text._replace(start=max(text.start - 1, 0)) for text in texts])

        monkeypatch.setattr("ssd_generation.forward.captured.cache_attention.cache_table", shifted)
    plain = decoded(model, batch, 12, **options)
    passes.clear()
    drafted = decoded(model, batch, 12, request, **options)
    texts = (out if isinstance(out, torch.Tensor) else out.sequences for out in (plain, drafted))
    assert torch.equal(*texts)
    assert model.last_speculation.exactness == "numeric"
    if why == "the check":
        assert "standard deviations apart" in model._check(is_batch=True).capture_refusal
    else:
        assert all(rows == 1 for rows, _ in passes), "but for the check of single texts"


@pytest.mark.parametrize("lengths", [[40, 1, 3], [12, 0], [1, 1], [300, 2]], ids=str)
@pytest.mark.parametrize("request_", [NOTHING, LOOKUP], ids=["nothing", "lookup"])
def test_rows_of_very_different_length(lengths: list[int], request_: Any, prompts: bool) -> None:
    model, batch = model_of("llama"), left_padded(lengths)
    plain = decoded(model, batch, 20)
    assert decoded(model, batch, 20, request_).equal(plain)
    assert model.last_speculation.refusal is None
    options = {"eos_token_id": plain[-1, batch["input_ids"].shape[1]].item()}  # the last row ends at once
    assert decoded(model, batch, 20, request_, **options).equal(decoded(model, batch, 20, **options))


def test_more_rows_than_a_pass_has_go_in_groups(passes: list[tuple[int, int]]) -> None:
    model, batch = model_of("llama"), {"input_ids": prompt(5, rows=150)}
    plain = decoded(model, batch, 8)
    assert decoded(model, batch, 8, Lies(plain)).equal(plain)
    assert model.last_speculation.exactness == "bitwise"
    assert (256, 1) in passes


# ----------------------------------------------------------------------------------------------------------------------
# places


@given(
    padding=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    kind=st.sampled_from([torch.long, torch.bool, torch.float32]),
    hole=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 6)),
)
def test_padding_at_left(padding: list[int], kind: torch.dtype, hole: tuple[int, int] | None) -> None:
    mask = torch.ones((len(padding), 7), dtype=kind)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    expected: list[int] | None = padding
    if hole is not None and hole[0] < len(padding):
        row, column = hole
        if column >= padding[row]:
            mask[row, column] = 0
            expected = None
            if column == padding[row] and column < 6:
                expected = [*padding[:row], column + 1, *padding[row + 1 :]]
    assert padding_at_left(mask) == expected
    assert padding_at_left(mask[None]) is None


@settings(max_examples=40)
@given(
    texts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(-9, 9)), min_size=1, max_size=6),
    layers=st.integers(0, 3),
)
def test_the_table_says_where_texts_begin(texts: list[tuple[int, int, int]], layers: int) -> None:
    states = torch.zeros((2, 3, 5, 8))
    of_layers = [LayerPlace(states, states, at, None, 0) for at in range(layers)]
    table = cache_table.cache_table([4, 0, 2, -1], of_layers, [TextPlace(*text) for text in texts])
    assert isinstance(table, ctypes.Array) and list(table[:4]) == [4, 0, 2, -1]
    assert list(table[table[4] :]) == [number for text in texts for number in text]
    for at in range(layers):
        fields = dict(zip(FIELDS, table[len(HEADER) + at * len(FIELDS) :], strict=False))
        assert fields["end"] == at and fields["keys"] == states.data_ptr()
        assert (fields["key row"], fields["key head"]) == (120, 40)
    assert LayerPlace(None, None, 3, None, 0).fields(0) == [0] * len(FIELDS)


def test_one_row_has_a_place_whatever_else() -> None:
    context = Context(None, length=3, positions=torch.full((1, 1), 3))  # type: ignore[arg-type]
    assert context.places(1) is ONE_TEXT
    assert context.places(2) == [TextPlace(0, 0), TextPlace(1, 0)]
    context.mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert context.places(2) == [TextPlace(0, 2), TextPlace(1, 0)]
    context.lags = [0, 2]  # the second row ends two slots before the first
    assert context.places(2) == [TextPlace(0, 2, 0), TextPlace(1, 0, -2)]
    context.positions = None
    assert context.places(2) is None


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_drafts_of_many_texts_in_half_precision(
    family: str, monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(plan_passes, "longest_by_kernels", lambda model, invariance: 0)
    model, batch = model_of(family, torch.bfloat16), left_padded([21, 9, 16, 4, 20])
    together = decoded(model, batch, request=NOTHING)
    assert model.last_speculation.exactness == "bitwise" and (5, 1) in passes
    for request in (LOOKUP, Lies(together), OWN, INT8):
        assert decoded(model, batch, request=request).equal(together)
        assert model.last_speculation.exactness == "bitwise"
    seeded = decoded(model, batch, request=NOTHING, do_sample=True, top_k=30)
    assert decoded(model, batch, request=Lies(seeded), do_sample=True, top_k=30).equal(seeded)


def test_a_wider_pass_is_used_until_capturing_pays() -> None:
    batch = left_padded([21, 9, 16, 4, 20, 7])
    model, other = model_of("llama"), model_of("llama")
    expected = decoded(other, batch, request=NOTHING)
    decoded(model, batch, new=1, request=NOTHING)  # with the check of the model
    target = captured_target(model, BatchInvariance(NATIVE, WIDTHS))
    assert target is not None
    for width in [*target._programs]:
        if width != 8:
            del target._programs[width]
    target._filled.clear()
    target.program(8)
    assert torch.equal(decoded(model, batch, new=7, request=NOTHING), expected[:, : 21 + 7])
    assert list(target._programs) == [8] and target._filled == {6: pytest.approx(6 * 2 / 16)}
    assert torch.equal(decoded(model, batch, request=NOTHING), expected)
    assert 6 in target._programs and target._filled[6] == pytest.approx(2.0)
    # With narrower passes alone, one with room is captured: drafts vary the width.
    assert [target._wider(width) for width in (10, 13, 24, 40)] == [16, 16, 32, 64]
