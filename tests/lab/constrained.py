"""Speed-up of grammar-constrained text: JSON by a schema, with xgrammar and outlines.

    python -m tests.lab.constrained [--model FOLDER] [--dtype bfloat16] [--new-tokens 96] [--repeats 2]
                                                   [--requests tests/schemas.json] [--json]

Three built-in requests, or those of a file, each with each library; methods are interleaved. A matcher follows one
text, so each call gets a new processor, whose creation is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import spread
from ssd_generation.harness.texts import encode_prompt
from ssd_generation.models import load_model

from .program import Program, conditions
from .side_by_side import METHODS, compare, drafting_methods, greedy_options, with_range
from .tables import as_markdown

__all__ = ["LIBRARIES", "REQUESTS", "measure_constrained", "requests_in"]

Requests = tuple[tuple[str, dict[str, Any]], ...]

_TEXT: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z ,.'-]{3,60}$"}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


REQUESTS: Requests = (
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
"""Pairs of a request and the schema of its answer."""

Maker = Callable[[], LogitsProcessor]
"""Function that makes a processor for one text."""


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
"""Functions by name: `(tokenizer, size of the vocabulary, schema)` → `Maker`."""


def _processor(make: Maker) -> dict[str, Any]:
    """Return the option of `generate` with a new processor."""
    return {"logits_processor": LogitsProcessorList([make()])}


def requests_in(file: Path) -> Requests:
    """Read requests from a file: a list of `{"request": …, "schema": …}`.

    Args:
        file: JSON file.
    """
    return tuple((one["request"], one["schema"]) for one in json.loads(file.read_text(encoding="utf-8")))


def measure_constrained(
    model: Any, tokenizer: Any, new_tokens: int = 96, repeats: int = 2, requests: Requests | None = None
) -> list[dict[str, Any]]:
    """Time constrained calls of each method, interleaved.

    Args:
        model: a transformers model; it is enabled.
        tokenizer: its tokenizer.
        new_tokens: most new tokens of a text, which ends where its JSON does.
        repeats: timed calls of each method, after one to warm up.
        requests: pairs of a request and the schema of its answer; by default `REQUESTS`.

    Returns:
        For each library: the number of `texts`, and by method the `speedup` over plain in the same round (as `spread`
        gives it), `same_texts` (number of texts that are plain's), and the `acceptance_rate` of all drafted tokens.

    Raises:
        ImportError: a library is not installed (extra `dev`).
    """
    enable_self_speculative(model)
    options = {**greedy_options(new_tokens), "eos_token_id": tokenizer.eos_token_id}
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    found, asked = [], REQUESTS if requests is None else requests
    for library, maker_of in LIBRARIES.items():
        ratios: dict[str, list[float]] = {method: [] for method in METHODS}
        same, drafted, accepted = (dict.fromkeys(METHODS, 0) for _ in range(3))
        for text, schema in asked:
            make = maker_of(tokenizer, vocabulary, json.dumps(schema))
            compared = compare(model, encode_prompt(tokenizer, text), options, repeats, partial(_processor, make))
            for method in METHODS:
                ratios[method] += compared.timings.ratios(method)
                same[method] += torch.equal(compared.texts[method], compared.texts["plain"])
            for method, statistics in compared.statistics.items():
                drafted[method] += sum(one.drafted_tokens for one in statistics)
                accepted[method] += sum(one.accepted_tokens for one in statistics)
        row: dict[str, Any] = {"library": library, "texts": len(asked)}
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
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("constrained", __doc__)
    program.add_model()
    program.add_counts(new_tokens=96, repeats=2)
    program.add_argument("--requests", type=Path, metavar="FILE", help="JSON: a list of {request, schema}")
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    requests = None if arguments.requests is None else requests_in(arguments.requests)
    found = measure_constrained(model, tokenizer, arguments.new_tokens, arguments.repeats, requests)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{conditions(arguments)}\n")
    print("\n".join(_table(found)))


def _table(found: Sequence[dict[str, Any]]) -> list[str]:
    methods = drafting_methods()
    lines = []
    for row in found:
        rates = [row[method]["acceptance_rate"] for method in methods]
        accepted = ", ".join("–" if rate is None else f"{rate:.2f}" for rate in rates)
        same = ", ".join(f"{row[method]['same_texts']} of {row['texts']}" for method in methods)
        lines.append([row["library"], *(with_range(row[method]["speedup"]) for method in methods), accepted, same])
    return as_markdown(["library", *methods, "accepted", "texts plain's"], lines)


if __name__ == "__main__":
    main()
