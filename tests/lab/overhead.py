"""Time that loops take outside the model's passes: this library's and transformers' assisted decoding, interleaved.

    python -m tests.lab.overhead [--model FOLDER] [--draft-length 5] [--new-tokens 96] [--repeats 5]
    [--json]

The draft skips nothing (an empty skip set in this library, the model as its own `assistant_model` in transformers), so
both accept all drafted tokens and make the same forward passes. The time outside these passes is that of the loop: per
drafted token, the time inside drafting; per round, the rest (verification, acceptance, stopping criteria, bookkeeping).
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from ssd_generation.config import DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.drafting.self_drafter import SelfDrafter
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.run import interleaved
from ssd_generation.models import load_model

from .program import Program
from .side_by_side import greedy_options

__all__ = ["measure_overhead"]

PROMPT = "Explain in three sentences why the sky is blue, and then why sunsets are red."


class _Clock:
    """Seconds inside drafting and between the parts of a round."""

    def __init__(self) -> None:
        self.drafted = self.rounds = 0
        self.drafting = 0.0  # outside the passes
        self.between = 0.0
        self._started = 0.0
        self._passes_in_draft = 0.0
        self._in_draft = False
        # End of the last part of a round; `None` until the first target pass has ended: up to there (the preparation of
        # the call, and the prompt) all methods are the same.
        self._last: float | None = None

    def _part(self, started: float, ended: float) -> None:
        if self._last is not None:
            self.between += started - self._last
            self._last = ended

    def before(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def after(self, *_: Any) -> None:
        now = time.perf_counter()
        if self._in_draft:
            self._passes_in_draft += now - self._started
            return
        if self._last is None:
            self._last = now
        else:
            self._part(self._started, now)
            self.rounds += 1

    def around(self, draft: Callable[..., Any], count: Callable[[Any, tuple[Any, ...]], int]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._in_draft, self._passes_in_draft = True, 0.0
            try:
                result = draft(*args, **kwargs)
            finally:
                self._in_draft = False
            ended = time.perf_counter()
            if self._last is not None:
                self.drafting += ended - started - self._passes_in_draft
                self.drafted += count(result, args)
            self._part(started, ended)
            return result

        return timed


class _Passes:
    """Forward hooks that notify the current clock when a pass of the model begins and ends.

    They are registered once: with new hooks in each call, the library would check the model again in each call.
    """

    def __init__(self, model: Any) -> None:
        self.clock = _Clock()
        self.handles = [
            model.register_forward_pre_hook(lambda *_: self.clock.before()),
            model.register_forward_hook(lambda *_: self.clock.after()),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextmanager
def _watched(
    passes: _Passes, owner: type, method: str, count: Callable[[Any, tuple[Any, ...]], int]
) -> Iterator[_Clock]:
    clock = passes.clock = _Clock()
    original = getattr(owner, method)
    setattr(owner, method, clock.around(original, count))
    try:
        yield clock
    finally:
        setattr(owner, method, original)


def measure_overhead(
    model: Any, tokenizer: Any, draft_length: int = 5, new_tokens: int = 96, repeats: int = 5
) -> dict[str, Any]:
    """Time both loops, interleaved.

    Args:
        model: a transformers model; it is enabled.
        tokenizer: its tokenizer.
        draft_length: tokens per round.
        new_tokens: tokens per call; end-of-sequence is off.
        repeats: timed calls of each loop, after one to warm up.

    Returns:
        Medians over the repeats, in seconds: a plain step, and per loop the time outside the model's passes per drafted
        token and per round, with minimum and maximum; and each as a share of a plain step.
    """
    enable_self_speculative(model)
    text = PROMPT
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    common = greedy_options(new_tokens)
    config = SelfSpeculativeConfig(SkipConfig(), DraftingConfig(policy="fixed", max_draft_length=draft_length))
    settings = model.generation_config
    saved = {
        name: getattr(settings, name, None)
        for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    }
    settings.num_assistant_tokens = draft_length
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0

    def ours() -> dict[str, float]:
        with _watched(passes, SelfDrafter, "propose", lambda draft, args: draft.tokens.shape[1]) as clock:
            model.generate(**inputs, **common, self_speculative=config)
            return split(clock)

    def theirs() -> dict[str, float]:
        with _watched(
            passes,
            AssistedCandidateGenerator,
            "get_candidates",
            lambda result, args: result[0].shape[1] - args[1].shape[1],
        ) as clock:
            model.generate(**inputs, **common, assistant_model=model)
            return split(clock)

    def plain() -> dict[str, float]:
        started = time.perf_counter()
        model.generate(**inputs, **common)
        return {"step": (time.perf_counter() - started) / new_tokens}

    def split(clock: _Clock) -> dict[str, float]:
        return {
            "per_drafted_token": clock.drafting / max(clock.drafted, 1),
            "per_round": clock.between / max(clock.rounds, 1),
            "drafted": clock.drafted,
            "rounds": clock.rounds,
        }

    calls = {"plain": plain, "ours": ours, "upstream": theirs}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    passes = _Passes(model)
    try:
        for turn in interleaved(list(calls), repeats):
            measured = calls[turn.method]()
            if not turn.is_warm_up:
                runs[turn.method].append(measured)
    finally:
        passes.remove()
        for name, value in saved.items():
            setattr(settings, name, value)

    step = statistics.median(run["step"] for run in runs["plain"])
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "draft_length": draft_length,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "plain_step": step,
    }
    for name in ("ours", "upstream"):
        report[name] = {key: int(runs[name][0][key]) for key in ("drafted", "rounds")}
        for key in ("per_drafted_token", "per_round"):
            values = [run[key] for run in runs[name]]
            median = statistics.median(values)
            report[name][key] = {
                "median": median,
                "min": min(values),
                "max": max(values),
                "share_of_plain_step": median / step,
            }
    for key in ("per_drafted_token", "per_round"):
        report[f"{key}_ratio"] = statistics.median(
            a[key] / b[key] for a, b in zip(runs["ours"], runs["upstream"], strict=True)
        )
    return report


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("overhead", __doc__)
    program.add_model()
    program.add_counts(draft_length=5, new_tokens=96, repeats=5)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    report = measure_overhead(model, tokenizer, arguments.draft_length, arguments.new_tokens, arguments.repeats)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_table(report)))


def _table(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"plain step {report['plain_step'] * 1e3:.1f} ms; torch {report['torch']}, transformers "
        f"{report['transformers']}, {report['dtype']} on {report['device']}, {report['threads']} threads, "
        f"draft length {report['draft_length']}"
    )
    yield f"{'time outside the passes':28} {'median ms':>10} {'min':>8} {'max':>8} {'of a plain step':>16}"
    for name, title in (("ours", "this library"), ("upstream", "assisted decoding")):
        for key in ("per_drafted_token", "per_round"):
            row = report[name][key]
            yield (
                f"{title + ', ' + key.replace('per_', '').replace('_', ' '):28.40} {row['median'] * 1e3:10.3f} "
                f"{row['min'] * 1e3:8.3f} {row['max'] * 1e3:8.3f} {row['share_of_plain_step']:16.2%}"
            )
    yield (
        f"ours / transformers': {report['per_drafted_token_ratio']:.2f} per drafted token, "
        f"{report['per_round_ratio']:.2f} per round"
    )


if __name__ == "__main__":
    main()
