"""Ends of texts: by length, by token, by the stopping criteria of the call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

__all__ = ["Ends", "KnownEnds", "Limits", "StopRequest", "end_tokens", "stored_end_tokens"]


@dataclass(frozen=True)
class Limits:
    """Limits at which the texts of a call end.

    Attributes:
        max_length: largest number of tokens of a text, prompt included.
        stops_at_eos: whether a row that has ended is padded (some criterion has an `eos_token_id`).
        eos_token_ids: the tokens that end a text.
        pad_token_id: token that follows the end of a text that ended before others.
        most_positions: number of positions that the model has; no draft reaches beyond them.
    """

    max_length: int
    stops_at_eos: bool
    eos_token_ids: frozenset[int]
    pad_token_id: int
    most_positions: int = sys.maxsize


class Ends:
    """Record of which of B texts have ended.

    Args:
        limits: limits at which texts end.
        batch: number of rows, B.

    Attributes:
        finished: per row, whether plain decoding would have ended it after the committed steps.
        rests: per row, whether it is known to finish at a step that is not committed yet.
        last_columns: per row, the column of the token that ended it, where padding follows.
    """

    def __init__(self, limits: Limits, batch: int) -> None:
        self.limits = limits
        self.finished, self.rests = [False] * batch, [False] * batch
        self.last_columns = [sys.maxsize] * batch

    def is_padded(self, row: int) -> bool:
        """Tell whether a row has ended, so that padding follows."""
        return self.finished[row] and self.limits.stops_at_eos

    def goes_on(self, row: int) -> bool:
        """Tell whether a row may take more tokens."""
        return not self.rests[row] and not self.is_padded(row)

    def finish(self, done: Sequence[bool], column: int) -> list[int]:
        """Record the decision of the stopping criteria after a step.

        Args:
            done: per row, whether they end it.
            column: column of the step's token.

        Returns:
            The rows that ended with it.
        """
        ended = [row for row, is_done in enumerate(done) if is_done and not self.finished[row]]
        for row in ended:
            self.finished[row] = True
            if self.limits.stops_at_eos:
                self.last_columns[row] = column
        return ended

    def rest(self, lengths: Sequence[int], ahead: Callable[[int], list[int]]) -> None:
        """Rest rows whose end is known but not committed yet, while others catch up.

        Args:
            lengths: number of tokens per row.
            ahead: returns the tokens of a row after the committed steps.
        """
        for row, length in enumerate(lengths):
            if self.finished[row] or self.rests[row]:
                continue
            tokens = ahead(row) if self.limits.eos_token_ids else []
            is_full = length >= self.limits.max_length
            self.rests[row] = is_full or not self.limits.eos_token_ids.isdisjoint(tokens)


class StopRequest(StoppingCriteria):
    """Stopping criterion that, once requested, ends all texts of a call after the next committed token."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Request the end of the texts, from any thread or from a signal handler."""
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        """True once `ask` was called."""
        return self._asked.is_set()

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Return, per row, whether its text ends."""
        return torch.full((input_ids.shape[0],), self.is_asked, device=input_ids.device)  # type: ignore[return-value]


@dataclass(frozen=True)
class KnownEnds:
    """Stopping criteria that depend on nothing but the length and the last token of a text, or on no text at all.

    They are evaluated here on the host: their own code computes on the device, and waits for it.
    """

    max_length: int
    tokens: frozenset[int]
    positions: int
    requests: tuple[StopRequest, ...] = ()

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> KnownEnds | None:
        """Collect the criteria of a call; return `None` if any of them is of another class."""
        if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria, StopRequest) for criterion in criteria):
            return None
        lengths = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        positions = [known for one in lengths if (known := one.max_position_embeddings) is not None]
        return cls(
            min((int(one.max_length) for one in lengths), default=sys.maxsize),
            end_tokens(criteria),
            min(positions, default=sys.maxsize),
            tuple(criterion for criterion in criteria if type(criterion) is StopRequest),
        )

    def warns(self, columns: int) -> bool:
        """Tell whether transformers' own criteria would warn at this length."""
        return columns > self.positions

    def done(self, columns: int, last: list[int]) -> list[bool]:
        """Return, per row, whether a text of `columns` tokens has ended, given its last token."""
        is_over = columns >= self.max_length or any(request.is_asked for request in self.requests)
        return [is_over or token in self.tokens for token in last]


def end_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    """Return the tokens that end a text; a criterion that the user passed in replaces the config's here, too."""
    ends = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
    return frozenset(number for end in ends for number in _numbers(end))


def stored_end_tokens(config: GenerationConfig | None) -> frozenset[int]:
    """Return the end-of-text tokens of a generation config; an empty set if it has none."""
    ends = getattr(config, "eos_token_id", None)
    return frozenset(() if ends is None else _numbers(ends))


def _numbers(ends: Any) -> list[int]:
    """Return one or several tokens, in whatever form, as a list."""
    return torch.as_tensor(ends, device="cpu").flatten().tolist()
