"""Replacement of functions and methods that a model's code calls, on one thread alone."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import masking_utils, modeling_utils

from ...support.forks import ForkSafeRLock, undone_in_child
from ...support.structure import modules_of

__all__ = ["layers_that_call", "modules_with", "own_attention", "own_functions", "own_methods"]


@functools.lru_cache(maxsize=256)
def _called_by(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names that the code of a forward uses."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def layers_that_call(model: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    """Return the modules of a model whose forward calls one of these functions."""
    return [module for module in modules_of(model) if names & _called_by(type(module).forward)]


def modules_with(model: nn.Module, method: str) -> list[nn.Module]:
    """Return the modules of a model whose class has this method."""
    return [module for module in modules_of(model) if hasattr(type(module), method)]


def _guarded(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `own` on this thread, and the original on others."""
    owner = threading.get_ident()

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == owner else original)(*args, **kwargs)

    return step


_LOCK = ForkSafeRLock()

Maker = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def own_functions(layers: Iterable[nn.Module], wanted: frozenset[str], make: Maker) -> Iterator[None]:
    """Replace functions that modules call by functions of this library; other threads see no difference.

    Args:
        layers: the modules.
        wanted: names of the functions.
        make: makes the replacement from a function's name and the function.
    """
    with _LOCK:
        places = {
            (id(names), name): (names, name, names[name])
            for layer in layers
            for names in (inspect.unwrap(type(layer).forward).__globals__,)
            for name in wanted & _called_by(type(layer).forward)
            if name in names
        }

        def restore() -> None:
            for names, name, original in places.values():
                names[name] = original

        with undone_in_child(restore):
            try:
                for names, name, original in places.values():
                    names[name] = _guarded(make(name, original), original)
                yield
            finally:
                restore()


@contextmanager
def own_methods(modules: Sequence[nn.Module], name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method of modules by functions of this library; other threads see no difference.

    Args:
        modules: the modules.
        name: name of the method.
        make: makes the replacement from a module.
    """
    with _LOCK:
        places = [(module.__dict__, getattr(module, name), module.__dict__.get(name)) for module in modules]

        def restore() -> None:
            for attributes, _, before in places:
                attributes.pop(name, None)
                if before is not None:
                    attributes[name] = before

        with undone_in_child(restore):
            try:
                for module, (attributes, original, _) in zip(modules, places, strict=True):
                    attributes[name] = _guarded(make(module), original)
                yield
            finally:
                restore()


@contextmanager
def own_attention(
    make: Callable[[Callable[..., Any]], Callable[..., Any]], own_mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Replace this thread's sdpa attention by a function of this library; other threads see no difference.

    Args:
        make: makes the replacement from the original function.
        own_mask: function that makes masks, also of eager attention; `None`: transformers' own.
    """
    owner = threading.get_ident()
    attention, masks = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == owner else original)(*args, **kwargs)

    def mask(name: str, *args: Any, **kwargs: Any) -> Any:
        if own_mask is not None and threading.get_ident() == owner:
            return own_mask(*args, **kwargs)
        return original_masks[name](*args, **kwargs)

    places: list[tuple[Any, str, Any]] = [(attention._local_mapping, "sdpa", forward)]
    if own_mask is not None:
        places += [(masks._local_mapping, name, functools.partial(mask, name)) for name in ("sdpa", "eager")]
    with _LOCK:
        # Looked up here: earlier, it may be that of another thread's capture.
        original, original_masks = attention["sdpa"], {name: masks[name] for name in ("sdpa", "eager")}
        function = make(original)
        before = [mapping.get(name) for mapping, name, _ in places]

        def restore() -> None:
            for (mapping, name, _), known in zip(places, before, strict=True):
                if known is None:
                    mapping.pop(name, None)
                else:
                    mapping[name] = known

        with undone_in_child(restore):
            try:
                for mapping, name, replacement in places:
                    mapping[name] = replacement
                yield
            finally:
                restore()
