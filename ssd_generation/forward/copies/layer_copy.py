"""Low-bit copy of linear layers that have the same input.

A copy holds the same weights in 8 or 4 bits and is read in place of the layer's own weights: a decoding step is bound
by the bytes it reads.

int8: one scale per output channel, symmetric, w ≈ q · s. int4: one scale and offset per group of input channels,
asymmetric, w ≈ q · s + z (as in QuantSpec's weights, arXiv 2502.10424, and every int4 weight-only kernel). They are
read by JIT-compiled kernels, or by ATen's where there are none; both take bfloat16 activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...native.codegen.compiler import why_not
from ...native.ops import linear as native
from ...native.ops.quantise import quantise_int4, quantise_int8
from .gpu_int4 import linear_int4, pack_int4, why_not_int4

__all__ = ["LowBitCopy", "is_native", "packing", "refused_shape"]

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
        self.num_weights = sum(weight.numel() for weight, _ in layers)
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
        made.num_weights = rows * columns
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


def is_native(rows: int, precision: str) -> bool:
    """Tell whether JIT-compiled kernels read copies of weights with `rows` rows, on the CPU."""
    return why_not() is None and (precision == "int8" or rows % 16 == 0)


def _reads_here(weight: torch.Tensor, precision: str) -> bool:
    """Tell whether JIT-compiled kernels read copies of such a weight."""
    return weight.device.type == "cpu" and is_native(int(weight.shape[0]), precision)


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
