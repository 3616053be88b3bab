"""Text that arrives in pieces, printed at once and broken between words at the edge of the terminal."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

from rich.cells import cell_len

__all__ = ["WordWrap"]

_TAB = 8
"""Columns from one tab stop to the next."""

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Stream of text to a terminal.

    A word that reaches the edge is erased and printed again on the next line, so that nothing waits for its end. Words
    wider than the terminal are broken by it.

    Args:
        write: `(text, style)`, prints text where the cursor is.
        width: function that returns the terminal's width in columns; by default that of this process's terminal.
    """

    def __init__(
        self,
        write: Callable[[str, str], None],
        width: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._write, self._width = write, width
        self._column = 0  # where the cursor is
        self._word: list[tuple[str, str]] = []  # pieces of the word that the cursor is in

    def add(self, text: str, style: str = "") -> None:
        """Print a piece of text.

        Args:
            text: text whose control characters are line feeds and tabs at most.
            style: style of the piece, given on to `write`.
        """
        for part in _PARTS.findall(text):
            if part == "\n":
                self._write("\n", "")
                self._column, self._word = 0, []
            elif part.isspace():
                self._blank(part, style)
            else:
                self._piece(part, style)

    def _blank(self, blank: str, style: str) -> None:
        self._word = []
        column = self._column
        for one in blank:
            column += _TAB - column % _TAB if one == "\t" else cell_len(one)
        if column < self._edge():
            self._write(blank, style)
            self._column = column
        else:  # the end of a line needs none
            self._column = self._edge()

    def _piece(self, piece: str, style: str) -> None:
        before, size = sum(cell_len(text) for text, _ in self._word), cell_len(piece)
        if self._column + size > self._edge() and self._column > 0 and before < self._column:
            # Back to the beginning of the word, and erase from there to the end of the line.
            self._write(f"\x1b[{before}D\x1b[K\n" if before else "\n", "")
            for text, its in self._word:
                self._write(text, its)
            self._column = before
        self._write(piece, style)
        self._word.append((piece, style))
        self._column = (self._column + size) % max(self._width(), 1) if size > self._edge() else self._column + size

    def _edge(self) -> int:
        # After the last column terminals do not agree where the cursor is.
        return max(self._width() - 1, 1)
