"""Calls with too few tokens for drafting to save more time than its preparation takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ssd_generation import Costs, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.conditions import forbid_capture
from ssd_generation.generation import prepare, request
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.tuning import short_calls
from ssd_generation.tuning.short_calls import is_known_short, is_short_for
from tiny_models import prompt, tiny_model


@pytest.fixture
def model() -> PreTrainedModel:
    """Return a model whose passes run by its own code."""
    found = enable_self_speculative(tiny_model())
    forbid_capture(found, "a test says so")
    return found


def config_of(speedup: float, plain_step: float) -> SelfSpeculativeConfig:
    """Return a config with this estimated speed-up: long drafts, all accepted, at the cost that gives it."""
    costs = Costs(plain_step=plain_step, draft_step=1e-9, verify=((1, plain_step), (13, 13 * plain_step / speedup)))
    config = SelfSpeculativeConfig.from_dict({"precision": "int8", "drafting": {"acceptance": [1.0]}})
    return SelfSpeculativeConfig(precision=config.precision, drafting=config.drafting, costs=costs)


@pytest.mark.parametrize(("plain_step", "longest"), [(1e-3, 8), (4e-3, 5), (0.05, 1)])
def test_what_a_call_saves_is_weighed_against_its_preparation(
    model: PreTrainedModel, plain_step: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 8 ms of preparation; half of each step but the first is saved.
    modules = sum(1 for _ in model.modules())
    monkeypatch.setattr(short_calls, "_SECONDS_PER_MODULE", 8e-3 / modules)
    config = config_of(2.0, plain_step)
    found = [n for n in range(1, 20) if is_short_for(model, config, n)]
    assert found == list(range(1, longest + 1))
    assert [n for n in range(1, 20) if is_known_short(model, n)] == found


def test_a_draft_that_promises_nothing_is_not_prepared_for_few_tokens(model: PreTrainedModel) -> None:
    config = config_of(0.5, 1.0)
    assert is_short_for(model, config, 8)
    assert not is_short_for(model, config, 9), "lookup may save what no cost promises"
    lookup = SelfSpeculativeConfig(lookup=config_of(1, 1).lookup, costs=config.costs)
    assert is_short_for(model, lookup, 8)


def test_no_call_is_short_where_passes_are_captured(model: PreTrainedModel) -> None:
    config = config_of(0.5, 1e-6)
    assert is_short_for(model, config, 4)
    forbid_capture(model, None)
    assert not is_short_for(model, config, 4)
    assert not is_known_short(model, 4), "what was found before is forgotten"


@pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")
def test_no_call_is_short_where_experts_have_kernels() -> None:
    mixture = enable_self_speculative(tiny_model("gpt_oss"))
    assert not is_short_for(mixture, config_of(0.5, 1e-6), 4)


def test_a_call_that_was_found_short_is_not_prepared_again(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_calls, "_SECONDS_PER_MODULE", 10.0)
    monkeypatch.setattr(prepare, "is_not_worth_measuring", lambda request: False)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    plain = model.generate(prompt(9), **options)

    def generate(**kwargs: Any) -> str | None:
        assert torch.equal(plain, model.generate(prompt(9), **options, **kwargs))
        return model.last_speculation.refusal  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(request, "automatic_config", lambda *_: config_of(2.0, 1e-3))
        # `check` would forbid or allow captures by its result.
        patch.setattr(prepare, "check", lambda *_, **__: prepare_check())
        assert "too few tokens" in str(generate(self_speculative="auto"))

    def prepared(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("prepared")

    monkeypatch.setattr(request, "automatic_config", prepared)
    monkeypatch.setattr(prepare, "check", prepared)
    assert "too few tokens" in str(generate(self_speculative="auto"))
    # An explicitly requested draft is always made.
    with pytest.raises(AssertionError, match="prepared"):
        generate(self_speculative=SkipConfig(attention=[1]))
    with pytest.raises(AssertionError, match="prepared"):
        generate(self_speculative="auto", draft_memory=0.3)


def prepare_check() -> Any:
    """A model check that found nothing wrong."""
    return type("Check", (), {"refusal": None})()
