"""Display of each token's origin in an answer: in a terminal, in a notebook, as a web page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...support.display import visible
from ...support.files import write_whole
from .origin_piece import DECIDED, DRAFTED, LOOKED_UP, OriginPiece
from .origins_html import fragment, page
from .piece_reader import Piece, PieceReader

if TYPE_CHECKING:
    import torch
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

__all__ = ["STYLES", "TokenOrigins", "legend"]


@dataclass(frozen=True)
class TokenOrigins:
    """Answer, token by token, with the origin of each.

    Print it with rich (`rich.print(origins)`), or put it at the end of a notebook cell:

    ```python
    out = model.generate(**inputs, self_speculative=config)
    new = out[0, inputs["input_ids"].shape[1] :]
    TokenOrigins.from_ids(tokenizer, new, model.last_speculation.token_sources[0])
    ```

    Colour is never the only mark: tokens that the target decided are underlined too, looked-up ones are in italics;
    where a terminal shows no styles, they are set in ⟦brackets⟧ and ‹brackets›.

    Attributes:
        pieces: the answer in order.
        drafted_tokens: tokens that were drafted and accepted.
        decided_tokens: tokens that the target decided.
        looked_up_tokens: drafted tokens that were copied from the text by prompt lookup.
    """

    pieces: tuple[OriginPiece, ...]
    drafted_tokens: int
    decided_tokens: int
    looked_up_tokens: int = 0

    @classmethod
    def from_ids(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: Sequence[int] | torch.Tensor,
        origins: Sequence[bool] | Sequence[str],
    ) -> TokenOrigins:
        """Split an answer into pieces.

        Args:
            tokenizer: the model's tokenizer.
            token_ids (`torch.LongTensor` of shape `(new_tokens,)`, or integers): the new tokens of one row, without the
                prompt.
            origins: origin of each token, such as a row of `SpeculationStatistics.token_sources`; truth values for
                drafted or not will do.

        Raises:
            ValueError: the two differ in length.
        """
        ids: list[int] = [int(i) for i in (token_ids if isinstance(token_ids, Sequence) else token_ids.tolist())]
        flags = [origin in ("drafted", "looked up") if isinstance(origin, str) else bool(origin) for origin in origins]
        copied = [origin == "looked up" for origin in origins]
        if len(ids) != len(flags):
            raise ValueError(
                f"There are {len(ids)} tokens but origins of {len(flags)}. Pass the new tokens of one row (no prompt, "
                "no padding) and the same row of `token_sources`."
            )
        # A round ends with the token that the target decided.
        rounds = list(accumulate((not flag for flag in flags), initial=0))
        return cls(
            pieces=tuple(
                OriginPiece(text, flags[last], first, last - first + 1, rounds[last], special, copied[last])
                for text, first, last, special in _texts(tokenizer, ids)
            ),
            drafted_tokens=sum(flags),
            decided_tokens=len(flags) - sum(flags),
            looked_up_tokens=sum(copied),
        )

    @property
    def text(self) -> str:
        """Text of the answer, without special tokens."""
        return "".join(piece.text for piece in self.pieces if not piece.special)

    def summary(self) -> str:
        """Summarise in one line the number of tokens of each origin."""
        total = self.drafted_tokens + self.decided_tokens
        if not total:
            return "No new tokens."
        share = f"{self.drafted_tokens / total:.0%}"
        if self.looked_up_tokens:
            share += f"; {self.looked_up_tokens} of them looked up in the text"
        return (
            f"{total} {'token' if total == 1 else 'tokens'}: {self.drafted_tokens} {DRAFTED} ({share}), "
            f"{self.decided_tokens} {DECIDED}."
        )

    def legend(self) -> list[str]:
        """Return the origins to explain: looked-up tokens only where there are some."""
        return [DRAFTED, *([LOOKED_UP] if self.looked_up_tokens else []), DECIDED]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the pieces as plain JSON types."""
        return [
            {
                "text": p.text,
                "drafted": p.drafted,
                "looked_up": p.looked_up,
                "tokens": p.tokens,
                "round": p.round,
                "special": p.special,
            }
            for p in self.pieces
        ]

    # -- terminal ------------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        # Without a colour system (a pipe, a dumb terminal) rich drops underlines as well; NO_COLOR drops colours only.
        styled = console.color_system is not None
        marks = {DECIDED: ("⟦", "⟧"), LOOKED_UP: ("‹", "›")}
        if options.ascii_only:
            marks = {DECIDED: ("[", "]"), LOOKED_UP: ("<", ">")}
        newline = "\\n" if options.ascii_only else "↵"
        body = Text(overflow="fold")
        for piece in self.pieces:
            style = STYLES[piece.origin] + (" italic" if piece.special else "")
            left, right = ("", "") if styled else marks.get(piece.origin, ("", ""))
            *lines, rest = visible(piece.text, keep="\n\t").split("\n")
            body.append(left)
            for number, line in enumerate(lines, start=1):
                body.append(line + newline, style=style)
                # A piece that ends with its line has its bracket there too.
                body.append(right if number == len(lines) and not rest else "")
                body.append("\n")
            body.append(rest, style=style)
            body.append(right if rest or not lines else "")
        yield body
        yield Text()
        yield legend(self.legend(), {} if styled else marks, notes=styled)
        yield Text(self.summary())

    # -- HTML ----------------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        return fragment(self.pieces, self.legend(), self.summary())

    def to_html(self, title: str = "Where each token came from", prompt: str | None = None) -> str:
        """Return a whole web page.

        Args:
            title: title of the page.
            prompt: prompt to show above the answer, if given.
        """
        return page(fragment(self.pieces, self.legend(), self.summary()), title, prompt)

    def save_html(
        self,
        path: str | os.PathLike[str],
        title: str = "Where each token came from",
        prompt: str | None = None,
    ) -> Path:
        """Write the web page to a file, whole or not at all.

        Args:
            path: the file; one that exists is replaced.
            title: title of the page.
            prompt: prompt to show above the answer, if given.

        Returns:
            The path.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        target = Path(os.path.expanduser(os.fspath(path)))
        if not target.parent.is_dir():
            raise FileNotFoundError(
                f"There is no folder {str(target.parent)!r} to write {target.name!r} into. Make it first."
            )
        write_whole(target, self.to_html(title, prompt))
        return target


def _texts(tokenizer: Any, ids: list[int]) -> Iterator[Piece]:
    """Yield the pieces of a whole text."""
    reader = PieceReader(tokenizer)
    for token in ids:
        yield from reader.add(token)
    yield from reader.end()


STYLES: Mapping[str, str] = {DRAFTED: "green", LOOKED_UP: "italic cyan", DECIDED: "bold underline yellow"}
"""Terminal styles by origin: a colour, and another mark where needed."""
_NOTES = {LOOKED_UP: "in italics", DECIDED: "underlined"}


def legend(origins: Sequence[str], marks: Mapping[str, tuple[str, str]], notes: bool) -> Text:
    """Return the line that explains how origins are shown in a terminal.

    Args:
        origins: origins to explain.
        marks: brackets around each, where no styles are shown.
        notes: whether to name the marks other than colours.
    """
    from rich.text import Text

    line = Text()
    for origin in origins:
        left, right = marks.get(origin, ("", ""))
        line.append(" · " if line else "").append(f"{left}{origin}{right}", style=STYLES[origin])
        line.append(f" ({_NOTES[origin]})" if notes and origin in _NOTES else "")
    return line
