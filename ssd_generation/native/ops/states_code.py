"""Code for recurrent states in LLVM IR: steps of convolutions and scans.

A kernel goes through the tokens of each text in order and updates the state of the text's row, in place. A token's
result is computed in the same way whatever tokens come before it in the pass. All intermediate results are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..cache_table import FIELDS, HEADER, STATE_FIELDS, TEXT_FIELDS
from ..codegen.builder import ADDRESS, FLOAT, I32, I64, LANES, STORED, Module, Task, integer, splat

__all__ = ["states_module"]

_SIDE_BY_SIDE = (4, 2, 1)
"""Numbers of vectors of a state's columns that are computed at the same time, where there are as many."""


@dataclass(frozen=True)
class _Item:
    """Part of a text's state that is computed alone.

    Attributes:
        index: its index among the parts.
        source, working, saved: addresses of the part, as in `cache_table.STATE_FIELDS`.
        is_elsewhere: whether the source is another than the working state.
        begin, end: range of the text's tokens in the pass.
        save_at: token before which the state is saved.
    """

    index: Any
    source: Any
    working: Any
    saved: Any
    is_elsewhere: Any
    begin: Any
    end: Any
    save_at: Any


class _States(Module):
    """Kernels that update recurrent states.

    Args:
        activation: type of the results.
        state: type of the states.
    """

    def __init__(self, what: str, activation: str, state: str) -> None:
        super().__init__(f"states_{what}_{activation}_{state}", activation)
        self._state = state
        self._kind = STORED[activation]

    def _number(self, b: Any, address: Any, place: Any, stored: str) -> Any:
        """Load one number as float32, in all lanes."""
        its = self.at(b, address, place, STORED[stored])
        one = self.floats(b, self.load(b, its, STORED[stored], integer(1)), stored)
        return self.spread(b, b.extract_element(one, integer(0)))

    def _vector(self, b: Any, address: Any, place: Any, stored: str) -> Any:
        """Load 16 numbers as float32."""
        kind = STORED[stored]
        return self.floats(b, self.load(b, self.at(b, address, place, kind), kind), stored)

    def _store(self, b: Any, values: Any, address: Any, place: Any, stored: str) -> None:
        """Store 16 float32 numbers."""
        kind = STORED[stored]
        b.store(self.narrow(b, values, stored), self.at(b, address, place, kind), align=1)

    def _copy(self, b: Any, source: Any, target: Any, count: int) -> None:
        """Copy numbers of a state."""
        kind = STORED[self._state]
        with self.loop(b, integer(0), integer(count), integer(LANES), []) as (place, _):
            left = b.sub(integer(count), place)
            values = self.floats(b, self.load(b, self.at(b, source, place, kind), kind, left), self._state)
            self.store_many(b, values, self.at(b, target, place, kind), left, self._state)

    def _bring(self, b: Any, item: _Item, count: int) -> None:
        """Bring a part of the source to where the pass changes it."""
        with b.if_then(item.is_elsewhere):
            self._copy(b, item.source, item.working, count)

    def _save(self, b: Any, item: _Item, token: Any, count: int) -> None:
        """Save a part of the state before the token from which on tokens may be rejected."""
        with b.if_then(b.icmp_signed("==", token, item.save_at)):
            self._copy(b, item.working, item.saved, count)

    @contextmanager
    def _items(self, b: Any, task: Task, at: int, items: int, size: int) -> Iterator[_Item]:
        """Build the loop over the items of all texts.

        Args:
            at: place in the record of the layer's index; that of the state follows.
            items: number of items of a text, each of which has as many numbers of the state.
            size: numbers of a state in one row.
        """
        cache = b.inttoptr(task.entry(b, 2), ADDRESS)

        def entry(place: Any) -> Any:
            return b.load(self.at(b, cache, place, I64), typ=I64)

        layer = b.add(b.mul(task.field(b, at), integer(len(FIELDS))), integer(len(HEADER)))
        states = entry(b.add(layer, integer(FIELDS.index("states"))))
        state = b.add(states, b.mul(task.field(b, at + 1), integer(len(STATE_FIELDS))))
        addresses = [entry(b.add(state, integer(n))) for n in range(len(STATE_FIELDS))]
        total, each, after, texts = (
            entry(integer(HEADER.index(name))) for name in ("tokens", "tokens per text", "saved after", "texts")
        )
        first, end = task.share(b, b.mul(b.sdiv(total, each), integer(items)))
        with self.loop(b, first, end, integer(1), []) as (place, _):
            text, item = b.sdiv(place, integer(items)), b.srem(place, integer(items))
            row = entry(b.add(texts, b.mul(text, integer(len(TEXT_FIELDS)))))
            own = b.add(b.mul(row, integer(size)), b.mul(item, integer(size // items)))
            source, working, saved = (
                self.at(b, b.inttoptr(one, ADDRESS), own, STORED[self._state]) for one in addresses
            )
            begin = b.mul(text, each)
            may_save = b.icmp_signed("!=", addresses[2], integer(0))
            save_at = b.select(may_save, b.add(begin, after), integer(-1))
            is_elsewhere = b.icmp_signed("!=", addresses[0], addresses[1])
            yield _Item(item, source, working, saved, is_elsewhere, begin, b.add(begin, each), save_at)

    # ------------------------------------------------------------------------------------------------------------------

    def convolution(
        self, weight: str, bias_type: str, channels: int, taps: int, held_taps: int, activates: bool
    ) -> None:
        """Append each token to the last ones, and multiply the last K tokens by the weights of each channel.

        The record: x, y, weight `(C, K)`, bias `(C,)`, stride of x from a token to the next, layer, state. y is
        `(n, C)`.

        Args:
            weight: type of the weight.
            bias_type: type of the bias; empty where there is none.
            channels: C, a multiple of 16.
            taps: K.
            held_taps: number of tokens that the state `(C, …)` holds: K, or K − 1.
            activates: whether SiLU follows.
        """
        b, task = self.kernel()
        x, y, weights, biases = task.operand(b, 2), task.operand(b, 4), task.address(b, 6), task.address(b, 7)
        stride = task.field(b, 8)
        wide = ir.VectorType(STORED[self._state], LANES * held_taps)

        def lanes(numbers: list[int]) -> Any:
            return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)

        def together(values: list[Any]) -> Any:
            """Bring the taps of a channel next to each other: vectors are joined one after the other, and mixed."""
            joined = values[0]
            for k, value in enumerate(values[1:], start=1):
                count = LANES * k
                padded = b.shuffle_vector(value, value, lanes([at % LANES for at in range(count)]))
                joined = b.shuffle_vector(joined, padded, lanes([*range(count), *range(count, count + LANES)]))
            order = [LANES * k + at for at in range(LANES) for k in range(held_taps)]
            return b.shuffle_vector(joined, joined, lanes(order))

        with self._items(b, task, 9, channels // LANES, channels * held_taps) as item:
            channel = b.mul(item.index, integer(LANES))
            of_weights = self.at(b, weights, b.mul(channel, integer(taps)), STORED[weight])
            stored = b.load(of_weights, typ=ir.VectorType(STORED[weight], LANES * taps), align=1)
            factors = [
                self.floats(b, b.shuffle_vector(stored, stored, lanes([taps * at + k for at in range(LANES)])), weight)
                for k in range(taps)
            ]
            bias = self._vector(b, biases, channel, bias_type) if bias_type else splat(FLOAT, 0.0)
            held = b.load(item.source, typ=wide, align=1)
            last = [
                b.shuffle_vector(held, held, lanes([held_taps * at + k for at in range(LANES)]))
                for k in range(held_taps)
            ]
            with self.loop(b, item.begin, item.end, integer(1), last) as (token, carried):
                with b.if_then(b.icmp_signed("==", token, item.save_at)):
                    b.store(together(carried), item.saved, align=1)
                new = self.activations(b, x, b.add(b.mul(token, stride), channel), integer(LANES))
                window = [*carried, self.narrow(b, new, self._state)]
                carried[:] = window[-held_taps:]
                total = bias
                for factor, value in zip(factors, window[-taps:], strict=True):
                    total = self.fma(b, factor, self.floats(b, value, self._state), total)
                if activates:
                    total = self.silu(b, self.rounded(b, total))
                self._store(b, total, y, b.add(b.mul(token, integer(channels)), channel), self.activation)
            b.store(together(last), item.working, align=1)
        b.ret_void()

    # ------------------------------------------------------------------------------------------------------------------

    def recurrence(self, gates: str, channels: int) -> None:
        """Compute a step of a linear recurrence: h ← a h + x, y = h.

        The record: x, a, y, the strides of x and a from a token to the next, layer, state `(C,)`. y is `(n, C)`.
        (Griffin, De et al., arXiv 2402.19427, equation 4.)

        Args:
            gates: type of a.
            channels: C, a multiple of 16.
        """
        b, task = self.kernel()
        x, gate, y = (task.operand(b, at) for at in range(2, 8, 2))
        x_stride, gate_stride = task.field(b, 8), task.field(b, 9)
        with self._items(b, task, 10, channels // LANES, channels) as item:
            channel = b.mul(item.index, integer(LANES))
            state = [self._vector(b, item.source, integer(0), self._state)]
            with self.loop(b, item.begin, item.end, integer(1), state) as (token, carried):
                with b.if_then(b.icmp_signed("==", token, item.save_at)):
                    self._store(b, carried[0], item.saved, integer(0), self._state)
                decay = self._vector(b, gate, b.add(b.mul(token, gate_stride), channel), gates)
                value = self.activations(b, x, b.add(b.mul(token, x_stride), channel), integer(LANES))
                carried[0] = b.fadd(b.fmul(decay, carried[0]), value)
                self._store(b, carried[0], y, b.add(b.mul(token, integer(channels)), channel), self.activation)
            self._store(b, state[0], item.working, integer(0), self._state)
        b.ret_void()

    # ------------------------------------------------------------------------------------------------------------------

    def delta(
        self,
        gates: str,
        rates: str,
        key_heads: int,
        heads: int,
        keys: int,
        values: int,
        is_normed: bool,
        decays_each: bool,
    ) -> None:
        """Compute a step of the gated delta rule: S ← e^g S, δ = β (v − Sᵀ k), S ← S + k δᵀ, o = Sᵀ q / √K.

        The record: q, k, v, g, β, o, the strides of the first five from a token to the next, layer, state `(H, K, V)`.
        o is `(n, H, V)`. (Gated DeltaNet, Yang et al., arXiv 2412.06464, equation 10.)

        Args:
            gates: type of g.
            rates: type of β.
            key_heads: heads of q and k, each of which serves as many of v.
            heads: H.
            keys: K.
            values: V, a multiple of 16.
            is_normed: whether q and k are divided by their norms.
            decays_each: whether g has a number for each of the K, where it has one for a head otherwise.
        """
        b, task = self.kernel()
        q, k, v, g, beta, o = (task.operand(b, at) for at in range(2, 14, 2))
        strides = [task.field(b, at) for at in range(14, 19)]
        whole = -(-keys // LANES) * LANES
        queries, keyed, decays = (b.alloca(FLOAT, size=integer(whole)) for _ in range(3))
        one = ir.Constant(FLOAT, 1.0)
        together = next(count for count in _SIDE_BY_SIDE if values % (count * LANES) == 0)

        def normed(source: Any, target: Any, place: Any, scale: float) -> None:
            """Store the numbers of a head, normed and scaled."""
            factor = splat(FLOAT, scale)
            pieces = [(at, integer(min(LANES, keys - at))) for at in range(0, keys, LANES)]
            loaded = [self.activations(b, source, b.add(place, integer(at)), left) for at, left in pieces]
            if is_normed:
                total = splat(FLOAT, 0.0)
                for piece in loaded:
                    total = self.fma(b, piece, piece, total)
                root = self.call(b, "llvm.sqrt.f32", FLOAT, b.fadd(self.sum(b, total), ir.Constant(FLOAT, 1e-6)))
                inverse = self.spread(b, b.fdiv(one, root))
                loaded = [b.fmul(piece, inverse) for piece in loaded]
            for (at, _), piece in zip(pieces, loaded, strict=True):
                self.store_many(
                    b, b.fmul(piece, factor), self.at(b, target, integer(at), FLOAT), integer(LANES), "float32"
                )

        def at_key(table: Any, key: Any) -> Any:
            return self.spread(b, b.load(self.at(b, table, key, FLOAT), typ=FLOAT))

        with self._items(b, task, 19, heads, heads * keys * values) as item:
            head, own = item.index, item.working
            self._bring(b, item, keys * values)
            key_head = b.sdiv(head, integer(heads // key_heads))
            with self.loop(b, item.begin, item.end, integer(1), []) as (token, _):
                self._save(b, item, token, keys * values)
                of_keys = b.mul(key_head, integer(keys))
                normed(q, queries, b.add(b.mul(token, strides[0]), of_keys), keys**-0.5)
                normed(k, keyed, b.add(b.mul(token, strides[1]), of_keys), 1.0)
                if decays_each:
                    place = b.add(b.mul(token, strides[3]), b.mul(head, integer(keys)))
                    for at in range(0, keys, LANES):
                        its = self.at(b, g, b.add(place, integer(at)), STORED[gates])
                        loaded = self.floats(b, self.load(b, its, STORED[gates], integer(min(LANES, keys - at))), gates)
                        self.store_many(
                            b, self.exp(b, loaded), self.at(b, decays, integer(at), FLOAT), integer(LANES), "float32"
                        )
                else:
                    decay = self.exp(b, self._number(b, g, b.add(b.mul(token, strides[3]), head), gates))
                rate = self._number(b, beta, b.add(b.mul(token, strides[4]), head), rates)
                with self.loop(b, integer(0), integer(values), integer(together * LANES), []) as (column, _):

                    def places(key: Any, column: Any = column) -> list[Any]:
                        first = b.add(b.mul(key, integer(values)), column)
                        return [b.add(first, integer(at * LANES)) for at in range(together)]

                    read = [splat(FLOAT, 0.0)] * together
                    with self.loop(b, integer(0), integer(keys), integer(1), read) as (key, carried):
                        its = at_key(decays, key) if decays_each else decay
                        factor = at_key(keyed, key)
                        for at, place in enumerate(places(key)):
                            decayed = b.fmul(self._vector(b, own, place, self._state), its)
                            carried[at] = self.fma(b, decayed, factor, carried[at])
                    first = b.add(b.add(b.mul(token, strides[2]), b.mul(head, integer(values))), column)
                    change = [
                        b.fmul(
                            b.fsub(self.activations(b, v, b.add(first, integer(at * LANES)), integer(LANES)), read[at]),
                            rate,
                        )
                        for at in range(together)
                    ]
                    result = [splat(FLOAT, 0.0)] * together
                    with self.loop(b, integer(0), integer(keys), integer(1), result) as (key, carried):
                        its = at_key(decays, key) if decays_each else decay
                        factor, query = at_key(keyed, key), at_key(queries, key)
                        for at, place in enumerate(places(key)):
                            decayed = b.fmul(self._vector(b, own, place, self._state), its)
                            after = self.fma(b, factor, change[at], decayed)
                            self._store(b, after, own, place, self._state)
                            carried[at] = self.fma(b, after, query, carried[at])
                    first = b.add(b.mul(b.add(b.mul(token, integer(heads)), head), integer(values)), column)
                    for at, values_of in enumerate(result):
                        self._store(b, values_of, o, b.add(first, integer(at * LANES)), self.activation)
        b.ret_void()

    # ------------------------------------------------------------------------------------------------------------------

    def scan(
        self,
        steps: str,
        heads: int,
        size: int,
        groups: int,
        states: int,
        decays_each: bool,
        has_skip: bool,
        has_bias: bool,
        is_softplus: bool,
        has_gate: bool,
    ) -> None:
        """Compute a step of a selective scan: h ← e^(Δ A) h + Δ x Bᵀ, y = h C + D x.

        The record: x, Δ, B, C, z, y, the strides of the first five from a token to the next, A, D and the bias of Δ,
        layer, state `(H, P, N)`. y is `(n, H, P)`. (Mamba, Gu and Dao, arXiv 2312.00752, equation 2; Mamba 2, Dao and
        Gu, arXiv 2405.21060.)

        Args:
            steps: type of Δ.
            heads: H.
            size: P, the numbers of a head.
            groups: number of B and C, each of which serves as many heads.
            states: N, a multiple of 16.
            decays_each: whether A is `(H, N)`, where it is `(H,)` otherwise.
            has_skip: whether there is a D, `(H,)`.
            has_bias: whether Δ has a bias, `(H,)`.
            is_softplus: whether Δ is softplus of what is given.
            has_gate: whether y is multiplied by SiLU of z.
        """
        b, task = self.kernel()
        x, dt, to_state, from_state, z, y = (task.operand(b, at) for at in range(2, 14, 2))
        x_stride, dt_stride, b_stride, c_stride, z_stride = (task.field(b, at) for at in range(14, 19))
        decay_of, skip_of, bias_of = (task.address(b, at) for at in (19, 20, 21))
        with self._items(b, task, 22, heads, heads * size * states) as item:
            head, own = item.index, item.working
            self._bring(b, item, size * states)
            group = b.sdiv(head, integer(heads // groups))
            with self.loop(b, item.begin, item.end, integer(1), []) as (token, _):
                self._save(b, item, token, size * states)
                step = self._number(b, dt, b.add(b.mul(token, dt_stride), head), steps)
                if has_bias:
                    step = b.fadd(step, self._number(b, bias_of, head, "float32"))
                    step = self.floats(b, self.narrow(b, step, steps), steps)
                if is_softplus:
                    step = self.floats(b, self.narrow(b, self.softplus(b, step), steps), steps)
                if not decays_each:
                    its_decay = self.exp(b, b.fmul(step, self._number(b, decay_of, head, "float32")))
                its_skip = self._number(b, skip_of, head, "float32") if has_skip else None
                of_b = b.add(b.mul(token, b_stride), b.mul(group, integer(states)))
                of_c = b.add(b.mul(token, c_stride), b.mul(group, integer(states)))
                first = b.mul(head, integer(size))
                with self.loop(b, integer(0), integer(size), integer(1), []) as (at, _):
                    place = b.add(first, at)
                    value = self._number(b, x, b.add(b.mul(token, x_stride), place), self.activation)
                    moved = b.fmul(step, value)
                    totals = [splat(FLOAT, 0.0)]
                    with self.loop(b, integer(0), integer(states), integer(LANES), totals) as (n, carried):
                        if decays_each:
                            its = b.add(b.mul(head, integer(states)), n)
                            its_decay = self.exp(b, b.fmul(step, self._vector(b, decay_of, its, "float32")))
                        before = self._vector(b, own, b.add(b.mul(at, integer(states)), n), self._state)
                        added = b.fmul(moved, self._vector(b, to_state, b.add(of_b, n), self.activation))
                        after = self.fma(b, before, its_decay, added)
                        self._store(b, after, own, b.add(b.mul(at, integer(states)), n), self._state)
                        factor = self._vector(b, from_state, b.add(of_c, n), self.activation)
                        carried[0] = self.fma(b, after, factor, carried[0])
                    result = self.spread(b, self.sum(b, totals[0]))
                    if its_skip is not None:
                        result = self.fma(b, value, its_skip, self.rounded(b, result))
                    if has_gate:
                        gate = self._number(b, z, b.add(b.mul(token, z_stride), place), self.activation)
                        result = b.fmul(self.rounded(b, result), self.silu(b, gate))
                    to = self.at(b, y, b.add(b.mul(token, integer(heads * size)), place), self._kind)
                    self.store(b, b.extract_element(result, integer(0)), to)
        b.ret_void()


def states_module(what: str, activation: str, state: str, *parts: Any) -> str:
    """Return the text of a module whose kernel updates recurrent states.

    Args:
        what: `"convolution"`, `"recurrence"`, `"delta"` or `"scan"`; see the methods of `_States`.
        activation: type of activations: `"float32"`, `"bfloat16"` or `"float16"`.
        state: type of the states.
        parts: the method's arguments.
    """
    module = _States(what, activation, state)
    getattr(module, what)(*parts)
    return str(module.module)
