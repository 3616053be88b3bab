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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

__all__ = ["LAYER_FIELDS", "MOST_ROWS", "linear_module"]

LAYER_FIELDS = ("weight", "bias", "scales", "columns", "rows")
"""Of the record that describes a layer, 64 bits each: three addresses, K, and N."""

MOST_ROWS = 8
"""Rows of x that one reading of the weights serves; of more, each eight read them again, from the cache."""

_LANES = 16
_TILE = {1: 8, 2: 8, 3: 5, 4: 5, 5: 4, 6: 4, 7: 3, 8: 3}
_TILE_OF_DIGITS = {1: 8, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2, 7: 1, 8: 1}
"""Rows of W that are read side by side, by rows of x: as many sums as there are registers."""

_FEW_SUMS = 20
"""Of which a loop may hold twice the code without putting any into memory."""

_STRIP = 24
"""Rows of W that stay in the cache while more than `MOST_ROWS` rows of x take their turns."""

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ADDRESS = ir.PointerType()
_VOID = ir.VoidType()

_STORED: dict[str, Any] = {"float32": _FLOAT, "bfloat16": _I16, "float16": _HALF, "int8": _I8, "int4": _I16}
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, _LANES)


_FLOATS, _INTS = _vector(_FLOAT), _vector(_I32)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _splat(kind: Any, value: float) -> Any:
    return ir.Constant(_vector(kind), [value] * _LANES)


@dataclass(frozen=True)
class _Layer:
    """What a kernel reads of a layer's record."""

    weight: Any
    bias: Any
    scales: Any
    columns: Any
    rows: Any


class _Kernels:
    """The functions of one kind of weights and activations."""

    def __init__(self, weight: str, activation: str, group: int) -> None:
        self.weight, self.activation = weight, activation
        self._group = _int(group)
        self.module = ir.Module(name=f"linear_{weight}_{activation}")
        self._declared: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------------------------
    # pieces

    def _call(self, b: Any, name: str, result: Any, *args: Any) -> Any:
        if name not in self._declared:
            kind = ir.FunctionType(result, [arg.type for arg in args])
            self._declared[name] = ir.Function(self.module, kind, name)
        return b.call(self._declared[name], args)

    def _fma(self, b: Any, one: Any, other: Any, total: Any) -> Any:
        return self._call(b, f"llvm.fma.v{_LANES}f32", _FLOATS, one, other, total)

    @staticmethod
    def _at(b: Any, address: Any, offset: Any, kind: Any) -> Any:
        """The address of element `offset`."""
        return b.gep(address, [offset], source_etype=kind)

    def _load(self, b: Any, address: Any, kind: Any, count: Any = None) -> Any:
        """16 elements as they are stored, and with `count` only so many of them and zeros."""
        if count is None:
            return b.load(address, typ=_vector(kind), align=1)
        lanes = ir.Constant(_INTS, list(range(_LANES)))
        mask = b.icmp_signed("<", lanes, self._spread(b, b.trunc(count, _I32)))
        zeros = ir.Constant(_vector(kind), None)
        name = {_FLOAT: "f32", _HALF: "f16", _I8: "i8", _I16: "i16", _I32: "i32"}[kind]
        return self._call(
            b, f"llvm.masked.load.v{_LANES}{name}.p0", _vector(kind), address, ir.Constant(_I32, 1), mask, zeros
        )

    def _spread(self, b: Any, value: Any) -> Any:
        """One number in all lanes."""
        single = b.insert_element(ir.Constant(_vector(value.type), ir.Undefined), value, ir.Constant(_I32, 0))
        return b.shuffle_vector(single, single, ir.Constant(_INTS, None))

    @staticmethod
    def _floats(b: Any, values: Any, stored: str) -> Any:
        """What was loaded as float32."""
        if stored == "bfloat16":
            return b.bitcast(b.shl(b.zext(values, _INTS), _splat(_I32, 16)), _FLOATS)
        if stored == "float16":
            return b.fpext(values, _FLOATS)
        if stored == "int8":
            return b.sitofp(b.sext(values, _INTS), _FLOATS)
        return values

    def _sum(self, b: Any, values: Any) -> Any:
        """The sum of the lanes: of the halves, of their halves, and so on."""
        width = _LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))) for at in (0, width)]
            values = b.fadd(*(b.shuffle_vector(values, values, half) for half in halves))
        return b.extract_element(values, ir.Constant(_I32, 0))

    def _store(self, b: Any, value: Any, address: Any) -> None:
        """A float32 number, rounded to what activations are stored as: to the nearest, of two to the even one."""
        if self.activation == "bfloat16":
            bits = b.bitcast(value, _I32)
            even = b.and_(b.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
            rounded = b.add(b.add(bits, ir.Constant(_I32, 0x7FFF)), even)
            quiet = b.or_(bits, ir.Constant(_I32, 0x400000))
            bits = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
            b.store(b.trunc(b.lshr(bits, ir.Constant(_I32, 16)), _I16), address)
        else:
            b.store(b.fptrunc(value, _HALF) if self.activation == "float16" else value, address)

    def _one(self, b: Any, address: Any) -> Any:
        """One number of those that activations are, as float32."""
        value = b.load(address, typ=_STORED[self.activation])
        if self.activation == "bfloat16":
            return b.bitcast(b.shl(b.zext(value, _I32), ir.Constant(_I32, 16)), _FLOAT)
        return b.fpext(value, _FLOAT) if self.activation == "float16" else value

    @contextmanager
    def _loop(self, b: Any, first: Any, end: Any, step: Any, carried: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """`for i in range(first, end, step)`: gives i and what is carried, in which the new values are to be put.

        Afterwards the list holds what came out.
        """
        function = b.function
        before, head = b.block, function.append_basic_block("head")
        body, after = function.append_basic_block("body"), function.append_basic_block("after")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(_I64)
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

    # ------------------------------------------------------------------------------------------------------------------
    # sums

    def _products(self, b: Any, rows: list[Any], x: list[Any], k: Any, sums: list[Any], ahead: Any, count: Any) -> None:
        """Add the products of 16 columns; with `count` of only so many."""
        kind = _STORED[self.weight]
        values = []
        for row in rows:
            values.append(self._floats(b, self._load(b, self._at(b, row, k, kind), kind, count), self.weight))
            if ahead is not None:
                self._ask_for(b, self._at(b, row, b.add(k, ahead), kind))
        for m, activations in enumerate(x):
            of_x = _STORED[self.activation]
            loaded = self._load(b, self._at(b, activations, k, of_x), of_x, count)
            factors = self._floats(b, loaded, self.activation)
            for r, value in enumerate(values):
                at = m * len(rows) + r
                sums[at] = self._fma(b, value, factors, sums[at])

    def _quads(
        self, b: Any, layer: _Layer, rows: list[Any], scales: list[Any], x: list[Any], k: Any, sums: list[Any]
    ) -> None:
        """Add the products of 64 columns in 4 bits: digit j of lane l is that of column k + 16 j + l."""
        of_x = _STORED[self.activation]
        factors = [
            [
                self._floats(
                    b, self._load(b, self._at(b, row, b.add(k, _int(_LANES * j)), of_x), of_x), self.activation
                )
                for j in range(4)
            ]
            for row in x
        ]
        for r, row in enumerate(rows):
            place = self._at(b, row, b.lshr(k, _int(2)), _I16)
            digits = b.zext(self._load(b, place, _I16), _INTS)
            self._ask_for(b, self._at(b, place, b.lshr(b.mul(layer.columns, _int(len(rows))), _int(2)), _I16))
            values = [self._digit(b, digits, j) for j in range(4)]
            for half in (0, 2):
                group = b.sdiv(b.add(k, _int(_LANES * half)), self._group)
                scale = self._spread(b, b.load(self._at(b, scales[r], group, _FLOAT), typ=_FLOAT))
                for m in range(len(x)):
                    part = b.fmul(values[half], factors[m][half])
                    part = self._fma(b, values[half + 1], factors[m][half + 1], part)
                    at = m * len(rows) + r
                    sums[at] = self._fma(b, part, scale, sums[at])

    @staticmethod
    def _digit(b: Any, digits: Any, j: int) -> Any:
        """Digit j of each lane as the float32 16 + digit: these are the upper four bits of its fraction."""
        moved = b.shl(digits, _splat(_I32, 19 - 4 * j))
        return b.bitcast(b.or_(b.and_(moved, _splat(_I32, 0x780000)), _splat(_I32, 0x41800000)), _FLOATS)

    def _offsets(self, b: Any, layer: _Layer, scales: list[Any], of_groups: list[Any], sums: list[Any]) -> None:
        """Add the offsets' part: each group's offset by the sum of x in it."""
        groups = b.sdiv(layer.columns, self._group)
        with self._loop(b, _int(0), groups, _int(_LANES), sums) as (g, carried):
            for r, row in enumerate(scales):
                both = self._load(b, self._at(b, row, g, _I32), _I32, b.sub(groups, g))
                offsets = b.bitcast(b.shl(both, _splat(_I32, 16)), _FLOATS)
                offsets = self._fma(b, b.bitcast(both, _FLOATS), _splat(_FLOAT, -16.0), offsets)
                for m, sums_of_x in enumerate(of_groups):
                    at = m * len(scales) + r
                    x = self._load(b, self._at(b, sums_of_x, g, _FLOAT), _FLOAT, b.sub(groups, g))
                    carried[at] = self._fma(b, offsets, x, carried[at])

    def _sum_groups(self, b: Any, layer: _Layer, x: Any, rows: Any, result: Any) -> None:
        """The sums of x over each group of columns, `(rows, groups)`."""
        of_x = _STORED[self.activation]
        groups = b.sdiv(b.mul(layer.columns, rows), self._group)
        with self._loop(b, _int(0), groups, _int(1), []) as (g, _):
            sums = [_splat(_FLOAT, 0.0)]
            with self._loop(b, _int(0), self._group, _int(_LANES), sums) as (k, carried):
                place = self._at(b, x, b.add(b.mul(g, self._group), k), of_x)
                carried[0] = b.fadd(carried[0], self._floats(b, self._load(b, place, of_x), self.activation))
            b.store(self._sum(b, sums[0]), self._at(b, result, g, _FLOAT))

    def _ask_for(self, b: Any, address: Any) -> None:
        """Let a line of memory come into the second-level cache."""
        hints = (ir.Constant(_I32, hint) for hint in (0, 2, 1))  # to be read; not into the nearest cache; data
        self._call(b, "llvm.prefetch.p0", _VOID, address, *hints)

    def _tile(self, name: str, rows: int, tile: int) -> Any:
        """`rows` rows of x with rows of W from the first up to the last, `tile` at a time."""
        function = self._function(name, [_ADDRESS] * 4 + [_I64] * 2, "noinline")
        record, x, y, of_groups, first, end = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        layer = self._layer(b, record)
        of_x = _STORED[self.activation]
        x = [self._at(b, x, b.mul(layer.columns, _int(m)), of_x) for m in range(rows)]
        y = [self._at(b, y, b.mul(layer.rows, _int(m)), of_x) for m in range(rows)]
        groups = b.sdiv(layer.columns, self._group)
        of_groups = [self._at(b, of_groups, b.mul(groups, _int(m)), _FLOAT) for m in range(rows)]
        with self._loop(b, first, end, _int(tile), []) as (n, _):
            places = [b.add(n, _int(r)) for r in range(tile)]
            sums = [_splat(_FLOAT, 0.0)] * (rows * tile)
            if self.weight == "int4":
                self._sum_of_digits(b, layer, places, x, of_groups, sums)
            else:
                self._sum_of_products(b, layer, places, x, sums)
            for r, place in enumerate(places):
                for m in range(rows):
                    self._finish(b, layer, sums[m * tile + r], place, self._at(b, y[m], place, of_x))
        b.ret_void()
        return function

    def _sum_of_products(self, b: Any, layer: _Layer, places: list[Any], x: list[Any], sums: list[Any]) -> None:
        """All products of rows of W, at `places`, with rows of x."""
        rows = [self._at(b, layer.weight, b.mul(place, layer.columns), _STORED[self.weight]) for place in places]
        per_line = int(64 / (_BYTES[self.weight] * _LANES))  # loads
        unrolled = max(2, per_line) if len(sums) <= _FEW_SUMS else 1
        below = b.mul(layer.columns, _int(len(places)))
        whole = b.and_(layer.columns, _int(-_LANES * unrolled))
        sixteens = b.and_(layer.columns, _int(-_LANES))
        with self._loop(b, _int(0), whole, _int(_LANES * unrolled), sums) as (k, carried):
            for at in range(unrolled):
                ahead = below if at % min(per_line, unrolled) == 0 else None
                self._products(b, rows, x, b.add(k, _int(at * _LANES)), carried, ahead, None)
        with self._loop(b, whole, sixteens, _int(_LANES), sums) as (k, carried):
            self._products(b, rows, x, k, carried, None, None)
        with self._loop(b, sixteens, layer.columns, _int(_LANES), sums) as (k, carried):
            self._products(b, rows, x, k, carried, None, b.sub(layer.columns, k))

    def _sum_of_digits(
        self, b: Any, layer: _Layer, places: list[Any], x: list[Any], of_groups: list[Any], sums: list[Any]
    ) -> None:
        """The same of int4 weights."""
        groups = b.sdiv(layer.columns, self._group)
        rows = [self._at(b, layer.weight, b.lshr(b.mul(place, layer.columns), _int(2)), _I16) for place in places]
        scales = [self._at(b, layer.scales, b.mul(place, groups), _FLOAT) for place in places]
        with self._loop(b, _int(0), layer.columns, _int(4 * _LANES), sums) as (k, carried):
            self._quads(b, layer, rows, scales, x, k, carried)
        self._offsets(b, layer, scales, of_groups, sums)

    def _finish(self, b: Any, layer: _Layer, sums: Any, place: Any, y: Any) -> None:
        """Write one output: the sum of its lanes, scaled where W is, and the bias."""
        value = self._sum(b, sums)
        if self.weight == "int8":
            value = b.fmul(value, b.load(self._at(b, layer.scales, place, _FLOAT), typ=_FLOAT))
        plain = b.block
        with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(layer.bias, _I64), _int(0))):
            biased = b.fadd(value, self._one(b, self._at(b, layer.bias, place, _STORED[self.activation])))
            with_bias = b.block
        total = b.phi(_FLOAT)
        total.add_incoming(value, plain)
        total.add_incoming(biased, with_bias)
        self._store(b, total, y)

    def _function(self, name: str, args: list[Any], *attributes: str) -> Any:
        function = ir.Function(self.module, ir.FunctionType(_VOID, args), name)
        if name != "run":
            function.linkage = "internal"
        for attribute in ("nounwind", *attributes):
            function.attributes.add(attribute)
        return function

    def _layer(self, b: Any, record: Any) -> _Layer:
        fields = {}
        for at, name in enumerate(LAYER_FIELDS):
            kind = _ADDRESS if at < 3 else _I64
            fields[name] = b.load(self._at(b, record, _int(at), _I64), typ=kind)
        return _Layer(**fields)

    # ------------------------------------------------------------------------------------------------------------------
    # all of it

    def build(self) -> str:
        """The module's text: `run(layer, x, y, rows, threads)`."""
        tiles: dict[int, tuple[Any, Any, int]] = {}
        for rows in range(1, MOST_ROWS + 1):
            tile = (_TILE_OF_DIGITS if self.weight == "int4" else _TILE)[rows]
            tiles[rows] = (self._tile(f"rows_{rows}", rows, tile), self._tile(f"rows_{rows}_one", rows, 1), tile)
        strip = self._strip(tiles)
        self._run(self._part(strip))
        return str(self.module)

    def _strip(self, tiles: dict[int, tuple[Any, Any, int]]) -> Any:
        """Up to `MOST_ROWS` rows of x with rows of W from the first up to the last."""
        function = self._function("strip", [_ADDRESS] * 4 + [_I64] * 3)
        record, x, y, of_groups, rows, first, end = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        done = function.append_basic_block("done")
        choice = b.switch(rows, done)
        for count, (many, one, tile) in tiles.items():
            block = function.append_basic_block(f"of_{count}")
            choice.add_case(_int(count), block)
            b.position_at_end(block)
            middle = b.sub(end, b.srem(b.sub(end, first), _int(tile)))
            b.call(many, [record, x, y, of_groups, first, middle])
            b.call(one, [record, x, y, of_groups, middle, end])
            b.branch(done)
        b.position_at_end(done)
        b.ret_void()
        return function

    def _part(self, strip: Any) -> Any:
        """What each thread of a team does: `part(task)`."""
        function = self._function("part", [_ADDRESS])
        b = ir.IRBuilder(function.append_basic_block("entry"))
        task = function.args[0]
        record, x, y, rows = (
            b.load(self._at(b, task, _int(at), _I64), typ=_I64 if at == 3 else _ADDRESS) for at in range(4)
        )
        which = b.sext(self._call(b, "omp_get_thread_num", _I32), _I64)
        of = b.sext(self._call(b, "omp_get_num_threads", _I32), _I64)
        layer = self._layer(b, record)
        strips = b.sdiv(b.add(layer.rows, _int(_STRIP - 1)), _int(_STRIP))
        first, end = (b.mul(b.sdiv(b.mul(strips, place), of), _int(_STRIP)) for place in (which, b.add(which, _int(1))))
        end = b.select(b.icmp_signed("<", end, layer.rows), end, layer.rows)
        few = b.icmp_signed("<=", rows, _int(MOST_ROWS))
        every = b.select(few, b.sub(end, first), _int(_STRIP))
        every = b.select(b.icmp_signed("<", every, _int(1)), _int(1), every)
        of_x = _STORED[self.activation]
        of_groups: Any = ir.Constant(_ADDRESS, None)
        if self.weight == "int4":
            groups = b.sdiv(b.mul(layer.columns, rows), self._group)
            of_groups = b.alloca(_FLOAT, size=groups)
            self._sum_groups(b, layer, x, rows, of_groups)
        groups = b.sdiv(layer.columns, self._group)
        with self._loop(b, first, end, every, []) as (n, _):
            until = b.add(n, every)
            until = b.select(b.icmp_signed("<", until, end), until, end)
            with self._loop(b, _int(0), rows, _int(MOST_ROWS), []) as (m, _):
                left = b.sub(rows, m)
                left = b.select(b.icmp_signed("<", left, _int(MOST_ROWS)), left, _int(MOST_ROWS))
                its_x = self._at(b, x, b.mul(m, layer.columns), of_x)
                its_y = self._at(b, y, b.mul(m, layer.rows), of_x)
                its_groups = self._at(b, of_groups, b.mul(m, groups), _FLOAT)
                b.call(strip, [record, its_x, its_y, its_groups, left, n, until])
        b.ret_void()
        return function

    def _run(self, part: Any) -> None:
        function = self._function("run", [_ADDRESS] * 3 + [_I64, _I32])
        record, x, y, rows, threads = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        task = b.alloca(_I64, size=4)
        for at, value in enumerate((record, x, y, rows)):
            number = value if at == 3 else b.ptrtoint(value, _I64)
            b.store(number, self._at(b, task, _int(at), _I64))
        self._call(b, "GOMP_parallel", _VOID, part, task, threads, ir.Constant(_I32, 0))
        b.ret_void()


def linear_module(weight: str, activation: str, group: int = 32) -> str:
    """The text of a module for layers whose weights and activations are stored so.

    It has one function, `run(layer, x, y, rows, threads)`: the address of a layer's record (`LAYER_FIELDS`), those of x
    `(rows, K)` and y `(rows, N)`, which lie without gaps, and the number of threads.

    Args:
        weight: `"float32"`, `"bfloat16"`, `"float16"`, `"int8"` or `"int4"`.
        activation: one of the first three.
        group: columns that share a scale and an offset under int4; a multiple of 32.
    """
    return _Kernels(weight, activation, group).build()
