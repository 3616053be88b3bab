"""Code for elementwise operations with broadcasting, and for means, in LLVM IR.

Each result is computed in float32 and rounded. The exponential and the logarithm are computed by the same instructions
at every place, so bits do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..codegen.builder import FLOAT, FLOATS, LANES, STORED, Module, integer, least, splat

__all__ = ["OPERATIONS", "pointwise_module"]


class _Pointwise(Module):
    """The kernel of one operation.

    Args:
        what: a name in `OPERATIONS`.
        result: stored type of the result; with `:s` where its columns do not follow each other.
        operands: of each operand: its stored type; `x` for a tensor of the pass, `w` for a weight, `n` for a number;
            and 1 where it has a number for each column, `s` where these do not follow each other, 0 where one number
            serves all. They are joined by colons.
    """

    def __init__(self, what: str, result: str, operands: tuple[str, ...]) -> None:
        stored, _, self._is_strided = result.partition(":")
        super().__init__("_".join(("pointwise", what, result, *operands)).replace(":", "_"), stored)
        self._what = what
        self._operands = [tuple(operand.split(":")) for operand in operands]

    def build(self) -> None:
        """Add the kernel, for a result `(rows, groups, columns)`.

        The record: result, groups, columns, its strides from a row to the next and from a group to the next; then of
        each tensor its place and such strides, of each weight its address and its stride from a group to the next, and
        each number. Where columns do not follow each other, the stride from one to the next follows the other strides.
        """
        b, task = self.kernel()
        y, groups, columns = task.operand(b, 2), task.field(b, 4), task.field(b, 5)
        y_row, y_group = task.field(b, 6), task.field(b, 7)
        at, operands, y_column = 8, [], None
        if self._is_strided:
            at, y_column = 9, task.field(b, 8)
        for stored, where, of_column in self._operands:
            if where == "n":
                operands.append((None, self.spread(b, task.number(b, at)), None, "", None))
                at += 1
                continue
            if where == "w":
                address, to_row, to_group = task.address(b, at), None, task.field(b, at + 1)
                at += 2
            else:
                address, to_row, to_group = task.operand(b, at), task.field(b, at + 2), task.field(b, at + 3)
                at += 4
            to_column: Any = of_column
            if of_column == "s":
                to_column = task.field(b, at)
                at += 1
            operands.append((address, to_row, to_group, stored, to_column))
        pieces = b.sdiv(b.add(columns, integer(LANES - 1)), integer(LANES))
        first, end = task.share(b, b.mul(b.mul(task.entry(b, 0), groups), pieces))
        with self.loop(b, first, end, integer(1), []) as (item, _):
            of_all, column = b.sdiv(item, pieces), b.mul(b.srem(item, pieces), integer(LANES))
            row, group, left = b.sdiv(of_all, groups), b.srem(of_all, groups), b.sub(columns, column)
            values = []
            for address, to_row, to_group, stored, to_column in operands:
                if address is None:
                    values.append(to_row)
                    continue
                place = b.mul(group, to_group)
                if to_row is not None:
                    place = b.add(place, b.mul(row, to_row))
                values.append(self._loaded(b, address, place, stored, to_column, column, columns))
            result = OPERATIONS[self._what](self, b, *values)
            place, kind = b.add(b.mul(row, y_row), b.mul(group, y_group)), STORED[self.activation]
            if y_column is None:
                self.store_many(b, result, self.at(b, y, b.add(place, column), kind), left)
            else:
                with self.loop(b, integer(0), least(b, left, integer(LANES)), integer(1), []) as (lane, _):
                    its = self.at(b, y, b.add(place, b.mul(b.add(column, lane), y_column)), kind)
                    self.store(b, b.extract_element(result, lane), its)
        b.ret_void()

    def _loaded(self, b: Any, address: Any, place: Any, stored: str, to_column: Any, column: Any, columns: Any) -> Any:
        """Load the numbers of 16 columns; `to_column` is a stride, "1", or "0" where one number serves all."""
        kind = STORED[stored]
        if to_column == "1":
            its = self.at(b, address, b.add(place, column), kind)
            return self.floats(b, self.load(b, its, kind, b.sub(columns, column)), stored)
        if to_column == "0":
            return self.spread(b, self._one(b, self.at(b, address, place, kind), stored))
        found, last = splat(FLOAT, 0.0), b.sub(columns, integer(1))
        for lane in range(LANES):
            at = b.mul(least(b, b.add(column, integer(lane)), last), to_column)
            one = self._one(b, self.at(b, address, b.add(place, at), kind), stored)
            found = b.insert_element(found, one, integer(lane))
        return found

    def _one(self, b: Any, address: Any, stored: str) -> Any:
        """Load one number as float32."""
        loaded = self.load(b, address, STORED[stored], integer(1))
        return b.extract_element(self.floats(b, loaded, stored), integer(0))


def _gelu_tanh(module: Module, b: Any, x: Any) -> Any:
    """Compute x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (GELU, arXiv 1606.08415, section 2)."""
    cube = module.fma(b, b.fmul(b.fmul(x, x), x), splat(FLOAT, 0.044715), x)
    inner = module.tanh(b, b.fmul(cube, splat(FLOAT, math.sqrt(2 / math.pi))))
    return b.fmul(b.fmul(x, splat(FLOAT, 0.5)), b.fadd(inner, splat(FLOAT, 1.0)))


def _sqrt(module: Module, b: Any, x: Any) -> Any:
    return module.call(b, f"llvm.sqrt.v{LANES}f32", FLOATS, x)


Operation = Callable[..., Any]

OPERATIONS: dict[str, Operation] = {
    "add": lambda module, b, one, other: b.fadd(one, other),
    "sub": lambda module, b, one, other: b.fsub(one, other),
    "mul": lambda module, b, one, other: b.fmul(one, other),
    "div": lambda module, b, one, other: b.fdiv(one, other),
    "neg": lambda module, b, x: b.fneg(x),
    "to": lambda module, b, x: x,
    "exp": lambda module, b, x: module.exp(b, x),
    "sigmoid": lambda module, b, x: module.sigmoid(b, x),
    "silu": lambda module, b, x: b.fmul(x, module.sigmoid(b, x)),
    "softplus": lambda module, b, x: module.softplus(b, x),
    "tanh": lambda module, b, x: module.tanh(b, x),
    "gelu_tanh": lambda module, b, x: _gelu_tanh(module, b, x),
    "sqrt": _sqrt,
    "rsqrt": lambda module, b, x: b.fdiv(splat(FLOAT, 1.0), _sqrt(module, b, x)),
    "relu": lambda module, b, x: b.select(b.fcmp_ordered("<", x, splat(FLOAT, 0.0)), splat(FLOAT, 0.0), x),
    "square": lambda module, b, x: b.fmul(x, x),
    "cube": lambda module, b, x: b.fmul(module.rounded(b, b.fmul(x, x)), x),
}
"""Operations by name, on float32 numbers."""


class _Mean(Module):
    """The kernel of a mean over columns."""

    def __init__(self, result: str, operand: str) -> None:
        super().__init__(f"mean_{result}_{operand}", result)
        self._operand = operand

    def build(self) -> None:
        """Add the kernel; the record: result `(rows, groups)`, groups, columns, and x with its two strides."""
        b, task = self.kernel()
        y, groups, columns = task.operand(b, 2), task.field(b, 4), task.field(b, 5)
        x, to_row, to_group = task.operand(b, 6), task.field(b, 8), task.field(b, 9)
        kind = STORED[self._operand]
        first, end = task.share(b, b.mul(task.entry(b, 0), groups))
        with self.loop(b, first, end, integer(1), []) as (item, _):
            place = b.add(b.mul(b.sdiv(item, groups), to_row), b.mul(b.srem(item, groups), to_group))
            sums = [splat(FLOAT, 0.0)]
            with self.loop(b, integer(0), columns, integer(LANES), sums) as (k, carried):
                its = self.at(b, x, b.add(place, k), kind)
                values = self.floats(b, self.load(b, its, kind, b.sub(columns, k)), self._operand)
                carried[0] = b.fadd(carried[0], values)
            mean = b.fdiv(self.sum(b, sums[0]), b.sitofp(columns, FLOAT))
            self.store(b, mean, self.at(b, y, item, STORED[self.activation]))
        b.ret_void()


def pointwise_module(what: str, result: str, *operands: str) -> str:
    """Return the text of a module whose kernel computes an elementwise operation.

    Args:
        what: a name in `OPERATIONS`; `"mean"`: the mean over columns instead.
        result: `"float32"`, `"bfloat16"` or `"float16"`, as in `_Pointwise`.
        operands: as in `_Pointwise`, such as `"bfloat16:x:1"`; of a mean, the stored type alone.
    """
    module = _Mean(result, *operands) if what == "mean" else _Pointwise(what, result, operands)
    module.build()
    return str(module.module)
