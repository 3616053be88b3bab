"""Low-bit copy of a layer of experts: of both matrices of each, which the draft's own router chooses among."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...native.codegen.compiler import why_not
from ...native.ops.experts import ExpertWeights, NativeExperts
from ...native.ops.kernels import NAMES
from ...native.ops.linear import can_pack_int8
from ...native.ops.quantise import quantise_int4, quantise_int8
from ..structure.expert_layers import add_unchanged, are_routed, form_of, gate_of, unchanged_from, weights_of_experts

__all__ = ["ExpertsCopy", "matrices_of_experts", "why_not_experts"]

_Layers = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class ExpertsCopy:
    """A layer of experts whose matrices are in low bits; the gate between them is the layer's own.

    Args:
        layers: weight and bias of both products, as `matrices_of_experts` returns them.
        module: the layer.
        precision: `"int8"` or `"int4"`.
        group_size: input channels that share a scale under int4.

    Attributes:
        precision, group_size: as given.
        num_weights: number of weights in it.
        native: the kernels that compute it, in bfloat16.
    """

    def __init__(self, layers: _Layers, module: nn.Module, precision: str, group_size: int = 32) -> None:
        self.precision, self.group_size = precision, group_size
        self.num_weights = sum(weight.numel() for weight, _ in layers)
        with torch.inference_mode():
            self._hold([self._quantised(*layer) for layer in layers], module)

    def _hold(self, products: list[ExpertWeights], module: nn.Module) -> None:
        up, down = self._products = products
        self.native = NativeExperts(up, down, gate_of(module), activation=torch.bfloat16)

    def _quantised(self, weight: torch.Tensor, bias: torch.Tensor | None) -> ExpertWeights:
        """Quantise a weight `(E, N, K)` and its bias `(E, N)`."""
        experts, rows, columns = weight.shape
        each = list(weight.detach())
        if self.precision == "int4":
            numbers, scales = quantise_int4(each, self.group_size)
        else:
            numbers, scales = quantise_int8(each, can_pack_int8(rows, columns))
        bias = None if bias is None else bias.detach().bfloat16().contiguous()
        group = self.group_size if self.precision == "int4" else 0
        return ExpertWeights(numbers.view(experts, rows, -1), bias, scales.view(experts, -1), group)

    def rewrite(self, layers: _Layers) -> None:
        """Quantise the same layer again, into the same memory: what was captured with the copy stays valid.

        Args:
            layers: as in the constructor, with weights of other values.
        """
        with torch.inference_mode():
            for held, layer in zip(self._products, layers, strict=True):
                for own, new in zip(held.tensors(), self._quantised(*layer).tensors(), strict=True):
                    own.copy_(new)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors from which `of_tensors` makes the same copy again."""
        return {f"{at}.{key}": tensor for at, one in enumerate(self._products) for key, tensor in _named(one).items()}

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], module: nn.Module, precision: str, group_size: int
    ) -> ExpertsCopy:
        """Make a copy from its tensors, without quantising.

        Args:
            tensors: result of `tensors`, on a processor that packs weights in the same way (`packing`).
            module: the layer, of whose weights only the shapes are used.
            precision: as in the constructor.
            group_size: as in the constructor.

        Raises:
            KeyError, ValueError: these are not the tensors of such a copy.
        """
        made = cls.__new__(cls)
        made.precision, made.group_size, made.num_weights = precision, group_size, 0
        products = []
        for at, (weight, bias) in enumerate(matrices_of_experts(module)):
            experts, rows, columns = weight.shape
            group = group_size if precision == "int4" else 0
            shapes = {
                "weight": (experts, rows, columns // 2 if group else columns),
                "scales": (experts, rows * columns // (group or columns)),
                "bias": (experts, rows),
            }
            if bias is None:
                del shapes["bias"]
            found = {key: tensors[f"{at}.{key}"] for key in shapes}
            if any(tensor.shape != shapes[key] for key, tensor in found.items()):
                raise ValueError("these are not the tensors of a copy of such experts")
            made.num_weights += weight.numel()
            products.append(ExpertWeights(found["weight"], found.get("bias"), found["scales"], group))
        made._hold(products, module)
        return made

    def num_bytes(self) -> int:
        """Return the memory of the copy in bytes."""
        return sum(tensor.nbytes for one in self._products for tensor in one.tensors())

    def forward_of(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """Return a replacement of the layer's `forward` that computes from the copy, if it is called as usual."""
        first = unchanged_from(module)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs or not are_routed(args):
                return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]
            hidden, chosen, weights = args
            output = self.native(hidden.bfloat16(), chosen, weights).to(hidden.dtype)
            return output if first is None else add_unchanged(first, output, hidden, chosen, weights)

        return forward


def _named(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    named = {"weight": weights.weight, "bias": weights.bias, "scales": weights.scales}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def why_not_experts(module: nn.Module) -> str | None:
    """Return why no low-bit copy can be made of a layer of experts; `None` where one can, if its shapes allow it.

    Args:
        module: the layer (`is_experts`).
    """
    if why_not() is not None:
        return f"experts in low bits need JIT-compiled kernels: {why_not()}"
    found = weights_of_experts(module)
    if found is None:
        return "its experts are computed in a form that has no kernels"
    kinds = {tensor.dtype for one in found for tensor in one.tensors()} - NAMES.keys()
    if kinds:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"copies are made of float32, bfloat16 and float16 weights, but these are {names}"
    if any(tensor.device.type not in ("cpu", "meta") for one in found for tensor in one.tensors()):
        return "experts in low bits run on the CPU only"
    return None


def matrices_of_experts(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return weight `(E, N, K)` and bias `(E, N)` of both products of a layer, as views where it stores them by input.

    Args:
        module: the layer (`is_experts`), of which copies can be made.
    """
    found: Any = weights_of_experts(module)
    is_transposed = form_of(module).is_transposed
    return [(one.weight.transpose(1, 2) if is_transposed else one.weight, one.bias) for one in found]
