"""Three ways of decoding, compared: texts, figures, and the model's state afterwards."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, draft_mode, enable_self_speculative
from ssd_generation.forward.copies.low_bit import copies_of, copy_bytes
from ssd_generation.forward.structure.skip_mode import draft_mode_with
from ssd_generation.harness.results import describe_environment
from ssd_generation.harness.run import COMPARED, Caller, TimedCall, compare, engine, methods_of
from ssd_generation.harness.texts import Difference, find_difference, first_difference
from tiny_models import LAYERS, prompt, tiny_model

CONFIG = SelfSpeculativeConfig(skip=SkipConfig(attention=[1], mlp=[2]))
INPUTS = {"input_ids": prompt(10), "attention_mask": torch.ones(1, 10, dtype=torch.long)}


@pytest.fixture
def model() -> Any:
    return enable_self_speculative(tiny_model())


def new_tokens(model: Any, **kwargs: Any) -> list[int]:
    return list(model.generate(**INPUTS, **kwargs)[0, 10:].tolist())


# --- where two texts diverge -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "other", "index"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 4, 3], 1),
        ([1], [2], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1], 1),
    ],
)
def test_first_difference(plain: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(plain, other) == index


@pytest.mark.parametrize("at", [0, 3])
def test_margin_is_what_plain_decoding_decided_by(model: Any, at: int) -> None:
    plain = new_tokens(model, max_new_tokens=6)
    other = [*plain[:at], (plain[at] + 1) % 64, *plain[at + 1 :]]
    difference = find_difference(model, INPUTS, plain, other)
    with torch.no_grad():
        prefix = torch.cat((INPUTS["input_ids"], torch.tensor([plain[:at]], dtype=torch.long)), dim=1)
        logits = model(prefix).logits[0, -1]
    assert difference is not None
    assert (difference.token, difference.plain_token, difference.other_token) == (at + 1, plain[at], other[at])
    assert difference.logit_margin == pytest.approx(float(logits[plain[at]] - logits[other[at]]), rel=1e-4)
    assert difference.logit_margin is not None and difference.logit_margin > 0


def test_margin_is_taken_after_the_logits_processors(model: Any) -> None:
    arguments = {"repetition_penalty": 3.0, "max_new_tokens": 8}
    penalised, free = new_tokens(model, **arguments), new_tokens(model, max_new_tokens=8)
    assert penalised != free
    difference = find_difference(model, INPUTS, penalised, free, **arguments)
    assert difference is not None and difference.logit_margin is not None and difference.logit_margin > 0
    # By the raw logits the other token would have won.
    raw = find_difference(model, INPUTS, penalised, free)
    assert raw is not None and raw.logit_margin is not None and raw.logit_margin < 0


def test_where_a_text_ends_there_is_no_margin(model: Any) -> None:
    assert find_difference(model, INPUTS, [5, 6], [5]) == Difference(2, 6, None, None)
    assert find_difference(model, INPUTS, [5], [5, 6]) == Difference(2, None, 6, None)
    assert find_difference(model, INPUTS, [5, 6], [5, 6]) is None


def test_a_forbidden_token_has_no_margin(model: Any) -> None:
    arguments = {"suppress_tokens": [7], "max_new_tokens": 4}
    plain = new_tokens(model, **arguments)
    difference = find_difference(model, INPUTS, plain, [7, *plain[1:]], **arguments)
    assert difference is not None and difference.logit_margin is None


# --- the comparison -------------------------------------------------------------------------------


def test_every_method_says_what_it_says_alone(model: Any) -> None:
    result = compare(model, INPUTS, CONFIG, repeats=2, max_new_tokens=24, do_sample=False)
    with draft_mode(model, CONFIG.skip):
        draft = new_tokens(model, max_new_tokens=24, do_sample=False)
    plain = new_tokens(model, max_new_tokens=24, do_sample=False)
    assert draft != plain
    assert [list(ids) for ids in result.plain.token_ids] == [plain, plain]
    assert result.draft is not None
    assert [list(ids) for ids in result.draft.token_ids] == [draft, draft]
    assert [list(ids) for ids in result.self_speculative.token_ids] == [plain, plain]
    assert result.self_speculative.difference is None
    assert result.draft.difference == find_difference(model, INPUTS, plain, draft)
    assert len(result.self_speculative.speculation) == 2 and result.plain.speculation == ()
    assert result.self_speculative.new_tokens == 24


def test_end_of_sequence_holds_for_all_methods(model: Any) -> None:
    plain = new_tokens(model, max_new_tokens=24)
    end = plain[9]
    model.generation_config.eos_token_id = end
    result = compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=24)
    stop = plain.index(end) + 1
    assert list(result.plain.token_ids[0]) == list(result.self_speculative.token_ids[0]) == plain[:stop]
    assert result.draft is not None
    draft = result.draft.token_ids[0]
    assert end not in draft[:-1] and (len(draft) == 24 or draft[-1] == end)


def test_an_empty_skip_set_drafts_what_the_target_says(model: Any) -> None:
    config = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=3))
    result = compare(model, INPUTS, config, repeats=1, max_new_tokens=13)
    assert result.draft is None and "draft alone" not in result.to_dict()["methods"]
    assert result.self_speculative.acceptance_rate == 1
    assert result.self_speculative.tokens_per_round == 4
    assert (result.skipped_sublayers, result.skipped_parameters) == (0, 0)


def test_a_draft_in_low_bits(model: Any) -> None:
    fixed = DraftingConfig(policy="fixed", max_draft_length=3)
    config = SelfSpeculativeConfig(SkipConfig(attention=[1]), fixed, precision="int8")
    result = compare(model, INPUTS, config, repeats=1, max_new_tokens=16)
    copies = copies_of(model, config.skip, config.precision)  # type: ignore[arg-type]
    with draft_mode_with(model, config.skip, copies.forwards()):
        draft = new_tokens(model, max_new_tokens=16)
    assert result.draft is not None and list(result.draft.token_ids[0]) == draft
    assert list(result.self_speculative.token_ids[0]) == new_tokens(model, max_new_tokens=16)
    assert result.copy_bytes == copies.num_bytes() == copy_bytes(model) > 0
    assert result.copy_share == pytest.approx(copies.num_bytes() / (4 * model.num_parameters()))
    assert result.left_as_loaded == tuple(copies.left)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["copy_bytes"] == result.copy_bytes and data["costs"] is None


def test_prompt_lookup_has_no_draft_of_its_own(model: Any) -> None:
    inputs = {"input_ids": INPUTS["input_ids"].repeat(1, 3), "attention_mask": torch.ones(1, 30, dtype=torch.long)}
    config = SelfSpeculativeConfig(lookup=True, drafting=DraftingConfig(policy="fixed"))
    result = compare(model, inputs, config, repeats=2, max_new_tokens=24)
    own = result.self_speculative
    assert result.draft is None and result.methods == (result.plain, own)
    assert own.self_drafted_tokens == 0 and own.self_drafted_acceptance is None
    assert own.looked_up_tokens is not None and own.looked_up_tokens > 0
    assert own.looked_up_acceptance == own.acceptance_rate
    assert result.plain.self_drafted_tokens is None and result.plain.looked_up_tokens is None
    assert (result.copy_bytes, result.draft_cost) == (0, None)


@pytest.mark.parametrize(
    ("config", "has_draft"),
    [
        (CONFIG, True),
        (SelfSpeculativeConfig(precision="int4"), True),
        (SelfSpeculativeConfig(precision="int4", lookup=True), True),
        (SelfSpeculativeConfig(lookup=True), False),
        (SelfSpeculativeConfig(), False),
        (SelfSpeculativeConfig(SkipConfig(attention=[1]), DraftingConfig(policy="none")), False),
    ],
)
def test_which_methods_there_are_to_compare(config: SelfSpeculativeConfig, has_draft: bool) -> None:
    assert methods_of(config) == (COMPARED if has_draft else (COMPARED[0], COMPARED[2]))


def test_all_methods_of_a_repeat_sample_from_the_same_seed(model: Any) -> None:
    arguments = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0}
    result = compare(model, INPUTS, CONFIG, repeats=2, seed=5, **arguments)
    assert result.draft is not None
    for repeat in range(2):
        torch.manual_seed(5 + repeat)
        assert list(result.plain.token_ids[repeat]) == new_tokens(model, **arguments)
        torch.manual_seed(5 + repeat)
        with draft_mode(model, CONFIG.skip):
            assert list(result.draft.token_ids[repeat]) == new_tokens(model, **arguments)
    assert result.sampling
    assert result.self_speculative.difference is None  # the same seed, the same text
    parted = result.draft.difference
    assert parted is not None and parted.logit_margin is not None and parted.logit_margin > 0
    for method in result.methods:
        assert method.draws is not None and method.draws.tokens == sum(map(len, method.token_ids)) == 24
    methods = result.to_dict()["methods"]
    assert methods["self-speculative"]["identical_to_plain"] and not methods["draft alone"]["identical_to_plain"]


def test_draws_that_cannot_be_judged_cost_nothing_else(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(engine, "check_sampling", judge)
    result = compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=4, do_sample=True)
    assert [method.draws for method in result.methods] == [None] * 3
    assert result.to_dict()["methods"]["plain"]["draws_error"] == "MemoryError: no room"


def test_sampling_by_the_models_own_default_is_noticed(model: Any) -> None:
    model.generation_config.do_sample = True
    assert compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=4).sampling


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = new_tokens(model, max_new_tokens=8)
    compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=8)
    assert new_tokens(model, max_new_tokens=8) == before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_methods_are_interleaved_and_take_turns_in_going_first(model: Any) -> None:
    steps: list[str] = []
    compare(model, INPUTS, CONFIG, repeats=3, max_new_tokens=4, advance=steps.append)
    plain, draft, own = COMPARED
    assert steps[:3] == [f"warm-up, {name}" for name in COMPARED]
    assert [step.partition(", ")[2] for step in steps[3:]] == [plain, draft, own, draft, own, plain, own, plain, draft]


def test_ratios_are_taken_per_repeat_and_medians_over_repeats(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the order of the calls: warm-up, then plain, draft, own; draft, own, plain; own, plain, draft.
    durations = iter([9.0, 9.0, 9.0, 1.0, 0.5, 2.0, 1.0, 1.0, 4.0, 1.0, 3.0, 1.0])
    real = Caller.call

    def call(self: Caller, *args: Any) -> TimedCall:
        return dataclasses.replace(real(self, *args), seconds=next(durations))

    monkeypatch.setattr(Caller, "call", call)
    result = compare(model, INPUTS, CONFIG, repeats=3, max_new_tokens=12)
    assert next(durations, None) is None
    assert result.plain.seconds == (1.0, 4.0, 3.0)
    assert result.self_speculative.seconds == (2.0, 1.0, 1.0)
    assert result.plain.tokens_per_second == 4
    assert result.plain.ratios == (1, 1, 1)
    assert result.self_speculative.ratios == pytest.approx((0.5, 4, 3))
    assert result.self_speculative.ratio == pytest.approx(3)
    assert result.draft is not None and result.draft.ratios == pytest.approx((2, 4, 3))


def test_costs_are_relative_to_a_plain_step(model: Any) -> None:
    result = compare(model, INPUTS, CONFIG, repeats=3, max_new_tokens=16)
    assert result.draft_cost is not None and result.draft_cost > 0
    assert result.verify_cost is not None and result.verify_cost > 0
    single = compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=1)  # the prompt's pass alone
    assert (single.draft_cost, single.verify_cost) == (None, None)
    assert (single.self_speculative.acceptance_rate, single.self_speculative.tokens_per_round) == (None, None)


def test_sizes(model: Any) -> None:
    result = compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=8)
    attention = 32 * 32 * 2 + 32 * 16 * 2 + 32  # q, o; k, v of two heads; the preceding norm
    mlp = 3 * 32 * 48 + 32
    assert result.parameters == model.num_parameters()
    assert result.skipped_parameters == pytest.approx((attention + mlp) / model.num_parameters())
    assert (result.skipped_sublayers, result.sublayers) == (2, 2 * LAYERS)
    assert result.weight_bytes == 4 * model.num_parameters()
    slot = LAYERS * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    assert not result.extra_bytes_measured
    assert result.extra_bytes == (12 + 32) * slot + 12 * 64 * 4  # spare slots, and the scores of 12 drafted tokens


def test_a_comparison_is_plain_json(model: Any) -> None:
    result = compare(model, INPUTS, CONFIG, repeats=2, max_new_tokens=12)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert list(data["methods"]) == list(COMPARED)
    own, draft = data["methods"]["self-speculative"], data["methods"]["draft alone"]
    assert own["identical_to_plain"] is True and own["first_difference"] is None
    assert draft["identical_to_plain"] is False
    assert draft["first_difference"]["token"] >= 1 and draft["first_difference"]["logit_margin"] > 0
    assert own["new_tokens"] == [12, 12] and len(own["speculation"]) == 2
    assert "identical_to_plain" not in data["methods"]["plain"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1, but got 0"),
        ({"inputs": {"input_ids": prompt(4, rows=2)}}, "One prompt can be compared at a time, but got 2"),
        ({"config": SelfSpeculativeConfig(skip=SkipConfig(attention=[99]))}, "99"),
    ],
)
def test_bad_input(model: Any, changes: dict[str, Any], message: str) -> None:
    arguments = {"inputs": INPUTS, "config": CONFIG, "repeats": 1, "max_new_tokens": 2, **changes}
    with pytest.raises(ValueError, match=message):
        compare(model, **arguments)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "bloom", "falcon", "deepseek_v3"])
def test_other_families(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    result = compare(model, INPUTS, CONFIG, repeats=1, max_new_tokens=12)
    assert result.self_speculative.difference is None
    assert result.extra_bytes > 0 and 0 < result.skipped_parameters < 1


def test_environment(model: Any) -> None:
    environment = describe_environment(model)
    assert json.loads(json.dumps(environment)) == environment
    assert environment["dtype"] == "float32" and environment["device"] == "cpu"
    assert environment["threads"] == torch.get_num_threads()
    assert environment["cpu"]
    assert {"torch", "transformers", "ssd_generation", "python"} <= environment["versions"].keys()
