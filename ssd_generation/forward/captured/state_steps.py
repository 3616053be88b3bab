"""Recurrent states in captured passes: what a token does to a state is one node, run for the tokens in their order.

transformers computes the states of a layer in a few functions, which other packages' kernels may replace: a step of a
causal convolution, of a selective scan, of the gated delta rule. While a pass is captured, a layer that calls them is
given the tokens of the pass as rows of a batch, of one token each. So its own code for a single token computes all but
the states of all tokens at once, and each of these functions becomes a node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from ...cache.recurrent import is_known, keeps_states
from ...native.ops.states import State
from ...support.model_state import Part, state_of
from ..eager.module_states import fill_cache
from .cache_attention import CacheAttention
from .griffin import STATE_OF_BLOCKS
from .replacing import Maker, layers_that_call, own_functions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "STATE_OF",
    "StatePlace",
    "StateStep",
    "StatesPart",
    "bound_step",
    "layers_with_steps",
    "own_steps",
    "run_step",
    "state_at",
    "states_of",
]

STATE_OF = {
    "causal_conv1d_update": "conv_state",
    "mamba_selective_state_update": "state",
    "mamba2_selective_state_update": "state",
    "torch_recurrent_gated_delta_rule": "initial_state",
    "recurrent_kimi_delta_attention": "initial_state",
    **STATE_OF_BLOCKS,
}
"""Functions that compute one token's step, and the name of the argument that is the state."""


@dataclass(frozen=True, order=True)
class StatePlace:
    """Place of a state in a cache.

    Attributes:
        layer: index of the layer.
        kind: `"conv_states"` or `"recurrent_states"`.
        index: index among the layer's states of this kind; the key of one that a module stores (module_states.py).
    """

    layer: int
    kind: str
    index: int | str


@dataclass(frozen=True)
class StateStep:
    """A call of a function that computes one token's step.

    Attributes:
        name: name of the function in transformers.
        function: the function.
        place: place of its state.
        state: the state as kernels know it.
        tensors: names of its arguments that are tensors, in the order of the node's.
        dtypes: types of these. A draft's may be others, and are cast.
        of_token: of each of these, whether it has a row for each token; others are the same for all.
        others: the other arguments.
    """

    name: str
    function: Callable[..., Any]
    place: StatePlace
    state: State
    tensors: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    of_token: tuple[bool, ...]
    others: tuple[tuple[str, Any], ...]

    def given(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by name but for the state, with these for the tensors."""
        return {**dict(zip(self.tensors, tensors, strict=True)), **dict(self.others)}


def run_step(attention: CacheAttention, step: StateStep, *tensors: torch.Tensor) -> torch.Tensor:
    """Compute a step for each token of a pass by transformers' own function, on the states in the cache.

    Args:
        attention: attention of the pass, which knows the cache and the texts.
        step: the call.
        tensors: its arguments that are tensors, `(n, …)` where they have a row for each token.

    Returns:
        Results `(n, …)`; zeros for tokens that fill the pass up.
    """
    state = attention.states.layers[step.state.layer][step.state.number]
    of_token = [tensor for tensor, has_rows in zip(tensors, step.of_token, strict=True) if has_rows]
    given = [tensor.to(dtype) for tensor, dtype in zip(tensors, step.dtypes, strict=True)]
    found: list[torch.Tensor] = []
    for text, place in enumerate(attention.texts):
        rows = slice(place.row, place.row + 1)
        own = state.working[rows]
        if state.source is not state.working:
            own.copy_(state.source[rows])
        begin = text * attention.count
        for token in range(begin, begin + attention.count):
            if token - begin == attention.states.saved_after and state.saved is not None:
                state.saved[rows].copy_(own)
            parts = [
                tensor[token : token + 1] if has_rows else tensor
                for tensor, has_rows in zip(given, step.of_token, strict=True)
            ]
            result = step.function(**step.given(parts), **{STATE_OF[step.name]: own})
            if isinstance(result, tuple):
                result, after = result
                own.copy_(after)
            found.append(result)
    if (missing := len(of_token[0]) - len(found)) > 0:
        found.append(found[0].new_zeros((missing, *found[0].shape[1:])))
    whole = torch.cat(found)
    dtype, captured = next((t.dtype, kind) for t, kind in zip(tensors, step.dtypes, strict=True))
    return whole if dtype is captured else whole.to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# the layers


def layers_with_steps(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that compute a state by one of transformers' functions for that."""
    return layers_that_call(model, frozenset(STATE_OF))


class StatesPart(Part):
    """Part of a model's state: the states that its cache holds for one text, by place; `None` until that is known."""

    def __init__(self) -> None:
        self.states: dict[StatePlace, torch.Tensor] | None = None

    def drop(self) -> None:
        self.states = None


def states_of(model: PreTrainedModel) -> Mapping[StatePlace, torch.Tensor]:
    """Return zeros in the form of each state that the cache of a model holds for one text, found by a short pass.

    Args:
        model: the target model, not in skip mode.
    """
    part = state_of(model).get(StatesPart)
    if part.states is None:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        if any(map(keeps_states, cache.layers)):
            ids = torch.zeros((1, 2), dtype=torch.long, device=model.get_input_embeddings().weight.device)
            with torch.inference_mode():
                fill_cache(model, ids, cache)
        part.states = {
            StatePlace(layer, kind, index): torch.zeros_like(state)
            for layer, held in enumerate(cache.layers)
            if is_known(held)
            for kind in ("conv_states", "recurrent_states")
            for index, state in getattr(held, kind).items()
            if state is not None
        }
    return part.states


def state_at(place: StatePlace, states: Mapping[StatePlace, torch.Tensor]) -> State:
    """Return a state as kernels know it.

    Args:
        place: its place.
        states: zeros in the form of each state of the model.
    """
    its = sorted(other for other in states if other.layer == place.layer)
    return State(place.layer, its.index(place), tuple(states[place].shape[1:]), states[place].dtype)


# ----------------------------------------------------------------------------------------------------------------------
# capturing them


def own_steps(layers: list[nn.Module], make: Maker) -> AbstractContextManager[None]:
    """Replace the functions for steps by functions of this library; arguments as in `own_functions`."""
    return own_functions(layers, frozenset(STATE_OF), make)


def bound_step(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state, the other tensors and the other arguments of a call.

    Args:
        name: name of the function.
        function: the function.
        args, kwargs: its arguments.
    """
    plain = inspect.unwrap(function)
    parameters = inspect.signature(plain).parameters
    bound = inspect.signature(plain).bind(*args, **kwargs)
    ignored = {name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD}
    given = {name: value for name, value in bound.arguments.items() if name not in ignored}
    state = given.pop(STATE_OF[name], None)
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    others = {key: value for key, value in given.items() if value is not None and key not in tensors}
    return state, tensors, others
