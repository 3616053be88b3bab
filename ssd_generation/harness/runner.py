"""Runs methods side by side, item by item, and stores each call as a row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import SelfSpeculativeConfig
from ..forward.low_bit import copy_bytes, drop_copies
from ..generation import enable_self_speculative, why_no_drafts
from ..tuning.automatic import weight_bytes
from ..tuning.costs import costs_of
from .calls import Caller, TimedCall, first_line
from .interleaved import interleaved, rotated
from .llama_cpp import LlamaCpp, llama_cpp_version
from .memory import peak_bytes
from .methods import PLAIN, Method, is_llama_cpp, make_methods
from .results import (
    ROWS,
    Check,
    RunFolder,
    check_rows,
    finished_calls,
    latest_calls,
    load_average,
    own_settings,
    ratios_so_far,
    run_environment,
    sessions_of,
    start_session,
    summarise,
    where_measured,
    write_summary,
)
from .texts import check_sampling, find_difference, first_difference

__all__ = ["Item", "Observer", "Progress", "RunSettings", "Share", "SideBySide"]

_MOST_TRIES = 3  # items on which plain decoding may fail before there is nothing to compare with


class Item(Protocol):
    """A prompt or question for all methods."""

    @property
    def id(self) -> str:
        """Its name, unique in a run."""

    @property
    def category(self) -> str:
        """The kind of task; medians are taken per category."""


@dataclass(frozen=True)
class RunSettings:
    """How methods are run.

    Args:
        methods: their names, see `methods.METHODS`; plain decoding first.
        repeats: how often every item is run, ≥ 1.
        warm_up: calls of each method on the first item that can be run, ≥ 0. They do not count: the first makes the
            measurements, captures and copies that a method needs, the second runs with these in place.
        do_sample: sample instead of greedy decoding, all methods from the same seeds.
        temperature: of the sampling, > 0; `None` for the model's.
        seed: of the sampling and of `random-half`.
        memory: whether the peak memory is measured, in one more call of each method.

    Raises:
        ValueError: a value out of range.
    """

    methods: tuple[str, ...]
    repeats: int = 1
    warm_up: int = 2
    do_sample: bool = False
    temperature: float | None = None
    seed: int = 0
    memory: bool = True

    def __post_init__(self) -> None:
        self.check_least(repeats=1, warm_up=0, seed=0)
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
        peer = next(filter(is_llama_cpp, self.methods), None)
        if self.do_sample and peer is not None:
            # Its sampling is another one: neither texts nor speeds would compare.
            raise ValueError(f"The method {peer!r} decodes greedily only. Leave do_sample out, or this method.")

    def check_least(self, **least: int) -> None:
        """Raise if a value is too small."""
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, but got {getattr(self, name)}.")

    def options(self, pad_token_id: int | None) -> dict[str, Any]:
        """The arguments of `generate` that are the same for all methods."""
        options: dict[str, Any] = {
            "do_sample": self.do_sample,
            "pad_token_id": 0 if pad_token_id is None else pad_token_id,
        }
        if self.temperature is not None:
            options["temperature"] = self.temperature
        return options

    def seed_of(self, item: int, repeat: int) -> int | None:
        """Seed of a call, the same for all methods; `None` in greedy decoding."""
        return self.seed + 1000 * repeat + item if self.do_sample else None


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        done: number of finished calls, those of earlier sessions included.
        total: number of all calls.
        step: description of the next call.
        ratios: per method, the median ratio to plain decoding so far.
    """

    done: int
    total: int
    step: str
    ratios: Mapping[str, float]


Observer = Callable[[Progress], None]


@dataclass(frozen=True)
class Share:
    """What one process does of a run that several share.

    Attributes:
        part: `(i, n)`: only every n-th item from the i-th on; the others run the rest.
        earlier: rows of the run that stand in another folder, checked.
    """

    part: tuple[int, int] = (0, 1)
    earlier: Sequence[Mapping[str, Any]] = ()


WHOLE_RUN = Share()


class SideBySide:
    """A run: all methods on all items. It continues an earlier run in the same folder.

    Every item is run by all methods in turns (see `interleaved`). A method that fails is reported and the run goes on.
    A method keeps what its draft-length policy has learnt from call to call, as in a user's session. Peak memory and
    logit margins are measured at the end, after everything that is timed.

    Args:
        model: the target model; it is enabled.
        items: at least one.
        folder: of the results, entered (`with`).
        settings: of the run.
        config: of the methods that need one.
        assistant: model of the method "assistant".
        observe: callback with the progress, before each call.
        share: what of the run is done here.
        gguf: the GGUF files of llama.cpp's methods, by the method's name, see `gguf_methods`.

    Raises:
        ValueError: the folder holds something that such a run cannot have written.
    """

    # Checks of the additional fields of rows, which `noted` returns.
    fields_of_calls: Mapping[str, Check] = {}

    def __init__(
        self,
        model: Any,
        items: Sequence[Item],
        folder: RunFolder,
        settings: RunSettings,
        config: SelfSpeculativeConfig | None = None,
        assistant: Any = None,
        observe: Observer | None = None,
        share: Share = WHOLE_RUN,
        gguf: Mapping[str, str] | None = None,
    ) -> None:
        known = {item.id for item in items}
        check_rows(folder.rows, folder.path / ROWS, settings.methods, known, self.fields_of_calls)
        self.model = enable_self_speculative(model)
        self.items = items
        self.folder = folder
        self.settings = settings
        self.assistant = assistant
        self.observe = observe
        self.part = share.part
        self.earlier = share.earlier
        self.peer = LlamaCpp()
        self.caller = Caller(model, assistant, self.peer)
        self.options = settings.options(getattr(model.generation_config, "pad_token_id", None))
        self.methods = make_methods(settings.methods, model, config, settings.seed, gguf)
        own = own_settings(model, self.options)
        self.environment = run_environment(model) | ({"generation_config": own} if own else {})
        if any(map(is_llama_cpp, settings.methods)):
            self.environment["versions"]["xllamacpp"] = llama_cpp_version()
        self.session = start_session(folder, self.environment, self.rows)
        # Calls that failed in an earlier session are repeated: there may be more memory now, or another version.
        self.earlier_sessions = {row["session"] for row in self.rows if "session" in row}
        self.failed: set[str] = set()
        self.done = self.total = 0
        self.tries_from = 0
        self.copies: dict[str, int] = {}
        self.configs: dict[str, SelfSpeculativeConfig] = {}

    # -- what subclasses override -----------------------------------------------------------------

    def inputs(self, index: int) -> dict[str, torch.Tensor]:
        """The model's inputs for an item: `input_ids` of shape `(1, prompt_length)` and `attention_mask`."""
        raise NotImplementedError

    def own_items(self) -> Sequence[int]:
        """Indices of the items that this process runs, see `Share`."""
        return range(self.part[0], len(self.items), self.part[1])

    def noted(self, index: int, call: TimedCall) -> dict[str, Any]:
        """Additional fields of a call's row."""
        return {}

    def short_options(self) -> dict[str, Any]:
        """`generate`'s arguments for calls that are not timed: to warm up, to measure the memory."""
        return self.options

    def write(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write the summary to files."""
        return write_summary(self.folder, summary, "Benchmark")

    # --------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Make the calls that are missing.

        Returns:
            The summary, as in summary.json.

        Raises:
            KeyboardInterrupt: passed on; finished calls are kept, with a summary of them.
        """
        try:
            with contextlib.closing(self.peer):
                self.everything()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.summary(complete=False)
            raise
        return self.summary(complete=True)

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """All rows, those of other folders included."""
        return [*self.earlier, *self.folder.rows]

    def _finished(self) -> set[tuple[str, str, int]]:
        """The calls that need not be made again: made in the session of their plain call, or failed in this run."""
        calls = [row for row in self.rows if row["kind"] == "call"]
        complete = {(*_key(row), row["session"]) for row in calls if row["method"] == PLAIN}
        return {
            _key(row)
            for row in calls
            if (
                row["session"] not in self.earlier_sessions
                if "error" in row
                else (row["prompt"], PLAIN, row["repeat"], row["session"]) in complete
            )
        }

    def everything(self) -> None:
        mine = {self.items[index].id for index in self.own_items()}
        finished = {key for key in self._finished() if key[0] in mine}
        measured = {row["method"] for row in self.rows if row["kind"] == "memory"}
        wanted = [
            (repeat, index, method)
            for repeat in range(self.settings.repeats)
            for index in self.own_items()
            for method in rotated(self.methods, index + repeat)
            if (self.items[index].id, method.name, repeat) not in finished and method.name not in self.failed
        ]
        weighs = self.settings.memory and self.part[0] == 0
        weighed = [m for m in self.methods if weighs and m.name not in measured | self.failed]
        to_warm = [m for m in self.methods if m in weighed or any(m is method for _, _, method in wanted)]
        judged = len(wanted) + len(self._unchecked_samples()) if self.settings.do_sample else 0
        self.total = len(finished) + len(wanted) + len(weighed) + len(to_warm) * self.settings.warm_up + judged
        self.done = len(finished)
        if not wanted and not weighed:
            self._compare_texts()
            return
        # In rounds: what a method's first call makes for itself may cost others what they had made.
        for turn in interleaved(to_warm, 0, self.settings.warm_up):
            self._report_progress(f"warm-up, {turn.method.name}")
            if turn.method.name not in self.failed:
                self._warm_up(turn.method)
            self.done += 1
        for (repeat, index), methods in _groups(wanted):
            if all(method.name in self.failed for method in methods):
                self.done += len(methods)
                continue
            if PLAIN not in {method.name for method in methods}:
                # The rest of an interrupted round: ratios need a plain call of the same session.
                methods = [self.methods[0], *methods]
                self.total += 1
            for position, method in enumerate(methods):
                self._report_progress(f"{self.items[index].id}, {method.name}")
                if method.name not in self.failed:
                    self._measure(method, index, repeat, position)
                self.done += 1
        for method in weighed:
            self._report_progress(f"memory, {method.name}")
            if method.name not in self.failed:
                self._measure_memory(method)
            self.done += 1
        self._compare_texts()

    def _report_progress(self, step: str) -> None:
        if self.observe is not None:
            self.observe(Progress(self.done, self.total, step, ratios_so_far(self.rows)))

    def _inputs_to_try(self) -> dict[str, torch.Tensor]:
        """Inputs of the first item that fits the model's context: one that does not fit fails in its own rows only."""
        last = len(self.items) - 1
        for index in range(self.tries_from, last):
            with contextlib.suppress(ValueError):
                return self.inputs(index)
        return self.inputs(last)

    def _warm_up(self, method: Method) -> None:
        before = copy_bytes(self.model)
        try:
            inputs = self._inputs_to_try()
            self.caller.call(method.name, method.request, inputs, self.short_options(), self.settings.seed_of(0, 0))
        except Exception as error:
            if method.name == PLAIN:
                # The item may be too long for the memory.
                if self.tries_from + 1 >= min(len(self.items), _MOST_TRIES):
                    raise
                self.tries_from += 1
                self._warm_up(method)
                return
            self.failed.add(method.name)
            self.folder.append({"kind": "failed", "method": method.name, "error": first_line(error)})
        self.copies[method.name] = max(self.copies.get(method.name, 0), copy_bytes(self.model) - before)

    def _measure(self, method: Method, index: int, repeat: int, position: int) -> None:
        item = self.items[index]
        row: dict[str, Any] = {
            "kind": "call",
            "session": self.session,
            "prompt": item.id,
            "category": item.category,
            "method": method.name,
            "repeat": repeat,
            "position": position,
            "load_average": load_average(),
        }
        try:
            inputs = self.inputs(index)
            row["prompt_tokens"] = inputs["input_ids"].shape[1]
            call = self.caller.call(
                method.name, method.request, inputs, self.options, self.settings.seed_of(index, repeat)
            )
        except Exception as error:
            row["error"] = first_line(error)
        else:
            row |= call.to_dict() | self.noted(index, call)
            row["costs"] = self._costs_of(method)
        self.folder.append(row)

    def _costs_of(self, method: Method) -> dict[str, Any] | None:
        """The costs that a call used, if any; appends a row for its config when that is new."""
        config = self.caller.config_of(method.name)
        if not isinstance(config, SelfSpeculativeConfig):
            return None
        if self.configs.get(method.name) != config:
            self.configs[method.name] = config
            self.folder.append({"kind": "config", "method": method.name, "config": config.to_dict()})
        costs = config.costs
        if costs is None and config.drafting.policy == "cost" and why_no_drafts(self.model) is None:
            costs = costs_of(self.model, config)  # measured in its first call, and cached
        return None if costs is None else costs.to_dict()

    def _measure_memory(self, method: Method) -> None:
        row: dict[str, Any] = {"kind": "memory", "method": method.name}
        if is_llama_cpp(method.name):
            try:
                row |= self.peer.memory(method.request["llama_cpp"])
            except Exception as error:
                row["error"] = first_line(error)
            self.folder.append(row)
            return
        try:
            inputs = self._inputs_to_try()
            # First, since this makes the copies, which should exist while the peak is measured.
            row["persistent_bytes"] = self._persistent_bytes(method)
            with self.caller.alone(method.name, learn=False):
                row["peak_bytes"] = peak_bytes(
                    self.model,
                    inputs["input_ids"],
                    attention_mask=inputs.get("attention_mask"),
                    **{**self.short_options(), **self.caller.arguments(method.request)},
                )
        except Exception as error:
            row["error"] = first_line(error)
        self.folder.append(row)

    def _persistent_bytes(self, method: Method) -> int:
        """Bytes that a method holds between calls: low-bit copies, or another model."""
        if method.name == "assistant":
            return weight_bytes(self.assistant)
        if not method.is_own:
            return 0
        # Methods share their copies, so each starts without any.
        drop_copies(self.model)
        with self.caller.alone(method.name, learn=False):
            # A shorter call drafts nothing, and makes no copies.
            options = {**self.options, "max_new_tokens": 3}
            self.model.generate(**self._inputs_to_try(), **{**options, **self.caller.arguments(method.request)})
        return max(copy_bytes(self.model), self.copies.get(method.name, 0))

    def _compare_texts(self) -> None:
        """Compare the texts of each method with plain decoding, and its samples with the model's distribution."""
        if self.settings.do_sample:
            self._check_sampling()
        self._measure_margins()

    def _check_sampling(self) -> None:
        """Whether tokens were drawn from the model's distribution."""
        indices = self._item_indices()
        for row in self._unchecked_samples():
            self._report_progress(f"{row['prompt']}, judging the draws of {row['method']}")
            judged: dict[str, Any] = {key: row[key] for key in ("session", "prompt", "method", "repeat")}
            try:
                inputs = self.inputs(indices[row["prompt"]])
                judged |= check_sampling(self.model, inputs, row["token_ids"], **self.options).to_dict()
            except Exception as error:
                judged["error"] = first_line(error)
            self.folder.append({"kind": "draws", **judged})
            self.done += 1

    def _unchecked_samples(self) -> list[Mapping[str, Any]]:
        """Sampled calls whose draws are still to be judged."""
        known = {(*_key(row), row["session"]) for row in self.rows if row["kind"] == "draws"}
        indices = self._item_indices()
        return [
            row
            for row in latest_calls(self.rows)
            if row["prompt"] in indices and (*_key(row), row["session"]) not in known
        ]

    def _item_indices(self) -> dict[str, int]:
        return {self.items[index].id: index for index in self.own_items()}

    def _measure_margins(self) -> None:
        """The logit margin of plain decoding wherever a text differs from its text."""
        known = {_key(row) for row in self.rows if row["kind"] == "difference"}
        calls = finished_calls(self.rows)
        plain = {(row["prompt"], row["repeat"]): row for row in calls if row["method"] == PLAIN}
        own = {method.name for method in self.methods if method.is_own or not self.settings.do_sample}
        indices = self._item_indices()
        for row in calls:
            base = plain.get((row["prompt"], row["repeat"]))
            if base is None or row["method"] not in own or _key(row) in known or row["prompt"] not in indices:
                continue
            if first_difference(base["token_ids"], row["token_ids"]) is None:
                continue
            found: dict[str, Any] = {key: row[key] for key in ("prompt", "method", "repeat")}
            try:
                inputs = self.inputs(indices[row["prompt"]])
                seed = self.settings.seed_of(indices[row["prompt"]], row["repeat"])
                difference = find_difference(
                    self.model, inputs, base["token_ids"], row["token_ids"], seed, **self.options
                )
                assert difference is not None
                found |= difference.to_dict()
            except Exception as error:
                found["error"] = first_line(error)
            self.folder.append({"kind": "difference", **found})

    def summary(self, complete: bool) -> dict[str, Any]:
        """Summarise the rows so far, and write the summary."""
        places = where_measured(sessions_of(self.folder.path), self.rows) or [self.environment]
        summary = summarise(self.rows, self.folder.arguments, places, weight_bytes(self.model))
        rows = len(self.methods) * len(self.items) * self.settings.repeats
        failed = len(self.failed) * len(self.items) * self.settings.repeats
        done = len(self._finished())
        return self.write({**summary, "complete": complete, "rows_done": done, "rows": rows - failed})


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["prompt"], row["method"], row["repeat"]


def _groups(wanted: Sequence[tuple[int, int, Method]]) -> Iterator[tuple[tuple[int, int], list[Method]]]:
    """The methods wanted for each repeat and prompt, in order."""
    groups: dict[tuple[int, int], list[Method]] = {}
    for repeat, index, method in wanted:
        groups.setdefault((repeat, index), []).append(method)
    yield from groups.items()
