"""Weights of a model during a call: held in memory, and checked for changes.

Kernels and captured passes read weights in place. User code that runs in the middle of a call (a streamer, a criterion,
a logits processor) or in another thread may replace a weight, change its layout or write into it. So the memory of all
weights is held until the call ends, and after such code has run, weights are compared with their earlier state. Writes
that torch cannot see are not seen here: those through `.data` or NumPy that keep the memory.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from ...support.model_state import Part, state_of
from ...support.once import looked_at_once
from ...support.structure import modules_of
from ...support.tensors import place_of, version_of
from .adapters import SWITCHES, AdapterWatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WeightWatch", "WeightsPart", "fingerprint", "forget_stale"]

_DYNAMIC = "rope_type"
"""Attribute of rotary embeddings, whose buffers some models change themselves as a text grows."""

_VERSION = attrgetter("_version")


class WeightWatch:
    """Watch over a model's weights: it holds their memory, and tells whether they have changed.

    Args:
        model: the target model.
        looks: whether anything but adapters may change on this thread; otherwise only adapters are checked.
    """

    def __init__(self, model: PreTrainedModel, looks: bool = True) -> None:
        self._model, self._looks = model, looks
        self._held: list[Any] = []
        self._adapters = AdapterWatch(model)
        self._note()
        self._kinds = self._kinds_now()

    def _note(self) -> None:
        """Record the current weights for later comparison, and hold their memory as well."""
        modules = modules_of(self._model)
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._held.append(_memory_of(tensor))
        self._tensors: list[torch.Tensor] = []
        if not self._looks:
            return
        self._children: list[tuple[Any, str, Any]] = []
        self._slots: list[tuple[Any, str, torch.Tensor]] = []
        for module in modules:
            self._children += [(module._modules, name, child) for name, child in module._modules.items()]
            tables = (module._parameters,) if _DYNAMIC in vars(module) else (module._parameters, module._buffers)
            for table in tables:
                self._slots += [(table, name, tensor) for name, tensor in table.items() if tensor is not None]
        tensors = [tensor for _, _, tensor in self._slots]
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._uncounted = [tensor for tensor in tensors if tensor.is_inference()]
        self._tensors = tensors
        self._layout = list(map(place_of, tensors))
        self._versions = list(map(version_of, self._counted))

    def has_changed(self, adapters_alone: bool = False) -> bool:
        """Tell whether a weight, a module or an adapter has changed since the last call, or since it was recorded.

        Args:
            adapters_alone: whether to check adapters only; other weights take a tenth of a millisecond and more.
        """
        adapters = self._adapters.has_changed()
        if adapters_alone or not self._looks or not self._is_other():
            return adapters
        self._note()
        return True

    @property
    def are_of_a_kind(self) -> bool:
        """Tell whether types, devices and vocabulary are as before, so that a cache and buffers suit the weights."""
        (kinds, vocabulary), (before, vocabulary_before) = self._kinds_now(), self._kinds
        return kinds <= before and vocabulary == vocabulary_before

    def _is_other(self) -> bool:
        if any(modules.get(name) is not child for modules, name, child in self._children):
            return True
        if any(table.get(name) is not tensor for table, name, tensor in self._slots):
            return True
        if list(map(_VERSION, self._counted)) != self._versions:
            return True
        return list(map(place_of, self._tensors)) != self._layout

    def _kinds_now(self) -> tuple[set[Any], list[Any]]:
        ends = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        vocabulary = [getattr(getattr(end, "weight", None), "shape", None) for end in ends]
        return {(tensor.dtype, tensor.device) for tensor in self._tensors}, vocabulary


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return an object that keeps the memory of a tensor when the tensor is given other memory or deleted."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # of a class that has no memory of its own
        return tensor


class WeightsPart(Part):
    """Part of a model's state: the fingerprint of the modules and weights that captures were made of."""

    def __init__(self) -> None:
        self.made_of: tuple[list[Any], ...] | None = None

    def drop(self) -> None:
        self.made_of = None


def forget_stale(model: PreTrainedModel) -> None:
    """Drop everything made of weights or modules that the model no longer has."""
    state, part = state_of(model), state_of(model).get(WeightsPart)
    now = fingerprint(model)
    if part.made_of is not None and part.made_of != now:
        state.drop_captures()
    part.made_of = now


_SCALARS = frozenset({bool, int, float, str})
_OTHERS = frozenset({"_previous_max_cache_length", *SWITCHES[:2]})
"""Attributes that count elsewhere or nowhere: adapters in use (`adapters_in_use`), and what a call with a static cache
leaves on a model."""


@looked_at_once
def fingerprint(model: PreTrainedModel) -> tuple[list[Any], ...]:
    """Return a value that changes when captures no longer match the model; which adapters are in use does not count."""
    modules: list[Any] = []
    tensors: list[Any] = []
    for module in modules_of(model):
        # Numbers such as an attention's scale are written into the graph.
        numbers = [v for k, v in module.__dict__.items() if type(v) in _SCALARS and k not in _OTHERS]
        modules.append((id(module), type(module).forward, numbers))
        # Tensors count by their address alone: their contents are read anew in each pass.
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensors.append((id(tensor), place_of(tensor)))
    # Numbers that a forward takes from the config are written into the graph as well.
    config = [(k, v) for k, v in model.config.get_text_config(decoder=True).__dict__.items() if type(v) in _SCALARS]
    return modules, config, tensors
