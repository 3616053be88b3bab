"""Prompt lookup against a reference that searches the whole text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import little_work
from ssd_generation.drafting.lookup import NGramIndex


def _reference(text: list[int], max_ngram: int, min_ngram: int, max_tokens: int) -> tuple[list[int], int]:
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                growing = list(text)
                for position in range(start + n, start + n + max_tokens):
                    growing.append(growing[position])
                return growing[len(text) :], n
    return [], 0


# Few distinct tokens, so that n-grams repeat.
texts = st.integers(1, 5).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))


@given(
    pieces=st.lists(texts, max_size=6),
    tail=st.integers(1, 5).flatmap(lambda most: st.lists(st.integers(0, most), max_size=14)),
    ngrams=st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    max_tokens=st.integers(1, 15),
)
def test_finds_what_a_search_of_the_whole_text_finds(
    pieces: list[list[int]], tail: list[int], ngrams: tuple[int, int], max_tokens: int
) -> None:
    index = NGramIndex(*ngrams, max_tokens=max_tokens)
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert len(index) == len(text)
        assert index.find(tail) == _reference(text + tail, *ngrams, max_tokens)
        assert index.find() == _reference(text, *ngrams, max_tokens)


@given(texts)
def test_token_by_token_is_as_all_at_once(text: list[int]) -> None:
    whole, grown = NGramIndex(), NGramIndex()
    whole.extend(text)
    for token in text:
        grown.extend([token])
    assert whole._ends == grown._ends


def test_a_periodic_text_goes_on_periodically() -> None:
    index = NGramIndex(max_tokens=5)
    index.extend([7, 1, 2, 1, 2])
    assert index.find() == ([1, 2, 1, 2, 1], 2)
    assert index.find([1]) == ([2, 1, 2, 1, 2], 3)
    assert index.find([9]) == ([], 0)
    assert index.find([9, 9]) == ([9] * 5, 1)


def test_the_longest_then_the_most_recent_match_decides() -> None:
    index = NGramIndex(max_tokens=1)
    index.extend([1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 2, 3])
    assert index.find() == ([5], 2)  # "2 3", not the later "3"; and the later "2 3"


def test_an_index_holds_no_more_than_its_text() -> None:
    index = NGramIndex(max_ngram=3)
    index.extend(range(100))
    assert sum(map(len, index._ends.values())) <= 3 * 100
    index.extend([0] * 1000)
    assert sum(map(len, index._ends.values())) <= 3 * 103


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((2, 3), "got 3 and 2"),
        ((4, 0), "got 0"),
        ((4, 1, 0), "got 0"),
        ((17,), "max_ngram must be an integer from 1 to 16, but got 17"),
        ((10**9, 10**9), "max_ngram must be an integer from 1 to 16"),
        ((4, 1, 129), "max_tokens must be an integer from 1 to 128, but got 129"),
        ((4.0,), "but got 4.0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: Any, complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        NGramIndex(*arguments)


def test_the_widest_index_is_made_in_no_time() -> None:
    with little_work():
        index = NGramIndex(16, 1, 128)
        index.extend([1, 2] * 5_000)
        assert index.find([1] * 128) == ([1] * 128, 16)
