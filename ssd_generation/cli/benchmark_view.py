"""Output of `ssd benchmark`, `ssd evaluate` and `ssd report`: progress of a run, and the tables at its end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..support.display import visible
from .console import styled

if TYPE_CHECKING:
    from ..harness.run import Progress


@contextlib.contextmanager
def live_progress(announced: str | None = None) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar with the time left and the ratios so far; where stderr is no terminal, print progress lines.

    Args:
        announced: line printed when the run begins.

    Yields:
        The observer to pass to a run.
    """
    from .console import Announcement, LogLines, description, err

    console, announcement = err(), Announcement(announced)
    if not console.is_terminal:
        lines = LogLines()

        def say(progress: Progress) -> None:
            announcement.say()
            lines.say(_line(progress))

        yield say
        announcement.say()
        return
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        description("dim"),
        console=console,
        # Estimate the time left from the calls of ten minutes; rich's default of 30 s covers only a few.
        speed_estimate_period=600,
    )
    task = bar.add_task("", total=None)
    with Live(bar, console=console, transient=True, refresh_per_second=4) as live:

        def observe(progress: Progress) -> None:
            announcement.say()
            bar.update(task, completed=progress.done, total=progress.total, description=progress.step)
            live.update(Group(bar, styled((_ratios(progress.ratios), "dim"))))

        yield observe
        announcement.say()


def _line(progress: Progress) -> str:
    ratios = _ratios(progress.ratios)
    return f"{progress.done}/{progress.total} {progress.step}{'; ' if ratios else ''}{ratios}"


def _ratios(ratios: Mapping[str, float]) -> str:
    return (
        "median ratio so far: " + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()) if ratios else ""
    )


def print_summary(
    summary: Mapping[str, Any],
    view: Callable[[Mapping[str, Any], int], RenderableType],
    written: str,
    as_json: bool,
) -> None:
    """Print the tables of a run and the folder that stores them, or the summary as one JSON document.

    Args:
        summary: contents of summary.json.
        view: function of the summary and the console's width that builds the tables.
        written: description of the folder and the plots in it.
        as_json: whether to print the JSON document instead.
    """
    from .console import err, out, print_json

    if as_json:
        print_json(summary)
        return
    console = out()
    console.print(view(summary, console.width))
    err().print(f"\nWritten to {written}", style="dim", soft_wrap=True)


def benchmark_view(summary: Mapping[str, Any], width: int) -> RenderableType:
    """Build the tables of a finished run, with the conditions below them.

    Args:
        summary: summary of the run.
        width: terminal width in columns; a wider table by category is split into several.
    """
    from ..harness.results import conditions, problems, sampling_notes

    parts: list[RenderableType] = [_overview(summary)]
    parts.append(styled("Ratio by category: median, below it the least and the greatest."))
    parts += _category_tables(summary, width)
    parts += _length_tables(summary, width)
    notes = [*sampling_notes(summary), *problems(summary)]
    parts += [styled(note) for note in notes]
    parts += [styled()] * bool(notes)
    parts += [styled((line, "dim")) for line in conditions(summary)]
    return Group(*parts)


def evaluation_view(summary: Mapping[str, Any], width: int) -> RenderableType:
    """Build the tables of a finished evaluation: quality of the answers, then speed as in a benchmark.

    Args:
        summary: summary of the run.
        width: terminal width in columns.
    """
    from ..evaluation.report import quality_notes, quality_table

    parts: list[RenderableType] = []
    if summary["quality"]:
        header, lines = quality_table(summary)
        table = _table([title.replace(" ", "\n", 1) for title in header])
        for line in lines:
            table.add_row(*map(_cell, line))
        parts.append(table)
    parts += [styled(note) for note in quality_notes(summary)]
    parts += [styled()] * bool(parts)
    return Group(*parts, benchmark_view(summary, width))


def runs_view(summaries: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Build the table of several runs.

    Args:
        summaries: summaries by run name.
    """
    from ..evaluation.report import runs_table

    header, lines = runs_table(summaries)
    table = _table([title.replace(" ", "\n", 1) for title in header])
    before = None
    for line in lines:
        if before not in (None, line[0]):
            table.add_section()
        names = ["", ""] if line[0] == before else line[:2]
        table.add_row(*map(styled, names), *map(_cell, line[2:]))
        before = line[0]
    return table


def _overview(summary: Mapping[str, Any]) -> Table:
    from ..harness.results import overview

    header, lines = overview(summary)
    table = _table([_HEADERS.get(title, title) for title in header])
    for line in lines:
        table.add_row(_method_cell(line[0]), *map(_cell, line[1:]))
    return table


def _cell(text: str) -> Text:
    """Build a cell; "0.93 (code)", "12 of 12" and "3.1 MB (0.5%)" are narrower in two lines than in one."""
    return styled(text.replace(" (", "\n").replace(")", "").replace(" of ", "/"))


_LONGEST_NAME = 18  # characters per line of a method's name, which may contain a file name of any length


def _name_lines(name: str) -> list[str]:
    """Split a method's name into lines, after hyphens and similar separators where there are any."""
    lines = [""]
    for part in re.findall(rf"[^-_. ]{{1,{_LONGEST_NAME - 1}}}[-_. ]?|[-_. ]", visible(name)):
        if len(lines[-1]) + len(part) > _LONGEST_NAME:
            lines.append("")
        lines[-1] += part
    return lines


def _method_cell(name: str) -> Text:
    return styled("\n".join(_name_lines(name)))


_HEADERS = {
    "geometric mean": "geom.\nmean",
    "worst category": "worst\ncategory",
    "decoding only": "decode\nonly",
    "identical text": "same\ntext",
    "drawn as plain, z": "drawn as\nplain, z",
    "acceptance": "accep-\ntance",
    "tokens per round": "tok./\nround",
    "engine efficiency": "effi-\nciency",
    "extra memory": "extra\nmemory",
}


def _category_tables(summary: Mapping[str, Any], width: int) -> list[Table]:
    from ..harness.results import categories_of

    return [_category_table(summary, chunk) for chunk in _chunks(summary, categories_of(summary), width)]


def _length_tables(summary: Mapping[str, Any], width: int) -> list[RenderableType]:
    """Build the tables of acceptance lengths, where any method has them."""
    from ..harness.results import length_cells, length_table

    if summary["kind"] != "methods":
        return []
    categories, lines = length_table(summary)
    if not lines:
        return []
    parts: list[RenderableType] = [
        styled("Acceptance length (mean tokens committed per verification pass): over passes, below it over prompts.")
    ]
    for chunk in _chunks(summary, categories, width):
        table = _table(["method", *map(_wrapped, chunk)])
        for name, figures in lines:
            table.add_row(_method_cell(name), *("\n".join(length_cells(figures.get(category))) for category in chunk))
        parts.append(table)
    return parts


def _chunks(summary: Mapping[str, Any], categories: list[str], width: int) -> list[list[str]]:
    """Group the categories into tables, each with as many columns as fit into the width."""
    first = max([len("method"), *(len(line) for name in summary["methods"] for line in _name_lines(name))]) + 1
    chunks: list[list[str]] = []
    taken = width
    for category in categories:
        needed = max(9, *map(len, _wrapped(category).split("\n"))) + 1
        if taken + needed > width:
            chunks.append([])
            taken = first
        chunks[-1].append(category)
        taken += needed
    return chunks


def _wrapped(category: str) -> str:
    return visible(category).replace("-", "-\n").replace(" ", "\n")


def _category_table(summary: Mapping[str, Any], categories: list[str]) -> Table:
    table = _table(["method", *map(_wrapped, categories)])
    for name, entry in summary["methods"].items():
        if "ratio" not in entry:
            continue
        cells = []
        for category in categories:
            figures = entry["ratio"]["categories"].get(category)
            if figures is None:
                cells.append("–")
            elif figures["n"] == 1:
                cells.append(f"{figures['median']:.2f}")
            else:
                cells.append(f"{figures['median']:.2f}\n{figures['min']:.2f}–{figures['max']:.2f}")
        table.add_row(_method_cell(name), *cells)
    return table


def _table(header: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for i, title in enumerate(header):
        table.add_column(styled(title), justify="left" if i == 0 else "right", no_wrap=True)
    return table
