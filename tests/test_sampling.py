"""Under sampling the text has the target's own distribution: a statistical test of four tokens at once, and proof that
it can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ssd_generation import (
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
    generation,
)
from ssd_generation.decoding import verification
from ssd_generation.decoding.processors import Processors
from ssd_generation.drafting.draft_length import NO_MATCH, DraftPolicy, Match
from ssd_generation.drafting.drafter import Draft
from ssd_generation.drafting.self_drafter import SelfDrafter
from tiny_models import prompt, tiny_model

VOCAB, TOKENS, ROWS, CALLS = 5, 4, 2000, 4
LENGTH = 6
FIXED = SelfSpeculativeConfig(SkipConfig(attention=[1, 2], mlp=[1]), DraftingConfig(policy="fixed", max_draft_length=2))
CONFIDENT = SelfSpeculativeConfig(
    FIXED.skip, DraftingConfig(policy="confidence", max_draft_length=2, threshold=0.3, threshold_step=0.0)
)

# Lookup first, and the draft where it offers nothing.
LOOKUP = SelfSpeculativeConfig(FIXED.skip, FIXED.drafting, lookup=LookupConfig(max_ngram=2, max_tokens=2))


class Chained(DraftPolicy):
    """One token of the model's own, and up to two that are looked up behind it."""

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return min(1, limit)

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        return min(2, match.tokens, limit)


class Favours(LogitsProcessor):
    """A processor of the user's that depends on the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[torch.arange(scores.shape[0]), input_ids[:, -1] % scores.shape[1]] += 1.5
        return scores


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 1.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.15},
    "typical": {"top_k": 0, "typical_p": 0.85},
    "repetition penalty": {"top_k": 0, "repetition_penalty": 1.8},
    "no repeated n-grams": {"top_k": 0, "no_repeat_ngram_size": 2, "temperature": 1.5},
    "bad words": {"top_k": 0, "bad_words_ids": [[3], [1, 2]]},
    "custom": {"top_k": 0, "logits_processor": LogitsProcessorList([Favours()])},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # Softened, so that every continuation has a fair chance.
    model = tiny_model(vocab_size=VOCAB)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return enable_self_speculative(model)


def ids() -> torch.Tensor:
    return torch.tensor([[3, 4, 3, 4, 4, 3]])[:, :LENGTH]


def exact(model: PreTrainedModel, settings: dict[str, Any]) -> torch.Tensor:
    """The joint distribution of the first tokens, worked out from the target's processed scores, of shape `(V,) *
    TOKENS`."""
    joint = torch.ones(())
    texts = ids()
    for _ in range(TOKENS):
        out = model.generate(
            texts,
            attention_mask=torch.ones_like(texts),
            max_new_tokens=1,
            do_sample=True,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        step = out.scores[0].double().softmax(dim=-1)
        joint = joint.reshape(-1, 1) * step
        texts = torch.cat(
            (texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(texts.shape[0])[:, None]), dim=1
        )
    return joint.reshape((VOCAB,) * TOKENS)


def observed(model: PreTrainedModel, config: SelfSpeculativeConfig | None, settings: dict[str, Any]) -> torch.Tensor:
    counts = torch.zeros((VOCAB,) * TOKENS, dtype=torch.double)
    for seed in range(CALLS):
        torch.manual_seed(seed)
        out = model.generate(
            ids(), max_new_tokens=TOKENS, do_sample=True, num_return_sequences=ROWS, self_speculative=config, **settings
        )
        new = out[:, LENGTH:]
        counts.index_put_(tuple(new.T), torch.ones(len(new), dtype=torch.double), accumulate=True)
    return counts


def chi_squared(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int, float]:
    """Pearson's statistic, its degrees of freedom, and the number of texts that should be impossible."""
    expected = expected * counts.sum()
    impossible = float(counts[expected == 0].sum())
    common = expected >= 5
    pairs = [(float(o), float(e)) for o, e in zip(counts[common], expected[common], strict=True)]
    rest = (float(counts[~common].sum()), float(expected[~common].sum()))
    if rest[1] >= 5:
        pairs.append(rest)
    return sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1, impossible


def quantile(degrees: int) -> float:
    """Chi-squared quantile at 1 − 1e-5 (Wilson and Hilferty's approximation)."""
    a = 2 / (9 * degrees)
    return float(degrees * (1 - a + 4.2649 * a**0.5) ** 3)


def differs(model: PreTrainedModel, config: SelfSpeculativeConfig | None, settings: dict[str, Any]) -> bool:
    statistic, degrees, impossible = chi_squared(observed(model, config, settings), exact(model, settings))
    assert degrees >= 5
    return impossible > 0 or statistic > quantile(degrees)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_distribution_is_the_targets(model: PreTrainedModel, name: str) -> None:
    assert not differs(model, FIXED, SETTINGS[name])
    rate = model.last_speculation.acceptance_rate
    assert 0.2 < rate < 0.98, "the draft is too good or too bad for this to test anything"


def test_the_joint_distribution_with_a_confidence_stop(model: PreTrainedModel) -> None:
    # Stopping by the value of a drawn token must not bias what is said.
    assert not differs(model, CONFIDENT, {"top_k": 0})
    first, second = model.last_speculation.drafted_by_depth
    assert 0 < second < first, "it always or never stopped"


@pytest.mark.parametrize(("name", "chained"), [("plain", False), ("custom", True)])
def test_the_joint_distribution_with_prompt_lookup(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str, chained: bool
) -> None:
    if chained:
        monkeypatch.setattr(generation, "_policy_of", lambda *args, **kwargs: Chained())
    assert not differs(model, LOOKUP, SETTINGS[name])
    statistics = model.last_speculation
    assert 0 < statistics.accepted_looked_up_tokens < statistics.looked_up_tokens
    assert statistics.self_drafted_tokens > 0 and statistics.looked_up_tokens > ROWS / 4


def test_plain_sampling_passes_the_same_test(model: PreTrainedModel) -> None:
    assert not differs(model, None, SETTINGS["top-p"])


# --- broken on purpose: the test above must see each of these
# --------------------------------------------------------------


def test_it_sees_a_missing_residual_step(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = verification.accept_sampled

    def from_p(drafted: Any, draft_scores: Any, scores: Any, lengths: Any) -> Any:
        kept, _ = original(drafted, draft_scores, scores, lengths)
        p = scores.softmax(-1)[torch.arange(len(kept)), kept]
        return kept, torch.multinomial(p, 1).squeeze(1)  # instead of from (p − q)+

    monkeypatch.setattr(verification, "accept_sampled", from_p)
    assert differs(model, FIXED, {"top_k": 0})


def test_it_sees_drafts_accepted_unseen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = verification.accept_sampled

    def trusting(drafted: Any, draft_scores: Any, scores: Any, lengths: Any) -> Any:
        _, following = original(drafted, draft_scores, scores, lengths)
        return lengths, following

    monkeypatch.setattr(verification, "accept_sampled", trusting)
    assert differs(model, FIXED, {"top_k": 0})


def test_it_sees_a_draft_distribution_that_is_not_the_one_drawn_from(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SelfDrafter.propose

    def unprocessed(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = original(self, *args, **kwargs)
        assert draft.scores is not None
        draft.scores = draft.scores * 0.3  # q is not what the tokens were drawn from
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", unprocessed)
    assert differs(model, FIXED, {"top_k": 0})


def test_it_sees_processors_that_are_left_out_in_verification(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_position_only(self: Any, tokens: Any, lengths: Any, pending: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[:, 0] = self.step(tokens, lengths, logits[:, 0], 0)
        return logits

    monkeypatch.setattr(Processors, "block", first_position_only)
    assert differs(model, FIXED, SETTINGS["top-k"])


def test_it_sees_processors_that_see_the_wrong_text(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Processors.step

    def one_token_late(self: Any, tokens: Any, lengths: Any, logits: torch.Tensor, ahead: int) -> torch.Tensor:
        return original(self, tokens, lengths, logits, max(ahead - 1, 0))

    monkeypatch.setattr(Processors, "step", one_token_late)
    assert differs(model, FIXED, SETTINGS["custom"])


def test_it_sees_a_dropped_unsure_token(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SelfDrafter.propose

    def drop_unsure(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = original(self, *args, **kwargs)
        assert draft.scores is not None
        q = draft.scores.softmax(-1).gather(2, draft.tokens[..., None]).squeeze(2)
        draft.lengths = [
            next((i for i in range(n) if row[i] < 0.35), n) for n, row in zip(draft.lengths, q.tolist(), strict=True)
        ]
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", drop_unsure)
    assert differs(model, FIXED, {"top_k": 0})


def with_lookup_scores(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `change` put in other scores for tokens that were looked up: (scores (k, V)) → (k, V)."""
    original = Draft.distributions

    def changed(self: Draft, vocabulary: int) -> torch.Tensor:
        scores = original(self, vocabulary)
        for row, (own, length) in enumerate(zip(self.self_lengths, self.lengths, strict=True)):
            scores[row, own:length] = change(scores[row, own:length])
        return scores

    monkeypatch.setattr(Draft, "distributions", changed)


def test_it_sees_looked_up_tokens_taken_for_drawn_ones(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_policy_of", lambda *args, **kwargs: Chained())
    with_lookup_scores(monkeypatch, torch.zeros_like)  # q uniform instead of 1 on the token
    assert differs(model, LOOKUP, {"top_k": 0})


def test_it_sees_looked_up_tokens_with_the_probability_of_others(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lookup_scores(monkeypatch, lambda scores: scores.roll(1, -1))  # q = 0: always kept
    assert differs(model, LOOKUP, {"top_k": 0})


# --- seeds
# -------------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text(model: PreTrainedModel) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(
            model.generate(prompt(6, vocab=VOCAB), max_new_tokens=40, do_sample=True, top_k=0, self_speculative=FIXED)
        )
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_impossible_tokens_are_never_said(model: PreTrainedModel) -> None:
    out = model.generate(
        ids(), max_new_tokens=60, do_sample=True, top_k=0, suppress_tokens=[0, 2], self_speculative=FIXED
    )
    assert set(out[0, LENGTH:].tolist()) <= {1, 3, 4}
