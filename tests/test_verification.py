"""Acceptance is a pure function of tensors: its rules, row by row, and the distribution it must give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_generation.decoding.verification import accept_greedy, accept_sampled
from ssd_generation.support.tensors import argmax


def one_hot_scores(choices: list[list[int]], vocab: int = 6) -> torch.Tensor:
    """Scores whose argmax is the given token at each position."""
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).float()


@pytest.mark.parametrize(
    ("drafted", "choices", "length", "kept", "following"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3, 4),  # all accepted: the free token
        ([1, 2, 3], [1, 2, 5, 4], 3, 2, 5),  # the target's own choice in place of the first rejected
        ([1, 2, 3], [5, 2, 3, 4], 3, 0, 5),  # matches behind a mismatch do not count
        ([1, 2, 3], [1, 2, 3, 4], 2, 2, 3),  # what stands behind the row's draft length is ignored
        ([1, 2, 3], [1, 2, 3, 4], 0, 0, 1),
    ],
)
def test_greedy_keeps_the_leading_matches(
    drafted: list[int], choices: list[int], length: int, kept: int, following: int
) -> None:
    n, token = accept_greedy(torch.tensor([drafted]), one_hot_scores([choices]), torch.tensor([length]))
    assert (n.item(), token.item()) == (kept, following)


def test_rows_are_judged_on_their_own() -> None:
    drafted = torch.tensor([[1, 2], [1, 2], [1, 2]])
    scores = one_hot_scores([[1, 2, 3], [1, 0, 3], [0, 2, 3]])
    n, token = accept_greedy(drafted, scores, torch.tensor([2, 2, 2]))
    assert n.tolist() == [2, 1, 0]
    assert token.tolist() == [3, 0, 0]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda k: st.tuples(
            st.lists(st.integers(0, 2), min_size=k, max_size=k),
            st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1),
        )
    )
)
def test_sampling_from_one_word_distributions_is_greedy(case: tuple[list[int], list[int]]) -> None:
    drafted, choices = case
    certain = torch.where(one_hot_scores([choices], 3) > 0, 0.0, -math.inf)
    draft_scores = torch.where(one_hot_scores([drafted], 3) > 0, 0.0, -math.inf)
    lengths = torch.tensor([len(drafted)])
    expected = accept_greedy(torch.tensor([drafted]), one_hot_scores([choices], 3), lengths)
    got = accept_sampled(torch.tensor([drafted]), draft_scores, certain, lengths)
    assert [x.tolist() for x in got] == [x.tolist() for x in expected]


def test_sampled_tokens_follow_the_target_distribution() -> None:
    # One drafted token per row: the first token said must be distributed as p_1, whatever q is.
    torch.manual_seed(0)
    rows, vocab = 200_000, 5
    p = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    q = torch.tensor([0.5, 0.1, 0.1, 0.25, 0.05])
    drafted = torch.multinomial(q, rows, replacement=True)[:, None]
    kept, following = accept_sampled(
        drafted, q.log().expand(rows, 1, vocab), p.log().expand(rows, 2, vocab), torch.ones(rows, dtype=torch.long)
    )
    first = torch.where(kept > 0, drafted[:, 0], following)
    frequency = torch.bincount(first, minlength=vocab) / rows
    bound = 4.5 * (p * (1 - p) / rows).sqrt()  # a false alarm in 30,000 runs; the seed is fixed anyway
    assert ((frequency - p).abs() < bound).all(), frequency
    # The acceptance rate is Σ min(p, q).
    assert abs(kept.float().mean().item() - torch.minimum(p, q).sum().item()) < 0.005


def test_equal_distributions_accept_everything() -> None:
    torch.manual_seed(0)
    scores = torch.randn(1000, 4, 7)
    q = scores[:, :3]
    drafted = torch.multinomial(q.softmax(-1).flatten(0, 1), 1).view(1000, 3)
    kept, _ = accept_sampled(drafted, q, scores, torch.full((1000,), 3))
    assert (kept == 3).all()


def test_a_residual_of_nothing_falls_back_to_the_target() -> None:
    # p = q everywhere, and yet the token was "rejected" since it has no mass in either: no NaN, a draw from p.
    scores = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]])
    kept, following = accept_sampled(torch.tensor([[2]]), scores[:, :1], scores, torch.tensor([1]))
    assert kept.item() == 0
    assert following.item() in (0, 1)


def test_nothing_drafted_is_a_plain_draw() -> None:
    scores = torch.tensor([[[0.0, -math.inf, -math.inf]]])
    kept, following = accept_sampled(torch.empty((1, 0), dtype=torch.long), None, scores, torch.tensor([0]))
    assert (kept.item(), following.item()) == (0, 0)


def test_a_forbidden_token_is_never_kept() -> None:
    torch.manual_seed(0)
    rows = 2000
    p = torch.tensor([-math.inf, 0.0, 0.0]).expand(rows, 2, 3)
    q = torch.tensor([5.0, 0.0, 0.0]).expand(rows, 1, 3)
    kept, following = accept_sampled(torch.zeros((rows, 1), dtype=torch.long), q, p, torch.ones(rows, dtype=torch.long))
    assert (kept == 0).all() and (following > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_score_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 3, 1000).to(dtype)
    scores[0, 0, [7, 500]] = 9.0  # equals: the first
    scores[1, 1] = -math.inf
    scores[2, 2, [30, 40]] = math.nan
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
    assert torch.equal(argmax(scores[:, 1]), scores[:, 1].argmax(dim=-1))  # not contiguous
