"""Attention by JIT-compiled code, kernel lists, and the passes built from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, enable_self_speculative
from ssd_generation.cache.buffered_layers import add_buffers
from ssd_generation.forward.captured import passes
from ssd_generation.forward.captured.batch_invariance import WIDTHS, BatchInvariance, RowAttention
from ssd_generation.forward.captured.cache_attention import CacheAttention
from ssd_generation.forward.captured.fx_graph import Program
from ssd_generation.forward.captured.passes import captured_target
from ssd_generation.native.codegen import compiler
from ssd_generation.native.ops import kernels
from ssd_generation.native.ops.kernels import NAMES, bits_of, flags, kernel
from ssd_generation.native.sequence import Block, KernelList, Operand, Step, make_list
from ssd_generation.support.versions import CACHE
from tiny_models import FAMILIES, even_model, prompt, tiny_model

pytestmark = pytest.mark.skipif(compiler.why_not() is not None, reason=f"no code can be made: {compiler.why_not()}")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
HEADS, KV_HEADS = 6, 2


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------------------
# attention


class Layer:
    """The attributes of a cache layer that `CacheAttention` reads."""

    def __init__(self, slots: int, size: int, dtype: torch.dtype, window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(slots)
        self.key_buffer, self.value_buffer = (
            torch.randn((1, KV_HEADS, slots, size), generator=generator).to(dtype) for _ in range(2)
        )
        self.sliding_window = window


def attended(
    query: torch.Tensor,
    layer: Layer,
    at: int,
    scale: float = 0.3,
    count: int | None = None,
    shift: int = 0,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of queries `(1, n, H, D)` at slots from `at` on."""
    _, rows, heads, size = query.shape
    attention = CacheAttention()
    attention.begin([layer], at - shift, rows if count is None else count)
    attention.windows = [layer.sliding_window]
    attention.move_to(at - shift, attention.count)
    attention.table()
    attention.move_to(at, attention.count)
    given, cache, result = Block((1, rows, heads, size), 0), Block((1,)), Block((1, rows, heads, size))
    names = NAMES[query.dtype], NAMES[layer.key_buffer.dtype], size
    fields = [0, heads, heads // KV_HEADS, heads * size, size, bits_of(scale)]
    fields += [bits_of(cap or 0.0), 0 if sinks is None else sinks.data_ptr()]
    step = Step(
        "attend",
        kernel("attention", "attend", *names, size, cap is not None, sinks is not None),
        flags(40, 2),
        [Operand(given), Operand(result, 0, True), *fields, Operand(cache)],
    )
    made = make_list([step], [result], 1, rows, query.dtype)
    return made(attention, query)  # type: ignore[no-any-return]


def true_attention(
    query: torch.Tensor,
    layer: Layer,
    at: int,
    scale: float = 0.3,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the same attention, computed in float64."""
    rows, end = query.shape[1], at + query.shape[1]
    keys, values = (
        buffer[:, :, :end].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
        for buffer in (layer.key_buffer, layer.value_buffer)
    )
    mask = torch.ones((rows, end), dtype=torch.bool).tril_(at)
    if layer.sliding_window is not None and layer.sliding_window > 0:
        mask = mask.triu_(at + 1 - layer.sliding_window)
    elif layer.sliding_window is not None:
        chunks = torch.arange(end) // -layer.sliding_window
        mask &= chunks[at:, None] == chunks
    if cap is not None or sinks is not None:
        scores = query.double().transpose(1, 2) @ keys.transpose(2, 3) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(1, -1, rows, -1)), dim=-1)
        return (scores.softmax(dim=-1)[..., :end] @ values).transpose(1, 2)
    return functional.scaled_dot_product_attention(
        query.double().transpose(1, 2), keys, values, attn_mask=mask, scale=scale
    ).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 6, -6])
def test_rows_of_a_draft_follow_those_before_them(window: int | None) -> None:
    """Attention by torch, where a draft has written tokens that the layer does not count."""
    layer: Any = Layer(40, 8, torch.float32, window)
    layer.end = 20
    query, attention = queries(2, 8, torch.float32), RowAttention([window])
    attention.begin([layer], 20, 5)
    attention.move_to(25, 2)
    key, value = (buffer[:, :, 25:27].clone() for buffer in (layer.key_buffer, layer.value_buffer))
    found = attention.attend(query.transpose(1, 2), key, value, 0, 0.3)
    torch.testing.assert_close(found.double(), true_attention(query, layer, 25), rtol=1e-5, atol=1e-6)


def queries(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((1, rows, HEADS, size), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [5, 8, 16, 64, 80, 160])
@pytest.mark.parametrize("at", [0, 1, 15, 16, 255, 256, 700])
@pytest.mark.parametrize(
    ("dtype", "cached"), [*((dtype, dtype) for dtype in FLOATS), (torch.bfloat16, torch.float32)], ids=str
)
def test_attention_is_as_near_to_the_true_result_as_rounding_allows(
    dtype: torch.dtype, cached: torch.dtype, at: int, size: int
) -> None:
    layer, query = Layer(at + 9, size, cached), queries(4, size, dtype)
    got, expected = attended(query, layer, at), true_attention(query, layer, at)
    assert got.dtype is dtype
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert bool(((got.double() - expected).abs() <= rounding * expected.abs() + 2e-6 * (1 + expected.abs())).all())


@pytest.mark.parametrize("at", [0, 17, 700])
@pytest.mark.parametrize("cap", [None, 0.5, 30.0])
@pytest.mark.parametrize("sunk", [None, 0.0, 4.0, -200.0, 200.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_capped_scores_and_sinks(dtype: torch.dtype, sunk: float | None, cap: float | None, at: int) -> None:
    layer, query = Layer(at + 9, 24, dtype, 300), queries(4, 24, dtype)
    sinks = None if sunk is None else sunk + torch.randn(HEADS, generator=torch.Generator().manual_seed(5))
    got = attended(query, layer, at, 3.0, cap=cap, sinks=sinks)
    expected = true_attention(query, layer, at, 3.0, cap, sinks)
    alone = [attended(query[:, row : row + 1], layer, at + row, 3.0, cap=cap, sinks=sinks) for row in range(4)]
    assert torch.equal(got, torch.cat(alone, dim=1)), "bits depend on the other tokens"
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert bool(((got.double() - expected).abs() <= rounding * expected.abs() + 6e-6 * (1 + expected.abs())).all())
    if sunk == 200.0:
        assert not got.any(), "a sink that takes all weight leaves nothing"


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    size=st.sampled_from([8, 24, 64]),
    at=st.integers(0, 600),
    rows=st.integers(1, 9),
    window=st.sampled_from([None, 1, 7, 300, -1, -7, -300]),
    count=st.integers(1, 4),
    shift=st.integers(0, 3),
)
def test_a_token_gives_the_same_bits_whatever_else_is_in_the_pass(
    dtype: torch.dtype, size: int, at: int, rows: int, window: int | None, count: int, shift: int
) -> None:
    layer, query = Layer(at + rows, size, dtype, window), queries(rows, size, dtype)
    before = torch.get_num_threads()
    alone = torch.cat([attended(query[:, row : row + 1], layer, at + row) for row in range(rows)], dim=1)
    try:
        torch.set_num_threads(count)
        assert torch.equal(attended(query, layer, at, shift=min(shift, at)), alone)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(alone.double(), true_attention(query, layer, at), rtol=2**-7, atol=1e-3)


@pytest.mark.skipif("+avx512f" not in compiler._features(), reason="AVX-512")
def test_a_processor_with_shorter_vectors_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, query = Layer(300, 64, torch.bfloat16), queries(3, 64, torch.bfloat16)
    wide = attended(query, layer, 290)
    monkeypatch.setattr(compiler, "_cpu", lambda: "haswell")
    monkeypatch.setattr(compiler, "_features", lambda: "")
    kernels.kernel.cache_clear()
    try:
        assert torch.equal(attended(query, layer, 290), wide)
    finally:
        kernels.kernel.cache_clear()


def test_a_token_sees_nothing_after_itself() -> None:
    layer, query = Layer(30, 16, torch.float32), queries(5, 16, torch.float32)
    clean = attended(query, layer, 20)
    layer.key_buffer[:, :, 23:] = float("nan")
    layer.value_buffer[:, :, 23:] = float("inf")
    got = attended(query, layer, 20)
    assert torch.equal(got[:, :3], clean[:, :3]) and bool(got[:, 3:].isnan().all())
    # Padding rows of the pass are not computed.
    filled = attended(query, layer, 20, count=2)
    assert torch.equal(filled[:, :2], clean[:, :2]) and filled[:, 2:].unique().tolist() == [0]


@pytest.mark.parametrize("factor", [1e4, 1e30])
def test_scores_of_any_size(factor: float) -> None:
    layer, query = Layer(300, 16, torch.float32), queries(2, 16, torch.float32)
    layer.key_buffer[:, :, 17] *= factor
    got, expected = attended(query, layer, 290), true_attention(query, layer, 290)
    assert torch.allclose(got.double(), expected, atol=1e-5)
    layer.key_buffer[:, :, :] = -float("inf")
    assert bool(attended(query, layer, 290).isnan().all())  # as in torch
    assert bool(true_attention(query, layer, 290).isnan().all())


def test_what_is_appended_lies_in_its_slots(threads: None) -> None:
    torch.set_num_threads(2)
    size, at, rows = 24, 5, 3
    layer = Layer(12, size, torch.float32)
    before = layer.key_buffer.clone(), layer.value_buffer.clone()
    attention = CacheAttention()
    attention.begin([None, layer], at, 2)
    # Keys and values side by side in each row, as one merged product returns them.
    both = torch.randn(1, rows, 2 * KV_HEADS * size).bfloat16()
    block = Block((1, rows, 2 * KV_HEADS * size), 0)
    ways = [2 * KV_HEADS * size, size]
    fields = [Operand(block), Operand(block, KV_HEADS * size), 1, KV_HEADS, *ways, *ways, Operand(Block((1,)), 0, True)]
    step = Step("append", kernel("attention", "append", "bfloat16", "float32", size), flags(2), fields)
    make_list([step], [], 1, rows, torch.bfloat16)(attention, both)
    parts = both.float().view(1, rows, 2, KV_HEADS, size)
    for which, (buffer, old) in enumerate(zip((layer.key_buffer, layer.value_buffer), before, strict=True)):
        assert torch.equal(buffer[:, :, at : at + 2], parts[:, :2, which].transpose(1, 2))
        assert torch.equal(buffer[:, :, :at], old[:, :, :at]) and torch.equal(
            buffer[:, :, at + 2 :], old[:, :, at + 2 :]
        )


# ----------------------------------------------------------------------------------------------------------------------
# lists


def sums(sizes: list[int], terms: list[tuple[int, int]]) -> tuple[KernelList, list[torch.Tensor], list[Any]]:
    """Return a list that adds inputs (two per size) and earlier results, its inputs, and some expected results."""
    inputs = [torch.randn(size) for size in sizes for _ in range(2)]
    blocks = [Block((size,), at) for at, size in enumerate(size for size in sizes for _ in range(2))]
    steps, results = [], list(inputs)
    for one, other in terms:
        first = one % len(blocks)
        same = [at for at, block in enumerate(blocks) if block.shape == blocks[first].shape]
        second = same[other % len(same)]
        made = Block(blocks[first].shape)
        operands = [Operand(blocks[first]), Operand(blocks[second]), Operand(made, 0, True)]
        steps.append(Step("add", kernel("rows", "add", "float32"), flags(5), [*operands, made.count()]))
        blocks.append(made)
        results.append(results[first] + results[second])
    wanted = [at for at in range(len(inputs), len(blocks)) if at % 3 == 0 or at == len(blocks) - 1]
    return (
        make_list(steps, [blocks[at] for at in wanted], len(inputs), 1, torch.float32),
        inputs,
        [results[at] for at in wanted],
    )


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    terms=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=40),
    count=st.integers(1, 4),
)
@example(sizes=[257], terms=[(0, 1), (2, 2), (3, 0), (4, 1), (5, 5), (6, 0)], count=4)
def test_memory_is_used_again_and_no_result_is_lost(sizes: list[int], terms: Any, count: int) -> None:
    made, inputs, expected = sums(sizes, terms)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        for _ in range(3):
            got = made(None, *inputs)
            got = (got,) if len(expected) == 1 else got
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_threads_meet_only_where_they_must() -> None:
    given, one, other, both = Block((64,), 0), Block((64,)), Block((64,)), Block((64,))

    def add(first: Block, second: Block, result: Block) -> Step:
        operands = [Operand(first), Operand(second), Operand(result, 0, True)]
        return Step("add", kernel("rows", "add", "float32"), flags(5), [*operands, 64])

    steps = [add(given, given, one), add(given, given, other), add(one, other, both)]
    made = make_list(steps, [both], 1, 1, torch.float32)
    assert [made._records[at][1] & 1 for at in range(3)] == [0, 1, 0]
    assert made.bytes == 2 * 64 * 4
    # A result that reuses another's memory waits until that one has been read.
    chain = [add(given, given, one), add(one, one, other), add(other, other, both)]
    made = make_list(chain, [both], 1, 1, torch.float32)
    assert [made._records[at][1] & 1 for at in range(3)] == [1, 1, 0]


def test_some_of_the_kernels_alone() -> None:
    made, inputs, expected = sums([64], [(0, 1), (0, 0), (1, 1)])
    assert [step.name for step in made.steps] == ["add"] * 3
    last = made.only([2])
    assert len(last.steps) == 1 and last.outputs == made.outputs
    got = last(None, *inputs)
    assert torch.equal((got if len(expected) == 1 else got[-1]), expected[-1])
    whole = made(None, *inputs)
    assert torch.equal(whole if len(expected) == 1 else whole[-1], expected[-1])  # unchanged


def test_other_types_and_strides_are_taken() -> None:
    made, inputs, (expected,) = sums([64], [(0, 1)])
    crooked = torch.stack([inputs[0]] * 3, dim=1)[:, 1]
    assert torch.equal(made(None, crooked, inputs[1].double()), expected)


# ----------------------------------------------------------------------------------------------------------------------
# passes


def program_of(family: str, dtype: torch.dtype, length: int) -> tuple[Program | None, str | None]:
    model = enable_self_speculative(even_model(family).to(dtype))
    found = captured_target(model, BatchInvariance("native", WIDTHS))
    if found is None:
        return None, "not captured"
    return found.program(length), found.uneven or found.refusal


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "olmo2"])
@pytest.mark.parametrize("length", [1, 4])
def test_the_layers_of_common_families_are_one_call(family: str, length: int) -> None:
    program, refusal = program_of(family, torch.float32, length)
    assert program is not None, refusal
    (call,) = (line for line in program.source.splitlines() if "kernels(" in line)
    assert "attend" not in program.source.replace("attention", "") and "linear" not in program.source
    assert f"return {call.split(' = ')[0].strip()}" in program.source


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_multiples_are_in_the_list(dtype: torch.dtype) -> None:
    program, refusal = program_of("granite", dtype, 4)  # it scales embeddings and what is added to the residual stream
    assert program is not None, refusal
    assert program.source.count("sequence_kernels") == 1
    x, factor = torch.randn(3, 100, dtype=dtype), 0.22
    step = Step("scale", kernel("rows", "scale", NAMES[dtype]), flags(2), [])
    blocks = Block((3, 100), 0), Block((3, 100))
    step.fields = [Operand(blocks[0]), Operand(blocks[1], 0, True), 100, bits_of(factor)]
    made = make_list([step], [blocks[1]], 1, 3, dtype)
    assert torch.equal(made(None, x), x * factor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 15, 16, 100, 576])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(dtype: torch.dtype, columns: int, has_weight: bool, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, columns), (columns,), (columns,)))
    x, weight, bias = (x * 3 + 40).to(dtype), weight.to(dtype), bias.to(dtype)
    blocks = Block((5, columns), 0), Block((5, columns))
    addresses = [weight.data_ptr() if has_weight else 0, bias.data_ptr() if has_bias else 0]
    fields = [Operand(blocks[0]), Operand(blocks[1], 0, True), *addresses, columns, bits_of(1e-5), 1, columns]
    step = Step("layer_norm", kernel("rows", "layer_norm", NAMES[dtype]), flags(3), fields)
    found = make_list([step], [blocks[1]], 1, 5, dtype)(None, x)
    given = weight.double() if has_weight else None, bias.double() if has_bias else None
    true = functional.layer_norm(x.double(), (columns,), *given, 1e-5)
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(found.double(), true, rtol=rounding, atol=2e-4)


class OneByOne(RowAttention):
    """Attention by the same kernels as in a list, called one by one from Python."""

    __slots__ = ()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, kv_heads, rows, size = query.shape[1], key.shape[1], query.shape[2], query.shape[3]
        blocks = [Block((1, state.shape[1], rows, size), at) for at, state in enumerate((query, key, value))]
        cache, result = Block((1,)), Block((1, rows, heads, size))
        names = NAMES[query.dtype], NAMES[self.key_buffers[layer].dtype], size
        ways = [size, rows * size]
        states = Operand(blocks[1]), Operand(blocks[2])
        appended: list[int | Operand] = [*states, layer, kv_heads, *ways, *ways, Operand(cache, 0, True)]
        sinks = None if sinks is None else sinks.float()
        options = [bits_of(softcap or 0.0), 0 if sinks is None else sinks.data_ptr()]
        fields: list[int | Operand] = [layer, heads, heads // kv_heads, *ways, bits_of(scaling), *options]
        fields.append(Operand(cache))
        steps = [
            Step("append", kernel("attention", "append", *names), flags(2), appended),
            Step(
                "attend",
                kernel("attention", "attend", *names, size, softcap is not None, sinks is not None),
                flags(40, 3),
                [Operand(blocks[0]), Operand(result, 0, True), *fields],
            ),
        ]
        made = make_list(steps, [result], 3, rows, query.dtype)
        return made(self, query, key, value)  # type: ignore[no-any-return]

    def attend_latents(
        self,
        query: torch.Tensor,
        query_rotated: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        given = [one.contiguous() for one in (query, query_rotated, latent, rotated)]
        blocks = [Block(tuple(one.shape), at) for at, one in enumerate(given)]
        (_, heads, rows, size), turned = query.shape, rotated.shape[3]
        cache, result = Block((1,)), Block((1, heads, rows, size))
        names = NAMES[query.dtype], NAMES[self.key_buffers[layer].dtype]
        appended: list[int | Operand] = [Operand(blocks[2]), Operand(blocks[3]), layer, 1]
        appended += [size, rows * size, turned, rows * turned, Operand(cache, 0, True)]
        fields: list[int | Operand] = [Operand(blocks[0]), Operand(result, 0, True), layer, heads, heads, size]
        fields += [rows * size, bits_of(scaling), 0, 0, Operand(blocks[1]), turned, rows * turned, Operand(cache)]
        attend = kernel("attention", "attend", *names, size, size, False, False, turned)
        steps = [
            Step("append", kernel("attention", "append", *names, turned, size), flags(2), appended),
            Step("attend", attend, flags(40, 3), fields),
        ]
        return make_list(steps, [result], 4, rows, query.dtype)(self, *given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lists_change_no_bit(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rounded = [], False
    for lists in (True, False):
        model = enable_self_speculative(even_model(family).to(dtype))
        if not lists:
            monkeypatch.setattr(passes, "use_kernel_lists", lambda *rest: None)
            monkeypatch.setattr(passes.CapturedPasses, "_new_attention", lambda self: OneByOne(self._windows))
        found = captured_target(model, BatchInvariance("native", WIDTHS))
        if found is None or found.program(3) is None:
            pytest.skip("its passes are not captured")
        rounded = rounded or bool(found._rounded)
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(prompt(9), **{CACHE: cache})
            add_buffers(cache)
            parts = []
            for at, count in ((9, 3), (12, 1), (13, 2)):  # the last one is padded
                positions = torch.arange(at, at + count)[None]
                parts.append(found.run(cache, prompt(count, seed=at), positions, width=3 if count > 1 else 1))
            assert cache.get_seq_length() == 15
        assert all(part is not None for part in parts)
        logits.append(torch.cat([part for part in parts if part is not None], dim=1))
    if not rounded:
        assert torch.equal(*logits)
    else:  # such as a mean, an exponential or a norm, which torch computes where there are no lists
        close = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(*logits, rtol=close, atol=close)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_reads_the_memory_that_it_was_captured_with(family: str) -> None:
    # Another thread may replace a weight while a pass reads it: its memory must outlive the pass.
    model = enable_self_speculative(even_model(family))
    found = captured_target(model, BatchInvariance("native", WIDTHS))
    if found is None or found.program(3) is None:
        pytest.skip("its passes are not captured")

    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            model(prompt(9), **{CACHE: cache})
            add_buffers(cache)
        before = found.run(caches[0], prompt(3, seed=1), torch.arange(9, 12)[None], width=3)
        for weight in (*model.parameters(), *model.buffers()):
            weight.data = torch.full_like(weight, 7)
        after = found.run(caches[1], prompt(3, seed=1), torch.arange(9, 12)[None], width=3)
    assert before is not None and after is not None and torch.equal(before, after)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "phi3"])
def test_drafts_of_a_wider_cache(family: str) -> None:
    # Activations are bfloat16, the cache is float32; mixtral's experts stay in float32 and must not be mixed with them.
    model = enable_self_speculative(tiny_model(family))
    config = SelfSpeculativeConfig(precision="int8", drafting=DraftingConfig(policy="fixed", max_draft_length=3))
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(prompt(9), **options)
    assert torch.equal(model.generate(prompt(9), **options, self_speculative=config), plain)
    assert model.last_speculation.acceptance_rate > 0.6


def test_a_cache_of_another_type_is_left_to_torch() -> None:
    model = enable_self_speculative(tiny_model("llama"))
    found = captured_target(model)
    assert found is not None and found.program(1) is not None
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(prompt(5), **{CACHE: cache})
    narrow = DynamicCache(config=model.config)
    for layer, known in enumerate(cache.layers):
        narrow.update(known.keys.bfloat16(), known.values.bfloat16(), layer)
    for one, can in ((cache, True), (narrow, False)):
        add_buffers(one)
        assert found.can_run(one, 1) is can
        assert (found.run(one, prompt(1), torch.tensor([[5]])) is not None) is can
