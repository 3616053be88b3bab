"""Code that draws the exponentials of torch's generator of a CPU, many at once.

torch takes two 32-bit numbers of a Mersenne twister for each (mt19937: Matsumoto and Nishimura, 1998), of which 53 bits
are u, and returns −ln(1 − u) in float64, rounded to float32. It draws them one by one. Here vectors of 16 are drawn;
all threads generate the whole stream, since that takes a fraction of the time, and each converts some chunks of it.

The logarithm of this file differs from the C library's by a few units in the last place of float64, which may round
another way where the number lies close to the middle between two of float32: such numbers are listed, to be computed
by the library itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..codegen.builder import I32, I64, INTS, LANES, Module, integer, least, splat, vector

__all__ = ["exponentials_module"]

_BLOCK, _SHIFT = 624, 397
_MATRIX, _UPPER, _LOWER = 0x9908B0DF, 0x80000000, 0x7FFFFFFF
_DOUBLE = ir.DoubleType()
_LONGS, _DOUBLES = vector(I64), vector(_DOUBLE)

_ROOT = 0x3FE6A09E667F3BCD
"""Bits of √½ in float64."""

_ONE, _FRACTION = 0x3FF0000000000000, 0x000FFFFFFFFFFFFF

_SERIES = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip
"""Remez' polynomial for ln((1 + s) / (1 − s)) / s − 2 in s², to 2^−58 (Sun's fdlibm, e_log.c)."""

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two parts, of which the first times an exponent is exact."""


class _Exponentials(Module):
    """The kernel, with the arguments of `exponentials_module`."""

    def __init__(self, chunk: int, work: int, listed: int) -> None:
        super().__init__("exponentials", "float32")
        self._chunk, self._work, self._listed = chunk, work, listed

    def build(self) -> None:
        """Add the kernel. The record: addresses and counts, as `exponentials_module` lists them."""
        b, task = self.kernel()
        numbers, state, after, work, lists = (task.address(b, at) for at in range(2, 7))
        count, used, window = (task.field(b, at) for at in range(7, 10))
        words = self.at(b, work, b.mul(task.part, integer(self._work)), I32)
        listed = self.at(b, lists, b.mul(task.part, integer(1 + 2 * self._listed)), I64)
        b.store(integer(0), listed)
        with self.loop(b, integer(0), integer(_BLOCK), integer(LANES), []) as (at, _):
            stored = b.load(self.at(b, state, at, I64), typ=_LONGS, align=8)
            b.store(b.trunc(stored, INTS), self.at(b, words, at, I32), align=4)
        # The state's last number is the first half of a pair where an odd number of words is left.
        odd = b.and_(used, integer(1))
        here = least(b, b.ashr(b.sub(integer(_BLOCK), used), integer(1)), count)
        mine = b.select(b.icmp_signed("==", task.part, integer(0)), here, integer(0))
        self._convert(b, self.at(b, words, used, I32), numbers, integer(0), mine, listed, window)
        left = b.sub(count, here)
        chunks = b.sdiv(b.add(left, integer(self._chunk // 2 - 1)), integer(self._chunk // 2))
        # The block in which the stream ends; 0 is the one that it began with.
        last = b.sdiv(b.sub(b.add(used, b.mul(count, integer(2))), integer(1)), integer(_BLOCK))
        with self.loop(b, integer(0), chunks, integer(1), []) as (chunk, _):
            self._generate(b, words)
            begun = b.mul(chunk, integer(self._chunk // 2))
            of_chunk = least(b, b.sub(left, begun), integer(self._chunk // 2))
            is_mine = b.icmp_signed("==", b.srem(chunk, task.parts), task.part)
            of_chunk = b.select(is_mine, of_chunk, integer(0))
            pairs = self.at(b, words, b.sub(integer(_BLOCK), odd), I32)
            self._convert(b, pairs, numbers, b.add(here, begun), of_chunk, listed, window)
            block = b.sub(last, b.add(b.mul(chunk, integer(self._chunk // _BLOCK)), integer(1)))
            is_last = b.and_(
                b.icmp_signed("==", task.part, integer(0)), b.icmp_unsigned("<", block, integer(self._chunk // _BLOCK))
            )
            ending = self.at(b, words, b.mul(b.add(block, integer(1)), integer(_BLOCK)), I32)
            with self.loop(b, integer(0), b.select(is_last, integer(_BLOCK), integer(0)), integer(LANES), []) as (
                at,
                _,
            ):
                its = b.load(self.at(b, ending, at, I32), typ=INTS, align=4)
                b.store(b.zext(its, _LONGS), self.at(b, after, at, I64), align=8)
            with self.loop(b, integer(0), integer(_BLOCK), integer(LANES), []) as (at, _):
                moved = b.load(self.at(b, words, b.add(at, integer(self._chunk)), I32), typ=INTS, align=4)
                b.store(moved, self.at(b, words, at, I32), align=4)
        b.ret_void()

    def _generate(self, b: Any, words: Any) -> None:
        """Continue the recurrence x[k + 624] = x[k + 397] ⊕ (upper bit of x[k], lower ones of x[k + 1]) · A."""
        with self.loop(b, integer(0), integer(self._chunk), integer(LANES), []) as (at, _):
            one, other, far = (
                b.load(self.at(b, words, b.add(at, integer(shift)), I32), typ=INTS, align=4) for shift in (0, 1, _SHIFT)
            )
            joined = b.or_(b.and_(one, splat(I32, _UPPER)), b.and_(other, splat(I32, _LOWER)))
            is_odd = b.sub(splat(I32, 0), b.and_(other, splat(I32, 1)))
            new = b.xor(b.xor(far, b.lshr(joined, splat(I32, 1))), b.and_(is_odd, splat(I32, _MATRIX)))
            b.store(new, self.at(b, words, b.add(at, integer(_BLOCK)), I32), align=4)

    def _convert(self, b: Any, words: Any, numbers: Any, first: Any, count: Any, listed: Any, window: Any) -> None:
        """Store `count` numbers from number `first` on, each from two words."""
        with self.loop(b, integer(0), count, integer(LANES), []) as (at, _):
            start = b.mul(at, integer(2))
            low, high = (
                self._tempered(b, b.load(self.at(b, words, b.add(start, integer(shift)), I32), typ=INTS, align=4))
                for shift in (0, LANES)
            )
            first_words, second_words = (
                b.shuffle_vector(low, high, ir.Constant(INTS, list(range(half, 2 * LANES, 2)))) for half in (0, 1)
            )
            rest = self._remainder(b, first_words, second_words)
            value = self._minus_log(b, rest)
            left = b.sub(count, at)
            place = self.at(b, numbers, b.add(first, at), ir.FloatType())
            self.store_many(b, b.fptrunc(value, vector(ir.FloatType())), place, left)
            # Distance from the middle between two float32 numbers, in units in the last place of float64.
            bits = b.and_(b.bitcast(value, _LONGS), splat(I64, (1 << 29) - 1))
            from_middle = b.add(b.sub(bits, splat(I64, 1 << 28)), self.spread(b, window))
            close = b.icmp_unsigned("<=", from_middle, self.spread(b, b.mul(window, integer(2))))
            close = b.and_(close, self._first(b, left))
            some = b.icmp_unsigned("!=", b.bitcast(close, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))
            with self.loop(b, integer(0), b.select(some, integer(LANES), integer(0)), integer(1), []) as (lane, _):
                found = b.load(listed, typ=I64)
                room = b.and_(b.extract_element(close, lane), b.icmp_signed("<", found, integer(self._listed)))
                entry = b.add(b.mul(least(b, found, integer(self._listed - 1)), integer(2)), integer(1))
                index_at, rest_at = (self.at(b, listed, b.add(entry, integer(more)), I64) for more in (0, 1))
                index = b.add(b.add(first, at), lane)
                b.store(b.select(room, index, b.load(index_at, typ=I64)), index_at)
                exact = b.extract_element(b.bitcast(rest, _LONGS), lane)
                b.store(b.select(room, exact, b.load(rest_at, typ=I64)), rest_at)
                b.store(b.add(found, b.zext(b.extract_element(close, lane), I64)), listed)

    @staticmethod
    def _tempered(b: Any, x: Any) -> Any:
        x = b.xor(x, b.lshr(x, splat(I32, 11)))
        x = b.xor(x, b.and_(b.shl(x, splat(I32, 7)), splat(I32, 0x9D2C5680)))
        x = b.xor(x, b.and_(b.shl(x, splat(I32, 15)), splat(I32, 0xEFC60000)))
        return b.xor(x, b.lshr(x, splat(I32, 18)))

    @staticmethod
    def _remainder(b: Any, high: Any, low: Any) -> Any:
        """Compute 1 − u exactly, where u · 2⁵³ is the lower 53 bits of both words."""
        # Placed under the exponents of 2⁸⁴ and 2⁵², whole numbers need no conversion, which AVX2 does not have.
        upper = b.or_(b.zext(b.and_(high, splat(I32, 0x1FFFFF)), _LONGS), splat(I64, 0x4530000000000000))
        lower = b.or_(b.zext(low, _LONGS), splat(I64, 0x4330000000000000))
        upper = b.fsub(b.bitcast(upper, _DOUBLES), splat(_DOUBLE, 2.0**84 + 2.0**52))
        whole = b.fadd(upper, b.bitcast(lower, _DOUBLES))
        return b.fmul(b.fsub(splat(_DOUBLE, 2.0**53), whole), splat(_DOUBLE, 2.0**-53))

    def _minus_log(self, b: Any, x: Any) -> Any:
        """Compute −ln x of normal numbers up to 1, to two units in the last place (fdlibm, e_log.c)."""
        shifted = b.add(b.bitcast(x, _LONGS), splat(I64, _ONE - _ROOT))
        exponent = b.or_(b.lshr(shifted, splat(I64, 52)), splat(I64, 0x4330000000000000))
        n = b.fsub(b.bitcast(exponent, _DOUBLES), splat(_DOUBLE, 2.0**52 + 1023))
        # x = 2ⁿ · (1 + f), √½ ≤ 1 + f < √2
        fraction = b.add(b.and_(shifted, splat(I64, _FRACTION)), splat(I64, _ROOT))
        f = b.fsub(b.bitcast(fraction, _DOUBLES), splat(_DOUBLE, 1.0))
        s = b.fdiv(f, b.fadd(f, splat(_DOUBLE, 2.0)))
        z = b.fmul(s, s)
        series = splat(_DOUBLE, _SERIES[-1])
        for factor in reversed(_SERIES[:-1]):
            series = self._fma(b, series, z, splat(_DOUBLE, factor))
        half = b.fmul(b.fmul(f, f), splat(_DOUBLE, 0.5))
        small = b.fmul(s, self._fma(b, series, z, half))
        small = self._fma(b, n, splat(_DOUBLE, _LN2_LOW), small)
        small = b.fsub(b.fsub(half, small), f)
        return b.fsub(small, b.fmul(n, splat(_DOUBLE, _LN2_HIGH)))

    def _fma(self, b: Any, one: Any, other: Any, total: Any) -> Any:
        return self.call(b, f"llvm.fma.v{LANES}f64", _DOUBLES, one, other, total)


def exponentials_module(chunk: int, work: int, listed: int) -> str:
    """Return the text of a module that continues the stream of a Mersenne twister.

    The record:

    - addresses of the numbers (float32), of the generator's 624 words before and after (64 bits each), of each part's
      memory (words of 32 bits), and of its list: the number of entries (64 bits), then each one's index and the bits of
      1 − u in float64;
    - number of numbers; number of words of the state that are used up; distance in units of the last place of float64
      within which numbers are listed.

    The words after are written where the stream reaches another state.

    Args:
        chunk: words that are generated before any is converted, a multiple of 624 and of 32.
        work: words of a part's memory: 656 more than `chunk`, or more.
        listed: most entries of a list; its number goes on counting.
    """
    module = _Exponentials(chunk, work, listed)
    module.build()
    return str(module.module)
