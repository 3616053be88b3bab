"""What the supported versions of transformers call things. Nothing else asks for a version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import transformers
from packaging.version import Version

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["CACHE", "CACHE_NAMES", "UNTRIED", "cache_argument", "cache_given", "is_untried", "takes"]

_RELEASE = Version(Version(transformers.__version__).base_version)  # a development version is what it will become

UNTRIED: Final = "5.25"
"""First minor version that this library has not been tried with (CONTRIBUTING.md says what to do when it is out)."""

CACHE: Final = "cache" if Version("5.24") <= _RELEASE else "past_key_values"
"""Name of the KV cache: an argument of `generate`, of `prepare_inputs_for_generation` and of a model's forward, and a
field of their outputs."""

CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")
"""All names that a forward may have for its cache: models of states alone said `cache_params` before 5.24, and code
that came with a model may still use an old name."""


def is_untried() -> bool:
    """Whether the installed transformers is newer than what this library has been tried with."""
    return Version(UNTRIED) <= _RELEASE


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument, and of the output, of a model's passes that is its cache."""
    names = takes(type(model).forward)
    return next((name for name in (CACHE, *CACHE_NAMES) if name in names), CACHE)


def takes(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a forward that may be its cache."""
    return frozenset(CACHE_NAMES) & set(inspect.signature(forward).parameters)


def cache_given(kwargs: dict[str, Any]) -> Cache | None:
    """Cache among the keyword arguments of a forward, whatever it is called there."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
