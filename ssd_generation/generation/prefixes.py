"""Prefixes reused by a call: keys and values of an earlier text of this model that begins with the same tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ..cache.prefix_cache import PrefixCache, whole_text
from ..cache.recurrent import slots_of
from ..decoding.prompt import starts_of_prompts
from ..decoding.rotary import RotarySwitch
from ..forward.captured.conditions import why_not_on
from ..support.messages import shown
from ..support.model_state import Part, state_of
from ..support.once import looked_at_once
from ..support.structure import modules_of
from ..support.tensors import fingerprint_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from ..forward.forward import Forward

__all__ = ["Prefix", "PrefixCacheSize", "PrefixPart", "bytes_of", "set_prefix_cache"]

_BY_DEFAULT = 10**9
"""Default size of a cache, in bytes."""

_FEWEST = 32
"""Shortest prefix that is reused, in tokens: reuse takes a reading of all weights, to check that they are the same."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

PrefixCacheSize = bool | int | str
"""Type of `enable_self_speculative(prefix_cache=…)`: bytes, a size such as `"1GB"`, `True` for 1 GB, or `False`."""


class PrefixPart(Part):
    """State of a model: stored prefixes of its texts.

    Attributes:
        cache: keys and values; `None` where nothing is stored.
        weights: fingerprint of the weights that these were computed with, by identity and torch's counts of writes.
        digest: digest of the weights' numbers; `None` until it is needed.
    """

    def __init__(self) -> None:
        self.cache: PrefixCache | None = None
        self.weights: Hashable = None
        self.digest: str | None = None

    def drop(self) -> None:
        self.cache, self.digest = None, None


def bytes_of(size: PrefixCacheSize) -> int:
    """Return the number of bytes of a size.

    Args:
        size: a `PrefixCacheSize`.

    Raises:
        TypeError: it is of another type.
        ValueError: it cannot be read, or is negative.
    """
    allowed = 'bytes, a size such as "1GB" or "512MiB", True for 1 GB, or False for none'
    if isinstance(size, bool):
        return _BY_DEFAULT if size else 0
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower())
        if found is not None and found[2] in _UNITS:
            return int(float(found[1]) * _UNITS[found[2]])
        raise ValueError(f"`prefix_cache={shown(size)}` is not a size: give {allowed}.")
    if not isinstance(size, int):
        raise TypeError(f"`prefix_cache` must be {allowed}, but got {type(size).__name__}.")
    if size < 0:
        raise ValueError(f"`prefix_cache={size}` is negative: give {allowed}.")
    return size


def set_prefix_cache(model: PreTrainedModel, size: PrefixCacheSize) -> None:
    """Store keys and values of a model's texts from now on, or none.

    Args:
        model: the target model.
        size: a `PrefixCacheSize`.

    Raises:
        TypeError, ValueError: as in `bytes_of`.
    """
    most, part = bytes_of(size), state_of(model).get(PrefixPart)
    if most == 0:
        part.cache = None
    elif part.cache is None:
        part.cache = PrefixCache(most)
    else:
        part.cache.limit(most)


class Prefix:
    """Prefix of one call: what it takes from the cache of prefixes, and what it stores there.

    Args:
        forward: the passes of the call.
        cache: the KV cache of the call.
        input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts.
        model_kwargs: the model's keyword arguments.
        config: generation config of the call.
        salt: key that separates the entries of different users.

    Attributes:
        reused: number of tokens that were taken.
    """

    def __init__(
        self,
        forward: Forward,
        cache: Any,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
        config: GenerationConfig,
        salt: str | None,
    ) -> None:
        self.reused = 0
        self._forward, self._cache, self._ids = forward, cache, input_ids
        self._part = state_of(forward.model).get(PrefixPart)
        self._prefixes = self._part.cache
        if self._prefixes is not None and not self._may_be(model_kwargs, config):
            self._prefixes = None
        self._key = (salt, str(forward.model.dtype), str(forward.device), torch.get_num_threads(), forward.plan.prompts)

    def _may_be(self, model_kwargs: dict[str, Any], config: GenerationConfig) -> bool:
        """Tell whether keys and values of this call depend on nothing but tokens and the key."""
        model, plan, cache = self._forward.model, self._forward.plan, self._cache
        positions = model_kwargs.get("position_ids")
        return (
            plan.captured  # no attentions or hidden states are requested
            and (plan.prompts or model.dtype == torch.float32)
            and isinstance(cache, Cache)
            and slots_of(cache) == 0
            and starts_of_prompts(self._ids, model_kwargs, config) == [0]
            and (positions is None or positions[0].tolist() == list(range(self._ids.shape[1])))
            and why_not_on(model, self._forward.device, "it is spread over several devices") is None
            and not RotarySwitch(model)
        )

    def fill(self) -> None:
        """Copy what is stored of the prompt into the cache of the call."""
        prefixes, part = self._prefixes, self._part
        if prefixes is None:
            return
        model = self._forward.model
        weights = _weights(model)
        if weights != part.weights:
            prefixes.clear()
            part.weights, part.digest = weights, None
        tokens = self._ids[0].cpu()
        most = len(tokens) - 1  # the last one's logits are needed
        if min(prefixes.match(self._key, tokens), most) < _FEWEST:
            return
        # torch does not count writes through `.data` or NumPy.
        digest = _digest(model)
        if digest != part.digest:
            prefixes.clear()
            part.digest = digest
            return
        for layer, states in zip(self._cache.layers, prefixes.take(self._key, tokens, most), strict=False):
            layer.update(*states)
        self.reused = slots_of(self._cache)

    def keep(self, sequences: torch.Tensor) -> None:
        """Store what the call has read and decoded.

        Args:
            sequences (`torch.LongTensor` of shape `(1, n)`): the text.
        """
        prefixes, part, forward = self._prefixes, self._part, self._forward
        if prefixes is None or _weights(forward.model) != part.weights:
            return
        count = min(slots_of(self._cache), sequences.shape[1])
        if forward.model.dtype != torch.float32:
            # A text must not depend on earlier ones: store only what any call would have computed to the bit.
            if not forward.has_read_prompt:
                return
            if not forward.is_bitwise:
                count = min(count, self._ids.shape[1])
        states = whole_text(self._cache, count) if count >= _FEWEST else None
        if states is not None:
            if part.digest is None:
                part.digest = _digest(forward.model)
            prefixes.keep(self._key, sequences[0, :count].cpu(), states)


@looked_at_once
def _weights(model: PreTrainedModel) -> Hashable:
    """Return a fingerprint of the weights, by their identity and torch's counts of writes into them."""
    tensors = (t for m in modules_of(model) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return hash(tuple(map(fingerprint_of, tensors)))


def _digest(model: PreTrainedModel) -> str:
    """Return a digest of the numbers in all weights, which takes about as long as reading them."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        numbers = parameter.detach().contiguous().view(-1).view(torch.uint8)
        whole = len(numbers) // 8 * 8
        total = int(numbers[:whole].view(torch.int64).sum()) if whole else 0
        found.update(f"{name} {tuple(parameter.shape)} {total} {numbers[whole:].tolist()}\n".encode())
    return found.hexdigest()
