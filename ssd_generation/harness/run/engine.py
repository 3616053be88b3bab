"""Engine of all side-by-side timing: each item is run by all methods, interleaved, and each call is a row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...tuning.short_calls import FEW
from ..methods import PLAIN, Method
from ..results import load_average, ratios_so_far
from ..texts import Difference, SamplingCheck, check_sampling, find_difference
from .calls import Caller, TimedCall
from .child import first_line
from .interleaving import interleaved

__all__ = ["Engine", "InMemory", "Item", "Observer", "Progress", "Rows"]

_MOST_TRIES = 3  # items tried with plain decoding before the run fails


class Item(Protocol):
    """Prompt or question for all methods."""

    @property
    def id(self) -> str:
        """Name of the item, unique in a run."""

    @property
    def category(self) -> str:
        """Kind of task; medians are taken per category."""


class Rows(Protocol):
    """Store of a run's rows: a `RunFolder`, or `InMemory`."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All rows so far."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""


class InMemory:
    """Rows of a run that will not be continued."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self.rows.append(row)


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


class Engine:
    """Engine that calls methods, interleaved, and records each call as a row.

    A method retains what its draft-length policy has learnt from call to call, as in a user's session. Subclasses
    define the inputs, the calls to make, and the use of the rows.

    Args:
        caller: caller of the model.
        methods: the methods, plain decoding first.
        items: the items, at least one.
        options: arguments of `generate` that are the same for all methods.
        rows: store of the rows.
        observe: callback with the progress, before each call.
    """

    session = 1
    """Session number in the rows of calls; ratios are taken within a session."""

    goes_on = True
    """If true, a method that fails is recorded and the run continues; else its error is raised."""

    def __init__(
        self,
        caller: Caller,
        methods: Sequence[Method],
        items: Sequence[Item],
        options: Mapping[str, Any],
        rows: Rows,
        observe: Observer | None = None,
    ) -> None:
        self.caller = caller
        self.model = caller.model
        self.methods = methods
        self.items = items
        self.options = dict(options)
        self.places = {item.id: index for index, item in enumerate(items)}
        self.observe = observe
        self.failed: set[str] = set()
        self.done = self.total = 0
        self._rows = rows
        self._tries_from = 0

    # -- what subclasses override --------------------------------------------------------------------------------------

    def inputs(self, index: int) -> dict[str, torch.Tensor]:
        """Make the model's inputs for an item: `input_ids` of shape `(1, prompt_length)` and `attention_mask`."""
        raise NotImplementedError

    def seed_of(self, index: int, repeat: int) -> int | None:
        """Return the seed of a call, the same for all methods; `None` under greedy decoding."""
        raise NotImplementedError

    def short_options(self) -> dict[str, Any]:
        """Return `generate`'s arguments for calls that are not timed: warm-up, and measurements of memory."""
        return self.options

    def step(self, index: int, repeat: int) -> str:
        """Describe a round."""
        return self.items[index].id

    def make_call(
        self, method: Method, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], seed: int | None
    ) -> TimedCall:
        """Generate once, timed or to warm up."""
        return self.caller.call(method.name, method.request, inputs, options, seed)

    def after_call(self, method: Method, index: int, call: TimedCall) -> dict[str, Any]:
        """Return additional fields of a call's row."""
        return {}

    # -- calls ---------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All rows so far."""
        return self._rows.rows

    def warm_up(self, methods: Sequence[Method], rounds: int) -> None:
        """Call methods on the first item that can be run; these calls do not count."""
        # In rounds: what a method's first call builds may displace what another method has built.
        for turn in interleaved(methods, 0, rounds):
            self.report_progress(f"warm-up, {turn.method.name}")
            if turn.method.name not in self.failed:
                self.warm_up_method(turn.method)
            self.done += 1

    def run_round(self, index: int, repeat: int, methods: Sequence[Method]) -> None:
        """Time one call of each of these methods on an item, in this order."""
        for position, method in enumerate(methods):
            self.report_progress(f"{self.step(index, repeat)}, {method.name}")
            if method.name not in self.failed:
                self._measure(method, index, repeat, position)
            self.done += 1

    def report_progress(self, step: str) -> None:
        """Report the next step to the observer."""
        if self.observe is not None:
            self.observe(Progress(self.done, self.total, step, ratios_so_far(self.rows)))

    def inputs_to_try(self) -> dict[str, torch.Tensor]:
        """Return the inputs of the first item that fits the model's context; others fail in their own rows only."""
        last = len(self.items) - 1
        for index in range(self._tries_from, last):
            with contextlib.suppress(ValueError):
                return self.inputs(index)
        return self.inputs(last)

    def warm_up_method(self, method: Method) -> None:
        """Call a method once, so that it builds what it needs."""
        options = self.short_options()
        if method.request.get("self_speculative") == "auto" and 0 < options.get("max_new_tokens", 0) <= FEW:
            options = {**options, "max_new_tokens": FEW + 1}  # shorter calls would not measure what they draft by
        try:
            self.make_call(method, self.inputs_to_try(), options, self.seed_of(0, 0))
        except Exception as error:
            if not self.goes_on:
                raise
            if method.name != PLAIN:
                self.failed.add(method.name)
                self._rows.append({"kind": "failed", "method": method.name, "error": first_line(error)})
                return
            # The item may be too long for the memory.
            if self._tries_from + 1 >= min(len(self.items), _MOST_TRIES):
                raise
            self._tries_from += 1
            self.warm_up_method(method)

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
            call = self.make_call(method, inputs, self.options, self.seed_of(index, repeat))
        except Exception as error:
            if not self.goes_on:
                raise
            row["error"] = first_line(error)
        else:
            row |= call.to_dict() | self.after_call(method, index, call)
        self._rows.append(row)

    # -- texts ---------------------------------------------------------------------------------------------------------

    def draws_of(self, row: Mapping[str, Any]) -> SamplingCheck:
        """Compare the tokens of a sampled call with the model's distribution."""
        return check_sampling(self.model, self.inputs(self.places[row["prompt"]]), row["token_ids"], **self.options)

    def difference(self, plain: Mapping[str, Any], tokens: Sequence[int]) -> Difference | None:
        """Find the first difference of a text to that of a plain call of the same item and repeat."""
        index = self.places[plain["prompt"]]
        seed = self.seed_of(index, plain["repeat"])
        return find_difference(self.model, self.inputs(index), plain["token_ids"], tokens, seed, **self.options)
