"""Latent attention, and other attention that was not called through sdpa's interface, in captured passes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from lab.families.models import build
from lab.families.trial import how_captured
from ssd_generation import DraftingConfig, SelfSpeculativeConfig, enable_self_speculative
from ssd_generation.forward.captured import passes
from ssd_generation.forward.captured.batch_invariance import NATIVE, WIDTHS, BatchInvariance
from ssd_generation.forward.captured.cache_attention import CacheAttention
from ssd_generation.forward.captured.capture import capture_pass
from ssd_generation.forward.captured.conditions import why_not_captured
from ssd_generation.forward.captured.latent_attention import EXPANSION, HeadLayers, from_latent, into_latent
from ssd_generation.forward.captured.passes import captured_target
from ssd_generation.forward.captured.replacing import modules_with, own_methods
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops.kernels import NAMES, bits_of, flags, kernel
from ssd_generation.native.sequence import Block, Operand, Step, make_list
from test_native_lists import Layer
from tiny_models import even_model, left_padded, prompt, tiny_model

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

native = pytest.mark.skipif(why_not() is not None, reason=f"no code can be made: {why_not()}")


def drafts(**more: Any) -> SelfSpeculativeConfig:
    return SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed", max_draft_length=3), **more)


# --- kernels


HEADS = 6


class Latents(Layer):
    """Buffers of latents and of rotated keys."""

    def __init__(self, slots: int, size: int, rotated: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(slots)
        self.key_buffer, self.value_buffer = (
            torch.randn((1, 1, slots, one), generator=generator).to(dtype) for one in (size, rotated)
        )
        self.sliding_window = None


def attended(query: torch.Tensor, turned: torch.Tensor, layer: Latents, at: int, scale: float) -> torch.Tensor:
    """Return sums of latents `(1, H, n, R)` for queries `(1, H, n, …)` at slots from `at` on."""
    _, heads, rows, size = query.shape
    attention = CacheAttention()
    attention.begin([layer], at, rows)
    blocks = [Block(tuple(one.shape), place) for place, one in enumerate((query, turned))]
    result, cache, rotated = Block((1, heads, rows, size)), Block((1,)), turned.shape[3]
    names = NAMES[query.dtype], NAMES[layer.key_buffer.dtype]
    ways = [size, rows * size], [rotated, rows * rotated]
    fields: list[int | Operand] = [Operand(blocks[0]), Operand(result, 0, True), 0, heads, heads, *ways[0]]
    fields += [bits_of(scale), 0, 0, Operand(blocks[1]), *ways[1], Operand(cache)]
    address = kernel("attention", "attend", *names, size, size, False, False, rotated)
    step = Step("attend", address, flags(40, 2), fields)
    found: torch.Tensor = make_list([step], [result], 2, rows, query.dtype)(attention, query, turned)
    return found


@native
@pytest.mark.parametrize(("size", "rotated"), [(16, 8), (20, 5), (96, 32), (512, 64)])
@pytest.mark.parametrize("at", [0, 17, 700])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_latent_attention(dtype: torch.dtype, at: int, size: int, rotated: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query, turned = (torch.randn((1, HEADS, 3, one), generator=generator).to(dtype) for one in (size, rotated))
    layer = Latents(at + 9, size, rotated, dtype)
    got = attended(query, turned, layer, at, 0.2)
    for row in range(3):
        latents, keys = (held[0, 0, : at + row + 1].double() for held in (layer.key_buffer, layer.value_buffer))
        scores = query[0, :, row].double() @ latents.T + turned[0, :, row].double() @ keys.T
        true = (scores * 0.2).softmax(dim=-1) @ latents
        rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        assert bool(((got[0, :, row].double() - true).abs() <= rounding * true.abs() + 2e-5 * (1 + true.abs())).all())
        alone = attended(query[:, :, row : row + 1], turned[:, :, row : row + 1], layer, at + row, 0.2)
        assert torch.equal(got[:, :, row : row + 1], alone), "bits depend on the other tokens"


@native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layers_of_heads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn((HEADS * (24 + 40), 48), generator=generator).to(dtype)
    query = torch.randn((1, HEADS, 5, 24), generator=generator).to(dtype)
    latent = torch.randn((1, HEADS, 5, 48), generator=generator).to(dtype)
    by_head = weight.view(HEADS, 64, 48)
    close = {"rtol": 2e-2, "atol": 2e-1} if dtype is not torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    into = HeadLayers(by_head[:, :24].transpose(1, 2).contiguous(), dtype)(query)
    torch.testing.assert_close(into, torch.einsum("bhnd,hdr->bhnr", query, by_head[:, :24]), **close)
    torch.testing.assert_close(into, into_latent(query, weight, 40), **close)
    out = HeadLayers(by_head[:, 24:], dtype)(latent)
    torch.testing.assert_close(out, torch.einsum("bhnr,hdr->bhnd", latent, by_head[:, 24:]), **close)
    torch.testing.assert_close(out, from_latent(latent, weight, 40), **close)


# --- models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiles", [True, False])
def test_logits_are_the_models(dtype: torch.dtype, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiles:
        monkeypatch.setattr(passes, "why_not", lambda: "of the test")
        monkeypatch.setattr(passes, "uneven", lambda captured: None)  # SiLU of tiny sizes, by torch
    model = enable_self_speculative(even_model("deepseek_v3").to(dtype))
    found = captured_target(model, BatchInvariance(NATIVE if compiles else "linear", WIDTHS))
    program = None if found is None else found.program(3)  # compared with the model's own logits as it is made
    assert program is not None, found and (found.refusal, found.uneven)
    assert program.attends_by_kernels == (compiles and why_not() is None)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_linear", "minicpm3"])
def test_texts(family: str) -> None:
    model: Any = enable_self_speculative(build(family))
    assert why_not_captured(model) is None and (why_not() is not None or how_captured(model) == "yes")
    for inputs in ({"input_ids": prompt(9)}, left_padded([9, 5, 12])):
        plain = model.generate(**inputs, **GREEDY)
        for config in (drafts(lookup=True), drafts(precision="int8")):
            assert torch.equal(model.generate(**inputs, **GREEDY, self_speculative=config), plain)
            assert model.last_speculation.drafted_tokens > 0
    torch.manual_seed(1)
    sampled = model.generate(prompt(9), max_new_tokens=20, do_sample=True, pad_token_id=0)
    torch.manual_seed(1)
    options = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt(9), **options, self_speculative=drafts(precision="int8")), sampled)


def test_changed_weights_are_followed() -> None:
    model: Any = enable_self_speculative(even_model("deepseek_v3"))
    for _ in range(3):
        plain = model.generate(prompt(9), **GREEDY)
        assert torch.equal(model.generate(prompt(9), **GREEDY, self_speculative=drafts(lookup=True)), plain)
        with torch.no_grad():
            for layer in modules_with(model, EXPANSION):
                its: Any = layer
                weight = its.kv_b_proj.weight
                weight.copy_(weight.flip(0))


@pytest.mark.parametrize("change", ["bias", "another class"])
def test_other_expansions_are_not_captured(change: str) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
            return 2 * super().forward(input)

    Doubled.__module__ = "transformers.test"
    model: Any = enable_self_speculative(even_model("deepseek_v3"))
    layer: Any = modules_with(model, EXPANSION)[0]
    if change == "bias":
        layer.kv_b_proj.bias = nn.Parameter(torch.full((layer.kv_b_proj.out_features,), 0.1))
    else:
        layer.kv_b_proj.__class__ = Doubled
    plain = model.generate(prompt(9), **GREEDY)
    assert torch.equal(model.generate(prompt(9), **GREEDY, self_speculative=drafts(lookup=True)), plain)
    found = captured_target(model, BatchInvariance(NATIVE, WIDTHS))
    assert found is not None and found.program(1) is None and "latents are expanded by" in str(found.refusal)


def test_a_method_is_replaced_for_one_thread() -> None:
    layers: Any = modules_with(even_model("deepseek_v3"), EXPANSION)
    seen: list[Any] = []
    with own_methods(layers, EXPANSION, lambda layer: lambda *_: "replaced"):
        assert layers[0].expand_kv(None, None) == "replaced"

        def call() -> None:
            latent = torch.zeros((1, 1, 2, layers[0].kv_b_proj.in_features))
            seen.append(layers[0].expand_kv(latent, torch.zeros((1, 1, 2, layers[0].qk_rope_head_dim)))[0].shape)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(seen) == 1 and seen[0][2] == 2
    assert not any(EXPANSION in vars(layer) for layer in layers)


# --- positions that a model counts by its cache, and attention that it calls itself


@pytest.mark.parametrize("family", ["bart", "blenderbot", "marian", "falcon", "gpt2"])
def test_models_that_count_by_the_cache_or_attend_themselves(family: str) -> None:
    model: Any = enable_self_speculative(build(family))
    assert why_not() is not None or how_captured(model) in ("yes", "one text")
    has_slots = any(node.target == "slots" for node in capture_pass(model, 3, 7).nodes)
    assert has_slots == (family in ("bart", "blenderbot", "marian"))
    for inputs in ({"input_ids": prompt(9)}, left_padded([9, 5, 12])):
        plain = model.generate(**inputs, **GREEDY)
        for config in (drafts(lookup=True), drafts(precision="int8")):
            assert torch.equal(model.generate(**inputs, **GREEDY, self_speculative=config), plain)


def test_a_warning_about_padding_does_not_prevent_capture() -> None:
    model: Any = tiny_model("gpt2")
    model.config.pad_token_id = 0
    assert why_not_captured(model) is None
    assert capture_pass(model, 2, 7).length == 2
    assert "warn_if_padding_and_no_attention_mask" not in vars(model)
