"""Passes that give a token the same bits however many other tokens are in the pass.

Bits depend on the width of a pass where kernels add up in another order for another number of rows. So each linear
layer runs by a kernel whose rows were found to be independent of one another, at widths at which they were; a pass in
between is filled up to the next of these, a single token to two. Attention is computed for each token separately, over
exactly the keys that it sees: the very call that a pass over one token makes. Everything else in a layer works on each
row separately; but torch computes exp and its kind by vector instructions for most of a tensor, and by others for the
rest at its end, which sometimes round differently. Passes in which that can happen are not used (`uneven`). Whether all
else holds is checked on the model itself (tuning/exactness.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ...cache.buffered_layers import BufferedLayer, BufferedSlidingLayer, BufferedStatesLayer
from ...cache.recurrent import has_no_keys
from ...native.ops.linear import native_linear
from ..structure.expert_layers import run_experts, shape_of_gate
from .cache_attention import CacheAttention, attended
from .fx_graph import CapturedPass
from .linear_kernels import Linear, onednn_linear

__all__ = [
    "LINEARS",
    "NATIVE",
    "PROMPT_WIDTHS",
    "REPLAYED",
    "TEXT_WIDTHS",
    "WIDTHS",
    "BatchInvariance",
    "RowAttention",
    "live_layers_of_any_window",
    "uneven",
]

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 16, 24)
"""Widths that are tried: those of rounds, and longer ones, each at most half as wide again as the one before."""

NATIVE, REPLAYED = "native", "replayed"
"""JIT-compiled kernels, and CUDA graphs."""

_WIDE = (*range(32, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
"""Widths of passes bound by arithmetic; more tokens would not fit into the nearer caches."""

PROMPT_WIDTHS = (16, 24, *_WIDE)
"""Tokens of the passes that read a prompt."""

TEXT_WIDTHS = (*WIDTHS, *_WIDE)
"""Tokens of the passes over several texts."""

LINEARS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Linear | None]] = {
    NATIVE: native_linear,
    "linear": lambda weight, bias: None,
    "onednn": onednn_linear,
}
"""Kernels for linear layers by name; `None` leaves a layer at `F.linear`. JIT-compiled ones do not depend on the width
by construction."""


@dataclass(frozen=True)
class BatchInvariance:
    """Means by which the bits of a model's passes do not depend on their width.

    Attributes:
        linear: the kernel of its linear layers, by its name in `LINEARS`; `REPLAYED` where passes are replayed as they
            were recorded (graph_passes.py).
        widths: widths that agree with each other, ascending; a pass is filled up to the next one.
    """

    linear: str
    widths: tuple[int, ...]

    @property
    def is_native(self) -> bool:
        """Tell whether JIT-compiled kernels provide it."""
        return self.linear == NATIVE

    @property
    def is_replayed(self) -> bool:
        """Tell whether replayed passes provide it; these are the same where exactness is not requested."""
        return self.linear == REPLAYED

    def width(self, count: int) -> int | None:
        """Return the width of a pass for `count` tokens; `None` where there is none as wide."""
        return next((width for width in self.widths if width >= count), None)


class RowAttention(CacheAttention):
    """Attention of each token separately, in passes that are filled up after their tokens.

    Args:
        windows: window of each layer, as in `LayerPlace`.
    """

    __slots__ = ("_of_model",)

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__()
        self._of_model = list(windows)

    def _ends_and_windows(self, layers: Sequence[Any], at: int) -> tuple[list[int], list[int | None]]:
        others = [None] * (len(layers) - len(self._of_model))
        return [getattr(layer, "end", 0) for layer in layers], [*self._of_model, *others][: len(layers)]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        at, count, window = self.ends[layer] + self.at - self._begun, self.count, self.windows[layer]
        key_buffer, value_buffer = self.key_buffers[layer], self.value_buffers[layer]
        key_buffer.narrow(2, at, count).copy_(key[:, :, :count])
        value_buffer.narrow(2, at, count).copy_(value[:, :, :count])
        if query.dtype is not key_buffer.dtype:
            query = query.to(key_buffer.dtype)
        heads, width, kv_heads = query.shape[1], query.shape[2], key_buffer.shape[1]
        grouped = query.view(kv_heads, heads // kv_heads, width, -1)
        sinks = None if sinks is None else sinks.view(kv_heads, heads // kv_heads)
        rows = []
        for place in range(count):
            end = at + place + 1
            first = 0 if window is None else max(end - window, 0)
            if window is not None and window < 0:
                first = max(end - 1 - (end - 1 + self._dropped[layer]) % -window, 0)
            rows.append(
                attended(
                    grouped[None, :, :, place],
                    key_buffer.narrow(2, first, end - first),
                    value_buffer.narrow(2, first, end - first),
                    None,
                    scaling,
                    softcap,
                    sinks,
                ).reshape(1, 1, heads, -1)
            )
        rows += rows[-1:] * (width - count)
        return torch.cat(rows, dim=1)


# Elementwise functions that vector instructions and scalar ones may round differently.
_NAMES = (
    "silu gelu tanh sigmoid logsigmoid exp exp2 expm1 log log2 log10 log1p softplus softsign mish erf erfc sin cos tan "
    "pow hypot addcmul addcdiv lerp hardswish selu elu celu hardsigmoid"
)
_ROUNDED = frozenset(_NAMES.split())
_EXACT_POWERS = (2, 3, 2.0, 3.0)  # products
_GRAIN = 32768
"""Elements from which on torch shares an elementwise operation among threads."""


def uneven(captured: CapturedPass) -> str | None:
    """Return the name of an operation whose rounding may depend on the place in the pass; `None`: there is none.

    torch's vectorised loops take two vectors at a time, of each thread's share, and the remainder one by one.

    Args:
        captured: a pass of a certain length.
    """
    vector = 64 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 32  # bytes
    threads = torch.get_num_threads()
    for node in captured.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        name = name.strip("_")
        shape = node.meta.get("shape")
        if node.target is run_experts:
            name, pairs = "gate of experts", math.prod(node.args[2].meta["shape"])
            shape = shape_of_gate(captured.constants[node.args[0].target], pairs)
            if shape is None:
                continue
        elif name == "pow" and len(node.args) > 1 and node.args[1] in _EXACT_POWERS:
            continue
        elif name == "norm":  # of rewrites.py: hypot of one number for each token
            shape = (*shape[:-1], 1) if shape else None
        elif name not in _ROUNDED and name != "rotate":
            continue
        dtype = node.meta.get("dtype")
        if not shape or dtype is None:
            return name
        step = 2 * vector // dtype.itemsize
        count = math.prod(shape)
        if count < step:
            continue  # all of it one by one
        shares = min(threads, -(-count // _GRAIN))
        if shape[-1] % step or (shares > 1 and -(-count // shares) % step):
            return name
    return None


def live_layers_of_any_window(cache: Cache, skipped: frozenset[int] = frozenset()) -> list[BufferedLayer] | None:
    """Return the layers whose keys and values a pass writes, or `None` where one is of another kind."""
    layers: list[Any] = [layer for at, layer in enumerate(cache.layers) if at not in skipped and not has_no_keys(layer)]
    kinds = BufferedLayer, BufferedStatesLayer, BufferedSlidingLayer
    if any(type(layer) not in kinds or not layer.is_initialized for layer in layers):
        return None
    return layers if all(layer.start == 0 for layer in layers if type(layer) is not BufferedSlidingLayer) else None
