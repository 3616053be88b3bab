"""Runs the methods side by side, prompt by prompt, and keeps what was measured."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..comparison import describe_environment, find_difference, first_difference
from ..config import SelfSpeculativeConfig
from ..costs import costs_of
from ..files import replacing
from ..generation import enable_self_speculative
from ..precision import copy_bytes, drop_copies
from ..prompts import Prompt, digest, encode_prompt
from ..run_folder import ENVIRONMENT, PLOT, SUMMARY, TABLE, RunFolder
from .calls import Caller, first_line, load_average
from .memory import peak_bytes
from .methods import PLAIN, Method, make_methods
from .report import markdown, plot_summary, ratios_so_far, summarise

__all__ = ["BenchmarkSettings", "Progress", "benchmark_arguments", "benchmark_environment", "run_benchmark"]


@dataclass(frozen=True)
class BenchmarkSettings:
    """How the methods are run.

    Args:
        methods: their names, see `methods.METHODS`; plain decoding first.
        new_tokens: of every call; end of sequence is off. ≥ 2, so that there is a step behind the prompt's.
        repeats: how often every prompt is run, ≥ 1.
        warm_up: calls of each method on the first prompt that are not counted, ≥ 0. The first measures what a method
            measures once, the second finds everything in place.
        do_sample: sample instead of greedy decoding; the texts are then not compared.
        temperature: of the sampling, > 0; `None` for the model's.
        seed: of the sampling and of `random-half`.
        chat_template: whether prompts go through the tokenizer's chat template, where it has one.
        memory: whether the peak memory is measured, in one more call of each method.

    Raises:
        ValueError: a value out of range.
    """

    methods: tuple[str, ...]
    new_tokens: int = 48
    repeats: int = 1
    warm_up: int = 2
    do_sample: bool = False
    temperature: float | None = None
    seed: int = 0
    chat_template: bool = True
    memory: bool = True

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 2), ("repeats", 1), ("warm_up", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, but got {getattr(self, name)}.")
        if self.temperature is not None:
            if not self.do_sample:
                raise ValueError(
                    f"A temperature ({self.temperature:g}) has an effect only when sampling. Ask for do_sample, or "
                    "leave it out."
                )
            if not self.temperature > 0:
                raise ValueError(f"The temperature must be above 0, but got {self.temperature:g}.")
        if not self.methods or self.methods[0] != PLAIN:
            raise ValueError(f"Plain decoding comes first, but got the methods {', '.join(self.methods) or 'none'}.")

    def options(self, pad_token_id: int | None) -> dict[str, Any]:
        """The arguments of `generate` that all methods get alike."""
        options: dict[str, Any] = {
            "max_new_tokens": self.new_tokens,
            "do_sample": self.do_sample,
            "eos_token_id": None,
            "pad_token_id": 0 if pad_token_id is None else pad_token_id,
        }
        if self.temperature is not None:
            options["temperature"] = self.temperature
        return options

    def seed_of(self, prompt: int, repeat: int) -> int | None:
        """Of a call, the same for all methods; `None` in greedy decoding."""
        return self.seed + 1000 * repeat + prompt if self.do_sample else None


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        done: calls that are done, those of earlier sessions included.
        total: of how many.
        step: what comes next.
        ratios: per method, the median ratio to plain decoding so far.
    """

    done: int
    total: int
    step: str
    ratios: Mapping[str, float]


Observer = Callable[[Progress], None]


def benchmark_arguments(
    settings: BenchmarkSettings, prompts: Sequence[Prompt], config: SelfSpeculativeConfig | None, **about: Any
) -> dict[str, Any]:
    """What defines a run, for `RunFolder`.

    Args:
        settings: how the methods are run.
        prompts: what they are asked.
        config: of the methods that need one.
        **about: the model and whatever else the results depend on.
    """
    return {
        "format_version": 1,
        **about,
        **asdict(settings),
        "methods": list(settings.methods),
        "prompts": {"count": len(prompts), "sha256": digest(prompts)},
        "config": None if config is None else config.to_dict(),
    }


def run_benchmark(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    folder: RunFolder,
    settings: BenchmarkSettings,
    *,
    config: SelfSpeculativeConfig | None = None,
    assistant: Any = None,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Time all methods on all prompts, and go on where an earlier run in this folder ended.

    Every prompt is run by all methods in turn, in an order that rotates from prompt to prompt, so that a machine that
    gets slower meanwhile favours none of them. A method that fails is reported and the run goes on. A method keeps what
    its draft-length policy has learnt from call to call, as in a user's session. Peak memory and logit margins are
    measured at the end, where they disturb no clock.

    Args:
        model: the target model; it is enabled.
        tokenizer: its tokenizer.
        prompts: at least one.
        folder: of the results, entered (`with`).
        settings: how to run.
        config: of the methods that need one.
        assistant: model of the method "assistant".
        observe: told before each call how far the run is.

    Returns:
        The summary, as in summary.json.

    Raises:
        ValueError: no prompts, or a config that does not fit.
        KeyboardInterrupt: passed on; what was measured is kept, with a summary of it.
    """
    if not prompts:
        raise ValueError("There are no prompts to run.")
    enable_self_speculative(model)
    run = _Run(model, tokenizer, prompts, folder, settings, config, assistant, observe)
    try:
        run.everything()
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what counts
            run.summary(complete=False)
        raise
    return run.summary(complete=True)


class _Run:
    """One session of a run."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        folder: RunFolder,
        settings: BenchmarkSettings,
        config: SelfSpeculativeConfig | None,
        assistant: Any,
        observe: Observer | None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.folder = folder
        self.settings = settings
        self.assistant = assistant
        self.observe = observe
        self.caller = Caller(model, assistant)
        self.options = settings.options(getattr(model.generation_config, "pad_token_id", None))
        self.methods = make_methods(settings.methods, model, config, settings.seed)
        self.environment = start_session(folder, benchmark_environment(model))
        self.session = max((row.get("session", 0) for row in folder.rows), default=0) + 1
        self.failed = {row["method"] for row in folder.rows if row["kind"] == "failed"}
        self.copies: dict[str, int] = {}
        self.configs: dict[str, SelfSpeculativeConfig] = {}

    def everything(self) -> None:
        finished = _finished(self.folder.rows)
        measured = {row["method"] for row in self.folder.rows if row["kind"] == "memory"}
        wanted = [
            (repeat, index, method)
            for repeat in range(self.settings.repeats)
            for index in range(len(self.prompts))
            for method in self._turn(index + repeat)
            if (self.prompts[index].id, method.name, repeat) not in finished and method.name not in self.failed
        ]
        weighed = [m for m in self.methods if self.settings.memory and m.name not in measured | self.failed]
        to_warm = [m for m in self.methods if m in weighed or any(m is method for _, _, method in wanted)]
        self.total = len(finished) + len(wanted) + len(weighed) + len(to_warm) * self.settings.warm_up
        self.done = len(finished)
        if not wanted and not weighed:
            self._measure_margins()
            return
        # In rounds: what a method's first call makes for itself may cost others what they had made.
        for _ in range(self.settings.warm_up):
            for method in to_warm:
                self._tell(f"warm-up, {method.name}")
                if method.name not in self.failed:
                    self._warm_up(method)
                self.done += 1
        for (repeat, index), methods in _groups(wanted):
            if PLAIN not in {method.name for method in methods}:
                # The rest of a group that was interrupted: its ratio wants a plain call of the same session.
                methods = [self.methods[0], *methods]
                self.total += 1
            for position, method in enumerate(methods):
                self._tell(f"{self.prompts[index].id}, {method.name}")
                if method.name not in self.failed:
                    self._measure(method, index, repeat, position)
                self.done += 1
        for method in weighed:
            self._tell(f"memory, {method.name}")
            if method.name not in self.failed:
                self._measure_memory(method)
            self.done += 1
        self._measure_margins()

    def _turn(self, offset: int) -> list[Method]:
        first = offset % len(self.methods)
        return [*self.methods[first:], *self.methods[:first]]

    def _tell(self, step: str) -> None:
        if self.observe is not None:
            self.observe(Progress(self.done, self.total, step, ratios_so_far(self.folder.rows)))

    def _inputs(self, index: int) -> dict[str, torch.Tensor]:
        encoded = encode_prompt(self.tokenizer, self.prompts[index].text, self.settings.chat_template)
        return {key: value.to(self.model.device) for key, value in encoded.items()}

    def _warm_up(self, method: Method) -> None:
        before = copy_bytes(self.model)
        try:
            self.caller.call(method.name, method.request, self._inputs(0), self.options, self.settings.seed_of(0, 0))
        except Exception as error:
            if method.name == PLAIN:
                raise
            self.failed.add(method.name)
            self.folder.append({"kind": "failed", "method": method.name, "error": first_line(error)})
        self.copies[method.name] = max(self.copies.get(method.name, 0), copy_bytes(self.model) - before)

    def _measure(self, method: Method, index: int, repeat: int, position: int) -> None:
        prompt = self.prompts[index]
        inputs = self._inputs(index)
        row: dict[str, Any] = {
            "kind": "call",
            "session": self.session,
            "prompt": prompt.id,
            "category": prompt.category,
            "method": method.name,
            "repeat": repeat,
            "position": position,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "load_average": load_average(),
        }
        try:
            call = self.caller.call(
                method.name, method.request, inputs, self.options, self.settings.seed_of(index, repeat)
            )
        except Exception as error:
            row["error"] = first_line(error)
        else:
            row |= call.to_dict()
            row["costs"] = self._costs_of(method)
        self.folder.append(row)

    def _costs_of(self, method: Method) -> dict[str, Any] | None:
        """The costs that a call went by, if it went by any; and a row for its config when that is new."""
        config = self.caller.config_of(method.name)
        if not isinstance(config, SelfSpeculativeConfig):
            return None
        if self.configs.get(method.name) != config:
            self.configs[method.name] = config
            self.folder.append({"kind": "config", "method": method.name, "config": config.to_dict()})
        costs = config.costs
        if costs is None and config.drafting.policy == "cost":
            costs = costs_of(self.model, config)  # measured in its first call, and kept
        return None if costs is None else costs.to_dict()

    def _measure_memory(self, method: Method) -> None:
        inputs = self._inputs(0)
        row: dict[str, Any] = {"kind": "memory", "method": method.name, "prompt": self.prompts[0].id}
        try:
            with self.caller.alone(method.name, learn=False):
                row["peak_bytes"] = peak_bytes(
                    self.model,
                    inputs["input_ids"],
                    attention_mask=inputs.get("attention_mask"),
                    **{**self.options, **self.caller.arguments(method.request)},
                )
            row["persistent_bytes"] = self._persistent_bytes(method)
        except Exception as error:
            row["error"] = first_line(error)
        self.folder.append(row)

    def _persistent_bytes(self, method: Method) -> int:
        """What a method holds from call to call: low-bit copies, or another model."""
        if method.name == "assistant":
            return _weight_bytes(self.assistant)
        if not method.is_own:
            return 0
        # Methods share their copies, so each is made to begin without any.
        drop_copies(self.model)
        with self.caller.alone(method.name, learn=False):
            options = {**self.options, "max_new_tokens": 2}
            self.model.generate(**self._inputs(0), **{**options, **self.caller.arguments(method.request)})
        return max(copy_bytes(self.model), self.copies.get(method.name, 0))

    def _measure_margins(self) -> None:
        """How close plain decoding's decision was wherever a text has left its text."""
        if self.settings.do_sample:
            return
        known = {_key(row) for row in self.folder.rows if row["kind"] == "difference"}
        calls = [row for row in self.folder.rows if row["kind"] == "call" and "error" not in row]
        plain = {row["prompt"]: row for row in calls if row["method"] == PLAIN}
        places = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        for row in calls:
            base = plain.get(row["prompt"])
            if base is None or row["method"] == PLAIN or _key(row) in known:
                continue
            if first_difference(base["token_ids"], row["token_ids"]) is None:
                continue
            difference = find_difference(
                self.model, self._inputs(places[row["prompt"]]), base["token_ids"], row["token_ids"], **self.options
            )
            assert difference is not None
            self.folder.append(
                {
                    "kind": "difference",
                    "prompt": row["prompt"],
                    "method": row["method"],
                    "repeat": row["repeat"],
                    **difference.to_dict(),
                }
            )

    def summary(self, complete: bool) -> dict[str, Any]:
        """Summarise what there is, and write it down."""
        summary = summarise(self.folder.rows, self.folder.arguments, self.environment, _weight_bytes(self.model))
        rows = len(self.methods) * len(self.prompts) * self.settings.repeats
        failed = len(self.failed) * len(self.prompts) * self.settings.repeats
        done = len(_finished(self.folder.rows))
        return write_summary(self.folder, {**summary, "complete": complete, "rows_done": done, "rows": rows - failed})


def write_summary(folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Write summary.json, summary.md and, of a finished run, plot.png.

    Returns:
        The summary, with the reason under `plot` where there is none.
    """
    summary["plot"] = PLOT
    if summary["complete"]:
        try:
            with replacing(folder.path / PLOT) as path:
                plot_summary(summary, path)
        except ImportError as error:
            summary["plot"] = f"left out: {error}"
    else:
        summary["plot"] = "left out: the run is unfinished"
    folder.write_json(SUMMARY, summary)
    folder.write_text(TABLE, markdown(summary))
    return summary


def start_session(folder: RunFolder, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Note in environment.json that a session begins, and on what machine."""
    session = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": load_average(),
        **environment,
    }
    before = folder.read_json(ENVIRONMENT)
    sessions = before["sessions"] if isinstance(before, dict) and isinstance(before.get("sessions"), list) else []
    folder.write_json(ENVIRONMENT, {"sessions": [*sessions, session]})
    return session


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["prompt"], row["method"], row["repeat"]


def _finished(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, int]]:
    """The calls that need not be made again: those whose plain call was made in the same session, or that failed."""
    calls = [row for row in rows if row["kind"] == "call"]
    complete = {(*_key(row), row["session"]) for row in calls if row["method"] == PLAIN}
    return {
        _key(row)
        for row in calls
        if "error" in row or (row["prompt"], PLAIN, row["repeat"], row["session"]) in complete
    }


def _groups(wanted: Sequence[tuple[int, int, Method]]) -> Iterator[tuple[tuple[int, int], list[Method]]]:
    """The methods wanted for each repeat and prompt, in order."""
    groups: dict[tuple[int, int], list[Method]] = {}
    for repeat, index, method in wanted:
        groups.setdefault((repeat, index), []).append(method)
    yield from groups.items()


def _weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# the machine


def benchmark_environment(model: Any) -> dict[str, Any]:
    """What the times depend on: `describe_environment`, the number of CPUs, the system, the commit of this checkout."""
    return {
        **describe_environment(model),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(Path(__file__).resolve().parents[2]),
    }


def _commit(checkout: Path) -> str | None:
    """The commit of a checkout, with `-dirty` where tracked files differ from it; `None` where there is none."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
