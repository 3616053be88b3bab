"""Random numbers of sampling: those of torch's generator, drawn by a kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_generation.decoding.choice import SampledChoice
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops import exponentials
from ssd_generation.native.ops.exponentials import draw_exponentials

FEW = exponentials._LEAST

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many numbers the kernel draws, each time; what torch draws is asked of torch as ever."""
    assert exponentials._draws_as_torch()
    drawn, fill = [], exponentials._fill

    def noting(numbers: torch.Tensor, *others: Any) -> torch.Tensor | None:
        drawn.append(numbers.numel())
        return fill(numbers, *others)

    monkeypatch.setattr(exponentials, "_fill", noting)
    return drawn


def generators(seed: int, words: int = 0) -> tuple[torch.Generator, torch.Generator]:
    """Return two generators in the same state, from which 32-bit words have been taken."""
    one, other = (torch.Generator("cpu").manual_seed(seed) for _ in range(2))
    for generator in (one, other):
        torch.empty(words, dtype=torch.int32).random_(generator=generator)
    return one, other


def same(numbers: torch.Tensor, theirs: torch.Generator, ours: torch.Generator) -> bool:
    """Draw by torch and by the package; tell whether numbers and states are the same."""
    expected = torch.empty_like(numbers).exponential_(generator=theirs)
    found = draw_exponentials(numbers, ours)
    assert found is numbers
    return torch.equal(found, expected) and torch.equal(theirs.get_state(), ours.get_state())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    words=st.integers(0, 1300),
    counts=st.lists(st.integers(FEW, 4 * FEW), min_size=1, max_size=3),
    threads=st.integers(1, 3),
)
def test_they_are_torchs_wherever_the_generator_is(seed: int, words: int, counts: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        theirs, ours = generators(seed, words)
        for count in counts:
            assert same(torch.empty(count), theirs, ours)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(3, 50_001), (64, 1_248), (1, 312 * 16)], ids=str)
@pytest.mark.parametrize("words", [0, 1, 623, 624])
def test_they_are_torchs_in_any_shape(shape: tuple[int, int], words: int, by_kernel: list[int]) -> None:
    assert same(torch.empty(shape), *generators(7, words))
    assert by_kernel == [math.prod(shape)]


def test_doubtful_numbers_are_the_c_librarys(monkeypatch: pytest.MonkeyPatch, by_kernel: list[int]) -> None:
    monkeypatch.setattr(exponentials, "_WINDOW", 1 << 15)  # one number of 8,000
    asked = []

    def noting(x: float, log1p: Any = math.log1p) -> float:
        asked.append(x)
        return float(log1p(x))

    monkeypatch.setattr(exponentials.math, "log1p", noting)  # type: ignore[attr-defined]
    assert same(torch.empty(100_000), *generators(1))
    assert 2 <= len(asked) <= 60 and by_kernel == [100_000]


def test_a_number_of_the_c_library_is_stored_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exponentials, "_WINDOW", 1 << 15)
    theirs, ours = generators(1)
    expected = torch.empty(100_000).exponential_(generator=theirs)
    monkeypatch.setattr(exponentials.math, "log1p", lambda x, log1p=math.log1p: log1p(x) * 2)  # type: ignore[attr-defined]
    found = draw_exponentials(torch.empty(100_000), ours)
    other = found != expected
    assert 2 <= other.sum() <= 60 and torch.allclose(found[other], 2 * expected[other])


def test_too_many_doubtful_numbers_are_all_torchs(monkeypatch: pytest.MonkeyPatch, by_kernel: list[int]) -> None:
    monkeypatch.setattr(exponentials, "_WINDOW", 1 << 27)  # half of all
    assert same(torch.empty(FEW), *generators(1)) and by_kernel == [FEW]


@pytest.mark.parametrize(
    "numbers",
    [torch.empty(FEW - 1), torch.empty(FEW, dtype=torch.float64), torch.empty(2, FEW).T, torch.empty(0)],
    ids=["few", "float64", "transposed", "none"],
)
def test_other_numbers_are_left_to_torch(numbers: torch.Tensor, by_kernel: list[int]) -> None:
    assert same(numbers, *generators(1)) and not by_kernel


def test_where_numbers_are_not_torchs_torch_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(numbers: torch.Tensor, state: torch.Tensor, _: int) -> torch.Tensor:
        numbers.fill_(1.0)
        return state

    monkeypatch.setattr(exponentials, "_fill", wrong)
    exponentials._draws_as_torch.cache_clear()
    try:
        assert not exponentials._draws_as_torch() and same(torch.empty(FEW), *generators(1))
    finally:
        exponentials._draws_as_torch.cache_clear()


def test_a_state_of_another_layout_is_torchs_own(monkeypatch: pytest.MonkeyPatch, by_kernel: list[int]) -> None:
    monkeypatch.setattr(exponentials, "_STATE", 5048)
    exponentials._draws_as_torch.cache_clear()
    try:
        assert same(torch.empty(FEW), *generators(1)) and not by_kernel
    finally:
        exponentials._draws_as_torch.cache_clear()


@pytest.mark.parametrize("vocabulary", [1_500, 20_000])
def test_sampled_tokens_are_multinomials(vocabulary: int, by_kernel: list[int]) -> None:
    scores = torch.randn(6, 3, vocabulary, generator=torch.Generator("cpu").manual_seed(0))
    torch.manual_seed(5)
    expected = [torch.multinomial(step.softmax(-1), 1)[:, 0].tolist() for step in scores]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    choice = SampledChoice(3, torch.device("cpu"))
    found = [choice.choose(step[:, None], [at] * 3)[:, 0].tolist() for at, step in enumerate(scores)]
    choice.end(6)
    assert found == expected and torch.equal(torch.get_rng_state(), state)
    assert by_kernel == [3 * vocabulary] * 6
