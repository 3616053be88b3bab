"""Whole calls of `generate` by several methods, interleaved, for `batches`, `constrained`, `experts` and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ssd_generation.config import DraftingConfig, SelfSpeculativeConfig
from ssd_generation.harness.results import Timings
from ssd_generation.harness.run import interleaved, timed

__all__ = ["METHODS", "Compared", "compare", "drafting_methods", "greedy_options", "with_range"]

METHODS: dict[str, Any] = {
    "plain": None,
    "nothing": SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")),
    "lookup": SelfSpeculativeConfig(lookup=True),
    "auto": "auto",
}
"""Methods by name, each with its value of `self_speculative=`."""


def drafting_methods() -> list[str]:
    """Return the names of the methods that are compared with plain `generate`."""
    return [method for method in METHODS if method != "plain"]


def greedy_options(new_tokens: int) -> dict[str, Any]:
    """Return options of `generate` for a greedy call of so many new tokens, with end-of-sequence off."""
    return {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }


@dataclass(frozen=True)
class Compared:
    """Calls of all methods on one input.

    Attributes:
        timings: timings of the calls after the warm-up.
        texts: output of the last call, by method.
        statistics: statistics of each call after the warm-up, by drafting method.
    """

    timings: Timings
    texts: dict[str, torch.Tensor]
    statistics: dict[str, list[Any]]


def compare(
    model: Any,
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    repeats: int,
    fresh: Callable[[], dict[str, Any]] = dict,
    methods: Mapping[str, Any] | None = None,
) -> Compared:
    """Call `generate` by each method, interleaved, after one call of each to warm up.

    Args:
        model: an enabled model.
        inputs: token ids and their mask.
        options: options of each call.
        repeats: number of timed calls of each method.
        fresh: function that makes further options for each call, outside its time.
        methods: as `METHODS`, with "plain" among them; by default these.
    """
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    methods = METHODS if methods is None else methods
    timings = Timings(methods, "plain")
    texts: dict[str, torch.Tensor] = {}
    statistics: dict[str, list[Any]] = {method: [] for method in methods if method != "plain"}
    for turn in interleaved(list(methods), repeats):
        request = methods[turn.method]
        asked = {} if request is None else {"self_speculative": request}
        output, seconds = timed(model.device, model.generate, **inputs, **options, **asked, **fresh())
        texts[turn.method] = output
        if turn.is_warm_up:
            continue
        timings.add(turn.method, output[:, inputs["input_ids"].shape[1] :].numel(), seconds)
        if request is not None:
            statistics[turn.method].append(model.last_speculation)
    return Compared(timings, texts, statistics)


def with_range(speedup: Mapping[str, float]) -> str:
    """Format a median with the least and the greatest value, as `spread` returns them."""
    return f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})"
