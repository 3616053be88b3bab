"""The measurements count what they claim to count (their times are not asserted)."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from lab import batches, constrained, kernels, overhead, release, side_by_side
from lab.batches import measure_batches
from lab.kernels import measure_kernels
from lab.memory import measure_memory
from lab.overhead import measure_overhead
from ssd_generation import SkipConfig, enable_self_speculative
from ssd_generation.harness.texts import Prompt
from ssd_generation.native.sequence import KernelList
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
    # transformers also drafts before its first pass.
    assert report["upstream"]["rounds"] in (3, 4)
    for loop in ("ours", "upstream"):
        for part in ("per_drafted_token", "per_round"):
            figures = report[loop][part]
            assert 0 < figures["min"] <= figures["median"] <= figures["max"] and math.isfinite(figures["median"])
    after = {name: getattr(model.generation_config, name, None) for name in before}
    assert after == before, "the model's settings were not put back"


def test_batches_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    model = tiny_model()
    texts = ["a prompt", "one that is too long " * 10, "another one", "and a third"]
    monkeypatch.setattr(batches, "load_prompts", lambda: [Prompt(text, "some", text) for text in texts])
    methods = {name: side_by_side.METHODS[name] for name in ("plain", "nothing", "lookup")}
    monkeypatch.setattr(side_by_side, "METHODS", methods)
    monkeypatch.setattr(batches, "load_model", lambda name, dtype: (model, tokenizer))
    padded = batches.batch_of_prompts(tokenizer, 2)
    assert padded["attention_mask"].tolist() == [[0, 0, 0, *[1] * 8], [1] * 11]
    found = measure_batches(model, tokenizer, [1, 3], new_tokens=9, repeats=2)
    assert [row["rows"] for row in found] == [1, 3]
    for row in found:
        assert row["plain_tokens_per_second"] > 0
        for method in ("nothing", "lookup"):
            assert row[method]["same_texts"] == row["rows"] and row[method]["speedup"]["n"] == 2
            assert row[method]["decoding"] > 0
        assert row["alone"] == row["rows"]
    batches.main(["--rows", "2", "--new-tokens", "5", "--repeats", "1"])
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "| rows | plain, tokens/s | nothing | lookup | decoding alone | texts plain's | texts of rows alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for wrong, said in ((["--rows", "4"], "from 1 to 3 rows"), (["--repeats", "0"], "--repeats should be at least 1")):
        with pytest.raises(SystemExit, match="2"):
            batches.main(wrong)
        assert said in capsys.readouterr().err


def test_a_release_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    model = tiny_model()
    texts = [Prompt(text, "some", text) for text in ("a prompt", "another one", "a third one", "and a fourth")]
    monkeypatch.setattr(batches, "load_prompts", lambda: texts)
    monkeypatch.setattr(release, "load_model", lambda name, dtype: (model, tokenizer))
    lengths = [Prompt("few", "short", "a few words"), Prompt("more", "long", "more words " * 5)]
    monkeypatch.setattr(release, "prompts_by_length", lambda count: lengths * count)
    words = ["--new-tokens", "9", "--prompts", "1", "--repeats", "1", "--rows", str(tmp_path), "--json"]
    release.main(words)
    found = json.loads(capsys.readouterr().out)["found"]
    methods = {"plain", "auto", "auto-free", "plain-loop", "prompt-lookup-3"}
    for length in ("short", "long"):
        assert found[length].keys() == methods
        for name, figures in found[length].items():
            assert figures["texts"] == figures["same_texts"] == figures["undrafted_texts"] == 1, name
            assert figures["step"] > 0 and 0 < figures["first"] < 60 and figures["speed"] > 0
        assert found[length]["plain"]["speed"] == 1
    assert found["batch"].keys() == {"plain", "nothing", "auto"}
    # The same command continues: nothing is left to be called.
    monkeypatch.setattr(model, "generate", None)
    monkeypatch.setattr(release, "batches_by_rows", None)
    release.main([word for word in words if word != "--json"])
    head, *lines = capsys.readouterr().out.splitlines()[2:]
    assert head == "| | about 50 tokens | about 500 tokens | 4 texts at once |"
    assert {line.split(" | ")[0].strip("| ") for line in lines[1:]} == methods
    with pytest.raises(SystemExit, match="2"):
        release.main(["--new-tokens", "9"])
    assert "--rows is needed" in capsys.readouterr().err


def test_prompts_of_a_release_have_two_lengths() -> None:
    prompts = release.prompts_by_length(4)
    assert [prompt.category for prompt in prompts] == ["short", "long"] * 4
    assert len({prompt.text for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 8
    words = [len(prompt.text.split()) for prompt in prompts]
    assert max(words[::2]) < 50 and min(words[1::2]) > 300 and max(words[1::2]) < 420
    for count in (0, 5):
        with pytest.raises(ValueError, match=rf"from 1 to 4, but got {count}"):
            release.prompts_by_length(count)


def test_constrained_calls_have_a_processor_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    class Even(LogitsProcessor):
        """Stateful logits processor of a single text: forbids odd tokens and notes the text's lengths."""

        def __init__(self) -> None:
            made.append(self)
            self.lengths: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.lengths.append(input_ids.shape[1])
            scores = scores.clone()
            scores[:, 1::2] = -math.inf
            return scores

    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    model = tiny_model()
    methods = {name: side_by_side.METHODS[name] for name in ("plain", "nothing", "lookup")}
    for module in (side_by_side, constrained):
        monkeypatch.setattr(module, "METHODS", methods)
    monkeypatch.setattr(constrained, "LIBRARIES", {"even": lambda tokenizer, vocabulary, schema: Even})
    monkeypatch.setattr(constrained, "REQUESTS", (("a prompt", {}), ("another one", {})))
    monkeypatch.setattr(constrained, "load_model", lambda name, dtype: (model, tokenizer))
    (row,) = constrained.measure_constrained(model, tokenizer, new_tokens=9, repeats=2)
    assert row["library"] == "even" and row["texts"] == 2
    for method in ("nothing", "lookup"):
        assert row[method]["same_texts"] == 2 and row[method]["speedup"]["n"] == 4
    assert row["plain"]["acceptance_rate"] is None
    # Each request and method gets one warm-up call and two that count.
    assert len(made) == 2 * 3 * 3 and all(len(one.lengths) >= 9 for one in made)
    constrained.main(["--new-tokens", "5", "--repeats", "1"])
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "| library | nothing | lookup | accepted | texts plain's |", "|---|---|---|---|---|"
    ]  # fmt: skip


def test_memory_is_counted_by_live_tensors() -> None:
    model = tiny_model()
    report = measure_memory(model, SkipConfig(attention=[1]), context=100, new_tokens=8, draft_length=3)
    # At least the keys and values of the whole context: 4 layers, 2 heads of 8, float32.
    held = 4 * 2 * 2 * 8 * 4 * 107
    for part in ("whole_call", "decoding"):
        figures = report[part]
        assert figures["plain"] >= held * (part == "whole_call")
        assert figures["difference"] == figures["self_speculative"] - figures["plain"]
        # No second cache: far less than another copy of the keys and values.
        assert figures["difference"] < held
    assert report["weights"] == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_counted_by_their_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LARGE", 1 << 12)
    # Heads of 32 numbers: whole vectors on any processor, so torch computes cosines alike at every position.
    sizes = {"hidden_size": 96, "intermediate_size": 64, "vocab_size": 128, "head_dim": 32}
    model = enable_self_speculative(tiny_model(**sizes).to(dtype))
    # Each reading of the clock is a second after the last, so anything timed once takes one second.
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 1.0).__next__))
    called = KernelList.__call__
    report = measure_kernels(model, [1, 3], repeats=2)
    assert KernelList.__call__ is called
    assert report["memory"] == 1 << 12
    name = str(dtype).removeprefix("torch.")
    assert [(one["weights"], one["rows"]) for one in report["passes"]] == [
        (weights, rows) for weights in (name, "int8", "int4") for rows in (1, 3)
    ]
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for one in report["passes"]:
        parts = one["parts"]
        shapes = {part: found for part, found in parts.items() if "bytes" in found}
        # Rotary tables may be scaled and cast in a list, too.
        of_tables = {"scale", "mul", "to"}
        assert {"attention", "norm", "gate", "rotary", "add"} == set(parts) - set(shapes) - of_tables
        per_weight = {name: dtype.itemsize, "int8": 1, "int4": 0.5}[one["weights"]]
        held = sum(linear.weight.numel() for linear in linears)
        assert held * per_weight <= sum(found["bytes"] for found in shapes.values()) <= held * (per_weight + 0.4)
        assert set(shapes) >= {"LM head, 128 x 96", "96 x 64"}
        for found in parts.values():
            # The kernels of a part are timed once per list; no pass has more lists than were timed in it.
            assert 1 <= found["seconds"] <= one["in_kernels"] and found["seconds"].is_integer()
        assert all(found["torch"] >= 1 for found in shapes.values())
        assert one["seconds"] == 1 <= one["in_kernels"] and one["in_kernels"].is_integer()
    lines = list(kernels._tables(report))
    assert sum(line.startswith((name, "int8", "int4")) for line in lines) == 6 + sum(
        len([part for part in one["parts"].values() if "bytes" in part]) for one in report["passes"] if one["rows"] == 1
    )


def test_kernels_that_cannot_be_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda: "llvmlite is not installed (extra `fast`)")
    with pytest.raises(ValueError, match="no kernels to measure: llvmlite is not installed"):
        measure_kernels(enable_self_speculative(tiny_model()), [1])
