"""Prompts that a batch holds several times, as with `num_return_sequences`: each is read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.buffered_layers import can_repeat_rows, repeat_rows
from ..cache.recurrent import has_begun
from ..support.versions import CACHE

__all__ = ["RepeatedPrompts"]


@dataclass(frozen=True)
class RepeatedPrompts:
    """The different prompts of a batch.

    Attributes:
        first: first row with each prompt.
        which (`torch.LongTensor` of shape `(B,)`): index of each row's prompt.
    """

    first: list[int]
    which: torch.Tensor

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, starts: list[int], cache: Any, config: GenerationConfig
    ) -> RepeatedPrompts | None:
        """Find the different prompts of a batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, n)`): the prompts, padded at the left.
            starts: column of each row's first token.
            cache: the call's cache.
            config: generation config of the call.

        Returns:
            `None` where all differ, or what a pass leaves cannot be copied from row to row.
        """
        asks_for_states = config.output_hidden_states or config.output_attentions
        if len(input_ids) == 1 or asks_for_states or not isinstance(cache, Cache):
            return None
        if has_begun(cache) or not can_repeat_rows(cache):
            return None
        known: dict[tuple[int, ...], int] = {}
        rows = zip(starts, input_ids.tolist(), strict=True)
        which = [known.setdefault((start, *tokens), len(known)) for start, tokens in rows]
        if len(known) == len(which):
            return None
        return cls([which.index(prompt) for prompt in range(len(known))], torch.tensor(which, device=input_ids.device))

    def repeat(self, answer: CausalLMOutputWithPast, cache: Cache) -> CausalLMOutputWithPast:
        """Repeat what a pass over the different prompts left, for each row of the batch.

        Args:
            answer: the pass's outputs.
            cache: the call's cache, changed in place.

        Returns:
            The outputs that matter: logits of the whole batch, and the cache.
        """
        repeat_rows(cache, self.which)
        assert answer.logits is not None
        return CausalLMOutputWithPast(logits=answer.logits[self.which], **{CACHE: cache})
