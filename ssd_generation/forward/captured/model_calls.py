"""Functions that replace those which a model's code calls while one of its passes is captured.

Attention, layers of experts, steps of recurrent states and the expansion of latents become nodes as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from ...config import SkipConfig
from ..eager.module_states import Holder, module_states
from ..structure.expert_layers import add_unchanged, are_routed, experts_of, run_experts, unchanged_from
from ..structure.skip_mode import SkipMode
from .conditions import EAGER, layers_that_attend, own_attentions
from .griffin import is_griffin_block, run_griffin_block
from .latent_attention import EXPANSION, from_latent, into_latent
from .pretend_cache import CannotCapture, HeldKeys
from .recording import Recording
from .replacing import modules_with, own_attention, own_functions, own_methods
from .state_steps import (
    STATE_OF,
    StatePlace,
    StateStep,
    bound_step,
    layers_with_steps,
    own_steps,
    run_step,
    state_at,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelCalls"]

_WARNING = "warn_if_padding_and_no_attention_mask"
"""Method of transformers' models that reads token ids, only to warn."""

_UNKNOWN = ("position_bias", "sinks", "indices", "sliding_window", "cache")
"""Arguments of transformers' attention functions that change what they compute, and have no kernel here."""


@dataclass(frozen=True)
class _Expanded:
    """Keys and values of all heads that a layer computes from latents.

    Attributes:
        key: tensor that represents the keys, `(1, H, n, D)`.
        value: tensor that represents the values.
        held: the cache's latents and rotated keys.
        weight: matrices of keys and values, as in `into_latent`.
        size: size of a head's keys that are not rotated.
    """

    key: torch.Tensor
    value: torch.Tensor
    held: tuple[torch.Tensor, torch.Tensor]
    weight: torch.Tensor
    size: int


class ModelCalls:
    """Replacements for one capture.

    Args:
        model: the target model, in skip mode or not.
        recording: the mode that makes the nodes.
        keys: keys and values that the cache was given.
        length: tokens of the pass, n.
        cached: tokens in the cache.
        windows: as in `capture_pass`.
        states: as in `capture_pass`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recording: Recording,
        keys: HeldKeys,
        length: int,
        cached: int,
        windows: Sequence[int | None],
        states: Mapping[StatePlace, torch.Tensor],
    ) -> None:
        self._model, self._recording, self._keys = model, recording, keys
        self._length, self._cached = length, cached
        self._windows, self._states = windows, states
        self._expanded: dict[int, _Expanded] = {}  # by id of the keys
        self._masks: list[torch.Tensor] = []
        self._device = model.get_input_embeddings().weight.device

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the functions within the block, on this thread."""
        model = self._model
        is_eager = model.config.get_text_config(decoder=True)._attn_implementation == "eager"
        its_states = layers_with_steps(model) if self._states else []
        # On a GPU, the operations of experts are captured one by one, and replayed as part of a CUDA graph.
        its_experts = experts_of(model) if self._device.type == "cpu" else []
        patched = [(module, partial(self.experts, module)) for module in its_experts]
        held = module_states(model) if self._states else None
        blocks = [holder for holder in (held.held if held else ()) if is_griffin_block(holder.module)]
        by_token = [(module, partial(_by_token, module)) for module in its_states]
        by_token += [(holder.module, partial(self.griffin_block, holder)) for holder in blocks]
        # Those that a draft skips are replaced already.
        patched += [(module, forward) for module, forward in by_token if "forward" not in module.__dict__]
        with ExitStack() as stack:
            if patched:
                stack.enter_context(SkipMode(model, SkipConfig(), patched))
            if its_states:
                stack.enter_context(own_steps(its_states, lambda name, function: partial(self.step, name, function)))
            stack.enter_context(own_attention(lambda original: self.attention, self.mask))
            if is_eager:
                eager = own_functions(layers_that_attend(model), EAGER, lambda name, original: self.attention)
                stack.enter_context(eager)
            stack.enter_context(own_methods(own_attentions(model), "_attn", lambda module: self.attention_of_gpt_neo))
            for method, make in (
                (EXPANSION, lambda module: partial(self.expand, module)),
                (_WARNING, lambda module: lambda *_, **__: None),
            ):
                stack.enter_context(own_methods(modules_with(model, method), method, make))
            yield

    # ------------------------------------------------------------------------------------------------------------------
    # attention

    def mask(self, *_: Any, allow_is_causal_skip: bool = True, **__: Any) -> torch.Tensor | None:
        """Return a mask that the attention recognises where the model needs one, to compute another from it."""
        if allow_is_causal_skip:
            return None
        with torch._C.DisableTorchFunction():
            shape = (1, 1, self._length, self._cached + self._length)
            self._masks.append(torch.zeros(shape, device=self._device))
        return self._masks[-1]

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Make the node of attention, with the arguments of transformers' functions for it."""
        of_latents = self._expanded.get(id(key))
        if of_latents is not None and value is of_latents.value:
            key, value = of_latents.held
        held = [self._keys.get(id(state)) for state in (key, value)]
        if held[0] is None or held[1] is None or held[0][0] != held[1][0]:
            raise CannotCapture("an attention reads keys or values that did not come from the cache of one layer")
        layer = held[0][0]
        window = self._windows[layer] if layer < len(self._windows) else None
        if window is not None and kwargs.get("sliding_window") == window:
            kwargs["sliding_window"] = None
        odd = [name for name in _UNKNOWN if kwargs.get(name) is not None]
        if any(attention_mask is known for known in self._masks):
            attention_mask = None
        if odd or attention_mask is not None or dropout or is_causal is False:
            raise CannotCapture(f"an unsupported attention ({', '.join(odd) or 'mask, dropout or not causal'})")
        if s_aux is not None and tuple(s_aux.shape) != (query.shape[1],):
            raise CannotCapture("an attention with sinks of an unsupported shape")
        if query.ndim != 4 or query.shape[0] != 1 or query.shape[2] != self._length or query.shape[1] % key.shape[1]:
            raise CannotCapture("an attention with unsupported shapes")
        scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
        recording = self._recording
        with torch._C.DisableTorchFunction():
            new = [recording.argument(given) for _, _, given in held]  # type: ignore[misc]
            if of_latents is not None:
                if softcap is not None or s_aux is not None or window is not None:
                    raise CannotCapture("an unsupported attention (latents)")
                return self._attend_latents(of_latents, query, new, layer, scale), None
            result = query.new_zeros((1, self._length, query.shape[1], value.shape[3]))
            options = () if softcap is None and s_aux is None else (softcap, recording.argument(s_aux))
            arguments = recording.attention, recording.argument(query), *new, layer, scale, *options
            made = recording.graph.call_method("attend", arguments)
            recording.noted(made, result, writes=True)  # into the cache, which `attend` represents
        return result, None

    def attend_directly(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        """Make the node of attention by torch's function, with its arguments; `None` where it is over other keys."""
        if id(key) not in self._keys:
            return None
        is_causal = is_causal or self._length == 1 or attn_mask is not None
        result, _ = self.attention(self._model, query, key, value, attn_mask, dropout_p, scale, is_causal)
        with torch._C.DisableTorchFunction():
            return self._recording.transposed(result)

    def attention_of_gpt_neo(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """Make the node of attention by GPT-Neo's own method, which does not scale scores."""
        if not self._windows:
            raise CannotCapture("an attention with windows of its own")
        result, _ = self.attention(self._model, query, key, value, attention_mask, scaling=1.0)
        with torch._C.DisableTorchFunction():
            return self._recording.transposed(result), None

    def expand(self, module: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors that represent the keys and values of all heads, which a captured pass does not compute."""
        layer = module.kv_b_proj
        if type(layer) is not nn.Linear or layer.bias is not None:
            raise CannotCapture(f"latents are expanded by {type(layer).__name__}, or with a bias")
        if (latent.shape[1], rotated.shape[1]) != (1, 1):
            raise CannotCapture("an attention with unsupported shapes")
        with torch._C.DisableTorchFunction():
            size, values = module.qk_nope_head_dim, module.v_head_dim
            heads = layer.weight.shape[0] // (size + values)
            key = latent.new_zeros((1, heads, self._length, size + rotated.shape[3]))
            value = latent.new_zeros((1, heads, self._length, values))
        self._expanded[id(key)] = _Expanded(key, value, (latent, rotated), layer.weight, size)
        return key, value

    def _attend_latents(
        self, of_latents: _Expanded, query: torch.Tensor, new: Sequence[Any], layer: int, scale: float
    ) -> torch.Tensor:
        """Make the nodes of latent attention (latent_attention.py); `new`: the nodes of latents and rotated keys."""
        recording, graph = self._recording, self._recording.graph
        size, values = of_latents.size, of_latents.value.shape[3]
        whole, weight = recording.argument(query), recording.argument(of_latents.weight)
        parts: list[Node] = []
        for at, part in ((0, query[..., :size]), (size, query[..., size:])):
            made = graph.call_method("narrow", (whole, 3, at, part.shape[3]))
            parts.append(recording.noted(made, part, is_view=True))
        absorbed = query.new_zeros((*query.shape[:3], of_latents.held[0].shape[3]))
        made = recording.noted(graph.call_function(into_latent, (parts[0], weight, values)), absorbed)
        made = graph.call_method("attend_latents", (recording.attention, made, parts[1], *new, layer, scale))
        recording.noted(made, torch.zeros_like(absorbed), writes=True)
        result = query.new_zeros((*query.shape[:3], values))
        recording.noted(graph.call_function(from_latent, (made, weight, values)), result)
        return recording.transposed(result)

    # ------------------------------------------------------------------------------------------------------------------
    # layers

    def experts(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make the node of a layer of experts."""
        if kwargs or not are_routed(args):
            return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]
        recording, (hidden, chosen, weights), first = self._recording, args, unchanged_from(module)
        routed = weights if first is None else weights * (chosen < first)
        with torch._C.DisableTorchFunction():
            result = torch.zeros_like(hidden)
            arguments = map(recording.argument, (module, hidden, chosen, routed))
            recording.noted(recording.graph.call_function(run_experts, tuple(arguments)), result)
        return result if first is None else add_unchanged(first, result, hidden, chosen, weights)

    def griffin_block(self, holder: Holder, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Run a recurrent block whose states its modules store, with those of the cache (griffin.py)."""
        its = {place.index: state for place, state in self._recording.states.values() if place.layer == holder.layer}
        conv_state, state = (its[key] for key in holder.keys)
        return run_griffin_block(holder.module, hidden, conv_state, state, self.step)

    def step(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the node of a step of recurrent states (state_steps.py)."""
        state, tensors, others = bound_step(name, function, args, kwargs)
        recording = self._recording
        if id(state) not in recording.states:
            raise CannotCapture(f"{name} is called with something other than a state of the cache")
        with torch._C.DisableTorchFunction():
            place, represented = recording.states[id(state)]
            nodes = {key: recording.argument(tensor) for key, tensor in tensors.items()}
            of_token = {key: not recording.is_constant(node) for key, node in nodes.items()}
            # Over one token, for the form of the result.
            first = {key: tensor[:1] if of_token[key] else tensor for key, tensor in tensors.items()}
            result = function(**first, **{STATE_OF[name]: torch.zeros_like(self._states[place])}, **others)
            gives_state = isinstance(result, tuple)
            result = result[0] if gives_state else result
            result = result.new_zeros((self._length, *result.shape[1:]))
            form, rows = state_at(place, self._states), tuple(of_token.values())
            dtypes = tuple(tensor.dtype for tensor in tensors.values())
            made = StateStep(name, function, place, form, tuple(nodes), dtypes, rows, tuple(sorted(others.items())))
            arguments = recording.attention, recording.argument(made), *nodes.values()
            node = recording.graph.call_function(run_step, arguments)
            recording.noted(node, result, writes=True)  # into the cache, which the attention represents
        return (result, represented) if gives_state else result


def _by_token(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer of states on a pass's tokens as rows of a batch, of one token each."""
    hidden = args[0] if args else kwargs.pop("hidden_states")
    result = type(module).forward(module, hidden.transpose(0, 1), *args[1:], **kwargs)
    if not isinstance(result, tuple):
        return result.transpose(0, 1)
    return (result[0].transpose(0, 1), *result[1:])
