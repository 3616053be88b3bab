"""Time per step of TRL's GRPO with rollouts by plain `generate`, and by a model that drafts in every call.

    python -m tests.lab.rollouts [--model FOLDER] [--dtype float32] [--steps 3] [--new-tokens 64] [--generations 4]
                                                [--learning-rate 1e-6] [--json]

Needs trl and datasets, which no extra installs. Each way trains a model of its own from the same weights and seed; the
completions have to be the same. The first drafting step measures costs on this machine unless they are stored, so the
first step is left out of the medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from transformers import TrainerCallback

from ssd_generation.generation import enable_self_speculative
from ssd_generation.models import load_model

from .program import Program, conditions
from .tables import as_markdown

__all__ = ["main", "measure_rollouts"]

_PROMPTS = ("Write a short story about a fox.", "List the planets.", "Why is the sky blue?", "Explain photosynthesis.")


def _reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def measure_rollouts(arguments: Namespace) -> list[dict[str, Any]]:
    """Train for a few steps in both ways.

    Args:
        arguments: parsed command line of `main`.

    Returns:
        For plain and drafting: seconds in `generate` and of whole steps, the rollouts' tokens, and draft statistics.
    """
    return [_trained(arguments, drafts) for drafts in (False, True)]


def _trained(arguments: Namespace, drafts: bool) -> dict[str, Any]:
    trl, datasets = import_module("trl"), import_module("datasets")  # needed by nothing else here

    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    if drafts:
        enable_self_speculative(model, always=True)
    found: dict[str, Any] = {
        "way": "always" if drafts else "plain",
        "generate": [],
        "step": [],
        "texts": [],
        "drafts": [],
    }
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = generate(*args, **kwargs)
        found["generate"].append(time.perf_counter() - began)
        found["texts"].append(output.tolist())
        last = model.last_speculation if drafts else None
        found["drafts"].append(None if last is None else (last.drafted_tokens, last.accepted_tokens, last.refusal))
        return output

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            found["step"].append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["step"][-1] += time.perf_counter()

    model.generate = timed
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            per_device_train_batch_size=arguments.generations,
            num_generations=arguments.generations,
            max_completion_length=arguments.new_tokens,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        data = datasets.Dataset.from_dict({"prompt": list(_PROMPTS) * arguments.steps})
        trainer = trl.GRPOTrainer(model, _reward, args=settings, train_dataset=data, processing_class=tokenizer)
        trainer.add_callback(Steps())
        trainer.train()
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("rollouts", __doc__)
    program.add_model()
    program.add_counts(steps=3, new_tokens=64, generations=4)
    program.add_argument("--learning-rate", type=float, default=1e-6, help="GRPO's own default")
    program.add_json()
    arguments = program.parsed(words)
    plain, drafting = measure_rollouts(arguments)
    if arguments.json:
        print(json.dumps([plain, drafting], indent=2))
        return
    print(f"{conditions(arguments)}\n")
    print("\n".join(as_markdown(["rollouts", "generate, s", "step, s", "drafted, accepted"], _rows(plain, drafting))))
    same = sum(one == other for one, other in zip(plain["texts"], drafting["texts"], strict=True))
    print(f"\n{same} of {len(plain['texts'])} rollouts are the same.")


def _rows(*ways: dict[str, Any]) -> list[list[str]]:
    lines = []
    for way in ways:
        seconds = [f"{statistics.median(way[name][1:] or way[name]):.2f}" for name in ("generate", "step")]
        said = [d[2] or f"{d[0]}, {d[1]}" for d in way["drafts"] if d is not None]
        lines.append([way["way"], *seconds, "; ".join(dict.fromkeys(said)) or "–"])
    return lines


if __name__ == "__main__":
    main()
