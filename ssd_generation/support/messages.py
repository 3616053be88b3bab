"""Values in errors and warnings, which stay short and on one line whatever the values are."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from .display import visible

__all__ = ["clipped", "did_you_mean", "either", "listed", "shown"]


class _Short(reprlib.Repr):
    """`repr` of the first entries: a long list's takes long, and only its beginning is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 40
        self.maxlong = self.maxother = self.maxarray = 400

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: self.maxlong])

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        entries = (f"{self.repr1(k, level - 1)}: {self.repr1(x[k], level - 1)}" for k in islice(x, self.maxdict))
        return "{" + ", ".join(entries) + "}"

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x)[: self.maxother]


_SHORT = _Short()
_LONGEST_LIST = 250  # characters from which on a list is long enough


def shown(value: Any, most: int = 80) -> str:
    """Return a value as a message shows it: short, on one line.

    Args:
        value: anything.
        most: maximum number of characters.
    """
    try:
        text = _SHORT.repr(value)
    except Exception:  # for example, an integer with more digits than Python prints, or a class whose `repr` fails
        text = f"a value of type {type(value).__name__}"
    return clipped(text[: most + 1], most)


def clipped(text: object, most: int = 200) -> str:
    """Return text of foreign origin, shortened and made safe for a message of this library.

    Args:
        text: for example, another library's error.
        most: maximum number of characters.
    """
    words = visible(str(text))
    return words if len(words) <= most else f"{words[: most - 1]}…"


def listed(values: Iterable[Any], most: int = 6) -> str:
    """Return values as a message names them, the first few of many; "none" where there are none.

    Args:
        values: the values.
        most: maximum number of values named; fewer where they are long.
    """
    entries = list(values)
    texts: list[str] = []
    for value in entries[:most]:
        texts.append(shown(value, most=40 if len(entries) > 1 else 80))
        if sum(map(len, texts)) > _LONGEST_LIST:
            break
    more = f" and {len(entries) - len(texts):,} more" if len(entries) > len(texts) else ""
    return ", ".join(texts) + more or "none"


def either(values: Sequence[Any]) -> str:
    """Return `a, b or c`."""
    return f"{listed(values[:-1])} or {shown(values[-1])}"


def did_you_mean(word: Any, allowed: Iterable[Any]) -> str:
    """Return a question whether a similar allowed word was meant; empty where there is none."""
    if not isinstance(word, str) or len(word) > 100:
        return ""
    matches = difflib.get_close_matches(word, [a for a in islice(allowed, 200) if isinstance(a, str)], n=1)
    return f" Did you mean {shown(matches[0])}?" if matches else ""
