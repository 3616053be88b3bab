"""Accuracy of acceptance rates that are estimated in one forward pass, compared with those of generation.

    python -m tests.lab.estimators [--model demo] [--sets 30] [--texts 6] [--new-tokens 32]

Random skip sets of one to eight sub-layers (not those at either end of the model, whose drafts are never accepted) are
judged by several estimators, and measured in generation with a fixed draft length on the same prompts.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ssd_generation.config import DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.decoding.verified_text import VerifiedText
from ssd_generation.forward.structure.sublayers import locate_sublayers
from ssd_generation.generation import enable_self_speculative
from ssd_generation.models import load_model
from ssd_generation.search.calibration import Calibration, calibrate, calibration_prompts
from ssd_generation.search.confirm import generated_acceptance
from ssd_generation.tuning.acceptance import Acceptance, judge, judge_rounds
from ssd_generation.tuning.measuring import describe_machine
from ssd_generation.tuning.speedup import expected_tokens

from .program import Program

__all__ = ["ESTIMATORS", "compare_estimators", "random_skips"]

Estimator = Callable[[Any, SelfSpeculativeConfig, VerifiedText, int], Acceptance]


ESTIMATORS: Mapping[str, Estimator] = {
    # One parallel pass of the draft over the text, as in SWIFT, with the draft's keys and values for the whole prefix.
    # Each token counts, whatever its depth.
    "one round for all": lambda model, config, text, depth: judge_rounds(
        model, config, text, [0], len(text), lambda matches: matches.T
    ),
    "rounds in a row": lambda model, config, text, depth: judge_rounds(
        model, config, text, range(0, len(text), depth), depth
    ),
    "a round at each token": lambda model, config, text, depth: judge_rounds(
        model, config, text, range(len(text)), depth
    ),
    "first tokens": lambda model, config, text, depth: judge_rounds(model, config, text, range(len(text)), 1),
    "replayed, by 1": lambda model, config, text, depth: judge(model, config, text, depth, 1),
    "replayed, by 2": lambda model, config, text, depth: judge(model, config, text, depth, min(2, depth)),
    "replayed, exact": lambda model, config, text, depth: judge(model, config, text, depth, depth),
}
"""Estimators by name; the last argument is the draft length."""


def random_skips(model: Any, count: int, seed: int = 0) -> list[SkipConfig]:
    """Return random skip sets of one to eight sub-layers."""
    layout = locate_sublayers(model)
    generator = random.Random(seed)
    inner = range(2, len(layout) - 1) if len(layout) > 6 else range(len(layout))
    names = [("attention", i) for i in inner if layout.layers[i].attention and i not in layout.shares_kv]
    names = names[1:]  # one is never skipped
    names += [("mlp", i) for i in inner if layout.layers[i].mlp]
    skips = []
    for index in range(count):
        chosen = generator.sample(names, min(1 + index % 8, len(names) - 1))
        skips.append(
            SkipConfig(
                attention=[i for kind, i in chosen if kind == "attention"],
                mlp=[i for kind, i in chosen if kind == "mlp"],
            )
        )
    return skips


def compare_estimators(
    model: Any,
    calibration: Calibration,
    skips: Sequence[SkipConfig],
    draft_length: int = 4,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Compare predicted with measured accepted tokens per round, by estimator.

    Args:
        model: the target model; it is enabled.
        calibration: calibration texts.
        skips: skip sets of the drafts.
        draft_length: number of tokens drafted in a round.
        progress: callback with the number of drafts done.

    Returns:
        By estimator: correlation with the measured numbers, mean difference and mean absolute difference in accepted
        tokens per round; passes, inputs and seconds per draft. Also the points themselves.
    """
    enable_self_speculative(model)
    points: dict[str, list[float]] = {name: [] for name in ("measured", *ESTIMATORS)}
    costs: dict[str, list[tuple[int, int, float]]] = {name: [] for name in points}
    for done, skip in enumerate(skips):
        config = SelfSpeculativeConfig(skip)
        fixed = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=draft_length))
        started = time.perf_counter()
        measured = generated_acceptance(model, fixed, calibration)
        costs["measured"].append((measured.passes, measured.tokens, time.perf_counter() - started))
        points["measured"].append(_tokens(measured, draft_length))
        for name in ESTIMATORS:
            started = time.perf_counter()
            total = Acceptance()
            for text in calibration.texts:
                total.add(ESTIMATORS[name](model, config, text, draft_length))
            costs[name].append((total.passes, total.tokens, time.perf_counter() - started))
            points[name].append(_tokens(total, draft_length))
        if progress is not None:
            progress(done + 1)
    summary = {}
    for name in ESTIMATORS:
        differences = [p - m for p, m in zip(points[name], points["measured"], strict=True)]
        summary[name] = {
            "correlation": statistics.correlation(points[name], points["measured"]),
            "mean_difference": statistics.mean(differences),
            "mean_absolute_difference": statistics.mean(map(abs, differences)),
        }
    return {
        "drafts": len(skips),
        "draft_length": draft_length,
        "texts": len(calibration),
        "tokens": calibration.tokens(),
        "estimators": summary,
        "per_draft": {
            name: {
                "passes": statistics.mean(c[0] for c in values),
                "inputs": statistics.mean(c[1] for c in values),
                "seconds": statistics.median(c[2] for c in values),
            }
            for name, values in costs.items()
        },
        "points": points,
        "skips": [skip.to_dict() for skip in skips],
    }


def _tokens(acceptance: Acceptance, draft_length: int) -> float:
    return expected_tokens(acceptance.by_depth(1.0), draft_length) - 1.0


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("estimators", __doc__)
    program.add_model()
    program.add_counts(sets=30, texts=6, new_tokens=32, draft_length=4)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    texts = calibrate(model, tokenizer, calibration_prompts(None, arguments.texts), arguments.new_tokens)
    result = compare_estimators(
        model,
        texts,
        random_skips(model, arguments.sets),
        arguments.draft_length,
        lambda done: print(f"\r{done}/{arguments.sets}", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    if arguments.json:
        print(json.dumps({"machine": describe_machine(model), **result}))
        return
    print("\n".join([describe_machine(model), *_table(result)]))


def _table(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['drafts']} skip sets, {result['tokens']} tokens of {result['texts']} texts"
    yield f"accepted tokens of a round of {result['draft_length']}, predicted against measured in generation"
    yield f"{'':24}{'correlation':>12}{'bias':>8}{'|error|':>9}{'passes':>8}{'inputs':>8}{'seconds':>9}"
    for name in ("measured", *ESTIMATORS):
        spent = result["per_draft"][name]
        tail = f"{spent['passes']:>8.0f}{spent['inputs']:>8.0f}{spent['seconds']:>9.2f}"
        head = " " * 29
        if (figures := result["estimators"].get(name)) is not None:
            head = f"{figures['correlation']:>12.3f}{figures['mean_difference']:>+8.3f}"
            head += f"{figures['mean_absolute_difference']:>9.3f}"
        yield f"{name:24}{head}{tail}"


if __name__ == "__main__":
    main()
