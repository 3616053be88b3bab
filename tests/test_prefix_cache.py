"""Keys and values that stay from call to call: the same texts, sooner, and nothing of what was other."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation import (
    DraftingConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    disable_self_speculative,
    enable_self_speculative,
)
from ssd_generation.cache.prefix_cache import PrefixCache
from ssd_generation.generation.prefixes import PrefixPart, bytes_of
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning import prompt_kernels
from tiny_models import even_model, prompt, tiny_model

NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
OWN = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=4))
LOOKUP = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=5), lookup=True)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# the tree


def states_of(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of two layers; what a token gives hangs on all before it."""
    sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0)
    made = sums[None, None, :, None].expand(1, 2, len(tokens), 3).contiguous()
    return [(made, made + 1), (made + 2, made + 3)]


def total(cache: PrefixCache) -> int:
    return sum(run.bytes() for run in cache._runs())


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=20),
    st.integers(0, 4000),
    st.data(),
)
def test_what_is_taken_is_what_was_kept(texts: list[list[int]], most: int, data: st.DataObject) -> None:
    cache = PrefixCache(most)
    for text in texts:
        key = data.draw(st.sampled_from(["a", "b"]))
        cache.keep(key, torch.tensor(text), states_of(text))
        assert cache.bytes == total(cache) <= most
        asked = data.draw(st.sampled_from(texts))
        tokens, limit = torch.tensor(asked), data.draw(st.integers(0, 12))
        known = cache.match(key, tokens)
        taken = cache.take(key, tokens, limit)
        count = min(known, limit)
        assert known <= len(asked)
        if known:
            for (keys, values), (own_keys, own_values) in zip(taken, states_of(asked[:count]), strict=True):
                assert torch.equal(keys, own_keys) and torch.equal(values, own_values)


def test_texts_share_what_they_begin_with() -> None:
    cache = PrefixCache(10**6)
    first, second = [1, 2, 3, 4], [1, 2, 3, 9, 9]
    cache.keep("", torch.tensor(first), states_of(first))
    alone = cache.bytes
    cache.keep("", torch.tensor(second), states_of(second))
    assert cache.match("", torch.tensor([1, 2, 3, 9, 9, 7])) == 5 and cache.match("", torch.tensor(first)) == 4
    assert cache.bytes == alone * 6 // 4
    assert cache.match("other", torch.tensor(first)) == 0


def test_the_oldest_goes_first() -> None:
    one = PrefixCache(10**6)
    one.keep("", torch.tensor([1] * 10), states_of([1] * 10))
    cache = PrefixCache(2 * one.bytes)
    for text in ([1] * 10, [2] * 10):
        cache.keep("", torch.tensor(text), states_of(text))
    cache.take("", torch.tensor([1] * 10), 10)
    cache.keep("", torch.tensor([3] * 10), states_of([3] * 10))
    assert [cache.match("", torch.tensor([n] * 10)) for n in (1, 2, 3)] == [10, 0, 10]
    cache.limit(one.bytes)
    assert [cache.match("", torch.tensor([n] * 10)) for n in (1, 2, 3)] == [0, 0, 10] and cache.bytes == one.bytes


def test_nothing_keeps_the_memory_of_what_was_given() -> None:
    cache, text = PrefixCache(10**6), list(range(8))
    given = states_of(text)
    cache.keep("", torch.tensor(text), given)
    taken = cache.take("", torch.tensor(text), 8)
    for keys, values in (*given, *taken):
        keys.zero_()
        values.zero_()
    assert torch.equal(cache.take("", torch.tensor(text), 8)[0][0], states_of(text)[0][0])


# ----------------------------------------------------------------------------------------------------------------------
# texts


def model_of(dtype: torch.dtype = torch.float32, size: Any = "1MB", family: str = "llama") -> Any:
    make = tiny_model if dtype == torch.float32 else even_model
    return enable_self_speculative(make(family, max_position_embeddings=2048).to(dtype), prefix_cache=size)


def generate(model: Any, ids: torch.Tensor, drafts: Any = NOTHING, **options: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=torch.ones_like(ids), self_speculative=drafts, **options)


def reused(model: Any) -> int:
    return int(model.last_speculation.reused_tokens)


def conversation(model: Any, drafts: Any, turns: int = 5, **options: Any) -> tuple[list[Any], list[int]]:
    """The texts of a conversation, and what was reused in each turn."""
    ids, found, counts = prompt(60), [], []
    for turn in range(turns):
        ids = generate(model, ids, drafts, **options)
        found.append(ids.tolist())
        counts.append(reused(model))
        ids = torch.cat((ids, prompt(5, seed=turn)), dim=1)
    return found, counts


@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP, "auto"], ids=["nothing", "own", "lookup", "auto"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_conversation_in_float32(drafts: Any, sampled: bool, family: str) -> None:
    options = {"do_sample": True, "temperature": 1.1} if sampled else {}
    ids, plain = prompt(60), []
    model = model_of(size=False, family=family)
    for turn in range(5):
        ids = generate(model, ids, None, **options)
        plain.append(ids.tolist())
        ids = torch.cat((ids, prompt(5, seed=turn)), dim=1)
    texts, counts = conversation(model_of(family=family), drafts, **options)
    assert texts == plain
    assert counts[0] == 0 and counts[1:] == [60 + 12 - 1 + 17 * turn for turn in range(4)]


@pytest.mark.skipif(why_not() is not None, reason="no code can be made here")
@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.measures
def test_a_conversation_in_half_precision_has_the_same_bits(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_kernels, "_PAYS", float("inf"))
    options = {"output_logits": True, "return_dict_in_generate": True}
    one, other = model_of(torch.bfloat16), model_of(torch.bfloat16, False)
    ids = prompt(60)
    for turn in range(4):
        found = [generate(model, ids, drafts, **options) for model in (one, other)]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert all(map(torch.equal, found[0].logits, found[1].logits))
        assert (reused(one) > 0) == (turn > 0) and reused(other) == 0
        assert one.last_speculation.exactness == "bitwise", one.last_speculation.exactness_reason
        ids = torch.cat((found[0].sequences, prompt(5, seed=turn)), dim=1)


@pytest.mark.measures
def test_in_half_precision_nothing_is_reused_that_rounding_could_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_kernels, "_PAYS", 0.0)
    model = model_of(torch.bfloat16)
    texts, counts = conversation(model, NOTHING)
    kept = state_of(model).get(PrefixPart).cache
    assert counts == [0] * 5 and kept is not None and kept.bytes == 0
    assert texts == conversation(model_of(torch.bfloat16, False), NOTHING)[0]


def test_what_is_reused_is_said() -> None:
    model = model_of()
    generate(model, prompt(60))
    generate(model, torch.cat((prompt(60), prompt(4)), dim=1))
    about = model.last_speculation
    assert about.reused_tokens >= 60 and about.to_dict()["reused_tokens"] == about.reused_tokens
    assert about.exactness == "numeric" and "earlier call" in str(about.exactness_reason)
    # The same prompt again: its last token is read for its logits.
    generate(model, prompt(60))
    assert reused(model) == 59
    generate(model, prompt(20))
    assert reused(model) == 0, "too few to look at all weights for"


def test_users_are_kept_apart() -> None:
    model = model_of()
    for salt in ("one", "other", None):
        generate(model, prompt(60), cache_salt=salt)
        assert reused(model) == 0
    for salt in ("one", "other", None):
        generate(model, prompt(60), cache_salt=salt)
        assert reused(model) == 59
    with pytest.raises(ValueError, match="`cache_salt='one'` was given without `self_speculative`"):
        model.generate(prompt(9), cache_salt="one", max_new_tokens=2)


@pytest.mark.parametrize("how", ["in place", "data", "numpy", "replaced"])
def test_weights_that_change(how: str) -> None:
    model = model_of()
    generate(model, prompt(60))
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(1.5)
        elif how == "data":
            weight.data[3, 4] += 1
        elif how == "numpy":
            weight.detach().numpy()[3, 4] += 1
        else:
            model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(1.5 * weight)
    ids = torch.cat((prompt(60), prompt(4)), dim=1)
    expected = generate(model, ids, None).tolist()
    assert generate(model, ids).tolist() == expected and reused(model) == 0
    assert generate(model, ids).tolist() == expected and reused(model) > 0


def test_what_is_neither_read_nor_left() -> None:
    model = model_of()
    kept = state_of(model).get(PrefixPart).cache
    assert kept is not None
    ids, two = prompt(60), torch.cat((prompt(60), prompt(60, seed=2)))
    padded = torch.ones_like(ids)
    padded[:, :3] = 0
    own: Any = generate(model, ids, None, return_dict_in_generate=True)[CACHE]
    for options in (
        {"self_speculative": None},
        {"inputs": two, "attention_mask": torch.ones_like(two)},
        {"attention_mask": padded},
        {"inputs": torch.cat((ids, prompt(20)), dim=1), "attention_mask": torch.ones(1, 80), CACHE: own},
        {"output_attentions": True, "return_dict_in_generate": True},
    ):
        asked: dict[str, Any] = {"inputs": ids, "attention_mask": torch.ones_like(ids), "self_speculative": NOTHING}
        asked |= {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
        for _ in range(2):
            model.generate(**asked)
        assert kept.bytes == 0, options
    other = model_of(family="gemma2")  # whose passes are not captured
    for _ in range(2):
        generate(other, ids)
        assert reused(other) == 0
    generate(model, ids)
    assert kept.bytes > 0
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast is on"):
        generate(model, ids)
    assert reused(model) == 0


def test_a_window_is_kept_as_far_as_it_reaches() -> None:
    model = enable_self_speculative(tiny_model("mistral", sliding_window=80), prefix_cache=True)
    plain = enable_self_speculative(tiny_model("mistral", sliding_window=80))
    ids = prompt(50)
    counts = []
    for turn in range(12):
        texts = [generate(one, ids, LOOKUP).tolist() for one in (model, plain)]
        assert texts[0] == texts[1]
        counts.append(reused(model))
        ids = torch.cat((torch.tensor(texts[0]), prompt(3, seed=turn)), dim=1)
    assert counts[:3] == [0, 61, 76]


def test_a_call_that_is_broken_off_leaves_it_right() -> None:
    model = model_of()
    generate(model, prompt(60))

    class Breaks:
        count = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.count += 1
            if self.count > 4:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    ids = torch.cat((prompt(60), prompt(9)), dim=1)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, OWN, streamer=Breaks())
    expected = generate(model_of(size=False), ids, None).tolist()
    assert generate(model, ids, OWN).tolist() == expected and reused(model) == 60


def test_threads_have_their_own_texts() -> None:
    model = model_of()
    prompts = [torch.cat((prompt(60), prompt(6, seed=n)), dim=1) for n in range(4)]
    expected = [generate(model_of(size=False), ids, None).tolist() for ids in prompts]
    found: dict[int, list[Any]] = {}

    def run(number: int) -> None:
        found[number] = [generate(model, prompts[number]).tolist() for _ in range(4)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(text == expected[number] for number, texts in found.items() for text in texts) and len(found) == 4
    kept = state_of(model).get(PrefixPart).cache
    assert kept is not None and kept.bytes == total(kept)


def test_it_is_switched_off_and_on() -> None:
    model = model_of()
    generate(model, prompt(60))
    assert enable_self_speculative(model) is model
    generate(model, prompt(60))
    assert reused(model) == 59
    assert reused_by_a_copy(model) == 0
    enable_self_speculative(model, prefix_cache=False)
    generate(model, prompt(60))
    assert reused(model) == 0
    enable_self_speculative(model, prefix_cache=True)
    generate(model, prompt(60))
    disable_self_speculative(model)
    enable_self_speculative(model)
    generate(model, prompt(60))
    assert reused(model) == 0


def reused_by_a_copy(model: Any) -> int:
    other = copy.deepcopy(model)
    generate(other, prompt(60))
    return reused(other)


def test_it_stays_within_its_bytes() -> None:
    model = model_of(size="60kB")
    kept = state_of(model).get(PrefixPart).cache
    assert kept is not None and kept.most_bytes == 60_000
    most = 0
    for seed in range(30):
        generate(model, prompt(40 + seed, seed=seed % 7))
        assert kept.bytes <= 60_000
        most = max(most, kept.bytes)
    assert most > 30_000


@pytest.mark.parametrize(
    ("size", "count"),
    [(True, 10**9), (False, 0), (0, 0), (5000, 5000), ("1GB", 10**9), ("1.5 gib", 3 * 2**29), ("200", 200)],
)
def test_sizes(size: Any, count: int) -> None:
    assert bytes_of(size) == count


@pytest.mark.parametrize(
    ("size", "message"),
    [("1 pound", "is not a size: give bytes"), (-1, "is negative"), ("", "is not a size"), ("-1GB", "is not a size")],
)
def test_sizes_that_are_none(size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        enable_self_speculative(tiny_model(), prefix_cache=size)


def test_a_size_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"must be bytes, a size such as .* but got float"):
        enable_self_speculative(tiny_model(), prefix_cache=0.5)  # type: ignore[arg-type]
