"""Layers with spare room hold the same as transformers' own layers, and a draft sees the right keys and values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ssd_generation.cache.buffered_layers import (
    BufferedLayer,
    BufferedSlidingLayer,
    DraftCache,
    GhostLayer,
    add_buffers,
    drop_buffers,
    move_rows,
    trim_windows,
)

WINDOW = 7


def states(count: int, seed: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Keys and values of different width, as in multi-head latent attention.
    return torch.randn((rows, 3, count, 4), generator=generator), torch.randn((rows, 3, count, 5), generator=generator)


def pair(sliding: bool) -> tuple[Any, Any]:
    if sliding:
        theirs = DynamicSlidingWindowLayer(WINDOW)
        theirs.activate_past_recording()
        return BufferedSlidingLayer(WINDOW), theirs
    return BufferedLayer(), DynamicLayer()


def same(ours: Any, theirs: Any) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for query in (1, 3):
        assert ours.get_mask_sizes(query) == theirs.get_mask_sizes(query)
    width = min(theirs.keys.shape[2], ours.keys.shape[2])
    assert width == (min(theirs.get_seq_length(), WINDOW - 1) if ours.is_sliding else theirs.get_seq_length())
    assert torch.equal(
        ours.keys[:, :, -width:] if width else ours.keys, theirs.keys[:, :, theirs.keys.shape[2] - width :]
    )
    assert torch.equal(
        ours.values[:, :, -width:] if width else ours.values, theirs.values[:, :, theirs.values.shape[2] - width :]
    )


@settings(max_examples=60)
@given(
    sliding=st.booleans(),
    # Each round: number of tokens in the pass, and of those rolled back.
    rounds=st.lists(
        st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), min_size=1, max_size=30
    ),
)
def test_updates_and_crops_as_in_transformers(sliding: bool, rounds: list[tuple[int, int]]) -> None:
    ours, theirs = pair(sliding)
    for seed, (count, back) in enumerate(rounds):
        keys, values = states(count, seed)
        mine, yours = ours.update(keys, values), theirs.update(keys, values)
        assert torch.equal(mine[0], yours[0]) and torch.equal(mine[1], yours[1])
        assert ours.get_mask_sizes(2) == theirs.get_mask_sizes(2)
        ours.crop(-back)
        theirs.crop(-back)
        same(ours, theirs)


@pytest.mark.parametrize("sliding", [False, True])
def test_a_pass_of_one_token_copies_nothing(sliding: bool) -> None:
    layer, _ = pair(sliding)
    layer.update(*states(20, 0))
    room = layer.key_buffer.data_ptr()
    moved = 0
    for seed in range(30):
        layer.update(*states(1, seed))
        moved += layer.key_buffer.data_ptr() != room
        room = layer.key_buffer.data_ptr()
    assert moved <= 1


@pytest.mark.parametrize("sliding", [False, True])
def test_what_transformers_does_to_a_layer_is_followed(sliding: bool) -> None:
    for act in (
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
        lambda layer: layer.batch_repeat_interleave(3),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.offload(),
    ):
        ours, theirs = pair(sliding)
        for layer in (ours, theirs):
            layer.update(*states(11, 1))
            layer.crop(-2)
            layer.crop(0)
            act(layer)
        same(ours, theirs)
        rows = theirs.keys.shape[0]
        for layer in (ours, theirs):
            layer.update(*states(2, 5, rows))
            layer.crop(0)
        same(ours, theirs)
        ours.reset()
        assert ours.get_seq_length() == 0 and not ours.is_initialized
        ours.update(*states(3, 1))
        assert ours.get_seq_length() == 3


@pytest.mark.parametrize("sliding", [False, True])
def test_layers_can_be_copied_and_pickled(sliding: bool) -> None:
    layer, _ = pair(sliding)
    layer.update(*states(11, 1))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.keys, layer.keys) and other.get_seq_length() == 11
        other.update(*states(1, 2))
        assert layer.get_seq_length() == 11


def test_a_positive_crop_is_refused() -> None:
    layer, _ = pair(False)
    layer.update(*states(5, 0))
    with pytest.raises(ValueError, match="positive number"):
        layer.crop(2)


def mixed_cache(length: int, rows: int = 2) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [
        DynamicSlidingWindowLayer(WINDOW),
        DynamicLayer(),
        DynamicSlidingWindowLayer(WINDOW),
        DynamicLayer(),
    ]
    for index, layer in enumerate(cache.layers):
        layer.update(*states(length, index, rows))
    return cache


def contents(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    return [(layer.keys.clone(), layer.values.clone(), layer.get_seq_length()) for layer in cache.layers]


def test_a_buffer_is_added_and_dropped_without_a_copy() -> None:
    cache = mixed_cache(15)
    before, types = contents(cache), [type(layer) for layer in cache.layers]
    add_buffers(cache)
    assert all(isinstance(layer, BufferedLayer) for layer in cache.layers)
    pointers = [layer.keys.data_ptr() for layer in cache.layers]
    drop_buffers(cache)
    assert [type(layer) for layer in cache.layers] == types
    assert [layer.keys.data_ptr() for layer in cache.layers] == pointers
    for (keys, values, length), layer in zip(before, cache.layers, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values) and layer.get_seq_length() == length


def test_layers_of_other_classes_stay() -> None:
    class Own(DynamicLayer):  # type: ignore[misc]
        pass

    cache = mixed_cache(5)
    cache.layers[1] = Own()
    cache.layers[1].update(*states(5, 1))
    add_buffers(cache)
    assert type(cache.layers[1]) is Own
    draft = DraftCache(cache, frozenset())
    before = contents(cache)
    for index in range(4):
        keys, _ = draft.update(*states(2, 9), index)
        assert keys.shape[2] == 7
    draft.rewind()
    assert draft.get_seq_length(1) == 5
    for (keys, values, _), layer in zip(before, cache.layers, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@settings(max_examples=40)
@given(
    prefix=st.integers(1, 40),
    drafts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=30), min_size=1, max_size=3),
    skipped=st.sets(st.integers(0, 3), max_size=3),
)
def test_a_draft_sees_the_prefix_and_itself(prefix: int, drafts: list[list[int]], skipped: set[int]) -> None:
    cache = mixed_cache(prefix)
    add_buffers(cache)
    before = contents(cache)
    draft = DraftCache(cache, frozenset(skipped))
    for steps in drafts:
        draft.rewind()
        plain = mixed_cache(prefix)
        plain.activate_past_recording()
        for seed, count in enumerate(steps):
            live = [i for i in range(4) if i not in skipped]
            for index in range(4):
                # A skipped layer answers from a live one of its kind, or for itself as the plain cache does.
                assert draft.get_mask_sizes(count, index) == plain.get_mask_sizes(count, index)
                assert draft.get_seq_length(index) == plain.get_seq_length(index)
            assert draft.is_sliding == plain.is_sliding
            for index in range(4):
                theirs = plain.update(*states(count, seed), index)
                if index in live:
                    ours = draft.update(*states(count, seed), index)
                    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    for (keys, values, length), layer in zip(before, cache.layers, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values) and layer.get_seq_length() == length


def test_a_ghost_refuses_to_hold_anything() -> None:
    cache = mixed_cache(5)
    add_buffers(cache)
    draft = DraftCache(cache, frozenset({0, 2}))  # all sliding layers
    assert isinstance(draft.layers[0], GhostLayer) and draft.layers[0].is_sliding
    with pytest.raises(RuntimeError, match="filled in draft mode"):
        draft.update(*states(1, 0), 0)


@settings(max_examples=40)
@given(data=st.data())
def test_rows_keep_their_own_tokens_when_they_move(data: st.DataObject) -> None:
    # Each row accepts a different number of tokens per round; its window must hold its last tokens at the right.
    rows, block = 3, 5
    cache = mixed_cache(1, rows)
    add_buffers(cache)
    own: list[list[list[torch.Tensor]]] = [
        [[layer.keys[row, :, 0].clone()] for row in range(rows)] for layer in cache.layers
    ]
    shifts, slots = [0] * rows, 1
    for seed in range(data.draw(st.integers(1, 12))):
        accepted = data.draw(st.lists(st.integers(0, block), min_size=rows, max_size=rows))
        for index, layer in enumerate(cache.layers):
            keys, values = states(block, 10 * seed + index, rows)
            layer.update(keys, values)
            for row in range(rows):
                own[index][row] += [keys[row, :, i] for i in range(accepted[row])]
        lengths = [slots - shift + n for shift, n in zip(shifts, accepted, strict=True)]
        slots = max(lengths)
        new = [slots - length for length in lengths]
        move_rows(cache, [a - b for a, b in zip(new, shifts, strict=True)], slots)
        shifts = new
        for index, layer in enumerate(cache.layers):
            assert layer.get_seq_length() == slots
            for row in range(rows):
                count = min(len(own[index][row]), WINDOW - 1 if layer.is_sliding else slots)
                expected = torch.stack(own[index][row][-count:], dim=1)
                assert torch.equal(layer.keys[row, :, layer.keys.shape[2] - count :], expected)


def test_rows_of_a_foreign_layer_cannot_move() -> None:
    cache = mixed_cache(5)
    with pytest.raises(ValueError, match="one prompt at a time"):
        move_rows(cache, [0, 1], 5)
    move_rows(cache, [0, 0], 4)
    assert cache.get_seq_length() == 4


def test_a_long_prompts_windows_are_trimmed() -> None:
    cache = mixed_cache(400)
    cache.layers[0].keys = torch.zeros(2, 3, 400, 4)
    cache.layers[0].values = torch.zeros(2, 3, 400, 5)
    add_buffers(cache)
    trim_windows(cache)
    assert cache.layers[0].key_buffer.shape[2] < 100
    assert cache.layers[0].keys.shape[2] == WINDOW - 1 and cache.layers[0].get_seq_length() == 400
