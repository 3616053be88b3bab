"""Prompt lookup in `generate`: the text stays the target's, and copied tokens are counted."""

from __future__ import annotations

import string
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from ssd_generation import (
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from ssd_generation.drafting.lookup import NGramIndex
from ssd_generation.drafting.policy import NO_MATCH, DraftPolicy, Match
from ssd_generation.drafting.self_drafter import SelfDrafter
from ssd_generation.tuning import call_drafter
from tiny_models import FAMILIES, VOCAB, WINDOW, prompt, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=3)
LOOKUP = SelfSpeculativeConfig(drafting=FIXED, lookup=LookupConfig())
BOTH = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED, lookup=LookupConfig(max_ngram=2, max_tokens=5))
COST = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), lookup=LookupConfig())
NEW = 18

_MODELS: dict[str, PreTrainedModel] = {}


def enabled(family: str = "llama") -> Any:
    """Return the family's model, made once for this file: no test changes it."""
    if family not in _MODELS:
        _MODELS[family] = enable_self_speculative(tiny_model(family))
    return _MODELS[family]


class Cycle(LogitsProcessor):
    """Logits processor for mostly repetitive text: each row in its own cycles of 3 to 5 tokens, with slips."""

    supports_speculation = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            length = len(ids)
            period = 3 + int(ids[length - length % 7 - 1]) % 3
            scores[row, ids[max(length - period, 0)] if length % 11 else length % 64] += 30.0
        return scores


def repetitive(rows: int = 1, length: int = 18, ragged: bool = False) -> dict[str, torch.Tensor]:
    """Return prompts that each repeat a few tokens; padded at the left if `ragged`."""
    ids = torch.stack([prompt(5, seed=row + 2)[0].repeat(length)[:length] for row in range(rows)])
    mask = torch.ones_like(ids)
    if ragged:
        for row in range(rows):
            mask[row, : 3 * row] = 0
        ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, config: SelfSpeculativeConfig, inputs: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(**inputs, **options), model.generate(**inputs, **options, self_speculative=config)


def cycling(**kwargs: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Cycle()]), **kwargs}


# --- the text
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_targets_text(family: str) -> None:
    model = enabled(family)
    for config, inputs in ((LOOKUP, repetitive(length=WINDOW * 2 + 3)), (BOTH, repetitive(2, ragged=True))):
        plain, ours = both(model, config, inputs, **cycling())
        assert torch.equal(plain, ours), config
        statistics = model.last_speculation
        assert statistics.accepted_looked_up_tokens > 3, "nothing that was looked up was right"
        assert statistics.looked_up_tokens > statistics.accepted_looked_up_tokens, "all of it was"


@pytest.mark.parametrize(("config", "rows"), [(LOOKUP, 1), (BOTH, 3), (COST, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[41], [10, 5]], "min_new_tokens": 4},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 60},
    ],
)
def test_options(config: SelfSpeculativeConfig, rows: int, options: dict[str, Any]) -> None:
    model = enabled()
    plain, ours = both(model, config, repetitive(rows, ragged=rows > 1), **{**cycling(), **options})
    assert torch.equal(plain, ours)
    assert ours.shape[1] == 18 + options.get("max_new_tokens", NEW)


@pytest.mark.parametrize("rows", [1, 3])
def test_without_processors(rows: int) -> None:
    # Without the processor the text has few repetitions: looked-up tokens are mostly wrong.
    for family in ("llama", "gemma2"):
        plain, ours = both(enabled(family), LOOKUP, repetitive(rows), max_new_tokens=40)
        assert torch.equal(plain, ours)
        assert enabled(family).last_speculation.looked_up_tokens > 0


@settings(max_examples=20)
@given(
    seed=st.integers(0, 100),
    words=st.integers(2, 6),
    length=st.integers(1, 30),
    ngrams=st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    tokens=st.integers(1, 15),
    draft=st.integers(1, 4),
    skips=st.booleans(),
    new=st.integers(1, 25),
)
def test_any_lookup(
    seed: int, words: int, length: int, ngrams: tuple[int, int], tokens: int, draft: int, skips: bool, new: int
) -> None:
    model = enabled()
    config = SelfSpeculativeConfig(
        SkipConfig(attention=[1], mlp=[0]) if skips else SkipConfig(),
        DraftingConfig(policy="fixed", max_draft_length=draft),
        lookup=LookupConfig(ngrams[0], ngrams[1], tokens),
    )
    inputs = {"input_ids": prompt(length, seed=seed, vocab=3 + words)}
    plain, ours = both(model, config, inputs, suppress_tokens=list(range(3 + words, 64)), max_new_tokens=new)
    assert torch.equal(plain, ours)


# --- ends inside looked-up tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LOOKUP, BOTH])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_end_of_sequence_that_was_looked_up(config: SelfSpeculativeConfig, rows: int) -> None:
    # The prompt holds the token that ends the text; lookup copies it, and nothing after it.
    model = enabled()
    inputs = repetitive(rows)
    ended, looked = set(), 0
    for place in range(5):
        eos = inputs["input_ids"][:, place].tolist()
        plain, ours = both(model, config, inputs, **cycling(eos_token_id=eos, pad_token_id=0))
        assert torch.equal(plain, ours)
        ended.add(ours.shape[1])
        looked += model.last_speculation.accepted_looked_up_tokens
    assert len(ended) > 2 and looked > 3


def test_nothing_is_copied_after_an_end_of_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.drafting.self_drafter import SelfDrafter

    drafts = []
    original = SelfDrafter.propose

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = original(self, *args, **kwargs)
        drafts.append(draft.tokens[0].tolist())
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", watched)
    model = enabled()
    eos = int(repetitive()["input_ids"][0, 1])
    # Forbidden and so never generated, but looked up all the same.
    for config in (LOOKUP, BOTH):
        drafts.clear()
        model.generate(
            **repetitive(), max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0, min_new_tokens=NEW,
            **cycling(), self_speculative=config,
        )  # fmt: skip
        assert any(eos in tokens for tokens in drafts)
        assert all(eos not in tokens[:-1] for tokens in drafts)


def test_nothing_is_copied_after_an_end_that_the_model_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.drafting.self_drafter import SelfDrafter

    monkeypatch.setattr(call_drafter, "policy_of", lambda *args, **kwargs: Chained())
    drafts = []
    original = SelfDrafter.propose

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = original(self, *args, **kwargs)
        drafts.append((draft.tokens[0].tolist(), draft.self_lengths[0]))
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", watched)
    found = 0
    for place in range(5):
        eos = int(repetitive()["input_ids"][0, place])
        plain, ours = both(enabled(), BOTH, repetitive(), **cycling(eos_token_id=eos, pad_token_id=0))
        assert torch.equal(plain, ours)
        found += sum(own > 0 and tokens[own - 1] == eos for tokens, own in drafts)
        assert all(eos not in tokens[:-1] for tokens, _ in drafts)
        drafts.clear()
    assert found > 0, "the model never drafted one"


def test_stop_strings_inside_what_was_looked_up() -> None:
    model = enabled()
    characters = string.ascii_letters + string.digits + " ."
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    free = model.generate(**repetitive(), max_new_tokens=NEW, do_sample=False, **cycling())[0, 18:].tolist()
    text = "".join(characters[token] for token in free)
    stopped, looked = set(), 0
    for at in (1, 4, 9, 13, 17):
        plain, ours = both(model, LOOKUP, repetitive(), **cycling(stop_strings=text[at : at + 3], tokenizer=tokenizer))
        assert torch.equal(plain, ours)
        stopped.add(ours.shape[1])
        looked += model.last_speculation.accepted_looked_up_tokens
    assert len(stopped) > 2 and looked > 3


# --- drafts
# --------------------------------------------------------------------------------------------------


class Chained(DraftPolicy):
    """Policy that drafts two tokens and appends three looked-up ones, whatever the cost."""

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return min(2, limit)

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        return min(3, match.tokens, limit)


@pytest.mark.parametrize("rows", [1, 3])
def test_lookup_after_self_drafts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    from ssd_generation.drafting.self_drafter import SelfDrafter

    monkeypatch.setattr(call_drafter, "policy_of", lambda *args, **kwargs: Chained())
    seen = []
    original = SelfDrafter.propose

    def watched(self: Any, texts: Any, limits: Any) -> Any:
        draft = original(self, texts, limits)
        for row, index in enumerate(self.indexes):
            if not limits[row]:
                continue
            own, length = draft.self_lengths[row], draft.lengths[row]
            tokens = draft.tokens[row].tolist()
            # After the self-drafted tokens comes the continuation that lookup finds for the text and them.
            found, ngram = index.find(tokens[:own])
            assert tokens[own:length] == found[: length - own]
            assert draft.matches[row] == Match(len(found), ngram)
            assert length <= limits[row]
            seen.append((own, length - own))
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", watched)
    model = enabled()
    plain, ours = both(model, BOTH, repetitive(rows, ragged=rows > 1), **cycling(max_new_tokens=30))
    assert torch.equal(plain, ours)
    assert (2, 3) in seen
    statistics = model.last_speculation
    assert statistics.looked_up_tokens == sum(copied for _, copied in seen)
    assert statistics.self_drafted_tokens == sum(own for own, _ in seen)
    assert statistics.drafted_tokens == sum(own + copied for own, copied in seen)
    assert 0 < statistics.accepted_looked_up_tokens <= statistics.accepted_tokens
    if rows == 1:
        accepted = [max(n - own, 0) for n, (own, _) in zip(statistics.round_accepted[0], seen, strict=False)]
        assert statistics.accepted_looked_up_tokens == sum(accepted)


def test_a_text_that_repeats_is_copied_whole() -> None:
    # Once the text repeats itself, every round is a full one.
    class Repeat(LogitsProcessor):
        supports_speculation = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            scores[torch.arange(len(scores)), input_ids[:, -5]] += 1000.0
            return scores

    model = enabled()
    config = SelfSpeculativeConfig(drafting=FIXED, lookup=LookupConfig(max_tokens=7))
    plain, ours = both(model, config, repetitive(), logits_processor=LogitsProcessorList([Repeat()]), max_new_tokens=33)
    assert torch.equal(plain, ours)
    statistics = model.last_speculation
    # One token from the prompt's pass, then seven copied and one of the target's in each of four rounds.
    assert (statistics.rounds, statistics.target_passes, statistics.draft_passes) == (4, 5, 0)
    assert statistics.looked_up_tokens == statistics.accepted_looked_up_tokens == 28
    assert statistics.self_drafted_tokens == 0 and statistics.acceptance_rate == 1.0
    assert statistics.to_dict()["looked_up_tokens"] == 28


def test_lookup_alone_runs_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.forward.structure import skip_mode

    def fail(*args: Any) -> None:
        raise AssertionError("skip mode was entered")

    # With the policy "cost"; the others self-draft where lookup finds no match.
    monkeypatch.setattr(skip_mode.SkipMode, "__enter__", fail)
    model = enabled()
    config = SelfSpeculativeConfig(lookup=True)
    plain, ours = both(model, config, repetitive(2), **cycling())
    assert torch.equal(plain, ours)
    assert model.last_speculation.draft_passes == 0 < model.last_speculation.looked_up_tokens


def test_each_row_looks_in_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NGramIndex] = []
    original = NGramIndex.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(NGramIndex, "__init__", watched)
    out = enabled().generate(**repetitive(3), max_new_tokens=NEW, do_sample=False, **cycling(), self_speculative=LOOKUP)
    assert len(made) == 3
    for index, row in zip(made, out.tolist(), strict=True):
        assert row[: len(index)] == index._text and len(index) > 18 + NEW // 2


def test_a_row_that_is_far_ahead_does_not_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = enable_self_speculative(tiny_model())
    ids = torch.cat((prompt(4).repeat(1, 6), prompt(24)))
    options = {"max_new_tokens": 90, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # One row repeats itself over and over, the other never does.
    once = torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(0)) + 3

    class Says(LogitsProcessor):
        supports_speculation = True

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            forced = torch.full_like(scores, -torch.inf)
            for row, text in enumerate(input_ids.tolist()):
                new = len(text) - ids.shape[1]
                known = text[-4] if row == 0 else int(once[new % len(once)])
                forced[row, known] = 0.0
            return forced  # type: ignore[return-value]

    asked: list[tuple[list[int], list[int]]] = []
    propose = SelfDrafter.propose

    def watched(self: SelfDrafter, texts: Any, limits: Any) -> Any:
        lengths = list(texts.lengths)
        draft = propose(self, texts, limits)
        asked.append((lengths, list(draft.lengths)))
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", watched)
    config = SelfSpeculativeConfig(
        lookup=LookupConfig(min_ngram=3), drafting=DraftingConfig(policy="fixed", max_draft_length=4)
    )
    processors = LogitsProcessorList([Says()])
    plain = model.generate(ids, logits_processor=processors, **options)
    assert torch.equal(model.generate(ids, logits_processor=processors, self_speculative=config, **options), plain)
    leads = [lengths[0] - lengths[1] for lengths, _ in asked]
    assert asked[0][1][0] > 8
    assert any(lead > 8 for lead in leads)
    assert all(drafted[0] == 0 for lead, (_, drafted) in zip(leads, asked, strict=True) if lead > 8)
