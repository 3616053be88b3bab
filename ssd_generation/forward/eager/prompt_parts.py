"""Reading of a prompt in parts by the model's own code, each the same computation in every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...cache.recurrent import slots_of
from ...support.versions import CACHE, cache_argument
from .prompt_mode import prompt_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["read_in_parts"]


def read_in_parts(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, part: int
) -> CausalLMOutputWithPast:
    """Read what the cache does not hold of a single text, in parts that begin at multiples of their length.

    transformers' own chunks begin anew at the end of a cache, or before it: that depends on its version.

    Args:
        model: the target model.
        cache: cache of the first tokens, whose number is a multiple of `part`; the others are appended to it.
        ids (`torch.LongTensor` of shape `(1, n)`): all tokens of the text.
        positions (`torch.LongTensor` of shape `(1, n)`): their positions.
        part: tokens of a part; the last one may have fewer.

    Returns:
        The outputs for the last token: logits `(1, 1, V)`, and the cache.
    """
    name, count = cache_argument(model), ids.shape[1]
    fewer: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    logits = torch.empty(0, device=ids.device)
    # Kernels are chosen by the length of a part, not by how much is left.
    with prompt_mode(model, part):
        for at in range(slots_of(cache), count, part):
            end = min(at + part, count)
            logits = model(
                input_ids=ids[:, at:end],
                attention_mask=torch.ones((1, end), dtype=torch.long, device=ids.device),
                position_ids=positions[:, at:end],
                use_cache=True,
                **{name: cache},
                **fewer,
            ).logits[:, -1:]
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
