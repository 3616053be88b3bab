"""Prompts that the methods are asked: the built-in mixed set, or files of prompts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...support.messages import listed, shown
from ...support.reading import DATA, filled_lines, parse_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BUILT_IN",
    "HubRows",
    "Prompt",
    "built_in_prompts",
    "digest",
    "encode_prompt",
    "hub_rows",
    "load_prompts",
    "read_prompts",
]

BUILT_IN = "built-in"
_SUMMARISE = "Summarise the following article in three sentences.\n\n"
_FORMATS = (
    "Each line is a JSON object with 'prompt' (and 'category'), with 'turns' (MT-bench), with "
    "'document' (an article to summarise) or with 'question' (GSM8K)."
)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: its name, unique in a run.
        category: the kind of task; medians are taken per category.
        text: what the user says.
        later: what the user says after each answer; only `ssd evaluate chat` asks it.
    """

    id: str
    category: str
    text: str
    later: tuple[str, ...] = ()


def built_in_prompts() -> list[Prompt]:
    """Return the mixed set that comes with the package: 44 prompts in 7 categories, written for this project."""
    text = resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8")
    return [Prompt(entry["id"], entry["category"], entry["prompt"]) for entry in json.loads(text)["prompts"]]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read the prompts of a file.

    Args:
        path: a `.jsonl` file in one of the formats of MT-bench (`category`, `turns`), XSum (`document`), GSM8K
            (`question`) or plainly `prompt` and `category`; or a `.txt` file with a prompt on each line, whose
            category is the file's name.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, a line that cannot be understood, or no prompt at all.
    """
    file = Path(os.path.expanduser(path))
    if file.suffix not in (".jsonl", ".txt"):
        raise ValueError(
            f"A prompt file is .jsonl (a JSON object per line) or .txt (a prompt per line), but got {str(path)!r}."
        )
    try:
        lines = filled_lines(file, DATA)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no prompt file {str(path)!r}. Give a .jsonl or .txt file.") from error
    prompts = []
    for number, line in lines:
        if file.suffix == ".txt":
            prompts.append(Prompt(f"{file.stem}-{number}", file.stem, line.strip()))
            continue
        try:
            category, text, later = _parse(parse_json(line), file.stem)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error} {_FORMATS}") from error
        prompts.append(Prompt(f"{file.stem}-{number}", category, text, later))
    if not prompts:
        raise ValueError(f"The prompt file {str(path)!r} is empty. {_FORMATS}")
    return prompts


def _parse(entry: Any, stem: str) -> tuple[str, str, tuple[str, ...]]:
    """Return category, text and later turns of one line."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"a JSON object is needed, but got {type(entry).__name__}.")
    for key, category, before in (
        ("prompt", stem, ""),
        ("turns", stem, ""),
        ("document", "summarisation", _SUMMARISE),
        ("question", "arithmetic", ""),
    ):
        if key not in entry:
            continue
        value = entry[key]
        turns = value if key == "turns" and isinstance(value, list) and value else [value]
        if not all(isinstance(text, str) and text.strip() for text in turns):
            raise ValueError(f"{key!r} holds no text, but {shown(value)}.")
        first, *later = (text.strip() for text in turns)
        return str(entry.get("category") or category), before + first, tuple(later)
    raise ValueError(f"there is no prompt in it; its keys are {listed(entry)}.")


@dataclass(frozen=True)
class HubRows:
    """The first rows of a data set.

    Attributes:
        name: of the data set.
        column: that was asked for; may be empty.
        rows: at least one, each by column.
    """

    name: str
    column: str
    rows: list[dict[str, Any]]


def hub_rows(source: str, count: int | None, split: str, advice: str) -> HubRows:
    """Read the first rows of a data set of the Hub, by `datasets`.

    Args:
        source: `ID`, `ID:CONFIG`, `ID@SPLIT` or `ID#COLUMN`, or all of these in that order.
        count: so many; `None`: all.
        split: unless the source names one.
        advice: what to give instead, for the error's message.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: the data set cannot be read, or has no rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no file, and reading it as a data set of the Hub needs `datasets`: pip install datasets"
        ) from error
    rest, _, column = source.partition("#")
    rest, _, named = rest.partition("@")
    name, _, subset = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, subset or None, split=named or split, streaming=True)
        first = list(rows if count is None else itertools.islice(rows, count))
    except Exception as error:  # datasets and huggingface_hub raise dozens of kinds
        raise ValueError(
            f"{source!r} is no file, and could not be read as a data set of the Hub either ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no reason given'}). {advice}"
        ) from error
    if not first:
        raise ValueError(f"The data set {source!r} has no rows.")
    return HubRows(name, column, first)


def load_prompts(
    files: Sequence[str | os.PathLike[str]] = (),
    categories: Iterable[str] = (),
    limit_per_category: int | None = None,
) -> list[Prompt]:
    """Return the prompts of a run, the categories interleaved, so that an interrupted run has seen something of each.

    Args:
        files: prompt files; `"built-in"` or none at all: the built-in set.
        categories: only these; none: all.
        limit_per_category: the first so many of each category, ≥ 1; `None`: all.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that cannot be read, a category that does not occur, or a limit below 1.
    """
    if limit_per_category is not None and limit_per_category < 1:
        raise ValueError(f"The limit per category must be at least 1, but got {limit_per_category}.")
    found: dict[str, list[Prompt]] = {}
    taken: set[str] = set()
    for file in files or (BUILT_IN,):
        for prompt in built_in_prompts() if file == BUILT_IN else read_prompts(file):
            name, copies = prompt.id, 1
            while name in taken:  # two files of one name
                copies += 1
                name = f"{prompt.id} ({copies})"
            taken.add(name)
            found.setdefault(prompt.category, []).append(replace(prompt, id=name))
    wanted = list(dict.fromkeys(categories)) or list(found)
    unknown = [category for category in wanted if category not in found]
    if unknown:
        raise ValueError(
            f"No prompt is of the category {', '.join(map(repr, unknown))}; there are {listed(found, most=20)}."
        )
    columns = [found[category][:limit_per_category] for category in wanted]
    return [column[i] for i in range(max(map(len, columns))) for column in columns if i < len(column)]


def digest(prompts: Sequence[Prompt]) -> str:
    """Make a fingerprint of the prompts, by which a resumed run knows that they are the same."""
    text = json.dumps([[prompt.id, prompt.category, prompt.text] for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    use_chat_template: bool = True,
    before: Sequence[tuple[str, str]] = (),
    system: str | None = None,
) -> dict[str, torch.Tensor]:
    """Make the model's inputs: the text in the tokenizer's chat template where it has one, else as it is.

    Args:
        tokenizer: of the model.
        text: what the user says.
        use_chat_template: where there is one.
        before: earlier turns, each what the user said and what the model answered; they need the template.
        system: what the template says first; it needs the template, too.

    Returns:
        `input_ids` and `attention_mask`, each of shape `(1, prompt_length)`.

    Raises:
        ValueError: the template refuses, or the tokenizer makes nothing of the text.
    """
    if use_chat_template and getattr(tokenizer, "chat_template", None) is not None:
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in before:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            encoded: Any = tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": text}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
        except Exception as error:  # a template is a program of its own, and may raise what it likes
            reason = str(error)[:300].rstrip(".")
            raise ValueError(f"The model's chat template refused the prompt: {reason}.") from error
    else:
        encoded = tokenizer(text, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise ValueError(f"The tokenizer makes nothing of the prompt {shown(text)}: it has no tokens.")
    return {key: encoded[key] for key in ("input_ids", "attention_mask") if key in encoded}
