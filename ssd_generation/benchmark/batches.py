"""Several texts at once, which go through the model's own code together: this library's ways beside plain `generate`.

    python -m ssd_generation.benchmark.batches [--model FOLDER] [--dtype bfloat16] [--rows 1 2 4 8] [--new-tokens 48]
                                               [--repeats 3] [--json]

Prompts of the package of at most 128 tokens, padded at the left, the categories in turn; methods take turns, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ..config import DraftingConfig, SelfSpeculativeConfig
from ..generation import enable_self_speculative
from ..harness.results import Timings, spread
from ..harness.run import greedy_options, interleaved, timed
from ..harness.texts import encode_prompt, load_prompts
from ..models import load_model
from ..support.machine import cpu_name
from .tables import versions

__all__ = ["METHODS", "measure_batches"]

METHODS: dict[str, Any] = {
    "plain": None,
    "nothing": SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")),
    "lookup": SelfSpeculativeConfig(lookup=True),
    "auto": "auto",
}
"""What each is called, and what is given as `self_speculative=`."""


LONGEST = 128
"""Tokens of a prompt: one long prompt would make a long one of every row."""


def _batch(tokenizer: Any, rows: int) -> dict[str, torch.Tensor]:
    encoded = (encode_prompt(tokenizer, prompt.text)["input_ids"][0] for prompt in load_prompts())
    short = [tokens for tokens in encoded if len(tokens) <= LONGEST]
    if not 1 <= rows <= len(short):
        raise ValueError(
            f"A batch should have from 1 to {len(short)} rows, the short prompts there are, but got {rows}."
        )
    width = max(map(len, short[:rows]))
    ids = torch.full((rows, width), tokenizer.pad_token_id or 0, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(short[:rows]):
        ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def measure_batches(
    model: Any, tokenizer: Any, rows: Sequence[int] = (1, 2, 4, 8), new_tokens: int = 48, repeats: int = 3
) -> list[dict[str, Any]]:
    """Time whole calls of each method on batches of each size, interleaved.

    Args:
        model: a transformers model; it is enabled.
        tokenizer: its tokenizer.
        rows: texts in a batch.
        new_tokens: of each text; end-of-sequence is off.
        repeats: timed calls of each method, after one to warm up.

    Returns:
        For each size: `rows`, `plain_tokens_per_second` (of all rows together, median), and by method `speedup` over
        plain in the same round (as `spread`), `same_texts` (rows whose text is plain's) and the `acceptance_rate`.

    Raises:
        ValueError: there are not so many short prompts.
    """
    enable_self_speculative(model)
    options = greedy_options(new_tokens)
    found = []
    for count, batch in [(count, _batch(tokenizer, count)) for count in rows]:
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        timings = Timings(METHODS, "plain")
        texts: dict[str, torch.Tensor] = {}
        rates: dict[str, float | None] = {}
        for turn in interleaved(list(METHODS), repeats):
            request = METHODS[turn.method]
            asked = {} if request is None else {"self_speculative": request}
            output, seconds = timed(model.device, model.generate, **inputs, **options, **asked)
            texts[turn.method] = output
            if request is not None:
                rates[turn.method] = model.last_speculation.acceptance_rate
            if not turn.is_warm_up:
                timings.add(turn.method, count * new_tokens, seconds)
        plain = statistics.median(timing.tokens_per_second for timing in timings.by_method["plain"])
        row: dict[str, Any] = {"rows": count, "plain_tokens_per_second": plain}
        for method in rates:
            row[method] = {
                "speedup": spread(timings.ratios(method)),
                "same_texts": int((texts[method] == texts["plain"]).all(dim=1).sum()),
                "acceptance_rate": rates[method],
            }
        found.append(row)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """The command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ssd_generation.benchmark.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="Hub id, folder, GGUF file or 'demo' (SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="texts in a batch")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(words)
    for name, given in (("--new-tokens", arguments.new_tokens), ("--repeats", arguments.repeats)):
        if given < 1:
            parser.error(f"{name} should be at least 1, but got {given}")
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    try:
        found = measure_batches(model, tokenizer, arguments.rows, arguments.new_tokens, arguments.repeats)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{versions()}; {arguments.model}, {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads.\n")
    methods = [method for method in METHODS if method != "plain"]
    print(f"| rows | plain, tokens/s | {' | '.join(methods)} | texts plain's |")
    print("|---|---|" + "---|" * (len(methods) + 1))
    for row in found:
        speedups = [row[method]["speedup"] for method in methods]
        shown = " | ".join(f"{each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})" for each in speedups)
        same = ", ".join(str(row[method]["same_texts"]) for method in methods)
        print(f"| {row['rows']} | {row['plain_tokens_per_second']:.1f} | {shown} | {same} |")


if __name__ == "__main__":
    main()
