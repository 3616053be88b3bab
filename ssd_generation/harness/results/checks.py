"""Checks of stored values: each takes a value and returns a description of what is wrong with it, or `None`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Check", "anything", "both", "by_name", "count", "fields", "flag", "list_of", "number", "optional"]
__all__ += ["positive", "quoted", "string"]

Check = Callable[[Any], "str | None"]
"""Function that describes what is wrong with a value, or returns `None`."""

_LARGEST = 1e15  # of bytes, seconds, tokens, ratios


def quoted(value: Any) -> str:
    """Return a value as JSON, cut to a length that fits into a message."""
    found = json.dumps(value)
    return found if len(found) <= 60 else f"{found[:60]}…"


def string(value: Any) -> str | None:
    """Check for a string."""
    return None if isinstance(value, str) else f"a text is needed, but it is {quoted(value)}"


def flag(value: Any) -> str | None:
    """Check for true or false."""
    return None if isinstance(value, bool) else f"true or false is needed, but it is {quoted(value)}"


def number(value: Any) -> str | None:
    """Check for a number that is not absurdly large."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return None
    return f"a number of at most {_LARGEST:g} is needed, but it is {quoted(value)}"


def positive(value: Any) -> str | None:
    """Check for a number above 0."""
    return number(value) or (None if value > 0 else f"a number above 0 is needed, but it is {quoted(value)}")


def count(value: Any) -> str | None:
    """Check for an integer from 0 on."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
        return None
    return f"a number of things, 0 or more, is needed, but it is {quoted(value)}"


def anything(value: Any) -> str | None:
    """Accept any value."""
    return None


def optional(check: Check) -> Check:
    """Make a check that accepts `None`, too."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check, least: int = 0) -> Check:
    """Make a check for a list of at least `least` entries that pass."""

    def found(value: Any) -> str | None:
        if not isinstance(value, list) or len(value) < least:
            return f"a list of at least {least} is needed, but it is {quoted(value)}"
        return next((wrong for entry in value if (wrong := check(entry))), None)

    return found


def by_name(check: Check) -> Check:
    """Make a check for an object whose values pass."""

    def found(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"an object is needed, but it is {quoted(value)}"
        return next((at(key, wrong) for key, entry in value.items() if (wrong := check(entry))), None)

    return found


def fields(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """Make a check for an object that has the needed fields; those of `more` are checked where present."""

    def found(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"an object is needed, but it is {quoted(value)}"
        for key, check in needed.items():
            if key not in value:
                return f"{key!r} is missing"
            if wrong := check(value[key]):
                return at(key, wrong)
        return next(
            (at(key, wrong) for key, check in (more or {}).items() if key in value and (wrong := check(value[key]))),
            None,
        )

    return found


def at(key: str, wrong: str) -> str:
    """Prefix a description of what is wrong with the key where it was found."""
    return f"{quoted(key)}: {wrong}"


def both(first: Check, second: Check) -> Check:
    """Make a check that runs two, in order, and returns the first fault."""
    return lambda value: first(value) or second(value)
