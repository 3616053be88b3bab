"""Draft length by costs: the draft with the most expected tokens per second, plain steps included."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Sequence

from ...config import Costs
from ...support.bounds import DRAFT_LENGTH, SHARE
from .base import NO_MATCH, DraftPolicy, Match

__all__ = ["CostAwarePolicy"]

# Confidence bins: [0, .3), [.3, .5), … [.995, 1], and where in them a token's probability is taken to lie.
_BIN_EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
_BIN_CENTRES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.965, 0.988, 0.998)

# Lookup: how likely a copied token is right before anything was seen, by n-gram length (1, 2, 3, 4 and more) and place
# in the copy (1st, 2nd–3rd, 4th–7th, 8th on), if those before it were right.
_LOOKUP_PRIOR = (
    (0.20, 0.45, 0.70, 0.80),
    (0.40, 0.60, 0.80, 0.85),
    (0.55, 0.75, 0.85, 0.90),
    (0.65, 0.80, 0.88, 0.92),
)
_LOOKUP_PLACES = (0, 1, 1, 2, 2, 2, 2)  # and 3 for all further ones
_MAX_LOOKUP = 16

# What was observed counts this much less with each observation of its kind (depths: with each draft) that follows, so
# that estimates follow a change of topic.
_DEPTH_DISCOUNT = 0.98
_BIN_DISCOUNT = 0.985
_LOOKUP_DISCOUNT = 0.95
_MATCH_DISCOUNT = 0.95
_SHARE_STEP = 0.1

# Observations that a prior is worth.
_PRIOR_WEIGHT = 8.0
_DEPTH_WEIGHT = 16.0
_BIN_WEIGHT = 3.0
_LOOKUP_WEIGHT = 4.0

DEFAULT_PRIOR = (0.75,)

# Accounts, in plain steps.
_START = 1.5
_MOST_START = 4.0
_LOOKUP_START = 0.5
_LEAST_CAP = 3.0
_MOST_SAVED = 50.0
_LONGEST_WAIT = 128


class _Account:
    """What a way of drafting may lose, in plain steps.

    Attributes:
        balance: what it may lose at once.
        savings: what was gained beyond the cap of the balance; pays for probes when the balance is spent.
        wait: rounds between probes; doubles with each draft in vain and shrinks with any other.
        waited: rounds since the last.
    """

    __slots__ = ("balance", "savings", "wait", "waited")

    def __init__(self, balance: float, savings: float = 0.0, wait: int = 0, waited: int = 0) -> None:
        self.balance, self.savings, self.wait, self.waited = balance, savings, wait, waited

    def book(self, amount: float, cap: float) -> None:
        balance = self.balance + amount
        if balance > cap:
            self.savings = min(self.savings + balance - cap, _MOST_SAVED)
            balance = cap
        self.balance = balance

    def drafted(self, right: bool, pays: bool) -> None:
        if right:
            self.wait = 0 if pays else self.wait // 4
        else:
            self.wait = min(max(2 * self.wait, 2), _LONGEST_WAIT)

    def stands_still(self, income: float, cap: float) -> None:
        self.book(income, cap)
        self.waited += 1

    def can_probe(self, price: float) -> bool:
        """Whether it is time for a probe, and the price is there."""
        missing = price - self.balance
        if self.waited < self.wait or missing > self.savings:
            return False
        if missing > 0.0:
            self.balance += missing
            self.savings -= missing
        self.waited = 0
        return True


class _Round:
    """What the rows of a batch reported of a round: they share its passes.

    Attributes:
        rows: how many drafted.
        longest: draft of any of them.
        right: tokens accepted, of all of them.
    """

    __slots__ = ("longest", "right", "rows")

    def __init__(self) -> None:
        self.rows = self.longest = self.right = 0

    def add(self, length: int, right: int) -> None:
        self.rows += 1
        self.longest = max(self.longest, length)
        self.right += right


class CostAwarePolicy(DraftPolicy):
    r"""The draft with the most expected tokens per second, plain steps included.

    With the acceptance $a_i$ of the drafted token at depth i, given that those before it were accepted, a round of k
    self-drafted and m looked-up tokens gains and costs (Leviathan et al., arXiv 2211.17192, section 3.3, for an
    acceptance that varies with depth and a verify pass that is not free)

    $$E(k, m) = 1 + \sum_{j=1}^{k+m} \prod_{i \le j} a_i, \qquad C(k, m) = k \, c + v(1 + k + m)$$

    with c the seconds of a draft step and v(n) those of a verify pass over n tokens: linear between the measured n,
    continued by the last slope. C(0, 0) is a plain step. Tokens per second in the long run are greatest if each round
    takes what maximises $E - λ C$, where λ is the best rate that can be had (renewal-reward theorem; Dinkelbach's
    method for ratios). So:

    - `draft_length`: the best of a plain step, lookup alone and self-drafting.
    - `keep_drafting`: with the survival s of what was drafted (the product of the acceptances, calibrated by the
      draft's own confidence), drafting goes on if for any number j of further tokens
      $s \sum_{i \le j} \prod a > λ (j c + v(1 + d + j) - v(1 + d))$. All j are looked at, so a plateau of v is used and
      a cliff avoided.
    - `lookup_length`: the same comparison with c = 0.

    **Estimates** are discounted Beta counts: by depth, shrunk towards the depth before, the first towards the prior; by
    the draft's confidence, in bins; for looked-up tokens by n-gram length and place in the copy.

    **Never slower** than plain decoding, whatever the estimates say: self-drafting and lookup each have an account in
    plain steps. It opens with 1.5 (lookup 0.5; with a measured prior, what the best draft costs, up to 4), gains a
    plain step for each accepted token, pays what its rounds cost beyond one, and earns half the `exploration` share of
    each round in which it stands still. What it cannot pay is not drafted. So, by the costs as measured, the loss
    over any number of rounds is at most the opening balances and `exploration` of the time; and what earlier gains may
    pay for later losses is capped. The account also pays for probes: where the estimates say that drafting does not
    pay, the draft that tells most for its price is tried again, each failed probe doubling the wait for the next. Gains
    beyond the cap are kept for probes alone, so that a run of bad luck does not end a good draft.

    **A batch** shares its passes, and lasts as long as its slowest row: what that one gains is what the accounts gain,
    and what some rows may gain counts by their share of all rows. Costs are those of passes of as many rows.

    No clock and no randomness: the same reports lead to the same decisions.

    Args:
        costs: of a plain step, a draft step and verification.
        max_length: the most tokens self-drafted per round, 1 to 128.
        prior: acceptance by depth before anything was seen, each in [0, 1], the last standing for all further ones.
        exploration: largest share of the time to spend on trying again what had stopped to pay, in [0, 1]. With 0, what
            could not pay its way is never tried again.
        self_drafts: whether there is a draft besides lookup.
        lookup: whether there is prompt lookup.
        use_confidence: whether to ask for the draft's probabilities. On an accelerator reading them costs a
            synchronisation per token.
        prior_is_measured: whether the prior was measured on this model, so that a few rejections at the start are more
            likely bad luck than a bad draft.

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
        if not prior:
            raise ValueError("The prior needs the acceptance of at least one depth, but is empty.")
        # What is beyond the longest draft is never asked for.
        priors = [min(max(SHARE.check("A prior acceptance", a), 0.01), 0.995) for a in prior[: self.max_length]]
        self.exploration = SHARE.check("exploration", exploration)
        self.self_drafts = self_drafts
        self.lookup = lookup
        self.needs_probability = self_drafts and use_confidence
        # In plain steps from here on.
        self._draft_cost = costs.draft_step / costs.plain_step
        longest = self.max_length + _MAX_LOOKUP + 1
        self._verify_cost = [0.0, *(costs.verify_seconds(n) / costs.plain_step for n in range(1, longest + 1))]
        steps = range(self.max_length + 1)
        self._cost = [1.0 if k == 0 else k * self._draft_cost + self._verify_cost[1 + k] for k in steps]
        self._prior = [priors[min(i, len(priors) - 1)] for i in range(self.max_length)]
        self._probe_length = self._best_probe()
        self._lookup_probe = self._best_lookup_probe()
        self._lookup_cap = _LEAST_CAP + self._verify_cost[1 + _MAX_LOOKUP] - 1.0

        # [observations, accepted], discounted.
        self._depths = [[0.0, 0.0] for _ in range(self.max_length)]
        self._bins = [[0.0, 0.0] for _ in _BIN_CENTRES]
        self._lookups = [[[0.0, 0.0] for _ in places] for places in _LOOKUP_PRIOR]
        self._changed = [True] * 4
        self._gains: list[list[float]] = [[] for _ in _LOOKUP_PRIOR]
        # How often lookup offers nothing, a 1-gram, 2-gram, 3-gram, longer.
        self._matches = [1.0, 0.0, 0.0, 0.0, 0.0]
        self._judged = self._right = 0  # of its own drafts' tokens, since the record was last taken
        self._account = _Account(_START)
        self._lookup_account = _Account(_LOOKUP_START)
        self._rounds = 0

        # Of a batch: the share of its rows that copy in a round in which any does, whose pass all wait for.
        self._share = 1.0
        self._rows = 0  # that this round began with
        self._is_reported = True
        self._slowest: int | None = None  # tokens of the row that is waited for
        self._advance: int | None = None  # and how many more these are than a round before; `None`: not known

        # Of the round.
        self._paths: list[list[float]] = []  # per row: survival, then the bins of its drafted tokens
        self._depth = 0  # depth of the last question
        self._alive: list[list[float]] = []  # paths that went on at the depth before, and at this one
        self._going_on: list[list[float]] = []
        self._drafting = _Round()
        self._copying = _Round()
        self._copying_judged = False
        self._next_path = 0
        self._stale = 0
        self._rate = 1.0
        self._plan()
        if prior_is_measured:
            self._account.balance = min(max(_START, self._cost[self._best] - 1.0), _MOST_START)

    # ------------------------------------------------------------------------------------------------------------------
    # decisions

    def begin_round(self, lengths: Sequence[int]) -> None:
        slowest, before = min(lengths), self._slowest
        self._slowest = slowest
        self._advance = None if before is None or slowest <= before else slowest - before

    def draft_length(self, limit: int, match: Match = NO_MATCH) -> int:
        if self._is_reported:
            self._settle()
            self._rows, self._is_reported = 0, False
        self._rows += 1
        self._next_path = self._depth = 0
        self._paths = []
        self._going_on = []
        self._rounds += 1
        if self._stale and (self._stale >= 6 or self._rounds < 32):
            self._plan()
        if self.lookup:
            for i in range(5):
                self._matches[i] *= _MATCH_DISCOUNT
            self._matches[min(match.length, 4) if match.tokens else 0] += 1.0
        if limit < 1:
            return 0
        # Lookup alone is worth so much more than a plain step:
        offer = self._offer(1.0, 0, match, limit)[1] if self.lookup and match.tokens else 0.0
        if not self.self_drafts:
            return 0
        account, cost = self._account, self._cost
        longest = min(self.max_length, limit)
        affordable = longest
        while affordable and cost[affordable] - 1.0 > account.balance:
            affordable -= 1
        best, rate = self._best, self._rate
        if best > affordable:
            # Not the rate of a draft that cannot be paid yet: a shorter one that gains is the way to it.
            best = self._best_length(affordable)
            rate = min(rate, max(1.0, self._tokens[best] / cost[best]))
        if best and self._tokens[best] - rate * cost[best] > 1.0 - rate + offer:
            return affordable if self.needs_probability else best
        account.stands_still(0.5 * self.exploration, self._cap)
        probe = min(self._probe_length, longest)
        if offer > 0.0 or not account.can_probe(cost[probe] - 1.0):
            return 0
        return probe

    def keep_drafting(self, depth: int, probability: float, match: Match = NO_MATCH) -> bool:
        # Rows are told apart by their order: at each depth, those that went on before are asked again.
        if depth != self._depth:
            self._depth = depth
            self._alive = self._going_on
            self._going_on = []
            self._alive.reverse()
        if depth == 1:
            path = [1.0]
            self._paths.append(path)
        elif self._alive:
            path = self._alive.pop()
        else:
            path = [self._survival[depth - 1]]
        if self.needs_probability and probability == probability:
            place = bisect_right(_BIN_EDGES, probability)
            path.append(place)
            path[0] *= self._calibrated[place]
        else:
            path.append(-1)
            path[0] *= self._acceptance[min(depth, self.max_length) - 1]
        if depth >= self.max_length:
            return False
        if match.tokens and self.lookup:
            worth = self._continued(path[0], depth)
            go_on = worth > 0.0 and worth > self._offer(path[0], depth, match, _MAX_LOOKUP)[1]
        else:
            go_on = not self.needs_probability or path[0] > self._thresholds[depth]
        if go_on:
            self._going_on.append(path)
        return go_on

    def lookup_length(self, depth: int, match: Match, limit: int) -> int:
        if not self.lookup or match.tokens < 1 or limit < 1:
            return 0
        depth = min(depth, self.max_length)
        survival = self._survival[depth]
        if depth and len(self._paths) == 1:
            path = self._paths[0]
            survival = path[0]
            for i in range(len(path) - 1, depth):  # drafted last, and not asked about
                survival *= self._acceptance[i]
        count, _ = self._offer(survival, depth, match, limit)
        if count:
            return count
        account = self._lookup_account
        account.stands_still(0.5 * self.exploration, self._lookup_cap)
        probe = min(self._lookup_probe, match.tokens, limit)
        price = self._verify_cost[1 + depth + probe] - (self._verify_cost[1 + depth] if depth else 1.0)
        # Most matches are short; longer ones shall not find the account empty.
        if survival < 0.5 or account.balance < price * max(4 - match.length, 0) or not account.can_probe(price):
            return 0
        return probe

    # ------------------------------------------------------------------------------------------------------------------
    # learning

    def update(
        self, drafted: int, accepted: int, reached_end: bool, looked_up: int = 0, match: Match = NO_MATCH
    ) -> None:
        self._is_reported = True
        drafted = min(drafted, self.max_length)
        kept = min(accepted, drafted)
        if drafted:
            self._judged += min(kept + 1, drafted)
            self._right += kept
            # The depths not reached are discounted as well: what they say gets old.
            for i, counts in enumerate(self._depths):
                judged = i <= kept and i < drafted
                counts[0] = counts[0] * _DEPTH_DISCOUNT + judged
                counts[1] = counts[1] * _DEPTH_DISCOUNT + (judged and i < kept)
            self._calibrate(drafted, kept)
            self._drafting.add(drafted, kept)
            self._stale += 1 if kept else 2
        if looked_up:
            looked_up = min(looked_up, _MAX_LOOKUP)
            right = min(max(accepted - drafted, 0), looked_up)
            self._copying.add(drafted + looked_up, right)
            self._copying_judged = self._copying_judged or kept == drafted
            length = min(max(match.length, 1), 4) - 1
            if kept == drafted:
                self._changed[length] = True
                for i in range(min(right + 1, looked_up)):
                    counts = self._lookups[length][_LOOKUP_PLACES[i] if i < 7 else 3]
                    counts[0] = counts[0] * _LOOKUP_DISCOUNT + 1.0
                    counts[1] = counts[1] * _LOOKUP_DISCOUNT + (i < right)
            self._stale += 1 if right else 2

    def take_record(self, least: int) -> tuple[int, int]:
        """How many tokens of its own drafts were judged since the last time, and how many of them were accepted.

        Args:
            least: fewer are kept for the next time, and `(0, 0)` is given.
        """
        if self._judged < least:
            return 0, 0
        record = self._judged, self._right
        self._judged = self._right = 0
        return record

    def _settle(self) -> None:
        """Book the round on the accounts."""
        drafting, copying = self._drafting, self._copying
        drafted = drafting.longest
        # What was gained of each token that was right.
        worth = 1.0 / max(self._rows, drafting.rows, copying.rows, 1)
        if self._advance is not None and (right := drafting.right + copying.right):
            worth = min(self._advance - 1, right) / right
        if drafting.rows:
            spent = self._cost[drafted] - 1.0
            self._account.book(drafting.right * worth - spent, self._cap)
            self._account.drafted(drafting.right > 0, pays=self._best > 0)
            self._drafting = _Round()
        if copying.rows:
            behind = self._verify_cost[1 + drafted] if drafted else 1.0
            spent = self._verify_cost[1 + max(copying.longest, drafted)] - behind
            rows = max(self._rows, copying.rows)
            self._share += _SHARE_STEP * (copying.rows / rows - self._share)
            self._lookup_account.book(copying.right * worth - spent, self._lookup_cap)
            if self._copying_judged:
                self._lookup_account.drafted(copying.right > 0, pays=False)
            self._copying, self._copying_judged = _Round(), False

    def _calibrate(self, drafted: int, kept: int) -> None:
        """Learn how the acceptance goes with the draft's confidence."""
        if self._next_path >= len(self._paths):
            return
        path = self._paths[self._next_path]
        if len(path) - 1 not in (drafted, drafted - 1):  # the last token need not have been asked about
            return
        self._next_path += 1
        for i in range(min(kept + 1, len(path) - 1)):
            place = int(path[i + 1])
            if place >= 0:
                counts = self._bins[place]
                counts[0] = counts[0] * _BIN_DISCOUNT + 1.0
                counts[1] = counts[1] * _BIN_DISCOUNT + (i < kept)

    # ------------------------------------------------------------------------------------------------------------------
    # the plan: all that hangs on estimates only

    def _plan(self) -> None:
        self._stale = 0
        k_max, cost = self.max_length, self._cost
        # Failures so far against those that the prior expects, of all depths; then each depth by itself.
        expected = failures = _PRIOR_WEIGHT * (1.0 - self._prior[0])
        for prior, (seen, accepted) in zip(self._prior, self._depths, strict=True):
            expected += seen * (1.0 - prior)
            failures += seen - accepted
        scale = failures / expected
        acceptance = [
            (accepted + _DEPTH_WEIGHT * max(1.0 - (1.0 - prior) * scale, 0.0)) / (seen + _DEPTH_WEIGHT)
            for prior, (seen, accepted) in zip(self._prior, self._depths, strict=True)
        ]
        self._acceptance = acceptance
        self._survival = [1.0]
        self._tokens = [1.0]
        for a in acceptance:
            self._survival.append(self._survival[-1] * a)
            self._tokens.append(self._tokens[-1] + self._survival[-1])

        # Confidence: where a bin has seen little, its centre counts, with the failures scaled as those of all bins.
        expected = _BIN_WEIGHT
        failures = _BIN_WEIGHT
        for centre, (seen, accepted) in zip(_BIN_CENTRES, self._bins, strict=True):
            expected += seen * (1.0 - centre)
            failures += seen - accepted
        scale = failures / expected
        self._calibrated = [
            (accepted + _BIN_WEIGHT * max(1.0 - (1.0 - centre) * scale, 0.0)) / (seen + _BIN_WEIGHT)
            for centre, (seen, accepted) in zip(_BIN_CENTRES, self._bins, strict=True)
        ]

        # A fixed length, and what lookup adds in the rounds that it has a match in.
        self._best = self._best_length(k_max) if self.self_drafts else 0
        tokens, spent = self._tokens[self._best], cost[self._best]
        self._cap = _LEAST_CAP + 1.5 * (spent - 1.0)
        rate = tokens / spent
        if self.lookup:
            # One step of Dinkelbach's method from the rate before; the next plan takes the next.
            for length, changed in enumerate(self._changed):
                if changed:
                    self._gains[length] = self._copy_gains(length)
                    self._changed[length] = False
            before = max(self._rate, rate)
            all_tokens, all_spent = tokens * self._matches[0], spent * self._matches[0]
            for length, share in enumerate(self._matches[1:]):
                if share < 0.1:
                    continue
                m, value = self._best_copy(1.0, 0, length, _MAX_LOOKUP)
                copying = m > 0 and 1.0 - before + value > tokens - before * spent
                all_tokens += share * (1.0 + self._share * self._gains[length][m] if copying else tokens)
                all_spent += share * (self._verify_cost[1 + m] if copying else spent)
            rate = max(rate, all_tokens / all_spent)
        self._rate = max(rate, 1.0)

        # keep_drafting goes on if the survival is above the threshold.
        v, rate = self._verify_cost, self._rate
        self._thresholds = [0.0]
        for depth in range(1, k_max):
            gain, product, threshold = 0.0, 1.0, math.inf
            for j in range(1, k_max - depth + 1):
                product *= acceptance[depth + j - 1]
                gain += product
                needed = j * self._draft_cost + v[1 + depth + j] - v[1 + depth]
                if needed < threshold * gain:
                    threshold = needed / gain
            self._thresholds.append(rate * threshold)

    def _best_length(self, longest: int) -> int:
        """The fixed length with the best rate, 0 if none beats plain decoding."""
        best, rate = 0, 1.0 + 1e-9
        for k in range(1, longest + 1):
            if self._tokens[k] > rate * self._cost[k]:
                best, rate = k, self._tokens[k] / self._cost[k]
        return best

    def _best_probe(self) -> int:
        """The length with the most tokens judged, were the draft a good one, per price."""
        best, most = 1, 0.0
        judged, survival = 0.0, 1.0
        for k in range(1, self.max_length + 1):
            judged += survival
            survival *= max(self._prior[k - 1], 0.75)
            worth = judged / max(self._cost[k] - 1.0, 1e-6)
            if worth > most * 1.001:
                best, most = k, worth
        return best

    def _best_lookup_probe(self) -> int:
        best, most = 1, 0.0
        judged, survival = 0.0, 1.0
        for m in range(1, _MAX_LOOKUP + 1):
            judged += survival
            survival *= 0.75
            worth = judged / max(self._verify_cost[1 + m] - 1.0, 1e-3)
            if worth > most * 1.001:
                best, most = m, worth
        return best

    def _continued(self, survival: float, depth: int) -> float:
        """What drafting on is worth beyond stopping at once: the most of E − λ C over all lengths."""
        v, rate = self._verify_cost, self._rate
        best, gain, product = -math.inf, 0.0, survival
        for j in range(1, self.max_length - depth + 1):
            product *= self._acceptance[depth + j - 1]
            gain += product
            best = max(best, gain - rate * (j * self._draft_cost + v[1 + depth + j] - v[1 + depth]))
        return best

    # ------------------------------------------------------------------------------------------------------------------
    # lookup

    def _copy_gains(self, length: int) -> list[float]:
        """Expected accepted tokens of a copy of 0, 1, … tokens."""
        estimates = [
            (accepted + _LOOKUP_WEIGHT * prior) / (seen + _LOOKUP_WEIGHT)
            for prior, (seen, accepted) in zip(_LOOKUP_PRIOR[length], self._lookups[length], strict=True)
        ]
        gains, gain, survival = [0.0], 0.0, 1.0
        for m in range(_MAX_LOOKUP):
            survival *= estimates[_LOOKUP_PLACES[m] if m < 7 else 3]
            gain += survival
            gains.append(gain)
        return gains

    def _best_copy(self, survival: float, depth: int, length: int, longest: int) -> tuple[int, float]:
        """The number of looked-up tokens with the most E − λ C, and how much more it is than without any."""
        gains, v, rate = self._gains[length], self._verify_cost, self._rate
        base = v[1 + depth] if depth else 1.0
        best, most = 0, 0.0
        for m in range(1, longest + 1):
            value = self._share * survival * gains[m] - rate * (v[1 + depth + m] - base)
            if value > most:
                best, most = m, value
        return best, most

    def _offer(self, survival: float, depth: int, match: Match, limit: int) -> tuple[int, float]:
        """`_best_copy` of what lookup offers and the account can pay."""
        longest = min(match.tokens, limit, _MAX_LOOKUP)
        v = self._verify_cost
        most = self._lookup_account.balance + (v[1 + depth] if depth else 1.0)
        while longest > 0 and v[1 + depth + longest] > most:
            longest -= 1
        if longest < 1:
            return 0, 0.0
        return self._best_copy(survival, depth, min(max(match.length, 1), 4) - 1, longest)

    # ------------------------------------------------------------------------------------------------------------------
    # state

    def state(self) -> dict[str, float]:
        self._settle()
        state: dict[str, float] = {"tokens_per_plain_step": self._rate}
        if self.self_drafts:
            state["draft_length"] = float(self._best)
            state["balance"] = self._account.balance
            for depth, acceptance in enumerate(self._acceptance, start=1):
                state[f"acceptance_{depth}"] = acceptance
        if self.lookup:
            state["lookup_balance"] = self._lookup_account.balance
            for length, gains in enumerate(self._gains, start=1):
                state[f"lookup_acceptance_{length}"] = gains[1]
        return state

    def take_over(self, other: CostAwarePolicy) -> None:
        """Go on with what another policy learnt of lookup and has in its accounts, for a new draft of the same model.

        What this one knows of its own draft stays.
        """
        other._settle()
        self._lookups, self._matches = copy.deepcopy(other._lookups), list(other._matches)
        self._account, self._lookup_account = copy.copy(other._account), copy.copy(other._lookup_account)
        self._rounds = other._rounds
        self._changed = [True] * 4
        self._drafting, self._copying, self._copying_judged = _Round(), _Round(), False
        self._plan()
