"""Code for products of bfloat16 matrices by AMX, in LLVM IR.

A tile has 16 rows of 64 bytes. TDPBF16PS multiplies a tile of W, 16 of its rows by 32 columns as they lie in memory,
with a tile of x, 32 columns of up to 16 of its rows, and adds to 16 × 16 sums. For each output it adds the products at
even columns of these 32 from 0 on, those at odd ones likewise (multiply-adds in float32), then both sums to the output.
So a row's result depends on K and nothing else: not on how many rows there are, nor on its place among them, nor on
the threads. The bits are others than those of products_code.py.

Up to 16 rows of x take about as long as one, since reading W takes most of the time. The 16 lines of a tile lie far
apart, where the processor does not prefetch by itself: these kernels do, and multiply one row of x as fast as
multiply-adds. (Intel Xeon, two cores, layers of 8,960 outputs and 1,536 columns, 1, 4, 16, 32 and 64 rows: W is read at
20, 23, 23, 19 and 9 GB/s; by multiply-adds at 18, 20, 8, 5 and 2. Without prefetching and with four tiles of W at once
it was 14 GB/s for one row, 17 for 16, 6 for 64.)

x is packed first: the two numbers at columns 2 j and 2 j + 1 of all rows lie next to each other, as the instruction
needs its second factor. Rows of W are divided among threads anywhere: where fewer than 16 are left, a tile begins
earlier, and some outputs are computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..codegen.builder import ADDRESS, FLOAT, FLOATS, I8, I16, I32, I64, INTS, LANES, VOID, integer, least
from .products_code import Layer, Products

__all__ = ["Tiles"]

_TILE = 16
_COLUMNS = 32
"""Rows of a tile, and columns of W in one."""

_GROUPS = 4
"""Groups of 16 rows of x that are multiplied while a tile of W is in the cache."""

_BLOCK_OF_ONE, _BLOCK = 8192, 2048
"""Columns of x that are packed at a time: of one group, and of more."""

_STRIP = 256
"""Rows of W whose sums wait for further columns."""

_CONFIG = 64
"""Bytes of a configuration of tiles."""

_SUMS, _X, _W = (0, 1), (2, 3), 4
"""Numbers of the tiles: sums and rows of x of one or two groups, and a single tile of W. Two of these at once would be
more lines to read than the processor keeps track of."""

_AHEAD = 4
"""Number of tiles between the one that is multiplied and the one that is prefetched."""

_ITEM = 64
"""Rows of W that work is divided by."""


@dataclass(frozen=True)
class _Room:
    """Memory on the stack, and how x is divided.

    Attributes:
        across: rows of x in a tile.
        groups: most groups of rows that are packed.
        block: columns that are packed at a time.
        size: pairs of numbers in a packed group.
        is_single: whether these are all.
        packed, sums, rest, outputs, config: addresses.
    """

    across: Any
    groups: Any
    block: Any
    size: Any
    is_single: Any
    packed: Any
    sums: Any
    rest: Any
    outputs: Any
    config: Any


class Tiles(Products):
    """bfloat16 weights and activations by AMX."""

    columns = _COLUMNS
    strip = _ITEM

    def functions(self) -> tuple[Any, Any]:
        """Build the functions of `multiply`: products of tiles of W, and packing."""
        self._finished = self._finish_tile()
        return {groups: self._sums_of(groups) for groups in (2, 1)}, self._pack()

    # ------------------------------------------------------------------------------------------------------------------
    # instructions

    @staticmethod
    def _number(number: int) -> Any:
        return ir.Constant(I8, number)

    def _load_tile(self, b: Any, number: int, address: Any, stride: Any) -> None:
        self.call(b, "llvm.x86.tileloadd64", VOID, self._number(number), address, stride)

    def _configure(self, b: Any, config: Any, across: Any, rows: Any) -> None:
        """Set the sizes of the tiles: sums are `rows` by `across`, tiles of W `rows` by 32 columns."""
        b.store(ir.Constant(ir.VectorType(I8, _CONFIG), None), config, align=1)
        b.store(ir.Constant(I8, 1), config)
        width = b.trunc(b.mul(across, integer(4)), I16)
        of_rows = b.trunc(rows, I8)
        sizes = dict.fromkeys(_SUMS, (of_rows, width))
        sizes |= dict.fromkeys(_X, (ir.Constant(I8, _TILE), width))
        sizes[_W] = of_rows, ir.Constant(I16, 64)
        for number, (height, its_width) in sizes.items():
            b.store(its_width, self.at(b, config, integer(16 + 2 * number), I8), align=1)
            b.store(height, self.at(b, config, integer(48 + number), I8), align=1)
        self.call(b, "llvm.x86.ldtilecfg", VOID, config)

    # ------------------------------------------------------------------------------------------------------------------
    # parts

    def _pack(self) -> Any:
        """Build the function that packs columns of up to 16 rows of x.

        Rows that are missing are copies of the last one: what is computed of them is not written.
        """
        function = self.function("packed", [ADDRESS, ADDRESS] + [I64] * 4, "noinline")
        x, made, stride, columns, rows, across = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        last = b.sub(rows, integer(1))
        places = [self.at(b, x, b.mul(least(b, integer(m), last), stride), I16) for m in range(_TILE)]
        whole = b.and_(columns, integer(-_COLUMNS))

        def put(some: list[Any], k: Any, count: Any) -> None:
            lines = [b.bitcast(self.load_pairs(b, self.at(b, place, k, I16), count), INTS) for place in some]
            first = b.mul(b.sdiv(k, integer(2)), across)
            # Each line of 16 overlaps those that follow, where there are fewer rows: these are written later.
            for at, line in enumerate(lines if len(lines) == 1 else _transposed(b, lines)):
                b.store(line, self.at(b, made, b.add(first, b.mul(across, integer(at))), I32), align=4)

        with b.if_else(b.icmp_signed("==", across, integer(1))) as (single, several):
            for which, some in ((single, places[:1]), (several, places)):
                with which:
                    with self.loop(b, integer(0), whole, integer(_COLUMNS), []) as (k, _):
                        put(some, k, None)
                    with self.loop(b, whole, columns, integer(_COLUMNS), []) as (k, _):
                        put(some, k, b.sub(columns, k))
        b.ret_void()
        return function

    def _sums_of(self, groups: int) -> Any:
        """Build the function that adds the products of a tile's rows of W with some groups of rows of x.

        Sums of the columns before are in memory, and so are those that result.
        """
        function = self.function(f"tile_{groups}", [ADDRESS] * (2 * groups + 2) + [I64] * 5, "noinline")
        weight, rest, *addresses = function.args[: 2 * groups + 2]
        xs, sums = addresses[:groups], addresses[groups:]
        stride, columns, across, height, is_first = function.args[2 * groups + 2 :]
        b = ir.IRBuilder(function.append_basic_block("entry"))
        row, of_x = b.mul(stride, integer(2)), b.mul(across, integer(4))  # bytes
        numbers = _SUMS[:groups]
        with b.if_else(b.icmp_signed("!=", is_first, integer(0))) as (first, later):
            with first:
                for number in numbers:
                    self.call(b, "llvm.x86.tilezero", VOID, self._number(number))
            with later:
                for number, place in zip(numbers, sums, strict=True):
                    self._load_tile(b, number, place, of_x)

        line, whole = b.mul(across, integer(_TILE)), b.and_(columns, integer(-_COLUMNS))
        # From a row's end on, the lines that are prefetched are those of the tile below.
        onward = integer(2 * _AHEAD * _COLUMNS)
        below = b.sub(b.add(b.mul(row, integer(_TILE)), onward), b.mul(whole, integer(2)))

        def ask_for(place: Any, k: Any) -> None:
            is_in_row = b.icmp_signed("<", b.add(k, integer(_AHEAD * _COLUMNS)), whole)
            ahead = self.at(b, place, b.select(is_in_row, onward, below), I8)
            for r in range(_TILE):
                self.ask_for(b, self.at(b, ahead, b.mul(row, integer(r)), I8), nearest=True)

        def add(place: Any, its_stride: Any, k: Any) -> None:
            before = b.mul(b.sdiv(k, integer(_COLUMNS)), line)
            self._load_tile(b, _W, place, its_stride)
            for number, of_group, x in zip(numbers, _X, xs, strict=False):
                self._load_tile(b, of_group, self.at(b, x, before, I32), of_x)
                self.call(b, "llvm.x86.tdpbf16ps", VOID, *map(self._number, (number, _W, of_group)))

        with self.loop(b, integer(0), whole, integer(_COLUMNS), []) as (k, _):
            place = self.at(b, weight, k, I16)
            ask_for(place, k)
            add(place, row, k)
        with self.loop(b, whole, columns, integer(_COLUMNS), []) as (k, _):
            # What follows a row of W is no zero.
            left = b.sub(columns, k)
            with self.loop(b, integer(0), height, integer(1), []) as (r, _):
                start = self.at(b, weight, b.add(b.mul(r, stride), k), I16)
                copy = self.at(b, rest, b.mul(r, integer(_COLUMNS)), I16)
                b.store(self.load_pairs(b, start, left), copy, align=1)
            add(rest, integer(2 * _COLUMNS), k)
        for number, place in zip(numbers, sums, strict=True):
            self.call(b, "llvm.x86.tilestored64", VOID, self._number(number), place, of_x)
        b.ret_void()
        return function

    def _finish_tile(self) -> Any:
        """Build the function that writes the outputs of a tile: its sums plus the bias."""
        function = self.function("finish", [ADDRESS] * 4 + [I64] * 3, "noinline")
        record, sums, outputs, y, place, rows, across = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        layer = Layer.of(self, b, record)
        lines = [b.load(self.at(b, sums, b.mul(across, integer(r)), FLOAT), typ=FLOATS, align=4) for r in range(_TILE)]
        for at, line in enumerate(_transposed(b, lines)):
            b.store(line, self.at(b, outputs, integer(at * _TILE), FLOAT), align=64)
        count = least(b, b.sub(layer.rows, place), integer(_TILE))
        with self.loop(b, integer(0), rows, integer(1), []) as (m, _):
            value = b.load(self.at(b, outputs, b.mul(m, integer(_TILE)), FLOAT), typ=FLOATS, align=64)
            total = self.biased(b, layer, value, lambda: self.activations(b, layer.bias, place, count))
            its_y = self.at(b, y, b.add(b.mul(m, layer.rows), place), I16)
            self.store_many(b, total, its_y, count)
        b.ret_void()
        return function

    # ------------------------------------------------------------------------------------------------------------------
    # all of it

    def room(self, b: Any, columns: Any, rows: Any) -> Any:
        across = least(b, rows, integer(_TILE))
        wanted = b.sdiv(b.add(rows, integer(_TILE - 1)), integer(_TILE))
        groups = least(b, wanted, integer(_GROUPS))
        most = b.select(b.icmp_signed("<=", groups, integer(1)), integer(_BLOCK_OF_ONE), integer(_BLOCK))
        block = least(b, self._up(b, columns), most)
        size = b.mul(across, b.sdiv(block, integer(2)))
        is_single = b.icmp_signed("<=", columns, block)
        places = b.select(is_single, integer(_TILE), integer(_STRIP))
        sizes = {
            # Whole vectors are stored and loaded.
            "packed": (I32, b.add(b.mul(groups, size), integer(LANES))),
            "sums": (FLOAT, b.add(b.mul(b.mul(groups, across), places), integer(LANES))),
            "rest": (I16, integer(_TILE * _COLUMNS)),
            "outputs": (FLOAT, integer(_TILE * _TILE)),
            "config": (I8, integer(_CONFIG)),
        }
        found = {}
        for name, (kind, many) in sizes.items():
            place = b.alloca(kind, size=many)
            place.align = 64
            found[name] = b.inttoptr(b.ptrtoint(place, I64), ADDRESS)
        return _Room(across, groups, block, size, is_single, **found)

    def multiply(
        self,
        b: Any,
        functions: tuple[Any, Any],
        room: Any,
        record: Any,
        operands: tuple[Any, Any, Any],
        first: Any,
        end: Any,
    ) -> None:
        (tiles, packed), (x, y, rows) = functions, operands
        layer = Layer.of(self, b, record)
        height = least(b, layer.rows, integer(_TILE))
        self._configure(b, room.config, room.across, height)
        most = b.mul(room.groups, room.across)

        def pack(its_x: Any, groups: Any, count: Any, left: Any, right: Any) -> None:
            with self.loop(b, integer(0), groups, integer(1), []) as (group, _):
                before = b.mul(group, room.across)
                start = self.at(b, its_x, b.add(b.mul(before, layer.columns), left), I16)
                made = self.at(b, room.packed, b.mul(group, room.size), I32)
                its_rows = least(b, b.sub(count, before), room.across)
                b.call(packed, [start, made, layer.columns, b.sub(right, left), its_rows, room.across])

        every = b.select(room.is_single, b.sub(end, first), integer(_STRIP))
        every = b.select(b.icmp_signed("<", every, integer(1)), integer(1), every)
        with self.loop(b, integer(0), rows, most, []) as (m, _):
            count = least(b, b.sub(rows, m), most)
            groups = b.sdiv(b.add(count, b.sub(room.across, integer(1))), room.across)
            its_x = self.at(b, x, b.mul(m, layer.columns), I16)
            its_y = self.at(b, y, b.mul(m, layer.rows), I16)
            with b.if_then(room.is_single):
                pack(its_x, groups, count, integer(0), layer.columns)
            with self.loop(b, first, end, every, []) as (n, _):
                until = least(b, b.add(n, every), end)
                with self.loop(b, integer(0), layer.columns, room.block, []) as (left, _):
                    right = least(b, b.add(left, room.block), layer.columns)
                    with b.if_then(b.not_(room.is_single)):
                        pack(its_x, groups, count, left, right)
                    rest_of_call = (its_y, count, groups), (n, until), (left, right), height
                    self._range(b, tiles, room, record, layer, rest_of_call)
        self.call(b, "llvm.x86.tilerelease", VOID)

    def _range(
        self,
        b: Any,
        tiles: dict[int, Any],
        room: _Room,
        record: Any,
        layer: Layer,
        work: tuple[tuple[Any, Any, Any], tuple[Any, Any], tuple[Any, Any], Any],
    ) -> None:
        """Multiply a range of rows of W, a tile at a time, with all groups.

        Outputs are written where their columns are complete.
        """
        (y, count, groups), (n, until), (left, right), height = work
        last = b.sub(until, integer(_TILE))
        last = b.select(b.icmp_signed("<", last, integer(0)), integer(0), last)
        is_first = b.zext(b.icmp_signed("==", left, integer(0)), I64)
        is_last = b.icmp_signed("==", right, layer.columns)
        size_of_sums = b.mul(room.across, integer(_TILE))
        with self.loop(b, n, until, integer(_TILE), []) as (at, _):
            start = least(b, at, last)
            weight = self.at(b, layer.weight, b.add(b.mul(start, layer.columns), left), I16)
            before = b.mul(b.mul(room.across, room.groups), b.select(room.is_single, integer(0), b.sub(at, n)))

            def multiply(group: Any, together: int) -> None:
                which = [b.add(group, integer(other)) for other in range(together)]
                xs = [self.at(b, room.packed, b.mul(one, room.size), I32) for one in which]
                sums = [self.at(b, room.sums, b.add(before, b.mul(one, size_of_sums)), FLOAT) for one in which]
                sizes = [layer.columns, b.sub(right, left), room.across, height, is_first]
                b.call(tiles[together], [weight, room.rest, *xs, *sums, *sizes])
                with b.if_then(is_last):
                    for one, its_sums in zip(which, sums, strict=True):
                        first_row = b.mul(one, room.across)
                        its_y = self.at(b, y, b.mul(first_row, layer.rows), I16)
                        its_rows = least(b, b.sub(count, first_row), room.across)
                        arguments = [record, its_sums, room.outputs, its_y, start, its_rows, room.across]
                        b.call(self._finished, arguments)

            first = integer(0)
            for together in tiles:
                whole = b.sub(groups, b.srem(b.sub(groups, first), integer(together)))
                with self.loop(b, first, whole, integer(together), []) as (group, _):
                    multiply(group, together)
                first = whole


def _transposed(b: Any, lines: list[Any]) -> list[Any]:
    """Transpose 16 vectors: four times, each vector is interleaved with the one eight further on."""
    low = ir.Constant(INTS, [lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
    high = ir.Constant(INTS, [LANES // 2 + lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
    for _ in range(4):
        pairs = zip(lines[: LANES // 2], lines[LANES // 2 :], strict=True)
        lines = [b.shuffle_vector(one, other, part) for one, other in pairs for part in (low, high)]
    return lines
