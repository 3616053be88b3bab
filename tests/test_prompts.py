"""The built-in prompts, and prompt files of every format."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ssd_generation.harness.texts import (
    Prompt,
    built_in_prompts,
    digest,
    encode_prompt,
    load_prompts,
    questions_of,
    read_prompts,
)
from test_cli import tiny_tokenizer


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_built_in_set_has_six_prompts_of_each_kind() -> None:
    prompts = built_in_prompts()
    counts = Counter(prompt.category for prompt in prompts)
    assert {"writing", "summarisation", "translation", "code", "arithmetic", "questions"} <= counts.keys()
    assert min(counts.values()) >= 6
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        if prompt.category in ("summarisation", "questions"):  # prompts with a passage to copy from
            assert 120 <= len(prompt.text.split()) <= 290, prompt.id
        if prompt.category == "writing":  # prompts with next to nothing to copy from
            assert len(prompt.text.split()) < 40, prompt.id


@pytest.mark.parametrize(
    ("entry", "category", "text"),
    [
        ({"prompt": " Hello "}, "file", "Hello"),
        ({"prompt": "Hello", "category": "greetings"}, "greetings", "Hello"),
        ({"question": "What is 2 + 2?", "answer": "4"}, "arithmetic", "What is 2 + 2?"),
        (
            {"id": "1", "document": "A long text.", "summary": "Short."},
            "summarisation",
            "Summarise the following article in three sentences.\n\nA long text.",
        ),
    ],
)
def test_formats(entry: dict[str, Any], category: str, text: str, tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "file.jsonl", entry)) == [Prompt("file-1", category, text)]


def test_later_turns_are_kept(tmp_path: Path) -> None:
    entry = {"question_id": 81, "category": "writing", "turns": ["First", " Second "]}
    file = write(tmp_path / "file.jsonl", entry)
    assert read_prompts(file) == [Prompt("file-1", "writing", "First", ("Second",))]
    assert load_prompts([file]) == read_prompts(file)


MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x", "y"]}
SPEED_BENCH = {
    "question_id": "a1", "category": "low_entropy", "sub_category": "sorting", "turns": ["Sort this."],
    "source": "somewhere", "src_id": "7", "difficulty": "unknown", "multiturn": False,
}  # fmt: skip


def test_spec_bench_reports_mt_bench_as_one(tmp_path: Path) -> None:
    translation = {"question_id": 161, "category": "translation", "turns": ["Translate."]}
    alone = read_prompts(write(tmp_path / "question.jsonl", MT_BENCH))
    assert [prompt.category for prompt in alone] == ["writing"]
    both = read_prompts(write(tmp_path / "question.jsonl", MT_BENCH, translation))
    assert [prompt.category for prompt in both] == ["mt_bench", "translation"]
    assert both[0].later == ("Again.",)


def test_speed_bench_by_input_length(tmp_path: Path) -> None:
    other = {**SPEED_BENCH, "category": "coding", "turns": ["Code.", "More."], "multiturn": True}
    assert [p.category for p in read_prompts(write(tmp_path / "qualitative.jsonl", SPEED_BENCH, other))] == [
        "low_entropy",
        "coding",
    ]
    (prompt,) = read_prompts(write(tmp_path / "throughput_16k.jsonl", SPEED_BENCH))
    assert (prompt.category, prompt.text) == ("low_entropy-16k", "Sort this.")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for folder, category in (("throughput_2k", "low_entropy-2k"), ("qualitative", "low_entropy")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "test.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([SPEED_BENCH, {**other, "category": "low_entropy"}]), file)
        assert read_prompts(file) == [
            Prompt("test-1", category, "Sort this."),
            Prompt("test-2", category, "Code.", ("More.",)),
        ]
        assert len(load_prompts([file], limit_per_category=1)) == 1


def test_parquet_files_that_cannot_be_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "test.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match="not a Parquet file that can be read"):
        read_prompts(file)
    for rows, message in (
        ([SPEED_BENCH, {**SPEED_BENCH, "turns": []}], r"row 2: 'turns' holds no text, but \[\]"),
        ([{"text": "a"}], "row 1: there is no prompt in it; its keys are 'text'"),
    ):
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        with pytest.raises(ValueError, match=message):
            read_prompts(file)
    with pytest.raises(FileNotFoundError, match=r"no prompt file 'nowhere.parquet'"):
        read_prompts("nowhere.parquet")


def test_texts_of_speed_bench_that_are_still_to_be_fetched(tmp_path: Path) -> None:
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    for text in (placeholder, f"{placeholder}\n\nYou are"):
        file = write(tmp_path / "test.jsonl", SPEED_BENCH, {**SPEED_BENCH, "turns": ["Hello.", text]})
        with pytest.raises(ValueError, match=r"line 2: this text of SPEED-Bench is not in the published file.*prepare"):
            read_prompts(file)


def test_turns_become_questions() -> None:
    prompts = [Prompt("a-1", "a", "one", ("two", "three")), Prompt("a-2", "a", "four")]
    questions = questions_of(prompts, has_turns=True)
    assert [question.id for question in questions] == ["a-1", "a-1, turn 2", "a-1, turn 3", "a-2"]
    assert questions[2].earlier == (("a-1", "one"), ("a-1, turn 2", "two"))
    assert {question.conversation for question in questions[:3]} == {"a-1"}
    assert [question.text for question in questions_of(prompts, has_turns=False)] == ["one", "four"]
    assert digest(prompts) != digest([Prompt("a-1", "a", "one"), prompts[1]])


def test_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("First\n\n  Second  \r\n", encoding="utf-8")
    assert read_prompts(file) == [Prompt("mine-1", "mine", "First"), Prompt("mine-3", "mine", "Second")]


def test_categories_take_turns(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *({"prompt": f"a{i}", "category": "a"} for i in range(3)))
    second = write(tmp_path / "b.jsonl", *({"prompt": f"b{i}", "category": "b"} for i in range(2)))
    assert [prompt.text for prompt in load_prompts([first, second])] == ["a0", "b0", "a1", "b1", "a2"]
    assert [prompt.text for prompt in load_prompts([first, second], limit_per_category=1)] == ["a0", "b0"]
    assert [prompt.text for prompt in load_prompts([first, second], categories=["b"])] == ["b0", "b1"]


def test_names_stay_unique(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    files = [write(tmp_path / "p.jsonl", {"prompt": "1"}), write(tmp_path / "x" / "p.jsonl", {"prompt": "2"})]
    assert [prompt.id for prompt in load_prompts(files)] == ["p-1", "p-1 (2)"]


def test_built_in_set_and_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "1"})
    assert len(load_prompts(["built-in", file])) == len(built_in_prompts()) + 1 == len(load_prompts()) + 1


def test_digest_changes_with_any_prompt() -> None:
    prompts = built_in_prompts()
    assert digest(prompts) == digest(built_in_prompts())
    assert digest(prompts[:-1]) != digest(prompts) != digest([*prompts[:-1], Prompt("x", "y", "z")])


def test_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    plain, chat = encode_prompt(tokenizer, "rain", False), encode_prompt(tokenizer, "rain")
    assert tokenizer.decode(plain["input_ids"][0]) == "rain"
    assert tokenizer.decode(chat["input_ids"][0]) == "<|start|>user\nrain<|end|><|start|>assistant\n"
    assert chat["attention_mask"].shape == chat["input_ids"].shape == (1, chat["input_ids"].shape[1])
    with pytest.raises(ValueError, match="finds no tokens in the prompt ''"):
        encode_prompt(tokenizer, "", False)
    tokenizer.chat_template = "{{ raise_exception('No systems here.') }}"
    with pytest.raises(ValueError, match=r"chat template refused the prompt: No systems here\.$"):
        encode_prompt(tokenizer, "rain")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "is empty"),
        ("p.txt", " \n", "is empty"),
        ("p.csv", "a,b", ".jsonl"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2: .*Each line is a JSON object"),
        ("p.jsonl", '["a"]', "line 1: a JSON object is needed, but got list"),
        ("p.jsonl", '{"text": "a"}', "its keys are 'text'"),
        ("p.jsonl", '{"prompt": " "}', "'prompt' holds no text, but ' '"),
        ("p.jsonl", '{"turns": []}', r"'turns' holds no text, but \[\]"),
        ("p.jsonl", '{"turns": [3]}', r"'turns' holds no text, but \[3\]"),
        ("p.jsonl", '{"turns": ["a", ""]}', r"'turns' holds no text, but \['a', ''\]"),
        ("p.txt", b"\xff\xfe\xff", "is not UTF-8"),
    ],
)
def test_bad_files(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_prompts(file)


def test_bad_choices(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no prompt file 'nowhere.jsonl'"):
        load_prompts(["nowhere.jsonl"])
    with pytest.raises(ValueError, match=r"category 'poetry'; there are 'writing'"):
        load_prompts(categories=["poetry"])
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        load_prompts(limit_per_category=0)
