"""JIT-compiled kernels: their results, to the last bit, and the fallback where none can be compiled."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ssd_generation.forward.captured.linear_kernels import KERNELS, linear_of_few_rows
from ssd_generation.native import ahead
from ssd_generation.native.codegen import compiler, pool
from ssd_generation.native.ops import kernels, linear
from ssd_generation.native.ops.linear import Linear, native_linear
from ssd_generation.native.ops.quantise import quantise_int4, quantise_int8
from ssd_generation.native.ops.rows import gated_silu, rms_norm, rotary
from unpacking import pack_int4, pack_int8, unpack_int4, unpack_int8

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = pytest.mark.skipif(compiler.why_not() is not None, reason=f"no code can be made: {compiler.why_not()}")


def made(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    layer = native_linear(weight, bias)
    assert layer is not None
    return layer


def random_layer(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn((rows, columns), generator=generator).to(dtype),
        torch.randn(rows, generator=generator).to(dtype),
    )


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.AMX, "0")


# ----------------------------------------------------------------------------------------------------------------------
# results


@pytest.mark.parametrize("amx", ["1", "0"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 19])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 16), (50, 7), (37, 100), (200, 576)])
def test_a_layer_is_as_near_to_the_true_result_as_torchs(
    amx: str, dtype: torch.dtype, rows: int, outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.AMX, amx)
    weight, bias = random_layer(outputs, columns, dtype)
    x = torch.randn((2, rows, columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    true = x.double() @ weight.double().t() + bias.double()
    scale = (x.double().abs() @ weight.double().abs().t() + bias.double().abs()).clamp(min=1)
    got = made(weight, bias)(x)
    assert got.dtype is dtype
    assert got.shape == (2, rows, outputs)
    ours, torchs = (
        ((result.double() - true).abs() / scale).max() for result in (got, functional.linear(x, weight, bias))
    )
    assert ours <= torchs + 2**-22
    plain = made(weight)(x)
    assert torch.allclose(plain, functional.linear(x, weight), rtol=0, atol=float(ROUNDING[dtype] * scale.max()))


@settings(max_examples=40, deadline=None)
@given(
    amx=st.sampled_from(["1", "0"]),
    dtype=st.sampled_from(FLOATS),
    outputs=st.integers(1, 70),
    columns=st.integers(1, 150),
    rows=st.integers(1, 24),
    first=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_row_gives_the_same_bits_whatever_else_is_in_the_pass(
    amx: str, dtype: torch.dtype, outputs: int, columns: int, rows: int, first: int, seed: int
) -> None:
    weight, bias = random_layer(outputs, columns, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiler.AMX, amx)
        layer = made(weight, bias)
    x = torch.randn((30, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)
    alone = torch.cat([layer(x[row : row + 1]) for row in range(30)])
    assert torch.equal(layer(x[first : first + rows]), alone[first : first + rows])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_change_no_bit(dtype: torch.dtype, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SHARE", 1)  # all threads, even for a small layer
    weight, bias = random_layer(131, 96, dtype)
    layer, x = made(weight, bias), torch.randn(9, 96).to(dtype)
    found = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.append(layer(x))
    assert all(torch.equal(result, found[0]) for result in found)


@pytest.fixture
def shorter_vectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Yield a function that makes this a processor with AVX2 alone from its call on."""

    def shorten() -> None:
        monkeypatch.setattr(compiler, "_cpu", lambda: "haswell")
        monkeypatch.setattr(compiler, "_features", lambda: "")
        kernels.kernel.cache_clear()

    yield shorten
    kernels.kernel.cache_clear()


@pytest.mark.skipif("+avx512f" not in compiler._features(), reason="AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_processor_with_shorter_vectors_gives_the_same_bits(
    dtype: torch.dtype, shorter_vectors: Callable[[], None], no_amx: None
) -> None:
    weight, bias = random_layer(61, 345, dtype)
    x = torch.randn(11, 345).to(dtype)
    wide = made(weight, bias)(x)
    shorter_vectors()
    assert compiler.registers() == 8
    narrow = made(weight, bias)(x)
    assert torch.equal(narrow, wide)


@pytest.mark.skipif("+avx512bf16" not in compiler._features(), reason="AVX-512's bfloat16")
def test_the_instruction_for_pairs_gives_the_bits_of_two_multiply_adds(
    no_amx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = random_layer(61, 2345, torch.bfloat16)
    x = torch.randn(19, 2345).to(torch.bfloat16)
    found = []
    for is_intel in (True, False):  # whose processors have it at half the speed
        monkeypatch.setattr(compiler, "is_intel", lambda is_intel=is_intel: is_intel)
        assert compiler.bfloat16_sums() == ("pairs" if is_intel else "dots")
        kernels.kernel.cache_clear()
        found.append(made(weight, bias)(x))
    kernels.kernel.cache_clear()
    assert torch.equal(*found)


def by_tiles(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute a layer of bfloat16 numbers with each rounding of AMX's instruction (tiles_code.py)."""
    rest = -x.shape[1] % 32
    blocks = [functional.pad(numbers.double(), (0, rest)).unflatten(1, (-1, 32)) for numbers in (x, weight)]
    total = torch.zeros(len(x), len(weight))
    for left, right in zip(blocks[0].unbind(1), blocks[1].unbind(1), strict=True):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for column in range(32):  # a product of two is exact in float64, and its sum is rounded once more
            product = left[:, None, column] * right[None, :, column]
            sums[column % 2] = (sums[column % 2].double() + product).float()
        total += sums[0] + sums[1]
    return (total + bias.float()).to(torch.bfloat16)


@pytest.mark.skipif(not compiler.may_use_tiles(), reason="AMX")
@pytest.mark.parametrize(
    ("outputs", "columns"), [(3, 5), (16, 32), (17, 70), (31, 130), (100, 96), (37, 2050), (300, 8200)]
)
def test_tiles_add_as_they_say(outputs: int, columns: int) -> None:
    # Fewer outputs than a tile has rows, a remainder of columns, several groups of rows, blocks of columns, strips.
    weight, bias = random_layer(outputs, columns, torch.bfloat16)
    layer = made(weight, bias)
    x = torch.randn(70, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = by_tiles(x, weight, bias)
    for rows in (1, 2, 5, 16, 17, 33, 70):
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows
    weight[1:, 0] = torch.inf  # what follows the first row of W does not count
    assert torch.equal(layer(x)[:, 0], expected[:, 0])


@pytest.mark.parametrize("sums", ["pairs", "tiles"])
@pytest.mark.parametrize("answer", [0, 22, None])
def test_tiles_are_used_where_linux_permits_them(
    sums: str, answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            if answer is None:
                raise OSError("no such library")

        def syscall(self, *_: int) -> int:
            assert answer is not None
            return answer

    has = "+avx2,+avx512f,+amx-tile,+amx-bf16" if sums == "tiles" else "+avx2,+avx512f,-amx-tile,-amx-bf16"
    monkeypatch.delenv(compiler.AMX, raising=False)
    monkeypatch.setattr(compiler, "_features", lambda: has)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    compiler.may_use_tiles.cache_clear()
    try:
        permitted = "tiles" if sums == "tiles" and answer == 0 else "pairs"
        assert compiler.bfloat16_sums() == permitted
        monkeypatch.setenv(compiler.AMX, "0")
        assert compiler.bfloat16_sums() == "pairs"
    finally:
        compiler.may_use_tiles.cache_clear()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [897, 1793, 3001, 9001])
def test_rows_in_blocks_have_the_bits_of_each_alone(dtype: torch.dtype, columns: int) -> None:
    # Strips of 96 rows of W, groups of 8 rows of x, blocks of columns: none of them comes out even.
    weight, bias = random_layer(229, columns, dtype)
    layer, x = made(weight, bias), torch.randn(43, columns).to(dtype)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert (alone.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.skipif("+avx512vnni" not in compiler._features(), reason="AVX-512 VNNI")
@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16], ids=str)
def test_shorter_vectors_add_up_the_same_integers(activation: torch.dtype, shorter_vectors: Callable[[], None]) -> None:
    stored, scales = quantise_int4([torch.randn(48, 320)], 64)
    stored[:16] = 255  # the largest digits, which bring the 16-bit sums to their maximum
    x = torch.randn(7, 320).to(activation)
    x[2] = 3.0
    x[3] = -3.0

    def result() -> torch.Tensor:
        return linear.NativeLinear(stored, None, activation, scales, 64)(x)

    wide = result()
    shorter_vectors()
    assert compiler.integer_products() == "avx2"
    assert torch.equal(result(), wide)


@pytest.mark.parametrize("columns", [9000, 90000])  # eight rows fit on the stack as float32; not even one does
def test_rows_that_do_not_fit_on_the_stack_take_turns(columns: int) -> None:
    weight, bias = random_layer(3, columns, torch.bfloat16)
    layer, x = made(weight, bias), torch.randn(17, columns).bfloat16()
    apart = torch.cat([layer(x[row : row + 1]) for row in range(17)])
    assert torch.equal(layer(x), apart)
    assert torch.allclose(
        apart.float(), functional.linear(x.float(), weight.float(), bias.float()), rtol=0.02, atol=0.5
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype, value: float) -> None:
    weight, bias = random_layer(20, 48, dtype)
    x = torch.randn(4, 48).to(dtype)
    clean = made(weight, bias)(x)
    x[2, 5] = value
    got, expected = made(weight, bias)(x), functional.linear(x, weight, bias)
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())


def test_large_results_are_rounded_as_torch_rounds_them() -> None:
    weight = torch.full((1, 16), 2.0**60).bfloat16()
    x = torch.tensor([[2.0**64] * 16, [1.0] * 16, [-(2.0**64)] * 16]).bfloat16()
    assert made(weight)(x).flatten().tolist() == [float("inf"), 2.0**64, float("-inf")]
    ties = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [1.0, -(2.0**-9)]]).bfloat16()
    got = made(torch.ones((1, 2)).bfloat16())(ties)
    assert got.flatten().tolist() == ties.float().sum(dim=1).bfloat16().tolist()


def test_no_rows_and_other_shapes() -> None:
    weight, bias = random_layer(6, 32, torch.float32)
    layer = made(weight, bias)
    assert layer(torch.empty(1, 0, 32)).shape == (1, 0, 6)
    assert layer(torch.empty(32)).shape == (6,)
    crooked = torch.randn(32, 5).t()
    assert torch.equal(layer(crooked), layer(crooked.contiguous()))


def test_weights_changed_in_place_are_seen() -> None:
    weight, bias = random_layer(9, 32, torch.float32)
    layer, x = made(weight, bias), torch.randn(1, 32)
    layer(x)
    weight.mul_(2)
    bias.zero_()
    assert torch.allclose(layer(x), functional.linear(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize("goes", ["the tensors", "their memory"])
def test_a_layer_holds_what_it_reads(goes: str) -> None:
    weight, bias = random_layer(300, 64, torch.float32)
    x = torch.randn(1, 64)
    expected = functional.linear(x, weight, bias)
    layer = made(weight, bias)
    if goes == "the tensors":
        del weight, bias
    else:
        weight.data, bias.data = weight * 2, bias * 2
    rubbish = [torch.full((300, 64), 7.0) for _ in range(20)]
    assert torch.allclose(layer(x), expected, atol=1e-4)
    assert len(rubbish) == 20


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty((4, 8), device="meta"),
        torch.ones((8, 4)).t(),
        torch.ones((4, 8), dtype=torch.float64),
        torch.ones((4, 8)).as_subclass(Subclass),
        torch.empty((0, 8)),
        torch.ones(8),
    ],
    ids=["meta", "crooked", "float64", "subclass", "empty", "one dimension"],
)
def test_weights_there_is_no_code_for(weight: torch.Tensor) -> None:
    assert native_linear(weight, None) is None


def test_a_bias_of_another_kind() -> None:
    assert native_linear(torch.ones((4, 8)), torch.ones(4).bfloat16()) is None


# ----------------------------------------------------------------------------------------------------------------------
# fallback where none can be compiled


@pytest.fixture
def forgetful() -> Any:
    """Clear the caches of what was found out about this machine, before and after a test."""
    functions: list[Any] = [compiler.why_not, pool.openmp_library]
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


@pytest.mark.parametrize("what", ["missing", "broken", "processor", "threads"])
def test_without_code_torchs_kernels_are_used(what: str, forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "missing":
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    elif what == "broken":
        import llvmlite.binding as llvm

        monkeypatch.delattr(llvm, "get_host_cpu_features")
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    elif what == "processor":
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
    else:
        monkeypatch.setattr(compiler, "openmp", lambda: None)
    reason = compiler.why_not()
    assert reason is not None
    assert {"missing": "llvmlite", "broken": "llvmlite", "processor": "riscv64", "threads": "threads"}[what] in reason
    assert native_linear(torch.ones((4, 8)), None) is None
    assert KERNELS["native"](torch.ones((4, 8)), None) is None
    usual = linear_of_few_rows(torch.ones((400, 8)), None, 4)
    assert usual is not None
    assert usual(torch.ones((4, 8))).unique().tolist() == [8]


def test_libraries_that_are_none(forgetful: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libgomp.so.1"
    broken.write_text("not a library")
    monkeypatch.setattr(pool, "_candidates", lambda: [str(broken)])
    monkeypatch.setattr(pool, "ENTRIES", ("no_function_of_any_library",))
    assert pool.openmp() is None


# ----------------------------------------------------------------------------------------------------------------------
# compiled code on the disk


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_of_layers_are_compiled_in_a_thread(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead, "linear_kernel", lambda *parts: asked.append(linear.linear_kernel(*parts)))
    for _ in range(2):
        ahead.compile_ahead(dtype)
        for thread in threading.enumerate():
            if thread.name.startswith("ssd_generation"):
                thread.join()
    packed, scales = quantise_int4([torch.randn(32, 64)], 32)
    layers: list[Any] = [
        made(*random_layer(8, 16, dtype)),
        linear.NativeLinear(packed, None, torch.bfloat16, scales, 32),
    ]
    if dtype is torch.float32:
        packed, scales = quantise_int8([torch.randn(32, 64)], linear.can_pack_int8(32, 64))
        layers.append(linear.NativeLinear(packed, None, torch.bfloat16, scales))
    assert asked == [layer.parts()[0] for layer in layers], "kernels that a call uses"


MODULE = """
define void @run() { ret void }
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_engines", {})
    return tmp_path / "code"


def asked_for(monkeypatch: pytest.MonkeyPatch) -> int:
    """Count how often a new process requests the text of a module."""
    count = 0

    def text() -> str:
        nonlocal count
        count += 1
        return MODULE

    monkeypatch.setattr(compiler, "_engines", {})
    assert compiler.address_of("nothing", "of the test", text)
    assert compiler.address_of("nothing", "of the test", text)
    return count


def test_code_is_compiled_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(monkeypatch) == 1
    assert asked_for(monkeypatch) == 0
    assert [path.suffix for path in store.iterdir()] == [".o"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_file_is_compiled_anew(store: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for(monkeypatch)
    (file,) = store.iterdir()
    content = file.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    file.write_bytes({"truncated": content[:-9], "flipped": flipped, "empty": b""}[damage])
    assert asked_for(monkeypatch) == 1
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_to(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_text("a file where the folder would be")
    assert asked_for(monkeypatch) == 1
    assert asked_for(monkeypatch) == 1


def test_code_of_another_processor_is_not_used(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for(monkeypatch)
    monkeypatch.setattr(compiler, "_cpu", lambda: "haswell")
    monkeypatch.setattr(compiler, "_features", lambda: "")
    assert asked_for(monkeypatch) == 1
    assert len(list(store.iterdir())) == 2


# ----------------------------------------------------------------------------------------------------------------------
# low-bit weights


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """Return x as integer products read it: multiples of 1 / 127 of the largest of every 32 values."""
    parts = x.float().view(-1, 32)
    scale = (parts.abs().amax(1, keepdim=True) / 127).double()
    return ((parts * (127 / parts.abs().amax(1, keepdim=True))).round().double() * scale).view_as(x)


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("precision", "group", "products"),
    [
        ("int8", 0, ""),
        ("int8", 0, "avx512"),
        *(("int4", group, products) for group in (32, 64, 192) for products in ("", "avx2", "avx512")),
    ],
)
def test_low_bit_layers(
    precision: str, group: int, products: str, activation: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if products not in ("", "avx2" if compiler.integer_products() else "", compiler.integer_products()):
        pytest.skip("the processor has no such products of integers")
    monkeypatch.setattr(linear, "integer_products", lambda: products)
    weight, bias = random_layer(48, 192, torch.float32)
    bias = bias.to(activation)
    if precision == "int8":
        scales = weight.abs().amax(1) / 127
        stored = (weight / scales[:, None]).round().to(torch.int8)
        meant = stored.double() * scales.double()[:, None]
        if products:
            numbers, stored = stored, pack_int8(stored)
            assert torch.equal(unpack_int8(stored), numbers)
    else:
        stored, scales = quantise_int4([weight], group)
        assert stored.shape == (48, 96) and scales.shape == (3, 192 // group, 16)
        meant = unpack_int4(stored, scales).double()
    layer = linear.NativeLinear(stored, bias, activation, scales, group)
    x = torch.randn(21, 192).to(activation)
    true = x.double() @ meant.t() + bias.double()
    if products and not group:
        true = as_multiplied(x) @ meant.t() + bias.double()
        assert float((true - x.double() @ meant.t() - bias.double()).norm() / true.norm()) < 0.01
    elif products:
        # Offsets, raised by 8 steps, are multiplied by the sums of x itself.
        offsets = (scales.view(torch.int32) << 16).view(torch.float32).double() + 8 * scales.double()
        offsets = offsets.transpose(1, 2).reshape(48, -1).repeat_interleave(group, 1)
        true = as_multiplied(x) @ (meant - offsets).t() + x.double() @ offsets.t() + bias.double()
        assert float((true - x.double() @ meant.t() - bias.double()).norm() / true.norm()) < 0.01
    got = layer(x)
    assert got.dtype is activation
    bound = (2**-8 if activation is torch.bfloat16 else 2**-20) * (x.double().abs() @ meant.abs().t() + 8)
    assert bool(((got.double() - true).abs() <= bound).all())
    for first in (0, 1, 3):
        for rows in range(1, 18):
            assert torch.equal(layer(x[first : first + rows]), got[first : first + rows])
    assert torch.equal(layer(x.to(torch.float32)), got)


@given(
    st.integers(0, 99),
    st.sampled_from([1e-4, 0.02, 1.0, 30.0]),
    st.sampled_from([0.0, 3.0, -1.0]),
    st.sampled_from([32, 64, 128]),
)
def test_int4_weights_are_within_half_a_step(seed: int, scale: float, shift: float, group: int) -> None:
    weight = scale * (torch.randn((16, 256), generator=torch.Generator().manual_seed(seed)) + shift)
    packed, scales = quantise_int4([weight], group)
    w = weight.view(16, -1, group)
    found = unpack_int4(packed, scales).view_as(w)
    scales = scales[0].t()
    offset, steps = w.amin(2).abs(), (w.amax(2) - w.amin(2)) / 15
    assert torch.allclose(scales, steps, rtol=2**-6, atol=float(scale * 2**-7))
    # The offset is rounded to bfloat16; the scale shares its word with the offset and differs by up to 2⁻⁷.
    bound = scales / 2 * 1.001 + offset * 2**-8 + 15 * scales * 2**-7
    assert bool(((found - w).abs() <= bound[..., None]).all())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(
    st.integers(0, 99),
    st.sampled_from([1e-30, 1e-4, 0.02, 30.0]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([(16, 16), (48,), (640, 16)]),
)
def test_weights_are_quantised_as_by_torch(
    stored: torch.dtype, seed: int, scale: float, shift: float, group: int, rows: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # "+ 0": of 0 and −0 either may be called the least.
    weights = [(scale * (torch.randn((count, 256), generator=generator) + shift)).to(stored) + 0 for count in rows]
    weights[0][1] = 0
    whole = torch.cat(weights)
    numbers, scales = quantise_int4(weights, group)
    expected, their_scales = pack_int4(whole, group)
    assert torch.equal(numbers, expected) and torch.equal(scales.view(torch.int32), their_scales.view(torch.int32))
    w = whole.float()
    steps = (w.abs().amax(1) / 127).clamp(min=1e-12).to(torch.bfloat16).float()
    wanted = (w / steps[:, None]).round().clamp(-127, 127).to(torch.int8)
    for is_packed, expected in ((False, wanted), (True, pack_int8(wanted))):
        numbers, scales = quantise_int8(weights, is_packed)
        assert torch.equal(numbers, expected) and torch.equal(scales, steps)


def test_quantising_what_is_no_number() -> None:
    weight = torch.randn(32, 64)
    weight[3, 5], weight[4, 40], weight[20, 0] = torch.nan, torch.inf, -torch.inf
    others = [row for row in range(32) if row not in (3, 4, 20)]
    meant = unpack_int4(*quantise_int4([weight], 32))
    assert torch.equal(meant[others], unpack_int4(*pack_int4(weight, 32))[others])
    numbers, scales = quantise_int8([weight], False)
    assert bool((numbers[others].float() * scales[others, None] - weight[others]).abs().max() < 0.02)


def test_weights_that_are_all_the_same() -> None:
    for value in (0.0, 0.5, -3.0):
        packed, scales = quantise_int4([torch.full((16, 64), value)], 32)
        assert torch.allclose(unpack_int4(packed, scales), torch.full((16, 64), value), atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# operations between linear layers


def llama_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def llama_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to one double rounding in half precision, and to float32's own precision otherwise."""
    assert got.dtype is expected.dtype and got.shape == expected.shape
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * eps if eps > 1e-4 else 1e-5, atol=1e-6)
    if eps > 1e-4:
        assert (got != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [7, 16, 100, 576])
def test_norms_and_gates_are_the_models_own(dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, up = (4 * torch.randn((1, 5, columns), generator=generator) for _ in range(2))
    weight = torch.randn(columns, generator=generator).to(dtype)
    x, up = x.to(dtype), up.to(dtype)
    near(rms_norm(x, weight, 1e-5), llama_norm(x, weight, 1e-5))
    near(gated_silu(x, up), functional.silu(x) * up)
    for row in range(5):
        assert torch.equal(rms_norm(x[:, row], weight, 1e-5), rms_norm(x, weight, 1e-5)[:, row])
        assert torch.equal(gated_silu(x[:, row], up[:, row]), gated_silu(x, up)[:, row])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(3, 64), (1, 80), (2, 6)])
def test_rotary_embeddings_are_the_models_own_to_the_bit(dtype: torch.dtype, heads: int, size: int) -> None:
    x = torch.randn(1, 4, heads * size).to(dtype).view(1, 4, heads, size).transpose(1, 2)
    cos, sin = (torch.randn(1, 1, 4, size).to(dtype) for _ in range(2))
    assert torch.equal(rotary(x, cos, sin), llama_rotary(x, cos, sin))
    assert torch.equal(rotary(x.contiguous(), cos, sin), llama_rotary(x, cos, sin))


def test_gates_of_extreme_numbers() -> None:
    inf = float("inf")
    x = torch.tensor([-inf, inf, float("nan"), -200.0, 200.0, -88.0, -87.5, -103.9, 0.0, -0.0, 88.7, 1e-30, -1e30])
    torch.testing.assert_close(gated_silu(x, torch.ones(13)), functional.silu(x), equal_nan=True, rtol=1e-6, atol=0)
    many = torch.linspace(-90, 90, 20001)
    torch.testing.assert_close(gated_silu(many, torch.ones(20001)), functional.silu(many), rtol=1e-6, atol=1e-36)


def test_norms_of_extreme_rows() -> None:
    x = torch.stack([torch.zeros(32), torch.full((32,), 1e-20), torch.full((32,), float("nan")), torch.arange(32.0)])
    torch.testing.assert_close(
        rms_norm(x, torch.ones(32), 1e-6), llama_norm(x, torch.ones(32), 1e-6), equal_nan=True, rtol=1e-5, atol=1e-25
    )
