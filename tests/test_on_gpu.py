"""Tests on a CUDA device, where there is one: texts, drafts, bits and host waits of tiny models.

`python -m pytest tests/test_on_gpu.py` on a machine with a GPU. test_pretended_gpu.py has the same tests, and tests of
failures, on a mock GPU.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from ssd_generation import DraftingConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.decoding.loop import DecodingLoop
from ssd_generation.forward.cuda_graph import compiled_ops, graph_passes
from ssd_generation.forward.cuda_graph.graph_passes import GraphPart
from ssd_generation.forward.cuda_graph.graphs import CudaGraphs
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.costs import measure_costs
from test_replayed import NOT_REPLAYED, NOTHING, Forbids, Guesses, plain_text
from tiny_models import FAMILIES, even_model, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # torch's own, of counting the host's waits and of compiling.
    pytest.mark.filterwarnings("default:called a synchronizing CUDA operation"),
    pytest.mark.filterwarnings("default:Synchronization debug mode is a prototype feature"),
    pytest.mark.filterwarnings("default:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("default:TensorFloat32 tensor cores"),
]

HERE = torch.device("cuda", 0)
OWN = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[0, 2]), DraftingConfig(policy="fixed", max_draft_length=4))
EXPERTS = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"]
REQUESTS: dict[str, Any] = {
    "nothing": NOTHING,
    "guesses": lambda plain: Guesses(plain[0].tolist()),
    "lookup": SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=5), lookup=True),
    "auto": "auto",
    "own": OWN,
    "own, by cost": SelfSpeculativeConfig(OWN.skip),
    "own, by confidence": SelfSpeculativeConfig(OWN.skip, DraftingConfig(policy="confidence", max_draft_length=4)),
}
OPTIONS: dict[str, Any] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "sampled from all": {"do_sample": True, "temperature": 1.2},
    "repeats": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "ends": {"eos_token_id": 1},
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture passes at once, and compile them only where a test says so."""
    monkeypatch.setattr(CudaGraphs, "seconds", 0.0)
    monkeypatch.setattr(CudaGraphs, "compiles", False)


def model_here(
    family: str = "llama", make: Any = tiny_model, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    return enable_self_speculative(make(family, **options).to(HERE, dtype))


def texts(model: Any, request: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return plain `generate`'s text and the self-speculative one, both made on the device."""
    options = {"inputs": prompt(9).to(HERE), "new": 60, **options}
    plain = plain_text(model, **options)
    drafted = plain_text(model, self_speculative=request(plain) if callable(request) else request, **options)
    return plain.tolist(), drafted.tolist()


def about(model: Any) -> str:
    """Return the explanation of a failure."""
    last = model.last_speculation
    return f"{last.replayed_passes} of {last.target_passes} passes replayed, {last.replay_refusal}, {last.exactness}"


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("drafts", REQUESTS)
def test_the_text_is_plain_generates(drafts: str, how: str) -> None:
    model = model_here("qwen2")
    for _ in range(2):
        plain, drafted = texts(model, REQUESTS[drafts], **OPTIONS[how])
        assert plain == drafted, about(model)
    last = model.last_speculation
    assert last.replay_refusal is None, about(model)
    if not drafts.startswith("own, by") and how != "ends":
        assert last.replayed_passes == last.target_passes - 1 > 3, about(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_generates_of_every_family(family: str) -> None:
    model = model_here(family)
    for request in (NOTHING, REQUESTS["guesses"], OWN):
        plain, drafted = texts(model, request)
        assert plain == drafted, about(model)
        # In float32 torch has no grouped matrix product for experts; its fallback reads each expert's token count.
        stays_eager = family in NOT_REPLAYED or family in EXPERTS
        assert (model.last_speculation.replayed_passes == 0) == stays_eager, about(model)
    rows = torch.cat((prompt(9), prompt(9) + 1, prompt(9).flip(1))).to(HERE)
    for _ in range(2):
        plain, drafted = texts(model, REQUESTS["lookup"], inputs=rows, attention_mask=torch.ones_like(rows))
        assert plain == drafted, about(model)
    assert (model.last_speculation.replayed_passes == 0) == stays_eager, about(model)
    plain, drafted = texts(model, NOTHING, **OPTIONS["sampled"])
    assert plain == drafted, about(model)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_bfloat16_are_replayed(family: str) -> None:
    model = model_here(family, dtype=torch.bfloat16)
    texts(model, NOTHING)
    texts(model, REQUESTS["lookup"])
    last = model.last_speculation
    assert last.replay_refusal is None and last.replayed_passes == last.target_passes - 1 > 3, about(model)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_drafts_in_four_bits(how: str) -> None:
    model = model_here("qwen2", hidden_size=256, intermediate_size=512, num_hidden_layers=3, dtype=torch.bfloat16)
    config = SelfSpeculativeConfig(
        drafting=DraftingConfig(policy="fixed", max_draft_length=4),
        precision=PrecisionConfig(default="int4", head="int4"),
    )
    plain_text(model, 60, inputs=prompt(9).to(HERE), self_speculative=config, **OPTIONS[how])
    last = model.last_speculation
    assert last.replay_refusal is None and last.acceptance_rate > 0.15, (about(model), last.acceptance_rate)
    passes = [found for kind, found in state_of(model).get(GraphPart).passes.items() if kind is not None]
    assert [found.refusal for found in passes] == [None] and passes[0].table.graphs


@pytest.mark.parametrize("drafts", ["nothing", "lookup", "own"])
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_batches(drafts: str, how: str) -> None:
    model = model_here()
    rows = torch.cat((prompt(9), prompt(9) + 1, prompt(9).flip(1))).to(HERE)
    padded = torch.ones_like(rows)
    padded[1, :4] = 0
    for mask in (torch.ones_like(rows), padded):
        for _ in range(2):
            plain, drafted = texts(model, REQUESTS[drafts], inputs=rows, attention_mask=mask, **OPTIONS[how])
            assert plain == drafted, about(model)
        last = model.last_speculation
        assert last.replay_refusal is None and last.replayed_passes == last.target_passes - 1 > 3, about(model)


@pytest.mark.parametrize("drafts", ["nothing", "guesses", "own"])
def test_a_processor_that_reads_values(drafts: str) -> None:
    model = model_here()
    plain, drafted = texts(model, REQUESTS[drafts], logits_processor=LogitsProcessorList([Forbids()]))
    assert plain == drafted and model.last_speculation.replay_refusal is None


@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_the_cache_comes_back(how: str) -> None:
    model = model_here("gemma3")
    options: dict[str, Any] = {"inputs": prompt(9).to(HERE), "return_dict_in_generate": True, "output_logits": True}
    if how == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    plain_text(model, 40, inputs=prompt(9).to(HERE), self_speculative=NOTHING)
    plain: Any = plain_text(model, 50, **options)
    drafted: Any = plain_text(model, 50, self_speculative=Guesses(plain.sequences[0].tolist()), **options)
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    for one, other in zip(plain.logits, drafted.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert plain[CACHE].get_seq_length() == drafted[CACHE].get_seq_length()


def test_a_long_text_over_buckets_and_larger_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_generation.cache.arena.BUCKETS", (32, 64, 128, 256, 512))
    model = model_here(max_position_embeddings=2048)
    plain, drafted = texts(model, REQUESTS["guesses"], new=600)
    assert plain == drafted, about(model)
    assert 0 < model.last_speculation.replayed_passes < model.last_speculation.target_passes - 1, about(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_called_bitwise_is(dtype: torch.dtype) -> None:
    model = model_here(make=even_model, dtype=dtype)
    plain_text(model, 60, inputs=prompt(9).to(HERE), self_speculative=NOTHING)
    logits: dict[str, Any] = {}
    for drafts in ("nothing", "guesses", "lookup"):
        request = REQUESTS[drafts]
        if callable(request):
            request = request(logits["nothing"].sequences)
        logits[drafts] = plain_text(
            model,
            60,
            inputs=prompt(9).to(HERE),
            self_speculative=request,
            return_dict_in_generate=True,
            output_logits=True,
        )
        exactness = model.last_speculation.exactness
    same = all(
        torch.equal(one, other)
        for drafts in ("guesses", "lookup")
        for one, other in zip(logits["nothing"].logits, logits[drafts].logits, strict=True)
    )
    assert state_of(model).get(GraphPart).passes[None].keeps_bits is not None
    assert same or exactness != "bitwise"


@pytest.mark.parametrize("how", ["greedy", "sampled", "repeats"])
@pytest.mark.parametrize("drafts", ["nothing", "lookup", "own"])
def test_the_host_waits_once_a_round(drafts: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count torch's own warnings, one for each operation that makes the host wait."""
    model = model_here()
    for _ in range(2):
        texts(model, REQUESTS[drafts], **OPTIONS[how])
    waits: list[int] = []
    original = DecodingLoop._round

    def counted(self: DecodingLoop, *args: Any) -> bool:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            running = original(self, *args)
        waits.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in found))
        return running

    monkeypatch.setattr(DecodingLoop, "_round", counted)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        plain_text(model, 40, inputs=prompt(9).to(HERE), self_speculative=REQUESTS[drafts], **OPTIONS[how])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) > 3 and max(waits[1:]) <= 1, waits


def test_weights_that_change_where_they_lie_or_are_replaced() -> None:
    model = model_here()
    texts(model, NOTHING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, device=HERE))
    plain, drafted = texts(model, REQUESTS["guesses"])
    assert plain == drafted
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(module.weight + 0.05)
    plain, drafted = texts(model, REQUESTS["guesses"])
    assert plain == drafted


def test_costs_are_measured_on_the_device() -> None:
    model = model_here()
    texts(model, NOTHING)
    costs = measure_costs(model, OWN)
    assert costs.draft_step > 0 and torch.cuda.get_device_name(HERE) in str(costs.measured_on)


@pytest.mark.parametrize("fuses", ["rows", "whole"])
def test_compiled_operations_give_the_text(fuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_passes, "FUSES", fuses)
    compiled_ops.fused_rows.cache_clear()
    model = model_here()
    for request in (NOTHING, REQUESTS["guesses"]):
        plain, drafted = texts(model, request)
        assert plain == drafted and model.last_speculation.replay_refusal is None, about(model)
        assert model.last_speculation.replayed_passes > 3, about(model)


def test_operations_are_compiled_alongside_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraphs, "compiles", True)
    monkeypatch.setattr(CudaGraphs, "seconds", 1e-9)  # passes are timed
    monkeypatch.setattr(graph_passes, "_FUSING_AFTER", 1e-6)
    model = model_here()
    for _ in range(3):
        texts(model, NOTHING)
    fusing = state_of(model).get(GraphPart).fusing
    assert fusing is not None
    fusing._thread.join()
    assert fusing.refusal is None
    texts(model, NOTHING)
    assert state_of(model).get(GraphPart).passes[None] is fusing.passes
    for request in (NOTHING, REQUESTS["guesses"], NOTHING):
        plain, drafted = texts(model, request)
        assert plain == drafted, about(model)


def test_memory_goes_with_the_model() -> None:
    texts(model_here(), OWN)  # allocations that libraries never release
    gc.collect()
    before = torch.cuda.memory_allocated(HERE)
    model = model_here()
    for request in (NOTHING, REQUESTS["guesses"], OWN):
        texts(model, request)
    del model
    gc.collect()
    assert torch.cuda.memory_allocated(HERE) <= before + 2**20


def test_a_capture_that_fails_leaves_the_process_as_it_was() -> None:
    graphs = CudaGraphs(HERE)
    given = torch.ones(2, device=HERE)
    torch.manual_seed(5)
    expected = torch.rand(3, device=HERE).tolist()
    torch.manual_seed(5)
    with pytest.raises(RuntimeError):
        graphs.record(
            lambda: (given * given.sum().item() if torch.cuda.is_current_stream_capturing() else given.clone(),)
        )
    assert torch.rand(3, device=HERE).tolist() == expected
    assert graphs.record(lambda: (given * 2,))()[0].tolist() == [2, 2]
