"""`ssd evaluate` and `ssd report`: is it still as good, and how fast is it then; and runs side by side."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    DEMO,
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

if TYPE_CHECKING:
    from ..evaluation.runner import Processes

HELP = """Measure the quality of the answers, and the speed, of this library beside plain decoding and its peers.

All methods answer the same questions in one process, taking turns question by question. Answers end where the model \
ends them. Results go to a folder as they are made; the same command with the same folder goes on after an interruption.

[bold]Tasks[/bold]

  summarisation  articles with reference summaries: ROUGE-1, -2 and -L
  code           functions to write (HumanEval, pip install "ssd_generation\\[code]"): pass@k
  chat           prompts of any kind, or the built-in mixed set: texts beside plain decoding's

[bold]Examples[/bold]

  ssd evaluate summarisation --limit 8
  ssd evaluate summarisation -m MODEL --data cnn_dailymail --limit 100 --style paper
  ssd evaluate code -m Qwen/Qwen2.5-Coder-1.5B-Instruct --allow-code-execution
  ssd evaluate code --do-sample --temperature 0.6 --top-p 0.95 --answers 10 --k 1,10
  accelerate launch --num_processes 4 -m ssd_generation evaluate chat --data questions.jsonl -o results
  ssd report results other-results

`ssd benchmark --help` tells what the methods are.
"""

REPORT_HELP = """Put several runs side by side.

Takes the folders that `ssd evaluate` and `ssd benchmark` have written, and prints one table of all their methods; \
with --output also as a page and a plot.

[bold]Example[/bold]

  ssd report laptop server -o comparison
"""

_WHAT = "What to ask"
_HOW = "How to run"
_CODE = "Generated code"


def evaluate(
    task: Annotated[str, typer.Argument(metavar="TASK", help="summarisation, code or chat.")],
    model: ModelOption = DEMO,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Spread the model over all processes, which then answer every question together: for models larger "
            "than one device. Under torchrun or accelerate launch.",
            rich_help_panel="Model",
        ),
    ] = False,
    threads: ThreadsOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Where the questions come from; may be repeated. Summarisation: a .jsonl file with article and "
            "reference, cnn_dailymail, xsum, or another data set of the Hub. Code: a .jsonl file as HumanEval's. Chat: "
            ".jsonl (MT-bench, Spec-Bench, or prompt and category) or .txt. Default: HumanEval for code, else the "
            "package's.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Only the first N questions of each source (chat: of each category).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    style: Annotated[
        str,
        typer.Option(
            help="chat: an instruction in the chat template. paper: text to go on with, as in Draft & Verify. auto: "
            "chat where there is a template.",
            rich_help_panel=_WHAT,
        ),
    ] = "auto",
    shots: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Articles with summaries before the one that is asked, in the style paper. Default: 1.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    methods: MethodsOption = None,
    assistant: AssistantOption = None,
    config: ConfigToCompareOption = None,
    config_name: ConfigNameOption = None,
    skip_attention: SkipAttentionOption = None,
    skip_mlp: SkipMlpOption = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Of an answer, at the most. Default: 128; for code 384.", rich_help_panel=_HOW
        ),
    ] = None,
    answers: Annotated[
        int, typer.Option(min=1, metavar="N", help="To each question; with --do-sample.", rich_help_panel=_HOW)
    ] = 1,
    k: Annotated[
        str, typer.Option("--k", metavar="NUMBERS", help="Of pass@k, with commas between them.", rich_help_panel=_HOW)
    ] = "1",
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of greedy decoding.", rich_help_panel=_HOW)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Of the sampling. Default: the model's.", rich_help_panel=_HOW)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Of the sampling. Default: the model's.", rich_help_panel=_HOW)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling and of random-half.", rich_help_panel=_HOW)] = 0,
    warm_up: Annotated[
        int, typer.Option(min=0, metavar="N", help="Calls of each method that are not counted.", rich_help_panel=_HOW)
    ] = 1,
    no_memory: Annotated[
        bool,
        typer.Option(
            "--no-memory",
            help="Do not measure the peak memory, by a call of its own: 16 tokens of the first answer.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="Run the programs that the model has written, in a sandbox: without network, without your files, "
            "with limits on time and memory. Without it they are kept, and not judged.",
            rich_help_panel=_CODE,
        ),
    ] = False,
    allow_weaker_sandbox: Annotated[
        bool,
        typer.Option(
            "--allow-weaker-sandbox",
            help="Run them also where the kernel does not hold them: outside Linux, or where seccomp or Landlock is "
            "off. Python's own checks stop accidents then, and no program that means harm.",
            rich_help_panel=_CODE,
        ),
    ] = False,
    code_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="That each program may take.", rich_help_panel=_CODE)
    ] = 10.0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let all methods answer the questions of a task."""
    from .console import err, out, print_json, quiet_libraries

    group = _processes()
    is_first = group is None or group.process_index == 0
    if group is not None and output is None:
        raise ValueError("Several processes share a run by its folder: name it with --output.")
    if tensor_parallel and group is None:
        raise ValueError("--tensor-parallel needs several processes: start it with torchrun or accelerate launch.")
    # In a --json run nothing but the document may reach stdout.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        from ..evaluation.runner import CodeExecution, EvaluationSettings, default_methods, run_evaluation
        from ..evaluation.sandbox import Limits, run_program
        from ..evaluation.tasks import TASKS, check_data, make_task
        from .benchmark_view import live_progress
        from .options import default_config, default_folder, load, requested_config, requested_methods, set_threads

        # What can be refused is refused before anything slow begins.
        if task not in TASKS:
            raise ValueError(f"There is no task {task!r}. Choose from {', '.join(TASKS)}.")
        chosen = requested_config(config, config_name, skip_attention, skip_mlp)
        if chosen is None:
            chosen = default_config(model, None)
        names = requested_methods(methods, chosen, assistant, default_methods)
        ks = _numbers(k)

        def settings_for(length: int) -> EvaluationSettings:
            return EvaluationSettings(
                methods=names,
                repeats=answers,
                warm_up=warm_up,
                do_sample=do_sample,
                temperature=temperature,
                seed=seed,
                memory=not no_memory,
                new_tokens=length,
                top_p=top_p,
                ks=ks,
            )

        settings_for(new_tokens or 1)
        check_data(task, data or ())
        code = None
        if allow_code_execution and task == "code":
            code = CodeExecution(Limits(seconds=code_seconds), allow_weaker_sandbox)
            try:
                run_program("", code.limits, code.allow_weaker)
            except RuntimeError as error:
                raise ValueError(f"{error} Here: --allow-weaker-sandbox, or no --allow-code-execution.") from error
        set_threads(threads)
        if device is None and device_map is None and group is not None and not tensor_parallel:
            device = str(getattr(group, "device", "cpu"))
        target, tokenizer = load(model, dtype, device, device_map, tensor_parallel)
        asked = make_task(task, tokenizer, data or (), style=style, shots=shots, limit=limit)
        small = None
        if assistant is not None:
            small, other = load(assistant, dtype, device, device_map, tensor_parallel)
            _check_vocabularies(tokenizer, other, assistant)
        settings = settings_for(new_tokens or asked.new_tokens)
        about: dict[str, Any] = {
            "model": model,
            "assistant": assistant,
            "dtype": dtype,
            "device": device if group is None else None,  # differs from process to process
            "device_map": device_map,
            "tensor_parallel": tensor_parallel,
            "threads": threads,
        }
        path = Path(os.path.expanduser(default_folder("evaluate", model) if output is None else output))
        announced = None if as_json else f"Results go to {path}"
        try:
            with live_progress(announced) if is_first else contextlib.nullcontext() as observe:
                summary = run_evaluation(
                    target,
                    tokenizer,
                    asked,
                    path,
                    settings,
                    about=about,
                    config=chosen,
                    assistant=small,
                    code=code,
                    processes=group,
                    together=tensor_parallel,
                    observe=observe,
                )
        except KeyboardInterrupt:
            err().print(
                f"Interrupted. What was measured is kept in {path}; the same command with --output {path} goes on from "
                "there.",
                soft_wrap=True,
            )
            raise typer.Exit(130) from None

    if summary is None:
        return
    if as_json:
        print_json(summary)
        return
    from .benchmark_view import evaluation_view

    console = out()
    console.print(evaluation_view(summary, console.width))
    said = f"with {', '.join(summary['plots'])}" if summary["plots"] else f"plot {summary['plot']}"
    err().print(f"\nWritten to {path} ({said})", style="dim", soft_wrap=True)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"--k wants numbers with commas between them, such as 1,10, but got {text!r}.") from None


def _check_vocabularies(tokenizer: Any, other: Any, name: str) -> None:
    """Complain about an assistant that writes other tokens."""
    if tokenizer.get_vocab() != other.get_vocab():
        raise ValueError(
            f"The assistant {name!r} has another vocabulary than the model, so their texts cannot be compared token by "
            "token. transformers can draft across tokenizers (generate(..., tokenizer=…, assistant_tokenizer=…)), at "
            "the price of decoding and encoding every draft; this command does not. Choose an assistant of the same "
            "family."
        )


def _processes() -> Processes | None:
    """The processes that `accelerate launch` or `torchrun` has started; `None` for one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError('Several processes need accelerate: pip install "ssd_generation[accelerate]"') from error
    from datetime import timedelta

    import torch

    # One process may be done hours before another.
    state: Processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))
    return state


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Of finished or unfinished runs.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Also write report.md and report.png there."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Put runs side by side."""
    from ..evaluation.report import check_report_folder, plot_runs, read_summaries, runs_markdown
    from ..support.files import replacing, write_whole
    from .benchmark_view import runs_view
    from .console import err, out, print_json, quiet_libraries

    summaries = read_summaries(folders)
    if output is not None:
        output = Path(os.path.expanduser(output))
        check_report_folder(output)
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / "report.md", runs_markdown(summaries))
        # matplotlib has something to say of each letter that its font lacks.
        with quiet_libraries(), replacing(output / "report.png") as path:
            plot_runs(summaries, path)
    if as_json:
        print_json(summaries)
        return
    console = out()
    console.print(runs_view(summaries))
    if output is not None:
        err().print(f"\nWritten to {output}", style="dim", soft_wrap=True)
