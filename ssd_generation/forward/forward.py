"""One forward pass of the target model, or of its draft, behind a KV cache.

Which way a pass is run is decided here, and nowhere else: it is played back from its capture where there is one
(passes.py), which saves most of what Python costs, or replayed as it was recorded on a GPU (replayed.py); otherwise the
model's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.layers import DraftCache, add_buffers, append_written, draft_cache, fix_unwritten
from ..cache.recurrent import Checkpoint
from ..config import SelfSpeculativeConfig
from ..support.model_state import state_of
from ..support.versions import CACHE_NAMES, cache_argument
from .few_rows import MOST_ROWS, few_rows
from .invariant import Invariant
from .module_states import module_states
from .passes import CapturedPasses, agree, captured_target, draft_of
from .recorded_pass import Tokens
from .replayed import ReplayedPasses, replayed_draft, replayed_target
from .resident import drafting_model
from .row_by_row import row_by_row
from .skip_mode import SkipMode
from .sublayers import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Context", "DraftPasses", "Forward"]

# What a draft's pass has no use for, or is given anew in each pass.
_NOT_FOR_DRAFTS = frozenset(
    (
        *CACHE_NAMES,
        "attention_mask",
        "position_ids",
        "inputs_embeds",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "token_type_ids",
        "mm_token_type_ids",
        "next_sequence_length",
        "is_first_iteration",
    )
)


@dataclass
class Context:
    """What a pass stands behind: the KV cache, and the model's other arguments.

    Attributes:
        cache: the target's; it holds `length` slots of each row.
        length: slots in the cache.
        mask (`torch.LongTensor` of shape `(B, length + 1)`): over the cached slots and the pending token; `None` while
            nothing is masked.
        positions (`torch.LongTensor` of shape `(…, B, 1)`): of the pending token; `None` for a model that counts them
            itself.
        arguments: further keyword arguments of the model's passes.
        columns: arguments of which the model wants a column for each token, such as `token_type_ids`: that of any token
            behind the prompt, and the dimension of the tokens.
        limit: slots that the text may come to.
        checkpoint: of a cache with recurrent states: where they can be put back to.
        has_been_passed: whether the model's own code has run a pass behind the prompt.
        is_as_flat: whether a captured pass, which knows neither axes of positions nor further arguments, was found to
            compute what the model does with them here; `None`: not tried yet.
    """

    cache: Cache
    length: int
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    limit: int = 0
    checkpoint: Checkpoint | None = None
    has_been_passed: bool = False
    is_as_flat: bool | None = None

    def __post_init__(self) -> None:
        # Of a single row this stays so: nothing behind the prompt is masked.
        is_unmasked = self.mask is None or bool(self.mask.all())
        self._is_flat = is_unmasked and (self.positions is None or self.positions.ndim == 2)
        # Behind a picture, the axes of time, height and width go on side by side; the first of four counts tokens.
        axes = None if self._is_flat or self.positions is None else self.positions[1:, ..., -1]
        self._may_be_flat = is_unmasked and (axes is None or bool((axes == axes[:1]).all()))
        self._ahead: int | None = None
        self.draft_arguments = {key: value for key, value in self.arguments.items() if key not in _NOT_FOR_DRAFTS}
        self._has_tensors = any(isinstance(value, torch.Tensor) for value in self.arguments.values())
        draft_tensors = any(isinstance(value, torch.Tensor) for value in self.draft_arguments.values())
        self._draft_is_plain = self._is_flat and not draft_tensors

    def suits_capture(self, rows: int) -> bool:
        """Whether a captured pass of the draft, which knows one row without a mask, can stand in for the model's."""
        return rows == 1 and (self._draft_is_plain or self.is_as_flat is True)

    def is_plain(self, rows: int) -> bool:
        """Whether a pass has no arguments but tokens and positions, and one row; or what else there is does nothing."""
        if rows != 1:
            return False
        return self.is_as_flat is True or (self._is_flat and not self.columns and not self._has_tensors)

    def is_to_be_tried(self, rows: int) -> bool:
        """Whether a pass may turn out to be plain: pictures are a matter of the prompt alone in most models."""
        return rows == 1 and self._may_be_flat and self.is_as_flat is None and self.checkpoint is None

    @property
    def flat_positions(self) -> torch.Tensor | None:
        """Positions `(B, 1)`, for a pass that is plain."""
        return self.positions if self.positions is None or self.positions.ndim == 2 else self.positions[-1]

    @property
    def position(self) -> int:
        """Of the pending token of a single row, which moves along with its slot."""
        if self._ahead is None:
            positions = self.flat_positions
            self._ahead = 0 if positions is None else int(positions[..., -1]) - self.length
        return self.length + self._ahead

    def positions_of(self, count: int) -> torch.Tensor | None:
        """Positions of the pending token and those behind it, `(…, B, count)`."""
        if self.positions is None or count == 1:
            return self.positions
        return self.positions + torch.arange(count, device=self.positions.device)


class Forward:
    """The passes of one model: whole (`target`), and as its own draft (`draft`).

    Args:
        model: the target model.
        config: what to draft with; `None` where the model does not draft.
        plays_back: whether the target's passes may be played back from a capture: not where hidden states or attentions
            are asked for, which a captured pass does not have, and of no use for more than one row.
        invariant: how the bits of the target's logits are kept from depending on the width of a pass; `None`: they may.
        replays: whether they may be replayed as they were recorded, where this device has a way to.
        own_kernels: whether passes that are the model's own code compute its linear layers by its own kernels, too.

    Attributes:
        is_bitwise: whether the bits of all passes of the target so far did not depend on their width.
        replayed_passes: of the target, so far.

    Raises:
        ValueError: the skip set does not fit the model, or low-bit copies cannot be made of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig | None = None,
        plays_back: bool = True,
        invariant: Invariant | None = None,
        replays: bool = True,
        own_kernels: bool = False,
    ) -> None:
        self.model = model
        self._own_kernels = own_kernels
        self._few: tuple[SkipMode | None] | None = None
        self._states = _mode_of_states(model)
        self.device = input_device(model)
        self._cache_argument = cache_argument(model)
        self.is_bitwise = invariant is not None
        self.replayed_passes = 0
        self._replayed = replayed_target(model) if plays_back and replays else None
        self._is_stale = False
        self._captured = captured_target(model, invariant) if plays_back and self._replayed is None else None
        self._invariant, self._plays_back, self._config = invariant, plays_back, config
        # In half precision a plain step is the model's own: captured, it would round otherwise.
        self._shortest = 2 if invariant is None and model.dtype in (torch.bfloat16, torch.float16) else 1
        self._draft: _DraftForward | None = None
        if config is not None:
            self.draft_by(config)

    def draft_by(self, config: SelfSpeculativeConfig) -> None:
        """Draft by this config from now on.

        Args:
            config: what the draft leaves out, and its precision.

        Raises:
            ValueError: as the constructor.
        """
        self._config = config
        self._draft = _DraftForward(self.model, config, None if self._is_stale else self._replayed)

    def renew(self) -> None:
        """The model's weights are others than they were, as by an adapter that was switched: make all of it anew.

        Raises:
            ValueError: as the constructor.
        """
        if self._replayed is None:
            self._captured = captured_target(self.model, self._invariant) if self._plays_back else None
        else:
            # Another recording would need the memory that this call's cache has been lent.
            self._is_stale = not self._replayed.is_current(self.model)
        self._few = None
        if self._config is not None:
            self.draft_by(self._config)

    def _few_rows(self) -> SkipMode | None:
        # Not a `cached_property`: until Python 3.12 these have a lock, which a fork may catch held.
        if self._few is None:
            self._few = (None if self._own_kernels else few_rows(self.model),)
        return self._few[0]

    # ------------------------------------------------------------------------------------------------------------------

    def target(
        self,
        tokens: torch.Tensor,
        context: Context,
        whole: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> Any:
        """The whole model's pass over the pending token of each row and the drafted ones behind it.

        Args:
            tokens (`torch.LongTensor` of shape `(B, n)`): the pending token and n − 1 drafted ones.
            context: what they stand behind. Their keys and values are appended to its cache; where the model starts a
                new cache, that one takes its place.
            whole: tokens and positions of the whole text, `(B, text)` each, for a pass in which the model may want to
                compute its cache anew.

        Returns:
            The model's outputs, with `logits` of shape `(B, ≥ n, V)`.
        """
        new = count = tokens.shape[1]
        replays = whole is None and self._replays(context, len(tokens))
        if replays and (found := self._replay(Tokens((), tokens), context)) is not None:
            return CausalLMOutputWithPast(logits=found[0])
        positions = context.positions_of(count)
        plays_back = whole is None and self._captured is not None and count >= self._shortest
        played: torch.Tensor | None = None
        if plays_back and (context.is_plain(len(tokens)) or context.is_to_be_tried(len(tokens))):
            played = self._play_back(tokens, context)
            if played is not None:
                if context.is_plain(len(tokens)):
                    return CausalLMOutputWithPast(logits=played)
                context.cache.crop(-count)  # the model's own pass decides
        was_bitwise, self.is_bitwise = self.is_bitwise, False
        if context.checkpoint is not None:
            again = context.checkpoint.begin(context.cache, context.length, may_fail=count > 1)
            if again is not None:
                tokens, count = torch.cat((again, tokens), dim=1), count + again.shape[1]
                if positions is not None:
                    positions = positions[..., :1] + torch.arange(
                        -again.shape[1], positions.shape[-1], device=positions.device
                    ).to(positions)
            context.checkpoint.passed(tokens)
        mask = context.mask
        if mask is not None and new > 1:
            mask = functional.pad(mask, (0, new - 1), value=1)
        ids = tokens
        if whole is not None:
            ids, positions = whole
        arguments = {
            **context.arguments,
            **{key: torch.cat([column] * count, dim=dim) for key, (column, dim) in context.columns.items()},
        }
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = new
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=count,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_argument: context.cache},
            **arguments,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = new  # some models put a number of their own there
        outputs: Any = None
        lengths = None if context.has_been_passed else [getattr(layer, "end", 0) for layer in context.cache.layers]

        def run() -> None:
            nonlocal outputs
            few = self._few_rows() if whole is None and tokens.numel() <= MOST_ROWS else None
            with (
                few or nullcontext(),
                self._states or nullcontext(),
                row_by_row(self.model, len(tokens)) if count > 1 and whole is None else nullcontext(),
            ):
                outputs = self.model(**inputs, return_dict=True)

        if replays and self._replayed is not None:
            self._replayed.note_eager(self._replayed.replays.seconds_of(run))
        else:
            run()
        if (cache := outputs.get(self._cache_argument)) is not None and cache is not context.cache:
            # phi3 starts a new cache where its long-context rotary embedding sets in.
            add_buffers(cache)
            context.cache = cache
        elif lengths is not None:
            context.has_been_passed = True
            fix_unwritten(context.cache, lengths)
        if played is not None:
            context.is_as_flat = agree(played, outputs.logits[:, -count:])
            if context.is_as_flat and was_bitwise:
                # The keys and values, too, are to have the bits that they have in any other pass.
                context.cache.crop(-count)
                outputs.logits, self.is_bitwise = self._play_back(tokens, context), True
        if replays and self._replayed is not None:
            left = max(context.limit - context.length, 0)
            if self._replayed.is_worth_it(left):
                self._replayed.try_beside(context.cache, tokens, context.position, outputs.logits, left)
        return outputs

    def _play_back(self, tokens: torch.Tensor, context: Context) -> torch.Tensor | None:
        """Logits of the captured pass; `None` where it cannot be played back: nothing has happened then."""
        assert self._captured is not None
        count, positions = tokens.shape[1], context.flat_positions
        first = torch.full((1, 1), context.length, device=tokens.device) if positions is None else positions
        positions = first + torch.arange(count, device=tokens.device)
        return self._captured.run(context.cache, tokens, positions)

    def replayed_logits(self, tokens: Tokens, context: Context) -> torch.Tensor | None:
        """Logits `(1, n, V)` of the whole model's pass over n tokens, good until the next one.

        Args:
            tokens, context: as in `choices`.

        Returns:
            `None` where the pass is not replayed, and nothing has happened then.
        """
        found = self._replay(tokens, context) if self._replays(context, 1) else None
        return None if found is None else found[0]

    def choices(self, tokens: Tokens, context: Context) -> tuple[list[int], list[int]] | None:
        """The tokens that the whole model takes greedily behind each of some, where its passes are replayed.

        One copy to the device, and one wait for it.

        Args:
            tokens: the pending one of a single row, and drafted ones behind it.
            context: as in `target`.

        Returns:
            The tokens themselves, and as many that it takes; `None` where the pass is not replayed, and nothing has
            happened then.
        """
        found = self._replay(tokens, context) if self._replays(context, 1) else None
        if found is None:
            return None
        if tokens.others is None:
            return list(tokens.known), found[1].tolist()
        both: list[int] = torch.cat((tokens.others[0], found[1])).tolist()
        others = tokens.others.shape[1]
        return [*tokens.known, *both[:others]], both[others:]

    @property
    def may_replay(self) -> bool:
        """Whether passes of the target are replayed, or may turn out to be."""
        if self._is_stale:
            return False
        if self._replayed is not None:
            self._replayed = self._replayed.in_use
        return self._replayed is not None and self._replayed.refusal is None

    @property
    def replays(self) -> bool:
        """Whether passes of the target are replayed by now, where they have been recorded."""
        return self.may_replay and self._replayed is not None and self._replayed.is_checked

    @property
    def is_trying_to_replay(self) -> bool:
        """Whether passes of the target are to be replayed, and have not been found to be right yet."""
        return self.may_replay and self._replayed is not None and not self._replayed.is_checked

    def _replays(self, context: Context, rows: int) -> bool:
        return self.may_replay and context.is_plain(rows)

    def _replay(self, tokens: Tokens, context: Context) -> tuple[torch.Tensor, ...] | None:
        """A pass with the addresses it was recorded at; `None` where it has not been."""
        replayed = self._replayed
        assert replayed is not None
        if not replayed.is_checked:
            return None
        found = replayed.run(context.cache, tokens, context.length, context.position, expected=context.limit)
        if found is not None:
            append_written(context.cache, found[1].shape[0])
            self.replayed_passes += 1
        return found

    @property
    def replay_refusal(self) -> str | None:
        """Why passes are not replayed where they might be; `None` where they are, or nothing is replayed here."""
        return None if self._replayed is None else self._replayed.refusal

    def end(self, cache: Cache, keeps: bool) -> None:
        """A call is over.

        Args:
            cache: what its passes stood behind.
            keeps: whether anybody will look at what it holds.
        """
        if self._replayed is not None:
            self._replayed.arena.take_back(cache, keeps)
            if self._replayed.refusal is not None:
                self._replayed.arena.free()

    # ------------------------------------------------------------------------------------------------------------------

    def draft(self, context: Context, rows: int, length: int) -> DraftPasses:
        """The passes of one round's draft, to be entered with `with`.

        Args:
            context: what they stand behind. Its cache is read in place; the draft's own keys and values are kept until
                the end of the round.
            rows: of the batch, B.
            length: tokens to draft at the most.
        """
        assert self._draft is not None, "no config to draft by"
        return self._draft.passes(context, rows, length)


class DraftPasses:
    """The passes of one round's draft, one token after the other: `passes(token, depth)` inside `with passes:`."""

    def __enter__(self) -> DraftPasses:
        """Begin the round's draft."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, however it came to its end."""

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        """One pass.

        Args:
            token (`torch.LongTensor` of shape `(B, 1)`): the last token of each row, drafted ones included.
            depth: tokens drafted so far.

        Returns:
            Logits `(B, 1, V)`.
        """
        raise NotImplementedError

    def chain(self, first: int, length: int) -> torch.Tensor | None:
        """Tokens that a single text's draft takes greedily one behind the other, without a look at any of them.

        Args:
            first: the pending token.
            length: of the chain.

        Returns:
            `torch.LongTensor` of shape `(1, length)`; `None` where they are to be drafted one by one.
        """
        return None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model as it is without the draft, for what others do between two passes."""
        yield


class _CapturedDraftPasses(DraftPasses):
    def __init__(self, captured: CapturedPasses, cache: Cache, positions: torch.Tensor, length: int) -> None:
        self._captured, self._cache, self._length = captured, cache, length
        self._positions = positions + torch.arange(length, device=positions.device)

    def __exit__(self, *_: object) -> None:
        self._captured.end_round()

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        positions = self._positions[:, depth : depth + 1]
        logits = self._captured.run(self._cache, token, positions, drafted=depth, ahead=self._length)
        assert logits is not None
        return logits


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
        # One mask for all passes; each sees the left part of it.
        self._mask = None if context.mask is None else functional.pad(context.mask, (0, length), value=1)
        self._width = 0 if context.mask is None else context.mask.shape[1]
        self._columns = {name: one for name, one in context.columns.items() if name not in _NOT_FOR_DRAFTS}
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
        """Go on behind so many drafted tokens, whose keys and values stand behind the cache already."""
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
            # States stand behind the checkpoint: what was committed since goes first.
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


class _ReplayedDraftPasses(DraftPasses):
    """Replayed, and by the model's own code from where that fails."""

    def __init__(
        self, replayed: ReplayedPasses, context: Context, of_the_model: Callable[[], _ModelDraftPasses]
    ) -> None:
        self._replayed, self._context, self._of_the_model = replayed, context, of_the_model
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
        return self._replayed.chain(context.cache, first, context.length, context.position, length)

    def __call__(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        if self._others is None:
            context = self._context
            slot, position = context.length + depth, context.position + depth
            found = self._replayed.run(context.cache, Tokens((), token), slot, position, records=True)
            if found is not None:
                return found[0]
            others = self._of_the_model()
            others.resume_at(depth)
            self._others = others.__enter__()
        return self._others(token, depth)


class _DraftForward:
    """What makes a model its own draft: skip mode, low-bit copies in place, and the passes captured with them."""

    def __init__(self, model: PreTrainedModel, config: SelfSpeculativeConfig, target: ReplayedPasses | None) -> None:
        model = drafting_model(model, config)
        self._model = model
        self._skip_mode, self._captured = draft_of(model, config)
        self._replayed: ReplayedPasses | None = None
        if target is not None and config.drafts_itself:
            copies = state_of(model).low_bit_drafts.get((config.skip, config.precision))
            self._replayed = replayed_draft(model, (config.skip, config.precision), self._skip_mode, copies)
        if self._replayed is not None:
            self._captured = None
        self._target = target
        self._skipped_attention = frozenset(config.skip.attention)
        self._cache: DraftCache | None = None
        self._has_copies = config.precision is not None
        self._few: tuple[SkipMode | None] | None = None
        self._states = _mode_of_states(model)

    def _few_rows(self) -> SkipMode | None:
        if self._few is None:
            # Copies have kernels of their own.
            self._few = (None if self._has_copies else few_rows(self._model),)
        return self._few[0]

    def passes(self, context: Context, rows: int, length: int) -> DraftPasses:
        captured = self._captured
        if (
            captured is not None
            and (positions := context.flat_positions) is not None
            and context.suits_capture(rows)
            and captured.can_run(context.cache, 1)
        ):
            return _CapturedDraftPasses(captured, context.cache, positions, length)
        of_the_model = partial(self._passes_of_the_model, context, length)
        replayed, target = self._replayed, self._target
        if replayed is None or target is None or not target.is_checked or not context.is_plain(rows):
            return of_the_model()
        if not target.arena.lend(context.cache, context.length + length + 1):
            return of_the_model()
        return _ReplayedDraftPasses(replayed, context, of_the_model)

    def _passes_of_the_model(self, context: Context, length: int) -> _ModelDraftPasses:
        again = None if context.checkpoint is None else context.checkpoint.rewind(context.cache, context.length)
        if self._cache is None or self._cache.target is not context.cache:
            self._cache = draft_cache(context.cache, self._skipped_attention)
        else:
            self._cache.rewind()
        others = self._few_rows(), self._states
        return _ModelDraftPasses(self._model, self._skip_mode, self._cache, context, length, again, others)


def _mode_of_states(model: PreTrainedModel) -> SkipMode | None:
    """What makes the states that are kept on modules those of a pass's cache; `None` where there are none."""
    states = module_states(model)
    return None if states is None else states.mode(model)
