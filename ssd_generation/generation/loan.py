"""What a call borrows of its cache and its model, and gives back."""

from __future__ import annotations

from types import TracebackType
from typing import cast

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from ..cache.layers import add_buffers, drop_buffers
from ..cache.own_lists import hold_lists, release_lists
from ..cache.recurrent import REACH, keeps_states
from ..cache.static import fill_static
from ..decoding.outputs import SelfSpeculativeOutput
from ..forward.forward import Forward
from ..forward.module_states import module_states
from ..support.versions import CACHE

__all__ = ["Loan"]

_HISTORY = 160
"""Tokens by which a row of a batch may lead when a sliding window's cache is to be rolled back (decoding/rows.py)."""


class Loan:
    """Context manager: the cache of a call as passes of this library need it, and afterwards as transformers knows it.

    On entering, lists of the cache's own are kept in its layers, and its layers get buffers. On leaving, whatever
    happened, the memory of CUDA graphs is taken back, recurrent states return to the modules that keep them, and a
    cache that the caller sees is one of transformers' again.

    Args:
        model: the target model.
        cache: the cache of the call.
        batch: rows, B.
        is_returned: whether the caller sees the cache afterwards.
        static: the static cache that the caller sees in its place, where one was asked for.

    Attributes:
        forward: the passes of the call, once there are any.
        has_states: whether the cache keeps recurrent states.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, batch: int, is_returned: bool, static: StaticCache | None
    ) -> None:
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

    def restore_states(self) -> None:
        """Put back the states that modules held at first: passes that measure something leave others."""
        if self._on_modules is not None and self._states is not None:
            self._on_modules.write(self._states)

    def deliver(self, output: SelfSpeculativeOutput) -> None:
        """Let an output hold the cache that the caller is to see.

        Args:
            output: of the call; a model may have started another cache than it was given.
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
