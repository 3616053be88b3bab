"""Sampled texts are plain `generate`'s for the same seed, and leave torch's generator in the same state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ssd_generation import (
    Draft,
    Drafter,
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from ssd_generation.decoding.choice import IMPOSSIBLE, SampledChoice
from ssd_generation.decoding.refusals import CannotDraft
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.call_drafter import refinement_of
from test_sampling import Favours
from tiny_models import left_padded, prompt, tiny_model

NEW = 24
FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
CONFIGS = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1, 2], mlp=[1]), FIXED),
    "int8": SelfSpeculativeConfig(drafting=FIXED, precision="int8"),
    "lookup": SelfSpeculativeConfig(drafting=FIXED, lookup=LookupConfig(max_ngram=2, min_ngram=1, max_tokens=3)),
    "cost": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[1]), lookup=True),
    "confidence": SelfSpeculativeConfig(
        SkipConfig(attention=[1, 2], mlp=[1]), DraftingConfig(policy="confidence", max_draft_length=3, threshold=0.2)
    ),
    "adapt": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[1]), adapt=True),
    "none": SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")),
    "auto": "auto",
}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature and top-p": {"temperature": 0.6, "top_p": 0.95, "top_k": 0},
    "top-k and repetition penalty": {"top_k": 20, "repetition_penalty": 1.4},
    "min-p": {"top_k": 0, "min_p": 0.05, "temperature": 1.5},
    "typical": {"top_k": 0, "typical_p": 0.9},
    "no repeated n-grams": {"top_k": 0, "no_repeat_ngram_size": 2},
    "bad words": {"top_k": 0, "bad_words_ids": [[3], [7, 2]]},
    "custom": {"top_k": 0, "logits_processor": LogitsProcessorList([Favours()])},
}
INPUTS: dict[str, dict[str, Any]] = {
    "single": {"input_ids": prompt(9)},
    "ragged": left_padded([12, 7, 10, 9]),
    "several": {"input_ids": prompt(9), "num_return_sequences": 3},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enable_self_speculative(softened("llama"))


def softened(family: str) -> PreTrainedModel:
    """Return a model in which continuations, and drafts of them, each have a fair chance."""
    model = tiny_model(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    return model


def sample(model: Any, seed: int = 0, inputs: dict[str, Any] | None = None, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    asked = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0, **(inputs or INPUTS["single"])}
    asked.setdefault("attention_mask", torch.ones_like(asked["input_ids"]))
    return model.generate(**{**asked, **options})  # type: ignore[no-any-return]


def state() -> torch.Tensor:
    return torch.default_generator.get_state()


def assert_same(model: Any, config: Any, seed: int = 0, **options: Any) -> torch.Tensor:
    """Assert that texts and generator states after them are equal with and without drafts; return the texts."""
    plain = sample(model, seed, **options)
    left = state()
    drafted = sample(model, seed, self_speculative=config, **options)
    assert plain.tolist() == drafted.tolist()
    assert torch.equal(left, state())
    return plain


# --- texts
# ----------------------------------------------------------------------------------------------------------------------


# Every way to draft with every setting and every kind of input, in pairwise combinations.
PAIRS = [
    (config, setting, list(INPUTS)[(i + j) % len(INPUTS)])
    for i, config in enumerate(CONFIGS)
    for j, setting in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("config", "setting", "inputs"), PAIRS)
def test_every_text_is_that_of_plain_generate(model: PreTrainedModel, config: str, setting: str, inputs: str) -> None:
    for seed in range(2):
        assert_same(model, CONFIGS[config], seed, inputs=INPUTS[inputs], **SETTINGS[setting])
    if config not in ("none", "auto", "lookup"):
        assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "qwen3_moe", "opt", "bloom"])
def test_other_families(family: str) -> None:
    model = enable_self_speculative(softened(family))
    for inputs in ("single", "ragged"):
        for seed in range(2):
            assert_same(model, CONFIGS["skip"], seed, inputs=INPUTS[inputs])


@pytest.mark.parametrize("inputs", INPUTS)
def test_an_end_of_sequence_inside_a_block(model: PreTrainedModel, inputs: str) -> None:
    # Every sixth token ends a text, so that rows end at many places of a block and at different steps.
    ends = list(range(0, 64, 6))
    lengths = set()
    for seed in range(12):
        text = assert_same(model, CONFIGS["skip"], seed, inputs=INPUTS[inputs], eos_token_id=ends)
        lengths.add(text.shape[1])
    assert len(lengths) > 3


def test_whatever_was_drafted_the_text_is_the_same(model: PreTrainedModel) -> None:
    class Anything(Drafter):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(1)

        def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
            # Draw from torch's own generator, too: a drafter's random numbers must not affect the text.
            torch.rand(3)
            counts = torch.randint(0, 6, (texts.batch,), generator=self.generator).tolist()
            return Draft.of_tokens(
                [
                    torch.randint(0, 64, (min(count, limit),), generator=self.generator).tolist()
                    for count, limit in zip(counts, limits, strict=True)
                ]
            )

    class Knows(Drafter):
        """A drafter that uses the target's own scores and noise, so that every token is the target's."""

        def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
            ids = torch.tensor([texts.text(0)])
            tokens: list[int] = []
            for ahead in range(min(3, limits[0])):
                drafted = torch.tensor([tokens], dtype=torch.long)
                with torch.no_grad():
                    logits = target(torch.cat((ids, drafted), dim=1)).logits[:, -1]
                tokens.append(int(texts.choose(texts.process(drafted, logits.clone()), ahead)))
            return Draft.of_tokens([tokens])

    target = softened("llama")
    for seed in range(4):
        assert_same(model, Anything(), seed, inputs=INPUTS["ragged"])
        assert_same(model, Knows(), seed, temperature=0.9, repetition_penalty=1.2)
        assert model.last_speculation.acceptance_rate == 1.0


def test_a_continued_cache(model: PreTrainedModel) -> None:
    def turns(**more: Any) -> list[list[int]]:
        ids, cache, said = INPUTS["single"]["input_ids"], None, []
        torch.manual_seed(5)
        for _ in range(3):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, max_new_tokens=10, do_sample=True,
                top_k=0, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, **more,
            )  # fmt: skip
            cache, ids = out[CACHE], torch.cat((out.sequences, prompt(4)), dim=1)
            said.append(out.sequences[0].tolist())
        return said

    assert turns() == turns(self_speculative=CONFIGS["skip"])


def test_policies_may_learn_what_they_like(model: PreTrainedModel) -> None:
    # Their state, carried between calls, changes the drafts and not the text.
    counts = set()
    for _ in range(4):
        assert_same(model, CONFIGS["cost"], 3)
        counts.add(model.last_speculation.drafted_tokens)
    assert len(counts) > 1


def test_drafts_are_refined_under_sampling() -> None:
    model = enable_self_speculative(softened("llama"))
    for seed in range(12):
        assert_same(model, CONFIGS["adapt"], seed, max_new_tokens=64, eos_token_id=None, temperature=0.7)
    refinement = refinement_of(model, CONFIGS["adapt"])
    assert refinement.reason is None and refinement.passes >= 2


def test_judged_with_the_noise_of_the_text(model: PreTrainedModel) -> None:
    # The target model, judged as a draft, predicts each of its own sampled tokens: same scores, same noise.
    from ssd_generation.tuning import refinement
    from ssd_generation.tuning.acceptance import judge_rounds

    whole = SelfSpeculativeConfig(drafting=FIXED)
    judged: list[Any] = []

    def judge(self: Any, model: Any, text: Any) -> bool:
        judged.append(judge_rounds(model, whole, text, range(len(text)), 1))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement.Refinement, "learn", judge)
        patch.setattr(refinement.Refinement, "is_due", lambda self, tokens: tokens >= 16)
        for setting in ("temperature and top-p", "custom"):
            sample(model, self_speculative=CONFIGS["adapt"], max_new_tokens=64, eos_token_id=None, **SETTINGS[setting])
    assert len(judged) >= 4
    assert all(found.first() == 1.0 and found.tried[0] >= 16 for found in judged)


# --- it can fail
# ----------------------------------------------------------------------------------------------------------------------


def break_order(self: SampledChoice, step: int, vocabulary: int) -> None:
    self._vocabulary = vocabulary
    while self._drawn < step:  # exchange the steps of each pair
        for later in (1, 0):
            self._states[self._drawn + later] = self._generator.get_state()
            noise = torch.empty(self._batch, vocabulary).exponential_(generator=self._generator)
            self._noise[self._drawn + later] = noise
        self._drawn += 2


def break_rows(self: SampledChoice, step: int, vocabulary: int) -> None:
    self._vocabulary = vocabulary
    while self._drawn < step:
        self._states[self._drawn] = self._generator.get_state()
        rows = [torch.empty(vocabulary).exponential_(generator=self._generator) for _ in range(self._batch)]
        self._noise[self._drawn] = torch.stack(rows[::-1])
        self._drawn += 1


@pytest.mark.parametrize(("broken", "inputs"), [(break_order, "single"), (break_rows, "several")])
def test_it_sees_noise_in_another_order(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, broken: Callable[..., None], inputs: str
) -> None:
    monkeypatch.setattr(SampledChoice, "draw_up_to", broken)
    with pytest.raises(AssertionError):
        assert_same(model, CONFIGS["skip"], inputs=INPUTS[inputs])


def test_it_sees_noise_that_is_drawn_anew_for_the_target(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SampledChoice.choose

    def anew(self: SampledChoice, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        if scores.shape[1] > 1:
            return torch.multinomial(scores.softmax(-1).flatten(0, 1), 1).view(scores.shape[:2])
        return original(self, scores, steps)

    monkeypatch.setattr(SampledChoice, "choose", anew)
    with pytest.raises(AssertionError):
        assert_same(model, CONFIGS["skip"])


# --- where a call ends
# ----------------------------------------------------------------------------------------------------------------------


class Breaks(BaseStreamer):  # type: ignore[misc]
    """A streamer that fails at the token with number `at`."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())
        if len(self.tokens) == self.at:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@pytest.mark.parametrize("at", [1, 2, 3, 8, 11])
def test_a_call_that_is_broken_off(model: PreTrainedModel, at: int) -> None:
    found = []
    for config in (None, CONFIGS["skip"]):
        streamer = Breaks(at)
        with pytest.raises(KeyboardInterrupt):
            sample(model, 2, streamer=streamer, self_speculative=config)
        found.append((streamer.tokens, state().tolist()))
    assert found[0] == found[1]


class StopsAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", [10, 11, 17, 20])
def test_a_criterion_inside_a_block(model: PreTrainedModel, length: int) -> None:
    criteria = StoppingCriteriaList([StopsAt(length)])
    for inputs in INPUTS.values():
        assert_same(model, CONFIGS["skip"], inputs=inputs, stopping_criteria=criteria)


class Spoils(LogitsProcessor):
    """A processor that returns NaN for all scores, or −∞, from a length on."""

    def __init__(self, length: int, value: float) -> None:
        self.length, self.value = length, value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self.value) if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("length", [9, 10, 13, 18])
def test_scores_that_nothing_can_be_drawn_from(model: PreTrainedModel, length: int, value: float) -> None:
    found = []
    for config in (None, CONFIGS["skip"]):
        streamer = Breaks(0)
        with pytest.raises(RuntimeError) as error:
            sample(
                model,
                streamer=streamer,
                logits_processor=LogitsProcessorList([Spoils(length, value)]),
                self_speculative=config,
            )
        found.append((str(error.value), streamer.tokens, state().tolist()))
    assert found[0] == found[1]


def test_a_single_possible_token_and_probabilities_that_underflow(model: PreTrainedModel) -> None:
    for options in ({"top_k": 1}, {"temperature": 1e-3}, {"temperature": 0.02, "top_p": 1e-6}):
        for inputs in INPUTS.values():
            assert_same(model, CONFIGS["skip"], inputs=inputs, **options)


def test_a_prompt_that_fails_leaves_the_generator(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    before = state()
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[5, 99999]]), do_sample=True, max_new_tokens=4, self_speculative=CONFIGS["skip"])
    assert torch.equal(before, state())


def test_greedy_decoding_leaves_the_generator(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    before = state()
    for config in CONFIGS.values():
        model.generate(prompt(9), do_sample=False, max_new_tokens=NEW, self_speculative=config)
    assert torch.equal(before, state())


# --- others that draw
# ----------------------------------------------------------------------------------------------------------------------


class DrawsInProcessor(LogitsProcessor):
    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.0 * torch.rand(scores.shape, **self.options)


class DrawsInStreamer(Breaks):
    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.tokens) > 1:  # the first is the prompt
            torch.rand(1)


class DrawsInCriterion(StopsAt):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        torch.randperm(4)
        return super().__call__(input_ids, scores)


class DeclaredButDraws(DrawsInProcessor):
    supports_speculation = True


@pytest.mark.parametrize(
    ("processor", "do_sample"), [(DrawsInProcessor, True), (DeclaredButDraws, True), (DeclaredButDraws, False)]
)
def test_a_processor_that_draws_is_refused(
    model: PreTrainedModel, processor: type[DrawsInProcessor], do_sample: bool
) -> None:
    with pytest.raises(CannotDraft, match=rf"{processor.__name__} draws random numbers .* a `torch\.Generator`"):
        sample(
            model,
            do_sample=do_sample,
            logits_processor=LogitsProcessorList([Favours(), processor()]),
            self_speculative=CONFIGS["skip"],
        )
    # A processor with its own generator is not noticed.
    own = LogitsProcessorList([DrawsInProcessor(generator=torch.Generator())])
    assert_same(model, CONFIGS["skip"], logits_processor=own)


@pytest.mark.parametrize(
    "user",
    [{"streamer": DrawsInStreamer(0)}, {"stopping_criteria": StoppingCriteriaList([DrawsInCriterion(99)])}],
    ids=["streamer", "criterion"],
)
def test_others_that_draw_are_refused(model: PreTrainedModel, user: dict[str, Any]) -> None:
    with pytest.raises(CannotDraft, match="draws random numbers from torch's own generator"):
        sample(model, self_speculative=CONFIGS["skip"], **user)


def test_another_thread_that_draws_is_no_processor(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.decoding import processors

    states = iter(range(10**9))
    monkeypatch.setattr(processors, "state_of_generators", lambda device: next(states))  # as if another thread drew
    assert_same(model, CONFIGS["skip"], **SETTINGS["custom"])


def test_calls_side_by_side_have_the_texts_of_their_own_seeds(model: PreTrainedModel) -> None:
    expected = {seed: sample(model, seed, eos_token_id=None).tolist() for seed in range(6)}
    found: dict[int, list[list[int]]] = {}
    begins = threading.Lock()

    class Begun(Breaks):
        """A streamer that lets the next call set its seed once this call has begun."""

        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 2:  # the prompt and the first token
                begun.set()

    begun = threading.Event()

    def run(seed: int) -> None:
        with begins:
            begun.clear()
            thread = threading.Thread(target=call, args=(seed,))
            thread.start()
            threads.append(thread)
            begun.wait(30)

    def call(seed: int) -> None:
        found[seed] = sample(
            model, seed, eos_token_id=None, streamer=Begun(0), self_speculative=CONFIGS["skip"]
        ).tolist()

    threads: list[threading.Thread] = []
    for seed in expected:
        run(seed)
    for thread in threads:
        thread.join()
    assert found == expected


def test_calls_side_by_side_from_one_state_differ() -> None:
    torch.manual_seed(7)
    first = SampledChoice(1, torch.device("cpu"))
    second = SampledChoice(1, torch.device("cpu"))
    third = SampledChoice(1, torch.device("cpu"))
    scores = torch.zeros(1, 16, 64)
    texts = [choice.choose(scores, [0]).tolist() for choice in (first, second, third)]
    assert texts[0] != texts[1] and texts[1] != texts[2] and texts[0] != texts[2]
    for choice in (second, first, third):
        choice.end(16)
    # With no other call running, the seed decides again.
    torch.manual_seed(7)
    alone = SampledChoice(1, torch.device("cpu"))
    assert alone.choose(scores, [0]).tolist() == texts[0]
    alone.end(16)


# --- the noise itself
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "words"), [(1, 7), (3, 64), (2, 5000), (1, 49152)])
def test_the_noise_is_that_of_multinomial(rows: int, words: int) -> None:
    torch.manual_seed(11)
    scores = torch.randn(rows, 4, words) * 3
    torch.manual_seed(12)
    expected = torch.cat([torch.multinomial(scores[:, place].softmax(-1), 1) for place in range(4)], dim=1)
    left = state()
    torch.manual_seed(12)
    choice = SampledChoice(rows, torch.device("cpu"))
    assert torch.equal(choice.choose(scores[:, :2], [0] * rows), expected[:, :2])
    assert torch.equal(choice.choose(scores[:, 2:3], [2] * rows), expected[:, 2:3])  # a draft
    assert torch.equal(choice.choose(scores[:, 1:], [1] * rows), expected[:, 1:])
    choice.commit(4)
    choice.choose(scores, [4] * rows)  # drawn ahead and never committed
    choice.end(4)
    assert torch.equal(left, state())


def test_rows_may_be_at_different_steps() -> None:
    scores = torch.randn(3, 6, 40)
    choice = SampledChoice(3, torch.device("cpu"))
    together = choice.choose(scores, [0, 0, 0])
    apart = choice.choose(torch.stack((scores[0, 2:4], scores[1, 0:2], scores[2, 4:6])), [2, 0, 4])
    assert apart.tolist() == [together[0, 2:4].tolist(), together[1, 0:2].tolist(), together[2, 4:6].tolist()]
    choice.commit(6)
    assert choice.choose_again(scores[0, 3:5], [3, 4]).shape == (2,)
    choice.end(6)


def test_committed_steps_can_be_drawn_again() -> None:
    scores = torch.randn(1, 90, 40)
    choice = SampledChoice(1, torch.device("cpu"))
    tokens = choice.choose(scores, [0])[0]
    choice.commit(90)
    places = [30, 89, 89, 64]
    assert choice.choose_again(scores[0, places], places).tolist() == tokens[places].tolist()
    choice.end(90)


def test_the_noise_of_rows_that_lead_fits_into_its_bounds() -> None:
    few = SampledChoice(1, torch.device("cpu"))
    many = SampledChoice(4, torch.device("cpu"))
    few.choose(torch.zeros(1, 1, 50_000), [0])
    many.choose(torch.zeros(4, 1, 50_000), [0] * 4)
    assert few.longest_lead > 10**9
    assert many.longest_lead == 2**28 // (4 * 4 * 50_000)
    few.end(1)
    many.end(1)


def test_rows_wait_for_each_other_where_their_noise_would_be_too_much(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SampledChoice, "longest_lead", 3)
    for seed in range(3):
        assert_same(model, CONFIGS["skip"], seed, inputs=INPUTS["ragged"])


def test_impossible_is_no_token() -> None:
    choice = SampledChoice(1, torch.device("cpu"))
    scores = torch.zeros(1, 3, 8)
    scores[0, 1] = -float("inf")
    scores[0, 2, 3] = float("nan")
    tokens = choice.choose(scores, [0])[0].tolist()
    assert tokens[0] >= 0 and tokens[1:] == [IMPOSSIBLE, IMPOSSIBLE]
    choice.end(1)
