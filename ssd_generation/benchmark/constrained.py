"""What drafting gains in text that a grammar constrains: JSON by a schema, with xgrammar and outlines.

    python -m ssd_generation.benchmark.constrained [--model FOLDER] [--dtype bfloat16] [--new-tokens 96] [--repeats 2]
                                                   [--json]

Three requests of the package's own, each with each library; methods are interleaved. A matcher follows one text, so
each call has a new processor; making it is not timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ..generation import enable_self_speculative
from ..harness.results import Timings, spread
from ..harness.run import greedy_options, interleaved, timed
from ..harness.texts import encode_prompt
from ..models import load_model
from ..support.machine import cpu_name
from .batches import METHODS
from .tables import versions

__all__ = ["LIBRARIES", "REQUESTS", "measure_constrained"]

_TEXT: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z ,.'-]{3,60}$"}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "Describe a person from a novel as JSON with name, profession, age and hobbies.",
        _object(
            name=_TEXT,
            profession=_TEXT,
            age={"type": "integer"},
            hobbies={"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 4},
        ),
    ),
    (
        "Write a recipe for a tomato soup as JSON with title, ingredients and steps.",
        _object(
            title=_TEXT,
            ingredients={"type": "array", "items": _object(item=_TEXT, amount=_TEXT), "minItems": 3, "maxItems": 5},
            steps={"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 4},
        ),
    ),
    (
        "List three cities as JSON, each with name, country and whether it is a capital.",
        _object(
            cities={
                "type": "array",
                "items": _object(name=_TEXT, country=_TEXT, capital={"type": "boolean"}),
                "minItems": 3,
                "maxItems": 3,
            }
        ),
    ),
)
"""A request, and the schema of its answer."""

Maker = Callable[[], LogitsProcessor]
"""Makes a processor for one text."""


def _xgrammar(tokenizer: Any, vocabulary: int, schema: str) -> Maker:
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor as Matching

    about = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    compiled = xgrammar.GrammarCompiler(about).compile_json_schema(schema, any_whitespace=False)
    return lambda: Matching(compiled)


def _outlines(tokenizer: Any, vocabulary: int, schema: str) -> Maker:
    from outlines.backends.outlines_core import OutlinesCoreBackend, OutlinesCoreLogitsProcessor
    from outlines_core import Index
    from outlines_core.json_schema import build_regex_from_schema

    known = OutlinesCoreBackend.create_outlines_core_vocabulary(
        tokenizer.get_vocab(),
        tokenizer.eos_token_id,
        tokenizer.eos_token,
        lambda token: tokenizer.convert_tokens_to_string([token]),
    )
    index = Index(build_regex_from_schema(schema, ""), known)
    return lambda: OutlinesCoreLogitsProcessor(index, "torch")


LIBRARIES: dict[str, Callable[[Any, int, str], Maker]] = {"xgrammar": _xgrammar, "outlines": _outlines}
"""By name: `(tokenizer, tokens that the model knows, schema)` → what makes processors."""


def measure_constrained(model: Any, tokenizer: Any, new_tokens: int = 96, repeats: int = 2) -> list[dict[str, Any]]:
    """Time constrained calls of each method, interleaved.

    Args:
        model: a transformers model; it is enabled.
        tokenizer: its tokenizer.
        new_tokens: of each text at the most; it ends where its JSON does.
        repeats: timed calls of each method, after one to warm up.

    Returns:
        For each library: by method `speedup` over plain in the same round (as `spread`), `same_texts` of how many
        `texts`, and the `acceptance_rate` of all drafted tokens.

    Raises:
        ImportError: a library is not installed (extra `dev`).
    """
    enable_self_speculative(model)
    options = {**greedy_options(new_tokens), "eos_token_id": tokenizer.eos_token_id}
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    found = []
    for library, maker_of in LIBRARIES.items():
        ratios: dict[str, list[float]] = {method: [] for method in METHODS}
        same, drafted, accepted = (dict.fromkeys(METHODS, 0) for _ in range(3))
        for text, schema in REQUESTS:
            make = maker_of(tokenizer, vocabulary, json.dumps(schema))
            inputs = {name: value.to(model.device) for name, value in encode_prompt(tokenizer, text).items()}
            timings = Timings(METHODS, "plain")
            texts: dict[str, torch.Tensor] = {}
            for turn in interleaved(list(METHODS), repeats):
                request = METHODS[turn.method]
                asked: dict[str, Any] = {} if request is None else {"self_speculative": request}
                asked["logits_processor"] = LogitsProcessorList([make()])
                output, seconds = timed(model.device, model.generate, **inputs, **options, **asked)
                texts[turn.method] = output
                if turn.is_warm_up:
                    continue
                timings.add(turn.method, output.shape[1] - inputs["input_ids"].shape[1], seconds)
                if request is not None:
                    drafted[turn.method] += model.last_speculation.drafted_tokens
                    accepted[turn.method] += model.last_speculation.accepted_tokens
            for method in METHODS:
                ratios[method] += timings.ratios(method)
                same[method] += torch.equal(texts[method], texts["plain"])
        row: dict[str, Any] = {"library": library, "texts": len(REQUESTS)}
        for method in METHODS:
            rate = accepted[method] / drafted[method] if drafted[method] else None
            row[method] = {
                "speedup": spread(ratios[method]),
                "same_texts": same[method],
                "acceptance_rate": rate,
            }
        found.append(row)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """The command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ssd_generation.benchmark.constrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="Hub id, folder, GGUF file or 'demo' (SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(words)
    for name, given in (("--new-tokens", arguments.new_tokens), ("--repeats", arguments.repeats)):
        if given < 1:
            parser.error(f"{name} should be at least 1, but got {given}")
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    found = measure_constrained(model, tokenizer, arguments.new_tokens, arguments.repeats)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{versions()}; {arguments.model}, {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads.\n")
    methods = [method for method in METHODS if method != "plain"]
    print(f"| library | {' | '.join(methods)} | accepted | texts plain's |")
    print("|---|" + "---|" * (len(methods) + 2))
    for row in found:
        speedups = [row[method]["speedup"] for method in methods]
        shown = " | ".join(f"{each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})" for each in speedups)
        rates = [row[method]["acceptance_rate"] for method in methods]
        accepted = ", ".join("–" if rate is None else f"{rate:.2f}" for rate in rates)
        same = ", ".join(f"{row[method]['same_texts']} of {row['texts']}" for method in methods)
        print(f"| {row['library']} | {shown} | {accepted} | {same} |")


if __name__ == "__main__":
    main()
