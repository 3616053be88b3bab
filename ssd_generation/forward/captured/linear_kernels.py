"""Kernels for the linear layers of a pass over a few tokens on the CPU, and which of them is the fastest here.

A pass over n tokens could take no longer than a pass over one, since reading the weights is most of it. What `F.linear`
calls (MKL's GEMM) is far from that; which kernel is closest depends on the processor, the matrix and n. So the kernels
are measured, once per machine, matrix and number of rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...native.codegen.compiler import why_not
from ...native.ops.kernels import NAMES
from ...native.ops.linear import Linear, native_linear
from ...support.machine import cpu_name, is_intel
from ...support.measurements import cached_measurement, flag_if_noisy

__all__ = ["KERNELS", "Layer", "Linear", "fastest_kernels", "linear_of_few_rows", "onednn_linear", "onednn_takes"]

Layer = tuple[torch.Tensor, "torch.Tensor | None"]
"""Weight `(N, K)` and bias `(N,)`."""

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_SMALL = 2**16
"""Elements below which a weight is left to the rule: a call takes longer than its arithmetic."""

_ROWS = (1, 2, 3, 4, 8, 16, 32)
"""Numbers of rows that are measured; numbers between are filled up to the next one, or nearly, and use its result."""

_BYTES = 2**26
"""Bytes of weights of one shape that a measurement reads, so that they come from memory as they do in a pass."""

_REPEATS = 5
_AHEAD = 0.95
"""Share of the time of the rule's kernel below which another one replaces it."""


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)


def onednn_takes(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN multiplies numbers of a type on this processor: half precision not on all (AVX2 has none)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def onednn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
    """Return the layer by oneDNN on the plain weight, read in place; `None` where oneDNN has none of this type."""
    if not onednn_takes(weight.dtype):
        return None
    kernel = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    return linear


def _turned(weight: torch.Tensor, bias: torch.Tensor | None, least: int, block: int, product: _Product) -> Linear:
    """Return a layer that computes `W · xᵀ`: the weight has the many rows and is read in place; only x is packed.

    From `least` rows on, x is padded with rows of zeros to a multiple of `block`: the kernels are much slower at the
    numbers between.
    """
    out_features, in_features = weight.shape

    def linear(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, in_features)
        count = rows.shape[0]
        missing = -count % block if count >= least else 0
        if missing:
            rows = functional.pad(rows, (0, 0, 0, missing))
        result = product(weight, rows).t()[:count].contiguous()
        if bias is not None:
            result += bias
        return result.view(*x.shape[:-1], out_features)

    return linear


def _onednn_turned(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
    if weight.dtype != torch.float32 or onednn_linear(weight, bias) is None:
        return None
    kernel = torch.ops.mkldnn._linear_pointwise.default
    return _turned(weight, bias, 2, 8, lambda w, x: kernel(w, x.contiguous(), None, "none", [], ""))


def _mkl_turned(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
    if weight.dtype != torch.float32 or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    return _turned(weight, bias, 3, 4, lambda w, x: torch.mm(w, x.t()))


KERNELS: Mapping[str, Callable[[torch.Tensor, torch.Tensor | None], Linear | None]] = {
    "native": native_linear,
    "linear": _plain,
    "onednn": onednn_linear,
    "onednn-turned": _onednn_turned,
    "mkl-turned": _mkl_turned,
}
"""Makers by name: `(weight (N, K), bias (N,) or None)` → the layer on the CPU; `None`: there is none for it here."""


def _rule(rows: int, dtype: torch.dtype) -> str:
    """Return the name of the kernel where nothing is measured.

    JIT-compiled kernels read weights about as fast as memory gives them; with more rows than passes of decoding have,
    arithmetic takes the time. There, and where nothing is compiled, in float32: MKL's GEMM, which `F.linear` calls from
    four rows on, takes twice the time of a matrix-vector product; oneDNN's on the plain weight streams it once. On
    processors other than Intel's it is ahead from the first row (on an AMD EPYC 1.0 to 1.8 times as fast at one row, up
    to 3 times at three).
    """
    if rows <= _ROWS[-1] and why_not() is None:
        return "native"
    return "onednn" if dtype == torch.float32 and rows >= (4 if is_intel() else 1) else "linear"


def _fits(weight: torch.Tensor) -> bool:
    """Tell whether there may be kernels for this weight."""
    return weight.dtype in NAMES and weight.device.type == "cpu" and weight.is_contiguous()


def linear_of_few_rows(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> Linear | None:
    """Return a kernel that is faster than `F.linear` for `rows` rows on most machines; `None` where there is none."""
    name = _rule(rows, weight.dtype)
    return None if name == "linear" or not _fits(weight) else KERNELS[name](weight, bias)


def fastest_kernels(
    model: nn.Module, layers: Sequence[Layer], rows: int
) -> Callable[[torch.Tensor, torch.Tensor | None], Linear | None]:
    """Return the kernels that are the fastest here for a pass over `rows` tokens: known, or measured now.

    Args:
        model: the model that the layers belong to; the answer is stored with it.
        layers: the linear layers of the pass.
        rows: tokens in the pass, ≥ 1.

    Returns:
        `(weight, bias)` → the layer, or `None` where `F.linear` is as fast as any.
    """
    by_shape: dict[str, list[Layer]] = {}
    for weight, bias in layers:
        if _fits(weight) and weight.numel() >= _SMALL:
            by_shape.setdefault(_shape(weight, bias), []).append((weight, bias))
    measured = next((count for count in _ROWS if count >= rows), None)
    names: dict[str, str] = {}
    if by_shape and measured is not None:
        described = {
            "what": "kernels",
            "machine": [cpu_name(), torch.get_num_threads(), torch.__version__],
            "shapes": sorted(by_shape),
            "rows": measured,
            "native": why_not() is None,
            "format": 3,
        }
        names = cached_measurement(model, described, lambda: _measure(by_shape, measured), use=_check)

    def kernel_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        name = names.get(_shape(weight, bias)) if _fits(weight) else None
        if name is None:
            return linear_of_few_rows(weight, bias, rows)
        return None if name == "linear" else KERNELS[name](weight, bias)

    return kernel_of


def _shape(weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"{weight.shape[0]}x{weight.shape[1]}{'' if bias is None else '+bias'} {dtype}"


def _check(names: Any) -> None:
    """Raise where an answer from the disk names unknown kernels."""
    unknown = set(names.values()) - set(KERNELS)
    if unknown:
        raise ValueError(f"unknown kernels {', '.join(sorted(map(str, unknown)))}")


def _measure(by_shape: Mapping[str, Sequence[Layer]], rows: int) -> Any:
    """Return the name of the fastest kernel by shape; `NoisyMeasurement` where the machine is busy."""
    with torch.inference_mode():
        runs: dict[tuple[str, str], tuple[torch.Tensor, list[Linear]]] = {}
        for shape, layers in by_shape.items():
            most = max(1, _BYTES // layers[0][0][0].nbytes)  # rows: a large LM head is not run whole
            few = [
                (weight[:most], None if bias is None else bias[:most])
                for weight, bias in layers[: max(1, _BYTES // layers[0][0].nbytes)]
            ]
            x = few[0][0].new_ones((1, rows, few[0][0].shape[1]))
            for name, make in KERNELS.items():
                linears = [made for weight, bias in few if (made := make(weight, bias)) is not None]
                if linears:
                    runs[shape, name] = x, linears
        for x, linears in runs.values():
            linears[0](x)  # a kernel's preparation, done once
        times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for _ in range(_REPEATS):
            # Kernels in the outer loop: before a weight is read again, it has left the processor's cache.
            for name in KERNELS:
                for shape in by_shape:
                    if (shape, name) not in runs:
                        continue
                    x, linears = runs[shape, name]
                    begun = time.perf_counter()
                    for linear in linears:
                        linear(x)
                    times[shape, name].append(time.perf_counter() - begun)
    middle = {key: statistics.median(values) for key, values in times.items()}
    names = {}
    for shape, layers in by_shape.items():
        usual = _rule(rows, layers[0][0].dtype)
        found = {name: seconds for (its_shape, name), seconds in middle.items() if its_shape == shape}
        best = min(found, key=found.__getitem__)
        names[shape] = usual if usual in found and found[best] >= _AHEAD * found[usual] else best
    return flag_if_noisy(names, times.values())
