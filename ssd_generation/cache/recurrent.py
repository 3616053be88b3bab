"""Recurrent states, out of which no token can be taken again: they are put back as they were at a checkpoint.

The states of a hybrid model's linear attention, state space or convolution layers stand behind the last token of a
pass, rejected ones and all. So a copy is kept of how they stood at a checkpoint. Where tokens of a pass are rejected,
the copy is put back, keys and values are cropped to the checkpoint as well, and the tokens committed since go through
the next pass again, in front of what is to be verified: a few more rows, not another pass over the weights.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..support.once import looked_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "MOST_OWED",
    "REACH",
    "Checkpoint",
    "NoRoomForStates",
    "crop_attention",
    "fork_states",
    "has_states",
    "is_known",
    "keeps_states",
    "knows_its_length",
    "layers_of_states",
    "layers_without_keys",
    "slots_of",
    "usual_layers",
]

MOST_OWED = 48
"""Tokens that go through passes again and again: beyond so many, a round without a draft makes an end of it. (Passes
over several tokens compute states in chunks of 64 and more: below that, they are hardly dearer.)"""

REACH = 256
"""Slots by which a sliding window has to reach back further, so that it can be cropped to the checkpoint."""

_KNOWN = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)

_WINDOW = ("keys", "values", "cumulative_length")
"""What a layer with a sliding window beside its states holds: it cannot be cropped, and is put back with them."""


def keeps_states(layer: Any) -> bool:
    """Whether a layer of a cache keeps recurrent or convolution states, alone or beside keys and values."""
    return hasattr(layer, "recurrent_states")


def is_known(layer: Any) -> bool:
    """Whether it is one whose states can be copied and put back here."""
    return type(layer) in _KNOWN and isinstance(layer.recurrent_states, dict) and isinstance(layer.conv_states, dict)


def usual_layers(model: PreTrainedModel) -> list[Any]:
    """The empty layers of the cache that transformers makes for a model, or would make."""
    layers: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return layers


@looked_at_once
def has_states(model: PreTrainedModel) -> bool:
    """Whether a model keeps such states in its cache."""
    return any(map(keeps_states, usual_layers(model)))


def knows_its_length(cache: Cache) -> bool:
    """Whether a cache can say how many tokens it holds: not one of states alone."""
    return not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def slots_of(cache: Cache | None, otherwise: int = 0) -> int:
    """Tokens that a cache holds.

    Args:
        cache: of which they are asked; `None` holds none.
        otherwise: what a cache of states alone is taken to hold, which does not know.
    """
    if cache is None:
        return 0
    return int(cache.get_seq_length()) if knows_its_length(cache) else otherwise


def layers_without_keys(model: PreTrainedModel) -> frozenset[int]:
    """Layers of which the cache holds states alone, or nothing."""
    return frozenset(index for index, layer in enumerate(usual_layers(model)) if not isinstance(layer, CacheLayerMixin))


def layers_of_states(model: PreTrainedModel) -> frozenset[int]:
    """Layers of which the cache holds states alone, which can be copied and put back here."""
    layers = usual_layers(model)
    return frozenset(index for index in layers_without_keys(model) if is_known(layers[index]))


class NoRoomForStates(MemoryError):
    """There is no memory for a copy of the states, so that no token can be taken back; nothing has happened yet."""


def _copy(state: torch.Tensor) -> torch.Tensor:
    try:
        return state.clone()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise NoRoomForStates(f"a copy of states of {state.nbytes:,} bytes finds no room") from error


def fork_states(layer: Any) -> Any:
    """A layer of the same kind with states of its own, which stand where these do; keys and values are those of both.

    Args:
        layer: one that keeps states (`keeps_states`).
    """
    fork = copy.copy(layer)
    for name, kept in vars(layer).items():
        if isinstance(kept, dict):
            vars(fork)[name] = {
                index: _copy(state) if isinstance(state, torch.Tensor) else state for index, state in kept.items()
            }
    return fork


def crop_attention(cache: Cache, slots: int) -> None:
    """Make the keys and values of a cache end at a slot, if they go on behind it; states stay as they are.

    Args:
        cache: of a model with recurrent states.
        slots: the new length.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if not keeps_states(layer):
            if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > slots:  # others hold nothing
                layer.crop(slots - layer.get_seq_length())
        elif _has_window(layer):
            continue
        elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.keys.numel():
            layer.keys, layer.values = layer.keys[..., :slots, :], layer.values[..., :slots, :]


class Checkpoint:
    """The states of a cache as they stood behind some slot, and the tokens that have gone through a pass since.

    Args:
        length: slots in a cache whose states stand behind the last of them, in each of its rows.

    Attributes:
        length: slots up to the checkpoint.
        has_no_room: there was no memory for a copy of the states; `begin` is not to be told that tokens may fail.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.has_no_room = False
        self._since: torch.Tensor | None = None  # tokens of the last pass, all of which came behind the checkpoint
        self._stands = 0  # of these, so many are in the states: all or none
        self._saved: list[_Saved] | None = None

    @classmethod
    def of(cls, cache: Cache, length: int) -> Checkpoint | None:
        """That of a cache that keeps states; `None` of any other."""
        return cls(length) if any(map(keeps_states, cache.layers)) else None

    def begin(self, cache: Cache, length: int, may_fail: bool) -> torch.Tensor | None:
        """Make a cache ready for a pass.

        Args:
            cache: the cache.
            length: slots that are committed, no fewer than at the last call.
            may_fail: whether tokens of the pass may be rejected.

        Returns:
            Tokens `(B, n)` that were committed behind the checkpoint and have to be in the pass again, in front of its
            own; `None` where there are none.
        """
        return self.save(cache, length) if may_fail else self.rewind(cache, length)

    def save(self, cache: Cache, length: int) -> torch.Tensor | None:
        """Copy the states that tokens of the next pass may have to be taken out of.

        Args:
            cache: the cache.
            length: as in `begin`.

        Returns:
            As `begin`.

        Raises:
            NoRoomForStates: there is no memory for them.
        """
        again = self.rewind(cache, length)
        if self._saved is None:
            self._saved = [_Saved(layer) for layer in cache.layers]
        return again

    def rewind(self, cache: Cache, length: int) -> torch.Tensor | None:
        """Let the states stand behind tokens that are committed, all of them or those up to the checkpoint.

        Args:
            cache: the cache.
            length: slots that are committed, no fewer than at the last call.

        Returns:
            As `begin`.
        """
        if not self.owed(length):
            # All of the last pass was accepted: the states are those behind it.
            if length > self.length:
                self.length, self._since, self._stands, self._saved = length, None, 0, None
            return None
        assert self._since is not None
        if self._stands:
            self.restore(cache)
        return self._since[:, : length - self.length]

    def owed(self, length: int) -> int:
        """Tokens that the next pass has to take again.

        Args:
            length: slots that are committed.
        """
        return 0 if length == self.length + self._stands else length - self.length

    def passed(self, tokens: torch.Tensor) -> None:
        """A pass has gone over tokens `(B, n)` that begin at the checkpoint."""
        self._since, self._stands = tokens, tokens.shape[1]

    def end(self, cache: Cache, length: int) -> None:
        """Leave a cache, after an exception, with no token that was not committed.

        That may be fewer than were: to go on from the checkpoint takes a pass, which is not made here.

        Args:
            cache: the cache.
            length: slots that are committed.
        """
        if not self.owed(length) or self._saved is None:
            crop_attention(cache, length)
        else:
            self.restore(cache)

    def restore(self, cache: Cache) -> None:
        """Take everything behind the checkpoint out of a cache."""
        self._stands = 0
        crop_attention(cache, self.length)
        layers: list[Any] = cache.layers
        for layer, saved in zip(layers, self._saved or [], strict=False):
            saved.restore(layer)


def _has_window(layer: Any) -> bool:
    """Whether a layer keeps states and, beside them, the keys and values of a sliding window alone."""
    return keeps_states(layer) and isinstance(layer, DynamicSlidingWindowLayer)


class _Saved:
    """What of a layer cannot be cropped, as it stands now."""

    def __init__(self, layer: Any) -> None:
        names = ("conv_states", "recurrent_states") if keeps_states(layer) else ()
        self._states = {
            name: {index: _copy(state) for index, state in getattr(layer, name).items() if state is not None}
            for name in names
        }
        # Appending to keys and values makes new tensors: these stay as they are.
        self._window = {name: getattr(layer, name) for name in _WINDOW} if _has_window(layer) else {}

    def restore(self, layer: Any) -> None:
        for name, states in self._states.items():
            for index, state in states.items():
                getattr(layer, name)[index].copy_(state)
        for name, value in self._window.items():
            setattr(layer, name, value)
