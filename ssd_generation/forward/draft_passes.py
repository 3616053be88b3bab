"""The passes of a round's draft: captured, replayed as a CUDA graph, or by the model's own code in skip mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..cache.buffered_layers import DraftCache, draft_cache
from ..config import SelfSpeculativeConfig
from ..native.cache_table import TextPlace
from ..support.model_state import state_of
from ..support.versions import cache_argument
from .captured.passes import CapturedPasses, draft_of
from .context import NOT_FOR_DRAFTS, Context
from .copies.low_bit import CopiesPart
from .copies.resident import drafting_model
from .cuda_graph.graph_passes import GraphPasses, draft_graphs
from .cuda_graph.single_pass import Tokens
from .eager.few_rows import few_rows
from .eager.module_states import mode_of_states
from .eager.row_by_row import row_by_row
from .structure.skip_mode import SkipMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DraftForward", "DraftPasses"]


class DraftPasses:
    """The passes of one round's draft, one token after the other: `passes(token, depth)` inside `with passes:`."""

    def __enter__(self) -> DraftPasses:
        """Begin the round's draft."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the round's draft, completed or interrupted."""

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        """Run one pass.

        Args:
            token (`torch.LongTensor` of shape `(B, 1)`): the last token of each row, drafted ones included.
            depth: tokens drafted so far.

        Returns:
            Logits `(B, 1, V)`.
        """
        raise NotImplementedError

    def chain(self, first: int, length: int) -> torch.Tensor | None:
        """Draft a greedy chain of tokens for a single row, without inspecting any of them in between.

        Args:
            first: the pending token.
            length: number of tokens in the chain.

        Returns:
            `torch.LongTensor` of shape `(1, length)`; `None` where they are to be drafted one by one.
        """
        return None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Restore the model without the draft, for code that runs between two passes."""
        yield


class _CapturedDraftPasses(DraftPasses):
    def __init__(
        self,
        captured: CapturedPasses,
        context: Context,
        positions: torch.Tensor,
        length: int,
        texts: Sequence[TextPlace],
    ) -> None:
        self._captured, self._cache, self._length, self._texts = captured, context.cache, length, texts
        self._again = self._states = None
        if context.checkpoint is not None:
            self._states, self._again = context.checkpoint.states_of_draft(context.cache, context.length)
        self._repeated = 0 if self._again is None else self._again.shape[1]
        self._positions = positions + torch.arange(-self._repeated, length, device=positions.device)

    def __exit__(self, *_: object) -> None:
        self._captured.end_round()

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        first, drafted = depth + self._repeated, depth + self._repeated
        if depth == 0 and self._again is not None:
            # The states are those of the checkpoint: the tokens committed since then go first.
            token, first, drafted = torch.cat((self._again, token), dim=1), 0, 0
        logits = self._captured.run(
            self._cache,
            token,
            self._positions[:, first : first + token.shape[1]],
            drafted=drafted,
            ahead=self._length + self._repeated,
            texts=self._texts,
            states=self._states,
        )
        assert logits is not None
        return logits[:, -1:]


class _ModelDraftPasses(DraftPasses):
    def __init__(
        self,
        model: PreTrainedModel,
        skip_mode: SkipMode,
        cache: DraftCache,
        context: Context,
        length: int,
        again: torch.Tensor | None,
        others: Sequence[SkipMode | None],
    ) -> None:
        self._model, self._cache, self._context = model, cache, context
        self._modes = (*(mode for mode in others if mode is not None), skip_mode)
        # One mask for all passes; each sees its left part.
        self._mask = None if context.mask is None else functional.pad(context.mask, (0, length), value=1)
        self._width = 0 if context.mask is None else context.mask.shape[1]
        self._columns = {name: one for name, one in context.columns.items() if name not in NOT_FOR_DRAFTS}
        self._again = again

    def __enter__(self) -> _ModelDraftPasses:
        with ExitStack() as entered:
            for mode in self._modes:
                entered.enter_context(mode)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)  # type: ignore[arg-type]

    def resume_at(self, depth: int) -> None:
        """Continue after `depth` drafted tokens, whose keys and values are already written after the cache."""
        self._cache.resume_at(depth)

    @contextmanager
    def paused(self) -> Iterator[None]:
        for mode in self._modes:
            mode.pause()
        yield
        for mode in self._modes:
            mode.resume()

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        context = self._context
        positions = None if context.positions is None else context.positions + depth
        columns, count = {name: column for name, (column, _) in self._columns.items()}, 1
        if self._again is not None:
            # The states are those of the checkpoint: the tokens committed since then go first.
            token, self._again = torch.cat((self._again, token), dim=1), None
            count = token.shape[1]
            columns = {name: torch.cat([column] * count, dim=dim) for name, (column, dim) in self._columns.items()}
            if positions is not None:
                positions = positions + torch.arange(1 - count, 1, device=positions.device)
        inputs = self._model.prepare_inputs_for_generation(
            token,
            next_sequence_length=count,
            attention_mask=None if self._mask is None else self._mask[:, : self._width + depth],
            position_ids=positions,
            **{cache_argument(self._model): self._cache, **context.draft_arguments, **columns},
        )
        with row_by_row(self._model, len(token)) if count > 1 else nullcontext():
            logits: torch.Tensor = self._model(**inputs, return_dict=True).logits
        return logits[:, -1:]


class _GraphDraftPasses(DraftPasses):
    """Replayed passes, and passes by the model's own code from the first replay that fails."""

    def __init__(self, graphs: GraphPasses, context: Context, of_the_model: Callable[[], _ModelDraftPasses]) -> None:
        self._graphs, self._context, self._of_the_model = graphs, context, of_the_model
        self._others: _ModelDraftPasses | None = None

    def __exit__(self, *error: object) -> None:
        if self._others is not None:
            self._others.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with nullcontext() if self._others is None else self._others.paused():
            yield

    def chain(self, first: int, length: int) -> torch.Tensor | None:
        context = self._context
        return self._graphs.chain(context.cache, first, context.length, context.position, length)

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        if self._others is None:
            context = self._context
            slot, position = context.length + depth, context.position + depth
            found = self._graphs.run(context.cache, Tokens((), token), slot, position, records=True)
            if found is not None:
                return found[0]
            others = self._of_the_model()
            others.resume_at(depth)
            self._others = others.__enter__()
        return self._others(token, depth)


class DraftForward:
    """Drafting side of a model: skip mode, low-bit copies in place, and the passes captured with them.

    Args:
        model: the target model.
        config: what the draft leaves out, and its precision.
        target: the target's passes as CUDA graphs, where there are any.
        targets_few_rows: returns the target's mode for few rows, which a draft that runs the target's own code shares.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig,
        target: GraphPasses | None,
        targets_few_rows: Callable[[], SkipMode | None],
    ) -> None:
        of_target, model = model, drafting_model(model, config)
        self._targets_few_rows = targets_few_rows if model is of_target else None
        self._model = model
        self._skip_mode, self._captured = draft_of(model, config)
        self._graphs: GraphPasses | None = None
        if target is not None and config.drafts_itself:
            copies = state_of(model).get(CopiesPart).low_bit_drafts.get((config.skip, config.precision))
            self._graphs = draft_graphs(model, (config.skip, config.precision), self._skip_mode, copies)
        if self._graphs is not None:
            self._captured = None
        self._target = target
        self._skipped_attention = frozenset(config.skip.attention)
        self._cache: DraftCache | None = None
        self._has_copies = config.precision is not None
        self._few: tuple[SkipMode | None] | None = None
        self._states = mode_of_states(model)

    def _few_rows(self) -> SkipMode | None:
        if self._few is None:
            found = None
            if not self._has_copies:  # copies have kernels of their own
                found = None if self._targets_few_rows is None else self._targets_few_rows()
                found = few_rows(self._model) if found is None else found
            self._few = (found,)
        return self._few[0]

    def passes(self, context: Context, rows: int, length: int) -> DraftPasses:
        captured = self._captured
        owed = 0 if context.checkpoint is None else context.checkpoint.owed(context.length)
        if (
            captured is not None
            and (texts := context.places_for_drafts(rows)) is not None
            and captured.can_run(context.cache, rows * (1 + owed), texts)
        ):
            positions = context.flat_positions
            if positions is None:  # of states alone: no pass reads them
                positions = torch.full((rows, 1), context.length, device="cpu")
            return _CapturedDraftPasses(captured, context, positions, length, texts)
        of_the_model = partial(self._passes_of_the_model, context, length)
        graphs, target = self._graphs, self._target
        if graphs is None or target is None or not target.is_checked or not context.is_plain(rows):
            return of_the_model()
        if not target.arena.lend(context.cache, context.length + length + 1):
            return of_the_model()
        return _GraphDraftPasses(graphs, context, of_the_model)

    def _passes_of_the_model(self, context: Context, length: int) -> _ModelDraftPasses:
        context.align_rows()
        again = None if context.checkpoint is None else context.checkpoint.rewind(context.cache, context.length)
        if self._cache is None or self._cache.target is not context.cache:
            self._cache = draft_cache(context.cache, self._skipped_attention)
        else:
            self._cache.rewind()
        others = self._few_rows(), self._states
        return _ModelDraftPasses(self._model, self._skip_mode, self._cache, context, length, again, others)
