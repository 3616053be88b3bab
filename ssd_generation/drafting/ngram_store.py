"""Continuations of earlier texts: drafts copied from texts other than the one that is decoded.

This follows SuffixDecoding (Oliaro et al., arXiv 2411.04975), with an index of n-grams instead of suffix trees. Among
the places at which the last tokens occurred before, the longest match decides, then the token that followed most often,
then the latest place; the longer the match, the longer the draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..support.forks import ForkSafeRLock
from ..support.model_state import Part
from ..support.token_lists import shared_prefix
from .lookup import NGramIndex

__all__ = ["NGramStore", "RememberingIndex", "StorePart"]

_NGRAM = 3
"""Smallest number of tokens that have to match: fewer say little about another text."""

_PLACES = 8
"""Number of latest places stored for each n-gram."""

_LONGEST_MATCH = 32
"""Largest number of tokens compared before a place."""

_PER_TOKEN = 2
"""Largest number of tokens drafted for each one that matches (α in SuffixDecoding's adaptive length)."""

_BETWEEN = -1
"""Separator of texts."""

_RECENT = 16
"""Number of texts whose beginnings are recognised, so that a conversation is not stored anew in each turn."""


class NGramStore:
    """Store of texts, indexed by their n-grams. The time to add a token or to search does not grow with the store.

    Args:
        most_tokens: capacity in tokens; beyond it, the older half is dropped, except for permanent texts. A token takes
            some 150 bytes.
    """

    def __init__(self, most_tokens: int = 1 << 18) -> None:
        self.most_tokens = most_tokens
        self._guard = ForkSafeRLock()
        self.clear()

    def __len__(self) -> int:
        """Return the number of stored tokens."""
        return len(self._text)

    def clear(self) -> None:
        """Drop all texts."""
        with self._guard:
            self._text: list[int] = []
            self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
            self._recent: list[list[int]] = []
            self._permanent: list[int] = []

    def texts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the stored texts, oldest first, and those of them that are permanent."""
        with self._guard:
            return _split(self._text), _split(self._permanent)

    def add_permanent(self, text: Sequence[int]) -> None:
        """Store a text for good, such as a document of the user.

        Args:
            text: tokens of the text.

        Raises:
            ValueError: permanent texts would take more than half of the capacity.
        """
        text = list(text)
        with self._guard:
            total = len(self._permanent) + len(text) + 1
            if total > self.most_tokens // 2:
                raise ValueError(
                    f"Permanent texts would take {total} tokens, but the store has room for {self.most_tokens // 2} of "
                    "them. Add fewer."
                )
            self._permanent += [*text, _BETWEEN]
            self._extend(text)

    def add(self, text: Sequence[int]) -> None:
        """Store a text; if it begins like a recent one, only its new part.

        Args:
            text: tokens of the text.
        """
        text = list(text)
        with self._guard:
            shared = [shared_prefix(text, other) for other in self._recent]
            known = max(shared, default=0)
            others = [other for other, count in zip(self._recent, shared, strict=True) if count < len(other)]
            self._recent = [*others, text][-_RECENT:]
            new = text[max(known - _NGRAM, 0) :]
            if len(new) <= _NGRAM or known == len(text):
                return
            self._extend(new)

    def _extend(self, new: list[int]) -> None:
        if len(self._text) + len(new) >= self.most_tokens:
            left = max(self.most_tokens // 2 - len(self._permanent), 1)
            new = [*self._permanent, *(self._text + new)[-left:]]
            self._text = []
            self._places.clear()
        self._append(new)

    def _append(self, new: list[int]) -> None:
        first = len(self._text)
        self._text += [*new, _BETWEEN]
        text = self._text
        for end in range(first + _NGRAM, len(text)):
            if text[end] == _BETWEEN:
                continue
            key = tuple(text[end - _NGRAM : end])
            if _BETWEEN in key:
                continue
            places = self._places[key]
            places.append(end)
            if len(places) > _PLACES:
                del places[0]

    def find(self, recent: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return the most likely continuation of a text.

        Args:
            recent: last tokens of the text.
            most: largest number of tokens to return.

        Returns:
            The tokens, and how many of the last tokens matched; `([], 0)` where fewer than three did.
        """
        if len(recent) < _NGRAM:
            return [], 0
        with self._guard:
            text = self._text
            # By next token: its longest match, the number of its matches, and the latest place of the longest.
            votes: dict[int, tuple[int, int, int]] = {}
            for place in self._places.get(tuple(recent[-_NGRAM:]), ()):
                length = _matching(text, place, recent)
                longest, count, best = votes.get(text[place], (0, 0, 0))
                votes[text[place]] = max(longest, length), count + 1, place if length >= longest else best
            if not votes:
                return [], 0
            length, _, place = max(votes.values())
            end = min(place + min(most, _PER_TOKEN * length), len(text))
            found = text[place:end]
            return found[: found.index(_BETWEEN)] if _BETWEEN in found else found, length


def _split(tokens: list[int]) -> list[list[int]]:
    """Return the texts of a list of tokens with separators."""
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == _BETWEEN:
            found.append([])
        else:
            found[-1].append(token)
    return [text for text in found if text]


def _matching(text: Sequence[int], place: int, recent: Sequence[int]) -> int:
    """Return how many tokens before a place agree with the last ones of another text."""
    most, length = min(_LONGEST_MATCH, len(recent), place), _NGRAM
    while length < most and text[place - length - 1] == recent[-length - 1]:
        length += 1
    return length


class RememberingIndex(NGramIndex):
    """Index of a growing text that searches a store as well, where its own matches are short.

    Args:
        store: store of earlier texts.
        max_ngram, min_ngram, max_tokens: as in `NGramIndex`.
    """

    def __init__(self, store: NGramStore, max_ngram: int, min_ngram: int, max_tokens: int) -> None:
        super().__init__(max_ngram, min_ngram, max_tokens)
        self._store, self._longest = store, max_ngram

    def find(self, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """Return the longer of the matches in the text (`NGramIndex.find`) and the store; the text's own on a tie."""
        own = super().find(tail)
        if own[1] >= self._longest:
            return own
        recent = [*self._text[-_LONGEST_MATCH:], *tail][-_LONGEST_MATCH:]
        found, length = self._store.find(recent, self.max_tokens)
        # The policy learns by the length of a match, and knows none above `max_ngram`.
        return (found, min(length, self._longest)) if found and length > own[1] else own


class StorePart(Part):
    """State of a model: the store of its earlier texts."""

    def __init__(self) -> None:
        self.store = NGramStore()

    def drop(self) -> None:
        self.store = NGramStore()
