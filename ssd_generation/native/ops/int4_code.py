"""Code for linear layers whose weights are stored in 4 bits, w = q · s + z with a scale and an offset for each group.

Sixteen rows of W are interleaved, a lane for each: a thread reads a single stream, a lane's sum is a row's, and scales
are applied to sixteen rows at once (as in the interleaved formats of llama.cpp). Where there are instructions for sums
of products of small integers, each 32 numbers of x are quantised to 8-bit integers with a common scale, and their
products are summed exactly. That rounds x, by at most 1 / 254 of the greatest of the 32, which a draft does not notice.
Elsewhere digits become float32 numbers. Offsets are multiplied by sums of x, which are those of its unrounded numbers
in either case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..codegen.builder import (
    ADDRESS,
    BYTES,
    FLOAT,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    STORED,
    Module,
    integer,
    least,
    splat,
)
from .products_code import Layer

__all__ = ["COLUMNS", "Digits", "Integers", "int4_module", "int4_products"]

COLUMNS = 32
"""Number of columns whose weights are stored together, 256 bytes for 16 rows: line j, 64 bytes, has four bytes of each
row, whose lower bits are those of columns 4 j … 4 j + 3, the upper ones those of 16 + 4 j …"""


_AHEAD = 8192
"""Distance in bytes at which memory is prefetched."""


class Digits(Module):
    """4-bit weights by float32 arithmetic."""

    name = "int4"

    bits = 4

    strip = 2 * LANES
    """Number of rows of W that work on experts is divided by."""

    most_rows = 4
    """Number of rows of x that one reading of the weights serves."""

    per_column = 4
    """Bytes per number of x once it is prepared."""

    def __init__(self, activation: str, group: int) -> None:
        super().__init__(f"{self.name}_{activation}", activation)
        self.group = integer(group)
        self.bytes_of_block = COLUMNS * LANES * self.bits // 8

    def build(self) -> str:
        """Return the module's text."""
        functions = self.functions()
        b, task = self.kernel()
        record, x, y = task.address(b, 2), task.operand(b, 3), task.operand(b, 5)
        rows = task.entry(b, 0)
        layer = Layer.of(self, b, record)
        room = self.room(b, layer.columns, rows)
        first, end = (b.mul(at, integer(LANES)) for at in task.share(b, b.sdiv(layer.rows, integer(LANES))))
        self.multiply(b, functions, room, record, (x, y, rows), first, end)
        b.ret_void()
        return str(self.module)

    def functions(self) -> tuple[dict[tuple[int, int], Any], Any]:
        """Build the functions that multiply prepared rows of x, and the one that prepares them."""
        rows_of_tiles = range(1, self.most_rows + 1)
        return {
            (rows, blocks): self._tile(rows, blocks) for rows in rows_of_tiles for blocks in (1, 2)
        }, self._prepare()

    def room(self, b: Any, columns: Any, rows: Any) -> Any:
        """Take the memory for prepared rows of x on the stack, at the entry of a kernel; return its address."""
        memory = b.alloca(I8, size=b.mul(self._bytes(b, columns)[2], integer(self.most_rows)))
        memory.align = 64
        return b.inttoptr(b.ptrtoint(memory, I64), ADDRESS)

    def multiply(
        self,
        b: Any,
        functions: tuple[dict[tuple[int, int], Any], Any],
        room: Any,
        record: Any,
        operands: tuple[Any, Any, Any],
        first: Any,
        end: Any,
    ) -> None:
        """Multiply all rows of x by a range of rows of W, as `Products.multiply` does; its ends are multiples of 16."""
        (tiles, prepare), (x, y, rows) = functions, operands
        layer = Layer.of(self, b, record)
        first, end = (b.sdiv(at, integer(LANES)) for at in (first, end))
        even = b.sub(end, b.srem(b.sub(end, first), integer(2)))
        of_x = STORED[self.activation]
        with self.loop(b, integer(0), rows, integer(self.most_rows), []) as (m, _):
            count = least(b, b.sub(rows, m), integer(self.most_rows))
            its_x = self.at(b, x, b.mul(m, layer.columns), of_x)
            its_y = self.at(b, y, b.mul(m, layer.rows), of_x)
            b.call(prepare, [its_x, room, layer.columns, count])
            after = b.append_basic_block("after_tiles")
            choice = b.switch(count, after)
            for many in range(1, self.most_rows + 1):
                block = b.append_basic_block(f"of_{many}")
                choice.add_case(integer(many), block)
                b.position_at_end(block)
                for blocks, begin, until in ((2, first, even), (1, even, end)):
                    b.call(tiles[many, blocks], [record, room, its_y, begin, until])
                b.branch(after)
            b.position_at_end(after)

    def bytes_of(self, b: Any, layer: Layer) -> tuple[Any, Any, Any]:
        """Return how many bytes the weights, the bias and the scales of a layer take."""
        weights = b.lshr(b.mul(layer.rows, layer.columns), integer(3))
        scales = b.mul(layer.rows, b.sdiv(layer.columns, self.group)) if self.has_offsets else layer.rows
        of_bias = integer(int(BYTES[self.activation]))
        return b.mul(weights, integer(self.bits)), b.mul(layer.rows, of_bias), b.shl(scales, integer(2))

    def _bytes(self, b: Any, columns: Any) -> tuple[Any, Any, Any]:
        """Return bytes of a prepared row: of its scales, of the three such tables before its numbers, and of all."""
        scales = b.lshr(columns, integer(3))  # 4 bytes for each 32 columns
        numbers = b.mul(scales, integer(3))
        size = b.add(numbers, b.mul(columns, integer(self.per_column)))
        return scales, numbers, b.and_(b.add(size, integer(63)), integer(-64))

    def _prepare(self) -> Any:
        """Build the function that prepares rows of x for multiplication."""
        function = self.function("prepare", [ADDRESS, ADDRESS, I64, I64], "noinline")
        x, prepared, columns, rows = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        sums, numbers, size = self._bytes(b, columns)
        of_x = STORED[self.activation]
        with self.loop(b, integer(0), rows, integer(1), []) as (row, _):
            its_x = self.at(b, x, b.mul(row, columns), of_x)
            own = self.at(b, prepared, b.mul(row, size), I8)
            with self.loop(b, integer(0), columns, integer(COLUMNS), []) as (k, _):
                places = [self.at(b, its_x, b.add(k, integer(at)), of_x) for at in (0, LANES)]
                parts = [self.floats(b, self.load(b, place, of_x), self.activation) for place in places]
                place = b.lshr(k, integer(3))
                if self.has_offsets:
                    total = self.sum(b, b.fadd(*parts))
                    b.store(total, self.at(b, own, b.add(sums, place), I8), align=4)
                target = self.at(b, own, b.add(numbers, b.mul(k, integer(self.per_column))), I8)
                scale, begin = self.put(b, parts, target)
                b.store(scale, self.at(b, own, place, I8), align=4)
                b.store(begin, self.at(b, own, b.add(b.shl(sums, integer(1)), place), I8), align=4)
        b.ret_void()
        return function

    def put(self, b: Any, parts: list[Any], target: Any) -> tuple[Any, Any]:
        """Write 32 numbers in the form to be multiplied; return their scale, and the start value of the products."""
        for at, part in enumerate(parts):
            b.store(part, self.at(b, target, integer(4 * LANES * at), I8), align=4)
        return ir.Constant(FLOAT, 1.0), ir.Constant(FLOAT, 0.0)

    def _tile(self, rows: int, blocks: int) -> Any:
        """Build the function for prepared rows of x and a range of 16-row blocks of W, `blocks` of them at a time."""
        function = self.function(f"rows_{rows}_{blocks}", [ADDRESS] * 3 + [I64] * 2, "noinline")
        record, prepared, y, first, end = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        layer = Layer.of(self, b, record)
        sums_at, numbers_at, size = self._bytes(b, layer.columns)
        own = [self.at(b, prepared, b.mul(size, integer(m)), I8) for m in range(rows)]
        bytes_of_rows = b.mul(b.lshr(layer.columns, integer(5)), integer(self.bytes_of_block))
        with self.loop(b, first, end, integer(blocks), []) as (block, _):
            its_blocks = [b.add(block, integer(t)) for t in range(blocks)]
            streams = [self.at(b, layer.weight, b.mul(its_block, bytes_of_rows), I8) for its_block in its_blocks]
            sums = [splat(FLOAT, 0.0)] * (rows * blocks)
            with self.loop(b, integer(0), layer.columns, integer(COLUMNS), sums) as (k, carried):
                place = b.lshr(k, integer(3))
                at_number = b.add(numbers_at, b.mul(k, integer(self.per_column)))
                numbers = [self.at(b, row, at_number, I8) for row in own]
                for t, (stream, its_block) in enumerate(zip(streams, its_blocks, strict=True)):
                    weights = self.at(b, stream, b.mul(k, integer(self.bytes_of_block // COLUMNS)), I8)
                    for line in range(0, self.bytes_of_block, 64):
                        self.ask_for(b, self.at(b, weights, integer(_AHEAD + line), I8))
                    lines = range(0, self.bytes_of_block, 64)
                    words = [b.load(self.at(b, weights, integer(line), I8), typ=INTS, align=1) for line in lines]
                    begins = [
                        b.load(self.at(b, row, b.add(b.shl(sums_at, integer(1)), place), I8), typ=self.total, align=4)
                        for row in own
                    ]
                    totals = self.products(b, words, numbers, [self.spread(b, begin) for begin in begins])
                    add = self.scaling(b, layer, its_block, k)
                    for m, total in enumerate(totals):
                        of_x = [self.at(b, own[m], b.add(part, place), I8) for part in (integer(0), sums_at)]
                        at = m * blocks + t
                        carried[at] = add(total, of_x[0], of_x[1], carried[at])
            for t, its_block in enumerate(its_blocks):
                row = b.mul(its_block, integer(LANES))
                for m in range(rows):
                    place = self.at(b, y, b.add(b.mul(layer.rows, integer(m)), row), STORED[self.activation])
                    self._finish(b, layer, sums[m * blocks + t], row, place)
        b.ret_void()
        return function

    def scaling(self, b: Any, layer: Layer, block: Any, k: Any) -> Callable[..., Any]:
        """Read the scales of 16 rows of W from column k on.

        Return a function of the products, the places of the scale and of the sum of 32 numbers of x, and the sums so
        far, to which it adds the products.
        """
        groups = b.sdiv(layer.columns, self.group)
        group = b.add(b.mul(block, groups), b.sdiv(k, self.group))
        both = b.load(self.at(b, layer.scales, b.mul(group, integer(LANES)), I32), typ=INTS, align=4)
        scale, offset = b.bitcast(both, FLOATS), b.bitcast(b.shl(both, splat(I32, 16)), FLOATS)
        if self.base:
            offset = self.fma(b, scale, splat(FLOAT, self.base), offset)

        def add(total: Any, x_scale: Any, x_sum: Any, before: Any) -> Any:
            if self.scaled:
                total = b.fmul(total, self.number(b, x_scale))
            return self.fma(b, total, scale, self.fma(b, offset, self.number(b, x_sum), before))

        return add

    def number(self, b: Any, place: Any) -> Any:
        """Load a float32 number into every lane."""
        return self.spread(b, b.load(place, typ=FLOAT, align=4))

    has_offsets = True
    """True where weights have offsets, so that sums of x are needed."""

    base = -16.0
    """Multiple of the scale that corrects the offsets: here a digit is loaded with 16 added."""

    total: Any = FLOAT
    """Type in which products are summed."""

    scaled = False
    """True where the numbers of x have a scale."""

    def products(self, b: Any, words: list[Any], numbers: list[Any], begins: list[Any]) -> list[Any]:
        """Sum the products of 32 columns of 16 rows of W with each row of x, as float32."""
        totals = begins
        for upper in (0, 1):
            for j, word in enumerate(words):
                for i in range(4):
                    digit = self._digit(b, word, 8 * i + 4 * upper)
                    column = 16 * upper + 4 * j + i
                    for m, row in enumerate(numbers):
                        number = b.load(self.at(b, row, integer(4 * column), I8), typ=FLOAT, align=4)
                        totals[m] = self.fma(b, digit, self.spread(b, number), totals[m])
        return totals

    @staticmethod
    def _digit(b: Any, word: Any, bit: int) -> Any:
        """Convert four bits of each lane to the float32 16 + digit: they are the upper bits of its fraction."""
        moved = b.shl(word, splat(I32, 19 - bit)) if bit <= 19 else b.lshr(word, splat(I32, bit - 19))
        return b.bitcast(b.or_(b.and_(moved, splat(I32, 0x780000)), splat(I32, 0x41800000)), FLOATS)

    def _finish(self, b: Any, layer: Layer, sums: Any, row: Any, y: Any) -> None:
        """Write 16 outputs: the sums and the bias."""
        sums = self.scaled_rows(b, layer, sums, row)
        before = b.block
        with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(layer.bias, I64), integer(0))):
            of_x = STORED[self.activation]
            bias = self.floats(b, self.load(b, self.at(b, layer.bias, row, of_x), of_x), self.activation)
            biased = b.fadd(sums, bias)
            with_bias = b.block
        total = b.phi(FLOATS)
        total.add_incoming(sums, before)
        total.add_incoming(biased, with_bias)
        self.store_many(b, total, y, integer(LANES))

    def scaled_rows(self, b: Any, layer: Layer, sums: Any, row: Any) -> Any:
        """Scale the sums of 16 rows of W from this one on, where a row has one scale."""
        return sums


class Integers(Digits):
    """Products of 8-bit integers, with the instruction that adds four of them to a 32-bit integer."""

    per_column = 1
    base = 8.0  # digits count from −8 to 7, so that the rounding of x matters less
    least = -8
    """Value that the lowest digit represents."""
    scaled = True
    total = I32

    def put(self, b: Any, parts: list[Any], target: Any) -> tuple[Any, Any]:
        """Write 32 numbers as integers from −127 to 127; return their scale, and `least` times their sum."""
        sizes = [self.call(b, f"llvm.fabs.v{LANES}f32", FLOATS, part) for part in parts]
        most = self.greatest(b, b.select(b.fcmp_ordered(">", *sizes), *sizes))
        nothing = b.fcmp_ordered("==", most, ir.Constant(FLOAT, 0.0))
        factors = self.spread(b, b.select(nothing, most, b.fdiv(ir.Constant(FLOAT, 127.0), most)))
        wholes = []
        for at, part in enumerate(parts):
            rounded = self.call(b, f"llvm.rint.v{LANES}f32", FLOATS, b.fmul(part, factors))
            whole = b.fptosi(self._within(b, rounded), INTS)
            wholes.append(whole)
            narrow = b.trunc(whole, ir.VectorType(I8, LANES))
            b.store(narrow, self.at(b, target, integer(LANES * at), I8), align=1)
        total = self.call(b, f"llvm.vector.reduce.add.v{LANES}i32", I32, b.add(*wholes))
        return b.fdiv(most, ir.Constant(FLOAT, 127.0)), b.mul(total, ir.Constant(I32, self.least))

    def _within(self, b: Any, values: Any) -> Any:
        """Clamp to −127 … 127, and NaN to 0. LLVM turns `llvm.fptosi.sat` into a branch for each lane."""
        values = b.select(b.fcmp_ordered("ord", values, values), values, splat(FLOAT, 0.0))
        for sign, bound in (("<", splat(FLOAT, 127.0)), (">", splat(FLOAT, -127.0))):
            values = b.select(b.fcmp_ordered(sign, values, bound), values, bound)
        return values

    def factors(self, b: Any, j: int, word: Any) -> list[tuple[int, Any]]:
        """Return the contents of line j of the weights: first columns, with the bytes of four columns in each lane."""
        mask = splat(I32, 0x0F0F0F0F)
        return [(4 * j, b.and_(word, mask)), (16 + 4 * j, b.and_(b.lshr(word, splat(I32, 4)), mask))]

    def products(self, b: Any, words: list[Any], numbers: list[Any], begins: list[Any]) -> list[Any]:
        # One sum per row of x: other blocks, and the following ones, need not wait for it.
        totals = list(begins)
        for j, word in enumerate(words):
            factors = self.factors(b, j, word)
            for m, row in enumerate(numbers):
                for column, weights in factors:
                    four = self.spread(b, b.load(self.at(b, row, integer(column), I8), typ=I32, align=4))
                    totals[m] = self.call(b, "llvm.x86.avx512.vpdpbusd.512", INTS, totals[m], weights, four)
        return [b.sitofp(total, FLOATS) for total in totals]


class _Pairs(Integers):
    """The same products, with AVX2's instruction that adds two of them into 16 bits.

    Eight such sums are the most that 16 bits hold: 8 · 2 · 15 · 127 = 30,480. They cover 32 columns.
    """

    def products(self, b: Any, words: list[Any], numbers: list[Any], begins: list[Any]) -> list[Any]:
        bytes_, pairs, sums = (ir.VectorType(kind, count) for kind, count in ((I8, 32), (I16, 16), (I32, 8)))
        parts = [ir.Constant(ir.VectorType(I32, 8), list(range(at, at + 8))) for at in (0, 8)]
        mask = ir.Constant(sums, [0x0F0F0F0F] * 8)
        four_bits, first = ir.Constant(sums, [4] * 8), ir.Constant(sums, None)
        totals: list[list[Any]] = [[] for _ in numbers]
        for part in parts:
            added: list[Any] = [None] * len(numbers)
            for j, word in enumerate(words):
                half = b.shuffle_vector(word, word, part)
                digits = b.and_(half, mask), b.and_(b.lshr(half, four_bits), mask)
                for m, row in enumerate(numbers):
                    for upper, four in enumerate(digits):
                        number = b.load(self.at(b, row, integer(16 * upper + 4 * j), I8), typ=I32, align=4)
                        single = b.insert_element(ir.Constant(sums, ir.Undefined), number, ir.Constant(I32, 0))
                        spread = b.shuffle_vector(single, single, first)
                        operands = (b.bitcast(four, bytes_), b.bitcast(spread, bytes_))
                        product = self.call(b, "llvm.x86.avx2.pmadd.ub.sw", pairs, *operands)
                        added[m] = product if added[m] is None else b.add(added[m], product)
            for m, total in enumerate(added):
                ones = ir.Constant(pairs, [1] * 16)
                totals[m].append(self.call(b, "llvm.x86.avx2.pmadd.wd", sums, total, ones))
        whole = ir.Constant(INTS, list(range(LANES)))
        return [
            b.sitofp(b.add(begin, b.shuffle_vector(*total, whole)), FLOATS)
            for begin, total in zip(begins, totals, strict=True)
        ]


_PRODUCTS = {"avx512": Integers, "avx2": _Pairs, "": Digits}


def int4_products(activation: str, group: int, products: str) -> Digits:
    """Return the functions for 4-bit layers; arguments as in `int4_module`."""
    return _PRODUCTS[products](activation, group)


def int4_module(activation: str, group: int, products: str) -> str:
    """Return the text of a module for 4-bit layers, whose kernel is called like that of `linear_code.linear_module`.

    N is a multiple of 16 and K of `COLUMNS`. Scales are `(N / 16, K / group, 16)`, 32 bits of which the upper half is
    the scale and the lower the offset.

    Args:
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
        group: number of columns that share a scale and an offset; a multiple of `COLUMNS`.
        products: instructions for products of integers, `"avx512"` (VNNI) or `"avx2"`; `""`: there are none, and
            float32 numbers are multiplied.
    """
    return int4_products(activation, group, products).build()
