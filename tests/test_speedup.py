"""Speed-ups estimated from acceptance and costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import Costs
from ssd_generation.search.trials import Scoring
from ssd_generation.tuning.acceptance import Acceptance
from ssd_generation.tuning.speedup import expected_tokens, speedup_within_chance, theoretical_speedup

RATES = st.floats(0.0, 0.999)


def costs(draft: float, *verify: tuple[int, float]) -> Costs:
    return Costs(plain_step=1.0, draft_step=draft, verify=list(verify) or [(1, 1.0)])


@given(RATES, st.integers(0, 12))
def test_one_acceptance_for_all_depths_is_the_closed_form(rate: float, length: int) -> None:
    assert expected_tokens([rate], length) == pytest.approx((1 - rate ** (length + 1)) / (1 - rate))


def test_acceptance_by_depth_by_hand() -> None:
    # 1 + 0.9 + 0.9 · 0.5 + 0.9 · 0.5 · 0.5
    assert expected_tokens([0.9, 0.5], 3) == pytest.approx(2.575)
    assert expected_tokens([], 4) == 1.0


def test_the_best_length_by_hand() -> None:
    # k = 1: 1.9 / 1.3; k = 2: 2.71 / 1.6; k = 3: 3.439 / 1.9; k = 4, beyond the cliff: 4.0951 / 3.2
    stepped = costs(0.3, (1, 1.0), (4, 1.0), (5, 2.0))
    speedup, length = theoretical_speedup([0.9], stepped)
    assert speedup == pytest.approx(3.439 / 1.9)
    assert length == 3


def test_other_draft_lengths_by_hand() -> None:
    free = costs(1e-9, (1, 1.0), (2, 1.0))
    assert theoretical_speedup([0.0], free)[0] == pytest.approx(1.0)
    assert theoretical_speedup([1.0], free)[0] == pytest.approx(13.0)
    assert theoretical_speedup([1.0], free)[1] == 12
    assert theoretical_speedup([0.5], free, longest=2)[0] == pytest.approx(1.75)
    assert theoretical_speedup([0.8], costs(1.0, (1, 1.0), (2, 1.5)))[0] == pytest.approx(1.8 / 2.5), "below 1"
    half = Costs(plain_step=2.0, draft_step=1.0, verify=[(1, 2.0), (2, 2.5), (3, 3.0)])
    assert theoretical_speedup([0.8], half, longest=2)[0] == pytest.approx(max(1.8 * 2 / 3.5, 2.44 * 2 / 5))


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.1, 3.0))
def test_chance_moves_a_speedup_both_ways(right: int, wrong: int, errors: float) -> None:
    c = costs(0.3)
    tried = [right + wrong]
    lower, middle, upper = (speedup_within_chance(tried, [right], c, e)[0] for e in (-errors, 0.0, errors))
    assert lower < middle < upper


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([None, 0.3, 0.2]))
def test_a_draft_is_not_given_up_for_what_chance_explains(right: int, wrong: int, budget: float | None) -> None:
    c, scoring = costs(0.3), Scoring(budget)
    tried = right + wrong
    promised = scoring.score(right / tried if tried else 0.5, c)
    assert scoring.optimistic_score(Acceptance([tried], [right]), c, 3.0) >= promised


@pytest.mark.parametrize(("budget", "best"), [(None, 1.2), (0.6, 0.5)])
def test_a_draft_that_is_never_right_is_given_up(budget: float | None, best: float) -> None:
    scoring = Scoring(budget)
    assert scoring.optimistic_score(Acceptance([40], [0]), costs(0.5), 3.0) < best
    assert scoring.optimistic_score(Acceptance([2], [0]), costs(0.5), 3.0) >= best


def test_worth_under_a_budget() -> None:
    scoring = Scoring(0.5)
    assert scoring.score(0.9, costs(0.5)) == 0.9
    assert scoring.score(0.2, costs(0.1)) == 0.2, "cheaper than it may be counts for nothing"
    assert scoring.score(0.9, costs(0.7)) == pytest.approx(-0.2), "too dear, the less the nearer it is"
