"""Code for products of a few rows with a matrix of weights, in LLVM's language.

y = x Wᵀ + b for x of 1 … rows, as few tokens as a decoding step has. Reading the weights is most of the time, so a
kernel reads `_TILE` rows of W side by side and asks for those below while it computes. Every output is added up in one
fixed order, which depends on nothing but K: lane l of 16 adds the products at k = l, l + 16, l + 32 … by fused
multiply-adds in float32, and the lanes are added pairwise. So a row's result does not depend on how many rows there
are, nor on where it stands among them, nor on the threads; vectors of 16 lanes stand for one, two or four registers, so
that it does not depend on the processor either.

int8: w = q · s, with one scale per row of W. int4: w = q · s + z, with a scale and an offset per group of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .builder import (
    ADDRESS,
    BYTES,
    FLOAT,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    STORED,
    VOID,
    Module,
    integer,
    least,
    splat,
)

__all__ = ["LAYER_FIELDS", "MOST_ROWS", "linear_module"]

LAYER_FIELDS = ("weight", "bias", "scales", "columns", "rows")
"""Of the record that describes a layer, 64 bits each: three addresses, K, and N."""

MOST_ROWS = 8
"""Rows of x that one reading of the weights serves; of more, each eight read them again, from the cache."""

_TILE = {1: 8, 2: 8, 3: 5, 4: 5, 5: 4, 6: 4, 7: 3, 8: 3}
_TILE_OF_DIGITS = {1: 8, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2, 7: 1, 8: 1}
"""Rows of W that are read side by side, by rows of x: as many sums as there are registers."""

_FEW_SUMS = 20
"""Of which a loop may hold twice the code without putting any into memory."""

_STRIP = 24
"""Rows of W that stay in the cache while more than `MOST_ROWS` rows of x take their turns."""


@dataclass(frozen=True)
class _Layer:
    """What a kernel reads of a layer's record."""

    weight: Any
    bias: Any
    scales: Any
    columns: Any
    rows: Any


class _Kernels(Module):
    """The functions of one kind of weights and activations."""

    def __init__(self, weight: str, activation: str, group: int) -> None:
        super().__init__(f"linear_{weight}_{activation}", activation)
        self.weight = weight
        self._group = integer(group)

    # ------------------------------------------------------------------------------------------------------------------
    # sums

    def _products(self, b: Any, rows: list[Any], x: list[Any], k: Any, sums: list[Any], ahead: Any, count: Any) -> None:
        """Add the products of 16 columns; with `count` of only so many."""
        kind = STORED[self.weight]
        values = []
        for row in rows:
            values.append(self.floats(b, self.load(b, self.at(b, row, k, kind), kind, count), self.weight))
            if ahead is not None:
                self._ask_for(b, self.at(b, row, b.add(k, ahead), kind))
        for m, activations in enumerate(x):
            of_x = STORED[self.activation]
            loaded = self.load(b, self.at(b, activations, k, of_x), of_x, count)
            factors = self.floats(b, loaded, self.activation)
            for r, value in enumerate(values):
                at = m * len(rows) + r
                sums[at] = self.fma(b, value, factors, sums[at])

    def _quads(
        self, b: Any, layer: _Layer, rows: list[Any], scales: list[Any], x: list[Any], k: Any, sums: list[Any]
    ) -> None:
        """Add the products of 64 columns in 4 bits: digit j of lane l is that of column k + 16 j + l."""
        of_x = STORED[self.activation]
        factors = [
            [
                self.floats(b, self.load(b, self.at(b, row, b.add(k, integer(LANES * j)), of_x), of_x), self.activation)
                for j in range(4)
            ]
            for row in x
        ]
        for r, row in enumerate(rows):
            place = self.at(b, row, b.lshr(k, integer(2)), I16)
            digits = b.zext(self.load(b, place, I16), INTS)
            self._ask_for(b, self.at(b, place, b.lshr(b.mul(layer.columns, integer(len(rows))), integer(2)), I16))
            values = [self._digit(b, digits, j) for j in range(4)]
            for half in (0, 2):
                group = b.sdiv(b.add(k, integer(LANES * half)), self._group)
                scale = self.spread(b, b.load(self.at(b, scales[r], group, FLOAT), typ=FLOAT))
                for m in range(len(x)):
                    part = b.fmul(values[half], factors[m][half])
                    part = self.fma(b, values[half + 1], factors[m][half + 1], part)
                    at = m * len(rows) + r
                    sums[at] = self.fma(b, part, scale, sums[at])

    @staticmethod
    def _digit(b: Any, digits: Any, j: int) -> Any:
        """Digit j of each lane as the float32 16 + digit: these are the upper four bits of its fraction."""
        moved = b.shl(digits, splat(I32, 19 - 4 * j))
        return b.bitcast(b.or_(b.and_(moved, splat(I32, 0x780000)), splat(I32, 0x41800000)), FLOATS)

    def _offsets(self, b: Any, layer: _Layer, scales: list[Any], of_groups: list[Any], sums: list[Any]) -> None:
        """Add the offsets' part: each group's offset by the sum of x in it."""
        groups = b.sdiv(layer.columns, self._group)
        with self.loop(b, integer(0), groups, integer(LANES), sums) as (g, carried):
            for r, row in enumerate(scales):
                both = self.load(b, self.at(b, row, g, I32), I32, b.sub(groups, g))
                offsets = b.bitcast(b.shl(both, splat(I32, 16)), FLOATS)
                offsets = self.fma(b, b.bitcast(both, FLOATS), splat(FLOAT, -16.0), offsets)
                for m, sums_of_x in enumerate(of_groups):
                    at = m * len(scales) + r
                    x = self.load(b, self.at(b, sums_of_x, g, FLOAT), FLOAT, b.sub(groups, g))
                    carried[at] = self.fma(b, offsets, x, carried[at])

    def _sum_groups(self, b: Any, layer: _Layer, x: Any, rows: Any, result: Any) -> None:
        """The sums of x over each group of columns, `(rows, groups)`."""
        of_x = STORED[self.activation]
        groups = b.sdiv(b.mul(layer.columns, rows), self._group)
        with self.loop(b, integer(0), groups, integer(1), []) as (g, _):
            sums = [splat(FLOAT, 0.0)]
            with self.loop(b, integer(0), self._group, integer(LANES), sums) as (k, carried):
                place = self.at(b, x, b.add(b.mul(g, self._group), k), of_x)
                carried[0] = b.fadd(carried[0], self.floats(b, self.load(b, place, of_x), self.activation))
            b.store(self.sum(b, sums[0]), self.at(b, result, g, FLOAT))

    def _ask_for(self, b: Any, address: Any) -> None:
        """Let a line of memory come into the second-level cache."""
        hints = (ir.Constant(I32, hint) for hint in (0, 2, 1))  # to be read; not into the nearest cache; data
        self.call(b, "llvm.prefetch.p0", VOID, address, *hints)

    def _tile(self, name: str, rows: int, tile: int) -> Any:
        """`rows` rows of x with rows of W from the first up to the last, `tile` at a time."""
        function = self.function(name, [ADDRESS] * 4 + [I64] * 2, "noinline")
        record, x, y, of_groups, first, end = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        layer = self._layer(b, record)
        of_x = STORED[self.activation]
        x = [self.at(b, x, b.mul(layer.columns, integer(m)), of_x) for m in range(rows)]
        y = [self.at(b, y, b.mul(layer.rows, integer(m)), of_x) for m in range(rows)]
        groups = b.sdiv(layer.columns, self._group)
        of_groups = [self.at(b, of_groups, b.mul(groups, integer(m)), FLOAT) for m in range(rows)]
        with self.loop(b, first, end, integer(tile), []) as (n, _):
            places = [b.add(n, integer(r)) for r in range(tile)]
            sums = [splat(FLOAT, 0.0)] * (rows * tile)
            if self.weight == "int4":
                self._sum_of_digits(b, layer, places, x, of_groups, sums)
            else:
                self._sum_of_products(b, layer, places, x, sums)
            for r, place in enumerate(places):
                for m in range(rows):
                    self._finish(b, layer, sums[m * tile + r], place, self.at(b, y[m], place, of_x))
        b.ret_void()
        return function

    def _sum_of_products(self, b: Any, layer: _Layer, places: list[Any], x: list[Any], sums: list[Any]) -> None:
        """All products of rows of W, at `places`, with rows of x."""
        rows = [self.at(b, layer.weight, b.mul(place, layer.columns), STORED[self.weight]) for place in places]
        per_line = int(64 / (BYTES[self.weight] * LANES))  # loads
        unrolled = max(2, per_line) if len(sums) <= _FEW_SUMS else 1
        below = b.mul(layer.columns, integer(len(places)))
        whole = b.and_(layer.columns, integer(-LANES * unrolled))
        sixteens = b.and_(layer.columns, integer(-LANES))
        with self.loop(b, integer(0), whole, integer(LANES * unrolled), sums) as (k, carried):
            for at in range(unrolled):
                ahead = below if at % min(per_line, unrolled) == 0 else None
                self._products(b, rows, x, b.add(k, integer(at * LANES)), carried, ahead, None)
        with self.loop(b, whole, sixteens, integer(LANES), sums) as (k, carried):
            self._products(b, rows, x, k, carried, None, None)
        with self.loop(b, sixteens, layer.columns, integer(LANES), sums) as (k, carried):
            self._products(b, rows, x, k, carried, None, b.sub(layer.columns, k))

    def _sum_of_digits(
        self, b: Any, layer: _Layer, places: list[Any], x: list[Any], of_groups: list[Any], sums: list[Any]
    ) -> None:
        """The same of int4 weights."""
        groups = b.sdiv(layer.columns, self._group)
        rows = [self.at(b, layer.weight, b.lshr(b.mul(place, layer.columns), integer(2)), I16) for place in places]
        scales = [self.at(b, layer.scales, b.mul(place, groups), FLOAT) for place in places]
        with self.loop(b, integer(0), layer.columns, integer(4 * LANES), sums) as (k, carried):
            self._quads(b, layer, rows, scales, x, k, carried)
        self._offsets(b, layer, scales, of_groups, sums)

    def _finish(self, b: Any, layer: _Layer, sums: Any, place: Any, y: Any) -> None:
        """Write one output: the sum of its lanes, scaled where W is, and the bias."""
        value = self.sum(b, sums)
        if self.weight == "int8":
            value = b.fmul(value, b.load(self.at(b, layer.scales, place, FLOAT), typ=FLOAT))
        plain = b.block
        with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(layer.bias, I64), integer(0))):
            biased = b.fadd(value, self.one(b, self.at(b, layer.bias, place, STORED[self.activation])))
            with_bias = b.block
        total = b.phi(FLOAT)
        total.add_incoming(value, plain)
        total.add_incoming(biased, with_bias)
        self.store(b, total, y)

    def _layer(self, b: Any, record: Any) -> _Layer:
        fields = {}
        for at, name in enumerate(LAYER_FIELDS):
            kind = ADDRESS if at < 3 else I64
            fields[name] = b.load(self.at(b, record, integer(at), I64), typ=kind)
        return _Layer(**fields)

    # ------------------------------------------------------------------------------------------------------------------
    # all of it

    def build(self) -> str:
        """The module's text."""
        tiles: dict[int, tuple[Any, Any, int]] = {}
        for rows in range(1, MOST_ROWS + 1):
            tile = (_TILE_OF_DIGITS if self.weight == "int4" else _TILE)[rows]
            tiles[rows] = (self._tile(f"rows_{rows}", rows, tile), self._tile(f"rows_{rows}_one", rows, 1), tile)
        self._kernel(self._strip(tiles))
        return str(self.module)

    def _strip(self, tiles: dict[int, tuple[Any, Any, int]]) -> Any:
        """Up to `MOST_ROWS` rows of x with rows of W from the first up to the last."""
        function = self.function("strip", [ADDRESS] * 4 + [I64] * 3)
        record, x, y, of_groups, rows, first, end = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        done = function.append_basic_block("done")
        choice = b.switch(rows, done)
        for count, (many, one, tile) in tiles.items():
            block = function.append_basic_block(f"of_{count}")
            choice.add_case(integer(count), block)
            b.position_at_end(block)
            middle = b.sub(end, b.srem(b.sub(end, first), integer(tile)))
            b.call(many, [record, x, y, of_groups, first, middle])
            b.call(one, [record, x, y, of_groups, middle, end])
            b.branch(done)
        b.position_at_end(done)
        b.ret_void()
        return function

    def _kernel(self, strip: Any) -> None:
        """What each thread does: its strips of W, each with all rows of x."""
        b, task = self.kernel()
        record, x, y, most = task.address(b, 2), task.operand(b, 3), task.operand(b, 5), task.field(b, 7)
        rows = task.entry(b, 0)
        layer = self._layer(b, record)
        strips = b.sdiv(b.add(layer.rows, integer(_STRIP - 1)), integer(_STRIP))
        first, end = (b.mul(place, integer(_STRIP)) for place in task.share(b, strips, most))
        end = least(b, end, layer.rows)
        few = b.icmp_signed("<=", rows, integer(MOST_ROWS))
        every = b.select(few, b.sub(end, first), integer(_STRIP))
        every = b.select(b.icmp_signed("<", every, integer(1)), integer(1), every)
        of_x = STORED[self.activation]
        of_groups: Any = ir.Constant(ADDRESS, None)
        if self.weight == "int4":
            groups = b.sdiv(b.mul(layer.columns, rows), self._group)
            of_groups = b.alloca(FLOAT, size=groups)
            self._sum_groups(b, layer, x, rows, of_groups)
        groups = b.sdiv(layer.columns, self._group)
        with self.loop(b, first, end, every, []) as (n, _):
            until = least(b, b.add(n, every), end)
            with self.loop(b, integer(0), rows, integer(MOST_ROWS), []) as (m, _):
                left = least(b, b.sub(rows, m), integer(MOST_ROWS))
                its_x = self.at(b, x, b.mul(m, layer.columns), of_x)
                its_y = self.at(b, y, b.mul(m, layer.rows), of_x)
                its_groups = self.at(b, of_groups, b.mul(m, groups), FLOAT)
                b.call(strip, [record, its_x, its_y, its_groups, left, n, until])
        b.ret_void()


def linear_module(weight: str, activation: str, group: int = 32) -> str:
    """The text of a module for layers whose weights and activations are stored so.

    Its kernel's record (`builder.Task`) has the address of a layer's (`LAYER_FIELDS`) at 2, the operands x `(rows, K)`
    at 3 and y `(rows, N)` at 5, which lie without gaps, and at 7 how many threads it is worth.

    Args:
        weight: `"float32"`, `"bfloat16"`, `"float16"`, `"int8"` or `"int4"`.
        activation: one of the first three.
        group: columns that share a scale and an offset under int4; a multiple of 32.
    """
    return _Kernels(weight, activation, group).build()
