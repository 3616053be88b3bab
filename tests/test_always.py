"""`always`: every `generate` call of an enabled model drafts, from any caller, and no call fails because of it."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from ssd_generation import (
    DraftingConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    disable_self_speculative,
    draft_mode,
    enable_self_speculative,
)
from ssd_generation.decoding.refusals import CannotDraft
from ssd_generation.generation import call
from ssd_generation.support.unasked import only_asked_drafts
from tiny_models import prompt, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=3)
SKIP = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED)
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def generate(model: Any, *args: Any, **options: Any) -> Any:
    return model.generate(prompt(9), *args, **{**OPTIONS, **options})


@pytest.fixture
def plain() -> torch.Tensor:
    return generate(tiny_model())  # type: ignore[no-any-return]


@pytest.fixture
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model(), default=SKIP, always=True)


def drafted(model: Any) -> bool:
    """Tell whether the last call drafted, and clear its statistics."""
    last, model.last_speculation = model.last_speculation, None
    return last is not None and last.refusal is None and last.drafted_tokens > 0


def test_every_call_drafts(model: PreTrainedModel, plain: torch.Tensor) -> None:
    for config in (None, GenerationConfig(**OPTIONS), model.generation_config):
        assert torch.equal(plain, generate(model, generation_config=config))
        assert drafted(model)
    other = tiny_model()
    torch.manual_seed(3)
    sampled = generate(other, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(sampled, generate(model, do_sample=True)) and drafted(model)
    # Called as by third-party code that does not know of the library.
    assert torch.equal(plain, type(model).generate(model, inputs=prompt(9), **OPTIONS)) and drafted(model)


def test_a_call_that_says_no_does_not_draft(model: PreTrainedModel, plain: torch.Tensor) -> None:
    for options in (
        {"self_speculative": False},
        {"generation_config": GenerationConfig(self_speculative=False, **OPTIONS)},
    ):
        assert torch.equal(plain, generate(model, **options))
        assert model.last_speculation is None
    enable_self_speculative(model, always=False)
    assert torch.equal(plain, generate(model)) and model.last_speculation is None
    assert model.generation_config.self_speculative == SKIP.to_dict(), "the default stays"


def test_a_generation_config_of_the_call_is_honoured(model: PreTrainedModel, plain: torch.Tensor) -> None:
    other = SelfSpeculativeConfig(SkipConfig(attention=[3], mlp=[0, 3]), FIXED)
    drafts = {}
    for name, config in (("stored", SKIP), ("other", other)):
        settings = GenerationConfig(self_speculative=config.to_dict(), **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(plain, generate(model, settings))
        drafts[name] = model.last_speculation.accepted_tokens, model.last_speculation.drafted_tokens
    generate(model, self_speculative=other)
    assert drafts["other"] == (model.last_speculation.accepted_tokens, model.last_speculation.drafted_tokens)
    assert drafts["other"] != drafts["stored"]
    with pytest.raises(TypeError, match="must be the config itself"):
        generate(model, GenerationConfig(self_speculative="/a/path", **OPTIONS))
    with pytest.raises(ValueError, match="9"):
        generate(model, GenerationConfig(self_speculative={"skip": {"attention": [9]}}, **OPTIONS))


def custom(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return input_ids


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": tiny_model(seed=1)},
        {"prompt_lookup_num_tokens": 3},
        {"custom_generate": custom},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3, **OPTIONS)},
    ],
    ids=["assistant", "lookup", "custom", "config"],
)
def test_another_way_of_decoding_wins(model: PreTrainedModel, options: dict[str, Any]) -> None:
    other = generate(tiny_model(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(other, generate(model, **options))
    assert model.last_speculation is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"generation_config": GenerationConfig(num_beams=3, **OPTIONS)}, "beam search"),
        ({"use_cache": False}, "use_cache=False"),
    ],
)
def test_a_call_that_cannot_draft_decodes_as_ever(model: PreTrainedModel, options: dict[str, Any], reason: str) -> None:
    other = generate(tiny_model(), **options)
    with pytest.warns(UserWarning, match=f"decoded without drafts.*{reason}") as given:
        assert torch.equal(other, generate(model, **options))
    assert len(given) == 1 and given[0].filename == __file__
    last = model.last_speculation
    assert last is not None and reason in str(last.refusal)
    assert last.generated_tokens == other.shape[1] - 9 and last.prompt_tokens == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(other, generate(model, **options)), "said once"
    with pytest.raises(ValueError, match=reason):
        generate(model, self_speculative=True, **options)


def test_training_with_gradient_checkpointing_decodes_as_ever(model: PreTrainedModel) -> None:
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*` is deprecated", category=FutureWarning)
    other = tiny_model().train()
    for one in (other, model.train()):
        one.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="gradient checkpointing"):
        assert torch.equal(generate(other), generate(model))
    assert "gradient checkpointing" in str(model.last_speculation.refusal)


def test_a_cache_that_cannot_be_drafted_from(
    model: PreTrainedModel, plain: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise CannotDraft("Layer 0 of the cache is a QuantizedLayer.")

    monkeypatch.setattr(call, "suited_cache", refuse)
    with pytest.warns(UserWarning, match=r"decodes it: Layer 0 of the cache is a QuantizedLayer\.$"):
        assert torch.equal(plain, generate(model))
    assert model.last_speculation.refusal == "Layer 0 of the cache is a QuantizedLayer"
    with pytest.raises(ValueError, match="QuantizedLayer"):
        generate(model, self_speculative=True)


class Nested(LogitsProcessor):
    """Logits processor that calls another model, as a critic would."""

    def __init__(self, critic: Any) -> None:
        self.critic, self.texts = critic, [torch.zeros(0)]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(self.critic.generate(input_ids, max_new_tokens=2, do_sample=False, pad_token_id=0))
        return scores


@pytest.mark.parametrize("outer", [None, False, True])
def test_a_call_from_inside_of_another_is_plain(model: PreTrainedModel, outer: Any, plain: torch.Tensor) -> None:
    critic = enable_self_speculative(tiny_model(seed=1), default=SKIP, always=True)
    assert torch.equal(
        plain, generate(model, logits_processor=LogitsProcessorList([Nested(critic)]), self_speculative=outer)
    )
    assert critic.last_speculation is None


def test_an_assistant_is_plain(model: PreTrainedModel, plain: torch.Tensor) -> None:
    other = tiny_model(seed=1)
    assert torch.equal(generate(other), generate(other, assistant_model=model))
    assert model.last_speculation is None


def test_what_compares_with_plain_decoding_gets_it(model: PreTrainedModel, plain: torch.Tensor) -> None:
    with only_asked_drafts():
        assert torch.equal(plain, generate(model)) and model.last_speculation is None
        generate(model, self_speculative=True)
        assert drafted(model)
    with draft_mode(model, SKIP.skip):
        draft = generate(model)
    assert model.last_speculation is None
    with draft_mode(tiny_model(), SKIP.skip) as other:
        assert torch.equal(draft, generate(other))


def test_it_is_stored_with_the_model(model: PreTrainedModel, plain: torch.Tensor, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(plain, generate(again)), "inert before it is enabled"
    assert not hasattr(again, "last_speculation")
    enable_self_speculative(again)
    assert torch.equal(plain, generate(again)) and drafted(again)
    disable_self_speculative(again)
    assert torch.equal(plain, generate(again)) and not hasattr(again, "last_speculation")


def test_a_default_of_before_stays_inert(plain: torch.Tensor, tmp_path: Path) -> None:
    enable_self_speculative(tiny_model(), default=SKIP).save_pretrained(tmp_path)
    again = enable_self_speculative(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(plain, generate(again)) and again.last_speculation is None
    enable_self_speculative(again, always=True)
    assert torch.equal(plain, generate(again)) and drafted(again)


def test_without_a_default_it_is_auto() -> None:
    model = enable_self_speculative(tiny_model(), always=True)
    assert model.generation_config.self_speculative == "auto"
    assert model.generation_config.self_speculative_always is True
    enable_self_speculative(model, default=SKIP, always=True)
    assert enable_self_speculative(model, always=True).generation_config.self_speculative == SKIP.to_dict()


def test_what_is_wrong_with_it_is_said_when_it_is_switched_on() -> None:
    with pytest.raises(TypeError, match=r"`always` must be True or False, but got 'yes'"):
        enable_self_speculative(tiny_model(), always="yes")  # type: ignore[arg-type]
    model = tiny_model()
    model.generation_config.self_speculative_always = "true"
    with pytest.raises(TypeError, match="self_speculative_always` must be true or false, but got 'true'"):
        enable_self_speculative(model)
    for stored, error in (({"skip": {"attention": [9]}}, ValueError), ("/a/path", TypeError)):
        model = tiny_model()
        model.generation_config.self_speculative = stored
        enable_self_speculative(model)  # the stored default is not used yet
        with pytest.raises(error):
            enable_self_speculative(model, always=True)
        assert getattr(model.generation_config, "self_speculative_always", None) is None
        model.generation_config.self_speculative_always = True
        with pytest.raises(error):
            enable_self_speculative(model)


def test_copies_and_threads(model: PreTrainedModel, plain: torch.Tensor) -> None:
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(plain, generate(other)) and drafted(other)
    texts: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: texts.append(generate(model))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3 and all(torch.equal(plain, text) for text in texts) and drafted(model)


def test_a_pipeline() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({character: i for i, character in enumerate("#abc ")}, [])), pad_token="#"
    )
    pipe: Any = pipeline("text-generation", tiny_model(), tokenizer=tokenizer)
    assert enable_self_speculative(pipe, default=SKIP, always=True) is pipe
    pipe("a b c", max_new_tokens=8, do_sample=False)
    assert drafted(pipe.model)
    assert disable_self_speculative(pipe) is pipe


def test_continuous_batching_is_plain(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    parent = type(model).__mro__[2]
    monkeypatch.setattr(parent, "init_continuous_batching", lambda self, *a, **k: begun.append(a), raising=False)
    with pytest.warns(UserWarning, match="continuous batching"):
        model.init_continuous_batching()
    assert begun == [()]
    assert "continuous batching" in str(model.last_speculation.refusal)
    enable_self_speculative(model, always=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.init_continuous_batching()
