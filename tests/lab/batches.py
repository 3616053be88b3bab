"""Speed of batches, by the methods of this library and by plain `generate`.

    python -m tests.lab.batches [--model FOLDER] [--dtype bfloat16] [--rows 1 2 4 8] [--samples 8] [--new-tokens 48]
                                [--temperature 1] [--top-k K] [--top-p P] [--repeats 3] [--json]

Built-in prompts of at most 128 tokens, padded at the left, of each category in turn; methods are interleaved. Greedy,
or several sampled texts of each prompt in one call, as rollouts and pass@k take them, with the same seed in each call;
without `--top-k` and `--top-p` from the whole vocabulary.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from operator import truediv
from typing import Any

import torch

from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import spread
from ssd_generation.harness.run import timed
from ssd_generation.harness.texts import encode_prompt, load_prompts
from ssd_generation.models import load_model

from .program import Program, conditions
from .side_by_side import METHODS, compare, drafting_methods, greedy_options, with_range
from .tables import as_markdown

__all__ = ["LONGEST", "batch_of_prompts", "measure_batches"]

LONGEST = 128
"""Most tokens of a prompt: one long prompt would pad every row to its length."""


def batch_of_prompts(tokenizer: Any, rows: int) -> dict[str, torch.Tensor]:
    """Return the first short prompts of the package as one batch, padded at the left.

    Args:
        tokenizer: tokenizer of the model.
        rows: number of prompts.

    Returns:
        `input_ids` and `attention_mask`, each `(rows, longest)`.

    Raises:
        ValueError: there are not so many, or none are wanted.
    """
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
    model: Any,
    tokenizer: Any,
    rows: Sequence[int] = (1, 2, 4, 8),
    new_tokens: int = 48,
    repeats: int = 3,
    samples: int = 0,
    **sampling: Any,
) -> list[dict[str, Any]]:
    """Time whole calls of each method on batches of each size, interleaved.

    Args:
        model: a transformers model; it is enabled.
        tokenizer: its tokenizer.
        rows: numbers of prompts in a batch.
        new_tokens: number of new tokens of each text; end-of-sequence is off.
        repeats: timed calls of each method, after one to warm up.
        samples: number of texts sampled for each prompt; 0: one greedy text.
        sampling: options of `generate` for samples, such as `top_p`.

    Returns:
        For each size: `rows`, `plain_tokens_per_second` (of all rows together, median), and by method `speedup` over
        plain in the same round (as `spread` gives it), `decoding` (median of the same without the time until the first
        token), `same_texts` (number of rows whose text is plain's) and the `acceptance_rate`; and for greedy texts
        `alone`, the number of rows whose undrafted text is that of their prompt alone.

    Raises:
        ValueError: a batch has no rows, or more rows than there are short prompts.
    """
    enable_self_speculative(model)
    options = greedy_options(new_tokens)
    if samples:
        options |= {"do_sample": True, "num_return_sequences": samples, **sampling}
    found = []
    for count, batch in [(count, batch_of_prompts(tokenizer, count)) for count in rows]:
        compared = compare(model, batch, options, repeats, fresh=_seeded)
        timings, texts = compared.timings, compared.texts
        plain = statistics.median(timing.tokens_per_second for timing in timings.by_method["plain"])
        row: dict[str, Any] = {"rows": count, "plain_tokens_per_second": plain}
        until_first = _until_first_token(model, batch, options, repeats)
        decoding = [seconds - until_first for seconds in timings.seconds("plain")]
        for method in drafting_methods():
            own = zip(timings.seconds(method), compared.statistics[method], strict=True)
            after_prompts = [seconds - of_call.prompt_seconds for seconds, of_call in own]
            row[method] = {
                "speedup": spread(timings.ratios(method)),
                "decoding": statistics.median(map(truediv, decoding, after_prompts)),
                "same_texts": int((texts[method] == texts["plain"]).all(dim=1).sum()),
                "acceptance_rate": compared.statistics[method][-1].acceptance_rate,
            }
        if not samples:
            row["alone"] = _texts_alone(model, batch, texts["nothing"], options)
        found.append(row)
    return found


def _seeded() -> dict[str, Any]:
    """Seed the random numbers of the next call; it has no further options."""
    torch.manual_seed(0)
    return {}


def _until_first_token(model: Any, batch: dict[str, torch.Tensor], options: Mapping[str, Any], repeats: int) -> float:
    """Return the median seconds of plain calls for one token."""
    inputs = {name: value.to(model.device) for name, value in batch.items()}
    calls = (timed(model.device, model.generate, **inputs, **{**options, "max_new_tokens": 1}) for _ in range(repeats))
    return statistics.median(seconds for _, seconds in calls)


def _texts_alone(model: Any, batch: dict[str, torch.Tensor], texts: torch.Tensor, options: Mapping[str, Any]) -> int:
    """Count the rows whose undrafted text in the batch is that of their prompt alone."""
    same = 0
    for row, text in enumerate(texts):
        seen = batch["attention_mask"][row] != 0
        inputs = {name: value[row : row + 1, seen].to(model.device) for name, value in batch.items()}
        alone = model.generate(**inputs, **options, self_speculative=METHODS["nothing"])
        same += torch.equal(alone[0, seen.sum() :], text[len(seen) :])
    return same


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("batches", __doc__)
    program.add_model()
    program.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="prompts in a batch")
    program.add_argument("--samples", type=int, default=0, metavar="N", help="texts sampled for each prompt; 0: greedy")
    program.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of samples; default 1")
    program.add_argument("--top-k", type=int, metavar="K", help="of samples; by default the whole vocabulary")
    program.add_argument("--top-p", type=float, metavar="P", help="of samples; by default the whole vocabulary")
    program.add_counts(new_tokens=48, repeats=3)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    try:
        counts = arguments.new_tokens, arguments.repeats, arguments.samples
        sampling = {"temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p}
        found = measure_batches(model, tokenizer, arguments.rows, *counts, **sampling)
    except ValueError as error:
        program.error(str(error))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{conditions(arguments)}\n")
    print("\n".join(_table(found)))


def _table(found: Sequence[dict[str, Any]]) -> list[str]:
    methods = drafting_methods()
    lines = []
    for row in found:
        same = ", ".join(str(row[method]["same_texts"]) for method in methods)
        speedups = [with_range(row[method]["speedup"]) for method in methods]
        plain = f"{row['plain_tokens_per_second']:.1f}"
        alone = ", ".join(f"{row[method]['decoding']:.2f}" for method in methods)
        lines.append([str(row["rows"]), plain, *speedups, alone, same, str(row.get("alone", "–"))])
    names = [*methods, "decoding alone", "texts plain's", "texts of rows alone"]
    return as_markdown(["rows", "plain, tokens/s", *names], lines)


if __name__ == "__main__":
    main()
