"""Passes replayed at fixed addresses, with mock CUDA graphs: buffers are fixed, inputs are copied in, and the captured
function runs again."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, PreTrainedModel, StaticCache, TemperatureLogitsWarper
from transformers.cache_utils import DynamicCache

from run_again import Again
from ssd_generation import Draft, Drafter, DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.benchmark import gpu
from ssd_generation.cache import arena as arenas
from ssd_generation.cache.buffered_layers import BufferedLayer, add_buffers
from ssd_generation.decoding import choice_graph
from ssd_generation.decoding.choice import SampledChoice
from ssd_generation.decoding.choice_graph import ChoicePart
from ssd_generation.decoding.loop import DecodingLoop
from ssd_generation.decoding.processors import PureProcessors
from ssd_generation.drafting.drafter import Texts
from ssd_generation.forward.cuda_graph import compiled_ops as fused
from ssd_generation.forward.cuda_graph import graph_passes
from ssd_generation.forward.cuda_graph import graphs as replay
from ssd_generation.forward.cuda_graph.fixed_attention import FixedAttention
from ssd_generation.forward.cuda_graph.graph_passes import GraphPart, GraphPasses, draft_graphs, target_graphs
from ssd_generation.forward.cuda_graph.graph_table import GraphTable
from ssd_generation.forward.cuda_graph.graphs import Results
from ssd_generation.forward.cuda_graph.single_pass import Tokens
from ssd_generation.forward.structure.skip_mode import SkipMode
from ssd_generation.harness.texts import built_in_prompts
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning import plan_passes
from ssd_generation.tuning.costs import costs_of, measure_costs
from ssd_generation.tuning.plan_passes import batch_invariance_of
from test_capture import REFUSALS
from tiny_models import FAMILIES, LAYERS, VOCAB, even_model, prompt, tiny_model

NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
LOOKUP = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=5), lookup=True)


class Runs(Again):
    """A mock of CUDA graphs that counts captures and replays."""

    recorded = 0
    replays = 0

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        Runs.recorded += 1
        run = super().record(function)

        def counted() -> Results:
            Runs.replays += 1
            return run()

        return counted


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay.KINDS, "cpu", Runs)
    Runs.recorded = Runs.replays = 0


class Guesses(Drafter):
    """A drafter that is right up to a random token and wrong after it; the draft length changes from round to round."""

    def __init__(self, text: Sequence[int], lengths: Sequence[int] = (3, 0, 7, 1, 12, 5), seed: int = 0) -> None:
        self.text, self.lengths = list(text), lengths
        self.round = 0
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        length = min(self.lengths[self.round % len(self.lengths)], limits[0])
        self.round += 1
        at = len(texts.text(0))
        tokens = self.text[at : at + length]
        tokens += [0] * (length - len(tokens))
        wrong = int(torch.randint(0, length + 1, (), generator=self.generator))
        return Draft.of_tokens([[*tokens[:wrong], *((token + 1) % VOCAB for token in tokens[wrong:])]])


class Forbids(LogitsProcessor):
    """A processor that forbids repeating the last token, and reads a value for it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, int(input_ids[0, -1])] = -torch.inf
        return scores


def graphs_of(model: PreTrainedModel) -> Any:
    """Return the state of a model's graphs, untyped, since tests know which parts exist."""
    return state_of(model).get(GraphPart)


def choice_of(model: PreTrainedModel) -> Any:
    return state_of(model).get(ChoicePart).choice_graph


def plain_text(model: PreTrainedModel, new: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    options = {"inputs": prompt(9), "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(max_new_tokens=new, **options)


def texts(model: Any, request: Any, new: int = 40, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return plain `generate`'s text and the self-speculative one."""
    return plain_text(model, new, **options), plain_text(model, new, self_speculative=request, **options)


# ----------------------------------------------------------------------------------------------------------------------
# passes

# Not captured on the CPU either, for the same reasons (tests/test_capture.py), but for sliding windows.
NOT_REPLAYED = {"llama4", *(family for family, reason in REFUSALS.items() if reason is not None)}
if Version(transformers.__version__) < Version("5.24"):
    NOT_REPLAYED.add("gptj")  # its code of that time makes a batched product of unusual shapes
REPLAYED = [family for family in FAMILIES if family not in NOT_REPLAYED]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_whatever_is_drafted(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    plain = plain_text(model, 40)
    for drafter in (NOTHING, Guesses(plain[0].tolist())):
        assert torch.equal(plain, plain_text(model, 40, self_speculative=drafter))
    passes = graphs_of(model).passes.get(None)
    if passes is not None and passes.refusal is None:
        assert passes.is_checked and Runs.replays > 20 and passes.arena.keys
    assert (passes is None or passes.refusal is not None) == (family in NOT_REPLAYED)


@pytest.mark.parametrize("family", REPLAYED)
def test_a_replayed_pass_gives_the_models_logits(family: str) -> None:
    model = tiny_model(family)
    passes = GraphPasses(model, arenas.Arena(), Again(torch.device("cpu")), widths=(1, 4, 16))
    text = prompt(60)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=text[:, :20], **{CACHE: cache}, use_cache=True)
        add_buffers(cache)
        at = 20
        for count in (1, 3, 16, 2, 4, 9, 1):
            ids = text[:, at : at + count]
            known = ids[0].tolist()
            tokens = Tokens((), ids) if count % 2 else Tokens(known[: count // 4 * 2], ids[:, count // 4 * 2 :])
            found = passes.run(cache, tokens, at, at, records=True)
            assert found is not None, passes.refusal
            logits, choices = (result.clone() for result in found)
            expected = model(input_ids=ids, **{CACHE: cache}, use_cache=True).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert logits.shape == expected.shape and torch.equal(choices, logits[0].argmax(-1))
            at += count


def test_a_thousand_tokens_over_buckets_and_larger_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "BUCKETS", (32, 64, 128, 256, 512, 1024, 2048))
    model = enable_self_speculative(tiny_model("llama", max_position_embeddings=2048))
    plain = plain_text(model, 1000)
    short = plain_text(model, 20, self_speculative=NOTHING)
    before = graphs_of(model).arena.version
    drafted = plain_text(model, 1000, self_speculative=Guesses(plain[0].tolist()))
    assert torch.equal(plain, drafted) and torch.equal(plain[:, :29], short)
    assert graphs_of(model).arena.version > before, "the arena has grown"
    passes = graphs_of(model).passes[None]
    graphs = passes.table.graphs
    assert (16, 1024) in graphs and (16, 32) not in graphs, "what was recorded in the old one is gone"
    assert Runs.recorded >= 6 and Runs.replays > 150


def test_an_arena_that_grows_in_the_middle_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "BUCKETS", (32, 64, 128, 256))
    original = arenas.Arena.lend
    monkeypatch.setattr(arenas.Arena, "lend", lambda self, cache, slots, expected=0: original(self, cache, slots))
    model = enable_self_speculative(tiny_model("mistral"))
    plain = plain_text(model, 150)
    assert torch.equal(plain, plain_text(model, 150, self_speculative=Guesses(plain[0].tolist())))
    assert graphs_of(model).arena.version >= 4 and graphs_of(model).arena.capacity == 256


def test_a_text_longer_than_any_bucket_goes_on_by_the_models_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "BUCKETS", (32, 64))
    model = enable_self_speculative(tiny_model())
    plain = plain_text(model, 100)
    assert torch.equal(plain, plain_text(model, 100, self_speculative=Guesses(plain[0].tolist())))
    assert 0 < Runs.replays < 60 and graphs_of(model).passes[None].refusal is None


@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize(("narrow", "recording"), [(0.003, 0.02), (0.003, 1.0), (0.0039, 0.02)])
def test_where_a_narrower_pass_is_faster_and_as_exact_it_stands_in(
    narrow: float, recording: float, same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    original = GraphTable.run

    def run(self: GraphTable, width: int, bucket: int, tokens: Any, slot: int, position: int) -> Results:
        # A CPU's kernels round differently at other widths, so the usual pass replaces the narrower one here.
        widths.append(width)
        found = original(self, 16, bucket, tokens, slot, position)
        is_checked = graphs_of(model).passes[None].is_checked
        self.recording_seconds = recording if is_checked else 0.0
        if width == 16:
            return found
        self.inputs.setdefault(1, self.inputs[16])
        return found if same_bits or bucket < 512 else (found[0] * 1.001, found[1])

    class Timed(Runs):
        seconds = 1e-6

        def seconds_of(self, run: Callable[[], object]) -> float:
            before = len(widths)
            run()
            return 0.02 if len(widths) == before else narrow if widths[-1] == 1 else 0.004

    monkeypatch.setitem(replay.KINDS, "cpu", Timed)
    monkeypatch.setattr(GraphTable, "run", run)
    model = enable_self_speculative(even_model("llama", max_position_embeddings=2048))
    plain = plain_text(model, 600)
    plain_text(model, 20, self_speculative=NOTHING)
    passes = graphs_of(model).passes[None]
    assert passes.is_checked and passes.narrower_saves == 0
    monkeypatch.setattr(torch, "equal", lambda one, other: one.shape == other.shape)
    found, reason = batch_invariance_of(model, None)
    monkeypatch.undo()
    monkeypatch.setitem(replay.KINDS, "cpu", Timed)
    monkeypatch.setattr(GraphTable, "run", run)
    assert found is not None and reason is None
    assert (passes.narrower_saves > 0) == (narrow < 0.0038)
    for request in (NOTHING, Guesses(plain[0].tolist())):
        widths.clear()
        assert torch.equal(plain, plain_text(model, 600, self_speculative=request))
        if narrow > 0.0038:
            assert 1 not in widths
        elif request is NOTHING:
            # At once in the bucket that was checked; in later ones once it pays, if the bits agree there, too.
            assert widths[:200].count(1) > 190
            assert (widths[-50:].count(1) > 45) == (recording < 1 and same_bits)
    costs = costs_of(model, SelfSpeculativeConfig(lookup=True))
    assert costs.verify_seconds(1) == costs.plain_step == (narrow if narrow < 0.0038 else 0.004)
    assert costs.verify_seconds(2) == costs.verify_seconds(16) == 0.004


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_called_bitwise_is(family: str, dtype: torch.dtype) -> None:
    model = enable_self_speculative(even_model(family).to(dtype))
    options = {"output_logits": True, "return_dict_in_generate": True}
    first: Any = plain_text(model, 20, self_speculative=NOTHING, **options)
    assert first.speculation.exactness == "numeric", "its first passes were the model's own"
    undrafted: Any = plain_text(model, 60, self_speculative=NOTHING, **options)
    drafted: Any = plain_text(model, 60, self_speculative=Guesses(undrafted.sequences[0].tolist()), **options)
    assert drafted.speculation.replayed_passes == drafted.speculation.target_passes - 1 < 55
    assert undrafted.speculation.replayed_passes == undrafted.speculation.target_passes - 1 == 59
    passes = graphs_of(model).passes[None]
    # A CPU's kernels may sum a row differently depending on its place; the report then says so.
    assert undrafted.speculation.exactness == ("bitwise" if passes.keeps_bits else "numeric")
    if passes.keeps_bits:
        assert drafted.speculation.exactness == "bitwise" and torch.equal(undrafted.sequences, drafted.sequences)
        assert all(torch.equal(*pair) for pair in zip(undrafted.logits, drafted.logits, strict=True))
    else:
        assert "depend on its place" in undrafted.speculation.exactness_reason


class _Pretended:
    """Mock passes whose logits are a function of the tokens and, with `uneven`, of their places."""

    widths, refusal, is_checked, keeps_bits = (16,), None, True, None

    def __init__(self, uneven: float, is_free: bool = True) -> None:
        self.arena, self.uneven, self.is_free = arenas.Arena(), uneven, is_free

    def run(self, cache: Any, tokens: Tokens, *args: Any, **kwargs: Any) -> Results | None:
        ids = tokens.others
        assert ids is not None
        logits = ids[..., None].float() + self.uneven * torch.arange(ids.shape[1])[None, :, None]
        return (logits, logits[0, :, 0].long()) if self.is_free else None

    def use_narrower(self, uses: bool) -> None:
        assert not uses

    def consider_narrower(self, *_: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        (_Pretended(0.0), None),
        (_Pretended(1e-6), "depend on its place"),
        (_Pretended(0.0, is_free=False), "another text was being decoded"),
    ],
)
def test_what_the_certificate_says(passes: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_passes, "target_graphs", lambda model: passes)
    way, why = batch_invariance_of(tiny_model(), None)
    if reason is None:
        assert why is None and way is not None and way.is_replayed and way.widths == (16,)
    else:
        assert way is None and reason in str(why)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.3, "repetition_penalty": 1.2},
        {"top_p": 0.9, "min_new_tokens": 12},
    ],
)
def test_sampled_text_is_that_of_the_seed(options: dict[str, Any]) -> None:
    model = enable_self_speculative(tiny_model("qwen2"))
    plain = plain_text(model, 40, do_sample=True, **options)
    state = torch.get_rng_state()
    drafted = plain_text(model, 40, do_sample=True, self_speculative=Guesses(plain[0].tolist()), **options)
    assert torch.equal(plain, drafted) and torch.equal(state, torch.get_rng_state())
    assert Runs.replays > 10


def test_sampling_is_recorded_where_it_is_a_function_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model("qwen2"))
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    eager: list[int] = []
    monkeypatch.setattr(SampledChoice, "choose", _counted(SampledChoice.choose, eager))
    for recorded, more in ((True, {}), (False, {"repetition_penalty": 1.2}), (True, {"typical_p": 0.95})):
        plain = plain_text(model, 90, **options, **more)
        for request in (NOTHING, Guesses(plain[0].tolist(), lengths=(3, 0, 14, 1, 12, 5))):
            eager.clear()
            assert torch.equal(plain, plain_text(model, 90, self_speculative=request, **options, **more))
            rounds = model.last_speculation.target_passes - 1
            # The first token, and rounds before passes are replayed.
            assert (len(eager) <= 4) if recorded else (len(eager) == rounds + 1)
    known = choice_of(model)
    assert len(known._recorded) == 2 and set(next(iter(known._recorded.values()))) >= {1, 4, 16}
    plain_text(model, 8, self_speculative=NOTHING, do_sample=True, temperature=0.5)
    assert len(known._recorded) == 2, "not for so few tokens"


def _counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return counted


def test_where_sampling_cannot_be_recorded_it_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = enable_self_speculative(tiny_model())
    plain_text(model, 20, self_speculative=NOTHING)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    plain = plain_text(model, 60, **options)
    original = Runs.record

    def fails(self: Runs, function: Callable[[], Results]) -> Callable[[], Results]:
        if len(function()) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended).")
        return original(self, function)

    monkeypatch.setattr(Runs, "record", fails)
    for _ in range(2):
        assert torch.equal(plain, plain_text(model, 60, self_speculative=Guesses(plain[0].tolist()), **options))
        assert model.last_speculation.replayed_passes == model.last_speculation.target_passes - 1
    assert "out of memory" in choice_of(model).refusal and "Sampling is no longer replayed" in caplog.text


def test_where_there_is_no_room_for_noise_it_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model())
    plain_text(model, 20, self_speculative=NOTHING)
    options = {"do_sample": True, "temperature": 0.8}
    plain = plain_text(model, 60, **options)

    def short(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (pretended).")

    monkeypatch.setattr(choice_graph.ChoiceGraph, "__init__", short)
    assert torch.equal(plain, plain_text(model, 60, self_speculative=Guesses(plain[0].tolist()), **options))
    assert choice_of(model) is None


def test_the_noise_of_a_call_is_its_own() -> None:
    model = enable_self_speculative(tiny_model())
    plain_text(model, 20, self_speculative=NOTHING)
    options = {"do_sample": True, "temperature": 0.8}
    plain = plain_text(model, 60, **options)
    other = SampledChoice(1, torch.device("cpu"))
    processors = PureProcessors([TemperatureLogitsWarper(0.8)])
    drafts = Guesses(plain[0].tolist())
    assert torch.equal(plain, plain_text(model, 60, self_speculative=drafts, **options))
    known = choice_of(model)
    assert known.lend(other), "the call before has ended"
    assert torch.equal(plain, plain_text(model, 60, self_speculative=drafts, **options)), "and draws elsewhere"
    # With more steps than the buffer holds, the known noise is moved out of it.
    logits = torch.randn(1, 3, VOCAB)
    assert known.choose(processors, logits, other, 50) is not None and other.ring is known.noise
    before = {step: noise.clone() for step, noise in other._noise.items()}
    assert known.choose(processors, logits, other, 80) is None and other.ring is None
    assert len(before) == 53 and all(torch.equal(noise, other._noise[step]) for step, noise in before.items())
    other.end(0)


def test_an_impossible_token_ends_a_sampled_call_as_plain_does() -> None:
    model = enable_self_speculative(tiny_model())
    options = {"do_sample": True, "temperature": 0.8}
    plain = plain_text(model, 40, self_speculative=NOTHING, **options)
    original = GraphPasses.run

    def not_a_number(self: GraphPasses, cache: Any, tokens: Any, slot: int, *args: Any, **kwargs: Any) -> Any:
        found = original(self, cache, tokens, slot, *args, **kwargs)
        if found is not None:
            found[0][:, max(30 - slot, 0) :] = torch.nan
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphPasses, "run", not_a_number)
        streamed: list[int] = []
        streamer: Any = SimpleNamespace(put=lambda tokens: streamed.extend(tokens.flatten().tolist()), end=lambda: None)
        with pytest.raises(RuntimeError, match="probability"):
            plain_text(model, 40, self_speculative=Guesses(plain[0].tolist()), streamer=streamer, **options)
    assert streamed == plain[0, :31].tolist(), "what comes before it is committed"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_draft_with_sub_layers_left_out_is_replayed(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    skip = SkipConfig(attention=[1], mlp=[0, 2])
    config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=4))
    plain, drafted = texts(model, config, 60)
    assert torch.equal(plain, drafted)
    passes = draft_graphs(model, (skip, None), SkipMode(model, skip))
    assert passes is not None and passes.table.graphs and passes.refusal is None
    replayed_rate = model.last_speculation.acceptance_rate
    replay.KINDS.pop("cpu")
    state_of(model).drop()
    drafted = plain_text(model, 60, self_speculative=config)
    assert abs(model.last_speculation.acceptance_rate - replayed_rate) < 0.02


def test_a_draft_goes_on_by_the_models_own_code_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model())
    config = SelfSpeculativeConfig(SkipConfig(mlp=[3]), DraftingConfig(policy="fixed", max_draft_length=4))
    plain_text(model, 20, self_speculative=NOTHING)
    plain, drafted = texts(model, config, 60)
    accepted = model.last_speculation.accepted_by_depth
    original, runs = GraphPasses.run, Counter[bool]()

    def fails_now_and_then(self: GraphPasses, *args: Any, **kwargs: Any) -> Results | None:
        is_draft = self.widths == (1,)
        runs[is_draft] += 1
        return None if is_draft and runs[True] % 3 == 0 else original(self, *args, **kwargs)

    monkeypatch.setattr(GraphPasses, "run", fails_now_and_then)
    assert torch.equal(plain, drafted)
    assert torch.equal(plain, plain_text(model, 60, self_speculative=config))
    # The draft continues after its earlier tokens; otherwise later ones would differ.
    assert runs[True] > 10 and model.last_speculation.accepted_by_depth == accepted and sum(accepted[2:]) > 0


def test_a_draft_that_leaves_nothing_out_is_always_right() -> None:
    model = enable_self_speculative(tiny_model())
    config = SelfSpeculativeConfig(SkipConfig(), DraftingConfig(policy="fixed", max_draft_length=3), lookup=None)
    passes = draft_graphs(model, (SkipConfig(), None), SkipMode(model, SkipConfig()))
    assert passes is not None
    plain, drafted = texts(model, config, 40)
    assert torch.equal(plain, drafted)


# ----------------------------------------------------------------------------------------------------------------------
# what a graph may contain


class _Looked(TorchDispatchMode):
    """Record of all operations with their shapes, and of the outside memory that they read or write."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "is_nonzero", "_to_copy.cpu")

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.outside: set[int] = set()
        self._made: set[int] = set()
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} reads a value"
        given = list(torch.utils._pytree.tree_leaves((args, kwargs)))
        for leaf in given:
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._made:
                self.outside.add(leaf.data_ptr())
        result = func(*args, **kwargs)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                inputs = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
                if leaf.untyped_storage()._cdata not in inputs:
                    self._made.add(leaf.untyped_storage()._cdata)
                self._alive.append(leaf)
        numbers = [leaf if not isinstance(leaf, torch.Tensor) else tuple(leaf.shape) for leaf in given]
        self.operations.append((name, numbers))
        return result


@pytest.mark.parametrize("family", REPLAYED)
def test_nothing_in_a_pass_reads_a_value_or_moves(family: str) -> None:
    model = tiny_model(family)
    recorded: list[Callable[[], Results]] = []

    class Keeps(Again):
        def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
            recorded.append(function)
            return super().record(function)

    passes = GraphPasses(model, arenas.Arena(), Keeps(torch.device("cpu")))
    cache = DynamicCache(config=model.config)
    text = prompt(80)
    seen = []
    with torch.no_grad():
        model(input_ids=text[:, :20], **{CACHE: cache}, use_cache=True)
        add_buffers(cache)
        assert passes.run(cache, Tokens((), text[:, 20:22]), 20, 20, records=True) is not None, passes.refusal
        ((width, _),) = passes.table.graphs
        (compute,) = recorded
        for slot, ids in ((20, text[:, 20:22]), (31, text[:, 40:49]), (200, text[:, 60:61])):
            passes.table.inputs[width].set(Tokens((), ids), slot, slot)
            with _Looked() as looked:
                compute()
            seen.append(looked)
    assert seen[0].operations == seen[1].operations == seen[2].operations
    assert seen[0].outside == seen[1].outside == seen[2].outside


def test_the_look_notices() -> None:
    with pytest.raises(AssertionError, match="reads a value"), _Looked():
        torch.ones(3).sum().item()
    with _Looked() as one:
        torch.arange(3)[:2] + 1
    with _Looked() as other:
        torch.arange(4)[:3] + 1
    assert one.operations != other.operations


class _Waits(TorchFunctionMode):
    """Count of the operations that make the host wait for its device."""

    NAMES = frozenset(
        {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "__contains__", "equal"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES and getattr(args[0], "shape", None) is not None:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 30}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("drafts", ["nothing", "lookup"])
def test_the_host_waits_once_a_round(drafts: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model())
    config = NOTHING
    if drafts == "lookup":
        config = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=5), lookup=True)
    plain_text(model, 30, self_speculative=config, **options)
    waits: list[int] = []
    original = DecodingLoop._round

    def counted(self: DecodingLoop, *args: Any) -> bool:
        with _Waits() as mode:
            running = original(self, *args)
        waits.append(sum(mode.count.values()))
        return running

    monkeypatch.setattr(DecodingLoop, "_round", counted)
    plain_text(model, 30, self_speculative=config, eos_token_id=VOCAB + 5, **options)
    assert len(waits) > 3 and waits[0] <= 3 and set(waits[1:]) == {1}, "at first, it reads the prompt"


# ----------------------------------------------------------------------------------------------------------------------
# the cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_cache_comes_back_as_plain_decoding_leaves_it(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    plain_text(model, 20, self_speculative=NOTHING)
    options = {"return_dict_in_generate": True}
    plain: Any = plain_text(model, 30, **options)
    drafted: Any = plain_text(model, 30, self_speculative=Guesses(plain.sequences[0].tolist()), **options)
    mine = {
        buffer.untyped_storage()._cdata for buffer in (*graphs_of(model).arena.keys, *graphs_of(model).arena.values)
    }
    for one, other in zip(plain[CACHE].layers, drafted[CACHE].layers, strict=True):
        assert type(one) is type(other) and one.get_seq_length() == other.get_seq_length()
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)
        assert other.keys.untyped_storage()._cdata not in mine
    # Both caches continue to the same text, even though the arena serves another call in between.
    plain_text(model, 30, self_speculative=NOTHING)
    ids = torch.cat((plain.sequences, prompt(5)), dim=1)
    again = [
        model.generate(ids, **{CACHE: result[CACHE]}, max_new_tokens=12, do_sample=False, **extra)
        for result, extra in ((plain, {}), (drafted, {"self_speculative": NOTHING}))
    ]
    assert torch.equal(*again)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("prompted", [5, 12])
def test_a_static_cache_is_used_and_given_back(family: str, prompted: int) -> None:
    model = enable_self_speculative(tiny_model(family))
    options = {"return_dict_in_generate": True, "cache_implementation": "static", "inputs": prompt(prompted)}
    for new in (2, 30):
        plain: Any = plain_text(model, new, **options)
        drafted: Any = plain_text(model, new, self_speculative=Guesses(plain.sequences[0].tolist()), **options)
        assert torch.equal(plain.sequences, drafted.sequences)
        assert type(drafted[CACHE]) is StaticCache
        for one, other in zip(plain[CACHE].layers, drafted[CACHE].layers, strict=True):
            assert one.get_seq_length() == other.get_seq_length() and one.keys.shape == other.keys.shape
            # The first slot of a full window is no longer visible.
            hidden = int(one.is_sliding and one.get_seq_length() >= one.keys.shape[2])
            torch.testing.assert_close(one.keys[:, :, hidden:], other.keys[:, :, hidden:])
            torch.testing.assert_close(one.values[:, :, hidden:], other.values[:, :, hidden:])
            assert bool(one.cumulative_length == other.cumulative_length) or hidden


def test_an_arena_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    original = arenas.Arena._make

    def short(self: arenas.Arena, layers: Any, capacity: int) -> None:
        if capacity > 512:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended).")
        original(self, layers, capacity)

    monkeypatch.setattr(arenas.Arena, "_make", short)
    arena, cache = arenas.Arena(), DynamicCache()
    cache.update(torch.ones((1, 2, 5, 8)), torch.ones((1, 2, 5, 8)), 0)
    add_buffers(cache)
    assert arena.lend(cache, 300, expected=2000) and arena.capacity == 512
    with pytest.raises(torch.OutOfMemoryError):
        arena.lend(cache, 600)
    assert arena.holds(cache) and torch.equal(cache.layers[0].keys, torch.ones((1, 2, 5, 8)))
    arena.free()
    assert arena.bytes > 0, "a text has it"
    arena.take_back(cache)
    arena.free()
    assert arena.bytes == 0 and torch.equal(cache.layers[0].keys, torch.ones((1, 2, 5, 8)))


def test_a_cache_that_is_lent_to_one_is_not_lent_to_another() -> None:
    arena = arenas.Arena()
    caches = []
    for _ in range(2):
        cache = DynamicCache()
        cache.update(torch.ones((1, 2, 5, 8)), torch.ones((1, 2, 5, 8)), 0)
        add_buffers(cache)
        caches.append(cache)
    first, second = caches
    assert arena.lend(first, 10) and not arena.lend(second, 10)
    assert type(second.layers[0]) is BufferedLayer and arena.holds(first)
    del first, caches, cache
    gc.collect()
    assert arena.lend(second, 10)
    assert not bool(arena.keys[0][:, :, 5:].any()), "nothing of the text before is left"
    assert not arena.lend(second, arenas.BUCKETS[-1] + 1)


# ----------------------------------------------------------------------------------------------------------------------
# failures


def test_costs_are_measured_of_what_is_replayed_and_give_the_arena_back() -> None:
    model = enable_self_speculative(tiny_model())
    costs = measure_costs(model, SelfSpeculativeConfig(SkipConfig(attention=[1])))
    assert costs.plain_step > 0 and graphs_of(model).passes[None].is_checked
    assert Runs.replays > 20 and graphs_of(model).passes[SkipConfig(attention=[1]), None].table.graphs
    plain, drafted = texts(model, NOTHING, 20)
    assert torch.equal(plain, drafted) and model.last_speculation.replayed_passes == 19


def test_two_threads_have_their_own_texts() -> None:
    model = enable_self_speculative(tiny_model())
    prompts = [prompt(9), prompt(14)]
    plain = [plain_text(model, 60, inputs=ids) for ids in prompts]
    plain_text(model, 20, self_speculative=NOTHING)
    found: dict[int, torch.Tensor] = {}

    def run(at: int) -> None:
        found[at] = model.generate(
            prompts[at % 2],
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            self_speculative=Guesses(plain[at % 2][0].tolist(), seed=at),
        )

    threads = [threading.Thread(target=run, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(torch.equal(text, plain[at % 2]) for at, text in found.items())


def test_weights_that_change_where_they_lie_are_followed() -> None:
    model = enable_self_speculative(tiny_model())
    for _ in range(2):
        plain_text(model, 20, self_speculative=NOTHING)
    before, recorded = plain_text(model, 40), Runs.recorded
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    plain, drafted = texts(model, NOTHING, 40)
    assert torch.equal(plain, drafted) and not torch.equal(plain, before)
    assert Runs.recorded == recorded


def test_weights_in_another_place_are_recorded_anew() -> None:
    model = enable_self_speculative(tiny_model())
    plain_text(model, 20, self_speculative=NOTHING)
    old = graphs_of(model).passes[None]
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(module.weight + 0.05 * torch.randn(module.weight.shape))
    plain, drafted = texts(model, NOTHING, 40)
    assert torch.equal(plain, drafted) and graphs_of(model).passes[None] is not old
    model.to(torch.float64)
    plain, drafted = texts(model, NOTHING, 40)
    assert torch.equal(plain, drafted) and graphs_of(model).arena.keys[0].dtype is torch.float64


@pytest.mark.parametrize("at", [0, 1, 4])
def test_where_recording_fails_the_models_own_code_goes_on(
    at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Runs.record

    def fails(self: Runs, function: Callable[[], Results]) -> Callable[[], Results]:
        if Runs.recorded >= at:
            function()
            raise torch.OutOfMemoryError("CUDA out of memory (pretended).")
        return original(self, function)

    monkeypatch.setattr(Runs, "record", fails)
    monkeypatch.setattr(arenas, "BUCKETS", (16, 32, 48, 64, 80, 96))
    monkeypatch.setattr(graph_passes, "WIDTHS", (4,))
    model = enable_self_speculative(tiny_model())
    plain = plain_text(model, 60)
    assert torch.equal(plain, plain_text(model, 60, self_speculative=Guesses(plain[0].tolist(), lengths=(3, 1))))
    passes = graphs_of(model).passes[None]
    assert "out of memory" in passes.refusal and not passes.table.graphs and passes.arena.bytes == 0
    assert "no longer replayed" in caplog.text
    assert "out of memory" in str(model.last_speculation.replay_refusal)


def test_a_wrong_pass_never_decides_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FixedAttention._mask

    def sees_too_much(self: FixedAttention, window: Any, groups: int, dtype: Any) -> torch.Tensor:
        return torch.zeros_like(original(self, window, groups, dtype))

    monkeypatch.setattr(FixedAttention, "_mask", sees_too_much)
    model = enable_self_speculative(tiny_model())
    plain, drafted = texts(model, NOTHING, 40)
    assert torch.equal(plain, drafted)
    passes = graphs_of(model).passes[None]
    assert not passes.is_checked and "different logits" in passes.refusal


def test_what_is_not_a_number_in_one_text_does_not_come_into_the_next() -> None:
    model = enable_self_speculative(tiny_model())
    plain = plain_text(model, 40)
    plain_text(model, 20, self_speculative=NOTHING)
    arena = graphs_of(model).arena
    for buffer in (*arena.keys, *arena.values):
        buffer.fill_(torch.nan)
    assert torch.equal(plain, plain_text(model, 40, self_speculative=NOTHING))


def test_recording_waits_until_it_is_worth_its_time() -> None:
    model = tiny_model()
    replays = Again(torch.device("cpu"))
    replays.seconds = 1.0
    passes = GraphPasses(model, arenas.Arena(), replays)
    assert not passes.is_worth_it(10_000), "nothing is known yet"
    passes.note_eager(0.02)
    assert passes.is_worth_it(128) and not passes.is_worth_it(20)
    for _ in range(50):
        passes.note_eager(0.02)
    assert passes.is_worth_it(0), "as much time has gone as recording takes"


@pytest.mark.parametrize(("own", "replays"), [(20.0, 4.0), (4.0, 20.0)])
def test_where_replaying_does_not_pay_the_models_own_code_goes_on(
    own: float, replays: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Runs):
        seconds = 1e-6

        def seconds_of(self, run: Callable[[], object]) -> float:
            before = Runs.replays
            run()
            return own if Runs.replays == before else replays

    monkeypatch.setitem(replay.KINDS, "cpu", Slow)
    model = enable_self_speculative(tiny_model())
    plain, drafted = texts(model, NOTHING, 40)
    assert torch.equal(plain, drafted)
    passes = graphs_of(model).passes[None]
    assert passes.refusal == (None if replays < own else "they take 20000.0 ms where the model's own take 4000.0")


def test_nothing_keeps_a_model_that_is_gone() -> None:
    model = enable_self_speculative(tiny_model())
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]), DraftingConfig(policy="fixed", max_draft_length=3))
    for request in (NOTHING, config):
        plain_text(model, 30, self_speculative=request)
    assert Runs.replays > 30
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_without_a_way_to_replay_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(replay.KINDS, "cpu")
    model = enable_self_speculative(tiny_model())
    plain, drafted = texts(model, NOTHING, 20)
    assert torch.equal(plain, drafted) and not graphs_of(model).passes and target_graphs(model) is None


# ----------------------------------------------------------------------------------------------------------------------
# compiled rows, the program that measures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_compiled_is_what_the_model_computes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not compiled by inductor, which takes half a minute; only the function it receives matters here.
    compiled = []

    def compile_(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            compiled.append(function.__name__)
            return function(*args)

        called.__name__ = function.__name__
        return called

    monkeypatch.setattr(torch, "compile", compile_)
    fused.fused_rows.cache_clear()
    model = tiny_model("llama").to(dtype)
    cache, text = DynamicCache(config=model.config), prompt(40)
    passes = GraphPasses(model, arenas.Arena(), Again(torch.device("cpu")), fuses="rows")
    try:
        with torch.no_grad():
            model(input_ids=text[:, :20], **{CACHE: cache}, use_cache=True)
            add_buffers(cache)
            found = passes.run(cache, Tokens((), text[:, 20:30]), 20, 20, records=True)
            assert found is not None, passes.refusal
            expected = model(input_ids=text[:, 20:30], **{CACHE: cache}, use_cache=True).logits
    finally:
        fused.fused_rows.cache_clear()
    once = Counter({"norm": 2 * LAYERS + 1, "gate": LAYERS, "rotary": 2 * LAYERS})
    assert Counter(compiled) == Counter({name: 2 * count for name, count in once.items()}), "recorded, and run again"
    apart = (found[0] - expected).float().square().mean().sqrt() / expected.float().std()
    assert apart < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("outcome", ["faster", "slower", "wrong", "no compiler"])
def test_passes_are_compiled_alongside_and_stay_if_they_are_faster(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.get_ident()
    compiled: list[bool] = []

    def compile_(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            compiled.append(threading.get_ident() == main)
            if outcome == "no compiler":
                raise RuntimeError("Failed to find a working compiler (pretended).")
            return function(*args) + (outcome == "wrong")

        return called

    class Compiles(Runs):
        seconds, compiles = 1e-6, True

        def seconds_of(self, run: Callable[[], object]) -> float:
            before, ran = len(compiled), Runs.replays
            run()
            if Runs.replays == ran:
                return 0.2
            return 0.1 if len(compiled) == before else 0.05 if outcome == "faster" else 0.099

    monkeypatch.setitem(replay.KINDS, "cpu", Compiles)
    monkeypatch.setattr(torch, "compile", compile_)
    fused.fused_rows.cache_clear()
    model = enable_self_speculative(tiny_model("llama"))
    try:
        plain = plain_text(model, 60)
        drafts = Guesses(plain[0].tolist())
        while graphs_of(model).fusing is None:
            assert torch.equal(plain, plain_text(model, 60, self_speculative=drafts))
            assert graphs_of(model).passes[None].fuses is None
            # Compilation starts after 100 replays at the latest.
            assert (Runs.replays < 100) or graphs_of(model).fusing is not None
        before = graphs_of(model).passes[None]
        graphs_of(model).fusing._thread.join()
        assert set(compiled) == {False}, "nothing waits"
        for _ in range(3):
            assert torch.equal(plain, plain_text(model, 60, self_speculative=drafts))
            assert model.last_speculation.replayed_passes > 5
        passes = graphs_of(model).passes[None]
        assert (passes is not before) == (outcome == "faster")
        if outcome == "faster":
            assert passes.fuses == "rows" and passes.rival is None and not before.table.graphs and True in compiled
        elif outcome == "no compiler":
            assert "working compiler" in graphs_of(model).fusing.refusal
        else:
            words = {"slower": "without compiled operations take 100.0", "wrong": "different logits from the model's"}
            assert words[outcome] in graphs_of(model).fusing.passes.refusal and passes.refusal is None
    finally:
        fused.fused_rows.cache_clear()


@pytest.fixture
def small_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_REPEATS", 2)
    monkeypatch.setattr(gpu, "_WIDTHS", (1, 4))
    monkeypatch.setattr(gpu, "_CACHED", (20, 300))
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--seconds", "1e6", "--new-tokens", "8"],
    )


def test_the_program_that_measures_passes(small_benchmark: None, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main()
    printed = capsys.readouterr().out
    assert "4 after 300" in printed and "half left out, 1 after 20" in printed
    assert printed.count("not measured") == 1 and "not measured: host time in a round" in printed
    for line in ("plain-loop", "static", "undrafted text as plain's", "slowest call, plain-loop: "):
        assert f"\n{line}" in printed


@pytest.mark.measures
def test_the_program_measures_batches(
    small_benchmark: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--rows", "3", "--methods", "plain,plain-loop,lookup"])
    gpu.main()
    printed = capsys.readouterr().out
    assert "not measured" not in printed and "milliseconds of a pass" not in printed
    assert re.search(r"\nplain-loop +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d\n", printed), "relative to plain alone"
    assert re.search(r"\nplain-loop: replayed +1\.00\n", printed)
    assert "bitwise, whatever" not in printed, "that is of passes over a single text"


def test_the_program_says_what_it_could_not_measure(
    small_benchmark: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(replay.KINDS, "cpu")
    gpu.main()
    printed = capsys.readouterr().out
    assert "not measured: replayed passes: nothing is replayed on cpu" in printed and "4 after 300" in printed
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seconds", "0", "--json"])
    gpu.main()
    report = json.loads(capsys.readouterr().out)
    assert report["passes"] == [] and any("no time was left" in line for line in report["missing"])


class _Tokenizer:
    """A tokenizer that maps every prompt to tokens of a tiny model."""

    chat_template = None
    pad_token_id = 0

    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[3 + ord(letter) % (VOCAB - 3) for letter in text[:30]]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.measures
def test_whole_calls_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model(max_position_embeddings=512))
    monkeypatch.setattr(gpu, "built_in_prompts", lambda: built_in_prompts()[:2])
    clock = gpu.Clock(1e6)
    found = gpu.measure_calls(model, _Tokenizer(), clock, new_tokens=24)
    assert clock.missing == ["host time in a round: on a CPU it cannot be separated from the time of the pass"]
    assert set(found["first"]) == {"plain", "plain-loop", "lookup", "auto", "static"}
    assert len(found["calls"]) == 2
    for row in found["calls"]:
        assert row["undrafted text as plain's"] and row["lookup: text as undrafted"] and row["auto: text as undrafted"]
        assert row["lookup: replayed"] == row["plain-loop: replayed"] == 1
    found = gpu.measure_calls(model, _Tokenizer(), clock, 24, ("plain", "plain-loop", "lookup"), batch=2)
    assert len(found["calls"]) == 1 and found["host"] is None
    for row in found["calls"]:
        assert row["undrafted text as plain's"] and row["lookup: text as undrafted"]


# ----------------------------------------------------------------------------------------------------------------------
# batches


def rows_of(model: Any, count: int = 3) -> dict[str, torch.Tensor]:
    """Return a batch of prompts, one of them padded at its left."""
    ids = torch.cat([prompt(9, seed=seed) for seed in range(count)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    ids[1, :4] = 0
    return {"inputs": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", REPLAYED)
def test_a_batch_is_replayed(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    given = rows_of(model)
    plain = plain_text(model, 40, **given)
    for request in (NOTHING, LOOKUP):
        assert torch.equal(plain, plain_text(model, 40, self_speculative=request, **given)), request
        last = model.last_speculation
        # The first three passes of a batch size are compared with the model's own.
        assert last.replay_refusal is None, last.replay_refusal
        assert last.replayed_passes == last.target_passes - (3 if request is NOTHING else 1), request


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20}], ids=["greedy", "sampled"]
)
def test_a_batch_that_never_had_a_draft_can_draft(options: dict[str, Any]) -> None:
    """The first call of a process drafts: its rows are not moved before graphs have been recorded."""
    model = enable_self_speculative(tiny_model())
    given = {**rows_of(model), **options}
    plain = plain_text(model, 60, **given)
    for _ in range(2):
        assert torch.equal(plain, plain_text(model, 60, self_speculative=LOOKUP, **given))
        assert model.last_speculation.tokens_per_round > 1
    own = SelfSpeculativeConfig(
        SkipConfig(attention=[1], mlp=[0, 2]), DraftingConfig(policy="fixed", max_draft_length=4)
    )
    assert torch.equal(plain, plain_text(model, 60, self_speculative=own, **given)), "its drafts move the rows"
    assert torch.equal(plain, plain_text(model, 60, self_speculative=LOOKUP, **given))
    last = model.last_speculation
    assert last.replayed_passes == last.target_passes - 1 and last.exactness == "numeric"


def test_a_batch_over_buckets_and_larger_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "BUCKETS", (32, 64, 128, 256))
    monkeypatch.setattr(graph_passes, "_AHEAD", 32)
    model = enable_self_speculative(tiny_model(max_position_embeddings=512))
    given = rows_of(model)
    plain = plain_text(model, 200, **given)
    for _ in range(2):
        assert torch.equal(plain, plain_text(model, 200, self_speculative=LOOKUP, **given))
    last = model.last_speculation
    assert last.replayed_passes == last.target_passes - 1


def test_batch_sizes_have_their_own_passes_and_few_are_retained() -> None:
    model = enable_self_speculative(tiny_model())
    for count in (2, 3, 4, 3):
        given = {key: value[:count] for key, value in rows_of(model, 4).items()}
        plain = plain_text(model, 30, **given)
        assert torch.equal(plain, plain_text(model, 30, self_speculative=NOTHING, **given))
    assert list(graphs_of(model).batches) == [4, 3]
    assert [passes.arena.rows for passes in graphs_of(model).batches.values()] == [4, 3]
    assert torch.equal(plain_text(model, 30), plain_text(model, 30, self_speculative=NOTHING))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    given = rows_of(model)
    before = graphs_of(model).batches[3]
    plain_text(model, 30, self_speculative=NOTHING, **given)
    assert graphs_of(model).batches[3] is not before


def test_large_buffers_of_a_batch_are_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model())
    given = rows_of(model)
    plain = plain_text(model, 30, **given)
    plain_text(model, 30, self_speculative=NOTHING, **given)
    assert graphs_of(model).batches[3].arena.bytes > 0
    monkeypatch.setattr(Runs, "memory", 16 * graphs_of(model).batches[3].arena.bytes - 1)
    for _ in range(2):
        assert torch.equal(plain, plain_text(model, 30, self_speculative=LOOKUP, **given))
        last = model.last_speculation
        assert last.replayed_passes == last.target_passes - 1
        passes = graphs_of(model).batches[3]
        assert passes.arena.bytes == 0 and not passes.table.graphs


def test_rows_that_end_wait_and_come_back_as_plain_leaves_them() -> None:
    model = enable_self_speculative(tiny_model())
    given = rows_of(model)
    ends = int(plain_text(model, 20, **given)[0, -4])
    options: dict[str, Any] = {**given, "eos_token_id": ends, "return_dict_in_generate": True, "output_logits": True}
    plain: Any = plain_text(model, 40, **options)
    for request in (NOTHING, LOOKUP, LOOKUP):
        drafted: Any = plain_text(model, 40, self_speculative=request, **options)
        assert torch.equal(plain.sequences, drafted.sequences)
        for one, other in zip(plain.logits, drafted.logits, strict=True):
            torch.testing.assert_close(one[1:], other[1:], rtol=1e-4, atol=1e-4)
        for one, other in zip(plain[CACHE].layers, drafted[CACHE].layers, strict=True):
            torch.testing.assert_close(one.keys[2], other.keys[2], rtol=1e-4, atol=1e-4)


def test_what_a_batch_is_not_replayed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model().to(torch.bfloat16))
    given = rows_of(model)
    numeric = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness="numeric")
    plain = plain_text(model, 30, **given)
    assert torch.equal(plain, plain_text(model, 30, self_speculative=numeric, **given))
    assert model.last_speculation.replayed_passes == 0, "the model's own kernels, so that the text is plain's"
    monkeypatch.setattr(graph_passes, "_MOST_TOKENS", 2)
    plain_text(model, 30, self_speculative=NOTHING, **given)
    assert model.last_speculation.replayed_passes == 0 and not graphs_of(model).batches


def test_a_wrong_pass_over_a_batch_never_decides_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model())
    given = rows_of(model)
    plain = plain_text(model, 30, **given)
    run = GraphTable.run
    monkeypatch.setattr(GraphTable, "run", lambda *args: (run(*args)[0] + torch.randn(VOCAB), run(*args)[1]))
    assert torch.equal(plain, plain_text(model, 30, self_speculative=NOTHING, **given))
    last = model.last_speculation
    assert last.replayed_passes == 0 and "different logits" in str(last.replay_refusal)
