"""Conversion of a text's keys and values to transformers' static cache, where a caller requested one."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, StaticCache

__all__ = ["fill_static"]


def fill_static(static: StaticCache, cache: Cache) -> StaticCache:
    """Copy the contents of a dynamic cache into a static one, as if its tokens had been decoded with that.

    Args:
        static: new static cache, with room for all of it.
        cache: cache of plain dynamic layers (`drop_buffers`).

    Returns:
        The same static cache.
    """
    layers: list[Any] = static.layers
    for target, layer in zip(layers, cache.layers, strict=True):
        source: Any = layer
        if not source.is_initialized or source.keys is None:
            continue
        held, seen = source.keys.shape[2], source.get_seq_length()
        if seen == held:
            target.update(source.keys, source.values)
            continue
        # A window of a static cache holds one more token, which no later one sees.
        target.lazy_initialization(source.keys, source.values)
        for mine, theirs in ((target.keys, source.keys), (target.values, source.values)):
            mine[:, :, mine.shape[2] - held :] = theirs
        target.cumulative_length_int = seen
    return static
