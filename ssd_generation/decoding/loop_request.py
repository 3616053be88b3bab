"""Request of `generate` to the decoding loop."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .ends import Limits, end_tokens
from .random_use import is_foreign

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

__all__ = ["LoopRequest"]


@dataclass(frozen=True)
class LoopRequest:
    """Request of `generate` to the decoding loop.

    Attributes:
        generation_config: prepared config of the call.
        processors: logits processors of the call.
        criteria: stopping criteria of the call.
        streamer: receiver of each committed step, or `None`.
        cache_is_returned: whether the caller sees the KV cache afterwards.
        lockstep: whether all rows take the same number of tokens in each round, for models that count positions by
            the length of the cache.
    """

    generation_config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None = None
    cache_is_returned: bool = False
    lockstep: bool = False

    @property
    def has_code_of_the_users(self) -> bool:
        """True if code of the user's runs in the middle of the call."""
        users = (*self.processors, *self.criteria, *(() if self.streamer is None else (self.streamer,)))
        return any(map(is_foreign, users))

    def limits(self, most_positions: int | None) -> Limits:
        """Return the limits at which texts end.

        Args:
            most_positions: number of positions that the model has; `None` for any number.
        """
        length = self.criteria.max_length  # a criterion that the user passed in replaces the config's
        pad = getattr(self.generation_config, "_pad_token_tensor", None)
        return Limits(
            max_length=sys.maxsize if length is None else int(length),
            stops_at_eos=any(hasattr(criterion, "eos_token_id") for criterion in self.criteria),
            eos_token_ids=end_tokens(self.criteria),
            pad_token_id=0 if pad is None else int(pad),
            most_positions=most_positions or sys.maxsize,
        )
