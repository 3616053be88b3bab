"""Batches here and in other runtimes: tokens per second of all rows together.

    python -m tests.lab.peer_batches --model FOLDER [--dtype bfloat16] [--gguf FILE …] [--openvino FOLDER …]
                                     [--rows 2 4 8] [--new-tokens 48] [--repeats 3] [--json]

The prompts are those of `batches`. llama.cpp (xllamacpp) decodes a row in each of as many slots, which its server fills
by requests that arrive at the same time; OpenVINO GenAI takes the rows in one call. Greedy whole calls, interleaved,
after one of each to warm up; the other runtimes in a process each, with as many threads.
"""

from __future__ import annotations

import contextlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import spread
from ssd_generation.harness.run import Child, interleaved
from ssd_generation.models import load_model

from .batches import LONGEST, batch_of_prompts
from .program import Program, conditions
from .runtimes import add_runtimes, answer_of, runtimes
from .side_by_side import METHODS, greedy_options
from .tables import as_markdown

__all__ = ["batches_by_rows", "measure_rows"]

Decode = Callable[[], int]
"""Decodes a batch; returns the number of new tokens."""


def measure_rows(ways: dict[str, Decode], repeats: int) -> dict[str, Any]:
    """Time ways to decode a batch, interleaved.

    Args:
        ways: by name.
        repeats: timed calls of each, after one to warm up.

    Returns:
        For each the tokens per second, as `spread` gives them.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in interleaved(list(ways), repeats):
        began = time.perf_counter()
        tokens = ways[turn.method]()
        if not turn.is_warm_up:
            found[turn.method].append(tokens / (time.perf_counter() - began))
    return {name: spread(rates) for name, rates in found.items()}


def batches_by_rows(
    model: Any, tokenizer: Any, counts: Sequence[int], arguments: Namespace
) -> dict[int, dict[str, Any]]:
    """Time batches of each size, here and in other runtimes.

    Args:
        model: a transformers model; it is enabled.
        tokenizer: its tokenizer.
        counts: numbers of prompts in a batch.
        arguments: `new_tokens`, `repeats`, `dtype`, and the options of `add_runtimes`.

    Returns:
        As in `measure_rows`, by the number of rows.
    """
    enable_self_speculative(model)
    options = greedy_options(arguments.new_tokens)
    found: dict[int, dict[str, Any]] = {}
    for count in counts:
        batch = batch_of_prompts(tokenizer, count)
        ways: dict[str, Decode] = {
            name: partial(_by_transformers, model, batch, options, METHODS[name])
            for name in ("plain", "nothing", "auto")
        }
        kept = [ids[mask != 0].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        room = count * (LONGEST + arguments.new_tokens)
        with contextlib.ExitStack() as children:
            for name, child in runtimes(arguments, children, context=room, rows=count, prefix_cache=False):
                ways[name] = partial(_by_runtime, child, kept, arguments.new_tokens)
            found[count] = measure_rows(ways, arguments.repeats)
    return found


def _by_transformers(model: Any, batch: dict[str, torch.Tensor], options: dict[str, Any], request: Any) -> int:
    asked = {} if request is None else {"self_speculative": request}
    text = model.generate(**batch, **options, **asked)
    return int(text[:, batch["input_ids"].shape[1] :].numel())


def _by_runtime(child: Child, rows: list[list[int]], new_tokens: int) -> int:
    return sum(map(len, answer_of(child, "batch", rows=rows, new_tokens=new_tokens)["token_ids"]))


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("peer_batches", __doc__)
    program.add_model(dtype="bfloat16")
    add_runtimes(program)
    program.add_argument("--rows", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="prompts in a batch")
    program.add_counts(new_tokens=48, repeats=3)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    found = batches_by_rows(model, tokenizer, arguments.rows, arguments)
    if arguments.json:
        print(json.dumps({"conditions": conditions(arguments), "found": found}))
        return
    print(conditions(arguments) + "\n")
    names = list(found[arguments.rows[0]])
    rows = [
        [
            str(count),
            *(f"{one[name]['median']:.0f} ({one[name]['min']:.0f} to {one[name]['max']:.0f})" for name in names),
        ]
        for count, one in found.items()
    ]
    print("\n".join(as_markdown(["rows, tokens/s", *names], rows)))


if __name__ == "__main__":
    main()
