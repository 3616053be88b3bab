"""Draft-length policies: numbers in, a decision out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation.config import DraftingConfig
from ssd_generation.drafting import ConfidencePolicy, FixedPolicy, make_policy


@pytest.mark.parametrize(("length", "limit", "expected"), [(5, 10, 5), (5, 3, 3), (5, 0, 0), (1, 1, 1)])
def test_fixed_drafts_its_length_or_what_is_left(length: int, limit: int, expected: int) -> None:
    policy = FixedPolicy(length)
    assert policy.draft_length(limit) == expected
    assert policy.keep_drafting(1, 0.0)  # never stops early
    assert not policy.needs_probability


@pytest.mark.parametrize("policy", [FixedPolicy, ConfidencePolicy])
def test_a_draft_length_below_one_is_refused(policy: type) -> None:
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        policy(0)


def test_confidence_stops_after_an_unsure_token() -> None:
    policy = ConfidencePolicy(max_length=8, threshold=0.6)
    assert policy.draft_length(20) == 8
    assert policy.keep_drafting(1, 0.61)
    assert policy.keep_drafting(1, 0.6)
    assert not policy.keep_drafting(2, 0.59)


# The update rule with the published constants, worked out by hand (β1 0.5, β2 0.9, ε 0.01, α 0.9, γ 0.6).
@pytest.mark.parametrize(
    ("drafted", "accepted", "reached_end", "expected"),
    [
        (4, 2, False, 0.9 * 0.6 + 0.1 * 0.61),  # 0.5 < α: more careful
        (4, 4, False, 0.9 * 0.6 + 0.1 * 0.59),  # 1.0 ≥ α: bolder
        (8, 8, True, 0.6),  # 1.0 ≥ α, and it drafted all it could: as it is
        (8, 2, True, 0.9 * 0.6 + 0.1 * 0.61),
    ],
)
def test_confidence_follows_the_papers_rule(drafted: int, accepted: int, reached_end: bool, expected: float) -> None:
    policy = ConfidencePolicy(max_length=8, threshold=0.6)
    policy.update(drafted, accepted, reached_end)
    assert policy.threshold == pytest.approx(expected, abs=1e-12)


def test_confidence_averages_the_acceptance() -> None:
    policy = ConfidencePolicy(max_length=8)
    policy.update(4, 4, False)
    assert policy.acceptance == 1.0
    policy.update(4, 2, False)
    assert policy.acceptance == pytest.approx(0.75)
    assert policy.state() == {"threshold": policy.threshold, "acceptance": 0.75}


def test_a_round_without_a_draft_teaches_nothing() -> None:
    policy = ConfidencePolicy()
    policy.update(0, 0, False)
    assert policy.state() == {"threshold": 0.6}


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1), st.booleans()), max_size=200))
def test_the_threshold_stays_a_probability(rounds: list[tuple[int, float, bool]]) -> None:
    policy = ConfidencePolicy(step=1.0, threshold_smoothing=0.0)
    for drafted, share, reached_end in rounds:
        policy.update(drafted, int(drafted * share), reached_end)
        assert 0.0 <= policy.threshold <= 1.0
        assert 0 <= policy.draft_length(7) <= 7


def test_policies_are_made_from_the_config() -> None:
    fixed = make_policy(DraftingConfig(policy="fixed", max_draft_length=3))
    assert isinstance(fixed, FixedPolicy) and fixed.length == 3
    adaptive = make_policy(
        DraftingConfig(policy="confidence", threshold=0.8, max_draft_length=6, target_acceptance=0.85)
    )
    assert isinstance(adaptive, ConfidencePolicy)
    assert (adaptive.threshold, adaptive.max_length, adaptive.target_acceptance) == (0.8, 6, 0.85)
