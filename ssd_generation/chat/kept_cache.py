"""KV cache of a conversation, retained between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..decoding.rotary import RotarySwitch
from ..forward.eager.module_states import module_states
from ..support.token_lists import shared_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["KeptCache"]


class KeptCache:
    """KV cache of one call, stored for the next as far as both texts begin with the same tokens.

    A cache that cannot be continued is dropped, so that the next call reads its whole text: one with recurrent states,
    one of a model-specific class, and one whose sliding window has discarded tokens where some have to be cropped.

    Args:
        model: the model that is called.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # With such rotary embeddings the keys depend on the length of the text that they were computed in.
        self._is_usable = (
            not RotarySwitch(model)
            and module_states(model) is None
            and getattr(model.generation_config, "cache_implementation", None) is None
        )
        self._cache: Any = None
        self._ids: Sequence[int] = ()

    def keep(self, cache: Any, ids: Sequence[int]) -> None:
        """Store a cache.

        Args:
            cache: cache that a call returned; `None` for none.
            ids: tokens of that call's text, the first of which the cache holds.
        """
        self.drop()
        if not self._is_usable or type(cache) is not DynamicCache or not all(map(_is_usual, cache.layers)):
            return
        lengths = {layer.get_seq_length() for layer in cache.layers if getattr(layer, "is_initialized", False)}
        if len(lengths) == 1 and 0 < (length := lengths.pop()) <= len(ids):
            self._cache, self._ids = cache, tuple(ids[:length])

    def take(self, ids: Sequence[int]) -> tuple[Any, int]:
        """Return the cache for a text; it is no longer stored here, since a call that fails may leave it half filled.

        Args:
            ids: tokens of the text.

        Returns:
            The cache and the number of tokens of the text that it holds, at most all but one; `(None, 0)` for none.
        """
        cache, kept = self._cache, self._ids
        self.drop()
        # The last token has to be read in any case: its logits are those of the next one.
        shared = min(shared_prefix(kept, ids), len(ids) - 1)
        surplus = len(kept) - shared
        if cache is None or shared < 1 or not all(_can_be_cut(layer, surplus) for layer in cache.layers):
            return None, 0
        if surplus:
            for layer in cache.layers:
                layer.crop(-surplus)
        return cache, shared

    def drop(self) -> None:
        """Drop the cache and free its memory."""
        self._cache, self._ids = None, ()


def _is_usual(layer: Any) -> bool:
    """Tell whether a layer holds keys and values alone, or nothing."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or type(layer).__name__ == "DummyLayer"


def _can_be_cut(layer: Any, tokens: int) -> bool:
    """Tell whether a layer, cropped by `tokens`, still holds all that the next token attends to."""
    return tokens == 0 or not layer.is_sliding or layer.get_seq_length() < layer.sliding_window
