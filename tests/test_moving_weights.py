"""Weights updated in small steps: what was measured and learnt stays, and low-bit copies follow where it pays."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ssd_generation import Costs, DraftingConfig, PrecisionConfig, SelfSpeculativeConfig, enable_self_speculative
from ssd_generation.forward.captured.passes import CapturedPart
from ssd_generation.forward.copies.layer_copy import LowBitCopy
from ssd_generation.forward.copies.low_bit import CopiesPart, LowBitCopies, copies_of
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning import automatic, moving_weights
from ssd_generation.tuning.learnt import LearntPart
from ssd_generation.tuning.moving_weights import follow_weights, origin_of, weights_in_use
from ssd_generation.tuning.speedup import seconds_saved
from tiny_models import even_model, prompt

FIXED = DraftingConfig(policy="fixed", max_draft_length=4, acceptance=(0.9,))
INT8 = SelfSpeculativeConfig(precision=PrecisionConfig("int8", head="int8"), drafting=FIXED)


@pytest.fixture
def model() -> PreTrainedModel:
    return enable_self_speculative(even_model("llama", tie_word_embeddings=False))


def texts(model: Any, config: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for request in (None, config):
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **options}
        found.append(model.generate(prompt(9), self_speculative=request, **options))
    return found[0], found[1]


def update(model: Any, share: float) -> None:
    """Move all weights, as an optimizer does, by a share of their root mean square."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(share * parameter.square().mean().sqrt() * torch.randn_like(parameter))


def copies_in_use(model: Any, config: SelfSpeculativeConfig = INT8) -> LowBitCopies:
    return state_of(model).get(CopiesPart).low_bit_drafts[config.skip, config.precision]


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of layers of each copy that is quantised."""
    calls: list[int] = []
    quantise = LowBitCopy._quantised

    def counted(self: LowBitCopy, layers: Any) -> Any:
        calls.append(len(layers))
        return quantise(self, layers)

    monkeypatch.setattr(LowBitCopy, "_quantised", counted)
    return calls


def test_an_update_that_no_copy_would_show_quantises_nothing(model: PreTrainedModel, quantised: list[int]) -> None:
    texts(model, INT8)
    copies, made = copies_in_use(model), len(quantised)
    for _ in range(3):
        update(model, 1e-4)
        plain, drafted = texts(model, INT8)
        assert torch.equal(plain, drafted) and model.last_speculation.acceptance_rate > 0.3
    assert 0 < copies.drift(model) < 0.001
    assert copies_in_use(model) is copies and len(quantised) == made


def test_copies_are_quantised_once_for_an_update_and_in_place(model: PreTrainedModel, quantised: list[int]) -> None:
    texts(model, INT8)
    copies, made = copies_in_use(model), len(quantised)
    (passes,), targets = copies.passes.values(), dict(state_of(model).get(CapturedPart).of(model).targets)
    assert passes.program(1) is not None and targets
    weights = [copy.weight.data_ptr() for copy, _ in copies.by_module.values()]
    for number in range(1, 4):
        update(model, 0.02)
        for _ in range(3):
            plain, drafted = texts(model, INT8)
            assert torch.equal(plain, drafted) and model.last_speculation.acceptance_rate > 0.3
        assert len(quantised) == made * (1 + number)
    assert copies_in_use(model) is copies and copies.is_current(model)
    assert list(copies.passes.values()) == [passes], "captured again"
    assert state_of(model).get(CapturedPart).of(model).targets == targets, "captured again"
    assert weights == [copy.weight.data_ptr() for copy, _ in copies.by_module.values()]
    # They equal new copies of these weights.
    new = LowBitCopies(model, INT8.skip, PrecisionConfig("int8", head="int8", group_size=64))
    for module in copies.modules:
        for one, other in zip(copies.by_module[id(module)][0].tensors().values(), _tensors(new, module), strict=True):
            assert torch.equal(one, other)


def _tensors(copies: LowBitCopies, module: Any) -> Any:
    return copies.by_module[id(module)][0].tensors().values()


def test_other_weights_get_other_copies(model: PreTrainedModel, quantised: list[int]) -> None:
    texts(model, INT8)
    known = weakref.ref(copies_in_use(model))
    update(model, 1.0)
    assert copies_in_use(model).drift(model) > 0.1
    plain, drafted = texts(model, INT8)
    assert torch.equal(plain, drafted) and model.last_speculation.acceptance_rate > 0.3
    assert known() is not copies_in_use(model)
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[1].mlp.down_proj.weight.data.clone()
    assert copies_in_use(model).drift(model) == math.inf


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_that_torch_does_not_count(model: PreTrainedModel, quantised: list[int], fused: bool) -> None:
    """Check that drift is noticed with fused optimizers too, which do not change a weight's version."""
    texts(model, INT8)
    copies, made = copies_in_use(model), len(quantised)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    for _ in range(3):
        model(input_ids=prompt(9), labels=prompt(9)).loss.backward()
        optimizer.step()
        plain, drafted = texts(model, INT8)
        assert torch.equal(plain, drafted)
    assert 0 < copies.drift(model) < 0.003
    assert copies_in_use(model) is copies and len(quantised) == made


def test_drafts_that_share_copies_with_those_that_were_followed(model: PreTrainedModel, quantised: list[int]) -> None:
    other = SelfSpeculativeConfig(precision=PrecisionConfig("int8"), drafting=FIXED)
    texts(model, INT8)
    texts(model, other)
    made = len(quantised)
    update(model, 0.02)
    texts(model, INT8)
    texts(model, other)
    assert len(quantised) == 2 * made
    assert copies_in_use(model, other).is_current(model)


def test_short_calls_do_not_quantise_until_they_have_missed_as_much(
    model: PreTrainedModel, quantised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)])
    config = SelfSpeculativeConfig(precision=INT8.precision, drafting=FIXED, costs=costs)
    copies = copies_of(model, config.skip, config.precision)  # type: ignore[arg-type]
    made = len(quantised)
    saved = seconds_saved(config)
    assert 0 < saved < 1
    monkeypatch.setattr(moving_weights, "SECONDS_PER_WEIGHT", 10 * saved / copies.num_weights())
    update(model, 0.02)
    for _ in range(3):
        follow_weights(model, config, 3)
        assert len(quantised) == made
    follow_weights(model, config, 3)
    assert len(quantised) == 2 * made and copies.is_current(model)
    update(model, 0.02)
    follow_weights(model, config, 9)
    assert not copies.is_current(model)
    follow_weights(model, config, 11)
    assert copies.is_current(model)
    update(model, 0.02)
    follow_weights(model, config, None)  # an unknown length counts as long
    assert copies.is_current(model)


def test_what_was_learnt_and_chosen_stays_while_weights_move(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    # Measurements from a busy machine would not be stored, but repeated.
    monkeypatch.setattr(automatic, "was_noisy", lambda model: False)
    chosen = []
    choose = automatic._choose

    def counted(*args: Any) -> Any:
        chosen.append(1)
        return choose(*args)

    monkeypatch.setattr(automatic, "_choose", counted)
    texts(model, "auto")
    weights = weights_in_use(model)
    origin, policies = origin_of(model), state_of(model).get(LearntPart).policies
    for _ in range(5):
        update(model, 0.05)
        texts(model, "auto")
        assert origin_of(model) == origin and weights_in_use(model) == weights
    assert state_of(model).get(LearntPart).policies is policies
    assert len(chosen) == 1
    update(model, 1.0)
    texts(model, "auto")
    assert origin_of(model) != origin and len(chosen) == 2
