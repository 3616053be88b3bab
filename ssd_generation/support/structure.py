"""A model's modules and the kinds of its weights: walked once a call; what follows from them alone is found once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from .model_state import Part, state_of
from .once import is_looking_once, looked_at_once

__all__ = ["StructurePart", "follows_from_structure", "modules_of"]

T = TypeVar("T")

_PLAIN = (torch.Tensor, nn.Parameter)


class Structure:
    """The modules of a model, and of which class, type, shape and device its weights are.

    Attributes:
        key: differs from that of another structure.
        modules: in the order of `nn.Module.modules`, not held.
        found: what follows from them, by function and arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        self.key: list[Any] = []
        self.modules: list[weakref.ref[nn.Module]] = []
        self.found: dict[Any, Any] = {}
        self._walk(model)

    def _walk(self, model: nn.Module) -> None:
        """Walk as `nn.Module.modules` does, which takes five times as long."""
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
                            key.append(id(tensor))  # one of a class of its own has settings
            waiting += [child for child in reversed(module._modules.values()) if child is not None]


class StructurePart(Part):
    """Of a model: its structure when it was last looked at."""

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
    """All modules of a model, in the order of `model.modules()`."""
    if not is_looking_once():
        return list(model.modules())
    return [module for reference in _structure_of(model).modules if (module := reference()) is not None]


def follows_from_structure(function: Callable[..., T]) -> Callable[..., T]:
    """Compute a function of a model once inside `looking_once`, and anew when the structure has changed.

    Args:
        function: of a model, and of further arguments that can be told apart. It depends on the model's modules and the
            kinds of its weights alone; what it returns holds no module and no tensor.
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
