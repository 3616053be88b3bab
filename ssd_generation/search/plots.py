"""Plots of a search: the Pareto frontier, progress over forward passes, and the map of sub-layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..support.display import for_plot
from ..support.files import replacing
from ..tuning.speedup import expected_tokens
from .space import KEEP, SKIP
from .trials import Found, Tried, mean_acceptance

if TYPE_CHECKING:
    from .cost_profile import CostProfile
    from .space import Space

__all__ = ["plot_frontier", "plot_map", "plot_progress"]

_COLOURS = {
    "given": "tab:gray",
    "uniform": "tab:purple",
    "single": "tab:cyan",
    "set": "tab:orange",
    "layerwise": "tab:brown",
    "move": "tab:green",
    "forward": "tab:olive",
    "neighbour": "tab:pink",
}
_NAMES = {
    "given": "given",
    "uniform": "one precision",
    "single": "one sub-layer left out",
    "set": "promising sets",
    "layerwise": "by hidden states",
    "move": "small changes",
    "forward": "forward selection",
    "neighbour": "neighbours",
    "sampler": "sampler",
}


def _axes(path: Path | None, width: float, height: float) -> Any:
    """Create axes. Without a path they belong to a pyplot figure, which a notebook displays."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'ssd_generation[plots]'") from error
    if path is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=(width, height), layout="constrained")
    else:
        figure = Figure(figsize=(width, height), layout="constrained")
    return figure.add_subplot()


def plot_frontier(found: Found, profile: CostProfile, path: Path | None = None, ax: Any = None) -> Any:
    """Plot acceptance rate against draft cost of every draft tried, with the Pareto frontier and equal-speed-up lines.

    The lines assume one acceptance rate at all depths, and the profile's costs of verification.

    Args:
        found: results of a search.
        profile: the costs.
        path: PNG file to write; `None`: none.
        ax: axes to draw on; `None`: new ones.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is None:
        ax = _axes(path, 7, 4.6)
    whole = [t for t in found.tried if not t.pruned]
    by_origin: dict[str, list[Tried]] = {}
    for t in whole:
        by_origin.setdefault(t.origin, []).append(t)
    for origin, group in by_origin.items():
        ax.scatter(
            [t.draft_cost for t in group],
            [mean_acceptance(t) for t in group],
            s=16,
            alpha=0.75,
            color=_COLOURS.get(origin, "tab:blue"),
            label=for_plot(_NAMES.get(origin, origin)),
            zorder=3,
        )
    frontier = found.frontier()
    ax.plot([t.draft_cost for t in frontier], [mean_acceptance(t) for t in frontier], color="0.4", lw=1, zorder=2)
    least = min([t.draft_cost for t in whole] + [0.9])
    low = min([mean_acceptance(t) for t in frontier] + [0.8])
    ax.set_xlim(max(0.0, least - 0.06), max([t.draft_cost for t in whole] + [least + 0.3]) + 0.04)
    ax.set_ylim(max(0.0, low - 0.12), 1.02)
    _equal_speedups(ax, profile)
    for t in found.best():
        ax.scatter(
            [t.draft_cost], [mean_acceptance(t)], s=110, facecolors="none", edgecolors="tab:red", lw=1.8, zorder=4
        )
        ax.annotate(
            f"best: {t.speedup:.2f}× at draft length {t.draft_length}",
            (t.draft_cost, mean_acceptance(t)),
            xytext=(10, -14),
            textcoords="offset points",
            color="tab:red",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            zorder=5,
        )
    ax.set_xlabel("draft step / plain step")
    ax.set_ylabel("accepted / drafted tokens")
    lower = sum(mean_acceptance(t) < ax.get_ylim()[0] for t in whole)
    counts = (lower, "accepted less often than shown"), (len(found.tried) - len(whole), "given up early")
    absent = ", ".join(f"{count} {why}" for count, why in counts if count)
    ax.set_title(
        "Drafts that were tried, and lines of equal theoretical speed-up"
        + (f"\n(not shown: {absent})" if absent else ""),
        fontsize=10,
    )
    ax.legend(fontsize=8, loc="lower right", framealpha=0.9)
    return _saved(ax, path)


def _equal_speedups(ax: Any, profile: CostProfile) -> None:
    from ..config import SelfSpeculativeConfig

    costs = profile.costs(SelfSpeculativeConfig())
    plain = costs.plain_step
    verify = [costs.verify_seconds(k + 1) / plain for k in range(13)]
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    steps = 120
    xs = [left + (right - left) * i / steps for i in range(steps + 1)]
    ys = [bottom + (top - bottom) * i / steps for i in range(steps + 1)]
    grid = [
        [max([1.0] + [expected_tokens([min(y, 1.0)], k) / (k * x + verify[k]) for k in range(1, 13)]) for x in xs]
        for y in ys
    ]
    highest = max(map(max, grid))
    step = 0.1 if highest < 1.8 else 0.25 if highest < 3.5 else 1.0
    levels = [1 + step * i for i in range(1, 12)]
    lines = ax.contour(xs, ys, grid, levels=levels, colors="0.75", linewidths=0.8, zorder=1)
    ax.clabel(lines, fmt=lambda v: f"{v:g}×", fontsize=7)


def plot_progress(
    searches: Mapping[str, Found],
    path: Path | None = None,
    ax: Any = None,
    names: Sequence[str] = (),
) -> Any:
    """Plot the best theoretical speed-up so far over forward passes, a line for each search.

    Args:
        searches: results by name.
        path: PNG file to write; `None`: none.
        ax: axes to draw on; `None`: new ones.
        names: names of all searches, so that each has the same colour and marker in several plots; by default those
            drawn.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is None:
        ax = _axes(path, 8.5 if len(searches) > 1 else 7, 4.2)
    ax.axhline(1, color="0.3", lw=1, ls=":", zorder=1)
    places = {name: i for i, name in enumerate(dict.fromkeys([*names, *searches]))}
    for name, found in searches.items():
        i = places[name]
        spent, best = 0, float("-inf")
        xs: list[int] = []
        ys: list[float] = []
        better = []
        for t, passes in zip(found.tried, found.passes, strict=True):
            spent += passes
            if not t.pruned and t.speedup > best:
                best = t.speedup
                better.append(len(xs))
            if better:
                xs.append(max(spent, 1))
                ys.append(best)
        # A mark at each improvement distinguishes lines that end on the same value.
        label = f"{for_plot(name)} ({best:.2f}×)" if better else f"{for_plot(name)} (nothing yet)"
        marker = "os^Dv*PXph"[i % 10]
        style = {"color": f"C{i}", "marker": marker, "markevery": better, "ms": 5, "lw": 1.4, "zorder": 3 - i * 0.01}
        ax.step(xs, ys, where="post", label=label, **style)
    ax.set_xscale("log")
    ax.set_xlabel("forward passes of the model")
    ax.set_ylabel("best theoretical speed-up so far\n(dotted: plain decoding)")
    ax.grid(alpha=0.3)
    if len(searches) > 1:
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    else:
        ax.legend(fontsize=8)
    return _saved(ax, path)


def plot_map(found: Found, space: Space, chosen: Tried | None = None, path: Path | None = None, ax: Any = None) -> Any:
    """Plot layers × {attention, MLP}, coloured by the acceptance lost by skipping one alone, and mark the chosen draft.

    Args:
        found: results of a search; it has skipped single sub-layers if it began with a warm start.
        space: the space that was searched.
        chosen: the draft to mark; `None`: the best.
        path: PNG file to write; `None`: none.
        ax: axes to draw on; `None`: new ones.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    chosen = chosen or (found.best() or [None])[0]  # type: ignore[list-item]
    loss = sensitivities(found, space)
    kinds = [kind for kind in ("attention", "mlp") if any(n.startswith(kind) for n in space.choices)]
    layers = 1 + max(int(name.partition(".")[2]) for name in space.choices if "." in name)
    if ax is None:
        ax = _axes(path, max(6.0, 0.32 * layers + 1.6), 2.3)
    from matplotlib import colormaps

    values = [[loss.get(f"{kind}.{layer}", float("nan")) for layer in range(layers)] for kind in kinds]
    colours = colormaps["viridis_r"].with_extremes(bad="0.9")
    image = ax.imshow(values, aspect="auto", cmap=colours, vmin=0.0, vmax=1.0)
    marks = {SKIP: "×", "int8": "8", "int4": "4", KEEP: ""}
    for row, kind in enumerate(kinds):
        for layer in range(layers):
            choice = KEEP if chosen is None else chosen.choices.get(f"{kind}.{layer}", KEEP)
            dark = values[row][layer] > 0.5
            ax.text(
                layer,
                row,
                marks[choice],
                ha="center",
                va="center",
                fontsize=13 if choice == SKIP else 8,
                fontweight="bold" if choice == SKIP else "normal",
                color="white" if dark else "black",
            )
    ax.set_yticks(range(len(kinds)), [{"attention": "attention", "mlp": "MLP"}[kind] for kind in kinds])
    ax.set_xticks(range(0, layers, 2 if layers > 16 else 1))
    is_partial = any(value != value for row in values for value in row)
    ax.set_xlabel("layer (grey: not tried alone)" if is_partial else "layer")
    used = {c for name, c in (chosen.choices if chosen else {}).items() if name.startswith(tuple(kinds))}
    legend = [f"{marks[c]} = {'left out' if c == SKIP else c}" for c in (SKIP, "int8", "int4") if c in used]
    ax.set_title(f"The chosen draft ({', '.join(legend) or 'nothing left out'})", fontsize=10)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.02)
    bar.set_label("acceptance lost", fontsize=8)
    return _saved(ax, path)


def sensitivities(found: Found, space: Space) -> dict[str, float]:
    """Return the loss of acceptance rate by sub-layer, if it alone is skipped."""
    singles = [t for t in found.tried if t.origin == "single"]
    if not singles:
        return {}
    skipped = [[name for name in space.choices if t.choices[name] == SKIP] for t in singles]
    base = {name: c for name, c in singles[0].choices.items() if c != SKIP}
    reference = 1.0
    for t in found.tried:
        if all(t.choices[name] == choice for name, choice in base.items()) and SKIP not in t.choices.values():
            reference = mean_acceptance(t)
    return {
        names[0]: max(0.0, reference - mean_acceptance(t))
        for names, t in zip(skipped, singles, strict=True)
        if len(names) == 1
    }


def _saved(ax: Any, path: Path | None) -> Any:
    if path is not None:
        ax.figure.savefig(path, dpi=130, format="png")
    return ax


def plot_all(found: Found, profile: CostProfile, space: Space, folder: Path) -> Sequence[Path]:
    """Write all plots of one search into a folder, each file whole or not at all."""
    paths = [folder / name for name in ("frontier.png", "progress.png", "map.png")]
    with replacing(paths[0]) as path:
        plot_frontier(found, profile, path)
    with replacing(paths[1]) as path:
        plot_progress({"this search": found}, path)
    with replacing(paths[2]) as path:
        plot_map(found, space, path=path)
    return paths
