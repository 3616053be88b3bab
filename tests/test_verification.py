"""Acceptance, a pure function of tensors: its rules, row by row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import Draft
from ssd_generation.decoding.choice import IMPOSSIBLE
from ssd_generation.decoding.verification import accept, accept_known
from ssd_generation.support.tensors import argmax


def drafted(rows: list[list[int]], lengths: list[int] | None = None) -> tuple[torch.Tensor, list[int]]:
    draft = Draft.of_tokens(rows)
    return draft.tokens, draft.lengths if lengths is None else lengths


@pytest.mark.parametrize(
    ("tokens", "choices", "length", "kept", "following"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3, 4),  # all accepted: the bonus token follows
        ([1, 2, 3], [1, 2, 5, 4], 3, 2, 5),  # the target's own choice replaces the first rejected token
        ([1, 2, 3], [5, 2, 3, 4], 3, 0, 5),  # matches after a mismatch do not count
        ([1, 2, 3], [1, 2, 3, 4], 2, 2, 3),  # tokens after the row's draft length are ignored
        ([1, 2, 3], [1, 2, 3, 4], 0, 0, 1),
        ([], [4], 0, 0, 4),  # nothing drafted
        ([1, 2], [1, 2, IMPOSSIBLE], 2, 1, 2),  # the token before it is committed first
        ([1, 2], [1, IMPOSSIBLE, 3], 2, 0, 1),
        ([1, 2], [IMPOSSIBLE, 2, 3], 2, 0, IMPOSSIBLE),
        ([1, 2], [4, IMPOSSIBLE, IMPOSSIBLE], 2, 0, 4),  # rejected tokens may be anything
    ],
)
def test_the_leading_matches_are_kept(
    tokens: list[int], choices: list[int], length: int, kept: int, following: int
) -> None:
    n, token = accept(*drafted([tokens], [length]), torch.tensor([choices]))
    assert (n.item(), token.item()) == (kept, following)


def test_rows_are_judged_on_their_own() -> None:
    n, token = accept(*drafted([[1, 2], [1, 2], [1, 2]]), torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]]))
    assert n.tolist() == [2, 1, 0]
    assert token.tolist() == [3, 0, 0]


@given(st.data())
def test_what_is_taken_is_the_targets(data: st.DataObject) -> None:
    words = st.integers(0, 2)
    rows = data.draw(st.integers(1, 4))
    width = data.draw(st.integers(0, 5))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    tokens = data.draw(st.lists(st.lists(words, min_size=width, max_size=width), min_size=rows, max_size=rows))
    choices = data.draw(st.lists(st.lists(words, min_size=width + 1, max_size=width + 1), min_size=rows, max_size=rows))
    kept, following = accept(*drafted(tokens, lengths), torch.tensor(choices))
    for row in range(rows):
        n = int(kept[row])
        assert 0 <= n <= lengths[row]
        assert [*tokens[row][:n], int(following[row])] == choices[row][: n + 1]
        assert n == lengths[row] or tokens[row][n] != choices[row][n]  # no token too few


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_score_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 3, 1000).to(dtype)
    scores[0, 0, [7, 500]] = 9.0  # of equal scores the first
    scores[1, 1] = -math.inf
    scores[2, 2, [30, 40]] = math.nan
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
    assert torch.equal(argmax(scores[:, 1]), scores[:, 1].argmax(dim=-1))  # not contiguous


@given(
    drafted=st.lists(st.integers(0, 2), max_size=6),
    choices=st.lists(st.sampled_from([0, 1, 2, IMPOSSIBLE]), min_size=7, max_size=7),
)
def test_lists_and_tensors_have_one_rule(drafted: list[int], choices: list[int]) -> None:
    choices = choices[: len(drafted) + 1]
    kept, following = accept(torch.tensor([drafted], dtype=torch.long), [len(drafted)], torch.tensor([choices]))
    found = accept_known(drafted, choices)
    assert found == int(kept) and choices[found] == int(following)
