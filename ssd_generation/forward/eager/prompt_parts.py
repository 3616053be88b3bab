"""Reading of prompts in parts by the model's own code, each the same computation in every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...cache.buffered_layers import BufferedLayer, BufferedStatesLayer, add_buffers, append_written
from ...cache.own_lists import new_cache
from ...cache.prefix_cache import whole_text
from ...cache.recurrent import LayerStates, give_states, is_known, keeps_states, named_states, slots_of
from ...support.versions import CACHE, cache_argument
from ..captured.prompt_passes import RowPrefixes
from .prompt_mode import prompt_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["read_in_parts", "read_prompt_in_parts", "read_rows_in_parts"]


def read_in_parts(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    positions: torch.Tensor,
    part: int,
    begun: int = 0,
    after_part: Callable[[Cache, int], None] | None = None,
) -> CausalLMOutputWithPast:
    """Read what the cache does not hold of a single text, in parts that begin at multiples of their length.

    transformers' own chunks begin anew at the end of a cache, or before it: that depends on its version.

    Args:
        model: the target model.
        cache: cache of the first tokens; the others are appended to it. Bits are those of other calls if their number
            is a multiple of `part`.
        ids (`torch.LongTensor` of shape `(1, n)`): all tokens of the text.
        positions (`torch.LongTensor` of shape `(1, n)`): their positions.
        part: tokens of a part; the last one may have fewer.
        begun: number of tokens in the cache.
        after_part: callback after each part, with the cache and the number of tokens in it.

    Returns:
        The outputs for the last token: logits `(1, 1, V)`, and the cache.
    """
    name, at, count = cache_argument(model), begun, ids.shape[1]
    fewer: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    logits = torch.empty(0, device=ids.device)
    # Kernels are chosen by the length of a part, not by how much is left.
    with prompt_mode(model, part):
        while at < count:
            end = min(at - at % part + part, count)
            logits = model(
                input_ids=ids[:, at:end],
                attention_mask=torch.ones((1, end), dtype=torch.long, device=ids.device),
                position_ids=positions[:, at:end],
                use_cache=True,
                **{name: cache},
                **fewer,
            ).logits[:, -1:]
            at = end
            if after_part is not None:
                after_part(cache, at)
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def read_prompt_in_parts(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    positions: torch.Tensor,
    part: int,
    prefixes: RowPrefixes | None = None,
) -> CausalLMOutputWithPast:
    """Read what the cache does not hold of a prompt, or take its ending from an earlier call with the same prompt.

    Args:
        model, cache, ids, positions, part: as in `read_in_parts`.
        prefixes: what the cache was filled from; the ending of this prompt, and recurrent states, are stored there.

    Returns:
        As `read_in_parts`.
    """
    count = ids.shape[1]
    if prefixes is None:
        return read_in_parts(model, cache, ids, positions, part, slots_of(cache))
    whole, begun = (count - 1) // part * part, slots_of(cache, otherwise=prefixes.filled)
    if begun == whole and (known := prefixes.take_ending(ids[0], count - whole)) is not None:
        known[0].fill(cache)
        return CausalLMOutputWithPast(logits=known[1], **{CACHE: cache})
    answer = read_in_parts(model, cache, ids, positions, part, begun, partial(prefixes.note_states, of=count))
    assert answer.logits is not None
    prefixes.add_ending(ids[0], cache, count - whole, answer.logits)
    return answer


def read_rows_in_parts(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    positions: torch.Tensor,
    starts: Sequence[int],
    part: int,
    prefixes: RowPrefixes | None = None,
) -> CausalLMOutputWithPast | None:
    """Read the prompts of a batch, each by itself as `read_prompt_in_parts` does.

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
    batch, count = ids.shape
    if not layers or not all(map(_holds_all, layers)) or max(starts) >= count:
        return None
    logits: list[torch.Tensor] = []
    recurrent: list[list[LayerStates]] = []
    for row, start in enumerate(starts):
        tokens = ids[row, start:]
        own: Any = new_cache(model)
        add_buffers(own)
        if prefixes is not None:
            begun = prefixes.take(tokens[:-1])
            begun.fill(own)
            prefixes.filled = begun.count
        of_row = positions[row : row + 1, start:]
        logits.append(read_prompt_in_parts(model, own, tokens[None], of_row, part, prefixes).logits)
        recurrent.append(list(map(named_states, own.layers)))
        for layer, read in zip(layers, own.layers, strict=True):
            if not isinstance(layer, BufferedLayer):
                continue
            states = (read.keys, read.values)
            if not layer.is_initialized:
                layer.lazy_initialization(*(x.new_empty((batch, x.shape[1], 0, x.shape[3])) for x in states))
                layer.reserve(count)
            for buffer, state in zip((layer.key_buffer, layer.value_buffer), states, strict=True):
                assert buffer is not None
                buffer[row, :, :start] = 0  # masked numbers count, too, if they are not finite
                buffer[row, :, start:count] = state[0]
        whole = len(tokens) - len(tokens) % part
        if prefixes is not None and whole and (stored := whole_text(own, whole)) is not None:
            prefixes.add(tokens[:whole], stored)
    append_written(cache, count)
    for layer, *of_rows in zip(layers, *recurrent, strict=True):
        give_states(layer, {name: torch.cat([states[name] for states in of_rows]) for name in of_rows[0]})
    return CausalLMOutputWithPast(logits=torch.cat(logits), **{CACHE: cache})


def _holds_all(layer: Any) -> bool:
    """Tell whether a layer of a cache holds all keys and values of a text, or states that can be put there."""
    if isinstance(layer, CacheLayerMixin):
        return type(layer) in (BufferedLayer, BufferedStatesLayer)
    return keeps_states(layer) and is_known(layer)
