"""Tables and plots of an evaluation, and of several runs side by side."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.methods import PLAIN
from ..harness.results import (
    COLOURS,
    LEAST_JUDGED,
    MARKERS,
    PLOT,
    SUMMARY,
    TABLE,
    RunFolder,
    check_summary,
    conditions,
    latest_calls,
    markdown,
    markdown_sentence,
    markdown_table,
    new_figure,
    sampling_cell,
    write_summary,
)
from ..support.display import for_markdown, for_plot
from ..support.files import replacing
from ..support.reading import RESULT, read_json, read_text

__all__ = [
    "plot_drafting",
    "plot_quality",
    "plot_runs",
    "quality_notes",
    "quality_table",
    "read_summaries",
    "runs_markdown",
    "runs_table",
    "write_evaluation",
]

Row = Mapping[str, Any]
QUALITY, DRAFTING = "quality.png", "drafting.png"
_NONE = "–"
_NAMES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def _metrics_of(summary: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(metric for entry in summary["quality"].values() for metric in entry))


def _percent(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.1%} ({interval['low']:.1%} … {interval['high']:.1%})".replace("%", "")


def _points(interval: Mapping[str, float]) -> str:
    if interval["low"] == interval["high"] == 0:
        return "0"
    return f"{100 * interval['mean']:+.1f} ({100 * interval['low']:+.1f} … {100 * interval['high']:+.1f})"


def quality_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: scores of each method's answers and the difference to plain decoding's, in percent."""
    metrics = _metrics_of(summary)
    header = [
        "method",
        *(_NAMES.get(metric, metric) for metric in metrics),
        "difference to plain",
        "same score as plain",
    ]
    lines = []
    for method, entry in summary["quality"].items():
        main = entry.get(metrics[0], {})
        lines.append(
            [
                method,
                *(_percent(entry[metric]) if metric in entry else _NONE for metric in metrics),
                _points(main["difference"]) if "difference" in main else _NONE,
                f"{main['same']} of {main['compared']}" if "same" in main else _NONE,
            ]
        )
    return header, lines


def quality_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return notes on the answers, one sentence each."""
    lines = []
    metrics = _metrics_of(summary)
    if metrics:
        lines.append(
            "Percent, with 95 % intervals, bootstrapped over questions; the difference to plain decoding is that of "
            f"{_NAMES.get(metrics[0], metrics[0])}, question by question."
        )
    for method, entry in summary["quality"].items():
        most = max((found["questions"] for found in entry.values()), default=0)
        lines += [
            f"{method}: {_NAMES.get(metric, metric)} is that of {found['questions']} of {most} questions; the others "
            "have too few answers."
            for metric, found in entry.items()
            if found["questions"] < most
        ]
    if left_out := summary["arguments"].get("turns_left_out"):
        lines.append(
            f"{left_out} later turns of conversations were not asked: this model has no chat template, and so no turns."
        )
    code = summary["code"]
    if code and code["not_run"]:
        lines.append(
            f"{code['not_run']} answers were not run. The same command with --allow-code-execution runs them, in a "
            "sandbox."
        )
    for method, outcomes in (code or {"outcomes": {}})["outcomes"].items():
        others = ", ".join(f"{count} {status}" for status, count in sorted(outcomes.items()))
        lines.append(f"{method}: {others}.")
    if summary["failed_rows"]:
        first = summary["failed_rows"][0]
        lines.append(
            f"{len(summary['failed_rows'])} rows failed and are left out, first {first['prompt']} by "
            f"{first['method']}: {first['error']}"
        )
    return lines


def write_evaluation(folder: RunFolder, summary: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Write summary.json, summary.md and, for a finished run, the plots.

    Returns:
        The summary, with the reason under `plot` if there is none.
    """
    title = f"Evaluation: {summary['arguments']['task']}"
    summary = write_summary(folder, summary, title)
    summary["plots"] = []
    if summary["plot"] == PLOT:
        summary["plots"].append(PLOT)
        if summary["quality"]:
            with replacing(folder.path / QUALITY) as path:
                plot_quality(summary, path)
            summary["plots"].append(QUALITY)
        if _accepted_per_round(rows):
            with replacing(folder.path / DRAFTING) as path:
                plot_drafting(summary, rows, path)
            summary["plots"].append(DRAFTING)
    folder.write_json(SUMMARY, summary)
    folder.write_text(TABLE, evaluation_markdown(summary, title))
    return summary


def evaluation_markdown(summary: Mapping[str, Any], title: str) -> str:
    """Return the summary as a page: quality first, then speed as in a benchmark."""
    page = markdown(summary, title)
    parts = ["## Quality", ""]
    if summary["quality"]:
        parts += [*markdown_table(*quality_table(summary)), ""]
    parts += [f"{markdown_sentence(note)}\n" for note in quality_notes(summary)]
    if len(parts) == 2:
        return page
    head, mark, rest = page.partition("\n| method |")
    return f"{head}\n{chr(10).join(parts)}\n## Speed\n{mark}{rest}"


# ----------------------------------------------------------------------------------------------------------------------
# plots


def plot_quality(summary: Mapping[str, Any], path: Path) -> None:
    """Plot the scores of answers, by metric and method, with 95 % intervals.

    Args:
        summary: summary of an evaluation.
        path: the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    metrics, methods = _metrics_of(summary), summary["quality"]
    figure, axes = new_figure(max(6.0, 1.5 + len(metrics) * (0.5 + 0.25 * len(methods))), 4.2)
    step = 0.8 / max(len(methods), 1)
    for i, (name, entry) in enumerate(methods.items()):
        points = [(x, entry[metric]) for x, metric in enumerate(metrics) if metric in entry]
        axes.errorbar(
            [x + (i - (len(methods) - 1) / 2) * step for x, _ in points],
            [100 * p["mean"] for _, p in points],
            yerr=[
                [100 * (p["mean"] - p["low"]) for _, p in points],
                [100 * (p["high"] - p["mean"]) for _, p in points],
            ],
            # Plain decoding comes first; the others have the same colours and markers as in the plots of speed.
            fmt="_" if name == PLAIN else MARKERS[(i - 1) % len(MARKERS)],
            color="0.2" if name == PLAIN else COLOURS[(i - 1) % len(COLOURS)],
            markersize=6,
            capsize=3,
            linewidth=1.2,
            label=for_plot(name),
        )
    axes.set_xticks(range(len(metrics)), [for_plot(_NAMES.get(metric, metric)) for metric in metrics])
    axes.set_xlim(-0.6, len(metrics) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("percent, with 95 % interval")
    axes.set_title(_title(summary), fontsize=10, loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def plot_drafting(summary: Mapping[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Plot the accepted tokens per round, and the acceptance rate by depth, of this library's methods.

    Args:
        summary: summary of an evaluation.
        rows: its rows.
        path: the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    accepted = _accepted_per_round(rows)
    depths = {
        name: [
            (depth, rate)
            for depth, (rate, judged) in enumerate(
                zip(entry["drafting"]["acceptance_by_depth"], entry["drafting"]["judged_by_depth"], strict=True), 1
            )
            if rate is not None and judged >= LEAST_JUDGED
        ]
        for name, entry in summary["methods"].items()
        if entry.get("drafting")
    }
    figure, (left, right) = new_figure(10.0, 4.2, columns=2)
    names = list(accepted)
    most = max(max(counts, default=0) for counts in accepted.values())
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        counts, colour = accepted[name], COLOURS[i % len(COLOURS)]
        rounds = max(sum(counts.values()), 1)
        places = [n + (i - (len(names) - 1) / 2) * width for n in range(most + 1)]
        left.bar(places, [100 * counts[n] / rounds for n in range(most + 1)], width, color=colour, label=for_plot(name))
        if depths.get(name):
            right.plot(
                [depth for depth, _ in depths[name]],
                [100 * rate for _, rate in depths[name]],
                color=colour,
                marker=MARKERS[i % len(MARKERS)],
                markersize=5,
                linewidth=1.2,
            )
    left.set_xlabel("drafted tokens accepted in a round (0: or none drafted)")
    left.set_ylabel("rounds, percent")
    left.set_title(_title(summary), fontsize=10, loc="left")
    right.set_xlabel("depth of the drafted token in its round")
    right.set_ylabel("accepted of those judged, percent")
    right.set_ylim(0, 103)
    right.xaxis.get_major_locator().set_params(integer=True)
    left.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _accepted_per_round(rows: Sequence[Row]) -> dict[str, Counter[int]]:
    """Count the rounds that accepted 0, 1, 2, … drafted tokens, by method of this library."""
    accepted: dict[str, Counter[int]] = {}
    for row in latest_calls(rows):
        if row["speculation"] is not None and row["speculation"]["rounds"]:
            counts = accepted.setdefault(row["method"], Counter())
            for tokens, times in row["speculation"]["tokens_per_round_histogram"].items():
                counts[int(tokens) - 1] += times
    return accepted


def _title(summary: Mapping[str, Any]) -> str:
    environment = summary["environment"] or {}
    model = environment.get("model", summary["arguments"].get("model", ""))
    task = summary["arguments"]["task"]
    return f"{for_plot(task)}, {for_plot(model)}, {sum(summary['prompts_per_category'].values())} questions"


# ----------------------------------------------------------------------------------------------------------------------
# several runs


def read_summaries(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Read the summaries of runs, by name: the folder's, with as much of the path as makes the names unique.

    Raises:
        FileNotFoundError: a folder without a summary.
        ValueError: a summary that cannot be read, of another kind, or a folder named twice.
    """
    found: dict[Path, dict[str, Any]] = {}
    for path in paths:
        folder = os.path.expanduser(path)
        file = os.path.join(folder, SUMMARY)
        try:
            summary = read_json(file, RESULT)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{str(path)!r} holds no {SUMMARY}. Give folders that `ssd benchmark` or `ssd evaluate` has written."
            ) from error
        try:
            check_summary(summary)
        except ValueError as error:
            raise ValueError(f"{file!r} cannot be read: {error}.") from error
        found[Path(os.path.realpath(folder))] = summary
    if len(found) < len(paths):
        raise ValueError("A folder was named twice. Name each run once.")
    parts = 1
    while len({path.parts[-parts:] for path in found}) < len(found):
        parts += 1
    return {"/".join(path.parts[-parts:]): summary for path, summary in found.items()}


def runs_table(summaries: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the comparison: one line per run and method."""
    header = ["run", "task", "method", "speed", "least–greatest", "text as plain's", "quality", "difference to plain"]
    lines = []
    for run, summary in summaries.items():
        quality = summary.get("quality", {})
        metric = next(iter(_metrics_of(summary)), None) if quality else None
        for name in [PLAIN, *summary["methods"]]:
            own = quality.get(name, {}).get(metric)
            entry = summary.get("plain", {}) if name == PLAIN else summary["methods"][name]
            ratio, text, cell = entry.get("ratio"), entry.get("text"), sampling_cell(entry)
            if name != PLAIN and ratio is None:
                continue
            overall = None if ratio is None else ratio["overall"]
            lines.append(
                [
                    run,
                    summary["arguments"].get("task", "benchmark"),
                    name,
                    "1" if ratio is None else f"{ratio['geometric_mean']:.2f}",
                    _NONE if overall is None else f"{overall['min']:.2f}–{overall['max']:.2f}",
                    "; ".join(_witnesses(text, cell)) or _NONE,
                    _NONE if own is None else f"{_NAMES.get(str(metric), metric)} {_percent(own)}",
                    _points(own["difference"]) if own and "difference" in own else _NONE,
                ]
            )
    return header, lines


def _witnesses(text: Mapping[str, Any] | None, z: str) -> list[str]:
    """Return the count of texts that equal plain decoding's, and z for sampled ones, where known."""
    counts = [] if not text else [f"{text['identical']} of {text['calls']}"]
    return counts if z == _NONE else [*counts, f"z = {z}"]


_SIDE_BY_SIDE = "# Runs side by side"


def check_report_folder(folder: Path) -> None:
    """Check that writing `report.md` and `report.png` into a folder overwrites no other files.

    Raises:
        ValueError: there are such files, and `ssd report` did not write them.
    """
    page, picture = folder / "report.md", folder / "report.png"
    ours = os.path.lexists(page) and read_text(page, RESULT).startswith(_SIDE_BY_SIDE)
    for file in (page, picture):
        if os.path.lexists(file) and not ours:
            raise ValueError(f"{str(file)!r} was not written by `ssd report`. Choose another folder with --output.")


def runs_markdown(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the comparison as a page, with the conditions of each run."""
    page = [_SIDE_BY_SIDE, "", *markdown_table(*runs_table(summaries)), ""]
    page += ["Speed is relative to plain decoding: the geometric mean over categories of their median ratios.", ""]
    for run, summary in summaries.items():
        state = "" if summary.get("complete", True) else " (unfinished)"
        sentences = (f"{markdown_sentence(line)}\n" for line in conditions(summary))
        page += [f"## {for_markdown(run)}{state}", "", *sentences]
    return "\n".join(page)


def plot_runs(summaries: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot the speed of each method in each run: medians by category (small), their geometric mean (large).

    Args:
        summaries: summaries by name of the run.
        path: the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary["methods"]))
    figure, axes = new_figure(max(6.0, 1.8 + len(summaries) * (0.6 + 0.2 * len(names))), 4.6)
    step = 0.8 / max(len(names), 1)
    axes.axhline(1.0, color="0.3", linewidth=1, zorder=1)
    for i, name in enumerate(names):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        offset = (i - (len(names) - 1) / 2) * step
        label: str | None = for_plot(name)
        for x, summary in enumerate(summaries.values()):
            ratio = summary["methods"].get(name, {}).get("ratio")
            if ratio is None:
                continue
            medians = [figures["median"] for figures in ratio["categories"].values()]
            axes.scatter([x + offset] * len(medians), medians, s=10, alpha=0.5, linewidths=0, **style)
            axes.scatter(x + offset, ratio["geometric_mean"], s=46, edgecolors="white", zorder=3, label=label, **style)
            label = None
    axes.set_xticks(range(len(summaries)), [for_plot(run).replace("/", "/\n") for run in summaries])
    axes.set_xlim(-0.6, len(summaries) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed relative to plain decoding")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")
