"""Splitting an answer into pieces, and rendering it in a terminal, a notebook and a file."""

from __future__ import annotations

import io
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ssd_generation.harness.results import OriginPiece, TokenOrigins

END = "<|end|>"


def byte_level() -> Any:
    """Return a tokenizer with one token per byte, so that every non-ASCII character takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def word_level(decoder: Any = None) -> Any:
    """Return a tokenizer with one token per word; the decoder joins them (by spaces, if there is none)."""
    words = ["[UNK]", "▁the", "▁rain", "▁in", "s", "ing", "the", "rain"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


BYTES = byte_level()


def ids_of(text: str) -> list[int]:
    return list(BYTES(text, add_special_tokens=False)["input_ids"])


def origins_of(text: str, drafted: bool = False) -> TokenOrigins:
    ids = ids_of(text)
    return TokenOrigins.from_ids(BYTES, ids, [drafted] * len(ids))


# --- pieces ---------------------------------------------------------------------------------------


def test_characters_of_several_tokens_stay_whole() -> None:
    ids = ids_of("a☔b")
    assert len(ids) == 5
    origins = TokenOrigins.from_ids(BYTES, ids, [False, True, True, False, True])
    assert [(p.text, p.tokens, p.first, p.drafted) for p in origins.pieces] == [
        ("a", 1, 0, False),
        ("☔", 3, 1, False),  # the token that completes the character counts
        ("b", 1, 4, True),
    ]
    assert (origins.drafted_tokens, origins.decided_tokens) == (3, 2)
    assert origins.text == "a☔b"


def test_bytes_that_never_become_a_character_are_shown() -> None:
    ids = ids_of("a☔")[:-1]
    origins = TokenOrigins.from_ids(BYTES, ids, [True] * 3)
    assert origins.pieces[0].text == "a"
    assert origins.text == BYTES.decode(ids)
    assert origins.text.endswith("\N{REPLACEMENT CHARACTER}")


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_tokens_add_up_to_the_decoded_text(ids: list[int]) -> None:
    origins = TokenOrigins.from_ids(BYTES, ids, [True] * len(ids))
    assert origins.text == BYTES.decode(ids)
    assert sum(p.tokens for p in origins.pieces) == len(ids)
    assert [p.first for p in origins.pieces] == [
        sum(q.tokens for q in origins.pieces[:i]) for i in range(len(origins.pieces))
    ]


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace()])
def test_spaces_between_tokens_are_kept(decoder: Any) -> None:
    tokenizer = word_level(decoder)
    ids = [1, 2, 4, 3, 1, 2, 5]
    origins = TokenOrigins.from_ids(tokenizer, ids, [False] * len(ids))
    assert origins.text == tokenizer.decode(ids)
    assert " " in origins.text
    assert len(origins.pieces) == len(ids)


def test_special_tokens_are_named_and_are_not_part_of_the_text() -> None:
    ids = [*ids_of("é"), BYTES.eos_token_id, *ids_of("x")]
    origins = TokenOrigins.from_ids(BYTES, ids, [False, True, True, False])
    assert [(p.text, p.special) for p in origins.pieces] == [("é", False), (END, True), ("x", False)]
    assert origins.text == "éx"
    # A special token ends an incomplete character.
    cut = TokenOrigins.from_ids(BYTES, [ids_of("é")[0], BYTES.eos_token_id], [False, False])
    assert [p.special for p in cut.pieces] == [False, True]


def test_rounds_end_with_the_token_that_the_target_decided() -> None:
    origins = TokenOrigins.from_ids(BYTES, ids_of("abcdef"), [False, True, True, False, False, True])
    assert [p.round for p in origins.pieces] == [0, 1, 1, 1, 2, 3]


def test_tensors_are_taken_too() -> None:
    origins = TokenOrigins.from_ids(BYTES, torch.tensor(ids_of("ab")), [False, True])
    assert origins.text == "ab"


def test_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but origins of 3"):
        TokenOrigins.from_ids(BYTES, ids_of("ab"), [True] * 3)


def test_summary() -> None:
    origins = TokenOrigins.from_ids(BYTES, ids_of("abcd"), [False, True, True, True])
    assert origins.summary() == "4 tokens: 3 drafted and accepted (75%), 1 decided by the target."
    assert origins_of("a").summary().startswith("1 token: 0 drafted")
    assert origins_of("").summary() == "No new tokens."


def test_looked_up_tokens_are_drafted_ones() -> None:
    assert [(p.drafted, p.looked_up, p.round) for p in COPIED.pieces] == [
        (False, False, 0),
        (True, False, 1),
        (True, True, 1),
        (False, False, 1),
    ]
    assert (COPIED.drafted_tokens, COPIED.looked_up_tokens, COPIED.decided_tokens) == (2, 1, 2)
    assert "2 drafted and accepted (50%; 1 of them looked up in the text), 2 decided" in COPIED.summary()


def test_plain_types() -> None:
    origins = TokenOrigins.from_ids(BYTES, ids_of("é"), [False, True])
    assert origins.to_dicts() == [
        {"text": "é", "drafted": True, "looked_up": False, "tokens": 2, "round": 1, "special": False}
    ]


# --- terminal -------------------------------------------------------------------------------------

MIXED = TokenOrigins.from_ids(BYTES, ids_of("abcd"), [False, True, True, False])
COPIED = TokenOrigins.from_ids(BYTES, ids_of("abcd"), ["target", "drafted", "looked up", "target"])


def printed(origins: TokenOrigins, monkeypatch: pytest.MonkeyPatch, width: int = 80, **console: Any) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    file = io.StringIO()
    Console(file=file, width=width, **console).print(origins)
    return file.getvalue()


def test_a_terminal_underlines_what_the_target_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(MIXED, monkeypatch, force_terminal=True, color_system="standard")
    assert "\x1b[1;4;33ma\x1b[0m" in text and "\x1b[32mb\x1b[0m" in text  # 4: underlined
    assert "⟦" not in text
    assert "drafted and accepted" in text and "(underlined)" in text and MIXED.summary() in text


def test_without_colour_the_underline_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(MIXED, monkeypatch, force_terminal=True, color_system="standard", no_color=True)
    assert "\x1b[1;4ma\x1b[0m" in text
    assert "33m" not in text and "32m" not in text


def test_without_styles_brackets_mark_what_the_target_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(MIXED, monkeypatch)
    assert text.splitlines()[0] == "⟦a⟧bc⟦d⟧"
    assert "drafted and accepted · ⟦decided by the target⟧" in text


def test_looked_up_tokens_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    styled = printed(COPIED, monkeypatch, force_terminal=True, color_system="standard")
    assert "\x1b[32mb\x1b[0m\x1b[3;36mc\x1b[0m" in styled  # 3: italic
    assert "looked up and accepted" in styled and "(in italics)" in styled
    plain = printed(COPIED, monkeypatch)
    assert plain.splitlines()[0] == "⟦a⟧b‹c›⟦d⟧"
    assert "drafted and accepted · ‹looked up and accepted› · ⟦decided by the target⟧" in plain
    # The legend omits lookup where nothing was looked up.
    assert "looked up" not in printed(MIXED, monkeypatch)


def test_newlines_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(origins_of("a\n\nb", drafted=True), monkeypatch).splitlines()[:3] == ["a↵", "↵", "b"]
    assert printed(origins_of("\nb"), monkeypatch).splitlines()[:2] == ["⟦↵⟧", "⟦b⟧"]
    two_lines = TokenOrigins((OriginPiece("a\nb", drafted=False, first=0),), drafted_tokens=0, decided_tokens=1)
    assert printed(two_lines, monkeypatch).splitlines()[:2] == ["⟦a↵", "b⟧"]


def test_long_answers_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(origins_of("word " * 40, drafted=True), monkeypatch, width=30)
    assert max(map(len, text.splitlines())) <= 30
    assert text.count("word") == 40


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb", "a\\rb"),
        ("\x7f\x9b", "\\x7f\\x9b"),
        ("x\u202ey", "x\\u202ey"),
        ("é\n\tb", "é↵\n        b"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(raw: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(origins_of(raw, drafted=True), monkeypatch)
    assert text.startswith(f"{shown}\n")
    assert not {"\x1b", "\r", "\x7f", "\x9b", "\u202e"} & set(text)


def test_rich_markup_in_the_answer_is_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[bold]x[/nothing]" in printed(origins_of("[bold]x[/nothing]", drafted=True), monkeypatch)


# --- HTML -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Text that a browser would show and copy, without parts hidden from copying; fails on mismatched tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, bool]] = []
        self.text = ""
        self.tags: set[str] = set()
        self.titles: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append((tag, "user-select:none" in (values.get("style") or "")))
        if values.get("title"):
            self.titles.append(str(values["title"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not any(hidden for _, hidden in self.open):
            self.text += data


def test_html_holds_the_answer_escaped() -> None:
    text = '  <script>alert("&amp;")</script>\n  é'
    html = origins_of(text)._repr_html_()
    page = Page(html)
    assert page.text.startswith(text)
    # Parsers tolerate a lone "<", so check the source, too.
    assert (html.count("&lt;"), html.count("&amp;"), html.count("&quot;")) == (2, 1, 2)
    assert page.tags == {"div", "span", "br"}


def test_html_tells_where_each_token_came_from() -> None:
    html = MIXED._repr_html_()
    page = Page(html)
    assert page.titles == [
        "token 1: decided by the target, the pass over the prompt",
        "token 2: drafted and accepted, round 1",
        "token 3: drafted and accepted, round 1",
        "token 4: decided by the target, round 1",
    ]
    assert page.text.endswith(MIXED.summary())
    assert html.count("border-bottom") == 3  # two tokens and the legend, so colour is not the only mark


def test_html_tells_looked_up_tokens_apart() -> None:
    html = COPIED._repr_html_()
    assert Page(html).titles[1:3] == [
        "token 2: drafted and accepted, round 1",
        "token 3: looked up and accepted, round 1",
    ]
    assert html.count("dotted rgba") == 2 and "(dotted)" in html  # the token and the legend
    assert "dotted" not in MIXED._repr_html_()


def test_html_shows_newlines() -> None:
    html = origins_of("a\n\nb")._repr_html_()
    assert html.count("↵") == 2
    assert Page(html).text.startswith("a\n\nb")


def test_html_needs_nothing_from_elsewhere() -> None:
    html = MIXED.to_html()
    assert html.startswith("<!doctype html>") and 'charset="utf-8"' in html and "light dark" in html
    assert not any(word in html for word in ("http", "src=", "<style", "<script", "<link"))
    assert Page(MIXED.to_html("<t>", prompt="<b>?")).text.count("<t>") == 2
    assert "<b>?" in Page(MIXED.to_html("<t>", prompt="<b>?")).text


def test_html_shows_what_would_act(tmp_path: Path) -> None:
    raw = "a\x1b]0;t\x07\u202eb\ud800<"
    shown = "a\\x1b]0;t\\x07\\u202eb\\ud800<"
    piece = OriginPiece(raw, drafted=False, first=0)
    origins = TokenOrigins((piece,), drafted_tokens=0, decided_tokens=1)
    file = origins.save_html(tmp_path / "answer.html", title=f"{raw}\n", prompt=f"{raw}\n")
    html = file.read_text(encoding="utf-8")
    assert not any(character in html for character in "\x1b\x07\u202e")
    text = Page(html).text
    assert text.count(shown) == 4  # title, heading, prompt, answer
    assert text.count(f"{shown}\\n") == 2 and f"{shown}\n" in text  # a title is one line


def test_html_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "answer.html"
    assert MIXED.save_html(file) == file
    before = file.read_text(encoding="utf-8")
    assert before == MIXED.to_html()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("ssd_generation.harness.results.token_origins.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        origins_of("other").save_html(file)
    assert file.read_text(encoding="utf-8") == before
    assert os.listdir(tmp_path) == ["answer.html"]


def test_html_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        MIXED.save_html(tmp_path / "nowhere" / "answer.html")
