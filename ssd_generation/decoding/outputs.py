"""Outputs of a call other than its tokens: scores, logits, attentions and hidden states of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache.buffered_layers import BufferedSlidingLayer
from .batch_rows import Rows
from .statistics import SpeculationStatistics

__all__ = ["SelfSpeculativeOutput", "StepOutputs"]


@dataclass
class SelfSpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(..., return_dict_in_generate=True)`: `GenerateDecoderOnlyOutput`, and `speculation`.

    Attributes:
        sequences (`torch.LongTensor` of shape `(B, prompt + new tokens)`): prompt and text, as from plain decoding.
        scores, logits, attentions, hidden_states, past_key_values: as from plain decoding, where requested.
        speculation: statistics of the call, also in `model.last_speculation`.
    """

    speculation: SpeculationStatistics | None = None


class StepOutputs:
    """Scores, logits, attentions and hidden states of each step, where a call requests them.

    Rows reach a step at different times: the outputs of a row wait until the step is committed.

    Args:
        config: generation config of the call.
        batch: number of rows, B.

    Attributes:
        returns_states: whether attentions or hidden states are requested.
        keeps_nothing: whether none of these outputs is requested.
        scores, logits, attentions, hidden_states: tuples over the committed steps; `None` where not requested.
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        records = bool(config.return_dict_in_generate)

        def asked(name: str) -> tuple[Any, ...] | None:
            return () if records and bool(getattr(config, f"output_{name}")) else None

        self.scores = asked("scores")
        self.logits = asked("logits")
        self.attentions = asked("attentions")
        self.hidden_states = asked("hidden_states")
        self.returns_states = self.attentions is not None or self.hidden_states is not None
        self._waiting: list[list[dict[str, Any]]] = [[] for _ in range(batch)]
        self.keeps_nothing = self.scores is None and self.logits is None and not self.returns_states

    def float_logits(
        self, outputs: Any, count: int, device: torch.device, processed: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the logits of the last `count` places in float32, once raw, if requested, and once for processing.

        Args:
            outputs: outputs of the model.
            count: number of places.
            device: device of the tokens.
            processed: whether processors may write into them.

        Returns:
            Two tensors `(B, count, V)`; the first is `None` unless logits are requested.
        """
        raw = outputs.logits[:, -count:].to(dtype=torch.float32, device=device)
        # The prompt's logits may be large: what is stored must not be a view of them.
        logits = raw.clone() if processed or self.scores is not None or self.logits is not None else raw
        return (raw.clone() if self.logits is not None else None), logits

    def add_prompt(self, outputs: Any, raw: torch.Tensor | None, scores: torch.Tensor) -> None:
        """Record the outputs of the prompt's pass for the first new token, `(B, 1, V)` each."""
        if self.keeps_nothing:
            return
        states: dict[str, Any] = {}
        if self.returns_states:
            states = {"attentions": outputs.get("attentions"), "hidden_states": outputs.get("hidden_states")}
        for row, waiting in enumerate(self._waiting):
            waiting.append(
                self._scores_of(None if raw is None else raw[row, 0], scores[row, 0])
                | {
                    key: None if layers is None else tuple(layer[row : row + 1] for layer in layers)
                    for key, layers in states.items()
                }
            )

    def add_round(
        self, outputs: Any, raw: torch.Tensor | None, scores: torch.Tensor, rows: Rows, row: int, count: int
    ) -> None:
        """Record the outputs of a verification pass, `(B, n, V)`, for the first `count` tokens that a row takes."""
        if self.keeps_nothing:
            return
        for place in range(count):
            raw_scores = None if raw is None else raw[row, place]
            self.add_place(outputs, raw_scores, scores[row, place], rows, row, (place, scores.shape[1]))

    def add_place(
        self,
        outputs: Any,
        raw: torch.Tensor | None,
        scores: torch.Tensor,
        rows: Rows,
        row: int,
        at: tuple[int, int],
    ) -> None:
        """Record the outputs of a verification pass for one token that a row takes from it.

        Args:
            outputs: outputs of the model.
            raw, scores: raw logits and scores of the token, `(V,)`.
            rows: the texts, before they advance.
            row: row that takes the token.
            at: place of the token in the pass, and number of places of the pass.
        """
        if self.keeps_nothing:
            return
        record = self._scores_of(raw, scores)
        if self.returns_states:
            record |= self._states_of(outputs, rows, row, *at)
        self._waiting[row].append(record)

    def commit(self) -> None:
        """Commit one more step that all rows have taken."""
        if self.keeps_nothing:
            return
        records: list[dict[str, Any] | None] = [waiting.pop(0) if waiting else None for waiting in self._waiting]
        if self.scores is not None:
            self.scores += (_stacked(records, "scores"),)
        if self.logits is not None:
            self.logits += (_stacked(records, "logits"),)
        if self.attentions is not None:
            self.attentions += (_joined(records, "attentions"),)
        if self.hidden_states is not None:
            self.hidden_states += (_joined(records, "hidden_states"),)

    def take_back(self) -> None:
        """Discard everything that is not committed."""
        for waiting in self._waiting:
            waiting.clear()

    def drop(self, row: int) -> None:
        """Discard the outputs of a row that has ended beyond its end: they are no part of the text."""
        self._waiting[row].clear()

    def _scores_of(self, raw: torch.Tensor | None, scores: torch.Tensor) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if self.scores is not None:
            record["scores"] = scores
        if raw is not None:
            record["logits"] = raw
        return record

    def _states_of(self, outputs: Any, rows: Rows, row: int, place: int, block: int) -> dict[str, Any]:
        """Return hidden states and attentions of one row and place, cut to what plain decoding gives for that step."""
        record: dict[str, Any] = {}
        if self.hidden_states is not None:
            record["hidden_states"] = tuple(layer[row : row + 1, place : place + 1] for layer in outputs.hidden_states)
        if self.attentions is not None and not outputs.attentions:
            record["attentions"] = outputs.attentions  # sdpa returns none
        elif self.attentions is not None:
            seen = rows.context.length - rows.shifts[row] + place + 1  # slots of the row when this token was the newest
            attentions: list[torch.Tensor | None] = []
            for layer, attention in zip(rows.context.cache.layers, outputs.attentions, strict=True):
                if attention is None:
                    attentions.append(None)
                    continue
                stop = attention.shape[-1] - block + place + 1
                window = layer.sliding_window if isinstance(layer, BufferedSlidingLayer) else seen
                first = stop - min(seen, window)
                attentions.append(attention[row : row + 1, :, place : place + 1, max(first, 0) : stop])
            record["attentions"] = tuple(attentions)
        return record


def _stacked(records: list[dict[str, Any] | None], key: str) -> torch.Tensor:
    """Stack the records of all rows to `(B, V)`, with zeros for a row that has ended."""
    like = next(record for record in records if record is not None)[key]
    return torch.stack([like.new_zeros(like.shape) if record is None else record[key] for record in records])


def _joined(records: list[dict[str, Any] | None], key: str) -> tuple[Any, ...] | None:
    """Join the states of all rows, layer by layer."""
    known = next(record for record in records if record is not None)
    if known.get(key) is None:
        return None
    layers: list[torch.Tensor | None] = []
    for index, like in enumerate(known[key]):
        if like is None:
            layers.append(None)
            continue
        parts = [None if record is None else record[key][index] for record in records]
        filled = [like.new_zeros(like.shape) if part is None else part for part in parts]
        layers.append(filled[0] if len(filled) == 1 else torch.cat(filled))
    return tuple(layers)
