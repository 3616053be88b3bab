"""A run's summary as a page of Markdown, and its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...support.display import for_markdown
from ...support.files import replacing
from .acceptance_length import length_cells, length_table
from .cells import (
    LEAST_JUDGED,
    NONE,
    category_cell,
    depth_cell,
    figure_cell,
    markdown_sentence,
    markdown_table,
    memory_cell,
    percent_cell,
    sampling_cell,
    share_cell,
    text_cell,
)
from .ratio_plot import plot_summary
from .run_folder import PLOT, SUMMARY, TABLE, RunFolder
from .sentences import conditions, problems, sampling_notes
from .summary import categories_of

__all__ = ["markdown", "overview", "write_summary"]


def overview(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the main table: one line per method that ran."""
    paired = summary["kind"] == "paired"
    sampling = summary["arguments"]["do_sample"] and not paired
    header = ["method", "geometric mean", "worst category"]
    header += ["identical text"] if paired else ["decoding only", "identical text"]
    header += ["drawn as plain, z"] * sampling
    header += [] if paired else ["acceptance", "tokens per round", "engine efficiency", "extra memory"]
    lines = []
    for name, entry in summary["methods"].items():
        ratio = entry.get("ratio")
        if ratio is not None:
            worst = f"{figure_cell(ratio['worst_median'])} ({ratio['worst_category']})"
            cells = [share_cell(entry["identical"], entry["calls"])] if paired else _method_cells(entry, sampling)
            lines.append([name, figure_cell(ratio["geometric_mean"]), worst, *cells])
    return header, lines


def _method_cells(entry: Mapping[str, Any], sampling: bool) -> list[str]:
    drafting = entry["drafting"] or entry.get("assisted") or {}
    efficiency, memory = entry["engine_efficiency"], entry["memory"]
    return [
        figure_cell(entry["decode_ratio"]["geometric_mean"]),
        text_cell(entry.get("text")),
        *[sampling_cell(entry)] * sampling,
        percent_cell(drafting.get("acceptance_rate")),
        figure_cell(drafting.get("tokens_per_round")),
        NONE if efficiency is None else figure_cell(efficiency["median"]),
        NONE if memory is None else memory_cell(memory),
    ]


def markdown(summary: Mapping[str, Any], title: str) -> str:
    """Write the summary as a page under a title."""
    page = [f"# {for_markdown(title)}", "", *map(markdown_sentence, conditions(summary)), ""]
    if not summary.get("complete", True):
        page += [f"**Unfinished**: {summary['rows_done']} of {summary['rows']} rows.", ""]
    page += [*markdown_table(*overview(summary)), ""]
    page += _by_category(summary)
    page += _acceptance_lengths(summary)
    if drawn := [markdown_sentence(note) for note in sampling_notes(summary)]:
        first, *others = drawn
        page += ["## Sampling", "", first, "", *(f"- {line}" for line in others), ""]
    page += _times(summary)
    if notes := problems(summary):
        page += ["## Notes", "", *(f"- {markdown_sentence(note)}" for note in notes), ""]
    return "\n".join(page)


def _by_category(summary: Mapping[str, Any]) -> list[str]:
    categories = categories_of(summary)
    if not categories:
        return []
    lines = (
        [name, *(category_cell(entry["ratio"]["categories"].get(category)) for category in categories)]
        for name, entry in summary["methods"].items()
        if "ratio" in entry
    )
    table = markdown_table(["method", *categories], lines)
    return ["## By category", "", "Median ratio (least–greatest).", "", *table, ""]


def _acceptance_lengths(summary: Mapping[str, Any]) -> list[str]:
    if summary["kind"] != "methods":
        return []
    categories, lines = length_table(summary)
    if not categories:
        return []
    cells = ([name, *(_both(figures.get(category)) for category in categories)] for name, figures in lines)
    explained = (
        "Mean tokens committed per verification pass: over all passes, as in Spec-Bench, and over prompts, as in "
        "SPEED-Bench."
    )
    return ["## Acceptance length", "", explained, "", *markdown_table(["method", *categories], cells), ""]


def _both(figures: Mapping[str, float] | None) -> str:
    per_pass, per_prompt = length_cells(figures)
    return per_pass if figures is None else f"{per_pass} ({per_prompt})"


def _times(summary: Mapping[str, Any]) -> list[str]:
    if summary["kind"] != "methods":
        return []
    own = {name: entry["drafting"] for name, entry in summary["methods"].items() if entry.get("drafting")}
    if not own:
        return []
    parts = ("prompt", "draft", "verify", "elsewhere")
    depths = f"acceptance by depth (of {LEAST_JUDGED} tokens or more)"
    lines = (
        [
            name,
            *(percent_cell(figures["share_of_time"][part], 1) for part in parts),
            figure_cell(figures["drafted_per_round"]),
            depth_cell(figures),
        ]
        for name, figures in own.items()
    )
    table = markdown_table(["method", *parts, "drafted per round", depths], lines)
    return ["## Where the time goes", "", *table, ""]


def write_summary(folder: RunFolder, summary: dict[str, Any], title: str) -> dict[str, Any]:
    """Write summary.json, summary.md under a title and, of a finished run, plot.png.

    Returns:
        The summary, with the reason under `plot` where there is none.
    """
    summary["plot"] = PLOT
    if summary["complete"]:
        try:
            with replacing(folder.path / PLOT) as path:
                plot_summary(summary, path)
        except ImportError as error:
            summary["plot"] = f"left out: {error}"
    else:
        summary["plot"] = "left out: the run is unfinished"
    folder.write_json(SUMMARY, summary)
    folder.write_text(TABLE, markdown(summary, title))
    return summary
