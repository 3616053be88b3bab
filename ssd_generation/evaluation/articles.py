"""Articles to summarise, with reference summaries: the built-in set, a file, or a data set on the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..harness.texts import hub_rows
from ..support.messages import listed, shown
from ..support.reading import DATA, filled_lines, parse_json

__all__ = ["Article", "articles_of_the_hub", "built_in_articles", "read_articles"]

_ARTICLE = ("article", "document")
_REFERENCE = ("reference", "summary", "highlights")
_FORMAT = (
    "Each line is a JSON object with the text under 'article' (or 'document', as in XSum) and the summary to compare "
    "with under 'reference' (or 'summary', or 'highlights', as in CNN/DailyMail)."
)


@dataclass(frozen=True)
class Article:
    """Text to summarise.

    Attributes:
        id: name, unique in a run.
        text: the article.
        reference: reference summary.
    """

    id: str
    text: str
    reference: str


def built_in_articles() -> list[Article]:
    """Return the package's own articles: 26, with reference summaries, written for this project."""
    text = resources.files(__package__).joinpath("articles.json").read_text(encoding="utf-8")
    return [Article(entry["id"], entry["article"], entry["summary"]) for entry in json.loads(text)["articles"]]


def read_articles(path: str | os.PathLike[str]) -> list[Article]:
    """Read the articles of a `.jsonl` file.

    Args:
        path: file of one JSON object per line, with the text under `article` or `document` and the summary under
            `reference`, `summary` or `highlights`; `id` is optional.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, a line that is no such object, an empty article or reference, a duplicate id, or no
            articles.
    """
    file = Path(os.path.expanduser(path))
    try:
        lines = filled_lines(file, DATA)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file of articles {str(path)!r}. {_FORMAT}") from error
    articles: dict[str, Article] = {}
    for number, line in lines:
        try:
            article = _parse(parse_json(line), f"{file.stem}-{number}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error} {_FORMAT}") from error
        if article.id in articles:
            raise ValueError(
                f"{path}, line {number}: the id {shown(article.id)} occurs there twice. Ids must be unique."
            )
        articles[article.id] = article
    if not articles:
        raise ValueError(f"{str(path)!r} holds no articles. {_FORMAT}")
    return list(articles.values())


_KNOWN: Mapping[str, str] = {
    "cnn_dailymail": "abisee/cnn_dailymail:3.0.0@test",
    "cnndm": "abisee/cnn_dailymail:3.0.0@test",
    "xsum": "EdinburghNLP/xsum@test",
}


def articles_of_the_hub(source: str, count: int | None = None) -> list[Article]:
    """Load the articles of a data set on the Hub.

    Args:
        source: `cnn_dailymail`, `xsum`, or `ID`, `ID:CONFIG`, `ID@SPLIT` of another with the same columns. The
            default split is the test split.
        count: maximum number of articles; `None`: all.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: the data set cannot be read, or has other columns.
    """
    found = hub_rows(_KNOWN.get(source, source), count, "test", "Give a .jsonl file with articles and references.")
    try:
        articles = [_parse(row, f"{source}-{number}") for number, row in enumerate(found.rows)]
    except ValueError as error:
        raise ValueError(f"The data set {source!r}: {error} {_FORMAT}") from error
    return articles


def _parse(entry: Any, name: str) -> Article:
    if not isinstance(entry, Mapping):
        raise ValueError(f"a JSON object is needed, but got {type(entry).__name__}.")
    found = []
    for what, keys in (("article", _ARTICLE), ("reference summary", _REFERENCE)):
        key = next((key for key in keys if key in entry), None)
        if key is None:
            raise ValueError(f"there is no {what} in it; its keys are {listed(entry)}.")
        value = entry[key]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key!r} holds no text, but {shown(value)}.")
        found.append(value.strip())
    return Article(str(entry.get("id", name)), found[0], found[1])
