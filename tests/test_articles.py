"""Articles with reference summaries: the built-in set, and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssd_generation.evaluation.articles import Article, built_in_articles, read_articles


def test_the_built_in_set() -> None:
    articles = built_in_articles()
    assert len(articles) >= 24
    assert len({a.id for a in articles}) == len({a.text for a in articles}) == len(articles)
    for article in articles:
        words, kept = len(article.text.split()), len(article.reference.split())
        assert 120 <= words <= 260 and 20 <= kept <= 60, article.id
        assert article.text.endswith((".", "'")) and article.reference.endswith("."), article.id


@pytest.mark.parametrize(
    ("text", "summary"), [("article", "reference"), ("document", "summary"), ("article", "highlights")]
)
def test_files_in_all_spellings(tmp_path: Path, text: str, summary: str) -> None:
    file = tmp_path / "news.jsonl"
    rows = [{text: " One. ", summary: "1."}, {"id": 7, text: "Two.", summary: "2.", "more": None}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8-sig")
    assert read_articles(file) == [Article("news-1", "One.", "1."), Article("7", "Two.", "2.")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no articles"),
        ("\n \n", "holds no articles"),
        ("{", "line 1: .*Each line is a JSON object"),
        ("[1]", "line 1: a JSON object is needed, but got list"),
        ('{"article": "x"}', "line 1: there is no reference summary in it; its keys are 'article'"),
        ('{"reference": "x"}', "there is no article in it"),
        ('{"article": "x", "reference": " "}', "'reference' holds no text, but ' '"),
        ('{"article": 3, "reference": "x"}', "'article' holds no text, but 3"),
        (
            '{"id": 1, "article": "x", "reference": "y"}\n{"id": 1, "article": "x", "reference": "y"}',
            "line 2: the id '1'",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_articles(file)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file of articles"):
        read_articles(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_articles(tmp_path / "b.jsonl")
