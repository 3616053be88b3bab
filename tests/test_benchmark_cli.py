"""`ssd benchmark`: a run of all kinds of methods, two checkouts side by side, and refused input."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ssd_generation
from ssd_generation.benchmark import paired
from ssd_generation.cli import main
from ssd_generation.cli.benchmark_view import benchmark_view, live_progress
from ssd_generation.harness.run import Caller, calls
from test_cli import Run
from test_cli import folder as folder  # the fixture

SKIP = ["--skip-attention", "1", "--skip-mlp", "2"]
SHORT = ["--new-tokens", "8"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    texts = [("rain", "the rain falls"), ("rivers", "a river runs"), ("rain", "rain and rain")]
    file.write_text("".join(json.dumps({"prompt": text, "category": kind}) + "\n" for kind, text in texts))
    return str(file)


@pytest.fixture
def ssd(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    for name in ("SSD_DEBUG", "NO_COLOR", "FORCE_COLOR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Run:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as left:
            main(["benchmark", *arguments])
        captured = capfd.readouterr()
        return Run(left.value.code, captured.out, captured.err)

    return run


def test_a_run_ends_in_tables_and_a_folder(ssd: Callable[..., Run], folder: str, prompts: str, tmp_path: Path) -> None:
    names = "paper,plain-loop,prompt-lookup-3"
    run = ssd("-m", folder, "--prompts", prompts, "--methods", names, *SKIP, *SHORT, "-o", "results")
    assert run.status == 0, run.err
    for name, tables in (("paper", 3), ("plain-loop", 2), ("prompt-lookup-3", 3)):
        assert sum(line.startswith(name + " ") for line in run.out.splitlines()) == tables
    assert "Acceptance length" in run.out and "overall" in run.out
    assert "rain" in run.out and "rivers" in run.out and "3 prompts in 2 categories" in " ".join(run.out.split())
    assert all(len(line) <= 80 for line in run.out.splitlines()) and "…" not in run.out
    assert "Results go to results" in run.err and "Written to results" in run.err
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert summary["complete"] and summary["methods"]["paper"]["text"]["identical"] == 3
    assert len((tmp_path / "results" / "rows.jsonl").read_text().splitlines()) >= 12


def test_the_files_of_the_field(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["the rain falls", "and then?"], "reference": ["a"]},
        {"question_id": 161, "category": "translation", "turns": ["a river"]},
        {"question_id": 241, "category": "math_reasoning", "turns": ["what falls?"]},
    ]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["-m", folder, "--prompts", "question.jsonl", "--methods", "config", *SKIP, *SHORT]
    run = ssd(*common, "-o", "r")
    assert run.status == 0, run.err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    figures = summary["methods"]["config"]["acceptance_length"]
    assert list(figures["categories"]) == ["mt_bench", "translation", "math_reasoning"]
    assert figures["categories"]["mt_bench"]["prompts"] == 1 and figures["overall"]["prompts"] == 3
    assert summary["prompts_per_category"]["mt_bench"] == 2, "its turns"
    assert "mt_bench" in run.out and "## Acceptance length" in (tmp_path / "r" / "summary.md").read_text()
    run = ssd(*common, "--no-chat-template", "-o", "first-turns", "--json")
    assert run.json["prompts_per_category"]["mt_bench"] == 1
    (tmp_path / "question.jsonl").write_text(json.dumps({"category": "qa", "turns": "no list"}) + "\n[1]\n")
    run = ssd(*common, "-o", "bad")
    assert run.status == 2 and "question.jsonl, line 2: a JSON object is needed" in run.err


def test_json_is_one_document(ssd: Callable[..., Run], folder: str, prompts: str, tmp_path: Path) -> None:
    run = ssd("-m", folder, "--prompts", prompts, "--methods", "plain-loop", *SHORT, "--json", "-o", "r")
    assert run.json == json.loads((tmp_path / "r" / "summary.json").read_text())
    assert run.err == ""


def test_the_default_folder_is_named_by_model_and_time(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    run = ssd("-m", folder, "--methods", "plain-loop", *SHORT, "--category", "arithmetic", "--limit-per-category", "1")
    assert run.status == 0, run.err
    (made,) = [path.name for path in tmp_path.iterdir() if path.name.startswith("benchmark-tiny-")]
    assert f"Written to {made}" in run.err


def test_defaults_run_on_a_model_without_config(ssd: Callable[..., Run], folder: str, prompts: str) -> None:
    summary = ssd("-m", folder, "--prompts", prompts, "--limit-per-category", "1", *SHORT, "-o", "r", "--json").json
    assert list(summary["methods"]) == [
        *("auto", "auto-free", "plain-loop"),
        *("prompt-lookup-2", "prompt-lookup-3", "prompt-lookup-10"),
    ]
    assert all(not entry["errors"] for entry in summary["methods"].values())


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(
    ssd: Callable[..., Run], folder: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["-m", folder, "--prompts", prompts, "--methods", "plain-loop", *SHORT, "-o", "r"]
    real, count = Caller.call, 0

    def call(self: Caller, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Caller, "call", call)
    run = ssd(*common)
    assert run.status == 130 and run.out == ""
    assert (
        "Interrupted. 3 measured rows are stored in r; the same command with --output r continues from there."
        in run.err
    )
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["complete"] is False
    run = ssd(*common)
    assert run.status == 0 and json.loads((tmp_path / "r" / "summary.json").read_text())["complete"]


def test_a_model_that_is_not_there_leaves_no_folder(ssd: Callable[..., Run], tmp_path: Path) -> None:
    run = ssd("-m", "./nowhere", "--methods", "plain-loop", "-o", "r")
    assert run.status == 2 and "./nowhere" in run.err.splitlines()[-1]
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fast"], "There is no method 'fast'"),
        (["--methods", "plain"], "nothing to compare"),
        (["--methods", "skip"], "needs a config"),
        (["--methods", "assistant"], "--assistant"),
        (["--new-tokens", "1"], "--new-tokens"),
        (["--repeats", "0"], "--repeats"),
        (["--temperature", "0.5"], "only when sampling"),
        (["--prompts", "nowhere.txt"], "no prompt file 'nowhere.txt'"),
        (["--category", "poetry"], "no prompt is of the category 'poetry'"),
        (["--paired", "."], "holds no ssd_generation/__init__.py"),
        (["--skip-attention", "a"], "'a' is not a layer"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    ssd: Callable[..., Run], arguments: list[str], message: str, tmp_path: Path
) -> None:
    run = ssd("-m", "./nowhere", *arguments, "-o", "r")
    assert run.status == 2 and run.out == ""
    assert run.err.startswith("error: ") and run.err.count("\n") == 1
    assert message.lower() in run.err.lower()
    assert not (tmp_path / "r").exists()


def test_a_folder_of_another_run_and_one_that_cannot_be_written(
    ssd: Callable[..., Run], folder: str, prompts: str, tmp_path: Path
) -> None:
    common = ["-m", folder, "--prompts", prompts, "--methods", "plain-loop", "--no-memory"]
    assert ssd(*common, *SHORT, "-o", "r").status == 0
    run = ssd(*common, "--new-tokens", "9", "-o", "r")
    assert run.status == 2 and "new_tokens: 8 there, 9 now" in run.err
    (tmp_path / "file").touch()
    run = ssd("-m", "./nowhere", "--methods", "plain-loop", "-o", "file/below")
    assert run.status == 2 and "cannot be written" in run.err


def test_help(ssd: Callable[..., Run]) -> None:
    page = ssd("--help").out
    for word in ("ssd benchmark --limit-per-category 1", "plain-loop", "early-exit-N", "--paired", "--output"):
        assert word in page
    assert "llama.cpp-NAME" in page and "--gguf" in page
    flat = " ".join(page.split())
    assert "continues after an interruption" in flat


# --- two checkouts --------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Make another checkout: a copy of this one that does not know `auto` yet and has no harness.

    Checkouts lay out the harness in different ways, so no part of it may be required.
    """
    root = tmp_path / "other"
    source = Path(ssd_generation.__file__).parent
    left_out = shutil.ignore_patterns("__pycache__", "benchmark", "harness")
    shutil.copytree(source, root / "ssd_generation", ignore=left_out)
    mixin = root / "ssd_generation" / "generation" / "mixin.py"
    text = mixin.read_text(encoding="utf-8")
    first = "        generate, model = super().generate"
    assert text.count(first) == 1
    early = '        assert self_speculative != "auto", "not yet"\n'
    mixin.write_text(text.replace(first, early + first))
    return root


def test_paired(ssd: Callable[..., Run], folder: str, prompts: str, other: Path, tmp_path: Path) -> None:
    common = ["-m", folder, "--prompts", prompts, "--methods", "paper,auto", *SKIP, *SHORT, "--paired", str(other)]
    run = ssd(*common, "-o", "r")
    assert run.status == 0, run.err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["kind"] == "paired" and summary["complete"]
    for name in ("plain", "paper"):
        entry = summary["methods"][name]
        assert entry["calls"] == entry["identical"] == 3 and entry["ratio"]["geometric_mean"] > 0
    assert summary["methods"]["auto"]["errors"] == ["there: AssertionError: not yet"]
    assert summary["methods"]["paper"]["drafting"]["there"]["rounds"] > 0
    rows = [json.loads(line) for line in (tmp_path / "r" / "rows.jsonl").read_text().splitlines()]
    pairs = [row for row in rows if row["kind"] == "pair"]
    assert len(pairs) == 6
    for name in ("plain", "paper"):
        assert {row["first"] for row in pairs if row["method"] == name} == {"here", "there"}
    assert "faster than the other" in " ".join(run.out.split())
    # All rows exist already: nothing is loaded again.
    assert ssd(*common, "-o", "r").status == 0


def test_a_worker_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import sys\nsys.stdin.readline()\nsys.exit('out of luck')\n")
    monkeypatch.setattr(calls, "__file__", str(script))
    with (
        paired._Worker("here", tmp_path) as peer,
        pytest.raises(RuntimeError, match=r"'here' ended with exit status 1(.|\n)*out of luck"),
    ):
        peer.request("load")


def test_workers_end_with_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(calls, "__file__", str(script))
    with pytest.raises(KeyboardInterrupt), paired._Worker("here", tmp_path) as peer:
        raise KeyboardInterrupt
    assert peer._process.poll() is not None


# --- progress display -----------------------------------------------------------------------------


def test_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from ssd_generation.cli import console
    from ssd_generation.harness.run import Progress

    file = io.StringIO()
    monkeypatch.setattr(console, "err", lambda: Console(file=file, force_terminal=True, width=100))
    with live_progress() as observe:
        observe(Progress(3, 10, "rain-1, auto", {"auto": 1.234}))
    assert "3/10" in file.getvalue() and "rain-1, auto" in file.getvalue() and "auto 1.23" in file.getvalue()


def test_progress_in_a_log_file(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_generation.harness.run import Progress

    now = iter([0.0, 1.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr("ssd_generation.cli.console.time", SimpleNamespace(monotonic=lambda: next(now)))
    with live_progress() as observe:
        for done in range(3):
            observe(Progress(done, 10, f"step {done}", {"auto": 1.5} if done else {}))
    assert capfd.readouterr().err == "1/10 step 1; median ratio so far: auto 1.50\n"


def test_wide_tables_are_cut_by_category() -> None:
    from rich.console import Console

    spread = {"n": 2, "median": 1.0, "q1": 1.0, "q3": 1.0, "min": 0.9, "max": 1.1}
    categories = {f"category {n}": spread for n in range(12)}
    ratio = {"geometric_mean": 1.0, "worst_median": 1.0, "worst_category": "category 0", "categories": categories}
    entry = {
        "calls": 1,
        "errors": [],
        "ratio": ratio,
        "decode_ratio": ratio,
        "drafting": None,
        "engine_efficiency": None,
        "memory": None,
    }
    summary = {
        "kind": "methods",
        "arguments": {"do_sample": False, "repeats": 1, "new_tokens": 8},
        "environment": None,
        "prompts_per_category": dict.fromkeys(categories, 1),
        "methods": {"auto": entry},
    }
    file = io.StringIO()
    Console(file=file, width=80).print(benchmark_view(summary, 80))
    assert file.getvalue().count("0.90–1.10") == 12 and max(map(len, file.getvalue().splitlines())) <= 80


def test_results_hold_no_path_of_this_machine(
    ssd: Callable[..., Run], folder: str, prompts: str, tmp_path: Path
) -> None:
    """Check that only the arguments contain paths, so that a results folder can be shared."""
    os.rename(folder, tmp_path / "here")
    try:
        assert ssd("-m", "here", "--prompts", prompts, "--methods", "plain-loop", *SHORT, "-o", "r").status == 0
    finally:
        os.rename(tmp_path / "here", folder)
    for file in (tmp_path / "r").iterdir():
        if file.suffix != ".png":
            assert str(tmp_path) not in file.read_text(), file.name
