"""Prompts that a batch holds several times: each is read once, and the texts stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version

from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.decoding import prompt as prompt_reading
from ssd_generation.support.versions import CACHE, cache_argument
from test_recurrent import FAMILIES as RECURRENT
from test_recurrent import made
from tiny_models import left_padded, prompt, tiny_model

NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
LOOKUP = SelfSpeculativeConfig(
    lookup=LookupConfig(min_ngram=1), drafting=DraftingConfig(policy="fixed", max_draft_length=4)
)
OWN = SelfSpeculativeConfig(SkipConfig(attention=[1]), DraftingConfig(policy="fixed", max_draft_length=3))
METHODS = {"nothing": NOTHING, "lookup": LOOKUP, "own": OWN}
FAMILIES = ["llama", "gpt2", "gemma3", "mistral", "mixtral", "bloom", "deepseek_v3"]
STATES = ["qwen3_next", "falcon_h1", "mamba2", "lfm2", "jamba"]
NEW = 12


@pytest.fixture(autouse=True)
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each reading of prompts for a caller, in order."""
    found, read = [], prompt_reading._read

    def noting(forward: Any, config: Any, prompts: Any) -> Any:
        found.append(len(prompts.ids))
        return read(forward, config, prompts)

    monkeypatch.setattr(prompt_reading, "_read", noting)
    return found


def generate(model: Any, batch: dict[str, Any], request: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    asked = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(**batch, **asked, self_speculative=request)


def batch_of(rows: list[int]) -> dict[str, torch.Tensor]:
    """Return prompts by number, of lengths of their own, padded at the left."""
    batch = left_padded([30, 22, 27])
    return {name: value[rows] for name, value in batch.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_prompt_are_those_of_plain_generate(family: str, method: str, rows_read: list[int]) -> None:
    model = enable_self_speculative(tiny_model(family))
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 20}
    plain = generate(model, batch_of([0, 1]), **options)
    assert torch.equal(generate(model, batch_of([0, 1]), METHODS[method], **options), plain) and rows_read[-1] == 2


@pytest.mark.parametrize("rows", [[0, 1, 0], [2, 2, 2], [1, 0, 0, 1, 2], [0, 1, 2]], ids=str)
def test_rows_stay_in_their_places(rows: list[int], rows_read: list[int]) -> None:
    model = enable_self_speculative(tiny_model("llama"))
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain, drafted = generate(model, batch_of(rows), **options), generate(model, batch_of(rows), LOOKUP, **options)
    assert rows_read[-1] == len(set(rows)) and torch.equal(drafted.sequences, plain.sequences)
    for one, other in zip(plain.logits, drafted.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    for one, other in zip(plain[CACHE].layers, drafted[CACHE].layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-4) and torch.allclose(one.values, other.values, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # other packages' kernels for these layers are missing
@pytest.mark.skipif(Version(tf.__version__) < Version("5.23"), reason="states were kept otherwise")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", STATES)
def test_states_go_to_every_row(family: str, method: str, rows_read: list[int]) -> None:
    model = enable_self_speculative(made(RECURRENT[family]()))
    options = {"do_sample": True, "num_return_sequences": 3}
    plain = generate(model, {"input_ids": prompt(30)}, **options)
    drafted = generate(model, {"input_ids": prompt(30)}, METHODS[method], **options)
    assert rows_read[-1] == 1 and torch.equal(drafted, plain)


def test_states_of_all_rows_are_asked_for(rows_read: list[int]) -> None:
    model = enable_self_speculative(tiny_model("llama"))
    options = {"do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    plain, drafted = generate(model, batch_of([0, 0]), **options), generate(model, batch_of([0, 0]), NOTHING, **options)
    assert rows_read[-1] == 2 and torch.allclose(plain.hidden_states[0][-1], drafted.hidden_states[0][-1], atol=1e-4)


def test_the_same_tokens_behind_other_padding_are_another_prompt(rows_read: list[int]) -> None:
    model = enable_self_speculative(tiny_model("llama"))
    ids = torch.cat([prompt(30)] * 2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    plain, drafted = generate(model, batch), generate(model, batch, NOTHING)
    assert rows_read[-1] == 2 and torch.equal(drafted, plain)


def test_rows_that_continue_a_cache_are_all_read(rows_read: list[int]) -> None:
    model = enable_self_speculative(tiny_model("llama"))
    ids = prompt(40).repeat(2, 1)
    first = generate(model, {"input_ids": ids[:, :20]}, NOTHING, max_new_tokens=1, return_dict_in_generate=True)
    drafted = generate(model, {"input_ids": ids, cache_argument(model): first[CACHE]}, NOTHING)
    assert rows_read[-1] == 2 and torch.equal(drafted, generate(model, {"input_ids": ids}))
