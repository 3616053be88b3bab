"""Acceptance lengths by category: mean tokens committed per verification pass, as Spec-Bench and SPEED-Bench report."""

from __future__ import annotations

import statistics as averages
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .cells import NONE, figure_cell

__all__ = ["ALL", "acceptance_lengths", "length_cells", "length_table"]

ALL = "overall"
"""Heading of the figures over all categories."""

Row = Mapping[str, Any]


def acceptance_lengths(calls: Iterable[Row]) -> dict[str, Any] | None:
    """Return the acceptance lengths of a method's calls; `None` where it has no verification passes.

    The pass over the prompt is not counted. "per_pass" is the mean over all passes of a category, as in Spec-Bench;
    "per_prompt" is the mean over its prompts, all turns of a conversation together, as in SPEED-Bench.

    Args:
        calls: finished calls of one method.
    """
    counted: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for row in calls:
        if (found := _passes_and_tokens(row)) is not None and found[0]:
            total = counted[row["category"]][row.get("conversation", row["prompt"])]
            total[0] += found[0]
            total[1] += found[1]
    if not counted:
        return None
    everything = [total for prompts in counted.values() for total in prompts.values()]
    return {
        "overall": _figures(everything),
        "categories": {category: _figures(list(prompts.values())) for category, prompts in counted.items()},
    }


def _passes_and_tokens(row: Row) -> tuple[int, int] | None:
    """Return the verification passes of a call, and the tokens that they committed."""
    if (own := row.get("speculation")) is not None:
        histogram = own["tokens_per_round_histogram"]
        return sum(histogram.values()), sum(int(tokens) * passes for tokens, passes in histogram.items())
    if (assisted := row.get("assisted")) is not None:
        return assisted["target_passes"], assisted["target_passes"] + assisted["accepted_tokens"]
    return None


def _figures(totals: Sequence[Sequence[int]]) -> dict[str, Any]:
    passes, tokens = (sum(column) for column in zip(*totals, strict=True))
    return {
        "prompts": len(totals),
        "passes": passes,
        "per_pass": tokens / passes,
        "per_prompt": averages.fmean(tokens / passes for passes, tokens in totals),
    }


def length_table(summary: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
    """Return the categories that have figures, `ALL` last, and each method's figures by category; both may be empty."""
    found = {name: entry["acceptance_length"] for name, entry in summary["methods"].items() if _has_lengths(entry)}
    known = {category for figures in found.values() for category in figures["categories"]}
    categories = [category for category in summary["prompts_per_category"] if category in known]
    lines: list[tuple[str, Mapping[str, Any]]]
    lines = [(name, {**figures["categories"], ALL: figures["overall"]}) for name, figures in found.items()]
    return [*categories, ALL] if lines else [], lines


def _has_lengths(entry: Mapping[str, Any]) -> bool:
    return entry.get("acceptance_length") is not None


def length_cells(figures: Mapping[str, float] | None) -> tuple[str, str]:
    """Format the mean over passes, and the mean over prompts."""
    if figures is None:
        return NONE, NONE
    return figure_cell(figures["per_pass"]), figure_cell(figures["per_prompt"])
