"""Code for layers of experts, in LLVM IR: only the experts that were chosen are read, each once for all its tokens.

A pass chooses k of E experts for each of its n tokens: S = n k pairs. `sort` makes a plan of it, by which `gather`
brings the tokens of an expert together. `grouped` multiplies them with that expert's matrix, and `combine` adds up what
the experts of each token give. The products are those of `products_code`: every output is summed in an order that
depends on nothing but the number of columns, so a token's numbers do not depend on which other tokens chose its
experts.

A pair whose expert is none of 0 … E − 1 adds nothing; some models route tokens to no expert so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from ..codegen.builder import ADDRESS, BYTES, FLOAT, FLOATS, I64, LANES, STORED, Module, Task, integer, least, splat
from .int4_code import Digits, int4_products
from .int8_code import int8_products
from .linear_code import products_of
from .products_code import LAYER_FIELDS, Layer, Products

__all__ = ["experts_module", "plan_numbers"]

_GROUPS, _TOTAL, _STARTS = 0, 1, 2
"""Places in a plan: the number of chosen experts, the pairs that have one, and where the starts begin."""

_FIELDS = 3
"""Numbers of a chosen expert in a plan: itself, its first pair in the order of experts, and how many there are."""

_BLOCK = 4 * LANES
"""Columns in a work item of elementwise kernels."""

_WIDE, _DEEP, _ROWS = 6144, 8, 8
"""Most outputs and inputs of a block of a matrix stored by input, which the nearer caches hold; rows of x at a time.

The more outputs, the more of a row is read at once: whole rows where there is room on the stack. (Intel Xeon, two
threads, gpt-oss-20b's layer in bfloat16, one token: at most 1,024 outputs at once 12.0 ms, 3,072 8.3, 6,144 7.5.)"""

_UNIT = 256
"""Outputs that work is divided by."""


def plan_numbers(experts: int, pairs: int) -> int:
    """Return how many 64-bit numbers a plan has.

    They are: the number of chosen experts, the number of pairs that have an expert, for each expert its first place in
    the order of experts, for each chosen expert three numbers (`_FIELDS`), the pairs in the order of experts, and the
    place of each pair in that order, −1 for none.

    Args:
        experts: E.
        pairs: S.
    """
    return _STARTS + (1 + _FIELDS) * experts + 2 * pairs


class _Plan:
    """A plan, as kernels read and write it."""

    def __init__(self, address: Any, experts: Any, pairs: Any) -> None:
        self._address, self._experts, self._pairs = address, experts, pairs

    def _at(self, b: Any, place: Any) -> Any:
        return Module.at(b, self._address, place, I64)

    def groups(self, b: Any) -> Any:
        return self._at(b, integer(_GROUPS))

    def total(self, b: Any) -> Any:
        return self._at(b, integer(_TOTAL))

    def start(self, b: Any, expert: Any) -> Any:
        return self._at(b, b.add(integer(_STARTS), expert))

    def group(self, b: Any, group: Any, field: int) -> Any:
        place = b.add(b.mul(group, integer(_FIELDS)), b.add(self._experts, integer(_STARTS + field)))
        return self._at(b, place)

    def pair(self, b: Any, place: Any) -> Any:
        before = b.add(b.mul(self._experts, integer(1 + _FIELDS)), integer(_STARTS))
        return self._at(b, b.add(before, place))

    def place(self, b: Any, pair: Any) -> Any:
        return self.pair(b, b.add(self._pairs, pair))


def _load(b: Any, address: Any) -> Any:
    return b.load(address, typ=I64)


class _Experts(Module):
    """Kernels around the products; the types of activations and of the weights that combine them are given."""

    def __init__(self, what: str, activation: str, weights: str) -> None:
        super().__init__(f"experts_{what}_{activation}", activation)
        self._kind, self._weights = STORED[activation], weights

    def sort(self) -> None:
        """Make the plan; the record: the chosen experts `(n, k)` (64-bit), the plan, k, E."""
        b, task = self.kernel()
        chosen, slots, experts = task.operand(b, 2), task.field(b, 6), task.field(b, 7)
        pairs = b.mul(task.entry(b, 0), slots)
        plan = _Plan(task.operand(b, 4), experts, pairs)
        with self.loop(b, integer(0), experts, integer(1), []) as (expert, _):
            b.store(integer(0), plan.start(b, expert))
        with self.loop(b, integer(0), pairs, integer(1), []) as (pair, _):
            expert, is_one = self._expert(b, chosen, pair, experts)
            with b.if_then(is_one):
                count = plan.start(b, expert)
                b.store(b.add(_load(b, count), integer(1)), count)
        carried = [integer(0), integer(0)]
        with self.loop(b, integer(0), experts, integer(1), carried) as (expert, values):
            groups, before = values
            count = _load(b, plan.start(b, expert))
            for field, number in enumerate((expert, before, count)):
                b.store(number, plan.group(b, groups, field))  # overwritten by the next where there is none
            b.store(before, plan.start(b, expert))
            is_chosen = b.zext(b.icmp_signed(">", count, integer(0)), I64)
            values[:] = [b.add(groups, is_chosen), b.add(before, count)]
        b.store(carried[0], plan.groups(b))
        b.store(carried[1], plan.total(b))
        with self.loop(b, integer(0), pairs, integer(1), []) as (pair, _):
            b.store(integer(-1), plan.place(b, pair))
            expert, is_one = self._expert(b, chosen, pair, experts)
            with b.if_then(is_one):
                start = plan.start(b, expert)
                place = _load(b, start)
                b.store(b.add(place, integer(1)), start)
                b.store(pair, plan.pair(b, place))
                b.store(place, plan.place(b, pair))
        b.ret_void()

    def _expert(self, b: Any, chosen: Any, pair: Any, experts: Any) -> tuple[Any, Any]:
        """Load the expert of a pair, and whether there is such an expert."""
        expert = _load(b, self.at(b, chosen, pair, I64))
        return expert, b.icmp_unsigned("<", expert, experts)

    def gather(self) -> None:
        """Copy the token of each pair, in the order of experts; the record: x, y `(S, K)`, the plan, k, E, K."""
        b, task = self.kernel()
        x, y = task.operand(b, 2), task.operand(b, 4)
        slots, experts, columns = (task.field(b, at) for at in (8, 9, 10))
        plan = _Plan(task.operand(b, 6), experts, b.mul(task.entry(b, 0), slots))
        with self._blocks(b, task, _load(b, plan.total(b)), columns) as (place, k, left):
            token = b.sdiv(_load(b, plan.pair(b, place)), slots)
            values = self.activations(b, self.at(b, x, b.mul(token, columns), self._kind), k, left)
            self.store_many(b, values, self.at(b, y, b.add(b.mul(place, columns), k), self._kind), left)
        b.ret_void()

    def gate(self) -> None:
        """Compute silu(gate) · up, with silu rounded first.

        The record: gate and up next to each other `(S, 2 I)`, y, the plan, k, E, I.
        """
        b, task = self.kernel()
        x, y = task.operand(b, 2), task.operand(b, 4)
        slots, experts, columns = (task.field(b, at) for at in (8, 9, 10))
        plan = _Plan(task.operand(b, 6), experts, b.mul(task.entry(b, 0), slots))
        with self._blocks(b, task, _load(b, plan.total(b)), columns) as (place, k, left):
            gate = self.at(b, x, b.mul(b.mul(place, columns), integer(2)), self._kind)
            value = self.activations(b, gate, k, left)
            up = self.activations(b, gate, b.add(columns, k), left)
            self.store_many(
                b, b.fmul(self.silu(b, value), up), self.at(b, y, b.add(b.mul(place, columns), k), self._kind), left
            )
        b.ret_void()

    def combine(self) -> None:
        """Add up what the experts of each token give, times their weights, in the order in which they were chosen.

        Products are rounded where weights have the activations' type, as torch rounds them; sums are float32. The
        record: x `(S, K)`, weights `(n, k)`, y `(n, K)`, the plan, k, E, K.
        """
        b, task = self.kernel()
        x, weights, y = (task.operand(b, at) for at in (2, 4, 6))
        slots, experts, columns = (task.field(b, at) for at in (10, 11, 12))
        tokens = task.entry(b, 0)
        plan = _Plan(task.operand(b, 8), experts, b.mul(tokens, slots))
        of_weight = STORED[self._weights]
        with self._blocks(b, task, tokens, columns) as (token, k, left):
            sums = [splat(FLOAT, 0.0)]
            with self.loop(b, integer(0), slots, integer(1), sums) as (slot, carried):
                pair = b.add(b.mul(token, slots), slot)
                place = _load(b, plan.place(b, pair))
                before, start = carried[0], b.block
                with b.if_then(b.icmp_signed(">=", place, integer(0))):
                    weight = b.load(self.at(b, weights, pair, of_weight), typ=of_weight)
                    factor = self.spread(b, self._wide(b, weight))
                    its_x = self.at(b, x, b.mul(place, columns), self._kind)
                    product = b.fmul(self.activations(b, its_x, k, left), factor)
                    if self._weights == self.activation:
                        product = self.rounded(b, product)
                    added, end = b.fadd(before, product), b.block
                total = b.phi(FLOATS)
                total.add_incoming(before, start)
                total.add_incoming(added, end)
                carried[0] = total
            self.store_many(b, sums[0], self.at(b, y, b.add(b.mul(token, columns), k), self._kind), left)
        b.ret_void()

    def _wide(self, b: Any, weight: Any) -> Any:
        """Convert a weight of a pair to float32."""
        if self._weights == "bfloat16":
            return b.bitcast(b.shl(b.zext(weight, ir.IntType(32)), ir.Constant(ir.IntType(32), 16)), FLOAT)
        return b.fpext(weight, FLOAT) if self._weights == "float16" else weight

    @contextmanager
    def _blocks(self, b: Any, task: Task, rows: Any, columns: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Build a loop over this part's share of a tensor; yield the row, the column, and columns from there on."""
        each = b.sdiv(b.add(columns, integer(_BLOCK - 1)), integer(_BLOCK))
        first, end = task.share(b, b.mul(rows, each))
        with self.loop(b, first, end, integer(1), []) as (item, _):
            row = b.sdiv(item, each)
            start = b.mul(b.sub(item, b.mul(row, each)), integer(_BLOCK))
            stop = least(b, b.add(start, integer(_BLOCK)), columns)
            with self.loop(b, start, stop, integer(LANES), []) as (k, _):
                yield row, k, b.sub(stop, k)


def _grouped(made: Products | Digits) -> str:
    """Multiply the tokens of each chosen expert with its matrix `(N, K)`, by the functions for such matrices.

    The record: the address of the layer of expert 0 (`LAYER_FIELDS`), whose matrices, biases and scales are followed by
    those of the others; x `(S, K)`, y `(S, N)`, the plan, k, E.
    """
    functions: Any = made.functions()
    b, task = made.kernel()
    work = _Work(made, b, task)
    room = made.room(b, work.layer.columns, work.pairs)
    with work.groups() as (own, x, y, count, first, end):
        made.multiply(b, functions, room, own, (x, y, count), first, end)
    b.ret_void()
    return str(made.module)


class _Work:
    """This part's share of the products of all chosen experts: a range of outputs of some of them.

    Args:
        module: the module; it knows how many outputs a unit of work has, and the bytes of an expert.
        b: builder at the entry of its kernel.
        task: the kernel's task; its record as in `_grouped`.
    """

    def __init__(self, module: Products | Digits | _Columns, b: Any, task: Task) -> None:
        self._module, self._b, self._task = module, b, task
        self.pairs = b.mul(task.entry(b, 0), task.field(b, 9))
        self._plan = _Plan(task.operand(b, 7), task.field(b, 10), self.pairs)
        self.layer = Layer.of(module, b, task.address(b, 2))
        self._sizes = module.bytes_of(b, self.layer)
        self._own = b.alloca(I64, size=integer(len(LAYER_FIELDS)))
        for at, number in ((3, self.layer.columns), (4, self.layer.rows)):
            b.store(number, module.at(b, self._own, integer(at), I64))

    @contextmanager
    def groups(self) -> Iterator[tuple[Any, ...]]:
        """Build a loop over chosen experts.

        Yield the address of the expert's layer, those of its first rows of x and of y, how many rows there are, its
        first output and the one at which to stop.
        """
        module, b, task, layer = self._module, self._b, self._task, self.layer
        x, y = task.operand(b, 3), task.operand(b, 5)
        strip = integer(module.strip)
        strips = b.sdiv(b.add(layer.rows, integer(module.strip - 1)), strip)
        first, end = task.share(b, b.mul(_load(b, self._plan.groups(b)), strips))
        # Where there is nothing to do, the range is empty: the quotients are the same, or the first is greater.
        after = b.sdiv(b.add(end, b.sub(strips, integer(1))), strips)
        with module.loop(
            b, b.sdiv(first, strips), b.select(b.icmp_signed("<", first, end), after, integer(0)), integer(1), []
        ) as (group, _):
            expert, place, count = (_load(b, self._plan.group(b, group, field)) for field in range(_FIELDS))
            for at, (base, size) in enumerate(zip((layer.weight, layer.bias, layer.scales), self._sizes, strict=True)):
                address = b.ptrtoint(base, I64)
                moved = b.add(address, b.mul(expert, size))
                is_none = b.icmp_unsigned("==", address, integer(0))
                b.store(b.select(is_none, address, moved), module.at(b, self._own, integer(at), I64))
            before = b.mul(group, strips)
            start, stop = (b.mul(b.sub(limit, before), strip) for limit in (first, end))
            start = b.select(b.icmp_signed("<", start, integer(0)), integer(0), start)
            kind = STORED[module.activation]
            its_x = module.at(b, x, b.mul(place, layer.columns), kind)
            its_y = module.at(b, y, b.mul(place, layer.rows), kind)
            yield self._own, its_x, its_y, count, start, least(b, stop, layer.rows)


class _Columns(Module):
    """Products with matrices that are stored by input, `(K, N)`: each row of the matrix adds to all outputs.

    y = x W + b. Output n adds the products at k = 0, 1, 2 … by fused multiply-adds in float32, whatever else is
    computed. A block of W, some inputs of some outputs, stays in the cache while rows of x are multiplied with it; the
    sums of a block of outputs stay on the stack.
    """

    strip = _UNIT

    def __init__(self, weight: str, activation: str, registers: int) -> None:
        super().__init__(f"columns_{weight}_{activation}", activation)
        self._weight, self._registers = weight, registers

    def bytes_of(self, b: Any, layer: Layer) -> tuple[Any, Any, Any]:
        """Return how many bytes the weights, the bias and the scales of an expert take."""
        each = integer(int(BYTES[self._weight]))
        return b.mul(b.mul(layer.rows, layer.columns), each), b.mul(layer.rows, each), integer(0)

    def build(self) -> str:
        """Return the module's text; the record as in `_grouped`."""
        blocks = {rows: self._block(rows, max(1, self._registers // 2 // rows)) for rows in (4, 2, 1)}
        b, task = self.kernel()
        work = _Work(self, b, task)
        sums = b.alloca(FLOAT, size=integer(_ROWS * _WIDE))
        sums.align = 64
        sums = b.inttoptr(b.ptrtoint(sums, I64), ADDRESS)  # of vectors, too
        kind = STORED[self.activation]
        with work.groups() as (own, x, y, count, first, end):  # noqa: SIM117
            with self.loop(b, first, end, integer(_WIDE), []) as (n, _):
                width = least(b, b.sub(end, n), integer(_WIDE))
                layer = Layer.of(self, b, own)
                with self.loop(b, integer(0), count, integer(_ROWS), []) as (m, _):
                    rows = least(b, b.sub(count, m), integer(_ROWS))
                    its_x = self.at(b, x, b.mul(m, layer.columns), kind)
                    its_y = self.at(b, y, b.add(b.mul(m, layer.rows), n), kind)
                    self._sum(b, blocks, layer, its_x, rows, sums, n, width)
                    self._finish(b, layer, sums, rows, its_y, n, width)
        b.ret_void()
        return str(self.module)

    def _sum(
        self, b: Any, blocks: dict[int, Any], layer: Layer, x: Any, rows: Any, sums: Any, n: Any, width: Any
    ) -> None:
        """Compute the sums of some rows at some outputs."""
        with self.loop(b, integer(0), b.mul(rows, integer(_WIDE)), integer(LANES), []) as (at, _):
            b.store(splat(FLOAT, 0.0), self.at(b, sums, at, FLOAT), align=64)
        kind, of_w = STORED[self.activation], STORED[self._weight]
        with self.loop(b, integer(0), layer.columns, integer(_DEEP), []) as (k, _):
            depth = least(b, b.sub(layer.columns, k), integer(_DEEP))
            w = self.at(b, self.at(b, layer.weight, b.mul(k, layer.rows), of_w), n, of_w)
            done = integer(0)
            for many, block in blocks.items():
                end = b.sub(rows, b.srem(b.sub(rows, done), integer(many)))
                with self.loop(b, done, end, integer(many), []) as (m, _):
                    its_x = self.at(b, self.at(b, x, b.mul(m, layer.columns), kind), k, kind)
                    its_sums = self.at(b, sums, b.mul(m, integer(_WIDE)), FLOAT)
                    b.call(block, [w, its_x, its_sums, layer.rows, layer.columns, depth, width])
                done = end

    def _block(self, rows: int, tile: int) -> Any:
        """Build the function that adds the products of a block of W with `rows` rows of x, `tile` vectors at a time."""
        function = self.function(f"block_{rows}", [ADDRESS] * 3 + [I64] * 4, "noinline")
        w, x, sums, stride, x_stride, depth, width = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        step = tile * LANES
        many = b.and_(width, integer(-step))  # a power of two
        whole = b.and_(width, integer(-LANES))
        arguments = w, x, sums, stride, x_stride, depth
        for start, end, vectors in ((integer(0), many, tile), (many, whole, 1), (whole, width, 0)):
            with self.loop(b, start, end, integer(max(1, vectors) * LANES), []) as (n, _):
                self._vectors(b, arguments, rows, max(1, vectors), n, None if vectors else b.sub(width, n))
        b.ret_void()
        return function

    def _vectors(self, b: Any, arguments: tuple[Any, ...], rows: int, vectors: int, n: Any, count: Any) -> None:
        """Add the products at some vectors of outputs from n on; with `count`, at so many outputs of one vector."""
        w, x, sums, stride, x_stride, depth = arguments
        of_w, of_x = STORED[self._weight], STORED[self.activation]
        places = [
            self.at(b, sums, b.add(integer(m * _WIDE + v * LANES), n), FLOAT)
            for m in range(rows)
            for v in range(vectors)
        ]
        carried = [b.load(place, typ=FLOATS, align=4) for place in places]
        with self.loop(b, integer(0), depth, integer(1), carried) as (k, values):
            row = self.at(b, self.at(b, w, b.mul(k, stride), of_w), n, of_w)
            below = self.at(b, self.at(b, w, b.mul(b.add(k, integer(_DEEP)), stride), of_w), n, of_w)
            weights = []
            for v in range(vectors):
                address = self.at(b, row, integer(v * LANES), of_w)
                weights.append(self.floats(b, self.load(b, address, of_w, count), self._weight))
                if v % max(1, int(64 / (LANES * BYTES[self._weight]))) == 0:
                    self.ask_for(b, self.at(b, below, integer(v * LANES), of_w))
            for m in range(rows):
                factor = self.spread(b, self.one(b, self.at(b, x, b.add(b.mul(x_stride, integer(m)), k), of_x)))
                for v in range(vectors):
                    at = m * vectors + v
                    values[at] = self.fma(b, weights[v], factor, values[at])
        for place, value in zip(places, carried, strict=True):
            b.store(value, place, align=4)

    def _finish(self, b: Any, layer: Layer, sums: Any, rows: Any, y: Any, n: Any, width: Any) -> None:
        """Write the outputs: the sums, plus the bias, which torch adds to the rounded sum."""
        kind, of_bias = STORED[self.activation], STORED[self._weight]
        has_bias = b.icmp_unsigned("!=", b.ptrtoint(layer.bias, I64), integer(0))
        with self.loop(b, integer(0), rows, integer(1), []) as (m, _):  # noqa: SIM117
            with self.loop(b, integer(0), width, integer(LANES), []) as (at, _):
                left = b.sub(width, at)
                value = b.load(self.at(b, sums, b.add(b.mul(m, integer(_WIDE)), at), FLOAT), typ=FLOATS, align=4)
                plain = b.block
                with b.if_then(has_bias):
                    its_bias = self.at(b, layer.bias, b.add(n, at), of_bias)
                    bias = self.floats(b, self.load(b, its_bias, of_bias, left), self._weight)
                    biased, with_bias = b.fadd(self.rounded(b, value), bias), b.block
                total = b.phi(FLOATS)
                total.add_incoming(value, plain)
                total.add_incoming(biased, with_bias)
                self.store_many(b, total, self.at(b, y, b.add(b.mul(m, layer.rows), at), kind), left)


_FUNCTIONS: dict[str, Callable[..., Products | Digits]] = {
    "grouped": products_of,
    "int4": int4_products,
    "int8": int8_products,
}


def experts_module(what: str, *parts: Any) -> str:
    """Return the text of a module whose kernel computes a part of a layer of experts.

    Args:
        what: `"sort"`, `"gather"`, `"gate"`, `"combine"`, `"grouped"`, `"int4"`, `"int8"` or `"columns"`; see the
            functions and classes of these names (`_grouped` for low bits, too), whose records (`builder.Task`) begin at
            2. The number of rows in the table is n, the number of tokens.
        parts: type of the activations; for `"combine"` also that of the weights of experts; for `"grouped"` the
            arguments of `linear_module`, for `"columns"` the first three of them; for `"int4"` and packed `"int8"`
            those of `int4_module` and `int8_module`.
    """
    if what in _FUNCTIONS:
        return _grouped(_FUNCTIONS[what](*parts))
    if what == "columns":
        return _Columns(*parts).build()
    activation, *weights = parts
    experts = _Experts(what, activation, *(weights or [activation]))
    getattr(experts, what)()
    return str(experts.module)
