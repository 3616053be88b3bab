"""Comparison of two checkouts of this library: the same calls by each, interleaved.

Two versions of a package cannot be imported in one process. So each has its own worker process, which loads the model
and waits for requests; only one of them computes at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import SelfSpeculativeConfig
from ..harness.methods import PLAIN
from ..harness.results import (
    ROWS,
    RunFolder,
    check_rows,
    load_average,
    ratios_so_far,
    sessions_of,
    start_session,
    summarise_pairs,
    where_measured,
    write_summary,
)
from ..harness.run import Child, Observer, Progress, calls, rotated
from ..harness.texts import Prompt
from .run_benchmark import BenchmarkSettings

__all__ = ["check_checkout", "own_methods", "run_paired"]

HERE, THERE = "here", "there"


def check_checkout(path: str | os.PathLike[str]) -> Path:
    """Return the root of another checkout.

    Raises:
        FileNotFoundError: `path` is not the root of a checkout.
    """
    root = Path(os.path.expanduser(path)).resolve()
    if not (root / "ssd_generation" / "__init__.py").is_file():
        raise FileNotFoundError(
            f"{str(path)!r} holds no ssd_generation/__init__.py. Give the root of a checkout of this library."
        )
    return root


def own_methods(config: SelfSpeculativeConfig | None, has_assistant: bool) -> tuple[str, ...]:
    """Return the default methods for comparing two checkouts: this library's own modes."""
    return (PLAIN, "auto", *(("config",) if config is not None else ()), "plain-loop")


class _Worker(Child):
    """Worker process of one checkout, see `calls.py`.

    Args:
        name: "here" or "there".
        checkout: the root of its checkout.
    """

    def __init__(self, name: str, checkout: Path) -> None:
        python_path = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([str(checkout), *([python_path] if python_path else [])])
        super().__init__(name, Path(calls.__file__).resolve(), {"PYTHONPATH": paths})

    def require(self, do: str, **message: Any) -> dict[str, Any]:
        """Send a request as `request` does, but raise if the worker answers with an error.

        Raises:
            ValueError: the worker answered with an error; the message includes its own.
        """
        answer = self.request(do, **message)
        if "error" in answer:
            raise ValueError(f"The checkout {self.name!r} cannot {do}: {answer['error']}")
        return answer

    def __enter__(self) -> _Worker:
        return self


def run_paired(
    prompts: Sequence[Prompt],
    folder: RunFolder,
    settings: BenchmarkSettings,
    *,
    other: Path,
    load: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Run the same calls by this checkout and another, interleaved, and continue an earlier run in this folder.

    The checkout that runs first alternates from call to call. Plain decoding is a method like the others: its ratio
    shows how noisy the machine is.

    Args:
        prompts: prompts to run, at least one.
        folder: results folder, entered (`with`).
        settings: settings of the run; memory is not measured.
        other: the other checkout's root, see `check_checkout`.
        load: the worker's arguments: `model`, `dtype`, `device`, and `device_map`, `assistant`, `threads`.
        config: config of the methods that need one, as a dictionary.
        observe: callback with the progress, before each pair of calls.

    Returns:
        The summary, as in summary.json.

    Raises:
        ValueError: no prompts, a checkout cannot load the model, or the folder holds rows of something else.
        RuntimeError: a worker has died.
    """
    if not prompts:
        raise ValueError("There are no prompts to run.")
    check_rows(folder.rows, folder.path / ROWS, settings.methods, {prompt.id for prompt in prompts})
    this = Path(__file__).resolve().parents[2]
    with _Worker(HERE, this) as here, _Worker(THERE, other) as there:
        run = _PairedRun(prompts, folder, settings, here, there, observe)
        try:
            run.prepare({HERE: this, THERE: other}, load, config)
            run.everything()
        except BaseException:
            run.summary(complete=False)
            raise
        return run.summary(complete=True)


class _PairedRun:
    def __init__(
        self,
        prompts: Sequence[Prompt],
        folder: RunFolder,
        settings: BenchmarkSettings,
        here: _Worker,
        there: _Worker,
        observe: Observer | None,
    ) -> None:
        self.prompts = prompts
        self.folder = folder
        self.settings = settings
        self.workers = (here, there)
        self.observe = observe
        self.done = 0
        self.finished = {(r["prompt"], r["method"], r["repeat"]) for r in folder.rows if r["kind"] == "pair"}
        self.failed = {row["method"] for row in folder.rows if row["kind"] == "failed"}
        names = [name for name in settings.methods if name not in self.failed]
        self.wanted = [
            (repeat, index, name)
            for repeat in range(settings.repeats)
            for index, prompt in enumerate(prompts)
            for name in names
            if (prompt.id, name, repeat) not in self.finished
        ]
        self.done = len(self.finished)
        self.total = self.done + len(self.wanted) + 2

    def _report_progress(self, step: str) -> None:
        if self.observe is not None:
            self.observe(Progress(self.done, self.total, step, ratios_so_far(self.folder.rows)))

    def prepare(self, checkouts: Mapping[str, Path], load: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
        """Load the model in both workers."""
        if not self.wanted:
            return
        for worker in self.workers:
            self._report_progress(f"loading the model, {worker.name}")
            loaded = worker.require("load", **load)
            package = Path(loaded["package"]).resolve()
            if package != checkouts[worker.name] / "ssd_generation":
                raise RuntimeError(f"The worker {worker.name!r} took ssd_generation from {str(package)!r}.")
            self.done += 1
        answer = self.workers[0].require(
            "prepare",
            methods=list(self.settings.methods),
            config=config,
            seed=self.settings.seed,
            texts=[prompt.text for prompt in self.prompts],
            chat_template=self.settings.chat_template,
        )
        self.method_requests: dict[str, Any] = answer["requests"]
        self.input_ids: list[list[int]] = answer["input_ids"]
        self.session = start_session(self.folder, answer["environment"], self.folder.rows)
        self.options = self.settings.options(loaded["pad_token_id"])

    def everything(self) -> None:
        """Warm up, then run all pairs of calls."""
        names = list(dict.fromkeys(name for _, _, name in self.wanted))
        self.total += len(names) * self.settings.warm_up
        for name in names * self.settings.warm_up:
            self._report_progress(f"warm-up, {name}")
            if name not in self.failed:
                row = self._pair(name, 0, 0, self.workers)
                if "error" in row:
                    self.failed.add(name)
                    self.folder.append({"kind": "failed", "method": name, "error": row["error"]})
            self.done += 1
        for repeat, index, name in self.wanted:
            self._report_progress(f"{self.prompts[index].id}, {name}")
            if name not in self.failed:
                # Neither a method nor a prompt starts with the same checkout every time.
                turn = self.settings.methods.index(name) + index + repeat
                self.folder.append(self._pair(name, index, repeat, rotated(self.workers, turn)))
            self.done += 1

    def _pair(self, name: str, index: int, repeat: int, order: Sequence[_Worker]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "kind": "pair",
            "session": self.session,
            "prompt": self.prompts[index].id,
            "category": self.prompts[index].category,
            "method": name,
            "repeat": repeat,
            "first": order[0].name,
            "prompt_tokens": len(self.input_ids[index]),
            "load_average": load_average(),
        }
        for worker in order:
            answer = worker.request(
                "call",
                method=name,
                request=self.method_requests[name],
                input_ids=self.input_ids[index],
                options=self.options,
                seed=self.settings.seed_of(index, repeat),
            )
            if "error" in answer:
                row["error"] = f"{worker.name}: {answer['error']}"
                return row
            row[worker.name] = answer
        return row

    def summary(self, complete: bool) -> dict[str, Any]:
        """Summarise the rows so far, and write the summary."""
        places = where_measured(sessions_of(self.folder.path), self.folder.rows)
        summary = summarise_pairs(self.folder.rows, self.folder.arguments, places)
        calls_done = len({(r["prompt"], r["method"], r["repeat"]) for r in self.folder.rows if r["kind"] == "pair"})
        rows = (len(self.settings.methods) - len(self.failed)) * len(self.prompts) * self.settings.repeats
        summary |= {"complete": complete, "rows_done": calls_done, "rows": rows}
        return write_summary(self.folder, summary, "Benchmark")
