"""Parameters as frozen dataclasses whose fields state their bounds: checked at construction, stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar

from .bounds import Bound, checked_fields
from .messages import did_you_mean, listed, shown

__all__ = ["FrozenMapping", "Parameters", "Part", "check_keys", "pretty_json"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Parameters = TypeVar("_Parameters", bound="Parameters")


@dataclass(frozen=True)
class Parameters:
    """Base of dataclasses whose fields have a `support.bounds.Bound` in their metadata, which define all else.

    A subclass is declared as `class Costs(Parameters, title="'costs'", omits_defaults=True)`: its name in errors, and
    whether `to_dict` leaves out fields that have their defaults.
    """

    _title: ClassVar[str]
    _omits_defaults: ClassVar[bool] = False

    def __init_subclass__(cls, title: str | None = None, omits_defaults: bool | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if title is not None:
            cls._title = title
        if omits_defaults is not None:
            cls._omits_defaults = omits_defaults

    def __post_init__(self) -> None:
        checked_fields(self)
        self._check_together()

    def _check_together(self) -> None:
        """Check several fields together, in a subclass, once each of them has been checked."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON types."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        omitted = {f.name for f in fields(self) if self._omits_defaults and values[f.name] == f.default}
        return {name: _as_json(value) for name, value in values.items() if name not in omitted}

    @classmethod
    def from_dict(cls: type[_Parameters], data: Mapping[str, Any]) -> _Parameters:
        """Build parameters from `to_dict`'s result; a missing field has its default.

        Raises:
            TypeError, ValueError: an unknown or missing key, or a bad value.
        """
        names = [f.name for f in fields(cls)]
        if not isinstance(data, Mapping):
            raise TypeError(
                f"{cls._title} must be a JSON object (a dict) with keys of {', '.join(names)}, but got {shown(data)}."
            )
        check_keys(data, names, cls._title)
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        if missing := [name for name in required if name not in data]:
            raise ValueError(f"{cls._title} lacks {listed(missing)}. Give these too, or leave out {cls._title}.")
        return cls(**data)


@dataclass(frozen=True)
class Part(Bound):
    """A field that holds parameters.

    Attributes:
        kind: their class.
        form: alternatives to the parameters themselves, in words.
        short: type of a shorter form, such as a name; where there is one, a dict of the fields is accepted too.
        read: builds the parameters from the shorter form.
        advice: remedy for a dict that is not accepted.
    """

    kind: type[Parameters]
    form: str = ""
    short: type | None = None
    read: Callable[[Any], Any] | None = None
    advice: str = ""

    def __str__(self) -> str:
        return f"a {self.kind.__name__}{self.form}"

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, self.kind):
            return value
        if self.short is not None and self.read is not None:
            if isinstance(value, self.short):
                return self.read(value)
            if isinstance(value, Mapping):
                return self.kind.from_dict(value)
        problem = str(self.refusal(TypeError, name, value))
        raise TypeError(f"{problem} {self.advice}" if self.advice and isinstance(value, Mapping) else problem)


def check_keys(data: Iterable[Any], allowed: Iterable[str], title: str, aliases: Iterable[str] = ()) -> None:
    """Refuse a key that is neither allowed nor an alias of one that is.

    Raises:
        ValueError: there is such a key; the message names those that are allowed.
    """
    known = (*allowed, *aliases)
    for key in data:
        if key not in known:
            raise ValueError(
                f"Unknown key {shown(key)} in {title}; allowed are {listed(allowed, most=20)}."
                f"{did_you_mean(key, known)}"
            )


def pretty_json(value: Any, indent: str = "") -> str:
    """Format JSON with objects spread over lines and lists on one."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = indent + "  "
    items = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {pretty_json(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


class FrozenMapping(Mapping[_Key, _Value]):
    """A mapping that is hashable, picklable and immutable; equal to a dict of the same items."""

    def __init__(self, items: Mapping[_Key, _Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: _Key) -> _Value:
        return self._items[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def _as_json(value: Any) -> Any:
    if isinstance(value, Parameters):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_as_json(entry) for entry in value]
    return {str(key): entry for key, entry in value.items()} if isinstance(value, Mapping) else value
