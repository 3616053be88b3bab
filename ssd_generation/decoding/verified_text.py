"""A text that the target model has verified, for drafts to be judged on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

__all__ = ["VerifiedText"]


@dataclass(frozen=True)
class VerifiedText:
    """A text that the target has generated, and what a draft of its continuation starts from.

    Attributes:
        ids: the text, `(1, prompt_length + N)`.
        prompt_length: tokens of the prompt, ≥ 1; the N tokens behind it are the target's.
        cache: the target's keys and values of all tokens but the last, in full.
        passes: forward passes of the model that this took.
    """

    ids: torch.Tensor
    prompt_length: int
    cache: Cache
    passes: int = 1

    def __len__(self) -> int:
        """Tokens of the continuation, N."""
        return int(self.ids.shape[1]) - self.prompt_length
