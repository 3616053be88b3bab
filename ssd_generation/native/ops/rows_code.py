"""Code for the operations between linear layers, a row at a time: norms, gates, rotary embeddings, sums, multiples.

Each fuses five to ten operations of a model's code, every one of which costs more than its arithmetic where a row is a
token. Numbers are rounded where the model's own code rounds them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..codegen.builder import ADDRESS, FLOAT, LANES, STORED, Module, Task, integer, least, splat

__all__ = ["rows_module"]


class _Rows(Module):
    def __init__(self, activation: str) -> None:
        super().__init__(f"rows_{activation}", activation)
        self._kind = STORED[activation]

    def norm(self) -> None:
        """Compute RMSNorm, w · (x / √(mean(x²) + ε)), with the quotient rounded first.

        The record: x, y, the address of w, columns, ε, number of rows per row of the table, stride from a row of x to
        the next. y has no gaps.
        """
        b, task = self.kernel()
        x, y, weight = task.operand(b, 2), task.operand(b, 4), task.address(b, 6)
        columns, epsilon, stride = task.field(b, 7), task.number(b, 8), task.field(b, 10)
        first, end = task.share(b, b.mul(task.entry(b, 0), task.field(b, 9)))
        with self.loop(b, first, end, integer(1), []) as (row, _):
            its_x = self.at(b, x, b.mul(row, stride), self._kind)
            its_y = self.at(b, y, b.mul(row, columns), self._kind)
            sums = [splat(FLOAT, 0.0)]
            with self.loop(b, integer(0), columns, integer(LANES), sums) as (k, carried):
                values = self.activations(b, its_x, k, b.sub(columns, k))
                carried[0] = self.fma(b, values, values, carried[0])
            mean = b.fdiv(self.sum(b, sums[0]), b.sitofp(columns, FLOAT))
            root = self.call(b, "llvm.sqrt.f32", FLOAT, b.fadd(mean, epsilon))
            factor = self.spread(b, b.fdiv(ir.Constant(FLOAT, 1.0), root))
            with self.loop(b, integer(0), columns, integer(LANES), []) as (k, _):
                left = b.sub(columns, k)
                normed = self.rounded(b, b.fmul(self.activations(b, its_x, k, left), factor))
                scaled = b.fmul(self.activations(b, weight, k, left), normed)
                self.store_many(b, scaled, self.at(b, its_y, k, self._kind), left)
        b.ret_void()

    def layer_norm(self) -> None:
        """Compute LayerNorm, w · (x − mean(x)) / √(var(x) + ε) + c (arXiv 1607.06450), in float32.

        The record: x, y, the addresses of w and c, 0 for none, columns, ε, number of rows per row of the table, stride
        from a row of x to the next. y has no gaps.
        """
        b, task = self.kernel()
        x, y, weight, bias = task.operand(b, 2), task.operand(b, 4), task.field(b, 6), task.field(b, 7)
        columns, epsilon, stride = task.field(b, 8), task.number(b, 9), task.field(b, 11)
        first, end = task.share(b, b.mul(task.entry(b, 0), task.field(b, 10)))
        count = b.sitofp(columns, FLOAT)
        zeros, ones = splat(FLOAT, 0.0), splat(FLOAT, 1.0)
        with self.loop(b, first, end, integer(1), []) as (row, _):
            its_x = self.at(b, x, b.mul(row, stride), self._kind)
            its_y = self.at(b, y, b.mul(row, columns), self._kind)
            sums = [zeros]
            with self.loop(b, integer(0), columns, integer(LANES), sums) as (k, carried):
                carried[0] = b.fadd(carried[0], self.activations(b, its_x, k, b.sub(columns, k)))
            mean = self.spread(b, b.fdiv(self.sum(b, sums[0]), count))
            squares = [zeros]
            with self.loop(b, integer(0), columns, integer(LANES), squares) as (k, carried):
                left = b.sub(columns, k)
                apart = b.fsub(self.activations(b, its_x, k, left), mean)
                apart = b.select(self._first(b, left), apart, zeros)
                carried[0] = self.fma(b, apart, apart, carried[0])
            variance = b.fdiv(self.sum(b, squares[0]), count)
            root = self.call(b, "llvm.sqrt.f32", FLOAT, b.fadd(variance, epsilon))
            factor = self.spread(b, b.fdiv(ir.Constant(FLOAT, 1.0), root))
            with self.loop(b, integer(0), columns, integer(LANES), []) as (k, _):
                left = b.sub(columns, k)
                value = b.fmul(b.fsub(self.activations(b, its_x, k, left), mean), factor)
                scaled = self.fma(b, value, self._given(b, weight, k, left, ones), self._given(b, bias, k, left, zeros))
                self.store_many(b, scaled, self.at(b, its_y, k, self._kind), left)
        b.ret_void()

    def _given(self, b: Any, address: Any, k: Any, left: Any, otherwise: Any) -> Any:
        """Load numbers of a weight; `otherwise` where its address is 0."""
        before = b.block
        with b.if_then(b.icmp_signed("!=", address, integer(0))):
            loaded = self.activations(b, b.inttoptr(address, ADDRESS), k, left)
            inside = b.block
        found = b.phi(loaded.type)
        found.add_incoming(otherwise, before)
        found.add_incoming(loaded, inside)
        return found

    def gate(self) -> None:
        """Compute a gated activation, silu(gate) · up, with silu rounded first.

        The record: gate, up, y, columns, strides from a row of gate to the next, and of up. y has no gaps.
        """
        b, task = self.kernel()
        gate, up, y = task.operand(b, 2), task.operand(b, 4), task.operand(b, 6)
        columns, gate_stride, up_stride = task.field(b, 8), task.field(b, 9), task.field(b, 10)
        first, end = self._columns(b, task, columns)
        with self.loop(b, integer(0), task.entry(b, 0), integer(1), []) as (row, _):
            its_gate = self.at(b, gate, b.mul(row, gate_stride), self._kind)
            its_up = self.at(b, up, b.mul(row, up_stride), self._kind)
            its_y = self.at(b, y, b.mul(row, columns), self._kind)
            with self.loop(b, first, end, integer(LANES), []) as (k, _):
                left = b.sub(end, k)
                value = self.activations(b, its_gate, k, left)
                silu = self.silu(b, value)
                self.store_many(
                    b, b.fmul(silu, self.activations(b, its_up, k, left)), self.at(b, its_y, k, self._kind), left
                )
        b.ret_void()

    def add(self) -> None:
        """Compute the sum of two tensors; the record: both, y, columns. None of them has gaps."""
        b, task = self.kernel()
        one, other, y, columns = task.operand(b, 2), task.operand(b, 4), task.operand(b, 6), task.field(b, 8)
        first, end = self._columns(b, task, b.mul(columns, task.entry(b, 0)))
        with self.loop(b, first, end, integer(LANES), []) as (k, _):
            left = b.sub(end, k)
            total = b.fadd(self.activations(b, one, k, left), self.activations(b, other, k, left))
            self.store_many(b, total, self.at(b, y, k, self._kind), left)
        b.ret_void()

    def scale(self) -> None:
        """Compute a multiple of a tensor; the record: x, y, columns, the factor. Neither of them has gaps."""
        b, task = self.kernel()
        x, y, columns, factor = task.operand(b, 2), task.operand(b, 4), task.field(b, 6), task.number(b, 7)
        factors = self.spread(b, factor)
        first, end = self._columns(b, task, b.mul(columns, task.entry(b, 0)))
        with self.loop(b, first, end, integer(LANES), []) as (k, _):
            left = b.sub(end, k)
            self.store_many(b, b.fmul(self.activations(b, x, k, left), factors), self.at(b, y, k, self._kind), left)
        b.ret_void()

    @staticmethod
    def _columns(b: Any, task: Task, columns: Any) -> tuple[Any, Any]:
        """Return this part's range of so many columns, in units of four vectors."""
        step = 4 * LANES
        parts = b.sdiv(b.add(columns, integer(step - 1)), integer(step))
        first, end = (b.mul(place, integer(step)) for place in task.share(b, parts))
        return first, least(b, end, columns)

    def rotary(self) -> None:
        """Compute a rotary embedding, x · cos + (−x₂, x₁) · sin, with products rounded.

        The record: x, cos, sin, y, heads, size, strides from a row of x to the next, and from a head to the next. y is
        `(heads, rows, size)`, cos and sin are `(rows, size)`.
        """
        b, task = self.kernel()
        x, cos, sin, y = (task.operand(b, at) for at in (2, 4, 6, 8))
        heads, size, row_stride, head_stride = (task.field(b, at) for at in (10, 11, 12, 13))
        rows = task.entry(b, 0)
        half = b.lshr(size, integer(1))
        first, end = task.share(b, heads)
        with self.loop(b, first, end, integer(1), []) as (head, _):  # noqa: SIM117
            with self.loop(b, integer(0), rows, integer(1), []) as (row, _):
                offset = b.add(b.mul(head, head_stride), b.mul(row, row_stride))
                its_x = self.at(b, x, offset, self._kind)
                its_y = self.at(b, y, b.mul(b.add(b.mul(head, rows), row), size), self._kind)
                its_cos, its_sin = (self.at(b, table, b.mul(row, size), self._kind) for table in (cos, sin))
                with self.loop(b, integer(0), half, integer(LANES), []) as (k, _):
                    left = b.sub(half, k)
                    upper = b.add(k, half)
                    first_half, second = self.activations(b, its_x, k, left), self.activations(b, its_x, upper, left)
                    for place, straight, turned in ((k, first_half, b.fneg(second)), (upper, second, first_half)):
                        one = self.rounded(b, b.fmul(straight, self.activations(b, its_cos, place, left)))
                        other = self.rounded(b, b.fmul(turned, self.activations(b, its_sin, place, left)))
                        self.store_many(b, b.fadd(one, other), self.at(b, its_y, place, self._kind), left)
        b.ret_void()


def rows_module(what: str, activation: str) -> str:
    """Return the text of a module whose kernel computes a norm, a gate, a sum, a multiple or a rotary embedding.

    Args:
        what: `"norm"`, `"layer_norm"`, `"gate"`, `"add"`, `"scale"` or `"rotary"`; see the methods, whose records
            (`builder.Task`) begin at 2.
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
    """
    rows = _Rows(activation)
    getattr(rows, what)()
    return str(rows.module)
