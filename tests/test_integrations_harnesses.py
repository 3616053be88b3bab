"""Evaluation harnesses (lm-eval by a model and by a folder's name, lighteval): the same answers, and drafted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from other_programs import Recorded, plain_and_drafting, save_tiny

pytestmark = pytest.mark.integrations

TASK = """
task: tiny_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
"""
QUESTIONS = {
    "Which colour has the sky?": "blue",
    "How many legs has a cat?": "four",
    "Who wrote this?": "nobody",
    "Is it late?": "no",
    "What is the capital of France?": "Paris",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Make a folder with a task of lm-eval."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in QUESTIONS.items()]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.yaml").write_text(TASK.format(file=folder / "questions.jsonl"))
    return folder


def answers(results: Any) -> list[Any]:
    return [sample["resps"] for sample in results["samples"]["tiny_questions"]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_with_a_model(tasks: Path, batch_size: int) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    plain, drafting, tokenizer = plain_and_drafting()
    found = []
    for model in (plain, drafting):
        calls = Recorded(model)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        found.append(lm_eval.simple_evaluate(lm, tasks=["tiny_questions"], task_manager=manager, bootstrap_iters=0))
    assert answers(found[0]) == answers(found[1])
    assert found[0]["results"] == found[1]["results"]
    assert calls.all_drafted and len(calls.texts) == -(-len(QUESTIONS) // batch_size)


def run_lm_eval(folder: str, tasks: Path, out: Path, *more: str) -> list[Any]:
    words = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={folder},trust_remote_code=True",
        "--tasks",
        "tiny_questions",
    ]
    words += ["--include_path", str(tasks), "--device", "cpu", "--log_samples", "--output_path", str(out), *more]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (file,) = out.rglob("samples_*.jsonl")
    return [json.loads(line)["resps"] for line in file.read_text().splitlines()]


def test_lm_eval_with_an_exported_folder(tasks: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from ssd_generation.cli import main

    folder = save_tiny(tmp_path / "tiny")
    with pytest.raises(SystemExit) as left:
        main(["export", folder, str(tmp_path / "drafting")])
    assert left.value.code == 0
    plain = run_lm_eval(folder, tasks, tmp_path / "plain")
    assert run_lm_eval(str(tmp_path / "drafting"), tasks, tmp_path / "drafted") == plain
    assert len(plain) == len(QUESTIONS)


def lighteval_docs() -> list[Any]:
    """Return the questions as lighteval's requests."""
    from lighteval.tasks.requests import Doc, SamplingMethod

    return [
        Doc(
            query=question,
            choices=[answer],
            gold_index=0,
            id=str(place),
            task_name="tiny|0",
            generation_size=16,
            stop_sequences=["\n\n"],
            sampling_methods=[SamplingMethod.GENERATIVE],
        )
        for place, (question, answer) in enumerate(QUESTIONS.items())
    ]


def test_lighteval_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lighteval")
    from lighteval.models.model_input import GenerationParameters
    from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig

    folder = save_tiny(tmp_path / "tiny")
    plain, drafting, _ = plain_and_drafting()
    found = []
    for number, model in enumerate((plain, drafting)):
        calls = Recorded(model)
        config = TransformersModelConfig(
            model_name=folder,
            device="cpu",
            batch_size=2,
            max_length=256,
            cache_dir=str(tmp_path / f"cache-{number}"),
            generation_parameters=GenerationParameters(temperature=0.0, max_new_tokens=16),
        )
        lm = TransformersModel.from_model(model, config)
        found.append([response.text for response in lm.greedy_until(lighteval_docs())])
    assert found[0] == found[1] and len(found[0]) == len(QUESTIONS)
    assert calls.all_drafted
