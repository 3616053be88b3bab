"""`adapt=True`: online refinement of the draft, which takes a share of the time and never changes the text."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ssd_generation import (
    Costs,
    DraftingConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    disable_self_speculative,
    enable_self_speculative,
)
from ssd_generation.decoding.verified_text import VerifiedText
from ssd_generation.forward.copies.low_bit import copy_bytes
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning import refinement
from ssd_generation.tuning.learnt import LearntPart
from ssd_generation.tuning.refinement import Refinement
from tiny_models import left_padded, prompt, tiny_model

COSTS = Costs(plain_step=1.0, draft_step=0.9, verify=[(1, 1.0), (13, 1.1)])
BAD = SkipConfig(attention=[1], mlp=[0])
NEEDLESS = {("attention", 3), ("attention", 4), ("mlp", 2), ("mlp", 3), ("mlp", 4), ("mlp", 5)}
"""Sub-layers that add nothing to the hidden states of `model_with_needless_parts`."""


def model_with_needless_parts() -> PreTrainedModel:
    model: Any = tiny_model(num_hidden_layers=8)
    with torch.no_grad():
        for kind, layer in NEEDLESS:
            block = model.model.layers[layer]
            (block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj).weight.zero_()
    return enable_self_speculative(model)  # type: ignore[no-any-return]


def adaptive(**changes: Any) -> SelfSpeculativeConfig:
    return SelfSpeculativeConfig(**{"skip": BAD, "costs": COSTS, "adapt": True, **changes})


def generate(model: Any, new: int = 200, seed: int = 0, **arguments: Any) -> torch.Tensor:
    ids = prompt(10, seed=seed)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**options, **arguments})  # type: ignore[no-any-return]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the share of time for refinement, so that few tokens are enough."""
    monkeypatch.setattr(refinement, "SHARE", 0.5)


# ----------------------------------------------------------------------------------------------------------------------
# effect


@pytest.mark.usefixtures("often")
def test_it_finds_what_the_model_does_not_need_and_keeps_the_text() -> None:
    model: Any = model_with_needless_parts()
    config = adaptive()
    for call in range(3):
        expected = generate(model, seed=call)
        assert torch.equal(generate(model, seed=call, self_speculative=config), expected)
    learnt = model.last_speculation.refinement
    found = SelfSpeculativeConfig.from_dict(learnt["config"])
    skipped = {("attention", i) for i in found.skip.attention} | {("mlp", i) for i in found.skip.mlp}
    assert skipped <= NEEDLESS and len(skipped) >= 5
    assert learnt["changes"] >= 3 and learnt["reason"] is None
    # The refined draft is in use, and pays.
    assert model.last_speculation.acceptance_rate > 0.95
    assert model.last_speculation.tokens_per_round > 2
    assert found.costs is not None and found.costs.draft_step < 0.75
    # The result is a config like any other.
    assert torch.equal(generate(model, self_speculative=found), generate(model))


@pytest.mark.usefixtures("often")
def test_the_same_texts_lead_to_the_same_drafts() -> None:
    learnt = []
    for _ in range(2):
        model: Any = model_with_needless_parts()
        generate(model, self_speculative=adaptive())
        learnt.append({**model.last_speculation.refinement, "seconds": 0.0})
    assert learnt[0] == learnt[1]
    assert learnt[0]["passes"] > 5


def test_it_takes_no_more_than_its_share() -> None:
    model: Any = model_with_needless_parts()
    spent = rounds = 0.0
    learn, earn = Refinement.learn, Refinement.earn

    def learning(self: Refinement, target: PreTrainedModel, text: VerifiedText) -> bool:
        nonlocal spent
        spent += refinement._ABOVE_VERIFYING * COSTS.verify_seconds(len(text))
        return learn(self, target, text)

    def earning(self: Refinement, draft_steps: int, verified: int) -> None:
        nonlocal rounds
        rounds += draft_steps * self._in_use.costs.draft_step + COSTS.verify_seconds(verified)
        earn(self, draft_steps, verified)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Refinement, "learn", learning)
        patch.setattr(Refinement, "earn", earning)
        for call in range(3):
            generate(model, new=400, seed=call, self_speculative=adaptive())
    assert 0 < spent <= refinement.SHARE * rounds
    # Not much less either: the time earned is used.
    assert spent > 0.4 * (refinement.SHARE * rounds - refinement._TRYING_OUT)


@pytest.mark.usefixtures("often")
def test_what_was_learnt_is_kept_between_calls_and_dropped_with_the_model() -> None:
    model: Any = model_with_needless_parts()
    generate(model, self_speculative=adaptive())
    before = model.last_speculation.refinement
    generate(model, new=40, seed=3, self_speculative=adaptive())
    after = model.last_speculation.refinement
    assert after["passes"] > before["passes"] and after["changes"] >= before["changes"] > 0
    # Without carried state, each call starts from scratch.
    fresh = adaptive(drafting=DraftingConfig(carry_state=False))
    for _ in range(2):
        generate(model, new=40, self_speculative=fresh)
        assert model.last_speculation.refinement["passes"] < before["passes"]
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generate(other, new=20, self_speculative=adaptive()), generate(model, new=20))
    disable_self_speculative(model)
    assert not [name for name in vars(model) if "speculation" in name]


@pytest.mark.usefixtures("often")
def test_the_policy_goes_by_the_new_draft() -> None:
    model: Any = model_with_needless_parts()
    config = adaptive()
    generate(model, self_speculative=config)
    policies = state_of(model).get(LearntPart).policies
    assert list(policies) == [config, SelfSpeculativeConfig.from_dict(model.last_speculation.refinement["config"])]
    assert next(reversed(policies.values())).state()["acceptance_1"] > 0.8


@pytest.mark.usefixtures("often")
def test_low_bit_copies_are_made_of_nothing_more() -> None:
    model: Any = tiny_model(num_hidden_layers=8, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    model = enable_self_speculative(model)
    config = adaptive(skip=SkipConfig(mlp=[2, 5]), precision="int8")
    expected = generate(model)
    sizes = set()
    for _ in range(2):
        assert torch.equal(generate(model, self_speculative=config), expected)
        sizes.add(copy_bytes(model))
    assert model.last_speculation.refinement["passes"] > 10
    assert len(sizes) == 1
    found = SelfSpeculativeConfig.from_dict(model.last_speculation.refinement["config"])
    assert found.precision is not None
    for layer in {2, 5} - set(found.skip.mlp):
        assert found.precision.of("mlp", layer) is None, "there is no copy of what was skipped"


@pytest.mark.usefixtures("often")
def test_a_winner_is_measured_where_the_costs_were(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.tuning.measuring import describe_machine

    model: Any = model_with_needless_parts()
    asked: list[SkipConfig] = []

    def measured(model: Any, config: SelfSpeculativeConfig, **_: Any) -> Costs:
        asked.append(config.skip)
        # Every later draft is expensive.
        return Costs(1.0, 0.7 if len(asked) == 1 else 2.0, COSTS.verify, describe_machine(model))

    monkeypatch.setattr(refinement, "costs_of", measured)
    here = Costs(1.0, 0.9, COSTS.verify, describe_machine(model))
    expected = generate(model)
    assert torch.equal(generate(model, self_speculative=adaptive(costs=here)), expected)
    assert asked[0] == SkipConfig(attention=range(1, 8)), "attention's part"
    assert len(asked) > 1
    assert model.last_speculation.refinement["changes"] == 0


# ----------------------------------------------------------------------------------------------------------------------
# where it does not apply


@pytest.mark.usefixtures("often")
def test_batches_are_left_alone() -> None:
    model: Any = model_with_needless_parts()
    batch = left_padded([10, 7, 4])
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, self_speculative=adaptive()), expected)
    assert model.last_speculation.refinement["passes"] == 0
    generate(model, self_speculative=SelfSpeculativeConfig(BAD, costs=COSTS))
    assert model.last_speculation.refinement is None
    assert "refinement" not in model.last_speculation.to_dict()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "mistral", "mixtral", "phi3", "falcon", "bloom"])
def test_families(family: str) -> None:
    model: Any = enable_self_speculative(tiny_model(family))
    config = adaptive(skip=SkipConfig(mlp=[1]))
    options = {"new": 120}
    expected = generate(model, **options)
    assert torch.equal(generate(model, **options, self_speculative=config), expected)
    learnt = model.last_speculation.refinement
    slides = family in ("gemma2", "mistral")  # its window is eight tokens
    assert (learnt["reason"] is not None) == (family == "bloom")
    assert (learnt["passes"] > 3) == (family != "bloom" and not slides), "windows do not hold the whole text"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_a_text_that_a_window_holds_whole(family: str) -> None:
    model: Any = enable_self_speculative(tiny_model(family, sliding_window=80))
    config = adaptive(skip=SkipConfig(mlp=[1]))
    passes = []
    for new in (60, 200):
        assert torch.equal(generate(model, new=new, self_speculative=config), generate(model, new=new))
        passes.append(model.last_speculation.refinement["passes"])
    assert passes[0] > 1
    # In the long text, only the beginning can be judged.
    assert passes[1] <= 2 * passes[0] + 1


@pytest.mark.usefixtures("often")
def test_nothing_skipped_at_first_and_nothing_to_draft_with() -> None:
    model: Any = model_with_needless_parts()
    config = adaptive(skip=SkipConfig(), lookup=True)
    assert not config.drafts_itself
    expected = generate(model, new=300)
    assert torch.equal(generate(model, new=300, self_speculative=config), expected)
    found = SelfSpeculativeConfig.from_dict(model.last_speculation.refinement["config"])
    assert found.drafts_itself and found.lookup == config.lookup
    assert model.last_speculation.self_drafted_tokens > 5, "of a text that lookup finds most of"


# ----------------------------------------------------------------------------------------------------------------------
# the config


def test_the_field_is_written_only_where_it_is_set() -> None:
    assert "adapt" not in SelfSpeculativeConfig().to_dict()
    config = adaptive()
    assert config.to_dict()["adapt"] is True
    assert SelfSpeculativeConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_field_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="adapt must be True or False, but got"):
        SelfSpeculativeConfig(adapt=value)


def test_a_draft_that_is_never_used_cannot_be_improved() -> None:
    with pytest.raises(ValueError, match="never drafts"):
        SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), adapt=True)
