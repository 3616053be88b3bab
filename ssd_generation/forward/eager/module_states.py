"""States that a model stores on its modules, one set for all texts (recurrent_gemma).

The cache of such a model has places for its states, and nothing in them. During a call the states are stored there, so
that they belong to a text, and are copied, restored and drafted from like any others: a module is given those of the
cache that a pass runs with, and its new ones go back into that cache. Afterwards the modules hold those of the text, as
they do after plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ...cache.recurrent import layers_of_states
from ...config import SkipConfig
from ...support.model_state import Part, state_of
from ...support.versions import cache_given
from ..structure.skip_mode import SkipMode, forward_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["Holder", "ModuleStates", "ModuleStatesPart", "holders", "mode_of_states", "module_states"]

_NAMES = ("_state", "_states")


class Holder(NamedTuple):
    """A module that stores states itself, or has parts that do."""

    layer: int
    """Index of its layer in the cache."""

    module: nn.Module
    places: tuple[tuple[nn.Module, str], ...]
    """Modules that have a state, each with the state's name there."""


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
    """

    def __init__(self, held: list[Holder]) -> None:
        self._held = held

    def mode(self, model: PreTrainedModel) -> SkipMode:
        """Return the mode in which a pass must run, so that its states are those of its cache.

        Args:
            model: the model that the modules belong to.
        """
        return SkipMode(model, SkipConfig(), [(holder.module, self._run(holder)) for holder in self._held])

    def _run(self, holder: Holder) -> Callable[..., Any]:
        forward = forward_of(holder.module)

        def run(*args: Any, **kwargs: Any) -> Any:
            kept = _kept(cache_given(kwargs), holder)
            _give(holder, kept)
            try:
                return forward(*args, **kwargs)
            finally:
                _take(holder, kept)

        return run

    def read(self) -> list[list[Any]]:
        """Return the states that the modules hold now."""
        return [[getattr(part, name) for part, name in holder.places] for holder in self._held]

    def write(self, states: list[list[Any]]) -> None:
        """Replace the states that the modules hold.

        Args:
            states: result of `read`.
        """
        for holder, values in zip(self._held, states, strict=True):
            for (part, name), value in zip(holder.places, values, strict=True):
                setattr(part, name, value)

    def take(self, cache: Cache) -> None:
        """Store the modules' states in a cache, whose tokens they follow."""
        for holder in self._held:
            _take(holder, _kept(cache, holder))

    def end(self, cache: Cache) -> None:
        """Give the modules their states from a cache, and remove these from it."""
        for holder in self._held:
            kept = _kept(cache, holder)
            if any(key in kept for key in _keys(holder)):
                _give(holder, kept)
                for key in _keys(holder):
                    kept.pop(key, None)


def _kept(cache: Any, holder: Holder) -> dict[Any, Any]:
    """Return the states of a layer of a cache, those of modules among others."""
    return cache.layers[holder.layer].recurrent_states  # type: ignore[no-any-return]


def _keys(holder: Holder) -> list[str]:
    return [f"{place} {name}" for place, (_, name) in enumerate(holder.places)]


def _give(holder: Holder, kept: dict[Any, Any]) -> None:
    for key, (part, name) in zip(_keys(holder), holder.places, strict=True):
        setattr(part, name, kept.get(key))


def _take(holder: Holder, kept: dict[Any, Any]) -> None:
    for key, (part, name) in zip(_keys(holder), holder.places, strict=True):
        kept[key] = getattr(part, name)


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
