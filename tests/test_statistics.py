"""Counts and the figures that follow from them, compared with figures worked out by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import SpeculationStatistics


def recorded(*rounds: tuple[list[int], list[int]], rows: int = 1) -> SpeculationStatistics:
    statistics = SpeculationStatistics(batch_size=rows, round_accepted=[[] for _ in range(rows)], new_tokens=[0] * rows)
    for drafted, accepted in rounds:
        statistics.record_round(drafted, accepted, range(rows))
    return statistics


def test_counts() -> None:
    statistics = recorded(([3], [3]), ([3], [1]), ([2], [0]), ([0], [0]))
    assert (statistics.rounds, statistics.drafted_tokens, statistics.accepted_tokens) == (4, 8, 4)
    assert statistics.acceptance_rate == 0.5
    assert statistics.drafted_by_depth == [3, 3, 2]
    # Judged: the first of each draft; the second where the first was accepted; the third where the second was.
    assert statistics.judged_by_depth == [3, 2, 1]
    assert statistics.accepted_by_depth == [2, 1, 1]
    assert statistics.acceptance_by_depth == [2 / 3, 1 / 2, 1.0]
    assert statistics.tokens_per_round == 2.0
    assert statistics.tokens_per_round_histogram == {1: 2, 2: 1, 4: 1}


def test_a_call_in_a_sentence() -> None:
    statistics = SpeculationStatistics(generated_tokens=5, target_passes=3, total_seconds=0.5)
    assert str(statistics) == "5 tokens in 3 passes of the target model, 0.50 s; nothing was drafted."
    statistics.round_accepted = [[]]
    statistics.draft_passes = 2
    statistics.record_round([4], [3], [0], [2])
    assert str(statistics) == (
        "5 tokens in 3 passes of the target model and 2 of the draft, 0.50 s: 4 tokens drafted (2 of them looked up), "
        "3 accepted (75%), 4.00 tokens per round."
    )
    assert "looked up" not in str(recorded(([3], [1])))


def test_rows_that_rest_do_not_count() -> None:
    statistics = SpeculationStatistics(batch_size=2, round_accepted=[[], []], new_tokens=[0, 0])
    statistics.record_round([2, 2], [1, 2], [1])
    assert statistics.round_accepted == [[], [2]]
    assert statistics.drafted_tokens == 2


def test_origins() -> None:
    statistics = recorded(([3], [2]), ([3], [0]), ([3], [3]))
    statistics.new_tokens = [8]  # the text ended inside the last round
    # The prompt's pass; two drafted tokens and the target's; the target's; three drafted, with the target's cut off.
    assert [[source != "target" for source in row] for row in statistics.token_sources] == [
        [False, True, True, False, False, True, True, True]
    ]


def test_sources() -> None:
    statistics = SpeculationStatistics(round_accepted=[[]], new_tokens=[9])
    statistics.record_round([4], [3], [0], self_drafted=[2])  # two self-drafted tokens, one of two looked-up ones
    statistics.record_round([3], [1], [0], self_drafted=[2])  # not the looked-up token
    statistics.record_round([2], [2], [0], self_drafted=[0])  # the text ended in this round
    own, copied, target = "drafted", "looked up", "target"
    assert statistics.token_sources == [[target, own, own, copied, target, own, target, copied, copied]]
    assert (statistics.looked_up_tokens, statistics.accepted_looked_up_tokens) == (5, 3)
    assert SpeculationStatistics(round_accepted=[[]], new_tokens=[1]).token_sources == [[target]]


def test_the_formula() -> None:
    # Every round drafts 4, of which 3 are accepted: 4 tokens for 4 draft steps at 0.5 and a pass at 1.2.
    statistics = recorded(([4], [3]), ([4], [3]))
    assert statistics.theoretical_speedup(draft_cost=0.5, verify_cost=1.2) == pytest.approx(4 / 3.2)


def test_nothing_happened() -> None:
    statistics = SpeculationStatistics()
    assert statistics.acceptance_rate is None and statistics.tokens_per_round is None
    assert statistics.theoretical_speedup(0.5, 1.0) is None
    assert statistics.acceptance_by_depth == [] and statistics.tokens_per_round_histogram == {}


@given(st.lists(st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30))
def test_the_figures_agree(rounds: list[tuple[int, int]]) -> None:
    statistics = recorded(*(([drafted], [accepted]) for drafted, accepted in rounds))
    tokens = sum(length * count for length, count in statistics.tokens_per_round_histogram.items())
    assert tokens == statistics.accepted_tokens + statistics.rounds
    assert all(0 <= rate <= 1 for rate in statistics.acceptance_by_depth)
    # A token is accepted only if all before it in the draft were.
    assert statistics.accepted_by_depth == sorted(statistics.accepted_by_depth, reverse=True)
    assert json.loads(json.dumps(statistics.to_dict()))["rounds"] == len(rounds)
