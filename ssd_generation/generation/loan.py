"""Preparation of a call's cache for this library's passes, and its restoration at the end of the call."""

from __future__ import annotations

from types import TracebackType
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from ..cache.buffered_layers import add_buffers, drop_buffers
from ..cache.own_lists import class_of, hold_lists, release_lists
from ..cache.recurrent import REACH, keeps_states
from ..cache.static import fill_static
from ..decoding.loop_request import LoopRequest
from ..decoding.outputs import SelfSpeculativeOutput
from ..decoding.refusals import refuse_cache, why_not_in
from ..forward.eager.module_states import module_states
from ..forward.forward import Forward
from ..forward.structure.offloaded import is_offloaded
from ..forward.structure.weights import WeightWatch, forget_stale
from ..support.versions import CACHE

__all__ = ["Loan", "suited_cache"]

_HISTORY = 160
"""Slots retained before a sliding window, for leading rows of a batch to be rolled back by (decoding/pace.py)."""


class Loan:
    """Context manager that prepares the cache of a call for this library's passes, and hands it back as transformers'.

    On entering, lists of the cache's own are moved into its layers, and its layers get buffers. On leaving, whatever
    happened, the memory of CUDA graphs is reclaimed, recurrent states return to the modules that hold them, and a cache
    that the caller sees is one of transformers' again.

    Args:
        model: the target model.
        cache: the cache of the call.
        request: request of the call.
        batch: number of rows, B.
        is_returned: whether the caller sees the cache afterwards.
        static: static cache that the caller sees instead, where one was requested.

    Attributes:
        forward: the passes of the call, once there are any.
        has_states: whether the cache holds recurrent states.
        watch: watch over the model's weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        request: LoopRequest,
        batch: int,
        is_returned: bool,
        static: StaticCache | None,
    ) -> None:
        # Offloaded weights change all the time.
        self.watch = WeightWatch(model, looks=request.has_code_of_the_users and not is_offloaded(model))
        self.forward: Forward | None = None
        self.has_states = False
        self._model, self._cache, self._batch = model, cache, batch
        self._is_returned, self._static = is_returned, static
        self._on_modules = module_states(model)
        self._states: list[list[object]] | None = None

    def __enter__(self) -> Loan:
        hold_lists(self._model, self._cache)
        try:
            self.has_states = any(map(keeps_states, self._cache.layers))
            rolls_back = self._batch > 1 and self._is_returned
            add_buffers(self._cache, REACH if self.has_states else _HISTORY if rolls_back else 0)
            self._states = None if self._on_modules is None else self._on_modules.read()
        except BaseException:
            self._end()
            raise
        return self

    def forget_stale(self) -> None:
        """Free what was made from weights or modules that the model no longer has."""
        forget_stale(self._model)

    def restore_states(self) -> None:
        """Restore the states that modules held at first: passes that measure something leave others."""
        if self._on_modules is not None and self._states is not None:
            self._on_modules.write(self._states)

    def deliver(self, output: SelfSpeculativeOutput) -> None:
        """Put the cache that the caller is to see into an output.

        Args:
            output: output of the call; a model may have started another cache than it was given.
        """
        returned = cast(Cache, output[CACHE])
        if returned is not self._cache:
            self._drop_buffers(returned)
        if self._static is not None:
            output[CACHE] = fill_static(self._static, returned)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._on_modules is not None:
            self._on_modules.end(self._cache)
        self._drop_buffers(self._cache)
        release_lists(self._cache)

    def _drop_buffers(self, cache: Cache) -> None:
        if self.forward is not None:
            self.forward.end(cache, keeps=self._is_returned)
        if self._is_returned:
            drop_buffers(cache)


def suited_cache(model: PreTrainedModel, cache: Any, is_users: bool) -> tuple[Any, StaticCache | None, str | None]:
    """Replace a cache from which rejected tokens cannot be removed, where it is not the user's.

    Args:
        model: the target model.
        cache: cache that transformers has prepared; `None` where the model makes one in its first pass.
        is_users: whether the user passed it in.

    Returns:
        The cache to decode with; the static one that the caller is to get instead, if one was requested; and why
        nothing can be drafted with it, or `None`.

    Raises:
        ValueError: it is a cache that `self_speculative` cannot be combined with.
    """
    static, kind = None, class_of(model)
    if cache is None and kind is not None:
        cache = kind()  # as the model itself makes one in its first pass
    if not is_users and isinstance(cache, StaticCache) and not cache.offloading:
        # Nothing has been allocated for it yet. Passes use a dynamic cache instead.
        static, cache = cache, DynamicCache(config=model.config.get_text_config(decoder=True))
    refusal = why_not_in(cache, kind)
    if refusal is None:
        refuse_cache(model, cache)
    return cache, static, refusal
