"""Setting `always`, with which every `generate` of a model drafts, whatever code calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..decoding.ends import stored_end_tokens
from ..decoding.statistics import SpeculationStatistics
from ..support.messages import shown
from ..support.unasked import may_draft_unasked
from .plain import warn_undrafted
from .request import AUTO, generation_config_of, prompt_of, resolve, stored_default

if TYPE_CHECKING:
    from .call import Call

__all__ = ["asks_always", "drafts_always", "note_continuous_batching", "note_undrafted", "store_default"]

_WINNERS = ("assistant_model", "prompt_lookup_num_tokens", "custom_generate", "assistant_early_exit")
"""Other ways of decoding, which take precedence where a call requests one."""

_CONTINUOUS_BATCHING = "continuous batching bypasses `generate`, and its cache has no room for drafts"


def store_default(model: PreTrainedModel, default: Any, always: bool | None) -> None:
    """Store in a model's generation config the default of its calls, and whether they draft without a request.

    Args:
        model: the target model.
        default: a config, "auto", `True` for the stored one, or `None` to leave it.
        always: whether every call drafts; `None` to leave it. With `True` and no default at all, "auto" is stored.

    Raises:
        TypeError: `always`, or a stored value, is of another type.
        ValueError: the default does not fit the model.
    """
    config = model.generation_config
    assert config is not None
    if always is not None and not isinstance(always, bool):
        raise TypeError(f"`always` must be True or False, but got {shown(always)}.")
    asked = getattr(config, "self_speculative_always", None)
    if always is None and asked is not None and not isinstance(asked, bool):
        raise TypeError(f"`generation_config.self_speculative_always` must be true or false, but got {shown(asked)}.")
    if default is True:
        default = stored_default(model)
    if always and default is None and getattr(config, "self_speculative", None) is None:
        default = AUTO
    # A stored default is checked where calls are going to use it: they do not request it, so none should fail by it.
    checked = stored_default(model) if default is None and (always or (asked and always is None)) else default
    if checked is not None and checked != AUTO:
        checked = resolve(model, checked).to_dict()
    if default is None and always is None:
        return
    if default is not None:
        config.self_speculative = checked
    if always is not None:
        config.self_speculative_always = always
    # Otherwise transformers rebuilds the generation config from the model's, and the entries are lost.
    config._from_model_config = False


def asks_always(model: PreTrainedModel) -> bool:
    """Tell whether every call of an enabled model drafts."""
    return getattr(model.generation_config, "self_speculative_always", None) is True


def drafts_always(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call without `self_speculative` drafts nevertheless.

    It does not inside another call, as an assistant of another model, or where the call, or the generation config that
    it was given, requests another way of decoding or switches drafting off.

    Args:
        model: an enabled model.
        args: positional arguments of `generate`.
        kwargs: its keyword arguments.
    """
    if not asks_always(model) or not may_draft_unasked():
        return False
    config = generation_config_of(args, kwargs)
    if getattr(config, "self_speculative", None) is False or getattr(config, "is_assistant", False):
        return False
    sources = (config, model.generation_config)
    return all(kwargs.get(name) is None for name in _WINNERS) and not any(
        getattr(source, name, None) is not None for source in sources for name in _WINNERS
    )


def note_undrafted(call: Call, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Warn once, and record, that a call drafted nothing since its way of decoding has no room for it.

    Args:
        call: call that has a refusal, and was decoded by another loop of transformers.
        output: output of that loop.
        args: positional arguments of `generate`.
        kwargs: its keyword arguments.
    """
    model, refusal = call.model, call.refusal
    assert refusal is not None
    warn_undrafted(model, refusal)
    sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
    texts = sequences.tolist() if sequences is not None and sequences.ndim == 2 else []
    prompt = prompt_of(args, kwargs)
    length = 0 if prompt is None else prompt.shape[1]
    ends = stored_end_tokens(generation_config_of(args, kwargs) or model.generation_config)
    model.last_speculation = SpeculationStatistics.of_plain([text[length:] for text in texts], length, ends, refusal)


def note_continuous_batching(model: PreTrainedModel) -> None:
    """Warn once, and record, that continuous batching drafts nothing, where every call was to draft."""
    if asks_always(model):
        warn_undrafted(model, _CONTINUOUS_BATCHING)
        model.last_speculation = SpeculationStatistics.of_plain([], 0, frozenset(), _CONTINUOUS_BATCHING)
