"""Pieces of an answer as HTML, each with its origin: for a notebook, and as a separate page.

rich's own HTML export was tried, and loses: a token's number and round (its tooltip) and its edges (neighbours of one
origin become one), lines as long as the window, colours for light and dark pages, newline marks that are not copied,
and notebooks without rich, which only the extra `cli` installs.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...support.display import for_html
from .origin_piece import DECIDED, DRAFTED, LOOKED_UP, OriginPiece

__all__ = ["fragment", "page"]

# Half-transparent backgrounds and the page's own text colour are legible on light and dark pages. The edge at the left
# tells neighbouring tokens apart.
_EDGE = "box-shadow:inset 1px 0 rgba(128,128,128,.5);border-radius:2px;padding:1px 0;"
_STYLES = {
    DRAFTED: f"{_EDGE}background:rgba(40,160,70,.22)",
    LOOKED_UP: f"{_EDGE}background:rgba(0,130,200,.22);border-bottom:2px dotted rgba(0,130,200,.95)",
    DECIDED: f"{_EDGE}background:rgba(235,150,0,.28);border-bottom:2px solid rgba(235,150,0,.95)",
}
_NOTES = {LOOKED_UP: "dotted", DECIDED: "underlined"}
# Not part of the text: it is left out when the text is copied.
_NEWLINE = '<span style="opacity:.5;user-select:none" aria-hidden="true">↵</span>\n'


def fragment(pieces: Iterable[OriginPiece], origins: Iterable[str], summary: str) -> str:
    """Return an answer as a part of a page, with a legend of these origins and the summary below it."""
    body = "".join(map(_span, pieces))
    legend = " &nbsp; ".join(
        f'<span style="{_STYLES[origin]}">{origin}</span>' + (f" ({_NOTES[origin]})" if origin in _NOTES else "")
        for origin in origins
    )
    return (
        '<div style="line-height:1.7;max-width:60em">'
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{body}</div>'
        f'<div style="margin-top:.8em;font-size:.85em">{legend}<br>{for_html(summary)}</div>'
        "</div>"
    )


def page(content: str, title: str, prompt: str | None) -> str:
    """Return a whole page around a fragment, below its title and, if given, the prompt."""
    shown = for_html(title, keep="")
    question = ""
    if prompt is not None:
        question = f'<p style="white-space:pre-wrap;overflow-wrap:anywhere;opacity:.75">{for_html(prompt)}</p>\n'
    return (
        '<!doctype html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{shown}</title>\n</head>\n'
        '<body style="font-family:system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em">\n'
        f'<h1 style="font-size:1.3em">{shown}</h1>\n{question}{content}\n</body>\n</html>\n'
    )


def _span(piece: OriginPiece) -> str:
    numbers = (
        f"token {piece.first + 1}" if piece.tokens == 1 else f"tokens {piece.first + 1}–{piece.first + piece.tokens}"
    )
    where = f"round {piece.round}" if piece.round else "the pass over the prompt"
    title = for_html(f"{numbers}: {piece.origin}, {where}")
    style = _STYLES[piece.origin]
    if piece.special:
        style += ";font-style:italic;opacity:.7"
    text = for_html(piece.text).replace("\n", _NEWLINE)
    return f'<span style="{style}" title="{title}">{text}</span>'
