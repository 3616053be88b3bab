"""Timing of passes, and descriptions of everything that their times depend on, by which measurements are stored."""

from __future__ import annotations

import hashlib
import itertools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ..forward.captured.conditions import why_not_captured
from ..forward.cuda_graph.graph_passes import why_no_graphs
from ..forward.structure.linears import is_plain
from ..forward.structure.sublayers import input_device
from ..native.codegen.compiler import bfloat16_sums
from ..support.devices import is_asynchronous
from ..support.machine import cpu_name
from ..support.once import looked_at_once
from ..support.structure import follows_from_structure
from ..support.tensors import rest_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["InterleavedTimings", "describe_adapters", "describe_machine", "describe_model", "time_interleaved"]

_MOST_REPEATS = 15


def describe_machine(model: PreTrainedModel) -> str:
    """Describe what costs depend on besides model and config: device, threads, dtype, attention, version of torch."""
    device = input_device(model)
    if is_asynchronous(device):
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_name()}, {torch.get_num_threads()} threads"
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype == "bfloat16" and device.type == "cpu" and bfloat16_sums() == "tiles":
        dtype = f"{dtype} by AMX"
    return f"{device.type} ({name}), {dtype}, {attention}, torch {torch.__version__}"


@looked_at_once
def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Describe all that the cost of a model's passes depends on, as plain JSON types: the key of its measurements."""
    text_config = model.config.get_text_config(decoder=True)
    return {
        "machine": describe_machine(model),
        "transformers": transformers.__version__,
        "model": type(model).__name__,
        "weights": _describe_weights(model),
        "adapters": describe_adapters(model),
        "config": {
            key: value
            for key, value in sorted(text_config.to_dict().items())
            if isinstance(value, (int, float, str, bool)) and not key.startswith("_") and "token" not in key
        },
        "recorded": why_not_captured(model) is None,
        "replayed": why_no_graphs(model) is None,
        "format": 10,
    }


@follows_from_structure
def _describe_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Describe the kinds of weights, the devices that hold them, and what is done to bring them there."""
    kinds: Counter[str] = Counter()
    settings: set[str] = set()
    for parameter in itertools.chain(model.parameters(), model.buffers()):
        kind = "" if is_plain(parameter) else f" {type(parameter).__name__}"
        if kind and parameter.device.type != "meta":
            settings.add(_without_addresses(repr(rest_of(parameter))))
        kinds[f"{parameter.device.type} {str(parameter.dtype).removeprefix('torch.')}{kind}"] += parameter.numel()
    # A quantiser's layers differ in class from those that they replaced, an offloaded layer in its hook.
    layers = Counter(f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules())
    hooks = Counter(type(m._hf_hook).__name__ for m in model.modules() if hasattr(m, "_hf_hook"))
    asked = getattr(model.config, "quantization_config", None)
    method = getattr(asked, "quant_method", None)
    return {
        "kinds": dict(sorted(kinds.items())),
        "layers": dict(sorted(layers.items())),
        "hooks": dict(sorted(hooks.items())),
        "quantisation": None if method is None else str(method),
        # Includes whether activations are quantised as well, for example.
        "settings": None if asked is None and not settings else _digest([str(asked), *sorted(settings)]),
    }


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(map(_without_addresses, lines)).encode()).hexdigest()[:16]


def describe_adapters(model: PreTrainedModel) -> dict[str, Any] | None:
    """Describe the adapters loaded and in use: their layers are in the model's own, and may be switched off."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return None
    active = {
        tuple(map(str, names if isinstance(names, (list, tuple)) else [names]))
        for module in model.modules()
        if (names := getattr(module, "active_adapters", None)) is not None and not callable(names)
    }
    disabled = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
    merged = {str(name) for module in model.modules() for name in getattr(module, "merged_adapters", ())}
    return {
        "names": sorted(map(str, adapters)),
        "active": sorted(active),
        "disabled": disabled,
        "merged": sorted(merged),
    }


# ----------------------------------------------------------------------------------------------------------------------
# interleaving


@dataclass(frozen=True)
class InterleavedTimings:
    """Times of passes interleaved with plain steps.

    Attributes:
        plain_steps: seconds of each plain step.
        passes: seconds of each repetition, by pass.
        ratios: each of these divided by the mean of the plain steps before and after it, by pass.
    """

    plain_steps: list[float]
    passes: dict[Any, list[float]]
    ratios: dict[Any, list[float]]

    @property
    def plain(self) -> float:
        """Median seconds of a plain step."""
        return statistics.median(self.plain_steps)

    def ratio(self, name: Any) -> float:
        """Return the cost of a pass in plain steps: the median of the ratios."""
        return statistics.median(self.ratios[name])

    @property
    def seconds(self) -> list[list[float]]:
        """Seconds of everything that was repeated."""
        return [self.plain_steps, *self.passes.values()]


def time_interleaved(
    plain: Callable[[], float],
    passes: Mapping[Any, Callable[[], float]],
    is_over: Callable[[int, float], bool],
    most_repeats: int = _MOST_REPEATS,
    progress: Callable[[int, int], Any] = lambda repeats, count: None,
) -> InterleavedTimings:
    """Time passes interleaved with plain steps: the one way in which this library measures the cost of a pass.

    The machine changes from one moment to the next: other work takes memory bandwidth or lowers the clock. So each pass
    counts relative to the plain steps on either side of it, with at most two passes between them.

    Args:
        plain: makes a plain step and returns its seconds.
        passes: functions that make the other passes and return their seconds; each was called once before.
        is_over: `(repetitions, seconds spent)` → whether that is enough.
        most_repeats: maximum number of repetitions.
        progress: called with the repetitions done, and the passes made since.
    """
    timings = InterleavedTimings([], {name: [] for name in passes}, {name: [] for name in passes})
    names = list(passes)
    started, after = time.perf_counter(), plain()
    for repeat in range(most_repeats):
        for pair in (names[i : i + 2] for i in range(0, len(names), 2)):
            before, between = after, [passes[name]() for name in pair]
            after = plain()
            timings.plain_steps.append(after)
            for name, seconds in zip(pair, between, strict=True):
                timings.passes[name].append(seconds)
                timings.ratios[name].append(2 * seconds / (before + after))
            progress(repeat, 1 + len(pair))
        if is_over(repeat + 1, time.perf_counter() - started):
            break
    return timings
