"""Streaming of an answer in pieces that carry the origin of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.generation.streamers import BaseStreamer

from ..harness.results import DECIDED, DRAFTED, LOOKED_UP, Piece, PieceReader

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..decoding.statistics import SpeculationStatistics

__all__ = ["PieceStreamer"]

_ORIGINS = {"drafted": DRAFTED, "looked up": LOOKED_UP}


class PieceStreamer(BaseStreamer):
    """Streamer that passes each piece of an answer on once its characters are complete; special tokens are left out.

    Args:
        tokenizer: the model's tokenizer.
        write: callback with a piece's text and the origin of its last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, str], None]) -> None:
        self._reader, self._write = PieceReader(tokenizer), write
        self._statistics: SpeculationStatistics | None = None
        self._has_prompt = False
        self._origins: list[str] = []

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer so far."""
        return self._reader.ids

    def on_statistics(self, statistics: SpeculationStatistics) -> None:
        """Read the origins of tokens from the statistics of a call that drafts."""
        self._statistics = statistics

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, and then each committed token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for token in value.flatten().tolist():
            self._origins.append(self._origin(len(self._origins)))
            self._hand_on(self._reader.add(token))

    def end(self) -> None:
        """Pass on the rest of the answer."""
        self._hand_on(self._reader.end())

    def _origin(self, number: int) -> str:
        sources: list[Any] = [] if self._statistics is None else self._statistics.token_sources[0]
        return _ORIGINS.get(sources[number], DECIDED) if number < len(sources) else DECIDED

    def _hand_on(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if not piece.special:
                self._write(piece.text, self._origins[piece.last])
