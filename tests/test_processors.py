"""Logits processors get exactly the calls of plain decoding, unless they are known to be pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ssd_generation import (
    Draft,
    Drafter,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from ssd_generation.decoding.processors import is_pure
from tiny_models import VOCAB, prompt, tiny_model

NEW = 26
SKIP = SkipConfig(attention=[1], mlp=[2])
FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
DRAFTS: dict[str, Any] = {
    "skip": SelfSpeculativeConfig(SKIP, FIXED),
    "int8": SelfSpeculativeConfig(precision=PrecisionConfig(default="int8", head="int8"), drafting=FIXED),
    "lookup": SelfSpeculativeConfig(lookup=LookupConfig(min_ngram=1), drafting=FIXED),
    "auto": "auto",
}
ENDS = [5, 10, 36]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model())


class Seeing(LogitsProcessor):
    """A processor that records its arguments, in the order of events of a call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(("processor", (input_ids.tolist(), scores.clone())))
        return self.change(input_ids, scores)

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def only(scores: torch.Tensor, token: int) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)


class Budget(Seeing):
    """A processor that ends the text after a number of calls."""

    left = 20

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        return scores if self.left > 0 else only(scores, ENDS[0])


class Script(Seeing):
    """A processor that forces a token from a list at every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.script = [41, 7, 41, 23, 9, 41, 30, 12, 60, 3, 17, 29]

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return only(scores, self.script.pop(0)) if self.calls % 2 and self.script else scores


class ByLastToken(Seeing):
    """A processor that advances its state by the last token alone, like an automaton."""

    state = 1

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.state = (self.state * 31 + int(input_ids[:, -1].sum())) % VOCAB
        return scores.index_add(1, torch.tensor([self.state]), torch.full((len(scores), 1), 6.0).to(scores))


class Matcher(Seeing):
    """A grammar of pairs: an even token is followed by a greater one. Fails on a token that it does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[range] | None = None
        self.over: list[bool] = []

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.allowed is None:
            self.allowed, self.over = [range(VOCAB)] * len(scores), [False] * len(scores)
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if self.over[row]:
                    continue
                assert token in self.allowed[row], "a token that the grammar does not have"
                self.over[row] = token in ENDS
                self.allowed[row] = range(token + 1, VOCAB) if token % 2 == 0 and token < 50 else range(VOCAB)
        mask = torch.full_like(scores, -torch.inf)
        for row, allowed in enumerate(self.allowed):
            mask[row, range(VOCAB) if self.over[row] else list(allowed)] = 0
        return scores + mask


class AcrossRows(Seeing):
    """A processor that forbids each row the last token of the row above, and that row's most likely next one."""

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(1, len(scores)):
            scores[row, scores[row - 1].argmax()] = -torch.inf
            scores[row, input_ids[row - 1, -1]] = -torch.inf
        return scores


class OfType(Seeing):
    """A processor that returns scores of another type."""

    dtype = torch.float64

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (scores * 1.5).to(self.dtype)


class InBFloat16(OfType):
    dtype = torch.bfloat16


class InHalf(OfType):
    dtype = torch.float16


class Draws(Seeing):
    """A processor that draws from torch's own generator, which is allowed in greedy decoding."""

    def change(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.randn(scores.shape).to(scores)


PROCESSORS: dict[str, Callable[[], Seeing]] = {
    "counts": Budget,
    "pops": Script,
    "last token": ByLastToken,
    "matches": Matcher,
    "across rows": AcrossRows,
    "float64": OfType,
    "bfloat16": InBFloat16,
    "float16": InHalf,
}


class Streams(BaseStreamer):  # type: ignore[misc]
    def __init__(self, seen: list[tuple[str, Any]]) -> None:
        self.seen = seen

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(("streamer", value.tolist()))

    def end(self) -> None:
        self.seen.append(("streamer", None))


class Asks(StoppingCriteria):
    def __init__(self, seen: list[tuple[str, Any]]) -> None:
        self.seen = seen

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append(("criterion", input_ids.tolist()))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def decoded(model: PreTrainedModel, processor: Seeing, rows: int, request: Any, **options: Any) -> Any:
    """Return the text of plain or drafted decoding, and the generator's state; the processor records the events."""
    inputs: dict[str, Any] = {"input_ids": prompt(9, rows)}
    if rows > 1:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, :3] = 0
        inputs["attention_mask"] = mask
    else:
        options["streamer"] = Streams(processor.seen)
    torch.manual_seed(3)
    output = model.generate(
        **inputs,
        max_new_tokens=NEW,
        eos_token_id=ENDS,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([Asks(processor.seen)]),
        self_speculative=request,
        **options,
    )
    return output, torch.get_rng_state()


def assert_same_events(one: Seeing, other: Seeing) -> None:
    assert [what for what, _ in one.seen] == [what for what, _ in other.seen]
    for (what, plain), (_, drafted) in zip(one.seen, other.seen, strict=True):
        if what == "processor":
            assert plain[0] == drafted[0]
            torch.testing.assert_close(plain[1], drafted[1], rtol=1e-3, atol=1e-4)
        else:
            assert plain == drafted


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", PROCESSORS)
def test_text_and_calls_are_those_of_plain_decoding(
    model: PreTrainedModel, name: str, how: dict[str, Any], rows: int, draft: str
) -> None:
    one, other = PROCESSORS[name](), PROCESSORS[name]()
    try:
        expected, state = decoded(model, one, rows, None, **how)
    except RuntimeError as error:  # torch cannot draw from scores of this type here
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            decoded(model, other, rows, DRAFTS[draft], **how)
        return
    got, state_after = decoded(model, other, rows, DRAFTS[draft], **how)
    assert torch.equal(expected, got)
    assert torch.equal(state, state_after), "the generator has another state"
    assert_same_events(one, other)


@pytest.mark.parametrize("name", ["counts", "pops", "last token", "across rows"])
def test_they_change_the_text(model: PreTrainedModel, name: str) -> None:
    """The test above is meaningful only if processors change the text."""
    expected, _ = decoded(model, Seeing(), 3, None, do_sample=False)
    got, _ = decoded(model, PROCESSORS[name](), 3, None, do_sample=False)
    assert not torch.equal(expected, got)


class Right(Drafter):
    """A drafter that knows the text."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, texts: Any, limits: Any) -> Draft:
        return Draft.of_tokens([self.text[texts.lengths[0] :][: min(limits[0], 5)]])


def test_what_is_right_is_accepted(model: PreTrainedModel) -> None:
    text, _ = decoded(model, Matcher(), 1, None, do_sample=False)
    again, _ = decoded(model, Matcher(), 1, Right(text[0].tolist()), do_sample=False)
    assert torch.equal(text, again)
    statistics = model.last_speculation
    assert statistics.acceptance_rate == 1.0 and statistics.target_passes <= 2 + len(text[0]) // 6


def test_scores_are_recorded_in_the_type_that_the_processor_gives(model: PreTrainedModel) -> None:
    options = {"do_sample": False, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    plain, _ = decoded(model, OfType(), 1, None, **options)
    drafted, _ = decoded(model, OfType(), 1, DRAFTS["skip"], **options)
    for one, other in zip((*plain.scores, *plain.logits), (*drafted.scores, *drafted.logits), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_drawing_in_greedy_decoding(model: PreTrainedModel) -> None:
    one, other = Draws(), Draws()
    expected, state = decoded(model, one, 1, None, do_sample=False)
    got, state_after = decoded(model, other, 1, DRAFTS["skip"], do_sample=False)
    assert torch.equal(expected, got) and torch.equal(state, state_after)
    assert_same_events(one, other)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_synthid_watermark(model: PreTrainedModel, rows: int, draft: str) -> None:
    mark = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)
    expected, _ = decoded(model, Seeing(), rows, None, do_sample=True, watermarking_config=mark)
    got, _ = decoded(model, Seeing(), rows, DRAFTS[draft], do_sample=True, watermarking_config=mark)
    assert torch.equal(expected, got)
    without, _ = decoded(model, Seeing(), rows, None, do_sample=True)
    assert not torch.equal(expected, without), "the mark changes nothing"


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_classifier_free_guidance(model: PreTrainedModel, rows: int, draft: str, how: dict[str, Any]) -> None:
    options = {"guidance_scale": 1.7, "negative_prompt_ids": prompt(5, rows, seed=8), **how}
    expected, _ = decoded(model, Seeing(), rows, None, **options)
    got, _ = decoded(model, Seeing(), rows, DRAFTS[draft], **options)
    assert torch.equal(expected, got)
    without, _ = decoded(model, Seeing(), rows, None, **how)
    assert not torch.equal(expected, without), "the guidance changes nothing"


# --- processors known to be pure functions ---


class Declared(LogitsProcessor):
    supports_speculation = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = (7 * int(input_ids[0, -1]) + 3) % VOCAB
        return scores.index_add(1, torch.tensor([token]), torch.full((len(scores), 1), 5.0))


class Overrides(Declared):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids, scores)


class OverridesAndDeclares(Overrides):
    supports_speculation = True


class OtherwiseAlike(Declared):
    pass


class TakesBack(Declared):
    supports_speculation = False


class Truthy(Declared):
    supports_speculation = "yes"  # type: ignore[assignment]


class DerivedFromTransformers(TopKLogitsWarper):
    pass


def cases() -> Iterator[tuple[LogitsProcessor, bool]]:
    yield TopKLogitsWarper(5), True
    yield MinNewTokensLengthLogitsProcessor(3, 4, 2), True
    yield PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1), False
    yield Seeing(), False
    yield Declared(), True
    yield OtherwiseAlike(), True
    yield Overrides(), False
    yield OverridesAndDeclares(), True
    yield TakesBack(), False
    yield Truthy(), False
    yield DerivedFromTransformers(5), False


@pytest.mark.parametrize(("processor", "pure"), list(cases()), ids=lambda case: type(case).__name__)
def test_which_may_be_asked_of_any_place(processor: LogitsProcessor, pure: bool) -> None:
    assert is_pure(processor) is pure


def test_the_declared_serve_the_draft_as_well(model: PreTrainedModel) -> None:
    whole = SelfSpeculativeConfig(SkipConfig(), FIXED)  # nothing is skipped: drafts are right if processed alike
    for declared, rate in ((OtherwiseAlike(), 1.0), (Overrides(), None)):
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        options["logits_processor"] = LogitsProcessorList([declared])
        plain = model.generate(prompt(9), **options)
        assert torch.equal(plain, model.generate(prompt(9), **options, self_speculative=whole))
        assert (model.last_speculation.acceptance_rate == 1.0) is (rate == 1.0)
