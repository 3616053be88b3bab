"""Code for what stands between the linear layers, a row at a time: norms, gates, rotary embeddings.

Each does in one go what a model's code does in five to ten operations, of which every one costs more than its
arithmetic where a row is a token. Numbers are rounded where the model's own code rounds them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .builder import ADDRESS, FLOAT, FLOATS, I32, I64, INTS, LANES, STORED, Module, integer, splat

__all__ = ["rows_module"]


class _Rows(Module):
    def __init__(self, activation: str) -> None:
        super().__init__(f"rows_{activation}", activation)
        self._kind = STORED[activation]

    def _of(self, b: Any, address: Any, place: Any, count: Any) -> Any:
        """16 activations, or `count` of them and zeros, as float32."""
        return self.floats(b, self.load(b, self.at(b, address, place, self._kind), self._kind, count), self.activation)

    def norm(self) -> str:
        """`run(x, weight, y, rows, columns, epsilon)`: w · (x / √(mean(x²) + ε)), the quotient rounded first."""
        function = self.function("run", [ADDRESS] * 3 + [I64, I64, FLOAT])
        x, weight, y, rows, columns, epsilon = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        with self.loop(b, integer(0), rows, integer(1), []) as (row, _):
            its_x, its_y = (self.at(b, address, b.mul(row, columns), self._kind) for address in (x, y))
            sums = [splat(FLOAT, 0.0)]
            with self.loop(b, integer(0), columns, integer(LANES), sums) as (k, carried):
                values = self._of(b, its_x, k, b.sub(columns, k))
                carried[0] = self.fma(b, values, values, carried[0])
            mean = b.fdiv(self.sum(b, sums[0]), b.sitofp(columns, FLOAT))
            root = self.call(b, "llvm.sqrt.f32", FLOAT, b.fadd(mean, epsilon))
            factor = self.spread(b, b.fdiv(ir.Constant(FLOAT, 1.0), root))
            with self.loop(b, integer(0), columns, integer(LANES), []) as (k, _):
                left = b.sub(columns, k)
                normed = self.rounded(b, b.fmul(self._of(b, its_x, k, left), factor))
                scaled = b.fmul(self._of(b, weight, k, left), normed)
                self.store_many(b, scaled, self.at(b, its_y, k, self._kind), left)
        b.ret_void()
        return str(self.module)

    def gate(self) -> str:
        """`run(gate, up, y, count)`: silu(gate) · up of as many numbers, silu rounded first."""
        function = self.function("run", [ADDRESS] * 3 + [I64])
        gate, up, y, count = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        with self.loop(b, integer(0), count, integer(LANES), []) as (k, _):
            left = b.sub(count, k)
            value = self._of(b, gate, k, left)
            sigmoid = b.fadd(splat(FLOAT, 1.0), self._exp(b, b.fneg(value)))
            silu = self.rounded(b, b.fdiv(value, sigmoid))
            self.store_many(b, b.fmul(silu, self._of(b, up, k, left)), self.at(b, y, k, self._kind), left)
        b.ret_void()
        return str(self.module)

    def _exp(self, b: Any, x: Any) -> Any:
        """e^x to two units in the last place: 2ⁿ · e^r, |r| ≤ ln 2 / 2, by Cephes' polynomial (Moshier, expf.c)."""
        high, low = 88.72283, -87.33654
        clipped = b.select(b.fcmp_ordered(">", x, splat(FLOAT, high)), splat(FLOAT, high), x)
        clipped = b.select(b.fcmp_ordered("<", x, splat(FLOAT, low)), splat(FLOAT, low), clipped)
        # Adding 1.5 · 2²³ leaves a float32 no fraction: its last bits are then n.
        magic = splat(FLOAT, 12582912.0)
        shifted = self.fma(b, clipped, splat(FLOAT, 1.4426950408889634), magic)
        n = b.fsub(shifted, magic)
        r = self.fma(b, n, splat(FLOAT, -0.693359375), clipped)
        r = self.fma(b, n, splat(FLOAT, 2.12194440e-4), r)
        series = splat(FLOAT, 1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
            series = self.fma(b, series, r, splat(FLOAT, factor))
        # 2ⁿ in two factors, since that of the greatest n is no float32.
        bits = b.bitcast(shifted, INTS)
        halves = b.ashr(b.shl(bits, splat(I32, 9)), splat(I32, 10))  # n / 2, rounded down
        rest = b.sub(b.ashr(b.shl(bits, splat(I32, 9)), splat(I32, 9)), halves)
        for part in (halves, rest):
            power = b.shl(b.add(part, splat(I32, 127)), splat(I32, 23))
            series = b.fmul(series, b.bitcast(power, FLOATS))
        return b.select(b.fcmp_ordered(">", x, splat(FLOAT, high)), splat(FLOAT, float("inf")), series)

    def rotary(self) -> str:
        """`run(x, cos, sin, y, rows, heads, size, row stride, head stride)`: x · cos + (−x₂, x₁) · sin.

        x is read by its strides; y is `(heads, rows, size)`, cos and sin are `(rows, size)`. Products are rounded.
        """
        function = self.function("run", [ADDRESS] * 4 + [I64] * 5)
        x, cos, sin, y, rows, heads, size, row_stride, head_stride = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        half = b.lshr(size, integer(1))
        with self.loop(b, integer(0), heads, integer(1), []) as (head, _):  # noqa: SIM117
            with self.loop(b, integer(0), rows, integer(1), []) as (row, _):
                offset = b.add(b.mul(head, head_stride), b.mul(row, row_stride))
                its_x = self.at(b, x, offset, self._kind)
                its_y = self.at(b, y, b.mul(b.add(b.mul(head, rows), row), size), self._kind)
                its_cos, its_sin = (self.at(b, table, b.mul(row, size), self._kind) for table in (cos, sin))
                with self.loop(b, integer(0), half, integer(LANES), []) as (k, _):
                    left = b.sub(half, k)
                    upper = b.add(k, half)
                    first, second = self._of(b, its_x, k, left), self._of(b, its_x, upper, left)
                    for place, straight, turned in ((k, first, b.fneg(second)), (upper, second, first)):
                        one = self.rounded(b, b.fmul(straight, self._of(b, its_cos, place, left)))
                        other = self.rounded(b, b.fmul(turned, self._of(b, its_sin, place, left)))
                        self.store_many(b, b.fadd(one, other), self.at(b, its_y, place, self._kind), left)
        b.ret_void()
        return str(self.module)


def rows_module(what: str, activation: str) -> str:
    """The text of a module whose `run` computes a norm, a gate or a rotary embedding.

    Args:
        what: `"norm"`, `"gate"` or `"rotary"`; see the methods.
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
    """
    return str(getattr(_Rows(activation), what)())
