"""Reading of prompts in parts by the model's own code, each the same computation in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...cache.buffered_layers import BufferedLayer, add_buffers, append_written, copy_row
from ...cache.prefix_cache import whole_text
from ...cache.recurrent import slots_of
from ...support.versions import CACHE, cache_argument
from ..captured.prompt_passes import RowPrefixes
from .prompt_mode import prompt_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["read_in_parts", "read_rows_in_parts"]


def read_in_parts(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    positions: torch.Tensor,
    part: int,
    prefixes: RowPrefixes | None = None,
) -> CausalLMOutputWithPast:
    """Read what the cache does not hold of a single text, in parts that begin at multiples of their length.

    transformers' own chunks begin anew at the end of a cache, or before it: that depends on its version.

    Args:
        model: the target model.
        cache: cache of the first tokens, whose number is a multiple of `part`; the others are appended to it.
        ids (`torch.LongTensor` of shape `(1, n)`): all tokens of the text.
        positions (`torch.LongTensor` of shape `(1, n)`): their positions.
        part: tokens of a part; the last one may have fewer.
        prefixes: endings of prompts; this one's is stored there.

    Returns:
        The outputs for the last token: logits `(1, 1, V)`, and the cache.
    """
    name, count = cache_argument(model), ids.shape[1]
    whole = (count - 1) // part * part
    if prefixes is not None and slots_of(cache) == whole:
        known = prefixes.take_ending(ids[0], count - whole)
        if known is not None:
            for layer, ending in zip(cache.layers, known[0], strict=True):
                layer.update(*ending)
            return CausalLMOutputWithPast(logits=known[1], **{CACHE: cache})
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
    states = None if prefixes is None else whole_text(cache, count)
    if prefixes is not None and states is not None:
        prefixes.add_ending(ids[0], [(keys[:, :, whole:], values[:, :, whole:]) for keys, values in states], logits)
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def read_rows_in_parts(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    positions: torch.Tensor,
    starts: Sequence[int],
    part: int,
    prefixes: RowPrefixes | None = None,
) -> CausalLMOutputWithPast | None:
    """Read the prompts of a batch, each by itself as `read_in_parts` does, and equal ones once.

    Args:
        model: the target model.
        cache: cache with buffers; it is empty.
        ids (`torch.LongTensor` of shape `(B, n)`): the prompts, padded at the left.
        positions (`torch.LongTensor` of shape `(B, n)`): their positions.
        starts: index of the first token of each row that is not padding.
        part: tokens of a part.
        prefixes: whole parts that each row begins with if they are stored there; rows that were read are stored for the
            next.

    Returns:
        The outputs for the last tokens: logits `(B, 1, V)`, and the cache; `None` where a row has no tokens, or layers
        of the cache do not hold the whole text: it is still empty then.
    """
    layers: list[Any] = cache.layers
    (batch, count), config = ids.shape, model.config.get_text_config(decoder=True)
    if not layers or any(type(layer) is not BufferedLayer for layer in layers) or max(starts) >= count:
        return None
    logits: list[torch.Tensor] = []
    known: dict[tuple[int, ...], int] = {}
    for row, start in enumerate(starts):
        tokens = ids[row, start:]
        same = known.setdefault((start, *tokens.tolist()), row)
        if same != row:
            logits.append(logits[same])
            copy_row(cache, same, row, slice(start, count))
            continue
        own: Any = DynamicCache(config=config)
        add_buffers(own)
        for layer, states in zip(own.layers, () if prefixes is None else prefixes.take(tokens[:-1]), strict=False):
            layer.update(*states)
        logits.append(read_in_parts(model, own, tokens[None], positions[row : row + 1, start:], part, prefixes).logits)
        for layer, read in zip(layers, own.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(*(x.new_empty((batch, x.shape[1], 0, x.shape[3])) for x in _states(read)))
                layer.reserve(count)
            for buffer, state in zip((layer.key_buffer, layer.value_buffer), _states(read), strict=True):
                buffer[row, :, start:count] = state[0]
        whole = len(tokens) - len(tokens) % part
        if prefixes is not None and whole:
            stored = [tuple(state[:, :, :whole] for state in _states(read)) for read in own.layers]
            prefixes.add(tokens[:whole], stored)  # type: ignore[arg-type]
    append_written(cache, count)
    return CausalLMOutputWithPast(logits=torch.cat(logits), **{CACHE: cache})


def _states(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values
