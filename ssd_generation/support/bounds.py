"""What a number, a text or a list from outside may be: stated with its field, checked in one place, told in errors.

A config from the Hub is input from a stranger. Whatever it says within these bounds is planned, indexed and shown in
no time and little memory; whatever lies beyond them is refused in a message that names both ends and stays short.
"""

from __future__ import annotations

import numbers
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, TypeVar

from .messages import shown

__all__ = [
    "DRAFT_LENGTH",
    "NGRAM",
    "SHARE",
    "Bound",
    "Entries",
    "Integer",
    "Number",
    "Text",
    "checked_fields",
    "index_of",
]

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Bound(ABC):
    """What one value may be. `str(bound)` says it in words."""

    @property
    def metadata(self) -> dict[str, Bound]:
        """For `dataclasses.field(metadata=…)`; `checked_fields` finds it there."""
        return {"bound": self}

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """The value in its own type.

        Args:
            name: of the value, for the message.
            value: as it came.

        Raises:
            TypeError: a value of another type.
            ValueError: a value out of bounds.
        """

    def _refuse(self, kind: type[Exception], name: str, value: Any) -> Exception:
        return kind(f"{name} must be {self}, but got {shown(value)}.")


@dataclass(frozen=True)
class Integer(Bound):
    """An integer of whatever library (a bool is none)."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"an integer from {self.least:,} to {self.most:,}"

    def check(self, name: str, value: Any) -> int:
        number = index_of(value)
        if number is None:
            raise self._refuse(TypeError, name, value)
        if not self.least <= number <= self.most:
            raise self._refuse(ValueError, name, number)
        return number


@dataclass(frozen=True)
class Number(Bound):
    """A real number of whatever library (a bool is none).

    Attributes:
        what: what it is a number of.
        advice: what to do about one that is out of bounds.
    """

    least: float
    most: float
    what: str = "a number"
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what} between {_plain(self.least)} and {_plain(self.most)}"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise self._refuse(TypeError, name, value)
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if not self.least <= number <= self.most:  # nor is NaN
            error = self._refuse(ValueError, name, value)
            raise ValueError(f"{error} {self.advice}") if self.advice else error
        return number


@dataclass(frozen=True)
class Text(Bound):
    """A string that UTF-8 can hold."""

    most: int

    def __str__(self) -> str:
        return f"a string of at most {self.most:,} characters"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._refuse(TypeError, name, value)
        if len(value) > self.most:
            raise ValueError(f"{name} must be {self}, but got one of {len(value):,}: {shown(value)}.")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name} has a lone surrogate, half of a character: {shown(value)}.")
        return value


@dataclass(frozen=True)
class Entries:
    """A list or mapping of so many entries. `take` counts them; each is checked by `each`.

    Not a `Bound`: what else makes a good list is for its owner to say.
    """

    most: int
    each: Bound

    @property
    def metadata(self) -> dict[str, Entries]:
        """For `dataclasses.field(metadata=…)`."""
        return {"bound": self}

    def __str__(self) -> str:
        return f"at most {self.most:,} entries"

    def take(self, name: str, values: Iterable[_Entry]) -> list[_Entry]:
        """The entries of an iterable, which may go on without end.

        Args:
            name: of the list, for the message.
            values: as they came.

        Raises:
            ValueError: there are more.
        """
        entries = list(islice(values, self.most + 1))
        if len(entries) > self.most:
            raise ValueError(f"{name} must have {self}, but it has more. Leave some out.")
        return entries


DRAFT_LENGTH = Integer(1, 128)
"""Tokens drafted or looked up in a round: planning looks at all lengths from each, in milliseconds up to here."""

NGRAM = Integer(1, 16)
"""Tokens looked for: the index holds an entry of each length per token of text."""

SHARE = Number(0, 1)


def checked_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass that state a `Bound`, and store them in their own types.

    A field whose default is None may be None.

    Raises:
        TypeError, ValueError: as `Bound.check`; the message names the field.
    """
    for f in fields(instance):
        bound, value = f.metadata.get("bound"), getattr(instance, f.name)
        if not isinstance(bound, Bound) or (value is None and f.default is None):
            continue
        object.__setattr__(instance, f.name, bound.check(f.name, value))


def index_of(value: Any) -> int | None:
    """An integer of whatever library as an int; None for anything else, bools (numpy's and torch's too) among it."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch: of a tensor without data
        return None


def _plain(number: float) -> str:
    """A bound as one writes it: 1e-9, not 1e-09."""
    return f"{number:,}" if isinstance(number, int) else re.sub(r"e\+?(-?)0*", r"e\1", f"{number:g}")
