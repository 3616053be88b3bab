"""Errors in files of prompts, articles, problems or costs are reported briefly and early, whatever they are."""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from effort import little_work
from ssd_generation.evaluation.articles import read_articles
from ssd_generation.evaluation.problems import Problem, answer_code, read_problems
from ssd_generation.evaluation.tasks import check_data
from ssd_generation.harness.texts import load_prompts, read_prompts
from ssd_generation.search import calibration
from ssd_generation.search.calibration import calibration_prompts
from ssd_generation.search.cost_profile import CostProfile
from test_cli import ssd as ssd  # the fixture
from tiny_models import prompt, tiny_model

Reader = Callable[[str], Any]

LINES: dict[str, Reader] = {
    "prompts": read_prompts,
    "articles": read_articles,
    "problems": read_problems,
    "calibration": lambda path: calibration_prompts(path, 1),
    "task code": lambda path: check_data("code", [path]),
    "task summarisation": lambda path: check_data("summarisation", [path]),
    "task chat": lambda path: check_data("chat", [path]),
}
WHOLE: dict[str, Reader] = {"profile": CostProfile.load}
LONG = "x" * 100_000

WRONG = {
    "deep": "[" * 100_000,
    "deep in an object": '{"prompt": ' + "[" * 100_000,
    "deep and closed": '{"prompt": ' + "[" * 500 + "]" * 500 + "}",
    "a long number": '{"prompt": ' + "9" * 5000 + "}",
    "not a number": '{"prompt": NaN}',
    "half of a character": '{"prompt": "\\ud800", "article": "\\ud800", "reference": "x"}',
    "a long key": json.dumps({LONG: 1}),
    "many keys": json.dumps({str(i): i for i in range(50_000)}),
    "a long list": json.dumps({"prompt": [LONG] * 9, "article": [LONG] * 9, "reference": "x"}),
    "a long object": json.dumps({"prompt": {LONG: LONG}, "document": {LONG: LONG}, "summary": "x"}),
    "a long name": json.dumps({"prompt": [], "entry_point": LONG + "-", "test": LONG, "turns": [LONG, []]}),
    "a long name of a function": json.dumps({"prompt": "x", "entry_point": LONG + "-", "test": "x"}),
    "no text": "\ud800",
}


def check_is_told(read: Reader, path: str) -> str:
    with little_work(), pytest.raises((ValueError, TypeError, FileNotFoundError)) as raised:
        read(path)
    message = str(raised.value)
    assert len(message) < 900 and Path(path).name[:100] in message
    return message


@pytest.mark.parametrize("kind", [*LINES, *WHOLE])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_told_shortly(tmp_path: Path, kind: str, wrong: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(WRONG[wrong].encode("utf-8", "surrogatepass"))
    if wrong == "a long name of a function" and "problems" not in kind and "code" not in kind:
        return  # it is a valid prompt
    check_is_told({**LINES, **WHOLE}[kind], str(file))


@pytest.mark.parametrize("kind", [*LINES, *WHOLE])
def test_what_is_no_file(tmp_path: Path, kind: str, no_files: list[str]) -> None:
    for path in no_files:
        check_is_told({**LINES, **WHOLE}[kind], path)


@pytest.fixture
def no_files(tmp_path: Path) -> Iterator[list[str]]:
    """Create things that are not files where one is expected."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    names = ["pipe", "round", "device", "folder", "socket", "n" * 300, "missing"]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket.jsonl"))
        yield [f"{tmp_path}/{name}.jsonl" for name in names] + ["~nobody-of-this-name/x.jsonl"]


def test_what_may_be_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("round", "round")
    for source in ("pipe", "round"):
        check_is_told(LINES["task summarisation"], source)
        check_is_told(LINES["calibration"], source)

    def hub_rows(source: str, *_: Any) -> Any:
        raise ValueError("the Hub was asked")

    monkeypatch.setattr(calibration, "hub_rows", hub_rows)
    for source in ("n" * 300, "a\0b"):  # not file names
        check_data("summarisation", [source])  # the Hub is asked when the task is made
        with pytest.raises(ValueError, match="the Hub was asked"):
            calibration_prompts(source, 1)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{}")[:-3], gzip.compress(b"{}" * 999)[:-20] + b"x" * 20],
    ids=["text", "cut", "spoilt"],
)
def test_spoilt_gzip_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "problems.jsonl.gz"
    file.write_bytes(content)
    for kind in ("problems", "task code"):
        assert "not a whole gzip file" in check_is_told(LINES[kind], str(file))


def test_the_command_line_tells_in_a_line(ssd: Any, tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 100_000)
    for arguments in (
        ["evaluate", "code", "--data", str(file)],
        ["evaluate", "summarisation", "--data", str(file)],
        ["evaluate", "chat", "--data", str(file)],
        ["search", "demo", "--costs", str(file)],
        ["search", "--from", str(tmp_path), "--costs", str(file)],
    ):
        run = ssd(*arguments)
        assert run.status == 2 and run.err.count("\n") == 1 and "deeper than 64 levels" in run.err, arguments


def test_many_categories_are_not_all_listed(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", "category": f"{i}{LONG[:999]}"}) + "\n" for i in range(99)))
    with pytest.raises(ValueError, match="category 'poetry'") as raised:
        load_prompts([str(file)], categories=["poetry"])
    assert len(str(raised.value)) < 500


def test_answers_of_blanks_are_searched_in_linear_time() -> None:
    problem = Problem("p", "def f():\n", "f", "def check(f): pass")
    with little_work():
        for text in ("```" + " " * 60_000 + "x", "```python\n" + "\n" * 60_000 + "```"):
            answer_code(text, problem, is_chat=True)
    assert answer_code("```py3 \nx\n```\n``` \n  def f(): 1\n```", problem, is_chat=True) == "  def f(): 1"


@pytest.mark.parametrize(
    "wrong", ["[" * 100_000, "3", '"text"', "[1, 2]", "[[1]]", "{given}, -1", "{given}, 999999999999", "{given}, true"]
)
def test_a_spoilt_continuation_is_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))
    model, ids = tiny_model(), prompt(5)
    whole, passes = calibration._continuation(model, "weights", ids, 4)
    assert passes == 4
    (file,) = tmp_path.rglob("*.json")
    file.write_text(wrong if "given" not in wrong else f"[{wrong.format(given=str(ids[0].tolist())[1:-1])}]")
    again, passes = calibration._continuation(model, "weights", ids, 4)
    assert passes == 4 and torch.equal(again, whole) and "generating it again" in caplog.text
    assert calibration._continuation(model, "weights", ids, 4)[1] == 0
