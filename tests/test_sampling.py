"""Sampled texts have the target's own distribution: a statistical test of four tokens at once, and proof that it can
fail. (test_same_seed.py compares texts with plain decoding's for a seed; this test depends on the model alone.)"""

from __future__ import annotations

from collections.abc import Sequence
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
)
from ssd_generation.decoding import verification
from ssd_generation.decoding.choice import SampledChoice
from ssd_generation.decoding.processors import PureProcessors
from ssd_generation.drafting.policy import NO_MATCH, DraftPolicy, Match
from ssd_generation.tuning import call_drafter
from tiny_models import tiny_model

VOCAB, TOKENS, ROWS, CALLS = 5, 4, 2000, 4
LENGTH = 6
FIXED = SelfSpeculativeConfig(SkipConfig(attention=[1, 2], mlp=[1]), DraftingConfig(policy="fixed", max_draft_length=2))
CONFIDENT = SelfSpeculativeConfig(
    FIXED.skip, DraftingConfig(policy="confidence", max_draft_length=2, threshold=0.3, threshold_step=0.0)
)

# Lookup first, and the model's own draft where it finds nothing.
LOOKUP = SelfSpeculativeConfig(FIXED.skip, FIXED.drafting, lookup=LookupConfig(max_ngram=2, max_tokens=2))


class Chained(DraftPolicy):
    """A policy of one token drafted by the model, followed by up to two looked-up ones."""

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        return min(1, limit)

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        return min(2, match.tokens, limit)


class Favours(LogitsProcessor):
    """A user's processor that depends on the text, and declares that it depends on nothing else."""

    supports_speculation = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[torch.arange(scores.shape[0]), input_ids[:, -1] % scores.shape[1]] += 1.5
        return scores


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "top-k": {"top_k": 3},
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
    """Return the joint distribution of the first tokens, of shape `(V,) * TOKENS`, from the target's processed
    scores."""
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
    """Return Pearson's statistic, its degrees of freedom, and the number of texts that should be impossible."""
    expected = expected * counts.sum()
    impossible = float(counts[expected == 0].sum())
    common = expected >= 5
    pairs = [(float(o), float(e)) for o, e in zip(counts[common], expected[common], strict=True)]
    rest = (float(counts[~common].sum()), float(expected[~common].sum()))
    if rest[1] >= 5:
        pairs.append(rest)
    return sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1, impossible


def quantile(degrees: int) -> float:
    """Return the chi-squared quantile at 1 − 1e-5 (Wilson and Hilferty's approximation)."""
    a = 2 / (9 * degrees)
    return float(degrees * (1 - a + 4.2649 * a**0.5) ** 3)


def differs(model: PreTrainedModel, config: SelfSpeculativeConfig | None, settings: dict[str, Any]) -> bool:
    statistic, degrees, impossible = chi_squared(observed(model, config, settings), exact(model, settings))
    assert degrees >= 5
    return impossible > 0 or statistic > quantile(degrees)


@pytest.mark.parametrize(("name", "config"), [("plain", CONFIDENT), ("top-k", FIXED), ("custom", FIXED)])
def test_the_joint_distribution_is_the_targets(
    model: PreTrainedModel, name: str, config: SelfSpeculativeConfig
) -> None:
    # A confidence stop depends on a drawn token's probability, which must not bias the text.
    assert not differs(model, config, SETTINGS[name])
    rate = model.last_speculation.acceptance_rate
    assert 0.2 < rate < 0.98, "the draft is too good or too bad for this to test anything"


def test_the_joint_distribution_with_prompt_lookup(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_drafter, "policy_of", lambda *args, **kwargs: Chained())
    assert not differs(model, LOOKUP, SETTINGS["custom"])
    statistics = model.last_speculation
    assert 0 < statistics.accepted_looked_up_tokens < statistics.looked_up_tokens
    assert statistics.self_drafted_tokens > 0 and statistics.looked_up_tokens > ROWS / 4


# --- deliberate errors, each of which the test above must detect
# --------------------------------------------------------------


def test_it_sees_drafts_accepted_unseen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = verification.accept

    def trusting(drafted: torch.Tensor, lengths: list[int], choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, following = original(drafted, lengths, choices)
        return torch.tensor(lengths), following

    monkeypatch.setattr(verification, "accept", trusting)
    assert differs(model, FIXED, SETTINGS["plain"])


def test_it_sees_noise_that_is_used_twice(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SampledChoice.choose

    def by_twos(self: SampledChoice, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        places = [
            original(self, scores[:, place : place + 1], [(step + place) // 2 * 2 for step in steps])
            for place in range(scores.shape[1])
        ]
        return torch.cat(places, dim=1)

    monkeypatch.setattr(SampledChoice, "choose", by_twos)
    monkeypatch.setattr(SampledChoice, "commit", lambda self, steps: None)  # the first of each two is needed again
    assert differs(model, FIXED, SETTINGS["plain"])


def test_it_sees_processors_that_are_left_out_in_verification(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PureProcessors.once

    def first_position_only(self: Any, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat((original(self, ids[:1], logits[:1]), logits[1:]))

    monkeypatch.setattr(PureProcessors, "once", first_position_only)
    assert differs(model, FIXED, SETTINGS["top-k"])


def test_it_sees_processors_that_see_the_wrong_text(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PureProcessors.step

    def one_token_late(self: Any, tokens: Any, lengths: Any, logits: torch.Tensor, ahead: int) -> torch.Tensor:
        return original(self, tokens, lengths, logits, max(ahead - 1, 0))

    monkeypatch.setattr(PureProcessors, "step", one_token_late)
    assert differs(model, FIXED, SETTINGS["custom"])
