"""The check of sampled tokens by the model's own distributions: draws from them pass, all others fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.harness.results import problems, read_rows, sampling_cell, sampling_notes
from ssd_generation.harness.run import engine
from ssd_generation.harness.texts import SamplingCheck, check_sampling, sampling_check
from test_evaluation import METHODS, TEXTS, own_place, run  # noqa: F401
from test_evaluation import model as model  # the fixture
from tiny_models import tiny_model

PROMPT = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
CONFIG = SelfSpeculativeConfig(SkipConfig([1], [2]), DraftingConfig(policy="fixed", max_draft_length=3))


def drawn(
    model: Any, texts: int, new_tokens: int = 40, judged_as: dict[str, Any] | None = None, **changes: Any
) -> SamplingCheck:
    """Return the check of texts sampled in one way, judged as if sampled in another."""
    total = SamplingCheck()
    for seed in range(texts):
        torch.manual_seed(seed)
        out = model.generate(**PROMPT, **{**SAMPLING, "max_new_tokens": new_tokens, **changes})
        total += check_sampling(model, PROMPT, out[0, 4:].tolist(), **(judged_as or SAMPLING))
    return total


@pytest.fixture(scope="module")
def target() -> Any:
    return enable_self_speculative(tiny_model(seed=3))


def test_one_token_by_hand(target: Any) -> None:
    logits = target(**PROMPT).logits[0, -1].detach().double() / 0.5
    p = logits.softmax(-1)
    entropy = -float((p * p.log()).sum())
    token = int(p.argmax())
    found = check_sampling(target, PROMPT, [token], do_sample=True, temperature=0.5, top_k=0, pad_token_id=0)
    assert found.tokens == 1 and found.impossible == 0
    assert found.excess == pytest.approx(float(p[token].log()) + entropy, abs=1e-4)
    assert found.variance == pytest.approx(float((p * (p.log() + entropy) ** 2).sum()), abs=1e-4)


def test_each_token_is_judged_after_those_before_it(target: Any) -> None:
    ids = [9, 3, 3, 11]
    whole = check_sampling(target, PROMPT, ids, **SAMPLING, repetition_penalty=1.3)
    parts = SamplingCheck()
    for n, token in enumerate(ids):
        before = torch.tensor([[5, 6, 7, 8, *ids[:n]]])
        parts += check_sampling(
            target, {"input_ids": before, "attention_mask": torch.ones_like(before)}, [token], **SAMPLING,
            repetition_penalty=1.3,
        )  # fmt: skip
    assert whole.tokens == parts.tokens == 4
    assert whole.impossible == parts.impossible
    assert whole.excess == pytest.approx(parts.excess, abs=1e-3)
    assert whole.variance == pytest.approx(parts.variance, abs=1e-3)


@pytest.mark.parametrize("way", [{}, {"self_speculative": CONFIG}, {"self_speculative": {"lookup": True}}])
def test_what_is_drawn_from_the_model_passes(target: Any, way: dict[str, Any]) -> None:
    found = drawn(target, 12, **way)
    assert found.tokens == 480 and found.impossible == 0
    assert found.variance > 100  # the distributions were not degenerate
    assert found.z is not None and abs(found.z) < 3.5


@pytest.mark.parametrize(
    ("changes", "sign"),
    [({"temperature": 0.5}, 1), ({"temperature": 1.3}, -1), ({"do_sample": False}, 1), ({"top_p": 0.6}, 1)],
)
def test_what_is_drawn_otherwise_is_noticed(target: Any, changes: dict[str, Any], sign: int) -> None:
    found = drawn(target, 12, judged_as=SAMPLING, **changes)
    assert found.z is not None and sign * found.z > 5


@pytest.mark.parametrize("changes", [{"top_p": 1.0}, {"top_p": 0.97}])
def test_what_ignores_top_p_draws_what_the_model_cannot(target: Any, changes: dict[str, Any]) -> None:
    assert drawn(target, 12, judged_as=SAMPLING, **changes).impossible > 10


def test_what_ignores_top_k_draws_what_the_model_cannot(target: Any) -> None:
    assert drawn(target, 12, judged_as=SAMPLING | {"top_p": 1.0, "top_k": 10}, top_p=1.0).impossible > 10


def test_a_text_may_end(target: Any) -> None:
    torch.manual_seed(4)
    ids = target.generate(**PROMPT, **{**SAMPLING, "max_new_tokens": 12})[0, 4:].tolist()
    assert ids[5] not in ids[:5]
    ends = {**SAMPLING, "eos_token_id": ids[5]}
    torch.manual_seed(4)
    ended = target.generate(**PROMPT, **{**ends, "max_new_tokens": 12})[0, 4:].tolist()
    assert ended == ids[:6]
    assert check_sampling(target, PROMPT, ended, **ends) == check_sampling(target, PROMPT, ids[:6], **SAMPLING)
    # An end that is not allowed yet cannot have been drawn.
    assert check_sampling(target, PROMPT, ended, **ends, min_new_tokens=8, max_new_tokens=12).impossible == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_at_the_left_changes_nothing(family: str) -> None:
    model = tiny_model(family, seed=3)
    ids = [9, 3, 3, 11]
    padded = {
        "input_ids": torch.tensor([[0, 0, 0, 5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1]]),
    }
    bare, with_padding = check_sampling(model, PROMPT, ids, **SAMPLING), check_sampling(model, padded, ids, **SAMPLING)
    assert with_padding.impossible == bare.impossible
    assert with_padding.excess == pytest.approx(bare.excess, abs=1e-4)
    assert check_sampling(model, {"input_ids": PROMPT["input_ids"]}, ids, **SAMPLING) == bare


def test_long_texts_are_judged_in_pieces(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [9, 3, 3, 11, 12, 4, 4]
    whole = check_sampling(target, PROMPT, ids, **SAMPLING)
    monkeypatch.setattr(sampling_check, "_CHUNK", 3)
    pieces = check_sampling(target, PROMPT, ids, **SAMPLING)
    assert (pieces.tokens, pieces.impossible) == (7, whole.impossible)
    assert pieces.excess == pytest.approx(whole.excess, abs=1e-4)
    assert pieces.variance == pytest.approx(whole.variance, abs=1e-4)


def test_logits_that_are_not_numbers(target: Any) -> None:
    broken = tiny_model(seed=3)
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not numbers"):
        check_sampling(broken, PROMPT, [3], **SAMPLING)


def test_tokens_outside_are_counted(target: Any) -> None:
    unlikely = int(target(**PROMPT).logits[0, -1].detach().argmin())
    found = check_sampling(target, PROMPT, [unlikely], **SAMPLING)
    assert found == SamplingCheck(tokens=1, impossible=1) and found.z is None


def test_nothing_is_nothing(target: Any) -> None:
    assert check_sampling(target, PROMPT, [], **SAMPLING) == SamplingCheck()
    assert (SamplingCheck(2, 1.0, 4.0) + SamplingCheck(1, -0.5, 5.0)).z == pytest.approx(0.5 / 3)


def test_what_cannot_be_judged(target: Any) -> None:
    with pytest.raises(ValueError, match="draws nothing"):
        check_sampling(target, PROMPT, [3], do_sample=False)
    with pytest.raises(ValueError, match="got 2 prompts"):
        check_sampling(target, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, [3], do_sample=True)


# ----------------------------------------------------------------------------------------------------------------------
# in a benchmark run


def test_a_sampled_run_says_so(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path / "r", do_sample=True, repeats=2, temperature=0.9, top_p=0.95)
    rows = [row for row in read_rows(tmp_path / "r") if row["kind"] == "draws"]
    assert len(rows) == len(METHODS) * len(TEXTS) * 2
    calls = {(r["prompt"], r["method"], r["repeat"]): r for r in read_rows(tmp_path / "r") if r["kind"] == "call"}
    assert all(row["tokens"] == len(calls[row["prompt"], row["method"], row["repeat"]]["token_ids"]) for row in rows)
    for name in METHODS:
        entry = summary["plain"] if name == "plain" else summary["methods"][name]
        own = [row for row in rows if row["method"] == name]
        assert entry["draws"]["texts"] == len(own) == 10
        assert entry["draws"]["tokens"] == sum(row["tokens"] for row in own)
        z = sum(row["excess"] for row in own) / math.sqrt(sum(row["variance"] for row in own))
        assert entry["draws"]["z"] == pytest.approx(z) and abs(z) < 4
    page = (tmp_path / "r" / "summary.md").read_text()
    assert "drawn as plain, z" in page and "identical text" in page and "Drawn as the model draws?" in page
    # Continued, the run judges nothing twice.
    again = run(model, tmp_path / "r", do_sample=True, repeats=2, temperature=0.9, top_p=0.95)
    assert len([row for row in read_rows(tmp_path / "r") if row["kind"] == "draws"]) == len(rows)
    assert again["methods"]["config"]["draws"] == summary["methods"]["config"]["draws"]


def test_progress_counts_what_is_judged(model: Any, tmp_path: Path) -> None:
    steps: list[Any] = []
    run(model, tmp_path / "r", do_sample=True, observe=steps.append)
    count = 2 * len(METHODS) * len(TEXTS)
    assert [step.done for step in steps] == list(range(count)) and {step.total for step in steps} == {count}


def test_a_greedy_run_has_no_draws(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path / "r")
    assert "draws" not in summary["plain"] and "draws" not in summary["methods"]["config"]
    assert sampling_notes(summary) == []
    assert "Drawn as" not in (tmp_path / "r" / "summary.md").read_text()


def test_what_cannot_be_judged_ends_no_run(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: Any, **__: Any) -> SamplingCheck:
        raise MemoryError("no room for these logits")

    monkeypatch.setattr(engine, "check_sampling", judge)
    summary = run(model, tmp_path / "r", do_sample=True)
    assert summary["complete"] and summary["methods"]["config"]["draws"] is None
    assert any("no room for these logits" in line for line in problems(summary))


def test_impossible_draws_are_told(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "check_sampling", lambda *_, **__: SamplingCheck(4, 2.0, 1.0, 1))
    summary = run(model, tmp_path / "r", do_sample=True)
    notes = sampling_notes(summary)
    assert len(notes) == 1 + len(METHODS)
    said = "config: 20 tokens, +0.6667 a token, z = +4.5. 5 of them the model itself could not have drawn"
    assert any(note.startswith(said) for note in notes)
    assert summary["methods"]["config"]["draws"]["z"] == pytest.approx(10 / math.sqrt(5))
    assert "| +4.5, 5 impossible |" in (tmp_path / "r" / "summary.md").read_text()
    assert sampling_cell({"draws": {"z": None, "impossible": 3}}) == "3 impossible"
