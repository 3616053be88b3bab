"""Draft-length policies as functions from numbers to decisions."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effort import little_work
from ssd_generation.config import Costs, DraftingConfig
from ssd_generation.drafting.policy import (
    NO_MATCH,
    ConfidencePolicy,
    CostAwarePolicy,
    DraftPolicy,
    FixedPolicy,
    Match,
    NoDraftPolicy,
    make_policy,
)
from ssd_generation.drafting.policy.estimates import confidence_bin
from ssd_generation.drafting.policy.prices import Prices


@pytest.mark.parametrize(("length", "limit", "expected"), [(5, 10, 5), (5, 3, 3), (5, 0, 0), (1, 1, 1)])
def test_fixed_drafts_its_length_or_what_is_left(length: int, limit: int, expected: int) -> None:
    policy = FixedPolicy(length)
    assert policy.draft_length(limit) == expected
    assert policy.keep_drafting(1, 0.0)  # never stops early
    assert not policy.needs_probability


@pytest.mark.parametrize("policy", [FixedPolicy, ConfidencePolicy])
def test_a_draft_length_below_one_is_refused(policy: type) -> None:
    with pytest.raises(ValueError, match="from 1 to 128, but got 0"):
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
        (8, 8, True, 0.6),  # 1.0 ≥ α, but it drafted all it could: unchanged
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


def test_the_cost_policy_is_made_with_its_costs() -> None:
    drafting = DraftingConfig(policy="cost", max_draft_length=6, acceptance=(0.9, 0.8), exploration=0.02)
    policy = make_policy(drafting, FLAT, lookup=True)
    assert isinstance(policy, CostAwarePolicy) and policy.needs_probability and policy.lookup and policy.self_drafts
    assert (policy.max_length, policy.exploration) == (6, 0.02)
    assert [policy.state()[f"acceptance_{depth}"] for depth in (1, 2, 3, 6)] == pytest.approx([0.9, 0.8, 0.8, 0.8])
    assert not make_policy(drafting, FLAT, use_confidence=False).needs_probability
    assert make_policy(drafting, FLAT, self_drafts=False).draft_length(10) == 0
    with pytest.raises(ValueError, match=r"needs the costs .* Measure them"):
        make_policy(drafting)


def test_the_policy_none_never_drafts() -> None:
    policy = make_policy(DraftingConfig(policy="none"))
    assert isinstance(policy, NoDraftPolicy)
    assert (
        policy.draft_length(10) == policy.draft_length(10, Match(5, 3)) == policy.lookup_length(0, Match(5, 3), 9) == 0
    )
    assert not policy.keep_drafting(1, 1.0)


# --- Lookup first, else self-draft ----------------------------------------------------------------


@pytest.mark.parametrize("policy", [FixedPolicy(4), ConfidencePolicy(4)])
def test_a_match_takes_the_place_of_the_self_draft(policy: DraftPolicy) -> None:
    assert policy.draft_length(10, Match(7, 2)) == 0
    assert policy.lookup_length(0, Match(7, 2), 10) == 7
    assert policy.lookup_length(0, Match(7, 2), 3) == 3
    assert policy.draft_length(10) == 4
    assert policy.lookup_length(4, Match(7, 2), 6) == 0
    assert policy.lookup_length(0, NO_MATCH, 6) == 0


def test_confidence_learns_from_self_drafted_tokens_only() -> None:
    policy = ConfidencePolicy()
    policy.update(0, 5, False, looked_up=7, match=Match(7, 2))
    assert policy.acceptance is None
    policy.update(2, 5, True, looked_up=6, match=Match(7, 2))
    assert policy.acceptance == 1.0


# --- Cost-aware: the decision ---------------------------------------------------------------------


def _costs(draft: float, verify: Sequence[tuple[int, float]], unit: float = 0.03) -> Costs:
    """Build costs given in plain steps."""
    return Costs(plain_step=unit, draft_step=draft * unit, verify=[(n, v * unit) for n, v in verify])


V_FLAT = ((1, 1.0), (2, 1.05), (4, 1.1), (8, 1.2), (16, 1.4))
V_STEEP = ((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.7), (16, 2.5))
# As measured on a CPU that uses another kernel from n = 4 on.
V_CLIFF = ((1, 1.0), (2, 1.1), (3, 1.12), (4, 1.79), (5, 1.83), (6, 1.9), (8, 2.3), (12, 2.5), (16, 3.3))
FLAT = _costs(0.3, V_FLAT)


def _rich(policy: CostAwarePolicy) -> CostAwarePolicy:
    """Give the policy enough balance for any draft."""
    policy.budget.drafting.balance = policy.budget.copying.balance = 1e9
    return policy


def _verify(costs: Any, n: int) -> float:
    """Compute v(n) in plain steps, the slow way."""
    points = [(m, seconds / costs.plain_step) for m, seconds in costs.verify]
    if points[0][0] > 1:
        points = [(1, 1.0), *points]
    if len(points) == 1:
        return points[0][1]
    for (n0, v0), (n1, v1) in pairwise(points):
        if n <= n1:
            return v0 + (v1 - v0) * (n - n0) / (n1 - n0)
    return v1 + max(v1 - v0, 0.0) / (n1 - n0) * (n - n1)


def _value(costs: Any, acceptance: Sequence[float], k: int) -> tuple[float, float]:
    """Compute E and C of a fixed length."""
    tokens = 1.0 + sum(math.prod(acceptance[:j]) for j in range(1, k + 1))
    return tokens, k * costs.draft_step / costs.plain_step + _verify(costs, 1 + k) if k else 1.0


counts = st.lists(st.integers(1, 20), min_size=1, max_size=6, unique=True).map(sorted)
some_costs = st.builds(
    lambda draft, counts, times: _costs(draft, list(zip(counts, times, strict=False))),
    st.floats(0.05, 0.9),
    counts,
    st.lists(st.floats(0.9, 4.0), min_size=6, max_size=6),
)
some_priors = st.lists(st.floats(0.05, 0.99), min_size=1, max_size=8)


@example(costs=_costs(0.25, [(1, 1.5)]), prior=[0.875], limit=1)
@given(costs=some_costs, prior=some_priors, limit=st.integers(0, 10))
def test_the_length_has_the_most_tokens_per_second(costs: Costs, prior: list[float], limit: int) -> None:
    policy = _rich(CostAwarePolicy(costs, 8, prior, exploration=0.0, use_confidence=False))
    policy.budget.drafting.wait = 10**9  # no probes
    acceptance = [prior[min(i, len(prior) - 1)] for i in range(8)]
    rates = [tokens / cost for tokens, cost in (_value(costs, acceptance, k) for k in range(min(8, limit) + 1))]
    length = policy.draft_length(limit)
    assert 0 <= length <= min(8, limit)
    # Also if the overall best length does not fit: then few tokens are left, and none come after them.
    assert rates[length] == pytest.approx(max(rates), rel=1e-6)


@given(costs=some_costs, prior=some_priors, depth=st.integers(1, 7), probability=st.floats(0, 1))
def test_drafting_goes_on_if_any_number_of_further_tokens_is_worth_it(
    costs: Costs, prior: list[float], depth: int, probability: float
) -> None:
    policy = CostAwarePolicy(costs, 8, prior)
    acceptance = [prior[min(i, len(prior) - 1)] for i in range(8)]
    rate = max(tokens / cost for tokens, cost in (_value(costs, acceptance, k) for k in range(9)))
    calibrated, survival = policy.plan.calibrated, 1.0
    for above in range(1, depth):
        survival *= calibrated[confidence_bin(1.0)]
        if not policy.keep_drafting(above, 1.0):
            survival = policy.plan.survival[above]  # of a row that continues regardless, nothing more is known
    goes_on = policy.keep_drafting(depth, probability)
    survival *= calibrated[confidence_bin(probability)]
    worth = [
        survival * sum(math.prod(acceptance[depth : depth + i]) for i in range(1, j + 1))
        - rate * (j * costs.draft_step / costs.plain_step + _verify(costs, 1 + depth + j) - _verify(costs, 1 + depth))
        for j in range(1, 8 - depth + 1)
    ]
    if abs(max(worth)) > 1e-6:
        assert goes_on == (max(worth) > 0)


def test_a_cliff_is_noticed() -> None:
    cliff = _costs(0.3, V_CLIFF)
    for prior, best in ((0.8, 2), (0.9, 2), (0.3, 0)):
        policy = CostAwarePolicy(cliff, prior=(prior,), use_confidence=False, exploration=0.0)
        _rich(policy).budget.drafting.wait = 10**9
        assert policy.draft_length(20) == best
    # Up to the cliff but not over it, however sure.
    policy = _rich(CostAwarePolicy(cliff, prior=(0.85,)))
    assert policy.draft_length(20) == 12
    assert policy.keep_drafting(1, 0.9)
    assert not policy.keep_drafting(2, 0.9)
    # Never beyond the requested maximum.
    assert not CostAwarePolicy(FLAT, max_length=1, prior=(0.99,)).keep_drafting(1, 1.0)
    # A draft that is cheap and good enough pays beyond the cliff, and then far beyond it.
    assert _rich(CostAwarePolicy(_costs(0.05, V_CLIFF), prior=(0.97,), use_confidence=False)).draft_length(20) > 8


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        (((1, 1.0), (3, 1.2)), [1.0, 1.1, 1.2, 1.3, 1.4]),  # extrapolated with the last slope
        (((2, 1.2), (4, 1.4)), [1.0, 1.2, 1.3, 1.4, 1.5]),  # a plain step replaces n = 1
        (((1, 1.1), (2, 1.5), (4, 1.3)), [1.1, 1.5, 1.4, 1.3, 1.3]),  # as measured, but extrapolated without falling
        (((1, 1.1),), [1.1] * 5),
    ],
)
def test_verification_between_and_beyond_what_was_measured(
    verify: Sequence[tuple[int, float]], expected: list[float]
) -> None:
    assert Prices.of(_costs(0.3, verify), 12).verify[1:6] == pytest.approx(expected)
    assert [_verify(_costs(0.3, verify), n) for n in range(1, 6)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_length": 0}, "from 1 to 128, but got 0"),
        ({"max_length": 129}, "from 1 to 128, but got 129"),
        ({"prior": ()}, "empty"),
        ({"prior": (0.5, 1.5)}, "between 0 and 1, but got 1.5"),
        ({"exploration": -0.1}, "between 0 and 1, but got -0.1"),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CostAwarePolicy(FLAT, **changes)


@pytest.mark.parametrize("draft", [1e-9, 1e6])
@pytest.mark.parametrize("plain", [1e-9, 1e6])
@pytest.mark.parametrize(
    "verify", [[(1, 1e-9)], [(2, 1e6)], [(1, 1.0), (2, 1e6), (3, 1e-9)], [(2, 1e-9), (10**6, 1e6)]]
)
@pytest.mark.parametrize("acceptance", [(), (0.0,) * 128, (1.0,) * 128])
def test_at_its_bounds_a_config_is_planned_in_no_time(
    plain: float, draft: float, verify: list[tuple[int, float]], acceptance: tuple[float, ...]
) -> None:
    drafting = DraftingConfig(max_draft_length=128, acceptance=acceptance, exploration=0.5)
    with little_work():  # all of it takes some 10 ms
        policy = make_policy(drafting, Costs(plain, draft, verify), lookup=True)
        for turn in range(6):
            match = Match(128, 16) if turn % 2 else NO_MATCH
            length = policy.draft_length(10**6, match)
            assert 0 <= length <= 128
            drafted = 0
            while drafted < length:
                drafted += 1
                if not policy.keep_drafting(drafted, 0.999, match):
                    break
            looked_up = policy.lookup_length(drafted, match, 1000)
            policy.update(drafted, drafted if turn < 3 else 0, drafted == length, looked_up, match)
        assert all(math.isfinite(value) for value in policy.state().values())


# --- Cost-aware: learning -------------------------------------------------------------------------


def test_a_token_is_judged_only_if_those_before_it_were_accepted() -> None:
    policy = CostAwarePolicy(FLAT)
    policy.draft_length(20)
    policy.update(5, 2, True)
    depths = policy.depths
    assert (depths.seen[:5], depths.accepted[:5]) == ([1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0])
    policy.update(2, 2, True)
    assert (depths.seen[1], depths.accepted[1]) == pytest.approx((1.98, 1.98))
    assert (depths.seen[2], depths.accepted[2]) == pytest.approx((0.98, 0.0))  # discounted with age


def test_depths_never_tried_are_taken_to_be_like_the_others() -> None:
    policy = CostAwarePolicy(FLAT, max_length=4)
    for _ in range(200):
        policy.update(2, 2, True)
        policy.draft_length(20)
    state = policy.state()
    assert state["acceptance_1"] > 0.95
    assert state["acceptance_4"] > 0.9


def test_calibration_learns_what_the_drafts_confidence_is_worth() -> None:
    policy = _rich(CostAwarePolicy(FLAT))
    for _ in range(300):
        policy.draft_length(20)
        policy.keep_drafting(1, 0.4)  # unsure, and always right
        policy.update(1, 1, False)
        policy.draft_length(20)
        policy.keep_drafting(1, 0.999)  # sure, and always wrong
        policy.update(1, 0, False)
    policy.replan()
    assert policy.plan.calibrated[1] > 0.95
    assert policy.plan.calibrated[-1] < 0.1


def test_rows_of_a_batch_are_told_apart() -> None:
    policy = _rich(CostAwarePolicy(FLAT))
    assert policy.draft_length(20) > 2
    assert [policy.keep_drafting(1, p) for p in (0.999, 0.01, 0.96)] == [True, False, True]
    assert policy.keep_drafting(2, 0.999)  # row 0
    policy.keep_drafting(2, 0.01)  # row 2
    policy.update(3, 3, False)  # the policy was not queried about the last token
    policy.update(1, 0, False)
    policy.update(2, 1, False)
    seen = list(zip(policy.confidence.seen, policy.confidence.accepted, strict=True))
    assert seen[8] == pytest.approx((1.985, 1.985)) or seen[8] == pytest.approx((2.0, 2.0), abs=0.02)  # .999 twice
    assert seen[6] == (1.0, 1.0)  # .96
    assert seen[0] == pytest.approx((1.985, 0.0))  # .01 twice
    # Three rows share the passes: 4 of the 6 tokens were accepted, for 3 draft steps and one verification.
    balance = policy.budget.drafting.balance
    policy.state()
    assert policy.budget.drafting.balance != balance  # booked once, and capped
    poor = CostAwarePolicy(FLAT)
    poor.draft_length(20)
    for accepted in (1, 0, 1):
        poor.update(1, accepted, True)
    assert poor.state()["balance"] == pytest.approx(1.5 + 2 / 3 - (0.3 + 1.05 - 1.0))


def test_a_batch_gains_what_its_slowest_row_gains() -> None:
    def played(accepted: Callable[[int, int], int], rounds: int = 200, rows: int = 4) -> tuple[int, float]:
        """Return the number of rounds that drafted and the total gain, given each row's accepted length."""
        policy = CostAwarePolicy(FLAT, use_confidence=False)
        lengths, drafts, price = [20] * rows, 0, 0.0
        for turn in range(rounds):
            policy.begin_round(lengths)
            wanted = [policy.draft_length(20) for _ in range(rows)]
            drafts += max(wanted) > 0
            price += FLAT.draft_step * max(wanted) + FLAT.verify_seconds(1 + max(wanted)) - FLAT.plain_step
            for row, length in enumerate(wanted):
                right = min(accepted(row, turn), length)
                policy.update(length, right, True)
                lengths[row] += 1 + right
        return drafts, min(lengths) - 20 - rounds - price / FLAT.plain_step

    drafts, gained = played(lambda row, turn: 3)
    assert drafts == 200 and gained > 100
    # Three rows accept everything, and wait for the fourth.
    drafts, gained = played(lambda row, turn: 3 if row else 0)
    assert drafts < 40 and gained > -8.0
    # Alternating: a row's lead counts as gain once the others have caught up.
    drafts, gained = played(lambda row, turn: 12 if (row + turn) % 2 else 1)
    assert drafts == 200 and gained > 100


def test_rows_share_what_a_pass_costs() -> None:
    """Check a batch in which one row of four finds matches: the others wait for its wider pass."""
    match = Match(3, 2)

    def copies(rows: int, of_rows: int) -> tuple[CostAwarePolicy, int]:
        policy = CostAwarePolicy(Costs(plain_step=1.0, draft_step=1.0, verify=[(1, 1.0), (9, 3.4)]), lookup=True)
        count = 0
        for _ in range(200):
            for _ in range(of_rows):
                policy.draft_length(20, match)
            for row in range(of_rows):
                copied = policy.lookup_length(0, match, 20) if row < rows else 0
                count += copied > 0
                policy.update(0, copied, False, copied, match if copied else NO_MATCH)  # always right
        return policy, count

    alone, of_one = copies(1, 1)
    policy, of_four = copies(1, 4)
    together, of_all = copies(4, 4)
    # Each copy of three tokens gains three for a price of 0.9; shared among four rows, 0.75.
    assert of_one == 200 and of_all == 800 and alone.budget.share == together.budget.share == pytest.approx(1.0)
    assert of_four < 20 and policy.budget.share < 0.7
    lost = policy.state()["lookup_balance"] - 0.5
    assert lost > -3.0


# --- Cost-aware: simulations ----------------------------------------------------------------------
# A world gives the acceptance probability of the drafted token at a position, and the draft's confidence in it.
World = Callable[[random.Random, int], tuple[float, float]]


def _always(acceptance: float, probability: float = 0.9) -> World:
    return lambda generator, position: (acceptance, probability)


def _mixed(easy: float, hard: float, share: float) -> World:
    """Return a world of easy and hard tokens, with a draft whose confidence distinguishes them."""

    def world(generator: random.Random, position: int) -> tuple[float, float]:
        if generator.random() < share:
            return easy, 0.97 + 0.03 * generator.random()
        return hard, 0.2 + 0.5 * generator.random()

    return world


def _simulate(
    policy: DraftPolicy, costs: Costs, world: World, calls: int, tokens: int = 48, seed: int = 0
) -> list[float]:
    """Return the time of each call in plain steps."""
    generator = random.Random(seed)
    draft_step = costs.draft_step / costs.plain_step
    times = []
    position = 0
    for _ in range(calls):
        left, spent = tokens, 0.0
        while left:
            length = policy.draft_length(left - 1) if left > 1 else 0
            right: list[bool] = []
            while len(right) < length:
                acceptance, probability = world(generator, position + len(right))
                right.append(generator.random() < acceptance)
                if len(right) < length and not policy.keep_drafting(len(right), probability):
                    break
            drafted = len(right)
            accepted = [*right, False].index(False)
            spent += drafted * draft_step + (_verify(costs, 1 + drafted) if drafted else 1.0)
            policy.update(drafted, accepted, drafted == length)
            left -= accepted + 1
            position += accepted + 1
        times.append(spent)
    return times


@pytest.mark.parametrize("use_confidence", [True, False])
@pytest.mark.parametrize("probability", [0.1, 0.999])
@pytest.mark.parametrize("draft", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("verify", [V_FLAT, V_STEEP, V_CLIFF])
def test_a_useless_draft_costs_next_to_nothing(
    verify: Sequence[tuple[int, float]], draft: float, probability: float, use_confidence: bool
) -> None:
    costs = _costs(draft, verify)
    policy = CostAwarePolicy(costs, use_confidence=use_confidence)
    first, *others = _simulate(policy, costs, _always(0.0, probability), calls=40)
    assert first - 48 <= 1.5 + 0.01 * 48
    assert sum(others) <= 48 * len(others) / 0.985
    assert policy.state()["acceptance_1"] < 0.6


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.8, 0.9, 0.95, 0.98])
@pytest.mark.parametrize("use_confidence", [True, False])
@pytest.mark.parametrize(("draft", "verify"), [(0.15, V_FLAT), (0.5, V_FLAT), (0.33, V_STEEP)])
def test_comes_near_the_best_fixed_length(
    draft: float, verify: Sequence[tuple[int, float]], use_confidence: bool, acceptance: float
) -> None:
    costs = _costs(draft, verify)
    best = max(tokens / cost for tokens, cost in (_value(costs, [acceptance] * 12, k) for k in range(13)))
    rates = []
    for seed in range(4):
        policy = CostAwarePolicy(costs, use_confidence=use_confidence)
        times = _simulate(policy, costs, _always(acceptance), calls=8, tokens=480, seed=seed)
        rates.append(480 * len(times) / sum(times))
    # If drafting could gain little, only the absence of a loss is required.
    assert sum(rates) / len(rates) >= (0.97 * best if best > 1.06 else 0.99)


def test_a_draft_that_knows_its_weak_spots_beats_every_fixed_length() -> None:
    costs = _costs(0.33, V_FLAT)
    world = _mixed(0.99, 0.3, 0.8)
    fixed = min(sum(_simulate(FixedPolicy(k), costs, world, calls=40)) for k in range(1, 13))
    adaptive = sum(_simulate(CostAwarePolicy(costs), costs, world, calls=40))
    blind = sum(_simulate(CostAwarePolicy(costs, use_confidence=False), costs, world, calls=40))
    assert adaptive < fixed / 1.08
    assert blind < fixed / 0.96


@pytest.mark.parametrize(("before", "after"), [(0.95, 0.0), (0.0, 0.9), (0.9, 0.3)])
def test_follows_a_change(before: float, after: float) -> None:
    costs = _costs(0.33, V_STEEP)

    def world(generator: random.Random, position: int) -> tuple[float, float]:
        return before if position < 20 * 48 else after, 0.9

    times = _simulate(CostAwarePolicy(costs), costs, world, calls=60)
    fixed = [
        _simulate(policy, costs, world, calls=60)
        for policy in (NoDraftPolicy(), *(FixedPolicy(k) for k in range(1, 13)))
    ]
    assert sum(times[:20]) <= min(sum(t[:20]) for t in fixed) / 0.94
    assert sum(times[20:24]) <= 4 * 48 * 1.06  # right after the change
    assert sum(times[24:]) <= min(sum(t[24:]) for t in fixed) / 0.94
    assert sum(times) < 60 * 48


@given(data=st.data())
def test_no_outcome_whatever_makes_it_slower(data: st.DataObject) -> None:
    exploration = data.draw(st.sampled_from([0.0, 0.01, 0.1]))
    costs = data.draw(st.sampled_from([FLAT, _costs(0.8, V_STEEP), _costs(0.1, V_CLIFF)]))
    measured = data.draw(st.booleans())
    policy = CostAwarePolicy(
        costs, prior=(0.95,), exploration=exploration, lookup=data.draw(st.booleans()), prior_is_measured=measured
    )
    opening = policy.state()["balance"]
    assert 1.5 <= opening <= (4.0 if measured else 1.5)
    generator = random.Random(data.draw(st.integers(0, 1000)))
    # Phases that differ in acceptance, from nothing right to everything right.
    phases = data.draw(st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=1, max_size=6))
    matches = [NO_MATCH, *(Match(12, n) for n in range(1, 6))]
    lost = worst = 0.0
    rounds = 0
    for acceptance in phases:
        for _ in range(60):
            match = generator.choice(matches)
            length = policy.draft_length(20, match)
            drafted = 0
            while drafted < length:
                drafted += 1
                match = generator.choice(matches)
                if drafted < length and not policy.keep_drafting(drafted, generator.random(), match):
                    break
            looked_up = policy.lookup_length(drafted, match, 20 - drafted)
            assert 0 <= looked_up <= min(match.tokens, 20 - drafted)
            accepted = 0
            while accepted < drafted + looked_up and generator.random() < acceptance:
                accepted += 1
            policy.update(drafted, accepted, drafted == length, looked_up, match)
            n = drafted + looked_up
            lost += drafted * costs.draft_step / costs.plain_step + (_verify(costs, 1 + n) if n else 1.0)
            lost -= accepted + 1
            rounds += 1
            worst = max(worst, lost - exploration * rounds)
    assert worst <= opening + 0.5 + 1e-6


def test_what_cannot_be_paid_yet_is_worked_up_to() -> None:
    # The best draft has ten tokens and costs more than the opening balance; a draft of two tokens gains as well.
    costs = _costs(0.44, ((1, 1.0), (2, 1.55), (4, 1.65), (13, 2.0)))
    policy = CostAwarePolicy(costs, prior=(0.97,), use_confidence=False)
    lengths = []
    for _ in range(12):
        lengths.append(policy.draft_length(20))
        policy.update(lengths[-1], lengths[-1], True)
    assert lengths[0] == 2
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 10


def test_a_measured_prior_opens_with_more() -> None:
    costs = _costs(0.44, ((1, 1.0), (2, 1.55), (4, 1.65), (13, 2.0)))
    policy = CostAwarePolicy(costs, prior=(0.97,), use_confidence=False, prior_is_measured=True)
    assert policy.draft_length(20) == 7
    # A draft with too low an acceptance has no best length, so the account opens with the usual balance.
    assert CostAwarePolicy(costs, prior=(0.1,), prior_is_measured=True).state()["balance"] == 1.5
    drafting = DraftingConfig(acceptance=(0.97,))
    assert make_policy(drafting, costs).state()["balance"] == 4.0
    assert make_policy(DraftingConfig(), costs).state()["balance"] == 1.5


def test_probes_are_rare_and_stop_where_nothing_is_to_be_spent() -> None:
    costs = _costs(0.5, ((1, 1.0), (2, 1.1)))
    for exploration, most in ((0.01, 0.005), (0.0, 0.0)):
        policy = CostAwarePolicy(costs, exploration=exploration)
        _simulate(policy, costs, _always(0.0), calls=10)
        asked = [policy.draft_length(40)]
        for _ in range(3000):
            policy.update(asked[-1], 0, True)
            asked.append(policy.draft_length(40))
        assert sum(asked) * 0.6 / len(asked) <= most + 1e-3
        assert (sum(asked) > 0) == (exploration > 0)
        assert set(asked) <= {0, 1}


def test_earlier_gains_pay_for_probes() -> None:
    policy = CostAwarePolicy(FLAT)
    policy.budget.drafting.balance = 0.0
    assert policy.draft_length(20) == 0
    policy.budget.drafting.savings = 10.0
    assert policy.draft_length(20) == 1
    policy.update(1, 0, True)
    assert policy.state()["balance"] == pytest.approx(0.0, abs=0.01)
    assert policy.draft_length(20) == 0  # but not another one right away
    assert policy.budget.drafting.savings == pytest.approx(10.0 - 0.35, abs=0.02)


def test_a_probe_is_long_where_that_costs_little_more() -> None:
    # On the stairs a pass over n = 3 costs no more than one over n = 2.
    stairs = _costs(0.05, ((1, 1.0), (2, 1.6), (3, 1.6), (4, 2.2)))
    for costs, expected in ((stairs, 2), (_costs(0.5, V_STEEP), 1)):
        policy = CostAwarePolicy(costs)
        # The balance is empty: only the savings can pay for a probe.
        policy.budget.drafting.balance, policy.budget.drafting.savings = 0.0, 10.0
        assert policy.draft_length(20) == expected


# --- Cost-aware: lookup ---------------------------------------------------------------------------


def _look_up(policy: CostAwarePolicy, match: Match, accepted: int, rounds: int) -> list[int]:
    """Return the lookup lengths of some rounds with the same match, with at most `accepted` tokens right."""
    lengths = []
    for _ in range(rounds):
        assert policy.draft_length(30, match) == 0
        lengths.append(policy.lookup_length(0, match, 30))
        policy.update(0, min(accepted, lengths[-1]), False, lengths[-1], match)
    return lengths


def test_lookup_alone_learns_what_copies_are_worth() -> None:
    policy = CostAwarePolicy(_costs(0.3, V_STEEP), self_drafts=False, lookup=True)
    assert policy.needs_probability is False
    long = _look_up(policy, Match(12, 4), accepted=12, rounds=60)
    assert long[-1] == 12
    # Each n-gram length has its own estimate.
    short = _look_up(policy, Match(12, 1), accepted=0, rounds=400)
    assert sum(short[50:]) <= 0.05 * 350
    assert policy.lookup_length(0, Match(12, 4), 30) == 12
    assert policy.lookup_length(0, Match(12, 4), 5) <= 5
    assert policy.lookup_length(0, Match(2, 4), 30) == 2
    assert policy.lookup_length(0, NO_MATCH, 30) == policy.lookup_length(0, Match(12, 4), 0) == 0


def test_lookup_stops_before_a_cliff() -> None:
    policy = CostAwarePolicy(_costs(0.3, V_CLIFF), self_drafts=False, lookup=True)
    assert _look_up(policy, Match(12, 2), accepted=2, rounds=60)[-1] == 2


def test_longer_matches_count_for_more() -> None:
    policy = _rich(CostAwarePolicy(_costs(0.3, V_STEEP), self_drafts=False, lookup=True))
    policy.draft_length(30)
    lengths = [policy.lookup_length(0, Match(12, n), 30) for n in (1, 2, 3, 4, 9)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[3] == lengths[4]


def test_lookup_and_self_draft_are_weighed() -> None:
    policy = _rich(CostAwarePolicy(FLAT, lookup=True))
    for _ in range(40):  # copies of 4-grams are right, those of 1-grams never; the draft is right half the time
        for match in (Match(12, 4), Match(12, 1)):
            policy.draft_length(30, match)
            policy.update(0, 12 if match.length == 4 else 0, False, 12, match)
        policy.draft_length(30)
        policy.update(2, 1, True)
    policy.draft_length(30)
    # The more rounds have a good copy, the higher the rate that a self-drafted token must not lower.
    assert policy.state()["tokens_per_plain_step"] > 1.2 * CostAwarePolicy(FLAT).state()["tokens_per_plain_step"]
    assert policy.draft_length(30, Match(12, 4)) == 0
    assert policy.lookup_length(0, Match(12, 4), 29) == 12
    assert _rich(policy).draft_length(30, Match(12, 1)) > 0
    # After a sure token a good match takes over from the draft; after an unlikely one it does not pay.
    policy.draft_length(30)
    assert not policy.keep_drafting(1, 0.999, Match(12, 4))
    assert policy.lookup_length(1, Match(12, 4), 28) == 12
    for _ in range(40):
        policy.draft_length(30)
        policy.keep_drafting(1, 0.001)
        policy.update(1, 0, False)
    policy.draft_length(30)
    assert not policy.keep_drafting(1, 0.001, Match(12, 4))
    assert policy.lookup_length(1, Match(12, 4), 28) == 0


def test_a_good_copy_takes_over_from_a_draft_worth_going_on_with() -> None:
    policy = _rich(CostAwarePolicy(FLAT, prior=(0.9,), lookup=True))
    for _ in range(20):
        policy.update(0, 12, False, 12, Match(12, 4))
    policy.replan()
    for match, goes_on in ((NO_MATCH, True), (Match(12, 4), False)):
        policy.draft_length(30)
        assert policy.keep_drafting(1, 0.999, match) == goes_on


def test_looked_up_tokens_after_a_rejected_draft_teach_nothing() -> None:
    policy = CostAwarePolicy(FLAT, lookup=True)
    policy.draft_length(20)
    policy.update(2, 1, True, looked_up=3, match=Match(3, 2))
    seen, accepted = policy.copies.seen[1], policy.copies.accepted[1]
    assert seen == accepted == [0.0] * 4
    policy.update(2, 4, True, looked_up=3, match=Match(3, 2))
    assert (seen[0], accepted[0]) == (1.0, 1.0) and (seen[1], accepted[1]) == pytest.approx((1.95, 0.95))


# --- Cost-aware: state ----------------------------------------------------------------------------


def _experienced(seed: int = 0) -> CostAwarePolicy:
    policy = CostAwarePolicy(FLAT, lookup=True)
    _simulate(policy, FLAT, _mixed(0.98, 0.3, 0.7), calls=5, seed=seed)
    _look_up(policy, Match(12, 4), accepted=5, rounds=5)
    return policy


def test_the_same_reports_lead_to_the_same_state() -> None:
    assert _experienced().state() == _experienced().state() != _experienced(1).state()


def test_a_new_draft_takes_over_what_does_not_depend_on_it() -> None:
    old, fresh = _experienced(), CostAwarePolicy(FLAT, lookup=True)
    before = fresh.state()
    new = CostAwarePolicy(FLAT, lookup=True)
    old.replan()  # as at the beginning of a round
    new.take_over(old)

    def of_lookup_and_accounts(state: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in state.items() if "lookup" in key or "balance" in key}

    assert of_lookup_and_accounts(new.state()) == of_lookup_and_accounts(old.state()) != of_lookup_and_accounts(before)
    # It still knows nothing about its own draft.
    depths = [key for key in before if key.startswith("acceptance_")]
    assert depths and [new.state()[key] for key in depths] == [before[key] for key in depths]
    assert [old.state()[key] for key in depths] != [before[key] for key in depths]
    # From then on it is independent of the old one.
    known = old.state()
    _simulate(new, FLAT, _mixed(0.98, 0.3, 0.7), calls=2)
    _look_up(new, Match(12, 4), accepted=0, rounds=5)
    assert old.state() == known
    shorter = CostAwarePolicy(FLAT, max_length=3)
    shorter.take_over(old)
    assert shorter.draft_length(20) <= 3
