"""A model's modules and kinds of weights: walked once per call; results that depend on nothing else are found once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from .model_state import Part, state_of
from .once import is_looking_once, looked_at_once

__all__ = ["StructurePart", "follows_from_structure", "is_of_transformers", "modules_of"]

T = TypeVar("T")

_PLAIN = (torch.Tensor, nn.Parameter)


class Structure:
    """The modules of a model, and the classes, types, shapes and devices of its weights.

    Attributes:
        key: differs from that of any other structure.
        modules: weak references, in the order of `nn.Module.modules`.
        found: results that depend on them, by function and arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        self.key: list[Any] = []
        self.modules: list[weakref.ref[nn.Module]] = []
        self.found: dict[Any, Any] = {}
        self._walk(model)

    def _walk(self, model: nn.Module) -> None:
        """Walk the modules in the order of `nn.Module.modules`, which takes five times as long."""
        key, met, waiting = self.key, set(), [model]
        while waiting:
            module = waiting.pop()
            if id(module) in met:
                continue
            met.add(id(module))
            self.modules.append(weakref.ref(module))
            hook = module.__dict__.get("_hf_hook")
            key += (id(module), type(module), type(hook), id(hook))
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        key += (type(tensor), tensor.dtype, tensor.shape, tensor.device)
                        if type(tensor) not in _PLAIN:
                            key.append(id(tensor))  # a tensor of a subclass has settings
            waiting += [child for child in reversed(module._modules.values()) if child is not None]


class StructurePart(Part):
    """Structure of a model when it was last walked."""

    def __init__(self) -> None:
        self.structure: Structure | None = None

    def drop(self) -> None:
        self.structure = None


@looked_at_once
def _structure_of(model: nn.Module) -> Structure:
    state, now = state_of(model).get(StructurePart), Structure(model)
    if state.structure is None or state.structure.key != now.key:
        state.structure = now
    found: Structure = state.structure
    return found


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, in the order of `model.modules()`."""
    if not is_looking_once():
        return list(model.modules())
    return [module for reference in _structure_of(model).modules if (module := reference()) is not None]


def is_of_transformers(module: nn.Module, *names: str) -> bool:
    """Tell whether a module's class is one of transformers' that has one of these names."""
    return type(module).__name__ in names and type(module).__module__.startswith("transformers.")


def follows_from_structure(function: Callable[..., T]) -> Callable[..., T]:
    """Compute a function of a model once inside `looking_once`, and anew when the structure has changed.

    Args:
        function: function of a model, and of further hashable arguments. It depends only on the model's modules and the
            kinds of its weights; its result holds no module and no tensor.
    """

    @functools.wraps(function)
    def found(model: Any, *args: Any) -> T:
        if not is_looking_once():
            return function(model, *args)
        known, key = _structure_of(model).found, (function, args)
        if key not in known:
            known[key] = function(model, *args)
        value: T = known[key]
        return value

    return found
