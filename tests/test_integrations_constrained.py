"""Constrained output: JSON by twenty schemas, and transformers' own constraints; direct and by pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, pipeline

from lab.constrained import LIBRARIES
from other_programs import Recorded, plain_and_drafting

pytestmark = pytest.mark.integrations

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, Any]:
    return plain_and_drafting()


@pytest.mark.parametrize("way", ["direct", "pipeline"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("asked", SCHEMAS, ids=[one["name"] for one in SCHEMAS])
def test_json_by_a_schema(models: Any, asked: dict[str, Any], library: str, way: str) -> None:
    pytest.importorskip(library)
    plain, drafting, tokenizer = models
    size = plain.get_input_embeddings().weight.shape[0]
    make = LIBRARIES[library](tokenizer, size, json.dumps(asked["schema"]))
    texts = []
    for model in (plain, drafting):
        options: dict[str, Any] = {
            "logits_processor": LogitsProcessorList([make()]),
            "max_new_tokens": 400,
            "do_sample": True,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        torch.manual_seed(1)
        if way == "direct":
            prompt = tokenizer(asked["request"], return_tensors="pt")
            tokens = model.generate(**prompt, **options)[0, prompt["input_ids"].shape[1] :]
            texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
        else:
            pipe = pipeline("text-generation", model, tokenizer=tokenizer)
            texts.append(pipe(asked["request"], return_full_text=False, **options)[0]["generated_text"])
    assert texts[0] == texts[1]
    assert drafting.last_speculation.refusal is None and drafting.last_speculation.drafted_tokens > 0
    if drafting.last_speculation.generated_tokens < 400:
        json.loads(texts[0])


def letters(tokenizer: Any) -> Callable[[int, torch.Tensor], list[int]]:
    """Return a function for `prefix_allowed_tokens_fn` that allows only tokens of ASCII letters."""
    allowed = [n for token, n in tokenizer.get_vocab().items() if token.isascii() and token.isalpha()]
    return lambda row, ids: allowed


CONSTRAINTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "prefix_allowed_tokens_fn": lambda tokenizer: {"prefix_allowed_tokens_fn": letters(tokenizer)},
    "bad_words_ids": lambda tokenizer: {"bad_words_ids": [[n] for n in range(3, 160)]},
    "sequence_bias": lambda tokenizer: {"sequence_bias": [[[n], 4.0] for n in range(70, 90)]},
    "suppress_tokens": lambda tokenizer: {"suppress_tokens": list(range(3, 160))},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_constraints_of_transformers(models: Any, constraint: str, rows: int) -> None:
    plain, drafting, tokenizer = models
    texts = []
    for model in (plain, drafting):
        torch.manual_seed(1)
        prompt = tokenizer(["Name a colour."] * rows, return_tensors="pt")
        made = CONSTRAINTS[constraint](tokenizer)
        texts.append(model.generate(**prompt, max_new_tokens=24, do_sample=True, pad_token_id=0, **made).tolist())
    assert texts[0] == texts[1] and drafting.last_speculation.drafted_tokens > 0


def test_forced_words_end_as_in_transformers(models: Any) -> None:
    """Check the error: forced words are Hub code today, which takes over the call; without it transformers raises."""
    plain, drafting, tokenizer = models
    said = []
    for model in (plain, drafting):
        prompt = tokenizer("Name a colour.", return_tensors="pt")
        with pytest.raises(Exception, match="") as error:  # noqa: PT011
            model.generate(**prompt, max_new_tokens=8, num_beams=2, force_words_ids=[[70]], pad_token_id=0)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]


def test_beams_are_decoded_plainly(models: Any) -> None:
    plain, drafting, tokenizer = models
    prompt = tokenizer("Name a colour.", return_tensors="pt")
    options = {"max_new_tokens": 8, "num_beams": 2, "pad_token_id": 0}
    made = [CONSTRAINTS["prefix_allowed_tokens_fn"](tokenizer) for _ in range(2)]
    with pytest.warns(UserWarning, match="beam search"):
        drafted = drafting.generate(**prompt, **options, **made[0])
    assert torch.equal(plain.generate(**prompt, **options, **made[1]), drafted)


def test_calls_are_recorded() -> None:
    """Check the recorder that the other integration tests rely on."""
    plain, drafting, tokenizer = plain_and_drafting()
    for model in (plain, drafting):
        calls = Recorded(model)
        model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=12, pad_token_id=0)
        assert len(calls.texts) == 1
        assert calls.all_drafted is (model is drafting)
