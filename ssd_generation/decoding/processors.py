"""Logits processors of a call: those that may be called for any place, and those that get plain decoding's very calls.

A drafted text is verified several tokens at a time, and drafts are rejected. A processor that is a function of a row's
tokens and scores does not notice. Any other one does: a grammar's matcher, a counter, a script, a watermark with a
state. So a processor that is not known to be such a function is called once for each committed token, in order, with
all rows at that step, and never for a token that is only drafted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from ..support.devices import sent
from .random_use import is_foreign, no_draws, state_of_generators
from .truncation import Truncation

__all__ = ["Processors", "PureProcessors", "is_pure"]


def _known(*names: str) -> tuple[type, ...]:
    """Return those of the named processors that this version of transformers has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Processors that are functions of the scores and of constant numbers: they can be captured. None writes into its input.
_RECORDABLE = _known(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "LogitNormalization",
)

# Processors that depend on the scores alone: all positions of all rows can be processed at once. (A class derived from
# one of them may depend on anything.)
_BLIND = (
    *_RECORDABLE,
    *_known("EtaLogitsWarper", "TopHLogitsWarper", "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor"),
)

# Processors that are functions of a row's tokens and scores. Not among them: those that call a function of the user's
# (`PrefixConstrainedLogitsProcessor`), run a model (guidance) or keep a state (SynthID).
_PURE = frozenset(
    (
        *_BLIND,
        *_known(
            "EncoderNoRepeatNGramLogitsProcessor",
            "EncoderRepetitionPenaltyLogitsProcessor",
            "ExponentialDecayLengthPenalty",
            "ForcedBOSTokenLogitsProcessor",
            "ForcedEOSTokenLogitsProcessor",
            "MinLengthLogitsProcessor",
            "MinNewTokensLengthLogitsProcessor",
            "NoBadWordsLogitsProcessor",
            "NoRepeatNGramLogitsProcessor",
            "RepetitionPenaltyLogitsProcessor",
            "SequenceBiasLogitsProcessor",
            "SuppressTokensAtBeginLogitsProcessor",
            "WatermarkLogitsProcessor",
        ),
    )
)

DECLARATION = "supports_speculation"
"""Class attribute that, where it is `True`, declares a user's processor to be such a function."""


def is_pure(processor: object) -> bool:
    """Tell whether a processor is a function of a row's tokens and scores, so that it may be called for any place.

    It is if transformers' class is known to be one, or if its class declares `supports_speculation = True`. A class
    that overrides `__call__` has to declare it again.
    """
    kind = type(processor)
    if kind in _PURE:
        return True
    for base in kind.__mro__:
        if DECLARATION in vars(base):
            return vars(base)[DECLARATION] is True
        if "__call__" in vars(base):
            return False
    return False


class Processors:
    """The logits processors of a call.

    Args:
        processors: the processors, as `generate` prepared them.
        draws: whether the call samples, so that a processor must not draw from torch's generators in between.

    Attributes:
        pure: those that may be called for any place; drafts are processed by these alone.
        are_pure: whether these are all. If not, `at_step` is called once for each committed token.
    """

    def __init__(self, processors: LogitsProcessorList, draws: bool = False) -> None:
        self._all = processors
        self._draws = draws
        self._foreign = any(map(is_foreign, processors))
        self.pure = PureProcessors([processor for processor in processors if is_pure(processor)])
        self.are_pure = len(self.pure) == len(processors)

    def __len__(self) -> int:
        """Return the number of processors."""
        return len(self._all)

    def at_step(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return scores `(B, V)` of the next committed token: all processors are called as plain decoding calls them.

        Args:
            ids (`torch.LongTensor` of shape `(B, columns)`): the committed texts.
            logits (`torch.FloatTensor` of shape `(B, V)`): the model's; may be written into.

        Raises:
            CannotDraft: under sampling, a user's processor draws random numbers.
        """
        if not (self._draws and self._foreign):
            return self._all(ids, logits)  # type: ignore[no-any-return]
        scores = logits
        for processor in self._all:
            with no_draws([processor]) if is_foreign(processor) else nullcontext():
                scores = LogitsProcessorList([processor])(ids, scores)
        return scores


class PureProcessors:
    """Processors that are functions of a row's tokens and scores: they may be called for any place, in any order.

    Args:
        processors: the processors.

    Attributes:
        are_blind: whether none of them depends on the text.
        may_write: whether one of them may write into the scores that it is given.
        setting: key of their settings where all of them are functions of tensors alone; else `None`.
        truncation: settings of the last ones.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = LogitsProcessorList(processors)
        self._foreign = [processor for processor in processors if is_foreign(processor)]
        self.are_blind = all(type(p) in _BLIND for p in processors)
        self.may_write = any(type(p) not in _RECORDABLE for p in processors)
        self.setting = _setting_of(processors)
        self.truncation = Truncation.of(processors)

    def split(self) -> tuple[PureProcessors, PureProcessors]:
        """Return the processors before those that truncate, and these."""
        count = len(self) - self.truncation.count
        return PureProcessors(self._processors[:count]), PureProcessors(self._processors[count:])

    def __len__(self) -> int:
        """Return the number of processors."""
        return len(self._processors)

    def once(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return scores `(n, V)` of logits `(n, V)` after the texts `(n, columns)`.

        Raises:
            CannotDraft: a user's processor draws random numbers.
        """
        if not self._foreign:
            return self._processors(ids, logits)  # type: ignore[no-any-return]
        before = state_of_generators(logits.device)
        scores: torch.Tensor = self._processors(ids, logits)
        if state_of_generators(logits.device) != before:
            # A processor drew, or another thread did: call them again, watching this thread alone.
            for processor in self._foreign:
                with no_draws([processor]):
                    processor(ids, scores.clone())
        return scores

    def step(self, tokens: torch.Tensor, lengths: Sequence[int], logits: torch.Tensor, ahead: int) -> torch.Tensor:
        """Return scores `(B, V)` for the token after the first `ahead` drafted ones.

        Args:
            tokens (`torch.LongTensor` of shape `(B, columns)`): the texts, each with its drafted tokens.
            lengths: number of tokens of each text, without the drafted ones.
            logits (`torch.FloatTensor` of shape `(B, V)`): the model's; may be written into.
            ahead: number of drafted tokens that the processors see.
        """
        ends = [length + ahead for length in lengths]
        if len(set(ends)) == 1:
            return self.once(tokens[:, : ends[0]].contiguous(), logits)
        found: torch.Tensor | None = None
        for end in sorted(set(ends)):
            # The whole batch each time, since a processor may address its rows by index; only the rows that end here
            # are used.
            rows = sent([row for row, its_end in enumerate(ends) if its_end == end], logits.device)
            scores = self.once(tokens[:, :end].contiguous(), logits.clone())
            found = torch.empty_like(scores) if found is None else found
            found[rows] = scores[rows]
        assert found is not None
        return found

    def block(
        self, tokens: torch.Tensor, lengths: Sequence[int], pending: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Return scores `(B, n, V)` of a verification pass; place i is processed with the first i drafted tokens.

        Args:
            tokens, lengths: as in `step`.
            pending (`torch.LongTensor` of shape `(B, 1)`): the last token of each text.
            logits (`torch.FloatTensor` of shape `(B, n, V)`): the model's; may be written into.
        """
        if not len(self):
            return logits
        count = logits.shape[1]
        if self.are_blind:
            return self.once(pending.expand(-1, count).reshape(-1, 1), logits.flatten(0, 1)).view_as(logits)
        for ahead in range(count):
            scores = self.step(tokens, lengths, logits[:, ahead], ahead)
            if scores.dtype is not logits.dtype:
                logits = logits.to(scores.dtype)
            logits[:, ahead] = scores
            # Nothing counts after an impossible token, and a user's processor may fail on it. (Those of transformers
            # accept any text, so the host need not wait for a GPU.)
            if self._foreign and len(lengths) == 1 and ahead + 1 < count:
                drafted = tokens[0, lengths[0] + ahead]
                if bool(scores[0].gather(0, drafted[None]) == -math.inf):
                    break
        return logits

    def places(self, tokens: torch.Tensor, columns: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return scores `(n, V)` for places of a single text.

        Args:
            tokens (`torch.LongTensor` of shape `(1, ≥ max(columns))`): the text.
            columns: column of the token that each place predicts; its text ends before that column.
            logits (`torch.FloatTensor` of shape `(n, V)`): the model's; may be written into.
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


def _setting_of(processors: Sequence[LogitsProcessor]) -> tuple[Hashable, ...] | None:
    if any(type(processor) not in _RECORDABLE for processor in processors):
        return None
    found = tuple((type(processor), *sorted(vars(processor).items())) for processor in processors)
    return found if all(type(v) in (int, float, bool) for _, *pairs in found for _, v in pairs) else None
