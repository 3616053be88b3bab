"""Adapters (PEFT's) in use, and whether these have changed since something was learnt, copied or verified with them."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...support.once import looked_at_once
from ...support.tensors import fingerprint_of
from .linears import few_of, is_plain, linears_of, sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SWITCHES", "AdapterWatch", "adapters_in_use", "few_numbers_of", "has_adapters", "numbers_of"]

# Attributes of a layer with adapters that say which of them are in use, and how much of each.
SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")

_VERSION = attrgetter("_version")

_FEW = 4
"""Numbers read from each of the adapters' own weights."""


class AdapterWatch:
    """Watch over the adapters of a model: tells whether any were switched, added, merged, removed or written to.

    Checking is cheap enough for each token: the layers are looked up once.

    Args:
        model: the target model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._names: Any = None
        self._layers: list[tuple[nn.Module, str, nn.Module, list[torch.Tensor]]] = []
        self._plain: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []
        self._numbers: list[torch.Tensor] = []
        self.state = self._look()

    def has_changed(self) -> bool:
        """Tell whether anything has changed since the last call, or since construction."""
        before, self.state = self.state, self._look()
        return self.state != before

    def _look(self) -> Hashable:
        names = tuple(getattr(self._model, "peft_config", None) or ())
        if names != self._names:
            self._names, self._layers = names, list(_adapted_layers(self._model)) if names else []
            weights = [weight for *_, its_weights in self._layers for weight in its_weights]
            self._plain, self._others = list(filter(is_plain, weights)), [w for w in weights if not is_plain(w)]
            self._counted = [weight for weight in self._plain if not weight.is_inference()]
            # Views: they show writes that torch does not count (`weight.data`).
            self._numbers = [few_of(weight, _FEW) for weight in self._plain]
        if not names:
            return ()
        # A layer that was removed from the model is no longer in use.
        found: list[Any] = [names, *(parent._modules.get(name) is module for parent, name, module, _ in self._layers)]
        for _, _, module, _ in self._layers:
            found += _switches(module)
        found += map(torch.Tensor.data_ptr, self._plain)
        found += map(_VERSION, self._counted)
        found += map(fingerprint_of, self._others)
        if self._numbers:
            found += torch.cat(self._numbers).tolist()
        return tuple(found)


def _switches(layer: nn.Module) -> list[Hashable]:
    return [_frozen(layer.__dict__.get(switch, getattr(type(layer), switch, None))) for switch in SWITCHES]


def _frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _adapted_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, list[torch.Tensor]]]:
    """Yield `(parent, name in it, layer, the adapters' own weights)` of all layers with adapters."""
    for parent in model.modules():
        for name, module in parent._modules.items():
            if module is not None and hasattr(module, SWITCHES[0]):
                base = getattr(module, "base_layer", None)
                others = set() if base is None else {id(p) for p in base.parameters()}
                yield parent, name, module, [p for p in module.parameters() if id(p) not in others]


def has_adapters(model: nn.Module) -> bool:
    """Tell whether adapters are loaded, in use or not."""
    return getattr(model, "peft_config", None) is not None or getattr(model, "_hf_peft_config_loaded", False)


@looked_at_once
def adapters_in_use(model: PreTrainedModel) -> Hashable:
    """Return which adapters exist, in which layers, and which are switched on, merged or scaled, by how much."""
    if not getattr(model, "peft_config", None):
        return ()
    return tuple(model.peft_config), tuple((id(layer), *_switches(layer)) for _, _, layer, _ in _adapted_layers(model))


def few_numbers_of(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a few numbers of each layer, and a few of the adapters' own weights, on the CPU."""
    layers = _adapted_layers(model) if getattr(model, "peft_config", None) else ()
    few = [few_of(w, _FEW).to("cpu", torch.float64) for *_, weights in layers for w in weights if is_plain(w)]
    none = torch.zeros(0, dtype=torch.float64, device="cpu")
    return _sample_of(model).to("cpu", torch.float64), torch.cat([none, *few])


@looked_at_once
def _sample_of(model: PreTrainedModel) -> torch.Tensor:
    """Return a few numbers of each layer."""
    return sample(linears_of(model))


def numbers_of(model: PreTrainedModel) -> str:
    """Return a fingerprint of the same numbers that is equal from one process to the next."""
    return hashlib.sha256(torch.cat(few_numbers_of(model)).numpy().tobytes()).hexdigest()[:16]
