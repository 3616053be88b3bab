"""Bounds of external input, and messages that stay short whatever the input."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from effort import little_work
from ssd_generation.support.bounds import Choice, Entries, Integer, Items, Number, Text
from ssd_generation.support.messages import clipped, did_you_mean, listed, shown

FEW = Integer(1, 12_000)
SOME = Number(1e-9, 0.5, "a number of seconds", "Measure it again.")
SHORT = Text(5)


class Huge:
    def __repr__(self) -> str:
        return "x" * 10**6


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError("no")


HOSTILE: list[Any] = [
    10**400,
    -(10**400),
    10**10_000,  # Python refuses to print it
    "x" * 10**6,
    b"x" * 10**6,
    [0] * 10**6,
    {n: n for n in range(10**5)},
    {str(n): "y" * 1000 for n in range(100)},
    set(range(10**5)),
    Huge(),
    Failing(),
    [Huge()] * 100,
    [Failing()],
    {Failing(): Huge()},
    type("y" * 10**5, (), {"__repr__": Failing.__repr__})(),
    np.zeros(10**6),
    torch.zeros(1000, 1000),
    torch.zeros(1, device="meta"),
    float("nan"),
    Fraction(10**400),
    "\x1b[2J\u202e\n",
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__[:20])
def test_messages_stay_short_and_on_one_line(value: Any) -> None:
    with little_work():
        for bound in (FEW, SOME, SHORT):
            with pytest.raises((TypeError, ValueError)) as caught:
                bound.check("some_name", value)
            message = str(caught.value)
            assert message.startswith("some_name ") and len(message) < 250 and message.isprintable()
        assert len(shown(value)) <= 80 and len(listed([value] * 1000)) < 300
        assert len(did_you_mean(value, [value, "a"])) < 100


def test_values_are_shown_as_python_writes_them() -> None:
    for value in ([3, 5], (3,), {"a": [1]}, {1, 2}, "it's", 1.5, None, True, torch.int8, b"x", range(3)):
        assert shown(value) == repr(value)
    assert shown("x" * 100) == "'" + "x" * 78 + "…"
    assert listed("abc") == "'a', 'b', 'c'" and listed(range(9)) == "0, 1, 2, 3, 4, 5 and 3 more"
    assert listed([]) == "none" and listed(["x" * 100] * 50, most=50).endswith(" and 43 more")
    assert clipped("a\nb") == r"a\nb" and clipped("x" * 9, most=4) == "xxx…"


@pytest.mark.parametrize(
    ("bound", "value", "message"),
    [
        (FEW, 0, "n must be an integer from 1 to 12,000, but got 0."),
        (FEW, 12_001, "n must be an integer from 1 to 12,000, but got 12001."),
        (SOME, 0, "n must be a number of seconds between 1e-9 and 0.5, but got 0. Measure it again."),
        (Number(-1e12, 1e6), 1e7, "n must be a number between -1e12 and 1e6, but got 10000000.0."),
        (SHORT, "123456", "n must be a string of at most 5 characters, but got one of 6: '123456'."),
        (SHORT, "\ud800", r"n has a lone surrogate, half of a character: '\ud800'."),
    ],
)
def test_both_ends_are_told(bound: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        bound.check("n", value)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), None, "1", 1j, [1]])
def test_what_is_no_number(value: Any) -> None:
    for bound in (FEW, SOME):
        with pytest.raises(TypeError):
            bound.check("n", value)


def test_within_bounds_a_value_gets_its_own_type() -> None:
    for number in (1, 12_000, np.int64(7), torch.tensor(7)):
        assert type(FEW.check("n", number)) is int
    for share in (1e-9, 0.5, np.float32(0.5), Fraction(1, 3)):
        assert type(SOME.check("n", share)) is float
    assert SHORT.check("n", "12345") == "12345"


def test_lists_without_end_are_counted_only_so_far() -> None:
    entries = Entries(3, FEW)
    assert entries.take("l", range(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="l must have at most 3 entries, but it has more"):
        entries.take("l", itertools.count())


def test_one_of_a_few_values() -> None:
    names, sizes, switch = (
        Choice(("int8", "int4"), unknown="There is no precision"),
        Choice((32, 64)),
        Choice((True, False)),
    )
    assert names.check("n", "int8") == "int8" and switch.check("n", False) is False
    assert type(sizes.check("n", np.int64(32))) is int
    for choice, value, error, message in (
        (names, "int5", ValueError, "There is no precision 'int5'; use 'int8' or 'int4'. Did you mean 'int"),
        (names, 8, TypeError, "n must be 'int8' or 'int4', but got 8."),
        (sizes, 48, ValueError, "n must be 32 or 64, but got 48."),
        (sizes, 32.0, TypeError, "n must be 32 or 64, but got 32.0."),
        (switch, 1, TypeError, "n must be True or False, but got 1."),
    ):
        with pytest.raises(error, match=re.escape(message)):
            choice.check("n", value)


def test_entries_are_named_by_their_places() -> None:
    entries = Entries(3, FEW, "be a sequence of counts", "count")
    assert entries.check("l", np.array([1, 2])) == (1, 2)
    with pytest.raises(ValueError, match="l of count 2 must be an integer from 1 to 12,000, but got 0"):
        entries.check("l", [1, 0])
    for value in ({1, 2}, {1: 2}, "12", 3, np.array(3), torch.tensor(3)):
        with pytest.raises(TypeError, match="l must be a sequence of counts, but got"):
            entries.check("l", value)
    items = Items(1, FEW, "map names to counts")
    assert items.take("l", {"a": 1}) == [("a", 1)]
    with pytest.raises(ValueError, match="at most 1 entries"):
        items.take("l", {"a": 1, "b": 2})
    with pytest.raises(TypeError, match=r"l must map names to counts, but got \[\]"):
        items.take("l", [])
