"""`ssd benchmark`: all methods measured side by side, with the results in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .option_groups import with_option_groups
from .options import DEMO, MAX_SEED, ComparedConfigOptions, MeasuredModelOptions, MethodOptions, ResultOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..benchmark.run_benchmark import BenchmarkSettings
    from ..config import SelfSpeculativeConfig
    from ..harness.peer_methods import PeerModel
    from ..harness.results import RunFolder
    from ..harness.texts import Prompt

HELP = """Compare the speed of this library with plain decoding and its peers.

All methods decode the same prompts, interleaved prompt by prompt, with a fixed number of new tokens. \
Results go to a folder as they are made; the same command with the same folder continues after an interruption.

[bold]Examples[/bold]

  ssd benchmark --limit-per-category 1
  ssd benchmark -m Qwen/Qwen2.5-Coder-1.5B-Instruct --methods auto,auto-free,prompt-lookup-10
  ssd benchmark -m large --assistant small --prompts spec_bench/question.jsonl -o results
  ssd benchmark -m large --prompts speed/throughput_1k/test.parquet --limit-per-category 8
  ssd benchmark -m folder --gguf model-bf16.gguf --gguf model-q4_0.gguf
  ssd benchmark -m folder --openvino folder-of-its-export
  ssd benchmark --methods plain-loop --paired ../older-checkout

[bold]Methods[/bold]

  auto             self_speculative="auto": the fastest way to draft on this machine
  auto-free        the same without low-bit copies: lookup, and layer skipping once it pays
  lookup           drafting by prompt lookup alone
  int8, int4       all linear layers and experts low-bit while drafting
  config, skip     --config as it is; its skip set alone
  paper            its skip set with Draft & Verify's own rule for the draft length
  random-half      a random half of all sub-layers left out
  plain-loop       this library's loop with nothing drafted
  prompt-lookup-N  transformers' prompt lookup of N tokens
  assistant        transformers' assisted decoding by --assistant
  early-exit-N     transformers' assisted decoding by the model's own first N layers
  llama.cpp-NAME   llama.cpp by the GGUF file --gguf …/NAME.gguf
  openvino-NAME    OpenVINO GenAI by the folder --openvino …/NAME
  openvino-prefix-cache-NAME
                   the same, with the prompt in its cache from an earlier call
"""


@dataclass(frozen=True)
class ComparisonOptions(MethodOptions):
    """Methods, the prompts that they decode, and another checkout to compare with."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A .jsonl file (Spec-Bench, MT-bench, XSum, GSM8K, or prompt and category), a .jsonl or .parquet file "
            "of SPEED-Bench, or a .txt file of one prompt per line; may be repeated. Later turns follow plain "
            "decoding's answers. `built-in` or none: the mixed set of the package.",
        ),
    ] = None
    category: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this category; may be repeated.")] = (
        None
    )
    limit_per_category: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts of each category.")
    ] = None
    gguf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="The same model as a GGUF file: llama.cpp decodes with it alongside the others, as the method "
            "`llama.cpp-NAME` of NAME.gguf; may be repeated. Needs `pip install xllamacpp`.",
        ),
    ] = None
    openvino: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="The same model as a folder of `optimum-cli export openvino`, or as a GGUF file: OpenVINO GenAI "
            "decodes with it, as the methods `openvino-NAME` and, with the prompt cached, "
            "`openvino-prefix-cache-NAME`; may be repeated. Needs `pip install openvino-genai`.",
        ),
    ] = None
    paired: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKOUT",
            help="Compare with another checkout of this library instead: each method by both, interleaved.",
        ),
    ] = None


@dataclass(frozen=True)
class CallOptions:
    """Settings of every method's calls."""

    panel: ClassVar[str] = "How to run"

    new_tokens: Annotated[
        int,
        typer.Option(
            "--new-tokens",
            "--max-new-tokens",
            min=2,
            metavar="N",
            help="New tokens of every call; end of sequence is off.",
        ),
    ] = 48
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="How often each prompt is run.")] = 1
    warm_up: Annotated[int, typer.Option(min=0, metavar="N", help="Calls of each method that are not counted.")] = 2
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of greedy decoding.")] = False
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Temperature of the sampling. Default: the model's.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the sampling and of random-half.")] = 0
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompts as they are, not as chats.")
    ] = False
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Do not measure the peak memory.")] = False


@with_option_groups
def benchmark(
    model: MeasuredModelOptions,
    compared: ComparisonOptions,
    draft: ComparedConfigOptions,
    calls: CallOptions,
    results: ResultOptions,
) -> None:
    """Compare methods, or two checkouts."""
    from .console import at_work

    with at_work(results.as_json):
        # Invalid options are rejected before anything slow begins.
        request = parse(model, compared, draft, calls)
        summary, path = _run(request, model, results)
    _print_summary(summary, path, results.as_json)


@dataclass(frozen=True)
class Request:
    """Parsed request, checked as far as possible without the model.

    Attributes:
        settings: the methods, and the settings of their calls.
        prompts: prompts that the methods decode.
        config: config of the methods that need one.
        about: the model and its placement, as recorded in the run's config.json.
        other: root of the other checkout, where two are compared.
        peers: models of other runtimes, by method name.
    """

    settings: BenchmarkSettings
    prompts: Sequence[Prompt]
    config: SelfSpeculativeConfig | None
    about: dict[str, Any]
    other: Path | None
    peers: Mapping[str, PeerModel]


def parse(
    model: MeasuredModelOptions, compared: ComparisonOptions, draft: ComparedConfigOptions, calls: CallOptions
) -> Request:
    """Build the request from the options.

    Raises:
        ValueError, TypeError, FileNotFoundError: the options contradict one another, or name something missing.
        ImportError: another runtime is requested but not installed.
    """
    from ..benchmark.paired import check_checkout, own_methods
    from ..benchmark.run_benchmark import BenchmarkSettings
    from ..harness.methods import default_methods
    from ..harness.texts import load_prompts
    from .configs import config_to_compare, requested_methods
    from .peers import described_models, peer_models

    config = config_to_compare(draft, model.model)
    is_paired = compared.paired is not None
    peers = peer_models(model, compared.gguf, compared.openvino, is_paired)
    settings = BenchmarkSettings(
        methods=requested_methods(compared, config, own_methods if is_paired else default_methods, peers),
        new_tokens=calls.new_tokens,
        repeats=calls.repeats,
        warm_up=calls.warm_up,
        do_sample=calls.do_sample,
        temperature=calls.temperature,
        seed=calls.seed,
        chat_template=not calls.no_chat_template,
        memory=not calls.no_memory and not is_paired,
    )
    about: dict[str, Any] = {
        "model": model.model,
        "assistant": compared.assistant,
        "dtype": model.dtype,
        "device": model.device,
        "device_map": model.device_map,
        "threads": model.threads,
        "paired": None if compared.paired is None else str(compared.paired),
    }
    prompts = load_prompts(compared.prompts or (), compared.category or (), compared.limit_per_category)
    other = None if compared.paired is None else check_checkout(compared.paired)
    # Last, since hashing a large file takes seconds.
    about |= described_models(peers)
    return Request(settings=settings, prompts=prompts, config=config, about=about, other=other, peers=peers)


def _run(request: Request, model: MeasuredModelOptions, results: ResultOptions) -> tuple[dict[str, Any], Path]:
    """Run the benchmark, and return its summary and its folder."""
    from ..benchmark.run_benchmark import benchmark_arguments
    from ..harness.results import RunFolder
    from .console import resumable
    from .resolve_options import default_folder

    path = default_folder("benchmark", model.model) if results.output is None else results.output
    arguments = benchmark_arguments(request.settings, request.prompts, request.config, **request.about)
    with RunFolder(path, arguments) as folder:
        announced = None if results.as_json else f"Results go to {folder.path}"

        def kept() -> str:
            count = sum(row["kind"] in ("call", "pair") for row in folder.rows)
            return f"{count} measured {'row is' if count == 1 else 'rows are'} stored in {folder.path}"

        with resumable(folder.path, kept):
            if request.other is None:
                return _run_methods(request, folder, model, announced), folder.path
            return _run_paired(request, folder, request.other, announced), folder.path


def _run_methods(
    request: Request, folder: RunFolder, model: MeasuredModelOptions, announced: str | None
) -> dict[str, Any]:
    from ..benchmark.run_benchmark import run_benchmark
    from .benchmark_view import live_progress
    from .resolve_options import load, set_threads

    set_threads(model.threads)
    target, tokenizer = load(model)
    assistant = request.about["assistant"]
    small = None if assistant is None else load(model, assistant)[0]
    with live_progress(announced) as observe:
        return run_benchmark(
            target,
            tokenizer,
            request.prompts,
            folder,
            request.settings,
            config=request.config,
            assistant=small,
            observe=observe,
            peers=request.peers,
        )


def _run_paired(request: Request, folder: RunFolder, other: Path, announced: str | None) -> dict[str, Any]:
    import torch

    from ..benchmark.paired import run_paired
    from ..models import fetch_demo
    from .benchmark_view import live_progress

    about = request.about
    if about["model"] == DEMO:
        fetch_demo()  # here, so that its progress is shown once, not by each checkout's process
    load = {
        **{key: about[key] for key in ("model", "assistant", "dtype", "device_map", "threads")},
        "device": about["device"] or ("cuda" if torch.cuda.is_available() else "cpu"),
    }
    with live_progress(announced) as observe:
        return run_paired(
            request.prompts,
            folder,
            request.settings,
            other=other,
            load=load,
            config=None if request.config is None else request.config.to_dict(),
            observe=observe,
        )


def _print_summary(summary: dict[str, Any], path: Path, as_json: bool) -> None:
    from .benchmark_view import benchmark_view, print_summary

    plot = "with a plot" if summary["plot"] == "plot.png" else f"plot {summary['plot']}"
    print_summary(summary, benchmark_view, f"{path} ({plot})", as_json)
