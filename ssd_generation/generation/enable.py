"""Enable and disable self-speculative decoding on a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import transformers
from transformers import PreTrainedModel

from ..decoding.refusals import CannotDraft, refuse_model
from ..forward.structure.sublayers import layout_of
from ..support.model_state import state_of
from ..support.versions import UNTRIED, is_untried
from ..support.warn import warn_user
from .always import store_default
from .mixin import SelfSpeculativeMixin, enabled_class, original_class
from .prefixes import PrefixCacheSize, set_prefix_cache
from .request import SelfSpeculativeRequest

if TYPE_CHECKING:
    from transformers import Pipeline

__all__ = [
    "disable_self_speculative",
    "enable_self_speculative",
    "is_self_speculative",
    "require_drafts",
    "why_no_drafts",
]

_ModelT = TypeVar("_ModelT", bound="torch.nn.Module | Pipeline")


def enable_self_speculative(
    model: _ModelT,
    default: SelfSpeculativeRequest | None = None,
    *,
    always: bool | None = None,
    prefix_cache: PrefixCacheSize | None = None,
) -> _ModelT:
    """Enable `generate(..., self_speculative=…)` on a model.

    The model stays the object it is, with its weights and its class's name; a call without `self_speculative` does
    exactly what it did before, unless `always` is set. Saving, pickling, copying, pipelines and adapters work as ever.

    Args:
        model: a decoder-only transformers model, a PEFT model around one, or a pipeline of either.
        default: a config, or "auto", to store in `model.generation_config.self_speculative`, used by
            `self_speculative=True`; it is saved and loaded with the generation config.
        always: whether every `generate` of this model drafts, whether a server, a trainer or a harness calls it. Stored
            as `model.generation_config.self_speculative_always` alongside the default ("auto" where none is given or
            stored), so that a model that was saved with it needs `enable_self_speculative(model)` alone. A call with
            `self_speculative=False` does not draft, nor does one with an assistant, prompt lookup or
            `custom_generate`; one that cannot draft, such as beam search, decodes as in transformers, with one
            warning and the reason in `model.last_speculation.refusal`. `None`: the stored value.
        prefix_cache: bytes of keys and values that are retained between calls, such as `"1GB"`; `True`: 1 GB, `False`:
            none. A self-speculative call then starts after the longest prefix of its tokens that an earlier one has
            read or decoded. The cache holds the contents of texts: `generate(cache_salt=…)` separates users. `None`:
            unchanged, initially none.

    Returns:
        The same object.

    Raises:
        TypeError: `model` is not a transformers model, `always` not a truth value, or `prefix_cache` not a size.
        ValueError: the model cannot draft for itself (an encoder-decoder, a model like RWKV, one that hands decoding on
            to a model inside of it), the default does not fit it, or `prefix_cache` cannot be read.
    """
    target = _target_of(model)
    if not isinstance(target, SelfSpeculativeMixin):
        refuse_model(target)
        if is_untried():
            warn_user(
                f"ssd_generation has not been tested with transformers {transformers.__version__}: texts may be wrong. "
                f"Install one that it has been tested with: pip install 'transformers>=5.18,<{UNTRIED}'."
            )
        layout_of(target)
        target.__class__ = enabled_class(type(target))
        target.last_speculation = None
    store_default(target, default, always)
    if prefix_cache is not None:
        set_prefix_cache(target, prefix_cache)
    return model


def disable_self_speculative(model: _ModelT) -> _ModelT:
    """Undo `enable_self_speculative`: the model has its own class again.

    A default stored in the generation config stays there.

    Args:
        model: the model; one that was never enabled is left alone.

    Returns:
        The same object.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    target = _target_of(model)
    if isinstance(target, SelfSpeculativeMixin):
        target.__class__ = original_class(type(target))
        target.__dict__.pop("last_speculation", None)
        state_of(cast(torch.nn.Module, target)).drop()
    return model


def why_no_drafts(model: torch.nn.Module) -> str | None:
    """Return why a model's tokens cannot be verified several at a time, so that it cannot draft; `None` where it can.

    Args:
        model: a decoder-only transformers model, enabled or not.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: it cannot draft for itself at all (see `enable_self_speculative`).
    """
    target = _target_of(model)
    was_enabled = isinstance(target, SelfSpeculativeMixin)
    refusal: str | None = enable_self_speculative(target)._check().refusal
    if not was_enabled:
        disable_self_speculative(target)
    return refusal


def require_drafts(model: torch.nn.Module) -> None:
    """Raise unless a model can draft, for callers that need drafts.

    Args:
        model: a decoder-only transformers model, enabled or not.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: it cannot draft for itself; the message says why.
    """
    refusal = why_no_drafts(model)
    if refusal is not None:
        raise CannotDraft(f"{type(_target_of(model)).__name__} cannot draft for itself: {refusal}.")


def is_self_speculative(model: torch.nn.Module) -> bool:
    """Tell whether `enable_self_speculative` was called on this model.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    return isinstance(_target_of(model), SelfSpeculativeMixin)


def _target_of(model: Any) -> PreTrainedModel:
    """Return the transformers model itself, from inside a pipeline or a PEFT wrapper."""
    if not isinstance(model, torch.nn.Module) and isinstance(inside := getattr(model, "model", None), torch.nn.Module):
        model = inside
    get_base_model = getattr(model, "get_base_model", None)
    target = get_base_model() if callable(get_base_model) else model
    if not isinstance(target, PreTrainedModel):
        hint = ""
        if isinstance(getattr(target, "_orig_mod", None), PreTrainedModel):
            hint = (
                " `torch.compile(model)` returns a wrapper that `generate` bypasses: enable the model, then call "
                "`model.compile()`."
            )
        raise TypeError(f"A transformers model is needed, but got {type(model).__name__}.{hint}")
    return target
