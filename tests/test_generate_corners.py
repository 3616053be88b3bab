"""Corner cases in which a loop of drafting, acceptance and rollback could diverge from plain decoding unnoticed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import TopKLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.conditions import why_not_captured
from ssd_generation.harness.texts import find_difference
from ssd_generation.support.versions import CACHE
from tiny_models import LAYERS, prompt, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
SKIPPING = SelfSpeculativeConfig(SkipConfig([1], [2]), FIXED)
LOOKING_UP = SelfSpeculativeConfig(drafting=FIXED, lookup=True)
DRAFTS = pytest.mark.parametrize("config", [SKIPPING, LOOKING_UP], ids=["skip", "lookup"])


def enabled(family: str = "llama", **changes: Any) -> Any:
    model = enable_self_speculative(tiny_model(family, **changes))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def greedily(model: Any, ids: torch.Tensor, new: int = 20, **options: Any) -> Any:
    return model.generate(
        ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, **options}
    )


class _NoRepeats(TopKLogitsWarper):
    """Logits processor that depends on the text, derived from one that depends on the scores alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids, -float("inf"))


@DRAFTS
def test_a_class_derived_from_a_blind_processor_sees_the_text(config: SelfSpeculativeConfig) -> None:
    model, ids = enabled(), prompt(10)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([_NoRepeats(5)])}
    plain = greedily(model, ids, **options)
    assert torch.equal(plain, greedily(model, ids, **options, self_speculative=config))
    assert not torch.equal(plain, greedily(model, ids))


@DRAFTS
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_holds_what_plain_decoding_computed_after_the_end_of_a_row(
    config: SelfSpeculativeConfig, padded: bool
) -> None:
    model = enabled()
    early = 0
    for seed in range(6):
        ids = prompt(10, rows=3, seed=seed)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :4], mask[2, :6] = 0, 0
        # A token that one row generates early.
        end = int(greedily(model, ids, attention_mask=mask)[seed % 3, 10 + 3 + seed])
        caches = []
        texts = []
        for drafts in (None, config):
            cache = DynamicCache(config=model.config)
            options = {"attention_mask": mask, "eos_token_id": end, CACHE: cache}
            texts.append(greedily(model, ids, **options, self_speculative=drafts))
            caches.append(cache)
        assert torch.equal(*texts)
        early += int((texts[0][:, -2] == 0).any())
        seen = torch.cat((mask, mask.new_ones(3, caches[0].get_seq_length() - 10)), dim=1)[:, None, :, None]
        for plain, own in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.allclose(plain.keys * seen, own.keys * seen, atol=1e-4)
            assert torch.allclose(plain.values * seen, own.values * seen, atol=1e-4)
    assert early >= 3, "rows must end before others"


@pytest.mark.filterwarnings("ignore")
def test_a_criterion_of_the_user_says_where_texts_end() -> None:
    model, ids = enabled(), prompt(10, rows=3)
    said = int(greedily(model, ids, 3)[0, 12])
    options: dict[str, Any] = {
        "eos_token_id": said,
        "stopping_criteria": StoppingCriteriaList([EosTokenCriteria(model.config.vocab_size - 1)]),
    }
    plain = greedily(model, ids, **options)
    assert torch.equal(plain, greedily(model, ids, **options, self_speculative=SKIPPING))


@DRAFTS
def test_batches_across_the_length_at_which_the_embedding_changes(config: SelfSpeculativeConfig) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = enabled(max_position_embeddings=24, rope_parameters=rope)
    for seed in range(7, 11):
        ids = prompt(12, rows=3, seed=seed)
        assert torch.equal(greedily(model, ids, 18), greedily(model, ids, 18, self_speculative=config)), seed


class _StopsError(Exception):
    pass


class _Stops:
    """Streamer that cancels the call in the usual way, by raising an error."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.said: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.said.append(value.reshape(1, -1))
        if len(self.said) == self.calls:
            raise _StopsError

    def end(self) -> None:
        pass


@pytest.mark.parametrize("calls", [2, 5, 6])
def test_a_cancelled_call_leaves_a_cache_to_go_on_from(calls: int) -> None:
    model, ids = enabled(), prompt(10)
    expected = greedily(model, ids, calls - 1 + 8)
    everything = SelfSpeculativeConfig(drafting=FIXED)  # all its drafts are accepted
    for config in (None, SKIPPING, LOOKING_UP, everything):
        cache, streamer = DynamicCache(config=model.config), _Stops(calls)
        with pytest.raises(_StopsError):
            greedily(model, ids, **{CACHE: cache}, streamer=streamer, self_speculative=config)
        said = torch.cat(streamer.said, dim=1)
        assert cache.get_seq_length() == said.shape[1] - 1
        assert torch.equal(expected, greedily(model, said, 8, **{CACHE: cache}))


def test_numbers_of_the_config_are_not_written_into_recordings_for_good() -> None:
    model, ids = enabled("granite", logits_scaling=1.0), prompt(10)
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    greedily(model, ids, self_speculative=SKIPPING)
    model.config.logits_scaling = 8.0
    plain, own = greedily(model, ids, **options), greedily(model, ids, **options, self_speculative=SKIPPING)
    assert torch.allclose(torch.stack(plain.logits), torch.stack(own.logits), atol=1e-4)


@DRAFTS
def test_a_constraint_is_not_asked_what_follows_an_impossible_token(config: SelfSpeculativeConfig) -> None:
    model, ids = enabled(), prompt(10)
    generator = torch.Generator().manual_seed(1)
    paths = [torch.randint(1, 60, (8,), generator=generator).tolist() for _ in range(6)] + [ids[0, 2:10].tolist()]

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        said = text[10:].tolist()
        return sorted({path[len(said)] for path in paths if path[: len(said)] == said and said != path})

    plain = greedily(model, ids, 8, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(plain, greedily(model, ids, 8, prefix_allowed_tokens_fn=allowed, self_speculative=config))

    def allowed_by_row(row: int, text: torch.Tensor) -> list[int]:
        # Rows draft, accept and end independently of one another.
        said = text[10:].tolist()
        return sorted({path[len(said)] for path in paths[row:] if path[: len(said)] == said and said != path})

    for seed in range(4):
        batch = prompt(10, rows=3, seed=seed)
        plain = greedily(model, batch, 8, prefix_allowed_tokens_fn=allowed_by_row)
        own = greedily(model, batch, 8, prefix_allowed_tokens_fn=allowed_by_row, self_speculative=config)
        assert torch.equal(plain, own)
    with pytest.raises(ValueError, match="unsatisfiable"):  # the error of plain decoding
        greedily(model, batch, 9, prefix_allowed_tokens_fn=allowed_by_row, self_speculative=config)


def test_a_cache_without_a_config_is_as_good() -> None:
    model, ids = enabled(), prompt(10, rows=3)
    plain = greedily(model, ids)
    assert torch.equal(plain, greedily(model, ids, **{CACHE: DynamicCache()}, self_speculative=SKIPPING))


@pytest.mark.filterwarnings("ignore")
def test_attentions_that_sdpa_does_not_give() -> None:
    model, ids = enabled(), prompt(10)
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_attentions": True}
    plain, own = greedily(model, ids, 5, **options), greedily(model, ids, 5, **options, self_speculative=SKIPPING)
    assert own.attentions == plain.attentions


def test_what_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_generation.generation.request.automatic_config", lambda *args: pytest.fail("was measured"))
    model, ids = enabled(), prompt(10)
    for options, message in (
        ({"num_beams": 2}, r"beam search \(`num_beams=2`\)"),
        ({"cache_implementation": "paged"}, "continuous batching"),
    ):
        with pytest.raises(ValueError, match=message):
            greedily(model, ids, **options, self_speculative="auto")
    model.train()
    model.model.gradient_checkpointing = model.model.layers[0].gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"gradient checkpointing.*Call `model.eval\(\)`"):
        greedily(model, ids, self_speculative="auto")


@pytest.mark.filterwarnings("ignore")  # peft's own warnings
def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), adapter_name="default"
    )
    enable_self_speculative(tuned.base_model)
    with pytest.raises(ValueError, match=r"prompt learning.*LoRA"):
        greedily(tuned, prompt(10), 5, self_speculative=SKIPPING)


def test_a_call_for_hidden_states_does_not_end_recordings() -> None:
    model, ids = enabled(), prompt(10)
    plain = greedily(model, ids, 4, return_dict_in_generate=True, output_hidden_states=True)
    assert why_not_captured(model) is None
    again = greedily(model, ids, 4, return_dict_in_generate=True, output_hidden_states=True, self_speculative=SKIPPING)
    for mine, theirs in zip(again.hidden_states, plain.hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, theirs, strict=True))
    assert torch.equal(greedily(model, ids), greedily(model, ids, self_speculative=SKIPPING))
    model.model.layers[0].register_forward_hook(lambda *args: None)
    assert "hook" in str(why_not_captured(model))


class _FailsError(Exception):
    pass


def test_an_exception_while_drafting_lets_the_cache_go() -> None:
    model, ids = enabled(), prompt(10)
    calls: list[int] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(input_ids.shape[1])
        if len(calls) > 1 and calls[-1] > calls[-2] > 11:
            raise _FailsError
        return scores

    greedily(model, ids, self_speculative=SKIPPING)  # captures the passes
    cache = DynamicCache(config=model.config)
    with pytest.raises(_FailsError):
        greedily(
            model,
            ids,
            **{CACHE: cache},
            logits_processor=LogitsProcessorList([processor]),  # type: ignore[list-item]
            self_speculative=SKIPPING,
        )
    assert len(calls) > 2
    storage = weakref.ref(cache.layers[LAYERS - 1].keys.untyped_storage())
    del cache
    gc.collect()
    assert storage() is None


def test_a_call_that_fails_at_its_beginning_leaves_the_cache_as_it_was() -> None:
    model = enabled().to(torch.float64)  # these weights have no low-bit copies
    cache = DynamicCache(config=model.config)
    before = [type(layer) for layer in cache.layers]
    with pytest.raises(ValueError, match="float64"):
        greedily(
            model,
            prompt(10),
            **{CACHE: cache},
            self_speculative=SelfSpeculativeConfig(drafting=FIXED, precision="int8"),
        )
    assert [type(layer) for layer in cache.layers] == before


def test_ids_of_any_width_become_as_in_transformers() -> None:
    model, ids = enabled(), prompt(10)
    assert greedily(model, ids.int(), 3, self_speculative=SKIPPING).dtype == torch.long


def test_a_difference_is_found_whatever_the_call_has_asked_for() -> None:
    model, ids = enabled(), prompt(10)
    said = greedily(model, ids, 4)[0, 10:].tolist()
    other = [*said[:2], (said[2] + 1) % 50, said[3]]
    found = find_difference(model, {"input_ids": ids}, said, other, return_dict_in_generate=True, output_scores=False)
    assert found is not None and found.token == 3 and found.logit_margin is not None and found.logit_margin > 0


@pytest.mark.parametrize(("given", "message"), [("Auto", 'in lower case: "auto"'), ("int8", "is a precision")])
def test_names_that_are_nearly_right(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedily(enabled(), prompt(10), 3, self_speculative=given)
