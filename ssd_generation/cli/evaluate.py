"""`ssd evaluate` and `ssd report`: quality and speed of the methods' answers; runs side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .option_groups import with_option_groups
from .options import MAX_SEED, ComparedConfigOptions, JsonOption, MeasuredModelOptions, MethodOptions, ResultOptions

if TYPE_CHECKING:
    from ..config import SelfSpeculativeConfig
    from ..evaluation.evaluate_model import CodeExecution, EvaluationSettings, Processes

HELP = """Measure the quality of the answers, and the speed, of this library compared with plain decoding and its peers.

All methods answer the same questions in one process, interleaved question by question. Answers end where the model \
ends them. Results go to a folder as they are made; the same command with the same folder continues after an \
interruption.

[bold]Tasks[/bold]

  summarisation  articles with reference summaries: ROUGE-1, -2 and -L
  code           functions to write (HumanEval, pip install "ssd_generation\\[code]"): pass@k
  chat           prompts of any kind, or the built-in mixed set: texts compared with plain decoding's

[bold]Examples[/bold]

  ssd evaluate summarisation --limit 8
  ssd evaluate summarisation -m MODEL --data cnn_dailymail --limit 100 --style paper
  ssd evaluate code -m Qwen/Qwen2.5-Coder-1.5B-Instruct --allow-code-execution
  ssd evaluate code --do-sample --temperature 0.6 --top-p 0.95 --answers 10 --k 1,10
  accelerate launch --num_processes 4 -m ssd_generation evaluate chat --data questions.jsonl -o results
  ssd report results other-results

`ssd benchmark --help` describes the methods.
"""

REPORT_HELP = """Put several runs side by side.

Takes the folders that `ssd evaluate` and `ssd benchmark` have written, and prints one table of all their methods; \
with --output also as a page and a plot.

[bold]Example[/bold]

  ssd report laptop server -o comparison
"""


@dataclass(frozen=True)
class SharedModelOptions(MeasuredModelOptions):
    """Model options where several processes may take part."""

    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Spread the model over all processes, which then answer every question together: for models larger "
            "than one device. Under torchrun or accelerate launch.",
        ),
    ] = False


@dataclass(frozen=True)
class QuestionOptions:
    """Questions, and the form in which they are asked."""

    panel: ClassVar[str] = "What to ask"

    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Where the questions come from; may be repeated. Summarisation: a .jsonl file with article and "
            "reference, cnn_dailymail, xsum, or another data set of the Hub. Code: a .jsonl file as HumanEval's. Chat: "
            ".jsonl (MT-bench, Spec-Bench, or prompt and category) or .txt. Default: HumanEval for code, else the "
            "package's.",
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only the first N questions of each source (chat: of each category)."),
    ] = None
    style: Annotated[
        str,
        typer.Option(
            help="chat: an instruction in the chat template. paper: text to continue, as in Draft & Verify. auto: chat "
            "if there is a template.",
        ),
    ] = "auto"
    shots: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With --style paper: how many articles with summaries come before the one in question. Default: 1.",
        ),
    ] = None


@dataclass(frozen=True)
class AnswerOptions:
    """Settings of every method's answers."""

    panel: ClassVar[str] = "How to run"

    new_tokens: Annotated[
        int | None,
        typer.Option(
            "--new-tokens",
            "--max-new-tokens",
            min=1,
            metavar="N",
            help="The longest answer, in tokens. Default: 128; for code 384.",
        ),
    ] = None
    answers: Annotated[int, typer.Option(min=1, metavar="N", help="Answers to each question; with --do-sample.")] = 1
    k: Annotated[str, typer.Option("--k", metavar="NUMBERS", help="The k of pass@k; several separated by commas.")] = (
        "1"
    )
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of greedy decoding.")] = False
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Temperature of the sampling. Default: the model's.")
    ] = None
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Top-p of the sampling. Default: the model's.")] = (
        None
    )
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the sampling and of random-half.")] = 0
    warm_up: Annotated[int, typer.Option(min=0, metavar="N", help="Calls of each method that are not counted.")] = 1
    no_memory: Annotated[
        bool,
        typer.Option(
            "--no-memory",
            help="Do not measure the peak memory (in a call of its own: 16 tokens of the first answer).",
        ),
    ] = False


@dataclass(frozen=True)
class CodeOptions:
    """Execution of the programs that the model has written."""

    panel: ClassVar[str] = "Generated code"

    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="Run the programs that the model has written, in a sandbox: without network, without your files, "
            "with limits on time and memory. Without this option they are stored, and not judged.",
        ),
    ] = False
    allow_weaker_sandbox: Annotated[
        bool,
        typer.Option(
            "--allow-weaker-sandbox",
            help="Run them also where the kernel does not confine them: outside Linux, or where seccomp or Landlock is "
            "off. Python's own checks then stop accidents, but no program that means harm.",
        ),
    ] = False
    code_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="The most seconds that a program may run.")
    ] = 10.0


@with_option_groups
def evaluate(
    task: Annotated[str, typer.Argument(metavar="TASK", help="summarisation, code or chat.")],
    model: SharedModelOptions,
    questions: QuestionOptions,
    methods: MethodOptions,
    draft: ComparedConfigOptions,
    answers: AnswerOptions,
    code: CodeOptions,
    results: ResultOptions,
) -> None:
    """Have all methods answer the questions of a task."""
    from .console import at_work

    group = _processes()
    if group is not None and results.output is None:
        raise ValueError("Several processes share a run by its folder: name it with --output.")
    if model.tensor_parallel and group is None:
        raise ValueError("--tensor-parallel needs several processes: start it with torchrun or accelerate launch.")
    with at_work(results.as_json):
        # Invalid options are rejected before anything slow begins.
        request = parse(task, model, questions, methods, draft, answers, code)
        summary, path = _run(request, results, group)
    if summary is not None:
        _print_summary(summary, path, results.as_json)


@dataclass(frozen=True)
class Request:
    """Parsed request, checked as far as possible without the model.

    Attributes:
        task: name of the task.
        methods: names of the methods that answer.
        assistant: model of the method `assistant`.
        config: config of the methods that need one.
        code: settings for running generated programs; `None`: they are not run.
        model: model options.
        questions: question options.
        answers: answer options.
    """

    task: str
    methods: tuple[str, ...]
    assistant: str | None
    config: SelfSpeculativeConfig | None
    code: CodeExecution | None
    model: SharedModelOptions
    questions: QuestionOptions
    answers: AnswerOptions

    def settings(self, new_tokens: int) -> EvaluationSettings:
        """Build the run's settings.

        Args:
            new_tokens: length of the longest answer in tokens, where the options do not set it.

        Raises:
            ValueError: the options contradict one another.
        """
        from ..evaluation.evaluate_model import EvaluationSettings

        answers = self.answers
        return EvaluationSettings(
            methods=self.methods,
            repeats=answers.answers,
            warm_up=answers.warm_up,
            do_sample=answers.do_sample,
            temperature=answers.temperature,
            seed=answers.seed,
            memory=not answers.no_memory,
            new_tokens=answers.new_tokens or new_tokens,
            top_p=answers.top_p,
            ks=_numbers(answers.k),
        )


def parse(
    task: str,
    model: SharedModelOptions,
    questions: QuestionOptions,
    methods: MethodOptions,
    draft: ComparedConfigOptions,
    answers: AnswerOptions,
    code: CodeOptions,
) -> Request:
    """Build the request from the options.

    Raises:
        ValueError, TypeError, FileNotFoundError: the options contradict one another, or name something missing.
    """
    from ..evaluation.evaluate_model import default_methods
    from ..evaluation.tasks import TASKS, check_data
    from .configs import config_to_compare, requested_methods

    if task not in TASKS:
        raise ValueError(f"There is no task {task!r}. Choose from {', '.join(TASKS)}.")
    config = config_to_compare(draft, model.model)
    request = Request(
        task=task,
        methods=requested_methods(methods, config, default_methods),
        assistant=methods.assistant,
        config=config,
        code=None,
        model=model,
        questions=questions,
        answers=answers,
    )
    request.settings(new_tokens=1)  # raises where the options contradict one another
    check_data(task, questions.data or ())
    return dataclasses.replace(request, code=_code_execution(code)) if task == "code" else request


def _code_execution(options: CodeOptions) -> CodeExecution | None:
    """Return the settings for running generated programs, tried with an empty one; `None`: they are not run.

    Raises:
        ValueError: programs cannot be confined on this machine.
    """
    if not options.allow_code_execution:
        return None
    from ..evaluation.evaluate_model import CodeExecution
    from ..evaluation.sandbox import Limits, run_program

    code = CodeExecution(Limits(seconds=options.code_seconds), options.allow_weaker_sandbox)
    try:
        run_program("", code.limits, code.allow_weaker)
    except RuntimeError as error:
        raise ValueError(f"{error} Here: --allow-weaker-sandbox, or no --allow-code-execution.") from error
    return code


def _run(request: Request, results: ResultOptions, group: Processes | None) -> tuple[dict[str, Any] | None, Path]:
    """Run the evaluation, and return its summary (in the first process, else `None`) and its folder."""
    from ..evaluation.evaluate_model import run_evaluation
    from ..evaluation.tasks import make_task
    from .benchmark_view import live_progress
    from .console import resumable
    from .resolve_options import default_folder, load, set_threads

    model, questions = request.model, request.questions
    set_threads(model.threads)
    placed = model
    if group is not None and model.device is None and model.device_map is None and not model.tensor_parallel:
        placed = dataclasses.replace(model, device=str(getattr(group, "device", "cpu")))
    target, tokenizer = load(placed, tensor_parallel=model.tensor_parallel)
    task = make_task(
        request.task,
        tokenizer,
        questions.data or (),
        style=questions.style,
        shots=questions.shots,
        limit=questions.limit,
    )
    assistant = None
    if request.assistant is not None:
        assistant, other = load(placed, request.assistant, model.tensor_parallel)
        _check_vocabularies(tokenizer, other, request.assistant)
    output = default_folder("evaluate", model.model) if results.output is None else results.output
    path = Path(os.path.expanduser(output))
    is_first = group is None or group.process_index == 0
    view = live_progress(None if results.as_json else f"Results go to {path}") if is_first else contextlib.nullcontext()
    with resumable(path, lambda: f"What was measured is stored in {path}"), view as observe:
        summary = run_evaluation(
            target,
            tokenizer,
            task,
            path,
            request.settings(task.new_tokens),
            about=_about(request, is_alone=group is None),
            config=request.config,
            assistant=assistant,
            code=request.code,
            processes=group,
            together=model.tensor_parallel,
            observe=observe,
        )
    return summary, path


def _about(request: Request, is_alone: bool) -> dict[str, Any]:
    """Describe the models and their placement, as recorded in the run's config.json."""
    model = request.model
    return {
        "model": model.model,
        "assistant": request.assistant,
        "dtype": model.dtype,
        "device": model.device if is_alone else None,  # differs from process to process
        "device_map": model.device_map,
        "tensor_parallel": model.tensor_parallel,
        "threads": model.threads,
    }


def _print_summary(summary: dict[str, Any], path: Path, as_json: bool) -> None:
    from .benchmark_view import evaluation_view, print_summary

    plots = f"with {', '.join(summary['plots'])}" if summary["plots"] else f"plot {summary['plot']}"
    print_summary(summary, evaluation_view, f"{path} ({plots})", as_json)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"--k takes numbers with commas between them, such as 1,10, but got {text!r}.") from None


def _check_vocabularies(tokenizer: Any, other: Any, name: str) -> None:
    """Raise if the assistant has another vocabulary than the model."""
    if tokenizer.get_vocab() != other.get_vocab():
        raise ValueError(
            f"The assistant {name!r} has another vocabulary than the model, so their texts cannot be compared token by "
            "token. transformers can draft across tokenizers (generate(..., tokenizer=…, assistant_tokenizer=…)), at "
            "the price of decoding and encoding every draft; this command does not. Choose an assistant of the same "
            "family."
        )


def _processes() -> Processes | None:
    """Return the processes that `accelerate launch` or `torchrun` has started; `None` for a single one."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError('Several processes need accelerate: pip install "ssd_generation[accelerate]"') from error
    from datetime import timedelta

    import torch

    # One process may finish hours before another.
    state: Processes = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))
    return state


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Folders of finished or unfinished runs.")],
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
        # matplotlib warns about each character that its font lacks.
        with quiet_libraries(), replacing(output / "report.png") as path:
            plot_runs(summaries, path)
    if as_json:
        print_json(summaries)
        return
    console = out()
    console.print(runs_view(summaries))
    if output is not None:
        err().print(f"\nWritten to {output}", style="dim", soft_wrap=True)
