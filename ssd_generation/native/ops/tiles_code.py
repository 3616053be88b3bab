"""Code for products of bfloat16 matrices by AMX, in LLVM IR.

A tile has 16 rows of 64 bytes. TDPBF16PS multiplies a tile of W, 16 of its rows by 32 columns as they lie in memory,
with a tile of x, 32 columns of up to 16 of its rows, and adds to 16 × 16 sums. For each output it adds the products at
even columns of these 32 from 0 on, those at odd ones likewise (multiply-adds in float32), then both sums to the output.
So a row's result depends on K and nothing else: not on how many rows there are, nor on its place among them, nor on
the threads. The bits are others than those of products_code.py.

Up to 16 rows of x take about as long as one, since reading W takes most of the time. (Intel Xeon, two cores, 12 layers
of 8,960 outputs and 1,536 columns, for 1, 8, 16 and 64 rows: 13.5, 13.3, 13.8 and 22 ms; by multiply-adds 14.6, 16.9,
31 and 87; by torch 21, 21, 21 and 31.) In a captured pass over one token, whose work is cut into small items, tiles are
some hundredths to a tenth slower than multiply-adds.

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

_SUMS, _X, _W = (0, 1, 2, 3), (4, 5), (6, 7)
"""Numbers of the tiles: sums, x, and W, of which two are in turn."""

_FOUR, _TWO = 4, 2
"""Tiles of W that are multiplied at once: with one group of rows of x, and with two."""


@dataclass(frozen=True)
class _Room:
    """Memory on the stack, and how x is divided.

    Attributes:
        across: rows of x in a tile.
        groups: most groups of rows that are packed.
        block: columns that are packed at a time.
        size: pairs of numbers in a packed group.
        is_single: whether these are all.
        is_one: whether all rows of x are one group.
        packed, sums, rest, outputs, config: addresses.
    """

    across: Any
    groups: Any
    block: Any
    size: Any
    is_single: Any
    is_one: Any
    packed: Any
    sums: Any
    rest: Any
    outputs: Any
    config: Any


class Tiles(Products):
    """bfloat16 weights and activations by AMX."""

    columns = _COLUMNS
    strip = _FOUR * _TILE

    def functions(self) -> tuple[Any, Any]:
        """Build the functions of `multiply`: products of tiles of W, and packing."""
        self._finished = self._finish_tile()
        counts = [(_FOUR, 1), (_TWO, 1), (1, 1), (_TWO, 2), (1, 2)]
        return {count: self._tiles(*count) for count in counts}, self._pack()

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
        sizes |= {number: (of_rows, ir.Constant(I16, 64)) for number in _W}
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

    def _tiles(self, tiles: int, groups: int) -> Any:
        """Build the function that adds the products of some tiles' rows of W with one or two groups of rows of x.

        Sums of the columns before are in memory, and so are those that result: of each group, tile after tile.
        """
        addresses = tiles + 2 * groups + 1
        function = self.function(f"tiles_{tiles}_{groups}", [ADDRESS] * addresses + [I64] * 5, "noinline")
        rows, xs = function.args[:tiles], function.args[tiles : tiles + groups]
        of_groups, rest = function.args[tiles + groups : addresses - 1], function.args[addresses - 1]
        stride, columns, across, height, is_first = function.args[addresses:]
        b = ir.IRBuilder(function.append_basic_block("entry"))
        row, of_x = b.mul(stride, integer(2)), b.mul(across, integer(4))  # bytes
        numbers = {(at, group): _SUMS[at * groups + group] for at in range(tiles) for group in range(groups)}
        memory = {
            (at, group): self.at(b, of_groups[group], b.mul(across, integer(_TILE * at)), FLOAT)
            for at, group in numbers
        }
        with b.if_else(b.icmp_signed("!=", is_first, integer(0))) as (first, later):
            with first:
                for number in numbers.values():
                    self.call(b, "llvm.x86.tilezero", VOID, self._number(number))
            with later:
                for which, number in numbers.items():
                    self._load_tile(b, number, memory[which], of_x)

        line = b.mul(across, integer(_TILE))

        def add(places: list[Any], its_stride: Any, k: Any) -> None:
            before = b.mul(b.sdiv(k, integer(_COLUMNS)), line)
            for number, x in zip(_X, xs, strict=False):
                self._load_tile(b, number, self.at(b, x, before, I32), of_x)
            for at, place in enumerate(places):
                of_w = _W[at % len(_W)]
                self._load_tile(b, of_w, place, its_stride)
                for group in range(groups):
                    operands = numbers[at, group], of_w, _X[group]
                    self.call(b, "llvm.x86.tdpbf16ps", VOID, *map(self._number, operands))

        whole = b.and_(columns, integer(-_COLUMNS))
        with self.loop(b, integer(0), whole, integer(_COLUMNS), []) as (k, _):
            add([self.at(b, place, k, I16) for place in rows], row, k)
        with self.loop(b, whole, columns, integer(_COLUMNS), []) as (k, _):
            # What follows a row of W is no zero.
            left, copies = b.sub(columns, k), []
            for at, place in enumerate(rows):
                copy = self.at(b, rest, integer(at * _TILE * _COLUMNS), I16)
                copies.append(copy)
                with self.loop(b, integer(0), height, integer(1), []) as (r, _):
                    start = self.at(b, place, b.add(b.mul(r, stride), k), I16)
                    its_copy = self.at(b, copy, b.mul(r, integer(_COLUMNS)), I16)
                    b.store(self.load_pairs(b, start, left), its_copy, align=1)
            add(copies, integer(2 * _COLUMNS), k)
        for which, number in numbers.items():
            self.call(b, "llvm.x86.tilestored64", VOID, self._number(number), memory[which], of_x)
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
        is_one = b.icmp_signed("<=", groups, integer(1))
        block = least(b, self._up(b, columns), b.select(is_one, integer(_BLOCK_OF_ONE), integer(_BLOCK)))
        size = b.mul(across, b.sdiv(block, integer(2)))
        is_single = b.icmp_signed("<=", columns, block)
        places = b.select(is_single, integer(_FOUR * _TILE), integer(_STRIP))
        sizes = {
            # Whole vectors are stored and loaded.
            "packed": (I32, b.add(b.mul(groups, size), integer(LANES))),
            "sums": (FLOAT, b.add(b.mul(b.mul(groups, across), places), integer(LANES))),
            "rest": (I16, integer(_FOUR * _TILE * _COLUMNS)),
            "outputs": (FLOAT, integer(_TILE * _TILE)),
            "config": (I8, integer(_CONFIG)),
        }
        found = {}
        for name, (kind, many) in sizes.items():
            place = b.alloca(kind, size=many)
            place.align = 64
            found[name] = b.inttoptr(b.ptrtoint(place, I64), ADDRESS)
        return _Room(across, groups, block, size, is_single, is_one, **found)

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
                    with b.if_else(room.is_one) as (one, more):
                        with one:
                            self._range(b, tiles, room, record, layer, rest_of_call, _FOUR, 1)
                        with more:
                            self._range(b, tiles, room, record, layer, rest_of_call, _TWO, 2)
        self.call(b, "llvm.x86.tilerelease", VOID)

    def _range(
        self,
        b: Any,
        tiles: dict[tuple[int, int], Any],
        room: _Room,
        record: Any,
        layer: Layer,
        work: tuple[tuple[Any, Any, Any], tuple[Any, Any], tuple[Any, Any], Any],
        most: int,
        together: int,
    ) -> None:
        """Multiply a range of rows of W, `most` tiles at a time, with all groups, `together` at a time.

        Outputs are written where their columns are complete.
        """
        (y, count, groups), (n, until), (left, right), height = work
        last = b.sub(until, integer(_TILE))
        last = b.select(b.icmp_signed("<", last, integer(0)), integer(0), last)
        is_first = b.zext(b.icmp_signed("==", left, integer(0)), I64)
        is_last = b.icmp_signed("==", right, layer.columns)
        size_of_sums = b.mul(room.across, integer(most * _TILE))
        with self.loop(b, n, until, integer(most * _TILE), []) as (at, _):
            starts = [least(b, b.add(at, integer(_TILE * tile)), last) for tile in range(most)]
            weights = [self.at(b, layer.weight, b.add(b.mul(start, layer.columns), left), I16) for start in starts]
            wanted = b.sdiv(b.add(b.sub(until, at), integer(_TILE - 1)), integer(_TILE))
            before = b.mul(b.mul(room.across, room.groups), b.select(room.is_single, integer(0), b.sub(at, n)))

            def multiply(group: Any, some: int, at_once: int) -> None:
                which = [b.add(group, integer(other)) for other in range(at_once)]
                xs = [self.at(b, room.packed, b.mul(one, room.size), I32) for one in which]
                sums = [self.at(b, room.sums, b.add(before, b.mul(one, size_of_sums)), FLOAT) for one in which]
                sizes = [layer.columns, b.sub(right, left), room.across, height, is_first]
                b.call(tiles[some, at_once], [*weights[:some], *xs, *sums, room.rest, *sizes])
                with b.if_then(is_last):
                    for one, its_sums in zip(which, sums, strict=True):
                        first_row = b.mul(one, room.across)
                        its_y = self.at(b, y, b.mul(first_row, layer.rows), I16)
                        its_rows = least(b, b.sub(count, first_row), room.across)
                        for tile, start in enumerate(starts[:some]):
                            place = self.at(b, its_sums, b.mul(room.across, integer(_TILE * tile)), FLOAT)
                            arguments = [record, place, room.outputs, its_y, start, its_rows, room.across]
                            b.call(self._finished, arguments)

            def some_tiles(group: Any, at_once: int) -> None:
                sizes = [size for size in (_FOUR, _TWO, 1) if size <= most]

                def choose(left_over: list[int]) -> None:
                    if len(left_over) == 1:
                        multiply(group, left_over[0], at_once)
                        return
                    with b.if_else(b.icmp_signed(">", wanted, integer(left_over[1]))) as (many, few):
                        with many:
                            multiply(group, left_over[0], at_once)
                        with few:
                            choose(left_over[1:])

                choose(sizes)

            pairs = b.and_(groups, integer(-together))
            with self.loop(b, integer(0), pairs, integer(together), []) as (group, _):
                some_tiles(group, together)
            if together > 1:
                with self.loop(b, pairs, groups, integer(1), []) as (group, _):
                    some_tiles(group, 1)


def _transposed(b: Any, lines: list[Any]) -> list[Any]:
    """Transpose 16 vectors: four times, each vector is interleaved with the one eight further on."""
    low = ir.Constant(INTS, [lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
    high = ir.Constant(INTS, [LANES // 2 + lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
    for _ in range(4):
        pairs = zip(lines[: LANES // 2], lines[LANES // 2 :], strict=True)
        lines = [b.shuffle_vector(one, other, part) for one, other in pairs for part in (low, high)]
    return lines
