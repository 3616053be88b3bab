"""Implementation of the `custom_generate/generate.py` of an exported folder, which only calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ..support.unasked import drafts_unasked
from .enable import enable_self_speculative, is_self_speculative
from .request import SelfSpeculativeRequest

__all__ = ["generate_drafting"]

_ALWAYS = "self_speculative_always"
_STORED = ("self_speculative", _ALWAYS, "_from_model_config")


def generate_drafting(
    model: PreTrainedModel, default: SelfSpeculativeRequest, inputs: Sequence[Any], arguments: Mapping[str, Any]
) -> Any:
    """Generate like the model's own `generate`, drafting like a model that was enabled with `always`.

    Transformers calls the `generate` of a `custom_generate/` in two ways. Loaded with a model
    (`trust_remote_code=True`), it is the model's from then on: the model is enabled with `always`. Named in a call
    (`custom_generate="folder"`), it is for that call: the model stays enabled, and its other calls do not draft.

    Args:
        model: the target model, enabled or not.
        default: default of calls that name no other: a config, a dictionary of one, or "auto".
        inputs: positional arguments of `generate`.
        arguments: its keyword arguments.

    Returns:
        As `generate`.

    Raises:
        ValueError: the model cannot draft for itself (see `enable_self_speculative`), or `default` does not fit it.
    """
    if _came_with(model):
        # The class's own `generate` replaces it, so that disable_self_speculative has its effect.
        vars(model).pop("generate", None)
        if not is_self_speculative(model) or getattr(model.generation_config, _ALWAYS, None) is None:
            enable_self_speculative(model, default, always=True)
        return type(model).generate(model, *inputs, **arguments)
    with _always(model, default), drafts_unasked():
        return type(model).generate(model, *inputs, **arguments)


def _came_with(model: PreTrainedModel) -> bool:
    """Tell whether `generate` is what `from_pretrained` makes of a `custom_generate/` next to the weights."""
    bound = vars(model).get("generate")
    return isinstance(bound, partial) and bound.keywords.get("model") is model


@contextmanager
def _always(model: PreTrainedModel, default: SelfSpeculativeRequest) -> Iterator[None]:
    """Make a model draft in all calls, within the context."""
    config = model.generation_config
    before = {name: vars(config)[name] for name in _STORED if name in vars(config)}
    enable_self_speculative(model, default, always=True)
    try:
        yield
    finally:
        for name in _STORED:
            vars(config).pop(name, None)
        vars(config).update(before)
