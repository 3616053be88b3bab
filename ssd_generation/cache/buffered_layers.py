"""KV cache layers with a buffer of spare slots, and the draft's view of them.

Shapes: keys and values are `(batch_size, num_heads, sequence_length, head_dim)`; *slots* are positions along
`sequence_length`, the same for all rows. transformers' own `DynamicLayer` copies all slots for each new token. The
layers here have a *buffer*, a tensor with spare slots after the valid ones: a pass writes its keys and values into the
spare slots and attends to a view, `crop` moves a counter. A draft writes after the valid slots of the same buffer, so
nothing of the prefix is copied to draft, and nothing of the target's cache changes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer as _StatesAndKeys

from .own_lists import ListedStates, lists_of
from .recurrent import crop_attention, fork_states, is_known, keeps_states, replace_states, states_in

__all__ = [
    "BufferedLayer",
    "BufferedSlidingLayer",
    "BufferedStatesLayer",
    "DraftCache",
    "FixedLayer",
    "GhostLayer",
    "add_buffers",
    "append_written",
    "can_repeat_rows",
    "draft_cache",
    "drop_buffers",
    "fix_unwritten",
    "keep_length",
    "move_rows",
    "repeat_rows",
    "spare_slots",
    "trim_windows",
]

_MIN_SPARE = 32
"""Smallest number of slots added when a buffer grows."""


def spare_slots(length: int) -> int:
    """Return the number of spare slots of a buffer over `length` tokens."""
    # A thirty-second of the context: the buffer is copied once in that many tokens, and takes at most 3 % more memory
    # than the keys and values themselves.
    return max(_MIN_SPARE, length // 32)


def _new_buffer(like: torch.Tensor, slots: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:2], slots, like.shape[3]))


class BufferedLayer(DynamicLayer):
    """A `DynamicLayer` that appends in place.

    The valid slots are `start … end` of two tensors, `key_buffer` and `value_buffer`; a full-attention layer starts at
    0. `keys` and `values` are views of them, made on access; assigning to them, as transformers' own methods do, adopts
    the tensor.
    """

    key_buffer: torch.Tensor | None
    value_buffer: torch.Tensor | None

    def __init__(self, **kwargs: Any) -> None:
        self.key_buffer = self.value_buffer = None
        self.start = self.end = 0
        super().__init__(**kwargs)

    def _first(self) -> int:
        """Return the first slot that the next token sees."""
        return self.start

    @property
    def keys(self) -> torch.Tensor | None:
        """View of the visible keys, `(batch_size, num_heads, sequence_length, head_dim)`."""
        return None if self.key_buffer is None else self.key_buffer[:, :, self._first() : self.end]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._take_over(keys, self.values)

    @property
    def values(self) -> torch.Tensor | None:
        """View of the visible values, `(batch_size, num_heads, sequence_length, head_dim)`."""
        return None if self.value_buffer is None else self.value_buffer[:, :, self._first() : self.end]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._take_over(self.keys, values)

    def _take_over(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Hold these tensors from now on. They are copied when the buffer first has to grow."""
        self.key_buffer, self.value_buffer = keys, values
        known = keys if keys is not None else values
        self.start, self.end = 0, 0 if known is None else known.shape[2]

    def adopt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start from keys and values that another layer held."""
        self.dtype, self.device = keys.dtype, keys.device
        self._take_over(keys, values)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.adopt(_new_buffer(key_states, 0), _new_buffer(value_states, 0))

    def reserve(self, slots: int, drafted: int = 0) -> None:
        """Make sure that `slots` slots fit after the valid ones, without changing the layer's contents.

        The first `drafted` of those slots hold a draft already, which is retained.
        """
        assert self.key_buffer is not None and self.value_buffer is not None
        if self.end + slots <= self.key_buffer.shape[2]:
            return
        self._forget()
        length = self.end - self.start
        buffers = []
        for buffer in (self.key_buffer, self.value_buffer):
            larger = _new_buffer(buffer, length + slots + spare_slots(length + slots))
            larger[:, :, : length + drafted] = buffer[:, :, self.start : self.end + drafted]
            buffers.append(larger)
        self.key_buffer, self.value_buffer = buffers
        self.start, self.end = 0, length

    def _forget(self) -> None:
        """Drop slots that no pass can see any more."""

    def write(self, at: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write into slots `at …` of the buffer."""
        assert self.key_buffer is not None and self.value_buffer is not None
        stop = at + key_states.shape[2]
        self.key_buffer[:, :, at:stop] = key_states
        self.value_buffer[:, :, at:stop] = value_states

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        self.reserve(count)
        first = self._first()
        self.write(self.end, key_states, value_states)
        self.end += count
        assert self.key_buffer is not None and self.value_buffer is not None
        return self.key_buffer[:, :, first : self.end], self.value_buffer[:, :, first : self.end]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop({tokens_to_remove})`: a positive number is not supported. Pass the number of tokens to remove "
                "as a negative one."
            )
        if self.is_initialized:
            self.end = max(self.end + tokens_to_remove, self.start)

    def get_seq_length(self) -> int:
        return self.end if self.is_initialized else 0

    def holds_all(self, slots: int) -> bool:
        """Tell whether the layer holds exactly `slots` slots, and the next token sees every one of them."""
        return self.is_initialized and self.start == self._first() == 0 and self.end == slots

    def repeat_rows(self, which: torch.Tensor) -> None:
        """Hold the rows of this layer with these indices, in this order, with room for more tokens."""
        if not self.is_initialized:
            return
        length, buffers = self.end - self.start, []
        for buffer in (self.key_buffer, self.value_buffer):
            assert buffer is not None
            shape = (len(which), buffer.shape[1], length + spare_slots(length), buffer.shape[3])
            larger = buffer.new_empty(shape)
            larger[:, :, :length] = buffer[which, :, self.start : self.end]
            buffers.append(larger)
        self.key_buffer, self.value_buffer = buffers
        self.start, self.end = 0, length

    def move_rows(self, moves: Sequence[int], slots: int) -> None:
        """Move the rows of this layer; arguments as in the function `move_rows`."""
        if not self.is_initialized:
            return
        assert self.key_buffer is not None and self.value_buffer is not None
        end = self.end - (self.get_seq_length() - slots)
        for row, move in enumerate(moves):
            source, target = self.start + max(-move, 0), self.start + max(move, 0)
            length = min(end - target, self.end - source)
            if move == 0 or length <= 0:
                continue
            for buffer in (self.key_buffer, self.value_buffer):
                buffer[row, :, target : target + length] = buffer[row, :, source : source + length].clone()
        self.end = end


class FixedLayer(BufferedLayer):
    """Keys and values of input other than text, such as an image in cross-attention: no pass adds to them."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: no token of the text is in this layer."""

    def move_rows(self, moves: Sequence[int], slots: int) -> None:
        """Do nothing: the slots of this layer are not the text's."""


class BufferedStatesLayer(_StatesAndKeys, BufferedLayer):
    """A layer of recurrent states and of keys and values, which appends these in place."""

    has_known_states = True

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        BufferedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    @classmethod
    def of(cls, layer: Any) -> BufferedStatesLayer:
        """Return a layer with the states of another one, and without keys and values."""
        made = cls(layer.number_of_states)
        _give_states(layer, made)
        return made

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        kind: Any = BufferedLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove keys and values of the last tokens; states are restored from a checkpoint."""
        BufferedLayer.crop(self, tokens_to_remove)


def _give_states(source: Any, target: Any) -> None:
    """Make a layer hold the states of another one, the same tensors."""
    for name in vars(LinearAttentionLayer(number_of_states=source.number_of_states)):
        if name not in ("dtype", "device"):
            setattr(target, name, getattr(source, name))


class BufferedSlidingLayer(BufferedLayer):
    """A `DynamicSlidingWindowLayer` that appends in place and can always be rolled back by its last tokens.

    The buffer holds the last `sliding_window - 1` slots and a few older ones; the older ones are dropped when the
    buffer is full.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, history: int = 0, **kwargs: Any) -> None:
        self.sliding_window = int(sliding_window)
        self.cumulative_length = 0
        self.history = history
        """Number of slots before the window that are retained as well, for rows of a batch that lead the others."""
        self.record_past = True
        super().__init__(**kwargs)

    @property
    def _sliding_window_tensor(self) -> torch.Tensor:
        return torch.tensor(self.sliding_window, dtype=torch.long, device=getattr(self, "device", None))

    def activate_past_recording(self) -> None:
        """Do nothing: the past needed to roll one pass back is always retained."""

    def _first(self) -> int:
        return max(self.start, self.end - self.sliding_window + 1)

    def _forget(self) -> None:
        self.start = max(self.start, self._first() - self.history)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cumulative_length += key_states.shape[2]
        return super().update(key_states, value_states)

    def trim(self) -> None:
        """Free the memory of slots that no pass will see (after a long prompt)."""
        if (
            self.key_buffer is not None
            and self.key_buffer.shape[2] > 2 * (self.sliding_window + self.history) + _MIN_SPARE
        ):
            self.reserve(self.key_buffer.shape[2] - self.end + 1)

    def crop(self, tokens_to_remove: int) -> None:
        before = self.end
        super().crop(tokens_to_remove)
        self.cumulative_length -= before - self.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _sliding_mask_sizes(self.cumulative_length, self.sliding_window, query_length)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.sliding_window

    def move_rows(self, moves: Sequence[int], slots: int) -> None:
        super().move_rows(moves, slots)
        self.cumulative_length = slots


def _sliding_mask_sizes(seen: int, window: int, query_length: int) -> tuple[int, int]:
    """Return `(kv_length, kv_offset)` of a sliding layer after `seen` tokens, as in `DynamicSlidingWindowLayer`."""
    return min(seen, window - 1) + query_length, max(seen - window + 1, 0)


# ----------------------------------------------------------------------------------------------------------------------
# the draft's view


class _DraftLayer(CacheLayerMixin):
    """View that a draft has of a layer with a buffer: the valid slots, followed by the draft's own."""

    is_sliding = False

    def __init__(self, base: BufferedLayer) -> None:
        super().__init__()
        self.base = base
        self.is_initialized = base.is_initialized  # false where a model skips a layer (mllama, without an image)
        self.drafted = 0

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys that the next pass of the draft sees; mllama checks whether there are any."""
        return self._seen(self.base.key_buffer)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        pass  # transformers' class assigns `None` at first

    @property
    def values(self) -> torch.Tensor | None:
        """Values that the next pass of the draft sees."""
        return self._seen(self.base.value_buffer)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        pass

    def _seen(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        return None if buffer is None else buffer[:, :, self._first_visible() : self.base.end + self.drafted]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a draft starts from a cache that holds the prefix")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        base, count = self.base, key_states.shape[2]
        base.reserve(self.drafted + count, self.drafted)
        assert base.key_buffer is not None and base.value_buffer is not None
        base.write(base.end + self.drafted, key_states, value_states)
        first = self._first_visible()
        self.drafted += count
        stop = base.end + self.drafted
        return base.key_buffer[:, :, first:stop], base.value_buffer[:, :, first:stop]

    def _first_visible(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.base.get_seq_length() + self.drafted

    def get_max_length(self) -> int:
        return -1


class _SlidingDraftLayer(_DraftLayer):
    """View that a draft has of a sliding layer with a buffer."""

    is_sliding = True
    base: BufferedSlidingLayer

    def _first_visible(self) -> int:
        return max(self.base.start, self.base.end + self.drafted - self.base.sliding_window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _sliding_mask_sizes(self.get_seq_length(), self.base.sliding_window, query_length)

    def get_max_length(self) -> int:
        return self.base.sliding_window


class GhostLayer(CacheLayerMixin):
    """Placeholder for the cache layer of a skipped attention: it holds nothing and has the length of a live layer.

    Masks and positions are derived from the first cache layer of each kind, which may be a skipped one.
    """

    is_croppable = True

    def __init__(self, layer: CacheLayerMixin, live: CacheLayerMixin) -> None:
        super().__init__()
        self.live = live
        self.is_sliding = bool(getattr(layer, "is_sliding", False))
        self.sliding_window = getattr(layer, "sliding_window", None)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._refuse()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse()
        raise AssertionError

    @staticmethod
    def _refuse() -> None:
        raise RuntimeError(
            "This cache was filled in draft mode: it has no keys and values for the attention sub-layers that were "
            "skipped. "
            "Start the target model with a new cache."
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_sliding and self.sliding_window is not None:
            return _sliding_mask_sizes(self.get_seq_length(), self.sliding_window, query_length)
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.live.get_seq_length()  # type: ignore[no-any-return]

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: the length is the live layer's."""

    def reset(self) -> None:
        """Do nothing: the length is the live layer's."""


class DraftCache(Cache):
    """Cache of drafting passes: the target's prefix, read in place, followed by the draft's own tokens.

    A layer whose attention is skipped is never written to; a live layer of the same kind replaces it, so that masks and
    positions, which transformers derives from the first layer of each kind, are right.

    Args:
        target: the target's cache, holding the verified prefix. It is never written to.
        skipped: indices of the layers whose attention the draft skips.
    """

    def __init__(self, target: Cache, skipped: frozenset[int]) -> None:
        self.target = target
        self.skipped = skipped
        Cache.__init__(self, layers=self._views())  # not `super()`: there may be another base class (`draft_cache`)

    def _views(self) -> list[Any]:
        layers = self.target.layers
        self._sources = list(layers)
        views: list[Any] = []
        for index, layer in enumerate(layers):
            if index in self.skipped:  # a layer without a length holds states, which a skipped mixer does not touch
                views.append(None if isinstance(layer, CacheLayerMixin) else layer)
            elif keeps_states(layer):
                views.append(fork_states(layer))
            elif not isinstance(layer, CacheLayerMixin):
                views.append(layer)
            elif isinstance(layer, BufferedSlidingLayer):
                views.append(_SlidingDraftLayer(layer))
            elif isinstance(layer, BufferedLayer):
                views.append(_DraftLayer(layer))
            else:
                views.append(_fork(layer))
        live = [view for view in views if isinstance(view, CacheLayerMixin)]
        for index, layer in enumerate(layers):
            if views[index] is None:
                sliding = bool(getattr(layer, "is_sliding", False))
                same = [view for view in live if bool(view.is_sliding) == sliding]
                views[index] = same[0] if same else GhostLayer(layer, live[0])
        return views

    def rewind(self) -> None:
        """Drop the drafted tokens and follow the target's cache as it is now."""
        if any(a is not b for a, b in zip(self._sources, self.target.layers, strict=True)):
            self.layers = self._views()
            return
        for index, view in enumerate(self.layers):
            if isinstance(view, _DraftLayer):
                view.drafted = 0
            elif index not in self.skipped and (isinstance(view, CacheLayerMixin) or keeps_states(view)):
                # A fork holds separate tensors from the first drafted token on.
                self.layers = self._views()
                return

    def resume_at(self, drafted: int) -> None:
        """Count `drafted` tokens after the target's that other passes wrote to its buffers; call after `rewind`."""
        for view in self.layers:
            if isinstance(view, _DraftLayer):
                view.drafted = drafted


def _fork(layer: CacheLayerMixin) -> CacheLayerMixin:
    """Return a shallow copy of a layer without a buffer: it aliases the tensors, which `cat` leaves untouched."""
    fork = copy.copy(layer)
    if getattr(fork, "record_past", False):
        fork.record_past = False
    return fork


# ----------------------------------------------------------------------------------------------------------------------
# whole caches


def draft_cache(target: Cache, skipped: frozenset[int]) -> DraftCache:
    """Create a `DraftCache`, of the target's class as well where that is a model's own and holds states in lists.

    Args:
        target: as in `DraftCache`.
        skipped: as in `DraftCache`.
    """
    lists = lists_of(target)
    if not lists:
        return DraftCache(target, skipped)
    cache: DraftCache = type("DraftCache", (DraftCache, type(target)), {})(target, skipped)
    for name in lists:
        setattr(cache, name, ListedStates(cache))
    return cache


def add_buffers(cache: Cache, history: int = 0) -> None:
    """Replace the plain dynamic layers of a cache by layers with a buffer, in place, retaining their contents.

    `history` slots before the window of a sliding layer are retained too: as many as one row of a batch may have to be
    rolled back. Layers of other classes stay as they are: a draft then reads them through a fork, which copies the
    prefix once per token as plain decoding does.
    """
    for index, layer in enumerate(cache.layers):
        new: BufferedLayer
        if type(layer) is DynamicLayer:
            new = BufferedLayer()
        elif type(layer) is _StatesAndKeys:
            new = BufferedStatesLayer.of(layer)
        elif type(layer) is DynamicSlidingWindowLayer:
            new = BufferedSlidingLayer(layer.sliding_window, history)
            new.cumulative_length = layer.cumulative_length
        else:
            continue
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            new.adopt(layer.keys, layer.values)
        cache.layers[index] = new


def can_repeat_rows(cache: Cache) -> bool:
    """Tell whether `repeat_rows` knows all layers of a cache."""
    layers: list[Any] = cache.layers
    return bool(layers) and all(
        type(layer) in (BufferedLayer, BufferedStatesLayer, BufferedSlidingLayer)
        or (not isinstance(layer, CacheLayerMixin) and keeps_states(layer) and is_known(layer))
        for layer in layers
    )


def repeat_rows(cache: Cache, which: torch.Tensor) -> None:
    """Make a cache hold some of its rows, any number of times.

    Args:
        cache: cache of layers that `can_repeat_rows` knows.
        which (`torch.LongTensor` of shape `(B,)`): index of the row that each of the rows afterwards is a copy of.
    """
    for layer in cache.layers:
        if isinstance(layer, BufferedLayer):
            layer.repeat_rows(which)
        replace_states(layer, [state[which] for state in states_in(layer)])


def append_written(cache: Cache, tokens: int) -> None:
    """Count the keys and values that a pass wrote right after those of a cache.

    Args:
        cache: cache of layers with buffers (`add_buffers`).
        tokens: number of tokens of the pass.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, FixedLayer) or not isinstance(layer, BufferedLayer):
            continue
        layer.end += tokens
        if isinstance(layer, BufferedSlidingLayer):
            layer.cumulative_length += tokens


def fix_unwritten(cache: Cache, before: Sequence[int]) -> None:
    """Exclude the layers that a pass did not write to from cropping and moving from now on, in place.

    Args:
        cache: cache after a pass over tokens of the text.
        before: length of each of its layers before that pass.
    """
    for index, (layer, length) in enumerate(zip(cache.layers, before, strict=False)):
        if type(layer) is not BufferedLayer or not layer.is_initialized or layer.end != length or not length:
            continue
        fixed = FixedLayer()
        assert layer.keys is not None and layer.values is not None
        fixed.adopt(layer.keys, layer.values)
        cache.layers[index] = fixed


def drop_buffers(cache: Cache) -> None:
    """Undo `add_buffers`: restore plain dynamic layers, which hold views (nothing is copied)."""
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, BufferedLayer):
            continue
        if isinstance(layer, BufferedSlidingLayer):
            plain = DynamicSlidingWindowLayer(layer.sliding_window)
        elif isinstance(layer, BufferedStatesLayer):
            plain = _StatesAndKeys(layer.number_of_states)
            _give_states(layer, plain)
        else:
            plain = DynamicLayer()
        if layer.is_initialized and layer.keys is not None and layer.values is not None:
            plain.lazy_initialization(layer.keys, layer.values)
            plain.keys, plain.values = layer.keys, layer.values
        if isinstance(layer, BufferedSlidingLayer):
            plain.cumulative_length = layer.cumulative_length
        cache.layers[index] = plain


def trim_windows(cache: Cache) -> None:
    """Free the slots before the window of sliding layers, after the prompt."""
    for layer in cache.layers:
        if isinstance(layer, BufferedSlidingLayer):
            layer.trim()


def move_rows(cache: Cache, moves: Sequence[int], slots: int) -> None:
    """Move each row of a cache along its slots, and make the cache end at slot `slots`.

    Slots that a row no longer covers at its left hold garbage: the caller masks them, like any left padding.

    Args:
        cache: the cache, of `len(moves)` rows.
        moves: number of slots to move each row by: to the right where positive, to the left where negative. A row that
            moves to the left brings in slots after slot `slots`.
        slots: the new length, at most the current one.

    Raises:
        ValueError: rows move, and a layer is of a class in which this library cannot move rows.
    """
    if not any(moves):
        if any(map(keeps_states, cache.layers)):
            crop_attention(cache, slots)  # the states are restored before the next pass
            return
        # The caller counts in slots; a layer of a KV-sharing cache may have no length of its own.
        cache.crop(slots - int(cache.get_seq_length()))
        return
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, BufferedLayer):
            layer.move_rows(moves, slots)
        elif isinstance(layer, CacheLayerMixin):
            raise ValueError(
                f"Rows of a batch accepted different numbers of tokens, and the rows of cache layer {index} "
                f"({type(layer).__name__}) cannot be moved. Generate one prompt at a time with this model or cache."
            )


def reaches_back(cache: Cache, tokens: int) -> bool:
    """Tell whether a cache, cropped by `tokens` tokens, still holds all that the next token sees."""
    for layer in cache.layers:
        if isinstance(layer, BufferedSlidingLayer):
            if layer.end - layer.start - tokens < min(layer.sliding_window - 1, layer.get_seq_length() - tokens):
                return False
        elif not isinstance(layer, BufferedLayer):
            return False
    return True


def keep_length(cache: Any, skipped: frozenset[int], num_layers: int) -> None:
    """Replace the cache layers of skipped attentions by ghosts, in a cache that is filled in draft mode."""
    layers = getattr(cache, "layers", None)
    if layers is None or isinstance(cache, DraftCache):
        return
    replicate = getattr(cache, "layer_class_to_replicate", None)
    while replicate is not None and len(layers) < num_layers:
        layers.append(replicate())
    live = [layer for i, layer in enumerate(layers) if i not in skipped and isinstance(layer, CacheLayerMixin)]
    for index in skipped:
        layer = layers[index] if index < len(layers) else None
        if isinstance(layer, CacheLayerMixin) and not isinstance(layer, GhostLayer) and not keeps_states(layer):
            sliding = bool(getattr(layer, "is_sliding", False))
            same = [other for other in live if bool(getattr(other, "is_sliding", False)) == sliding]
            layers[index] = GhostLayer(layer, same[0] if same else live[0])
