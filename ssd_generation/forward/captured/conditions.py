"""Conditions under which passes of a model may be captured."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from ...cache.recurrent import has_states, has_states_alone, usual_layers
from ...support.model_state import Part, state_of
from ...support.once import looked_at_once
from ...support.structure import is_of_transformers, modules_of
from ..structure.adapters import has_adapters
from ..structure.dropout import active_dropout
from ..structure.linears import is_plain
from .replacing import layers_that_call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "EAGER",
    "ConditionsPart",
    "does_something",
    "forbid_batch_capture",
    "forbid_capture",
    "has_patched_forward",
    "is_chunked",
    "layers_that_attend",
    "own_attentions",
    "why_no_batch_captured",
    "why_not_captured",
    "why_not_on",
    "windows_of",
]


class ConditionsPart(Part):
    """Part of a model's state: why none of its passes, or none over several rows, may be captured, by its checks."""

    def __init__(self) -> None:
        self.capture_refusal: str | None = None
        self.batch_refusal: str | None = None


def forbid_capture(model: PreTrainedModel, reason: str | None) -> None:
    """Forbid captured passes of this model from now on, or allow them again.

    Args:
        model: the target model.
        reason: error that was found in its captured passes; `None`: they may be captured again.
    """
    state_of(model).get(ConditionsPart).capture_refusal = reason


def forbid_batch_capture(model: PreTrainedModel, reason: str | None) -> None:
    """Forbid captured passes over several rows from now on, or allow them again; arguments as in `forbid_capture`."""
    state_of(model).get(ConditionsPart).batch_refusal = reason


def why_no_batch_captured(model: PreTrainedModel) -> str | None:
    """Return why passes over several rows are not captured; `None` where they may be.

    Args:
        model: the target model.
    """
    return state_of(model).get(ConditionsPart).batch_refusal or why_not_captured(model)


def why_not_captured(
    model: PreTrainedModel, even_forbidden: bool = False, replaced: Collection[int] = ()
) -> str | None:
    """Return why passes of this model are not captured; `None` where they may be.

    Args:
        model: the target model.
        even_forbidden: whether to ignore `forbid_capture`.
        replaced: ids of modules that are replaced in the passes, so that their make does not matter.
    """
    if not even_forbidden and (refusal := state_of(model).get(ConditionsPart).capture_refusal) is not None:
        return refusal
    return why_not_on(model, torch.device("cpu"), "it is not on the CPU", frozenset(replaced))


@looked_at_once
def why_not_on(
    model: PreTrainedModel, device: torch.device, elsewhere: str, replaced: Collection[int] = frozenset()
) -> str | None:
    """Return why passes are not captured on a device; `elsewhere` where a weight is not on it."""
    implementation = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    if implementation != "sdpa" and not has_states_alone(model):
        if implementation != "eager":
            return "its attention implementation is not sdpa"
        if not layers_that_attend(model) and (device.type != "cpu" or not own_attentions(model)):
            return "its attention is code of its own, not called through transformers' interface"
    if has_states(model) and device.type != "cpu":
        return "it has recurrent states"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if device.type != "cpu" and has_adapters(model):
        return "adapters are loaded"
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return "global module hooks are installed"
    for module in modules_of(model):
        is_replaced = bool(replaced) and id(module) in replaced
        for tensor in module._parameters.values():
            if tensor is not None and (tensor.device.type, tensor.device.index or 0) != (
                device.type,
                device.index or 0,
            ):
                return elsewhere
            if tensor is not None and not is_replaced and not is_plain(tensor):
                return "its weights are not plain tensors"
        hooks = module._forward_hooks or module._forward_pre_hooks  # most modules have none
        if hooks and any(map(does_something, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
            return f"a hook is installed on {type(module).__name__}"
        # Tested first: few modules have one, and every call checks all modules.
        if ("forward" in module.__dict__ and has_patched_forward(module)) or module._compiled_call_impl is not None:
            return f"the forward of {type(module).__name__} is patched or compiled"
        if not is_replaced and not type(module).__module__.startswith(_CAPTURED_CODE):
            return f"{type(module).__name__} is not a class of torch, transformers or PEFT"
    return active_dropout(model)


def own_attentions(model: nn.Module) -> list[Any]:
    """Return the modules of a model that attend by a method of their own that is known here, `_attn` (GPT-Neo)."""
    return [module for module in modules_of(model) if is_of_transformers(module, "GPTNeoSelfAttention")]


def is_chunked(model: PreTrainedModel) -> bool:
    """Tell whether a model has layers whose attention is chunked."""
    return any(window is not None and window < 0 for window in windows_of(model))


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Return the number of tokens that the attention of each layer sees, or minus the size of chunks; `None`: all.

    In chunked attention (Llama 4) a token sees those before it in its own chunk of the text.
    """
    windows: list[int | None] = [getattr(layer, "sliding_window", None) for layer in usual_layers(model)]
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    chunked = {index for index, kind in enumerate(types) if kind == "chunked_attention"}
    windows = [-size if size and index in chunked else size for index, size in enumerate(windows)]
    for module in own_attentions(model):
        if module.attention_type == "local":  # whose cache holds all tokens
            windows[module.layer_id] = int(module.config.window_size)
    return windows


EAGER = frozenset({"eager_attention_forward"})
"""Name of the function, in each file of models, that computes attention where it is eager."""


def layers_that_attend(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that attend through transformers' interface."""
    return layers_that_call(model, EAGER)


_CAPTURED_CODE = ("torch.nn.", "transformers.", "peft.tuners.", "peft.utils.")
"""Beginnings of the names of modules whose classes compute their results by torch functions alone. What switches
PEFT's layers is part of a model's fingerprint."""

_TRANSPARENT = {("trl.trainer.utils", "_fused_forward"): "original_forward"}
"""Wrappers of a model's forward that only pass calls of `generate` on, by module and name, with the variable that they
call: TRL's head that computes log-probabilities where a trainer requests them."""


def has_patched_forward(module: nn.Module) -> bool:
    """Tell whether a module has a forward that does more than its class's.

    Args:
        module: any module.
    """
    patched = module.__dict__.get("forward")
    while patched is not None and getattr(patched, "__self__", None) is module:
        function = patched.__func__
        if function is type(module).forward:
            return False
        code = getattr(function, "__code__", None)
        if code is None:
            return True
        called = _TRANSPARENT.get((function.__globals__.get("__name__"), code.co_name))
        if called not in code.co_freevars:
            return True
        patched = function.__closure__[code.co_freevars.index(called)].cell_contents
    return patched is not None


def does_something(hook: Any) -> bool:
    """Tell whether a hook changes what a captured pass computes; two of transformers' own do not.

    The one left by a call that requested hidden states does nothing until the next such call, whose passes are not
    captured; the one that trainers install for gradient checkpointing marks embeddings as requiring gradients.
    """
    names = getattr(hook, "__module__", None), getattr(hook, "__name__", None)
    return names[0] != "transformers.utils.output_capturing" and names != (
        "transformers.modeling_utils",
        "make_inputs_require_grads",
    )
