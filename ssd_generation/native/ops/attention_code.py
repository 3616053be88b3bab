"""Code for attention of a few tokens of one or several texts over a KV cache, in place.

Each token attends separately, head by head, over exactly the keys that it sees: so its bits depend on nothing else in
the pass. Scores are dot products over 16 lanes, which are summed by halves; the softmax proceeds in pieces of `_PIECE`
keys with the greatest score so far (online softmax, Milakov and Gimelshein, arXiv 1805.02867); values are added in the
order of their slots. All intermediate results are float32.

Scores may be capped, cap · tanh(score / cap) (Gemma 2, arXiv 2408.00118), and a head may have a sink, the score of a
key whose value is zero (gpt-oss, arXiv 2508.10925).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..cache_table import FIELDS, HEADER, TEXT_FIELDS
from ..codegen.builder import ADDRESS, FLOAT, FLOATS, I32, I64, LANES, STORED, Module, Task, integer, least, splat

__all__ = ["attention_module"]

_PIECE = 256
_SIDE_BY_SIDE = 8
"""Number of vectors of a head's values that are summed at the same time."""


def _left(size: int, block: int) -> Any:
    """Return how many lanes of a vector belong to a head of this size; `None`: all."""
    left = size - block
    return None if left >= LANES else integer(left)


class _Attention(Module):
    """Attention kernels for heads of one size.

    Args:
        activation: stored type of the query and the result.
        cached: stored type of the cache.
        size: size of a head's values.
        keys: sizes of the parts of a head's keys. One: that of the cache's keys, whose heads may be shared by several
            of the query's. Two: of latent attention, which has one head of keys for all of the query; the first part is
            the value at the same time.
        is_capped: whether scores are capped.
        has_sinks: whether heads have sinks.
    """

    def __init__(
        self, activation: str, cached: str, size: int, keys: tuple[int, ...], is_capped: bool, has_sinks: bool
    ) -> None:
        options = "_capped" * is_capped + "_sinks" * has_sinks
        super().__init__(f"attention_{activation}_{cached}_{size}_{'_'.join(map(str, keys))}{options}", activation)
        self.cached, self.size, self._keys = cached, size, keys
        self._is_capped, self._has_sinks = is_capped, has_sinks
        self._kind, self._cached_kind = STORED[activation], STORED[cached]
        self._blocks = range(0, size, LANES)

    def _vector(self, b: Any, address: Any, size: int, block: int, stored: str) -> Any:
        """Load numbers of a head of this size from `block` on, as float32."""
        kind = STORED[stored]
        place = self.at(b, address, integer(block), kind)
        return self.floats(b, self.load(b, place, kind, _left(size, block)), stored)

    def _layer(self, b: Any, task: Task, at: int) -> tuple[Any, list[Any]]:
        """Load the cache's table, and the fields of the layer whose index is in the record."""
        cache = b.inttoptr(task.entry(b, 2), ADDRESS)
        place = b.add(b.mul(task.field(b, at), integer(len(FIELDS))), integer(len(HEADER)))
        entry = self.at(b, cache, place, I64)
        return cache, [b.load(self.at(b, entry, integer(n), I64), typ=I64) for n in range(len(FIELDS))]

    def _header(self, b: Any, cache: Any) -> tuple[Any, Any, Any, Any]:
        """Load what attention needs of the `HEADER`, with the address of the texts' fields in place of their index."""
        count, ahead, each, texts = (
            b.load(self.at(b, cache, integer(HEADER.index(name)), I64), typ=I64)
            for name in ("tokens", "ahead", "tokens per text", "texts")
        )
        return count, ahead, each, self.at(b, cache, texts, I64)

    def _text(self, b: Any, texts: Any, each: Any, token: Any) -> tuple[Any, Any, Any]:
        """Load, for a token of the pass, its text's row and first slot; compute its index among the text's tokens."""
        text = b.sdiv(token, each)
        place = b.mul(text, integer(len(TEXT_FIELDS)))
        row, start, before = (
            b.load(self.at(b, texts, b.add(place, integer(n)), I64), typ=I64) for n in range(len(TEXT_FIELDS))
        )
        return row, start, b.add(before, b.sub(token, b.mul(text, each)))

    # ------------------------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Write keys and values, of `keys[0]` and `size` numbers, into the slots of their tokens.

        The record: key, value, index of the layer, heads, and for both the strides, in numbers, from a token to the
        next and from a head to the next.
        """
        b, task = self.kernel()
        cache, fields = self._layer(b, task, 6)
        count, ahead, each, texts = self._header(b, cache)
        slot = b.add(fields[4], ahead)
        first, end = task.share(b, task.field(b, 7))
        for which, size in enumerate((self._keys[0], self.size)):
            states, row_stride, head_stride = (
                task.operand(b, 2 + 2 * which),
                task.field(b, 8 + 2 * which),
                task.field(b, 9 + 2 * which),
            )
            buffer = b.inttoptr(fields[which], ADDRESS)
            with self.loop(b, first, end, integer(1), []) as (head, _):  # noqa: SIM117
                with self.loop(b, integer(0), count, integer(1), []) as (token, _):
                    row, _, its = self._text(b, texts, each, token)
                    offset = b.add(b.mul(head, head_stride), b.mul(token, row_stride))
                    source = self.at(b, states, offset, self._kind)
                    place = b.add(b.mul(head, fields[2 + which]), b.mul(b.add(slot, its), integer(size)))
                    place = b.add(place, b.mul(row, fields[6 + which]))
                    target = self.at(b, buffer, place, self._cached_kind)
                    for block in range(0, size, LANES):
                        values = self._vector(b, source, size, block, self.activation)
                        left = _left(size, block) or integer(LANES)
                        address = self.at(b, target, integer(block), self._cached_kind)
                        self.store_many(b, values, address, left, self.cached)
        b.ret_void()

    def attend(self) -> None:
        """Compute softmax(q Kᵀ · scale) V for each row and head; padding rows of the pass become zeros.

        The record: query, result, index of the layer, heads, heads that share a key's, strides of the query from a row
        to the next and from a head to the next, scale, cap, address of the heads' sinks (float32); the last two are
        read by kernels that have such. The result is `(rows, heads, size)`.

        Latent attention's record has in addition: the query's second part and its two strides. Its result is `(heads,
        rows, size)`.
        """
        one, is_latent = self._one(), len(self._keys) > 1
        b, task = self.kernel()
        query, result = task.operand(b, 2), task.operand(b, 4)
        heads, shared, row_stride, head_stride = (task.field(b, at) for at in (7, 8, 9, 10))
        scale, cap = task.number(b, 11), task.number(b, 12)
        sinks = task.address(b, 13)
        parts = [(query, row_stride, head_stride)]
        if is_latent:
            parts.append((task.operand(b, 14), task.field(b, 16), task.field(b, 17)))
        cache, fields = self._layer(b, task, 6)
        count, ahead, each, texts = self._header(b, cache)
        slot = b.add(fields[4], ahead)
        rows = task.entry(b, 0)
        together = b.mul(rows, shared)
        first, end = task.share(b, b.mul(rows, heads))
        scores = b.alloca(FLOAT, size=integer(_PIECE))
        sums = b.alloca(FLOAT, size=integer(-(-self.size // LANES) * LANES))
        with self.loop(b, first, end, integer(1), []) as (item, _):
            # Tokens of heads that share keys are consecutive.
            of_keys, within = b.sdiv(item, together), b.srem(item, together)
            row = b.sdiv(within, shared)
            head = b.add(b.mul(of_keys, shared), b.srem(within, shared))
            its_queries = [
                self.at(b, states, b.add(b.mul(row, to_row), b.mul(head, to_head)), self._kind)
                for states, to_row, to_head in parts
            ]
            index = b.add(b.mul(head, rows), row) if is_latent else b.add(b.mul(row, heads), head)
            place = b.mul(index, integer(self.size))
            its_result = self.at(b, result, place, self._kind)
            # Rows that pad the pass belong to no text.
            is_token = b.icmp_signed("<", row, count)
            its_row, start, its = self._text(b, texts, each, b.select(is_token, row, integer(0)))
            last = b.add(slot, b.add(its, integer(1)))
            start = b.sub(start, fields[8])
            window = fields[5]
            outside = b.select(b.icmp_signed(">", window, integer(0)), b.sub(last, window), integer(0))
            begin = b.select(b.icmp_signed(">", outside, start), outside, start)
            begin = b.select(b.icmp_signed(">", begin, integer(0)), begin, integer(0))
            seen = b.select(is_token, b.sub(last, begin), integer(0))
            held = [
                self.at(
                    b,
                    b.inttoptr(fields[which], ADDRESS),
                    b.add(
                        b.add(b.mul(of_keys, fields[2 + which]), b.mul(its_row, fields[6 + which])),
                        b.mul(begin, integer(size)),
                    ),
                    self._cached_kind,
                )
                for which, size in enumerate(self._keys if is_latent else (self._keys[0], self.size))
            ]
            # In latent attention the cache's keys are the values, and part of the keys; its values are the other part.
            keys, values = (held, held[0]) if is_latent else (held[:1], held[1])
            sink = b.load(self.at(b, sinks, head, FLOAT), typ=FLOAT) if self._has_sinks else ir.Constant(FLOAT, 0.0)
            b.call(one, [*its_queries, *keys, values, its_result, seen, scale, cap, sink, scores, sums])
        b.ret_void()

    def _one(self) -> Any:
        """Build the function for one head of one token, over `seen` keys."""
        parts = len(self._keys)
        kinds = [ADDRESS] * (2 * parts + 2) + [I64, FLOAT, FLOAT, FLOAT, ADDRESS, ADDRESS]
        function = self.function("one", kinds, "noinline")
        given, keys = function.args[:parts], function.args[parts : 2 * parts]
        values, result, seen, scale, cap, sink, scores, sums = function.args[2 * parts :]
        b = ir.IRBuilder(function.append_basic_block("entry"))
        queries = [
            [self._vector(b, query, size, block, self.activation) for block in range(0, size, LANES)]
            for query, size in zip(given, self._keys, strict=True)
        ]
        scales, caps = self.spread(b, scale), self.spread(b, cap)
        zeros, least_of_all = splat(FLOAT, 0.0), splat(FLOAT, float("-inf"))
        for block in self._blocks:
            b.store(zeros, self.at(b, sums, integer(block), FLOAT), align=4)
        carried = [least_of_all, zeros]  # the greatest score so far, in all lanes; sums of weights, by lanes
        if self._has_sinks:  # its weight relative to the greatest score so far, its own, is 1
            weight = b.insert_element(zeros, ir.Constant(FLOAT, 1.0), integer(0))
            carried = [self.spread(b, sink), weight]
        with self.loop(b, integer(0), seen, integer(_PIECE), carried) as (piece, state):
            count = least(b, b.sub(seen, piece), integer(_PIECE))
            *its_keys, its_values = (
                self.at(b, address, b.mul(piece, integer(size)), self._cached_kind)
                for address, size in zip((*keys, values), (*self._keys, self.size), strict=True)
            )
            most = [least_of_all]
            with self.loop(b, integer(0), count, integer(LANES), most) as (k, found):
                score = b.fmul(self._scores(b, queries, its_keys, k, count), scales)
                if self._is_capped:
                    score = b.fmul(self.tanh(b, b.fdiv(score, caps)), caps)
                score = b.select(self._first(b, b.sub(count, k)), score, least_of_all)
                b.store(score, self.at(b, scores, k, FLOAT), align=4)
                found[0] = b.select(b.fcmp_ordered(">", score, found[0]), score, found[0])
            greatest, before = self.spread(b, self.greatest(b, most[0])), state[0]
            greatest = b.select(b.fcmp_ordered(">", greatest, before), greatest, before)
            smaller = self.exp(b, b.fsub(before, greatest))
            total = [b.fmul(state[1], smaller)]
            with self.loop(b, integer(0), count, integer(LANES), total) as (k, found):
                place = self.at(b, scores, k, FLOAT)
                weight = self.exp(b, b.fsub(b.load(place, typ=FLOATS, align=4), greatest))
                weight = b.select(self._first(b, b.sub(count, k)), weight, zeros)
                b.store(weight, place, align=4)
                found[0] = b.fadd(found[0], weight)
            self._add_values(b, scores, its_values, count, smaller, sums)
            state[:] = [greatest, total[0]]
        whole = self.spread(b, self.sum(b, carried[1]))
        nothing = b.icmp_signed("<", seen, integer(1))
        for block in self._blocks:
            quotient = b.fdiv(b.load(self.at(b, sums, integer(block), FLOAT), typ=FLOATS, align=4), whole)
            quotient = b.select(nothing, zeros, quotient)
            place = self.at(b, result, integer(block), self._kind)
            self.store_many(b, quotient, place, _left(self.size, block) or integer(LANES))
        b.ret_void()
        return function

    def _scores(self, b: Any, queries: list[list[Any]], keys: list[Any], k: Any, count: Any) -> Any:
        """Compute 16 dot products with keys from slot k on; beyond `count`, that of the last key again."""
        last = b.sub(count, integer(1))
        sums = [splat(FLOAT, 0.0)] * LANES
        for vectors, address, size in zip(queries, keys, self._keys, strict=True):
            rows = [
                self.at(b, address, b.mul(least(b, b.add(k, integer(j)), last), integer(size)), self._cached_kind)
                for j in range(LANES)
            ]
            for block, query in zip(range(0, size, LANES), vectors, strict=True):
                for j, row in enumerate(rows):
                    sums[j] = self.fma(b, self._vector(b, row, size, block, self.cached), query, sums[j])
        # Sum the lanes of each by halves: each step merges two vectors into one.
        width = LANES
        while width > 1:
            half = width // 2
            picks = [
                [
                    place + (LANES if other else 0)
                    for other in (0, 1)
                    for group in range(0, LANES, width)
                    for place in range(group + low, group + low + half)
                ]
                for low in (0, half)
            ]
            sums = [
                b.fadd(*(b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, LANES), pick)) for pick in picks))
                for one, other in zip(sums[::2], sums[1::2], strict=True)
            ]
            width = half
        order = self._order()
        return b.shuffle_vector(sums[0], sums[0], ir.Constant(ir.VectorType(I32, LANES), order))

    @staticmethod
    def _order() -> list[int]:
        """Return the lane that holds each key's sum once all lanes have been added."""
        lanes: list[list[int]] = [[j] * LANES for j in range(LANES)]
        width = LANES
        while width > 1:
            half = width // 2
            lanes = [
                [
                    source[place]
                    for source in (one, other)
                    for group in range(0, LANES, width)
                    for place in range(group, group + half)
                ]
                for one, other in zip(lanes[::2], lanes[1::2], strict=True)
            ]
            width = half
        return [lanes[0].index(j) for j in range(LANES)]

    def _add_values(self, b: Any, weights: Any, values: Any, count: Any, smaller: Any, sums: Any) -> None:
        """Multiply the sums by `smaller`, and add weight · value in the order of the slots."""
        for first in range(0, len(self._blocks), _SIDE_BY_SIDE):
            blocks = self._blocks[first : first + _SIDE_BY_SIDE]
            places = [self.at(b, sums, integer(block), FLOAT) for block in blocks]
            totals = [b.fmul(b.load(place, typ=FLOATS, align=4), smaller) for place in places]
            with self.loop(b, integer(0), count, integer(1), totals) as (k, carried):
                weight = self.spread(b, b.load(self.at(b, weights, k, FLOAT), typ=FLOAT))
                row = self.at(b, values, b.mul(k, integer(self.size)), self._cached_kind)
                for n, block in enumerate(blocks):
                    value = self._vector(b, row, self.size, block, self.cached)
                    carried[n] = self.fma(b, value, weight, carried[n])
            for place, total in zip(places, totals, strict=True):
                b.store(total, place, align=4)


def attention_module(
    what: str,
    activation: str,
    cached: str,
    size: int,
    keys: int | None = None,
    is_capped: bool = False,
    has_sinks: bool = False,
    rotated: int = 0,
) -> str:
    """Return a module whose kernel appends to a cache or attends to it, as text; records (`builder.Task`) begin at 2.

    Entry 2 of the table is the address of the cache's own table (cache_table.py), whose tensors are `(…, slots, size)`
    for each head without gaps.

    Args:
        what: `"append"` or `"attend"`.
        activation: `"float32"`, `"bfloat16"` or `"float16"`.
        cached: type of the cache, one of these.
        size: size of a head's values, in numbers.
        keys: size of a head's keys; `None`: the same.
        is_capped: whether scores are capped.
        has_sinks: whether heads have sinks.
        rotated: in latent attention, size of the part of the keys that is in the cache's values; 0: no latent
            attention.
    """
    parts = (size if keys is None else keys, *([rotated] if rotated else []))
    attention = _Attention(activation, cached, size, parts, is_capped, has_sinks)
    getattr(attention, what)()
    return str(attention.module)
