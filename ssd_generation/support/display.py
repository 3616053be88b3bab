"""The one door for strings that go to a screen or into a report.

What a file, a model or a folder's name says is data: it must not set a terminal's title, clear its screen, turn the
direction of writing, open a tag or break a table. `visible` shows what would act as an escape; the other functions also
escape what means something in the format that the string goes into.
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
# An underscore within a word (`top_p`) is one.
_MARKDOWN = re.compile(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))")
_LONGEST_LABEL = 40  # characters
_LONGEST_PATH = 400  # characters


def visible(text: object, keep: str = "") -> str:
    r"""A string as it may go to a screen: nothing in it acts, all of it can be seen and encoded.

    Characters that act are shown as Python writes them (`\x1b`, `\u202e`).

    Args:
        text: the string, or what `str` makes of a value.
        keep: characters that may act all the same, such as `"\n\t"` for a text of several lines.
    """

    def shown(match: re.Match[str]) -> str:
        character = match.group()
        if character in keep:
            return character
        return repr(character)[1:-1]

    return _ACTING.sub(shown, str(text))


def for_markdown(text: object) -> str:
    """A string as a piece of Markdown that shows it, in a line or a table's cell."""
    escaped = _MARKDOWN.sub(r"\\\1", visible(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def for_html(text: object, keep: str = "\n\t") -> str:
    """A string as HTML text or as the value of an attribute."""
    return html.escape(visible(text, keep))


def for_json(document: str) -> str:
    """A JSON document as it may go to a screen: the same document, with what would act escaped as JSON escapes it.

    Args:
        document: what `json.dumps` wrote; its line breaks stay.
    """
    return _ACTING.sub(lambda match: "\n" if match.group() == "\n" else json.dumps(match.group())[1:-1], document)


def for_plot(text: object) -> str:
    """A string as a label of matplotlib, which takes what stands between dollar signs for mathematics.

    A long one is cut, lest it leave no room for the picture.
    """
    shown = visible(text)
    if len(shown) > _LONGEST_LABEL:
        shown = f"{shown[: _LONGEST_LABEL - 1]}…"
    return shown.replace("$", r"\$")


def path_shown(path: str | os.PathLike[str]) -> str:
    """A path as an error names it, in quotes; of a very long one the end, where the file's own name stands."""
    text = visible(repr(os.fspath(path)))
    return text if len(text) <= _LONGEST_PATH else f"'…{text[2 - _LONGEST_PATH :]}"


def byte_size(count: int) -> str:
    """A number of bytes for a person, to three digits."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
