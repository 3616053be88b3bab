"""Time to the first token by the length of the prompt, and whole conversations, with and without a cache of prefixes.

    python -m tests.lab.prompts [--model demo] [--dtype bfloat16] [--lengths 64 256 500 2000] [--turns 6] [--rows 8]
                                [--calls chat agent questions] [--document 1000]

First tokens: plain `generate`, this library with its defaults, and with `exactness="numeric"`, interleaved; median and
range in seconds. Prompts are parts of an English text. Series of calls with 32 new tokens each, all of which begin with
the same document: a chat, whose prompts are all that was said before and a question; an agent, whose prompts are all
that came before and 60 tokens of a tool's output; and separate questions. Methods: plain `generate` that reads the
whole prompt again in each call, plain `generate` that passes its own cache on, this library with lookup, the same with
`prefix_cache`, and with a store of earlier texts as well. Reports seconds of all calls, and whether the texts are the
same. Two batches ask `--rows` questions each about the same document: plain `generate`, this library with nothing
drafted, and the same with `prefix_cache`, which shares the document among rows and batches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ssd_generation.config import DraftingConfig, LookupConfig, SelfSpeculativeConfig
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.run import interleaved
from ssd_generation.models import load_model
from ssd_generation.support.versions import CACHE

from .program import Program, conditions

__all__ = [
    "KINDS",
    "NEW_TOKENS",
    "generate_greedily",
    "measure_batches",
    "measure_calls",
    "measure_first_tokens",
    "measure_series",
    "questions",
    "tokens_of",
]

KINDS = ("chat", "agent", "questions")
"""Series of calls."""

_TEXT = Path(__file__).parents[2] / "docs" / "how-it-works.md"
NEW_TOKENS = 32
"""New tokens of the calls of a series."""
_OUTPUT = 60
"""Tokens of a tool's output."""
_QUESTIONS = ("What is this about?", "Say it in one line.", "What is new?", "Who needs it?", "And what does it cost?")
_NOTHING = DraftingConfig(policy="none")
_METHODS: dict[str, SelfSpeculativeConfig | None] = {
    "plain": None,
    "default": SelfSpeculativeConfig(drafting=_NOTHING),
    "numeric": SelfSpeculativeConfig(drafting=_NOTHING, exactness="numeric"),
}


def tokens_of(tokenizer: Any, count: int) -> torch.Tensor:
    """Return the first tokens of the text that prompts are made of, `(1, count)`; it repeats itself after its end."""
    ids = tokenizer(_TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    return ids.repeat(1, -(-count // ids.shape[1]))[:, :count]  # type: ignore[no-any-return]


def questions(tokenizer: Any, count: int) -> list[list[int]]:
    """Return tokens of the questions of a conversation."""
    asked = [f"\n{_QUESTIONS[number % len(_QUESTIONS)]}\n" for number in range(count)]
    return [tokenizer(question).input_ids for question in asked]


def generate_greedily(model: Any, ids: torch.Tensor, new: int, **options: Any) -> Any:
    """Return the output of a greedy call for `new` tokens, with end-of-sequence off."""
    options = {"attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


def measure_first_tokens(
    model: Any, tokenizer: Any, lengths: Sequence[int], repeats: int
) -> list[dict[str, list[float]]]:
    """Time calls up to their first token.

    Args:
        model: the target model, enabled.
        tokenizer: its tokenizer.
        lengths: prompt lengths in tokens.
        repeats: number of timed calls of each method.

    Returns:
        For each length, seconds by method.
    """
    for config in _METHODS.values():  # measurements that are made once per machine
        generate_greedily(model, tokens_of(tokenizer, 64), 3, self_speculative=config)
    results = []
    for length in lengths:
        ids = tokens_of(tokenizer, length)
        seconds: dict[str, list[float]] = {name: [] for name in _METHODS}
        for turn in interleaved(list(_METHODS), repeats):
            config = _METHODS[turn.method]
            began = time.perf_counter()
            # A self-speculative call for fewer than three tokens would be decoded by transformers.
            generate_greedily(model, ids, 1 if config is None else 3, self_speculative=config)
            took = time.perf_counter() - began if config is None else model.last_speculation.prompt_seconds
            if not turn.is_warm_up:
                seconds[turn.method].append(took)
        results.append(seconds)
    return results


def measure_calls(model: Any, tokenizer: Any, kind: str, document: int, turns: int) -> dict[str, Any]:
    """Time a series of calls whose prompts begin with the same document.

    Args:
        model: the target model, enabled.
        tokenizer: its tokenizer.
        kind: `"chat"`, `"agent"` or `"questions"`; see the module's docstring.
        document: length of the document in tokens.
        turns: number of calls.

    Returns:
        By method, `seconds` of each call and `texts`.
    """
    added = [torch.tensor([question], device="cpu") for question in questions(tokenizer, turns)]
    if kind == "agent":
        outputs = tokens_of(tokenizer, document + _OUTPUT * turns)[:, document:]
        added = list(torch.split(outputs, _OUTPUT, dim=1))
    return measure_series(model, tokens_of(tokenizer, document), added, is_chat=kind != "questions")


def measure_series(model: Any, begin: torch.Tensor, added: Sequence[torch.Tensor], is_chat: bool) -> dict[str, Any]:
    """Time a series of calls.

    Args:
        model: the target model, enabled.
        begin: what all prompts begin with, `(1, n)`.
        added: what each call adds, `(1, n)`.
        is_chat: whether a call also begins with the texts of those before.

    Returns:
        As `measure_calls`.
    """
    lookup = SelfSpeculativeConfig(lookup=LookupConfig())
    stored = SelfSpeculativeConfig(lookup=LookupConfig(store=True))

    def in_turn(answer: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        text, seconds, texts = begin, [], []
        for more in added:
            asked = torch.cat((text if is_chat else begin, more), dim=1)
            began = time.perf_counter()
            text = answer(asked)
            seconds.append(time.perf_counter() - began)
            texts.append(text[0].tolist())
        return {"seconds": seconds, "texts": texts}

    def passing_on() -> Callable[[torch.Tensor], torch.Tensor]:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        return lambda text: generate_greedily(model, text, NEW_TOKENS, **{CACHE: cache})

    def drafting(config: SelfSpeculativeConfig) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda text: generate_greedily(model, text, NEW_TOKENS, self_speculative=config)

    generate_greedily(model, begin[:, :64], NEW_TOKENS, self_speculative=lookup)
    found = {"plain": in_turn(lambda text: generate_greedily(model, text, NEW_TOKENS))}
    if is_chat:
        found["plain, passing its cache on"] = in_turn(passing_on())
    found["lookup"] = in_turn(drafting(lookup))
    for name, config in (("lookup, prefix_cache", lookup), ("lookup with a store, prefix_cache", stored)):
        enable_self_speculative(model, prefix_cache="2GB")
        found[name] = in_turn(drafting(config))
        enable_self_speculative(model, prefix_cache=False)
    return found


def measure_batches(model: Any, tokenizer: Any, document: int, rows: int) -> dict[str, Any]:
    """Time two batches of questions about a document.

    Args:
        model: the target model, enabled.
        tokenizer: its tokenizer.
        document: length of the document in tokens.
        rows: number of questions in each batch.

    Returns:
        By method, `seconds` of each batch and `texts`.
    """
    text, nothing = tokens_of(tokenizer, document), SelfSpeculativeConfig(drafting=_NOTHING)
    asked = [[f"\n{number}. {_QUESTIONS[number % len(_QUESTIONS)]}\n" for number in range(rows)] for _ in range(2)]
    asked[1] = [f"\nOnce more: {question}" for question in asked[0]]

    def answers(config: SelfSpeculativeConfig | None) -> dict[str, Any]:
        seconds, texts = [], []
        for questions in asked:
            ends = [tokenizer(question, return_tensors="pt").input_ids for question in questions]
            width = max(end.shape[1] for end in ends)
            ids = torch.cat(
                [torch.nn.functional.pad(torch.cat((text, end), 1), (width - end.shape[1], 0)) for end in ends]
            )
            mask = torch.ones_like(ids)
            for row, end in enumerate(ends):
                mask[row, : width - end.shape[1]] = 0
            began = time.perf_counter()
            found = generate_greedily(model, ids, NEW_TOKENS, attention_mask=mask, self_speculative=config)
            seconds.append(time.perf_counter() - began)
            texts.append(found.tolist())
        return {"seconds": seconds, "texts": texts}

    generate_greedily(model, tokens_of(tokenizer, 64).repeat(rows, 1), 4, self_speculative=nothing)
    found = {"plain": answers(None), "nothing drafted": answers(nothing)}
    enable_self_speculative(model, prefix_cache="2GB")
    found["nothing drafted, prefix_cache"] = answers(nothing)
    enable_self_speculative(model, prefix_cache=False)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("prompts", __doc__)
    program.add_model(dtype="bfloat16")
    program.add_argument("--lengths", type=int, nargs="*", default=[64, 256, 500, 2000], help="tokens of prompts")
    program.add_argument("--calls", nargs="*", choices=KINDS, default=["chat"], help="series of calls")
    program.add_counts(repeats=3, turns=6, document=1000, rows=8)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    model = enable_self_speculative(model.eval())
    first = measure_first_tokens(model, tokenizer, arguments.lengths, arguments.repeats)
    series = {
        kind: measure_calls(model, tokenizer, kind, arguments.document, arguments.turns) for kind in arguments.calls
    }
    batches = measure_batches(model, tokenizer, arguments.document, arguments.rows)
    if arguments.json:
        document = {"conditions": conditions(arguments), "lengths": arguments.lengths, "first": first}
        print(json.dumps({**document, "calls": series, "batches": batches}))
        return
    print(conditions(arguments))
    print(f"\n{'seconds to the first token':30}" + "".join(f"{n:>24}" for n in arguments.lengths))
    for name in _METHODS:
        cells = [f"{statistics.median(s[name]):.2f} ({min(s[name]):.2f}-{max(s[name]):.2f})" for s in first]
        print(f"{name:30}" + "".join(f"{cell:>24}" for cell in cells))
    for kind, found in series.items():
        print(f"\n{kind}: {arguments.turns} calls, {arguments.document} tokens{'':6}seconds     first    others  texts")
        for name, one in found.items():
            seconds = one["seconds"]
            same = sum(a == b for a, b in zip(one["texts"], found["plain"]["texts"], strict=True))
            drafted = one["texts"] == found["lookup"]["texts"]
            others = statistics.mean(seconds[1:]) if len(seconds) > 1 else float("nan")
            said = f"{same} of {len(seconds)} plain's" + (", lookup's" if drafted else "")
            print(f"{name:36}{sum(seconds):12.2f}{seconds[0]:10.2f}{others:10.2f}  {said}")
    print(
        f"\ntwo batches of {arguments.rows} questions{'first':>26}{'second':>10}  rows with the text of nothing drafted"
    )
    for name, one in batches.items():
        others = batches["nothing drafted"]["texts"]
        same = sum(a == b for x, y in zip(one["texts"], others, strict=True) for a, b in zip(x, y, strict=True))
        print(f"{name:36}" + "".join(f"{s:10.2f}" for s in one["seconds"]) + f"  {same} of {2 * arguments.rows}")


if __name__ == "__main__":
    main()
