"""What the rows of a run amount to: medians, a table, a plot. Pure functions of the rows."""

from __future__ import annotations

import math
import statistics as averages
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..comparison import first_difference
from ..config import Costs
from ..statistics import SpeculationStatistics
from .methods import PLAIN

__all__ = ["engine_efficiency", "markdown", "plot_summary", "ratios_so_far", "spread", "summarise", "summarise_pairs"]

Row = Mapping[str, Any]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, quartiles, least and greatest value, and how many there are; `None` where there are none."""
    if not values:
        return None
    low, _, high = averages.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {
        "n": len(values),
        "median": averages.median(values),
        "q1": low,
        "q3": high,
        "min": min(values),
        "max": max(values),
    }


def _geometric_mean(values: Iterable[float]) -> float | None:
    logarithms = [math.log(value) for value in values]
    return math.exp(averages.fmean(logarithms)) if logarithms else None


# ----------------------------------------------------------------------------------------------------------------------
# one call beside the plain one


def _rate(row: Row) -> float:
    return float(len(row["token_ids"]) / row["seconds"])


def _ratio(row: Row, plain: Row) -> float:
    """Tokens per second of the whole call relative to plain decoding."""
    return _rate(row) / _rate(plain)


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
        looked_up_tokens=done["looked_up_tokens"],
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


def _calls(rows: Iterable[Row], kind: str = "call") -> list[Row]:
    return [row for row in rows if row["kind"] == kind and "error" not in row]


def _beside_plain(rows: Iterable[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Per method, its calls with the plain call of the same prompt, repeat and session."""
    calls = _calls(rows)
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
        for method, pairs in _beside_plain(rows).items()
    }
    pairs: dict[str, list[float]] = defaultdict(list)
    for row in _calls(rows, "pair"):
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


def _identity(pairs: Sequence[tuple[Row, Row]], margins: Mapping[tuple[Any, ...], Row]) -> dict[str, Any]:
    """How many texts are plain decoding's, and where the others part."""
    parted = []
    for row, plain in pairs:
        index = first_difference(plain["token_ids"], row["token_ids"])
        if index is not None:
            known = margins.get((row["prompt"], row["method"], row["repeat"]), {})
            parted.append(
                {
                    "prompt": row["prompt"],
                    "repeat": row["repeat"],
                    "token": index + 1,
                    "logit_margin": known.get("logit_margin"),
                }
            )
    found = [entry["logit_margin"] for entry in parted if entry["logit_margin"] is not None]
    return {
        "calls": len(pairs),
        "identical": len(pairs) - len(parted),
        "largest_margin": max(found) if found else None,
        "differences": parted,
    }


def summarise(
    rows: Sequence[Row],
    arguments: Mapping[str, Any],
    environment: Mapping[str, Any] | None = None,
    weight_bytes: int | None = None,
) -> dict[str, Any]:
    """All figures of a run, finished or not.

    Args:
        rows: the lines of rows.jsonl.
        arguments: of the run: `methods`, `do_sample`, …
        environment: the machine.
        weight_bytes: of the model; memory is given as a share of it.
    """
    pairs = _beside_plain(rows)
    plain_calls = [row for row in _calls(rows) if row["method"] == PLAIN]
    prompts = {(row["prompt"], row["category"]) for row in _calls(rows)}
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
            entry["decode_ratio"] = _ratio_summary(_by_category(own, _decode_ratio, lambda row: row["category"]))
            entry["tokens_per_second"] = spread([_rate(row) for row, _ in own])
            if not arguments["do_sample"]:
                entry["text"] = _identity(own, margins)
            entry["drafting"] = _drafting([row for row, _ in own])
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
        "environment": environment,
        "weight_bytes": weight_bytes,
        "prompts_per_category": _count(category for _, category in sorted(prompts)),
        "plain": {
            "calls": len(plain_calls),
            "tokens_per_second": spread([_rate(row) for row in plain_calls]),
            "step_seconds": spread(_known(_step_seconds(row) for row in plain_calls)),
            "prompt_seconds": spread([row["prompt_seconds"] for row in plain_calls]),
            "errors": _errors(rows, PLAIN),
        },
        "methods": methods,
    }


def summarise_pairs(
    rows: Sequence[Row], arguments: Mapping[str, Any], environment: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All figures of a paired run; ratios above 1 mean that this checkout is faster than the other.

    Args:
        rows: the lines of rows.jsonl.
        arguments: of the run.
        environment: the machine.
    """
    calls = _calls(rows, "pair")
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
        "environment": environment,
        "prompts_per_category": _count(category for _, category in sorted(prompts)),
        "methods": methods,
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


# ----------------------------------------------------------------------------------------------------------------------
# in words


_NONE = "–"


def _figure(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return _NONE if value is None else f"{value:.{digits}%}"


def _share(part: int, whole: int) -> str:
    return "all" if part == whole else f"{part} of {whole}"


def _markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{'|'.join(['---'] * len(header))}|",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


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
    header = ["method", "geometric mean", "worst category"]
    header += ["identical text"] if paired else ["decoding only", "identical text"]
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
        text, drafting = entry.get("text"), entry["drafting"] or {}
        efficiency, memory = entry["engine_efficiency"], entry["memory"]
        lines.append(
            [
                *line,
                _figure(entry["decode_ratio"]["geometric_mean"]),
                _NONE if text is None else _share(text["identical"], text["calls"]),
                _percent(drafting.get("acceptance_rate")),
                _figure(drafting.get("tokens_per_round")),
                _NONE if efficiency is None else _figure(efficiency["median"]),
                _NONE if memory is None else memory_cell(memory),
            ]
        )
    return header, lines


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
    arguments, environment = summary["arguments"], summary["environment"] or {}
    prompts = sum(summary["prompts_per_category"].values())
    decoding = "sampling" if arguments["do_sample"] else "greedy"
    lines = [
        f"{prompts} prompts in {len(summary['prompts_per_category'])} categories, {arguments['repeats']} "
        f"{'repeat' if arguments['repeats'] == 1 else 'repeats'}, {arguments['new_tokens']} new tokens (end of "
        f"sequence off), {decoding}, methods interleaved prompt by prompt."
    ]
    if environment:
        versions = environment["versions"]
        place = environment["device"]
        if "cpu" in environment:
            place = f"{environment['cpu']}, {environment['threads']} of {environment['cpu_count']} CPUs"
        commit = f" ({environment['commit'][:10]})" if environment.get("commit") else ""
        lines.append(
            f"{environment['model']} in {environment['dtype']} ({environment['attention_implementation']}) on {place}; "
            f"torch {versions['torch']}, transformers {versions['transformers']}, ssd_generation "
            f"{versions['ssd_generation']}{commit}."
        )
    if summary["kind"] == "paired":
        lines.append("Ratios above 1 mean that this checkout is faster than the other.")
    else:
        lines.append(
            "Ratios are tokens per second relative to plain decoding of the same prompt and repeat; above 1 is faster. "
            "The geometric mean is that of the categories' medians."
        )
    return lines


def problems(summary: Mapping[str, Any]) -> list[str]:
    """Methods that failed, and texts that differ from plain decoding's."""
    failures: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entry in summary["methods"].items():
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
                f"token {first['token']} of {first['prompt']}{known}."
            )
    return lines


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a page."""
    header, lines = overview(summary)
    page = ["# Benchmark", "", *conditions(summary), ""]
    if not summary.get("complete", True):
        page += [f"**Unfinished**: {summary['rows_done']} of {summary['rows']} rows.", ""]
    page += [*_markdown_table(header, lines), ""]
    categories = categories_of(summary)
    if categories:
        page += ["## By category", "", "Median ratio (least–greatest).", ""]
        page += _markdown_table(
            ["method", *categories],
            (
                [name, *(category_cell(entry["ratio"]["categories"].get(category)) for category in categories)]
                for name, entry in summary["methods"].items()
                if "ratio" in entry
            ),
        )
        page.append("")
    if summary["kind"] == "methods":
        own = {name: entry["drafting"] for name, entry in summary["methods"].items() if entry.get("drafting")}
        if own:
            page += ["## Where the time goes", ""]
            page += _markdown_table(
                ["method", "prompt", "draft", "verify", "elsewhere", "drafted per round", "acceptance by depth"],
                (
                    [
                        name,
                        *(_percent(figures["share_of_time"][p], 1) for p in ("prompt", "draft", "verify", "elsewhere")),
                        _figure(figures["drafted_per_round"]),
                        " ".join(_figure(rate) for rate in figures["acceptance_by_depth"]) or _NONE,
                    ]
                    for name, figures in own.items()
                ),
            )
            page.append("")
    notes = problems(summary)
    if notes:
        page += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(page)


# ----------------------------------------------------------------------------------------------------------------------
# as a picture

# Okabe and Ito's colours, which colour-blind people can tell apart, and a marker each.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
_MARKERS = "osD^vP*X<>"


def plot_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios by category: medians with quartiles (thick) and least and greatest value (thin).

    Args:
        summary: of `summarise` or `summarise_pairs`.
        path: the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import ScalarFormatter
    except ImportError as error:
        raise ImportError('The plot needs matplotlib: pip install "ssd_generation[plots]"') from error

    categories = categories_of(summary)
    methods = {name: entry["ratio"] for name, entry in summary["methods"].items() if entry.get("ratio")}
    places = [*categories, "all"]
    figure = Figure(figsize=(max(7.0, 1.6 + len(places) * (0.5 + 0.16 * len(methods))), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(1.0, color="0.3", linewidth=1, zorder=1)
    step = 0.8 / max(len(methods), 1)
    for i, (name, ratio) in enumerate(methods.items()):
        style: dict[str, Any] = {"color": _COLOURS[i % len(_COLOURS)]}
        offset = (i - (len(methods) - 1) / 2) * step
        points = []
        for x, category in enumerate(categories):
            figures = ratio["categories"].get(category)
            if figures is not None:
                points.append((x + offset, figures["median"]))
                axes.plot([x + offset] * 2, [figures["min"], figures["max"]], linewidth=1, alpha=0.6, zorder=2, **style)
                axes.plot([x + offset] * 2, [figures["q1"], figures["q3"]], linewidth=3.5, alpha=0.6, zorder=2, **style)
        points.append((len(categories) + offset, ratio["geometric_mean"]))
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            marker=_MARKERS[i % len(_MARKERS)],
            s=34,
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
            label=name,
            **style,
        )
    for x in range(len(places)):
        if x % 2:
            axes.axvspan(x - 0.5, x + 0.5, color="0.95", zorder=0)
    axes.axvline(len(categories) - 0.5, color="0.6", linewidth=1, linestyle=":")
    counts = summary["prompts_per_category"]
    labels = [f"{_broken(category)}\n(n = {counts[category]})" for category in categories]
    axes.set_xticks(range(len(places)), [*labels, "geometric\nmean"])
    axes.set_xlim(-0.5, len(places) - 0.5)
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
    axes.grid(axis="y", color="0.88", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    other = "the other checkout" if summary["kind"] == "paired" else "plain decoding"
    axes.set_ylabel(f"speed relative to {other}")
    environment = summary["environment"] or {}
    if environment:
        axes.set_title(
            f"{environment['model']}, {environment['dtype']}, {environment['device']}: median, quartiles (thick), "
            "range (thin)",
            fontsize=10,
            loc="left",
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if methods:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _broken(category: str) -> str:
    """A long label on two lines."""
    for separator in ("-", " ", "_"):
        if separator in category and len(category) > 10:
            first, rest = category.split(separator, 1)
            return f"{first}{separator if separator == '-' else ''}\n{rest}"
    return category
