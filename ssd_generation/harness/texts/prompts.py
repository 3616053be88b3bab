"""Prompts that the methods are asked: the built-in mixed set, or files of prompts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from ...support.messages import listed, shown
from .prompt_files import read_prompts
from .prompt_types import Prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BUILT_IN",
    "HubRows",
    "built_in_prompts",
    "digest",
    "encode_prompt",
    "hub_rows",
    "load_prompts",
]

BUILT_IN = "built-in"


def built_in_prompts() -> list[Prompt]:
    """Return the mixed set that comes with the package: 44 prompts in 7 categories, written for this project."""
    text = resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8")
    return [Prompt(entry["id"], entry["category"], entry["prompt"]) for entry in json.loads(text)["prompts"]]


@dataclass(frozen=True)
class HubRows:
    """The first rows of a data set.

    Attributes:
        name: name of the data set.
        column: column that the source names; may be empty.
        rows: at least one row, each a dict by column.
    """

    name: str
    column: str
    rows: list[dict[str, Any]]


def hub_rows(source: str, count: int | None, split: str, advice: str) -> HubRows:
    """Read the first rows of a data set of the Hub, by `datasets`.

    Args:
        source: `ID`, `ID:CONFIG`, `ID@SPLIT` or `ID#COLUMN`, or all of these in that order.
        count: number of rows; `None`: all.
        split: split to read, unless the source names one.
        advice: advice on other sources, for the error message.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: the data set cannot be read, or has no rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is not a file, and reading it as a data set of the Hub needs `datasets`: pip install datasets"
        ) from error
    rest, _, column = source.partition("#")
    rest, _, named = rest.partition("@")
    name, _, subset = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, subset or None, split=named or split, streaming=True)
        first = list(rows if count is None else itertools.islice(rows, count))
    except Exception as error:  # datasets and huggingface_hub raise dozens of kinds
        raise ValueError(
            f"{source!r} is not a file, and could not be read as a data set of the Hub either ({type(error).__name__}: "
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
    """Return the prompts of a run, the categories interleaved, so that an interrupted run covers all of them.

    Args:
        files: prompt files; `"built-in"` or none at all: the built-in set.
        categories: categories to include; none: all.
        limit_per_category: number of prompts of each category, from the first on, ≥ 1; `None`: all.

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
    """Return a fingerprint of the prompts, by which a resumed run checks that they are the same."""
    # Later turns only where there are some, so that the fingerprints of other runs do not change.
    text = json.dumps([[p.id, p.category, p.text, *([list(p.later)] if p.later else [])] for p in prompts])
    return hashlib.sha256(text.encode()).hexdigest()


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    use_chat_template: bool = True,
    before: Sequence[tuple[str, str]] = (),
    system: str | None = None,
) -> dict[str, torch.Tensor]:
    """Encode a text in the tokenizer's chat template where it has one, else as it is.

    Args:
        tokenizer: tokenizer of the model.
        text: the user's message.
        use_chat_template: whether to use the chat template, where there is one.
        before: earlier turns, each the user's message and the model's answer; they need the template.
        system: system message; it needs the template, too.

    Returns:
        `input_ids` and `attention_mask`, each of shape `(1, prompt_length)`.

    Raises:
        ValueError: the template refuses the prompt, or the text has no tokens.
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
        except Exception as error:  # a template is a program, and may raise any error
            reason = str(error)[:300].rstrip(".")
            raise ValueError(f"The model's chat template refused the prompt: {reason}.") from error
    else:
        encoded = tokenizer(text, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise ValueError(f"The tokenizer finds no tokens in the prompt {shown(text)}.")
    return {key: encoded[key] for key in ("input_ids", "attention_mask") if key in encoded}
