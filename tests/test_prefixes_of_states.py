"""Prefixes of models with recurrent states: a text begins where earlier ones have left a copy of their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from ssd_generation import (
    DraftingConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
    load_prefix_cache,
    save_prefix_cache,
)
from ssd_generation.cache.prefix_cache import PrefixCache, Recurrent
from ssd_generation.generation.prefixes import PrefixPart
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE, cache_argument
from ssd_generation.tuning import prompt_kernels
from ssd_generation.tuning.prompt_kernels import part_of_prompts
from test_prefix_cache import LOOKUP, NOTHING, Breaks, batch_of, generate, reused
from test_recurrent import FAMILIES, made
from tiny_models import prompt

pytestmark = [
    pytest.mark.skipif(Version(tf.__version__) < Version("5.23"), reason="states were kept otherwise"),
    pytest.mark.filterwarnings("ignore"),  # other packages' kernels for these layers are missing
    pytest.mark.measures,
]

OWN = SelfSpeculativeConfig(SkipConfig(attention=[2]), DraftingConfig(policy="fixed", max_draft_length=4))
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def in_short_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))
    monkeypatch.setattr(prompt_kernels, "PART", 32)


def model_of(family: str, dtype: torch.dtype = torch.float32, size: Any = True) -> Any:
    return enable_self_speculative(made(FAMILIES[family]()).to(dtype), prefix_cache=size)


def kept_by(model: Any) -> PrefixCache:
    cache = state_of(model).get(PrefixPart).cache
    assert cache is not None
    return cache


def emptied(model: Any, size: Any = True) -> Any:
    enable_self_speculative(model, prefix_cache=False)
    return enable_self_speculative(model, prefix_cache=size)


# ----------------------------------------------------------------------------------------------------------------------
# the tree


def after(tokens: list[int]) -> Recurrent:
    """Return states of two layers, the second of which has none, that depend on all tokens."""
    number = float(sum((at + 1) * token for at, token in enumerate(tokens)))
    return [{"conv.0": torch.tensor([number]), "recurrent.0": torch.tensor([[number + 1]])}, {}]


def keys_of(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0)[None, None, :, None]
    empty = torch.empty((1, 0, len(tokens), 0))
    return [(empty, empty), (sums, sums + 1)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=12), st.data())
def test_the_last_states_of_a_text_are_found(texts: list[list[int]], data: st.DataObject) -> None:
    cache, known = PrefixCache(10**6), set[tuple[int, ...]]()
    for text in texts:
        places = data.draw(st.sets(st.integers(1, len(text)), max_size=3))
        cache.keep("", torch.tensor(text), keys_of(text), recurrent={at: after(text[:at]) for at in sorted(places)})
        known |= {tuple(text[:at]) for at in places}
        assert cache.bytes == sum(run.bytes() for run in cache._runs())
        asked = data.draw(st.sampled_from(texts))
        expected = max((at for at in range(1, len(asked) + 1) if tuple(asked[:at]) in known), default=0)
        count, states = cache.recurrent("", torch.tensor(asked))
        assert count == expected
        if count:
            assert str(states) == str(after(asked[:count]))
            assert torch.equal(cache.take("", torch.tensor(asked), count)[1][0], keys_of(asked[:count])[1][0])


def test_states_are_copies_and_go_with_their_tokens() -> None:
    text = [1, 2, 1]
    cache, given = PrefixCache(10**6), after(text)
    cache.keep("", torch.tensor(text), keys_of(text), recurrent={3: given})
    taken = cache.recurrent("", torch.tensor(text))[1]
    for states in (given, taken):
        states[0]["conv.0"].zero_()
    assert str(cache.recurrent("", torch.tensor(text))[1]) == str(after(text))
    # Those of a text that is not stored are not, either.
    cache.keep("", torch.tensor([2, 2]), keys_of([2]), recurrent={2: after([2, 2])}, first=1)
    assert cache.recurrent("", torch.tensor([2, 2])) == (0, [])
    cache.limit(0)
    assert cache.bytes == 0 and cache.recurrent("", torch.tensor(text)) == (0, [])


# ----------------------------------------------------------------------------------------------------------------------
# texts


@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP, "auto"], ids=["nothing", "own", "lookup", "auto"])
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2"])
def test_a_conversation_in_float32(family: str, drafts: Any) -> None:
    model, plain = model_of(family), made(FAMILIES[family]())
    ids, counts = prompt(60), []
    for turn in range(4):
        text = generate(model, ids, drafts)
        counts.append(reused(model))
        assert torch.equal(text, plain.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS))
        ids = torch.cat((text, prompt(5, seed=turn)), dim=1)
    # All tokens but the last, or those up to the last states that no rejected token was in.
    ends = [0, *(60 + 17 * turn + 11 for turn in range(3))]
    if drafts is NOTHING:
        assert counts == ends
        assert model.last_speculation.exactness == "numeric"
        assert "earlier call" in model.last_speculation.exactness_reason
    assert all(end - 12 <= count <= end for count, end in zip(counts[1:], ends[1:], strict=True))


@pytest.mark.parametrize("drafts", [NOTHING, OWN, LOOKUP], ids=["nothing", "own", "lookup"])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "nemotron_h", "mamba2"])
def test_in_half_precision_a_text_has_the_same_bits(family: str, drafts: Any) -> None:
    one, other = (model_of(family, torch.bfloat16) for _ in range(2))
    options = {"output_logits": True, "return_dict_in_generate": True}
    ids = prompt(60)
    for turn in range(4):
        found = [generate(model, ids, drafts, **options) for model in (one, emptied(other))]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert all(map(torch.equal, found[0].logits, found[1].logits))
        # Whole parts of earlier prompts, and nothing that was decoded.
        assert reused(other) == 0 and reused(one) == (0 if turn == 0 else (60 + 17 * (turn - 1)) // 32 * 32)
        assert one.last_speculation.exactness == other.last_speculation.exactness
        ids = torch.cat((found[0].sequences, prompt(5, seed=turn)), dim=1)
    again = generate(one, ids[:, :-5], drafts, **options)
    assert torch.equal(again.sequences, generate(one, ids[:, :-5], drafts, **options).sequences)
    assert reused(one) == ids.shape[1] - 5  # its last part, too, and its logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "mamba2"])
def test_questions_about_one_text(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    counts = []
    for seed in range(3):
        ids = torch.cat((prompt(80), prompt(20, seed=seed)), dim=1)
        text = generate(model, ids)
        counts.append(reused(model))
        assert torch.equal(text, generate(emptied(model_of(family, dtype)), ids))
    assert counts == [0, 64, 64]


@pytest.mark.parametrize("drafts", [NOTHING, LOOKUP], ids=["nothing", "lookup"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid", "mamba2"])
def test_rows_of_a_batch(family: str, dtype: torch.dtype, drafts: Any) -> None:
    model, other = model_of(family, dtype), model_of(family, dtype)
    one, two, short = (torch.cat((prompt(60), prompt(5 + n, seed=n)), dim=1) for n in (1, 2, 3))
    batches = [batch_of(one, two), batch_of(short[:, :9], one, short, short[:, :9])]
    counts = []
    for batch in batches:
        text = model.generate(**batch, **OPTIONS, self_speculative=drafts)
        counts.append(reused(model))
        assert torch.equal(text, emptied(other).generate(**batch, **OPTIONS, self_speculative=drafts))
        if dtype == torch.float32:
            assert torch.equal(text, other.generate(**batch, **OPTIONS))
    # The second row begins like the first; then both long rows begin like those before.
    assert counts[0] == 32 and counts[1] >= 64


def test_states_of_long_texts_leave_room_for_others() -> None:
    model = model_of("mamba2")
    generate(model, prompt(200))
    each = max(
        sum(state.nbytes for layer in run.recurrent for state in layer.values()) for run in kept_by(model).runs()
    )
    emptied(model, 8 * each)  # a prompt may store two, and its end; the decoded text its own
    generate(model, prompt(200))
    lengths = [len(run.tokens) for run in kept_by(model).runs()]
    assert sorted(lengths) == [1, 8, 11, 96, 96] and kept_by(model).bytes <= 8 * each
    generate(model, torch.cat((prompt(120), prompt(9, seed=2)), dim=1))
    assert reused(model) == 96
    emptied(model, each // 2)
    for _ in range(2):
        generate(model, prompt(200))
        assert reused(model) == 0 and kept_by(model).bytes == 0


def test_what_is_neither_read_nor_left() -> None:
    ids = prompt(60)
    # Its scans begin anew in each pass of transformers' own code.
    jamba = model_of("jamba", torch.bfloat16)
    assert part_of_prompts(jamba) is None
    for model in (jamba, model_of("recurrent_gemma"), model_of("lfm3")):  # states on modules; short windows
        for _ in range(2):
            generate(model, ids)
            assert reused(model) == 0 and kept_by(model).bytes == 0
    model, other = model_of("mamba2"), model_of("mamba2")
    first = generate(other, ids, None, return_dict_in_generate=True)
    more = prompt(40, seed=5)
    cache = {cache_argument(model): first[CACHE]}
    generate(model, more)
    before = kept_by(model).bytes
    for _ in range(2):
        generate(model, more, **cache)
        assert reused(model) == 0 and kept_by(model).bytes == before


def test_another_process_goes_on_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prefixes.safetensors"
    one, other = (model_of("qwen3_5", torch.bfloat16) for _ in range(2))
    generate(one, prompt(100))
    assert save_prefix_cache(one, file) == load_prefix_cache(other, file)
    assert kept_by(one).bytes == kept_by(other).bytes
    ids = torch.cat((prompt(90), prompt(9, seed=3)), dim=1)
    assert torch.equal(generate(one, ids), generate(other, ids))
    assert reused(one) == reused(other) == 64


def test_a_call_that_is_broken_off_leaves_it_right() -> None:
    model = model_of("qwen3_5")
    generate(model, prompt(60))
    ids = torch.cat((prompt(60), prompt(9)), dim=1)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, OWN, streamer=Breaks())
    expected = generate(model_of("qwen3_5", size=False), ids, None)
    assert torch.equal(generate(model, ids, OWN), expected) and reused(model) == 60
