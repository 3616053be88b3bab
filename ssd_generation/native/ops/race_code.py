"""Code that finds the winner of an exponential race among all scores: the largest s / T − ln e (decoding/choice.py)."""

from __future__ import annotations

import math

from llvmlite import ir

from ..codegen.builder import ADDRESS, FLOAT, I8, I32, I64, INTS, LANES, STORED, Module, integer, splat

__all__ = ["race_module"]


def race_module(stored: str) -> str:
    """Return the text of a module that races for each of n rows.

    The record: addresses of the scores `(n, V)`, of n addresses of noise (float32), and of the results, of each row 16
    largest keys, 16 second ones (float32) and the indexes of the largest (32 bits), lane by lane; number of columns;
    temperature. n is the table's number of rows. A lane that has met a key that is no number returns none.

    Args:
        stored: type of the scores.
    """
    module = Module(f"race_{stored}", "float32")
    b, task = module.kernel()
    table, places, results = (task.address(b, at) for at in (2, 3, 4))
    columns, temperature, kind = task.field(b, 5), module.spread(b, task.number(b, 6)), STORED[stored]
    lanes = ir.Constant(INTS, list(range(LANES)))
    lowest = splat(FLOAT, -math.inf)
    first, end = task.share(b, task.entry(b, 0))
    with module.loop(b, first, end, integer(1), []) as (row, _):
        scores = module.at(b, table, b.mul(row, columns), kind)
        noise = b.inttoptr(b.load(module.at(b, places, row, I64), typ=I64), ADDRESS)
        found = [lowest, lowest, ir.Constant(INTS, None), ir.Constant(INTS, None)]
        with module.loop(b, integer(0), columns, integer(LANES), found) as (at, carried):
            best, second, index, is_wrong = carried
            left = b.sub(columns, at)
            score = module.floats(b, module.load(b, module.at(b, scores, at, kind), kind, left), stored)
            drawn = module.load(b, module.at(b, noise, at, FLOAT), FLOAT, left)
            key = b.fsub(b.fdiv(score, temperature), module.log(b, drawn))
            key = b.select(b.fcmp_ordered("==", drawn, splat(FLOAT, 0.0)), splat(FLOAT, math.inf), key)
            key = b.select(module._first(b, left), key, lowest)
            is_better = b.fcmp_ordered(">", key, best)
            is_next = b.fcmp_ordered(">", key, second)
            carried[1] = b.select(is_better, best, b.select(is_next, key, second))
            carried[2] = b.select(is_better, b.add(lanes, module.spread(b, b.trunc(at, I32))), index)
            carried[3] = b.or_(is_wrong, b.sext(b.fcmp_unordered("uno", key, key), INTS))
            carried[0] = b.select(is_better, key, best)
        best, second, index, is_wrong = found
        best = b.select(b.icmp_signed("!=", is_wrong, ir.Constant(INTS, None)), splat(FLOAT, math.nan), best)
        place = module.at(b, results, b.mul(row, integer(12 * LANES)), I8)
        for which, value in enumerate((best, second, index)):
            b.store(value, module.at(b, place, integer(which * 4 * LANES), I8), align=4)
    b.ret_void()
    return str(module.module)
