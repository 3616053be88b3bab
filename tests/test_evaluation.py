"""The evaluation: methods and their answers, scoring, resumption after an interruption, and several processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.evaluation import evaluate_model as evaluation_module
from ssd_generation.evaluation import sandbox
from ssd_generation.evaluation.evaluate_model import CodeExecution, EvaluationSettings, run_evaluation
from ssd_generation.evaluation.quality import quality_of
from ssd_generation.evaluation.report import (
    plot_quality,
    plot_runs,
    quality_notes,
    quality_table,
    read_summaries,
    runs_markdown,
    runs_table,
)
from ssd_generation.evaluation.tasks import Sample, Task, make_task
from ssd_generation.harness.results import read_rows
from ssd_generation.harness.run import Caller, Progress, TimedCall
from test_cli import Run, tiny_tokenizer
from test_cli import folder as folder  # the fixture
from test_cli import ssd as ssd  # the fixture
from tiny_models import tiny_model

TOKENIZER = tiny_tokenizer()
CONFIG = SelfSpeculativeConfig(SkipConfig([1], [2]), DraftingConfig(policy="fixed", max_draft_length=3))
METHODS = ("plain", "config", "plain-loop")
SAMPLING = {"do_sample": True, "repeats": 2, "temperature": 0.9, "top_p": 0.95}
TEXTS = ("the rain", "a river runs", "the fields", "rain and rain", "the river")
QUESTIONS = Task(
    "summarisation",
    tuple(Sample(f"q-{i}", "xy"[i % 2], text, reference=f"{text} falls") for i, text in enumerate(TEXTS)),
    is_chat=False,
    new_tokens=6,
    metrics=("rouge1", "rougeL"),
)


@pytest.fixture
def model() -> Any:
    return enable_self_speculative(tiny_model(vocab_size=len(TOKENIZER)))


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)


def settings_of(**changes: Any) -> EvaluationSettings:
    return EvaluationSettings(**{"methods": METHODS, "new_tokens": 6, "memory": False, "warm_up": 0, **changes})


def run(model: Any, path: Path, task: Task = QUESTIONS, observe: Any = None, **changes: Any) -> dict[str, Any]:
    others = {key: changes.pop(key) for key in ("code", "processes") if key in changes}
    settings = settings_of(**changes)
    summary = run_evaluation(model, TOKENIZER, task, path, settings, config=CONFIG, observe=observe, **others)
    assert summary is not None
    return summary


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a summary about texts and answers."""
    return {
        "quality": summary["quality"],
        "texts": {name: entry.get("text", entry.get("draws")) for name, entry in summary["methods"].items()},
        "calls": {name: entry["calls"] for name, entry in summary["methods"].items()},
        "plain": (summary["plain"]["calls"], summary["plain"]["errors"]),
        "drafted": {
            name: (entry["drafting"]["drafted_tokens"], entry["drafting"]["rounds"])
            for name, entry in summary["methods"].items()
            if entry["drafting"]
        },
        "failed": summary["failed_rows"],
        "code": summary["code"],
        "complete": summary["complete"],
    }


# ----------------------------------------------------------------------------------------------------------------------
# a run


def test_all_methods_answer_all_questions(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summary = run(model, tmp_path / "r")
    rows = [row for row in read_rows(tmp_path / "r") if row["kind"] == "call"]
    assert Counter(row["method"] for row in rows) == dict.fromkeys(METHODS, len(TEXTS))
    assert [row["method"] for row in rows][:6] == [*METHODS, *METHODS[1:], METHODS[0]]  # the methods are interleaved
    for row in rows:
        assert row["text"] == TOKENIZER.decode(row["token_ids"], skip_special_tokens=True)
    assert summary["complete"] and summary["failed_rows"] == [] and summary["code"] is None
    for name in METHODS[1:]:
        assert summary["methods"][name]["text"]["identical"] == len(TEXTS)
        entry = summary["quality"][name]["rouge1"]
        assert entry["same"] == entry["compared"] == len(TEXTS)
        assert entry["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert set(summary["quality"]) == set(METHODS)
    for name in ("plot.png", "quality.png", "drafting.png"):
        assert (tmp_path / "r" / name).read_bytes().startswith(b"\x89PNG"), name
    assert summary["plots"] == ["plot.png", "quality.png", "drafting.png"]
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == summary
    page = (tmp_path / "r" / "summary.md").read_text()
    assert page.index("# Evaluation: summarisation") < page.index("## Quality") < page.index("## Speed")
    assert "up to 6 new tokens" in page and "sessions elsewhere" not in page and "ROUGE-1" in page


def test_answers_end_where_the_model_ends_them(model: Any, tmp_path: Path) -> None:
    # The model's most frequent token becomes its end of sequence.
    summary = run(model, tmp_path / "free", new_tokens=12)
    said = Counter(t for row in read_rows(tmp_path / "free") if row["kind"] == "call" for t in row["token_ids"])
    model.generation_config.eos_token_id = end = said.most_common(1)[0][0]
    summary = run(model, tmp_path / "ended", new_tokens=12, methods=("plain", "config", "prompt-lookup-3"))
    rows = [row for row in read_rows(tmp_path / "ended") if row["kind"] == "call"]
    ended = [row for row in rows if end in row["token_ids"]]
    assert ended and all(row["token_ids"].index(end) == len(row["token_ids"]) - 1 for row in ended)
    for name in ("config", "prompt-lookup-3"):
        assert summary["methods"][name]["text"]["identical"] == len(TEXTS)


def test_text_after_the_end_does_not_count(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.generation_config.eos_token_id = [7]

    def call(self: Caller, method: str, *args: Any) -> TimedCall:
        return TimedCall([5, 7, 8, 9] if method == "prompt-lookup-3" else [5, 7], 1.0, 0.1, None)

    monkeypatch.setattr(Caller, "call", call)
    summary = run(model, tmp_path / "r", methods=("plain", "prompt-lookup-3"))
    assert summary["methods"]["prompt-lookup-3"]["text"]["identical"] == len(TEXTS)
    assert summary["methods"]["prompt-lookup-3"]["ratio"]["geometric_mean"] == 1.0


def test_a_question_that_is_too_long_costs_its_rows_alone(model: Any, tmp_path: Path) -> None:
    room = model.config.max_position_embeddings
    long = Sample("long", "x", "the rain " * room, reference="rain")
    task = Task("summarisation", (long, *QUESTIONS.samples[:2]), False, 6, metrics=("rouge1",))
    summary = run(model, tmp_path / "r", task, warm_up=1, memory=True)
    assert all("extra_bytes" in summary["methods"][name]["memory"] for name in METHODS[1:])
    assert summary["complete"] and [row["prompt"] for row in summary["failed_rows"]] == ["long"] * 3
    assert "leaves no room for 6 new ones" in summary["failed_rows"][0]["error"]
    assert summary["quality"]["config"]["rouge1"]["questions"] == 2
    assert "3 rows failed" in (tmp_path / "r" / "summary.md").read_text()
    again = run(model, tmp_path / "r", task, warm_up=1, memory=True)
    assert without_times(again) == without_times(summary)


def test_sampling_has_several_answers_of_different_seeds(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path / "r", do_sample=True, repeats=3, temperature=0.9, top_p=0.95)
    rows = [row for row in read_rows(tmp_path / "r") if row["kind"] == "call"]
    assert Counter(row["method"] for row in rows) == dict.fromkeys(METHODS, 3 * len(TEXTS))
    assert len({tuple(row["token_ids"]) for row in rows if row["prompt"] == "q-0" and row["method"] == "plain"}) > 1
    assert summary["methods"]["config"]["text"]["identical"] == 3 * len(TEXTS)
    assert summary["quality"]["config"]["rouge1"]["questions"] == len(TEXTS)
    assert "sampling, temperature 0.9, top_p 0.95" in (tmp_path / "r" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 2}, "would be the same"),
        ({"top_p": 0.9}, "only when sampling"),
        ({"top_p": 0.0, "do_sample": True}, "top_p is a share"),
        ({"ks": (2,)}, "got k=2"),
        ({"ks": ()}, "got k=none"),
        ({"new_tokens": 0}, "new_tokens must be at least 1"),
        ({"methods": ("config",)}, "Plain decoding comes first"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)


def test_what_the_model_adds_to_decoding_is_written_down(model: Any, tmp_path: Path) -> None:
    assert "generation_config" not in run(model, tmp_path / "none")["arguments"]
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.top_k = 7  # used for sampling alone
    summary = run(model, tmp_path / "r")
    assert summary["arguments"]["generation_config"] == {"repetition_penalty": 1.3}
    assert "generation config sets repetition_penalty 1.3." in (tmp_path / "r" / "summary.md").read_text()
    sampled = run(model, tmp_path / "s", do_sample=True)
    assert sampled["arguments"]["generation_config"] == {"repetition_penalty": 1.3, "top_k": 7}
    model.generation_config.repetition_penalty = 1.0
    with pytest.raises(ValueError, match="generation_config"):
        run(model, tmp_path / "r")


def test_a_folder_of_another_run_is_refused(model: Any, tmp_path: Path) -> None:
    run(model, tmp_path / "r")
    with pytest.raises(ValueError, match="new_tokens: 6 there, 7 now"):
        run(model, tmp_path / "r", new_tokens=7)
    other = Task("summarisation", QUESTIONS.samples[:3], False, 6, metrics=("rouge1",))
    with pytest.raises(ValueError, match="questions"):
        run(model, tmp_path / "r", other)


# ----------------------------------------------------------------------------------------------------------------------
# conversations

CHATTY = tiny_tokenizer()
CHATTY.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"


def conversations(tmp_path: Path) -> Task:
    file = tmp_path / "turns.jsonl"
    turns = (["the rain", "the river"], ["a river runs"], ["the fields", "rain", "a river"])
    file.write_text("".join(json.dumps({"category": "x", "turns": said}) + "\n" for said in turns))
    return make_task("chat", CHATTY, [str(file)])


def test_later_turns_go_on_after_plain_decodings_answer(model: Any, tmp_path: Path) -> None:
    task = conversations(tmp_path)
    assert [s.id.partition(", ")[2] for s in task.samples] == ["", "turn 2", "", "", "turn 2", "turn 3"]
    with pytest.raises(ValueError, match="turns-1, turn 2 continues turns-1, which has no answer"):
        task.inputs(CHATTY, 1)
    for settings in ({}, {"do_sample": True, "repeats": 2}):
        folder = tmp_path / f"r{len(settings)}"
        run_evaluation(model, CHATTY, task, folder, settings_of(**settings), config=CONFIG)
        rows = [row for row in read_rows(folder) if row["kind"] == "call"]
        assert not any("error" in row for row in rows)
        assert len(rows) == len(task.samples) * len(METHODS) * settings.get("repeats", 1)
        said = {row["prompt"]: row["text"] for row in rows if row["method"] == "plain" and row["repeat"] == 0}
        whole = f"the fields {said['turns-3']} rain {said['turns-3, turn 2']} a river "
        wanted = len(CHATTY(whole)["input_ids"])
        lengths = {row["prompt_tokens"] for row in rows if row["prompt"] == "turns-3, turn 3"}
        assert lengths == {wanted} and wanted > len(CHATTY("the fields rain a river ")["input_ids"])


def test_without_a_chat_template_there_are_no_turns(tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    file.write_text('{"turns": ["the rain", "the river"]}')
    assert len(make_task("chat", TOKENIZER, [str(file)], style="paper").samples) == 1


def test_a_turn_after_one_that_failed_is_reported(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Caller.call

    def call(self: Caller, name: str, *args: Any) -> TimedCall:
        if name == "plain" and len(read_rows(tmp_path / "r")) < 3:
            raise RuntimeError("out of luck")
        return real(self, name, *args)

    monkeypatch.setattr(Caller, "call", call)
    summary = run_evaluation(model, CHATTY, conversations(tmp_path), tmp_path / "r", settings_of(), config=CONFIG)
    assert summary is not None
    failed = {(row["prompt"], row["method"]): row["error"] for row in summary["failed_rows"]}
    assert set(failed) == {("turns-1", "plain"), *(("turns-1, turn 2", name) for name in METHODS)}
    assert "continues turns-1" in failed["turns-1, turn 2", "config"]


def test_a_conversation_stays_in_one_process(model: Any, tmp_path: Path) -> None:
    task = conversations(tmp_path)
    whole = run_evaluation(model, CHATTY, task, tmp_path / "one", settings_of(), config=CONFIG)

    def part(index: int, waiting: list[Callable[[], Any]]) -> dict[str, Any] | None:
        processes = Some(index, 2, waiting)
        return run_evaluation(model, CHATTY, task, tmp_path / "two", settings_of(), config=CONFIG, processes=processes)

    def other() -> None:
        part(1, [])
        found = {row["prompt"] for row in read_rows(tmp_path / "two" / "parts" / "1") if row["kind"] == "call"}
        assert found == {"turns-2"}

    shared = part(0, [lambda: None, other])
    assert whole is not None and shared is not None
    assert without_times(shared) == without_times(whole)


# ----------------------------------------------------------------------------------------------------------------------
# interruptions and processes


@pytest.mark.parametrize("changes", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_interrupted_ten_times_and_resumed(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    whole = run(model, tmp_path / "whole", **changes)
    real, chance = Caller.call, random.Random(0)
    left = 0

    def call(self: Caller, *args: Any) -> TimedCall:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Caller, "call", call)
    interrupted = 0
    while interrupted < 10:
        left = chance.randrange(3)
        try:
            run(model, tmp_path / "parts", **changes)
        except KeyboardInterrupt:
            interrupted += 1
            with (tmp_path / "parts" / "rows.jsonl").open("ab") as file:
                file.write(b'{"kind": "call", "half a r')  # as a kill leaves it
            assert not json.loads((tmp_path / "parts" / "summary.json").read_text())["complete"]
        else:  # it finished before ten interruptions: start again
            shutil.rmtree(tmp_path / "parts")
    left = 10**6
    assert without_times(run(model, tmp_path / "parts", **changes)) == without_times(whole)


class Some:
    """Mock of one of several processes that run one after the other."""

    def __init__(self, index: int, count: int, waiting: list[Callable[[], Any]]) -> None:
        self.process_index, self.num_processes = index, count
        self._waiting = waiting

    def wait_for_everyone(self) -> None:
        if self._waiting:
            self._waiting.pop(0)()


@pytest.mark.parametrize("changes", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_processes_share_the_questions(model: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = run(model, tmp_path / "one", **changes)
    settings = settings_of(**changes)

    def other() -> None:
        done = run_evaluation(
            model,
            TOKENIZER,
            QUESTIONS,
            tmp_path / "two",
            settings,
            config=CONFIG,
            processes=Some(1, 2, []),
        )
        assert done is None
        assert {row["prompt"] for row in read_rows(tmp_path / "two" / "parts" / "1") if row["kind"] == "call"} == {
            "q-1",
            "q-3",
        }

    shared = run(model, tmp_path / "two", processes=Some(0, 2, [lambda: None, other]), **changes)
    assert without_times(shared) == without_times(whole)
    assert not (tmp_path / "two" / "parts").exists()
    # A later single process finds nothing to do.
    assert without_times(run(model, tmp_path / "two", **changes)) == without_times(whole)


def test_rows_of_processes_that_were_killed_are_taken_over(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(model, tmp_path / "r")
    rows = (tmp_path / "r" / "rows.jsonl").read_text().splitlines(keepends=True)
    part = tmp_path / "r" / "parts" / "1"
    part.mkdir(parents=True)
    # One row had been taken over already when the first process was killed.
    (tmp_path / "r" / "rows.jsonl").write_text("".join(rows[:6]))
    (part / "rows.jsonl").write_text("".join(rows[5:]) + '{"half')
    shutil.copy(tmp_path / "r" / "config.json", part)
    (tmp_path / "r" / "parts" / "notes").mkdir()  # a user's folder, which causes no conflict
    (tmp_path / "r" / "parts" / "notes" / "todo.txt").write_text("all of it")
    monkeypatch.setattr(Caller, "call", lambda *args: pytest.fail("called again"))
    assert without_times(run(model, tmp_path / "r")) == without_times(whole)
    assert len((tmp_path / "r" / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert not part.exists() and (tmp_path / "r" / "parts" / "notes" / "todo.txt").read_text() == "all of it"


def test_parts_of_something_else_are_left_alone(model: Any, tmp_path: Path) -> None:
    parts = tmp_path / "r" / "parts"
    other = parts / "1" / "spare" / "part.txt"
    other.parent.mkdir(parents=True)
    other.write_text("M8 x 20")
    with pytest.raises(ValueError, match=r"holds parts without a config\.json"):
        run(model, tmp_path / "r")
    assert [path.name for path in (tmp_path / "r").rglob("*")] == ["parts", "1", "spare", "part.txt"]
    shutil.move(parts, tmp_path / "kept")
    run(model, tmp_path / "r")
    shutil.move(tmp_path / "kept", parts)
    with pytest.raises(ValueError, match=r"1' holds spare without a config\.json"):
        run(model, tmp_path / "r")
    assert other.read_text() == "M8 x 20"
    shutil.rmtree(parts)
    # A part of another run, a link, and a row that this run cannot have written.
    (parts / "1").mkdir(parents=True)
    (parts / "1" / "config.json").write_text('{"task": "chat"}')
    with pytest.raises(ValueError, match="holds a run with other arguments"):
        run(model, tmp_path / "r")
    shutil.copy(tmp_path / "r" / "config.json", parts / "1")
    (parts / "1" / "rows.jsonl").write_text('{"kind": "call"}\n')
    with pytest.raises(ValueError, match=r"parts/1/rows\.jsonl', line 1 is damaged"):
        run(model, tmp_path / "r")
    assert (parts / "1" / "rows.jsonl").exists()
    shutil.move(parts / "1", tmp_path / "elsewhere")
    (parts / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        run(model, tmp_path / "r")
    assert (tmp_path / "elsewhere" / "rows.jsonl").exists()


def test_a_part_that_holds_something_else_as_well_stays(model: Any, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "r")
    part = tmp_path / "r" / "parts" / "1"
    part.mkdir(parents=True)
    for name in ("config.json", "rows.jsonl"):
        shutil.move(tmp_path / "r" / name, part / name)
    for file in (tmp_path / "r").glob("*.*"):
        file.unlink()
    (part / "notes.txt").write_text("mine")
    shutil.copy(part / "config.json", tmp_path / "r")
    for _ in range(2):
        assert without_times(run(model, tmp_path / "r")) == without_times(whole)
    assert (part / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("rows.jsonl", '{"kind": "call"}\n', "line 1 is damaged ('prompt' is missing)"),
        ("rows.jsonl", "[" * 9999 + "\n", "line 1 is damaged (it is nested deeper than 64 levels)"),
        ("rows.jsonl", "3\n", "line 1 is damaged (not an object)"),
        ("environment.json", '{"sessions": {}}', "environment.json"),
        ("config.json", "[]", "does not hold the arguments of a run"),
    ],
)
def test_a_folder_that_no_run_has_written(
    name: str, content: str, complaint: str, ssd: Callable[..., Run], folder: str, tmp_path: Path
) -> None:
    data = articles(tmp_path)
    ways = {
        "evaluate": ("summarisation", "-m", folder, "--data", data, *SHORT),
        "benchmark": ("-m", folder, "--category", "code", "--limit-per-category", "1", *SHORT),
    }
    for command, arguments in ways.items():
        assert ssd(command, *arguments, "-o", command).status == 0
        (tmp_path / command / name).write_text(content)
        done = ssd(command, *arguments, "-o", command)
        last = done.err.splitlines()[-1]
        assert done.status == 2 and last.startswith("error: ") and complaint in last, done.err
        assert (tmp_path / command / name).read_text() == content


# ----------------------------------------------------------------------------------------------------------------------
# code


def problems(tmp_path: Path) -> str:
    file = tmp_path / "problems.jsonl"
    head, test = 'def one():\n    """One."""\n', "def check(f):\n    assert f() == 1\n"
    entries = [{"task_id": f"p{i}", "prompt": head, "entry_point": "one", "test": test} for i in range(3)]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(file)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the model give these answers, one after the other."""
    answers: list[str] = []
    monkeypatch.setattr(Caller, "call", lambda *args: TimedCall([5, 6], 1.0, 0.1, None))
    monkeypatch.setattr(
        evaluation_module.Evaluation,
        "noted",
        lambda self, index, call: {"text": answers[index % len(answers)] if answers else ""},
    )
    return answers


def code_task(tmp_path: Path) -> Task:
    from ssd_generation.evaluation.tasks import make_task

    return make_task("code", TOKENIZER, [problems(tmp_path)], style="paper")


def test_code_is_run_only_when_allowed(model: Any, tmp_path: Path, written: list[str], monkeypatch: Any) -> None:
    written += ["    return 1\n", "    return 2\n", "    return (\n"]
    task = code_task(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation_module, "run_programs", lambda *args: pytest.fail("was run"))
        summary = run(model, tmp_path / "r", task)
    assert summary["quality"] == {} and summary["code"] == {"outcomes": {}, "not_run": 9}
    assert "--allow-code-execution" in (tmp_path / "r" / "summary.md").read_text()

    ran: list[str] = []
    real = sandbox.run_programs

    def count(sources: list[str], *args: Any, **kwargs: Any) -> Any:
        ran.extend(sources)
        return real(sources, *args, **kwargs)

    monkeypatch.setattr(evaluation_module, "run_programs", count)
    monkeypatch.setattr(Caller, "call", lambda *args: pytest.fail("was asked again"))
    summary = run(model, tmp_path / "r", task, code=CodeExecution())
    assert len(ran) == len(set(ran)) == 3  # equal programs run once
    assert summary["code"]["outcomes"]["config"] == {"passed": 1, "failed": 1, "not Python": 1}
    assert summary["code"]["not_run"] == 0
    assert summary["quality"]["plain"]["pass@1"]["mean"] == pytest.approx(1 / 3)
    assert summary["quality"]["config"]["pass@1"]["same"] == 3
    page = (tmp_path / "r" / "summary.md").read_text()
    assert "pass@1" in page and "1 not Python" in page
    run(model, tmp_path / "r", task, code=CodeExecution())
    assert len(ran) == 3
    # Other limits may give other outcomes.
    summary = run(model, tmp_path / "r", task, code=CodeExecution(sandbox.Limits(seconds=20.0)))
    assert len(ran) == 6 and summary["code"]["outcomes"]["config"] == {"passed": 1, "failed": 1, "not Python": 1}


def test_a_machine_that_cannot_hold_programs_is_told_before_anything_is_made(
    ssd: Callable[..., Run], folder: str, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("The kernel of this machine cannot confine a program.")

    monkeypatch.setattr(evaluation_module, "run_program", refuse)
    monkeypatch.setattr(Caller, "call", lambda *args: pytest.fail("was asked"))
    with pytest.raises(RuntimeError, match="cannot confine"):
        run(model, tmp_path / "r", code_task(tmp_path), code=CodeExecution())
    monkeypatch.setattr(sandbox, "run_program", refuse)
    data = problems(tmp_path)
    done = ssd("evaluate", "code", "-m", folder, "--data", data, "--allow-code-execution", "-o", "r")
    assert done.status == 2 and "--allow-weaker-sandbox" in " ".join(done.err.split())
    assert not (tmp_path / "r").exists()


def test_pass_at_k_counts_the_answers_to_a_question() -> None:
    task = Task("code", (), False, 1, runs_code=True)
    rows: list[dict[str, Any]] = []
    for method, passed in (("plain", (3, 0)), ("config", (1, 0))):
        for question, count in zip(("a", "b"), passed, strict=True):
            for repeat in range(4):
                key = {"prompt": question, "method": method, "repeat": repeat}
                rows.append({"kind": "call", **key})
                rows.append({"kind": "verdict", **key, "status": "passed" if repeat < count else "failed"})
    found = quality_of(task, rows, ("plain", "config"), (1, 2, 5))
    assert set(found["plain"]) == {"pass@1", "pass@2"}  # there are no five answers
    assert found["plain"]["pass@1"]["mean"] == pytest.approx(3 / 8)
    assert found["plain"]["pass@2"]["mean"] == pytest.approx(1 / 2)
    assert found["config"]["pass@2"]["mean"] == pytest.approx(1 / 4)
    assert found["config"]["pass@1"]["difference"]["mean"] == pytest.approx(-1 / 4)
    assert found["config"]["pass@1"]["same"] == 1


def test_a_failed_answer_takes_its_question_out_of_pass_at_k_and_no_other() -> None:
    task = Task("code", (), False, 1, runs_code=True)
    rows: list[dict[str, Any]] = []
    for question in ("a", "b"):
        for repeat in range(3):
            key = {"prompt": question, "method": "plain", "repeat": repeat}
            failed = question == "b" and repeat == 2
            rows.append({"kind": "call", **key, **({"error": "no"} if failed else {})})
            rows += [] if failed else [{"kind": "verdict", **key, "status": "passed"}]
    found = quality_of(task, rows, ("plain",), (1, 3))
    assert found["plain"]["pass@1"]["questions"] == 2 and found["plain"]["pass@3"]["questions"] == 1
    notes = quality_notes({"quality": found, "arguments": {}, "code": None, "failed_rows": []})
    assert "plain: pass@3 is that of 1 of 2 questions; the others have too few answers." in notes


# ----------------------------------------------------------------------------------------------------------------------
# the commands


SHORT = ("--new-tokens", "5", "--warm-up", "0", "--no-memory", "--methods", "plain-loop,prompt-lookup-3")


def articles(tmp_path: Path) -> str:
    file = tmp_path / "news.jsonl"
    file.write_text("".join(json.dumps({"article": f"the rain {i}", "summary": "rain"}) + "\n" for i in range(4)))
    return str(file)


def test_evaluate_and_report(ssd: Callable[..., Run], folder: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = articles(tmp_path)
    done = ssd("evaluate", "summarisation", "-m", folder, "--data", data, *SHORT, "-o", "first")
    assert done.status == 0, done.err
    assert "ROUGE-1" in done.out and "4 prompts in 1 category" in " ".join(done.out.split())
    assert "Results go to first" in done.err and "with plot.png, quality.png, drafting.png" in done.err
    assert all(len(line) <= 100 for line in done.out.splitlines())
    again = ssd("evaluate", "summarisation", "-m", folder, "--data", data, *SHORT, "-o", "first", "--json")
    assert again.json == json.loads((tmp_path / "first" / "summary.json").read_text())
    paper = ssd(
        *("evaluate", "summarisation", "-m", folder, "--data", data, *SHORT, "-o", "second"),
        *("--style", "paper", "--shots", "2"),
    )
    assert paper.status == 0, paper.err
    bench = ssd("benchmark", "-m", folder, "--category", "code", "--limit-per-category", "1", *SHORT, "-o", "third")
    assert bench.status == 0, bench.err
    report = ssd("report", "first", "second", "third", "-o", "all")
    assert report.status == 0, report.err
    for word in ("first", "second", "third", "prompt-lookup-3", "summarisation", "benchmark"):
        assert word in report.out
    assert (tmp_path / "all" / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "all" / "report.md").read_text()
    assert page.count("| plain-loop |") == 3 and "## second" in page
    assert set(ssd("report", "first", "third", "--json").json) == {"first", "third"}
    # It may overwrite its own report, but no other file.
    assert ssd("report", "first", "-o", "all").status == 0
    for name in ("report.md", "report.png"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("mine")
        refused = ssd("report", "first", "-o", "mine")
        assert refused.status == 2 and "was not written by `ssd report`" in refused.err
        assert (tmp_path / "mine" / name).read_text() == "mine"
        (tmp_path / "mine" / name).unlink()
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("poetry",), "There is no task 'poetry'"),
        (("chat", "--style", "rhyme"), "There is no prompt style"),
        (("chat", "--k", "many"), "numbers with commas"),
        (("chat", "--k", "3"), "got k=3"),
        (("chat", "--answers", "2"), "would be the same"),
        (("chat", "--methods", "assistant"), "needs an assistant"),
        (("chat", "--data", "none.jsonl"), "There is no prompt file"),
        (("summarisation", "--data", "none.jsonl"), "There is no file of articles"),
        (("code", "--data", "none.jsonl"), "There is no file of problems"),
        (("chat", "--top-p", "0.5"), "only when sampling"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: tuple[str, ...],
    message: str,
    ssd: Callable[..., Run],
    folder: str,
    tmp_path: Path,
) -> None:
    done = ssd("evaluate", *arguments, "-m", folder, "-o", "r")
    assert done.status == 2 and message in " ".join(done.err.split()), done.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("task", ["chat", "summarisation", "code"])
def test_data_that_is_not_there_is_told_before_a_model_is_loaded(
    task: str, ssd: Callable[..., Run], tmp_path: Path
) -> None:
    done = ssd("evaluate", task, "-m", str(tmp_path / "no-model"), "--data", "none.jsonl", "-o", "r")
    assert done.status == 2 and "none.jsonl" in done.err and "no-model" not in done.err


def test_an_assistant_of_another_vocabulary_is_refused(
    ssd: Callable[..., Run],
    folder: str,
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(content))
    done = ssd("evaluate", "chat", "-m", folder, "--assistant", str(other), "-o", "r")
    assert done.status == 2 and "another vocabulary" in done.err and "assistant_tokenizer" in done.err


SMALLEST = json.dumps(
    {
        "kind": "methods",
        "arguments": {"do_sample": False, "repeats": 1, "new_tokens": 5},
        "environment": None,
        "prompts_per_category": {},
        "methods": {},
    }
)


def test_reports_of_nothing_are_refused(ssd: Callable[..., Run], tmp_path: Path) -> None:
    done = ssd("report", "none")
    assert done.status == 2 and "holds no summary.json" in " ".join(done.err.split())
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "summary.json").write_text("{}")
    assert "cannot be read" in " ".join(ssd("report", "r").err.split())
    (tmp_path / "r" / "summary.json").write_text('{"kind": "paired"}')
    assert "compares checkouts" in " ".join(ssd("report", "r").err.split())
    (tmp_path / "r" / "summary.json").write_text(SMALLEST)
    assert "Name each run once" in " ".join(ssd("report", "r", "r").err.split())


def test_runs_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for place in ("a/run", "b/run"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "summary.json").write_text(SMALLEST)
    assert list(read_summaries([tmp_path / "a/run", tmp_path / "b/run"])) == ["a/run", "b/run"]


def test_two_processes_of_accelerate_give_the_same_summary(tmp_path: Path, ssd: Callable[..., Run]) -> None:
    pytest.importorskip("accelerate")
    # transformers 5.18 shards only a vocabulary of even size.
    folder = str(tmp_path / "even")
    tiny_model(vocab_size=2 * -(-len(TOKENIZER) // 2)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    data = articles(tmp_path)
    common = ["evaluate", "summarisation", "-m", folder, "--data", data, *SHORT, "--threads", "1"]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("ACCELERATE_") and key not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTHONWARNINGS")
    } | {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    with socket.socket() as free:  # accelerate 1.2 does not accept 0 for "any"
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]
    program = ["-m", "ssd_generation", *common, "-o"]
    # The launcher's processes share the questions. Its variables are all they need to compute together.
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ways: dict[str, list[tuple[list[str], dict[str, str]]]] = {
        "two": [([*launch, *program, "two"], {})],
        "two together": [
            (
                [sys.executable, *program, "two together", "--tensor-parallel"],
                {**shared, "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in ("0", "1")
        ],
    }
    assert ssd(*common, "-o", "one").status == 0
    for processes in ways.values():
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(
                    subprocess.Popen(
                        command,
                        cwd=tmp_path,
                        env={**environment, **more},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
                for command, more in processes
            ]
            said = ""
            try:
                for process in started:
                    out, err = process.communicate(timeout=300)
                    assert process.returncode == 0, err
                    said += out
            finally:
                for process in started:
                    process.kill()
        assert " ".join(said.split()).count("above 1 is faster") == 1  # only one process prints
    summaries = [without_times(json.loads((tmp_path / name / "summary.json").read_text())) for name in ("one", *ways)]
    assert {row["process"] for row in read_rows(tmp_path / "two") if row["kind"] == "call"} == {0, 1}
    assert summaries[1] == summaries[0]
    assert summaries[2] == summaries[0]


# ----------------------------------------------------------------------------------------------------------------------
# tables


def test_tables_and_notes(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps: list[Progress] = []
    summary = run(model, tmp_path / "r", observe=steps.append)
    assert [step.done for step in steps] == list(range(len(METHODS) * len(TEXTS)))
    header, lines = quality_table(summary)
    assert header == ["method", "ROUGE-1", "ROUGE-L", "difference to plain", "same score as plain"]
    assert [line[0] for line in lines] == list(METHODS)
    assert lines[0][3:] == ["–", "–"] and lines[1][3:] == ["0", "5 of 5"]
    assert any("95 %" in note for note in quality_notes(summary))
    header, lines = runs_table({"r": summary})
    assert [line[2] for line in lines] == list(METHODS) and lines[0][3] == "1"
    assert "summarisation" in runs_markdown({"r": summary})
    plot_runs({"r": summary, "s": summary}, tmp_path / "runs.png")
    plot_quality(summary, tmp_path / "quality.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_difference_has_its_interval() -> None:
    task = Task("chat", tuple(Sample(f"q{i}", "x", "") for i in range(20)), False, 1, metrics=("rouge1",))
    rows: list[dict[str, Any]] = [
        {"kind": "call", "prompt": f"q{i}", "method": method, "repeat": 0, "text": f"{method} {i}"}
        for method in ("plain", "own")
        for i in range(20)
    ]

    class Judged(Task):
        def scores(self, answers: Any) -> dict[str, list[float]]:
            return {"rouge1": [int(text.split()[1]) / 20 - 0.1 * text.startswith("own") for _, text in answers]}

    found = quality_of(Judged(**vars(task)), rows, ("plain", "own"))
    difference = found["own"]["rouge1"]["difference"]
    assert difference["mean"] == pytest.approx(-0.1) and difference["low"] == pytest.approx(difference["high"])
    assert found["own"]["rouge1"]["same"] == 0
    assert found["plain"]["rouge1"]["low"] < found["plain"]["rouge1"]["mean"] < found["plain"]["rouge1"]["high"]
