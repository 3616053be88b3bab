"""Output of `ssd search` and `ssd profile`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from ..config import SelfSpeculativeConfig
    from ..search.cost_profile import CostProfile
    from ..search.run_search import SearchResult
    from ..search.study import Found, Tried


@dataclass(frozen=True)
class Picked:
    """Best draft of a study by another machine's costs."""

    profile: CostProfile
    best: Tried
    config: SelfSpeculativeConfig


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr; where that is no terminal, print progress lines.

    Yields:
        A function to call with a description of the current step, the number of steps done, and the total.
    """
    from .console import LogLines, description, err

    console = err()
    if not console.is_terminal:
        lines = LogLines()
        yield lambda text, done, total: lines.say(f"{done}/{total} {text}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), description())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def step(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)

        yield step


class View:
    """Progress display of a search: a `SearchObserver`. Use it as a context manager.

    Args:
        announced: line printed when the search begins.
    """

    def __init__(self, announced: str | None = None) -> None:
        from .console import Announcement, LogLines, err

        self.console = err()
        self.announcement = Announcement(announced)
        self.live: Any = None
        self.lines = LogLines()
        self.started = time.monotonic()
        self.at_start: int | None = None
        self.name = ""

    def __enter__(self) -> View:
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, transient=True, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def stage(self, name: str) -> None:
        """Show that a stage begins."""
        self.name = name
        self._show(name, at_once=True)

    def step(self, text: str, done: int, total: int) -> None:
        """Show progress within a stage: `done` of `total` steps."""
        self._show(f"{self.name}: {text}, {done} of {total}", done=done, total=total)

    def trial(self, found: Found, trials: int) -> None:
        """Show that a trial has ended: the best draft so far, and the time left."""
        done = len(found.tried)
        if self.at_start is None:
            self.at_start, self.started = done, time.monotonic()
        best = found.best()
        parts = [describe_tried(best[0])] if best else []
        parts.append(f"{sum(t.pruned for t in found.tried)} pruned")
        made = done - self.at_start
        if made:
            left = (time.monotonic() - self.started) / made * (trials - done)
            parts.append(f"{_duration(left)} left")
        self._show(f"Searching: {done} of {trials} drafts; {'; '.join(parts)}", done=done, total=trials)

    def warn(self, text: str) -> None:
        """Print a warning that something differs from the request."""
        self.console.print(text, style="yellow", soft_wrap=True)

    def _show(self, text: str, at_once: bool = False, done: int | None = None, total: int | None = None) -> None:
        self.announcement.say()
        if self.live is not None:
            from rich.console import Group
            from rich.progress_bar import ProgressBar

            from .console import styled

            parts: list[Any] = [styled((text, "dim"))]
            if total:
                parts.insert(0, ProgressBar(total=total, completed=done or 0, width=40))
            self.live.update(Group(*parts))
        else:
            self.lines.say(text, at_once)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def describe_tried(tried: Tried) -> str:
    """Describe the best draft's figures in a line."""
    from ..search.study import mean_acceptance

    return (
        f"best {tried.speedup:.2f}× at draft length {tried.draft_length} (acceptance {mean_acceptance(tried):.0%}, "
        f"draft step {tried.draft_cost:.2f} of a plain one)"
    )


def describe_draft(config: SelfSpeculativeConfig, num_layers: int) -> list[str]:
    """Describe what a draft leaves out and computes in low bits, in lines."""
    from .layer_lists import describe_layers, describe_skip

    lines = []
    if config.skip:
        lines.append(f"leaves out {describe_skip(config.skip)}")
    precision = config.precision
    for name in ("int8", "int4"):
        if precision is None:
            continue
        parts = []
        for kind, called in (("attention", "attention"), ("mlp", "MLP")):
            kept = [i for i in range(num_layers) if i not in getattr(config.skip, kind)]
            layers = [i for i in kept if precision.of(kind, i) == name]
            if layers:
                parts.append(f"all {called}" if layers == kept else f"{called} {describe_layers(layers)}")
        if precision.head == name:
            parts.append("the LM head")
        if parts:
            others = " that is not skipped" if config.skip and any(p.startswith("all") for p in parts) else ""
            lines.append(f"{name} copies of {', '.join(parts)}{others}")
    if not lines:
        lines.append("skips nothing and copies nothing: no draft of the search pays on this machine")
    if config.lookup is not None:
        lines.append("and prompt lookup, which costs nothing")
    return lines


def picked_view(picked: Picked) -> list[str]:
    """Describe the best draft by another machine's costs, in lines."""
    best = picked.best
    lines = [f"For {picked.profile.measured_on}:", f"  trial {best.number}, {describe_tried(best)}"]
    if best.pruned:
        lines.append("  It was pruned there, so its acceptance is that of a part of the texts.")
    if best.speedup <= 1:
        lines.append("  No draft of the study pays there: with this one, generate decodes plainly.")
    return lines + [f"  {line}" for line in describe_draft(picked.config, picked.profile.num_layers)]


def result_view(result: SearchResult, num_layers: int) -> list[Any]:
    """Build the display of a search's result."""
    shown: list[Any] = [_figures_table(result)]
    shown += [f"  {line}" for line in describe_draft(result.config, num_layers)]
    if result.best.speedup < 1.0:
        shown.append("  Nothing pays on this machine: with this config, drafting by cost amounts to plain steps.")
    total = sum(result.passes.values())
    pruned = sum(t.pruned for t in result.found.tried)
    shown.append(
        f"  {len(result.found.tried)} drafts judged, {pruned} of them pruned, in {total:,} forward passes of the model"
    )
    if result.confirmed is not None:
        same = result.confirmed.identical[f"trial {result.best.number}"]
        of = len(result.confirmed.ratios[f"trial {result.best.number}"])
        shown.append(f"  texts identical to plain decoding: {same} of {of}")
    return shown


def _figures_table(result: SearchResult) -> Table:
    """Build the table of the best draft's figures: estimated, on held-out texts, and measured."""
    from ..search.confirm import NOTHING_DRAFTED
    from ..search.study import mean_acceptance

    best = result.best
    table = Table(box=SIMPLE_HEAD, title="The best draft", title_justify="left", show_header=True)
    for column, justify in (("", "left"), ("speed-up", "right"), ("draft length", "right"), ("acceptance", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    held = result.held_out
    table.add_row(
        "predicted, over this library's plain step",
        f"{best.speedup:.2f}×",
        str(best.draft_length),
        f"{mean_acceptance(best):.1%}",
    )
    if held is not None:
        table.add_row(
            f"… on {held['texts']} held-out texts",
            f"{held['speedup']:.2f}×",
            str(held["draft_length"]),
            f"{held['acceptance']:.1%}",
        )
    if result.confirmed is not None:
        name = f"trial {best.number}"
        ratios = result.confirmed.ratios[name]
        rate = result.confirmed.acceptance[name]
        table.add_row(
            f"measured, over plain generate, {len(ratios)} texts",
            f"{result.confirmed.median(name):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})",
            "by cost",
            "–" if rate is None else f"{rate:.1%}",
        )
        by_the_draft = result.confirmed.by_the_draft(name)
        if by_the_draft is not None:
            table.add_row(
                "… the loop alone, nothing drafted",
                f"{result.confirmed.median(NOTHING_DRAFTED):.2f}×",
                "–",
                "–",
            )
            table.add_row("… what the draft adds to it", f"{by_the_draft:.2f}×", "", "")
    return table
