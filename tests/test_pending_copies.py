"""Low-bit copies that a process lacks: made after the first token, in parts, and only where calls are long enough."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ssd_generation import (
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    SelfSpeculativeConfig,
    enable_self_speculative,
)
from ssd_generation.forward.copies.low_bit import CopiesPart, copies_of, drop_copies, missing_copies
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning import pending_copies
from ssd_generation.tuning.speedup import seconds_saved
from tiny_models import prompt, tiny_model

COSTS = Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)])
CONFIG = SelfSpeculativeConfig(
    precision=PrecisionConfig("int8"), drafting=DraftingConfig(acceptance=(0.9,)), costs=COSTS, lookup=LookupConfig()
)
NEW = 24


@pytest.fixture
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model("llama"))


def weights_of(model: PreTrainedModel, config: SelfSpeculativeConfig = CONFIG) -> list[int]:
    """Return the numbers of weights of the copies that are missing."""
    assert config.precision is not None
    return [weights for weights, _ in missing_copies(model, config.skip, config.precision)]


def generate(model: Any, config: Any = CONFIG, new: int = NEW, **options: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(prompt(9), max_new_tokens=new, self_speculative=config, **settings)  # type: ignore[no-any-return]


class Counting(BaseStreamer):
    """Records how many copies there are when each token arrives."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.copies: list[int] = []
        self._part = state_of(model).get(CopiesPart)

    def put(self, value: torch.Tensor) -> None:
        self.copies.append(len(self._part.low_bit_copies))

    def end(self) -> None:
        """Nothing is left to do."""


def test_copies_come_after_the_first_token_a_few_in_each_round(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = weights_of(model)
    # Time for two plain steps is time for a single weight, so that each round makes one copy.
    monkeypatch.setattr(pending_copies, "SECONDS_PER_WEIGHT", 2.0 * COSTS.plain_step)
    monkeypatch.setattr(pending_copies, "_TO_COME", 1e9)
    plain, streamer = generate(model, None), Counting(model)
    assert torch.equal(generate(model, streamer=streamer), plain)
    seen = streamer.copies
    assert seen[:2] == [0, 0], "the prompt and the first token"
    assert seen[-1] == len(sizes)
    # (A looked-up draft needs none.)
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(seen))
    assert model.last_speculation.draft_passes > 0
    again = Counting(model)
    assert torch.equal(generate(model, streamer=again), plain)
    assert again.copies[0] == len(sizes)


def test_short_calls_make_copies_once_they_have_missed_enough(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, saved = sum(weights_of(model)), seconds_saved(CONFIG)
    assert 0 < saved < 1
    # Copies take as long as 10 tokens, of which a process decodes four times as many as so far, would save.
    monkeypatch.setattr(pending_copies, "SECONDS_PER_WEIGHT", 4 * 10 * saved / weights)
    sizes, looks = weights_of(model), list[int]()
    original = missing_copies

    def counted(*args: Any) -> Any:
        looks.append(0)
        return original(*args)

    monkeypatch.setattr(pending_copies, "missing_copies", counted)
    for _ in range(3):
        plain = generate(model, None, new=3)
        assert torch.equal(generate(model, new=3), plain)
        assert weights_of(model) == sizes and model.last_speculation.draft_passes == 0
    assert len(looks) == 1, "a call that is too short does not look for them again"
    for _ in range(3):
        generate(model)
    assert not weights_of(model)


def test_a_call_goes_on_where_one_before_it_ended(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = weights_of(model)
    monkeypatch.setattr(pending_copies, "SECONDS_PER_WEIGHT", 2.0 * COSTS.plain_step)
    monkeypatch.setattr(pending_copies, "_TO_COME", 1e9)
    left = [len(sizes)]
    while left[-1]:
        generate(model, new=4)
        left.append(len(weights_of(model)))
        assert left[-1] < left[-2]
    assert len(left) > 2
    copies = copies_of(model, CONFIG.skip, CONFIG.precision)  # type: ignore[arg-type]
    assert len({id(copy) for copy, _ in copies.by_module.values()}) == len(sizes)


def test_weights_that_change_between_two_parts_are_copied_as_they_are_now(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_copies, "SECONDS_PER_WEIGHT", 2.0 * COSTS.plain_step)
    monkeypatch.setattr(pending_copies, "_TO_COME", 1e9)

    class Changing(Counting):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.copies) == 4:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(-1.0)

    texts = []
    for config in (None, CONFIG):
        texts.append(generate(model, config, new=40, streamer=Changing(model)))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-1.0)
    assert torch.equal(*texts)
    generate(model)
    assert copies_of(model, CONFIG.skip, CONFIG.precision).is_current(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["no costs", "fixed", "no gain", "no length"])
def test_copies_are_made_beforehand_where_nothing_can_be_weighed(model: PreTrainedModel, change: str) -> None:
    config = {
        "no costs": SelfSpeculativeConfig(precision=CONFIG.precision, lookup=LookupConfig()),
        "fixed": SelfSpeculativeConfig(
            precision=CONFIG.precision, drafting=DraftingConfig(policy="fixed", acceptance=(0.9,)), costs=COSTS
        ),
        "no gain": SelfSpeculativeConfig(
            precision=CONFIG.precision, costs=Costs(plain_step=1.0, draft_step=5.0, verify=[(1, 1.0), (16, 9.0)])
        ),
        "no length": CONFIG,
    }[change]
    if change == "no length":
        pending = pending_copies.pending_copies(model, config, None)
        assert pending is not None and pending.make_some() and not weights_of(model)
        return
    assert pending_copies.pending_copies(model, config, 1) is None
    streamer = Counting(model)
    generate(model, config, new=4, streamer=streamer)
    assert streamer.copies[1] > 0, "at the first token"


def test_rows_of_a_batch_wait_for_copies_together(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_copies, "SECONDS_PER_WEIGHT", 2.0 * COSTS.plain_step)
    monkeypatch.setattr(pending_copies, "_TO_COME", 1e9)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.cat((prompt(9), prompt(9).flip(1)))
    found: Any = model
    plain = found.generate(ids, **options)
    assert torch.equal(found.generate(ids, **options, self_speculative=CONFIG), plain)
    assert not weights_of(model)


def test_dropped_copies_are_made_again(model: PreTrainedModel) -> None:
    generate(model)
    assert not weights_of(model)
    drop_copies(model)
    assert weights_of(model)
    generate(model)
    assert not weights_of(model)
