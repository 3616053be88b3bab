"""Kernels for linear layers of few rows, and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured import linear_kernels as kernels
from ssd_generation.forward.captured.linear_kernels import KERNELS, Linear, fastest_kernels, linear_of_few_rows
from ssd_generation.forward.captured.passes import captured_target
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.support import measurements as keeping
from tiny_models import prompt, tiny_model

SHAPES = ["512x256 float32", "256x512+bias float32"]
HERE = [name for name in KERNELS if name != "native" or why_not() is None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))
    return tmp_path / "costs"


def layers(seed: int = 0) -> list[kernels.Layer]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(512, 256, generator=generator), None),
        (torch.randn(256, 512, generator=generator), torch.randn(256, generator=generator)),
        (torch.randn(16, 16, generator=generator), None),  # too small to measure
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the seconds per row of each of torch's kernels, by a mock clock that only they advance."""
    takes = {"linear": 4.0, "onednn": 3.0, "onednn-turned": 1.0, "mkl-turned": 2.0}
    now = 0.0

    def slowly(name: str, make: Callable[..., Linear]) -> Callable[..., Linear]:
        def made(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            linear = make(weight, bias)

            def run(x: torch.Tensor) -> torch.Tensor:
                nonlocal now
                now += takes[name] * x.shape[-2]
                return linear(x)

            run.__name__ = name
            return run

        return made

    some: dict[str, Any] = {name: make for name, make in KERNELS.items() if name in takes}
    monkeypatch.setattr(kernels, "KERNELS", {name: slowly(name, make) for name, make in some.items()})
    monkeypatch.setattr(kernels, "why_not", lambda: "of the test")
    monkeypatch.setattr("ssd_generation.forward.captured.linear_kernels.time.perf_counter", lambda: now)
    return takes


def name_of(kernel: Linear | None) -> str:
    return "linear" if kernel is None else kernel.__name__


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 13, 16, 33])
@pytest.mark.parametrize("name", HERE)
def test_every_kernel_is_the_layer(name: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for weight, bias in layers(rows):
        x = torch.randn(1, rows, weight.shape[1], generator=generator)
        expected = functional.linear(x, weight, bias)
        for given in (x, x[0], x.transpose(0, 1), torch.cat([x, x], -1)[..., : weight.shape[1]]):
            with torch.inference_mode():
                linear = KERNELS[name](weight, bias)
                assert linear is not None
                got = linear(given)
            assert got.is_contiguous()
            torch.testing.assert_close(got, expected.reshape(got.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HERE)
def test_generation_is_plain_decoding_whatever_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SMALL", 1)
    monkeypatch.setattr(kernels, "_measure", lambda by_shape, rows: dict.fromkeys(by_shape, name))
    used: set[int] = set()

    def counted(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        linear = KERNELS[name](weight, bias)
        assert linear is not None

        def run(x: torch.Tensor) -> torch.Tensor:
            used.add(x.shape[-2])
            return linear(x)

        return run

    monkeypatch.setattr(kernels, "KERNELS", {**KERNELS, name: counted})
    model: Any = tiny_model("qwen2", seed=3)  # with biases
    ids = prompt(9)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    enable_self_speculative(model)
    for skip in (SkipConfig(), SkipConfig(attention=[1], mlp=[2])):
        config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=4), lookup=not skip)
        out = model.generate(ids, max_new_tokens=24, do_sample=False, self_speculative=config)
        assert torch.equal(out, plain)
    passes = captured_target(model)
    assert passes is not None and passes.refusal is None
    assert name == "linear" or {1, 5} <= used


# --- choice of the kernel -------------------------------------------------------------------------


def test_the_fastest_is_taken(clock: dict[str, float]) -> None:
    made = layers()
    kernel_of = fastest_kernels(tiny_model(), made, 5)
    assert [name_of(kernel_of(*layer)) for layer in made[:2]] == ["onednn-turned"] * 2
    assert name_of(kernel_of(*made[2])) == name_of(linear_of_few_rows(*made[2], 5)), "a small one follows the rule"
    clock["linear"] = 0.5
    kernel_of = fastest_kernels(tiny_model(), made, 9)  # another number of rows is measured separately
    assert [kernel_of(*layer) for layer in made[:2]] == [None, None]


def test_a_kernel_that_is_hardly_faster_does_not_take_the_place_of_the_usual_one(clock: dict[str, float]) -> None:
    clock |= {"onednn": 1.02}
    made = layers()
    assert name_of(fastest_kernels(tiny_model(), made, 8)(*made[0])) == "onednn"
    clock |= {"onednn": 1.2}
    assert name_of(fastest_kernels(tiny_model(), made, 16)(*made[0])) == "onednn-turned"


def test_the_choice_is_kept(clock: dict[str, float], cache: Path) -> None:
    made = layers()
    fastest_kernels(tiny_model(), made, 5)
    (file,) = cache.iterdir()
    content = json.loads(file.read_text())
    assert content["result"] == dict.fromkeys(SHAPES, "onednn-turned") and content["described"]["rows"] == 8
    clock["linear"] = 0.1  # would be chosen now
    for rows in (5, 6, 7, 8):
        assert name_of(fastest_kernels(tiny_model(), made, rows)(*made[0])) == "onednn-turned"
    assert len(list(cache.iterdir())) == 1
    content["result"][SHAPES[0]] = "another"  # as if a later version had written it
    file.write_text(json.dumps(content))
    assert name_of(fastest_kernels(tiny_model(), made, 5)(*made[0])) == "linear"


def test_what_a_busy_machine_measured_is_not_kept(
    clock: dict[str, float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_STEADY", 0.0)
    model = tiny_model()
    assert name_of(fastest_kernels(model, layers(), 5)(*layers()[0])) == "onednn-turned"
    assert not cache.exists() and keeping.was_noisy(model)


def test_what_the_kernels_do_not_take_is_left_alone(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(512, 512)
    odd = [weight.double(), weight.t(), weight[:, ::2]]
    kernel_of = fastest_kernels(tiny_model(), [(w, None) for w in (weight, *odd)], 5)
    assert kernel_of(weight, None) is not None and all(kernel_of(w, None) is None for w in odd)
    assert all(linear_of_few_rows(w, None, 5) is None for w in odd)
    monkeypatch.setattr(kernels, "KERNELS", KERNELS)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert kernel_of(weight, None) is None and linear_of_few_rows(weight, None, 5) is None


@pytest.mark.parametrize(("intel", "usual"), [(True, ["linear"] * 3 + ["onednn"]), (False, ["onednn"] * 4)])
def test_the_rule(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, intel: bool, usual: list[str]) -> None:
    monkeypatch.setattr(kernels, "is_intel", lambda: intel)
    weight = torch.randn(8, 8)
    assert [name_of(linear_of_few_rows(weight, None, rows)) for rows in (1, 2, 3, 4)] == usual
    # The rule also decides for passes that are longer than those measured.
    assert name_of(fastest_kernels(tiny_model(), layers(), 33)(*layers()[0])) == "onednn"


def test_a_large_head_is_measured_by_a_part_of_it(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BYTES", 4 * 256 * 100)
    seen: list[tuple[int, ...]] = []
    plain = kernels.KERNELS["linear"]
    monkeypatch.setitem(kernels.KERNELS, "linear", lambda w, b: seen.append(tuple(w.shape)) or plain(w, b))  # type: ignore[index, func-returns-value]
    fastest_kernels(tiny_model(), [(torch.randn(512, 256), torch.randn(512))] * 3, 2)
    assert seen == [(100, 256)]


@pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here")
def test_jit_compiled_code_is_the_usual_kernel_and_is_measured_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(512, 256)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        usual = linear_of_few_rows(weight.to(dtype), None, 1)
        assert usual is not None
        assert torch.allclose(usual(torch.ones(1, 256, dtype=dtype)).float()[0], weight.sum(1), atol=0.5)
    measured: list[str] = []

    def counted(name: str, make: Callable[..., Linear | None]) -> Callable[..., Linear | None]:
        def made(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
            linear = make(weight, bias)
            measured.append(f"{name} {weight.dtype}" if linear is not None else "")
            return linear

        return made

    monkeypatch.setattr(kernels, "KERNELS", {name: counted(name, make) for name, make in KERNELS.items()})
    fastest_kernels(tiny_model(), [(weight, None), (weight.bfloat16(), None)], 3)
    assert {"native torch.float32", "native torch.bfloat16", "linear torch.bfloat16"} <= set(measured)
    assert "mkl-turned torch.bfloat16" not in measured
