"""Captured passes, rewritten and run: the results stay, there are fewer operations, and look-alikes are unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from ssd_generation import PrecisionConfig, SkipConfig, enable_self_speculative
from ssd_generation.cache.buffered_layers import add_buffers
from ssd_generation.forward.captured import passes, rewrites
from ssd_generation.forward.captured.cache_attention import CacheAttention
from ssd_generation.forward.captured.capture import capture_pass
from ssd_generation.forward.captured.fx_graph import CapturedPass, compile_pass
from ssd_generation.forward.captured.recording import Recording
from ssd_generation.forward.captured.rewrites import (
    fuse_norms,
    fuse_rotary,
    merge_linears,
    share_results,
    swap_linears,
    use_bfloat16,
    use_native_rows,
)
from ssd_generation.forward.copies.low_bit import copies_of
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops.rows import gated_silu, rms_norm, rotary
from ssd_generation.support.versions import CACHE
from tiny_models import prompt, tiny_model

# Captured families, one per kind of layer, and the norms and rotations that rewrites find in a model of two layers.
FAMILIES = {
    "llama": (5, 4),
    "qwen3": (9, 4),  # norms on query and key, too
    "olmo2": (9, 4),
    "phi3": (5, 4),
    "smollm3": (5, 4),
    "gpt_neox": (0, 4),  # layer norms are one operation anyway
    "cohere": (3, 0),  # its layer norm is this norm after subtracting the mean; its rotary embedding interleaves
    "gpt2": (0, 0),
    "opt": (0, 0),
    "mixtral": (5, 4),
}
LENGTH = 3


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {family: tiny_model(family, num_hidden_layers=2) for family in FAMILIES}


def own_logits(model: PreTrainedModel, length: int = LENGTH) -> torch.Tensor:
    return run_after(
        model, lambda ids, positions, cache: model(ids, position_ids=positions, **{CACHE: cache}).logits, length
    )


def play(model: PreTrainedModel, captured: CapturedPass, length: int = LENGTH) -> torch.Tensor:
    def run(ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        add_buffers(cache)
        for layer in cache.layers:
            layer.reserve(length)
        attention = CacheAttention()
        attention.begin(cache.layers, 9, length)
        return compile_pass(captured).run(ids, positions, attention)

    return run_after(model, run, length)


def run_after(
    model: PreTrainedModel, run: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor], length: int
) -> torch.Tensor:
    """Run a pass over a few tokens after a cache of nine."""
    with torch.inference_mode():
        cache = DynamicCache()
        model(prompt(9), **{CACHE: cache})
        return run(prompt(length, seed=4), torch.arange(9, 9 + length)[None], cache)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


def count(captured: CapturedPass, target: Any) -> int:
    return sum(node.target == target for node in captured.nodes)


def calls_of(captured: CapturedPass) -> int:
    return sum(node.op.startswith("call_") for node in captured.nodes)


def after(captured: CapturedPass, *rewrites_: Callable[..., None]) -> CapturedPass:
    """Return a rewritten copy of a pass, and check that torch.fx finds its graph well formed."""
    made = captured.copy(captured.length, lambda leaf: leaf)
    for rewrite in rewrites_:
        rewrite(made)
    made.graph.lint()
    return made


# --- rewrites of real passes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_rewrites_keep_the_logits_and_shorten_the_pass(models: dict[str, Any], family: str) -> None:
    model = models[family]
    expected = own_logits(model)
    captured = capture_pass(model, LENGTH, 7)
    assert close(play(model, captured), expected, 1e-5)
    shared = after(captured, share_results)
    assert torch.equal(play(model, shared), play(model, captured)), "sharing results must not round otherwise"
    normed = after(shared, fuse_norms)
    assert close(play(model, normed), expected, 1e-5)
    turned = after(normed, fuse_rotary)
    assert close(play(model, turned), expected, 1e-5)

    norms, rotations = FAMILIES[family]
    assert (count(normed, rewrites._norm), count(turned, rewrites._rotate)) == (norms, rotations)
    calls = [calls_of(made) for made in (captured, shared, normed, turned)]
    assert calls[1] <= calls[0] and calls[2] <= calls[1] - 4 * norms and calls[3] <= calls[2] - 5 * rotations
    if norms == 0:
        assert str(normed.graph) == str(shared.graph)
    if rotations == 0:
        assert str(turned.graph) == str(normed.graph)
    source = compile_pass(turned).source
    assert source.count(" = ") >= calls[3] and sum(line.startswith("    ") for line in source.splitlines()) >= calls[3]


@pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_code_made_here_takes_the_place_of_norms_gates_and_rotations(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, num_hidden_layers=2).to(dtype)
    shared = after(capture_pass(model, LENGTH, 7), share_results)
    native = after(shared, use_native_rows)
    got, expected = play(model, native), play(model, shared)
    if dtype is torch.float32:
        assert close(got, expected, 1e-5)
    else:
        assert (got != expected).float().mean() < 0.02, "in half precision these are the model's own numbers"
    norms, rotations = FAMILIES[family]
    if dtype is torch.float32 or family not in ("cohere", "olmo2"):  # these multiply the weight in float32
        assert count(native, rms_norm) == norms
    assert count(native, rotary) == (0 if family == "olmo2" and dtype is not torch.float32 else rotations)
    gates = {"gpt_neox": 0, "gpt2": 0, "opt": 0, "mixtral": 0}.get(family, 2)  # mixtral's are in its experts
    assert count(native, gated_silu) == gates


def test_the_rotary_tables_are_reshaped_once(models: dict[str, Any]) -> None:
    captured = capture_pass(models["llama"], LENGTH, 7)
    # cos and sin once, instead of once in each of two layers
    assert count(captured, "unsqueeze") - count(after(captured, share_results), "unsqueeze") == 2


def test_swapped_and_merged_linear_layers(models: dict[str, Any]) -> None:
    model = models["llama"]
    expected = own_logits(model)
    captured = capture_pass(model, LENGTH, 7)
    linears = count(captured, functional.linear)
    assert linears == 2 * 7 + 1
    seen = []

    def swap(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        seen.append(weight)

        def kernel(x: torch.Tensor) -> torch.Tensor:
            return x @ weight.T

        return None if weight.shape[0] == 48 else kernel  # these layers stay unchanged

    swapped = after(captured, lambda made: swap_linears(made, swap))
    assert close(play(model, swapped), expected, 1e-5)
    assert len(seen) == linears and count(swapped, functional.linear) == 4

    groups = {
        id(linear.weight): (layer.self_attn, index)
        for layer in model.model.layers
        for index, linear in enumerate((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))
    }
    calls = []

    def kernel_of(group: Any, weights: Sequence[torch.Tensor]) -> Any:
        calls.append(len(weights))

        def kernel(x: torch.Tensor) -> list[torch.Tensor]:
            return [x @ linear.weight.T for linear in (group.q_proj, group.k_proj, group.v_proj)]

        return kernel, lambda weight: groups[id(weight)][1]

    merged = after(
        captured, lambda made: merge_linears(made, lambda weight, bias: groups.get(id(weight), (None,))[0], kernel_of)
    )
    assert close(play(model, merged), expected, 1e-5)
    assert calls == [3, 3] and count(merged, functional.linear) == linears - 6


def test_bfloat16_activations() -> None:
    model = tiny_model("qwen2", num_hidden_layers=2, hidden_size=96)  # norms large enough to be cast
    shared = after(capture_pass(model, LENGTH, 7), share_results, fuse_norms, fuse_rotary)
    narrow = after(shared, use_bfloat16)
    got, expected = (
        play(model, after(narrow, lambda made: passes._use_own_weights(made, model.dtype))),
        own_logits(model),
    )
    assert got.dtype == torch.bfloat16 and close(got, expected, 0.05) and not close(got, expected, 1e-4)
    # One cast after the embedding; the norms' weights are cast beforehand.
    assert calls_of(narrow) == calls_of(shared) + 1
    for made, dtype in ((narrow, torch.bfloat16), (shared, torch.float32)):
        weights = [made.constant(node.args[1]) for node in made.nodes if node.target is rewrites._norm]
        assert len(weights) == 5 and all(weight is not None and weight.dtype == dtype for weight in weights)


def test_query_and_key_are_turned_together() -> None:
    model = enable_self_speculative(tiny_model("qwen2", num_hidden_layers=2, hidden_size=96))
    copies = copies_of(model, SkipConfig(), PrecisionConfig("int8"))
    made = []
    for together in (True, False):
        captured = after(capture_pass(model, 1, 7), share_results, fuse_norms, fuse_rotary)
        with pytest.MonkeyPatch.context() as patch:
            if not together:
                patch.setattr(passes, "rotate_together", lambda captured, joined: None)
            passes._use_copies(captured, copies, model.dtype)
        captured.graph.lint()
        made.append(captured)
    assert [count(one, rewrites._rotate_together) for one in made] == [2, 0]
    assert [count(one, rewrites._rotate) for one in made] == [0, 4]
    got, expected = (play(model, one, 1) for one in made)
    assert torch.equal(got, expected) and close(got, own_logits(model, 1), 0.1)


def test_what_a_program_has_copies_of(models: dict[str, Any]) -> None:
    model = models["llama"]
    captured = capture_pass(model, LENGTH, 7)
    assert compile_pass(after(captured, share_results)).copied_weights == ()
    copied = compile_pass(after(captured, fuse_norms)).copied_weights
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert {id(one.weight) for one in copied} == {id(parameter) for parameter in norms}


# --- rewrites of artificial passes
# --------------------------------------------------------------------------------------------------

WIDTH = 8
WEIGHT = torch.linspace(0.5, 1.5, WIDTH)
TABLE = torch.randn((WIDTH, WIDTH), generator=torch.Generator().manual_seed(0))
OTHER = torch.randn((WIDTH, WIDTH), generator=torch.Generator().manual_seed(1))

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def arguments(seed: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, 4, width), generator=generator), torch.randn((1, 4, width), generator=generator)


def traced(function: Function, width: int = WIDTH) -> CapturedPass:
    """Return the graph of a function of two tensors, in place of a pass's ids and positions."""
    capture = Recording({})
    a, b = arguments(0, width)
    capture.input("ids", a)
    capture.input("positions", b)
    capture.graph.placeholder("attention")
    with capture:
        # As results of an operation, like all values inside a model.
        result = function(a * 1.0, b * 1.0)
    capture.noted(capture.graph.output(capture.node_of(result)), None)
    captured = CapturedPass(capture.graph, capture.constants)
    captured.eliminate_dead_code()
    return captured


def check(function: Function, made: CapturedPass, width: int = WIDTH) -> None:
    """Assert that a graph computes what the function does, on other inputs than those it was captured with."""
    made.graph.lint()
    run = compile_pass(made).run
    for seed in (1, 2):
        got = run(*arguments(seed, width), None)  # type: ignore[arg-type]
        torch.testing.assert_close(got, function(*arguments(seed, width)), rtol=1e-5, atol=1e-6)


def norm(
    x: torch.Tensor, axis: int = -1, power: int = 2, weight: torch.Tensor = WEIGHT, eps: float = 1e-5
) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(power).mean(axis, keepdim=True) + eps))


def used_twice(x: torch.Tensor, what: str) -> torch.Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    inverse = torch.rsqrt(mean + 1e-5)
    scaled = x * inverse
    return WEIGHT * scaled + {"mean": mean, "inverse": inverse, "scaled": scaled}[what]


def written_between(x: torch.Tensor) -> torch.Tensor:
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    scaled = x * inverse
    x.view(-1).add_(1)
    return WEIGHT * scaled


NORMS: dict[str, Function] = {
    "plain": lambda x, y: norm(x),
    "the other way round": lambda x, y: (
        (torch.rsqrt(1e-5 + torch.mean(torch.pow(x, 2), -1, keepdim=True)) * x) * WEIGHT
    ),
    "a large ε": lambda x, y: norm(x, eps=0.7),
}
NO_NORMS: dict[str, Function] = {
    "another axis": lambda x, y: norm(x, axis=1),
    "two axes": lambda x, y: WEIGHT * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-5)),
    "another power": lambda x, y: norm(x, power=4),
    "another tensor's mean": lambda x, y: WEIGHT * (x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "a computed ε": lambda x, y: WEIGHT * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + y.abs())),
    "a square root": lambda x, y: WEIGHT * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "a sum": lambda x, y: WEIGHT * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)),
    "one weight": lambda x, y: norm(x, weight=WEIGHT[:1]),
    "weights by row": lambda x, y: norm(x, weight=TABLE[:4]),
    "a computed weight": lambda x, y: (y * 2) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "mean used": lambda x, y: used_twice(x, "mean"),
    "inverse used": lambda x, y: used_twice(x, "inverse"),
    "scaled used": lambda x, y: used_twice(x, "scaled"),
    "written between": lambda x, y: written_between(x),
}


@pytest.mark.parametrize("name", [*NORMS, *NO_NORMS])
def test_norms(name: str) -> None:
    function = {**NORMS, **NO_NORMS}[name]
    fused = after(traced(function), fuse_norms)
    assert count(fused, rewrites._norm) == (name in NORMS)
    check(function, fused)


def turn(x: torch.Tensor, sin: torch.Tensor, half: int = WIDTH // 2, axis: int = -1) -> torch.Tensor:
    return x * sin.cos() + torch.cat((-x[..., half:], x[..., :half]), dim=axis) * sin


def turn_written(x: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    straight, turned = x * sin.cos(), torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin
    x.mul_(3)
    return straight + turned


def turn_used_twice(x: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
    return x * sin.cos() + rotated * sin + rotated


TURNS: dict[str, Function] = {
    "plain": turn,
    "the other way round": lambda x, s: s * torch.cat((-x[..., 4:], x[..., :4]), -1) + s.cos() * x,
    "two that share a table": lambda x, s: turn(x, s) + turn(x.exp(), s),
}
NO_TURNS: dict[str, Function] = {
    "another axis": lambda x, s: x * s.cos() + torch.cat((-x[:, 2:], x[:, :2]), dim=1) * s,
    "the halves exchanged": lambda x, s: x * s.cos() + torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * s,
    "nothing negated": lambda x, s: x * s.cos() + torch.cat((x[..., 4:], x[..., :4]), dim=-1) * s,
    "other parts": lambda x, s: turn(x, s, half=2),
    "another tensor's halves": lambda x, s: x * s.cos() + torch.cat((-s[..., 4:], s[..., :4]), dim=-1) * s.sin(),
    "interleaved": lambda x, s: x * s.cos() + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * s,
    "one sine": lambda x, s: x * s.cos() + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * s[..., :1],
    "subtracted": lambda x, s: x * s.cos() - torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * s,
    "used twice": turn_used_twice,
    "written": turn_written,
}


@pytest.mark.parametrize("name", [*TURNS, *NO_TURNS])
def test_rotations(name: str) -> None:
    function = {**TURNS, **NO_TURNS}[name]
    fused = after(traced(function), fuse_rotary)
    assert count(fused, rewrites._rotate) == (0 if name in NO_TURNS else 2 if "two" in name else 1)
    assert count(fused, rewrites._signed) == (name in TURNS)
    check(function, fused)


def test_rotations_of_an_odd_width() -> None:
    def function(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return turn(x, s, half=3)

    fused = after(traced(function, width=7), fuse_rotary)
    assert count(fused, rewrites._rotate) == 0
    check(function, fused, width=7)


# --- sharing and order
# --------------------------------------------------------------------------------------------------


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = x * 2
    x.add_(y)
    return before + x * 2


def through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before, flat = x * 2, x.view(-1)
    flat.add_(1)
    return before + x * 2


def through_a_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before, parts = x * 2, x.split(4, -1)
    parts[1].mul_(3)
    return before + x * 2


def by_entry(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = x * 2
    x[..., 1:3] = y[..., 1:3]
    return before + x * 2


def into_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = x * 2
    torch.add(x, y, out=x)
    return before + x * 2


def unread(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    copy.mul_(2).mul_(3)  # their return values are unused
    return copy + y


@pytest.mark.parametrize("function", [in_place, through_a_view, through_a_part, by_entry, into_out, unread])
def test_operations_in_place_keep_their_order(function: Function) -> None:
    made = traced(function)
    check(function, made)
    check(function, after(made, share_results))
    check(function, after(made, share_results, fuse_norms, fuse_rotary))


def test_the_same_is_computed_once_and_the_unused_never() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (x @ y.transpose(1, 2)).exp()
        return (x * 2 + y.exp()) * (x * 2 + y.exp()) + x[..., 1:2].expand(1, 4, 8) + x[..., 1:2].expand(1, 4, 8)

    made = after(traced(function), share_results)
    assert (count(made, "exp"), count(made, "expand"), count(made, "transpose")) == (1, 1, 0)
    check(function, made)


def test_what_only_looks_the_same_is_computed_twice() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        numbers = x.to(torch.float64).sum() + (x * 1).to(torch.float32).sum()
        masked = torch.add(x, y, alpha=2) + torch.add(x, y, alpha=3) + torch.add(x, y)
        parts = x[:, 1:] + x[:, :-1] + x[:, :3]
        return masked + numbers + parts.sum(-1).sum() + (x - y) + (y - x) * 2 + TABLE[:4] * OTHER[:4] + OTHER[:4]

    check(function, after(traced(function), share_results))


def test_inputs_that_are_written_into_are_not_merged() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = functional.linear(x, TABLE)
        x.mul_(2)
        return first + functional.linear(x, OTHER)

    both = [TABLE, OTHER]

    def kernel_of(group: Any, weights: Sequence[torch.Tensor]) -> Any:
        def kernel(x: torch.Tensor) -> list[torch.Tensor]:
            return [x @ weight.T for weight in both]

        return kernel, lambda weight: 0 if weight is TABLE else 1

    check(function, after(traced(function), lambda made: merge_linears(made, lambda weight, bias: both, kernel_of)))


def test_only_layers_with_constant_weights_are_swapped() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, TABLE * 2, WEIGHT) + functional.linear(x, TABLE, WEIGHT * 2) + x @ TABLE

    def swap(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        raise AssertionError("there is nothing to swap here")

    check(function, after(traced(function), lambda made: swap_linears(made, swap)))


# --- the code
# --------------------------------------------------------------------------------------------------


def test_arguments_of_all_kinds() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.masked_fill(y > 0, float("-inf")).clamp(min=-1e4).nan_to_num(nan=float("nan"))
        x = torch.where(x < 0, torch.full_like(y, 0.5, dtype=torch.float32), x)[..., None, :, ::2]
        left, right = torch.split(torch.cat([x, x.roll(1, -1)], dim=-1), [2, 6], dim=-1)
        best = right.topk(k=3, dim=-1, sorted=True)
        return (
            left.sum()
            + best.values * best.indices.to(device="cpu", dtype=torch.float32)
            + nn.functional.silu(y[:, :, :3])
        )

    made = traced(function)
    check(function, made)
    check(function, after(made, share_results))


def test_what_is_not_in_the_code_is_a_constant() -> None:
    class Odd(float):
        pass

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * np.float64(0.5) + y * Odd(0.25) + (x @ TABLE).mT.real.transpose(1, 2)

    made = traced(function)
    assert {type(value) for value in made.constants.values()} == {np.float64, Odd, torch.Tensor}
    check(function, after(made, share_results))


def watched(captured: CapturedPass) -> list[int]:
    """Return a list that the next run of the pass fills with the number of live results at each call."""
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def watching(target: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            alive.append(sum(ref() is not None for ref in seen))
            result = target(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                seen.append(weakref.ref(result))
            return result

        return call

    for node in captured.nodes:
        if node.op == "call_method" and node.target != "attend":
            node.op, node.target = "call_function", getattr(torch.Tensor, node.target)
        if node.op == "call_function":
            node.target = watching(node.target)
    return alive


def test_results_are_let_go(models: dict[str, Any]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.exp(-x.abs())
        return x + y

    made = traced(function)
    alive = watched(made)
    check(function, made)
    assert len(alive) >= 20 and max(alive) <= 4
    # A model's pass needs few results at a time.
    captured = after(capture_pass(models["llama"], LENGTH, 7), share_results)
    alive = watched(captured)
    play(models["llama"], captured)
    assert len(alive) > 60 and max(alive) < 12
