"""`ssd profile`: costs of a draft step's parts and of verification passes on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .option_groups import with_option_groups
from .options import JsonOption, ModelArgumentOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from ..search.cost_profile import CostProfile

MS = 1000.0

HELP = """Measure what drafting costs on this machine, part by part.

A draft step is broken down by sub-layer kind and precision, attention as a function of the context, and a verify pass \
is measured for 1 to 32 tokens. `ssd search --costs FILE` searches with it; `ssd search --from STUDY --costs FILE` \
picks another machine's best draft.

[bold]Examples[/bold]

  ssd profile demo
  ssd profile Qwen/Qwen2.5-Coder-1.5B-Instruct --dtype float32 -o laptop.json
"""


@dataclass(frozen=True)
class ProfileOptions:
    """Measurements, and their destination."""

    contexts: Annotated[
        str,
        typer.Option(metavar="N,N,…", help="Context lengths, in tokens, at which attention is measured."),
    ] = "64,512,2048"
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Each pass is timed at least this many times.")] = 5
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile here.", dir_okay=False)
    ] = None
    as_json: JsonOption = False


@with_option_groups
def profile(model: ModelArgumentOptions, options: ProfileOptions) -> None:
    """Measure a cost profile."""
    from .console import at_work, err, out, print_json

    contexts, output = parse_contexts(options.contexts), options.output
    if output is not None and not Path(os.path.expanduser(output)).absolute().parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(output.parent)!r} to write the profile in. Make it first.")
    with at_work(options.as_json):
        measured = _measure(model, contexts, options.repeats)
    if options.as_json:
        print_json(measured.to_dict())
    else:
        console = out()
        for table in profile_view(measured, console):
            console.print(table)
        for line in warnings_of(measured):
            err().print(line, style="yellow", soft_wrap=True)
    # After the figures are shown, so that they are not lost if they cannot be written.
    if output is not None:
        measured.save(output)
        if not options.as_json:
            err().print(f"Written to {output}", style="dim", soft_wrap=True)


def _measure(model: ModelArgumentOptions, contexts: list[int], repeats: int) -> CostProfile:
    from ..search.cost_profile import measure_profile
    from .resolve_options import load, set_threads
    from .search_view import bar

    set_threads(model.threads)
    target, _ = load(model)
    with bar() as step:
        return measure_profile(target, contexts=contexts, repeats=repeats, progress=step)


def parse_contexts(text: str) -> list[int]:
    """Parse context lengths separated by commas.

    Raises:
        ValueError: the text is not such a list, or a length is below 1.
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(
            f"--contexts takes numbers of tokens with commas between them, such as 64,512, but got {text!r}."
        )
    return numbers


def warnings_of(profile: CostProfile) -> list[str]:
    """List the reasons to doubt the figures."""
    lines = []
    if profile.spread > 1.25:
        lines.append(
            f"The machine was busy: passes took a median of {profile.spread:.2f} times their minimum. Measure again "
            "when it is quiet."
        )
    off = [f"{name}: {ratio:.2f}" for name, ratio in profile.checked.items() if not 0.8 < ratio < 1.25]
    if off:
        lines.append(
            f"The parts do not add up to what a mixed draft takes (predicted / measured, {', '.join(off)}): expect "
            "speed-ups to be off by as much."
        )
    return lines


def profile_view(profile: CostProfile, console: Console) -> list[RenderableType]:
    """Build the tables of a profile; one that is wider than the console has columns for rows."""
    tables = [_draft_step_table(profile, console)]
    if len(profile.contexts) > 1:
        tables.append(_attention_table(profile, console))
    return [*tables, _verify_table(profile, console)]


def _table(
    console: Console, title: str, rows: Sequence[Sequence[str]], caption: str = "", turned: bool = False
) -> RenderableType:
    """Build a table under its title; the first row is the head, and the first cell of each the name of the row."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head, *others = zip(*rows, strict=True) if turned else rows
    table = Table(box=SIMPLE_HEAD)
    for at, name in enumerate(head):
        table.add_column(name, justify="right" if at else "left", no_wrap=at > 0)
    for row in others:
        table.add_row(*row)
    if not turned and console.measure(table, options=console.options.update(width=10_000)).maximum > console.width:
        return _table(console, title, rows, caption, turned=True)
    below = [Text(f"{caption}\n", style="table.caption")] if caption else []
    return Group(Text(title, style="table.title"), table, *below)


def _draft_step_table(profile: CostProfile, console: Console) -> RenderableType:
    """Build the table of a draft step by its parts, in each precision."""
    from ..config import PrecisionConfig, SelfSpeculativeConfig

    plain = profile.plain_step[0]
    rows = [["of a draft step, in ms", "attention", "MLP", "head", "rest", "in all", "of a plain step"]]
    for name in profile.mlp:
        precision = None if name == "keep" else PrecisionConfig(default=name, head=name)
        step = profile.draft_step(SelfSpeculativeConfig(precision=precision))
        rows.append(
            [
                "as loaded" if name == "keep" else name,
                f"{profile.attention[name][0] * MS:.3f}",
                f"{profile.mlp[name] * MS:.3f}",
                f"{profile.head[name] * MS:.2f}",
                f"{profile.overhead[name] * MS:.2f}",
                f"{step * MS:.1f}",
                f"{step / plain:.2f}",
            ]
        )
    title = f"A plain step takes {plain * MS:.1f} ms after {profile.contexts[0]} tokens"
    caption = f"{profile.measured_on}; passes took a median of {profile.spread:.2f} times their minimum"
    return _table(console, title, rows, caption)


def _attention_table(profile: CostProfile, console: Console) -> RenderableType:
    """Build the table of attention and a plain step by context length."""
    rows = [
        ["tokens", *map(str, profile.contexts)],
        ["ms", *(f"{seconds * MS:.3f}" for seconds in profile.attention["keep"])],
        ["plain step, ms", *(f"{seconds * MS:.1f}" for seconds in profile.plain_step)],
    ]
    return _table(console, "One attention sub-layer by context", rows)


def _verify_table(profile: CostProfile, console: Console) -> RenderableType:
    """Build the table of the cost of verifying n tokens."""
    verify = dict(profile.verify)
    shown = [n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if n in verify]
    rows = [["n", *map(str, shown)], ["v(n)", *(f"{verify[n] / profile.plain_step[0]:.2f}" for n in shown)]]
    return _table(console, "Verifying n tokens, of a plain step", rows)
