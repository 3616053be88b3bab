"""What earlier texts went on with: drafts copied from other texts than the one that is decoded.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975), by an index of n-grams in the place of suffix trees: of the
places where the last tokens stood before, the ones with the longest match decide, by the token that followed most often
and latest; the longer the match, the longer the draft.
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
"""Tokens that have to match at the least: fewer say little about another text."""

_PLACES = 8
"""Latest places that are held of each n-gram."""

_LONGEST_MATCH = 32
"""Tokens that are compared before a place."""

_PER_TOKEN = 2
"""Tokens that are drafted at the most for each that matches (α in SuffixDecoding's adaptive length)."""

_BETWEEN = -1
"""Stands between texts."""

_RECENT = 16
"""Texts whose beginnings are recognised, so that a conversation is not stored anew in each turn."""


class NGramStore:
    """Tokens of texts, by the n-grams in them. What adding a token and a search take does not grow with the store.

    Args:
        most_tokens: that are held; beyond, the older half goes. A token takes some 150 bytes.
    """

    def __init__(self, most_tokens: int = 1 << 18) -> None:
        self.most_tokens = most_tokens
        self._guard = ForkSafeRLock()
        self.clear()

    def __len__(self) -> int:
        """Tokens that are held."""
        return len(self._text)

    def clear(self) -> None:
        """Forget all."""
        with self._guard:
            self._text: list[int] = []
            self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
            self._recent: list[list[int]] = []

    def add(self, text: Sequence[int]) -> None:
        """Remember a text; of one that begins as a recent one did, what is new.

        Args:
            text: its tokens.
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
            if len(self._text) + len(new) >= self.most_tokens:
                kept = (self._text + new)[-max(self.most_tokens // 2, 1) :]
                self._text, new = [], kept
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
        """The most likely continuation of a text.

        Args:
            recent: its last tokens.
            most: tokens to return at the most.

        Returns:
            The tokens, and how many of the last tokens matched; `([], 0)` where fewer than three did.
        """
        if len(recent) < _NGRAM:
            return [], 0
        with self._guard:
            text = self._text
            # By the token that followed: the longest match, how often it did, and the latest place of that match.
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


def _matching(text: Sequence[int], place: int, recent: Sequence[int]) -> int:
    """How many tokens before a place are the last ones of another text."""
    most, length = min(_LONGEST_MATCH, len(recent), place), _NGRAM
    while length < most and text[place - length - 1] == recent[-length - 1]:
        length += 1
    return length


class RememberingIndex(NGramIndex):
    """Index of a growing text that looks into a store as well, where its own matches are short.

    Args:
        store: of earlier texts.
        max_ngram, min_ngram, max_tokens: as in `NGramIndex`.
    """

    def __init__(self, store: NGramStore, max_ngram: int, min_ngram: int, max_tokens: int) -> None:
        super().__init__(max_ngram, min_ngram, max_tokens)
        self._store, self._longest = store, max_ngram

    def find(self, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """See `NGramIndex.find`; of two matches the longer one, the text's own where they are alike."""
        own = super().find(tail)
        if own[1] >= self._longest:
            return own
        recent = [*self._text[-_LONGEST_MATCH:], *tail][-_LONGEST_MATCH:]
        found, length = self._store.find(recent, self.max_tokens)
        # What the policy learns goes by the length of a match, of which it knows no longer ones.
        return (found, min(length, self._longest)) if found and length > own[1] else own


class StorePart(Part):
    """Of a model: what its texts went on with."""

    def __init__(self) -> None:
        self.store = NGramStore()

    def drop(self) -> None:
        self.store = NGramStore()
