"""Arguments of `generate` work with `self_speculative` as they do without."""

from __future__ import annotations

import copy
import itertools
import pickle
import string
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ssd_generation import (
    DraftingConfig,
    SelfSpeculativeConfig,
    SelfSpeculativeOutput,
    SkipConfig,
    disable_self_speculative,
    enable_self_speculative,
    is_self_speculative,
)
from ssd_generation.support.versions import CACHE
from tiny_models import left_padded, prompt, tiny_model

SKIP = SkipConfig(attention=[1], mlp=[2])
FIXED = DraftingConfig(policy="fixed", max_draft_length=5)
CONFIG = SelfSpeculativeConfig(SKIP, FIXED)
FREE = SelfSpeculativeConfig(SkipConfig(), FIXED)  # everything is accepted, so that texts end inside drafted blocks
NEW = 20


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model("llama"))


@pytest.fixture(scope="module")
def eager() -> PreTrainedModel:
    return enable_self_speculative(tiny_model("gemma2", attn_implementation="eager"))


def both(model: Any, config: SelfSpeculativeConfig, inputs: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    """Return the plain and the self-speculative output, from the same random state."""
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    torch.manual_seed(0)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(0)
    return plain, model.generate(**inputs, **options, self_speculative=config)


# --- logits processors under greedy decoding
# --------------------------------------------------------------------------------------------------


class Alternate(LogitsProcessor):
    """Logits processor that forbids even tokens at even lengths: depends on the length of the text."""

    supports_speculation = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 2 :: 2] = -float("inf")
        return scores


class ByRow(LogitsProcessor):
    """Logits processor that forbids other tokens in each row: depends on the number of the row."""

    supports_speculation = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape[0] in (1, 3)
        scores = scores.clone()
        for row in range(scores.shape[0]):
            scores[row, row * 20 : row * 20 + 20] = -float("inf")
        return scores


class AlternateInOrder(Alternate):
    """The same processor, without a declaration that it supports speculation."""

    supports_speculation = False


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[41], [63], [10, 5]]},
    "minimum length": {"min_new_tokens": 15, "eos_token_id": [5, 10, 36], "pad_token_id": 0},
    "forced end": {"forced_eos_token_id": 7, "eos_token_id": 7, "pad_token_id": 0},
    "suppressed": {"suppress_tokens": [41, 32, 53]},
    "sequence bias": {"sequence_bias": [[[41], -8.0], [[10], 5.0]]},
    "prefix function": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(batch * 9, batch * 9 + 30))},
    "custom": {"logits_processor": LogitsProcessorList([Alternate()])},
    "custom by row": {"logits_processor": LogitsProcessorList([ByRow()])},
    "custom in order": {"logits_processor": LogitsProcessorList([AlternateInOrder()])},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[41]], "min_new_tokens": 3},
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("rows", [1, 3])
def test_processors_act_on_every_position(model: PreTrainedModel, name: str, rows: int) -> None:
    inputs = {"input_ids": prompt(9, rows)}
    plain, ours = both(model, CONFIG, inputs, **PROCESSORS[name])
    assert torch.equal(plain, ours)
    without = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert plain.shape != without.shape or not torch.equal(plain, without), "the processor changed nothing"


NOT_FOR_DRAFTS = ("minimum length", "forced end", "prefix function", "custom in order")


@pytest.mark.parametrize("name", [n for n in PROCESSORS if n not in NOT_FOR_DRAFTS])
def test_processors_act_on_the_draft_as_on_the_target(model: PreTrainedModel, name: str) -> None:
    # With nothing skipped, a draft that is processed alike is always right.
    both(model, FREE, {"input_ids": prompt(9)}, **PROCESSORS[name])
    assert model.last_speculation.acceptance_rate == 1.0


# --- stopping
# --------------------------------------------------------------------------------------------------


class StopAfter(StoppingCriteria):
    """Stopping criterion that ends each row at a given length, and notes the texts it gets."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])


@pytest.mark.parametrize("lengths", [[13], [9 + NEW], [10], [11, 17, 13], [28, 12, 12]])
@pytest.mark.parametrize("eos", [None, 36])
@pytest.mark.parametrize("config", [CONFIG, FREE])
def test_a_criterion_is_met_anywhere_inside_a_block(
    model: PreTrainedModel, lengths: list[int], eos: int | None, config: SelfSpeculativeConfig
) -> None:
    inputs = {"input_ids": prompt(9, len(lengths))}
    seen = []
    outputs = []
    for request in (None, config):
        criterion = StopAfter(lengths)
        outputs.append(
            model.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([criterion]),
                self_speculative=request,
            )
        )
        seen.append(criterion.seen)
    assert torch.equal(*outputs)
    # Called as often, in the same order, with the same texts.
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_cache_ends_where_the_text_does(model: PreTrainedModel) -> None:
    # The text ends in the middle of a block: tokens verified after the end must not stay in the cache.
    criteria = StoppingCriteriaList([StopAfter([13])])
    plain, ours = both(model, FREE, {"input_ids": prompt(9)}, stopping_criteria=criteria, return_dict_in_generate=True)
    assert plain[CACHE].get_seq_length() == ours[CACHE].get_seq_length() == 12
    torch.testing.assert_close(ours[CACHE].layers[3].keys, plain[CACHE].layers[3].keys, rtol=1e-4, atol=1e-4)


def test_maximum_lengths(model: PreTrainedModel) -> None:
    for options in (
        {"max_length": 14, "max_new_tokens": None},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 7},
    ):
        plain, ours = both(model, FREE, {"input_ids": prompt(9)}, **options)
        assert torch.equal(plain, ours)
    # The user's criterion replaces that of the generation config.
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=40)])
    plain, ours = both(model, FREE, {"input_ids": prompt(9, 2)}, stopping_criteria=criteria)
    assert torch.equal(plain, ours) and ours.shape == (2, 40)


def test_maximum_time(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # A quarter of a second passes at every reading of the clock, however fast the machine is.
    clock = SimpleNamespace(time=itertools.count(0.0, 0.25).__next__)
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
    out = model.generate(prompt(9), max_new_tokens=400, max_time=5.0, do_sample=False, self_speculative=CONFIG)
    assert 9 + 10 < out.shape[1] < 9 + 400
    monkeypatch.undo()
    assert torch.equal(out, model.generate(prompt(9), max_length=out.shape[1], do_sample=False))


CHARACTERS = string.ascii_letters + string.digits + " ."


def characters() -> PreTrainedTokenizerFast:
    """Make a tokenizer for stop strings: each token is one character."""
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings_inside_a_block(model: PreTrainedModel) -> None:
    tokenizer = characters()
    free = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    text = "".join(CHARACTERS[token] for token in free)
    stopped = set()
    for at in (0, 1, 3, 6, 10):
        plain, ours = both(model, FREE, {"input_ids": prompt(9)}, stop_strings=text[at : at + 2], tokenizer=tokenizer)
        assert torch.equal(plain, ours)
        stopped.add(plain.shape[1])
    assert len(stopped) > 2


# --- streaming
# --------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_sees_the_same_calls(model: PreTrainedModel, rows: int) -> None:
    recorders = [Recorder(), Recorder()]
    for recorder, request in zip(recorders, (None, CONFIG), strict=True):
        model.generate(
            prompt(9, rows),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=36,
            pad_token_id=0,
            streamer=recorder,
            self_speculative=request,
        )
    assert recorders[0].calls == recorders[1].calls
    assert len(recorders[1].calls) > 3


# --- the output object
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("config", [CONFIG, FREE])
def test_scores_logits_states_and_attentions(eager: PreTrainedModel, rows: int, config: SelfSpeculativeConfig) -> None:
    # gemma2: one layer of two has a sliding window, shorter than the text.
    inputs = {"input_ids": prompt(11, rows)} if rows == 1 else left_padded([11, 6, 9])
    plain, ours = both(
        eager,
        config,
        inputs,
        max_new_tokens=9,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    assert isinstance(ours, SelfSpeculativeOutput)
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        theirs, mine = getattr(plain, name), getattr(ours, name)
        assert len(theirs) == len(mine) == 9
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.equal(ours.scores[3], ours.logits[3])
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for step in range(9):
        for layer, (a, b) in enumerate(zip(ours.hidden_states[step], plain.hidden_states[step], strict=True)):
            chosen = real if step == 0 else torch.ones((rows, 1), dtype=torch.bool)
            torch.testing.assert_close(a[chosen], b[chosen], rtol=1e-3, atol=1e-3, msg=f"hidden states {step} {layer}")
        for layer, (a, b) in enumerate(zip(ours.attentions[step], plain.attentions[step], strict=True)):
            assert a.shape == b.shape, (step, layer)
            if step:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=f"attentions {step} {layer}")


def test_rows_that_have_ended_keep_their_scores(model: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(9, 3)}
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    options = {
        "eos_token_id": int(free[1, 12]),
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    plain, ours = both(model, FREE, inputs, **options)
    assert torch.equal(plain.sequences, ours.sequences)
    assert len(plain.scores) == len(ours.scores)
    for step, (a, b) in enumerate(zip(ours.scores, plain.scores, strict=True)):
        alive = (plain.sequences[:, 9 : 9 + step] != options["eos_token_id"]).all(dim=1)
        torch.testing.assert_close(a[alive], b[alive], rtol=1e-4, atol=1e-4)


def test_statistics_are_in_the_output_and_on_the_model(model: PreTrainedModel) -> None:
    out = model.generate(
        prompt(9), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, self_speculative=CONFIG
    )
    assert out.speculation is model.last_speculation
    statistics = out.speculation
    assert statistics.generated_tokens == NEW and statistics.prompt_tokens == 9
    assert sum(statistics.tokens_per_round_histogram.values()) == statistics.rounds
    assert statistics.acceptance_by_depth and 0 <= statistics.acceptance_rate <= 1
    assert 0 < statistics.draft_seconds < statistics.total_seconds and statistics.verify_seconds > 0
    assert statistics.draft_seconds + statistics.verify_seconds + statistics.prompt_seconds <= statistics.total_seconds
    # One origin per new token; the first token is the target's.
    assert len(statistics.token_sources[0]) == NEW and statistics.token_sources[0][0] == "target"
    model.generate(prompt(9), max_new_tokens=3, do_sample=False)
    assert model.last_speculation is statistics, "a plain call leaves the last statistics alone"


# --- inputs
# --------------------------------------------------------------------------------------------------


def test_inputs_embeds(model: PreTrainedModel) -> None:
    for rows in (1, 2):
        embeddings = model.get_input_embeddings()(prompt(9, rows)).detach()
        plain, ours = both(model, CONFIG, {"inputs_embeds": embeddings})
        assert torch.equal(plain, ours) and ours.shape == (rows, NEW)


def test_a_prompt_in_chunks(model: PreTrainedModel) -> None:
    plain, ours = both(model, CONFIG, {"input_ids": prompt(23)}, prefill_chunk_size=8)
    assert torch.equal(plain, ours)


def test_only_the_new_tokens_of_a_conversation(model: PreTrainedModel) -> None:
    # The cache holds the conversation, the mask covers it, and `input_ids` holds the new turn alone.
    texts = []
    for request in (None, CONFIG):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(15), **{CACHE: cache})
        texts.append(
            model.generate(
                prompt(5, seed=3),
                attention_mask=torch.ones((1, 20), dtype=torch.long),
                **{CACHE: cache},
                max_new_tokens=NEW,
                do_sample=False,
                self_speculative=request,
            )
        )
        assert cache.get_seq_length() == 19 + NEW
    assert torch.equal(*texts)


def test_several_sequences_for_one_prompt(model: PreTrainedModel) -> None:
    out = model.generate(prompt(9), max_new_tokens=NEW, do_sample=True, num_return_sequences=4, self_speculative=CONFIG)
    assert out.shape == (4, 9 + NEW)
    assert len({tuple(row) for row in out.tolist()}) > 1


def test_a_cache_implementation_by_name(model: PreTrainedModel) -> None:
    plain, ours = both(model, CONFIG, {"input_ids": prompt(9)}, cache_implementation="dynamic")
    assert torch.equal(plain, ours)


def test_a_generation_config_object(model: PreTrainedModel) -> None:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, repetition_penalty=1.4, pad_token_id=0)
    plain = model.generate(prompt(9), generation_config=settings)
    assert torch.equal(plain, model.generate(prompt(9), generation_config=settings, self_speculative=CONFIG))
    settings.self_speculative = CONFIG.to_dict()
    assert torch.equal(plain, model.generate(prompt(9), generation_config=settings, self_speculative=True))


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.23"),
    reason="older transformers feed phi3 one token without a cache there, and their own text falls apart",
)
def test_rope_that_changes_once() -> None:
    # phi3 changes its rotary embedding, and drops its cache, once the text is longer than its training length.
    factors = [1.0, 1.5]
    for rows in (1, 2):
        model = enable_self_speculative(
            tiny_model(
                "phi3",
                max_position_embeddings=64,
                original_max_position_embeddings=16,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": factors * 2,
                    "long_factor": [8.0, 9.0, 7.0, 5.0],
                    "original_max_position_embeddings": 16,
                },
            )
        )
        plain, ours = both(model, CONFIG, {"input_ids": prompt(9, rows)})
        assert torch.equal(plain, ours)
        assert model.last_speculation.drafted_tokens > 0


def test_rope_that_depends_on_the_length() -> None:
    for rows in (1, 2):
        dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = enable_self_speculative(tiny_model("llama", max_position_embeddings=16, rope_parameters=dynamic))
        plain, ours = both(model, CONFIG, {"input_ids": prompt(9, rows)})
        assert torch.equal(plain, ours)


# --- requests -------------------------------------------------------------------------------------


def test_everything_that_can_be_asked_for(model: PreTrainedModel, tmp_path: Path) -> None:
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    CONFIG.save_pretrained(tmp_path)
    (tmp_path / "skip.json").write_text('{"attn": [1], "mlp": [2]}')
    requests = [CONFIG, SKIP, CONFIG.to_dict(), SKIP.to_dict(), str(tmp_path), tmp_path, tmp_path / "skip.json"]
    for request in requests:
        model.last_speculation = None
        got = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=request)
        assert torch.equal(got, plain), request
        assert model.last_speculation is not None
    for nothing in (None, False):
        model.last_speculation = None
        model.generate(prompt(9), max_new_tokens=2, do_sample=False, self_speculative=nothing)
        assert model.last_speculation is None


def test_a_stored_default_survives_saving(tmp_path: Path) -> None:
    model = enable_self_speculative(tiny_model(), default=CONFIG)
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    assert model.last_speculation is None, "a stored default is not used unasked"
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == "LlamaForCausalLM" and not is_self_speculative(again)
    assert again.config.architectures == ["LlamaForCausalLM"]
    enable_self_speculative(again)
    assert torch.equal(plain, again.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=True))
    assert again.last_speculation.drafted_tokens > 0


def test_the_threshold_is_carried_from_call_to_call(model: PreTrainedModel) -> None:
    config = SelfSpeculativeConfig(SKIP, DraftingConfig(policy="confidence", threshold=0.37, threshold_step=0.2))
    model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=config)
    first = model.last_speculation.policy_state["threshold"]
    assert first != 0.37
    model.generate(prompt(9), max_new_tokens=3, do_sample=False, self_speculative=config)
    assert model.last_speculation.policy_state["threshold"] != 0.37, "a new call started from scratch"


# --- switching on and off -------------------------------------------------------------------------


def test_enabling_changes_the_class_and_nothing_else() -> None:
    model = tiny_model()
    original, names = type(model), set(dir(model))
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    assert enable_self_speculative(model) is model
    enable_self_speculative(model)  # enabling twice has no further effect
    assert type(model) is not original and isinstance(model, original)
    assert (type(model).__name__, type(model).__module__) == (original.__name__, original.__module__)
    assert torch.equal(plain, model.generate(prompt(9), max_new_tokens=NEW, do_sample=False))
    assert disable_self_speculative(model) is model
    assert type(model) is original and set(dir(model)) == names
    disable_self_speculative(model)
    with pytest.raises(ValueError, match="self_speculative"):
        model.generate(prompt(9), max_new_tokens=2, self_speculative=CONFIG)


def test_an_enabled_model_can_be_pickled_and_copied() -> None:
    model = enable_self_speculative(tiny_model(), default=CONFIG)
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=True)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)):
        assert is_self_speculative(other) and type(other) is type(model)
        assert torch.equal(plain, other.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=True))
    assert disable_self_speculative(copy.deepcopy(model)) is not model and is_self_speculative(model)


def test_the_off_path_is_transformers_own(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a plain call no code of the library runs except the two lines that recognise it.
    from ssd_generation.decoding.loop import DecodingLoop
    from ssd_generation.drafting.self_drafter import SelfDrafter
    from ssd_generation.forward.forward import Forward
    from ssd_generation.forward.structure import skip_mode

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the library ran in a plain call")

    for kind in (DecodingLoop, SelfDrafter, Forward):
        monkeypatch.setattr(kind, "__init__", fail)
    monkeypatch.setattr(skip_mode.SkipMode, "__enter__", fail)
    out = model.generate(prompt(9), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert type(out[CACHE].layers[0]).__module__ == "transformers.cache_utils"
    model.generate(prompt(9), max_new_tokens=4, num_beams=2, do_sample=False)


def test_peers_still_do_what_transformers_does(model: PreTrainedModel) -> None:
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    assistant = tiny_model(seed=3)
    model.last_speculation = None
    for peer in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}):
        assert torch.equal(plain, model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, **peer)), peer
    assert model.last_speculation is None
    # An enabled model may also be another model's assistant.
    other = tiny_model(seed=3)
    wanted = other.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(wanted, other.generate(prompt(9), max_new_tokens=NEW, do_sample=False, assistant_model=model))


def test_peft_with_the_adapter_on_and_off() -> None:
    peft = pytest.importorskip("peft")
    # peft's own use of a renamed transformers property
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    base = tiny_model()
    before = base.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    wrapped.eval()
    assert enable_self_speculative(wrapped) is wrapped
    for _ in range(2):
        options = {"input_ids": prompt(9), "max_new_tokens": NEW, "do_sample": False}
        adapted = wrapped.generate(**options)
        assert not torch.equal(adapted, before)
        assert torch.equal(adapted, wrapped.generate(**options, self_speculative=CONFIG))
        with wrapped.disable_adapter():
            assert torch.equal(before, wrapped.generate(**options, self_speculative=CONFIG))
    assert wrapped.get_base_model().last_speculation.drafted_tokens > 0
    disable_self_speculative(wrapped)
    assert not is_self_speculative(wrapped)


def test_accelerate_offload() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model()
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" if i == 2 else "cpu" for i in range(4)}
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)
        enable_self_speculative(model)
        for skip in (SKIP, SkipConfig(attention=[2], mlp=[2]), SkipConfig(mlp=[2])):
            assert torch.equal(
                plain, model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=skip)
            )


# --- threads and failures -------------------------------------------------------------------------


def test_threads_generating_on_one_model(model: PreTrainedModel) -> None:
    configs = [CONFIG, SelfSpeculativeConfig(SkipConfig(attention=[0, 2], mlp=[1]), FIXED), None, None]
    expected = [model.generate(prompt(9, seed=i), max_new_tokens=NEW, do_sample=False) for i in range(4)]
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            for _ in range(4):
                got = model.generate(
                    prompt(9, seed=index), max_new_tokens=NEW, do_sample=False, self_speculative=configs[index]
                )
                if not torch.equal(got, expected[index]):
                    wrong.append(f"thread {index} gave another text")
        except Exception as error:
            wrong.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


class Asks(LogitsProcessor):
    """Logits processor that runs the model inside `generate`: it must see the target model, in the draft too."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.answers: set[tuple[float, ...]] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.answers.add(tuple(self.model(prompt(4)).logits[0, -1, :5].tolist()))
        self.model.generate(prompt(4), max_new_tokens=2, do_sample=False)
        return scores


def test_a_processor_that_runs_the_model_itself(model: PreTrainedModel) -> None:
    asks = Asks(model)
    plain, ours = both(model, CONFIG, {"input_ids": prompt(9)}, logits_processor=LogitsProcessorList([asks]))
    assert torch.equal(plain, ours)
    assert len(asks.answers) == 1


class Breaks(LogitsProcessor):
    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("after", [0, 1, 3, 7, 11])
def test_an_interruption_leaves_model_and_cache_usable(after: int) -> None:
    model = enable_self_speculative(tiny_model())
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            prompt(9),
            max_new_tokens=NEW,
            do_sample=False,
            **{CACHE: cache},
            logits_processor=LogitsProcessorList([Breaks(after)]),
            self_speculative=CONFIG,
        )
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(type(layer).__module__ == "transformers.cache_utils" for layer in cache.layers)
    assert torch.equal(plain, model.generate(prompt(9), max_new_tokens=NEW, do_sample=False))
    assert torch.equal(plain, model.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=CONFIG))


@pytest.mark.parametrize("carry", [None, True, False])
def test_what_a_policy_learnt_is_carried_where_asked(model: PreTrainedModel, carry: bool | None) -> None:
    drafting = DraftingConfig(policy="confidence", threshold=0.37, threshold_step=0.2, carry_state=carry)
    config = SelfSpeculativeConfig(SKIP, drafting)
    texts, thresholds = [], []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(prompt(9), max_new_tokens=NEW, do_sample=True, self_speculative=config))
        thresholds.append(model.last_speculation.policy_state["threshold"])
    assert (thresholds[0] == thresholds[1]) == (carry is False)
    assert torch.equal(*texts)  # the text depends on the seed alone
