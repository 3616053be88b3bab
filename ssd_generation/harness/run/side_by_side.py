"""Run in a folder: all methods on all items, continued after an interruption, with memory and texts at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...config import SelfSpeculativeConfig
from ...forward.copies.low_bit import copy_bytes
from ...generation import why_no_drafts
from ...tuning.automatic import weight_bytes
from ...tuning.costs import costs_of
from ..methods import PLAIN, Method
from ..results import (
    ROWS,
    Check,
    RunFolder,
    check_rows,
    finished_calls,
    latest_calls,
    own_settings,
    run_environment,
    sessions_of,
    start_session,
    summarise,
    where_measured,
    write_summary,
)
from ..texts import first_difference
from .call_memory import peak_bytes, persistent_bytes
from .calls import Caller, TimedCall
from .child import first_line
from .engine import Engine, Item, Observer
from .interleaving import rotated
from .run_settings import WHOLE_RUN, RunSettings, Share

if TYPE_CHECKING:
    import torch

__all__ = ["SideBySide"]


class SideBySide(Engine):
    """Run of all methods on all items. It continues an earlier run in the same folder.

    Every item is run by all methods, interleaved. A method that fails is reported and the run continues. Peak memory
    and logit margins are measured at the end, after everything that is timed.

    Args:
        caller: caller of the model, which is enabled.
        methods: the methods of the settings, see `make_methods`.
        items: the items, at least one.
        folder: folder of the results, entered (`with`).
        settings: settings of the run.
        observe: callback with the progress, before each call.
        share: part of the run that this process runs.

    Raises:
        ValueError: the folder holds something that such a run cannot have written.
    """

    # Checks of the additional fields of rows, which `noted` returns.
    fields_of_calls: Mapping[str, Check] = {}

    def __init__(
        self,
        caller: Caller,
        methods: Sequence[Method],
        items: Sequence[Item],
        folder: RunFolder,
        settings: RunSettings,
        observe: Observer | None = None,
        share: Share = WHOLE_RUN,
    ) -> None:
        known = {item.id for item in items}
        check_rows(folder.rows, folder.path / ROWS, settings.methods, known, self.fields_of_calls)
        options = settings.options(getattr(caller.model.generation_config, "pad_token_id", None))
        super().__init__(caller, methods, items, options, folder, observe)
        self.folder = folder
        self.settings = settings
        self.part = share.part
        self.earlier = share.earlier
        own = own_settings(self.model, self.options)
        self.environment = run_environment(self.model) | ({"generation_config": own} if own else {})
        for peer in caller.peers.values():
            self.environment["versions"] |= peer.versions()
        self.session = start_session(folder, self.environment, self.rows)
        # Calls that failed in an earlier session are repeated: there may be more memory now, or another version.
        self.earlier_sessions = {row["session"] for row in self.rows if "session" in row}
        self.copies: dict[str, int] = {}
        self.configs: dict[str, SelfSpeculativeConfig] = {}

    # -- what subclasses override --------------------------------------------------------------------------------------

    def own_items(self) -> Sequence[int]:
        """Return the indices of the items that this process runs, see `Share`."""
        return range(self.part[0], len(self.items), self.part[1])

    def noted(self, index: int, call: TimedCall) -> dict[str, Any]:
        """Return additional fields of a call's row."""
        return {}

    def write(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write the summary to files."""
        return write_summary(self.folder, summary, "Benchmark")

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Make the missing calls.

        Returns:
            The summary, as in summary.json.

        Raises:
            KeyboardInterrupt: passed on; finished calls are stored, with a summary of them.
        """
        try:
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

    def seed_of(self, index: int, repeat: int) -> int | None:
        return self.settings.seed_of(index, repeat)

    def _finished(self) -> set[tuple[str, str, int]]:
        """Return the calls not to repeat: in one session with their plain call, or failed in this session."""
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
        """Make the missing calls, measure memory, compare the texts."""
        mine = {self.items[index].id for index in self.own_items()}
        finished = {key for key in self._finished() if key[0] in mine}
        wanted = [
            (repeat, index, method)
            for repeat in range(self.settings.repeats)
            for index in self.own_items()
            for method in rotated(self.methods, index + repeat)
            if (self.items[index].id, method.name, repeat) not in finished and method.name not in self.failed
        ]
        weighed = self._to_weigh()
        to_warm = [m for m in self.methods if m in weighed or any(m is method for _, _, method in wanted)]
        judged = len(wanted) + len(self._unchecked_samples()) if self.settings.do_sample else 0
        self.total = len(finished) + len(wanted) + len(weighed) + len(to_warm) * self.settings.warm_up + judged
        self.done = len(finished)
        if wanted or weighed:
            self.warm_up(to_warm, self.settings.warm_up)
            for (repeat, index), methods in _rounds(wanted):
                self._run_wanted(index, repeat, methods)
            for method in weighed:
                self.report_progress(f"memory, {method.name}")
                if method.name not in self.failed:
                    self._measure_memory(method)
                self.done += 1
        if self.settings.do_sample:
            self._check_sampling()
        self._measure_margins()

    def _run_wanted(self, index: int, repeat: int, methods: Sequence[Method]) -> None:
        """Make the missing calls of a round."""
        if all(method.name in self.failed for method in methods):
            self.done += len(methods)
            return
        if PLAIN not in {method.name for method in methods}:
            # The rest of an interrupted round: ratios need a plain call of the same session.
            methods = [self.methods[0], *methods]
            self.total += 1
        self.run_round(index, repeat, methods)

    def after_call(self, method: Method, index: int, call: TimedCall) -> dict[str, Any]:
        return {**self.noted(index, call), "costs": self._costs_of(method)}

    def _costs_of(self, method: Method) -> dict[str, Any] | None:
        """Return the costs that a call used, if any, and append a row for its config if that is new."""
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

    # -- memory --------------------------------------------------------------------------------------------------------

    def _to_weigh(self) -> list[Method]:
        """Return the methods whose memory is still to be measured."""
        if not self.settings.memory or self.part[0] > 0:
            return []
        measured = {row["method"] for row in self.rows if row["kind"] == "memory"}
        return [method for method in self.methods if method.name not in measured | self.failed]

    def warm_up_method(self, method: Method) -> None:
        before = copy_bytes(self.model)
        super().warm_up_method(method)
        self.copies[method.name] = max(self.copies.get(method.name, 0), copy_bytes(self.model) - before)

    def _measure_memory(self, method: Method) -> None:
        row: dict[str, Any] = {"kind": "memory", "method": method.name}
        try:
            if (asked := method.request.get("peer")) is not None:
                row |= self.caller.peers[asked.peer].memory(asked)
            else:
                inputs = self.inputs_to_try()
                # First, since this makes the copies, which should exist while the peak is measured.
                held = persistent_bytes(self.caller, method, inputs, self.options)
                row["persistent_bytes"] = max(held, self.copies.get(method.name, 0)) if method.is_own else held
                row["peak_bytes"] = self._peak_bytes(method, inputs)
        except Exception as error:
            row["error"] = first_line(error)
        self.folder.append(row)

    def _peak_bytes(self, method: Method, inputs: Mapping[str, torch.Tensor]) -> int:
        options = {**self.short_options(), **self.caller.arguments(method.request)}
        with self.caller.alone(method.name, learn=False):
            mask = inputs.get("attention_mask")
            return peak_bytes(self.model, inputs["input_ids"], attention_mask=mask, **options)

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _check_sampling(self) -> None:
        """Check that tokens were drawn from the model's distribution."""
        for row in self._unchecked_samples():
            self.report_progress(f"{row['prompt']}, judging the draws of {row['method']}")
            judged: dict[str, Any] = {key: row[key] for key in ("session", "prompt", "method", "repeat")}
            try:
                judged |= self.draws_of(row).to_dict()
            except Exception as error:
                judged["error"] = first_line(error)
            self.folder.append({"kind": "draws", **judged})
            self.done += 1

    def _unchecked_samples(self) -> list[Mapping[str, Any]]:
        """Return the sampled calls whose draws have not been checked yet."""
        known = {(*_key(row), row["session"]) for row in self.rows if row["kind"] == "draws"}
        mine = {self.items[index].id for index in self.own_items()}
        return [
            row
            for row in latest_calls(self.rows)
            if row["prompt"] in mine and (*_key(row), row["session"]) not in known
        ]

    def _measure_margins(self) -> None:
        """Measure the logit margin of plain decoding wherever a text differs from its text."""
        known = {_key(row) for row in self.rows if row["kind"] == "difference"}
        calls = finished_calls(self.rows)
        plain = {(row["prompt"], row["repeat"]): row for row in calls if row["method"] == PLAIN}
        own = {method.name for method in self.methods if method.is_own or not self.settings.do_sample}
        mine = {self.items[index].id for index in self.own_items()}
        for row in calls:
            base = plain.get((row["prompt"], row["repeat"]))
            if base is None or row["method"] not in own or _key(row) in known or row["prompt"] not in mine:
                continue
            if first_difference(base["token_ids"], row["token_ids"]) is None:
                continue
            found: dict[str, Any] = {key: row[key] for key in ("prompt", "method", "repeat")}
            try:
                difference = self.difference(base, row["token_ids"])
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


def _rounds(wanted: Sequence[tuple[int, int, Method]]) -> Iterator[tuple[tuple[int, int], list[Method]]]:
    """Yield the methods wanted for each repeat and item, in order."""
    groups: dict[tuple[int, int], list[Method]] = {}
    for repeat, index, method in wanted:
        groups.setdefault((repeat, index), []).append(method)
    yield from groups.items()
