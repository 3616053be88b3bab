"""Skip mode, which turns a model into its own draft and back.

Skip mode puts a `forward` into the instance dictionary of each module that the skip set leaves out, and removes it
in `finally`. Nothing stays on the model in between, accelerate's own instance `forward` is respected, and the
modelling code is never copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache.buffered_layers import keep_length
from ...support.forks import forget_undo, note_undo
from ...support.model_state import state_of
from ...support.unasked import only_asked_drafts
from ...support.versions import cache_given
from .sublayers import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...config import SkipConfig

__all__ = ["SkipMode", "draft_mode", "draft_mode_with", "forward_of"]

_MISSING: Any = object()


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that a module runs now: its own `forward`, or what replaces it."""
    return module.__dict__.get("forward") or type(module).forward.__get__(module)  # type: ignore[no-any-return]


class SkipMode:
    """Context manager under which a model leaves out the sub-layers of a skip set.

    Built once and entered many times (a few microseconds each). Inside it, only the thread that entered is affected:
    another thread that runs the same model gets the whole model, and one that wants to enter skip mode on it waits.

    Inside the context, `pause` restores the whole model until `resume`, without leaving: a custom logits processor
    that calls the model must see the model as it is.

    Args:
        model: the target model.
        skip: the sub-layers to leave out.
        others: further `(module, forward)` pairs to put in place, such as linear layers with low-bit copies.

    Raises:
        ValueError: `skip` names a sub-layer that this model does not have or that cannot be skipped.
    """

    def __init__(
        self, model: PreTrainedModel, skip: SkipConfig, others: Iterable[tuple[nn.Module, Callable[..., Any]]] = ()
    ) -> None:
        self._lock = state_of(model).lock
        self._owner: int | None = None
        self._originals: list[Any] = []
        self._undo: object = None
        self._patches = [
            (module, self._guarded(module, stub, position))
            for position, (module, stub) in enumerate((*others, *layout_of(model).stubs(skip)))
        ]

    def _guarded(self, module: nn.Module, stub: Callable[..., Any], position: int) -> Callable[..., Any]:
        inherited = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Dynamo cannot trace a thread id; a compiled draft is only ever run by the thread that drafts.
            if torch.compiler.is_compiling() or self._owner == threading.get_ident():
                return stub(*args, **kwargs)
            originals = self._originals  # read once: the owner may be leaving right now
            original = originals[position] if originals else _MISSING
            return inherited(module, *args, **kwargs) if original is _MISSING else original(*args, **kwargs)

        forward.is_ours = True  # type: ignore[attr-defined]
        return forward

    def __enter__(self) -> SkipMode:
        self._lock.acquire()
        if self._originals:
            self._lock.release()
            raise RuntimeError("This skip mode is already active on this thread; build a second one to nest them.")
        self._undo = note_undo(self._unpatch)
        try:
            # Collected whole before the first patch: another thread may call a stub at once.
            self._originals = [module.__dict__.get("forward", _MISSING) for module, _ in self._patches]
            for module, forward in self._patches:
                module.__dict__["forward"] = forward
            self._owner = threading.get_ident()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        try:
            self._unpatch()
        finally:
            forget_undo(self._undo)
            self._lock.release()

    def _unpatch(self) -> None:
        self._owner = None
        try:
            # In reverse: a module that is patched twice gets its first `forward` back.
            # An interrupt may have come before all were collected.
            patched = self._patches[: len(self._originals)]
            for (module, _), original in zip(reversed(patched), reversed(self._originals), strict=True):
                if original is _MISSING:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = original
        finally:
            # A stub that another thread is calling right now still holds the list itself; only the reference goes.
            self._originals = []

    def is_active(self) -> bool:
        """Tell whether the calling thread's passes leave sub-layers out."""
        return self._owner == threading.get_ident()

    def is_in_place(self) -> bool:
        """Tell whether any thread has entered this mode and not left it."""
        return bool(self._originals)

    def pause(self) -> None:
        """Run the model without skipping until `resume`; the stubs stay in place and pass every call on."""
        self._owner = None

    def resume(self) -> None:
        """Skip again, after `pause`."""
        self._owner = threading.get_ident()


def draft_mode(model: PreTrainedModel, skip: SkipConfig) -> AbstractContextManager[PreTrainedModel]:
    """Run a model as its own draft: inside this context it leaves out the sub-layers of `skip`.

    Useful to read the text of the draft alone, or to time it:

    ```python
    with draft_mode(model, SkipConfig(attention=[5, 7], mlp=[9])):
        model.generate(**inputs)
    ```

    A cache that is filled in here has no keys and values for the skipped attention sub-layers: using it with the whole
    model afterwards raises, rather than giving wrong text. Inside the context, `self_speculative=` must not be passed
    to `generate`, and a model that drafts `always` does not draft.

    Args:
        model: a decoder-only transformers model, enabled or not.
        skip: the sub-layers to leave out.

    Returns:
        A context manager that yields the same model.

    Raises:
        ValueError: `skip` names a sub-layer that this model does not have or that cannot be skipped.
    """
    return draft_mode_with(model, skip)


@contextmanager
def draft_mode_with(
    model: PreTrainedModel, skip: SkipConfig, others: Iterable[tuple[nn.Module, Callable[..., Any]]] = ()
) -> Iterator[PreTrainedModel]:
    """Enter `draft_mode` with further `(module, forward)` pairs in place, as in `SkipMode`."""
    layout = layout_of(model)
    mode = SkipMode(model, skip, others)
    skipped = frozenset(skip.attention)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Masks and positions are read off a cache layer that a skipped attention would never fill.
        cache = cache_given(kwargs)
        if cache is not None and mode.is_active():
            keep_length(cache, skipped, len(layout))

    handle = model.register_forward_pre_hook(before, with_kwargs=True) if skipped else None
    try:
        with mode, only_asked_drafts():
            yield model
    finally:
        if handle is not None:
            handle.remove()
