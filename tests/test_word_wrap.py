"""Streamed text is broken between words at the edge of a terminal."""

from __future__ import annotations

import textwrap

from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_generation.cli.word_wrap import WordWrap


class Screen:
    """Terminal of one style of erasing: what `WordWrap` writes, as lines."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self.column = width, [""], 0
        self.styles: list[tuple[str, str]] = []

    def write(self, text: str, style: str) -> None:
        self.styles.append((text, style))
        if text.startswith("\x1b["):
            back, erase, rest = text.partition("D\x1b[K")
            assert erase and rest == "\n"
            self.column -= int(back.removeprefix("\x1b["))
            assert self.column >= 0
            self.lines[-1] = self.lines[-1][: self.column]
            text = rest
        for one in text:
            if one == "\n" or self.column == self.width:
                self.lines.append("")
                self.column = 0
            if one != "\n":
                self.lines[-1] += one
                self.column += 1


def shown(pieces: list[str], width: int) -> list[str]:
    screen = Screen(width)
    words = WordWrap(screen.write, lambda: width)
    for piece in pieces:
        words.add(piece)
    return [line.rstrip() for line in screen.lines]


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    width=st.integers(11, 30),
)
def test_words_stay_whole_however_they_arrive(words: list[str], cuts: list[int], width: int) -> None:
    text, at = " ".join(words), 0
    pieces: list[str] = []
    while at < len(text):
        cut = cuts[len(pieces) % len(cuts)]
        pieces.append(text[at : at + cut])
        at += cut
    assert shown(pieces, width) == textwrap.wrap(text, width - 1)


def test_lines_and_words_that_are_too_wide() -> None:
    assert shown(["one\n\ntwo th", "ree fo", "ur"], 11) == ["one", "", "two three", "four"]
    assert shown(["a " + "x" * 25, " b"], 10)[0] == "a"
    assert "".join(shown(["a " + "x" * 25, " b"], 10)).replace(" ", "") == "a" + "x" * 25 + "b"
    assert [shown(["\tx", " y\tz"], width) for width in (20, 16)] == [["\tx y\tz"], ["\tx y", "z"]]


def test_a_word_retains_its_styles_when_it_is_printed_again() -> None:
    screen = Screen(10)
    words = WordWrap(screen.write, lambda: 10)
    for piece, style in (("abcde fg", "bold"), ("hij", "dim")):
        words.add(piece, style)
    assert [line.rstrip() for line in screen.lines] == ["abcde", "fghij"]
    assert screen.styles[-2:] == [("fg", "bold"), ("hij", "dim")]
