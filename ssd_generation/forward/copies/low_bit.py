"""Low-bit copies of a model's own linear layers, for drafting.

A copy holds the same weights in 8 or 4 bits and is read in place of the layer's own weights: a decoding step is bound
by the bytes it reads. The target never computes with a copy, so the text is the target's.

int8: one scale per output channel, symmetric, w ≈ q · s. int4: one scale and offset per group of input channels,
asymmetric, w ≈ q · s + z (as in QuantSpec's weights, arXiv 2502.10424, and every int4 weight-only kernel). They are
read by JIT-compiled kernels, or by ATen's where there are none; both take bfloat16 activations.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...native.codegen.compiler import why_not
from ...native.ops import linear as native
from ...native.ops.quantise import quantise_int4, quantise_int8
from ...support.devices import is_asynchronous
from ...support.model_state import Part, state_of
from ...support.parallel import mesh_of
from ...support.recent import recent
from ...support.structure import follows_from_structure
from ...support.tensors import place_of
from ..structure.linears import (
    CannotRead,
    dense,
    features,
    identity,
    is_plain_linear,
    linears,
    linears_of,
    sample,
    tensors_of,
)
from ..structure.sublayers import layout_of
from .gpu_int4 import linear_int4, pack_int4, why_not_int4

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...config import PrecisionConfig, SkipConfig

__all__ = [
    "MOST_DRIFT",
    "CopiesPart",
    "LowBitCopies",
    "LowBitCopy",
    "check_precision",
    "copies_of",
    "copy_bytes",
    "drop_copies",
    "estimated_bytes",
    "keep_only",
    "missing_copies",
    "packing",
    "rewrite_copies",
]

_MOST_DRAFTS = 8
"""Drafts with different skip sets or precisions that are retained; copies that they share are made once."""

MOST_DRIFT = 0.1
"""Share of their size by which weights may move while their copies still draft: beyond it, the copies are stale."""

_ROWS = 1 << 18
"""Weights quantised at a time: a megabyte, so that the intermediate steps stay in a core's cache."""


class LowBitCopy:
    """One or more linear layers with the same input, computed by one low-bit kernel.

    Args:
        layers: `(weight (N_i, K), bias (N_i,) or None)` of each.
        precision: `"int8"` or `"int4"`.
        group_size: input channels that share a scale under int4; divides K.

    Raises:
        ValueError: the kernel does not take a weight of this shape.
    """

    def __init__(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]], precision: str, group_size: int = 32
    ) -> None:
        self.precision = precision
        self.group_size = group_size
        self.sizes = tuple(int(weight.shape[0]) for weight, _ in layers)
        first = layers[0][0]
        reason = refused_shape(sum(self.sizes), int(first.shape[1]), precision, group_size, first.device.type == "cpu")
        if reason is not None:
            raise ValueError(reason)
        with torch.inference_mode():
            self._hold(*self._quantised(layers), is_native=_reads_here(first, precision))

    def _quantised(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Quantise and pack the weights of layers; return numbers, scales, and the concatenated biases."""
        bias: torch.Tensor | None = None
        weights = [weight for weight, _ in layers]
        is_native = _reads_here(weights[0], self.precision)
        if is_native and self.precision == "int8":
            weight, scales = quantise_int8(weights, all(native.can_pack_int8(*weight.shape) for weight in weights))
        elif is_native:
            weight, scales = quantise_int4(weights, self.group_size)
        elif self.precision == "int8":
            weight, scales = _to_int8(weights)
        else:
            quantised, scales = _to_int4(weights, self.group_size)
            on_cpu = quantised.device.type == "cpu"
            pack = partial(torch._convert_weight_to_int4pack_for_cpu, innerKTiles=1) if on_cpu else pack_int4
            weight = pack(quantised)
        if any(bias is not None for _, bias in layers):
            bias = torch.cat(
                [
                    weight.new_zeros(weight.shape[0], dtype=torch.bfloat16) if bias is None else bias.bfloat16()
                    for weight, bias in layers
                ]
            )
        return weight, scales, bias

    def rewrite(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Quantise the same layers again, into the same memory: what was captured with the copy stays valid.

        Args:
            layers: as in the constructor, with weights of other values.
        """
        with torch.inference_mode():
            for held, new in zip((self.weight, self.scales, self.bias), self._quantised(layers), strict=True):
                if held is not None and new is not None:
                    held.copy_(new)

    def _hold(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, is_native: bool) -> None:
        self.weight, self.scales, self.bias = weight, scales, bias
        self.native: native.NativeLinear | None = None
        if is_native:
            group = 0 if self.precision == "int8" else self.group_size
            self.native = native.NativeLinear(weight, bias, torch.bfloat16, scales, group)
        self._last: tuple[Any, Any] = (None, None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors from which `of_tensors` makes the same copy again."""
        held = {"weight": self.weight, "scales": self.scales, "bias": self.bias}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], weights: Sequence[torch.Tensor], precision: str, group_size: int
    ) -> LowBitCopy:
        """Make a copy from its tensors, without quantising.

        Args:
            tensors: result of `tensors`, on a processor that packs weights in the same way (`packing`).
            weights: weights of the layers, of which only shape and device are used.
            precision: as in the constructor.
            group_size: as in the constructor.

        Raises:
            KeyError, ValueError: these are not the tensors of such a copy.
        """
        made = cls.__new__(cls)
        made.precision, made.group_size = precision, group_size
        made.sizes = tuple(int(weight.shape[0]) for weight in weights)
        rows, columns = sum(made.sizes), int(weights[0].shape[1])
        is_native = _reads_here(weights[0], precision)
        numbers = rows * columns if precision == "int8" else rows * columns // 2
        scales = rows if precision == "int8" else rows * (columns // group_size) * (1 if is_native else 2)
        weight, bias = tensors["weight"], tensors.get("bias")
        if weight.nbytes != numbers or tensors["scales"].numel() != scales or (bias is not None and len(bias) != rows):
            raise ValueError("these are not the tensors of a copy of such layers")
        made._hold(weight, tensors["scales"], bias, is_native)
        return made

    def num_bytes(self) -> int:
        """Return the memory of the copy in bytes."""
        tensors = (self.weight, self.scales, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return all layers' outputs, concatenated: `(…, K)` to `(…, N_1 + N_2 + …)` in bfloat16."""
        if self.native is not None:
            return self.native(x)
        if x.dtype is not torch.bfloat16:
            x = x.to(torch.bfloat16)
        shape = x.shape
        if len(shape) != 2:
            x = x.reshape(-1, shape[-1])
        if self.precision == "int8":
            y = torch._weight_int8pack_mm(x, self.weight, self.scales)
        elif x.device.type == "cpu":
            y = torch._weight_int4pack_mm_for_cpu(x, self.weight, self.group_size, self.scales)
        else:
            y = linear_int4(x, self.weight, self.group_size, self.scales)
        if self.bias is not None:
            y = y + self.bias
        return y if len(shape) == 2 else y.view(*shape[:-1], -1)

    def apart(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the layers' outputs, `(…, N_i)` each, as views of one tensor."""
        return torch.split_with_sizes(self.whole(x), self.sizes, -1)

    def one(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the output of one of the layers, which are called one after the other with the same input."""
        known, outputs = self._last
        if known is not x:
            outputs = self.apart(x)
        self._last = (None, None) if index == len(self.sizes) - 1 else (x, outputs)
        return outputs[index]  # type: ignore[no-any-return]


def packing(weight: torch.Tensor, precision: str) -> str:
    """Name the layout of a copy's numbers in memory, by the code that reads them; ATen's depends on the processor."""
    if _reads_here(weight, precision):
        return "native, by integers" if precision == "int8" and native.can_pack_int8(*weight.shape) else "native"
    return f"aten {torch.backends.cpu.get_cpu_capability()} {torch.__version__.partition('+')[0]}"


def _chunks(weights: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield some rows at a time of concatenated weights: their slice, and their values in float32."""
    step = max(16, _ROWS // weights[0].shape[1] // 16 * 16)
    place = 0
    for weight in weights:
        for rows in torch.split(weight.detach(), step):
            yield slice(place, place + rows.shape[0]), rows.float()
            place += rows.shape[0]


def _to_int8(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise concatenated weights `(N_i, K)` for ATen's kernel: `(N, K)` int8, and scales `(N,)`."""
    rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
    quantised = weights[0].new_empty((rows, columns), dtype=torch.int8)
    scales = weights[0].new_empty(rows, dtype=torch.bfloat16)
    for at, w in _chunks(weights):
        # Rounded to bfloat16 before it is used, so that the kernel multiplies by the number that was divided by.
        scale = (w.abs().amax(dim=1) / 127).clamp(min=1e-12).to(torch.bfloat16)
        quantised[at] = (w / scale.float()[:, None]).round_().clamp_(-127, 127)
        scales[at] = scale
    return quantised, scales


def _is_native(rows: int, precision: str) -> bool:
    """Tell whether JIT-compiled kernels read copies of weights with `rows` rows, on the CPU."""
    return why_not() is None and (precision == "int8" or rows % 16 == 0)


def _reads_here(weight: torch.Tensor, precision: str) -> bool:
    """Tell whether JIT-compiled kernels read copies of such a weight."""
    return weight.device.type == "cpu" and _is_native(int(weight.shape[0]), precision)


def _to_int4(weights: Sequence[torch.Tensor], group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise concatenated weights `(N_i, K)`: `(N, K)` int32 in 0 … 15; `(K / group_size, N, 2)` scales and offsets.

    The form is that of ATen's kernel, for which w is (q − 8) · s + z.
    """
    rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
    quantised = weights[0].new_empty((rows, columns), dtype=torch.int32)
    # The order of the kernel: by group, then by output channel.
    scales = weights[0].new_empty((columns // group_size, rows, 2), dtype=torch.bfloat16)
    for at, whole in _chunks(weights):
        w = whole.reshape(whole.shape[0], -1, group_size)
        least, greatest = w.amin(dim=2, keepdim=True), w.amax(dim=2, keepdim=True)
        scale = ((greatest - least) / 15).clamp(min=1e-9).to(torch.bfloat16).float()
        offset = (least + 8 * scale).to(torch.bfloat16).float()
        quantised[at] = (w - offset).div_(scale).round_().add_(8).clamp_(0, 15).view(whole.shape)
        scales[:, at] = torch.cat((scale, offset), dim=2).transpose(0, 1)
    return quantised, scales


def refused_shape(rows: int, columns: int, precision: str, group_size: int, on_cpu: bool = True) -> str | None:
    """Return why the kernel does not take a weight of shape `(rows, columns)`; `None` if it does."""
    if precision == "int8" and columns % 16:
        # ATen's kernel does not check: it reads beyond the rows, and gives wrong numbers or kills the process.
        return f"its {columns} input channels are not a multiple of 16"
    if precision == "int4":
        if columns % group_size:
            return f"its {columns} input channels are not a multiple of the group size {group_size}"
        if not on_cpu:
            return why_not_int4(rows, columns)
        if rows % 16:
            return f"its {rows} output channels are not a multiple of 16"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# which layers of a model


@dataclass(frozen=True)
class _Place:
    """A linear layer in a sub-layer (or the head) and the requested precision."""

    name: str
    module: nn.Module
    precision: str

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input channels, `(N, K)`."""
        columns, rows = features(self.module) or (0, 0)
        return rows, columns


def _places(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> tuple[list[_Place], list[str]]:
    """Find the linear layers to be copied, and the other weights that are requested but cannot be copied."""
    layout = layout_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    places: list[_Place] = []
    left: list[str] = []
    head = model.get_output_embeddings()

    def place(module: nn.Module, name: str, wanted: str) -> None:
        reason = _why_not_read(model, module)
        if reason is None:
            places.append(_Place(names.get(id(module), name), module, wanted))
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
            for module in inside:
                place(module, sub.name, wanted)
            held = sum(math.prod(features(module) or (0,)) for module in inside)
            if held < 0.5 * sum(p.numel() for top in sub.modules for p in top.parameters()):
                left.append(f"{names.get(id(sub.modules[-1]), sub.name)} (its weights are not in linear layers)")
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
        where = "on the CPU only" if not on_gpu else "on a GPU in int4 only, and only where a config asks for it"
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
    """Return why the weights that a linear layer computes with cannot be obtained; `None` where they can.

    Of a quantiser's classes, one layer of each is tested.
    """
    # `ssd inspect` inspects a model whose tensors have no values.
    if is_plain_linear(module) or (isinstance(module, nn.Linear) and isinstance(module.weight, FakeTensor)):
        dtype: Any = module.weight.dtype
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return None
        name = str(dtype).removeprefix("torch.")
        return f"copies are made of float32, bfloat16 and float16 weights, but these are {name}"
    known = state_of(model).get(CopiesPart).unread
    kind = (type(module), type(getattr(module, "weight", None)))
    if kind not in known:
        try:
            dense(module, model.dtype)
            known[kind] = None
        except CannotRead as error:
            known[kind] = str(error)
    return known[kind]


class LowBitCopies:
    """The copies that one draft computes with.

    Attributes:
        by_module: `(copy, index of the layer in it)` by id of the layer.
        by_weight: the same by id of the weight, or of what replaces it in captured passes (`stand_ins`).
        modules: the linear layers, in the order of the model.
        others: further `(module, forward)` pairs that the draft computes with.
        left: requested sub-layers and layers that stay as they are, with the reason.
        passes: passes captured with these copies, by adapters (captured/passes.py); stored here, they are freed with
            the copies.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        skip: SkipConfig,
        precision: PrecisionConfig,
        make: Callable[[Sequence[str], Sequence[Any], str, int], LowBitCopy] | None = None,
    ) -> None:
        """Make the copies for one draft.

        Args:
            model: the model whose layers are copied.
            skip: sub-layers that the draft leaves out.
            precision: precision of its layers.
            make: `(names, layers, precision, group size)` → the copy of these layers; by default of their weights.

        Raises:
            ValueError: see `check_precision`.
        """
        check_precision(model, precision)
        on_cpu = next(model.parameters()).device.type in ("cpu", "meta")
        self.others: list[tuple[nn.Module, Any]] = []
        self.by_module: dict[int, tuple[LowBitCopy, int]] = {}
        self.by_weight: dict[int, tuple[LowBitCopy, int]] = {}
        self.modules: list[nn.Module] = []
        self.passes: dict[Any, Any] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._copied: list[tuple[LowBitCopy, list[nn.Module]]] = []
        places, self.left = _places(model, skip, precision)
        store = state_of(model).get(CopiesPart).low_bit_copies
        for group, key, _, reason in _keyed(places, precision.group_size, on_cpu):
            if reason is None and key not in store:
                try:
                    if make is None:
                        store[key] = _copy_of(model, group, precision.group_size)
                    else:
                        names, modules = [p.name for p in group], [p.module for p in group]
                        store[key] = make(names, modules, group[0].precision, precision.group_size)
                except CannotRead as error:  # unlike the layer of this class that was tested
                    reason = str(error)
            if reason is not None:
                self.left += [f"{place.name} ({reason})" for place in group]
                continue
            self._copied.append((store[key], [place.module for place in group]))
            for index, place in enumerate(group):
                module = place.module
                self.by_module[id(module)] = store[key], index
                weight: Any = module.weight
                if not is_plain_linear(module):
                    # It takes no memory: it serves to be recognised.
                    zero = torch.zeros(1, dtype=model.dtype, device="cpu")
                    weight = self._stand_ins[id(module)] = zero.expand(place.shape)
                self.by_weight[id(weight)] = store[key], index
                self.modules.append(module)
        self._note(model)

    def _note(self, model: PreTrainedModel) -> None:
        """Record the weights that the copies are made of."""
        self._linears = [id(module) for module in linears_of(model)]
        self._identities = [identity(module) for module in self.modules]
        self._places = list(map(_place, self.modules))
        self._sample = sample(self.modules)

    def is_current(self, model: PreTrainedModel) -> bool:
        """Tell whether these are the model's layers, and still hold the weights that were copied."""
        return (
            self._linears == [id(module) for module in linears_of(model)]
            and self._identities == [identity(module) for module in self.modules]
            and torch.equal(self._sample, sample(self.modules))
        )

    def drift(self, model: PreTrainedModel) -> float:
        """Return how far the weights have moved since they were copied, as a share of their size.

        0 where the copies are current, infinite where there are other layers, or weights in another place. A few
        numbers of each weight are compared: torch does not count what fused optimizers write.
        """
        if self.is_current(model):
            return 0.0
        if (
            not self._sample.numel()
            or self._linears != [id(module) for module in linears_of(model)]
            or self._places != list(map(_place, self.modules))
        ):
            return math.inf
        moved = (sample(self.modules).double() - self._sample.double()).norm() / self._sample.double().norm()
        return float(moved) if math.isfinite(moved) else math.inf

    def rewrite(self, model: PreTrainedModel) -> None:
        """Quantise weights that have moved again, in place, and record that the copies are made of these.

        Raises:
            CannotRead: weights of a layer can no longer be obtained.
        """
        for copy, modules in self._copied:
            copy.rewrite([dense(module, model.dtype) for module in modules])
        self._note(model)

    def by_key(self) -> dict[Any, LowBitCopy]:
        """Return the copies by weights and precision, as `CopiesPart` has them."""
        return {_key(modules, copy.precision, copy.group_size): copy for copy, modules in self._copied}

    def num_weights(self) -> int:
        """Count the numbers that quantising all of them takes in."""
        return sum(sum(copy.sizes) * (features(modules[0]) or (0,))[0] for copy, modules in self._copied)

    def num_bytes(self) -> int:
        """Return the memory of the copies in bytes."""
        return sum(copy.num_bytes() for copy in {id(c): c for c, _ in self.by_module.values()}.values())

    def forwards(self) -> list[tuple[nn.Module, Any]]:
        """Return the `(module, forward)` pairs with which the linear layers compute from their copies."""
        return [*self.others, *((module, self._forward(module)) for module in self.modules)]

    def _forward(self, module: nn.Module) -> Any:
        copy, index = self.by_module[id(module)]

        def forward(x: torch.Tensor) -> torch.Tensor:
            return copy.one(x, index).to(x.dtype)

        return forward

    def stand_ins(self) -> list[tuple[nn.Module, Any]]:
        """Return the `(module, forward)` pairs with which a capture sees layers of other makes as torch's."""

        def forward(weight: torch.Tensor) -> Any:
            return lambda x: nn.functional.linear(x, weight)

        return [(m, forward(self._stand_ins[id(m)])) for m in self.modules if id(m) in self._stand_ins]


def _copy_of(model: PreTrainedModel, group: Sequence[_Place], group_size: int) -> LowBitCopy:
    """Return the copy of layers that share one.

    Raises:
        CannotRead: their weights cannot be obtained.
    """
    return LowBitCopy([dense(place.module, model.dtype) for place in group], group[0].precision, group_size)


def _key(modules: Sequence[nn.Module], precision: str, group_size: int) -> Any:
    """Return the key of a copy: the weights of its layers, and how they are quantised."""
    return tuple(map(identity, modules)), precision, group_size


def _place(module: nn.Module) -> list[Any]:
    """Return the tensors of a layer and their places: unlike `identity`, the same after they were written into."""
    return [(id(tensor), place_of(tensor)) for tensor in tensors_of(module)]


# Layers that read the same input, by the names that transformers gives them. Only speed depends on it.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def _groups(places: list[_Place], group_size: int) -> list[list[_Place]]:
    """Group places that share an input, their precision and a shape that fits."""
    groups: list[list[_Place]] = []
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


def _keyed(places: list[_Place], group_size: int, on_cpu: bool) -> Iterator[tuple[list[_Place], Any, int, str | None]]:
    """Yield each group of `_groups`, the key of its copy, its number of weights, and why it has none, or `None`."""
    for group in _groups(places, group_size):
        key = _key([place.module for place in group], group[0].precision, group_size)
        rows, columns = sum(place.shape[0] for place in group), group[0].shape[1]
        yield group, key, rows * columns, refused_shape(rows, columns, group[0].precision, group_size, on_cpu)


class Resident(Protocol):
    """Draft of a model with offloaded weights (resident.py), as far as it is used here."""

    def is_of(self, model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> bool:
        """Tell whether it is the draft of these, with the current weights."""

    def num_bytes(self) -> int:
        """Return the memory, in bytes, of all that the draft has for itself."""


class CopiesPart(Part):
    """Part of a model's state: the low-bit copies of its weights.

    Attributes:
        low_bit_copies: copies, by weights and precision.
        low_bit_drafts: copies that a draft computes from, by skip set and precision.
        resident: draft of a model with offloaded weights, whose own are all in memory.
        unread: reasons why the weights of classes of linear layers cannot be obtained; `None` where they can.
    """

    def __init__(self) -> None:
        self.low_bit_copies: dict[Any, LowBitCopy] = {}
        self.low_bit_drafts: dict[tuple[SkipConfig, PrecisionConfig | None], LowBitCopies] = {}
        self.resident: Resident | None = None
        self.unread: dict[tuple[type, type], str | None] = {}

    def drop_copies(self) -> None:
        self.low_bit_copies, self.low_bit_drafts, self.resident, self.unread = {}, {}, None, {}

    drop = drop_copies

    def drop_captures(self) -> None:
        self.low_bit_drafts = {}  # copies of layers that are still there are found again


def copies_of(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> LowBitCopies:
    """Return the low-bit copies of a model, made once and shared by all configs that need the same.

    Copies of weights that have moved a little since, as in training, still draft: `rewrite_copies` updates them.

    Raises:
        ValueError: see `check_precision`.
    """
    state, part = state_of(model), state_of(model).get(CopiesPart)
    known: LowBitCopies | None = part.low_bit_drafts.get((skip, precision))
    if known is not None and known.drift(model) > MOST_DRIFT:
        state.drop_copies()  # of weights that no longer exist

    def made() -> LowBitCopies:
        _drop_of_others(model)
        return LowBitCopies(model, skip, precision)

    return recent(part.low_bit_drafts, (skip, precision), made, _MOST_DRAFTS)


def missing_copies(
    model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig
) -> list[tuple[int, Callable[[], None]]]:
    """Return what `copies_of` would have to make, in parts: the number of weights, and a function that copies them.

    Args:
        model: the target model.
        skip, precision: as in `copies_of`.

    Raises:
        ValueError: see `check_precision`.
    """
    check_precision(model, precision)
    on_cpu = next(model.parameters()).device.type in ("cpu", "meta")
    store = state_of(model).get(CopiesPart).low_bit_copies

    def make(key: Any, group: Sequence[_Place]) -> None:
        if key not in store:
            with contextlib.suppress(CannotRead):
                store[key] = _copy_of(model, group, precision.group_size)

    groups = _keyed(_places(model, skip, precision)[0], precision.group_size, on_cpu)
    return [
        (weights, partial(make, key, group))
        for group, key, weights, reason in groups
        if reason is None and key not in store
    ]


def rewrite_copies(model: PreTrainedModel, copies: LowBitCopies) -> None:
    """Quantise weights that have moved again, into the memory of the copies that one draft computes with.

    Args:
        model: the target model.
        copies: copies whose `drift` is neither 0 nor infinite.
    """
    part = state_of(model).get(CopiesPart)
    try:
        copies.rewrite(model)
    except CannotRead:
        state_of(model).drop_copies()
        return
    # Other drafts find the copies that they share when they are next used.
    part.low_bit_copies = copies.by_key()
    part.low_bit_drafts = {asked: other for asked, other in part.low_bit_drafts.items() if other is copies}


def _drop_of_others(model: PreTrainedModel) -> None:
    """Free copies of layers that the model no longer has, or of weights that these no longer have."""
    store, drafts = state_of(model).get(CopiesPart).low_bit_copies, state_of(model).get(CopiesPart).low_bit_drafts
    for asked in [asked for asked, copies in drafts.items() if not copies.is_current(model)]:
        del drafts[asked]
    now = {identity(module) for module in linears_of(model)} if store else set()
    for key in [key for key in store if not now.issuperset(key[0])]:
        del store[key]


def copy_bytes(model: nn.Module) -> int:
    """Return the bytes of all low-bit copies of a model; where its weights are offloaded, of all that its draft has."""
    part = state_of(model).get(CopiesPart)
    kept: int = sum(copy.num_bytes() for copy in part.low_bit_copies.values())
    return kept if part.resident is None else kept + int(part.resident.num_bytes())


def keep_only(model: nn.Module, copies: LowBitCopies | None) -> None:
    """Free all low-bit copies of a model but these."""
    if copies is None:
        drop_copies(model)
        return
    wanted = {id(copy) for copy, _ in copies.by_weight.values()}
    store = state_of(model).get(CopiesPart).low_bit_copies
    for key in [key for key, copy in store.items() if id(copy) not in wanted]:
        del store[key]
    known = state_of(model).get(CopiesPart).low_bit_drafts
    for key in [key for key, other in known.items() if other is not copies]:
        del known[key]


def drop_copies(model: nn.Module) -> None:
    """Free the low-bit copies of a model."""
    state_of(model).drop_copies()


def estimated_bytes(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> int:
    """Estimate the bytes of the copies before they are made."""
    total = 0
    for group in _groups(_places(model, skip, precision)[0], precision.group_size):
        rows, columns = sum(place.shape[0] for place in group), group[0].shape[1]
        if refused_shape(rows, columns, group[0].precision, precision.group_size) is not None:
            continue
        if group[0].precision == "int8":
            total += rows * columns + (4 if _is_native(group[0].shape[0], "int8") else 2) * rows
        else:
            total += rows * columns // 2 + 4 * rows * (columns // precision.group_size)
        if any(getattr(place.module, "bias", None) is not None for place in group):
            total += 2 * rows
    return total
