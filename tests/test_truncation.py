"""Sampling by top-k, top-p and min-p from a few candidates: the tokens of transformers' own processors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.decoding import choice, truncation
from ssd_generation.decoding.batch_rows import Rows
from ssd_generation.decoding.choice import SampledChoice, winners
from ssd_generation.decoding.truncation import Drawn, Truncation
from ssd_generation.native.codegen.compiler import why_not
from tiny_models import left_padded, prompt, tiny_model

NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
LOOKUP = SelfSpeculativeConfig(
    lookup=LookupConfig(min_ngram=1), drafting=DraftingConfig(policy="fixed", max_draft_length=4)
)
OWN = SelfSpeculativeConfig(SkipConfig(attention=[1]), DraftingConfig(policy="fixed", max_draft_length=3))
CONFIDENT = SelfSpeculativeConfig(SkipConfig(attention=[1]), DraftingConfig(policy="confidence", max_draft_length=3))
METHODS = {"nothing": NOTHING, "lookup": LOOKUP, "own": OWN, "confident": CONFIDENT}
SETTINGS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 20},
    "usual": {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.1},
    "top-p": {"top_k": 0, "top_p": 0.6, "temperature": 0.2},
    "min-p": {"top_k": 0, "min_p": 0.2, "temperature": 0.3},
    "temperature": {"top_k": 0, "temperature": 0.8, "repetition_penalty": 1.1},
    "nothing": {"top_k": 0},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 0.5, "no_repeat_ngram_size": 2},
}
VOCABULARY = 4_200
TRUNCATING = [name for name in SETTINGS if name not in ("temperature", "nothing")]


def processors(**wanted: Any) -> LogitsProcessorList:
    least = {"min_tokens_to_keep": wanted.pop("least", 1)}
    kinds = {"temperature": "Temperature", "top_k": "TopK", "top_p": "TopP", "min_p": "MinP"}
    found = LogitsProcessorList()
    for name, kind in kinds.items():
        if wanted.get(name) is not None and (wanted[name] or name == "min_p"):
            others = {} if name == "temperature" else least
            found.append(getattr(logits_process, f"{kind}LogitsWarper")(wanted[name], **others))
    return found


def both(scores: torch.Tensor, these: LogitsProcessorList) -> tuple[Drawn, torch.Tensor]:
    """Draw tokens from scores `(N, V)` by both ways, with the same noise."""
    noise = torch.empty_like(scores).exponential_()
    drawn = Truncation.of(these).draw(scores, lambda tokens: noise.gather(1, tokens))
    assert drawn is not None
    processed = these(torch.zeros((len(scores), 1), dtype=torch.long), scores.clone())
    return drawn, winners(processed.softmax(dim=-1) / noise)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spread=st.floats(0.2, 12.0),
    step=st.sampled_from([0.0, 2.0**-7, 0.25, 1.0]),
    temperature=st.none() | st.floats(0.1, 3.0),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.floats(0.01, 0.99),
    min_p=st.none() | st.floats(0.0, 1.0),
    least=st.integers(1, 3),
    vocabulary=st.sampled_from([VOCABULARY, 4_111, 20_000]),
)
def test_certain_tokens_are_those_of_transformers(
    seed: int, spread: float, step: float, vocabulary: int, **wanted: Any
) -> None:
    these = processors(**wanted)
    if Truncation.of(these).is_none:
        assert all(wanted[name] is None for name in ("top_k", "top_p", "min_p"))
        return
    torch.manual_seed(seed)
    scores = torch.randn(4, vocabulary) * spread
    if step:  # many equal scores
        scores = (scores / step).round() * step
    drawn, expected = both(scores, these)
    assert torch.equal(drawn.tokens[drawn.are_sure], expected[drawn.are_sure])


@pytest.mark.parametrize("name", TRUNCATING)
def test_nearly_all_tokens_of_peaked_scores_are_certain(name: str) -> None:
    torch.manual_seed(0)
    these = processors(**SETTINGS[name])
    scores = torch.randn(200, 20_000) * 4
    drawn, expected = both(scores, these)
    assert drawn.are_sure.float().mean() > 0.97
    assert torch.equal(drawn.tokens[drawn.are_sure], expected[drawn.are_sure])
    chances = these(torch.zeros((200, 1), dtype=torch.long), scores).softmax(-1).gather(1, expected[:, None])[:, 0]
    assert torch.allclose(drawn.probabilities[drawn.are_sure].float(), chances[drawn.are_sure], atol=0.02)


@pytest.mark.parametrize(
    ("at", "wanted"),
    [
        ({0: 1.0, 1: 1.0}, {"top_p": 0.5}),  # which of two equals is left depends on the sort
        ({0: 1.0, 1: 1.0}, {"top_p": 0.1, "top_k": 2}),
        ({0: 1.0, 1: math.log(0.5) + 1.0}, {"top_k": 5, "min_p": 0.5}),  # probabilities at the limit
        ({0: math.nan}, {"top_k": 5}),
        ({0: math.inf}, {"top_k": 5}),
        ({-1: math.nan}, {"top_k": 5}),
        ({}, {"top_k": 5}),  # all are equal: all are retained
        ({}, {"top_p": 0.5}),
    ],
    ids=str,
)
def test_what_rounding_or_sorting_decides_is_never_certain(at: dict[int, float], wanted: dict[str, Any]) -> None:
    scores = torch.full((64, VOCABULARY), -20.0 if len(at) == 2 else 0.0)
    for token, score in at.items():
        scores[:, token] = score
    noise = torch.empty_like(scores).exponential_()
    drawn = Truncation.of(processors(**wanted)).draw(scores, lambda tokens: noise.gather(1, tokens))
    assert drawn is not None
    # Where the first of them wins in any case, nothing is in doubt.
    doubtful = noise[:, 1] * math.e < noise[:, 0] if "min_p" in wanted else torch.ones(64, dtype=torch.bool)
    assert doubtful.any() and not drawn.are_sure[doubtful].any()


@pytest.mark.parametrize(
    "these",
    [
        [],
        [*processors(top_k=5), logits_process.TypicalLogitsWarper(0.5)],
        [logits_process.TopKLogitsWarper(5, filter_value=-1e9)],
        [type("Own", (logits_process.TopKLogitsWarper,), {})(5)],
    ],
    ids=["none", "typical", "another filter", "derived"],
)
def test_other_processors_are_not_taken_for_these(these: Any) -> None:
    found = Truncation.of(these)
    assert found.is_none and found.count == 0


def test_the_order_is_that_of_generate() -> None:
    top_k, top_p = processors(top_k=5, top_p=0.5)
    found = Truncation.of([top_p, top_k])
    assert (found.top_k, found.top_p, found.count) == (5, None, 1)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    """Note what is drawn without processing all scores."""
    found, draw = [], SampledChoice.draw

    def noting(self: SampledChoice, truncation: Truncation, scores: torch.Tensor, steps: Any) -> Drawn | None:
        answer = draw(self, truncation, scores, steps)
        if answer is not None:
            found.append(answer)
        return answer

    monkeypatch.setattr(SampledChoice, "draw", noting)
    return found


def decoded(model: Any, batch: dict[str, Any], request: Any = None, **options: Any) -> Any:
    torch.manual_seed(11)
    asked = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(**batch, **asked, self_speculative=request)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_are_those_of_plain_generate(name: str, method: str, rows: int, drawn: list[Drawn]) -> None:
    model = enable_self_speculative(tiny_model("llama", vocab_size=VOCABULARY))
    batch: dict[str, Any] = left_padded([14, 9, 12]) if rows > 1 else {"input_ids": prompt(14)}
    plain = decoded(model, batch, **SETTINGS[name])
    assert torch.equal(decoded(model, batch, METHODS[method], **SETTINGS[name]), plain) and drawn
    state = torch.get_rng_state()
    decoded(model, batch, **SETTINGS[name])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_of_16_bits_are_drawn_from_as_they_are(
    name: str, dtype: torch.dtype, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable_self_speculative(tiny_model("llama", vocab_size=VOCABULARY).to(dtype))
    options = {**SETTINGS[name], "num_return_sequences": 3}
    found = decoded(model, {"input_ids": prompt(14)}, NOTHING, **options)
    assert len(drawn) == 19
    # The same passes: those of plain `generate` round differently.
    monkeypatch.setattr(Rows, "may_draw", False)
    assert torch.equal(decoded(model, {"input_ids": prompt(14)}, NOTHING, **options), found) and len(drawn) == 19


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_not_certain_is_asked_of_transformers(
    name: str, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable_self_speculative(tiny_model("llama", vocab_size=VOCABULARY))
    batch = left_padded([14, 9, 12])
    plain = decoded(model, batch, **SETTINGS[name])
    for module in (truncation, choice):
        monkeypatch.setattr(module, "APART", 0.3)
    assert torch.equal(decoded(model, batch, OWN, **SETTINGS[name]), plain)
    sure = torch.cat([answer.are_sure for answer in drawn])
    assert not sure.all()


def test_scores_that_are_requested_are_all_processed(drawn: list[Drawn]) -> None:
    model = enable_self_speculative(tiny_model("llama", vocab_size=VOCABULARY))
    options = {"output_scores": True, "return_dict_in_generate": True, **SETTINGS["usual"]}
    plain = decoded(model, {"input_ids": prompt(14)}, **options)
    found = decoded(model, {"input_ids": prompt(14)}, LOOKUP, **options)
    assert torch.equal(found.sequences, plain.sequences) and not drawn
    for one, other in zip(plain.scores, found.scores, strict=True):
        assert torch.equal(one == -math.inf, other == -math.inf)


def test_a_probability_that_is_not_a_number_fails_as_in_plain_generate() -> None:
    model = enable_self_speculative(tiny_model("llama", vocab_size=VOCABULARY))
    with torch.no_grad():
        model.lm_head.weight[7] = math.nan
    batch = {"input_ids": prompt(14)}
    with pytest.raises(RuntimeError) as plain:
        decoded(model, batch, **SETTINGS["usual"])
    with pytest.raises(RuntimeError) as drafted:
        decoded(model, batch, NOTHING, **SETTINGS["usual"])
    assert str(drafted.value) == str(plain.value)


def test_a_later_token_that_is_impossible_fails_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model("llama", vocab_size=VOCABULARY))
    forward, calls = model.lm_head.forward, []

    def failing(states: torch.Tensor) -> torch.Tensor:
        calls.append(states)
        found: torch.Tensor = forward(states)
        return found * math.nan if len(calls) > 5 else found

    monkeypatch.setattr(model.lm_head, "forward", failing)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        decoded(model, {"input_ids": prompt(14)}, NOTHING, **SETTINGS["usual"])


# --- races among all scores


@pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    vocabulary=st.integers(4_096, 9_000),
    rows=st.integers(1, 5),
    places=st.integers(1, 3),
    spread=st.sampled_from([0.0, 1.0, 5.0, 300.0]),
    temperature=st.none() | st.floats(0.05, 5.0),
    lag=st.integers(0, 2),
)
def test_a_kernels_race_has_the_winner_of_multinomial(
    seed: int, dtype: torch.dtype, vocabulary: int, rows: int, places: int, spread: float, lag: int, **wanted: Any
) -> None:
    torch.manual_seed(seed)
    scores = (torch.randn(rows, places, vocabulary) * spread).to(dtype)
    scores[0, 0, 5] = -math.inf
    these = processors(**wanted)
    drawing = SampledChoice(rows, torch.device("cpu"))
    steps = [lag * (row % 2) for row in range(rows)]
    drawn = drawing.draw(Truncation.of(these), scores, steps)
    ids = torch.zeros((rows * places, 1), dtype=torch.long)
    expected = drawing.choose(these(ids, scores.float().flatten(0, 1)).view(scores.shape), steps).flatten()
    drawing.end(0)
    assert drawn is not None and torch.equal(drawn.tokens[drawn.are_sure], expected[drawn.are_sure])
    assert drawn.are_sure.float().mean() > (0.5 if rows * places > 2 else -1)


@pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_race_with_a_score_that_is_no_number_is_never_certain(wrong: float) -> None:
    scores = torch.randn(2, 1, 4_100)
    for token in (0, 1_700, 4_099):
        scores[1, 0, token] = wrong
        drawing = SampledChoice(2, torch.device("cpu"))
        drawn = drawing.draw(Truncation.of([]), scores, [0, 0])
        drawing.end(0)
        assert drawn is not None and drawn.are_sure.tolist() == [True, False]
        scores[1, 0, token] = 0.0


def test_small_vocabularies_and_other_types_are_torchs() -> None:
    drawing = SampledChoice(1, torch.device("cpu"))
    assert drawing.draw(Truncation.of([]), torch.randn(1, 1, 4_000), [0]) is None
    assert drawing.draw(Truncation.of([]), torch.randn(1, 1, 5_000).double(), [0]) is None
    drawing.end(0)


@pytest.mark.parametrize("wanted", [{"top_p": 0.1}, {"min_p": 0.9}, {"top_p": 0.1, "min_p": 0.9}], ids=str)
def test_more_equals_of_the_last_than_are_looked_at(wanted: dict[str, float]) -> None:
    scores = torch.zeros((200, VOCABULARY))
    scores[:, :8] = 0.5  # top-k retains all others as well, and top-p counts them
    drawn, expected = both(scores, processors(top_k=22, **wanted))
    assert torch.equal(drawn.tokens[drawn.are_sure], expected[drawn.are_sure])
