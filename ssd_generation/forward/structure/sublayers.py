"""A model's attention and MLP sub-layers: how they are found.

The only file that knows model families, and it knows them by shape: the decoder layers are the `ModuleList` as long as
the config says, their sub-layers are found by the usual attribute names, and everything else (what a sub-layer returns,
which norms belong to it alone, whether it adds the residual itself) is read off one forward pass over a single token.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache.recurrent import layers_without_keys
from ...support.model_state import Part, state_of
from .layouts import DecoderLayout, Kind, LayerLayout, SubLayer, names_of, parts_of
from .offloaded import CannotStandIn, is_offloaded, stand_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "LayoutPart",
    "input_device",
    "layout_of",
    "locate_sublayers",
]

# Attribute names that transformers gives to the sub-layers, most common first.
_ATTENTION_NAMES = ("self_attn", "attn", "self_attention", "attention", "temporal_block")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "mlp_block")
# The MLP of a layer without an MLP module: (first linear, last linear).
_MLP_PAIRS = (("fc1", "fc2"), ("intermediate", "output"))


def input_device(model: nn.Module) -> torch.device:
    """Return the device for token ids: that of the embedding, or, where it is offloaded, that on which it runs."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    device: torch.device = next(embedding.parameters()).device
    if device.type != "meta":
        return device
    hook = getattr(embedding, "_hf_hook", None)
    hooks = getattr(hook, "hooks", None) or [hook]
    where = next((w for h in hooks if (w := getattr(h, "execution_device", None)) is not None), "cpu")
    return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)


class _CannotSkip(ValueError):
    """A part that skipping needs is missing or unknown."""


class _DoesNotRun(_CannotSkip):
    """The pass that finds the parts fails."""


def locate_sublayers(model: PreTrainedModel) -> DecoderLayout:
    """Find the attention and MLP sub-layers of a causal language model, and raise where none can be skipped.

    Args:
        model: a decoder-only transformers model.

    Raises:
        ValueError: a part that skipping needs is missing or unknown; the message says which.
    """
    layout = layout_of(model)
    if layout.refusal is not None:
        raise ValueError(layout.refusal)
    return layout


class LayoutPart(Part):
    """Part of a model's state: the layout of its attention and MLP sub-layers."""

    def __init__(self) -> None:
        self.layout: DecoderLayout | None = None

    def drop(self) -> None:
        self.layout = None


def layout_of(model: PreTrainedModel) -> DecoderLayout:
    """Find the attention and MLP sub-layers of a causal language model, or the reason why none can be skipped.

    The first call runs the model on one token, to see what the sub-layers return and which norms serve one of them
    only; the result is stored with the model and recomputed when its modules were exchanged.

    Args:
        model: a decoder-only transformers model.

    Returns:
        The layout of its decoder layers.

    Raises:
        ValueError: it is an encoder-decoder model.
    """
    state = state_of(model).get(LayoutPart)
    layout: DecoderLayout | None = state.layout
    if layout is None or not layout.is_current():
        layout = state.layout = _locate(model)
    return layout


def _locate(model: PreTrainedModel) -> DecoderLayout:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; self-speculative decoding is for decoder-only models."
        )
    total, depth = sum(p.numel() for p in model.parameters()), int(config.num_hidden_layers)
    try:
        layouts = _layouts_without_weights(model, depth) if is_offloaded(model) else _layouts(model, depth)
    except _CannotSkip as error:
        ran = not isinstance(error, _DoesNotRun)
        return DecoderLayout((), total, frozenset(), refusal=str(error), depth=depth, ran=ran)
    shared, without_keys = _layers_read_by_others(config, depth), layers_without_keys(model)
    return DecoderLayout(layouts, total, shared, depth=depth, without_keys=without_keys)


def _layouts_without_weights(model: PreTrainedModel, depth: int) -> tuple[LayerLayout, ...]:
    """Run `_layouts` for a model with offloaded weights on a stand-in, which reads none, or else on the model."""
    try:
        with stand_in(model) as (other, made):
            layouts = _layouts(other, depth)
    except (CannotStandIn, _DoesNotRun):
        return _layouts(model, depth)
    originals = {id(made[id(module)]): module for module in model.modules()}
    return tuple(layer.of_modules(originals) for layer in layouts)


def _layouts(model: PreTrainedModel, depth: int) -> tuple[LayerLayout, ...]:
    """Return the layout of each decoder layer.

    Raises:
        _CannotSkip: a part that skipping needs is missing or unknown.
    """
    lists = _layer_lists(model, depth)
    try:
        traces = _trace(model, [slot.module for slots in lists for slot in slots])
    except Exception as error:  # whatever a model's code raises
        said = " ".join(str(error).split())[:200]
        raise _DoesNotRun(
            f"The pass of {type(model).__name__} over a single token that is to locate its sub-layers fails "
            f"({type(error).__name__}: {said}). No sub-layers of this model can be skipped."
        ) from error
    # A tower for pictures or sound may have as many layers: text does not go through it.
    starts = range(0, len(traces), depth)
    run = [start for start in starts if any(trace.ran for trace in traces[start : start + depth])]
    if len(run) != 1:
        found = "none" if not run else f"{len(run)} of them"
        raise _CannotSkip(_one_list(model, depth, f"a token goes through {found}"))
    slots, trace = lists[run[0] // depth], traces[run[0] : run[0] + depth]
    used = {id(value) for each in trace for call in each.calls for value in call.inputs}
    layouts = tuple(_layer_layout(i, slot, trace[i], used) for i, slot in enumerate(slots))
    refusals = [reason for layer in layouts for reason in layer.refusals.values()]
    if refusals and all(layer.attention is None and layer.mlp is None for layer in layouts):
        raise _CannotSkip(f"{refusals[0]} No other sub-layer of this model can be skipped either.")
    if not refusals and all(layer.attention is None for layer in layouts):
        raise _CannotSkip(
            f"No attention sub-layer was found in the layers of {type(model).__name__}: a layer consists of "
            f"{names_of(slots[0].module)}, and none of them is called {', '.join(_ATTENTION_NAMES)} or is an attention "
            "class."
        )
    return layouts


@dataclass(frozen=True)
class _Slot:
    """A decoder layer, or a part of one that counts as a layer: entry `part` of its lists of attentions and MLPs."""

    module: nn.Module
    part: int | None = None

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that it may consist of, by name."""
        if self.part is None:
            return {name: module for name, module in self.module._modules.items() if module is not None}
        return {
            name: module[self.part]
            for name, module in self.module._modules.items()
            if isinstance(module, nn.ModuleList) and self.part < len(module)
        }


def _layer_lists(model: PreTrainedModel, num_layers: int) -> list[list[_Slot]]:
    """Return the lists with as many entries as decoder layers and attention inside; one of them has these layers.

    A layer may hold several attentions, each of which counts as a layer (longcat_flash).
    """
    lists: list[list[_Slot]] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or not len(module) or num_layers % len(module):
            continue
        several = num_layers // len(module)
        places = [None] if several == 1 else range(several)
        slots = [_Slot(layer, place) for layer in module for place in places]
        if any(_attention_of(slot.parts()) is not None for slot in slots):
            lists.append(slots)
    if not lists:
        raise _CannotSkip(_one_list(model, num_layers, "found none"))
    return lists


def _one_list(model: PreTrainedModel, num_layers: int, but: str) -> str:
    return (
        f"{type(model).__name__} should have one list of {num_layers} decoder layers with an attention sub-layer "
        f"(called {', '.join(_ATTENTION_NAMES)}); {but}. No sub-layers of this model can be skipped."
    )


def _attention_of(parts: Mapping[str, nn.Module]) -> tuple[str, nn.Module] | None:
    """Return the attention among a layer's parts, or its replacement as token mixer: a state space, a convolution."""
    found = _child(parts, _ATTENTION_NAMES, ("Attention",))
    if found is not None:
        return found
    mlp = _mlp_of(parts)
    return next(((name, m) for name, m in _mixers(parts) if mlp is None or m not in mlp[1]), None)


def _mixers(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that have a place in the cache."""
    for name, module in parts.items():
        if isinstance(getattr(module, "layer_idx", None), int):
            yield name, module


def _mlp_of(parts: Mapping[str, nn.Module]) -> tuple[str, tuple[nn.Module, ...]] | None:
    found = _child(parts, _MLP_NAMES, ("MLP", "MoE", "FeedForward", "SparseMoeBlock"))
    if found is not None:
        return found[0], (found[1],)
    for first, last in _MLP_PAIRS:
        if first in parts and last in parts:
            return f"{first} … {last}", (parts[first], parts[last])
    return None


def _child(
    parts: Mapping[str, nn.Module], names: Iterable[str], endings: tuple[str, ...]
) -> tuple[str, nn.Module] | None:
    for name in names:
        if name in parts:
            return name, parts[name]
    for name, module in parts.items():
        if type(module).__name__.endswith(endings) and "cross" not in name:
            return name, module
    return None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


# ----------------------------------------------------------------------------------------------------------------------
# one token through the model, to see how its layers are wired


@dataclass
class _Call:
    """One call of a direct child of a layer during the tracing pass."""

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    output: Any


@dataclass
class _LayerTrace:
    calls: list[_Call]
    inner: list[_Call]
    """Calls of the children of direct children."""
    output: Any = None
    ran: bool = False


def _trace(model: PreTrainedModel, layers: list[nn.Module]) -> list[_LayerTrace]:
    traces = [_LayerTrace([], []) for _ in layers]
    handles = []
    here = threading.get_ident()  # another thread may be running the model just now

    def watch_child(calls: list[_Call], name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if threading.get_ident() != here:
                return
            inputs = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            calls.append(_Call(name, module, inputs, output))

        return hook

    def watch_layer(trace: _LayerTrace) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if threading.get_ident() == here:
                trace.output, trace.ran = output, True

        return hook

    token = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    try:
        for layer, trace in zip(layers, traces, strict=True):
            handles.append(layer.register_forward_hook(watch_layer(trace)))
            for name, child in parts_of(layer).items():
                handles.append(child.register_forward_hook(watch_child(trace.calls, name), with_kwargs=True))
                for inside, grandchild in child.named_children():
                    handles.append(grandchild.register_forward_hook(watch_child(trace.inner, inside), with_kwargs=True))
        # `forward` and not `__call__`: a compiled model need not be compiled for one token with hooks. The random state
        # is restored, so that a dropout in training mode changes no sampled text.
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=True):
            model.forward(input_ids=token, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return traces


def _layer_layout(index: int, slot: _Slot, trace: _LayerTrace, used: set[int]) -> LayerLayout:
    """Derive the layout of a layer from its trace; `used`: ids of the tensors that any part of any layer received."""
    attention, mlp = _attention_of(slot.parts()), _mlp_of(slot.parts())
    found: dict[Kind, tuple[str, tuple[nn.Module, ...]]] = {}
    if attention is not None:
        found["attention"] = (attention[0], (attention[1],))
    if mlp is not None:
        found["mlp"] = mlp
    alongside = _parts_alongside(slot, found, trace)
    for kind, parts in alongside.items():
        name, modules = found[kind]
        found[kind] = " + ".join((name, *(call.name for call in parts))), (*(call.module for call in parts), *modules)
    members = {id(m) for _, modules in found.values() for m in modules}
    # Other parts stay in the draft, so what a left-out sub-layer gives must suit them as input.
    others = [
        call
        for call in trace.calls
        if id(call.module) not in members and not _is_norm(call.module) and any(True for _ in call.module.parameters())
    ]
    norms = [call for call in trace.calls if _is_norm(call.module)]
    refusals: dict[Kind, str] = {}
    sublayers: dict[Kind, SubLayer] = {}
    owned: set[int] = set()
    for kind, (name, modules) in found.items():
        parts = alongside.get(kind, [])
        reason = _why_kept(kind, modules, len(parts), trace, others, used)
        if reason is not None:
            where = f"The {kind} of layer {index} ({name}, {type(modules[-1]).__name__})"
            refusals[kind] = f"{where} {reason}: skipping it would not be safe."
            continue
        last, first = (_calls_of(modules[place], trace)[0] for place in (-1, len(parts)))
        output = last.output
        private = [norm for norm in norms if _stands_before(norm, first, trace.calls)]
        residual_index = _residual_index(modules[-1])
        if residual_index is None:
            own_inputs = [call.inputs[0] for call in (first, *private) if call.inputs]
            residual_index = _given_again(last, own_inputs, trace.inner)
        if name.startswith("intermediate") and residual_index is None:
            where = f"The {kind} of layer {index} ({name})"
            refusals[kind] = (
                f"{where} does not receive the residual to add its output to: skipping it would not be safe."
            )
            continue
        if residual_index is None:  # otherwise what follows is the residual stream
            private += [norm for norm in norms if _follows(norm, output, trace.calls)]
        owned |= {id(norm) for norm in private}
        sublayers[kind] = SubLayer(
            kind=kind,
            layer=index,
            name=name,
            modules=modules,
            private_norms=tuple(norm.module for norm in private),
            output_length=_length(output),
            residual_index=residual_index,
            alongside=tuple(_length(call.output) for call in parts),
        )
    # A norm shared by both sub-layers (parallel attention and MLP) goes when both go; one on the residual stream stays.
    inputs_of_sublayers = {id(call.inputs[0]) for call in trace.calls if id(call.module) in members and call.inputs}
    stream_norms = [
        norm
        for norm in norms
        if id(norm) not in owned
        and (
            id(norm.output) not in inputs_of_sublayers
            or _uses(norm.output, trace.calls) != _first_uses(norm.output, trace.calls)
        )
    ]
    output = trace.output
    return LayerLayout(
        module=slot.module,
        index=index,
        attention=sublayers.get("attention"),
        mlp=sublayers.get("mlp"),
        output_length=_length(output),
        can_be_bypassed=not stream_norms and not others,
        refusals=refusals,
    )


def _calls_of(module: nn.Module, trace: _LayerTrace) -> list[_Call]:
    return [call for call in trace.calls if call.module is module]


def _why_kept(
    kind: Kind, modules: tuple[nn.Module, ...], parts: int, trace: _LayerTrace, others: list[_Call], used: set[int]
) -> str | None:
    """Return why a sub-layer cannot be left out; `None` where it can.

    Args:
        kind: kind of the sub-layer.
        modules: modules that it consists of; the first `parts` run alongside the others.
        parts: see `modules`.
        trace: observed calls of the layer.
        others: calls of parts that are neither sub-layers nor norms, and stay in the draft.
        used: ids of the tensors that any part of any layer received.
    """
    if kind == "attention":
        inside = [call for call in others if any(map(_holds_attention, call.module.modules()))]
        if inside:
            return f"is not all of the attention in the layer: there is more in {_listed(inside)}"
    calls = _calls_of(modules[-1], trace)
    if len(calls) != 1:
        return f"ran {len(calls)} times for one token instead of once"
    output = calls[0].output
    if isinstance(output, tuple) and any(isinstance(v, torch.Tensor) and id(v) in used for v in output[1:]):
        return "passes more than its output to other parts"
    first = _calls_of(modules[parts], trace)
    if others and not _is_of_shape(output, first[0].inputs if first else ()):
        return f"does not return what it receives, and the layer has other parts ({_listed(others)})"
    return None


def _holds_attention(module: nn.Module) -> bool:
    return _attention_of(_Slot(module).parts()) is not None


def _listed(calls: list[_Call]) -> str:
    return ", ".join(f"{call.name}: {type(call.module).__name__}" for call in calls)


def _parts_alongside(
    slot: _Slot, found: Mapping[Kind, tuple[str, tuple[nn.Module, ...]]], trace: _LayerTrace
) -> dict[Kind, list[_Call]]:
    """Find the parts that run alongside a layer's sub-layers and are left out with them: other mixers, shared experts.

    A mixer has a place in the cache. A shared expert has the input of the MLP and an output of the same shape, which no
    other part reads.
    """
    members = {id(m) for _, modules in found.values() for m in modules}
    mixers = {id(module) for _, module in _mixers(slot.parts())}
    mlp = found["mlp"][1][0] if "mlp" in found else None
    given = next((call.inputs[0] for call in trace.calls if call.module is mlp and call.inputs), None)
    alongside: dict[Kind, list[_Call]] = {}
    for call in trace.calls:
        if id(call.module) in members or _is_norm(call.module) or not call.inputs:
            continue
        if sum(other.module is call.module for other in trace.calls) != 1:
            continue
        if id(call.module) in mixers and "attention" in found:
            alongside.setdefault("attention", []).append(call)
        elif (
            given is not None
            and call.inputs[0] is given
            and _is_of_shape(call.output, call.inputs)
            and not _uses(call.output, trace.calls)
        ):
            alongside.setdefault("mlp", []).append(call)
    return alongside


def _length(output: Any) -> int | None:
    """Return the length of the tuple that a module returns; `None` where it returns a tensor."""
    return len(output) if isinstance(output, tuple) else None


def _is_of_shape(output: Any, inputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether the output of a module has the shape of its input."""
    tensor = output[0] if isinstance(output, tuple) else output
    return isinstance(tensor, torch.Tensor) and bool(inputs) and tensor.shape == inputs[0].shape


def _uses(tensor: Any, calls: list[_Call]) -> int:
    return sum(value is tensor for call in calls for value in call.inputs)


def _first_uses(tensor: Any, calls: list[_Call]) -> int:
    return sum(bool(call.inputs) and call.inputs[0] is tensor for call in calls)


# Tensors are compared by identity: a norm that is fed the residual stream plus a sub-layer's output sees another tensor
# than the sub-layer's output, and one whose result is also used as the residual is used twice.


def _stands_before(norm: _Call, first: _Call, calls: list[_Call]) -> bool:
    """Tell whether a norm feeds the sub-layer that starts with `first`, and nothing else."""
    return bool(first.inputs) and norm.output is first.inputs[0] and _uses(norm.output, calls) == 1


def _follows(norm: _Call, output: Any, calls: list[_Call]) -> bool:
    """Tell whether a norm reads a sub-layer's output unchanged, and nothing else reads it."""
    tensor = output[0] if isinstance(output, tuple) else output
    return bool(norm.inputs) and norm.inputs[0] is tensor and _uses(tensor, calls) == 1


def _residual_index(module: nn.Module) -> int | None:
    """Return the position of a parameter called `residual`: the sub-layer adds the residual itself (bloom, mpt)."""
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    return parameters.index("residual") if "residual" in parameters else None


def _given_again(call: _Call, own_inputs: list[torch.Tensor], inner: list[_Call]) -> int | None:
    """Find the residual's position in the call that gives a sub-layer's output, where it is the sub-layer's input.

    BERT and its kind add the residual in the last part of a sub-layer, which receives the sub-layer's input alongside
    what was computed from it. That part may be the call itself, or the last one that it calls.
    """

    def place(part: _Call, own: list[torch.Tensor]) -> int | None:
        first, *others = part.inputs or (None,)
        if any(first is value for value in own):  # queries, keys and values of one source, say
            return None
        return next((place for place, value in enumerate(others, 1) if any(value is one for one in own)), None)

    if (found := place(call, own_inputs)) is not None:
        return found
    output = call.output[0] if isinstance(call.output, tuple) else call.output
    for part in inner:
        if part.output is output and place(part, list(call.inputs[:1])) is not None:
            return 0
    return None


def _layers_read_by_others(config: Any, num_layers: int) -> frozenset[int]:
    """Return layers whose attention stores keys and values for later layers (KV sharing, as in gemma3n and gemma4)."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return frozenset(i for i, mode in enumerate(modes) if mode not in (None, "none", "reuse"))
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return frozenset(range(num_layers - shared)) if shared else frozenset()
