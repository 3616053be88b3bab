"""Scans over a prompt by JIT-compiled kernels: token after token, as they are decoded.

transformers' functions for several tokens compute the states of a prompt in chunks of 64 to 256 tokens, or with an
operation of torch for each token. On a CPU that takes most of a prompt's time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ...cache.recurrent import PassState, PassStates
from ...native.cache_table import TextPlace
from ...native.codegen.compiler import why_not
from ...native.ops.kernels import NAMES
from ...native.ops.pointwise import NoKernel, Part, likeness
from ...native.ops.states import STEPS, State
from ...native.sequence import Block, make_list
from ...support.structure import modules_of
from ..captured.cache_attention import CacheAttention
from ..captured.griffin import is_rg_lru
from ..captured.replacing import layers_that_call, own_functions, own_methods

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["prompt_scans"]


def prompt_scans(model: PreTrainedModel, own_kernels: bool = False) -> AbstractContextManager[Any] | None:
    """Return a mode in which the scans of several tokens run by kernels; `None` where there are none.

    Args:
        model: the target model.
        own_kernels: whether the model's own kernels are requested in half precision.
    """
    if why_not() is not None or model.dtype not in NAMES or torch.is_autocast_enabled("cpu"):
        return None
    if own_kernels and model.dtype is not torch.float32:
        return None
    layers, units = layers_that_call(model, frozenset(_SCANS)), list(filter(is_rg_lru, modules_of(model)))
    if not layers and not units:
        return None
    return _replaced(layers, units)


@contextmanager
def _replaced(layers: list[nn.Module], units: list[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        if layers:
            stack.enter_context(
                own_functions(layers, frozenset(_SCANS), lambda name, function: partial(_scan, name, function))
            )
        if units:
            stack.enter_context(own_methods(units, "_rnn_scan", lambda unit: partial(_rg_lru, unit._rnn_scan)))
        yield


def _scan(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a scan by kernels; by transformers' function where there are none for these arguments."""
    signature = inspect.signature(inspect.unwrap(function))
    try:
        bound = signature.bind(*args, **kwargs)
        ignored = {key for key, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD}
        packed = (bound.arguments.get(key, {}).get("cu_seqlens") for key in ignored)
        given = {key: one for key, one in bound.arguments.items() if key not in ignored and one is not None}
        if torch.is_grad_enabled() or any(one is not None for one in packed) or _is_elsewhere(given):
            raise NoKernel
        return _SCANS[name](given)
    except (NoKernel, KeyError):  # an argument may have another name in another version
        return function(*args, **kwargs)


def _is_elsewhere(given: dict[str, Any]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in given.values())


def _run(
    name: str,
    tokens: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    others: dict[str, Any],
    state: torch.Tensor,
) -> torch.Tensor:
    """Run the kernel of a step over all tokens of all texts.

    Args:
        name: transformers' function for the step.
        tokens: its arguments for each token, `(B, n, …)`.
        weights: its weights.
        others: its other arguments.
        state: the states `(B, …)`, which are changed.

    Returns:
        Results in float32, of the shape of the first of `tokens`, or of its `value`.
    """
    first = next(iter(tokens.values()))
    batch, count = first.shape[:2]
    inputs = [tensor.flatten(0, 1).float().contiguous() for tensor in tokens.values()]
    parts = [Part(Block(tuple(one.shape), at), likeness(one.shape, one.dtype)) for at, one in enumerate(inputs)]
    given: dict[str, Any] = {**dict(zip(tokens, parts, strict=True)), **weights, **others}
    if name == "mamba2_selective_state_update":  # one step for all numbers of a head
        part = given["dt"]
        size = first.shape[-1]
        given["dt"] = Part(part.block, part.like[..., None].expand(*part.like.shape, size))
    if name in ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention", "rg_lru_step"):
        for key in tokens:  # which have a dimension for the tokens of a text
            given[key] = Part(given[key].block, given[key].like.unsqueeze(1))
    shape = tuple(given["value" if "value" in given else next(iter(tokens))].like.shape)
    result = Part(Block(shape), likeness(shape, torch.float32))
    step = STEPS[name](State(0, 0, tuple(state.shape[1:]), state.dtype), given, result)
    made = make_list([step], [result.block], len(inputs), batch * count, torch.float32)
    attention = CacheAttention()
    texts = [TextPlace(row, 0) for row in range(batch)]
    attention.begin([None], 0, count, texts, PassStates([[PassState(state, state)]]))
    found: torch.Tensor = made(attention, *inputs)
    return found.view(batch, count, *shape[1 if found.ndim == first.ndim - 1 else 2 :])


def _begun(before: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the state that a scan begins with, in float32 and of its own: zeros where there is none before."""
    return torch.zeros(shape, device="cpu") if before is None else before.to(torch.float32, copy=True).contiguous()


def _mamba2(given: dict[str, Any]) -> Any:
    if given.get("z") is not None:
        raise NoKernel
    given = _limited(given)
    x, decay, before = given["hidden_states"], given["A"], given.get("initial_states")
    batch, _, heads, size = x.shape
    states = given["B"].shape[-1]
    shape = batch, heads, size, states
    state = _begun(before, shape)
    weights = {"A": decay.float().contiguous()[:, None, None].expand(-1, size, states)}
    for name in ("D", "dt_bias"):
        if name in given:
            weights[name] = given[name].float().contiguous()[:, None].expand(-1, size)
    tokens = {"hidden_states": x, "dt": given["dt"], "B": given["B"], "C": given["C"]}
    others = {"dt_softplus": given.get("dt_softplus", False)}
    result = _run("mamba2_selective_state_update", tokens, weights, others, state)
    return (result, state) if given.get("return_final_states") else result


def _limited(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a time step that lies within its limits already."""
    least, most = given.get("dt_limit", (0.0, float("inf")))
    if (least, most) == (0.0, float("inf")):
        return given
    step = given["dt"]
    if "dt_bias" in given:
        step = step + given["dt_bias"].to(step.dtype)
    if given.get("dt_softplus"):
        step = functional.softplus(step)
    others = {key: value for key, value in given.items() if key not in ("dt_bias", "dt_softplus")}
    return {**others, "dt": step.clamp(least, most)}


def _mamba(given: dict[str, Any]) -> Any:
    x, decay = given["hidden_states"], given["A"]
    batch, width, _ = x.shape
    state = _begun(None, (batch, width, decay.shape[-1]))
    weights = {"A": decay.float().contiguous()}
    for name, here in (("D", "D"), ("delta_bias", "dt_bias")):
        if name in given:
            weights[here] = given[name].float().contiguous()
    tokens = {
        key: given[name].transpose(1, 2)
        for key, name in (("hidden_states", "hidden_states"), ("dt", "dt"), ("B", "B"), ("C", "C"), ("z", "z"))
        if name in given
    }
    others = {"dt_softplus": given.get("delta_softplus", False)}
    result = _run("mamba_selective_state_update", tokens, weights, others, state).transpose(1, 2)
    result = result.to(torch.promote_types(x.dtype, given["D"].dtype) if "D" in given else x.dtype)
    return (result, state) if given.get("return_last_state") else result


def _delta(name: str, given: dict[str, Any]) -> Any:
    value, before = given["value"], given.get("initial_state")
    shape = value.shape[0], value.shape[2], given["key"].shape[-1], value.shape[-1]
    state = _begun(before, shape)
    tokens = {key: given[key] for key in ("query", "key", "value", "g", "beta")}
    others = {"output_final_state": True, "use_qk_l2norm_in_kernel": given.get("use_qk_l2norm_in_kernel", False)}
    result = _run(name, tokens, {}, others, state).to(given["query"].dtype)
    return result, state if given.get("output_final_state") else None


def _rg_lru(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the scan of an RG-LRU, which transformers does by operations of torch for each token."""
    batch, count, width = hidden_states.shape
    if count == 1 or others or torch.is_grad_enabled() or hidden_states.device.type != "cpu":
        return original(hidden_states, recurrent_gate, reset, recurrent_states, **others)  # type: ignore[no-any-return]
    state = _begun(recurrent_states, (batch, width))
    tokens = {"hidden_states": hidden_states, "gate": recurrent_gate * ~reset}
    try:
        result = _run("rg_lru_step", tokens, {}, {}, state)
    except NoKernel:
        return original(hidden_states, recurrent_gate, reset, recurrent_states)  # type: ignore[no-any-return]
    return result.to(hidden_states.dtype), state


_SCANS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "torch_chunk_gated_delta_rule": partial(_delta, "torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": partial(_delta, "recurrent_kimi_delta_attention"),
}
"""Scans by the name of transformers' function."""
