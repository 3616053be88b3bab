"""Layers of a cache that claims to hold a prefix, for the capture of a pass after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin

from .state_steps import StatePlace

__all__ = ["CacheLength", "CannotCapture", "HeldKeys", "PretendLayer", "pretend_states"]


class CannotCapture(Exception):
    """This pass cannot be captured; the message says why."""


HeldKeys = dict[int, tuple[int, Any, Any]]
"""Keys and values that a cache returned, by id: their layer, the tensor, and the one that it was given."""


class CacheLength(int):
    """Number of tokens in a cache, or a sum with it: a number that the capture recognises among arguments.

    Attributes:
        tokens: number of tokens in the cache.
        width: number of tokens of the pass.
    """

    tokens: int
    width: int

    def __new__(cls, tokens: int, width: int, more: int = 0) -> CacheLength:
        made = super().__new__(cls, tokens + more)
        made.tokens, made.width = tokens, width
        return made

    def __add__(self, other: int) -> int:
        return (
            CacheLength(self.tokens, self.width, int(self) - self.tokens + other)
            if type(other) is int
            else NotImplemented
        )

    __radd__ = __add__


class PretendLayer(CacheLayerMixin):
    """A cache layer that claims to hold a prefix, and returns what it is given."""

    is_sliding = False

    def __init__(self, index: int, length: int, keys: HeldKeys) -> None:
        super().__init__()
        self.index = index
        self.length = length
        self.is_initialized = True
        self._keys = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # New tensor objects, by which the attention recognises the layer; outside the capture.
        with torch._C.DisableTorchFunction():
            key, value = key_states.view_as(key_states), value_states.view_as(value_states)
        self._keys[id(key)] = (self.index, key, key_states)
        self._keys[id(value)] = (self.index, value, value_states)
        return key, value

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def pretend_states(
    layer: int,
    keys: PretendLayer | None,
    states: Mapping[StatePlace, torch.Tensor],
    rows: int,
    known: dict[int, tuple[StatePlace, torch.Tensor]],
) -> Any:
    """Return a layer that claims to hold states.

    Args:
        layer: its index.
        keys: what it claims to hold of keys and values; `None`: states alone.
        states: zeros in the form of each state of the model.
        rows: number of texts that the states are for.
        known: receives the place of each state, by the id of the tensor that represents it, and that tensor.
    """
    its = {place: state for place, state in states.items() if place.layer == layer}
    count = 1 + max((place.index for place in its if isinstance(place.index, int)), default=0)
    pretended: Any
    if keys is None:
        pretended = _PretendStates(number_of_states=count)
    else:
        pretended = _PretendBoth(number_of_states=count)
        vars(pretended).update(vars(keys))
    for place, state in its.items():
        tensor = state.expand(rows, *state.shape[1:])
        known[id(tensor)] = place, tensor
        getattr(pretended, place.kind)[place.index] = tensor
        getattr(pretended, f"is_{place.kind}_initialized")[place.index] = True
        pretended.has_previous_state[place.index] = True
        if place.kind == "conv_states":
            pretended.conv_kernel_size[place.index] = state.shape[-1]
    return pretended


class _PretendStates(cache_utils.LinearAttentionLayer):
    """A layer of states that are never changed: the functions that change them are nodes of the captured pass."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise CannotCapture("a layer's convolution takes several tokens together")

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        if recurrent_states is not self.recurrent_states[state_idx]:
            raise CannotCapture("a layer computes its state itself")
        same: torch.Tensor = recurrent_states
        return same


class _PretendBoth(_PretendStates, PretendLayer):
    """A layer of states, and of the keys and values of a prefix."""

    def __init__(self, number_of_states: int) -> None:
        cache_utils.LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass
