"""Plot of a run's ratios, and what all plots share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...support.display import for_plot
from .summary import categories_of

__all__ = ["COLOURS", "MARKERS", "new_figure", "plot_summary"]

# Okabe and Ito's colours, which colour-blind people can distinguish, and a marker each.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
MARKERS = "osD^vP*X<>"
_WIDEST = 100.0  # inches; an image of more pixels cannot be drawn
_TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20)


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Make a figure and its axes: one, or several next to each other.

    Args:
        width: width in inches.
        height: height in inches.
        columns: number of axes.

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
        summary: summary by `summarise` or `summarise_pairs`.
        path: the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    categories = categories_of(summary)
    methods = {name: entry["ratio"] for name, entry in summary["methods"].items() if entry.get("ratio")}
    # With a single category, the geometric mean is its median.
    sums_up = len(categories) > 1
    places = len(categories) + sums_up
    figure, axes = new_figure(max(7.0, 1.6 + places * (0.5 + 0.16 * len(methods))), 4.8)
    axes.axhline(1.0, color="0.3", linewidth=1, zorder=1)
    for number, name in enumerate(methods):
        _draw_method(axes, name, methods[name], categories, (number, len(methods)))
    for x in range(1, places, 2):
        axes.axvspan(x - 0.5, x + 0.5, color="0.95", zorder=0)
    if sums_up:
        axes.axvline(len(categories) - 0.5, color="0.6", linewidth=1, linestyle=":")
    counts = summary["prompts_per_category"]
    labels = [f"{_wrapped(for_plot(category))}\n(n = {counts[category]})" for category in categories]
    axes.set_xticks(range(places), [*labels, *(["geometric\nmean"] if sums_up else [])])
    axes.set_xlim(-0.5, max(1, places) - 0.5)
    shown = [figures for ratio in methods.values() for figures in ratio["categories"].values()]
    _scale(axes, [figures[key] for figures in shown for key in ("min", "max")])
    other = "the other checkout" if summary["kind"] == "paired" else "plain decoding"
    axes.set_ylabel(f"speed relative to {other} (logarithmic)")
    if environment := summary["environment"]:
        place = ", ".join(for_plot(environment[key]) for key in ("model", "dtype", "device"))
        single = all(figures["n"] == 1 for figures in shown)
        marks = "one call each" if single else "median, quartiles (thick), range (thin)"
        axes.set_title(f"{place}\n{marks}", fontsize=10, loc="left")
    if methods:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _draw_method(
    axes: Any, name: str, ratio: Mapping[str, Any], categories: Sequence[str], place: tuple[int, int]
) -> None:
    """Draw one method's points and ranges; `place` is its number and the number of methods in a category's place."""
    number, count = place
    offset = (number - (count - 1) / 2) * 0.8 / count
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)]}
    points = []
    for x, category in enumerate(categories):
        figures = ratio["categories"].get(category)
        if figures is not None:
            points.append((x + offset, figures["median"]))
            axes.plot([x + offset] * 2, [figures["min"], figures["max"]], linewidth=1, alpha=0.6, zorder=2, **style)
            axes.plot([x + offset] * 2, [figures["q1"], figures["q3"]], linewidth=3.5, alpha=0.6, zorder=2, **style)
    if len(categories) > 1:
        points.append((len(categories) + offset, ratio["geometric_mean"]))
    axes.scatter(
        [x for x, _ in points],
        [y for _, y in points],
        marker=MARKERS[number % len(MARKERS)],
        s=34,
        edgecolors="white",
        linewidths=0.6,
        zorder=3,
        label=for_plot(name),
        **style,
    )


def _scale(axes: Any, shown: Sequence[float]) -> None:
    """Make the axis of ratios logarithmic, with round numbers next to it."""
    from matplotlib.ticker import ScalarFormatter

    axes.set_yscale("log", base=2)
    low, high = min([0.9, *shown]) * 0.96, max([1.1, *shown]) * 1.04
    axes.set_ylim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_yticks([tick for i, tick in enumerate(ticks) if len(ticks) <= 14 or not i % 2 or tick == 1])
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter(ScalarFormatter())


def _wrapped(category: str) -> str:
    """Break a long label into two lines."""
    for separator in ("-", " ", "_"):
        if separator in category and len(category) > 10:
            first, rest = category.split(separator, 1)
            return f"{first}{separator if separator == '-' else ''}\n{rest}"
    return category
