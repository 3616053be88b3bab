"""A forward pass over a few tokens, captured from the model's own code as a `torch.fx.Graph`.

A small model spends more time in Python (modules, keyword arguments, masks, cache objects) than in its matrices. A pass
over n tokens that continues a KV cache always does the same operations on the same shapes, so it is captured once and
compiled (fx_graph.py). Nothing is known about model families: what is captured are the torch functions that the
model's `forward` calls.

The nodes are made by a torch function mode of our own (recording.py). fx's symbolic tracer cannot follow the models
(branches on shapes and on the cache), and while it traces, it patches `nn.Module` for every thread. Dynamo and
`torch.export` follow them, but take seconds per model, and guard on what is examined here once.

A pass can be captured where it is a pure function of token ids, positions and the cache, and where it attends through
transformers' attention interface or torch's function. Some of what a model calls is replaced meanwhile, to become one
node (model_calls.py). Everything else is refused with `CannotCapture`, and the caller runs the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ...cache.recurrent import has_states_alone, layers_without_keys
from ...support.versions import cache_argument
from .fx_graph import CapturedPass
from .model_calls import ModelCalls
from .pretend_cache import CacheLength, CannotCapture, HeldKeys, PretendLayer, pretend_states
from .recording import Recording
from .state_steps import StatePlace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CannotCapture", "capture_pass"]

_INPUTS = {"input_ids", "position_ids"}


def capture_pass(
    model: PreTrainedModel,
    length: int,
    cached: int,
    windows: Sequence[int | None] = (),
    states: Mapping[StatePlace, torch.Tensor] = MappingProxyType({}),
) -> CapturedPass:
    """Capture a pass over `length` tokens after a cache that holds `cached`.

    The large products are not computed: a capture takes the time of the model's Python code and little more.

    Args:
        model: the target model, in skip mode or not.
        length: n ≥ 1.
        cached: tokens in the cache, ≥ 1. The captured pass must not depend on it: see `same_pass`.
        windows: sliding window of each layer that the attention of the captured pass knows about.
        states: zeros in the form of each recurrent state of the cache.

    Raises:
        CannotCapture: the pass is not a pure function of ids, positions and cache.
    """
    recording = Recording({id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())})
    keys: HeldKeys = {}
    cache = _pretended(model, recording, keys, length, cached, states)
    calls = ModelCalls(model, recording, keys, length, cached, windows, states)
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode(), calls.replaced():
        ids = torch.zeros((1, length), dtype=torch.long, device=device)
        positions = torch.arange(cached, cached + length, device=device)[None]
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=length,
            attention_mask=None,
            position_ids=positions,
            **{cache_argument(model): cache},
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0  # all; some models put a number of their own there
        extra = {key for key, value in inputs.items() if isinstance(value, torch.Tensor)} - _INPUTS
        if extra or not isinstance(inputs.get("input_ids"), torch.Tensor):
            raise CannotCapture(f"the model takes further tensors: {', '.join(sorted(extra))}")
        counts = inputs.get("position_ids")
        if counts is None and not has_states_alone(model):
            raise CannotCapture("the model takes no position ids")
        recording.input("ids", inputs["input_ids"])
        recording.input("positions", positions if counts is None else counts)
        recording.attend = calls.attend_directly
        recording.attention = recording.noted(recording.graph.placeholder("attention"), None)
        with recording:
            logits = model(**inputs, return_dict=True).logits
        made = recording.node_of(logits)
        if made is None or tuple(logits.shape[:2]) != (1, length):
            raise CannotCapture("the logits are not a result of the captured operations, one row per token")
    recording.noted(recording.graph.output(made), None)
    captured = CapturedPass(recording.graph, recording.constants, length)
    captured.eliminate_dead_code()
    return captured


def _pretended(
    model: PreTrainedModel,
    recording: Recording,
    keys: HeldKeys,
    length: int,
    cached: int,
    states: Mapping[StatePlace, torch.Tensor],
) -> Cache:
    """Return a cache that claims to hold a prefix, and adds to `keys` what it returns; others as in `capture_pass`."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    layers: list[Any] = [PretendLayer(index, CacheLength(cached, length), keys) for index in range(count)]
    without_keys = layers_without_keys(model) if states else ()
    for index in {place.layer for place in states}:
        keys_and_values = None if index in without_keys else layers[index]
        layers[index] = pretend_states(index, keys_and_values, states, length, recording.states)
    return Cache(layers=layers)
