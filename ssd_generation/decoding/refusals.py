"""Refusals of what self-speculative decoding cannot do, before anything is computed."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, QuantizedLayer, StaticLayer
from transformers.generation.configuration_utils import DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS, GenerationMode

from ..cache.recurrent import is_known
from ..support.versions import takes

__all__ = [
    "NO_CACHE",
    "CannotDraft",
    "refuse_beforehand",
    "refuse_cache",
    "refuse_model",
    "refuse_what_cannot_be",
    "why_not_in",
]


class CannotDraft(ValueError):
    """Error for what self-speculative decoding cannot do with this model or with the other settings of the call."""


NO_CACHE = (
    "has no KV cache: each of its passes recomputes the whole text, so there is no cached prefix to verify drafted "
    "tokens after"
)


def refuse_model(model: PreTrainedModel) -> None:
    """Raise `CannotDraft` for a model that cannot draft for itself in any call."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise CannotDraft(f"{name} is an encoder-decoder model; self-speculative decoding is for decoder-only models.")
    forward = type(model).forward
    takes_cache = bool(takes(forward))
    if getattr(model, "_is_stateful", False) and not takes_cache:
        raise CannotDraft(
            f"{name} is a recurrent (stateful) model that keeps its state in no transformers cache: it cannot roll "
            "back rejected tokens, so it cannot draft for itself."
        )
    parameters = inspect.signature(forward).parameters.values()
    if not takes_cache and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise CannotDraft(f"{name} {NO_CACHE}.")
    if not model.can_generate():
        raise CannotDraft(f"{name} cannot generate text; load the model with AutoModelForCausalLM.")
    if (inside := _decodes_inside(model)) is not None:
        raise CannotDraft(
            f"{name} delegates its decoding to an inner model: call enable_self_speculative(model.{inside}), "
            "and generate with the outer model as before. It passes `self_speculative=` on as well."
        )


def _decodes_inside(model: PreTrainedModel) -> str | None:
    """Return the attribute of an inner model that generates in this one's place, by `generate`'s code; or `None`."""
    code = getattr(inspect.unwrap(type(model).generate), "__code__", None)
    names = code.co_names if code is not None else ()
    if "super" in names or "generate" not in names:
        return None
    for name in names:
        inside = model._modules.get(name)
        if isinstance(inside, PreTrainedModel) and inside.can_generate():
            return str(name)
    return None


_LEAVE_THE_CACHE = 'Draft and target share one cache in place: leave `cache_implementation` out, or pass "static".'


_CACHES = (
    *(None, "dynamic", "dynamic_full", "static"),
    # Other names for "static", which concerns only the form in which the cache is returned.
    *(name for name in DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS if not name.startswith("offloaded")),
)


def _refuse(what: str, instead: str) -> None:
    raise CannotDraft(f"`self_speculative` cannot be combined with {what}. {instead}")


def refuse_what_cannot_be(
    model: PreTrainedModel,
    mode: GenerationMode,
    config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    """Raise `CannotDraft` for a generation mode, or settings of the call, that cannot be combined with drafting."""
    refuse_model(model)
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        if config.prompt_lookup_num_tokens is not None:
            _refuse(f"`prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}`", "Leave one of them out.")
        if config.assistant_early_exit is not None:
            _refuse(f"`assistant_early_exit={config.assistant_early_exit}`", "Leave one of them out.")
        _refuse(f"the generation mode '{mode.value}'", "Use greedy decoding or sampling.")
    if config.use_cache is False:
        _refuse(
            "`use_cache=False`",
            "The draft reads the target's KV cache: pass `use_cache=True` (some models switch it off in their config).",
        )
    if config.cache_implementation not in _CACHES:
        _refuse(
            f"`cache_implementation={config.cache_implementation!r}`",
            _LEAVE_THE_CACHE,
        )
    if mode_kwargs.get("synced_gpus"):
        _refuse(
            "`synced_gpus` (FSDP or DeepSpeed ZeRO-3)",
            "The ranks would make different numbers of passes: use `device_map` or tensor parallelism.",
        )


def refuse_beforehand(model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: Any) -> None:
    """Raise `CannotDraft` for what would be noticed too late, or not at all, once `generate` has started."""

    def wanted(name: str) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        configs = (generation_config, model.generation_config)
        return next((v for c in configs if c is not None and (v := getattr(c, name, None)) is not None), None)

    if wanted("cache_implementation") == "paged":
        _refuse('`cache_implementation="paged"` (continuous batching)', _LEAVE_THE_CACHE)
    if (beams := wanted("num_beams") or 1) > 1:
        _refuse(f"beam search (`num_beams={beams}`)", "Use `num_beams=1`, greedy or sampling.")
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise CannotDraft(
            "`self_speculative` needs the KV cache, which transformers switches off under gradient checkpointing in "
            "training mode. Call `model.eval()` first."
        )
    tuned = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", None)
    if getattr(getattr(tuned, "active_peft_config", None), "is_prompt_learning", False):
        _refuse(
            "a PEFT adapter of prompt learning (prefix, prompt and P-tuning): its virtual tokens are in the cache, but "
            "not in the text",
            "LoRA and similar adapters work.",
        )


def why_not_in(cache: Any, own: type | None) -> str | None:
    """Return why a cache of a third party's class cannot be drafted with; `None` for those of transformers.

    What else its `update` does, or which tokens its layers drop, is known to its own code alone: plain decoding feeds
    it one token after the other.

    Args:
        cache: any object.
        own: cache class of the model's own, if it has one.
    """
    layers = getattr(cache, "layers", ())
    if not isinstance(cache, Cache) or any(isinstance(layer, (QuantizedLayer, StaticLayer)) for layer in layers):
        return None  # refused elsewhere
    for kind in (type(cache), *map(type, layers)):
        if kind is not own and kind.__module__.partition(".")[0] not in _OURS:
            return f"its cache has a class of its own ({kind.__name__}), which may do more than store keys and values"
    return None


_OURS = ("transformers", __package__.partition(".")[0])


def refuse_cache(model: PreTrainedModel, cache: Any) -> None:
    """Raise `CannotDraft` for a cache from which rejected tokens cannot be removed."""
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise CannotDraft(
            f"{type(model).__name__} does not store its keys and values in a transformers `DynamicCache` (but in "
            f"{type(cache).__name__}), so that draft and target cannot share them."
        )
    if getattr(cache, "offloading", False):
        raise CannotDraft(
            "An offloaded cache cannot be drafted from: its layers are not on the model's device. Use a DynamicCache()."
        )
    for index, layer in enumerate(cache.layers):
        if (
            type(layer).__name__ == "DummyLayer"
        ):  # holds nothing (KV sharing, MLP-only layers); not in transformers 5.18
            continue
        if is_known(layer):
            continue
        if isinstance(layer, (QuantizedLayer, StaticLayer)) or not isinstance(layer, CacheLayerMixin):
            raise CannotDraft(
                f"Layer {index} of the cache is a {type(layer).__name__}: it cannot be rolled back after rejected "
                "tokens. Self-speculative decoding needs a DynamicCache(), and a model whose layers are all "
                "attention layers."
            )
        if (
            not isinstance(layer, DynamicLayer)
            or not getattr(layer, "is_croppable", True)
            or hasattr(layer, "recurrent_states")
        ):
            raise CannotDraft(
                f"Layer {index} of the cache is a {type(layer).__name__}, which holds a recurrent state: it cannot be "
                "rolled back after rejected tokens. This model or cache cannot draft for itself."
            )
