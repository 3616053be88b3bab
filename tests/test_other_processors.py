"""Kernels run on an emulated ARM processor (NEON): the same bits as on this processor, whichever it is."""

from __future__ import annotations

import functools
import struct
from typing import Any

import pytest
import torch

from ssd_generation.native.codegen import compiler
from ssd_generation.native.ops.linear import NativeLinear
from ssd_generation.native.ops.quantise import quantise_int4
from unpacking import unpack_int4

pytestmark = pytest.mark.skipif(compiler.why_not() is not None, reason=f"no code can be made: {compiler.why_not()}")

unicorn = pytest.importorskip("unicorn", reason="the emulator is not installed")

_PAGE = 1 << 16
_CODE, _DATA, _STACK, _END = 0x400000, 0x10000000, 0x70000000, 0x7F0000
_LOW_BITS = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4, 277: 0}
"""Relocations that write an address's lower 12 bits into an instruction, each with log2 of the divisor it applies."""


@functools.cache
def _arm_code(text: str, unrolls: bool) -> bytes:
    """Return a module's object code (ELF) for the baseline of all 64-bit ARM processors."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="generic", features="+neon", opt=3, reloc="static", codemodel="small")
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = unrolls
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


def _linked(code: bytes) -> tuple[dict[int, bytearray], int]:
    """Return the sections by address, and the address of `run`."""
    offset, size, count, names_at = struct.unpack_from("<Q", code, 40)[0], *struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, offset + i * size) for i in range(count)]
    contents = [bytearray(code[h[4] : h[4] + h[5]]) if h[1] != 8 else bytearray(h[5]) for h in headers]
    places, place = {}, _CODE
    for index, header in enumerate(headers):
        if header[2] & 2:  # loaded into memory
            place = -(-place // 64) * 64
            places[index] = place
            place += header[5]
    table = next(i for i, h in enumerate(headers) if h[1] == 2)
    names = contents[headers[table][6]]
    symbols, entry = [], 0
    for at in range(0, len(contents[table]), 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", contents[table], at)
        address = places.get(section, 0) + value
        symbols.append((section, address))
        if names[name : names.index(0, name)] == b"run":
            entry = address
    for header in headers:
        if header[1] != 4 or header[7] not in places:
            continue
        section, base = contents[header[7]], places[header[7]]
        for at in range(header[4], header[4] + header[5], 24):
            where, info, addend = struct.unpack_from("<QQq", code, at)
            defined_in, address = symbols[info >> 32]
            assert defined_in, "nothing outside the module is called"
            _relocate(section, where, info & 0xFFFFFFFF, address + addend, base + where)
    assert names_at and entry
    return {place: contents[index] for index, place in places.items()}, entry


def _relocate(section: bytearray, where: int, kind: int, value: int, place: int) -> None:
    if kind == 257:
        struct.pack_into("<Q", section, where, value)
        return
    if kind == 261:
        struct.pack_into("<i", section, where, value - place)
        return
    (word,) = struct.unpack_from("<I", section, where)
    if kind in (282, 283):  # a jump or a call
        word |= (value - place) >> 2 & 0x3FFFFFF
    elif kind == 275:  # a page address
        pages = (value >> 12) - (place >> 12)
        word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    else:
        word |= (value & 0xFFF) >> _LOW_BITS[kind] << 10
    struct.pack_into("<I", section, where, word)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def on_arm(
    text: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    shape: tuple[int, int],
    x: torch.Tensor,
    unrolls: bool = False,
) -> torch.Tensor:
    """Run a module's `NativeLinear` kernel in two parts: x `(rows, K)` ↦ `(rows, N)`; `shape` is N and K."""
    sections, entry = _linked(_arm_code(text, unrolls))
    processor = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    registers = unicorn.arm64_const
    top = max(place + len(content) for place, content in sections.items())
    processor.mem_map(_CODE, -(-(top - _CODE) // _PAGE) * _PAGE)
    for place, content in sections.items():
        processor.mem_write(place, bytes(content))
    processor.mem_map(_STACK, 64 * _PAGE)
    y = torch.full((x.shape[0], shape[0]), torch.nan, dtype=x.dtype)
    at, addresses = _DATA + 4096, []
    for tensor in (weight, bias, scales, x, y):
        addresses.append(0 if tensor is None else at)
        at += 0 if tensor is None else -(-tensor.nbytes // 64) * 64 + 64
    processor.mem_map(_DATA, -(-(at - _DATA) // _PAGE) * _PAGE)
    for tensor, address in zip((weight, bias, scales, x, y), addresses, strict=True):
        if tensor is not None:
            processor.mem_write(address, _bytes(tensor))
    layer, record, table = _DATA, _DATA + 512, _DATA + 1024
    processor.mem_write(layer, struct.pack("<5q", *addresses[:3], shape[1], shape[0]))
    processor.mem_write(record, struct.pack("<7q", 0, 0, layer, 3, 0, 4, 0))
    processor.mem_write(table, struct.pack("<5q", x.shape[0], 0, 0, *addresses[3:]))
    for part in range(2):
        for name, value in zip(("X0", "X1", "X2", "X3", "LR"), (record, table, part, 2, _END), strict=True):
            processor.reg_write(getattr(registers, f"UC_ARM64_REG_{name}"), value)
        processor.reg_write(registers.UC_ARM64_REG_SP, _STACK + 63 * _PAGE)
        processor.reg_write(registers.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # enable vector instructions
        processor.emu_start(entry, _END)
    found = bytearray(processor.mem_read(addresses[4], y.nbytes))
    return torch.frombuffer(found, dtype=torch.uint8).view(x.dtype).view(y.shape).clone()


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("outputs", "columns"), [(50, 96), (37, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floating_point_layers_have_the_same_bits(dtype: torch.dtype, outputs: int, columns: int) -> None:
    from ssd_generation.native.ops.linear_code import linear_module

    weight, bias = numbers((outputs, columns), dtype, 0), numbers((outputs,), dtype, 1)
    name = str(dtype).removeprefix("torch.")
    text = linear_module(name, name, 8, "pairs")
    for rows in (1, 3, 8, 19):
        x = numbers((rows, columns), dtype, rows)
        assert torch.equal(
            on_arm(text, weight, bias, None, (outputs, columns), x), NativeLinear(weight, bias, dtype)(x)
        )


def test_int8_layers_have_the_same_bits() -> None:
    from ssd_generation.native.ops.linear_code import linear_module

    weight = torch.randint(-127, 128, (50, 96), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales, bias = numbers((50,), torch.float32, 1).abs(), numbers((50,), torch.bfloat16, 2)
    text = linear_module("int8", "bfloat16", 8, "pairs")
    for rows in (1, 4, 9):
        x = numbers((rows, 96), torch.bfloat16, rows)
        here = NativeLinear(weight, bias, torch.bfloat16, scales)(x)
        assert torch.equal(on_arm(text, weight, bias, scales, (50, 96), x), here)


def test_int4_layers_compute_what_the_copy_says() -> None:
    from ssd_generation.native.ops.int4_code import int4_module

    packed, scales = quantise_int4([numbers((48, 128), torch.float32, 0)], 32)
    text = int4_module("bfloat16", 32, "")
    for rows in (1, 2, 5):
        x = numbers((rows, 128), torch.bfloat16, rows)
        found = on_arm(text, packed, None, scales, (48, 128), x, unrolls=True)
        wanted = x.double() @ unpack_int4(packed, scales).double().t()
        assert (found.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_another_order_of_sums_would_be_seen() -> None:
    weight = numbers((50, 100), torch.float32, 0)
    x = numbers((1, 100), torch.float32, 1)
    backwards: Any = NativeLinear(weight.flip(1).contiguous(), None, torch.float32)
    assert not torch.equal(backwards(x.flip(1)), NativeLinear(weight, None, torch.float32)(x))
