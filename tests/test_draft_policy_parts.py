"""Parts of the cost-aware policy, each in isolation: prices, estimates, budget and plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ssd_generation.config import Costs
from ssd_generation.drafting.policy import NO_MATCH, Match
from ssd_generation.drafting.policy.base import LEAD
from ssd_generation.drafting.policy.budget import (
    Account,
    Budget,
    affordable_copy,
    affordable_draft,
    copying_cap,
    drafting_cap,
    gain_per_token,
    opening_balance,
)
from ssd_generation.drafting.policy.estimates import (
    NO_CONFIDENCE,
    ConfidenceEstimates,
    CopyEstimates,
    DepthEstimates,
    confidence_bin,
    shrunk,
)
from ssd_generation.drafting.policy.paths import Path, Paths
from ssd_generation.drafting.policy.plan import (
    Plan,
    best_copy,
    best_length,
    best_probe,
    draft_length,
    expectations,
    make_plan,
    rate_with_copies,
    thresholds,
    worth_of_drafting,
)
from ssd_generation.drafting.policy.prices import LONGEST_COPY, Prices

LONGEST = 8


def _prices(draft: float, passes: Sequence[float]) -> Prices:
    """Return prices of draft steps and of passes over 1, 2, 4, 8 … tokens."""
    verify = [(2**i, price) for i, price in enumerate(passes)]
    return Prices.of(Costs(plain_step=1.0, draft_step=draft, verify=verify), LONGEST)


some_prices = st.builds(_prices, st.floats(0.02, 1.2), st.lists(st.floats(0.9, 5.0), min_size=1, max_size=5))
rising_prices = st.builds(
    _prices, st.floats(0.02, 1.2), st.lists(st.floats(1.0, 5.0), min_size=1, max_size=5).map(sorted)
)
shares = st.floats(0.0, 1.0)
some_acceptance = st.lists(shares, min_size=LONGEST, max_size=LONGEST)
rates = st.floats(1.0, 4.0)
some_gains = st.lists(shares, min_size=LONGEST_COPY, max_size=LONGEST_COPY).map(
    lambda acceptance: [tokens - 1.0 for tokens in expectations(acceptance)[1]]
)


def _plan(prices: Prices, acceptance: Sequence[float]) -> Plan:
    return make_plan(prices, acceptance, [0.5] * 9)


# --- Prices ---------------------------------------------------------------------------------------


def test_prices_are_in_plain_steps() -> None:
    prices = Prices.of(Costs(plain_step=0.5, draft_step=0.1, verify=[(1, 0.6), (3, 1.0)]), 2)
    assert prices.draft == 0.2
    assert prices.verify[1:4] == pytest.approx([1.2, 1.6, 2.0])
    assert len(prices.verify) == 1 + 1 + 2 + LONGEST_COPY
    assert prices.rounds == pytest.approx([1.0, 0.2 + 1.6, 2 * 0.2 + 2.0])
    # Without a draft the last pass is a plain step, whatever verifying one token takes.
    assert [prices.last_pass(depth) for depth in (0, 1, 2)] == pytest.approx([1.0, 1.6, 2.0])


# --- Estimates ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0, 50), shares), min_size=1, max_size=9),
    st.floats(0.1, 8),
    st.floats(1, 16),
)
def test_shrunk_means_are_probabilities_between_prior_and_observation(
    counts: list[tuple[float, float, float]], expected: float, weight: float
) -> None:
    priors = [prior for prior, _, _ in counts]
    seen = [tried for _, tried, _ in counts]
    accepted = [tried * share for _, tried, share in counts]
    found = shrunk(priors, seen, accepted, expected, weight)
    assert all(-1e-9 <= share <= 1.0 + 1e-9 for share in found)
    nothing = [0.0] * len(counts)
    assert shrunk(priors, nothing, nothing, expected, weight) == pytest.approx(priors)
    # One more acceptance never lowers an estimate.
    more = shrunk(priors, [seen[0] + 1, *seen[1:]], [accepted[0] + 1, *accepted[1:]], expected, weight)
    assert all(after >= before - 1e-9 for before, after in zip(found, more, strict=True))


def test_failures_at_one_depth_lower_the_others() -> None:
    estimates = DepthEstimates([0.9, 0.8, 0.7])
    assert estimates.estimate() == pytest.approx([0.9, 0.8, 0.7])
    estimates.observe(drafted=1, kept=0)
    # Twice the failures that the prior (worth 8 observations) expects; the depths not reached are scaled alike.
    assert estimates.estimate() == pytest.approx([16 * 0.8 / 17, 0.6, 0.4])
    assert estimates.seen[1:] == [0.0, 0.0]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=60))
def test_depths_judge_one_token_more_than_was_accepted(drafts: list[tuple[int, int]]) -> None:
    estimates = DepthEstimates([0.5] * 3)
    for drafted, kept in drafts:
        before = estimates.seen
        estimates.observe(drafted, min(kept, drafted))
        judged = [i < min(kept + 1, drafted) for i in range(3)]
        assert estimates.seen == pytest.approx([0.98 * tried + new for tried, new in zip(before, judged, strict=True)])
        assert estimates.seen == sorted(estimates.seen, reverse=True)
        assert all(right <= tried for tried, right in zip(estimates.seen, estimates.accepted, strict=True))
    assert all(tried <= 1 / (1 - 0.98) for tried in estimates.seen)


@pytest.mark.parametrize(("probability", "place"), [(0.0, 0), (0.29, 0), (0.3, 1), (0.94, 5), (0.995, 8), (1.0, 8)])
def test_confidence_bins(probability: float, place: int) -> None:
    assert confidence_bin(probability) == place


def test_a_token_of_unknown_confidence_is_not_counted() -> None:
    estimates = ConfidenceEstimates()
    estimates.observe([3, NO_CONFIDENCE, 4, 5], kept=2)
    assert [place for place, tried in enumerate(estimates.seen) if tried] == [3, 4]
    assert (estimates.accepted[3], estimates.accepted[4]) == (1.0, 0.0)
    untouched = ConfidenceEstimates().estimate()
    assert untouched == sorted(untouched)


def test_copies_of_each_ngram_length_have_their_own_gains() -> None:
    estimates = CopyEstimates()
    before = estimates.gains()
    assert len(before) == 4 and all(len(gains) == LONGEST_COPY + 1 and gains[0] == 0.0 for gains in before)
    assert [gains[1] for gains in before] == pytest.approx([0.20, 0.40, 0.55, 0.65])
    untouched = copy.deepcopy(estimates)
    for _ in range(40):
        estimates.observe(Match(12, 7), copied=12, right=12)
    after = estimates.gains()
    assert after[:3] == before[:3] and after[3][12] > 9.5 > 4.0 > before[3][12]
    assert untouched.gains() == before
    assert [estimates.row(match) for match in (NO_MATCH, Match(1, 1), Match(1, 3), Match(1, 4), Match(1, 9))] == [
        *(0, 0, 2, 3, 3)
    ]


def test_offers_are_counted_by_length() -> None:
    estimates = CopyEstimates()
    for _ in range(400):
        estimates.notice(NO_MATCH)
        estimates.notice(Match(3, 2))
    assert sum(estimates.offers) == pytest.approx(20.0)
    assert estimates.offers[2] > estimates.offers[0] > 9.0 and estimates.offers[1] < 1e-6


# --- Budget ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(-3, 20), max_size=50), st.floats(0, 10))
def test_an_account_saves_what_is_beyond_its_cap(amounts: list[float], cap: float) -> None:
    account = Account(0.0, cap)
    for amount in amounts:
        before = account.balance + account.savings
        account.book(amount)
        assert account.balance <= cap and 0.0 <= account.savings <= 50.0
        if account.savings < 50.0:
            assert account.balance + account.savings == pytest.approx(before + amount, abs=1e-9)


@given(st.floats(-2, 3), st.floats(0, 10), st.floats(0, 5), st.integers(0, 3), st.integers(0, 3))
def test_a_probe_waits_and_is_paid_for(balance: float, savings: float, price: float, wait: int, waited: int) -> None:
    account = Account(balance)
    account.savings, account.wait, account.waited = savings, wait, waited
    paid = account.pay_probe(price)
    assert paid == (waited >= wait and price - balance <= savings)
    assert account.balance + account.savings == pytest.approx(balance + savings)  # the sum is conserved
    if paid:
        assert account.balance >= price - 1e-9 and account.savings >= 0.0 and account.waited == 0
    else:
        assert (account.balance, account.savings, account.waited) == (balance, savings, waited)


def test_each_draft_in_vain_doubles_the_wait() -> None:
    account = Account(0.0)
    waits = []
    for _ in range(9):
        account.drafted(right=False, pays=True)
        waits.append(account.wait)
    assert waits == [2, 4, 8, 16, 32, 64, 128, 128, 128]
    account.drafted(right=True, pays=False)
    assert account.wait == 32
    account.drafted(right=True, pays=True)
    assert account.wait == 0
    for _ in range(3):  # rows of one round
        account.stand_still(0.25)
    assert (account.balance, account.waited) == (0.0, 1)  # so that all of them decide alike
    account.end_round()
    account.end_round()
    account.stand_still(0.25)
    assert (account.balance, account.waited) == (0.25, 2)


def test_all_rows_of_a_round_share_its_probe() -> None:
    account = Account(1.0)
    account.savings, account.wait = 5.0, 2
    assert not account.pay_probe(1.5)
    account.waited = 2
    assert [account.pay_probe(price) for price in (1.5, 1.5, 1.2, 1.6)] == [True, True, True, False]
    assert account.savings == 4.5
    account.end_round()
    assert not account.pay_probe(1.5)


def test_what_an_account_opens_with_and_may_have() -> None:
    assert [opening_balance(price) for price in (1.0, 2.0, 3.5, 9.0)] == [1.5, 1.5, 2.5, 4.0]
    assert [drafting_cap(price) for price in (1.0, 3.0)] == [3.0, 6.0]
    assert [copying_cap(price) for price in (1.0, 3.0)] == [3.0, 5.0]


@given(some_prices, st.floats(-1, 12), st.integers(0, LONGEST), st.integers(0, LONGEST_COPY))
def test_what_is_affordable_is_the_most_that_the_balance_pays(
    prices: Prices, balance: float, longest: int, copied: int
) -> None:
    drafted = affordable_draft(balance, longest, prices)
    assert 0 <= drafted <= longest
    assert drafted == 0 or prices.rounds[drafted] - 1.0 <= balance
    assert all(prices.rounds[k] - 1.0 > balance for k in range(drafted + 1, longest + 1))
    for depth in (0, longest):
        extra = [price - prices.last_pass(depth) for price in prices.verify[1 + depth :]]
        count = affordable_copy(balance, copied, extra)
        assert 0 <= count <= copied
        assert count == 0 or extra[count] <= balance + 1e-9
        assert all(extra[m] > balance - 1e-9 for m in range(count + 1, copied + 1))
    assert affordable_copy(balance, -1, prices.verify) == 0


@pytest.mark.parametrize(
    ("right", "rows", "advance", "expected"),
    [
        (3, 1, None, 1.0),
        (6, 4, None, 0.25),
        (0, 0, None, 1.0),
        (6, 4, 3, 2 / 6),  # the slowest row is two tokens further than after a plain step
        (6, 4, 1, 0.0),
        (2, 4, 9, 1.0),  # never more than was accepted
        (0, 4, 3, 0.25),
    ],
)
def test_a_batch_gains_by_its_slowest_row(right: int, rows: int, advance: int | None, expected: float) -> None:
    assert gain_per_token(right, rows, advance) == expected


def test_in_a_packed_pass_a_copy_costs_what_its_row_adds() -> None:
    prices = _prices(0.5, (1.0, 1.2, 2.0))  # passes over 1, 2 and 4 tokens of each row
    budget = Budget(prices, 0.01)
    budget.begin_round([20, 21, 20, 22], 0)
    assert budget.copy_prices(0, 3) == pytest.approx([0.0, 0.2, 0.6, 1.0]), "as wide for all rows as for this one"
    budget.begin_round([20, 21, 20, 22], 4)
    assert budget.copy_prices(0, 5) == pytest.approx([0.0, 0.2, 0.2, 0.2, 0.2, 0.6])
    budget.pay_copy(1, 0.2)
    assert budget.copy_prices(0, 4) == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.4]), "the first copy has paid"
    assert budget.left_for_copies == pytest.approx(budget.copying.balance - 0.2)
    # Four tokens were copied, one of them right, and the slowest row came two tokens further.
    before = budget.copying.balance
    budget.begin_row(False)
    for copied, right in ((1, 0), (3, 1)):
        budget.report(0, 0, copied, right)
    budget.begin_round([22, 22, 21, 23], 4)
    budget.settle(False)
    assert budget.copying.balance == pytest.approx(before + 0.0 - 0.2)
    assert budget.share == 1.0


def test_rows_ahead_draft_as_far_as_the_slowest_row_gains() -> None:
    budget, lengths = Budget(_prices(0.5, (1.0, 1.2)), 0.01), [20, 20]
    assert budget.lead == LEAD
    for _ in range(40):
        budget.begin_round(lengths, 2)
        lengths = [lengths[0] + 1, lengths[1] + 4]
    assert budget.lead == 0, "it gains nothing"
    for _ in range(40):
        budget.begin_round(lengths, 2)
        lengths = [lengths[0] + 3, lengths[1] + 3]
    assert budget.lead > LEAD


@given(
    some_prices,
    st.sampled_from([0.0, 0.02, 0.2]),
    st.lists(st.tuples(st.integers(0, LONGEST), st.integers(0, LONGEST), st.booleans()), max_size=120),
)
def test_no_round_that_the_budget_pays_for_loses_more_than_it_opened_with(
    prices: Prices, exploration: float, rounds: list[tuple[int, int, bool]]
) -> None:
    budget = Budget(prices, exploration)
    lost = 0.0
    for count, (wish, kept, pays) in enumerate(rounds, start=1):
        budget.begin_row(pays)
        drafted = affordable_draft(budget.drafting.balance, wish, prices)
        if drafted:
            kept = min(kept, drafted)
            budget.report(drafted, kept, 0, 0)
            lost += prices.rounds[drafted] - 1.0 - kept
        else:
            budget.drafting.stand_still(budget.income)
            budget.report(0, 0, 0, 0)
        assert lost <= 1.5 + budget.income * count + 1e-9
    budget.settle(pays=True)
    assert -1e-9 <= budget.drafting.balance <= budget.drafting.cap


def test_rows_of_a_round_are_booked_once_when_the_next_begins() -> None:
    prices = _prices(0.25, (1.0, 1.5))
    budget = Budget(prices, 0.0)
    for _ in range(2):
        budget.begin_row(pays=True)
    budget.report(drafted=1, kept=1, copied=0, right=0)
    budget.report(drafted=1, kept=0, copied=2, right=0)
    assert budget.drafting.balance == 1.5
    budget.begin_row(pays=True)
    assert budget.drafting.balance == 1.5 + 0.5 - (prices.rounds[1] - 1.0)
    # One of two rows copied two tokens, and the pass was wider for both; after a rejected draft they were not judged.
    assert budget.copying.balance == 0.5 - (prices.verify[4] - prices.verify[2]) and budget.copying.wait == 0
    assert budget.share == 0.95
    booked = budget.drafting.balance
    budget.settle(pays=True)
    assert budget.drafting.balance == booked


def test_a_budget_goes_its_own_way_after_taking_over() -> None:
    old, new = Budget(_prices(0.2, (1.0, 1.5)), 0.1), Budget(_prices(0.2, (1.0, 3.0)), 0.1)
    cap = new.copying.cap
    old.drafting.book(1.0)
    new.begin_row(pays=True)
    new.report(2, 0, 0, 0)  # about its own earlier draft: dropped
    new.take_over(old)
    new.settle(pays=True)
    assert new.drafting.balance == old.drafting.balance == 2.5 and new.copying.cap == cap != old.copying.cap
    new.drafting.book(-1.0)
    assert old.drafting.balance == 2.5


# --- Plan -----------------------------------------------------------------------------------------


@given(some_acceptance)
def test_expectations_are_sums_of_products(acceptance: list[float]) -> None:
    survival, tokens = expectations(acceptance)
    assert survival == pytest.approx([math.prod(acceptance[:k]) for k in range(LONGEST + 1)])
    assert tokens == pytest.approx([sum(survival[: k + 1]) for k in range(LONGEST + 1)])


@given(some_prices, some_acceptance, st.integers(0, LONGEST))
def test_the_best_length_is_that_of_the_best_rate(prices: Prices, acceptance: list[float], longest: int) -> None:
    tokens = expectations(acceptance)[1]
    best = best_length(tokens, prices.rounds, longest)
    assert 0 <= best <= longest
    rate = tokens[best] / prices.rounds[best]
    assert rate >= max(tokens[k] / prices.rounds[k] for k in range(longest + 1)) - 2e-9
    if all(tokens[k] <= prices.rounds[k] for k in range(1, longest + 1)):
        assert best == 0  # no draft if none can be faster


@given(some_prices, some_acceptance, st.lists(shares, min_size=LONGEST, max_size=LONGEST))
def test_more_acceptance_never_shortens_the_draft(
    prices: Prices, acceptance: list[float], towards_one: list[float]
) -> None:
    better = [a + (1.0 - a) * step for a, step in zip(acceptance, towards_one, strict=True)]
    worse_plan, better_plan = _plan(prices, acceptance), _plan(prices, better)
    assert better_plan.rate >= worse_plan.rate - 1e-9
    before, after = worse_plan.best, better_plan.best
    if after < before:  # only if both are equally good
        by_length = [better_plan.tokens[k] / prices.rounds[k] for k in (before, after)]
        assert by_length[0] == pytest.approx(by_length[1], rel=1e-8)


@given(some_prices, some_acceptance, st.integers(0, LONGEST), st.floats(0, 5))
def test_a_draft_is_never_longer_than_can_be_paid(
    prices: Prices, acceptance: list[float], affordable: int, offer: float
) -> None:
    plan = _plan(prices, acceptance)
    length = draft_length(plan, prices.rounds, affordable, offer)
    assert 0 <= length <= affordable
    free = draft_length(plan, prices.rounds, affordable, 0.0)
    assert length in (0, free)  # an offer replaces the draft, or makes no difference
    assert draft_length(plan, prices.rounds, affordable, math.inf) == 0
    if affordable >= plan.best:
        assert free in (0, plan.best)
    if free:
        assert plan.tokens[free] > prices.rounds[free]
    assert plan.pays == (plan.best > 0)


# At acceptance 0 further tokens gain nothing: then no survival suffices, even if wider passes cost less.
@given(
    some_prices,
    st.lists(st.floats(0.01, 1.0), min_size=LONGEST, max_size=LONGEST),
    st.integers(1, LONGEST - 1),
    shares,
    rates,
)
def test_drafting_on_is_worth_something_above_the_threshold(
    prices: Prices, acceptance: list[float], depth: int, survival: float, rate: float
) -> None:
    worth = worth_of_drafting(survival, depth, acceptance, prices, rate)
    limits = thresholds(acceptance, prices, rate)
    assert len(limits) == LONGEST
    assume(abs(worth) > 1e-9)
    assert (worth > 0.0) == (survival > limits[depth])
    # A surer draft is worth more; against a better alternative it is worth less.
    assert worth_of_drafting(min(1.0, survival + 0.1), depth, acceptance, prices, rate) >= worth
    if min(b - a for a, b in zip(prices.verify[2:], prices.verify[3:], strict=False)) >= 0.0:
        assert worth_of_drafting(survival, depth, acceptance, prices, rate + 0.5) <= worth


def test_at_the_longest_draft_nothing_is_worth_drafting() -> None:
    prices = _prices(0.1, (1.0,))
    assert worth_of_drafting(1.0, LONGEST, [1.0] * LONGEST, prices, 1.0) == -math.inf


@given(some_prices, some_gains, shares, st.integers(0, LONGEST), st.integers(0, LONGEST_COPY), rates)
def test_the_best_copy_has_the_most_value(
    prices: Prices, gains: list[float], weight: float, depth: int, longest: int, rate: float
) -> None:
    extra = [price - prices.last_pass(depth) for price in prices.verify[1 + depth :]]
    count, value = best_copy(gains, weight, longest, extra, rate)
    values = [weight * gains[m] - rate * extra[m] for m in range(1, longest + 1)]
    assert 0 <= count <= longest
    assert value == max([0.0, *values]) and (count == 0 or values[count - 1] == value)
    # The more likely it is to be reached, the longer the copy.
    surer, worth = best_copy(gains, min(1.0, weight + 0.2), longest, extra, rate)
    assert worth >= value and surer >= count


@given(rising_prices, some_acceptance, some_gains, shares)
def test_copies_are_counted_in_where_they_better_the_rate(
    prices: Prices, acceptance: list[float], gains: list[float], share: float
) -> None:
    tokens, price = expectations(acceptance)[1][2], prices.rounds[2]
    before = tokens / price
    never = rate_with_copies(tokens, price, prices, [gains] * 4, [1.0, 0.0, 0.0, 0.0, 0.05], share, before)
    assert never == before  # too few to count
    offers = [1.0, 0.0, 2.0, 0.0, 3.0]
    useless = [[0.0] * (LONGEST_COPY + 1)] * 4
    assert rate_with_copies(tokens, price, prices, useless, offers, share, before) == pytest.approx(before)
    assert rate_with_copies(tokens, price, prices, [gains] * 4, offers, share, before) >= before - 1e-9


def test_a_plan_is_never_worse_than_plain_decoding() -> None:
    prices = _prices(0.9, (1.0, 2.0, 3.0))
    plan = _plan(prices, [0.1] * LONGEST)
    assert (plan.best, plan.rate, plan.pays) == (0, 1.0, False)
    good = [0.9] * LONGEST
    assert _plan(_prices(0.1, (1.0, 1.0)), good).best == LONGEST
    assert make_plan(_prices(0.1, (1.0, 1.0)), good, [0.5] * 9, self_drafts=False).best == 0


@given(some_prices)
def test_a_probe_tells_most_for_its_price(prices: Prices) -> None:
    def worth(count: int) -> float:
        judged = sum(0.75**i for i in range(count))
        return judged / max(prices.rounds[count] - 1.0, 1e-6)

    best = best_probe([0.75] * LONGEST, prices.rounds[1:], 1e-6)
    assert 1 <= best <= LONGEST
    assert worth(best) * 1.0011 >= max(worth(count) for count in range(1, LONGEST + 1))


# --- Paths ----------------------------------------------------------------------------------------


def _drafted(path: Path, place: int, acceptance: float) -> None:
    path.bins.append(place)
    path.survival *= acceptance


def test_paths_tell_rows_apart_by_their_order() -> None:
    paths, by_depth = Paths(), [1.0, 0.5, 0.25, 0.125]
    for place, acceptance in ((1, 0.9), (2, 0.2), (3, 0.8)):
        path = paths.at(1, by_depth)
        _drafted(path, place, acceptance)
        if place != 2:
            paths.continues(path)
    first, third = paths.at(2, by_depth), paths.at(2, by_depth)
    assert (first.bins, third.bins, third.survival) == ([1], [3], 0.8)
    _drafted(first, 4, 0.5)
    assert first.survival == 0.45
    unknown = paths.at(2, by_depth)  # no other row continued
    assert (unknown.bins, unknown.survival) == ([], 0.5)
    # Reported in order; the policy need not have been queried about the last token.
    assert [paths.report(drafted) for drafted in (3, 1, 2)] == [[1, 4], [2], [3]]
    assert paths.report(1) == ()
    paths.begin()
    assert paths.report(0) == ()


def test_a_row_that_drafted_something_else_is_not_taken_for_another() -> None:
    paths = Paths()
    _drafted(paths.at(1, [1.0]), 5, 0.9)
    assert paths.report(4) == ()
    assert paths.report(1) == [5]


def test_the_survival_of_a_lone_row_is_that_of_its_path() -> None:
    paths, by_depth, acceptance = Paths(), [1.0, 0.5, 0.25], [0.5, 0.5]
    assert paths.survival(2, by_depth, acceptance) == 0.25
    _drafted(paths.at(1, by_depth), 8, 0.9)
    assert paths.survival(0, by_depth, acceptance) == 1.0
    assert paths.survival(1, by_depth, acceptance) == 0.9
    assert paths.survival(2, by_depth, acceptance) == 0.45  # the second token was not queried
    paths.at(1, by_depth)
    assert paths.survival(2, by_depth, acceptance) == 0.25  # its row is unknown
