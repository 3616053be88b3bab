"""Text that the target model has verified, to judge drafts on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from ..support.tensors import argmax

__all__ = ["VerifiedText"]


@dataclass(frozen=True)
class VerifiedText:
    """Text that the target has generated, and what a draft of its continuation starts from.

    Attributes:
        ids: the text, `(1, prompt_length + N)`.
        prompt_length: number of tokens of the prompt, ≥ 1; the N tokens after it are the target's.
        cache: the target's keys and values of all tokens but the last, in full.
        passes: number of forward passes of the model that this took.
        choose: function from logits `(Q, V)` of a draft, for tokens `(Q,)` of the continuation, to the tokens `(Q,)`
            that plain decoding would have taken: with the logits processors of the call, and under sampling with its
            noise. By default the most probable ones.
    """

    ids: torch.Tensor
    prompt_length: int
    cache: Cache
    passes: int = 1
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda logits, index: argmax(logits)

    def __len__(self) -> int:
        """Return the number of tokens of the continuation, N."""
        return int(self.ids.shape[1]) - self.prompt_length
