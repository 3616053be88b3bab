"""Quantised models and adapters in every form of `lab.targets`, as tiny models: the same text, however drafted.

Forms that need a library that is not installed are skipped.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lab.targets import __main__ as command
from lab.targets import trial
from lab.targets.forms import TARGETS, Target
from lab.targets.page import page
from lab.targets.trial import COLUMNS, Row, try_target
from ssd_generation import DraftingConfig, SelfSpeculativeConfig, enable_self_speculative
from ssd_generation.forward.copies.low_bit import CopiesPart
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning.automatic import DRAFT_MEMORY_OF_QUANTISED, usual_budget, weight_bytes
from test_models import write_gguf
from tiny_models import prompt, tiny_model

# Warnings of the quantisers and of peft.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16, num_key_value_heads=4).save_pretrained(made)
    return str(made)


def prompts() -> list[dict[str, torch.Tensor]]:
    ids = prompt(9, 2)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return [{"input_ids": x[:rows], "attention_mask": mask[:rows]} for rows, x in ((1, ids), (2, ids))]


def rows_of(target: Target, source: str) -> list[Row]:
    rows = list(try_target(target, source, prompts()))
    if rows[0].untried is not None and rows[0].untried.endswith("is not installed"):
        pytest.skip(rows[0].untried)
    return rows


@pytest.mark.parametrize("target", [t for t in TARGETS if t.name != "float32"], ids=lambda target: target.name)
def test_the_same_text(target: Target, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "NEW_TOKENS", 24)
    source = str(write_gguf(tmp_path / "tiny.gguf")) if target.reads_gguf else folder
    for row in rows_of(target, source):
        assert row.untried is None
        assert row.cells == dict.fromkeys(COLUMNS, "yes"), row.name
        assert row.apart is not None and row.apart[1] < 0.02, row.name
        for column in ("int8", "int4", "skipping", "batch", "always"):
            assert row.drafted[column] > 0, (row.name, column)


def by_name(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("torchao int8 weights", 8), ("bitsandbytes 8-bit", 8), ("bitsandbytes 4-bit NF4, float32", 4)],
)
def test_copies_agree_with_the_quantised_model(name: str, bits: int, folder: str) -> None:
    pytest.importorskip(by_name(name).needs[0])
    model = enable_self_speculative(by_name(name).make(folder))
    # The stored bytes count, not the size that a tensor's class reports.
    linear = 4 * (4 * 64 * 64 + 3 * 64 * 128)
    plain = sum(p.numel() * 4 for n, p in model.named_parameters() if "proj" not in n)
    assert linear * bits / 8 <= weight_bytes(model) - plain < 1.3 * linear * bits / 8
    assert usual_budget(model) == DRAFT_MEMORY_OF_QUANTISED
    config = SelfSpeculativeConfig(
        precision="int8", drafting=DraftingConfig(policy="fixed", max_draft_length=4), exactness="numeric"
    )
    model.generate(prompt(), max_new_tokens=40, eos_token_id=None, do_sample=False, self_speculative=config)
    statistics = model.last_speculation
    assert statistics.accepted_tokens > 0.6 * statistics.drafted_tokens
    # The draft contains only the copies and torch's own layers, so its passes are captured.
    (copies,) = state_of(model).get(CopiesPart).low_bit_drafts.values()
    (passes,) = copies.passes.values()
    assert copies.left == [] and passes.program(1) is not None


def test_one_quantisation_is_not_taken_for_another(folder: str) -> None:
    pytest.importorskip("torchao")
    from ssd_generation.tuning.measuring import describe_model

    weights, both = (
        by_name(name).make(folder) for name in ("torchao int8 weights", "torchao int8 weights and activations")
    )
    assert describe_model(weights) != describe_model(both)
    again = by_name("torchao int8 weights").make(folder)
    assert describe_model(weights) == describe_model(again)


# --- the command ----------------------------------------------------------------------------------


def test_what_is_not_installed_is_told() -> None:
    (row,) = try_target(Target("some", lambda folder: None, ("no-such-package",)), "nowhere", prompts())
    assert row.untried == "no-such-package is not installed"


def test_what_cannot_be_loaded_is_told() -> None:
    def make(folder: str) -> Any:
        raise RuntimeError(f"nothing in {folder}")

    (row,) = try_target(Target("some", make), "nowhere", prompts())
    assert row.untried == "it cannot be loaded: RuntimeError: nothing in nowhere"


def test_the_page() -> None:
    yes = dict.fromkeys(COLUMNS, "yes")
    folders = {"exported": "yes", "served": "An adapter."}
    rows = [
        Row("fine", yes, alone="attention", apart=(0.1234, 1e-7), folders=folders),
        Row("odd", {**yes, "int4": "It cannot.", "lookup": "WRONG"}, apart=(0.0, 0.0)),
        Row("absent", untried="some is not installed"),
    ]
    text = page(rows, "a model")
    assert "| fine | yes | yes | yes | yes | yes | yes | yes | yes | yes | 0.1 | 1e-07 | attention |" in text
    assert "| odd | **WRONG** | yes | no (1) |" in text and "1. It cannot. Forms: odd." in text
    assert "| fine | yes | no (2) |" in text and "2. An adapter. Forms: fine." in text
    assert "- absent: some is not installed." in text
    assert "| WRONG | 1 | 0 |" in text


def test_the_command(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = [Row("float32", dict.fromkeys(COLUMNS, "yes"))]
    monkeypatch.setattr(command, "try_target", lambda *_: iter(found))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())
    monkeypatch.setattr(logging, "disable", lambda level: None)
    monkeypatch.setattr(transformers.utils.logging, "set_verbosity", lambda level: None)
    monkeypatch.setattr(transformers.utils.logging, "disable_progress_bar", lambda: None)
    options = ["--model", folder, "--only", "float32"]
    command.main([*options, "-o", str(tmp_path / "page.md")])
    assert "| float32 | yes |" in (tmp_path / "page.md").read_text(encoding="utf-8")
    command.main([*options, "--json"])
    assert json.loads(capsys.readouterr().out)[0]["name"] == "float32"
    kept = ["--rows", str(tmp_path / "rows")]
    command.main([*options, "--json", *kept])
    monkeypatch.setattr(command, "try_target", None)  # the same command does not test it again
    command.main([*options, "--json", *kept])
    first, second = capsys.readouterr().out.split("]\n[")
    assert json.loads(first + "]") == json.loads("[" + second) != []
    with pytest.raises(SystemExit, match="2"):
        command.main(["--model", folder, *kept])
    assert "another folder with --rows" in capsys.readouterr().err
    monkeypatch.setattr(command, "try_target", lambda *_: iter(found))
    found[0].cells["lookup"] = "WRONG"
    with pytest.raises(SystemExit, match="1"):
        command.main(options)
    for wrong in (["--model", str(tmp_path)], ["--model", folder, "--only", "no such form"]):
        with pytest.raises(SystemExit, match="2"):
            command.main(wrong)
    assert "there is no form no such form" in capsys.readouterr().err


class Tokenizer:
    pad_token = "p"
    eos_token = "e"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros((len(texts), 2), dtype=torch.long)}
