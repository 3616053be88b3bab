"""States that a model stores on its modules, one set for all texts (recurrent_gemma).

The cache of such a model has places for its states, and nothing in them. During a call the states are stored there, so
that they belong to a text, and are copied, restored and drafted from like any others: a module is given those of the
cache that a pass runs with, and its new ones go back into that cache. Afterwards the modules hold those of the text, as
they do after plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ...cache.recurrent import layers_of_states
from ...config import SkipConfig
from ...support.model_state import Part, state_of
from ...support.versions import cache_argument, cache_given
from ..structure.skip_mode import SkipMode, forward_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["Holder", "ModuleStates", "ModuleStatesPart", "fill_cache", "holders", "mode_of_states", "module_states"]

_NAMES = ("_state", "_states")

_NO_STATE = 0
"""Index of the state for which such a model's cache has a place, in each layer."""


class Holder(NamedTuple):
    """A module that stores states itself, or has parts that do."""

    layer: int
    """Index of its layer in the cache."""

    module: nn.Module
    places: tuple[tuple[nn.Module, str], ...]
    """Modules that have a state, each with the state's name there."""

    @property
    def keys(self) -> list[str]:
        """Keys of the states in the cache, in the order of `places`."""
        return [f"{place} {name}" for place, (_, name) in enumerate(self.places)]


def holders(model: PreTrainedModel) -> list[Holder]:
    """Find the modules that store states, in the layers of which the cache would hold states alone.

    Args:
        model: the target model.
    """
    of_states = layers_of_states(model)
    if not of_states:
        return []
    found = []
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and len(layers) > max(of_states):
            for index in sorted(of_states):
                found += [Holder(index, module, places) for module, places in _outermost(layers[index])]
    return found


def _outermost(layer: nn.Module) -> list[tuple[nn.Module, tuple[tuple[nn.Module, str], ...]]]:
    found: list[tuple[nn.Module, tuple[tuple[nn.Module, str], ...]]] = []
    inside: set[nn.Module] = set()
    for module in layer.modules():  # a module comes before those inside it
        if module not in inside and _states_of(module):
            parts = list(module.modules())
            inside.update(parts)
            found.append((module, tuple((part, name) for part in parts for name in _states_of(part))))
    return found


def _states_of(module: nn.Module) -> list[str]:
    """Return the names of a module's states: tensors, or nothing yet, that are neither weights nor buffers."""
    return [
        name
        for name, value in vars(module).items()
        if name.endswith(_NAMES) and (value is None or isinstance(value, torch.Tensor))
    ]


class ModuleStates:
    """States that a model's modules store, and their transfer into a cache.

    Args:
        held: the modules, as found by `holders`.

    Attributes:
        held: the same.
    """

    def __init__(self, held: list[Holder]) -> None:
        self.held = held

    def mode(self, model: PreTrainedModel) -> SkipMode:
        """Return the mode in which a pass must run, so that its states are those of its cache.

        Args:
            model: the model that the modules belong to.
        """
        return SkipMode(model, SkipConfig(), [(holder.module, self._run(holder)) for holder in self.held])

    def _run(self, holder: Holder) -> Callable[..., Any]:
        forward = forward_of(holder.module)

        def run(*args: Any, **kwargs: Any) -> Any:
            layer = _layer(cache_given(kwargs), holder)
            _give(holder, layer)
            try:
                return forward(*args, **kwargs)
            finally:
                _take(holder, layer)

        return run

    def read(self) -> list[list[Any]]:
        """Return the states that the modules hold now."""
        return [[getattr(part, name) for part, name in holder.places] for holder in self.held]

    def write(self, states: list[list[Any]]) -> None:
        """Replace the states that the modules hold.

        Args:
            states: result of `read`.
        """
        for holder, values in zip(self.held, states, strict=True):
            for (part, name), value in zip(holder.places, values, strict=True):
                setattr(part, name, value)

    def take(self, cache: Cache) -> None:
        """Store the modules' states in a cache, whose tokens they follow."""
        for holder in self.held:
            _take(holder, _layer(cache, holder))

    def end(self, cache: Cache) -> None:
        """Give the modules their states from a cache, and remove these from it."""
        for holder in self.held:
            layer = _layer(cache, holder)
            if any(key in layer.recurrent_states for key in holder.keys):
                _give(holder, layer)
                for key in holder.keys:
                    layer.recurrent_states.pop(key, None)
                layer.has_previous_state[_NO_STATE] = False


def _layer(cache: Any, holder: Holder) -> Any:
    return cache.layers[holder.layer]


def _give(holder: Holder, layer: Any) -> None:
    for key, (part, name) in zip(holder.keys, holder.places, strict=True):
        setattr(part, name, layer.recurrent_states.get(key))


def _take(holder: Holder, layer: Any) -> None:
    for key, (part, name) in zip(holder.keys, holder.places, strict=True):
        state = getattr(part, name)
        layer.recurrent_states[key] = None if state is None else state.contiguous()
    layer.has_previous_state[_NO_STATE] = True


class ModuleStatesPart(Part):
    """Part of a model's state: the states that its modules store, or `None`, in a tuple once that is known."""

    def __init__(self) -> None:
        self.module_states: tuple[ModuleStates | None, ...] = ()

    def drop(self) -> None:
        self.module_states = ()


def module_states(model: PreTrainedModel) -> ModuleStates | None:
    """Return the states that a model stores on its modules; `None` where it stores none.

    Args:
        model: the target model.
    """
    state = state_of(model).get(ModuleStatesPart)
    if not state.module_states:
        held = holders(model)
        state.module_states = (ModuleStates(held) if held else None,)
    return state.module_states[0]


def mode_of_states(model: PreTrainedModel) -> SkipMode | None:
    """Return the mode in which modules use the states of a pass's cache; `None` where they store none.

    Args:
        model: the target model.
    """
    states = module_states(model)
    return None if states is None else states.mode(model)


def fill_cache(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> None:
    """Run the model's own pass over a text, which adds the text to a cache, with the states that modules store.

    Args:
        model: the target model.
        ids (`torch.LongTensor` of shape `(B, n)`): the text.
        cache: the cache.
    """
    fewer = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    with mode_of_states(model) or nullcontext():
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **fewer)
