"""The candidate generator keeps its contract: it works in transformers' own assisted decoding loop, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from ssd_generation import (
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeCandidateGenerator,
    SelfSpeculativeConfig,
    SkipConfig,
)
from ssd_generation.drafting.self_drafter import SelfDrafter
from tiny_models import WINDOW, prompt, tiny_model

NEW = 24
SKIP = SkipConfig(attention=[0, 1], mlp=[2])


def in_upstreams_loop(model: Any, config: SelfSpeculativeConfig) -> list[SelfSpeculativeCandidateGenerator]:
    """Give the model our candidate generator, as a user of transformers' interface would."""
    made: list[SelfSpeculativeCandidateGenerator] = []

    class WithGenerator(type(model)):  # type: ignore[misc]
        def _get_candidate_generator(self, generation_config: Any, logits_processor: Any, **kwargs: Any) -> Any:
            made.append(SelfSpeculativeCandidateGenerator(self, config, generation_config, logits_processor))
            return made[-1]

    model.__class__ = WithGenerator
    return made


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "bloom", "falcon-alibi", "opt", "gpt_oss"])
@pytest.mark.parametrize("policy", ["fixed", "confidence"])
def test_greedy_text_is_the_targets(family: str, policy: str) -> None:
    model = tiny_model(family)
    ids = prompt(WINDOW + 5)
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    drafting = DraftingConfig(policy=policy, max_draft_length=4, threshold=0.3)
    made = in_upstreams_loop(model, SelfSpeculativeConfig(SKIP, drafting))
    got = model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=model)
    assert torch.equal(got, expected)
    assert len(made) == 1 and made[0].draft_passes > 4


def test_an_empty_skip_set_is_always_accepted() -> None:
    model = tiny_model("gemma2")
    made = in_upstreams_loop(
        model, SelfSpeculativeConfig(SkipConfig(), DraftingConfig(policy="fixed", max_draft_length=4))
    )
    accepted: list[tuple[int, int]] = []
    original = SelfSpeculativeCandidateGenerator.update_candidate_strategy

    def watched(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        drafted = 0 if self._last_draft is None else self._last_draft.lengths[0]
        accepted.append((drafted, int(num_matches)))
        original(self, input_ids, scores, num_matches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfSpeculativeCandidateGenerator, "update_candidate_strategy", watched)
        model.generate(prompt(9), max_new_tokens=21, do_sample=False, assistant_model=model)
    assert accepted == [(0, 0)] + [(4, 4)] * 4
    assert made[0].draft_passes == 16


def test_sampling_returns_the_scores_that_were_drawn_from() -> None:
    model = tiny_model()
    made = in_upstreams_loop(model, SelfSpeculativeConfig(SKIP, DraftingConfig(policy="fixed", max_draft_length=3)))
    seen: list[Any] = []
    original = SelfSpeculativeCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        result = original(self, input_ids, **kwargs)
        seen.append((result[0].shape[1] - input_ids.shape[1], result[0], result[1]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfSpeculativeCandidateGenerator, "get_candidates", watched)
        model.generate(prompt(9), max_new_tokens=NEW, do_sample=True, top_k=4, assistant_model=model)
    assert made and seen[0][0] == 0 and seen[0][2] is None, "the target takes the prompt alone"
    for length, candidates, scores in seen[1:]:
        if length == 0:
            assert scores is None
            continue
        assert scores.shape == (1, length, 64)
        # The scores are processed: all but four tokens are impossible, and the drafted one is possible.
        assert (scores.isfinite().sum(dim=-1) == 4).all()
        assert scores.gather(2, candidates[:, -length:, None]).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("skip", [SKIP, SkipConfig()])
def test_prompt_lookup_gives_the_targets_text(family: str, skip: SkipConfig) -> None:
    model = tiny_model(family)
    # Few tokens, so that n-grams recur.
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": list(range(8, 64))}
    ids = prompt(WINDOW + 5, vocab=8)
    expected = model.generate(ids, **options)
    config = SelfSpeculativeConfig(
        skip, DraftingConfig(policy="fixed", max_draft_length=3), lookup=LookupConfig(max_tokens=5)
    )
    made = in_upstreams_loop(model, config)
    looked: list[int] = []
    original = SelfDrafter.learn

    def watched(self: Any, draft: Any, accepted: Any, rows: Any) -> None:
        looked.append(draft.lengths[0] - draft.self_lengths[0])
        original(self, draft, accepted, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfDrafter, "learn", watched)
        assert torch.equal(model.generate(ids, **options, assistant_model=model), expected)
    assert len(made) == 1 and sum(looked) > 4


def test_a_looked_up_token_is_certain() -> None:
    model = tiny_model()
    config = SelfSpeculativeConfig(SKIP, DraftingConfig(policy="fixed", max_draft_length=3), lookup=True)
    in_upstreams_loop(model, config)
    kinds: set[str] = set()
    original = SelfSpeculativeCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        candidates, scores = original(self, input_ids, **kwargs)
        length = candidates.shape[1] - input_ids.shape[1]
        if length:
            assert scores is not None and scores.shape == (1, length, 64)
            probabilities = scores.softmax(-1).gather(2, candidates[:, -length:, None]).flatten()
            own = self._last_draft.self_lengths[0]
            assert (probabilities[own:] == 1).all() and (probabilities[:own] > 0).all()
            kinds.add("own" if own else "looked up")
            if own:
                assert (probabilities[:own] < 1).any()
        return candidates, scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfSpeculativeCandidateGenerator, "get_candidates", watched)
        out = model.generate(
            prompt(9, vocab=8), max_new_tokens=40, do_sample=True, top_k=0, temperature=1.5, assistant_model=model
        )
    assert out.shape == (1, 49) and kinds == {"own", "looked up"}


def test_the_interface() -> None:
    model = tiny_model()
    settings = GenerationConfig(max_length=12, do_sample=False)
    config = SelfSpeculativeConfig(SKIP, DraftingConfig(policy="confidence"))
    generator = SelfSpeculativeCandidateGenerator(model, config, settings)
    assert isinstance(generator, CandidateGenerator)
    assert generator.requires_model_outputs and generator.model_kwargs_overrides == {}
    candidates, scores = generator.get_candidates(prompt(9), model_kwargs={}, is_first_iteration=True)
    assert torch.equal(candidates, prompt(9)) and scores is None


def test_a_config_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17"):
        SelfSpeculativeCandidateGenerator(
            tiny_model(), SelfSpeculativeConfig(SkipConfig(attention=[17])), GenerationConfig(max_length=12)
        )
