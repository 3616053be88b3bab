"""Where texts end: by their length, by a token, by the stopping criteria of the call."""

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


class Ends:
    """Which of B texts have ended.

    Args:
        limits: where texts end.
        batch: rows, B.

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
        """Whether a row has ended, so that padding follows."""
        return self.finished[row] and self.limits.stops_at_eos

    def goes_on(self, row: int) -> bool:
        """Whether a row may take more tokens."""
        return not self.rests[row] and not self.is_padded(row)

    def finish(self, done: Sequence[bool], column: int) -> list[int]:
        """Note what the stopping criteria say after a step.

        Args:
            done: per row, whether they end it.
            column: of the step's token.

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
        """Let rows rest whose end follows the committed steps already, while others catch up.

        Args:
            lengths: tokens per row.
            ahead: the tokens of a row after the committed steps.
        """
        for row, length in enumerate(lengths):
            if self.finished[row] or self.rests[row]:
                continue
            tokens = ahead(row) if self.limits.eos_token_ids else []
            is_full = length >= self.limits.max_length
            self.rests[row] = is_full or not self.limits.eos_token_ids.isdisjoint(tokens)


class StopRequest(StoppingCriteria):
    """Stopping criterion that ends all texts of a call after the next committed token, once somebody asks for it."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """End the texts; from any thread, or from a signal handler."""
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
    """Stopping criteria that look at no more than the length and the last token of a text, or at no text at all.

    They are asked here of numbers that the host has: their own code computes on the device, and waits for it.
    """

    max_length: int
    tokens: frozenset[int]
    positions: int
    requests: tuple[StopRequest, ...] = ()

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> KnownEnds | None:
        """Those of a call; `None` where there are others among them."""
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
        """Whether transformers' own criteria would warn at this length."""
        return columns > self.positions

    def done(self, columns: int, last: list[int]) -> list[bool]:
        """Per row, whether a text of so many tokens that ends in this one has come to its end."""
        is_over = columns >= self.max_length or any(request.is_asked for request in self.requests)
        return [is_over or token in self.tokens for token in last]


def end_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The tokens that end a text; a criterion that the user passed in takes the place of the config's here, too."""
    ends = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
    return frozenset(number for end in ends for number in _numbers(end))


def stored_end_tokens(config: GenerationConfig | None) -> frozenset[int]:
    """Return the tokens that end a text by a generation config; none where it names none."""
    ends = getattr(config, "eos_token_id", None)
    return frozenset(() if ends is None else _numbers(ends))


def _numbers(ends: Any) -> list[int]:
    """Return a token or several, however they are held, as a list."""
    return torch.as_tensor(ends, device="cpu").flatten().tolist()
