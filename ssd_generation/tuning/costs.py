"""What a draft step and a verify pass cost on this machine: measured once, kept on the disk."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging as hf_logging

from ..cache.layers import BufferedLayer, add_buffers
from ..config import Costs, SelfSpeculativeConfig
from ..config.values import SECONDS
from ..forward.capturable import why_not_captured
from ..forward.forward import Context, Forward
from ..forward.low_bit import is_plain
from ..forward.sublayers import input_device
from ..support.bounds import Number
from ..support.machine import cpu_name
from ..support.measurements import NoisyMeasurement, cached_measurement, flag_if_noisy, value_of
from ..support.parallel import broadcast
from ..support.tensors import argmax
from ..support.timing import Stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Passes",
    "TimingsInTurns",
    "costs_of",
    "describe_adapters",
    "describe_machine",
    "describe_model",
    "measure_costs",
    "time_in_turns",
]

VERIFIED = (2, 3, 4, 5, 6, 8, 10, 13)
"""Lengths of the verify passes that are measured; 13: the pending token and the 12 drafted ones of a longest round."""

LONGEST_VERIFIED = 32
"""The longest verify pass that `Passes` can make."""

_RATIO = Number(1e-6, 1e6, "a number of plain steps")
_CONTEXT = 64
_REPEATS = 3
_MOST_REPEATS = 15
_ENOUGH_SECONDS = 4.0
"""Beyond this much time there are no more than `_REPEATS` repetitions."""
_SECONDS = 6.0
"""Beyond this much time there are fewer: a large model's passes vary less."""


def describe_machine(model: PreTrainedModel) -> str:
    """What the costs depend on besides model and config: device, threads, dtype, attention, versions of torch."""
    device = input_device(model)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_name()}, {torch.get_num_threads()} threads"
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{device.type} ({name}), {dtype}, {attention}, torch {torch.__version__}"


# ----------------------------------------------------------------------------------------------------------------------
# measuring


def measure_costs(model: PreTrainedModel, config: SelfSpeculativeConfig) -> Costs:
    """Measure a plain step, a draft step and verify passes of this library's loop, in seconds, on random tokens.

    The passes take turns with plain steps, and each counts relative to those beside it, so that a machine that slows
    down meanwhile slows both; the medians are taken.

    Args:
        model: the target model.
        config: what the draft leaves out, and its precision.

    Returns:
        The costs, with `measured_on` set.
    """
    verify = value_of(_measure(model, None, VERIFIED, "verification"))
    return _put_together(model, verify, value_of(_draft_ratio(model, config)))


def _draft_ratio(model: PreTrainedModel, config: SelfSpeculativeConfig, shows: bool = True) -> Any:
    """A draft step / a plain step."""
    if not config.drafts_itself:
        return 1.0
    measured = _measure(model, config, [0], "drafting", shows)
    times = value_of(measured)
    ratio = times[0] / times[1]
    return NoisyMeasurement(ratio) if isinstance(measured, NoisyMeasurement) else ratio


def _put_together(model: PreTrainedModel, verify: dict[int, float], draft_ratio: float) -> Costs:
    plain = verify[1]
    return Costs(
        plain_step=plain,
        draft_step=draft_ratio * plain,
        verify=[(n, max(seconds, plain)) for n, seconds in sorted(verify.items())],
        measured_on=describe_machine(model),
    )


def _measure(
    model: PreTrainedModel, config: SelfSpeculativeConfig | None, lengths: Sequence[int], what: str, shows: bool = True
) -> Any:
    """Seconds of passes over so many tokens, 0 for a draft step: a dictionary, or a `NoisyMeasurement` of one."""
    with (
        torch.inference_mode(),
        hf_logging.tqdm(
            total=len(lengths) + 1 + _REPEATS * (len(lengths) + -(-len(lengths) // 2)),
            desc=f"Measuring the cost of {what} here, once",
            leave=False,
            disable=not shows,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {remaining} left",
        ) as bar,
    ):
        passes = Passes(model, config)
        for length in (1, *lengths):
            passes.once(length)  # capture, first touch
            bar.update()
        timings = time_in_turns(
            partial(passes.once, 1),
            {length: partial(passes.once, length) for length in lengths},
            # Processes that compute one model together stop together.
            is_over=lambda repeats, spent: broadcast(
                model, spent > (_ENOUGH_SECONDS if repeats >= _REPEATS else _SECONDS)
            ),
            progress=lambda repeats, count: bar.update(count) if repeats < _REPEATS else None,
        )
    return flag_if_noisy(
        {1: timings.plain} | {length: timings.plain * timings.ratio(length) for length in lengths}, timings.seconds
    )


@dataclass(frozen=True)
class TimingsInTurns:
    """Passes that took turns with plain steps.

    Attributes:
        plain_steps: seconds of each plain step.
        passes: seconds of each repetition, by pass.
        ratios: each of these divided by the mean of the plain steps before and behind it, by pass.
    """

    plain_steps: list[float]
    passes: dict[Any, list[float]]
    ratios: dict[Any, list[float]]

    @property
    def plain(self) -> float:
        """Seconds of a plain step, the median."""
        return statistics.median(self.plain_steps)

    def ratio(self, name: Any) -> float:
        """What a pass takes, in plain steps: the median of the ratios."""
        return statistics.median(self.ratios[name])

    @property
    def seconds(self) -> list[list[float]]:
        """Seconds of all that was repeated."""
        return [self.plain_steps, *self.passes.values()]


def time_in_turns(
    plain: Callable[[], float],
    passes: Mapping[Any, Callable[[], float]],
    is_over: Callable[[int, float], bool],
    most_repeats: int = _MOST_REPEATS,
    progress: Callable[[int, int], Any] = lambda repeats, count: None,
) -> TimingsInTurns:
    """Time passes in turns with plain steps: the one way in which this library measures what a pass costs.

    The machine is not the same from one moment to the next: other work takes its memory's bandwidth or its clock. So
    each pass counts relative to the plain steps on either side of it, at most two passes between them.

    Args:
        plain: makes a plain step and gives its seconds.
        passes: make the other passes; each was made once before.
        is_over: `(repetitions, seconds spent)` → whether that is enough.
        most_repeats: repetitions at the most.
        progress: called with the repetitions done, and the passes made since.
    """
    timings = TimingsInTurns([], {name: [] for name in passes}, {name: [] for name in passes})
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


class Passes:
    """The passes of a round behind a text of random tokens, on a cache of its own; enter `torch.inference_mode` first.

    Args:
        model: the target model.
        config: what the draft leaves out, and its precision; `None` for the whole model's passes alone.
        context: tokens in the cache.
        cache: of other passes behind the same context, to share; `None`: one of their own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig | None,
        context: int = _CONTEXT,
        cache: Cache | None = None,
    ) -> None:
        self.model = model
        self.context = context
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        device = input_device(model)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(0, vocabulary, (1, context), generator=generator).to(device)
        self.tokens = torch.randint(0, vocabulary, (1, LONGEST_VERIFIED), generator=generator).to(device)
        self.cache = _behind(model, prompt) if cache is None else cache
        self.forward = Forward(model, config)

    def once(self, length: int) -> float:
        """Seconds of one pass over `length` tokens, or of a draft step where it is 0; the cache stays as it is.

        By the device's own events on CUDA, with the waiting for the host that comes between its kernels.
        """
        count = max(length, 1)
        ids = self.tokens[:, :count]
        context = Context(
            self.cache,
            length=self.context,
            mask=torch.ones((1, self.context + 1), dtype=torch.long, device=ids.device),
            positions=torch.full((1, 1), self.context, device=ids.device),
        )
        watch = Stopwatch(ids.device)
        if ids.device.type == "cuda":
            torch.cuda.synchronize(ids.device)
        watch.start()
        if length:
            logits = self.forward.target(ids, context).logits
        else:
            with self.forward.draft(context, ids, 1) as passes:
                logits = passes(ids, 0)
        argmax(logits[:, -count:].float()).tolist()
        if length:
            self.cache.crop(-count)
        watch.stop()
        return watch.seconds()


def _behind(model: PreTrainedModel, prompt: torch.Tensor) -> Cache:
    """A cache behind a text of random tokens."""
    cache: Cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    add_buffers(cache)
    fewer = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    first = prompt[:, :_CONTEXT]
    model(input_ids=first, past_key_values=cache, use_cache=True, **fewer)
    if prompt.shape[1] == first.shape[1]:
        return cache
    if all(type(layer) is BufferedLayer for layer in cache.layers):
        # What is in the cache does not change what a pass takes: the same keys over and over will do.
        for layer in cache.layers:
            times = -(-prompt.shape[1] // first.shape[1])
            keys, values = (x.repeat(1, 1, times, 1)[:, :, : prompt.shape[1]] for x in (layer.keys, layer.values))
            layer.adopt(keys.contiguous(), values.contiguous())
    else:
        model(input_ids=prompt[:, first.shape[1] :], past_key_values=cache, use_cache=True, **fewer)
    return cache


# ----------------------------------------------------------------------------------------------------------------------
# keeping


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """All that the cost of a model's passes depends on, as plain JSON types: what measurements are stored by."""
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
        "format": 5,
    }


def _describe_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Of which kind the weights are, where they lie, and what is done to bring them there."""
    kinds: Counter[str] = Counter()
    for parameter in itertools.chain(model.parameters(), model.buffers()):
        kind = "" if is_plain(parameter) else f" {type(parameter).__name__}"
        kinds[f"{parameter.device.type} {str(parameter.dtype).removeprefix('torch.')}{kind}"] += parameter.numel()
    # A quantiser's layers differ in class from those that they took the place of, an offloaded layer in its hook.
    layers = Counter(f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules())
    hooks = Counter(type(m._hf_hook).__name__ for m in model.modules() if hasattr(m, "_hf_hook"))
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    return {
        "kinds": dict(sorted(kinds.items())),
        "layers": dict(sorted(layers.items())),
        "hooks": dict(sorted(hooks.items())),
        "quantisation": None if method is None else str(method),
    }


def describe_adapters(model: PreTrainedModel) -> dict[str, Any] | None:
    """Which adapters are loaded and in use: their layers are in the model's own, and may be switched off."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return None
    active = {
        tuple(map(str, names if isinstance(names, (list, tuple)) else [names]))
        for module in model.modules()
        if (names := getattr(module, "active_adapters", None)) is not None and not callable(names)
    }
    disabled = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
    return {"names": sorted(map(str, adapters)), "active": sorted(active), "disabled": disabled}


def costs_of(model: PreTrainedModel, config: SelfSpeculativeConfig, again: bool = False, shows: bool = True) -> Costs:
    """The costs of this model and config on this machine: from memory, from the disk, or measured now.

    Args:
        model: the target model.
        config: what the draft leaves out, and its precision.
        again: measure anew.
        shows: show a progress bar where the draft is measured; not in the middle of a text.
    """
    shape = describe_model(model)

    def put_together(verify: Any, ratio: Any) -> Costs:
        # From the disk, where anything may stand.
        times = {int(n): SECONDS.check(f"The time of {n} tokens", seconds) for n, seconds in verify.items()}
        return _put_together(model, times, _RATIO.check("The cost of a draft step", ratio))

    verify = cached_measurement(
        model,
        {"what": "verify", **shape},
        lambda: _measure(model, None, VERIFIED, "verification", shows),
        again,
        use=lambda result: put_together(result, 1.0),
    )
    draft = {
        "what": "draft",
        **shape,
        "skip": config.skip.to_dict(),
        "precision": None if config.precision is None else config.precision.to_dict(),
        "itself": config.drafts_itself,
    }
    ratio = cached_measurement(
        model, draft, lambda: _draft_ratio(model, config, shows), again, use=lambda result: put_together(verify, result)
    )
    return put_together(verify, ratio)
