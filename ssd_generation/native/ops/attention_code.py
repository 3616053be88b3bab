"""Code for attention of a few tokens of one or several texts over a KV cache, in place.

Each token attends separately, over exactly the keys that it sees, so its bits depend on nothing else in the pass. Heads
of a token that share keys read them together, with the bits that each has alone. Scores are dot products over 16 lanes,
which are summed by halves; the softmax proceeds in pieces of `_PIECE` keys with the greatest score so far (online
softmax, Milakov and Gimelshein, arXiv 1805.02867); values are added in the order of their slots. All intermediate
results are float32.

Scores may be capped, cap · tanh(score / cap) (Gemma 2, arXiv 2408.00118), and a head may have a sink, the score of a
key whose value is zero (gpt-oss, arXiv 2508.10925).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..cache_table import FIELDS, HEADER, TEXT_FIELDS
from ..codegen.builder import ADDRESS, FLOAT, FLOATS, I32, I64, LANES, STORED, Module, Task, integer, least, splat
from ..codegen.compiler import registers

__all__ = ["attention_module"]

_PIECE = 256
_TOGETHER = 4
"""Most heads of a token that read their keys together, where registers are many."""

_KEYS = {1: 16, 2: 8, 3: 8, 4: 4}
"""Keys whose products with the queries of so many heads are summed at the same time."""

_SIDE_BY_SIDE = {1: 8, 2: 8, 3: 5, 4: 4}
"""Vectors of the values that are summed at the same time for so many heads."""


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
        self._room = LANES * len(self._blocks)
        self._most = _TOGETHER if registers() == 32 else 1

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
        is_latent = len(self._keys) > 1
        functions = {many: self._some(many) for many in range(1, self._most + 1)}
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
        # Heads of a token that share keys are divided as equally as can be.
        turns = b.sdiv(b.add(shared, integer(self._most - 1)), integer(self._most))
        of_each = b.sdiv(b.add(shared, b.sub(turns, integer(1))), turns)
        first, end = task.share(b, b.mul(b.mul(rows, b.sdiv(heads, shared)), turns))
        scores = b.alloca(FLOAT, size=integer(_PIECE * self._most))
        sums = b.alloca(FLOAT, size=integer(self._room * self._most))
        with self.loop(b, first, end, integer(1), []) as (item, _):
            before, token = b.mul(b.srem(item, turns), of_each), b.sdiv(item, turns)
            of_keys, row = b.sdiv(token, rows), b.srem(token, rows)
            head, many = b.add(b.mul(of_keys, shared), before), least(b, of_each, b.sub(shared, before))
            its_queries = []
            for states, to_row, to_head in parts:
                place = b.add(b.mul(row, to_row), b.mul(head, to_head))
                its_queries += [self.at(b, states, place, self._kind), to_head]
            index = b.add(b.mul(head, rows), row) if is_latent else b.add(b.mul(row, heads), head)
            to_next = b.mul(rows if is_latent else integer(1), integer(self.size))
            its_result = self.at(b, result, b.mul(index, integer(self.size)), self._kind)
            # Rows that pad the pass belong to no text.
            is_token = b.icmp_signed("<", row, count)
            its_row, start, its = self._text(b, texts, each, b.select(is_token, row, integer(0)))
            last = b.add(slot, b.add(its, integer(1)))
            start = b.sub(start, fields[8])
            window = fields[5]
            outside = b.select(b.icmp_signed(">", window, integer(0)), b.sub(last, window), integer(0))
            own, is_chunk = b.sub(last, integer(1)), b.icmp_signed("<", window, integer(0))
            chunk = b.select(is_chunk, b.sub(integer(0), window), integer(1))
            outside = b.select(is_chunk, b.sub(own, b.srem(b.sub(own, start), chunk)), outside)
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
            its_sinks = self.at(b, sinks, head, FLOAT)
            given = [*its_queries, *keys, values, its_result, to_next, seen, scale, cap, its_sinks, scores, sums]
            done = b.append_basic_block("done")
            choice = b.switch(many, done)
            for number, function in functions.items():
                block = b.append_basic_block(f"of_{number}")
                choice.add_case(integer(number), block)
                b.position_at_end(block)
                b.call(function, given)
                b.branch(done)
            b.position_at_end(done)
        b.ret_void()

    def _some(self, many: int) -> Any:
        """Build the function for some heads of one token that share keys, over `seen` of these."""
        parts = len(self._keys)
        kinds = [ADDRESS, I64] * parts + [ADDRESS] * (parts + 2) + [I64, I64, FLOAT, FLOAT, ADDRESS, ADDRESS, ADDRESS]
        function = self.function(f"heads_{many}", kinds, "noinline")
        given, keys = function.args[: 2 * parts], function.args[2 * parts : 3 * parts]
        values, result, to_next, seen, scale, cap, sinks, scores, sums = function.args[3 * parts :]
        b = ir.IRBuilder(function.append_basic_block("entry"))
        heads = range(many)
        queries = [
            [
                [self._vector(b, place, size, block, self.activation) for block in range(0, size, LANES)]
                for place in (self.at(b, query, b.mul(stride, integer(head)), self._kind) for head in heads)
            ]
            for query, stride, size in zip(given[::2], given[1::2], self._keys, strict=True)
        ]
        scales, caps = self.spread(b, scale), self.spread(b, cap)
        zeros, least_of_all = splat(FLOAT, 0.0), splat(FLOAT, float("-inf"))
        its_scores = [self.at(b, scores, integer(_PIECE * head), FLOAT) for head in heads]
        its_sums = [self.at(b, sums, integer(self._room * head), FLOAT) for head in heads]
        for place in its_sums:
            for block in self._blocks:
                b.store(zeros, self.at(b, place, integer(block), FLOAT), align=4)
        # By head, the greatest score so far, in all lanes; then sums of weights, by lanes.
        carried = [least_of_all] * many + [zeros] * many
        if self._has_sinks:  # the weight of a sink relative to the greatest score so far, its own, is 1
            weight = b.insert_element(zeros, ir.Constant(FLOAT, 1.0), integer(0))
            of_heads = [b.load(self.at(b, sinks, integer(head), FLOAT), typ=FLOAT) for head in heads]
            carried = [self.spread(b, sink) for sink in of_heads] + [weight] * many
        with self.loop(b, integer(0), seen, integer(_PIECE), carried) as (piece, state):
            count = least(b, b.sub(seen, piece), integer(_PIECE))
            *its_keys, its_values = (
                self.at(b, address, b.mul(piece, integer(size)), self._cached_kind)
                for address, size in zip((*keys, values), (*self._keys, self.size), strict=True)
            )
            most = [least_of_all] * many
            with self.loop(b, integer(0), count, integer(LANES), most) as (k, found):
                for head, products in enumerate(self._scores(b, queries, its_keys, k, count)):
                    score = b.fmul(products, scales)
                    if self._is_capped:
                        score = b.fmul(self.tanh(b, b.fdiv(score, caps)), caps)
                    score = b.select(self._first(b, b.sub(count, k)), score, least_of_all)
                    b.store(score, self.at(b, its_scores[head], k, FLOAT), align=4)
                    found[head] = b.select(b.fcmp_ordered(">", score, found[head]), score, found[head])
            smaller = []
            for head in heads:
                greatest, before = self.spread(b, self.greatest(b, most[head])), state[head]
                greatest = b.select(b.fcmp_ordered(">", greatest, before), greatest, before)
                smaller.append(self.exp(b, b.fsub(before, greatest)))
                state[head] = greatest
            totals = [b.fmul(state[many + head], smaller[head]) for head in heads]
            with self.loop(b, integer(0), count, integer(LANES), totals) as (k, found):
                for head in heads:
                    place = self.at(b, its_scores[head], k, FLOAT)
                    weight = self.exp(b, b.fsub(b.load(place, typ=FLOATS, align=4), state[head]))
                    weight = b.select(self._first(b, b.sub(count, k)), weight, zeros)
                    b.store(weight, place, align=4)
                    found[head] = b.fadd(found[head], weight)
            self._add_values(b, its_scores, its_values, count, smaller, its_sums)
            state[many:] = totals
        nothing = b.icmp_signed("<", seen, integer(1))
        for head in heads:
            whole = self.spread(b, self.sum(b, carried[many + head]))
            its_result = self.at(b, result, b.mul(to_next, integer(head)), self._kind)
            for block in self._blocks:
                place = self.at(b, its_sums[head], integer(block), FLOAT)
                quotient = b.fdiv(b.load(place, typ=FLOATS, align=4), whole)
                quotient = b.select(nothing, zeros, quotient)
                place = self.at(b, its_result, integer(block), self._kind)
                self.store_many(b, quotient, place, _left(self.size, block) or integer(LANES))
        b.ret_void()
        return function

    def _scores(self, b: Any, queries: list[list[list[Any]]], keys: list[Any], k: Any, count: Any) -> list[Any]:
        """Compute each head's dot products with 16 keys from slot k on; beyond `count`, that of the last key again.

        Args:
            b: builder.
            queries: by part of the keys and by head, the query's vectors.
            keys: by part, the address of the first key.
            k: the first of the 16.
            count: number of keys.
        """
        last, many = b.sub(count, integer(1)), len(queries[0])
        found: list[list[Any]] = [[] for _ in range(many)]
        for first in range(0, LANES, _KEYS[many]):
            its_keys = range(first, first + _KEYS[many])
            sums = [[splat(FLOAT, 0.0)] * len(its_keys) for _ in range(many)]
            for of_heads, address, size in zip(queries, keys, self._keys, strict=True):
                rows = [
                    self.at(b, address, b.mul(least(b, b.add(k, integer(j)), last), integer(size)), self._cached_kind)
                    for j in its_keys
                ]
                for at, block in enumerate(range(0, size, LANES)):
                    for j, row in enumerate(rows):
                        key = self._vector(b, row, size, block, self.cached)
                        for head, vectors in enumerate(of_heads):
                            sums[head][j] = self.fma(b, key, vectors[at], sums[head][j])
            for head in range(many):
                found[head] += self._merged(b, sums[head], LANES, LANES // len(its_keys))
        lanes = ir.Constant(ir.VectorType(I32, LANES), self._order())
        sums_of_heads = [self._merged(b, vectors, len(vectors), 1)[0] for vectors in found]
        return [b.shuffle_vector(one, one, lanes) for one in sums_of_heads]

    @staticmethod
    def _merged(b: Any, sums: list[Any], width: int, lanes: int) -> list[Any]:
        """Sum the lanes of each key by halves, from `width` to `lanes` of them: a step merges two vectors into one."""
        while width > lanes:
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
        return sums

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

    def _add_values(
        self, b: Any, weights: list[Any], values: Any, count: Any, smaller: list[Any], sums: list[Any]
    ) -> None:
        """Multiply each head's sums by `smaller`, and add weight · value in the order of the slots."""
        together = _SIDE_BY_SIDE[len(sums)]
        for first in range(0, len(self._blocks), together):
            blocks = self._blocks[first : first + together]
            places = [self.at(b, its_sums, integer(block), FLOAT) for its_sums in sums for block in blocks]
            factors = [factor for factor in smaller for _ in blocks]
            totals = [
                b.fmul(b.load(place, typ=FLOATS, align=4), factor)
                for place, factor in zip(places, factors, strict=True)
            ]
            with self.loop(b, integer(0), count, integer(1), totals) as (k, carried):
                of_heads = [self.spread(b, b.load(self.at(b, one, k, FLOAT), typ=FLOAT)) for one in weights]
                row = self.at(b, values, b.mul(k, integer(self.size)), self._cached_kind)
                for n, block in enumerate(blocks):
                    value = self._vector(b, row, self.size, block, self.cached)
                    for head, weight in enumerate(of_heads):
                        at = head * len(blocks) + n
                        carried[at] = self.fma(b, value, weight, carried[at])
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
