"""Escaping of all strings that go to a screen or into a report.

The contents of a file, a model or a folder's name are data: they must not set a terminal's title, clear its screen,
change the direction of writing, open a tag or break a table. `visible` shows what would act as an escape; the other
functions also escape what has a meaning in the format that the string goes into.
"""

from __future__ import annotations

import html
import json
import os
import re

__all__ = ["byte_size", "for_html", "for_json", "for_markdown", "for_plot", "path_shown", "visible"]

# Control characters (C0, DEL, C1), line and paragraph separators, marks and overrides of the writing direction, tags
# (invisible letters), and halves of characters.
_ACTING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# An underscore within a word (`top_p`) is a literal one.
_MARKDOWN = re.compile(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))")
_LONGEST_LABEL = 40  # characters
_LONGEST_PATH = 400  # characters


def visible(text: object, keep: str = "") -> str:
    r"""Return a string that is safe for a screen: nothing in it acts, all of it can be seen and encoded.

    Characters that act are shown as Python writes them (`\x1b`, `\u202e`).

    Args:
        text: the string, or a value that `str` converts.
        keep: characters that may act all the same, such as `"\n\t"` for a text of several lines.
    """

    def shown(match: re.Match[str]) -> str:
        character = match.group()
        if character in keep:
            return character
        return repr(character)[1:-1]

    return _ACTING.sub(shown, str(text))


def for_markdown(text: object) -> str:
    """Return a string as a piece of Markdown that shows it, in a line or a table's cell."""
    escaped = _MARKDOWN.sub(r"\\\1", visible(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def for_html(text: object, keep: str = "\n\t") -> str:
    """Return a string as HTML text or as the value of an attribute."""
    return html.escape(visible(text, keep))


def for_json(document: str) -> str:
    """Return a JSON document that is safe for a screen: the same document, with acting characters escaped as in JSON.

    Args:
        document: output of `json.dumps`; its line breaks stay.
    """
    return _ACTING.sub(lambda match: "\n" if match.group() == "\n" else json.dumps(match.group())[1:-1], document)


def for_plot(text: object) -> str:
    """Return a string as a label of matplotlib, which takes text between dollar signs for mathematics.

    A long one is cut, so that room remains for the plot.
    """
    shown = visible(text)
    if len(shown) > _LONGEST_LABEL:
        shown = f"{shown[: _LONGEST_LABEL - 1]}…"
    return shown.replace("$", r"\$")


def path_shown(path: str | os.PathLike[str]) -> str:
    """Return a path as errors name it, in quotes; of a very long one the end, with the file's own name."""
    text = visible(repr(os.fspath(path)))
    return text if len(text) <= _LONGEST_PATH else f"'…{text[2 - _LONGEST_PATH :]}"


def byte_size(count: int) -> str:
    """Format a number of bytes for people, to three digits."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
