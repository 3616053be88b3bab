"""Caches of a model's own class that hold states in a list alongside their layers (minimax).

While this library decodes with one, its layers are those that any cache of such a model would have, with places for
states, and the list is a view of these. So states are copied, restored and drafted from like any others. Afterwards the
cache is as the model's own code leaves it.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..support.versions import CACHE_NAMES
from .recurrent import layers_of_states, usual_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ListedStates", "class_of", "hold_lists", "lists_of", "new_cache", "release_lists"]


def class_of(model: PreTrainedModel) -> type[DynamicCache] | None:
    """Return the cache class that a model's passes require, where it is its own and layers can hold the states.

    `None` where any cache will do, or where this version of transformers has no such layers.
    """
    kind = _wanted_by(type(model.base_model).forward)
    return None if kind is None or not layers_of_states(model) else kind


@functools.cache
def _wanted_by(forward: Callable[..., Any]) -> type[DynamicCache] | None:
    try:
        hints = typing.get_type_hints(inspect.unwrap(forward))
    except Exception:  # names that only a type checker knows
        return None
    wanted = next((hints[name] for name in CACHE_NAMES if name in hints), None)
    for kind in typing.get_args(wanted) or (wanted,):
        if isinstance(kind, type) and issubclass(kind, DynamicCache) and kind is not DynamicCache:
            return kind
    return None


def new_cache(model: PreTrainedModel) -> Cache:
    """Create an empty cache for passes of a model, from which this library can remove tokens."""
    kind = class_of(model)
    if kind is None:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    cache = kind()
    hold_lists(model, cache)
    return cache


class ListedStates(list[Any]):
    """List view of the states of a cache's layers, for reading and writing; `None` where a layer holds none.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache.layers)

    def __getitem__(self, index: Any) -> Any:
        return _states(self._cache.layers[index]).get(0)

    def __setitem__(self, index: Any, value: Any) -> None:
        _states(self._cache.layers[index])[0] = value


def _states(layer: Any) -> dict[Any, Any]:
    return getattr(layer, "recurrent_states", {})


def lists_of(cache: Cache) -> list[str]:
    """Return the names of a cache's lists that `hold_lists` has replaced by views."""
    return [name for name, value in vars(cache).items() if isinstance(value, ListedStates)]


def hold_lists(model: PreTrainedModel, cache: Cache) -> None:
    """Move into its layers what a cache holds in lists of its own, and replace the lists by views.

    Args:
        model: model of the cache.
        cache: any cache; one that is not of the model's own class, or has such views already, stays as it is.
    """
    kind = class_of(model)
    if kind is None or not isinstance(cache, kind) or lists_of(cache):
        return
    for name, before in list(vars(cache).items()):
        if not isinstance(before, list) or name == "layers":
            continue
        layers = usual_layers(model)
        for index, layer in enumerate(layers):
            if _states(layer):
                if index < len(before) and len(before[index]):
                    _states(layer)[0] = before[index]
            elif index < len(cache.layers):
                layers[index] = cache.layers[index]
        cache.layers = layers
        setattr(cache, name, ListedStates(cache))


def release_lists(cache: Cache) -> None:
    """Undo `hold_lists`: restore the lists of a cache, as the model's own code fills them."""
    for name in lists_of(cache):
        layers: list[Any] = cache.layers
        states = [_states(layer).get(0) for layer in layers]
        with_states = [index for index, state in enumerate(states) if state is not None]
        with_keys = [index for index, layer in enumerate(layers) if getattr(layer, "is_initialized", False)]
        setattr(cache, name, [[] if state is None else state for state in states[: max(with_states, default=-1) + 1]])
        cache.layers = [
            DynamicLayer() if _states(layer) else layer for layer in layers[: max(with_keys, default=-1) + 1]
        ]
