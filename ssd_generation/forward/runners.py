"""Three ways to run a pass of the target model: replayed as a CUDA graph, captured, or by the model's own code.

Each returns the model's outputs, or `None` where it cannot run this pass and nothing has happened. The first that
returns outputs has run the pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.buffered_layers import add_buffers, append_written, fix_unwritten
from ..native.cache_table import ONE_TEXT, TextPlace
from ..support.versions import cache_argument
from .captured.passes import CapturedPasses, captured_target
from .context import Context
from .cuda_graph.graph_passes import GraphPasses, target_graphs
from .cuda_graph.single_pass import RowPlaces, Tokens
from .eager.few_rows import MOST_ROWS, few_rows
from .eager.module_states import mode_of_states
from .eager.row_by_row import row_by_row
from .pass_plan import PassPlan
from .rounding import agree
from .structure.skip_mode import SkipMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CapturedRunner", "EagerRunner", "GraphRunner", "Passed", "WholeText"]

WholeText = tuple[torch.Tensor, torch.Tensor | None]
"""Tokens and positions of the whole text, `(B, text)` each."""


class Passed(NamedTuple):
    """Result of a pass.

    Attributes:
        outputs: the model's outputs, with `logits` of shape `(B, ≥ n, V)`.
        is_batch_invariant: whether the bits of the pass do not depend on its width, where there are such passes.
    """

    outputs: Any
    is_batch_invariant: bool


def _with_owed(
    tokens: torch.Tensor, positions: torch.Tensor | None, context: Context
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prepend the tokens that were committed since the checkpoint of recurrent states, which a pass is to repeat."""
    checkpoint = context.checkpoint
    if checkpoint is None:
        return tokens, positions
    owed = checkpoint.begin(context.cache, context.length, may_fail=tokens.shape[1] > 1)
    if owed is not None:
        tokens = torch.cat((owed, tokens), dim=1)
        if positions is not None:
            steps = torch.arange(-owed.shape[1], positions.shape[-1], device=positions.device)
            positions = positions[..., :1] + steps.to(positions)
    checkpoint.passed(tokens)
    return tokens, positions


def _at_once(run: Callable[[], None]) -> None:
    run()


class EagerRunner:
    """The model's own code, with fast kernels for few rows.

    Args:
        model: the target model.
        plan: how its passes are run.
    """

    def __init__(self, model: PreTrainedModel, plan: PassPlan) -> None:
        self._model, self._plan = model, plan
        self._cache_argument = cache_argument(model)
        self._states = mode_of_states(model)
        self._few: tuple[SkipMode | None] | None = None

    def few_rows(self) -> SkipMode | None:
        """Return the mode that puts fast kernels for few rows in place; `None` where there are none."""
        # Not a `cached_property`: until Python 3.12 these have a lock, which may be held when the process forks.
        if self._few is None:
            self._few = (None if self._plan.own_kernels else few_rows(self._model),)
        return self._few[0]

    def run(
        self,
        tokens: torch.Tensor,
        context: Context,
        whole: WholeText | None = None,
        through: Callable[[Callable[[], None]], object] = _at_once,
    ) -> Passed:
        """Run the pass.

        Args:
            tokens (`torch.LongTensor` of shape `(B, n)`): the pending token and n − 1 drafted ones.
            context: the state that they follow.
            whole: the whole text, for a pass in which the model may want to compute its cache anew.
            through: function that calls the model, such as to time it.
        """
        context.align_rows()
        new, positions = tokens.shape[1], context.positions_of(tokens.shape[1])
        tokens, positions = _with_owed(tokens, positions, context)
        inputs = self._inputs(tokens, positions, new, context, whole)
        lengths = None if context.has_been_passed else [getattr(layer, "end", 0) for layer in context.cache.layers]
        outputs: Any = None

        def run() -> None:
            nonlocal outputs
            few = self.few_rows() if whole is None and tokens.numel() <= MOST_ROWS else None
            is_apart = whole is None and tokens.shape[1] > 1
            with (
                few or nullcontext(),
                self._states or nullcontext(),
                row_by_row(self._model, len(tokens)) if is_apart else nullcontext(),
            ):
                outputs = self._model(**inputs, return_dict=True)

        through(run)
        cache = outputs.get(self._cache_argument)
        if cache is not None and cache is not context.cache:
            # phi3 starts a new cache where its long-context rotary embedding sets in.
            add_buffers(cache)
            context.cache = cache
        elif lengths is not None:
            context.has_been_passed = True
            fix_unwritten(context.cache, lengths)
        return Passed(outputs, False)

    def _inputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        new: int,
        context: Context,
        whole: WholeText | None,
    ) -> dict[str, Any]:
        count, mask = tokens.shape[1], context.mask
        if mask is not None and new > 1:
            mask = functional.pad(mask, (0, new - 1), value=1)
        ids = tokens
        if whole is not None:
            ids, positions = whole
        columns = {key: torch.cat([column] * count, dim=dim) for key, (column, dim) in context.columns.items()}
        arguments = {**context.arguments, **columns}
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = new
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=count,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_argument: context.cache},
            **arguments,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = new  # some models put a number of their own there
        return inputs


class CapturedRunner:
    """Captured passes of the target.

    Args:
        model: the target model.
        plan: how its passes are run.
        eager: runner of the model's own code, for comparison where a pass may not be as flat as captured ones.
    """

    def __init__(self, model: PreTrainedModel, plan: PassPlan, eager: EagerRunner) -> None:
        self._captured: CapturedPasses | None = captured_target(model, plan.batch_invariance) if plan.captured else None
        self._eager, self._plan = eager, plan
        # In half precision a plain step is the model's own: captured, it would round differently.
        is_half = model.dtype in (torch.bfloat16, torch.float16)
        self._shortest = 2 if plan.batch_invariance is None and is_half else 1

    def run(
        self,
        tokens: torch.Tensor,
        context: Context,
        whole: WholeText | None = None,
        counts: Sequence[int] | None = None,
    ) -> Passed | None:
        """Run the pass.

        Args:
            tokens, context, whole: as in `EagerRunner.run`.
            counts: number of tokens of each row that are computed, from the left; the logits of others are zeros.
                `None`: all.
        """
        rows, count = tokens.shape
        if whole is not None or self._captured is None or count < self._shortest:
            return None
        if (places := context.places(rows)) is not None:
            logits = self._logits(tokens, context, places, counts)
            return None if logits is None else Passed(CausalLMOutputWithPast(logits=logits), True)
        return self._try(tokens, context) if context.is_to_be_tried(rows) else None

    def _try(self, tokens: torch.Tensor, context: Context) -> Passed | None:
        """Run the pass both ways, and test whether a captured one computes the same here."""
        count = tokens.shape[1]
        logits = self._logits(tokens, context)
        if logits is None:
            return None
        context.cache.crop(-count)  # the model's own pass decides
        outputs, _ = self._eager.run(tokens, context)
        context.is_as_flat = agree(logits, outputs.logits[:, -count:])
        if not context.is_as_flat or self._plan.batch_invariance is None:
            return Passed(outputs, False)
        # The keys and values must have the bits that they have in any other pass, too.
        context.cache.crop(-count)
        outputs.logits = self._logits(tokens, context)
        return Passed(outputs, True)

    def _logits(
        self,
        tokens: torch.Tensor,
        context: Context,
        places: Sequence[TextPlace] = ONE_TEXT,
        counts: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Return the logits of the captured pass; `None` where it cannot run, in which case nothing has happened."""
        assert self._captured is not None
        positions = context.flat_positions
        if positions is None:
            positions = torch.full((len(tokens), 1), context.length, device=tokens.device)
        positions = positions + torch.arange(tokens.shape[1], device=tokens.device)
        if context.checkpoint is not None:
            return self._with_states(tokens, positions, context, places)
        if counts is None or min(counts) == tokens.shape[1] or not any(counts):
            return self._captured.run(context.cache, tokens, positions, texts=places)
        # Each token has a place of its own: a row costs what it has, not what the widest has.
        which = torch.arange(tokens.shape[1], device="cpu") < torch.tensor(counts, device="cpu")[:, None]
        texts = [
            place._replace(before=place.before + index)
            for place, count in zip(places, counts, strict=True)
            for index in range(count)
        ]
        ids, places_of_ids = tokens[which][:, None], positions.expand_as(tokens)[which][:, None]
        found = self._captured.run(context.cache, ids, places_of_ids, texts=texts, appended=tokens.shape[1])
        if found is None:
            return None
        logits = found.new_zeros((*tokens.shape, found.shape[-1]))
        logits[which] = found[:, 0]
        return logits

    def continues_from_states(self, count: int, rows: int, context: Context) -> bool:
        """Tell whether a pass over `count` tokens of each row, with recurrent states, is captured."""
        places, checkpoint = context.places(rows), context.checkpoint
        if self._captured is None or places is None or checkpoint is None or count < self._shortest:
            return False
        return self._captured.can_run(context.cache, rows * (checkpoint.owed(context.length) + count), places)

    def _with_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, context: Context, places: Sequence[TextPlace]
    ) -> torch.Tensor | None:
        """Return `_logits` of a pass that continues from a checkpoint of recurrent states."""
        captured, checkpoint = self._captured, context.checkpoint
        assert captured is not None and checkpoint is not None
        rows, count = tokens.shape
        may_fail = count > 1
        if not self.continues_from_states(count, rows, context):
            return None
        states, again = checkpoint.states_of_pass(context.cache, context.length, may_fail)
        if again is not None:
            steps = torch.arange(-again.shape[1], 0, device=positions.device)
            positions = torch.cat((positions[:, :1] + steps, positions), dim=1)
        whole = tokens if again is None else torch.cat((again, tokens), dim=1)
        logits = captured.run(context.cache, whole, positions, texts=places, states=states)
        assert logits is not None
        checkpoint.saved(context.cache, context.length, tokens, may_fail, repeats=again is not None)
        return logits[:, -count:]


class GraphRunner:
    """Passes replayed as CUDA graphs, once these have passed their check.

    Args:
        model: the target model.
        eager: runner of the model's own code, next to which graphs are recorded.
        rows: number of rows of the passes, B.

    Attributes:
        passes: number of passes replayed.
    """

    def __init__(self, model: PreTrainedModel, eager: EagerRunner, rows: int) -> None:
        self.passes = 0
        self._model, self._eager, self._rows = model, eager, rows
        self._graphs: GraphPasses | None = target_graphs(model, rows)
        self._is_stale = False

    @property
    def graphs(self) -> GraphPasses | None:
        """The passes over a single text; `None` for a batch, or where weights have changed since they were recorded."""
        return None if self._is_stale or self._rows > 1 else self._graphs

    @property
    def is_there(self) -> bool:
        """Tell whether this device replays passes of the model, or would."""
        return self._graphs is not None

    @property
    def refusal(self) -> str | None:
        """Reason why passes are not replayed where they might be; `None` where they are, or there are no graphs."""
        return None if self._graphs is None else self._graphs.refusal

    @property
    def may_run(self) -> bool:
        """Tell whether passes are replayed, or may turn out to be."""
        if self._is_stale or self._graphs is None:
            return False
        self._graphs = self._graphs.in_use
        return self._graphs.refusal is None

    @property
    def is_ready(self) -> bool:
        """Tell whether passes that have been recorded are replayed by now."""
        return self.may_run and self._graphs is not None and self._graphs.is_checked

    @property
    def is_trying(self) -> bool:
        """Tell whether passes are to be replayed, but have not passed their check yet."""
        return self.may_run and self._graphs is not None and not self._graphs.is_checked

    def most_drafted(self, context: Context) -> int:
        """Return the most tokens to draft for a round; arguments and result as in `Forward.most_drafted`."""
        if self._rows == 1 or not self.may_run or not self._has_place(context, self._rows):
            return sys.maxsize
        graphs = self._graphs
        assert graphs is not None
        left = max(context.limit - context.length, 0)
        # Rows that have advanced by the same number of tokens need not be moved for the model's own passes.
        is_tried = not graphs.is_checked and (not graphs.is_timed or graphs.is_worth_it(left))
        return 0 if is_tried else graphs.widths[-1] - 1

    def end(self, cache: Cache, keeps: bool) -> None:
        """End a call; arguments as in `Forward.end`."""
        if self._graphs is not None:
            self._graphs.end(cache, keeps)

    def renew(self, eager: EagerRunner) -> None:
        """Continue with weights that may have changed in the middle of a call.

        Args:
            eager: runner of the model's own code with these weights.
        """
        self._eager = eager
        if self._graphs is not None:
            # Another recording would need the memory that is lent to this call's cache.
            self._is_stale = not self._graphs.is_current(self._model)

    def run(self, tokens: torch.Tensor, context: Context, whole: WholeText | None = None) -> Passed | None:
        """Run the pass; arguments as in `EagerRunner.run`."""
        if whole is not None or not self.may_run or not self._has_place(context, len(tokens)):
            return None
        found = self.replay(Tokens((), tokens), context)
        if found is not None:
            return Passed(CausalLMOutputWithPast(logits=found[0]), self._rows == 1)
        return self._record(tokens, context)

    def _has_place(self, context: Context, rows: int) -> bool:
        return rows == self._rows and (context.is_plain(rows) or context.is_in_rows(rows))

    def _place(self, context: Context) -> int | RowPlaces:
        if self._rows == 1:
            return context.position
        assert context.positions is not None
        return RowPlaces(context.positions, context.lags, context.mask)

    def replay(self, tokens: Tokens, context: Context) -> tuple[torch.Tensor, ...] | None:
        """Replay a pass.

        Args:
            tokens: n tokens of each row.
            context: the state that they follow.

        Returns:
            Logits `(B, n, V)`, valid until the next pass, and the greedy choices; `None` where there is no graph yet.
        """
        if not self.may_run or not self._has_place(context, self._rows):
            return None
        graphs = self._graphs
        assert graphs is not None
        if not graphs.is_checked:
            return None
        # The model's own code would first have to move the rows of a batch.
        records = self._rows > 1 and graphs.is_worth_it(max(context.limit - context.length, 0))
        place, expected = self._place(context), context.limit
        found = graphs.run(context.cache, tokens, context.length, place, records, expected)
        if found is not None:
            append_written(context.cache, found[0].shape[1])
            self.passes += 1
        return found

    def _record(self, tokens: torch.Tensor, context: Context) -> Passed:
        """Run the model's own code, and record the same pass where that pays off in this text."""
        graphs = self._graphs
        assert graphs is not None

        def timed(run: Callable[[], None]) -> None:
            graphs.note_eager(graphs.backend.seconds_of(run))

        passed = self._eager.run(tokens, context, through=timed)
        left = max(context.limit - context.length, 0)
        if graphs.is_worth_it(left):
            graphs.try_alongside(context.cache, tokens, self._place(context), passed.outputs.logits, left)
        return passed
