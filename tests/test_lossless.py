"""The promise: greedy text is the target's own, token for token, for every skip set and every kind of call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured import passes
from ssd_generation.forward.captured.cache_attention import CacheAttention
from ssd_generation.support.versions import CACHE
from tiny_models import FAMILIES, LAYERS, WINDOW, left_padded, prompt, tiny_model

SKIPS = [
    SkipConfig(attention=[1], mlp=[2]),
    SkipConfig(attention=[0, 1, 2], mlp=[0, 3]),  # transformers reads the cache's length from layer 0
    SkipConfig(attention=[1, 3], mlp=[1, 3]),  # whole layers
    SkipConfig(attention=[1, 3]),  # gemma2, gemma3, gpt_oss: all full-attention layers
    SkipConfig(attention=[0, 2]),  # all their sliding layers
]
NEW = 16
FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
CONFIDENT = DraftingConfig(policy="confidence", max_draft_length=6, threshold=0.3)

_MODELS: dict[str, PreTrainedModel] = {}


def enabled(family: str) -> PreTrainedModel:
    """Return the family's model, made once for this file: no test changes it."""
    if family not in _MODELS:
        _MODELS[family] = enable_self_speculative(tiny_model(family))
    return _MODELS[family]


def generate(
    model: PreTrainedModel, config: SelfSpeculativeConfig | None, inputs: dict[str, Any], **kwargs: Any
) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(**inputs, **options, self_speculative=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_targets_text(family: str) -> None:
    model = enabled(family)
    long = WINDOW * 3 + 2  # longer than a sliding window
    layouts: list[dict[str, Any]] = [{"input_ids": prompt(long)}, left_padded([5, long, 11])]
    expected = [generate(model, None, inputs) for inputs in layouts]
    # Each skip set, both layouts and both policies with every family; their combinations are spread over the families.
    turn = FAMILIES.index(family)
    for number, skip in enumerate(SKIPS):
        padded = (number + turn) % 2
        drafting = (FIXED, CONFIDENT)[(number // 2 + turn // 2) % 2]
        got = generate(model, SelfSpeculativeConfig(skip, drafting), layouts[padded])
        assert torch.equal(got, expected[padded]), (skip, drafting, padded)
        assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_row_run_as_it_is_gives_the_targets_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test above runs captured passes where a family has them.
    monkeypatch.setattr(passes, "why_not_captured", lambda model, **_: "a test says so")
    model = enabled(family)
    inputs = {"input_ids": prompt(WINDOW * 3 + 2)}
    expected = generate(model, None, inputs)
    turn = FAMILIES.index(family)
    for number, drafting in enumerate((FIXED, CONFIDENT)):
        skip = SKIPS[(turn + 2 * number) % len(SKIPS)]
        got = generate(model, SelfSpeculativeConfig(skip, drafting), inputs)
        assert torch.equal(got, expected), skip
        assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_skip_set_is_always_accepted(family: str) -> None:
    model = enabled(family)
    config = SelfSpeculativeConfig(SkipConfig(), DraftingConfig(policy="fixed", max_draft_length=3))
    # Long enough to exhaust the cache's spare room in the middle of a draft.
    generate(model, config, {"input_ids": prompt(WINDOW * 2 + 3)}, max_new_tokens=61)
    statistics = model.last_speculation
    assert statistics.acceptance_rate == 1.0
    # 1 token from the prompt's pass, and 60 in rounds of 4
    assert (statistics.rounds, statistics.target_passes, statistics.draft_passes) == (15, 16, 45)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_cache_gives_the_targets_text(family: str) -> None:
    # Two turns of a conversation: the second reuses the cache of the first, whether drafted or plain.
    model = enabled(family)
    config = SelfSpeculativeConfig(SKIPS[1], FIXED)
    for rows in (1, 2):
        first = prompt(WINDOW + 5, rows)
        expected = generate(model, None, {"input_ids": first}, return_dict_in_generate=True, max_new_tokens=8)
        got = generate(model, config, {"input_ids": first}, return_dict_in_generate=True, max_new_tokens=8)
        assert torch.equal(got.sequences, expected.sequences)
        assert got[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
        assert [type(layer) for layer in got[CACHE].layers] == [type(layer) for layer in expected[CACHE].layers]
        second = torch.cat((got.sequences, prompt(4, rows, seed=5)), dim=1)
        wanted = generate(model, None, {"input_ids": second}, **{CACHE: expected[CACHE]}, max_new_tokens=8)
        # A drafted or a plain turn after a drafted one: each with either number of rows, in half of the families.
        again = (None, config)[(rows + FAMILIES.index(family)) % 2]
        text = generate(model, again, {"input_ids": second}, **{CACHE: got[CACHE]}, max_new_tokens=8)
        assert torch.equal(text, wanted), (rows, again)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_a_returned_cache_holds_what_plain_decoding_leaves(family: str) -> None:
    model = enabled(family)
    inputs = left_padded([17, 9, 12])
    expected = generate(model, None, inputs, return_dict_in_generate=True)
    got = generate(model, SelfSpeculativeConfig(SKIPS[0], FIXED), inputs, return_dict_in_generate=True)
    real = torch.cat((inputs["attention_mask"].bool(), torch.ones((3, NEW - 1), dtype=torch.bool)), dim=1)
    for ours, theirs in zip(got[CACHE].layers, expected[CACHE].layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length()
        mask = real[:, -theirs.keys.shape[2] :]
        # The keys and values of the left padding are never read.
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(a.transpose(1, 2)[mask], b.transpose(1, 2)[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_end_of_sequence_inside_a_block_ends_the_text_there(family: str, rows: int) -> None:
    model = enabled(family)
    inputs = {"input_ids": prompt(14, rows)}
    free = generate(model, None, inputs)[:, 14:]
    config = SelfSpeculativeConfig(SkipConfig(), DraftingConfig(policy="fixed", max_draft_length=7))
    ended_early = 0
    for token in free[0, 2:12].unique().tolist():
        for eos in (token, [token, int(free[-1, 5])]):
            expected = generate(model, None, inputs, eos_token_id=eos, pad_token_id=0)
            got = generate(model, config, inputs, eos_token_id=eos, pad_token_id=0)
            assert torch.equal(got, expected), eos
            ended_early += expected.shape[1] < 14 + NEW
    assert ended_early > 0 or rows > 1


def test_rows_run_at_their_own_speed() -> None:
    model = enabled("llama")
    generate(model, SelfSpeculativeConfig(SKIPS[0], FIXED), {"input_ids": prompt(10, 4)})
    rounds = model.last_speculation.round_accepted
    # The rows' accepted numbers differ, and yet the batch needs fewer passes than tokens.
    assert len({tuple(row) for row in rounds}) == 4
    assert any(len({row[i] for row in rounds if i < len(row)}) > 1 for i in range(4))
    assert model.last_speculation.target_passes < NEW


@settings(max_examples=25)
@given(
    attention=st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1),
    mlp=st.sets(st.integers(0, LAYERS - 1)),
    length=st.integers(1, 9),
    policy=st.sampled_from(["fixed", "confidence"]),
    rows=st.integers(1, 3),
    new_tokens=st.integers(1, 20),
    seed=st.integers(0, 5),
    family=st.sampled_from(["llama", "gemma2", "gpt_oss", "bloom", "falcon-alibi"]),
)
def test_any_skip_set_and_draft_length(
    attention: set[int], mlp: set[int], length: int, policy: str, rows: int, new_tokens: int, seed: int, family: str
) -> None:
    model = enabled(family)
    config = SelfSpeculativeConfig(
        SkipConfig(attention=sorted(attention), mlp=sorted(mlp)),
        DraftingConfig(policy=policy, max_draft_length=length, threshold=0.4),
    )
    inputs = {"input_ids": prompt(7 + seed, rows, seed)}
    expected = generate(model, None, inputs, max_new_tokens=new_tokens)
    assert torch.equal(generate(model, config, inputs, max_new_tokens=new_tokens), expected)
    statistics = model.last_speculation
    assert statistics.new_tokens == [new_tokens] * rows
    assert all(len(row) == new_tokens for row in statistics.token_sources)
    assert statistics.accepted_tokens <= statistics.drafted_tokens


def test_drafting_leaves_the_targets_cache_alone() -> None:
    # The draft reads the prefix in place; the target's keys and values stay the same tensors with the same numbers.
    model = enabled("gemma2")
    from ssd_generation.drafting.self_drafter import SelfDrafter

    looked = []
    original = SelfDrafter.propose

    def watched(self: Any, texts: Any, limits: Any) -> Any:
        cache = texts.context.cache
        before = [(layer.keys.clone(), layer.values.clone(), layer.get_seq_length()) for layer in cache.layers]
        draft = original(self, texts, limits)
        for (keys, values, length), layer in zip(before, cache.layers, strict=True):
            assert layer.get_seq_length() == length
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        looked.append(draft.tokens.shape[1])
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfDrafter, "propose", watched)
        generate(model, SelfSpeculativeConfig(SKIPS[1], FIXED), {"input_ids": prompt(20, 2)}, max_new_tokens=30)
    assert len(looked) > 5


def test_the_prefix_is_not_copied_to_draft() -> None:
    # A drafting pass attends to keys in the very storage of the target's keys.
    model = enabled("llama")
    from ssd_generation.cache import buffered_layers as cache

    storages: list[bool] = []
    original = cache._DraftLayer.update
    played_back = CacheAttention.begin

    def watched_playback(self: Any, layers: Any, *others: Any) -> None:
        played_back(self, layers, *others)
        storages.extend(
            room is None or room.data_ptr() == layer.keys.data_ptr()
            for room, layer in zip(self.key_buffers, layers, strict=True)
        )

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = original(self, *args, **kwargs)
        storages.append(keys.untyped_storage().data_ptr() == self.base.keys.untyped_storage().data_ptr())
        return keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache._DraftLayer, "update", watched)
        patch.setattr(CacheAttention, "begin", watched_playback)
        for inputs in ({"input_ids": prompt(20)}, left_padded([5, 20])):  # captured, and run eagerly
            storages.clear()
            generate(model, SelfSpeculativeConfig(SKIPS[0], FIXED), inputs, max_new_tokens=40)
            assert len(storages) > 20 and all(storages)


def test_the_number_of_passes_is_what_the_statistics_say() -> None:
    model = enabled("llama")
    passes = []
    handle = model.register_forward_hook(lambda module, args, output: passes.append(output.logits.shape[1]))
    try:
        for _ in range(2):  # the model check precedes the first one
            passes.clear()
            generate(model, SelfSpeculativeConfig(SKIPS[0], FIXED), {"input_ids": prompt(20)}, max_new_tokens=40)
    finally:
        handle.remove()
    statistics = model.last_speculation
    assert len(passes) == statistics.target_passes + statistics.draft_passes
    assert statistics.target_passes == statistics.rounds + 1
    assert statistics.draft_passes == statistics.drafted_tokens
