"""Prompt lookup: drafts copied from the text itself."""

from __future__ import annotations

from collections.abc import Sequence

from ..support.bounds import DRAFT_LENGTH, NGRAM

__all__ = ["NGramIndex"]


class NGramIndex:
    """Index of a growing text by its n-grams.

    Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): the draft is what
    followed the most recent earlier occurrence of the n-gram that ends the text; the longest n-gram decides. An n-gram
    enters the index once a token follows it, so the one that ends the text is never its own match, and one position per
    n-gram is enough. Adding a token costs O(`max_ngram`); memory is at most `max_ngram` entries per token of text.

    Args:
        max_ngram: length of the longest n-gram searched for, 1 to 16.
        min_ngram: length of the shortest, 1 to `max_ngram`.
        max_tokens: largest number of tokens that `find` returns, 1 to 128.

    Raises:
        TypeError: a number that is not an integer.
        ValueError: a number out of range.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, max_tokens: int = 12) -> None:
        max_ngram, min_ngram = NGRAM.check("max_ngram", max_ngram), NGRAM.check("min_ngram", min_ngram)
        if min_ngram > max_ngram:
            raise ValueError(f"n-grams need min_ngram ≤ max_ngram, but got {min_ngram} and {max_ngram}.")
        self.max_tokens = DRAFT_LENGTH.check("max_tokens", max_tokens)
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._text: list[int] = []
        # Per length: n-gram → end of its most recent followed occurrence (the position after its last token).
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}

    def __len__(self) -> int:
        """Return the number of tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the text."""
        old = len(self._text)
        self._text.extend(tokens)
        text, new = self._text, len(self._text)
        for n, ends in self._ends.items():
            first = max(old, n)  # the first end that now has a follower; `new` itself has none yet
            if first == new - 1:
                ends[tuple(text[first - n : first])] = first
            elif first < new:
                part = text[first - n : new - 1]
                ends.update(zip(zip(*(part[i:] for i in range(n)), strict=False), range(first, new), strict=True))

    def find(self, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """Return the continuation of the n-gram that ends the text.

        Args:
            tail: drafted tokens that follow the committed text for this search only. The n-grams that they form count
                as text, too.

        Returns:
            The tokens, at most `max_tokens`, and the length of the n-gram that matched; `([], 0)` where none did. A
            continuation that reaches the end of the text continues as a copy of the growing text would: "a b a b" is
            followed by "a b a b …".
        """
        text, committed = self._text, len(self._text)
        length = committed + len(tail)
        # Enough text for any n-gram that overlaps the tail.
        offset = max(committed - self._lengths[0], 0)
        recent = text[offset:]
        recent.extend(tail)
        for n in self._lengths:
            if n >= length:
                continue
            key = tuple(recent[-n:])
            start = self._ends[n].get(key, 0)
            # n-grams that end in the tail, or right before it, are not in the index; the latest is the most recent.
            for end in range(length - 1, max(committed, n) - 1, -1):
                if recent[end - offset - 1] == key[-1] and tuple(recent[end - offset - n : end - offset]) == key:
                    start = end
                    break
            if start:
                found = text[start : start + self.max_tokens] if start < committed else []
                if len(found) < self.max_tokens:
                    found.extend(recent[max(start, committed) - offset :][: self.max_tokens - len(found)])
                period = length - start
                while len(found) < self.max_tokens:
                    found.append(found[-period])
                return found, n
        return [], 0
