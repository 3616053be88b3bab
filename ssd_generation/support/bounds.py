"""Bounds of numbers, texts and lists from outside: stated with their fields, checked in one place, named in errors.

A config from the Hub is input from a stranger. Values within these bounds are planned, indexed and shown in no time and
little memory; values outside are refused in a message that names both ends and stays short.
"""

from __future__ import annotations

import numbers
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, ClassVar

from .messages import did_you_mean, either, shown

__all__ = [
    "DRAFT_LENGTH",
    "NGRAM",
    "SHARE",
    "Bound",
    "Choice",
    "Entries",
    "Integer",
    "Items",
    "Number",
    "Text",
    "checked_fields",
    "first_entries",
    "index_of",
]


@dataclass(frozen=True)
class Bound(ABC):
    """Bound of one value; `str(bound)` describes it in words."""

    @property
    def metadata(self) -> dict[str, Bound]:
        """Metadata for `dataclasses.field(metadata=…)`, where `checked_fields` finds the bound."""
        return {"bound": self}

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """Return the value in its own type.

        Args:
            name: name of the value, for the message.
            value: the value from outside.

        Raises:
            TypeError: a value of another type.
            ValueError: a value out of bounds.
        """

    def refusal(self, kind: type[Exception], name: str, value: Any) -> Exception:
        """Build the error that describes the bound and the value given."""
        return kind(f"{name} must be {self}, but got {shown(value)}.")


@dataclass(frozen=True)
class Integer(Bound):
    """An integer of any library (a bool is none)."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"an integer from {self.least:,} to {self.most:,}"

    def check(self, name: str, value: Any) -> int:
        number = index_of(value)
        if number is None:
            raise self.refusal(TypeError, name, value)
        if not self.least <= number <= self.most:
            raise self.refusal(ValueError, name, number)
        return number


@dataclass(frozen=True)
class Number(Bound):
    """A real number of any library (a bool is none).

    Attributes:
        what: meaning of the number, with its article.
        advice: remedy for a number that is out of bounds.
    """

    least: float
    most: float
    what: str = "a number"
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what} between {_plain(self.least)} and {_plain(self.most)}"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise self.refusal(TypeError, name, value)
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if not self.least <= number <= self.most:  # nor is NaN
            error = self.refusal(ValueError, name, value)
            raise ValueError(f"{error} {self.advice}") if self.advice else error
        return number


@dataclass(frozen=True)
class Text(Bound):
    """A string that UTF-8 can encode."""

    most: int

    def __str__(self) -> str:
        return f"a string of at most {self.most:,} characters"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refusal(TypeError, name, value)
        if len(value) > self.most:
            raise ValueError(f"{name} must be {self}, but got one of {len(value):,}: {shown(value)}.")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name} has a lone surrogate, half of a character: {shown(value)}.")
        return value


@dataclass(frozen=True)
class Choice(Bound):
    """One of a few values of one type: strings, integers, or True and False (and possibly None).

    Attributes:
        values: those that are allowed.
        none: meaning of None, in the message; `checked_fields` decides whether it is allowed.
        unknown: start of the message about another value, such as "There is no precision".
    """

    values: tuple[Any, ...]
    none: str = ""
    unknown: str = ""

    def __str__(self) -> str:
        return f"{either(self.values)}, or None {self.none}" if self.none else either(self.values)

    def check(self, name: str, value: Any) -> Any:
        kind = type(self.values[0])
        chosen = index_of(value) if kind is int else value
        if not isinstance(chosen, kind):
            raise self.refusal(TypeError, name, value)
        if chosen in self.values:
            return chosen
        error = f"{self.unknown} {shown(value)}; use {self}." if self.unknown else self.refusal(ValueError, name, value)
        raise ValueError(f"{error}{did_you_mean(value, self.values)}")


@dataclass(frozen=True)
class Entries(Bound):
    """A sequence of at most so many entries.

    Attributes:
        most: maximum number of entries.
        each: bound of each entry.
        form: description of the whole in words, such as "be a sequence of probabilities, such as [0.9, 0.85]".
        entry: name of an entry in errors, with its place counted from 1; "" for the name of the whole.
    """

    _refused: ClassVar[tuple[type, ...]] = (str, bytes, Mapping, Set)  # a set has no order

    most: int
    each: Bound
    form: str = "be a sequence"
    entry: str = ""

    def __str__(self) -> str:
        return f"at most {self.most:,} entries"

    def refusal(self, kind: type[Exception], name: str, value: Any) -> Exception:
        return kind(f"{name} must {self.form}, but got {shown(value)}.")

    def check(self, name: str, value: Any) -> Any:
        entries = enumerate(self.take(name, value), start=1)
        of = f"{name} of {self.entry} " if self.entry else ""
        return tuple(self.each.check(f"{of}{place}" if of else name, entry) for place, entry in entries)

    def take(self, name: str, values: Any) -> list[Any]:
        """Return the entries, counted but not checked, of an iterable that may be infinite.

        Raises:
            TypeError: it is no sequence.
            ValueError: there are more than `most`.
        """
        entries = first_entries(values, self.most + 1, self._refused)
        if entries is None:
            raise self.refusal(TypeError, name, values)
        if len(entries) > self.most:
            raise ValueError(f"{name} must have {self}, but it has more. Leave some out.")
        return entries


class Items(Entries):
    """A mapping of at most so many items, which `take` returns as pairs."""

    _refused = ()

    def take(self, name: str, values: Any) -> list[Any]:
        if not isinstance(values, Mapping):
            raise self.refusal(TypeError, name, values)
        return super().take(name, values.items())


DRAFT_LENGTH = Integer(1, 128)
"""Number of tokens drafted or looked up in a round: planning considers all lengths from each, in milliseconds up to
here."""

NGRAM = Integer(1, 16)
"""Number of tokens in a lookup's n-gram: the index holds an entry of each length per token of text."""

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


def first_entries(values: Any, most: int, refused: tuple[type, ...] = (str, bytes, Mapping, Set)) -> list[Any] | None:
    """Return the first entries of an iterable; None for a value of a refused type, or one that is not iterable."""
    try:
        return None if isinstance(values, refused) else list(islice(values, most))
    except TypeError:  # for example, an array of no dimensions
        return None


def index_of(value: Any) -> int | None:
    """Return an integer of any library as an int; None for anything else, including bools (numpy's and torch's too)."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch: a tensor without data
        return None


def _plain(number: float) -> str:
    """Format a bound as people write it: 1e-9, not 1e-09."""
    return f"{number:,}" if isinstance(number, int) else re.sub(r"e\+?(-?)0*", r"e\1", f"{number:g}")
