"""Code for products of a few rows with a matrix of weights, in LLVM IR.

y = x Wᵀ + b for x of 1 … rows, as few tokens as a decoding step has. Reading the weights takes most of the time, so a
kernel reads a few rows of W at once and prefetches those below while it computes. Every output is summed in one fixed
order, which depends on nothing but K and the types: lane l of 16 adds the products at k = l, l + 16, l + 32 … by fused
multiply-adds in float32, and the lanes are added pairwise. So a row's result does not depend on how many rows there
are, nor on its place among them, nor on the threads; vectors of 16 lanes occupy one, two or four registers, so that it
does not depend on the processor either.

For bfloat16, lane l adds two products at a time, those at k = 2 l + 1 and 2 l, then at 32 + 2 l + 1 and so on, like
AVX-512's instruction (VDPBF16PS: products are exact, each sum is rounded to the nearest float32, ties to even). Other
processors, and Intel's, where the instruction is slow, take two multiply-adds for it, with the same bits, except for
numbers below the smallest normal one, 2⁻¹²⁶, which the instruction takes for zero. (Intel Xeon with AVX-512 and AMX,
two cores, 256 rows of x, layers of 896 to 8,960 columns: 167 to 210 GFLOPS by the instruction, 275 to 292 by
multiply-adds.) Processors with AMX add them otherwise (tiles_code.py).

Where registers are few, and for these multiply-adds, x is converted to float32 beforehand, so that conversion takes no
registers. int8: w = q · s, with one scale per row of W.

Where registers are few, a tile prefetches in the order of memory, at least `_AHEAD` bytes ahead: rows read in parallel
from memory, each by itself, are slower there. With more rows at a time it is the other way round (Intel Xeon with
AVX-512, SmolLM2, one token, two runs each: bfloat16 by multiply-adds 14.1 and 14.8 ms in order, 12.2 and 11.6 by row;
float32 23.6 and 21.8, 24.5 and 20.4).

Many rows of x are multiplied in blocks of columns: a block of eight rows stays in the L1 cache while a strip of W
passes by, and its sums wait in memory for the next block. The order of additions is the same.

Built by llvmlite, not checked in as C that clang compiled to LLVM IR. The same kernels in C with vector
extensions (clang 22.1.8; llvmlite 0.50, LLVM 22.1; AMD EPYC, AVX2, one thread) gave the same bits in 1,008 calls of 1
to 9 rows. C took 1.02 (0.99 to 1.08) of the time in float32 and 0.97 (0.93 to 1.06) in bfloat16 for 1, 2 and 4 rows
(median over six shapes, extremes), and 1.04 and 0.70 for 8: the last probably since C converts x without masked loads,
which is possible here, too. C is shorter, 230 lines, many of them macros for types and tiles. But 13 modules (six kinds
by two counts of registers, and AVX-512's bfloat16) would be checked in, 54 to 74 KB each before LLVM's passes and 0.3
to 1.6 MB after. Their text depends on LLVM's version (20 in llvmlite 0.45, the oldest supported) and names clang's
processor. Only CI with a clang could compare them with C, and the other kernels would still need the builder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..codegen.builder import (
    ADDRESS,
    BFLOATS,
    BYTES,
    FLOAT,
    FLOATS,
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

__all__ = ["LAYER_FIELDS", "STRIP", "Dots", "Layer", "Pairs", "Products"]

LAYER_FIELDS = ("weight", "bias", "scales", "columns", "rows")
"""Fields of the record that describes a layer, 64 bits each: three addresses, K, and N."""

_TILES = {32: {1: 8, 2: 8, 3: 5, 4: 5, 5: 4, 6: 4, 7: 3, 8: 3}, 8: {1: 4, 2: 2, 3: 1, 4: 1}}
"""Number of rows of W that are read at once, by registers (of 16 numbers) and rows of x: as many sums as have room.

Where x has more rows than there are tiles for, they are processed in turn on rows of W that are in the cache.
"""

_FEW = 4
"""Number of rows of x up to which a loop can be unrolled to twice the code without spilling a sum to memory."""

_AHEAD = 4 << 10
"""Least distance in bytes at which memory is prefetched where registers are few."""

_LINE = 64
"""Bytes that are prefetched at once."""

_TOGETHER = 4
"""Number of neighbouring outputs whose lanes are added together."""

_STACK = 5 << 16
"""Most bytes of x in float32: a thread's stack has half a megabyte on some systems."""

_BLOCK = 28 << 10
"""Bytes of x that stay in the L1 cache while rows of W pass by."""

_STRIP = 96
_STRIP_BYTES = 1 << 20
"""Most rows of W, and most bytes of them, that stay in the L2 cache while groups of rows of x are processed."""

STRIP = 24
"""Number of rows of W that work is divided by."""


@dataclass(frozen=True)
class Room:
    """Memory on the stack of a kernel, and how it goes through x.

    Attributes:
        few: whether all rows of x are multiplied at once, in their whole length.
        block: number of columns that are multiplied at a time.
        own: memory for a block of x in its form; `None` where it is multiplied as it is.
        sums: memory for the sums of a strip of W.
    """

    few: Any
    block: Any
    own: Any
    sums: Any


@dataclass(frozen=True)
class Layer:
    """A layer's record, as a kernel reads it."""

    weight: Any
    bias: Any
    scales: Any
    columns: Any
    rows: Any

    @classmethod
    def of(cls, module: Module, b: Any, record: Any) -> Layer:
        """Load a layer's fields from its record."""
        fields = {}
        for at, name in enumerate(LAYER_FIELDS):
            kind = ADDRESS if at < 3 else I64
            fields[name] = b.load(module.at(b, record, integer(at), I64), typ=kind)
        return cls(**fields)


class Products(Module):
    """Functions for one kind of weights and activations."""

    columns = LANES
    """Number of columns whose products are added at a time."""

    strip = STRIP
    """Number of rows of W that work is divided by."""

    def __init__(self, weight: str, activation: str, registers: int) -> None:
        super().__init__(f"linear_{weight}_{activation}", activation)
        self.weight = weight
        self.tiles = _TILES[registers]
        self.most_rows = max(self.tiles)
        # Converted to float32, x takes twice the room in the L1 cache: not worth it where registers are many.
        self.converts = activation != "float32" and registers == 8
        self._in_order = registers == 8  # prefetches W as it lies in memory
        self.of_x: Any = FLOAT if self.converts else STORED[activation]
        """Type of x's numbers when they are multiplied."""

    # ------------------------------------------------------------------------------------------------------------------
    # products

    def stride(self, b: Any, columns: Any) -> Any:
        """Return the stride between converted rows of x of so many columns, in numbers."""
        return columns

    def convert(self, b: Any, x: Any, made: Any, k: Any, count: Any) -> None:
        """Convert as many columns of a row of x as are multiplied at a time; with `count`, only that many."""
        of_x = STORED[self.activation]
        values = self.floats(b, self.load(b, self.at(b, x, k, of_x), of_x, count), self.activation)
        place = self.at(b, made, k, FLOAT)
        if count is None:
            b.store(values, place, align=4)
        else:
            self.store_many(b, values, place, count, "float32")

    def weights(self, b: Any, row: Any, k: Any, count: Any) -> Any:
        """Load a row of W from column k on; with `count`, only that many columns, and zeros."""
        kind = STORED[self.weight]
        return self.floats(b, self.load(b, self.at(b, row, k, kind), kind, count), self.weight)

    def factors(self, b: Any, x: Any, k: Any, count: Any) -> Any:
        """Load the same columns of a row of x."""
        stored = "float32" if self.converts else self.activation
        return self.floats(b, self.load(b, self.at(b, x, k, self.of_x), self.of_x, count), stored)

    def add(self, b: Any, weights: Any, factors: Any, total: Any) -> Any:
        """Add the products to those before."""
        return self.fma(b, weights, factors, total)

    # ------------------------------------------------------------------------------------------------------------------
    # sums

    def _products(
        self, b: Any, rows: list[Any], x: list[Any], k: Any, sums: list[Any], ahead: list[Any], count: Any
    ) -> None:
        """Add the products of some columns; what lies at the addresses `ahead` is prefetched, one for each row of W."""
        values = []
        for at, row in enumerate(rows):
            values.append(self.weights(b, row, k, count))
            if ahead:
                self.ask_for(b, ahead[at])
        for m, its_x in enumerate(x):
            factors = self.factors(b, its_x, k, count)
            for r, value in enumerate(values):
                at = m * len(rows) + r
                sums[at] = self.add(b, value, factors, sums[at])

    def _tile(self, name: str, rows: int, tile: int) -> Any:
        """Build the function that multiplies `rows` rows of x by a range of rows of W, `tile` at a time.

        It covers a block of columns; sums that are not complete before or after it are in memory.
        """
        function = self.function(name, [ADDRESS] * 4 + [I64] * 5, "noinline")
        record, x, y, sums_at, stride, first, end, left, right = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        layer = Layer.of(self, b, record)
        of_y = STORED[self.activation]
        x = [self.at(b, x, b.mul(stride, integer(m)), self.of_x) for m in range(rows)]
        y = [self.at(b, y, b.mul(layer.rows, integer(m)), of_y) for m in range(rows)]
        ahead = self._distance(b, layer, tile)
        with self.loop(b, first, end, integer(tile), []) as (n, _):
            places = [b.add(n, integer(r)) for r in range(tile)]
            before = b.mul(b.sub(n, first), integer(rows * LANES))
            memory = [self.at(b, sums_at, b.add(before, integer(at * LANES)), FLOAT) for at in range(rows * tile)]
            sums = self._begun(b, left, memory)
            # Not beyond the last rows: another thread computes those below, and its core has to fetch them again.
            is_last = b.icmp_signed(">=", b.add(n, ahead), end)
            below = b.select(is_last, integer(0), b.mul(layer.columns, ahead))
            self._sum_of_products(b, layer, places, x, sums, (left, right), below)
            with b.if_else(b.icmp_signed("<", right, layer.columns)) as (incomplete, complete):
                with incomplete:
                    for value, place in zip(sums, memory, strict=True):
                        b.store(value, place, align=64)
                with complete:
                    for m in range(rows):
                        for r in range(0, tile, _TOGETHER):
                            its_sums = sums[m * tile + r : m * tile + min(r + _TOGETHER, tile)]
                            self._finish(b, layer, its_sums, places[r], self.at(b, y[m], places[r], of_y))
        b.ret_void()
        return function

    def _distance(self, b: Any, layer: Layer, tile: int) -> Any:
        """Return how many rows further down W a tile prefetches: a whole number of tiles."""
        if not self._in_order:
            return integer(tile)
        size = b.mul(layer.columns, integer(int(tile * BYTES[self.weight])))
        return b.mul(b.sdiv(b.add(size, integer(_AHEAD - 1)), size), integer(tile))

    @staticmethod
    def _begun(b: Any, left: Any, memory: list[Any]) -> list[Any]:
        """Return the sums of the columns before `left`, which are in memory; zeros where there are none."""
        with b.if_else(b.icmp_signed(">", left, integer(0))) as (later, first):
            with later:
                known = [b.load(place, typ=FLOATS, align=64) for place in memory]
                from_memory = b.block
            with first:
                at_first = b.block
        sums = []
        for value in known:
            phi = b.phi(FLOATS)
            phi.add_incoming(value, from_memory)
            phi.add_incoming(splat(FLOAT, 0.0), at_first)
            sums.append(phi)
        return sums

    def _sum_of_products(
        self, b: Any, layer: Layer, places: list[Any], x: list[Any], sums: list[Any], block: tuple[Any, Any], below: Any
    ) -> None:
        """Add the products of a block of columns, of the rows of W at `places` with rows of x, which begin with it.

        What lies `below` numbers further on in W is prefetched.
        """
        left, right = block
        columns = b.sub(right, left)
        kind = STORED[self.weight]
        rows = [self.at(b, layer.weight, b.add(b.mul(place, layer.columns), left), kind) for place in places]
        step = self.columns
        per_line = max(1, int(_LINE / (BYTES[self.weight] * step)))  # loads
        each, ahead = self._ahead(b, layer, rows, columns, below)
        unrolled = max(2, per_line) if len(x) <= _FEW else 1
        many = b.and_(columns, integer(-step * unrolled))
        whole = b.and_(columns, integer(-step))
        with self.loop(b, integer(0), many, integer(step * unrolled), sums) as (k, carried):
            for at in range(unrolled):
                its = b.add(k, integer(at * step))
                is_due = at % min(per_line, unrolled) == 0
                prefetched = [self.at(b, one, b.mul(its, each), kind) for one in ahead] if is_due else []
                self._products(b, rows, x, its, carried, prefetched, None)
        with self.loop(b, many, whole, integer(step), sums) as (k, carried):
            self._products(b, rows, x, k, carried, [], None)
        with self.loop(b, whole, columns, integer(step), sums) as (k, carried):
            self._products(b, rows, x, k, carried, [], b.sub(columns, k))

    def _ahead(self, b: Any, layer: Layer, rows: list[Any], columns: Any, below: Any) -> tuple[Any, list[Any]]:
        """Return where prefetching begins, an address for each row of W, and how far it moves for each column.

        Rows whose whole length is multiplied are prefetched line by line, in the order of memory; of parts of them,
        each row by itself.
        """
        kind = STORED[self.weight]
        its_own = [self.at(b, row, below, kind) for row in rows]
        if not self._in_order or len(rows) == 1:
            return integer(1), its_own
        is_whole = b.icmp_signed("==", columns, layer.columns)
        line = int(_LINE / BYTES[self.weight])
        ordered = [self.at(b, its_own[0], integer(at * line), kind) for at in range(len(rows))]
        ahead = [b.select(is_whole, one, other) for one, other in zip(ordered, its_own, strict=True)]
        return b.select(is_whole, integer(len(rows)), integer(1)), ahead

    def _finish(self, b: Any, layer: Layer, sums: list[Any], place: Any, y: Any) -> None:
        """Write neighbouring outputs: the sums of their lanes, scaled if W is, plus the bias."""
        if len(sums) != _TOGETHER:
            for at, one in enumerate(sums):
                its_place = b.add(place, integer(at))
                self._write(b, layer, self.sum(b, one), its_place, self.at(b, y, integer(at), STORED[self.activation]))
            return
        self._write(b, layer, self.sums(b, sums), place, y)

    def _write(self, b: Any, layer: Layer, value: Any, place: Any, y: Any) -> None:
        """Write one output, or a vector of them."""
        kind = value.type
        many = 1 if kind == FLOAT else kind.count
        if self.weight == "int8":
            value = b.fmul(value, b.load(self.at(b, layer.scales, place, FLOAT), typ=kind, align=4))
        its_bias = self.at(b, layer.bias, place, STORED[self.activation])
        total = self.biased(b, layer, value, lambda: self.some(b, its_bias, many))
        b.store(self.narrow(b, total), y, align=1 if many > 1 else None)

    @staticmethod
    def biased(b: Any, layer: Layer, value: Any, load: Callable[[], Any]) -> Any:
        """Add the bias, which `load` loads where the layer has one."""
        plain = b.block
        with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(layer.bias, I64), integer(0))):
            biased, with_bias = b.fadd(value, load()), b.block
        total = b.phi(value.type)
        total.add_incoming(value, plain)
        total.add_incoming(biased, with_bias)
        return total

    # ------------------------------------------------------------------------------------------------------------------
    # all of it

    def build(self) -> str:
        """Return the module's text."""
        self._kernel()
        return str(self.module)

    def functions(self) -> tuple[Any, Any]:
        """Build the function that multiplies a few rows of x, and the one that converts them first, or `None`."""
        tiles: dict[int, tuple[Any, Any, int]] = {}
        for rows, tile in self.tiles.items():
            tiles[rows] = (self._tile(f"rows_{rows}", rows, tile), self._tile(f"rows_{rows}_one", rows, 1), tile)
        return self._strip(tiles), self._converted() if self.converts else None

    def _strip(self, tiles: dict[int, tuple[Any, Any, int]]) -> Any:
        """Build the function that multiplies up to `most_rows` rows of x by a range of rows of W; see `_tile`."""
        function = self.function("strip", [ADDRESS] * 4 + [I64] * 6)
        record, x, y, sums, stride, rows, first, end, left, right = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        done = function.append_basic_block("done")
        choice = b.switch(rows, done)
        for count, (many, one, tile) in tiles.items():
            block = function.append_basic_block(f"of_{count}")
            choice.add_case(integer(count), block)
            b.position_at_end(block)
            middle = b.sub(end, b.srem(b.sub(end, first), integer(tile)))
            b.call(many, [record, x, y, sums, stride, first, middle, left, right])
            further = self.at(b, sums, b.mul(b.sub(middle, first), integer(count * LANES)), FLOAT)
            b.call(one, [record, x, y, further, stride, middle, end, left, right])
            b.branch(done)
        b.position_at_end(done)
        b.ret_void()
        return function

    def _converted(self) -> Any:
        """Build the function that converts columns of rows of x to the form in which they are multiplied."""
        function = self.function("converted", [ADDRESS, ADDRESS, I64, I64, I64], "noinline")
        x, made, stride_of_x, columns, rows = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        stride = self.stride(b, columns)
        with self.loop(b, integer(0), rows, integer(1), []) as (m, _):
            its_x = self.at(b, x, b.mul(m, stride_of_x), STORED[self.activation])
            its_own = self.at(b, made, b.mul(m, stride), self.of_x)
            # Without AVX-512 a masked load of 16-bit numbers becomes a branch for each of them: only for the remainder.
            whole, step = b.and_(columns, integer(-self.columns)), integer(self.columns)
            with self.loop(b, integer(0), whole, step, []) as (k, _):
                self.convert(b, its_x, its_own, k, None)
            with self.loop(b, whole, columns, step, []) as (k, _):
                self.convert(b, its_x, its_own, k, b.sub(columns, k))
        b.ret_void()
        return function

    def room(self, b: Any, columns: Any, rows: Any) -> Room:
        """Take the memory that `multiply` needs on the stack, at the entry of a kernel.

        Few rows of x are multiplied at once, in their whole length; of many, blocks of columns that fit in the L1
        cache.
        """
        most, whole = integer(self.most_rows), self._up(b, columns)
        # As equal as can be: a short last block costs as much as a whole one in loads and stores of sums.
        parts = b.sdiv(b.add(columns, integer(self._block - 1)), integer(self._block))
        block = self._up(b, b.sdiv(b.add(columns, b.sub(parts, integer(1))), parts))
        few, own = b.icmp_signed("<=", rows, most), None
        if self.converts:
            few = b.and_(few, b.icmp_signed("<=", b.mul(rows, whole), integer(_STACK // 4)))
            own = b.alloca(FLOAT, size=b.select(few, b.mul(rows, whole), b.mul(most, block)))
            own.align = 64
        sums = b.alloca(FLOAT, size=b.select(few, integer(1), integer(_STRIP * self.most_rows * LANES)))
        sums.align = 64
        return Room(few, b.select(few, whole, block), own, sums)

    def _up(self, b: Any, columns: Any) -> Any:
        """Round up to a number of columns that are multiplied together."""
        return b.and_(b.add(columns, integer(self.columns - 1)), integer(-self.columns))

    @property
    def _block(self) -> int:
        """Most columns of a block."""
        size = 4 if self.converts else BYTES[self.activation]
        return int(_BLOCK / (size * self.most_rows)) & -self.columns

    def multiply(
        self,
        b: Any,
        functions: tuple[Any, Any],
        room: Room,
        record: Any,
        operands: tuple[Any, Any, Any],
        first: Any,
        end: Any,
    ) -> None:
        """Multiply all rows of x by a range of rows of W, strip by strip.

        Args:
            b: builder.
            functions: the result of `functions`.
            room: the result of `room`.
            record: address of the layer's record.
            operands: addresses of x `(rows, K)` and y `(rows, N)`, without gaps, and the number of rows.
            first: first row of W.
            end: the row of W at which to stop.
        """
        (strip, converted), (x, y, rows), most = functions, operands, integer(self.most_rows)
        layer = Layer.of(self, b, record)
        fitting = b.sdiv(integer(int(_STRIP_BYTES / (STRIP * BYTES[self.weight]))), layer.columns)
        fitting = b.mul(b.select(b.icmp_signed("<", fitting, integer(1)), integer(1), fitting), integer(STRIP))
        every = b.select(room.few, b.sub(end, first), least(b, fitting, integer(_STRIP)))
        every = b.select(b.icmp_signed("<", every, integer(1)), integer(1), every)
        of_x = STORED[self.activation]
        with self.loop(b, first, end, every, []) as (n, _):
            until = least(b, b.add(n, every), end)
            with self.loop(b, integer(0), rows, most, []) as (m, _):
                count = least(b, b.sub(rows, m), most)
                its_y = self.at(b, y, b.mul(m, layer.rows), of_x)
                with self.loop(b, integer(0), layer.columns, room.block, []) as (left, _):
                    right = least(b, b.add(left, room.block), layer.columns)
                    its_x = self.at(b, x, b.add(b.mul(m, layer.columns), left), of_x)
                    stride = layer.columns
                    if converted is not None:
                        columns = b.sub(right, left)
                        b.call(converted, [its_x, room.own, layer.columns, columns, count])
                        its_x, stride = room.own, self.stride(b, columns)
                    b.call(strip, [record, its_x, its_y, room.sums, stride, count, n, until, left, right])

    def bytes_of(self, b: Any, layer: Layer) -> tuple[Any, Any, Any]:
        """Return how many bytes the weights, the bias and the scales of a layer take."""
        numbers = b.mul(layer.rows, layer.columns)
        kinds = self.weight, self.activation, "float32"
        counts = numbers, layer.rows, layer.rows
        weights, bias, scales = (b.mul(n, integer(int(BYTES[k]))) for n, k in zip(counts, kinds, strict=True))
        return weights, bias, scales

    def _kernel(self) -> None:
        """Build the kernel: strips of W, each with all rows of x."""
        functions = self.functions()
        b, task = self.kernel()
        record, x, y = task.address(b, 2), task.operand(b, 3), task.operand(b, 5)
        rows = task.entry(b, 0)
        layer = Layer.of(self, b, record)
        strips = b.sdiv(b.add(layer.rows, integer(self.strip - 1)), integer(self.strip))
        first, end = (b.mul(place, integer(self.strip)) for place in task.share(b, strips))
        end = least(b, end, layer.rows)
        self.multiply(b, functions, self.room(b, layer.columns, rows), record, (x, y, rows), first, end)
        b.ret_void()


class Pairs(Products):
    """bfloat16 weights and activations by two multiply-adds."""

    columns = 2 * LANES

    def __init__(self, weight: str, activation: str, registers: int) -> None:
        super().__init__(weight, activation, registers)
        self.converts, self.of_x = True, FLOAT

    def stride(self, b: Any, columns: Any) -> Any:
        """Round the stride up to whole groups of 32 columns, of which those with odd numbers come before the others."""
        return self._up(b, columns)

    def convert(self, b: Any, x: Any, made: Any, k: Any, count: Any) -> None:
        parts = self.weights(b, x, k, count)
        for at, part in enumerate(parts):
            b.store(part, self.at(b, made, b.add(k, integer(LANES * at)), FLOAT), align=4)

    def weights(self, b: Any, row: Any, k: Any, count: Any) -> Any:
        both = b.bitcast(self.load_pairs(b, self.at(b, row, k, I16), count), INTS)
        odd, even = b.and_(both, splat(I32, -(1 << 16))), b.shl(both, splat(I32, 16))
        return b.bitcast(odd, FLOATS), b.bitcast(even, FLOATS)

    def factors(self, b: Any, x: Any, k: Any, count: Any) -> Any:
        return [self.load(b, self.at(b, x, b.add(k, integer(at)), FLOAT), FLOAT) for at in (0, LANES)]

    def add(self, b: Any, weights: Any, factors: Any, total: Any) -> Any:
        for one, other in zip(weights, factors, strict=True):
            total = self.fma(b, one, other, total)
        return total


class Dots(Products):
    """bfloat16 weights and activations by AVX-512's instruction."""

    columns = 2 * LANES

    def weights(self, b: Any, row: Any, k: Any, count: Any) -> Any:
        return b.bitcast(self.load_pairs(b, self.at(b, row, k, I16), count), BFLOATS)

    def factors(self, b: Any, x: Any, k: Any, count: Any) -> Any:
        return self.weights(b, x, k, count)

    def add(self, b: Any, weights: Any, factors: Any, total: Any) -> Any:
        return self.call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, weights, factors)
