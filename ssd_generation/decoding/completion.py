"""Leave the cache of a call as plain `generate` leaves it."""

from __future__ import annotations

from ..cache.buffered_layers import reaches_back
from ..cache.recurrent import Checkpoint
from ..forward.forward import Forward
from .batch_rows import Rows

__all__ = ["complete_cache"]


def complete_cache(forward: Forward, rows: Rows) -> int:
    """Extend a cache to all committed tokens but the last one, in the columns of the output.

    Plain decoding feeds unmasked padding to rows that ended before others. Here these rows have rested, so their passes
    are made up for. (A sliding window that no longer reaches back as far stays as it is.)

    Args:
        forward: the target's passes.
        rows: the texts, and their cache.

    Returns:
        Number of passes that this took.
    """
    rows.align()
    length = rows.committed_slots
    if (checkpoint := rows.context.checkpoint) is not None:
        return _complete_states(forward, rows, checkpoint)
    before = rows.prompt_length - rows.prompt_slots  # columns of the output that the cache has no slots for
    start = min(rows.last_columns) - before
    if start >= length or not reaches_back(rows.context.cache, length - start):
        return 0
    # A pass may not reach across the length at which a rotary embedding changes.
    block = 1 if rows.rotary else length - start
    for layer in rows.context.cache.layers:
        layer.crop(start - length)
    mask = rows.context.mask
    for slot in range(start, length, block):
        rows.go_to(slot, mask)
        column = slot + before
        forward.target(rows.tokens[:, column : column + block], rows.context, rows.whole_text())
    return len(range(start, length, block))


def _complete_states(forward: Forward, rows: Rows, checkpoint: Checkpoint) -> int:
    owed = checkpoint.begin(rows.context.cache, rows.committed_slots, may_fail=False)
    if owed is None:
        return 0
    rows.go_to(checkpoint.length, rows.context.mask)
    forward.target(owed, rows.context, rows.whole_text())
    return 1
