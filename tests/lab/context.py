"""Cost of a draft step and of a round as the context grows, compared with a plain step.

    python -m tests.lab.context [--model demo] [--contexts 128 512 2048 8000] [--draft-length 2]

All passes are interleaved, after a prefix of random tokens; times are medians in milliseconds. "transformers" is a step
of its own plain decoding (its cache copies all keys and values for each token), "plain step" one of this library's
loop.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ssd_generation.config import PrecisionConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.run import interleaved
from ssd_generation.models import load_model
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.costs import Passes
from ssd_generation.tuning.measuring import describe_machine

from .program import Program

__all__ = ["measure_contexts"]


def _drafts(model: Any) -> dict[str, SelfSpeculativeConfig]:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return {
        "int8": SelfSpeculativeConfig(precision=PrecisionConfig.named("int8")),
        "int4": SelfSpeculativeConfig(precision=PrecisionConfig.named("int4")),
        "half of the attention skipped": SelfSpeculativeConfig(skip=SkipConfig(attention=range(1, layers, 2))),
    }


def measure_contexts(
    model: Any, contexts: list[int], draft_length: int = 2, repeats: int = 9
) -> list[dict[str, dict[str, float]]]:
    """Time steps and rounds at several prefix lengths.

    Args:
        model: the target model.
        contexts: prefix lengths, in tokens.
        draft_length: number of tokens drafted in a round, ≥ 1.
        repeats: number of times each pass is timed.

    Returns:
        For each context, by pass, `median`, `least` and `greatest` milliseconds; a round is `draft_length` draft steps
        and a verification pass.
    """
    results = []
    with torch.inference_mode():
        for context in contexts:
            passes = {name: Passes(model, config, context) for name, config in _drafts(model).items()}
            first = next(iter(passes.values()))
            timed: dict[str, Callable[[], float]] = {
                "transformers": _upstream_step(model, context),
                "plain step": lambda first=first: first.once(1),  # type: ignore[misc]
                f"verify {draft_length + 1}": lambda first=first: first.once(draft_length + 1),  # type: ignore[misc]
            }
            for name, own in passes.items():
                timed[f"draft step, {name}"] = lambda own=own: own.once(0)  # type: ignore[misc]
            seconds: dict[str, list[float]] = {name: [] for name in timed}
            for turn in interleaved(list(timed), repeats):
                took = timed[turn.method]()
                if not turn.is_warm_up:
                    seconds[turn.method].append(1e3 * took)
            verify = seconds[f"verify {draft_length + 1}"]
            for name in passes:
                steps = seconds[f"draft step, {name}"]
                seconds[f"round, {name}"] = [draft_length * d + v for d, v in zip(steps, verify, strict=True)]
            results.append(
                {
                    name: {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
                    for name, values in seconds.items()
                }
            )
    return results


def _upstream_step(model: Any, context: int) -> Callable[[], float]:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(
        0, vocabulary, (1, context), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu"
    ).to(model.device)
    fewer = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    model(input_ids=ids, use_cache=True, **{CACHE: cache}, **fewer)

    def once() -> float:
        started = time.perf_counter()
        mask = torch.ones((1, context + 1), dtype=torch.long, device=model.device)
        positions = torch.full((1, 1), context, device=model.device)
        inputs = model.prepare_inputs_for_generation(
            ids[:, :1], next_sequence_length=1, attention_mask=mask, position_ids=positions, **{CACHE: cache}
        )
        model(**inputs, return_dict=True).logits[:, -1].argmax().item()
        took = time.perf_counter() - started
        cache.crop(-1)
        return took

    return once


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("context", __doc__)
    program.add_model(dtype="auto")
    program.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 8000])
    program.add_counts(draft_length=2, repeats=9)
    program.add_json()
    arguments = program.parsed(words)
    model, _ = load_model(arguments.model, dtype=arguments.dtype)
    model = enable_self_speculative(model.eval())
    results = measure_contexts(model, arguments.contexts, arguments.draft_length, arguments.repeats)
    if arguments.json:
        print(json.dumps({"machine": describe_machine(model), "contexts": arguments.contexts, "results": results}))
        return
    print(describe_machine(model))
    print(f"{'ms, median (least-greatest)':42}" + "".join(f"{n:>24}" for n in arguments.contexts))
    for name in results[0]:
        cells = [f"{r[name]['median']:.1f} ({r[name]['least']:.1f}-{r[name]['greatest']:.1f})" for r in results]
        print(f"{name:42}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
