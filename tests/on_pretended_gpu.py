"""Tests of GPU behaviour on the mock GPU (pretended_gpu.py), in a process that test_pretended_gpu.py starts."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import pretended_gpu
from pretended_gpu import NAME, OnDevice, OnHostAndDevice, device
from ssd_generation import DraftingConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.benchmark import gpu
from ssd_generation.decoding.loop import DecodingLoop
from ssd_generation.forward.copies.low_bit import CopiesPart
from ssd_generation.forward.cuda_graph import graphs as replay
from ssd_generation.forward.cuda_graph.graph_passes import GraphPart, why_no_graphs
from ssd_generation.forward.cuda_graph.graphs import CudaGraphs
from ssd_generation.harness.texts import built_in_prompts
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.automatic import automatic_config
from ssd_generation.tuning.costs import measure_costs
from test_replayed import NOTHING, Forbids, Guesses, _Tokenizer, plain_text
from tiny_models import VOCAB, even_model, prompt, tiny_model

pretended_gpu.set_up()
HERE = torch.device(NAME, 0)
SKIP = SkipConfig(attention=[1], mlp=[0, 2])
FULL = ["full_attention"] * 3
OWN = SelfSpeculativeConfig(SKIP, DraftingConfig(policy="fixed", max_draft_length=4))
LOOKUP = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=5), lookup=True)


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CudaGraphs, "seconds", 0.0)  # recorded at once
    monkeypatch.setattr(CudaGraphs, "compiles", False)
    with OnHostAndDevice():
        yield


def graphs_of(model: Any) -> Any:
    """Return the state of a model's graphs, typed `Any` since tests know its fields."""
    return state_of(model).get(GraphPart)


def model_here(family: str = "llama", make: Any = tiny_model, **options: Any) -> Any:
    if family in ("llama", "qwen2") and make is tiny_model:  # operations take long here
        options = {"num_hidden_layers": 3, **({"layer_types": FULL} if family == "qwen2" else {}), **options}
    return enable_self_speculative(make(family, **options).to(HERE))


def texts(model: Any, request: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the plain text, by the same model on the CPU, which is a thousand times as fast, and the drafted one."""
    options = {"inputs": prompt(9).to(HERE), "new": 26, **options}
    on_host = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    plain = plain_text(copy.deepcopy(model).to("cpu"), **on_host)
    drafted = plain_text(model, self_speculative=request(plain) if callable(request) else request, **options)
    return plain.tolist(), drafted.tolist()


def guesses(plain: torch.Tensor) -> Guesses:
    return Guesses(plain[0].tolist())


# ----------------------------------------------------------------------------------------------------------------------
# the mock GPU itself


def test_what_a_gpu_refuses_is_refused() -> None:
    one = torch.ones(3, device=HERE)
    assert isinstance(one, OnDevice) and one.device == HERE
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(3)
    with pytest.raises(TypeError, match="numpy"):
        one.numpy()
    assert (one + torch.tensor(2.0)).tolist() == [3, 3, 3], "a number of the host is none of its memory"


def test_waits_are_counted() -> None:
    one = torch.arange(3, device=HERE)
    before = device.waits
    (one + 1).sum()
    torch.full((2,), 3, device=HERE)
    assert device.waits == before
    for wait in (one.tolist, one.sum().item, one.cpu, lambda: one.to(HERE) if one[0] else 0, one.nonzero):
        wait()
    torch.tensor([1, 2], device=HERE)
    torch.ones(2).to(HERE)
    assert device.waits == before + 7


def test_memory_that_a_copy_may_read_is_not_to_be_changed() -> None:
    host, there = torch.zeros(2).pin_memory(), torch.zeros(2, device=HERE)
    there.copy_(host, non_blocking=True)
    there.tolist()
    host[0] = 1
    there.copy_(host, non_blocking=True)
    host[0] = 2
    with pytest.raises(AssertionError, match="was changed"):
        there.tolist()
    device.pinned.clear()


def test_a_graph_holds_addresses_and_no_values() -> None:
    graphs = CudaGraphs(HERE)
    given = torch.ones(2, device=HERE)
    times = [3.0]
    run = graphs.record(lambda: (given * times[0],))
    times[0] = 5.0
    given.fill_(2)
    assert run()[0].tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.record(lambda: (given * given.sum().item(),) if device.graph else (given,))
    assert torch.rand(2, device=HERE).tolist(), "what failed leaves the generator as it was"
    seen: list[OnDevice] = []
    graphs.record(lambda: (seen.append(given * 2), given)[1:])  # type: ignore[func-returns-value]
    assert all(torch.isnan(seen[-1].inner)), "nothing is computed while it is captured"


def test_a_graph_keeps_what_it_reads_and_a_pool_its_graphs() -> None:
    graphs = CudaGraphs(HERE)

    def record() -> Callable[[], Any]:
        here_alone = torch.ones(2, device=HERE)
        return graphs.record(lambda: (here_alone * 2,))

    run = record()
    pool = graphs._pool
    gc.collect()
    assert run()[0].tolist() == [2, 2]
    assert record()()[0].tolist() == [2, 2] and graphs._pool is pool
    del run
    gc.collect()
    assert record()()[0].tolist() == [2, 2] and graphs._pool is not pool
    graph: Any = torch.cuda.CUDAGraph()
    given = torch.ones(2, device=HERE)
    options: Any = {"pool": torch.cuda.graph_pool_handle(), "stream": None, "capture_error_mode": "thread_local"}
    with torch.cuda.graph(graph, **options):
        given * 2
    del given
    with pytest.raises(AssertionError, match="freed"):
        graph.replay()
    with pytest.raises(RuntimeError, match="use_count"), torch.cuda.graph(graph, **{**options, "pool": pool}):
        pass


# ----------------------------------------------------------------------------------------------------------------------
# texts

REQUESTS: dict[str, Any] = {
    "nothing": NOTHING,
    "guesses": guesses,
    "lookup": LOOKUP,
    "auto": "auto",
    "own": OWN,
    "own, by cost": SelfSpeculativeConfig(SKIP),
    "own, by confidence": SelfSpeculativeConfig(SKIP, DraftingConfig(policy="confidence", max_draft_length=4)),
}
OPTIONS: dict[str, Any] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "repeats": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled, repeats": {"do_sample": True, "temperature": 1.2, "repetition_penalty": 1.3},
    "ends": {"eos_token_id": 1},
}


EACH = [
    (request, how) for request in REQUESTS for how in OPTIONS if how in ("greedy", "sampled") or request == "guesses"
]


@pytest.mark.measures
@pytest.mark.parametrize(("request_", "options"), EACH)
def test_the_text_is_plain_generates(request_: str, options: str) -> None:
    model = model_here("qwen2")
    plain, drafted = texts(model, REQUESTS[request_], **OPTIONS[options])
    assert plain == drafted
    again: Any = plain_text(model, 26, inputs=prompt(9).to(HERE), self_speculative=NOTHING, **OPTIONS[options])
    assert again.tolist() == plain
    if not request_.startswith("own, by") and options != "ends":
        statistics = model.last_speculation
        assert statistics.replayed_passes == statistics.target_passes - 1 > 20 and statistics.replay_refusal is None


@pytest.mark.parametrize("options", ["greedy", "sampled"])
def test_drafts_in_four_bits(options: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    sizes["layer_types"] = FULL
    config = SelfSpeculativeConfig(
        drafting=DraftingConfig(policy="fixed", max_draft_length=4),
        precision=PrecisionConfig(default="int4", head="int4"),
    )
    on_cpu: Any = enable_self_speculative(tiny_model("qwen2", **sizes))
    plain_text(on_cpu, 60, self_speculative=config, **OPTIONS[options])
    model = model_here("qwen2", **sizes)
    for _ in range(2):
        plain, drafted = texts(model, config, new=60, **OPTIONS[options])
        assert plain == drafted
    rate = model.last_speculation.acceptance_rate
    assert abs(rate - on_cpu.last_speculation.acceptance_rate) < 0.12 and rate > 0.3
    (passes,) = (found for kind, found in graphs_of(model).passes.items() if kind is not None)
    assert passes.table.graphs and passes.refusal is None and passes.copies is not None
    copies = next(iter(state_of(model).get(CopiesPart).low_bit_drafts.values()))
    assert not copies.left, "all layers have copies"
    # Weights that change in place get new copies, and new graphs of these.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, device=HERE))
    plain, drafted = texts(model, config, **OPTIONS[options])
    assert plain == drafted and model.last_speculation.acceptance_rate > 0.15
    assert next(iter(state_of(model).get(CopiesPart).low_bit_drafts.values())) is not copies
    with pytest.raises(ValueError, match="on a GPU in int4 only"):
        texts(model, SelfSpeculativeConfig(precision="int8"))


@pytest.mark.parametrize("family", ["gemma3", "mistral", "phi3", "qwen3_moe", "llama4"])
def test_the_text_is_plain_generates_of_every_kind_of_model(family: str) -> None:
    model = model_here(family)
    for request in (NOTHING, guesses, OWN):
        plain, drafted = texts(model, request)
        assert plain == drafted
    passes = graphs_of(model).passes.get(None)
    assert (family == "llama4") == (passes is None or not passes.table.graphs)


@pytest.mark.measures
@pytest.mark.parametrize("request_", ["nothing", "lookup", "own"])
@pytest.mark.parametrize("options", ["greedy", "sampled"])
def test_batches(request_: str, options: str) -> None:
    model = model_here()
    rows = torch.cat((prompt(9), prompt(9) + 1, prompt(9).flip(1))).to(HERE)
    plain, drafted = texts(model, REQUESTS[request_], inputs=rows, **OPTIONS[options])
    assert plain == drafted
    padded = torch.ones_like(rows)
    padded[1, :4] = 0
    for _ in range(2):
        plain, drafted = texts(model, REQUESTS[request_], inputs=rows, attention_mask=padded, **OPTIONS[options])
        assert plain == drafted
    last = model.last_speculation
    assert last.replay_refusal is None
    # The model's own code runs at most once, after drafts of its own, which has to move the rows.
    assert last.replayed_passes == last.target_passes - 1 > 3


class _Stops(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids[0, -12:].sum().item() % 29 == 0, device=input_ids.device)


@pytest.mark.parametrize("drafts", [NOTHING, guesses, OWN])
def test_what_reads_values_runs_between_rounds(drafts: Any) -> None:
    model = model_here()
    streamed: list[int] = []

    class Streams:
        def put(self, tokens: torch.Tensor) -> None:
            streamed.extend(tokens.flatten().tolist())

        def end(self) -> None:
            pass

    for options in (
        {"logits_processor": LogitsProcessorList([Forbids()])},
        {"stopping_criteria": StoppingCriteriaList([_Stops()])},
    ):
        plain, drafted = texts(model, drafts, **options)
        assert plain == drafted
    text = plain_text(model, 26, inputs=prompt(9).to(HERE))
    request = drafts(text) if callable(drafts) else drafts
    plain_text(model, 26, inputs=prompt(9).to(HERE), self_speculative=request, streamer=Streams())
    assert streamed == text[0].tolist()


@pytest.mark.parametrize("how", ["static", "dictionary", "continued"])
def test_the_cache_and_the_scores_come_back(how: str) -> None:
    model = model_here("gemma3")
    options: dict[str, Any] = {"inputs": prompt(9).to(HERE), "return_dict_in_generate": True, "output_logits": True}
    if how == "static":
        options["cache_implementation"] = "static"
    plain_text(model, 20, inputs=prompt(9).to(HERE), self_speculative=NOTHING)
    plain: Any = plain_text(model, 30, **options)
    drafted: Any = plain_text(model, 30, self_speculative=guesses(plain.sequences), **options)
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    for one, other in zip(plain.logits, drafted.logits, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-4)
    if how == "continued":
        ids = torch.cat((plain.sequences, prompt(5).to(HERE)), dim=1)
        again = [
            plain_text(model, 12, inputs=ids, **{CACHE: found[CACHE]}, **extra).tolist()
            for found, extra in ((plain, {}), (drafted, {"self_speculative": NOTHING}))
        ]
        assert again[0] == again[1]


# ----------------------------------------------------------------------------------------------------------------------
# what the host does


def each_round(monkeypatch: pytest.MonkeyPatch, read: Callable[[], int]) -> list[int]:
    """Return a list that gets the growth of a number in each round from now on."""
    found: list[int] = []
    original = DecodingLoop._round

    def counted(self: DecodingLoop, *args: Any) -> bool:
        before = read()
        running = original(self, *args)
        found.append(read() - before)
        return running

    monkeypatch.setattr(DecodingLoop, "_round", counted)
    return found


@pytest.mark.parametrize("options", ["greedy", "sampled", "repeats", "ends"])
@pytest.mark.parametrize("request_", ["nothing", "guesses", "lookup", "own"])
def test_the_host_waits_once_a_round(request_: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_here()
    more = {**OPTIONS[options], **({"eos_token_id": VOCAB + 5} if options == "ends" else {})}
    for _ in range(2):
        texts(model, REQUESTS[request_], **more)
    waits = each_round(monkeypatch, lambda: device.waits)
    texts(model, REQUESTS[request_], **more)
    assert len(waits) > 3 and waits[0] <= 4 and set(waits[1:]) == {1}, "at first, it reads the prompt"


@pytest.mark.parametrize("options", ["greedy", "sampled"])
@pytest.mark.parametrize("request_", ["nothing", "lookup"])
def test_the_host_waits_once_a_round_of_a_batch(request_: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_here()
    given = {"inputs": torch.cat((prompt(9), prompt(9) + 1, prompt(9).flip(1))).to(HERE), **OPTIONS[options]}
    for _ in range(2):
        texts(model, REQUESTS[request_], **given)
    waits = each_round(monkeypatch, lambda: device.waits)
    texts(model, REQUESTS[request_], **given)
    assert len(waits) > 3 and set(waits[1:]) == {1}, waits


@pytest.mark.parametrize(("request_", "most"), [("nothing", 30), ("lookup", 60)])
def test_a_round_of_a_batch_is_few_launches(request_: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_here()
    given = {"inputs": torch.cat((prompt(9), prompt(9) + 1, prompt(9).flip(1))).to(HERE)}
    for _ in range(2):
        texts(model, REQUESTS[request_], **given)
    launches = each_round(monkeypatch, lambda: device.launches)
    texts(model, REQUESTS[request_], **given)
    assert len(launches) > 3 and max(launches[1:]) <= most, launches


@pytest.mark.parametrize(("request_", "most"), [("nothing", 2), ("own", 14)])
def test_a_round_is_few_launches(request_: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_here()
    for _ in range(2):
        texts(model, REQUESTS[request_])
    launches = each_round(monkeypatch, lambda: device.launches)
    plain_text(model, 40, inputs=prompt(9).to(HERE), self_speculative=REQUESTS[request_])
    assert max(launches[2:]) <= most, "those inside of graphs apart"


# ----------------------------------------------------------------------------------------------------------------------
# failures, and measurements


@pytest.mark.parametrize("at", [0, 2])
def test_out_of_memory_while_capturing_leaves_nothing_behind(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_here()
    original, captured = CudaGraphs.record, []

    def record(self: CudaGraphs, function: Any) -> Any:
        def short() -> Any:
            found = function()
            if device.graph is not None:
                captured.append(1)
                if len(captured) > at:
                    raise torch.OutOfMemoryError("CUDA out of memory (pretended).")
            return found

        return original(self, short)

    monkeypatch.setattr(CudaGraphs, "record", record)
    monkeypatch.setattr("ssd_generation.cache.arena.BUCKETS", (16, 32, 48, 64, 80))
    monkeypatch.setattr("ssd_generation.forward.cuda_graph.graph_passes.WIDTHS", (4,))
    drafts = lambda plain: Guesses(plain[0].tolist(), lengths=(3, 1))  # noqa: E731
    for _ in range(2):
        plain, drafted = texts(model, drafts, new=50)
        assert plain == drafted
    assert "out of memory" in str(model.last_speculation.replay_refusal)
    gc.collect()
    assert not graphs_of(model).passes[None].table.graphs and graphs_of(model).arena.bytes == 0


def test_weights_and_devices_change_between_calls() -> None:
    model = model_here()
    texts(model, NOTHING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, device=HERE))
    plain, drafted = texts(model, guesses)
    assert plain == drafted
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(module.weight + 0.05)
    plain, drafted = texts(model, guesses)
    assert plain == drafted


def test_costs_and_bits_are_looked_at_on_the_device() -> None:
    model = model_here(make=even_model)
    plain, drafted = texts(model, NOTHING)
    costs = measure_costs(model, OWN)
    assert costs.draft_step > 0 and costs.measured_on is not None and "pretended GPU" in costs.measured_on
    plain, drafted = texts(model, guesses)
    assert plain == drafted
    passes = graphs_of(model).passes[None]
    assert passes.keeps_bits is not None
    assert (model.last_speculation.exactness == "bitwise") == passes.keeps_bits


@pytest.mark.measures
def test_the_program_that_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "_REPEATS", 2)
    monkeypatch.setattr(gpu, "_WIDTHS", (1, 4))
    monkeypatch.setattr(gpu, "_CACHED", (20, 300))
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu", "--shape", "tiny", "--device", NAME, "--dtype", "float32", "--seconds", "1e6", "--new-tokens", "8"],
    )
    gpu.main()
    printed = capsys.readouterr().out
    assert "4 after 300" in printed and "half left out, 1 after 20" in printed and "not measured" not in printed
    monkeypatch.setattr(gpu, "built_in_prompts", lambda: built_in_prompts()[:2])
    clock = gpu.Clock(1e6)
    model = model_here(max_position_embeddings=512)
    found = gpu.measure_calls(model, _Tokenizer(), clock, new_tokens=24)
    assert clock.missing == [] and found["host"] > 0
    assert all(row["lookup: text as undrafted"] and row["auto: text as undrafted"] for row in found["calls"])


def test_auto_does_not_look_for_other_drafts_in_the_middle_of_calls() -> None:
    assert not automatic_config(model_here()).adapt
    model = model_here()
    model.config._attn_implementation = "flex_attention"  # nothing is replayed
    assert why_no_graphs(model) is not None and automatic_config(model).adapt


def test_graphs_go_with_their_model() -> None:
    gc.collect()
    before = len(device.graphs)
    model = model_here()
    for request in (guesses, OWN):
        texts(model, request)
    texts(model, NOTHING, do_sample=True)
    assert len(device.graphs) > before + 2 and replay.KINDS[NAME] is CudaGraphs
    del model
    gc.collect()
    assert len(device.graphs) == before
