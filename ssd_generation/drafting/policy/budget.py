"""Budget of drafting: the bound on what drafting may lose, whatever the estimates say.

Self-drafting and lookup have an account each, in plain steps. An account opens with little, gains a plain step for each
accepted token, pays what its rounds cost beyond one, and earns a share of each round in which it does not draft. What
it cannot pay is not drafted. So, by the measured costs, the loss over any number of rounds is at most the opening
balances and that share of the time; and the amount of earlier gains that may pay for later losses is capped.

An account also pays for probes: where the estimates say that drafting does not pay, it is tried again, and each failed
probe doubles the wait for the next. Gains beyond the cap are saved for probes alone, so that a run of bad luck does not
end a good draft.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from .base import LEAD
from .prices import LONGEST_COPY, Prices

__all__ = [
    "Account",
    "Budget",
    "affordable_copy",
    "affordable_draft",
    "copying_cap",
    "drafting_cap",
    "gain_per_token",
    "opening_balance",
]

_START = 1.5
_MOST_START = 4.0
_COPY_START = 0.5
_LEAST_CAP = 3.0
_MOST_SAVED = 50.0
_LONGEST_WAIT = 128
_SHARE_STEP = 0.1
_PACE_STEP = 0.15
_MOST_LEAD = 16


# ----------------------------------------------------------------------------------------------------------------------
# numbers in, a number out


def opening_balance(price: float) -> float:
    """Return self-drafting's first balance, if its best round has this price and its prior was measured."""
    return min(max(_START, price - 1.0), _MOST_START)


def drafting_cap(price: float) -> float:
    """Return the cap of self-drafting's balance, if its best round has this price."""
    return _LEAST_CAP + 1.5 * (price - 1.0)


def copying_cap(price: float) -> float:
    """Return the cap of lookup's balance, if verifying its longest copy has this price."""
    return _LEAST_CAP + price - 1.0


def affordable_draft(balance: float, longest: int, prices: Prices) -> int:
    """Return the most self-drafted tokens, 0 to `longest`, whose loss the balance can pay were all of them rejected."""
    rounds = prices.rounds
    while longest and rounds[longest] - 1.0 > balance:
        longest -= 1
    return longest


def affordable_copy(balance: float, longest: int, prices: Sequence[float]) -> int:
    """Return the most looked-up tokens, 0 to `longest`, that the balance can pay; `prices` as in `copy_prices`."""
    while longest > 0 and prices[longest] > balance:
        longest -= 1
    return max(longest, 0)


def gain_per_token(right: int, rows: int, advance: int | None) -> float:
    """Return the plain steps gained by each accepted draft token of a round.

    A batch lasts as long as its slowest row: that row's gain is the gain of all accepted tokens together.

    Args:
        right: number of accepted draft tokens, of all rows.
        rows: number of rows of the round.
        advance: number of tokens that the slowest row gained since the round before; `None` if unknown.
    """
    if advance is None or not right:
        return 1.0 / max(rows, 1)
    return min(advance - 1, right) / right


# ----------------------------------------------------------------------------------------------------------------------
# accounts


class Account:
    """Account of what a way of drafting may lose, in plain steps.

    Attributes:
        balance: loss that it may make now.
        cap: largest balance; gains beyond it are saved.
        savings: reserve for probes when the balance is spent.
        wait: rounds between probes; doubles with each draft without an accepted token and shrinks with any other.
        waited: rounds without a draft since the last probe.
    """

    __slots__ = ("_income", "_paid", "balance", "cap", "savings", "wait", "waited")

    def __init__(self, balance: float, cap: float = _LEAST_CAP) -> None:
        self.balance, self.cap = balance, cap
        self.savings, self.wait, self.waited = 0.0, 0, 0
        self._income: float | None = None  # of this round, if any row of it does not draft
        self._paid: float | None = None  # price of this round's probe

    def book(self, amount: float) -> None:
        """Add what a round gained, less what it cost."""
        balance = self.balance + amount
        if balance > self.cap:
            self.savings = min(self.savings + balance - self.cap, _MOST_SAVED)
            balance = self.cap
        self.balance = balance

    def drafted(self, right: bool, pays: bool) -> None:
        """Set the wait for probes after a draft.

        Args:
            right: whether any token was accepted.
            pays: whether drafting pays by the estimates.
        """
        if right:
            self.wait = 0 if pays else self.wait // 4
        else:
            self.wait = min(max(2 * self.wait, 2), _LONGEST_WAIT)

    def stand_still(self, income: float) -> None:
        """Earn the income of a round without a draft, once for all of its rows; it is booked when the round ends."""
        if self._income is None:
            self._income = income
            self.waited += 1

    def pay_probe(self, price: float) -> bool:
        """Return whether a probe is due and can be paid; if so, draw on the savings and restart the wait.

        One payment serves all rows of a round: its passes are as wide for each of them.
        """
        if self._paid is not None and price <= self._paid:
            return True
        missing = price - self.balance
        if self.waited < self.wait or missing > self.savings:
            return False
        if missing > 0.0:
            self.balance += missing
            self.savings -= missing
        self.waited, self._paid = 0, price
        return True

    def end_round(self) -> None:
        """Book the income of the round that ends."""
        if self._income is not None:
            self.book(self._income)
        self._income = self._paid = None


class _Tally:
    """Reports of the rows that drafted in a round; these rows share its passes."""

    __slots__ = ("longest", "right", "rows", "tokens")

    def __init__(self) -> None:
        self.rows = self.longest = self.right = self.tokens = 0

    def add(self, tokens: int, right: int, before: int = 0) -> None:
        self.rows += 1
        self.longest = max(self.longest, before + tokens)
        self.tokens += tokens
        self.right += right


class Budget:
    """Accounts of self-drafting and lookup, and the reports of a round's rows until these are booked.

    A batch shares its passes: a round is booked once, when the next one begins.

    Args:
        prices: prices of passes and rounds.
        exploration: largest share of the time to spend on probes.

    Attributes:
        drafting: account of self-drafting.
        copying: account of lookup.
        income: income of an account in a round in which it does not draft.
        share: share of rows that copy, in rounds in which any does, where all rows wait for the pass of the copies; 1
            where passes are packed, so that each row costs what it has.
    """

    def __init__(self, prices: Prices, exploration: float) -> None:
        self.income = 0.5 * exploration
        self.drafting = Account(_START)
        self.copying = Account(_COPY_START, copying_cap(prices.verify[1 + LONGEST_COPY]))
        self.share = 1.0
        self._prices = prices
        self._packed = 0  # rows of the batch, where passes are packed
        self._began = self._began_before = 0  # rows that began this round, and the one before
        self._copied, self._spent = 0, 0.0  # tokens that its rows copy, and their price
        self._rows = 0  # counted in this round
        self._is_reported = True
        self._slowest: int | None = None  # tokens of the slowest row
        self._pace = 2.0  # its tokens per round
        self._advance: int | None = None
        self._drafts, self._copies = _Tally(), _Tally()
        self._copies_judged = False  # a copy whose self-drafted tokens were all accepted

    def begin_round(self, lengths: Sequence[int], packed: int) -> None:
        """Begin a round of a batch; arguments as in `DraftPolicy.begin_round`."""
        self._packed, self._began_before, self._began = packed, self._began, len(lengths)
        self._copied, self._spent = 0, 0.0
        if packed:
            self.share = 1.0
        slowest, before = min(lengths), self._slowest
        self._slowest = slowest
        self._advance = None if before is None or slowest <= before else slowest - before
        if self._advance is not None:
            self._pace += _PACE_STEP * (self._advance - self._pace)

    @property
    def lead(self) -> int:
        """Largest lead with which a row drafts, in tokens: the slowest row would catch up within `LEAD` rounds.

        A batch lasts as long as its slowest row. While drafting does not speed up that row, drafts of rows that lead it
        save nothing.
        """
        return min(int(LEAD * (self._pace - 1.0)), _MOST_LEAD)

    def copy_prices(self, depth: int, longest: int) -> list[float]:
        """Return what the target's pass costs more with a copy of 0 to `longest` tokens after `depth` drafted ones.

        In a packed pass, copies of other rows may have paid for the width already.
        """
        prices = self._prices
        if not self._packed:
            last = prices.last_pass(depth)
            return [prices.verify[1 + depth + count] - last for count in range(longest + 1)]
        tokens, rows, verify = self._began * (1 + depth) + self._copied, self._packed, prices.verify
        before, most = prices.of_pass(tokens, rows), len(verify) - 1
        return [verify[min(-(-count // rows), most)] - before for count in range(tokens, tokens + longest + 1)]

    @property
    def left_for_copies(self) -> float:
        """Balance of lookup that this round has not spent yet."""
        return self.copying.balance - self._spent

    def pay_copy(self, count: int, price: float) -> None:
        """Note that a row of this round copies so many tokens, at this price."""
        if self._packed:
            self._copied += count
            self._spent += price

    def begin_row(self, pays: bool) -> None:
        """Count a row of the round; the first one books the previous round.

        Args:
            pays: whether self-drafting pays by the estimates.
        """
        if self._is_reported:
            self.settle(pays)
            self._rows, self._is_reported = 0, False
        self._rows += 1

    def report(self, drafted: int, kept: int, copied: int, right: int) -> None:
        """Record the outcome of a row.

        Args:
            drafted: number of self-drafted tokens.
            kept: how many of them were accepted.
            copied: number of looked-up tokens after them.
            right: how many of these were accepted.
        """
        self._is_reported = True
        if drafted:
            self._drafts.add(drafted, kept)
        if copied:
            self._copies.add(copied, right, before=drafted)
            self._copies_judged |= kept == drafted

    def settle(self, pays: bool) -> None:
        """Book the reports of the round; `pays` as in `begin_row`."""
        self.drafting.end_round()
        self.copying.end_round()
        drafts, copies = self._drafts, self._copies
        rows = max(self._rows, drafts.rows, copies.rows)
        gain = gain_per_token(drafts.right + copies.right, rows, self._advance)
        drafting, copying = self._passes()
        if drafts.rows:
            self.drafting.book(drafts.right * gain - (drafts.longest * self._prices.draft + drafting - 1.0))
            self.drafting.drafted(drafts.right > 0, pays)
            self._drafts = _Tally()
        if copies.rows:
            self.copying.book(copies.right * gain - (copying - drafting))
            if self._copies_judged:
                self.copying.drafted(copies.right > 0, pays=False)
            if not self._packed:
                self.share += _SHARE_STEP * (copies.rows / rows - self.share)
            self._copies, self._copies_judged = _Tally(), False

    def _passes(self) -> tuple[float, float]:
        """Return the prices of the target's pass that is booked: without the copies, and with them."""
        drafts, copies, prices = self._drafts, self._copies, self._prices
        if self._packed:
            tokens = self._began_before + drafts.tokens
            return prices.of_pass(tokens, self._packed), prices.of_pass(tokens + copies.tokens, self._packed)
        return prices.last_pass(drafts.longest), prices.verify[1 + max(copies.longest, drafts.longest)]

    def take_over(self, other: Budget) -> None:
        """Continue with copies of another budget's accounts, under the caps of this one; its reports are dropped."""
        drafting_cap, copying_cap = self.drafting.cap, self.copying.cap
        self.drafting, self.copying = copy.copy(other.drafting), copy.copy(other.copying)
        self.drafting.cap, self.copying.cap = drafting_cap, copying_cap
        self._drafts, self._copies, self._copies_judged = _Tally(), _Tally(), False
