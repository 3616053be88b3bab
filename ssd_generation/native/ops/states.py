"""Steps of recurrent states, as kernels of a list (states_code.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..sequence import Operand, Step
from .kernels import NAMES, flags, kernel
from .pointwise import NoKernel, Part

__all__ = ["STEPS", "State"]

_LANES = 16


@dataclass(frozen=True)
class State:
    """A state in the cache.

    Attributes:
        layer: index of its layer.
        number: index among the layer's states.
        shape: its shape for one text, `(…)`.
        dtype: its type.
    """

    layer: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Given = Mapping[str, Any]
"""Arguments of transformers' function by name: parts of blocks, weights, and other values."""


def _row_stride(part: Any, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
    """Return the stride of a part from a token to the next; its other dimensions must lie without gaps."""
    if not isinstance(part, Part) or tuple(part.like.shape) != shape or part.like.dtype not in NAMES:
        raise NoKernel
    if dtype is not None and part.like.dtype is not dtype:
        raise NoKernel
    one = part.like[0]
    if not one.is_contiguous():
        raise NoKernel
    return int(part.like.stride(0))


def _weight(tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise NoKernel
    return tensor


def convolution(state: State, given: Given, result: Part) -> Step:
    """Return the kernel of a causal convolution: x `(n, C, 1)` appended to a state `(C, K)`, or `(C, K − 1)`.

    Raises:
        NoKernel: there is none for these arguments.
    """
    x, weight, bias = given["hidden_states"], given["weight"], given.get("bias")
    activation = given.get("activation")
    if not isinstance(x, Part) or not isinstance(weight, torch.Tensor) or x.like.ndim != 3:
        raise NoKernel
    channels, taps = weight.shape
    rows, dtype = x.like.shape[0], result.like.dtype
    held_taps = state.shape[-1]
    if channels % _LANES or state.shape != (channels, held_taps) or held_taps not in (taps - 1, taps) or held_taps < 1:
        raise NoKernel
    if activation not in (None, "silu", "swish"):
        raise NoKernel
    if tuple(x.like.shape) != (rows, channels, 1) or x.like.stride(1) != 1 or x.like.dtype is not dtype:
        raise NoKernel
    if weight.dtype not in NAMES or not weight.is_contiguous() or not result.is_whole:
        raise NoKernel
    held = [weight]
    if bias is not None:
        held.append(_weight(bias, (channels,)))
        if bias.dtype not in NAMES:
            raise NoKernel
    activates = activation is not None
    parts = NAMES[weight.dtype], "" if bias is None else NAMES[bias.dtype], channels, taps, held_taps, activates
    address = kernel("states", "convolution", NAMES[dtype], NAMES[state.dtype], *parts)
    addresses = [*(tensor.data_ptr() for tensor in held), 0][:2]
    fields: list[int | Operand] = [x.operand(), result.operand(True), *addresses, int(x.like.stride(0))]
    fields += [state.layer, state.number]
    return Step("convolution", address, flags(channels // _LANES, 2), fields, held)


def recurrence(state: State, given: Given, result: Part) -> Step:
    """Return the kernel of a linear recurrence: x and a `(n, 1, C)`, a state `(C,)`.

    Raises:
        NoKernel: there is none for these arguments.
    """
    x, gate = given["hidden_states"], given["gate"]
    if not isinstance(x, Part) or not isinstance(gate, Part) or len(given) > 2:
        raise NoKernel
    if x.like.ndim != 3 or not result.is_whole:
        raise NoKernel
    rows, _, channels = x.like.shape
    if channels % _LANES or state.shape != (channels,) or state.dtype is not torch.float32:
        raise NoKernel
    shape, dtype = (rows, 1, channels), result.like.dtype
    strides = [_row_stride(x, shape, dtype), _row_stride(gate, shape)]
    address = kernel("states", "recurrence", NAMES[dtype], NAMES[state.dtype], NAMES[gate.like.dtype], channels)
    fields: list[int | Operand] = [x.operand(), gate.operand(), result.operand(True), *strides]
    fields += [state.layer, state.number]
    return Step("recurrence", address, flags(channels // _LANES, 2), fields)


def delta(state: State, given: Given, result: Part) -> Step:
    """Return the kernel of the gated delta rule: q, k `(n, 1, G, K)`, v `(n, 1, H, V)`, a state `(H, K, V)`.

    Raises:
        NoKernel: there is none for these arguments.
    """
    query, key, value, gate, rate = (given[name] for name in ("query", "key", "value", "g", "beta"))
    if not all(isinstance(one, Part) for one in (query, key, value, gate, rate)) or value.like.ndim != 4:
        raise NoKernel
    rows, _, heads, values = value.like.shape
    key_heads, keys = key.like.shape[-2:]
    dtype = result.like.dtype
    if values % _LANES or heads % key_heads or state.shape != (heads, keys, values) or not result.is_whole:
        raise NoKernel
    if not given.get("output_final_state") or not set(given) <= _DELTA:
        raise NoKernel
    decays_each = gate.like.ndim == 4
    if decays_each and key_heads != heads:
        raise NoKernel
    strides = [
        _row_stride(query, (rows, 1, key_heads, keys), dtype),
        _row_stride(key, (rows, 1, key_heads, keys), dtype),
        _row_stride(value, (rows, 1, heads, values), dtype),
        _row_stride(gate, (rows, 1, heads, keys) if decays_each else (rows, 1, heads)),
        _row_stride(rate, (rows, 1, heads)),
    ]
    gates, rates = NAMES[gate.like.dtype], NAMES[rate.like.dtype]
    parts = gates, rates, key_heads, heads, keys, values, bool(given.get("use_qk_l2norm_in_kernel")), decays_each
    address = kernel("states", "delta", NAMES[dtype], NAMES[state.dtype], *parts)
    operands = [one.operand() for one in (query, key, value, gate, rate)]
    fields = [*operands, result.operand(True), *strides, state.layer, state.number]
    return Step("delta", address, flags(heads, 2), fields)


_DELTA = {
    "query", "key", "value", "g", "beta", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens",
}  # fmt: skip
_SCAN = {"hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"}


def scan(state: State, given: Given, result: Part) -> Step:
    """Return the kernel of a selective scan.

    In Mamba 2 x and Δ are `(n, H, P)`, B and C `(n, G, N)`, A `(H, P, N)`, D and the bias `(H, P)`, the same for all P
    but x and z; the state is `(H, P, N)`. In Mamba x and Δ are `(n, H)`, B and C `(n, N)`, A `(H, N)`, D `(H,)`, and
    the state is `(H, N)`.

    Raises:
        NoKernel: there is none for these arguments.
    """
    x, dt, decay, to_state, from_state = (given[name] for name in ("hidden_states", "dt", "A", "B", "C"))
    skip, bias, gate = (given.get(name) for name in ("D", "dt_bias", "z"))
    if not all(isinstance(one, Part) for one in (x, dt, to_state, from_state)) or not set(given) <= _SCAN:
        raise NoKernel
    dtype, is_first = result.like.dtype, x.like.ndim == 2
    rows, heads = x.like.shape[:2]
    size = 1 if is_first else x.like.shape[2]
    states = state.shape[-1]
    groups = 1 if is_first else to_state.like.shape[1]
    if states % _LANES or heads % groups or not result.is_whole:
        raise NoKernel
    if state.shape != ((heads, states) if is_first else (heads, size, states)):
        raise NoKernel
    of_states = (rows, states) if is_first else (rows, groups, states)
    shape = (rows, heads) if is_first else (rows, heads, size)
    its = dt.like
    if tuple(its.shape) != shape or its.stride(1) not in (1, *([its.stride(0)] if heads == 1 else [])):
        raise NoKernel
    if its.dtype not in NAMES or (not is_first and its.stride(2) != 0 and size > 1):
        raise NoKernel
    strides = [
        _row_stride(x, shape, dtype),
        int(its.stride(0)),
        _row_stride(to_state, of_states, dtype),
        _row_stride(from_state, of_states, dtype),
        0 if gate is None else _row_stride(gate, shape, dtype),
    ]
    held = [_for_heads(decay, heads, size, states, is_first)]
    addresses = [held[0].data_ptr()]
    for one in (skip, bias):
        if one is not None:
            held.append(_for_heads(one, heads, size, None, is_first))
        addresses.append(0 if one is None else held[-1].data_ptr())
    parts = (
        NAMES[its.dtype], heads, size, groups, states, is_first, skip is not None, bias is not None,
        bool(given.get("dt_softplus")), gate is not None,
    )  # fmt: skip
    address = kernel("states", "scan", NAMES[dtype], NAMES[state.dtype], *parts)
    operands = [x.operand(), dt.operand(), to_state.operand(), from_state.operand(), (gate or x).operand()]
    fields = [*operands, result.operand(True), *strides, *addresses, state.layer, state.number]
    return Step("scan", address, flags(heads, 2), fields, held)


def _for_heads(tensor: Any, heads: int, size: int, states: int | None, is_first: bool) -> torch.Tensor:
    """Return a float32 weight `(H,)`, or `(H, N)` in Mamba, which must be the same for all P."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.float32:
        raise NoKernel
    if is_first:
        shape: tuple[int, ...] = (heads,) if states is None else (heads, states)
        return _weight(tensor, shape)
    if tuple(tensor.shape) != ((heads, size) if states is None else (heads, size, states)):
        raise NoKernel
    others = tensor.stride()[1:]
    if any(others) or tensor.stride(0) != 1:
        raise NoKernel
    return tensor


STEPS = {
    "causal_conv1d_update": convolution,
    "griffin_convolution_step": convolution,
    "rg_lru_step": recurrence,
    "torch_recurrent_gated_delta_rule": delta,
    "recurrent_kimi_delta_attention": delta,
    "mamba_selective_state_update": scan,
    "mamba2_selective_state_update": scan,
}
"""Kernels by the name of the function that computes the step."""
