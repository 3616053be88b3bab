r"""Draft lengths from acceptances and prices: pure functions, numbers in, a decision out.

With the acceptance $a_i$ of the drafted token at depth i, given that those before it were accepted, a round of k
self-drafted and m looked-up tokens gains and costs (Leviathan et al., arXiv 2211.17192, equation 1 and theorem 3.8, for
an acceptance that varies with depth and a verification pass that is not free)

$$E(k, m) = 1 + \sum_{j=1}^{k+m} \prod_{i \le j} a_i, \qquad C(k, m) = k \, c + v(1 + k + m)$$

with the price c of a draft step and v(n) of a verification pass over n tokens. C(0, 0) is a plain step. Tokens per
plain step in the long run are greatest if each round takes what maximises $E - λ C$, where λ is the best attainable
rate (renewal-reward theorem: Ross, Stochastic Processes, theorem 3.6.1; ratios: Dinkelbach, "On nonlinear fractional
programming", Management Science 13, 1967).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .prices import LONGEST_COPY, Prices

__all__ = [
    "Plan",
    "best_copy",
    "best_length",
    "best_probe",
    "draft_length",
    "expectations",
    "make_plan",
    "rate_with_copies",
    "thresholds",
    "worth_of_drafting",
]

# Smallest number of lookup's offers for which rounds with such a match are counted (discounted counts, 20 in all).
_LEAST_OFFERS = 0.1


def expectations(acceptance: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return, by draft length k from 0 on, the probability that all k tokens are accepted, and the tokens E(k, 0)."""
    survival, tokens = [1.0], [1.0]
    for accepted in acceptance:
        survival.append(survival[-1] * accepted)
        tokens.append(tokens[-1] + survival[-1])
    return survival, tokens


def best_length(tokens: Sequence[float], rounds: Sequence[float], longest: int) -> int:
    """Return the fixed length up to `longest` with the most tokens per plain step; 0 if none beats plain decoding.

    Args:
        tokens: E(k, 0), by k.
        rounds: C(k, 0), by k.
        longest: length of the longest draft.
    """
    best, rate = 0, 1.0 + 1e-9
    for k in range(1, longest + 1):
        if tokens[k] > rate * rounds[k]:
            best, rate = k, tokens[k] / rounds[k]
    return best


def best_probe(acceptance: Sequence[float], prices: Sequence[float], least: float) -> int:
    """Return the number of draft tokens, ≥ 1, with the most judged tokens for its price.

    A token is judged if those before it were accepted.

    Args:
        acceptance: acceptance by depth, of a good draft.
        prices: price by number of tokens, from 1 on; a plain step, 1.0, is subtracted from it.
        least: smallest difference, > 0; any smaller one counts as this.
    """
    best, most = 1, 0.0
    judged, survival = 0.0, 1.0
    for count, (accepted, price) in enumerate(zip(acceptance, prices, strict=True), start=1):
        judged += survival
        survival *= accepted
        worth = judged / max(price - 1.0, least)
        if worth > most * 1.001:
            best, most = count, worth
    return best


def thresholds(acceptance: Sequence[float], prices: Prices, rate: float) -> list[float]:
    r"""Return, by depth d, the survival above which further drafting pays.

    With the survival s of what was drafted, the product of its acceptances, some number j of further tokens pays if
    $s \sum_{i \le j} \prod a > λ (j c + v(1 + d + j) - v(1 + d))$. All j are considered, so a plateau of v is used and
    a cliff avoided.

    Args:
        acceptance: acceptance by depth, up to that of the longest draft.
        prices: prices of a draft step and verification.
        rate: λ.
    """
    draft, verify, found = prices.draft, prices.verify, [0.0]
    for depth in range(1, len(acceptance)):
        gain, product, threshold, last = 0.0, 1.0, math.inf, verify[1 + depth]
        for i in range(depth, len(acceptance)):
            product *= acceptance[i]
            gain += product
            needed = (i - depth + 1) * draft + verify[2 + i] - last
            if needed < threshold * gain:
                threshold = needed / gain
        found.append(rate * threshold)
    return found


def worth_of_drafting(survival: float, depth: int, acceptance: Sequence[float], prices: Prices, rate: float) -> float:
    """Return how much more E − λ C is if drafting continues than if it stops here: the most over all lengths.

    Args:
        survival: survival of the tokens drafted so far.
        depth: number of these tokens, ≥ 1.
        acceptance: acceptance by depth, up to that of the longest draft.
        prices: prices of a draft step and verification.
        rate: λ.
    """
    draft, verify = prices.draft, prices.verify
    best, gain, product, last = -math.inf, 0.0, survival, verify[1 + depth]
    for i in range(depth, len(acceptance)):
        product *= acceptance[i]
        gain += product
        best = max(best, gain - rate * ((i - depth + 1) * draft + verify[2 + i] - last))
    return best


def best_copy(
    gains: Sequence[float], weight: float, longest: int, prices: Sequence[float], rate: float
) -> tuple[int, float]:
    """Return the number of looked-up tokens with the most E − λ C, and how much more that is than without any.

    Args:
        gains: expected accepted tokens of a copy, by its length.
        weight: weight of these gains: survival of what was drafted before, times the share of a batch's rows that copy.
        longest: length of the longest copy.
        prices: what the target's pass costs more with a copy, by its length.
        rate: λ.
    """
    best, most = 0, 0.0
    for m in range(1, longest + 1):
        value = weight * gains[m] - rate * prices[m]
        if value > most:
            best, most = m, value
    return best, most


def rate_with_copies(
    tokens: float,
    price: float,
    prices: Prices,
    gains: Sequence[Sequence[float]],
    offers: Sequence[float],
    share: float,
    before: float,
) -> float:
    """Return the tokens per plain step of rounds that copy where that is better: one step of Dinkelbach's method.

    Args:
        tokens: E of a round that does not copy.
        price: C of such a round.
        prices: prices of verification.
        gains: expected accepted tokens of a copy, by n-gram length and length of the copy.
        offers: how often lookup offers nothing, and a match of each n-gram length.
        share: share of a batch's rows that copy, in rounds in which any does.
        before: previous rate λ, from which the step is taken.
    """
    rate = max(before, tokens / price)
    all_tokens, all_prices = tokens * offers[0], price * offers[0]
    last = prices.last_pass(0)
    copying = [verify - last for verify in prices.verify[1 : 2 + LONGEST_COPY]]
    for often, gain in zip(offers[1:], gains, strict=True):
        if often < _LEAST_OFFERS:
            continue
        m, value = best_copy(gain, share, LONGEST_COPY, copying, before)
        copies = m > 0 and 1.0 - rate + value > tokens - rate * price
        all_tokens += often * (1.0 + share * gain[m] if copies else tokens)
        all_prices += often * (prices.verify[1 + m] if copies else price)
    return all_tokens / all_prices


@dataclass(frozen=True)
class Plan:
    """Plan for some rounds: all that depends on estimates alone.

    Attributes:
        acceptance: acceptance of the token at each depth, a_1, a_2, …
        survival: probability that all of k drafted tokens are accepted, by k.
        tokens: E(k, 0), by k.
        calibrated: acceptance by confidence bin.
        gains: expected accepted tokens of a copy, by n-gram length and length of the copy; empty without lookup.
        best: the best fixed length of a self-draft, 0 for plain steps.
        rate: the best attainable rate, λ, in tokens per plain step, ≥ 1.
        thresholds: by depth, the survival above which further drafting pays.
    """

    acceptance: Sequence[float]
    survival: Sequence[float]
    tokens: Sequence[float]
    calibrated: Sequence[float]
    gains: Sequence[Sequence[float]]
    best: int
    rate: float
    thresholds: Sequence[float]

    @property
    def pays(self) -> bool:
        """True if self-drafting pays."""
        return self.best > 0


def make_plan(
    prices: Prices,
    acceptance: Sequence[float],
    calibrated: Sequence[float],
    *,
    self_drafts: bool = True,
    gains: Sequence[Sequence[float]] = (),
    offers: Sequence[float] = (),
    share: float = 1.0,
    before: float = 1.0,
) -> Plan:
    """Make a plan from estimates.

    Args:
        prices: prices of passes and rounds.
        acceptance: acceptance by depth, up to that of the longest draft.
        calibrated: acceptance by confidence bin.
        self_drafts: whether there is a draft alongside lookup.
        gains: as in `rate_with_copies`, like the next three; empty without lookup.
        offers: frequencies of lookup's offers.
        share: share of a batch's rows that copy.
        before: rate of the previous plan.
    """
    survival, tokens = expectations(acceptance)
    best = best_length(tokens, prices.rounds, len(acceptance)) if self_drafts else 0
    rate = tokens[best] / prices.rounds[best]
    if gains:
        rate = max(rate, rate_with_copies(tokens[best], prices.rounds[best], prices, gains, offers, share, before))
    rate = max(rate, 1.0)
    limits = thresholds(acceptance, prices, rate)
    return Plan(acceptance, survival, tokens, calibrated, gains, best, rate, limits)


def draft_length(plan: Plan, rounds: Sequence[float], affordable: int, offer: float) -> int:
    """Return the length of the self-draft to begin, 0 where a plain step or lookup alone is worth more.

    Args:
        plan: the plan.
        rounds: C(k, 0), by k.
        affordable: length of the longest draft that can be paid and is of use.
        offer: how much more lookup alone is worth than a plain step, in E − λ C.
    """
    best, rate = plan.best, plan.rate
    if best > affordable:
        # The rate of a draft that cannot be paid yet does not count: a shorter one that gains leads to it.
        best = best_length(plan.tokens, rounds, affordable)
        rate = min(rate, max(1.0, plan.tokens[best] / rounds[best]))
    return best if plan.tokens[best] - rate * rounds[best] > 1.0 - rate + offer else 0
