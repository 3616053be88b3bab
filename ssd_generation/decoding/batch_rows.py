"""Rows of a batch during decoding: their tokens, their alignment in the cache, and which of them have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..cache.buffered_layers import BufferedLayer
from ..forward.context import Context
from .alignment import Alignment
from .choice import Choice, SampledChoice
from .ends import Ends, Limits
from .pace import Pace
from .processors import Processors, PureProcessors
from .rotary import RotarySwitch
from .row_tokens import RowTokens
from .verified_text import VerifiedText

__all__ = ["Rows"]


class Rows:
    """B texts decoded together, each at its own speed. A drafter sees them as `Texts`.

    Args:
        prompt (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.
        context: context that the next pass continues; its cache, mask and positions are the prompt's.
        processors: the call's logits processors.
        choice: rule that picks tokens from scores.
        limits: limits at which texts end.
        rotary: length at which the model's rotary embedding changes.
        lockstep: whether all rows take the same number of tokens in each round, for models that count positions by
            the length of the cache.
        cache_is_returned: whether the caller sees the cache afterwards.

    Attributes:
        committed: number of committed steps.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        context: Context,
        processors: Processors,
        choice: Choice,
        limits: Limits,
        rotary: RotarySwitch,
        lockstep: bool = False,
        cache_is_returned: bool = False,
    ) -> None:
        self._texts = RowTokens(prompt)
        self._alignment = Alignment(context, self.batch, prompt.device)
        self._ends = Ends(limits, self.batch)
        self.processors, self.choice, self.limits, self.rotary = processors, choice, limits, rotary
        self._before, self._truncating = processors.pure.split()
        self.lockstep = lockstep
        self.committed = 0
        self._goes = [True] * self.batch  # rows active in the current round
        self._pace = Pace(self._texts, self._alignment, self._ends, choice, rotary, cache_is_returned)

    # ------------------------------------------------------------------------------------------------------------------
    # what a drafter sees

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return self._texts.batch

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self._texts.device

    @property
    def context(self) -> Context:
        """Context that the next pass continues."""
        return self._alignment.context

    @property
    def lengths(self) -> list[int]:
        """Number of tokens per row."""
        return self._texts.lengths

    @property
    def prompt_length(self) -> int:
        """Number of columns of the prompts."""
        return self._texts.prompt_length

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids of the texts, `(B, ≥ longest)`; drafted tokens may follow a row's own."""
        return self._texts.ids

    @property
    def pending(self) -> torch.Tensor:
        """Last token of each row, `(B, 1)`, not in the cache yet."""
        return self._texts.pending

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return the tokens of a row from `start` on, including the prompt's and their padding."""
        return self._texts.text(row, start)

    @property
    def has_processors(self) -> bool:
        """True if the call has logits processors that apply to drafts."""
        return len(self.processors.pure) > 0

    @property
    def are_greedy(self) -> bool:
        """True if `choose` takes the token with the largest logit for a draft."""
        return not (self.has_processors or self.choice.draws)

    def process(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return scores `(B, V)`: logits `(B, V)` after the drafted tokens `(B, i)`, processed as for drafts."""
        return self._processed(self.processors.pure, drafted, logits)

    def _processed(self, processors: PureProcessors, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if processors.are_blind:
            return processors.once(self.pending, logits)
        self.write_ahead(drafted)
        return processors.step(self.tokens, self.lengths, logits, drafted.shape[1])

    def draw(self, drafted: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Implement `Texts.draw`."""
        truncation, ahead = self._truncating.truncation, drafted.shape[1]
        if truncation.is_none or not isinstance(self.choice, SampledChoice) or self.device.type != "cpu":
            return None
        scores = logits
        if len(self._before):
            scores = self._processed(self._before, drafted, logits.clone())
        drawn = self.choice.draw(truncation, scores[:, None], self._steps(ahead))
        return None if drawn is None else (drawn.tokens, drawn.probabilities.to(logits.dtype))

    def choose(self, scores: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """Return the tokens that plain decoding would take after the first `ahead` drafted ones.

        Args:
            scores (`torch.FloatTensor` of shape `(B, V)`, or `(B, n, V)` for n places): scores after all processors.
            ahead: number of drafted tokens before the first place.

        Returns:
            `torch.LongTensor` of shape `(B,)` or `(B, n)`.
        """
        steps = self._steps(ahead)
        if scores.ndim == 2:  # a draft may be any token: an impossible one becomes 0
            return self.choice.choose_for_draft(scores[:, None], steps)[:, 0].clamp(min=0)
        return self.choice.choose(scores, steps)

    def _steps(self, ahead: int = 0) -> list[int]:
        """Return the step of each row's next token after some drafted ones."""
        offset = self.prompt_length - ahead
        steps = [length - offset for length in self.lengths]
        if not all(self._goes):  # choices of inactive rows are not used
            some = next((step for step, goes in zip(steps, self._goes, strict=True) if goes), steps[0])
            steps = [step if goes else some for step, goes in zip(steps, self._goes, strict=True)]
        return steps

    # ------------------------------------------------------------------------------------------------------------------
    # verification

    @property
    def may_draw(self) -> bool:
        """True if `choose_drawn` can choose: the call samples on the CPU, by processors that are functions."""
        draws = self.processors.are_pure and isinstance(self.choice, SampledChoice)
        return draws and self.device.type == "cpu"

    @property
    def has_others(self) -> bool:
        """True if other processors come before temperature, top-k, top-p and min-p."""
        return len(self._before) > 0

    def choose_drawn(self, logits: torch.Tensor) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Return the tokens `(B, n)` that plain decoding would take, without the scores of all tokens.

        Args:
            logits (`torch.FloatTensor` of shape `(B, n, V)`): the model's, from a verification pass; written into if
                there are other processors, and else of any type.

        Returns:
            The tokens, and a function that returns the scores `(B, V)` of the first places.
        """
        choice, truncation, steps = self.choice, self._truncating.truncation, self._steps()
        assert isinstance(choice, SampledChoice)
        scores = self._before.block(self.tokens, self.lengths, self.pending, logits)

        def truncated(some: torch.Tensor) -> torch.Tensor:
            return self._truncating.once(self.pending[:1].expand(len(some), 1), some.float())

        drawn = choice.draw(truncation, scores, steps)
        if drawn is None:
            found = choice.choose(truncated(scores.flatten(0, 1)).view(scores.shape), steps)
            return found, lambda: truncated(scores[:, 0])
        found = drawn.tokens.view(scores.shape[:2])
        unsure: list[list[int]] = (~drawn.are_sure).view(scores.shape[:2]).nonzero().tolist()
        for row, place in unsure:
            if self._goes[row]:
                of_place = truncated(scores[row, place : place + 1])[0]
                found[row, place] = choice.choose_at(of_place, row, steps[row] + place)
        return found, lambda: truncated(scores[:, 0])

    # ------------------------------------------------------------------------------------------------------------------
    # the limits of a round

    def active(self) -> list[bool]:
        """Return, per row, whether it is active in this round: it has not ended, and need not wait for others."""
        self._goes = self._pace.active(self.columns)
        return self._goes

    def draft_limits(self, active: Sequence[bool]) -> list[int]:
        """Return, per row, the largest number of tokens worth drafting."""
        return self._pace.draft_limits(active, self.columns)

    # ------------------------------------------------------------------------------------------------------------------
    # tokens

    def is_padded(self, row: int) -> bool:
        """Tell whether a row has ended, so that padding follows."""
        return self._ends.is_padded(row)

    def write_ahead(self, drafted: torch.Tensor) -> None:
        """Write drafted tokens after each row's own, for the processors to see; accepted ones overwrite them."""
        self._texts.write_ahead(drafted, self.is_padded)

    def append(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Append new tokens to each row; arguments as in `RowTokens.append`."""
        self._texts.append(known, new)

    def advance(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Append the accepted tokens, remove the rejected ones from the cache, and advance mask and positions.

        Args:
            known, new: the tokens that each row takes, as in `RowTokens.append`.
        """
        self.append(known, new)
        self.move_on([len(tokens) for tokens in known])

    def move_on(self, added: Sequence[int]) -> None:
        """Remove the rejected tokens of a pass from the cache; arguments as in `Alignment.move_on`."""
        self._alignment.move_on(added)

    # ------------------------------------------------------------------------------------------------------------------
    # steps that all rows have taken

    def take_step(self) -> bool:
        """Commit one more step; return `False` where a row has not reached it yet.

        A row that has ended gets padding.
        """
        end = self.columns + 1
        padded = [row for row in range(self.batch) if self.is_padded(row)]
        if any(length < end and row not in padded for row, length in enumerate(self.lengths)):
            return False
        self._texts.pad(padded, end - 1, self.limits.pad_token_id)
        self.committed += 1
        self.choice.commit(self.committed)
        return True

    @property
    def columns(self) -> int:
        """Length of the committed text, prompt included."""
        return self.prompt_length + self.committed

    def committed_ids(self) -> torch.Tensor:
        """Return the committed texts, `(B, columns)`."""
        return self.tokens[:, : self.columns].contiguous()

    def last_committed(self) -> list[int]:
        """Return the last token of each committed text."""
        place = self.committed - 1
        return [
            self.limits.pad_token_id if self.is_padded(row) else self._texts.generated(row, place)
            for row in range(self.batch)
        ]

    @property
    def finished(self) -> list[bool]:
        """Flag of each row: true if plain decoding would have ended it after the committed steps."""
        return self._ends.finished

    @property
    def last_columns(self) -> list[int]:
        """Column of the token that ended each row, where padding follows."""
        return self._ends.last_columns

    def finish(self, done: Sequence[bool]) -> list[int]:
        """Record the decision of the stopping criteria after a step; return the rows that ended with it."""
        return self._ends.finish(done, self.columns - 1)

    def rest_known_ends(self) -> None:
        """Rest rows whose end is known but not committed yet, while others catch up."""
        if self.batch > 1:
            self._ends.rest(self.lengths, lambda row: self.text(row, self.columns))

    def roll_back_ahead(self) -> bool:
        """Roll back everything not committed yet, so that it is decoded anew; return `False` where that is impossible.

        It is impossible for a batch, for recurrent states, and where a window no longer reaches back so far.
        """
        ahead = max(self.lengths) - self.columns
        if self.context.checkpoint is not None:
            return False
        if ahead <= 0:
            return True
        if not self._alignment.roll_back(ahead):
            return False
        self._texts.cut(ahead)
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def whole_text(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return tokens and positions of the whole text if the rotary embedding changes at the next pass, else `None`.

        The model may then recompute its cache; all rows are equally long there.
        """
        if self.context.length != self.rotary.length:
            return None
        return self.tokens[:, : self.lengths[0]], self._alignment.all_positions()

    def verified_text(self, tokens: int) -> VerifiedText | None:
        """Return the last tokens of a single text and its cache; `None` where the cache does not hold the whole text.

        Args:
            tokens: largest number of them; the prompt's are never included.
        """
        context, length = self.context, self.lengths[0]
        tokens = min(tokens, length - self.prompt_length)
        if self.batch > 1 or tokens < 1 or self.rotary:
            return None
        layers = context.cache.layers
        holds_all = all(isinstance(layer, BufferedLayer) and layer.holds_all(context.length) for layer in layers)
        counts_from_0 = context.positions is None or bool((context.positions == context.length).all())
        is_masked = context.mask is not None and not bool(context.mask.all())
        # A continued cache may hold tokens that the call was not given.
        if not holds_all or is_masked or not counts_from_0 or context.length != length - 1:
            return None
        start = length - tokens

        def choose(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            columns = [start + number for number in index.tolist()]
            logits = logits.to(dtype=torch.float32, device=self.device)
            scores = self.processors.pure.places(self.tokens, columns, logits)
            return self.choice.choose_again(scores, [column - self.prompt_length for column in columns])

        return VerifiedText(self.tokens[:, :length], start, context.cache, choose=choose)

    # ------------------------------------------------------------------------------------------------------------------
    # handing the cache back

    @property
    def shifts(self) -> list[int]:
        """Cache slots by which each row lags the longest."""
        return self._alignment.shifts

    @property
    def prompt_slots(self) -> int:
        """Number of slots of the prompt."""
        return self._alignment.prompt_slots

    @property
    def committed_slots(self) -> int:
        """Number of slots of the prompt and the committed tokens; the last token has none yet."""
        return self.prompt_slots + self.committed - 1

    def take_back(self) -> None:
        """Crop the cache to the committed text after an exception."""
        if self.committed:
            self._alignment.leave(self.committed_slots)

    def align(self) -> None:
        """Align the cache as plain decoding leaves it: all committed tokens but the last, in the output's columns."""
        self._alignment.align(self.committed_slots)

    def go_to(self, slot: int, mask: torch.Tensor | None) -> None:
        """Go back to a slot of the aligned cache; arguments as in `Alignment.go_to`."""
        self._alignment.go_to(slot, mask)
        self._texts.lengths = [slot + self.prompt_length - self.prompt_slots + 1] * self.batch
