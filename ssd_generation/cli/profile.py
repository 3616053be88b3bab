"""`ssd profile`: what the parts of a draft step and verify passes cost here."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DEMO, DeviceMapOption, DeviceOption, DtypeOption, JsonOption, ModelArgument, ThreadsOption

if TYPE_CHECKING:
    from ..search.profile import CostProfile

HELP = """Measure what drafting costs on this machine, part by part.

A draft step is taken apart by sub-layer kind and precision, attention as a function of the context, and a verify pass \
is measured for 1 to 32 tokens. `ssd search --costs FILE` searches with it; `ssd search --from STUDY --costs FILE` \
picks another machine's best draft.

[bold]Examples[/bold]

  ssd profile demo
  ssd profile Qwen/Qwen2.5-Coder-1.5B-Instruct --dtype float32 -o laptop.json
"""


def profile(
    model: ModelArgument = DEMO,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    threads: ThreadsOption = None,
    contexts: Annotated[
        str, typer.Option(metavar="N,N,…", help="Tokens in the cache at which attention is measured.")
    ] = "64,512,2048",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="How often each pass is timed at the least.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile here.", dir_okay=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a cost profile."""
    from .console import err, out, print_json, quiet_libraries
    from .options import load, set_threads
    from .search_view import bar

    wanted = parse_contexts(contexts)
    if output is not None and not Path(os.path.expanduser(output)).absolute().parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(output.parent)!r} to write the profile in. Make it first.")
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        from ..search.profile import measure_profile

        set_threads(threads)
        target, _ = load(model, dtype, device, device_map)
        with bar() as step:
            measured = measure_profile(target, contexts=wanted, repeats=repeats, progress=step)
    if as_json:
        print_json(measured.to_dict())
    else:
        console = out()
        for table in profile_view(measured):
            console.print(table)
        for line in warnings_of(measured):
            err().print(line, style="yellow", soft_wrap=True)
    # Behind the figures: where they cannot be written, they have been seen.
    if output is not None:
        measured.save(output)
        if not as_json:
            err().print(f"Written to {output}", style="dim", soft_wrap=True)


def parse_contexts(text: str) -> list[int]:
    """Numbers with commas between them.

    Raises:
        ValueError: something else.
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
    """What speaks against the figures."""
    lines = []
    if profile.spread > 1.25:
        lines.append(
            f"The machine was busy: passes took a median of {profile.spread:.2f} times their least. Measure again when "
            "it is quiet."
        )
    off = [f"{name}: {ratio:.2f}" for name, ratio in profile.checked.items() if not 0.8 < ratio < 1.25]
    if off:
        lines.append(
            f"The parts do not add up to what a mixed draft takes (predicted / measured, {', '.join(off)}): expect "
            "speed-ups to be off by as much."
        )
    return lines


def profile_view(profile: CostProfile) -> list[Any]:
    """Tables of a profile."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..config import PrecisionConfig, SelfSpeculativeConfig

    ms = 1000.0
    plain = profile.plain_step[0]
    parts = Table(
        box=SIMPLE_HEAD,
        title=f"A plain step takes {plain * ms:.1f} ms behind {profile.contexts[0]} tokens",
        title_justify="left",
        caption=f"{profile.measured_on}; passes took a median of {profile.spread:.2f} times their least",
        caption_justify="left",
    )
    for column in ("of a draft step, in ms", "attention", "MLP", "head", "rest", "in all", "of a plain step"):
        parts.add_column(column, justify="left" if column.startswith("of a draft") else "right")
    for name in profile.mlp:
        precision = None if name == "keep" else PrecisionConfig(default=name, head=name)
        step = profile.draft_step(SelfSpeculativeConfig(precision=precision))
        parts.add_row(
            "as loaded" if name == "keep" else name,
            f"{profile.attention[name][0] * ms:.3f}",
            f"{profile.mlp[name] * ms:.3f}",
            f"{profile.head[name] * ms:.2f}",
            f"{profile.overhead[name] * ms:.2f}",
            f"{step * ms:.1f}",
            f"{step / plain:.2f}",
        )
    tables = [parts]
    if len(profile.contexts) > 1:
        attention = Table(box=SIMPLE_HEAD, title="One attention sub-layer by context", title_justify="left")
        attention.add_column("tokens")
        for context in profile.contexts:
            attention.add_column(str(context), justify="right")
        attention.add_row("ms", *(f"{seconds * ms:.3f}" for seconds in profile.attention["keep"]))
        attention.add_row("plain step, ms", *(f"{seconds * ms:.1f}" for seconds in profile.plain_step))
        tables.append(attention)
    shown = [n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if n in dict(profile.verify)]
    verify = Table(box=SIMPLE_HEAD, title="Verifying n tokens, of a plain step", title_justify="left")
    verify.add_column("n")
    for n in shown:
        verify.add_column(str(n), justify="right")
    verify.add_row("v(n)", *(f"{dict(profile.verify)[n] / plain:.2f}" for n in shown))
    tables.append(verify)
    return tables
