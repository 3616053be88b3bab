"""The rows of a batch while they are decoded: their tokens, where they stand in the cache, and which have ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.buffered_layers import BufferedLayer
from ..forward.context import Context
from .alignment import Alignment
from .choice import Choice
from .ends import Ends, Limits
from .pace import Pace
from .processors import Processors
from .rotary import RotarySwitch
from .row_tokens import RowTokens
from .verified_text import VerifiedText

__all__ = ["Rows"]


class Rows:
    """B texts that are decoded together, each at its own speed. A drafter sees them as `Texts`.

    Args:
        prompt (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.
        context: what the next pass follows; its cache holds the prompt, its mask and positions are the prompt's.
        processors: the call's logits processors.
        choice: picks tokens by their scores.
        limits: where texts end.
        rotary: where the model's rotary embedding changes.
        lockstep: whether all rows take the same number of tokens in each round, for models that count positions by
            the length of the cache.
        cache_is_returned: whether the caller sees the cache afterwards.

    Attributes:
        committed: steps that every row has taken.
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
        self.lockstep = lockstep
        self.committed = 0
        self._goes = [True] * self.batch  # in the round under way
        self._pace = Pace(self._texts, self._alignment, self._ends, choice, rotary, cache_is_returned)

    # ------------------------------------------------------------------------------------------------------------------
    # what a drafter sees

    @property
    def batch(self) -> int:
        """Rows, B."""
        return self._texts.batch

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self._texts.device

    @property
    def context(self) -> Context:
        """What the next pass follows."""
        return self._alignment.context

    @property
    def lengths(self) -> list[int]:
        """Tokens per row."""
        return self._texts.lengths

    @property
    def prompt_length(self) -> int:
        """Columns of the prompts."""
        return self._texts.prompt_length

    @property
    def tokens(self) -> torch.Tensor:
        """The texts `(B, ≥ longest)`, each followed by whatever was drafted."""
        return self._texts.ids

    @property
    def pending(self) -> torch.Tensor:
        """The last token of each row, `(B, 1)`, which is not in the cache yet."""
        return self._texts.pending

    def text(self, row: int, start: int = 0) -> list[int]:
        """The tokens of a row from `start` on, the prompt's (padding included) among them."""
        return self._texts.text(row, start)

    @property
    def has_processors(self) -> bool:
        """Whether the call has logits processors that drafts go through."""
        return len(self.processors.pure) > 0

    @property
    def are_greedy(self) -> bool:
        """Whether the token with the largest logit is the one that `choose` takes for a draft."""
        return not (self.has_processors or self.choice.draws)

    def process(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores `(B, V)`: logits `(B, V)` after the drafted tokens `(B, i)`, as processed for drafts."""
        pure = self.processors.pure
        if pure.are_blind:
            return pure.once(self.pending, logits)
        self.write_ahead(drafted)
        return pure.step(self.tokens, self.lengths, logits, drafted.shape[1])

    def choose(self, scores: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """The tokens that plain decoding would take behind the first `ahead` drafted ones.

        Args:
            scores (`torch.FloatTensor` of shape `(B, V)`, or `(B, n, V)` for n places): after all logits processors.
            ahead: drafted tokens before the first place.

        Returns:
            `torch.LongTensor` of shape `(B,)` or `(B, n)`.
        """
        behind = self.prompt_length - ahead
        steps = [length - behind for length in self.lengths]
        if not all(self._goes):  # what the others would take is of no use
            some = next((step for step, goes in zip(steps, self._goes, strict=True) if goes), steps[0])
            steps = [step if goes else some for step, goes in zip(steps, self._goes, strict=True)]
        if scores.ndim == 2:  # of a draft, which may be anything
            return self.choice.choose_for_draft(scores[:, None], steps)[:, 0].clamp(min=0)
        return self.choice.choose(scores, steps)

    # ------------------------------------------------------------------------------------------------------------------
    # the limits of a round

    def active(self) -> list[bool]:
        """Per row, whether it goes on in this round: it has not ended, and need not wait for others."""
        self._goes = self._pace.active(self.columns)
        return self._goes

    def draft_limits(self, active: Sequence[bool]) -> list[int]:
        """Per row, the most tokens that are worth drafting."""
        return self._pace.draft_limits(active, self.columns)

    # ------------------------------------------------------------------------------------------------------------------
    # tokens

    def is_padded(self, row: int) -> bool:
        """Whether a row has ended, so that padding follows."""
        return self._ends.is_padded(row)

    def write_ahead(self, drafted: torch.Tensor) -> None:
        """Put drafted tokens after each row's own, for the processors to see; accepted ones are written over them."""
        self._texts.write_ahead(drafted, self.is_padded)

    def append(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Put new tokens after each row's own; arguments as of `RowTokens.append`."""
        self._texts.append(known, new)

    def advance(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Take the accepted tokens in, and the rejected ones out of the cache; mask and positions move on.

        Args:
            known, new: the tokens that each row takes, as in `RowTokens.append`.
        """
        self.append(known, new)
        self.move_on([len(tokens) for tokens in known])

    def move_on(self, added: Sequence[int]) -> None:
        """Take the rejected tokens of a pass out of the cache; arguments as of `Alignment.move_on`."""
        self._alignment.move_on(added)

    # ------------------------------------------------------------------------------------------------------------------
    # steps that all rows have taken

    def take_step(self) -> bool:
        """Commit one more step; `False` where a row has not reached it yet.

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
        """The committed texts, `(B, columns)`."""
        return self.tokens[:, : self.columns].contiguous()

    def last_committed(self) -> list[int]:
        """The last token of each committed text."""
        place = self.committed - 1
        return [
            self.limits.pad_token_id if self.is_padded(row) else self._texts.generated(row, place)
            for row in range(self.batch)
        ]

    @property
    def finished(self) -> list[bool]:
        """Per row, whether plain decoding would have ended it after the committed steps."""
        return self._ends.finished

    @property
    def last_columns(self) -> list[int]:
        """Per row, the column of the token that ended it, where padding follows."""
        return self._ends.last_columns

    def finish(self, done: Sequence[bool]) -> list[int]:
        """Note what the stopping criteria say after a step; returns the rows that ended with it."""
        return self._ends.finish(done, self.columns - 1)

    def rest_known_ends(self) -> None:
        """Let rows rest whose end follows the committed steps already, while others catch up."""
        if self.batch > 1:
            self._ends.rest(self.lengths, lambda row: self.text(row, self.columns))

    def roll_back_ahead(self) -> bool:
        """Take all out that is not committed yet, so that it is decoded anew; `False` where that cannot be done.

        It cannot be of a batch, of recurrent states, and of a window that no longer reaches back so far.
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
        """Tokens and positions of the whole text for a pass at which the rotary embedding changes; `None` elsewhere.

        The model may then compute its cache anew; all rows are equally long there.
        """
        if self.context.length != self.rotary.length:
            return None
        return self.tokens[:, : self.lengths[0]], self._alignment.all_positions()

    def verified_text(self, tokens: int) -> VerifiedText | None:
        """The last tokens that were committed, with the cache behind them; `None` where it does not hold all of them.

        Args:
            tokens: at the most; none of the prompt.
        """
        context, length = self.context, self.lengths[0]
        tokens = min(tokens, length - self.prompt_length)
        if self.batch > 1 or tokens < 1 or self.rotary:
            return None
        layers = context.cache.layers
        holds_all = all(isinstance(layer, BufferedLayer) and layer.holds_all(context.length) for layer in layers)
        counts_from_0 = context.positions is None or bool((context.positions == context.length).all())
        is_masked = context.mask is not None and not bool(context.mask.all())
        # A continued cache may have tokens that the call was not given.
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
        """Slots of the cache by which each row lags behind the longest."""
        return self._alignment.shifts

    @property
    def prompt_slots(self) -> int:
        """Slots that the prompt takes."""
        return self._alignment.prompt_slots

    @property
    def committed_slots(self) -> int:
        """Slots of the prompt and of what was committed; the last token has none yet."""
        return self.prompt_slots + self.committed - 1

    def take_back(self) -> None:
        """After an exception: leave in the cache what was committed, and nothing that was to follow."""
        if self.committed:
            self._alignment.leave(self.committed_slots)

    def align(self) -> None:
        """Leave the cache as plain decoding does: all committed tokens but the last, in the columns of the output."""
        self._alignment.align(self.committed_slots)

    def go_to(self, slot: int, mask: torch.Tensor | None) -> None:
        """Go back to a slot of the aligned cache; arguments as of `Alignment.go_to`."""
        self._alignment.go_to(slot, mask)
        self._texts.lengths = [slot + self.prompt_length - self.prompt_slots + 1] * self.batch
