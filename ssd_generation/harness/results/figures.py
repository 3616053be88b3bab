"""Figures of single calls, and the selection of calls from a run's rows. Pure functions of the rows."""

from __future__ import annotations

import statistics as averages
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ...config import Costs
from ...decoding.statistics import SpeculationStatistics
from ..methods import PLAIN
from .timings import Timing

__all__ = ["decode_ratio", "engine_efficiency", "finished_calls", "latest_calls", "ratio", "with_plain"]
__all__ += ["ratios_so_far", "round_of", "step_seconds", "timing_of"]

Row = Mapping[str, Any]


# ----------------------------------------------------------------------------------------------------------------------
# one call compared with the plain one


def timing_of(row: Row) -> Timing:
    """Return the duration of the whole call, and its number of tokens."""
    return Timing(len(row["token_ids"]), row["seconds"])


def ratio(row: Row, plain: Row) -> float:
    """Return the tokens per second of the whole call, relative to plain decoding."""
    return timing_of(row).ratio_to(timing_of(plain))


def step_seconds(row: Row) -> float | None:
    """Return the time per token after the prompt's pass; `None` where that pass gave the only token."""
    steps = len(row["token_ids"]) - 1
    decoding = row["seconds"] - row["prompt_seconds"]
    return decoding / steps if steps > 0 and decoding > 0 else None


def decode_ratio(row: Row, plain: Row) -> float | None:
    """Return the same as `ratio`, without the pass over the prompt."""
    own, theirs = step_seconds(row), step_seconds(plain)
    return theirs / own if own and theirs else None


def engine_efficiency(row: Row, plain: Row, costs: Costs | None = None) -> float | None:
    """Return measured speed-up / theoretical speed-up for the same acceptance: the share that the loop achieves.

    The measured one is that of decoding alone: both calls without their pass over the prompt, which is as long in
    either. The other is `SpeculationStatistics.theoretical_speedup` with this call's own rounds and, as costs,

    - without `costs`, the same run's: c = time in drafting per self-drafted token / plain step, v = time in verifying
      per round / plain step, where the plain step is that of the plain call of its round. The gap to 1 is then time
      outside drafting and verifying;
    - with `costs`, those measured beforehand: c from `draft_step`, v from `verify` at each round's number of tokens.
      The gap to 1 then includes the time that drafting and verifying took beyond that.

    Tokens that were looked up cost nothing in either.

    Args:
        row: a call of this library.
        plain: the plain call of the same prompt and repeat.
        costs: costs measured beforehand, or `None` for the run's own.

    Returns:
        The efficiency, or `None` where there was no round.
    """
    done, step, measured = row["speculation"], step_seconds(plain), decode_ratio(row, plain)
    if done is None or not done["rounds"] or step is None or measured is None:
        return None
    # `theoretical_speedup` uses the rounds, and the tokens drafted and accepted in them.
    accepted = [int(n) - 1 for n, times in done["tokens_per_round_histogram"].items() for _ in range(times)]
    acted = SpeculationStatistics(
        drafted_by_depth=list(done["drafted_by_depth"]),
        accepted_by_depth=list(done["accepted_by_depth"]),
        looked_up_tokens=done.get("looked_up_tokens", 0),
        round_accepted=[accepted],
    )
    if costs is None:
        draft_cost = done["draft_seconds"] / max(acted.self_drafted_tokens, 1) / step
        verify_cost = done["verify_seconds"] / acted.rounds / step
    else:
        draft_cost = costs.draft_step / costs.plain_step
        # Number of rounds that drafted at least 0, 1, 2, … tokens.
        reached = [acted.rounds, *acted.drafted_by_depth, 0]
        verify_cost = sum(
            (reached[n] - reached[n + 1]) * costs.verify_seconds(n + 1) for n in range(len(reached) - 1)
        ) / (acted.rounds * costs.plain_step)
    theoretical = acted.theoretical_speedup(draft_cost, verify_cost)
    return measured / theoretical if theoretical else None


# ----------------------------------------------------------------------------------------------------------------------
# all rows


def finished_calls(rows: Iterable[Row], kind: str = "call") -> list[Row]:
    """Return the calls that ended without an error."""
    return [row for row in rows if row["kind"] == kind and "error" not in row]


def latest_calls(rows: Iterable[Row]) -> list[Row]:
    """Return one call for each prompt, method and repeat: the last one, where an interruption made it run again."""
    return list({(row["prompt"], row["method"], row["repeat"]): row for row in finished_calls(rows)}.values())


def with_plain(rows: Iterable[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Return the calls of each method, each with the plain call of the same prompt, repeat and session."""
    calls = finished_calls(rows)
    plain = {round_of(row): row for row in calls if row["method"] == PLAIN}
    pairs: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    for row in calls:
        if row["method"] != PLAIN and round_of(row) in plain:
            pairs[row["method"]].append((row, plain[round_of(row)]))
    return pairs


def round_of(row: Row) -> tuple[Any, ...]:
    """Return the key that the calls of all methods in a round share: prompt, repeat and session."""
    return row["prompt"], row["repeat"], row["session"]


def ratios_so_far(rows: Iterable[Row]) -> dict[str, float]:
    """Return the median ratio of each method to plain decoding (or, in a paired run, to the other checkout)."""
    rows = list(rows)
    found = {
        method: averages.median(ratio(row, plain) for row, plain in pairs) for method, pairs in with_plain(rows).items()
    }
    pairs: dict[str, list[float]] = defaultdict(list)
    for row in finished_calls(rows, "pair"):
        pairs[row["method"]].append(ratio(row["here"], row["there"]))
    return {**found, **{method: averages.median(values) for method, values in pairs.items()}}
