"""Building blocks of modules in LLVM IR.

Vectors have 16 lanes, in one, two or four registers; the lanes are summed by halves, then halves of these, and so on.
So results do not depend on the processor. Importing this module needs llvmlite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .teams import RUN

LANES = 16

FLOAT, HALF = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ADDRESS = ir.PointerType()
VOID = ir.VoidType()

STORED: dict[str, Any] = {"float32": FLOAT, "bfloat16": I16, "float16": HALF, "int8": I8}
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0}


def vector(kind: Any) -> Any:
    """Return the type of a vector of 16 of these."""
    return ir.VectorType(kind, LANES)


FLOATS, INTS = vector(FLOAT), vector(I32)


class _BFloat(ir.Type):
    """bfloat16, which llvmlite has no type for; stored as 16-bit integers, and used only where it must be."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def integer(value: int) -> Any:
    """Return a 64-bit constant."""
    return ir.Constant(I64, value)


def splat(kind: Any, value: float) -> Any:
    """Return a constant in all lanes."""
    return ir.Constant(vector(kind), [value] * LANES)


@dataclass(frozen=True)
class Task:
    """Arguments of a kernel: its record, a table of addresses, the part to do, and how many parts there are.

    Record and table consist of 64-bit numbers. The table begins with the number of rows (sequence.py); in the record,
    entries 0 and 1 are not the kernel's. An operand takes two entries of a record: an index into the table's addresses,
    and a byte offset from there.
    """

    record: Any
    table: Any
    part: Any
    parts: Any

    def field(self, b: Any, at: int) -> Any:
        """Load a number of the record."""
        return b.load(Module.at(b, self.record, integer(at), I64), typ=I64)

    def address(self, b: Any, at: int) -> Any:
        """Load an address stored in the record."""
        return b.inttoptr(self.field(b, at), ADDRESS)

    def number(self, b: Any, at: int) -> Any:
        """Load a float32 number stored in the record."""
        return b.load(Module.at(b, self.record, integer(at), I64), typ=FLOAT)

    def operand(self, b: Any, at: int) -> Any:
        """Compute the address of an operand."""
        base = b.load(Module.at(b, self.table, self.field(b, at), I64), typ=ADDRESS)
        return Module.at(b, base, self.field(b, at + 1), I8)

    def entry(self, b: Any, at: int) -> Any:
        """Load a number of the table."""
        return b.load(Module.at(b, self.table, integer(at), I64), typ=I64)

    def share(self, b: Any, count: Any) -> tuple[Any, Any]:
        """Return the range of `count` items that this part covers: the first, and the first of the next part."""
        first, end = (b.mul(count, part) for part in (self.part, b.add(self.part, integer(1))))
        return b.sdiv(first, self.parts), b.sdiv(end, self.parts)


def least(b: Any, one: Any, other: Any) -> Any:
    """Return the smaller of two 64-bit numbers."""
    return b.select(b.icmp_signed("<", one, other), one, other)


class Module:
    """A module for activations of one type.

    Args:
        name: name of the module.
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
    """

    def __init__(self, name: str, activation: str) -> None:
        self.activation = activation
        self.module = ir.Module(name=name)
        self._declared: dict[str, Any] = {}

    def function(self, name: str, args: list[Any], *attributes: str) -> Any:
        """Add a function without a result; only `run` is exported."""
        function = ir.Function(self.module, ir.FunctionType(VOID, args), name)
        if name != RUN:
            function.linkage = "internal"
        for attribute in ("nounwind", *attributes):
            function.attributes.add(attribute)
        return function

    def kernel(self) -> tuple[Any, Task]:
        """Add the module's kernel, `run(record, table, part, parts)`; return a builder at its entry, and its task."""
        function = self.function(RUN, [ADDRESS, ADDRESS, I64, I64])
        return ir.IRBuilder(function.append_basic_block("entry")), Task(*function.args)

    def call(self, b: Any, name: str, result: Any, *args: Any) -> Any:
        """Call a function from outside the module, or an LLVM intrinsic."""
        if name not in self._declared:
            kind = ir.FunctionType(result, [arg.type for arg in args])
            self._declared[name] = ir.Function(self.module, kind, name)
        return b.call(self._declared[name], args)

    def fma(self, b: Any, one: Any, other: Any, total: Any) -> Any:
        """Compute a product and a sum, rounded once."""
        return self.call(b, f"llvm.fma.v{LANES}f32", FLOATS, one, other, total)

    def ask_for(self, b: Any, address: Any, nearest: bool = False) -> None:
        """Prefetch a line of memory into the second-level cache, or into the nearest one."""
        hints = (ir.Constant(I32, hint) for hint in (0, 3 if nearest else 2, 1))  # to be read; into which cache; data
        self.call(b, "llvm.prefetch.p0", VOID, address, *hints)

    @staticmethod
    def at(b: Any, address: Any, offset: Any, kind: Any) -> Any:
        """Return the address of element `offset`."""
        return b.gep(address, [offset], source_etype=kind)

    def load(self, b: Any, address: Any, kind: Any, count: Any = None) -> Any:
        """Load 16 elements as they are stored; with `count`, only that many, and zeros."""
        if count is None:
            return b.load(address, typ=vector(kind), align=1)
        mask = self._first(b, count)
        zeros = ir.Constant(vector(kind), None)
        name = {FLOAT: "f32", HALF: "f16", I8: "i8", I16: "i16", I32: "i32"}[kind]
        return self.call(
            b, f"llvm.masked.load.v{LANES}{name}.p0", vector(kind), address, ir.Constant(I32, 1), mask, zeros
        )

    def load_pairs(self, b: Any, address: Any, count: Any = None) -> Any:
        """Load 32 numbers of 16 bits; with `count`, only that many, and zeros."""
        pairs = ir.VectorType(I16, 2 * LANES)
        if count is None:
            return b.load(address, typ=pairs, align=1)
        each = ir.VectorType(I32, 2 * LANES)
        single = b.insert_element(ir.Constant(each, ir.Undefined), b.trunc(count, I32), ir.Constant(I32, 0))
        many = b.shuffle_vector(single, single, ir.Constant(each, None))
        mask = b.icmp_signed("<", ir.Constant(each, list(range(2 * LANES))), many)
        zeros = ir.Constant(pairs, None)
        return self.call(b, "llvm.masked.load.v32i16.p0", pairs, address, ir.Constant(I32, 1), mask, zeros)

    def spread(self, b: Any, value: Any) -> Any:
        """Return a number in all lanes."""
        single = b.insert_element(ir.Constant(vector(value.type), ir.Undefined), value, ir.Constant(I32, 0))
        return b.shuffle_vector(single, single, ir.Constant(INTS, None))

    @staticmethod
    def floats(b: Any, values: Any, stored: str) -> Any:
        """Convert loaded values to float32."""
        if stored == "bfloat16":
            return b.bitcast(b.shl(b.zext(values, INTS), splat(I32, 16)), FLOATS)
        if stored == "float16":
            return b.fpext(values, FLOATS)
        if stored == "int8":
            return b.sitofp(b.sext(values, INTS), FLOATS)
        return values

    def sum(self, b: Any, values: Any) -> Any:
        """Sum the lanes: add the halves, then halves of these, and so on."""
        width = LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))) for at in (0, width)]
            values = b.fadd(*(b.shuffle_vector(values, values, half) for half in halves))
        return b.extract_element(values, ir.Constant(I32, 0))

    @staticmethod
    def sums(b: Any, values: list[Any]) -> Any:
        """Sum the lanes of each of four vectors, with the bits of `sum`; return a vector of the four sums."""

        def parts(one: Any, other: Any, lanes: list[int]) -> Any:
            return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

        for width in (8, 4):
            halves = [list(range(at, at + width)) for at in (0, width)]
            values = [b.fadd(*(parts(value, value, half) for half in halves)) for value in values]
        pairs = [
            b.fadd(parts(one, other, [0, 1, 4, 5]), parts(one, other, [2, 3, 6, 7]))
            for one, other in (values[:2], values[2:])
        ]
        return b.fadd(parts(pairs[0], pairs[1], [0, 2, 4, 6]), parts(pairs[0], pairs[1], [1, 3, 5, 7]))

    def greatest(self, b: Any, values: Any) -> Any:
        """Return the greatest of the lanes."""
        width = LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))) for at in (0, width)]
            one, other = (b.shuffle_vector(values, values, half) for half in halves)
            values = b.select(b.fcmp_ordered(">", one, other), one, other)
        return b.extract_element(values, ir.Constant(I32, 0))

    def narrow(self, b: Any, value: Any, stored: str | None = None) -> Any:
        """Convert float32 numbers, one or a vector, to activations or another stored type: to nearest, ties to even."""
        stored = stored or self.activation
        if stored == "float32":
            return value
        count = None if value.type == FLOAT else value.type.count

        def of(kind: Any) -> Any:
            return kind if count is None else ir.VectorType(kind, count)

        def constant(number: int) -> Any:
            return ir.Constant(of(I32), number if count is None else [number] * count)

        if stored == "float16":
            return b.fptrunc(value, of(HALF))
        bits = b.bitcast(value, of(I32))
        even = b.and_(b.lshr(bits, constant(16)), constant(1))
        rounded = b.add(b.add(bits, constant(0x7FFF)), even)
        quiet = b.or_(bits, constant(0x400000))
        bits = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        return b.trunc(b.lshr(bits, constant(16)), of(I16))

    def rounded(self, b: Any, values: Any) -> Any:
        """Round 16 float32 numbers as storing and loading them would."""
        return self.floats(b, self.narrow(b, values), self.activation)

    def store(self, b: Any, value: Any, address: Any) -> None:
        """Store one float32 number as an activation."""
        b.store(self.narrow(b, value), address)

    def store_many(self, b: Any, values: Any, address: Any, count: Any, stored: str | None = None) -> None:
        """Store the first `count` of 16 float32 numbers as activations (or as another type)."""
        narrow = self.narrow(b, values, stored)
        name = {FLOAT: "f32", HALF: "f16", I16: "i16"}[STORED[stored or self.activation]]
        mask = self._first(b, count)
        self.call(b, f"llvm.masked.store.v{LANES}{name}.p0", VOID, narrow, address, ir.Constant(I32, 1), mask)

    def _first(self, b: Any, count: Any) -> Any:
        lanes = ir.Constant(INTS, list(range(LANES)))
        return b.icmp_signed("<", lanes, self.spread(b, b.trunc(count, I32)))

    def one(self, b: Any, address: Any) -> Any:
        """Load one activation as float32."""
        return self.some(b, address, 1)

    def some(self, b: Any, address: Any, count: int) -> Any:
        """Load one activation, or a vector of a few, as float32."""

        def of(kind: Any) -> Any:
            return kind if count == 1 else ir.VectorType(kind, count)

        value = b.load(address, typ=of(STORED[self.activation]), align=1 if count > 1 else None)
        if self.activation == "bfloat16":
            places = 16 if count == 1 else [16] * count
            return b.bitcast(b.shl(b.zext(value, of(I32)), ir.Constant(of(I32), places)), of(FLOAT))
        return b.fpext(value, of(FLOAT)) if self.activation == "float16" else value

    def activations(self, b: Any, address: Any, place: Any, count: Any) -> Any:
        """Load 16 activations from a place on, or `count` of them and zeros, as float32."""
        kind = STORED[self.activation]
        return self.floats(b, self.load(b, self.at(b, address, place, kind), kind, count), self.activation)

    def silu(self, b: Any, x: Any) -> Any:
        """Compute x / (1 + e^−x), rounded to an activation."""
        return self.rounded(b, b.fdiv(x, b.fadd(splat(FLOAT, 1.0), self.exp(b, b.fneg(x)))))

    def exp(self, b: Any, x: Any) -> Any:
        """Compute e^x to two units in the last place: 2ⁿ · e^r, |r| ≤ ln 2 / 2, Cephes' polynomial (Moshier, expf.c).

        The result is 0 below the smallest normal number.
        """
        high, low = 88.72283, -87.33654
        clipped = b.select(b.fcmp_ordered(">", x, splat(FLOAT, high)), splat(FLOAT, high), x)
        clipped = b.select(b.fcmp_ordered("<", x, splat(FLOAT, low)), splat(FLOAT, low), clipped)
        # Adding 1.5 · 2²³ leaves a float32 no fraction: its lowest bits are then n.
        magic = splat(FLOAT, 12582912.0)
        shifted = self.fma(b, clipped, splat(FLOAT, 1.4426950408889634), magic)
        n = b.fsub(shifted, magic)
        r = self.fma(b, n, splat(FLOAT, -0.693359375), clipped)
        r = self.fma(b, n, splat(FLOAT, 2.12194440e-4), r)
        series = splat(FLOAT, 1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
            series = self.fma(b, series, r, splat(FLOAT, factor))
        # 2ⁿ in two factors, since the greatest 2ⁿ is no float32.
        bits = b.bitcast(shifted, INTS)
        halves = b.ashr(b.shl(bits, splat(I32, 9)), splat(I32, 10))  # n / 2, rounded down
        rest = b.sub(b.ashr(b.shl(bits, splat(I32, 9)), splat(I32, 9)), halves)
        for part in (halves, rest):
            power = b.shl(b.add(part, splat(I32, 127)), splat(I32, 23))
            series = b.fmul(series, b.bitcast(power, FLOATS))
        series = b.select(b.fcmp_ordered(">", x, splat(FLOAT, high)), splat(FLOAT, float("inf")), series)
        return b.select(b.fcmp_ordered("<", x, splat(FLOAT, low)), splat(FLOAT, 0.0), series)

    def log(self, b: Any, x: Any) -> Any:
        """Compute ln x of normal numbers to two units in the last place: Cephes' polynomial (Moshier, logf.c)."""
        # x = 2ⁿ · m with √½ ≤ m < √2.
        bits = b.bitcast(x, INTS)
        shifted = b.sub(bits, splat(I32, 0x3F3504F3))
        n = b.sitofp(b.ashr(shifted, splat(I32, 23)), FLOATS)
        m = b.bitcast(b.add(b.and_(shifted, splat(I32, 0x007FFFFF)), splat(I32, 0x3F3504F3)), FLOATS)
        r = b.fsub(m, splat(FLOAT, 1.0))
        square = b.fmul(r, r)
        series = splat(FLOAT, 7.0376836292e-2)
        for factor in (
            -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
            -2.4999993993e-1, 3.3333331174e-1,
        ):  # fmt: skip
            series = self.fma(b, series, r, splat(FLOAT, factor))
        series = b.fmul(b.fmul(series, r), square)
        series = self.fma(b, n, splat(FLOAT, -2.12194440e-4), series)
        series = self.fma(b, square, splat(FLOAT, -0.5), series)
        return self.fma(b, n, splat(FLOAT, 0.693359375), b.fadd(r, series))

    def sigmoid(self, b: Any, x: Any) -> Any:
        """Compute 1 / (1 + e^−x)."""
        return b.fdiv(splat(FLOAT, 1.0), b.fadd(splat(FLOAT, 1.0), self.exp(b, b.fneg(x))))

    def tanh(self, b: Any, x: Any) -> Any:
        """Compute tanh x to two units in the last place: Cephes' polynomial near 0 (tanhf.c), else by e^2|x|."""
        size = self.call(b, f"llvm.fabs.v{LANES}f32", FLOATS, x)
        square = b.fmul(x, x)
        series = splat(FLOAT, -5.70498872745e-3)
        for factor in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
            series = self.fma(b, series, square, splat(FLOAT, factor))
        near = self.fma(b, b.fmul(series, square), x, x)
        one = splat(FLOAT, 1.0)
        rest = b.fdiv(splat(FLOAT, 2.0), b.fadd(self.exp(b, b.fadd(size, size)), one))
        far = self.call(b, f"llvm.copysign.v{LANES}f32", FLOATS, b.fsub(one, rest), x)
        return b.select(b.fcmp_ordered("<", size, splat(FLOAT, 0.625)), near, far)

    def softplus(self, b: Any, x: Any) -> Any:
        """Compute ln(1 + e^x), and x itself from 20 on, as torch does."""
        power = self.exp(b, x)
        more = b.fadd(splat(FLOAT, 1.0), power)
        # ln(1 + e) = ln(m) · e / (m − 1) for the m that 1 + e is rounded to (Kahan); e itself where m is 1.
        exact = b.fdiv(b.fmul(self.log(b, more), power), b.fsub(more, splat(FLOAT, 1.0)))
        small = b.fcmp_ordered("==", more, splat(FLOAT, 1.0))
        value = b.select(small, power, exact)
        return b.select(b.fcmp_ordered(">", x, splat(FLOAT, 20.0)), x, value)

    @contextmanager
    def loop(self, b: Any, first: Any, end: Any, step: Any, carried: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Build `for i in range(first, end, step)`; yield i and the carried values, to be replaced by their new ones.

        Afterwards the list holds the final values.
        """
        function = b.function
        before, head = b.block, function.append_basic_block("head")
        body, after = function.append_basic_block("body"), function.append_basic_block("after")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(first, before)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, end), body, after)
        b.position_at_end(body)
        values = list(phis)
        yield index, values
        index.add_incoming(b.add(index, step), b.block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        carried[:] = phis
