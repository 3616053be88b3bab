"""Layers of experts in captured passes: which expert a token takes is data, so a layer is one node of the graph.

Where transformers computes experts through its interface for them, all of them have one form: matrices of all experts
in one tensor, and a gate between the two products. Experts that a model computes itself are captured operation by
operation, or not at all; some have the same form, and code that goes through the experts that were chosen. Llama 4's
computes all of them for every token, from zeros where a token has not chosen an expert.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations import moe

from ...native.codegen.compiler import why_not
from ...native.ops.experts import ExpertWeights, NativeExperts
from ...native.ops.kernels import NAMES
from ...support.once import looked_at_once
from ...support.structure import follows_from_structure, is_of_transformers, modules_of

__all__ = [
    "add_unchanged",
    "are_routed",
    "computes_all_experts",
    "experts_of",
    "form_of",
    "gate_of",
    "has_experts",
    "is_experts",
    "names_of_experts",
    "native_experts",
    "native_experts_of_all",
    "run_experts",
    "runs_through_interface",
    "shape_of_gate",
    "unchanged_from",
    "weights_of_experts",
]

_DEFAULT_GATE: Any = moe._default_apply_gate
"""silu(gate) · up of the two halves, where the activation is SiLU."""

_FORM = ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")
"""Attributes of a layer of experts that runs through the interface."""


_WITH_LOOPS = ("LongcatFlashExperts", "Step3p7Experts")
"""Classes of transformers that have the interface's form, and call each of the chosen experts in a loop."""


class ExpertForm(NamedTuple):
    """Form in which a layer's experts are stored.

    Attributes:
        has_gate: whether the first product has two halves, of which one is a gate.
        has_bias: whether both products have a bias.
        is_transposed: whether matrices are stored by input.
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool


@looked_at_once
def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of experts of a whole model that have the form of transformers' interface for them."""
    return [module for reference in _experts_of(model) if (module := reference()) is not None]


@follows_from_structure
def _experts_of(model: nn.Module) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(module) for module in modules_of(model) if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    """Tell whether a module is a layer of experts that has the form of transformers' interface for them."""
    has_loop = is_of_transformers(module, *_WITH_LOOPS) and getattr(module, "down_proj", None) is not None
    return has_loop or runs_through_interface(module)


def runs_through_interface(module: nn.Module) -> bool:
    """Tell whether a module is a layer of experts that runs through transformers' interface for them."""
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, name) for name in _FORM)


def computes_all_experts(module: nn.Module) -> bool:
    """Tell whether a module is a layer of experts that computes all of them for every token (Llama 4)."""
    return is_of_transformers(module, "Llama4TextExperts")


def has_experts(module: nn.Module) -> bool:
    """Tell whether a module is a layer of experts of either kind, of which kernels can compute the chosen ones."""
    return is_experts(module) or computes_all_experts(module)


def form_of(module: nn.Module) -> ExpertForm:
    """Return how the experts of a layer (`is_experts`) are stored."""
    if not runs_through_interface(module):
        return ExpertForm(has_gate=True, has_bias=False, is_transposed=False)
    layer: Any = module
    return ExpertForm(bool(layer.has_gate), bool(layer.has_bias), bool(layer.is_transposed))


def unchanged_from(module: nn.Module) -> int | None:
    """Return the number from which on an expert returns its input (LongCat's zero-computation experts), or `None`."""
    layer: Any = module
    return int(layer.num_routed_experts) if getattr(layer, "zero_expert_num", 0) else None


def add_unchanged(
    first: int, outputs: torch.Tensor, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Add to the outputs of a layer those of experts that return their input.

    Args:
        first: number of the first of these.
        outputs, hidden: `(n, H)`.
        chosen, weights: `(n, k)`, as in `run_experts`.
    """
    share = (weights * (chosen >= first)).sum(dim=1, keepdim=True)
    return outputs + (hidden * share).to(outputs.dtype)


def are_routed(arguments: Sequence[Any]) -> bool:
    """Tell whether these are hidden states `(n, H)`, chosen experts `(n, k)` and their weights."""
    if len(arguments) != 3 or not all(isinstance(one, torch.Tensor) and one.ndim == 2 for one in arguments):
        return False
    hidden, chosen, weights = (one.shape for one in arguments)
    return bool(chosen == weights and chosen[0] == hidden[0])


def run_experts(module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute a layer of experts by the model's own code.

    Args:
        module: the layer.
        hidden: `(n, H)`.
        chosen: `(n, k)` integers, the experts of each token.
        weights: `(n, k)`.
    """
    return type(module).forward(module, hidden, chosen, weights)  # type: ignore[no-any-return]


def native_experts(module: nn.Module, activation: torch.dtype | None = None) -> NativeExperts | None:
    """Build a layer of experts with JIT-compiled kernels; `None` where there are none for it.

    Args:
        module: the layer (`is_experts`); experts that return their input are left out.
        activation: type of its inputs and outputs, where it is not that of the weights.
    """
    found = None if why_not() is not None else weights_of_experts(module)
    if found is None or not all(one.have_kernels() for one in found) or (activation or torch.float32) not in NAMES:
        return None
    up, down = found
    form = form_of(module)
    is_mixed = activation not in (None, up.weight.dtype)
    if is_mixed and form.has_bias and not form.is_transposed:
        return None  # that kernel reads biases as activations
    return NativeExperts(up, down, gate_of(module), by_input=form.is_transposed, activation=activation)


def weights_of_experts(module: nn.Module) -> tuple[ExpertWeights, ExpertWeights] | None:
    """Return the matrices of a layer's two products, as they are stored; `None` where it has others.

    Args:
        module: the layer (`is_experts`).
    """
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return None
    matrices = []
    for weight, bias in names_of_experts(module):
        # Not by attribute, which may compute what an adapter or a quantiser stores.
        held = module._parameters.get(weight)
        its_bias = None if bias is None else module._parameters.get(bias)
        if held is None or held.ndim != 3 or (its_bias is None) != (bias is None):
            return None
        first = unchanged_from(module)
        matrices.append(ExpertWeights(held if first is None else held[:first], its_bias))
    up, down = matrices
    form = form_of(module)
    inner, outer = (1, 2) if form.is_transposed else (2, 1)
    middle = down.weight.shape[inner]
    if up.weight.shape[0] != down.weight.shape[0] or up.weight.shape[outer] != middle * (1 + form.has_gate):
        return None
    return up, down


def names_of_experts(module: nn.Module) -> list[tuple[str, str | None]]:
    """Return the names of the weight and of the bias, if there is one, of a layer's two products.

    Args:
        module: the layer (`is_experts`).
    """
    form = form_of(module)
    weights = "gate_up_proj" if form.has_gate else "up_proj", "down_proj"
    return [(weight, f"{weight}_bias" if form.has_bias else None) for weight in weights]


def native_experts_of_all(module: Any) -> NativeExperts | None:
    """Build the experts of a layer that computes all of them, for the chosen ones; `None` where there are no kernels.

    Args:
        module: the layer (`computes_all_experts`).
    """
    up, down = ExpertWeights(module.gate_up_proj), ExpertWeights(module.down_proj)
    if why_not() is not None or not (up.have_kernels() and down.have_kernels() and _is_silu(module.act_fn)):
        return None
    return NativeExperts(up, down, by_input=True)


def shape_of_gate(module: nn.Module, pairs: int) -> tuple[int, int] | None:
    """Return the shape of what torch computes between the two products; `None` where a kernel computes it.

    Args:
        module: the layer.
        pairs: S, the number of tokens times that of the experts that each of them takes.
    """
    layer: Any = module
    if gate_of(layer) is None:
        return None
    return pairs, int(layer.down_proj.shape[1 if form_of(module).is_transposed else 2])


def gate_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what lies between the two products of a layer; `None` for a gate that has a kernel."""
    layer: Any = module
    if not form_of(layer).has_gate:
        return layer.act_fn  # type: ignore[no-any-return]
    own = getattr(layer, "_apply_gate", partial(_DEFAULT_GATE, layer))
    is_default = getattr(type(layer), "_apply_gate", _DEFAULT_GATE) is _DEFAULT_GATE and "_apply_gate" not in vars(
        layer
    )
    return None if is_default and _is_silu(layer.act_fn) else own


def _is_silu(function: Any) -> bool:
    return type(function).__name__ in ("SiLU", "SiLUActivation")
