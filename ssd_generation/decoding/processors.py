"""Logits processors over the tokens of a block, each of which sees the text that plain decoding would show it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from .random_use import is_foreign, no_draws, state_of_generators

__all__ = ["Processors"]


def _known(*names: str) -> tuple[type, ...]:
    """Those of transformers' processors that this version has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Processors that are functions of the scores and of numbers that do not change: they can be recorded.
_RECORDABLE = _known(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "LogitNormalization",
)

# Processors that look at the scores alone: all positions of all rows can go through them at once. (A class derived from
# one of them may look at anything.)
_BLIND = (
    *_RECORDABLE,
    *_known("EtaLogitsWarper", "TopHLogitsWarper", "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor"),
)


class Processors:
    """The logits processors of a call.

    Args:
        processors: as `generate` made them.
        batch: rows, B.

    Attributes:
        are_blind: whether none of them looks at the text.
        setting: what tells them from others, where all of them are functions of tensors alone; `None` elsewhere.
    """

    def __init__(self, processors: LogitsProcessorList, batch: int) -> None:
        self.are_blind = all(type(p) in _BLIND for p in processors)
        has_constraints = any(type(p) is PrefixConstrainedLogitsProcessor for p in processors)
        self._is_constrained = batch > 1 and has_constraints
        if self._is_constrained:
            processors = LogitsProcessorList(
                [_RowPrefixes(p) if type(p) is PrefixConstrainedLogitsProcessor else p for p in processors]
            )
        self._processors = processors
        self._foreign = [processor for processor in processors if is_foreign(processor)]
        # transformers' other processors have scores for any text.
        self.setting = _setting_of(processors)
        self._takes_any_text = not has_constraints and not self._foreign

    def __len__(self) -> int:
        """Processors."""
        return len(self._processors)

    def once(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores `(n, V)` of logits `(n, V)` behind the texts `(n, columns)`.

        Raises:
            CannotDraft: a processor of the user's draws random numbers.
        """
        if not self._foreign:
            return self._processors(ids, logits)  # type: ignore[no-any-return]
        before = state_of_generators(logits.device)
        scores: torch.Tensor = self._processors(ids, logits)
        if state_of_generators(logits.device) != before:
            # Or another thread did: once more, with an eye on this one.
            for processor in self._foreign:
                with no_draws([processor]):
                    processor(ids, scores.clone())
        return scores

    def step(self, tokens: torch.Tensor, lengths: Sequence[int], logits: torch.Tensor, ahead: int) -> torch.Tensor:
        """Scores `(B, V)` for the token behind the first `ahead` drafted ones.

        Args:
            tokens (`torch.LongTensor` of shape `(B, columns)`): the texts, the drafted tokens behind each.
            lengths: tokens of each text, without them.
            logits (`torch.FloatTensor` of shape `(B, V)`): the model's; may be written into.
            ahead: drafted tokens that the processors see.
        """
        ends = [length + ahead for length in lengths]
        if len(set(ends)) == 1:
            return self.once(tokens[:, : ends[0]].contiguous(), logits)
        scores = torch.empty_like(logits)
        for end in sorted(set(ends)):
            # The whole batch each time, since a processor may know its rows by number; only the rows that end here are
            # used.
            rows = [row for row, its_end in enumerate(ends) if its_end == end]
            scores[rows] = self.once(tokens[:, :end].contiguous(), logits.clone())[rows]
        return scores

    def block(
        self, tokens: torch.Tensor, lengths: Sequence[int], pending: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Scores `(B, n, V)` of a verifying pass; place i is processed with the text and the first i drafted tokens.

        Args:
            tokens, lengths: as in `step`.
            pending (`torch.LongTensor` of shape `(B, 1)`): the last token of each text.
            logits (`torch.FloatTensor` of shape `(B, n, V)`): the model's; may be written into.
        """
        if not len(self):
            return logits
        count = logits.shape[1]
        if self.are_blind and count > 1:
            return self.once(pending.expand(-1, count).reshape(-1, 1), logits.flatten(0, 1)).view_as(logits)
        # On a GPU the host would wait for the answer.
        may_end = len(lengths) == 1 and not (self._takes_any_text and logits.device.type != "cpu")
        for ahead in range(count):
            scores = self.step(tokens, lengths, logits[:, ahead], ahead)
            logits[:, ahead] = scores
            # Nothing that stands behind a token that cannot be can count, and a constraint may have no word for it.
            if may_end and ahead + 1 < count:
                drafted = tokens[0, lengths[0] + ahead]
                if bool(scores[0].gather(0, drafted[None]) == -math.inf):
                    break
        return logits

    def places(self, tokens: torch.Tensor, columns: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Scores `(n, V)` for places of a single text.

        Args:
            tokens (`torch.LongTensor` of shape `(1, ≥ max(columns))`): the text.
            columns: of the token that each place is for; its text ends before it.
            logits (`torch.FloatTensor` of shape `(n, V)`): may be written into.
        """
        if not len(self):
            return logits
        if self.are_blind:
            return self.once(tokens[:, :1].expand(len(columns), 1), logits)
        return torch.cat(
            [
                self.once(tokens[:, :column].contiguous(), logits[place : place + 1].clone())
                for place, column in enumerate(columns)
            ]
        )

    def check_possible(self, scores: torch.Tensor, places: Sequence[int], counts: Sequence[bool]) -> None:
        """As transformers does where a constraint allows a row nothing.

        Args:
            scores (`torch.FloatTensor` of shape `(B, n, V)`): of a pass.
            places: per row, the place that it goes on from.
            counts: per row, whether it goes on at all.

        Raises:
            ValueError: a constraint is unsatisfiable.
        """
        if not self._is_constrained:
            return
        for row, place in enumerate(places):
            if counts[row] and bool((scores[row, place] == -math.inf).all()):
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {row}: the constraint is "
                    "unsatisfiable. Return at least one token for every text that it allows."
                )


def _setting_of(processors: LogitsProcessorList) -> tuple[Hashable, ...] | None:
    if any(type(processor) not in _RECORDABLE for processor in processors):
        return None
    found = tuple((type(processor), *sorted(vars(processor).items())) for processor in processors)
    return found if all(type(v) in (int, float, bool) for _, *pairs in found for _, v in pairs) else None


class _RowPrefixes(LogitsProcessor):
    """A `prefix_allowed_tokens_fn` for a batch, whose rows are shown drafts that no constraint may have a word for.

    Where transformers' own processor ends the call because nothing is allowed, the row is left without a possible token
    here; `check_possible` ends the call if it is one that counts.
    """

    def __init__(self, processor: PrefixConstrainedLogitsProcessor) -> None:
        self.allowed = processor._prefix_allowed_tokens_fn
        self.processor = PrefixConstrainedLogitsProcessor(self._ask, num_beams=1)
        self.without: list[int] = []

    def _ask(self, row: int, text: torch.Tensor) -> list[int]:
        allowed = self.allowed(row, text)
        if not len(allowed):
            self.without.append(row)
        return allowed if len(allowed) else [0]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.without = []
        processed = self.processor(input_ids, scores)
        processed[self.without] = -math.inf
        return processed  # type: ignore[no-any-return]
