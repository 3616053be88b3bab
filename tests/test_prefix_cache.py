"""Keys and values reused between calls: the same texts, sooner, and no reuse after anything has changed."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from prompt_reading import read_by_kernels, read_by_own_code
from ssd_generation import (
    DraftingConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    disable_self_speculative,
    enable_self_speculative,
    load_prefix_cache,
    save_prefix_cache,
)
from ssd_generation.cache import buffered_layers
from ssd_generation.cache.prefix_cache import PrefixCache
from ssd_generation.generation import prefix_files
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
    """Return keys and values of two layers; those of a token depend on all tokens before it."""
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


def test_a_part_is_stored_only_after_what_it_follows() -> None:
    text = list(range(8))
    rest = [(keys[:, :, 5:], values[:, :, 5:]) for keys, values in states_of(text)]
    cache = PrefixCache(10**6)
    cache.keep("", torch.tensor(text), rest, first=5)
    assert cache.bytes == 0 and cache.match("", torch.tensor(text)) == 0
    cache.keep("", torch.tensor(text[:5]), states_of(text[:5]))
    cache.keep("", torch.tensor(text), rest, first=5)
    assert torch.equal(cache.take("", torch.tensor(text), 8)[1][1], states_of(text)[1][1])
    assert cache.bytes == total(cache)


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
    """Return the texts of a conversation, and the number of tokens reused in each turn."""
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


@pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here")
@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.measures
def test_a_conversation_in_half_precision_has_the_same_bits(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_kernels(monkeypatch)
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


@pytest.fixture
def read_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have prompts read by the model's own code, as where torch's kernels are far ahead, in parts of 32 tokens."""
    read_by_own_code(monkeypatch)
    monkeypatch.setattr(prompt_kernels, "PART", 32)


@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3"])
@pytest.mark.measures
def test_a_prompt_in_parts_has_the_same_bits_after_a_stored_one(drafts: Any, family: str, read_by_torch: None) -> None:
    options = {"output_logits": True, "return_dict_in_generate": True}
    one, other = model_of(torch.bfloat16, family=family), model_of(torch.bfloat16, family=family)
    ids = prompt(60)
    for turn in range(4):
        enable_self_speculative(other, prefix_cache=False)
        enable_self_speculative(other, prefix_cache=True)  # which is empty
        found = [generate(model, ids, drafts, **options) for model in (one, other)]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert all(map(torch.equal, found[0].logits, found[1].logits))
        # Whole parts of earlier prompts, and nothing that was decoded.
        assert reused(other) == 0 and reused(one) == (0 if turn == 0 else (60 + 17 * (turn - 1)) // 32 * 32)
        assert one.last_speculation.exactness == other.last_speculation.exactness
        ids = torch.cat((found[0].sequences, prompt(5, seed=turn)), dim=1)


@pytest.mark.measures
def test_parts_begin_at_multiples_of_their_length(read_by_torch: None) -> None:
    model = model_of(torch.bfloat16)
    text = prompt(100)
    generate(model, text)
    for count, known in ((31, 0), (32, 0), (33, 32), (63, 32), (64, 32), (65, 64), (96, 64), (97, 96)):
        # The last token of a prompt is always read; what follows the stored one differs.
        generate(model, torch.cat((text[:, :count], prompt(1, seed=count)), dim=1)[:, :count])
        assert reused(model) == known, count
    other = torch.cat((text[:, :80], prompt(20, seed=9)), dim=1)
    generate(model, other)
    assert reused(model) == 64  # it parts from the stored one in the middle of a part


@pytest.mark.parametrize("count", [40, 64, 100])
@pytest.mark.measures
def test_the_same_prompt_again_is_not_read_in_parts(count: int, read_by_torch: None, tmp_path: Path) -> None:
    one, other = model_of(torch.bfloat16), model_of(torch.bfloat16)
    texts = [generate(one, prompt(count), do_sample=sample, cache_salt="A") for sample in (False, True)]
    assert reused(one) == count
    generate(one, prompt(count), cache_salt="B")
    assert reused(one) == 0
    # Its ending serves the same prompt alone.
    generate(one, prompt(100)[:, : count - 1], cache_salt="A")
    assert reused(one) == (count - 2) // 32 * 32
    assert save_prefix_cache(one, tmp_path / "prefixes.safetensors") == load_prefix_cache(
        other, tmp_path / "prefixes.safetensors"
    )
    again = [generate(other, prompt(count), do_sample=sample, cache_salt="A") for sample in (False, True)]
    assert reused(other) == count and all(map(torch.equal, texts, again))
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.data[0] += 1  # torch does not count it
    changed = generate(other, prompt(count), cache_salt="A", output_logits=True, return_dict_in_generate=True)
    assert reused(other) == 0 and not torch.equal(changed.sequences, again[0])


@pytest.mark.measures
def test_where_parts_do_not_keep_bits_nothing_is_reused(read_by_torch: None) -> None:
    model = model_of(torch.bfloat16)
    assert prompt_kernels._parts_keep_bits(model)
    calls = itertools.count()
    with model.model.layers[1].register_forward_hook(lambda module, args, output: output + 0.1 * next(calls)):
        assert not prompt_kernels._parts_keep_bits(model) and prompt_kernels.part_of_prompts(model) is None


@pytest.mark.measures
def test_in_half_precision_nothing_is_reused_that_rounding_could_change(monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_own_code(monkeypatch)
    monkeypatch.setattr(prompt_kernels, "_parts_keep_bits", lambda model: False)
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
    # With the same prompt again, only its last token is read, for its logits.
    generate(model, prompt(60))
    assert reused(model) == 59
    generate(model, prompt(20))
    assert reused(model) == 0, "too few to look at all weights for"


@pytest.mark.parametrize("drafts", [NOTHING, LOOKUP, "auto"], ids=["nothing", "lookup", "auto"])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_calls_for_very_few_tokens_reuse_what_was_read(drafts: Any, new: int) -> None:
    model = model_of()
    for turn in range(3):
        asked = torch.cat((prompt(60), prompt(9).roll(turn, 1)), dim=1)
        text = model.generate(asked, max_new_tokens=new, do_sample=False, self_speculative=drafts)
        assert torch.equal(text, model.generate(asked, max_new_tokens=new, do_sample=False))
        assert reused(model) >= (60 if turn else 0)
    # Nothing could be reused of so few tokens, or without a cache.
    for asked, cache in ((prompt(20), True), (prompt(60), False)):
        enable_self_speculative(model, prefix_cache=cache)
        model.generate(asked, max_new_tokens=new, do_sample=False, self_speculative=drafts)
        assert ("too few tokens" in str(model.last_speculation.refusal)) == (new <= 2)


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
    other = model_of(family="gemma2")  # its passes are not captured
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


class Breaks:
    """A streamer that is interrupted after a few tokens."""

    count = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.count += 1
        if self.count > 4:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def test_a_call_that_is_broken_off_leaves_it_right() -> None:
    model = model_of()
    generate(model, prompt(60))

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


# ----------------------------------------------------------------------------------------------------------------------
# batches


def batch_of(*texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded at the left."""
    width = max(text.shape[1] for text in texts)
    rows = [torch.nn.functional.pad(text, (width - text.shape[1], 0)) for text in texts]
    masks = [torch.nn.functional.pad(torch.ones_like(text), (width - text.shape[1], 0)) for text in texts]
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(masks)}


def questions(*seeds: int) -> list[torch.Tensor]:
    return [torch.cat((prompt(60), prompt(4 + seed, seed=seed)), dim=1) for seed in seeds]


@pytest.fixture
def prompts_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_kernels(monkeypatch)


@pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here")
@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.measures
def test_rows_of_a_batch_share_what_they_begin_with(drafts: Any, family: str, prompts_by_kernels: None) -> None:
    options = {
        "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    one, other = model_of(torch.bfloat16, family=family), model_of(torch.bfloat16, False, family)
    asked_first, counts = questions(1, 2, 3), []
    for texts in (asked_first, [*questions(4), prompt(9), *questions(1)], questions(5)):
        batch = batch_of(*texts)
        found = [model.generate(**batch, **options, self_speculative=drafts) for model in (one, other)]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert all(map(torch.equal, found[0].logits, found[1].logits))
        counts.append(reused(one))
        assert reused(other) == 0
    assert counts == [2 * 60, 60 + (60 + 5 - 1), 60]


@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.float32)], ids=str)
@pytest.mark.measures
def test_rows_in_parts_have_the_bits_of_each_alone(
    drafts: Any, family: str, dtype: torch.dtype, read_by_torch: None
) -> None:
    options = {
        "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    made = [even_model(family, max_position_embeddings=2048).to(dtype) for _ in range(2)]
    one, other = (enable_self_speculative(model, prefix_cache=True) for model in made)
    counts = []
    for texts in (questions(1, 2, 3), [*questions(4), prompt(9), *questions(1), prompt(9)]):
        batch = batch_of(*texts)
        enable_self_speculative(other, prefix_cache=False)
        enable_self_speculative(other, prefix_cache=True)  # which is empty
        found = [model.generate(**batch, **options, self_speculative=drafts) for model in (one, other)]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert all(map(torch.equal, found[0].logits, found[1].logits))
        counts.append((reused(one), reused(other)))
        if dtype != torch.float32:  # there a single text is read at once
            for row, text in enumerate(texts):
                alone = generate(other, text, drafts, output_logits=True, return_dict_in_generate=True)
                assert torch.equal(alone.sequences[0, text.shape[1] :], found[0].sequences[row, -12:])
                if why_not() is None:
                    logits = zip(alone.logits, found[0].logits, strict=True)
                    assert all(torch.equal(own[0], rows[row]) for own, rows in logits)
    # 32 tokens for each row but the first; and what the batch before left: all of a row that it had in common.
    assert counts[0] == (64, 64) and counts[1][0] == 32 + 65 and counts[1][1] == 32


@pytest.mark.measures
def test_rows_are_not_read_in_parts_where_a_window_is_shorter(read_by_torch: None) -> None:
    model = enable_self_speculative(even_model("mistral", sliding_window=24).to(torch.bfloat16), prefix_cache=True)
    found: Any = model
    for _ in range(2):
        found.generate(**batch_of(*questions(1, 2)), max_new_tokens=4, do_sample=False, self_speculative=NOTHING)
        assert reused(model) == 0


@pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here")
@pytest.mark.measures
def test_equal_rows_are_read_once_with_prefixes(prompts_by_kernels: None) -> None:
    one, other = model_of(torch.bfloat16), model_of(torch.bfloat16, False)
    options = {"do_sample": True, "num_return_sequences": 3}
    for _ in range(2):
        assert torch.equal(*(generate(model, prompt(60), **options) for model in (one, other)))
    assert reused(one) == 59


@pytest.mark.parametrize("way", ["in parts", "by kernels"])
@pytest.mark.measures
def test_masked_slots_hold_numbers(way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The caller may continue from the cache by transformers' own passes, where a masked `nan` would count."""
    request.getfixturevalue("read_by_torch" if way == "in parts" else "prompts_by_kernels")
    empty = buffered_layers._new_buffer
    monkeypatch.setattr(buffered_layers, "_new_buffer", lambda like, slots: empty(like, slots).fill_(float("nan")))
    model = model_of(torch.bfloat16)
    asked = batch_of(*questions(1, 5), prompt(9), prompt(9))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**asked, **options, self_speculative=NOTHING)
    mask = torch.nn.functional.pad(asked["attention_mask"], (0, 4), value=1)
    more = model.generate(found.sequences, attention_mask=mask, **options, **{CACHE: found[CACHE]})
    assert all(torch.isfinite(logits).all() for logits in more.logits)


def test_a_batch_in_float32_neither_reads_nor_fills() -> None:
    model = model_of()
    batch = batch_of(*questions(1, 2))
    model.generate(**batch, max_new_tokens=4, eos_token_id=None, pad_token_id=0, self_speculative=NOTHING)
    kept = state_of(model).get(PrefixPart).cache
    assert reused(model) == 0 and kept is not None and kept.bytes == 0


# ----------------------------------------------------------------------------------------------------------------------
# files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.safetensors"


def asked(model: Any, count: int = 3) -> list[Any]:
    """Texts after one document, and one for another user."""
    found = [generate(model, torch.cat((prompt(60), prompt(5, seed=seed)), dim=1)).tolist() for seed in range(count)]
    return [*found, generate(model, prompt(40, seed=9), cache_salt="alice").tolist()]


def test_another_process_goes_on_from_a_file(file: Path) -> None:
    one, other = model_of(), model_of()
    texts = asked(one)
    written = save_prefix_cache(one, file)
    assert load_prefix_cache(other, file) == written == 60 + 3 * (5 + 12 - 1) + 40 + 12 - 1
    caches = [state_of(model).get(PrefixPart).cache for model in (one, other)]
    assert caches[0] is not None and caches[1] is not None and caches[0].bytes == caches[1].bytes
    assert asked(other, 1) == [texts[0], texts[-1]] and reused(other) == 39
    generate(other, prompt(40, seed=9))
    assert reused(other) == 0, "it was kept for alice"
    generate(other, torch.cat((prompt(60), prompt(5, seed=7)), dim=1))
    assert reused(other) == 60


def test_a_smaller_cache_takes_the_last_used_of_a_file(file: Path) -> None:
    one = model_of()
    asked(one)
    save_prefix_cache(one, file)
    other = model_of(size=60_000)
    load_prefix_cache(other, file)
    kept = state_of(other).get(PrefixPart).cache
    assert kept is not None and 0 < kept.bytes <= 60_000
    generate(other, prompt(40, seed=9), cache_salt="alice")
    assert reused(other) == 39


@pytest.mark.parametrize("how", ["other weights", "a write", "another model", "another dtype", "other threads"])
def test_a_file_of_another_model_is_refused(file: Path, how: str) -> None:
    asked(one := model_of())
    save_prefix_cache(one, file)
    other = (
        model_of(torch.bfloat16) if how == "another dtype" else model_of(family="qwen3" if "model" in how else "llama")
    )
    if how == "other weights":
        torch.manual_seed(1)
        torch.nn.init.normal_(other.lm_head.weight)
    elif how == "a write":  # which torch does not count: the same numbers in other places
        weight = other.model.layers[0].mlp.up_proj.weight
        weight.data.numpy()[:] = weight.data.numpy()[::-1].copy()
    elif how == "other threads":
        torch.set_num_threads(2)
    with pytest.raises(ValueError, match=r"another model, machine or version computed .*differ in"):
        load_prefix_cache(other, file)
    kept = state_of(other).get(PrefixPart).cache
    assert kept is not None and kept.bytes == 0


def damaged(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "a bit":
        content[-5] ^= 4
    elif how == "cut short":
        del content[-100:]
    elif how == "rubbish":
        content = bytearray(b"rubbish" * 100)
    elif how == "nothing":
        content = bytearray()
    file.write_bytes(content)
    if how in ("a key", "a run", "a cycle", "no document"):
        with safe_open(file, framework="pt") as stored:
            about = json.loads(stored.metadata()["about"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if how == "a key":
            about["runs"][0][0][3] = "many"
        elif how == "a run":
            about["runs"].append([about["runs"][0][0], None, 4])
        elif how == "a cycle":
            about["runs"][0][1] = 0
        text = "[" * 10_000 if how == "no document" else json.dumps(about)
        save_file(tensors, file, metadata={"about": text})


@pytest.mark.parametrize(
    "how", ["a bit", "cut short", "rubbish", "nothing", "a key", "a run", "a cycle", "no document"]
)
def test_a_damaged_file_is_refused(file: Path, how: str) -> None:
    asked(model := model_of())
    save_prefix_cache(model, file)
    damaged(file, how)
    with pytest.raises(ValueError, match="is no file of prefixes, or damaged"):
        load_prefix_cache(other := model_of(), file)
    kept = state_of(other).get(PrefixPart).cache
    assert kept is not None and kept.bytes == 0


def test_a_file_is_written_whole_or_not_at_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(model := model_of())
    save_prefix_cache(model, file)
    before = file.read_bytes()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_prefix_cache(model, file)
    assert file.read_bytes() == before and list(file.parent.glob("*.safetensors")) == [file]


def test_files_need_a_cache(file: Path) -> None:
    model = model_of(size=False)
    for function in (save_prefix_cache, load_prefix_cache):
        with pytest.raises(ValueError, match="stores no prefixes"):
            function(model, file)
    with pytest.raises(FileNotFoundError):
        load_prefix_cache(model_of(), file)
    assert save_prefix_cache(model_of(), file) == 0 and load_prefix_cache(model_of(), file) == 0


@pytest.mark.parametrize("back", [False, True], ids=["once", "and back"])
def test_a_write_that_torch_does_not_count(back: bool) -> None:
    model = model_of()
    weight, question = model.model.layers[1].mlp.up_proj.weight, questions(1)[0]
    text = generate(model, question)
    weight.data.numpy()[:] *= -1.5
    changed = generate(model, question)
    assert reused(model) == 0
    if back:
        weight.data.numpy()[:] /= -1.5
    after = generate(model, question)
    assert torch.equal(after, text if back else changed) and (reused(model) > 0) == (not back)


def test_stale_prefixes_are_not_written(file: Path) -> None:
    asked(model := model_of())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert save_prefix_cache(model, file) == 0
