"""Interleaved timing of methods: the order of the calls, the clock, and ratios round by round."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ssd_generation.harness.results import Timing, Timings
from ssd_generation.harness.run import Turn, interleaved, interleaving, rotated, timed


@pytest.mark.parametrize(("number", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc"), (4, "bca"), (5, "cab")])
def test_each_method_comes_first_in_turn(number: int, order: str) -> None:
    assert rotated("abc", number) == list(order)


def test_warm_up_comes_in_rounds_and_does_not_count() -> None:
    turns = list(interleaved(["plain", "own"], rounds=2, warm_up=2))
    assert turns[:4] == [Turn("plain", 0, True), Turn("own", 0, True)] * 2
    assert turns[4:] == [Turn("plain", 0), Turn("own", 0), Turn("own", 1), Turn("plain", 1)]
    assert list(interleaved(["plain"], rounds=0, warm_up=0)) == [] == list(interleaved([], rounds=0))


def test_a_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5])
    monkeypatch.setattr(interleaving, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert timed(torch.device("cpu"), divmod, 7, 3) == ((2, 1), 2.5)


def test_ratios_are_of_the_same_round() -> None:
    timings = Timings(["plain", "own"], reference="plain")
    for plain, own in ((1.0, 0.5), (4.0, 1.0)):  # the machine slows down
        timings.add("plain", 8, plain)
        timings.add("own", 8, own)
    assert timings.seconds("plain") == (1.0, 4.0)
    assert timings.ratios("own") == (2.0, 4.0) and timings.ratios("plain") == (1.0, 1.0)
    # Texts of different length are compared by tokens per second.
    assert Timing(6, 2.0).ratio_to(Timing(2, 1.0)) == 1.5
