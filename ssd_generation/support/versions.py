"""Names that differ between the supported versions of transformers. No other module looks at a version."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import transformers
from packaging.version import Version

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["CACHE", "CACHE_NAMES", "UNTRIED", "cache_argument", "cache_given", "is_untried", "takes"]

_RELEASE = Version(Version(transformers.__version__).base_version)  # a development version counts as its release

UNTRIED: Final = "5.25"
"""First minor version that this library has not been tried with (CONTRIBUTING.md says what to do on its release)."""

CACHE: Final = "cache" if Version("5.24") <= _RELEASE else "past_key_values"
"""Name of the KV cache: an argument of `generate`, of `prepare_inputs_for_generation` and of a model's forward, and a
field of their outputs."""

CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")
"""All names that a forward may have for its cache: models of states alone used `cache_params` before 5.24, and code
that came with a model may still use an old name."""


def is_untried() -> bool:
    """Tell whether the installed transformers is newer than the versions that this library has been tried with."""
    return Version(UNTRIED) <= _RELEASE


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of a model's cache among the arguments, and the outputs, of its passes."""
    return _cache_argument_of(type(model).forward)


@functools.lru_cache(maxsize=32)
def _cache_argument_of(forward: Callable[..., Any]) -> str:
    names = takes(forward)
    return next((name for name in (CACHE, *CACHE_NAMES) if name in names), CACHE)


def takes(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the arguments of a forward that may be its cache."""
    return frozenset(CACHE_NAMES) & set(inspect.signature(forward).parameters)


def cache_given(kwargs: dict[str, Any]) -> Cache | None:
    """Return the cache among the keyword arguments of a forward, whatever its name there."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
