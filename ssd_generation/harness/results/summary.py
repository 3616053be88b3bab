"""Summaries of a run from its rows: medians and their spread, acceptance, texts. Pure functions of the rows."""

from __future__ import annotations

import math
import statistics as averages
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...config import Costs
from ..methods import PLAIN, UNDRAFTED
from ..peer_methods import is_peer
from ..texts import SamplingCheck, first_difference
from .acceptance_length import acceptance_lengths
from .figures import (
    decode_ratio,
    engine_efficiency,
    finished_calls,
    latest_calls,
    ratio,
    round_of,
    step_seconds,
    timing_of,
    with_plain,
)
from .timings import spread

__all__ = ["categories_of", "summarise", "summarise_pairs"]

Row = Mapping[str, Any]


def summarise(
    rows: Sequence[Row],
    arguments: Mapping[str, Any],
    environments: Sequence[Mapping[str, Any]] = (),
    weight_bytes: int | None = None,
) -> dict[str, Any]:
    """Return all figures of a run, finished or not.

    Args:
        rows: the lines of rows.jsonl.
        arguments: arguments of the run: `methods`, `do_sample`, …
        environments: machines and versions that rows come from, the last first.
        weight_bytes: bytes of the model's weights; memory is given as a share of them.
    """
    plain_calls = [row for row in latest_calls(rows) if row["method"] == PLAIN]
    prompts = {(row["prompt"], row["category"]) for row in finished_calls(rows)}
    pairs = with_plain(rows)
    memory = {row["method"]: row for row in rows if row["kind"] == "memory" and "error" not in row}
    methods: dict[str, Any] = {}
    for name in arguments["methods"]:
        if name == PLAIN:
            continue
        own = pairs.get(name, [])
        methods[name] = {"calls": len(own), "errors": _errors(rows, name)}
        if own:
            methods[name] |= _method_figures(name, own, rows, arguments["do_sample"])
        methods[name]["memory"] = _memory(memory.get(name), memory.get(PLAIN), weight_bytes)
    return {
        "kind": "methods",
        "arguments": dict(arguments),
        **_environments(environments),
        "weight_bytes": weight_bytes,
        "prompts_per_category": _counts(category for _, category in sorted(prompts)),
        "plain": {
            "calls": len(plain_calls),
            "tokens_per_second": spread([timing_of(row).tokens_per_second for row in plain_calls]),
            "step_seconds": spread(_known(step_seconds(row) for row in plain_calls)),
            "prompt_seconds": spread([row["prompt_seconds"] for row in plain_calls]),
            **({"draws": _sampling_check(rows, PLAIN)} if arguments["do_sample"] else {}),
            "errors": _errors(rows, PLAIN),
        },
        "methods": methods,
    }


def _method_figures(name: str, own: Sequence[tuple[Row, Row]], rows: Sequence[Row], do_sample: bool) -> dict[str, Any]:
    """Return the figures of a method's calls, each with the plain call of its round; `rows` are those of the run."""
    calls = [row for row, _ in own]
    # Not those of assisted decoding: it drafts and verifies before the end of the first pass, which is left out here.
    of_loop = [(row, plain) for row, plain in own if row["speculation"] is not None]
    figures: dict[str, Any] = {
        "ratio": _ratio_summary(own, ratio),
        "decode_ratio": _ratio_summary(own if is_peer(name) else of_loop, decode_ratio),
        "tokens_per_second": spread([timing_of(row).tokens_per_second for row in calls]),
    }
    if do_sample:
        figures["draws"] = _sampling_check(rows, name)
    if of_loop or not do_sample:  # others sample by other rules, and may diverge from the same seed
        margins = {(r["prompt"], r["method"], r["repeat"]): r for r in rows if r["kind"] == "difference"}
        undrafted = [row for row in finished_calls(rows) if row["method"] == UNDRAFTED]
        compared = {round_of(row): row for row in undrafted} if of_loop and name != UNDRAFTED else {}
        figures["text"] = _identity(own, margins, compared)
    at_stored_costs = (
        engine_efficiency(row, plain, Costs.from_dict(row["costs"]))
        for row, plain in own
        if row.get("costs") is not None
    )
    return figures | {
        "drafting": _drafting(calls),
        "assisted": _assisted(calls),
        "acceptance_length": None if name == UNDRAFTED else acceptance_lengths(calls),
        "config": {row["method"]: row["config"] for row in rows if row["kind"] == "config"}.get(name),
        "engine_efficiency": spread(_known(engine_efficiency(row, plain) for row, plain in own)),
        "engine_efficiency_at_stored_costs": spread(_known(at_stored_costs)),
    }


def summarise_pairs(
    rows: Sequence[Row], arguments: Mapping[str, Any], environments: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return all figures of a paired run; ratios above 1 mean that this checkout is faster than the other.

    Args:
        rows: the lines of rows.jsonl.
        arguments: arguments of the run.
        environments: machines and versions that rows come from, the last first.
    """
    calls = finished_calls(rows, "pair")
    methods: dict[str, Any] = {}
    for name in arguments["methods"]:
        own = [(row, row) for row in calls if row["method"] == name]
        entry: dict[str, Any] = {"calls": len(own), "errors": _errors(rows, name)}
        if own:
            entry["ratio"] = _ratio_summary(own, lambda row, _: ratio(row["here"], row["there"]))
            entry["identical"] = sum(row["here"]["token_ids"] == row["there"]["token_ids"] for row, _ in own)
            entry["drafting"] = {side: _drafting([row[side] for row, _ in own]) for side in ("here", "there")}
        methods[name] = entry
    prompts = {(row["prompt"], row["category"]) for row in calls}
    return {
        "kind": "paired",
        "arguments": dict(arguments),
        **_environments(environments),
        "prompts_per_category": _counts(category for _, category in sorted(prompts)),
        "methods": methods,
    }


def categories_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the categories that have a figure, in order."""
    found = dict.fromkeys(
        category for entry in summary["methods"].values() for category in entry.get("ratio", {}).get("categories", {})
    )
    return [category for category in summary["prompts_per_category"] if category in found]


def _environments(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "environment": environments[0] if environments else None,
        "other_environments": list(environments[1:]),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _counts(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for value in values:
        counts[value] += 1
    return dict(counts)


def _errors(rows: Iterable[Row], method: str) -> list[str]:
    """Return the errors of a method, each message once."""
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


def _geometric_mean(values: Iterable[float]) -> float | None:
    logarithms = [math.log(value) for value in values]
    return math.exp(averages.fmean(logarithms)) if logarithms else None


def _ratio_summary(pairs: Iterable[tuple[Row, Row]], ratio_of: Callable[[Row, Row], float | None]) -> dict[str, Any]:
    """Return the spread per category, the geometric mean of the categories' medians, and the worst of these."""
    values: dict[str, list[float]] = defaultdict(list)
    for row, other in pairs:
        figure = ratio_of(row, other)
        if figure is not None:
            values[row["category"]].append(figure)
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
    """Return acceptance and times of this library's own methods, over all calls; `None` for other methods."""
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
    """Return acceptance of transformers' assisted decoding, over all calls; `None` for other methods and older rows."""
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
    """Count the texts that equal plain decoding's; list the others, and whether undrafted ones diverge no later."""
    diverged = []
    for row, plain in pairs:
        index = first_difference(plain["token_ids"], row["token_ids"])
        if index is not None:
            known = margins.get((row["prompt"], row["method"], row["repeat"]), {})
            neighbour = undrafted.get(round_of(row))
            at = None if neighbour is None else first_difference(plain["token_ids"], neighbour["token_ids"])
            diverged.append(
                {
                    "prompt": row["prompt"],
                    "repeat": row["repeat"],
                    "token": index + 1,
                    "logit_margin": known.get("logit_margin"),
                    **({} if neighbour is None else {"undrafted_parts_too": at is not None and at <= index}),
                }
            )
    found = [entry["logit_margin"] for entry in diverged if entry["logit_margin"] is not None]
    return {
        "calls": len(pairs),
        "identical": len(pairs) - len(diverged),
        "largest_margin": max(found) if found else None,
        "differences": diverged,
    }


def _sampling_check(rows: Sequence[Row], method: str) -> dict[str, Any] | None:
    """Add up the `SamplingCheck` of all of a method's sampled tokens; `None` if none was judged."""
    judged = {round_of(row): row for row in finished_calls(rows, "draws") if row["method"] == method}
    calls = {round_of(row) for row in latest_calls(rows) if row["method"] == method}
    # In a fixed order, since floating-point sums depend on it in their last digits.
    found = [judged[key] for key in sorted(calls & judged.keys())]
    if not found:
        return None
    total = sum((SamplingCheck(*(row[key] for key in asdict(SamplingCheck()))) for row in found), SamplingCheck())
    return {**total.to_dict(), "z": total.z, "texts": len(found)}
