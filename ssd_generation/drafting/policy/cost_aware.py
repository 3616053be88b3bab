"""Draft length by costs: the draft with the most expected tokens per second, plain steps included."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from ...config import Costs
from ...support.bounds import DRAFT_LENGTH, SHARE
from .base import NO_MATCH, DraftPolicy, Match
from .budget import Budget, affordable_copy, affordable_draft, drafting_cap, opening_balance
from .estimates import NO_CONFIDENCE, ConfidenceEstimates, CopyEstimates, DepthEstimates, confidence_bin
from .paths import Paths
from .plan import Plan, best_copy, best_probe, draft_length, make_plan, worth_of_drafting
from .prices import LONGEST_COPY, Prices

__all__ = ["DEFAULT_PRIOR", "CostAwarePolicy"]

DEFAULT_PRIOR = (0.75,)

# Acceptance of a draft that is worth a probe.
_GOOD = 0.75
# Reports after which a plan is renewed, a draft without an accepted token counting twice; in the first rounds, one.
_REPORTS_OF_A_PLAN = 6
_FIRST_ROUNDS = 32


class CostAwarePolicy(DraftPolicy):
    """Policy that takes the draft with the most expected tokens per second, plain steps included.

    Estimates of the acceptance and measured prices make a plan, which a budget limits:

    - `draft_length`: the best of a plain step, lookup alone and self-drafting.
    - `keep_drafting`: drafting continues if any number of further tokens is worth its price, given the survival of the
      drafted tokens (the product of the acceptances, calibrated by the draft's own confidence).
    - `lookup_length`: the same comparison for looked-up tokens, whose draft step is free.

    Whatever the estimates say, it is never slower than plain decoding by more than the budget. No clock and no
    randomness: the same reports lead to the same decisions.

    Args:
        costs: costs of a plain step, a draft step and verification, for passes of as many rows.
        max_length: largest number of tokens self-drafted per round, 1 to 128.
        prior: acceptance by depth before any observation, each in [0, 1]; the last holds for all further depths.
        exploration: largest share of the time to spend on retrying what no longer paid, in [0, 1]. With 0, what does
            not pay is never tried again.
        self_drafts: whether there is a draft alongside lookup.
        lookup: whether there is prompt lookup.
        use_confidence: whether to use the draft's probabilities. On an accelerator reading them costs a
            synchronisation per token.
        prior_is_measured: whether the prior was measured on this model, so that a few rejections at the start are more
            likely bad luck than a bad draft.

    Attributes:
        prices: costs of passes and rounds, in plain steps.
        depths: estimates of the acceptance by depth.
        confidence: estimates of the acceptance by the draft's confidence.
        copies: estimates of the acceptance of looked-up tokens.
        budget: bound on what drafting may lose.
        plan: plan that follows from prices and estimates.
        judged: number of self-drafted tokens that were judged since the record was last taken.
        right: how many of these were accepted.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        costs: Costs,
        max_length: int = 12,
        prior: Sequence[float] = DEFAULT_PRIOR,
        exploration: float = 0.01,
        self_drafts: bool = True,
        lookup: bool = False,
        use_confidence: bool = True,
        prior_is_measured: bool = False,
    ) -> None:
        self.max_length = DRAFT_LENGTH.check("The draft length", max_length)
        priors = _by_depth(prior, self.max_length)
        self.exploration = SHARE.check("exploration", exploration)
        self.self_drafts = self_drafts
        self.lookup = lookup
        self.needs_probability = self_drafts and use_confidence

        self.prices = Prices.of(costs, self.max_length)
        self.depths, self.confidence, self.copies = DepthEstimates(priors), ConfidenceEstimates(), CopyEstimates()
        self.budget = Budget(self.prices, self.exploration)
        self.judged = self.right = 0
        self._paths = Paths()
        self._asked = self._stale = 0  # rows asked about; reports since the plan was made
        self._probe = best_probe([max(a, _GOOD) for a in priors], self.prices.rounds[1:], least=1e-6)
        copied = self.prices.verify[2 : 2 + LONGEST_COPY]
        self._copy_probe = best_probe([_GOOD] * LONGEST_COPY, copied, least=1e-3)
        self.replan(before=1.0)
        if prior_is_measured:
            self.budget.drafting.balance = opening_balance(self.prices.rounds[self.plan.best])

    def replan(self, before: float | None = None) -> None:
        """Renew the plan from the estimates; rounds do so automatically.

        Args:
            before: rate of the previous plan, by default that of the current one.
        """
        self._stale = 0
        self.plan: Plan = make_plan(
            self.prices,
            self.depths.estimate(),
            self.confidence.estimate(),
            self_drafts=self.self_drafts,
            gains=self.copies.gains() if self.lookup else (),
            offers=self.copies.offers,
            share=self.budget.share,
            before=self.plan.rate if before is None else before,
        )
        self.budget.drafting.cap = drafting_cap(self.prices.rounds[self.plan.best])

    def begin_round(self, lengths: Sequence[int], packed: int = 0) -> None:
        self.budget.begin_round(lengths, packed)

    @property
    def lead(self) -> int:
        return self.budget.lead

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        self.budget.begin_row(self.plan.pays)
        self._paths.begin()
        self._asked += 1
        if self._stale and (self._stale >= _REPORTS_OF_A_PLAN or self._asked < _FIRST_ROUNDS):
            self.replan()
        if self.lookup:
            self.copies.notice(match)
        if limit < 1 or not self.self_drafts:
            return 0
        rounds, account = self.prices.rounds, self.budget.drafting
        longest = min(self.max_length, limit)
        affordable = affordable_draft(account.balance, longest, self.prices)
        offer = self._best_copy(1.0, 0, match, limit)[1]
        length = draft_length(self.plan, rounds, affordable, offer)
        if length:
            return affordable if self.needs_probability else length
        account.stand_still(self.budget.income)
        probe = min(self._probe, longest)
        return probe if offer <= 0.0 and account.pay_probe(rounds[probe] - 1.0) else 0

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        plan = self.plan
        path = self._paths.at(depth, plan.survival)
        if self.needs_probability and probability == probability:  # not NaN
            place = confidence_bin(probability)
            acceptance = plan.calibrated[place]
        else:
            place = NO_CONFIDENCE
            acceptance = plan.acceptance[min(depth, self.max_length) - 1]
        path.bins.append(place)
        path.survival *= acceptance
        if depth >= self.max_length:
            return False
        if match.tokens and self.lookup:
            worth = worth_of_drafting(path.survival, depth, plan.acceptance, self.prices, plan.rate)
            continues = worth > 0.0 and worth > self._best_copy(path.survival, depth, match, LONGEST_COPY)[1]
        else:
            continues = not self.needs_probability or path.survival > plan.thresholds[depth]
        if continues:
            self._paths.continues(path)
        return continues

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        if not self.lookup or match.tokens < 1 or limit < 1:
            return 0
        depth = min(depth, self.max_length)
        survival = self._paths.survival(depth, self.plan.survival, self.plan.acceptance)
        count, _ = self._best_copy(survival, depth, match, limit)
        if not count:
            account = self.budget.copying
            account.stand_still(self.budget.income)
            probe = min(self._copy_probe, match.tokens, limit)
            price = self.budget.copy_prices(depth, probe)[probe]
            # Most matches are short; the account must not be empty when a longer one comes.
            if survival < 0.5 or account.balance < price * max(4 - match.length, 0) or not account.pay_probe(price):
                return 0
            count = probe
        if count:
            self.budget.pay_copy(count, self.budget.copy_prices(depth, count)[count])
        return count

    def _best_copy(self, survival: float, depth: int, match: Match, limit: int) -> tuple[int, float]:
        """Return `best_copy` for what lookup offers and its account can pay."""
        if not self.lookup or not match.tokens:
            return 0, 0.0
        longest = min(match.tokens, limit, LONGEST_COPY)
        prices = self.budget.copy_prices(depth, longest)
        longest = affordable_copy(self.budget.left_for_copies, longest, prices)
        gains, weight = self.plan.gains[self.copies.row(match)], self.budget.share * survival
        return best_copy(gains, weight, longest, prices, self.plan.rate)

    def update(
        self, drafted: int, accepted: int, reached_end: bool, looked_up: int = 0, match: Match = NO_MATCH
    ) -> None:
        drafted, copied = min(drafted, self.max_length), min(looked_up, LONGEST_COPY)
        kept = min(accepted, drafted)
        right = min(max(accepted - drafted, 0), copied)
        if drafted:
            self.judged += min(kept + 1, drafted)
            self.right += kept
            self.depths.observe(drafted, kept)
            if self.needs_probability:
                self.confidence.observe(self._paths.report(drafted), kept)
            self._stale += 1 if kept else 2
        if copied:
            if kept == drafted:
                self.copies.observe(match, copied, right)
            self._stale += 1 if right else 2
        self.budget.report(drafted, kept, copied, right)

    def take_record(self, least: int) -> tuple[int, int]:
        """Return how many self-drafted tokens were judged since the last call, and how many of them were accepted.

        Args:
            least: smallest number to return; fewer are left for the next call, and `(0, 0)` is returned.
        """
        if self.judged < least:
            return 0, 0
        record = self.judged, self.right
        self.judged = self.right = 0
        return record

    def state(self) -> dict[str, float]:
        self.budget.settle(self.plan.pays)
        plan = self.plan
        state: dict[str, float] = {"tokens_per_plain_step": plan.rate}
        if self.self_drafts:
            state["draft_length"] = float(plan.best)
            state["balance"] = self.budget.drafting.balance
            for depth, acceptance in enumerate(plan.acceptance, start=1):
                state[f"acceptance_{depth}"] = acceptance
        if self.lookup:
            state["lookup_balance"] = self.budget.copying.balance
            for length, gains in enumerate(plan.gains, start=1):
                state[f"lookup_acceptance_{length}"] = gains[1]
        return state

    def take_over(self, other: CostAwarePolicy) -> None:
        """Continue with what another policy of the same model learnt of lookup, and with its accounts.

        This policy retains what it knows of its own, new draft.
        """
        other.budget.settle(other.plan.pays)
        self.copies = copy.deepcopy(other.copies)
        self.budget.take_over(other.budget)
        self._asked = other._asked
        self.replan()


def _by_depth(prior: Sequence[float], longest: int) -> list[float]:
    """Return a prior acceptance, never certain, for each depth up to the longest draft."""
    if not prior:
        raise ValueError("The prior needs the acceptance of at least one depth, but is empty.")
    priors = [min(max(SHARE.check("A prior acceptance", a), 0.01), 0.995) for a in prior[:longest]]
    return priors + priors[-1:] * (longest - len(priors))
