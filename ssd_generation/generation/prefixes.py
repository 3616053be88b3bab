"""Prefixes reused by a call: keys and values of an earlier text of this model that begins with the same tokens."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ..cache.prefix_cache import PrefixCache, Recurrent, Start, States, whole_text
from ..cache.recurrent import (
    copied_states,
    has_all_states,
    has_begun,
    keeps_states,
    knows_its_length,
    slots_of,
    states_in,
)
from ..decoding.prompt import starts_of_prompts
from ..decoding.rotary import RotarySwitch
from ..forward.captured.conditions import why_not_on
from ..forward.structure.linears import linears_of, sample
from ..native.codegen.compiler import why_not
from ..native.ops.block_hashes import BLOCK, block_hashes
from ..support.messages import shown
from ..support.model_state import Part, state_of
from ..support.once import looked_at_once
from ..support.structure import modules_of
from ..support.tensors import fingerprint_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from ..forward.context import Context
    from ..forward.forward import Forward

__all__ = [
    "FEWEST",
    "Prefix",
    "PrefixCacheSize",
    "PrefixPart",
    "bytes_of",
    "digest_of",
    "follow_weights_of",
    "reuses_prefixes",
    "set_prefix_cache",
]

_BY_DEFAULT = 10**9
"""Default size of a cache, in bytes."""

_COLUMNS = 1024
"""Columns, of 64 bits, of the table of a weight's numbers whose rows and columns are added up."""

_SHARE_OF_STATES = 1 / 4
"""Largest share of a cache that recurrent states of one text may take: longer texts leave them at fewer places."""

FEWEST = 32
"""Shortest prefix that is reused, in tokens: reuse takes a reading of all weights, to check that they are the same."""

_ENDING = torch.zeros(1, dtype=torch.long, device="cpu")
"""Tokens under which the ending of a prompt is stored, by a key of its own."""

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


def reuses_prefixes(model: PreTrainedModel) -> bool:
    """Tell whether keys and values of a model's texts are stored for later calls."""
    return state_of(model).get(PrefixPart).cache is not None


def follow_weights_of(model: PreTrainedModel) -> None:
    """Drop a model's prefixes if its weights have changed since these were computed, by the quick test of `_weights`.

    Args:
        model: the target model.
    """
    part, weights = state_of(model).get(PrefixPart), _weights(model)
    if weights != part.weights:
        if part.cache is not None:
            part.cache.clear()
        part.weights, part.digest = weights, None


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
        reused: number of tokens that were taken, of all rows.
        keeps_bits: whether what is taken has the bits that this call would have computed.
        filled: number of tokens that the cache of a single text, or of the row that is read, began with.
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
        self.reused = self.filled = 0
        self._noted: dict[int, Recurrent] = {}  # recurrent states of the text that is read, by number of tokens
        self._has_states = isinstance(cache, Cache) and any(map(keeps_states, cache.layers))
        self._is_checked = False  # whether the digest of the weights was compared
        self._endings: list[tuple[torch.Tensor, Start]] = []  # to be stored after the text
        self._forward, self._cache, self._ids = forward, cache, input_ids
        # In half precision a text must not depend on earlier calls: only bits that any call would compute are reused.
        self._needs_bits, plan = forward.model.dtype != torch.float32, forward.plan
        self._part = state_of(forward.model).get(PrefixPart)
        self._prefixes = self._part.cache
        if self._prefixes is not None and not self._may_be(model_kwargs, config):
            self._prefixes = None
        how = "kernels" if plan.prompts else "at once" if plan.prompt_part is None else f"parts of {plan.prompt_part}"
        self.keeps_bits = plan.prompts or (plan.prompt_part is not None and (self._needs_bits or not self._has_states))
        self._key = (salt, str(forward.model.dtype), str(forward.device), torch.get_num_threads(), how)

    def _may_be(self, model_kwargs: dict[str, Any], config: GenerationConfig) -> bool:
        """Tell whether keys and values of this call depend on nothing but tokens and the key."""
        model, plan, cache = self._forward.model, self._forward.plan, self._cache
        in_parts = plan.prompt_part is not None
        starts = starts_of_prompts(self._ids, model_kwargs, config)
        return (
            plan.captured  # no attentions or hidden states are requested
            and (plan.prompts or in_parts or (len(self._ids) == 1 and not self._needs_bits and not self._has_states))
            and isinstance(cache, Cache)
            and not has_begun(cache)
            and starts is not None
            and (starts == [0] or len(self._ids) > 1)
            and self._counts_tokens(model_kwargs.get("position_ids"), starts)
            and why_not_on(model, self._forward.device, "it is spread over several devices") is None
            and not RotarySwitch(model)
        )

    def _counts_tokens(self, positions: torch.Tensor | None, starts: Sequence[int]) -> bool:
        """Tell whether the positions of each row are the numbers of its tokens."""
        width = self._ids.shape[1]
        if positions is None:
            return not any(starts) or not knows_its_length(self._cache)  # without keys nothing depends on positions
        return all(positions[row, at:].tolist() == list(range(width - at)) for row, at in enumerate(starts))

    def fill(self) -> None:
        """Copy what is stored of the prompt into the cache of the call; of a batch, when its prompts are read."""
        if self._prefixes is None:
            return
        follow_weights_of(self._forward.model)
        self._forward.prefixes = self
        if len(self._ids) > 1:
            return
        begun = self.take(self._ids[0, :-1])  # the last one is read
        begun.fill(self._cache)
        self.filled = begun.count

    def take(self, tokens: torch.Tensor) -> Start:
        """Return copies of the keys and values of the first tokens of a text, as far as they are stored.

        Args:
            tokens (`torch.LongTensor` of shape `(n,)`): tokens of the text.

        Returns:
            Keys, values and recurrent states; none where fewer are stored than are worth reading all weights for.
        """
        prefixes, tokens = self._prefixes, tokens.cpu()
        assert prefixes is not None
        recurrent: Recurrent = []
        if self._has_states:
            count, recurrent = prefixes.recurrent(self._key, tokens)
        else:
            count = self._whole_parts(prefixes.match(self._key, tokens))
        if count < FEWEST or not self._are_weights_the_same(prefixes):
            return Start()
        found = prefixes.take(self._key, tokens, count)
        # Another thread may have dropped some since.
        known = found[0][0].shape[2] if found else 0
        if known < count:
            count = 0 if self._has_states else self._whole_parts(known)
        if count == 0:
            return Start()
        self.reused += count
        return Start(count, [(keys[:, :, :count], values[:, :, :count]) for keys, values in found], recurrent)

    def note_states(self, cache: Cache, count: int, of: int) -> None:
        """Note copies of the recurrent states after some tokens of a prompt, to be stored with these.

        In half precision these are whole parts, whose bits are the same in every call. Where the states of all of them
        took too much memory, those of every second, third … are noted.

        Args:
            cache: the cache of the text.
            count: number of tokens that were read.
            of: number of tokens of the prompt.
        """
        part, prefixes = self._forward.plan.prompt_part, self._prefixes
        if prefixes is None or part is None or not has_all_states(cache):
            return
        is_last = count == of
        if count % part and not (is_last and not self._needs_bits):
            return
        each = sum(state.nbytes for layer in cache.layers for state in states_in(layer))
        every = math.ceil(of // part * each / max(1, _SHARE_OF_STATES * prefixes.most_bytes))
        if is_last or of - count < part or count // part % max(1, every) == 0:
            self._noted[count] = copied_states(cache)

    def take_ending(self, tokens: torch.Tensor, count: int) -> tuple[Start, torch.Tensor] | None:
        """Return copies of the keys and values of a prompt's last tokens, and its logits, if it was read before.

        Args:
            tokens (`torch.LongTensor` of shape `(n,)`): all tokens of the prompt.
            count: number of its last tokens, those after its whole parts.

        Returns:
            Keys, values and recurrent states, and logits `(1, 1, V)`; `None` where they are not stored.
        """
        prefixes, key = self._prefixes, self._ending_key(tokens)
        if prefixes is None or not prefixes.match(key, _ENDING) or not self._are_weights_the_same(prefixes):
            return None
        found, (_, recurrent) = prefixes.take(key, _ENDING, 1), prefixes.recurrent(key, _ENDING)
        if not found or (self._has_states and not recurrent):  # another thread has dropped it since
            return None
        self.reused += count
        *layers, (logits, _) = found

        def unpacked(states: torch.Tensor) -> torch.Tensor:
            return states.view(*states.shape[:2], count, states.shape[-1] // count)

        return Start(count, [(unpacked(keys), unpacked(values)) for keys, values in layers], recurrent), logits[:, :, 0]

    def add_ending(self, tokens: torch.Tensor, cache: Cache, count: int, logits: torch.Tensor) -> None:
        """Store the ending of a prompt, once the text is decoded: the first token does not wait for it.

        In a part of another length its tokens could have other bits, so that it serves this prompt alone.

        Args:
            tokens, count: as in `take_ending`.
            cache: the cache of the text.
            logits (`torch.FloatTensor` of shape `(1, 1, V)`): the logits after it.
        """
        whole = whole_text(cache, len(tokens))
        if self._prefixes is None or whole is None or len(tokens) < FEWEST:
            return
        if self._has_states and not has_all_states(cache):
            return
        layers: States = [tuple(x[:, :, -count:].flatten(2)[:, :, None].clone() for x in pair) for pair in whole]  # type: ignore[misc]
        layers.append((logits[:, :, None].clone(), logits[:, :, None, :0].clone()))
        self._endings.append((tokens.cpu(), Start(1, layers, copied_states(cache) if self._has_states else [])))

    def _ending_key(self, tokens: torch.Tensor) -> Hashable:
        """Return the key of a prompt's ending, which is stored as if it were a text of one token."""
        digest = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()
        return (*self._key[:-1], f"{self._key[-1]}, the end of {digest}")

    def _are_weights_the_same(self, prefixes: PrefixCache) -> bool:
        """Tell whether the numbers in the weights are those that computed what is stored; clear it if not."""
        if self._is_checked:
            return True
        # torch does not count writes through `.data` or NumPy.
        self._is_checked, digest = True, digest_of(self._forward.model)
        if digest == self._part.digest:
            return True
        prefixes.clear()
        self._part.digest = digest
        return False

    def _whole_parts(self, count: int) -> int:
        """Round a number of tokens down to whole parts of a prompt."""
        return count - count % (self._forward.plan.prompt_part or 1)

    def add(self, tokens: torch.Tensor, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Store copies of the keys and values of a text, up to the last recurrent states where the model has these.

        Args:
            tokens (`torch.LongTensor` of shape `(n,)`): tokens of the text.
            states: their keys and values by layer, each `(1, heads, n, size)`.
        """
        count, (noted, self._noted) = len(tokens), (self._noted, {})
        if self._has_states:
            noted = {at: after for at, after in noted.items() if at <= count}
            count = max(noted, default=0)
        if count >= FEWEST:
            known = [(keys[:, :, :count], values[:, :, :count]) for keys, values in states]
            self._store(self._key, tokens[:count].cpu(), known, noted)

    def _store(
        self, key: Hashable, tokens: torch.Tensor, states: States, recurrent: Mapping[int, Recurrent] | None = None
    ) -> None:
        if self._prefixes is None:
            return
        if self._part.digest is None:
            self._part.digest, self._is_checked = digest_of(self._forward.model), True
        self._prefixes.keep(key, tokens, states, recurrent=recurrent)

    def keep(self, sequences: torch.Tensor, context: Context | None = None) -> None:
        """Store what the call has read and decoded; the whole parts of a batch were stored when they were read.

        Args:
            sequences (`torch.LongTensor` of shape `(B, n)`): the texts.
            context: state after the last pass of the call.
        """
        part, forward = self._part, self._forward
        if self._prefixes is None or _weights(forward.model) != part.weights:
            return
        for tokens, ending in self._endings:
            after = {1: list(ending.recurrent)} if ending.recurrent else None
            self._store(self._ending_key(tokens), _ENDING, list(ending.states), after)
        if len(self._ids) > 1:
            return
        most = sequences.shape[1]
        count = min(slots_of(self._cache, otherwise=most), most)
        if context is not None and context.checkpoint is not None and not self._needs_bits:
            at, states_at = context.checkpoint.latest(self._cache, context.length)
            if at <= count and has_all_states(self._cache):
                self._noted[at] = states_at
        if self._needs_bits:
            in_parts = forward.plan.prompt_part is not None
            if not (in_parts or forward.has_read_prompt):
                return
            if in_parts or not forward.is_bitwise:
                count = self._whole_parts(min(count, self._ids.shape[1]))
        states = whole_text(self._cache, count)
        if states is not None:
            self.add(sequences[0, :count], states)


@looked_at_once
def _weights(model: PreTrainedModel) -> Hashable:
    """Return a fingerprint of the weights: identity, torch's counts of writes into them, and a few numbers of each."""
    tensors = (t for m in modules_of(model) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    numbers = sample(linears_of(model)).cpu().contiguous().view(torch.uint8)
    return hash((*map(fingerprint_of, tensors), numbers.numpy().tobytes()))


def digest_of(model: PreTrainedModel) -> str:
    """Return a digest of all weights and buffers that depends on the order of their numbers; reads each number once.

    Args:
        model: the target model.
    """
    found, has_kernels = hashlib.sha256(), why_not() is None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        parts = _hashes(numbers) if has_kernels and tensor.device.type == "cpu" else _sums(numbers)
        for part in parts:
            found.update(part.cpu().numpy().tobytes())
    return found.hexdigest()


def _hashes(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return hashes of bytes `(n,)` by a kernel, and the bytes that are left over."""
    return block_hashes(numbers), numbers[len(numbers) // BLOCK * BLOCK :]


def _sums(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums of all columns and all rows of bytes `(n,)` as a table, and the bytes that are left over.

    Numbers that change places change some of the sums. It takes torch two readings.
    """
    whole = len(numbers) // (8 * _COLUMNS) * 8 * _COLUMNS
    table = numbers[:whole].view(torch.int64).view(-1, _COLUMNS)
    return table.sum(dim=0), table.sum(dim=1), numbers[whole:]
