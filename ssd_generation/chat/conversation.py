"""Conversation with a model: its messages, and the cache that its turns share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..config import SelfSpeculativeConfig
from ..decoding.ends import StopRequest, stored_end_tokens
from ..harness.texts import encode_prompt
from ..support.versions import CACHE
from .kept_cache import KeptCache
from .streamer import PieceStreamer

if TYPE_CHECKING:
    from ..decoding.statistics import SpeculationStatistics

__all__ = ["Conversation", "Turn", "check_template"]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` for a tokenizer without a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "This model's tokenizer has no chat template, so it is most likely a base model, which continues texts "
            "instead of answering. Give an instruct or chat model, or a template with --chat-template FILE; `ssd "
            "generate` continues a text."
        )


@dataclass(frozen=True)
class Turn:
    """Question and answer.

    Attributes:
        question: text of the user.
        answer: text of the model, without special tokens.
        token_ids: tokens of the answer, its end token included.
        prompt_tokens: tokens of the conversation before the answer.
        cached_tokens: number of these that the cache held already.
        seconds: time of the answer, reading the new tokens included.
        ended_by: "end" of the answer, "length", or "stop" where the user stopped it.
        statistics: statistics of the call; `None` where it was interrupted in the middle of a pass.
    """

    question: str
    answer: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    ended_by: str
    statistics: SpeculationStatistics | None

    @property
    def tokens_per_second(self) -> float:
        """Speed of the answer, reading the new tokens included."""
        return len(self.token_ids) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the turn as JSON types, without its texts, which are messages of the conversation."""
        statistics = self.statistics
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": len(self.token_ids),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": None if statistics is None else statistics.acceptance_rate,
            "tokens_per_round": None if statistics is None else statistics.tokens_per_round,
            "ended_by": self.ended_by,
        }


class Conversation:
    """Conversation of several turns with one model.

    Each prompt is the whole conversation in the model's chat template. Only tokens that the previous turn's cache does
    not hold are read; so a template that rewrites earlier turns changes what is read, and never the text.

    Args:
        model: the target model, after `enable_self_speculative`.
        tokenizer: the model's tokenizer, with a chat template.
        config: config to draft with.
        arguments: arguments of `generate`, with `max_new_tokens`.
        system: system message, at the beginning of each prompt.
        seed: seed of the sampling; each turn adds its number.

    Attributes:
        turns: turns so far.
        tokenizer: …
        config: …

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: SelfSpeculativeConfig,
        arguments: Mapping[str, Any],
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        check_template(tokenizer)
        self.turns: list[Turn] = []
        self.tokenizer, self.config = tokenizer, config
        self._model, self._arguments, self._system, self._seed = model, dict(arguments), system, seed
        self._kept = KeptCache(model)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Messages of the conversation, in the form that chat templates take."""
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for turn in self.turns:
            messages += [
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            ]
        return messages

    def reset(self) -> None:
        """Start over; the system message stays."""
        self.turns.clear()
        self._kept.drop()

    def ask(self, question: str, streamer: PieceStreamer, stop: StopRequest) -> Turn | None:
        """Answer a question.

        Args:
            question: text of the user.
            streamer: new streamer, which receives the answer.
            stop: new stop request; once asked, it ends the answer after the next token.

        Returns:
            The turn, now part of the conversation; `None` where it was interrupted before the first token
            (`KeyboardInterrupt`) and is not part of it.

        Raises:
            ValueError: the template refuses the messages, or the conversation is too long for the model.
        """
        before = [(turn.question, turn.answer) for turn in self.turns]
        inputs = encode_prompt(self.tokenizer, question, before=before, system=self._system)
        ids: list[int] = inputs["input_ids"][0].tolist()
        arguments = self._arguments | {"max_new_tokens": self._room_for(len(ids))}
        cache, cached = self._kept.take(ids)
        if cache is not None:
            arguments[CACHE] = cache
        if arguments["do_sample"]:
            torch.manual_seed(self._seed + len(self.turns))
        started = time.perf_counter()
        new, statistics = self._answer(inputs, arguments, streamer, stop)
        seconds = time.perf_counter() - started
        if not new:
            return None
        turn = Turn(
            question=question,
            # Decoded without clean-up, so that the next prompt begins with the same tokens if the template allows it.
            answer=str(self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)),
            token_ids=new,
            prompt_tokens=len(ids),
            cached_tokens=cached,
            seconds=seconds,
            ended_by=self._ended_by(new, arguments["max_new_tokens"], statistics is None or stop.is_asked),
            statistics=statistics,
        )
        self.turns.append(turn)
        return turn

    def _answer(
        self, inputs: Mapping[str, torch.Tensor], arguments: dict[str, Any], streamer: PieceStreamer, stop: StopRequest
    ) -> tuple[list[int], SpeculationStatistics | None]:
        """Return the new tokens and the statistics of the call; store its cache."""
        model = self._model
        try:
            output = model.generate(
                **{name: tensor.to(model.device) for name, tensor in inputs.items()},
                **arguments,
                self_speculative=self.config,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([stop]),
                return_dict_in_generate=True,
            )
        except KeyboardInterrupt:
            # Interrupted in the middle of a pass: the cache's content is unknown, so it is not stored.
            streamer.end()
            return list(streamer.token_ids), None
        ids: list[int] = output.sequences[0].tolist()
        self._kept.keep(output.get(CACHE), ids)
        return ids[inputs["input_ids"].shape[1] :], model.last_speculation

    def _room_for(self, tokens: int) -> int:
        """Return the maximum length of an answer to a prompt of `tokens` tokens."""
        longest = int(self._arguments["max_new_tokens"])
        most = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if type(most) is not int or most < 1:
            return longest
        if tokens >= most:
            raise ValueError(
                f"The conversation is {tokens} tokens long with this turn, but the model's context is {most}. /reset "
                "starts over."
            )
        return min(longest, most - tokens)

    def _ended_by(self, new: list[int], longest: int, is_stopped: bool) -> str:
        if new[-1] in stored_end_tokens(self._model.generation_config):
            return "end"
        if len(new) >= longest:
            return "length"
        return "stop" if is_stopped else "end"
