"""`ssd benchmark`: all methods side by side, measured into a folder."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    DEMO,
    WHAT_TO_COMPARE,
    AssistantOption,
    ConfigNameOption,
    ConfigToCompareOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MethodsOption,
    ModelOption,
    OutputOption,
    SkipAttentionOption,
    SkipMlpOption,
    ThreadsOption,
)

HELP = """Measure this library beside plain decoding and its peers.

All methods decode the same prompts in one process, taking turns prompt by prompt, with a fixed number of new tokens. \
Results go to a folder as they are made; the same command with the same folder goes on after an interruption.

[bold]Examples[/bold]

  ssd benchmark --limit-per-category 1
  ssd benchmark -m Qwen/Qwen2.5-Coder-1.5B-Instruct --methods auto,auto-free,prompt-lookup-10
  ssd benchmark -m large --assistant small --prompts mt_bench_question.jsonl -o results
  ssd benchmark --methods plain-loop --paired ../older-checkout

[bold]Methods[/bold]

  auto             self_speculative="auto": whatever pays on this machine
  auto-free        the same without low-bit copies: lookup, and skipping once some pays
  lookup           drafting by prompt lookup alone
  int8, int4       all linear layers low-bit while drafting
  config, skip     --config as it is; its skip set alone
  paper            its skip set with Draft & Verify's own rule for the draft length
  random-half      a random half of all sub-layers left out
  plain-loop       this library's loop with nothing drafted
  prompt-lookup-N  transformers' prompt lookup of N tokens
  assistant        transformers' assisted decoding by --assistant
  early-exit-N     transformers' assisted decoding by the model's own first N layers
"""

_HOW = "How to run"


def benchmark(
    model: ModelOption = DEMO,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    threads: ThreadsOption = None,
    methods: MethodsOption = None,
    assistant: AssistantOption = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A .jsonl file (MT-bench, XSum, GSM8K, or prompt and category) or a .txt file of one prompt per line; "
            "may be repeated. `built-in` or none: the mixed set of the package.",
            rich_help_panel=WHAT_TO_COMPARE,
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this category; may be repeated.", rich_help_panel=WHAT_TO_COMPARE),
    ] = None,
    limit_per_category: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only the first N prompts of each.", rich_help_panel=WHAT_TO_COMPARE),
    ] = None,
    paired: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKOUT",
            help="Compare with another checkout of this library instead: each method by both, in turns.",
            rich_help_panel=WHAT_TO_COMPARE,
        ),
    ] = None,
    config: ConfigToCompareOption = None,
    config_name: ConfigNameOption = None,
    skip_attention: SkipAttentionOption = None,
    skip_mlp: SkipMlpOption = None,
    new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Of every call; end of sequence is off.", rich_help_panel=_HOW)
    ] = 48,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often each prompt is run.", rich_help_panel=_HOW)
    ] = 1,
    warm_up: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Calls of each method that are not counted.", rich_help_panel=_HOW),
    ] = 2,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of greedy decoding.", rich_help_panel=_HOW)
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Of the sampling. Default: the model's.", rich_help_panel=_HOW),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling and of random-half.", rich_help_panel=_HOW)] = 0,
    no_chat_template: Annotated[
        bool,
        typer.Option("--no-chat-template", help="Continue the prompts as they are.", rich_help_panel=_HOW),
    ] = False,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Do not measure the peak memory.", rich_help_panel=_HOW)
    ] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods, or two checkouts."""
    from .console import err, out, print_json, quiet_libraries

    # In a --json run nothing but the document may reach stdout.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        from ..benchmark.paired import check_checkout, own_methods
        from ..benchmark.runner import BenchmarkSettings, benchmark_arguments
        from ..harness.methods import default_methods
        from ..harness.prompts import load_prompts
        from ..harness.run_folder import RunFolder
        from .options import default_config, default_folder, requested_config, requested_methods

        # What can be refused is refused before anything slow begins.
        chosen = requested_config(config, config_name, skip_attention, skip_mlp)
        if chosen is None:
            chosen = default_config(model, None)
        names = requested_methods(methods, chosen, assistant, default_methods if paired is None else own_methods)
        settings = BenchmarkSettings(
            methods=names,
            new_tokens=new_tokens,
            repeats=repeats,
            warm_up=warm_up,
            do_sample=do_sample,
            temperature=temperature,
            seed=seed,
            chat_template=not no_chat_template,
            memory=not no_memory and paired is None,
        )
        wanted = load_prompts(prompts or (), category or (), limit_per_category)
        other = None if paired is None else check_checkout(paired)
        about: dict[str, Any] = {
            "model": model,
            "assistant": assistant,
            "dtype": dtype,
            "device": device,
            "device_map": device_map,
            "threads": threads,
            "paired": None if paired is None else str(paired),
        }
        path = default_folder("benchmark", model) if output is None else output
        arguments = benchmark_arguments(settings, wanted, chosen, **about)
        with RunFolder(path, arguments) as folder:
            announced = None if as_json else f"Results go to {folder.path}"
            try:
                if other is None:
                    summary = _run(folder, settings, wanted, chosen, about, announced)
                else:
                    summary = _run_paired(folder, settings, wanted, chosen, about, other, announced)
            except KeyboardInterrupt:
                kept = sum(row["kind"] in ("call", "pair") for row in folder.rows)
                err().print(
                    f"Interrupted. {kept} measured {'row is' if kept == 1 else 'rows are'} kept in {folder.path}; the "
                    f"same command with --output {folder.path} goes on from there.",
                    soft_wrap=True,
                )
                raise typer.Exit(130) from None

    if as_json:
        print_json(summary)
        return
    from .benchmark_view import benchmark_view

    console = out()
    console.print(benchmark_view(summary, console.width))
    said = "with a plot" if summary["plot"] == "plot.png" else f"plot {summary['plot']}"
    err().print(f"\nWritten to {folder.path} ({said})", style="dim", soft_wrap=True)


def _run(
    folder: Any, settings: Any, prompts: Any, config: Any, about: dict[str, Any], announced: str | None
) -> dict[str, Any]:
    from ..benchmark.runner import run_benchmark
    from .benchmark_view import live_progress
    from .options import load, set_threads

    set_threads(about["threads"])
    where = (about["dtype"], about["device"], about["device_map"])
    target, tokenizer = load(about["model"], *where)
    small = None if about["assistant"] is None else load(about["assistant"], *where)[0]
    with live_progress(announced) as observe:
        return run_benchmark(
            target, tokenizer, prompts, folder, settings, config=config, assistant=small, observe=observe
        )


def _run_paired(
    folder: Any, settings: Any, prompts: Any, config: Any, about: dict[str, Any], other: Path, announced: str | None
) -> dict[str, Any]:
    import torch

    from ..benchmark.paired import run_paired
    from ..models import fetch_demo
    from .benchmark_view import live_progress

    if about["model"] == DEMO:
        fetch_demo()  # shows its own progress, and once is enough
    load = {
        **{key: about[key] for key in ("model", "assistant", "dtype", "device_map", "threads")},
        "device": about["device"] or ("cuda" if torch.cuda.is_available() else "cpu"),
    }
    with live_progress(announced) as observe:
        return run_paired(
            prompts,
            folder,
            settings,
            other=other,
            load=load,
            config=None if config is None else config.to_dict(),
            observe=observe,
        )
