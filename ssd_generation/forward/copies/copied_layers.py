"""Linear layers and experts of a model that low-bit copies are made of, and why others are left as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...support.devices import is_asynchronous
from ...support.model_state import Part, state_of
from ...support.parallel import mesh_of
from ...support.structure import follows_from_structure
from ..structure.expert_layers import experts_of, is_experts
from ..structure.linears import CannotRead, dense, features, identity, is_plain_linear, linears, linears_of
from ..structure.sublayers import layout_of
from .experts_copy import ExpertsCopy, matrices_of_experts, why_not_experts
from .layer_copy import LowBitCopy, is_native, refused_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...config import PrecisionConfig, SkipConfig

__all__ = [
    "AnyCopy",
    "Place",
    "check_precision",
    "copied_modules",
    "copy_of",
    "estimated_bytes",
    "key_of",
    "keyed",
    "places_of",
    "values_of",
]

AnyCopy = LowBitCopy | ExpertsCopy
"""Copy that a draft computes with in place of a layer's own weights."""


class UnreadPart(Part):
    """Part of a model's state: whether the weights of its linear layers can be obtained.

    Attributes:
        unread: reasons why those of a class of layers cannot; `None` where they can.
    """

    def __init__(self) -> None:
        self.unread: dict[tuple[type, type], str | None] = {}

    def drop_copies(self) -> None:
        self.unread = {}

    drop = drop_copies


@dataclass(frozen=True)
class Place:
    """A linear layer in a sub-layer (or the head), or its experts, and the requested precision."""

    name: str
    module: nn.Module
    precision: str

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input channels, `(N, K)`."""
        columns, rows = features(self.module) or (0, 0)
        return rows, columns

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """Numbers of matrices of a shape `(N, K)`, N and K: one, or those of both products of experts."""
        if is_experts(self.module):
            return [tuple(weight.shape) for weight, _ in matrices_of_experts(self.module)]  # type: ignore[misc]
        return [(1, *self.shape)]


def places_of(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> tuple[list[Place], list[str]]:
    """Find the linear layers and experts to be copied, and other weights that are requested but cannot be copied."""
    layout = layout_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    places: list[Place] = []
    left: list[str] = []
    head = model.get_output_embeddings()

    def place(module: nn.Module, name: str, wanted: str) -> None:
        reason = _why_not_read(model, module)
        if reason is None:
            places.append(Place(names.get(id(module), name), module, wanted))
        else:
            left.append(f"{names.get(id(module), name)} ({reason})")

    within: set[int] = set()
    for layer in layout.layers:
        for sub, skipped in ((layer.attention, skip.attention), (layer.mlp, skip.mlp)):
            if sub is None:
                continue
            within |= {id(module) for top in sub.modules for module in linears(top)}
            if sub.layer in skipped:
                continue
            wanted = precision.of(sub.kind, sub.layer)
            if wanted is None:
                continue
            inside = [module for top in sub.modules for module in linears(top)]
            experts = [module for top in sub.modules for module in top.modules() if is_experts(module)]
            for module in (*inside, *experts):
                place(module, sub.name, wanted)
            held = sum(math.prod(features(module) or (0,)) for module in inside)
            held += sum(parameter.numel() for module in experts for parameter in module.parameters())
            if held < 0.5 * sum(p.numel() for top in sub.modules for p in top.parameters()):
                left.append(
                    f"{names.get(id(sub.modules[-1]), sub.name)} (its weights are in no linear layers or experts)"
                )
    if precision.default is not None:
        # Layers of the text's decoder that are in no known sub-layer.
        for module in linears(model.get_decoder()):
            if module is not head and id(module) not in within:
                place(module, "linear", precision.default)
    if precision.head is not None and head is not None:
        (head,) = linears(head) if features(head) else (head,)
        if features(head):
            place(head, "head", precision.head)
        else:
            left.append(f"{names.get(id(head), 'head')} (not a linear layer)")
    return places, left


def check_precision(model: PreTrainedModel, precision: PrecisionConfig | None = None) -> None:
    """Check that low-bit copies can be made of this model, here.

    Args:
        model: the target model.
        precision: precision of the copies; `None`: any that may be requested.

    Raises:
        ValueError: the weights are quantised already, or the device has no kernel for it.
    """
    if mesh_of(model) is not None:
        raise ValueError(
            f"The weights of {type(model).__name__} are sharded over processes (tensor parallel), which low-bit copies "
            "do not support. Leave `precision` out there: skipping sub-layers and prompt lookup work."
        )
    devices = _device_types(model)
    if "meta" in devices:
        raise ValueError(
            f"Weights of {type(model).__name__} are offloaded: they are brought into memory for each pass. `generate` "
            "drafts from low-bit copies of them; to search or profile, load the model without offloading."
        )
    only_int4 = precision is not None and {"int8"}.isdisjoint(
        (precision.default, precision.head, *precision.attention.values(), *precision.mlp.values())
    )
    on_gpu = len(devices) == 1 and is_asynchronous(next(model.parameters()).device)
    if devices != {"cpu"} and not (on_gpu and only_int4):
        where = "on the CPU only"
        if on_gpu:
            where = 'on a GPU in int4 only, where a config asks for it (PrecisionConfig(default="int4", head="int4"))'
        raise ValueError(
            f"Low-bit drafts run {where}, but {type(model).__name__} is on {', '.join(sorted(devices))}. "
            "Leave `precision` out there: skipping sub-layers and prompt lookup run on every device."
        )
    reasons = _why_none_is_read(model)
    if reasons:
        raise ValueError(
            f"Low-bit copies cannot be made of the weights of {type(model).__name__}: {'; '.join(reasons)}. Draft by "
            "skipping sub-layers or prompt lookup, without `precision`."
        )


@follows_from_structure
def _device_types(model: PreTrainedModel) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


@follows_from_structure
def _why_none_is_read(model: PreTrainedModel) -> list[str]:
    """Return why the weights of none of a model's linear layers can be obtained; empty where those of some can."""
    found = [_why_not_read(model, module) for module in linears_of(model)]
    if any(reason is None for reason in found):
        return []
    return sorted({reason for reason in found if reason is not None}) or [_what_holds_weights(model)]


def _what_holds_weights(model: nn.Module) -> str:
    """Name what holds the weights of a model without a layer that is known for a linear one."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.ndim > 1 and not isinstance(module, nn.Embedding)
    }
    return (
        f"they are in {', '.join(sorted(kinds)) or 'none'}, not known to be linear layers (in_features, out_features)"
    )


def _why_not_read(model: PreTrainedModel, module: nn.Module) -> str | None:
    """Return why the weights that a layer computes with cannot be obtained; `None` where they can.

    Of a quantiser's classes, one layer of each is tested.
    """
    if is_experts(module):
        return why_not_experts(module)
    # `ssd inspect` inspects a model whose tensors have no values.
    if is_plain_linear(module) or (isinstance(module, nn.Linear) and isinstance(module.weight, FakeTensor)):
        dtype: Any = module.weight.dtype
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return None
        name = str(dtype).removeprefix("torch.")
        return f"copies are made of float32, bfloat16 and float16 weights, but these are {name}"
    known = state_of(model).get(UnreadPart).unread
    kind = (type(module), type(getattr(module, "weight", None)))
    if kind not in known:
        try:
            dense(module, model.dtype)
            known[kind] = None
        except CannotRead as error:
            known[kind] = str(error)
    return known[kind]


def copied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a whole model that copies may be made of: linear ones, and experts."""
    return [*linears_of(model), *experts_of(model)]


def copy_of(model: PreTrainedModel, group: Sequence[Place], group_size: int) -> AnyCopy:
    """Return the copy of layers that share one.

    Raises:
        CannotRead: their weights cannot be obtained.
    """
    values, first = values_of([place.module for place in group], model.dtype), group[0]
    if is_experts(first.module):
        return ExpertsCopy(values, first.module, first.precision, group_size)
    return LowBitCopy(values, first.precision, group_size)


def values_of(modules: Sequence[nn.Module], dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the weights and biases that a copy of layers is made of.

    Args:
        modules: linear layers, or a single layer of experts.
        dtype: type of the activations that they take.

    Raises:
        CannotRead: they cannot be obtained.
    """
    if is_experts(modules[0]):
        reason = why_not_experts(modules[0])
        if reason is not None:
            raise CannotRead(reason)
        return matrices_of_experts(modules[0])
    return [dense(module, dtype) for module in modules]


def key_of(modules: Sequence[nn.Module], precision: str, group_size: int) -> Any:
    """Return the key of a copy: the weights of its layers, and how they are quantised."""
    return tuple(map(identity, modules)), precision, group_size


# Layers that read the same input, by the names that transformers gives them. Only speed depends on it.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def _groups(places: list[Place], group_size: int) -> list[list[Place]]:
    """Group places that share an input, their precision and a shape that fits."""
    groups: list[list[Place]] = []
    for place in places:
        parent, _, leaf = place.name.rpartition(".")
        last = groups[-1] if groups else None
        if last is not None:
            other, _, first = last[-1].name.rpartition(".")
            row = next((row for row in _TOGETHER if leaf in row and first in row), None)
            if (
                row is not None
                and other == parent
                and row.index(first) + 1 == row.index(leaf)
                and last[-1].precision == place.precision
                and last[-1].shape[1] == place.shape[1]
                and all(refused_shape(*p.shape, p.precision, group_size) is None for p in (last[-1], place))
            ):
                last.append(place)
                continue
        groups.append([place])
    return groups


def keyed(places: list[Place], group_size: int, on_cpu: bool) -> Iterator[tuple[list[Place], Any, int, str | None]]:
    """Yield each group of `_groups`, the key of its copy, its number of weights, and why it has none, or `None`."""
    for group in _groups(places, group_size):
        key = key_of([place.module for place in group], group[0].precision, group_size)
        shapes, precision = _matrices(group), group[0].precision
        refused = (refused_shape(rows, columns, precision, group_size, on_cpu) for _, rows, columns in shapes)
        reason = next((reason for reason in refused if reason is not None), None)
        yield group, key, sum(map(math.prod, shapes)), reason


def _matrices(group: Sequence[Place]) -> list[tuple[int, int, int]]:
    """Return the `matrices` that one copy of these layers has: linear layers lie one after the other."""
    if len(group) == 1:
        return group[0].matrices
    return [(1, sum(place.shape[0] for place in group), group[0].shape[1])]


def estimated_bytes(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> int:
    """Estimate the bytes of the copies before they are made."""
    total = 0
    for group, _, _, reason in keyed(places_of(model, skip, precision)[0], precision.group_size, True):
        if reason is not None:
            continue
        has_bias = any(getattr(place.module, "bias", None) is not None for place in group)
        if is_experts(group[0].module):
            has_bias = any(bias is not None for _, bias in matrices_of_experts(group[0].module))
        for count, rows, columns in _matrices(group):
            if group[0].precision == "int8":
                each = rows * columns + (4 if is_native(rows, "int8") else 2) * rows
            else:
                each = rows * columns // 2 + 4 * rows * (columns // precision.group_size)
            total += count * (each + 2 * rows * has_bias)
    return total
