"""The search space: the choices for each sub-layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import SelfSpeculativeConfig, SkipConfig
from ssd_generation.search.space import HEAD, KEEP, SKIP, space_of
from tiny_models import LAYERS, tiny_model

MODEL = tiny_model(hidden_size=64, intermediate_size=64, vocab_size=64)
SPACE = space_of(MODEL, draft_memory=10.0)


def test_skipping_alone_unless_memory_is_given() -> None:
    space = space_of(MODEL)
    assert space.precisions == ()
    assert set(space.choices) == {f"{kind}.{i}" for kind in ("attention", "mlp") for i in range(LAYERS)}
    assert set(space.choices.values()) == {(KEEP, SKIP)}


def test_precisions_that_fit_the_memory() -> None:
    assert SPACE.precisions == ("int8", "int4")
    assert SPACE.choices["mlp.0"] == (KEEP, SKIP, "int8", "int4")
    assert SPACE.choices[HEAD] == (KEEP, "int8", "int4")
    # int8 takes over a quarter of float32, int4 in groups of 32 about a sixth.
    assert space_of(MODEL, draft_memory=0.2).precisions == ("int4",)
    assert space_of(MODEL, draft_memory=0.2, precisions=("int8",)).precisions == ()


def test_half_precision_and_budgets_below_nothing() -> None:
    with pytest.raises(ValueError, match=r"draft_memory must be .* -0\.5"):
        space_of(MODEL, draft_memory=-0.5)


def test_a_model_with_nothing_to_search_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than four sub-layers"):
        space_of(tiny_model(num_hidden_layers=1))


@given(st.data())
def test_configs_and_choices_say_the_same(data: st.DataObject) -> None:
    choices = {name: data.draw(st.sampled_from(allowed)) for name, allowed in SPACE.choices.items()}
    config = SPACE.config(choices)
    assert SPACE.from_config(config) == choices
    assert SelfSpeculativeConfig.from_dict(config.to_dict()) == config
    kept = [name for name in SPACE.needed if choices[name] != SKIP]
    assert SPACE.is_possible(choices) == bool(kept)


def test_a_config_from_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'int8' is not available for attention\.0"):
        space_of(MODEL).from_config(SelfSpeculativeConfig(precision="int8"))
    with pytest.raises(ValueError, match=r"attention\.9"):
        SPACE.from_config(SelfSpeculativeConfig(SkipConfig([9], [])))
    with pytest.raises(ValueError, match=r"mlp\.77"):
        SPACE.complete({"mlp.77": SKIP})


def test_uniform_drafts_leave_what_is_not_allowed() -> None:
    assert set(SPACE.uniform("int4", head="int8").values()) == {"int4", "int8"}
    assert SPACE.uniform(SKIP)[HEAD] == KEEP
    assert SPACE.complete({"mlp.1": SKIP})["mlp.0"] == KEEP
