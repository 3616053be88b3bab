"""JIT-compiled kernels for the linear layers of a model's own passes, where a pass is over a few rows.

Passes that are not captured (with a hook, of some models with recurrent states) run by the model's own code, whose
linear layers call a GEMM that reads weights at half of memory's speed or less for so few rows. During such a pass
a kernel of native/ replaces `forward` of each linear layer of torch's own make, and of each layer of experts. It adds
up each row in one order, whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ...config import SkipConfig
from ...native.codegen.compiler import why_not
from ...native.ops.linear import NativeLinear, native_linear
from ...support.model_state import Part, state_of
from ...support.once import looking_once
from ...support.structure import modules_of
from ...support.tensors import place_of
from ..structure.expert_layers import (
    add_unchanged,
    are_routed,
    computes_all_experts,
    has_experts,
    native_experts,
    native_experts_of_all,
    unchanged_from,
)
from ..structure.linears import has_foreign, is_plain_linear
from ..structure.skip_mode import SkipMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MOST_ROWS", "FewRowsPart", "few_rows", "forward_of_all_experts", "forward_of_experts"]

MOST_ROWS = 64
_MOST_HALF = 32
"""Most rows of a pass, in float32 and in half precision; beyond these, arithmetic takes the time."""

_SMALL = 2**16
"""Elements below which a weight is left to torch: a call takes longer than its arithmetic."""


class FewRowsPart(Part):
    """Part of a model's state: its linear layers, and replacements of their `forward` in passes over few rows.

    Attributes:
        few_rows: the replacement of each layer, with the place of the weights that it reads.
        mode: the mode that puts them in place, and the replacements that it was made of.
    """

    def __init__(self) -> None:
        self.few_rows: dict[nn.Module, tuple[Any, Callable[..., Any]]] = {}
        self.mode: tuple[list[Any], SkipMode] | None = None

    def drop(self) -> None:
        self.few_rows, self.mode = {}, None

    drop_captures = drop


def few_rows(model: PreTrainedModel) -> SkipMode | None:
    """Return the mode that makes passes over at most `MOST_ROWS` rows fast; `None` where no layer has a kernel.

    Weights are read in place; for a layer whose weights have moved since, torch's code is run.

    Args:
        model: the target model.
    """
    with looking_once():
        forwards = _forwards(model)
    if not forwards:
        return None
    part = state_of(model).get(FewRowsPart)
    known, mode = part.mode or ([], None)
    # One that is in use would be nested in itself, where a hook of the model generates.
    if mode is None or known != forwards or mode.is_in_place():
        mode = SkipMode(model, SkipConfig(), forwards)
        part.mode = forwards, mode
    return mode


def _forwards(model: PreTrainedModel) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Return the linear layers that have kernels, with replacements of their `forward`, retained from call to call.

    A quantised model has none: its own layers stay torch's in any case, and some of them amplify any other rounding.
    """
    if why_not() is not None or torch.is_autocast_enabled("cpu"):
        return []
    modules = modules_of(model)
    if any(map(_is_compiled, modules)) or has_foreign(model):
        return []
    before = state_of(model).get(FewRowsPart).few_rows
    found: dict[nn.Module, tuple[Any, Callable[..., Any]]] = {}
    for module in modules:
        if (
            "forward" not in module.__dict__
            and (is_plain_linear(module) if isinstance(module, nn.Linear) else has_experts(module))
            and any(tensor is not None and tensor.numel() >= _SMALL for tensor in module._parameters.values())
        ):
            _, place = _held(module)
            known = before.get(module)
            forward: Callable[..., Any] | None
            if known is not None and known[0] == place:
                forward = known[1]
            else:
                forward = _forward(module, place) if isinstance(module, nn.Linear) else _few_experts(module)
            if forward is not None:
                found[module] = place, forward
    state_of(model).get(FewRowsPart).few_rows = found
    return [(module, forward) for module, (_, forward) in found.items()]


def _is_compiled(module: nn.Module) -> bool:
    """Tell whether torch has compiled a module: compilation would be repeated for the replacement of a layer."""
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _held(module: nn.Module) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return the weights of a layer, held by tensors of our own, and their place.

    As long as these are held, no other thread can free the memory that a kernel reads.
    """
    held = [tensor.detach() for tensor in module._parameters.values() if tensor is not None]
    return held, tuple(map(place_of, held))


def _forward(module: Any, place: tuple[Any, ...]) -> Callable[..., Any] | None:
    kernel = native_linear(module.weight.detach(), None if module.bias is None else module.bias.detach())
    if not isinstance(kernel, NativeLinear):
        return None
    kernel.held = kernel.held[-1:]  # not the weights, which are the module's: old ones must be freed
    columns, dtype = module.weight.shape[1], module.weight.dtype
    most = columns * (MOST_ROWS if dtype is torch.float32 else _MOST_HALF)

    def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002, the name that torch's own has
        is_few = input.dtype is dtype and 0 < input.numel() <= most
        if is_few and input.shape[-1] == columns:
            held, its_place = _held(module)
            if its_place == place:
                output = kernel(input)
                del held  # not before
                return output
        return functional.linear(input, module.weight, module.bias)

    return forward


def forward_of_experts(module: Any, fits: Callable[[torch.Tensor], bool]) -> Callable[..., Any] | None:
    """Return a replacement of the `forward` of a layer of experts; `None` where it has no kernels.

    Args:
        module: the layer, of either kind (`has_experts`).
        fits: tells by the chosen experts `(n, k)` whether kernels are to compute it; k is 1 where the layer's own code
            computes all experts.
    """
    if computes_all_experts(module):
        return forward_of_all_experts(module, fits)
    kernel = native_experts(module)
    if kernel is None:
        return None
    _, place = _held(module)
    kernel.let_go()
    dtype, first = kernel.activation, unchanged_from(module)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs and are_routed(args):
            hidden, chosen, weights = args
            if hidden.dtype is dtype and weights.dtype in (dtype, torch.float32) and fits(chosen):
                held, its_place = _held(module)
                if its_place == place:
                    output = kernel(hidden, chosen, weights)
                    del held  # not before
                    return output if first is None else add_unchanged(first, output, hidden, chosen, weights)
        return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


def forward_of_all_experts(module: Any, fits: Callable[[torch.Tensor], bool]) -> Callable[..., Any] | None:
    """Return a replacement of the `forward` of a layer that computes all experts for every token; `None`: no kernels.

    An expert makes zeros of zeros, which is what such a layer gives it for a token that has not chosen it. So the
    kernels compute the other rows alone.

    Args:
        module: the layer (`computes_all_experts`).
        fits: as in `forward_of_experts`, with one chosen expert for each row that is computed.
    """
    kernel = native_experts_of_all(module)
    if kernel is None:
        return None
    _, place = _held(module)
    kernel.let_go()
    dtype, experts = kernel.activation, module.num_experts

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.ndim == 2 and hidden_states.dtype is dtype and len(hidden_states) % experts == 0:
            rows = hidden_states.any(dim=1).nonzero()[:, 0]
            chosen = (rows // max(1, len(hidden_states) // experts))[:, None]
            if fits(chosen):
                held, its_place = _held(module)
                if its_place == place:
                    output = torch.zeros_like(hidden_states)
                    ones = torch.ones(chosen.shape, dtype=dtype, device=chosen.device)
                    output[rows] = kernel(hidden_states[rows], chosen, ones)
                    del held  # not before
                    return output
        return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]

    return forward


def _few_experts(module: Any) -> Callable[..., Any] | None:
    most = MOST_ROWS if next(module.parameters()).dtype is torch.float32 else _MOST_HALF
    return forward_of_experts(module, lambda chosen: len(chosen) <= most)
