"""Escaping of strings that go to a screen or into a report."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation.support.display import for_html, for_json, for_markdown, for_plot, path_shown, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("\u2066a\u2069", "\\u2066a\\u2069"),
        ("half \ud800", "half \\ud800"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("Ärger 你好 👩‍👩‍👧 \u200b", "Ärger 你好 👩‍👩‍👧 \u200b"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(visible(text)) == shown


def test_lines_may_be_kept() -> None:
    assert visible("a\n\tb\r\x1b", keep="\n\t") == "a\n\tb\\r\\x1b"


@given(st.text())
def test_nothing_acts(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert not any(
        unicodedata.bidirectional(c) in ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI") for c in shown
    )
    shown.encode()


def test_markdown_shows_what_it_is_given() -> None:
    assert for_markdown("a|b<script>\n*x* [l](u) `c` ~~d~~ &amp;") == (
        "a\\|b&lt;script&gt;\\\\n\\*x\\* \\[l\\](u) \\`c\\` \\~\\~d\\~\\~ &amp;amp;"
    )
    assert for_markdown("top_p _x_ a__b é_1") == "top_p \\_x\\_ a\\_\\_b é_1"


def test_html_shows_what_it_is_given() -> None:
    assert for_html('<b a="x">&\x1b\n\ud800') == "&lt;b a=&quot;x&quot;&gt;&amp;\\x1b\n\\ud800"


@given(st.dictionaries(st.text(), st.text()))
def test_json_stays_the_same_document(document: dict[str, str]) -> None:
    for indent in (None, 2):
        text = for_json(json.dumps(document, ensure_ascii=False, indent=indent))
        assert visible(text, keep="\n") == text
        assert json.loads(text) == document


def test_json_escapes_only_what_would_act() -> None:
    assert for_json(json.dumps("é\x1b\x9b\u202e\ud800\U000e0041\n", ensure_ascii=False)) == (
        '"é\\u001b\\u009b\\u202e\\ud800\\udb40\\udc41\\n"'
    )


@given(st.text(alphabet=st.sampled_from("$\\{}_^ax\x1b\n")))
def test_no_label_is_mathematics(text: str) -> None:
    matplotlib_text = pytest.importorskip("matplotlib.text")
    shown, is_mathematics = matplotlib_text.Text()._preprocess_math(for_plot(text))
    whole = visible(text)
    assert not is_mathematics
    assert shown == whole or (len(whole) > len(shown) == 40 and shown == whole[:39] + "…")


def test_paths_are_named_by_their_end() -> None:
    for path in ("/home/someone/" + "folder/" * 40 + "config.json", "a\nb.json", "it's"):
        assert path_shown(path) == visible(repr(path))
    long = path_shown(Path("/" + "folder/" * 200 + "the \u202e config.json"))
    assert len(long) == 400 and long.startswith("'…") and long.endswith("the \\u202e config.json'")
