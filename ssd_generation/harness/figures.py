"""Figures of a run from its rows: medians and their spread. Pure functions of the rows."""

from __future__ import annotations

import math
import statistics as averages
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..config import Costs
from ..decoding.statistics import SpeculationStatistics
from .comparison import first_difference
from .interleaved import Timing, spread
from .methods import PLAIN, UNDRAFTED, is_llama_cpp
from .sampling_check import SamplingCheck

__all__ = [
    "beside_plain",
    "engine_efficiency",
    "finished_calls",
    "latest_calls",
    "ratios_so_far",
    "spread",
    "summarise",
    "summarise_pairs",
]

Row = Mapping[str, Any]


def _geometric_mean(values: Iterable[float]) -> float | None:
    logarithms = [math.log(value) for value in values]
    return math.exp(averages.fmean(logarithms)) if logarithms else None


# ----------------------------------------------------------------------------------------------------------------------
# one call beside the plain one


def _timing(row: Row) -> Timing:
    return Timing(len(row["token_ids"]), row["seconds"])


def _ratio(row: Row, plain: Row) -> float:
    """Tokens per second of the whole call relative to plain decoding."""
    return _timing(row).ratio_to(_timing(plain))


def _step_seconds(row: Row) -> float | None:
    """Time per token behind the prompt's pass; `None` where that pass gave the only token."""
    steps = len(row["token_ids"]) - 1
    decoding = row["seconds"] - row["prompt_seconds"]
    return decoding / steps if steps > 0 and decoding > 0 else None


def _decode_ratio(row: Row, plain: Row) -> float | None:
    """As `_ratio`, without the pass over the prompt."""
    own, theirs = _step_seconds(row), _step_seconds(plain)
    return theirs / own if own and theirs else None


def engine_efficiency(row: Row, plain: Row, costs: Costs | None = None) -> float | None:
    """Measured speed-up / the speed-up that the formula gives for the same acceptance: what the loop itself leaves.

    The measured one is that of decoding alone: both calls without their pass over the prompt, which is as long in
    either. The formula is `SpeculationStatistics.theoretical_speedup` with this call's own rounds and, as costs,

    - without `costs`, the same run's: c = time in drafting per self-drafted token / plain step, v = time in verifying
      per round / plain step, where the plain step is that of the plain call beside it. What is missing to 1 is then
      time outside drafting and verifying;
    - with `costs`, those measured beforehand: c from `draft_step`, v from `verify` at each round's number of tokens.
      What is missing to 1 is then also whatever drafting and verifying took beyond that.

    Tokens that were looked up cost nothing in either.

    Args:
        row: a call of this library.
        plain: the plain call of the same prompt and repeat.
        costs: measured beforehand, or `None` for the run's own.

    Returns:
        The efficiency, or `None` where there was no round.
    """
    done, step, measured = row["speculation"], _step_seconds(plain), _decode_ratio(row, plain)
    if done is None or not done["rounds"] or step is None or measured is None:
        return None
    # `theoretical_speedup` looks at the rounds and at what was drafted and accepted in them.
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
        # How many rounds drafted at least 0, 1, 2, … tokens.
        reached = [acted.rounds, *acted.drafted_by_depth, 0]
        verify_cost = sum(
            (reached[n] - reached[n + 1]) * costs.verify_seconds(n + 1) for n in range(len(reached) - 1)
        ) / (acted.rounds * costs.plain_step)
    theoretical = acted.theoretical_speedup(draft_cost, verify_cost)
    return measured / theoretical if theoretical else None


# ----------------------------------------------------------------------------------------------------------------------
# all rows


def finished_calls(rows: Iterable[Row], kind: str = "call") -> list[Row]:
    """The calls that went well."""
    return [row for row in rows if row["kind"] == kind and "error" not in row]


def latest_calls(rows: Iterable[Row]) -> list[Row]:
    """One call for each prompt, method and repeat: plain decoding's may have been made again after an interruption."""
    return list({(row["prompt"], row["method"], row["repeat"]): row for row in finished_calls(rows)}.values())


def beside_plain(rows: Iterable[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Per method, its calls with the plain call of the same prompt, repeat and session."""
    calls = finished_calls(rows)
    plain = {_group(row): row for row in calls if row["method"] == PLAIN}
    pairs: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    for row in calls:
        if row["method"] != PLAIN and _group(row) in plain:
            pairs[row["method"]].append((row, plain[_group(row)]))
    return pairs


def _group(row: Row) -> tuple[Any, ...]:
    return row["prompt"], row["repeat"], row["session"]


def ratios_so_far(rows: Iterable[Row]) -> dict[str, float]:
    """Per method the median ratio to plain decoding (or, in a paired run, to the other checkout)."""
    rows = list(rows)
    found = {
        method: averages.median(_ratio(row, plain) for row, plain in pairs)
        for method, pairs in beside_plain(rows).items()
    }
    pairs: dict[str, list[float]] = defaultdict(list)
    for row in finished_calls(rows, "pair"):
        pairs[row["method"]].append(_ratio(row["here"], row["there"]))
    return {**found, **{method: averages.median(values) for method, values in pairs.items()}}


def _by_category(
    pairs: Sequence[tuple[Row, Row]], value: Callable[[Row, Row], float | None], category: Callable[[Row], str]
) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for row, other in pairs:
        figure = value(row, other)
        if figure is not None:
            values[category(row)].append(figure)
    return values


def _ratio_summary(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Spread per category, geometric mean of the categories' medians, and the worst of these."""
    medians = {category: averages.median(found) for category, found in values.items()}
    worst = min(medians, key=medians.__getitem__) if medians else None
    return {
        "geometric_mean": _geometric_mean(medians.values()),
        "worst_category": worst,
        "worst_median": None if worst is None else medians[worst],
        "overall": spread([value for found in values.values() for value in found]),
        "categories": {category: spread(found) for category, found in values.items()},
    }


def _drafting(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Acceptance and times of this library's own methods, over all calls."""
    done = [row["speculation"] for row in rows if row["speculation"] is not None]
    if not done:
        return None

    def total(key: str) -> float:
        found: float = sum(call[key] for call in done)
        return found

    def by_depth(key: str) -> list[int]:
        depths = max(len(call[key]) for call in done)
        return [sum(call[key][d] for call in done if d < len(call[key])) for d in range(depths)]

    judged, accepted = by_depth("judged_by_depth"), by_depth("accepted_by_depth")
    rounds, drafted = total("rounds"), total("drafted_tokens")
    seconds = {
        "whole": sum(row["seconds"] for row in rows),
        "prompt": sum(row["prompt_seconds"] for row in rows),
        "draft": total("draft_seconds"),
        "verify": total("verify_seconds"),
    }
    seconds["elsewhere"] = seconds["whole"] - seconds["prompt"] - seconds["draft"] - seconds["verify"]
    return {
        "rounds": rounds,
        "drafted_tokens": drafted,
        "looked_up_tokens": sum(call.get("looked_up_tokens", 0) for call in done),
        "drafted_per_round": drafted / rounds if rounds else None,
        "tokens_per_round": (total("accepted_tokens") + rounds) / rounds if rounds else None,
        "acceptance_rate": total("accepted_tokens") / drafted if drafted else None,
        "acceptance_by_depth": [a / j if j else None for a, j in zip(accepted, judged, strict=True)],
        "judged_by_depth": judged,
        "seconds": seconds,
        "share_of_time": {part: seconds[part] / seconds["whole"] for part in seconds if part != "whole"},
    }


def _assisted(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Acceptance of transformers' assisted decoding, over all calls; `None` of other methods, and of older rows."""
    done = [row["assisted"] for row in rows if row.get("assisted") is not None]
    if not done:
        return None
    passes, drafted, accepted = (
        sum(call[key] for call in done) for key in ("target_passes", "drafted_tokens", "accepted_tokens")
    )
    return {
        "rounds": passes,
        "drafted_tokens": drafted,
        "tokens_per_round": (accepted + passes) / passes if passes else None,
        "acceptance_rate": accepted / drafted if drafted else None,
    }


def _identity(
    pairs: Sequence[tuple[Row, Row]], margins: Mapping[tuple[Any, ...], Row], undrafted: Mapping[Any, Row]
) -> dict[str, Any]:
    """How many texts are plain decoding's, where the others part, and whether undrafted decoding parts there too."""
    parted = []
    for row, plain in pairs:
        index = first_difference(plain["token_ids"], row["token_ids"])
        if index is not None:
            known = margins.get((row["prompt"], row["method"], row["repeat"]), {})
            beside = undrafted.get(_group(row))
            apart = None if beside is None else first_difference(plain["token_ids"], beside["token_ids"])
            parted.append(
                {
                    "prompt": row["prompt"],
                    "repeat": row["repeat"],
                    "token": index + 1,
                    "logit_margin": known.get("logit_margin"),
                    **({} if beside is None else {"undrafted_parts_too": apart is not None and apart <= index}),
                }
            )
    found = [entry["logit_margin"] for entry in parted if entry["logit_margin"] is not None]
    return {
        "calls": len(pairs),
        "identical": len(pairs) - len(parted),
        "largest_margin": max(found) if found else None,
        "differences": parted,
    }


def _sampling_check(rows: Sequence[Row], method: str) -> dict[str, Any] | None:
    """The `SamplingCheck` of all of a method's sampled tokens; `None` if none was judged."""
    judged = {
        (r["prompt"], r["repeat"], r["session"]): r for r in finished_calls(rows, "draws") if r["method"] == method
    }
    calls = {(r["prompt"], r["repeat"], r["session"]) for r in latest_calls(rows) if r["method"] == method}
    # In one order, since sums hang on it in their last digits.
    found = [judged[key] for key in sorted(calls & judged.keys())]
    if not found:
        return None
    total = sum((SamplingCheck(*(row[key] for key in asdict(SamplingCheck()))) for row in found), SamplingCheck())
    return {**total.to_dict(), "z": total.z, "texts": len(found)}


def summarise(
    rows: Sequence[Row],
    arguments: Mapping[str, Any],
    environments: Sequence[Mapping[str, Any]] = (),
    weight_bytes: int | None = None,
) -> dict[str, Any]:
    """All figures of a run, finished or not.

    Args:
        rows: the lines of rows.jsonl.
        arguments: of the run: `methods`, `do_sample`, …
        environments: machines and versions that rows come from, the last first.
        weight_bytes: of the model; memory is given as a share of it.
    """
    pairs = beside_plain(rows)
    plain_calls = [row for row in latest_calls(rows) if row["method"] == PLAIN]
    prompts = {(row["prompt"], row["category"]) for row in finished_calls(rows)}
    undrafted = {_group(row): row for row in finished_calls(rows) if row["method"] == UNDRAFTED}
    margins = {(r["prompt"], r["method"], r["repeat"]): r for r in rows if r["kind"] == "difference"}
    memory = {row["method"]: row for row in rows if row["kind"] == "memory" and "error" not in row}
    configs = {row["method"]: row["config"] for row in rows if row["kind"] == "config"}
    methods: dict[str, Any] = {}
    for name in arguments["methods"]:
        if name == PLAIN:
            continue
        own = pairs.get(name, [])
        entry: dict[str, Any] = {"calls": len(own), "errors": _errors(rows, name)}
        if own:
            entry["ratio"] = _ratio_summary(_by_category(own, _ratio, lambda row: row["category"]))
            # Assisted decoding drafts and verifies before the pass that would have to be left out is over.
            of_loop = [(row, plain) for row, plain in own if row["speculation"] is not None]
            apart = own if is_llama_cpp(name) else of_loop
            entry["decode_ratio"] = _ratio_summary(_by_category(apart, _decode_ratio, lambda row: row["category"]))
            entry["tokens_per_second"] = spread([_timing(row).tokens_per_second for row, _ in own])
            if arguments["do_sample"]:
                entry["draws"] = _sampling_check(rows, name)
            if of_loop or not arguments["do_sample"]:  # others sample by other rules, and may part from the same seed
                compared = undrafted if of_loop and name != UNDRAFTED else {}
                entry["text"] = _identity(own, margins, compared)
            entry["drafting"] = _drafting([row for row, _ in own])
            entry["assisted"] = _assisted([row for row, _ in own])
            entry["config"] = configs.get(name)
            entry["engine_efficiency"] = spread(_known(engine_efficiency(row, plain) for row, plain in own))
            entry["engine_efficiency_at_stored_costs"] = spread(
                _known(
                    engine_efficiency(row, plain, Costs.from_dict(row["costs"]))
                    for row, plain in own
                    if row.get("costs") is not None
                )
            )
        entry["memory"] = _memory(memory.get(name), memory.get(PLAIN), weight_bytes)
        methods[name] = entry
    return {
        "kind": "methods",
        "arguments": dict(arguments),
        **_environments(environments),
        "weight_bytes": weight_bytes,
        "prompts_per_category": _count(category for _, category in sorted(prompts)),
        "plain": {
            "calls": len(plain_calls),
            "tokens_per_second": spread([_timing(row).tokens_per_second for row in plain_calls]),
            "step_seconds": spread(_known(_step_seconds(row) for row in plain_calls)),
            "prompt_seconds": spread([row["prompt_seconds"] for row in plain_calls]),
            **({"draws": _sampling_check(rows, PLAIN)} if arguments["do_sample"] else {}),
            "errors": _errors(rows, PLAIN),
        },
        "methods": methods,
    }


def summarise_pairs(
    rows: Sequence[Row], arguments: Mapping[str, Any], environments: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """All figures of a paired run; ratios above 1 mean that this checkout is faster than the other.

    Args:
        rows: the lines of rows.jsonl.
        arguments: of the run.
        environments: machines and versions that rows come from, the last first.
    """
    calls = finished_calls(rows, "pair")
    methods: dict[str, Any] = {}
    for name in arguments["methods"]:
        own = [(row, row) for row in calls if row["method"] == name]
        entry: dict[str, Any] = {"calls": len(own), "errors": _errors(rows, name)}
        if own:
            entry["ratio"] = _ratio_summary(
                _by_category(own, lambda row, _: _ratio(row["here"], row["there"]), lambda row: row["category"])
            )
            entry["identical"] = sum(row["here"]["token_ids"] == row["there"]["token_ids"] for row, _ in own)
            entry["drafting"] = {side: _drafting([row[side] for row, _ in own]) for side in ("here", "there")}
        methods[name] = entry
    prompts = {(row["prompt"], row["category"]) for row in calls}
    return {
        "kind": "paired",
        "arguments": dict(arguments),
        **_environments(environments),
        "prompts_per_category": _count(category for _, category in sorted(prompts)),
        "methods": methods,
    }


def _environments(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "environment": environments[0] if environments else None,
        "other_environments": list(environments[1:]),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _count(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for value in values:
        counts[value] += 1
    return dict(counts)


def _errors(rows: Iterable[Row], method: str) -> list[str]:
    """What went wrong with a method, each message once."""
    return list(dict.fromkeys(row["error"] for row in rows if "error" in row and row["method"] == method))


def _memory(own: Row | None, plain: Row | None, weight_bytes: int | None) -> dict[str, Any] | None:
    if own is None or plain is None:
        return None
    working = own["peak_bytes"] - plain["peak_bytes"]
    total = max(working, 0) + own["persistent_bytes"]
    return {
        "peak_beyond_plain_bytes": working,
        "persistent_bytes": own["persistent_bytes"],
        "extra_bytes": total,
        "share_of_weights": total / weight_bytes if weight_bytes else None,
    }
