"""What a run amounts to in words: tables in Markdown, sentences, a plot."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..support.display import for_markdown, for_plot
from .methods import PLAIN, is_llama_cpp
from .sampling_check import z_figure

__all__ = [
    "COLOURS",
    "LEAST_JUDGED",
    "MARKERS",
    "categories_of",
    "category_cell",
    "conditions",
    "markdown",
    "markdown_sentence",
    "markdown_table",
    "memory_cell",
    "new_figure",
    "overview",
    "plot_summary",
    "problems",
    "sampling_cell",
    "sampling_notes",
]

_NONE = "–"
LEAST_JUDGED = 10  # tokens at a depth: the acceptance of fewer is chance


def _figure(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return _NONE if value is None else f"{value:.{digits}%}"


def _share(part: int, whole: int) -> str:
    return "all" if part == whole else f"{part} of {whole}"


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table whose cells show these texts."""
    return [
        f"| {' | '.join(map(for_markdown, header))} |",
        f"|{'|'.join(['---'] * len(header))}|",
        *(f"| {' | '.join(map(for_markdown, line))} |" for line in lines),
    ]


def markdown_sentence(text: str) -> str:
    """A text that stands at the beginning of a line of Markdown, where `#` or `1.` would make it something else."""
    return re.sub(r"^(\d*)([-+=#.)])", r"\1\\\2", for_markdown(text).lstrip())


def category_cell(figures: Mapping[str, float] | None) -> str:
    """Median, and least and greatest value: `1.31 (1.12–1.50)`."""
    if figures is None:
        return _NONE
    if figures["n"] == 1:
        return f"{figures['median']:.2f}"
    return f"{figures['median']:.2f} ({figures['min']:.2f}–{figures['max']:.2f})"


def categories_of(summary: Mapping[str, Any]) -> list[str]:
    """Categories that have a figure, in order."""
    found = dict.fromkeys(
        category for entry in summary["methods"].values() for category in entry.get("ratio", {}).get("categories", {})
    )
    return [category for category in summary["prompts_per_category"] if category in found]


def overview(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the main table: one line per method that ran."""
    paired = summary["kind"] == "paired"
    sampling = summary["arguments"]["do_sample"] and not paired
    header = ["method", "geometric mean", "worst category"]
    header += ["identical text"] if paired else ["decoding only", "identical text"]
    header += ["drawn as plain, z"] * sampling
    header += [] if paired else ["acceptance", "tokens per round", "engine efficiency", "extra memory"]
    lines = []
    for name, entry in summary["methods"].items():
        ratio = entry.get("ratio")
        if ratio is None:
            continue
        line = [
            name,
            _figure(ratio["geometric_mean"]),
            f"{_figure(ratio['worst_median'])} ({ratio['worst_category']})",
        ]
        if paired:
            lines.append([*line, _share(entry["identical"], entry["calls"])])
            continue
        text, drafting = entry.get("text"), entry["drafting"] or entry.get("assisted") or {}
        efficiency, memory = entry["engine_efficiency"], entry["memory"]
        lines.append(
            [
                *line,
                _figure(entry["decode_ratio"]["geometric_mean"]),
                _text_cell(text),
                *[sampling_cell(entry)] * sampling,
                _percent(drafting.get("acceptance_rate")),
                _figure(drafting.get("tokens_per_round")),
                _NONE if efficiency is None else _figure(efficiency["median"]),
                _NONE if memory is None else memory_cell(memory),
            ]
        )
    return header, lines


def _text_cell(text: Mapping[str, Any] | None) -> str:
    return _NONE if text is None else _share(text["identical"], text["calls"])


def sampling_cell(entry: Mapping[str, Any]) -> str:
    """How far a method's draws are from the model's distribution: `+0.6`, and what the model could not have drawn."""
    draws = entry.get("draws")
    return (draws and z_figure(draws["z"], draws["impossible"])) or _NONE


def sampling_notes(summary: Mapping[str, Any]) -> list[str]:
    """What the draws say of whether sampling is the model's own, a sentence each; nothing under greedy decoding."""
    entries = {PLAIN: summary.get("plain", {}), **summary["methods"]}
    lines = []
    for name, entry in entries.items():
        draws = entry.get("draws")
        if draws is None:
            continue
        per_token = draws["excess"] / max(draws["tokens"] - draws["impossible"], 1)
        z = z_figure(draws["z"], 0) or _NONE
        line = f"{name}: {draws['tokens']:,} tokens, {per_token:+.4f} a token, z = {z}."
        if draws["impossible"]:
            line += f" {draws['impossible']} of them the model itself could not have drawn; z is that of the others."
        lines.append(line)
    if lines:
        lines.insert(
            0,
            "Drawn as the model draws? For each token: its log-probability under the model's own distribution, after "
            "temperature, top-p and all else, plus that distribution's entropy. For tokens drawn from it, that is 0 on "
            "average; above 0, a method draws likelier tokens than the model does. z is their sum in standard "
            "deviations, by chance beyond ±2 in one run of 20.",
        )
    return lines


def memory_cell(memory: Mapping[str, Any]) -> str:
    """Extra memory in bytes and as a share of the weights."""
    share = "" if memory["share_of_weights"] is None else f" ({memory['share_of_weights']:.1%})"
    size = float(memory["extra_bytes"])
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}{share}"
        size /= 1000
    return f"{size:.3g} GB{share}"


def conditions(summary: Mapping[str, Any]) -> list[str]:
    """What was measured and on what, a sentence each."""
    arguments = summary["arguments"]
    prompts = sum(summary["prompts_per_category"].values())
    decoding = "greedy"
    if arguments["do_sample"]:
        decoding = "sampling" + "".join(
            f", {name} {arguments[name]:g}" for name in ("temperature", "top_p") if arguments.get(name) is not None
        )
    is_evaluation = "task" in arguments
    asked = ""
    if "style" in arguments:
        asked = f" (style {arguments['style']!r}"
        if shots := arguments.get("shots"):
            asked += f", {shots} {'example' if shots == 1 else 'examples'} before each"
        asked += ")"
    length = (
        f"up to {arguments['new_tokens']} new tokens"
        if is_evaluation
        else (f"{arguments['new_tokens']} new tokens (end of sequence off)")
    )
    repeats = f"{arguments['repeats']} {'answer each' if is_evaluation else 'repeat'}"
    if arguments["repeats"] != 1:
        repeats = f"{arguments['repeats']} {'answers each' if is_evaluation else 'repeats'}"
    count = len(summary["prompts_per_category"])
    lines = [
        f"{prompts} prompts in {count} {'category' if count == 1 else 'categories'}{asked}, {repeats}, {length}, "
        f"{decoding}, methods interleaved prompt by prompt."
    ]
    if summary["environment"]:
        lines.append(_place(summary["environment"]))
    if others := summary.get("other_environments"):
        lines.append(
            "Part of it was measured in earlier sessions elsewhere, or by another version (ratios are taken within a "
            f"session): {' '.join(map(_place, others))}"
        )
    if summary["kind"] == "paired":
        lines.append("Ratios above 1 mean that this checkout is faster than the other.")
    else:
        lines.append(
            "Ratios are tokens per second relative to plain decoding of the same prompt and repeat; above 1 is faster. "
            "The geometric mean is that of the categories' medians."
        )
    if any(map(is_llama_cpp, summary["methods"])):
        lines.append(
            "llama.cpp has a process of its own, is given the prompts as tokens, and rounds in its own way, by the "
            "weights of its GGUF file."
        )
    return lines


def _place(environment: Mapping[str, Any]) -> str:
    """A machine, and the versions there."""
    versions = environment["versions"]
    place = environment["device"]
    if "cpu" in environment:
        place = f"{environment['cpu']}, {environment['threads']} of {environment['cpu_count']} CPUs"
    commit, dirty, _ = (environment.get("commit") or "").partition("-dirty")
    commit = f" ({commit[:10]}{dirty})" if commit else ""
    peer = f", xllamacpp {versions['xllamacpp']}" if "xllamacpp" in versions else ""
    own = ", ".join(f"{key} {value}" for key, value in environment.get("generation_config", {}).items())
    settings = f" The model's own generation config sets {own}." if own else ""
    return (
        f"{environment['model']} in {environment['dtype']} ({environment['attention_implementation']}) on {place}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}, ssd_generation "
        f"{versions['ssd_generation']}{commit}{peer}.{settings}"
    )


def problems(summary: Mapping[str, Any]) -> list[str]:
    """Methods that failed, and texts that differ from plain decoding's."""
    failures: dict[tuple[str, str], list[str]] = defaultdict(list)
    plain = {PLAIN: summary["plain"]} if "plain" in summary else {}
    for name, entry in {**plain, **summary["methods"]}.items():
        for error in entry["errors"]:
            failures["failed at times" if entry["calls"] else "cannot run here", error].append(name)
    lines = [f"{', '.join(names)}: {what}: {error}" for (what, error), names in failures.items()]
    for name, entry in summary["methods"].items():
        text = entry.get("text")
        if text and text["differences"]:
            first = text["differences"][0]
            margin = text["largest_margin"]
            known = "" if margin is None else f"; the largest logit margin is {margin:.3g}"
            lines.append(
                f"{name} differs from plain decoding in {len(text['differences'])} of {text['calls']} texts, first at "
                f"token {first['token']} of {first['prompt']}{known}." + _cause(text["differences"])
            )
    return lines


def _cause(differences: Sequence[Mapping[str, Any]]) -> str:
    """Whether drafting or a kernel parted texts, where undrafted decoding was run beside them."""
    known = [entry["undrafted_parts_too"] for entry in differences if "undrafted_parts_too" in entry]
    if not known:
        return ""
    return f" In {sum(known)} of these, undrafted decoding parts there or before: a kernel did it, not drafting."


def _by_depth(figures: Mapping[str, Any]) -> str:
    """Acceptance by depth, as deep as there is a rate to speak of."""
    rates = zip(figures["acceptance_by_depth"], figures["judged_by_depth"], strict=True)
    shown = itertools.takewhile(lambda pair: pair[1] >= LEAST_JUDGED, rates)
    return " ".join(_figure(rate) for rate, _ in shown) or _NONE


def markdown(summary: Mapping[str, Any], title: str) -> str:
    """The summary as a page."""
    header, lines = overview(summary)
    page = [f"# {for_markdown(title)}", "", *map(markdown_sentence, conditions(summary)), ""]
    if not summary.get("complete", True):
        page += [f"**Unfinished**: {summary['rows_done']} of {summary['rows']} rows.", ""]
    page += [*markdown_table(header, lines), ""]
    categories = categories_of(summary)
    if categories:
        page += ["## By category", "", "Median ratio (least–greatest).", ""]
        page += markdown_table(
            ["method", *categories],
            (
                [name, *(category_cell(entry["ratio"]["categories"].get(category)) for category in categories)]
                for name, entry in summary["methods"].items()
                if "ratio" in entry
            ),
        )
        page.append("")
    if drawn := [markdown_sentence(note) for note in sampling_notes(summary)]:
        first, *others = drawn
        page += ["## Sampling", "", first, "", *(f"- {line}" for line in others), ""]
    if summary["kind"] == "methods":
        own = {name: entry["drafting"] for name, entry in summary["methods"].items() if entry.get("drafting")}
        if own:
            page += ["## Where the time goes", ""]
            page += markdown_table(
                [
                    *("method", "prompt", "draft", "verify", "elsewhere", "drafted per round"),
                    f"acceptance by depth (of {LEAST_JUDGED} tokens or more)",
                ],
                (
                    [
                        name,
                        *(_percent(figures["share_of_time"][p], 1) for p in ("prompt", "draft", "verify", "elsewhere")),
                        _figure(figures["drafted_per_round"]),
                        _by_depth(figures),
                    ]
                    for name, figures in own.items()
                ),
            )
            page.append("")
    notes = problems(summary)
    if notes:
        page += ["## Notes", "", *(f"- {markdown_sentence(note)}" for note in notes), ""]
    return "\n".join(page)


# ----------------------------------------------------------------------------------------------------------------------
# as a picture

# Okabe and Ito's colours, which colour-blind people can tell apart, and a marker each.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
MARKERS = "osD^vP*X<>"
_WIDEST = 100.0  # inches; a picture of more pixels cannot be drawn


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure, and its axes: one, or several beside each other.

    Args:
        width: in inches.
        height: in inches.
        columns: how many axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('The plot needs matplotlib: pip install "ssd_generation[plots]"') from error

    figure = Figure(figsize=(min(width, _WIDEST), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.grid(axis="y", color="0.88", linewidth=0.8, zorder=0)
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def plot_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios by category: medians with quartiles (thick) and least and greatest value (thin).

    Args:
        summary: of `summarise` or `summarise_pairs`.
        path: the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    categories = categories_of(summary)
    methods = {name: entry["ratio"] for name, entry in summary["methods"].items() if entry.get("ratio")}
    # Of one category, the geometric mean is its median.
    sums_up = len(categories) > 1
    places = [*categories, *(["all"] if sums_up else [])]
    figure, axes = new_figure(max(7.0, 1.6 + len(places) * (0.5 + 0.16 * len(methods))), 4.8)
    from matplotlib.ticker import ScalarFormatter

    axes.axhline(1.0, color="0.3", linewidth=1, zorder=1)
    step = 0.8 / max(len(methods), 1)
    for i, (name, ratio) in enumerate(methods.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)]}
        offset = (i - (len(methods) - 1) / 2) * step
        points = []
        for x, category in enumerate(categories):
            figures = ratio["categories"].get(category)
            if figures is not None:
                points.append((x + offset, figures["median"]))
                axes.plot([x + offset] * 2, [figures["min"], figures["max"]], linewidth=1, alpha=0.6, zorder=2, **style)
                axes.plot([x + offset] * 2, [figures["q1"], figures["q3"]], linewidth=3.5, alpha=0.6, zorder=2, **style)
        if sums_up:
            points.append((len(categories) + offset, ratio["geometric_mean"]))
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            marker=MARKERS[i % len(MARKERS)],
            s=34,
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
            label=for_plot(name),
            **style,
        )
    for x in range(len(places)):
        if x % 2:
            axes.axvspan(x - 0.5, x + 0.5, color="0.95", zorder=0)
    if sums_up:
        axes.axvline(len(categories) - 0.5, color="0.6", linewidth=1, linestyle=":")
    counts = summary["prompts_per_category"]
    labels = [f"{_wrapped(for_plot(category))}\n(n = {counts[category]})" for category in categories]
    axes.set_xticks(range(len(places)), [*labels, *(["geometric\nmean"] if sums_up else [])])
    axes.set_xlim(-0.5, max(1, len(places)) - 0.5)
    axes.set_yscale("log", base=2)
    shown = [
        figures[key] for ratio in methods.values() for figures in ratio["categories"].values() for key in ("min", "max")
    ]
    low, high = min([0.9, *shown]) * 0.96, max([1.1, *shown]) * 1.04
    axes.set_ylim(low, high)
    steps = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20)
    ticks = [tick for tick in steps if low <= tick <= high]
    axes.set_yticks([tick for i, tick in enumerate(ticks) if len(ticks) <= 14 or not i % 2 or tick == 1])
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    other = "the other checkout" if summary["kind"] == "paired" else "plain decoding"
    axes.set_ylabel(f"speed relative to {other} (logarithmic)")
    environment = summary["environment"] or {}
    if environment:
        single = all(figures["n"] == 1 for ratio in methods.values() for figures in ratio["categories"].values())
        axes.set_title(
            ", ".join(for_plot(environment[key]) for key in ("model", "dtype", "device"))
            + "\n"
            + ("one call each" if single else "median, quartiles (thick), range (thin)"),
            fontsize=10,
            loc="left",
        )
    if methods:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _wrapped(category: str) -> str:
    """A long label on two lines."""
    for separator in ("-", " ", "_"):
        if separator in category and len(category) > 10:
            first, rest = category.split(separator, 1)
            return f"{first}{separator if separator == '-' else ''}\n{rest}"
    return category
