"""Models with recurrent states: states are restored, and the text stays plain decoding's whatever is drafted."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers as tf
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from ssd_generation import (
    Draft,
    Drafter,
    DraftingConfig,
    LookupConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    draft_mode,
    enable_self_speculative,
)
from ssd_generation.cache import recurrent
from ssd_generation.cache.own_lists import class_of, lists_of
from ssd_generation.cache.recurrent import Checkpoint, has_states, keeps_states, knows_its_length
from ssd_generation.cli import main
from ssd_generation.decoding import pace
from ssd_generation.drafting.drafter import Texts
from ssd_generation.drafting.self_drafter import SelfDrafter
from ssd_generation.forward.captured import conditions
from ssd_generation.forward.eager import row_by_row
from ssd_generation.forward.eager.module_states import module_states
from ssd_generation.forward.eager.row_by_row import RowByRowPart
from ssd_generation.forward.eager.state_layers import StateLayer
from ssd_generation.forward.structure.sublayers import layout_of
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE, cache_argument
from ssd_generation.tuning.acceptance import why_not_judged
from ssd_generation.tuning.costs import _put_together, measure_costs
from tiny_models import VOCAB, left_padded, prompt, small, tiny_model

pytestmark = [
    pytest.mark.skipif(
        Version(tf.__version__) < Version("5.23"), reason="states were kept otherwise, and passes over several differ"
    ),
    # transformers warns that other packages' kernels for these layers are missing, and that jamba has no alternative.
    pytest.mark.filterwarnings("ignore"),
]

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_expand": 2,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8,
}  # fmt: skip
# Whole vectors for each token on every processor: where a remainder is computed apart, batches are not captured.
_ROTATED_WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_SCANNED: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **small(), **_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1,
    ),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**{**small(), **_DELTA, "head_dim": 64}, rope_parameters=_ROTATED_WHOLE),
    "falcon_h1": lambda: tf.FalconH1Config(**small(), **_MAMBA, mamba_d_ssm=64, head_dim=8),
    "bamba": lambda: tf.BambaConfig(**small(), **_MAMBA, attn_layer_indices=[1, 3]),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **small(), **_MAMBA, layer_types=["mamba", "attention"] * 2, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=24,
    ),
    "lfm2": lambda: tf.Lfm2Config(**small(), layer_types=["conv", "full_attention"] * 2),
    # Windows of 8 tokens, which are shorter than a rollback.
    "lfm3": lambda: tf.Lfm3Config(
        **small(), layer_types=["conv", "sliding_attention", "conv", "full_attention"], sliding_window=8, head_dim=8,
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **small(num_hidden_layers=None), layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=4,
        mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=16, head_dim=8,
    ),
    # Convolution states and keys and values of 8-token windows in one layer.
    "inkling": lambda: tf.InklingTextConfig(
        **small(), head_dim=8, swa_head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        sliding_window_size=8, layer_types=["hybrid_sliding", "hybrid"] * 2, mlp_layer_types=["dense", "sparse"] * 2,
        n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=16, d_rel=8,
        logits_mup_width_multiplier=2.0,
    ),
    # No keys at all, so its cache does not know its length.
    "mamba2": lambda: tf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_heads=4, head_dim=16, expand=2, state_size=8,
        n_groups=1, chunk_size=16,
    ),
    # Their scan over several tokens starts from an empty state, whatever the cache holds.
    "jamba": lambda: tf.JambaConfig(
        **small(), mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8, attn_layer_period=2,
        attn_layer_offset=1, num_experts=2, num_experts_per_tok=1,
    ),
    "mamba": lambda: tf.MambaConfig(**_SCANNED),
    "falcon_mamba": lambda: tf.FalconMambaConfig(**_SCANNED),
    # States in a list of its own cache class, next to the layers.
    "minimax": lambda: tf.MiniMaxConfig(
        **small(), head_dim=8, block_size=8, num_local_experts=4, num_experts_per_tok=2,
    ),
    # States on its modules, one set for all texts; a convolution whose state differs after several tokens; windows.
    "recurrent_gemma": lambda: tf.RecurrentGemmaConfig(
        **small(num_hidden_layers=6), lru_width=32, attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"],
    ),
}  # fmt: skip
FROM_NOTHING = ("jamba", "mamba", "falcon_mamba", "recurrent_gemma")
NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
LOOKUP = SelfSpeculativeConfig(
    lookup=LookupConfig(min_ngram=1), drafting=DraftingConfig(policy="fixed", max_draft_length=5)
)


def made(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not re.search("A_log|x_proj|dt_proj", name):  # these set the memory of a scan
                parameter.mul_(3)  # so that texts do not repeat one token
    return enable_self_speculative(model)


_MADE: dict[str, PreTrainedModel] = {}


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    name = request.param
    if name not in _MADE:
        _MADE[name] = made(FAMILIES[name]())
    return _MADE[name]


class Lies(Drafter):
    """A drafter that cycles through a script of `(drafted tokens, right ones among them)`."""

    def __init__(self, text: Sequence[int], script: Sequence[tuple[int, int]]) -> None:
        self.text, self.script = list(text), list(script)
        self.rounds: list[int] = []

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        count, right = self.script[len(self.rounds) % len(self.script)]
        at = len(texts.text(0))
        wanted = self.text[at : at + min(count, limits[0])]
        drafted = [token if place < right else (token + 1) % VOCAB for place, token in enumerate(wanted)]
        self.rounds.append(len(drafted))
        return Draft.of_tokens([drafted])


EVERY_PATTERN = [(count, right) for count in range(9) for right in range(count + 1)]


def decoded(model: Any, ids: torch.Tensor, new: int, request: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new, **options}
    return model.generate(ids, **options) if request is None else model.generate(
        ids, self_speculative=request, **options
    )  # fmt: skip


def gone_on(model: Any, text: torch.Tensor, new: int, request: Any, cache: Any) -> torch.Tensor:
    """Return a text with its continuation, given the cache of all but the last token of the text."""
    if knows_its_length(cache):
        output: torch.Tensor = decoded(model, text, new, request, **{CACHE: cache})
        return output
    if isinstance(request, Lies):
        request.text = request.text[text.shape[1] - 1 :]
    last = text[:, -1:]  # it may equal the padding token
    output = decoded(model, last, new, request, **{cache_argument(model): cache}, attention_mask=torch.ones_like(last))
    return torch.cat((text[:, :-1], output), dim=1)


def rounds_of(script: Sequence[tuple[int, int]], new: int) -> int:
    """Return the number of target passes for `new` tokens: the prompt's, and one for each round."""
    tokens, rounds = 1, 0
    while tokens < new:
        count, right = script[rounds % len(script)]
        tokens += min(count, right, new - tokens - 1) + 1
        rounds += 1
    return rounds + 1


@pytest.mark.parametrize("length", [3, 16, 37])
def test_every_pattern_of_acceptance(model: Any, length: int) -> None:
    ids, options = prompt(length), {"no_repeat_ngram_size": 2}  # no endless repetition of one token
    plain = decoded(model, ids, 200, **options)
    assert len(set(plain[0].tolist())) > 20
    assert torch.equal(decoded(model, ids, 200, Lies(plain[0].tolist(), EVERY_PATTERN), **options), plain)
    done = model.last_speculation
    assert done.refusal is None
    assert done.target_passes == rounds_of(EVERY_PATTERN, 200)


@pytest.mark.parametrize("request_", [NOTHING, LOOKUP, "auto"], ids=["nothing", "lookup", "auto"])
@pytest.mark.measures
def test_what_a_user_asks_for(model: Any, request_: Any) -> None:
    ids = prompt(9).repeat(1, 3)
    plain = decoded(model, ids, 60)
    assert torch.equal(decoded(model, ids, 60, request_), plain)
    done = model.last_speculation
    assert done.refusal is None
    assert request_ is not LOOKUP or done.drafted_tokens > 0


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run by the models' own code, as where there are no kernels."""
    monkeypatch.setattr(conditions, "why_not_on", lambda *_: "their own code is tested")


@pytest.mark.usefixtures("own_code")
def test_no_pass_takes_ever_more_tokens_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model._check().refusal is None  # before passes are counted
    monkeypatch.setattr(pace, "MOST_OWED", 6)
    passed: list[int] = []
    monkeypatch.setattr(Checkpoint, "passed", _counting(passed, Checkpoint.passed))
    ids, options = prompt(16), {"no_repeat_ngram_size": 2}
    plain = decoded(model, ids, 80, **options)
    lies = Lies(plain[0].tolist(), [(4, 1)])  # never fully accepted
    assert torch.equal(decoded(model, ids, 80, lies, **options), plain)
    # The owed tokens, and the pending one with a draft of 4, or without a draft where 6 or more are owed.
    assert max(passed) == 4 + 1 + 4
    assert passed.count(6 + 1) > 5


def _counting(passed: list[int], original: Any) -> Any:
    def counted(self: Checkpoint, tokens: torch.Tensor) -> None:
        passed.append(tokens.shape[1])
        original(self, tokens)

    return counted


def test_sampled_with_the_same_seed(model: Any) -> None:
    ids, options = prompt(21), {"do_sample": True, "top_k": 20}
    plain = decoded(model, ids, 100, **options)
    lies = Lies(plain[0].tolist(), [(5, 2), (3, 3), (1, 0), (6, 6), (4, 1)])
    assert torch.equal(decoded(model, ids, 100, lies, **options), plain)
    assert model.last_speculation.refusal is None


def states(cache: Any) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        for kept in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            yield from (state for state in kept.values() if state is not None)
        if getattr(layer, "keys", None) is not None:
            yield from (layer.keys, layer.values)


@pytest.mark.parametrize("new", [19, 20, 21, 22, 23])  # texts that end in every kind of round
def test_the_cache_is_given_back_as_plain_leaves_it(model: Any, new: int) -> None:
    ids = prompt(21)
    plain = decoded(model, ids, new, return_dict_in_generate=True)
    text = decoded(model, ids, new + 12)
    script = [(4, 1), (3, 3), (5, 0), (2, 1)]
    drafted = decoded(model, ids, new, Lies(text[0].tolist(), script), return_dict_in_generate=True)
    for one, other in zip(states(plain[CACHE]), states(drafted[CACHE]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    lies = Lies(text[0].tolist(), script)
    assert torch.equal(gone_on(model, drafted.sequences, 12, lies, drafted[CACHE]), text)


class LiesInRows(Lies):
    """A scripted drafter for several rows of known text; each row is at another place of the script."""

    def __init__(self, texts: torch.Tensor, script: Sequence[tuple[int, int]]) -> None:
        super().__init__([], script)
        self.texts = texts.tolist()

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        drafts = []
        for row, known in enumerate(self.texts):
            self.text = known
            count, right = self.script[(len(self.rounds) + 2 * row) % len(self.script)]
            at = len(texts.text(row))
            wanted = known[at : at + min(count, limits[row])]
            drafts.append([token if place < right else (token + 1) % VOCAB for place, token in enumerate(wanted)])
        self.rounds.append(max(map(len, drafts)))
        return Draft.of_tokens(drafts)


ROWS_SCRIPT = [(4, 1), (3, 3), (5, 0), (2, 1), (6, 6), (0, 0), (8, 5)]


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_of_a_batch_go_in_step(model: Any, sampled: bool) -> None:
    batch = left_padded([21, 9, 16])
    options = {"attention_mask": batch["attention_mask"], "no_repeat_ngram_size": 2, "do_sample": sampled}
    plain = decoded(model, batch["input_ids"], 40, **options)
    lies = LiesInRows(plain, ROWS_SCRIPT)
    assert torch.equal(decoded(model, batch["input_ids"], 40, lies, **options), plain)
    done = model.last_speculation
    assert done.refusal is None
    assert 13 < done.target_passes < 40
    assert torch.equal(decoded(model, batch["input_ids"], 40, LOOKUP, **options), plain)


@pytest.mark.parametrize("new", [30, 33])
def test_the_cache_of_a_batch_is_given_back_as_plain_leaves_it(model: Any, new: int) -> None:
    batch = left_padded([21, 9, 16])
    ids, options = batch["input_ids"], {"attention_mask": batch["attention_mask"], "return_dict_in_generate": True}
    options |= {"no_repeat_ngram_size": 2, "pad_token_id": 2}  # drafts are padded with 0
    text = decoded(model, ids, new + 10, **options).sequences
    # One row ends early and is padded.
    ends, goes_on, options["eos_token_id"] = next(
        (row, other, token)
        for row, other in itertools.permutations(range(3), 2)
        for place, token in enumerate(text[row, 24:38].tolist())
        if token not in (2, *text[row, 21 : 24 + place], *text[other, 21:48])
    )
    plain = decoded(model, ids, new, **options)
    assert bool((plain.sequences[ends, -4:] == 2).all()) and not bool((plain.sequences[goes_on, 21:48] == 2).all())
    drafted = decoded(model, ids, new, LiesInRows(text, ROWS_SCRIPT), **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert model.last_speculation.refusal is None
    for one, other in zip(states(plain[CACHE]), states(drafted[CACHE]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stop", [2, 5, 9])
def test_a_text_that_is_cancelled_can_be_gone_on_with(model: Any, stop: int) -> None:
    ids = prompt(21)
    plain = decoded(model, ids, 40)
    kind = class_of(model)
    cache = tf.DynamicCache(config=model.config) if kind is None else kind()

    class Cancels:
        seen = -1

        def put(self, value: torch.Tensor) -> None:
            self.seen += 1
            if self.seen == stop:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        decoded(
            model,
            ids,
            40,
            Lies(plain[0].tolist(), [(4, 2), (3, 3), (2, 0)]),
            streamer=Cancels(),
            **{cache_argument(model): cache},
        )
    if not knows_its_length(cache):  # the states cover the streamed text
        assert torch.equal(gone_on(model, plain[:, : 21 + stop], 40 - stop, NOTHING, cache), plain)
        return
    assert 21 <= cache.get_seq_length() < 21 + stop
    assert torch.equal(decoded(model, plain[:, : 21 + stop], 40 - stop, NOTHING, **{CACHE: cache}), plain)


def test_no_copy_is_left_after_the_call(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = Checkpoint.begin

    def watched(self: Checkpoint, *args: Any, **options: Any) -> Any:
        import weakref

        made.append(weakref.ref(self))
        return begin(self, *args, **options)

    monkeypatch.setattr(Checkpoint, "begin", watched)
    ids = prompt(21)
    plain = decoded(model, ids, 20)
    decoded(model, ids, 20, Lies(plain[0].tolist(), [(3, 1)]), return_dict_in_generate=True)
    assert made
    assert all(reference() is None for reference in made)


# ----------------------------------------------------------------------------------------------------------------------
# the model's own drafts


def own_drafts(model: Any) -> dict[str, SelfSpeculativeConfig]:
    """Return a config for each kind of draft, by skipped sub-layers or by precision."""
    layout = layout_of(model)
    mixers = [layer.index for layer in layout.layers if layer.attention is not None]
    attention = [index for index in mixers if index not in layout.without_keys]
    mlps = [layer.index for layer in layout.layers if layer.mlp is not None]
    stays = (attention or mixers)[-1]
    whole = next((index for index in mixers if index in mlps and index != stays), mixers[0])
    skips = {
        "a mixer": SkipConfig(attention=mixers[:1]),
        "all mixers but one": SkipConfig(attention=[i for i in mixers if i != stays]),
        **({"an MLP": SkipConfig(mlp=mlps[:1])} if mlps else {}),
        "a layer": SkipConfig(attention=[whole], mlp=[whole] if whole in mlps else []),
    }
    drafting = DraftingConfig(policy="fixed", max_draft_length=4)
    return {
        **{name: SelfSpeculativeConfig(skip, drafting=drafting) for name, skip in skips.items()},
        **{bits: SelfSpeculativeConfig(precision=bits, drafting=drafting) for bits in ("int8", "int4")},
    }


@pytest.mark.parametrize("rows_", [1, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_model_drafts_for_itself(model: Any, sampled: bool, rows_: int) -> None:
    ids = torch.cat([prompt(21), prompt(21).flip(1)][:rows_])
    plain = decoded(model, ids, 24, do_sample=sampled)
    for name, config in own_drafts(model).items():
        drafted = decoded(model, ids, 24, config, do_sample=sampled)
        assert torch.equal(plain, drafted), name
        statistics = model.last_speculation
        assert statistics.refusal is None and statistics.draft_passes > 0, name
        if name == "int8":
            # One rejection in 24 tokens lowers the rate by up to a seventh.
            assert statistics.acceptance_rate > 0.6


@pytest.mark.parametrize("rows_", [1, 2])
def test_a_draft_continues_from_the_states_after_the_last_token(
    model: Any, rows_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The skipped sub-layer adds nothing, so every drafted token is right but for those falsified here.
    kinds: tuple[Literal["mlp", "attention"], ...] = ("mlp", "attention")
    layer, kind = next((at, kind) for kind in kinds for at in layout_of(model).layers if getattr(at, kind) is not None)
    left_out = layout_of(model).sublayer(kind, layer.index)
    before = {p: p.detach().clone() for module in left_out.modules for p in module.parameters()}
    script, rounds = [(4, 1), (4, 4), (4, 0), (4, 2), (4, 3)], 0
    propose = SelfDrafter.propose

    def lying(self: SelfDrafter, texts: Any, limits: Sequence[int]) -> Draft:
        nonlocal rounds
        draft = propose(self, texts, limits)
        right = script[rounds % len(script)][1]
        rounds += 1
        if right < draft.tokens.shape[1]:
            draft.tokens[:, right] = (draft.tokens[:, right] + 1) % VOCAB
        return draft

    monkeypatch.setattr(SelfDrafter, "propose", lying)
    config = SelfSpeculativeConfig(
        SkipConfig(**{kind: [layer.index]}), drafting=DraftingConfig(policy="fixed", max_draft_length=4)
    )
    ids = prompt(21).repeat(rows_, 1)
    try:
        with torch.no_grad():
            for parameter in before:
                parameter.zero_()
        plain = decoded(model, ids, 50)
        drafted = decoded(model, ids, 50, config)
    finally:
        with torch.no_grad():
            for parameter, values in before.items():
                parameter.copy_(values)
    assert torch.equal(plain, drafted)
    assert model.last_speculation.target_passes == rounds_of(script, 50)


def test_the_cache_is_given_back_after_drafts_of_its_own(model: Any) -> None:
    options = {"return_dict_in_generate": True}
    plain = decoded(model, prompt(21), 19, **options)
    for config in own_drafts(model).values():
        drafted = decoded(model, prompt(21), 19, config, **options)
        for one, other in zip(states(plain[CACHE]), states(drafted[CACHE]), strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("by", ["lookup", "int8"])
@pytest.mark.parametrize("rows_", [1, 2])
@pytest.mark.parametrize("copies", [0, 5])
def test_states_that_find_no_room(by: str, rows_: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = made(FAMILIES["qwen3_next"]())
    ids = prompt(9).repeat(rows_, 3)
    config = LOOKUP if by == "lookup" else own_drafts(model)["int8"]
    options = {"return_dict_in_generate": True}
    plain = decoded(model, ids, 60, **options)
    decoded(model, ids, 60, config)  # the model's check runs before copies are counted
    made_before = 0
    copy = recurrent._copy

    def no_room(state: torch.Tensor) -> torch.Tensor:
        nonlocal made_before
        made_before += 1
        if made_before <= copies:
            return copy(state)
        with monkeypatch.context() as patched:
            message = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"
            patched.setattr(torch.Tensor, "clone", lambda _: (_ for _ in ()).throw(RuntimeError(message)))
            return copy(state)

    monkeypatch.setattr(recurrent, "_copy", no_room)
    with pytest.warns(UserWarning, match=r"decoded without drafts from here on: no memory is left for a checkpoint"):
        found = decoded(model, ids, 60, config, **options)
    assert torch.equal(found.sequences, plain.sequences)
    assert made_before == copies + 1  # it is tried only once
    for one, other in zip(states(plain[CACHE]), states(found[CACHE]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(recurrent, "_copy", copy)
    assert torch.equal(decoded(model, ids, 60, config), plain.sequences)
    assert model.last_speculation.accepted_tokens > 0


def test_skip_mode_as_a_user_runs_it(model: Any) -> None:
    text = prompt(9)
    with draft_mode(model, SkipConfig(attention=[0] if layout_of(model).layers[0].attention is not None else [])):
        drafted = decoded(model, text, 12)
        with torch.no_grad():
            while text.shape[1] < drafted.shape[1]:  # decode without a cache
                text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(drafted, text)


def test_what_is_not_there_yet_is_said(model: Any) -> None:
    assert has_states(model)
    layout = layout_of(model)
    mixers = [layer.index for layer in layout.layers if layer.attention is not None]
    attention = [index for index in mixers if index not in layout.without_keys] or mixers
    with pytest.raises(ValueError, match=r"context\. Keep at least one"):
        decoded(model, prompt(9), 5, SkipConfig(attention=attention))
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    plain, drafted = (decoded(model, prompt(9), 12, request, **options) for request in (None, LOOKUP))
    assert torch.equal(plain.sequences, drafted.sequences)
    assert "recurrent state" in model.last_speculation.refusal
    assert "recurrent states" in str(why_not_judged(model))


def test_inspect_says_what_works(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    for layer in layout_of(model).layers:
        for sub in (layer.attention, layer.mlp):
            assert sub is None or sub.name.split()[-1] in said


def test_costs_are_measured(model: Any) -> None:
    costs = measure_costs(model, LOOKUP)
    assert costs.plain_step > 0
    assert not has_states(tiny_model("llama"))


def test_costs_hold_the_rows_that_are_done_again(model: Any) -> None:
    for each, price in ((model, 2.0), (tiny_model("llama"), 1.5)):
        costs = _put_together(each, {1: 1.0, 4: 1.5, 6: 0.9}, 0.5)
        assert costs.verify_seconds(4) == price and costs.verify_seconds(6) == costs.plain_step == 1.0


@pytest.mark.parametrize("name", FROM_NOTHING)
def test_a_model_whose_passes_differ_is_decoded_plainly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))
    monkeypatch.setattr(row_by_row, "state_layers", lambda model: [])  # no other way to run it
    model: Any = made(FAMILIES[name]())
    ids = prompt(21)
    plain = decoded(model, ids, 60)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert torch.equal(decoded(model, ids, 60, Lies(plain[0].tolist(), EVERY_PATTERN)), plain)
    assert any("gives different logits from passes over one" in str(warning.message) for warning in given)
    assert "different logits" in model.last_speculation.refusal


@pytest.mark.parametrize("name", FROM_NOTHING)
@pytest.mark.usefixtures("own_code")
def test_a_scan_that_begins_with_nothing_is_gone_through_token_by_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = made(FAMILIES[name]())
    ids, options = prompt(21), {"no_repeat_ngram_size": 2}
    plain = decoded(model, ids, 40, **options)
    mixer = next(module for module in model.modules() if type(module).__name__.endswith(("Mixer", "RecurrentBlock")))
    whole = {module: name != "x_proj" for name, module in mixer.named_children() if isinstance(module, nn.Linear)}
    whole = {module: is_whole for module, is_whole in whole.items() if module is not getattr(mixer, "dt_proj", None)}
    widths: dict[int, set[int]] = {id(module.weight): set() for module in whole}
    linear = nn.functional.linear

    def watched(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        widths.get(id(weight), set()).add(x.shape[1])
        return linear(x, weight, *bias)

    monkeypatch.setattr(nn.functional, "linear", watched)
    lies = Lies(plain[0].tolist(), [(5, 5)])
    assert torch.equal(decoded(model, ids, 40, lies, **options), plain)
    assert model.last_speculation.refusal is None
    assert state_of(model).get(RowByRowPart).row_by_row == {False: row_by_row.STATES}
    # Most of a layer's weights are read once for the pending token and five drafted ones together.
    assert [6 in seen for seen in widths.values()] == list(whole.values())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", FROM_NOTHING)
def test_a_second_turn_is_read_as_transformers_reads_it(name: str) -> None:
    model: Any = made(FAMILIES[name]())
    ids, texts = prompt(21), []
    for request in (None, LOOKUP):
        first = decoded(model, ids, 20, request, return_dict_in_generate=True)
        again = torch.cat((first.sequences, prompt(6)), dim=1)
        if not knows_its_length(cache := first[CACHE]):
            again = again[:, first.sequences.shape[1] - 1 :]
        options = {cache_argument(model): cache, "attention_mask": torch.ones_like(again)}
        if not knows_its_length(cache):
            del options["attention_mask"]
        texts.append(decoded(model, again, 30, request, **options))
        assert request is None or model.last_speculation.refusal is None
    assert torch.equal(*texts)


def test_a_list_of_states_is_as_the_model_leaves_it() -> None:
    model: Any = made(FAMILIES["minimax"]())
    kind = class_of(model)
    assert kind is not None and class_of(tiny_model("llama")) is None
    ids, options = prompt(21), {"return_dict_in_generate": True}
    text = decoded(model, ids, 40)[0].tolist()
    plain = decoded(model, ids, 30, **options)[CACHE]
    mine = kind()
    drafted = decoded(model, ids, 30, Lies(text, EVERY_PATTERN), **{CACHE: mine}, **options)[CACHE]
    assert drafted is mine and type(drafted) is type(plain) is kind and not lists_of(drafted)
    assert [type(layer) for layer in drafted.layers] == [type(layer) for layer in plain.layers]
    assert [len(state) for state in drafted.linear_cache] == [len(state) for state in plain.linear_cache] == [0, 1] * 2
    for one, other in zip(drafted.linear_cache, plain.linear_cache, strict=True):
        if len(one):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    with pytest.raises(RuntimeError, match="crop"):
        drafted.crop(-1)  # its own method is unchanged


class Interrupts:
    """A streamer that makes the model read another text between tokens."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def put(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.model(input_ids=prompt(7), use_cache=True)

    def end(self) -> None: ...


def test_states_on_modules_belong_to_the_text() -> None:
    model: Any = made(FAMILIES["recurrent_gemma"]())
    found = module_states(model)
    assert found is not None and module_states(tiny_model("llama")) is None
    ids, options = prompt(21), {"return_dict_in_generate": True}
    plain = decoded(model, ids, 30, **options)
    left = found.read()
    lies = Lies(decoded(model, ids, 40)[0].tolist(), EVERY_PATTERN)
    drafted = decoded(model, ids, 30, lies, streamer=Interrupts(model), **options)
    assert torch.equal(plain.sequences, drafted.sequences) and model.last_speculation.refusal is None
    for ours, its in zip(found.read(), left, strict=True):
        for one, other in zip(ours, its, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    layers = [layer for layer in drafted[CACHE].layers if keeps_states(layer)]
    assert len(layers) == 4 and all(layer.recurrent_states == {0: None} for layer in layers)
    # The modules hold one set of states, so only the cache returned last can be continued.
    text = decoded(model, ids, 50)
    drafted = decoded(model, ids, 30, lies, **options)
    assert torch.equal(gone_on(model, drafted.sequences, 20, LOOKUP, drafted[CACHE]), text)


class Odd(nn.Module):
    """A layer whose result is, or is not, the output of its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.is_plain = [True]

    def forward(self, hidden_states: torch.Tensor, mask: Any = None, places: Any = None) -> Any:
        self.given = mask, places
        made = self.last(self.first(hidden_states))
        return (made, "more") if self.is_plain[self.calls % len(self.is_plain)] else (made + 1, "more")

    @property
    def calls(self) -> int:
        self.count = getattr(self, "count", -1) + 1
        return self.count


def patched(layer: StateLayer, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    patches = layer.patches()
    try:
        for each, forward in patches:
            each.__dict__["forward"] = forward
        return module(*args, **kwargs)
    finally:
        for each, _ in patches:
            each.__dict__.pop("forward", None)


@torch.no_grad()
def test_layers_of_states_in_every_form() -> None:
    x = torch.randn(2, 5, 4)
    for is_plain in (True, False):
        module = Odd()
        module.is_plain = [is_plain]
        layer = StateLayer(module)
        expected = module(x)
        for _ in range(2):  # the first pass finds which linear layer is last
            for given in (patched(layer, module, x), patched(layer, module, hidden_states=x)):
                torch.testing.assert_close(given[0], expected[0])
                assert given[1] == "more"
        mask, places = torch.arange(18).view(2, 9), torch.arange(5)
        patched(layer, module, x, mask=mask, places=places)
        assert torch.equal(module.given[0], mask) and torch.equal(module.given[1], places[4:])
        patched(layer, module, x, mask=mask[:, :5], places="else")
        assert torch.equal(module.given[0], mask[:, 4:5]) and module.given[1] == "else"
        torch.testing.assert_close(patched(layer, module, x[:, :1])[0], expected[0][:, :1])
    module = Odd()
    module.is_plain, module.count = [True, True, False], -1
    with pytest.raises(RuntimeError, match="Odd makes its results in more ways than one"):
        patched(StateLayer(module), module, x)


def test_what_the_own_code_does_with_rows_is_no_fault_of_captured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's own code states run row by row; captured passes were not tried, and are not forbidden."""
    monkeypatch.setattr("ssd_generation.tuning.plan_passes.is_free", lambda model: False)
    monkeypatch.setattr("ssd_generation.tuning.model_check._own_code", lambda: "this test's")  # nothing stored is read
    model: Any = made(FAMILIES["mamba"]())
    found = model._check(is_batch=True)
    assert found.refusal is None and found.capture_refusal is None and found.row_by_row is not None
