"""Code that quantises weights in the layouts that kernels read (int4_code.py, int8_code.py, products_code.py).

A weight is read once from memory: its second reading, after the scale is known, finds it in a cache.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..codegen.builder import FLOAT, FLOATS, I8, I32, INTS, LANES, STORED, Module, Task, integer, splat
from .int4_code import COLUMNS

__all__ = ["quantise_module"]

_BLOCK = 64
"""Bytes that hold four columns (int8) or eight (int4) of sixteen interleaved rows."""


class _Quantise(Module):
    """Kernels for weights `(N, K)` of one stored type.

    The record: places of the weights, of the numbers and of the scales, and K. N is the table's number of rows.
    """

    def __init__(self, layout: str, stored: str, group: int) -> None:
        super().__init__(f"quantise_{layout}_{stored}_{group}", stored)
        self.group = group

    def places(self, b: Any, task: Task) -> tuple[Any, Any, Any, Any]:
        """Return the addresses of the weights, of the numbers and of the scales, and K."""
        return task.operand(b, 2), task.operand(b, 4), task.operand(b, 6), task.field(b, 8)

    def row(self, b: Any, weights: Any, row: Any, columns: Any) -> Any:
        """Return the address of a row of the weights."""
        return self.at(b, weights, b.mul(row, columns), STORED[self.activation])

    def numbers(self, b: Any, row: Any, column: Any) -> Any:
        """Load 16 weights of a row as float32."""
        kind = STORED[self.activation]
        return self.floats(b, self.load(b, self.at(b, row, column, kind), kind), self.activation)

    def size(self, b: Any, values: Any) -> Any:
        """Return absolute values."""
        return self.call(b, f"llvm.fabs.v{LANES}f32", FLOATS, values)

    def halves(self, b: Any, number: Any) -> Any:
        """Round a float32 number to bfloat16; return its 16 bits in the lower half of 32."""
        return b.zext(self.narrow(b, number, "bfloat16"), I32)

    def rounded_within(self, b: Any, values: Any, low: float, high: float) -> Any:
        """Round to whole numbers, ties to even, from `low` to `high`; NaN becomes `low`."""
        values = self.call(b, f"llvm.rint.v{LANES}f32", FLOATS, values)
        values = b.select(b.fcmp_ordered(">", values, splat(FLOAT, low)), values, splat(FLOAT, low))
        values = b.select(b.fcmp_ordered("<", values, splat(FLOAT, high)), values, splat(FLOAT, high))
        return b.fptosi(values, INTS)

    def store_words(self, b: Any, bytes_: Any, block: Any, row: Any) -> None:
        """Store 16 bytes of a row in a block of sixteen interleaved rows: four bytes in each of four lines."""
        words = b.bitcast(bytes_, ir.VectorType(I32, 4))
        for line in range(4):
            place = self.at(b, block, b.add(integer(_BLOCK * line), b.shl(row, integer(2))), I8)
            b.store(b.extract_element(words, ir.Constant(I32, line)), place, align=4)

    def four_bits(self) -> None:
        """Add the kernel for numbers in 4 bits, with a scale and an offset for each group of a row's columns.

        Numbers are `(N, K / 2)`, scales `(N / 16, K / group, 16)`, as int4_code.py reads them. The offset is the least
        weight of the group; 15 steps reach the greatest. The weight is divided by the number that a kernel multiplies
        by: the 32 bits that hold the step and the offset.
        """
        b, task = self.kernel()
        weights, packed, scales, columns = self.places(b, task)
        groups = b.sdiv(columns, integer(self.group))
        first, end = task.share(b, b.sdiv(task.entry(b, 0), integer(LANES)))
        with self.loop(b, first, end, integer(1), []) as (block, _):
            its_packed = self.at(b, packed, b.mul(block, b.mul(columns, integer(LANES // 2))), I8)
            its_scales = self.at(b, scales, b.mul(block, b.mul(groups, integer(LANES))), I32)
            with self.loop(b, integer(0), integer(LANES), integer(1), []) as (lane, _):
                row = self.row(b, weights, b.add(b.mul(block, integer(LANES)), lane), columns)
                with self.loop(b, integer(0), groups, integer(1), []) as (group, _):
                    at = b.mul(group, integer(self.group))
                    values = [self.numbers(b, row, b.add(at, integer(c))) for c in range(0, self.group, LANES)]
                    scale, offset, both = self.scale_of(b, values)
                    b.store(both, self.at(b, its_scales, b.add(b.mul(group, integer(LANES)), lane), I32), align=4)
                    digits = [
                        self.rounded_within(b, b.fdiv(b.fsub(value, offset), scale), 0.0, 15.0) for value in values
                    ]
                    for place in range(0, len(digits), 2):
                        lower, upper = digits[place : place + 2]
                        both = b.or_(lower, b.shl(upper, splat(I32, 4)))
                        column = b.add(at, integer(LANES * place))
                        its_block = self.at(b, its_packed, b.mul(column, integer(LANES // 2)), I8)
                        self.store_words(b, b.trunc(both, ir.VectorType(I8, LANES)), its_block, lane)
        b.ret_void()

    def scale_of(self, b: Any, values: list[Any]) -> tuple[Any, Any, Any]:
        """Return scale and offset of a group in all lanes, and the 32 bits that hold both."""
        least, greatest = values[0], values[0]
        for value in values[1:]:
            least = b.select(b.fcmp_ordered("<", value, least), value, least)
            greatest = b.select(b.fcmp_ordered(">", value, greatest), value, greatest)
        low = self.halves(b, b.fneg(self.greatest(b, b.fneg(least))))
        offset = b.bitcast(b.shl(low, ir.Constant(I32, 16)), FLOAT)
        step = b.fdiv(b.fsub(self.greatest(b, greatest), offset), ir.Constant(FLOAT, 15.0))
        smallest = ir.Constant(FLOAT, 1e-9)
        step = b.select(b.fcmp_ordered(">", step, smallest), step, smallest)
        both = b.or_(b.shl(self.halves(b, step), ir.Constant(I32, 16)), low)
        return self.spread(b, b.bitcast(both, FLOAT)), self.spread(b, offset), both

    def eight_bits(self, is_packed: bool) -> None:
        """Add the kernel for numbers in 8 bits, with a scale for each row.

        The scale `(N,)` is a bfloat16 number, stored as float32.

        Args:
            is_packed: whether sixteen rows are interleaved and 128 is added, as int8_code.py reads them; else numbers
                are `(N, K)` int8.
        """
        b, task = self.kernel()
        weights, numbers, scales, columns = self.places(b, task)
        first, end = task.share(b, b.sdiv(task.entry(b, 0), integer(LANES)) if is_packed else task.entry(b, 0))
        if is_packed:
            first, end = (b.mul(bound, integer(LANES)) for bound in (first, end))
        with self.loop(b, first, end, integer(1), []) as (at, _):
            row = self.row(b, weights, at, columns)
            most = [splat(FLOAT, 0.0)]
            with self.loop(b, integer(0), columns, integer(LANES), most) as (column, carried):
                size = self.size(b, self.numbers(b, row, column))
                carried[0] = b.select(b.fcmp_ordered(">", size, carried[0]), size, carried[0])
            scale = b.fdiv(self.greatest(b, most[0]), ir.Constant(FLOAT, 127.0))
            smallest = ir.Constant(FLOAT, 1e-12)
            scale = b.select(b.fcmp_ordered(">", scale, smallest), scale, smallest)
            scale = b.bitcast(b.shl(self.halves(b, scale), ir.Constant(I32, 16)), FLOAT)
            b.store(scale, self.at(b, scales, at, FLOAT), align=4)
            divisor = self.spread(b, scale)
            block, lane = b.and_(at, integer(-LANES)), b.and_(at, integer(LANES - 1))
            its_block = self.at(b, numbers, b.mul(block, columns), I8)
            its_row = self.at(b, numbers, b.mul(at, columns), I8)
            with self.loop(b, integer(0), columns, integer(LANES), []) as (column, _):
                whole = self.rounded_within(b, b.fdiv(self.numbers(b, row, column), divisor), -127.0, 127.0)
                if is_packed:
                    bytes_ = b.trunc(b.add(whole, splat(I32, 128)), ir.VectorType(I8, LANES))
                    self.store_words(b, bytes_, self.at(b, its_block, b.mul(column, integer(LANES)), I8), lane)
                else:
                    bytes_ = b.trunc(whole, ir.VectorType(I8, LANES))
                    b.store(bytes_, self.at(b, its_row, column, I8), align=1)
        b.ret_void()


def quantise_module(layout: str, stored: str, group: int = 0) -> str:
    """Return the text of a module that quantises weights `(N, K)`.

    Args:
        layout: `"int4"`, of which N is a multiple of 16 and K of `group`; `"int8"` (K is a multiple of 16); or
            `"int8 packed"` (N is a multiple of 16, too).
        stored: `"float32"`, `"bfloat16"` or `"float16"`.
        group: int4: number of columns that share a scale and an offset, a multiple of `COLUMNS`.
    """
    module = _Quantise(layout.replace(" ", "_"), stored, group)
    if layout == "int4":
        if group % COLUMNS:
            raise ValueError(f"groups of {group} columns are no multiple of {COLUMNS}")
        module.four_bits()
    else:
        module.eight_bits("packed" in layout)
    return str(module.module)
