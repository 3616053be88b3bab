"""The rows of a batch while they are decoded: tokens, lengths, masks, positions, and which of them have ended.

Layouts: `tokens` is aligned at the left, as in `generate`'s output: row r holds `lengths[r]` tokens, column t is step t
of every row. The KV cache is aligned at the right: a row that lags `shifts[r]` slots behind the longest one has as many
masked slots at its left, which every model supports as left padding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache.layers import BufferedLayer, BufferedSlidingLayer, move_rows, reaches_back
from ..cache.recurrent import MOST_OWED, REACH
from ..forward.forward import Context
from ..support.devices import sent
from .choice import Choice
from .processors import Processors
from .rotary import RotarySwitch
from .verified_text import VerifiedText

__all__ = ["Limits", "Rows"]

# Rows of a batch whose cache is returned may run this many tokens ahead of the slowest, so that sliding layers can be
# put back.
_MAX_LEAD = 64


@dataclass(frozen=True)
class Limits:
    """Where the texts of a call end.

    Attributes:
        max_length: tokens of a text, the prompt's included.
        stops_at_eos: whether rows end by themselves: what follows is padding.
        eos_token_ids: the tokens that end a text.
        pad_token_id: what follows the end of a text that ended before others.
        most_positions: tokens that the model has positions for; no draft reaches beyond them.
    """

    max_length: int
    stops_at_eos: bool
    eos_token_ids: frozenset[int]
    pad_token_id: int
    most_positions: int = sys.maxsize


class Rows:
    """B texts that are decoded together, each at its own speed. A drafter sees them as `Texts`.

    Args:
        prompt (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.
        context: what the next pass stands behind; its cache holds the prompt, its mask and positions are the prompt's.
        processors: the call's logits processors.
        choice: picks tokens by their scores.
        limits: where texts end.
        rotary: where the model's rotary embedding changes.
        in_step: whether all rows take the same number of tokens in each round, for models that count positions from the
            length of the cache.
        cache_is_returned: whether the caller sees the cache afterwards.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, ≥ longest)`): the texts, and behind each whatever was drafted.
        lengths: tokens per row.
        shifts: slots of the cache by which each row lags behind the longest.
        committed: steps that every row has taken.
        finished: per row, whether plain decoding would have ended it after the committed steps.
        last_columns: per row, the column of the token that ended it, where padding follows.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        context: Context,
        processors: Processors,
        choice: Choice,
        limits: Limits,
        rotary: RotarySwitch,
        in_step: bool = False,
        cache_is_returned: bool = False,
    ) -> None:
        self.prompt_length = prompt.shape[1]
        self._batch = prompt.shape[0]
        self.device = prompt.device
        self._tokens = prompt.new_zeros((self.batch, self.prompt_length + 64), dtype=torch.long)
        self._tokens[:, : self.prompt_length] = prompt
        # What the host knows of them, so that it need not wait for the device to say it again.
        self._prompt: list[list[int]] = []
        self._generated: list[list[int]] = [[] for _ in range(self.batch)]
        self._unwritten = 0  # of a single row's last tokens
        self.context = context
        self.processors = processors
        self.choice = choice
        self.limits = limits
        self.rotary = rotary
        self.in_step = in_step
        self.lengths = [self.prompt_length] * self.batch
        self.shifts = [0] * self.batch
        self.committed = 0
        self.finished = [False] * self.batch
        self._goes = [True] * self.batch  # in the round under way
        self._rests = [False] * self.batch  # known to finish at a step that is not committed yet
        self.last_columns = [sys.maxsize] * self.batch
        self.prompt_slots = context.length
        self._prompt_positions: torch.Tensor | None = None
        if context.positions is not None:
            self._prompt_positions = context.positions[..., : context.length]
            context.positions = context.positions[..., -1:].expand(*context.positions.shape[:-2], self.batch, 1).clone()
        is_sliding = any(isinstance(layer, BufferedSlidingLayer) for layer in context.cache.layers)
        self._max_lead = _MAX_LEAD if self.batch > 1 and cache_is_returned and is_sliding else limits.max_length

    # ------------------------------------------------------------------------------------------------------------------
    # what a drafter sees

    @property
    def batch(self) -> int:
        """Rows, B."""
        return self._batch

    @property
    def tokens(self) -> torch.Tensor:
        """See the class."""
        if self._unwritten:
            generated = self._generated[0]
            length, last = self.prompt_length + len(generated), generated[-self._unwritten :]
            self._widen(length)
            self._tokens[0, length - len(last) : length] = sent(last, self.device)
            self._unwritten = 0
        return self._tokens

    @property
    def pending(self) -> torch.Tensor:
        """The last token of each row, `(B, 1)`, which is not in the cache yet."""
        if len(set(self.lengths)) == 1:
            return self.tokens[:, self.lengths[0] - 1 : self.lengths[0]]
        last = sent(self.lengths, self.device)[:, None] - 1
        return self.tokens.gather(1, last)

    def text(self, row: int, start: int = 0) -> list[int]:
        """The tokens of a row from `start` on, the prompt's (padding included) among them."""
        if start >= self.prompt_length:
            return self._generated[row][start - self.prompt_length :]
        if not self._prompt:
            self._prompt = self._tokens[:, : self.prompt_length].tolist()
        return self._prompt[row][start:] + self._generated[row]

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
        going = [not self._rests[row] and not self.is_padded(row) for row in range(self.batch)]
        for row, spare in enumerate(self._spare()):
            going[row] = going[row] and spare > 0
        if self.rotary and any(going):
            rows = [row for row in range(self.batch) if going[row]]
            if min(map(self._columns, rows)) < self.rotary.length:
                for row in rows:  # until the last one has reached the length at which the embedding changes
                    going[row] = self._columns(row) < self.rotary.length
        self._goes = going
        return going

    def draft_limits(self, active: Sequence[bool]) -> list[int]:
        """Per row, the most tokens that are worth drafting: one less than it may add, since one is the target's own."""
        # The pending token is at the position of its slot, or before it where padding stands at the left.
        most = min(self._longest_draft(active), max(self.limits.most_positions - self.context.length - 1, 0))
        checkpoint = self.context.checkpoint
        if checkpoint is not None:
            most = min(most, REACH - MOST_OWED - 1)
            if checkpoint.has_no_room or checkpoint.owed(self.context.length) >= MOST_OWED:
                most = 0  # a pass in which nothing can be rejected moves the checkpoint on
        return [min(spare - 1, most) if active[row] else 0 for row, spare in enumerate(self._spare())]

    def _spare(self) -> list[int]:
        """Tokens that each row may still add."""
        end = self.prompt_length + self.committed
        lead = min(self._max_lead, self.choice.longest_lead)
        last = min(self.limits.max_length, self._last_common_length())
        return [min(last - length, lead - (length - end)) for length in self.lengths]

    def _last_common_length(self) -> int:
        """The length at which rows wait for one another: behind it their passes need rows that a table does not have.

        Rows that rest are in each pass as well, with the position of their pending token.
        """
        last = self.limits.most_positions - self.prompt_slots + self.prompt_length
        going = [length for row, length in enumerate(self.lengths) if not self._rests[row] and not self.is_padded(row)]
        return sys.maxsize if self.batch == 1 or min(going, default=last) >= last else last

    def _columns(self, row: int) -> int:
        """Tokens in the text of a row, the pending one and padding included."""
        return self.context.length - self.shifts[row] + 1

    def _longest_draft(self, active: Sequence[bool]) -> int:
        """Tokens of a draft that does not reach across the length at which the rotary embedding changes."""
        if not self.rotary or not any(active):
            return sys.maxsize
        slowest = min(self._columns(row) for row in range(self.batch) if active[row])
        if slowest < self.rotary.length:
            # Resting rows are in the pass as well, and its end is theirs; the one that is ahead may come to rest with a
            # token of the target's own at the switch.
            return max(self.rotary.length - self.context.length - (1 if self.batch == 1 else 2), 0)
        padding = 0
        if (positions := self.context.positions) is not None:
            padding = min(self._columns(row) - 1 - int(positions[..., row, 0].max()) for row in range(self.batch))
        return sys.maxsize if self.rotary.changes_once and slowest - padding > self.rotary.length + 1 else 0

    # ------------------------------------------------------------------------------------------------------------------
    # tokens

    def is_padded(self, row: int) -> bool:
        """Whether a row has ended, so that padding follows."""
        return self.finished[row] and self.limits.stops_at_eos

    def write_ahead(self, drafted: torch.Tensor) -> None:
        """Put drafted tokens behind each row's own, for the processors to see; accepted ones are written over them."""
        count = drafted.shape[1]
        self._widen(max(self.lengths) + count)
        for row, length in enumerate(self.lengths):
            if not self.is_padded(row):  # those hold padding there
                self.tokens[row, length : length + count] = drafted[row]

    def append(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Put new tokens behind each row's own.

        Args:
            known: the tokens of each row, `added[r]` of them.
            new (`torch.LongTensor` of shape `(B, ≥ max(added))`): the same on the device, and anything behind them;
                `None` for a single row: they are brought there when somebody asks for them.
        """
        added = [len(tokens) for tokens in known]
        if new is None:
            self._unwritten += added[0]
        else:
            self._widen(max(self.lengths) + new.shape[1])
            written = self.tokens  # with those before
            if len(set(self.lengths)) == 1 and len(set(added)) == 1:
                written[:, self.lengths[0] : self.lengths[0] + added[0]] = new[:, : added[0]]
            else:
                for row, count in enumerate(added):
                    written[row, self.lengths[row] : self.lengths[row] + count] = new[row, :count]
        for generated, tokens in zip(self._generated, known, strict=True):
            generated.extend(tokens)
        self.lengths = [length + count for length, count in zip(self.lengths, added, strict=True)]

    def advance(self, known: Sequence[Sequence[int]], new: torch.Tensor | None = None) -> None:
        """Take the accepted tokens in, and the rejected ones out of the cache; mask and positions move on.

        Args:
            known, new: the tokens that each row takes, as in `append`.
        """
        self.append(known, new)
        self.move_on([len(tokens) for tokens in known])

    def move_on(self, added: Sequence[int]) -> None:
        """Take the rejected tokens of a pass out of the cache; mask and positions move on.

        Args:
            added: tokens that each row has taken since the pass.
        """
        context = self.context
        # A row's slots end where its accepted tokens do, and all rows end where the longest does.
        lengths = [context.length - shift + count for shift, count in zip(self.shifts, added, strict=True)]
        longest = max(lengths)
        shifts = [longest - length for length in lengths]
        moves = [now - before for now, before in zip(shifts, self.shifts, strict=True)]
        move_rows(context.cache, moves, longest)
        if context.mask is None and any(moves):
            context.mask = torch.ones((self.batch, context.length + 1), dtype=torch.long, device=self.device)
        if context.mask is not None:
            # It covers the pending token, too.
            context.mask = torch.nn.functional.pad(context.mask, (0, longest - context.length), value=1)
            _move_mask(context.mask, moves)
        context.length, self.shifts = longest, shifts
        if context.positions is not None:
            if len(set(added)) == 1:
                context.positions = context.positions + added[0]
            else:
                context.positions = context.positions + sent(added, context.positions.device)[:, None]

    def _widen(self, columns: int) -> None:
        if columns > self._tokens.shape[1]:
            spare = max(64, columns // 8)
            self._tokens = torch.nn.functional.pad(self._tokens, (0, columns + spare - self._tokens.shape[1]))

    # ------------------------------------------------------------------------------------------------------------------
    # steps that all rows have taken

    def take_step(self) -> bool:
        """Commit one more step; `False` where a row has not reached it yet.

        A row that has ended gets padding.
        """
        end = self.prompt_length + self.committed + 1
        if any(self.lengths[row] < end and not self.is_padded(row) for row in range(self.batch)):
            return False
        if any(map(self.is_padded, range(self.batch))):
            self._widen(end)
            for row in range(self.batch):
                if self.is_padded(row):
                    self._tokens[row, end - 1] = self.limits.pad_token_id
        self.committed += 1
        self.choice.commit(self.committed)
        return True

    @property
    def columns(self) -> int:
        """Of the texts that all rows have come to."""
        return self.prompt_length + self.committed

    def committed_ids(self) -> torch.Tensor:
        """The texts that all rows have come to, `(B, columns)`."""
        return self.tokens[:, : self.columns].contiguous()

    def last_committed(self) -> list[int]:
        """The last token of each of these texts."""
        place = self.committed - 1
        return [
            self.limits.pad_token_id if self.is_padded(row) else generated[place]
            for row, generated in enumerate(self._generated)
        ]

    def finish(self, done: Sequence[bool]) -> list[int]:
        """Note what the stopping criteria say after a step; returns the rows that ended with it."""
        ended = [row for row, is_done in enumerate(done) if is_done and not self.finished[row]]
        for row in ended:
            self.finished[row] = True
            if self.limits.stops_at_eos:
                self.last_columns[row] = self.prompt_length + self.committed - 1
        return ended

    def take_back_ahead(self) -> bool:
        """Take all out that is not committed yet, so that it is decoded anew; `False` where that cannot be done.

        It cannot be of a batch, of recurrent states, and of a window that no longer reaches back so far.
        """
        context, ahead = self.context, max(self.lengths) - self.columns
        if context.checkpoint is not None:
            return False
        if ahead <= 0:
            return True
        if self.batch > 1 or not reaches_back(context.cache, ahead):
            return False
        del self._generated[0][-ahead:]
        self._unwritten = max(self._unwritten - ahead, 0)
        self.lengths = [self.columns]
        move_rows(context.cache, [0], context.length - ahead)
        context.length -= ahead
        if context.mask is not None:
            context.mask = context.mask[:, : context.length + 1]
        if context.positions is not None:
            context.positions = context.positions - ahead
        return True

    def rest_known_ends(self) -> None:
        """Let rows rest that have their end behind the committed steps already, while others catch up."""
        for row in range(self.batch) if self.batch > 1 else ():
            if self.finished[row] or self._rests[row]:
                continue
            ahead = self.text(row, self.prompt_length + self.committed) if self.limits.eos_token_ids else []
            self._rests[row] = self.lengths[row] >= self.limits.max_length or any(
                token in self.limits.eos_token_ids for token in ahead
            )

    # ------------------------------------------------------------------------------------------------------------------

    def whole_text(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Tokens and positions of the whole text for a pass at which the rotary embedding changes; `None` elsewhere.

        The model may then compute its cache anew; all rows are equally long there.
        """
        if self.context.length != self.rotary.length:
            return None
        ids = self.tokens[:, : self.lengths[0]]
        if self._prompt_positions is None:
            return ids, None
        behind = self.context.length + 1 - self.prompt_slots
        later = self._prompt_positions[..., -1:] + torch.arange(1, behind + 1, device=self.device)
        return ids, torch.cat((self._prompt_positions, later), dim=-1)

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
    def committed_slots(self) -> int:
        """Slots of the prompt and of what was committed; the last token has none yet."""
        return self.prompt_slots + self.committed - 1

    def take_back(self) -> None:
        """After an exception: leave in the cache what was committed, and nothing that was to follow."""
        if not self.committed:
            return
        length = self.committed_slots
        if self.context.checkpoint is not None:
            self.context.checkpoint.end(self.context.cache, length)
            return
        for layer in self.context.cache.layers:  # each by itself: the exception may have come in the middle of a pass
            if isinstance(layer, BufferedLayer):
                layer.move_rows([-shift for shift in self.shifts], length)
            elif layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())

    def align(self) -> None:
        """Leave the cache as plain decoding does: all committed tokens but the last, in the columns of the output."""
        moves = [-shift for shift in self.shifts]
        move_rows(self.context.cache, moves, self.committed_slots)
        if self.context.mask is not None:
            _move_mask(self.context.mask, moves)
        self.shifts = [0] * self.batch

    def go_to(self, slot: int, mask: torch.Tensor | None) -> None:
        """Go back to a slot of the aligned cache, for a pass over what follows.

        Args:
            slot: of the pending token.
            mask: over all slots.
        """
        context = self.context
        context.length = slot
        self.lengths = [slot + self.prompt_length - self.prompt_slots + 1] * self.batch
        if mask is not None:
            context.mask = mask[:, : slot + 1]
        if self._prompt_positions is not None:
            positions = self._prompt_positions[..., -1:] + (slot - self.prompt_slots + 1)
            context.positions = positions.expand(*positions.shape[:-2], self.batch, 1)


def _move_mask(mask: torch.Tensor, moves: Sequence[int]) -> None:
    """Move each row of a mask over slots as `move_rows` moves the slots, in place."""
    for row, move in enumerate(moves):
        if move > 0:
            mask[row, move:] = mask[row, :-move].clone()
            mask[row, :move] = 0
        elif move < 0:
            mask[row, :move] = mask[row, -move:].clone()
            mask[row, move:] = 1
