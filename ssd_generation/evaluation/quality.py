"""Quality of each method's answers, also compared with plain decoding's. Pure functions of the rows."""

from __future__ import annotations

import statistics as averages
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..harness.methods import PLAIN
from ..harness.results import latest_calls
from .metrics import bootstrap, paired_difference, pass_at_k
from .tasks import Task

__all__ = ["quality_of", "verdicts_of"]

Row = Mapping[str, Any]
Key = tuple[str, str, int]


def verdicts_of(rows: Iterable[Row]) -> dict[Key, Row]:
    """Return the outcomes of running the answers as programs, by prompt, method and repeat."""
    return {(row["prompt"], row["method"], row["repeat"]): row for row in rows if row["kind"] == "verdict"}


def quality_of(task: Task, rows: Sequence[Row], methods: Sequence[str], ks: Sequence[int] = (1,)) -> dict[str, Any]:
    """Return the scores of each method's answers.

    An answer is scored by its metrics, 0 … 1; a question by the mean over its answers, or by their pass@k. Intervals
    are bootstrapped over questions. A method is compared with plain decoding on the questions that both have answered.

    Args:
        task: the task of the questions.
        rows: the lines of rows.jsonl.
        methods: names of the methods, plain decoding included.
        ks: values of k in pass@k; a question with fewer answers than k is left out of it.

    Returns:
        By method and metric: `mean`, `low` and `high` (95 %), `questions`; for methods other than plain also
        `difference` to plain with the same three, and `same`, the number of questions with equal score, out of
        `compared`. Empty where nothing can be judged.
    """
    scores = _pass_rates(task, rows, ks) if task.runs_code else _metrics(task, rows)
    plain = scores.get(PLAIN, {})
    found: dict[str, Any] = {}
    for method in methods:
        entry: dict[str, Any] = {}
        for metric, by_question in scores.get(method, {}).items():
            entry[metric] = {**asdict(bootstrap(list(by_question.values()))), "questions": len(by_question)}
            both = [q for q in by_question if q in plain.get(metric, {})]
            if method != PLAIN and both:
                own, theirs = [by_question[q] for q in both], [plain[metric][q] for q in both]
                entry[metric] |= {
                    "difference": asdict(paired_difference(own, theirs)),
                    "same": sum(a == b for a, b in zip(own, theirs, strict=True)),
                    "compared": len(both),
                }
        if entry:
            found[method] = entry
    return found


def _metrics(task: Task, rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the mean scores by method, metric and question."""
    samples = {sample.id: sample for sample in task.samples}
    calls = [row for row in latest_calls(rows) if row["prompt"] in samples]
    values_by_metric = task.scores([(samples[row["prompt"]], task.answer(row["text"])) for row in calls])
    answers: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for metric, values in values_by_metric.items():
        for row, value in zip(calls, values, strict=True):
            answers[row["method"]][metric][row["prompt"]].append(value)
    return {
        method: {
            metric: {question: averages.fmean(values) for question, values in by_question.items()}
            for metric, by_question in by_metric.items()
        }
        for method, by_metric in answers.items()
    }


def _pass_rates(task: Task, rows: Sequence[Row], ks: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the estimates by method, `pass@k` and question, from the calls whose answers were run."""
    verdicts = verdicts_of(rows)
    outcomes: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in latest_calls(rows):
        verdict = verdicts.get((row["prompt"], row["method"], row["repeat"]))
        if verdict is not None:
            outcomes[row["method"]][row["prompt"]].append(verdict["status"] == "passed")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for method, by_question in outcomes.items():
        rates = {
            f"pass@{k}": {q: pass_at_k(len(o), sum(o), k) for q, o in by_question.items() if len(o) >= k} for k in ks
        }
        found[method] = {name: by_question for name, by_question in rates.items() if by_question}
    return found
