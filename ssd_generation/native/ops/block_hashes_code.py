"""Code that hashes the bytes of weights in blocks, as fast as memory gives them.

A hash notices changes; it is not meant to withstand an adversary. Each of a block's 16 lanes is a polynomial in 32-bit
words, modulo 2³² (Horner's rule, with an odd factor): a single word that changes always changes its lane.
"""

from __future__ import annotations

from llvmlite import ir

from ..codegen.builder import I8, I32, INTS, LANES, Module, integer, splat

__all__ = ["block_hashes_module"]

_CHAINS = 8
"""Polynomials computed next to each other: the processor multiplies for one while it waits for another."""

_VECTOR = 4 * LANES
"""Bytes of a vector."""

_FACTOR, _LAST_FACTOR = 0x01000193, 0x5BD1E995
"""Odd factors, within a chain and from chain to chain: the primes of FNV-1 and of MurmurHash2 (public domain)."""


def block_hashes_module(size: int) -> str:
    """Return the text of a module that hashes blocks of `size` bytes: `(n, 16)` words of 32 bits.

    The record: places of the bytes and of the hashes. n is the table's number of rows.

    Args:
        size: bytes of a block, a multiple of 512.
    """
    module = Module("block_hashes", "float32")
    b, task = module.kernel()
    blocks, hashes = task.operand(b, 2), task.operand(b, 4)
    first, end = task.share(b, task.entry(b, 0))
    with module.loop(b, first, end, integer(1), []) as (block, _):
        start = module.at(b, blocks, b.mul(block, integer(size)), I8)
        chains = [splat(I32, 0)] * _CHAINS
        with module.loop(b, integer(0), integer(size), integer(_CHAINS * _VECTOR), chains) as (at, carried):
            for chain in range(_CHAINS):
                place = module.at(b, start, b.add(at, integer(chain * _VECTOR)), I8)
                words = module.load(b, place, I32)
                carried[chain] = b.add(b.mul(carried[chain], splat(I32, _FACTOR)), words)
        total = ir.Constant(INTS, None)
        for chain in chains:
            total = b.add(b.mul(total, splat(I32, _LAST_FACTOR)), chain)
        b.store(total, module.at(b, hashes, b.mul(block, integer(_VECTOR)), I8), align=4)
    b.ret_void()
    return str(module.module)
