"""Evaluation: all methods answer the same questions, each until its end of sequence."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from ..config import SelfSpeculativeConfig
from ..decoding.ends import stored_end_tokens
from ..generation import enable_self_speculative
from ..harness.methods import PLAIN, Method, make_methods, of_config
from ..harness.results import (
    ROWS,
    RunFolder,
    check_rows,
    finished_calls,
    own_settings,
    read_rows,
    string,
    take_over_sessions,
)
from ..harness.run import Caller, Observer, Progress, RunSettings, Share, SideBySide, TimedCall
from .quality import quality_of, verdicts_of
from .report import write_evaluation
from .sandbox import DEFAULT_LIMITS, Limits, run_program, run_programs
from .tasks import Task

if TYPE_CHECKING:
    import torch

__all__ = [
    "Alone",
    "CodeExecution",
    "EvaluationSettings",
    "Processes",
    "default_methods",
    "evaluation_arguments",
    "run_evaluation",
]

_SHORT = 16
PARTS = "parts"


@dataclass(frozen=True)
class EvaluationSettings(RunSettings):
    """Settings of an evaluation, see `RunSettings`. `repeats` is the number of answers to each question.

    Args:
        new_tokens: maximum number of tokens in an answer.
        top_p: top-p of the sampling, above 0 and up to 1; `None` for the model's.
        ks: values of k in pass@k, each from 1 up to `repeats`.

    Raises:
        ValueError: a value out of range.
    """

    warm_up: int = 1
    new_tokens: int = 128
    top_p: float | None = None
    ks: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        self.check_least(new_tokens=1)
        super().__post_init__()
        if self.repeats > 1 and not self.do_sample:
            raise ValueError(
                f"Without sampling, all {self.repeats} answers to a question would be the same. Ask for do_sample, or "
                "for one answer."
            )
        if self.top_p is not None:
            if not self.do_sample:
                raise ValueError(f"top_p={self.top_p:g} has an effect only when sampling. Ask for do_sample.")
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p is a share of the probability, above 0 and up to 1, but got {self.top_p:g}.")
        wrong = [k for k in self.ks if not 1 <= k <= self.repeats]
        if wrong or not self.ks:
            raise ValueError(
                f"pass@k needs 1 ≤ k ≤ the number of answers to a question ({self.repeats}), but got "
                f"k={', '.join(map(str, wrong)) or 'none'}."
            )

    def options(self, pad_token_id: int | None) -> dict[str, Any]:
        options = {**super().options(pad_token_id), "max_new_tokens": self.new_tokens}
        return options if self.top_p is None else {**options, "top_p": self.top_p}


def default_methods(config: SelfSpeculativeConfig | None, has_assistant: bool) -> tuple[str, ...]:
    """Return the methods compared by default."""
    return (
        PLAIN,
        "auto",
        *of_config(config),
        "prompt-lookup-10",
        *(("assistant",) if has_assistant else ()),
    )


def evaluation_arguments(
    settings: EvaluationSettings, task: Task, config: SelfSpeculativeConfig | None, **about: Any
) -> dict[str, Any]:
    """Return the arguments that identify a run, for `RunFolder`.

    Args:
        settings: settings of the run.
        task: task with the questions.
        config: config of the methods that need one.
        **about: the model and everything else that the results depend on.
    """
    return {
        "format_version": 1,
        "task": task.name,
        **about,
        **task.about,
        **asdict(settings),
        "methods": list(settings.methods),
        "ks": list(settings.ks),
        "questions": {"count": len(task.samples), "sha256": task.digest()},
        "config": None if config is None else config.to_dict(),
    }


@dataclass(frozen=True)
class CodeExecution:
    """Permission to run the code that the model writes, in the sandbox of `sandbox.run_program`.

    Args:
        limits: limits of each program.
        allow_weaker: run it even where the kernel confines programs only in part.
    """

    limits: Limits = DEFAULT_LIMITS
    allow_weaker: bool = False


class Processes(Protocol):
    """Processes that share a run; accelerate's `PartialState` is one."""

    @property
    def process_index(self) -> int:
        """Index of this process; 0 is the one that writes the summary."""

    @property
    def num_processes(self) -> int:
        """Number of processes."""

    def wait_for_everyone(self) -> None:
        """Wait until all processes have reached this point."""


class Alone:
    """Single process."""

    process_index = 0
    num_processes = 1

    def wait_for_everyone(self) -> None: ...


def run_evaluation(
    model: Any,
    tokenizer: Any,
    task: Task,
    path: str | os.PathLike[str],
    settings: EvaluationSettings,
    *,
    about: Mapping[str, Any] | None = None,
    config: SelfSpeculativeConfig | None = None,
    assistant: Any = None,
    code: CodeExecution | None = None,
    processes: Processes | None = None,
    together: bool = False,
    observe: Observer | None = None,
) -> dict[str, Any] | None:
    """Run all methods on all questions, see `SideBySide`, and judge the answers.

    Several processes share the questions; each writes its own rows, which the first process merges. A run may be
    continued with another number of processes.

    Args:
        model: the target model; it is enabled.
        tokenizer: its tokenizer.
        task: task with the questions.
        path: results folder; existing results must be of the same run.
        settings: settings of the run.
        about: everything else that the results depend on; by default the model's name.
        config: config of the methods that need one.
        assistant: model of the method "assistant".
        code: permission to run the code that the model writes, see `sandbox`. Without it, code is stored but not
            judged; the same run may be continued with it later.
        processes: processes that share this run; `None`: this one alone.
        together: whether they compute one model together (tensor parallel), and so answer every question together.
        observe: callback with the progress, before each call.

    Returns:
        The summary, as in summary.json; `None` in all processes but the first.

    Raises:
        OSError, ValueError: as in `RunFolder`; or there are rows, or sessions, that such a run cannot have written.
        RuntimeError: this system cannot confine programs; raised before anything is generated.
        KeyboardInterrupt: re-raised; finished calls are stored.
    """
    group = processes or Alone()
    code = code if task.runs_code else None
    if code is not None:
        run_program("", code.limits, code.allow_weaker)  # raises now, rather than after hours of generation
    path = Path(os.path.expanduser(path))
    described = dict({"model": model.config.name_or_path} if about is None else about)
    # Copies of a model may differ in their generation config, and so would their answers.
    if own := own_settings(model, settings.options(None)):
        described["generation_config"] = own
    arguments = evaluation_arguments(settings, task, config, **described)

    questions = {sample.id for sample in task.samples}

    def gather(folder: RunFolder) -> None:
        _gather(folder, settings.methods, questions)

    def part(folder: RunFolder, earlier: Sequence[Mapping[str, Any]] = ()) -> Evaluation:
        share = Share((0, 1) if together else (group.process_index, group.num_processes), earlier)
        caller = Caller(enable_self_speculative(model), assistant)
        methods = make_methods(settings.methods, model, config, settings.seed)
        return Evaluation(Questions(task, tokenizer, code), caller, methods, folder, settings, observe, share)

    if group.process_index > 0:
        group.wait_for_everyone()  # until the first process has merged the existing rows
        earlier = read_rows(path)
        check_rows(earlier, path / ROWS, settings.methods, questions, Evaluation.fields_of_calls)
        if together:
            with tempfile.TemporaryDirectory() as temporary, RunFolder(temporary, arguments) as folder:
                part(folder, earlier).measure()
            return None
        with RunFolder(path / PARTS / str(group.process_index), arguments) as folder:
            part(folder, earlier).measure()
        group.wait_for_everyone()
        return None
    with RunFolder(path, arguments) as folder:
        gather(folder)
        group.wait_for_everyone()
        run = part(folder)
        if group.num_processes > 1 and not together:
            run.measure()
            group.wait_for_everyone()
            gather(folder)
            run.part = (0, 1)  # from here on, it is responsible for all questions
        return run.run()


def _gather(folder: RunFolder, methods: Sequence[str], questions: Collection[str]) -> None:
    """Move the rows written by other processes of this run into this folder; other files are left alone."""
    parts = folder.path / PARTS
    if not parts.is_dir():
        return
    known = {json.dumps(row, sort_keys=True) for row in folder.rows}
    for path in sorted(parts.iterdir()):
        if not path.name.isdecimal():
            continue
        if path.is_symlink():
            raise ValueError(f"{str(path)!r} is a link: no process of a run has written it. Remove it.")
        with RunFolder(path, folder.arguments) as part:  # refuses rows of any other run
            check_rows(part.rows, path / ROWS, methods, questions, Evaluation.fields_of_calls)
            for row in part.rows:
                # An earlier process may have been killed after copying a row, before removing the original.
                if json.dumps(row, sort_keys=True) not in known:
                    folder.append(row)
            take_over_sessions(folder, path)
            part.done_with()
    with contextlib.suppress(OSError):  # other files are left in it
        parts.rmdir()


@dataclass(frozen=True)
class Questions:
    """Questions of an evaluation.

    Attributes:
        task: task whose samples are the items.
        tokenizer: the model's tokenizer.
        code: permission to run the code that the model writes; `None`: do not run it.
    """

    task: Task
    tokenizer: Any
    code: CodeExecution | None


class Evaluation(SideBySide):
    """One session of an evaluation, see `SideBySide`."""

    fields_of_calls = MappingProxyType({"text": string})

    def __init__(self, questions: Questions, caller: Caller, methods: Sequence[Method], *others: Any) -> None:
        super().__init__(caller, methods, questions.task.samples, *others)
        self.task = questions.task
        self.tokenizer = questions.tokenizer
        self.code = questions.code

    def inputs(self, index: int) -> dict[str, torch.Tensor]:
        inputs = self.task.inputs(self.tokenizer, index, self._answers(index))
        context_length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        wanted = inputs["input_ids"].shape[1] + self.options["max_new_tokens"]
        if context_length is not None and wanted > context_length:
            raise ValueError(
                f"{self.items[index].id} has {inputs['input_ids'].shape[1]} tokens, which leaves no room for "
                f"{self.options['max_new_tokens']} new ones in the model's {context_length}."
            )
        return {key: value.to(self.model.device) for key, value in inputs.items()}

    def _answers(self, index: int) -> dict[str, str]:
        """Return plain decoding's first answers to the earlier turns, which all methods continue from."""
        earlier = self.task.samples[index].earlier
        return {
            row["prompt"]: row["text"]
            for row in (finished_calls(self.rows) if earlier else ())
            if row["prompt"] in earlier and row["method"] == PLAIN and row["repeat"] == 0
        }

    def own_items(self) -> Sequence[int]:
        # A conversation stays in one process, since its turns need the answers to earlier ones.
        number = {name: n for n, name in enumerate(s.id for s in self.task.samples if not s.earlier)}
        process, processes = self.part
        return [i for i, s in enumerate(self.task.samples) if number[(*s.earlier, s.id)[0]] % processes == process]

    def short_options(self) -> dict[str, Any]:
        return {**self.options, "max_new_tokens": min(_SHORT, self.options["max_new_tokens"])}

    def noted(self, index: int, call: TimedCall) -> dict[str, Any]:
        ids = call.token_ids
        ends = stored_end_tokens(self.model.generation_config)
        # Assisted decoding may return tokens after the end of sequence: these are ignored.
        ids = ids[: next((n for n, token in enumerate(ids, start=1) if token in ends), len(ids))]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"token_ids": ids, "text": text, "process": self.part[0]}

    def measure(self) -> None:
        """Run the calls of this process, without running the answers."""
        super().everything()

    def everything(self) -> None:
        self.measure()
        if self.code is not None:
            self._run_code()

    def write(self, summary: dict[str, Any]) -> dict[str, Any]:
        names = [method.name for method in self.methods]
        ks = self.folder.arguments["ks"]
        summary["quality"] = quality_of(self.task, self.rows, names, ks)
        calls = {(row["prompt"], row["method"], row["repeat"]): row for row in self.rows if row["kind"] == "call"}
        summary["failed_rows"] = [
            {key: row[key] for key in ("prompt", "method", "repeat", "error")}
            for row in calls.values()
            if "error" in row
        ]
        summary["code"] = _code_summary(self.task, self.rows, names)
        return write_evaluation(self.folder, summary, self.rows)

    def _run_code(self) -> None:
        """Run the answers that have not been run yet; equal programs run once."""
        assert self.code is not None
        places = {sample.id: index for index, sample in enumerate(self.task.samples)}
        # With other limits, programs are run again.
        limits = {**asdict(self.code.limits), "allow_weaker": self.code.allow_weaker}
        done = {key: row for key, row in verdicts_of(self.rows).items() if row.get("limits", limits) == limits}
        known = {row["program"]: row for row in done.values()}
        programs: dict[str, str] = {}
        waiting: dict[str, list[tuple[str, str, int]]] = {}
        answers = {(row["prompt"], row["method"], row["repeat"]): row["text"] for row in finished_calls(self.rows)}
        for key, text in answers.items():
            if key not in done:
                program = self.task.program(places[key[0]], text)
                name = hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()
                programs[name] = program
                waiting.setdefault(name, []).append(key)
        done_programs = 0

        def record_outcome(name: str, outcome: Mapping[str, Any]) -> None:
            nonlocal done_programs
            done_programs += 1
            if self.observe is not None:
                self.observe(Progress(done_programs, len(waiting), "running the answers", {}))
            for prompt, method, repeat in waiting[name]:
                row = {"kind": "verdict", "prompt": prompt, "method": method, "repeat": repeat, "program": name}
                row["limits"] = limits
                self.folder.append(row | {key: outcome[key] for key in ("status", "detail", "seconds")})

        for name in programs:
            if name in known:
                record_outcome(name, known[name])
        new = [name for name in programs if name not in known]
        run_programs(
            [programs[name] for name in new],
            self.code.limits,
            self.code.allow_weaker,
            # More would slow each other down, and programs have a time limit.
            workers=min(2, os.cpu_count() or 1),
            observe=lambda i, outcome: record_outcome(new[i], asdict(outcome)),
        )


def _code_summary(task: Task, rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, Any] | None:
    """Return the outcomes of the programs, by method; `None` for tasks without programs."""
    if not task.runs_code:
        return None
    verdicts = verdicts_of(rows)
    counts: dict[str, Counter[str]] = {name: Counter() for name in methods}
    for (_, method, _), row in verdicts.items():
        counts[method][row["status"]] += 1
    counts = {name: outcomes for name, outcomes in counts.items() if outcomes}
    answered = {(row["prompt"], row["method"], row["repeat"]) for row in finished_calls(rows)}
    return {"outcomes": counts, "not_run": len(answered - set(verdicts))}
