"""torch's threads wait by sleeping while other processes use the same cores, and only then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, enable_self_speculative
from ssd_generation.native import waiting
from ssd_generation.native.codegen import pool
from ssd_generation.native.waiting import ThreadsAtWork, sleeping_threads
from tiny_models import prompt, tiny_model

CPU = torch.device("cpu")
ALONE, CROWDED = 20, 400  # cores taken away per second from two threads


class Machine:
    """A mock clock and count of cores taken away."""

    def __init__(self) -> None:
        self.now, self.taken = 0.0, 0

    def goes_on(self, seconds: float, each_second: int) -> None:
        self.now += seconds
        self.taken += int(seconds * each_second)

    def threads(self, device: torch.device = CPU) -> ThreadsAtWork:
        return ThreadsAtWork(device, clock=lambda: self.now, taken=lambda: self.taken)


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the list of events in order: "sleep" and "wake"."""
    events: list[str] = []

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        events.append("sleep")
        yield
        events.append("wake")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(waiting, "sleeping_threads", watched)
    monkeypatch.setattr(waiting, "_cores_taken", lambda: 0)  # independent of this machine's load
    monkeypatch.setattr(ThreadsAtWork, "_crowded", False)
    yield events
    torch.set_num_threads(before)


def test_alone_nothing_is_done(asleep: list[str]) -> None:
    machine = Machine()
    with machine.threads() as threads:
        for _ in range(100):
            machine.goes_on(0.1, ALONE)
            threads.look()
    assert asleep == []


def test_next_to_others_threads_sleep_until_they_have_gone(asleep: list[str]) -> None:
    machine = Machine()
    with machine.threads() as threads:
        for seconds, each_second, then in (
            (0.1, CROWDED, []),  # too short to judge
            (0.2, CROWDED, ["sleep"]),
            (0.3, 7000, ["sleep"]),
            (0.3, ALONE, ["sleep", "wake"]),
            (0.3, CROWDED, ["sleep", "wake", "sleep"]),
        ):
            machine.goes_on(seconds, each_second)
            threads.look()
            assert asleep == then
    assert asleep == ["sleep", "wake"] * 2  # the threads wake when the call ends


def test_the_next_call_begins_as_the_last_one_ended(asleep: list[str]) -> None:
    machine = Machine()
    with machine.threads():
        machine.goes_on(0.4, CROWDED)
    assert asleep == []  # no second round followed
    with machine.threads():
        assert asleep == ["sleep"]
        machine.goes_on(0.4, ALONE)
    assert asleep == ["sleep", "wake"]
    with machine.threads():
        pass
    assert asleep == ["sleep", "wake"]


def test_a_short_call_says_nothing(asleep: list[str]) -> None:
    machine = Machine()
    with machine.threads():
        machine.goes_on(0.05, 7000)
    with machine.threads():
        assert asleep == []


def test_where_there_is_nothing_to_wait_for(asleep: list[str]) -> None:
    machine = Machine()
    for threads in (machine.threads(torch.device("meta")), ThreadsAtWork(CPU, lambda: machine.now, lambda: None)):
        with threads:
            machine.goes_on(1, 7000)
            threads.look()
    torch.set_num_threads(1)
    with machine.threads() as threads:
        machine.goes_on(1, 7000)
        threads.look()
    assert asleep == []


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_call_leaves_threads_as_they_were(how: str, asleep: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = enable_self_speculative(tiny_model("llama"))
    nothing = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))

    class Streamer:
        def put(self, value: Any) -> None:
            assert asleep in (["sleep"], [])  # `[]` while the prompt is streamed
            if how == "fails" and asleep:
                raise KeyError("stop")

        def end(self) -> None:
            assert asleep == ["sleep", "wake"]

    model.generate(prompt(), self_speculative=nothing, max_new_tokens=12)  # one-time checks are done
    monkeypatch.setattr(ThreadsAtWork, "_crowded", True)
    assert asleep == []
    with pytest.raises(KeyError) if how == "fails" else contextlib.nullcontext():
        model.generate(prompt(), self_speculative=nothing, streamer=Streamer(), max_new_tokens=12)
    assert asleep == ["sleep", "wake"]


def threads_of_this_process() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
def test_gnus_threads_sleep_because_there_are_more_than_cores() -> None:
    library = pool.openmp_library()
    if library is None or hasattr(library, "kmp_set_blocktime"):
        pytest.skip("another OpenMP")
    torch.ones((300, 300)) @ torch.ones((300, 300))  # starts torch's own threads
    cores = len(os.sched_getaffinity(0))
    before, mine = threads_of_this_process(), threading.active_count()
    with sleeping_threads():
        # One of the new threads owns the others, which OpenMP counts together with torch's.
        added = len(threads_of_this_process() - before) - 1
        assert torch.get_num_threads() + added > cores
    assert threading.active_count() == mine
    deadline = time.monotonic() + 120
    while len(threads_of_this_process() - before) > 0:  # they end on their own
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with sleeping_threads(), sleeping_threads():
        pass


def test_llvms_threads_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [200]
    library = SimpleNamespace(kmp_set_blocktime=times.append, kmp_get_blocktime=lambda: times[-1])
    monkeypatch.setattr(waiting, "openmp_library", lambda: library)
    with pytest.raises(KeyError), sleeping_threads():
        assert times[-1] == 0
        raise KeyError
    assert times == [200, 0, 200]


def test_without_openmp_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "openmp_library", lambda: None)
    before = threading.active_count()
    with sleeping_threads():
        assert threading.active_count() == before
