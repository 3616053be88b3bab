"""The KV cache of a conversation between its turns."""

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
    """Keep the cache of one call for the next, as far as both texts begin with the same tokens.

    A cache that cannot be continued is dropped, so that the next call reads its whole text: one with recurrent states,
    one of a class of the model's own, and a sliding window that has let go of tokens where some have to be taken out.

    Args:
        model: the model whose calls these are.
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
        """Keep a cache.

        Args:
            cache: that a call returned; `None` for none.
            ids: the text of that call, of which the cache holds the first tokens.
        """
        self.drop()
        if not self._is_usable or type(cache) is not DynamicCache or not all(map(_is_usual, cache.layers)):
            return
        lengths = {layer.get_seq_length() for layer in cache.layers if getattr(layer, "is_initialized", False)}
        if len(lengths) == 1 and 0 < (length := lengths.pop()) <= len(ids):
            self._cache, self._ids = cache, tuple(ids[:length])

    def take(self, ids: Sequence[int]) -> tuple[Any, int]:
        """Hand over the cache for a text; it is no longer kept here, since a call that fails may leave it half filled.

        Args:
            ids: tokens of the text.

        Returns:
            The cache, and how many tokens of the text it holds: all but one at the most; `(None, 0)` for none.
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
        """Keep nothing, and give its memory back."""
        self._cache, self._ids = None, ()


def _is_usual(layer: Any) -> bool:
    """True for a layer of keys and values alone, and for one that holds nothing."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or type(layer).__name__ == "DummyLayer"


def _can_be_cut(layer: Any, tokens: int) -> bool:
    """True where a layer, without its last tokens, still holds all that the next token sees."""
    return tokens == 0 or not layer.is_sliding or layer.get_seq_length() < layer.sliding_window
