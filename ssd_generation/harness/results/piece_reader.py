"""Conversion of tokens to pieces of text as they arrive: a piece is one token, or several that make up characters."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Piece", "PieceReader"]

# Text that a decoder gives for bytes that are not a whole character (yet).
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Piece(NamedTuple):
    """Piece of a text."""

    text: str
    """Text of the piece; for a special token, its name."""

    first: int
    """Number of its first token, from 0."""

    last: int
    """Number of its last token."""

    special: bool
    """True for a special token, such as the one that ends an answer."""


class PieceReader:
    """Decoder of a text, token by token; the texts of ordinary tokens add up to the decoded text.

    Args:
        tokenizer: tokenizer of the model.

    Attributes:
        ids: the tokens so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # Tokens from `_context` to `_shown` have been returned; they are decoded again with what follows, since a text
        # may depend on the token before it (a space, for example). Later tokens wait until they make whole characters.
        self._context = self._shown = 0

    def add(self, token: int) -> list[Piece]:
        """Return the pieces that a token completes: none while characters are incomplete."""
        at = len(self.ids)
        self.ids.append(token)
        if token in self._special:
            name = str(self._tokenizer.convert_ids_to_tokens(token))
            pieces = [*self._waiting(at), Piece(name, at, at, True)]
            self._context = self._shown = at + 1
            return pieces
        before, now = self._decode(self._context, self._shown), self._decode(self._context, at + 1)
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return []
        piece = Piece(now[len(before) :], self._shown, at, False)
        self._context, self._shown = self._shown, at + 1
        return [piece]

    def end(self) -> list[Piece]:
        """Return the piece that remains when no token follows, if there is one."""
        pieces = self._waiting(len(self.ids))
        self._context = self._shown = len(self.ids)
        return pieces

    def _waiting(self, stop: int) -> list[Piece]:
        if self._shown >= stop:
            return []
        text = self._decode(self._context, stop)[len(self._decode(self._context, self._shown)) :]
        return [Piece(text, self._shown, stop - 1, False)]

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        ids = self.ids[start:stop]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
