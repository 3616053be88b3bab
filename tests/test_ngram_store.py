"""Prompt lookup in the texts of earlier calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ssd_generation import (
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    add_lookup_texts,
    enable_self_speculative,
    load_lookup_texts,
    save_lookup_texts,
)
from ssd_generation.drafting.ngram_store import NGramStore, RememberingIndex, StorePart
from ssd_generation.support.model_state import state_of
from tiny_models import VOCAB, prompt, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=8)
WITHOUT = SelfSpeculativeConfig(drafting=FIXED, lookup=LookupConfig(min_ngram=2))
WITH = SelfSpeculativeConfig(drafting=FIXED, lookup=LookupConfig(min_ngram=2, store=True))


def store_of(*texts: list[int], most: int = 1000) -> NGramStore:
    store = NGramStore(most)
    for text in texts:
        store.add(text)
    return store


def test_the_longest_match_goes_on() -> None:
    store = store_of([1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 7, 8])
    assert store.find([1, 2, 3, 4], 12) == ([5, 6], 4)
    assert store.find([9, 2, 3, 4], 12) == ([7, 8], 4)
    assert store.find([2, 3], 12) == ([], 0), "two tokens say little"
    assert store.find([3, 4, 6], 12) == ([], 0)
    assert store.find([1, 2, 3, 4], 1) == ([5], 4)


def test_of_equal_matches_what_followed_more_often_and_later() -> None:
    often = store_of([0, 1, 2, 3, 5], [4, 1, 2, 3, 6], [7, 1, 2, 3, 5], [8, 1, 2, 3, 9])
    assert often.find([1, 2, 3], 4) == ([5], 3)
    latest = store_of([0, 1, 2, 3, 5, 5], [4, 1, 2, 3, 6, 6])
    assert latest.find([1, 2, 3], 4) == ([6, 6], 3)


def test_a_longer_match_makes_a_longer_draft() -> None:
    text = list(range(100))
    store = store_of(text)
    assert [len(store.find(text[30 - n : 30], 50)[0]) for n in (3, 5, 10, 30)] == [6, 10, 20, 50]


def test_a_text_that_grows_is_stored_once() -> None:
    store, text = NGramStore(), list(range(50))
    for length in (20, 30, 50, 40, 50):
        store.add(text[:length])
    assert len(store) < 60
    assert store.find(text[32:38], 8) == (text[38:46], 6)


@given(st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=12), st.lists(st.integers(0, 4), max_size=12))
def test_what_is_found_followed_the_match(texts: list[list[int]], recent: list[int]) -> None:
    store = store_of(*texts, most=120)
    assert len(store) <= 120 + 31
    found, length = store.find(recent, 7)
    assert len(found) <= 7 and bool(found) == (length >= 3)
    if found:
        wanted = [*recent[-length:], *found]
        assert any(text[at : at + len(wanted)] == wanted for text in texts for at in range(len(text)))


def test_it_is_bounded() -> None:
    generator = torch.Generator().manual_seed(0)
    store = NGramStore(most_tokens=20_000)
    for _ in range(40):
        store.add(torch.randint(0, 50, (2000,), generator=generator).tolist())
        assert len(store) <= 20_001 + 40
    assert sum(map(len, store._places.values())) <= len(store)
    same = NGramStore()
    same.add([1] * 50_000)
    assert same.find([1] * 40, 128)[1] == 32 and [len(places) for places in same._places.values()] == [8]


def test_the_texts_own_match_wins_where_it_is_as_long() -> None:
    store = store_of([1, 2, 3, 4, 5], [6, 7, 8, 9, 9])
    index = RememberingIndex(store, max_ngram=4, min_ngram=1, max_tokens=6)
    index.extend([8, 1, 2, 3])
    assert index.find() == ([4, 5], 3)
    index.extend([0, 0, 1, 2, 3])
    assert index.find()[0][:2] == [0, 0], "three tokens of its own"
    assert index.find([6, 7, 8]) == ([9, 9], 3), "after drafted tokens"


# ----------------------------------------------------------------------------------------------------------------------
# texts


def generate(model: Any, ids: torch.Tensor, drafts: Any, **options: Any) -> Any:
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=torch.ones_like(ids), self_speculative=drafts, **options)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_second_time_it_knows_the_text(sampled: bool) -> None:
    options = {"do_sample": True, "temperature": 1.3} if sampled else {}
    model = enable_self_speculative(tiny_model())
    plain = generate(model, prompt(9), None, **options)
    passes = []
    for drafts in (WITHOUT, WITHOUT, WITH, WITH):
        assert torch.equal(generate(model, prompt(9), drafts, **options), plain)
        passes.append(model.last_speculation.target_passes)
    assert passes[0] == passes[1] and passes[3] < 0.6 * passes[0]


def test_batches_and_own_drafts() -> None:
    model = enable_self_speculative(tiny_model())
    rows = torch.cat((prompt(9), prompt(9, seed=2), prompt(9, seed=3)))
    plain = generate(model, rows, None)
    mixed = SelfSpeculativeConfig(
        SkipConfig(attention=[1]), DraftingConfig(policy="fixed", max_draft_length=2), lookup=WITH.lookup
    )
    for drafts in (WITH, mixed, WITH, mixed):
        assert torch.equal(generate(model, rows, drafts), plain)
    assert len(state_of(model).get(StorePart).store) > 3 * 40


def test_nothing_is_kept_unless_asked() -> None:
    model = enable_self_speculative(tiny_model())
    for drafts in (None, WITHOUT, "auto", True):
        if drafts is True:
            enable_self_speculative(model, default=WITHOUT)
        generate(model, prompt(9), drafts)
    assert len(state_of(model).get(StorePart).store) == 0
    assert "store" not in WITHOUT.to_dict()["lookup"] and WITH.to_dict()["lookup"]["store"] is True
    assert SelfSpeculativeConfig.from_dict(WITH.to_dict()) == WITH
    generate(model, prompt(9), WITH)
    assert len(state_of(model).get(StorePart).store) > 0
    state_of(model).drop()
    assert len(state_of(model).get(StorePart).store) == 0


def test_threads() -> None:
    model = enable_self_speculative(tiny_model())
    plain = {seed: generate(model, prompt(9, seed=seed), None).tolist() for seed in range(3)}
    wrong: list[int] = []

    def run(seed: int) -> None:
        for _ in range(4):
            if generate(model, prompt(9, seed=seed), WITH).tolist() != plain[seed]:
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ----------------------------------------------------------------------------------------------------------------------
# texts of the user, and of earlier processes


def test_permanent_texts_outlast_the_others() -> None:
    store = NGramStore(most_tokens=200)
    store.add_permanent([1, 2, 3, 4, 5, 6])
    for start in range(10, 60):
        store.add([start + step for step in range(20)])
        assert len(store) <= 200 + 21
    assert store.find([1, 2, 3], 3) == ([4, 5, 6], 3) and store.texts()[1] == [[1, 2, 3, 4, 5, 6]]
    assert store.find([60, 61, 62], 3)[0] == [63, 64, 65]
    with pytest.raises(ValueError, match="Permanent texts would take 102 tokens, but the store has room for 100"):
        store.add_permanent(range(94))
    store.clear()
    assert store.texts() == ([], [])


def test_a_document_is_copied_from() -> None:
    model = enable_self_speculative(tiny_model())
    plain = generate(model, prompt(9), None)
    passes = []
    documents: list[list[list[int]]] = [[], [plain[0].tolist()]]
    for texts in documents:
        other = enable_self_speculative(tiny_model())
        assert add_lookup_texts(other, texts) == sum(map(len, texts))
        assert torch.equal(generate(other, prompt(9), WITH), plain)
        passes.append(other.last_speculation.target_passes)
    assert passes[1] < 0.6 * passes[0]


def test_another_process_knows_the_texts(tmp_path: Path) -> None:
    first, second = (enable_self_speculative(tiny_model()) for _ in range(2))
    file = tmp_path / "texts.safetensors"
    add_lookup_texts(first, [[5, 6, 7, 8, 9]])
    plain = generate(first, prompt(9), WITH)
    written = save_lookup_texts(first, file)
    assert load_lookup_texts(second, file) == written > plain.shape[1]
    stores = [state_of(model).get(StorePart).store for model in (first, second)]
    assert sorted(stores[0].texts()[0]) == sorted(stores[1].texts()[0]) and stores[1].texts()[1] == [[5, 6, 7, 8, 9]]
    assert torch.equal(generate(second, prompt(9), WITH), plain)
    assert second.last_speculation.target_passes < first.last_speculation.target_passes


@pytest.mark.parametrize(
    ("token", "error"), [(VOCAB, ValueError), (-1, ValueError), (1.0, TypeError), ("a", TypeError)]
)
def test_tokens_that_are_none(token: Any, error: type[Exception]) -> None:
    model = enable_self_speculative(tiny_model())
    with pytest.raises(error, match=r"(?i)token"):
        add_lookup_texts(model, [[1, 2, 3], [1, token]])
    assert len(state_of(model).get(StorePart).store) == 0


@pytest.mark.parametrize("how", ["a token", "a length", "a format", "rubbish", "cut short"])
def test_a_damaged_file_of_texts_is_refused(tmp_path: Path, how: str) -> None:
    model, file = enable_self_speculative(tiny_model()), tmp_path / "texts.safetensors"
    generate(model, prompt(9), WITH)
    save_lookup_texts(model, file)
    if how == "rubbish":
        file.write_bytes(b"rubbish" * 9)
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        tensors = load_file(file)
        if how == "a token":
            tensors["earlier.tokens"][3] = VOCAB
        elif how == "a length":
            tensors["earlier.lengths"][0] += 1
        save_file(tensors, file, metadata={"lookup_texts": "0" if how == "a format" else "1"})
    other = enable_self_speculative(tiny_model())
    with pytest.raises(ValueError, match="is no file of lookup texts of this model, or damaged"):
        load_lookup_texts(other, file)
    assert len(state_of(other).get(StorePart).store) == 0
    with pytest.raises(FileNotFoundError):
        load_lookup_texts(other, tmp_path / "nothing")
