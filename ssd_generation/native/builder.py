"""What modules in LLVM's language are put together from.

Vectors have 16 lanes, which stand for one, two or four registers; sums of the lanes are those of their halves, and so
on. So what is computed does not depend on the processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16

FLOAT, HALF = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ADDRESS = ir.PointerType()
VOID = ir.VoidType()

STORED: dict[str, Any] = {"float32": FLOAT, "bfloat16": I16, "float16": HALF, "int8": I8, "int4": I16}
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}


def vector(kind: Any) -> Any:
    """The type of 16 of these."""
    return ir.VectorType(kind, LANES)


FLOATS, INTS = vector(FLOAT), vector(I32)


def integer(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def splat(kind: Any, value: float) -> Any:
    """A constant in all lanes."""
    return ir.Constant(vector(kind), [value] * LANES)


class Module:
    """A module for activations of one type.

    Args:
        name: of the module.
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
    """

    def __init__(self, name: str, activation: str) -> None:
        self.activation = activation
        self.module = ir.Module(name=name)
        self._declared: dict[str, Any] = {}

    def function(self, name: str, args: list[Any], *attributes: str) -> Any:
        """A function without a result; `run` is the one that is called from outside."""
        function = ir.Function(self.module, ir.FunctionType(VOID, args), name)
        if name != "run":
            function.linkage = "internal"
        for attribute in ("nounwind", *attributes):
            function.attributes.add(attribute)
        return function

    def call(self, b: Any, name: str, result: Any, *args: Any) -> Any:
        """The call of a function from outside the module, or of one of LLVM's own."""
        if name not in self._declared:
            kind = ir.FunctionType(result, [arg.type for arg in args])
            self._declared[name] = ir.Function(self.module, kind, name)
        return b.call(self._declared[name], args)

    def fma(self, b: Any, one: Any, other: Any, total: Any) -> Any:
        """A product and a sum, rounded once."""
        return self.call(b, f"llvm.fma.v{LANES}f32", FLOATS, one, other, total)

    @staticmethod
    def at(b: Any, address: Any, offset: Any, kind: Any) -> Any:
        """The address of element `offset`."""
        return b.gep(address, [offset], source_etype=kind)

    def load(self, b: Any, address: Any, kind: Any, count: Any = None) -> Any:
        """16 elements as they are stored, and with `count` only so many of them and zeros."""
        if count is None:
            return b.load(address, typ=vector(kind), align=1)
        mask = self._first(b, count)
        zeros = ir.Constant(vector(kind), None)
        name = {FLOAT: "f32", HALF: "f16", I8: "i8", I16: "i16", I32: "i32"}[kind]
        return self.call(
            b, f"llvm.masked.load.v{LANES}{name}.p0", vector(kind), address, ir.Constant(I32, 1), mask, zeros
        )

    def spread(self, b: Any, value: Any) -> Any:
        """One number in all lanes."""
        single = b.insert_element(ir.Constant(vector(value.type), ir.Undefined), value, ir.Constant(I32, 0))
        return b.shuffle_vector(single, single, ir.Constant(INTS, None))

    @staticmethod
    def floats(b: Any, values: Any, stored: str) -> Any:
        """What was loaded as float32."""
        if stored == "bfloat16":
            return b.bitcast(b.shl(b.zext(values, INTS), splat(I32, 16)), FLOATS)
        if stored == "float16":
            return b.fpext(values, FLOATS)
        if stored == "int8":
            return b.sitofp(b.sext(values, INTS), FLOATS)
        return values

    def sum(self, b: Any, values: Any) -> Any:
        """The sum of the lanes: of the halves, of their halves, and so on."""
        width = LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))) for at in (0, width)]
            values = b.fadd(*(b.shuffle_vector(values, values, half) for half in halves))
        return b.extract_element(values, ir.Constant(I32, 0))

    def narrow(self, b: Any, value: Any) -> Any:
        """float32 numbers, one or 16, as activations are stored: rounded to the nearest, of two to the even one."""
        if self.activation == "float32":
            return value
        many = value.type == FLOATS
        if self.activation == "float16":
            return b.fptrunc(value, vector(HALF) if many else HALF)

        def constant(number: int) -> Any:
            return splat(I32, number) if many else ir.Constant(I32, number)

        bits = b.bitcast(value, INTS if many else I32)
        even = b.and_(b.lshr(bits, constant(16)), constant(1))
        rounded = b.add(b.add(bits, constant(0x7FFF)), even)
        quiet = b.or_(bits, constant(0x400000))
        bits = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        return b.trunc(b.lshr(bits, constant(16)), vector(I16) if many else I16)

    def rounded(self, b: Any, values: Any) -> Any:
        """16 float32 numbers as if they had been stored and loaded again."""
        return self.floats(b, self.narrow(b, values), self.activation)

    def store(self, b: Any, value: Any, address: Any) -> None:
        """One float32 number, as activations are stored."""
        b.store(self.narrow(b, value), address)

    def store_many(self, b: Any, values: Any, address: Any, count: Any) -> None:
        """The first `count` of 16 float32 numbers, as activations are stored."""
        narrow = self.narrow(b, values)
        name = {FLOAT: "f32", HALF: "f16", I16: "i16"}[STORED[self.activation]]
        mask = self._first(b, count)
        self.call(b, f"llvm.masked.store.v{LANES}{name}.p0", VOID, narrow, address, ir.Constant(I32, 1), mask)

    def _first(self, b: Any, count: Any) -> Any:
        lanes = ir.Constant(INTS, list(range(LANES)))
        return b.icmp_signed("<", lanes, self.spread(b, b.trunc(count, I32)))

    def one(self, b: Any, address: Any) -> Any:
        """One number of those that activations are, as float32."""
        value = b.load(address, typ=STORED[self.activation])
        if self.activation == "bfloat16":
            return b.bitcast(b.shl(b.zext(value, I32), ir.Constant(I32, 16)), FLOAT)
        return b.fpext(value, FLOAT) if self.activation == "float16" else value

    @contextmanager
    def loop(self, b: Any, first: Any, end: Any, step: Any, carried: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """`for i in range(first, end, step)`: gives i and what is carried, in which the new values are to be put.

        Afterwards the list holds what came out.
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
