"""The measurements count what they say they count (their times are nobody's to assert)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ssd_generation import SkipConfig
from ssd_generation.benchmark import overhead
from ssd_generation.benchmark.memory import measure_memory
from ssd_generation.benchmark.overhead import measure_overhead
from tiny_models import tiny_model

CHARACTERS = "#abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789"


def test_overhead_compares_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    backend.decoder = decoders.Fuse()
    monkeypatch.setattr(overhead, "PROMPT", "a prompt of a few words")
    model = tiny_model()
    before = {name: getattr(model.generation_config, name, None) for name in ("num_assistant_tokens", "eos_token_id")}
    report: dict[str, Any] = measure_overhead(
        model, PreTrainedTokenizerFast(tokenizer_object=backend), draft_length=3, new_tokens=17, repeats=2
    )
    # One token from the prompt's pass, 16 in four rounds of 3 + 1: nothing is ever rejected.
    assert report["ours"]["rounds"] == 4 and report["ours"]["drafted"] == 12
    # transformers drafts before its first pass, too.
    assert report["upstream"]["rounds"] in (3, 4)
    for loop in ("ours", "upstream"):
        for part in ("per_drafted_token", "per_round"):
            figures = report[loop][part]
            assert 0 < figures["min"] <= figures["median"] <= figures["max"] and math.isfinite(figures["median"])
    after = {name: getattr(model.generation_config, name, None) for name in before}
    assert after == before, "the model's settings were not put back"


def test_memory_is_counted_by_live_tensors() -> None:
    model = tiny_model()
    report = measure_memory(model, SkipConfig(attention=[1]), context=100, new_tokens=8, draft_length=3)
    # Keys and values of the whole context at the least: 4 layers, 2 heads of 8, float32.
    held = 4 * 2 * 2 * 8 * 4 * 107
    for part in ("whole_call", "decoding"):
        figures = report[part]
        assert figures["plain"] >= held * (part == "whole_call")
        assert figures["difference"] == figures["self_speculative"] - figures["plain"]
        # No second cache: far less than another copy of the keys and values.
        assert figures["difference"] < held
    assert report["weights"] == sum(p.numel() * 4 for p in model.parameters())
