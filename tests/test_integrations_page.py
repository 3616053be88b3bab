"""Each block of docs/integrations.md and docs/training.md runs, and the text about it is true."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from other_programs import DRAFTS, plain_and_drafting, save_tiny
from ssd_generation import enable_self_speculative
from ssd_generation.generation.mixin import SelfSpeculativeMixin
from test_documentation import ROOT, blocks
from test_integrations_harnesses import QUESTIONS, TASK

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="a source distribution has no docs"),
]

PAGE = ROOT / "docs" / "integrations.md"


def doors() -> dict[str, tuple[str, str]]:
    """Return, by heading, its block and the table's verdict on it."""
    if not PAGE.exists():
        return {}
    text = PAGE.read_text(encoding="utf-8")
    verdicts = {
        anchor: verdict.strip()
        for anchor, verdict in re.findall(r"^\| \[[^\]]+\]\(#([\w-]+)\)[^|]*\|([^|]+)\|$", text, re.M)
    }
    found = {}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, body = section.split("\n", 1)
        code = blocks(body, "py")
        if code:
            (found[heading],) = [(one, verdicts.get(heading.replace(" ", "-").lower(), "")) for one in code]
    return found


DOORS = doors()


def needed(code: str) -> None:
    for name in re.findall(r"^(?:import|from) (\w+)", code, flags=re.M):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the `last_speculation` of each call of an enabled model."""
    found: list[Any] = []
    for name in ("generate", "init_continuous_batching"):
        call = getattr(SelfSpeculativeMixin, name)

        def called(self: Any, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            output = _call(self, *args, **kwargs)
            found.append(self.last_speculation)
            return output

        monkeypatch.setattr(SelfSpeculativeMixin, name, called)
    return found


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Provide the names and files that the blocks assume."""
    monkeypatch.chdir(tmp_path)
    folder = save_tiny(tmp_path / "tiny")
    _, model, tokenizer = plain_and_drafting()
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "questions.jsonl").write_text(
        "\n".join(f'{{"question": "{q}", "answer": "{a}"}}' for q, a in QUESTIONS.items())
    )
    task = TASK.format(file=tasks / "questions.jsonl").replace("tiny_questions", "my_task")
    (tasks / "my_task.yaml").write_text(task)
    found = {"model": model, "tokenizer": tokenizer, "folder": folder, "config": DRAFTS}
    if importlib.util.find_spec("lighteval") is not None:
        from test_integrations_harnesses import lighteval_docs

        found["docs"] = lighteval_docs()
    return found


@pytest.mark.parametrize("door", DOORS)
def test_a_door(door: str, names: dict[str, Any], calls: list[Any]) -> None:
    code, verdict = DOORS[door]
    assert verdict, "the table has no row for it"
    needed(code)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        exec(compile(code, f"{PAGE.name}: {door}", "exec"), names)
    warned = [str(one.message) for one in given if "without drafts" in str(one.message)]
    if verdict.startswith("drafts"):
        assert calls and all(done is not None and done.refusal is None for done in calls)
        assert any(done.drafted_tokens for done in calls) and not warned
    elif "wins" in verdict:
        assert calls == [None] and not warned
    else:
        assert verdict.startswith("plain") and calls and all(done.refusal for done in calls)
        assert len(warned) == 1


def test_training() -> None:
    """Check that the block of docs/training.md is the one of docs/integrations.md."""
    (code,) = blocks((ROOT / "docs" / "training.md").read_text(encoding="utf-8"), "py")
    assert code == DOORS["TRL"][0]


def test_the_page_begins_with_the_line_that_does_it() -> None:
    (first, *_) = blocks(PAGE.read_text(encoding="utf-8"), "py")
    _, model, _ = plain_and_drafting()
    enable_self_speculative(model, always=False)
    exec(compile(first, PAGE.name, "exec"), {"model": model})
    assert model.generation_config.self_speculative_always is True
