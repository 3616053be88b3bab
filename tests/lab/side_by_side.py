"""Whole calls of `generate` by several methods, interleaved: what `batches` and `constrained` measure with."""

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
"""The name of each, and its `self_speculative=`."""


def drafting_methods() -> list[str]:
    """Return the names of the methods that are compared with plain `generate`."""
    return [method for method in METHODS if method != "plain"]


def greedy_options(new_tokens: int) -> dict[str, Any]:
    """Return options of `generate` for a greedy call of so many new tokens, end of sequence off."""
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
        timings: of the calls that count.
        texts: by method, the output of the last call.
        statistics: by drafting method, those of each call that counts.
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
) -> Compared:
    """Call `generate` by each method, interleaved, after one call of each to warm up.

    Args:
        model: an enabled model.
        inputs: token ids and their mask.
        options: of each call.
        repeats: calls of each method that count.
        fresh: makes more options, anew for each call and outside its time.
    """
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    timings = Timings(METHODS, "plain")
    texts: dict[str, torch.Tensor] = {}
    statistics: dict[str, list[Any]] = {method: [] for method in drafting_methods()}
    for turn in interleaved(list(METHODS), repeats):
        request = METHODS[turn.method]
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
    """Return a median with the least and the greatest value, as `spread` gives them, as text."""
    return f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})"
