"""What acceptance and costs promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import Costs
from ssd_generation.automatic import best_speedup
from ssd_generation.search.objective import expected_tokens, hopeless, theoretical_speedup

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


@given(RATES, st.floats(0.01, 2.0), st.floats(1.0, 3.0))
def test_it_agrees_with_what_auto_goes_by(rate: float, draft: float, verify: float) -> None:
    c = costs(draft, (1, 1.0), (13, verify))
    speedup, length = theoretical_speedup([rate], c)
    assert max(speedup, 1.0) == pytest.approx(best_speedup(rate, c))
    assert 1 <= length <= 12


@given(st.integers(0, 40), st.integers(0, 40), st.floats(1.0, 3.0))
def test_a_draft_is_not_given_up_for_what_chance_explains(right: int, wrong: int, best: float) -> None:
    c = costs(0.3)
    tried = right + wrong
    promised = theoretical_speedup([right / tried if tried else 0.5], c)[0]
    assert promised > 0
    if promised >= best:
        assert not hopeless([tried], [right], c, best)


def test_a_draft_that_is_never_right_is_given_up() -> None:
    assert hopeless([40], [0], costs(0.5), 1.2)
    assert not hopeless([2], [0], costs(0.5), 1.2)
