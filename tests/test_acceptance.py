"""Drafts judged in one pass give the same rounds as real generation, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.structure.skip_mode import SkipMode
from ssd_generation.tuning.acceptance import (
    Acceptance,
    agreements,
    judge,
    judge_rounds,
    replay,
    verify_text,
    why_not_judged,
)
from tiny_models import FAMILIES, VOCAB, prompt, tiny_model

DEPTH = 3
NEW = 40
# Positions computed from a 2-d mask (alibi), and chunked attention: a custom mask has no effect on them.
NOT_JUDGED = {"bloom", "bloom-post-residual", "falcon-alibi", "llama4", "mpt"}
SKIPS = [SkipConfig([], [2]), SkipConfig([1], [1]), SkipConfig([2], [])]


def continuation(model: Any, length: int = 20) -> torch.Tensor:
    ids = prompt(length)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)


def simulated_rounds(matches: torch.Tensor, first: int) -> list[int]:
    """Return the number of tokens that each round of a generation would accept."""
    rounds, at = [], first
    while at + DEPTH < matches.shape[0]:
        accepted = int(matches[at].clamp(min=0).cumprod(dim=0).sum())
        rounds.append(accepted)
        at += accepted + 1
    return rounds


@pytest.mark.parametrize("family", FAMILIES)
def test_judged_rounds_are_those_of_generation(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    reason = why_not_judged(model)
    assert (reason is not None) == (family in NOT_JUDGED), reason
    if reason is not None:
        return
    whole = continuation(model)
    text = verify_text(model, whole, 20)
    keys = [layer.keys.clone() for layer in text.cache.layers]
    some_rejected = 0
    turn = FAMILIES.index(family)
    for skip in (SKIPS[turn % 3], SKIPS[(turn + 1) % 3]):  # each skip set is used with two families in three
        matches, passes, tokens = agreements(model, SkipMode(model, skip), text, range(len(text)), DEPTH)
        assert (passes, tokens) == (1, DEPTH * NEW - DEPTH * (DEPTH - 1) // 2)
        config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=DEPTH))
        ids = whole[:, :20]
        again = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, self_speculative=config
        )
        assert torch.equal(again, whole)
        # The prompt's pass gives the first token; the first round drafts the second.
        expected = simulated_rounds(matches, 1)
        assert model.last_speculation.round_accepted[0][: len(expected)] == expected
        some_rejected += sum(accepted < DEPTH for accepted in expected)
    assert some_rejected > 0
    assert all(torch.equal(layer.keys, before) for layer, before in zip(text.cache.layers, keys, strict=True))


def test_many_rounds_take_several_passes_and_come_to_the_same() -> None:
    model = tiny_model()
    text = verify_text(model, continuation(model), 20)
    draft = SkipMode(model, SKIPS[0])
    at_once, passes, _ = agreements(model, draft, text, range(len(text)), DEPTH)
    assert passes == 1
    starts = [*range(len(text))] * 4
    repeated, passes, _ = agreements(model, draft, text, starts, DEPTH)
    assert passes == 2
    assert torch.equal(repeated, at_once.repeat(4, 1))


def test_what_is_judged_is_what_generation_accepts() -> None:
    model = enable_self_speculative(tiny_model("qwen3"))
    whole = continuation(model)
    text = verify_text(model, whole, 20)
    config = SelfSpeculativeConfig(SKIPS[1], DraftingConfig(policy="fixed", max_draft_length=DEPTH))
    judged = judge(model, config, text, DEPTH, exact_depth=DEPTH)
    ids = whole[:, :20]
    mask = torch.ones_like(ids)
    # A generation that continues beyond the text drafts all of it in rounds of full length.
    model.generate(ids, attention_mask=mask, max_new_tokens=NEW + 9, do_sample=False, self_speculative=config)
    counted, at = Acceptance(), 1
    for accepted in model.last_speculation.round_accepted[0]:
        row = [1] * accepted + [0] * (accepted < DEPTH) + [-1] * (DEPTH - accepted - 1)
        inside = max(NEW - at, 0)
        counted.add_rounds(torch.tensor([row[:inside] + [-1] * (DEPTH - inside)]))
        at += accepted + 1
        if at >= NEW:
            break
    assert (judged.tried, judged.accepted) == (counted.tried, counted.accepted)
    assert 0 < sum(judged.accepted) < sum(judged.tried)
    assert (judged.passes, judged.tokens) == (1, DEPTH * (NEW - 1) - DEPTH * (DEPTH - 1) // 2)
    cheap = judge(model, config, text, DEPTH)
    assert (cheap.passes, cheap.tokens) == (1, NEW - 1)
    assert cheap.tried[0] > 0 and judge_rounds(model, config, text, range(NEW), 1).tried == [NEW]
    with pytest.raises(ValueError, match="depth=2 and exact_depth=3"):
        judge(model, config, text, 2, 3)


@given(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=30), st.integers(1, 5))
def test_replayed_rounds_follow_one_another(right: list[int], depth: int) -> None:
    rounds, at = [], 0
    while at < len(right):
        row = [right[at + d] if at + d < len(right) else -1 for d in range(depth)]
        rounds.append(row)
        at += next((d for d, r in enumerate(row) if r != 1), depth) + 1
    first = torch.tensor(right)[:, None]
    assert replay(first, depth).tolist() == rounds
    # The same from matches judged to any depth from 1 on.
    for exact in range(1, depth + 1):
        known = torch.tensor([[*right, *[-1] * depth][at : at + exact] for at in range(len(right))])
        assert replay(known, depth).tolist() == rounds


def test_a_text_of_one_token_has_no_rounds() -> None:
    model = tiny_model()
    text = verify_text(model, continuation(model)[:, :21], 20)
    judged = judge(model, SelfSpeculativeConfig(), text, depth=2)
    assert (sum(judged.tried), judged.passes) == (0, 0) and judged.by_depth(1.0) == [0.5, 0.5]


def test_nothing_left_out_is_always_accepted() -> None:
    model = tiny_model()
    text = verify_text(model, continuation(model), 20)
    judged = judge(model, SelfSpeculativeConfig(), text, depth=5)
    assert judged.by_depth() == [1.0] * 5


def test_low_bit_copies_are_judged_too() -> None:
    model = tiny_model(hidden_size=64, intermediate_size=64)
    text = verify_text(model, continuation(model), 20)
    judged = judge(model, SelfSpeculativeConfig(precision="int8"), text, depth=4, exact_depth=4)
    assert 0.5 < judged.first() <= 1.0
    assert (
        judge(model, SelfSpeculativeConfig(precision="int4"), text, depth=4, exact_depth=4).accepted != judged.accepted
    )


@given(
    st.lists(
        st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3),
        min_size=1,
        max_size=12,
    )
)
def test_counts_are_those_of_rounds_that_end_at_the_first_rejection(rounds: list[list[int]]) -> None:
    acceptance = Acceptance()
    acceptance.add_rounds(torch.tensor(rounds))
    for depth in range(3):
        reached = [r for r in rounds if all(r[:depth])]
        assert acceptance.tried[depth] == len(reached)
        assert acceptance.accepted[depth] == sum(r[depth] for r in reached)
    again = Acceptance.from_dict(acceptance.to_dict())
    again.add(acceptance)
    assert again.tried == [2 * n for n in acceptance.tried]
    assert again.by_depth() == acceptance.by_depth()
    assert all(0 <= rate <= 1 for rate in acceptance.by_depth(4.0))


def test_what_lies_beyond_the_text_is_not_counted() -> None:
    acceptance = Acceptance()
    acceptance.add_rounds(torch.tensor([[1, 1, -1], [1, -1, -1]]))
    assert (acceptance.tried, acceptance.accepted) == ([2, 1, 0], [2, 1, 0])


@pytest.mark.parametrize("prompt_length", [0, 12])
def test_a_text_needs_a_prompt_and_a_continuation(prompt_length: int) -> None:
    with pytest.raises(ValueError, match=f"prompt_length={prompt_length}"):
        verify_text(tiny_model(), prompt(12), prompt_length)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="the model's context has 512"):
        verify_text(tiny_model(), prompt(600, vocab=VOCAB), 100)


def test_an_attention_implementation_without_masks_is_named() -> None:
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in str(why_not_judged(model))
