"""`generate(self_speculative=…)`: the mixin that adds it, and the functions that put it on a model and take it off."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation.configuration_utils import GenerationMode

from .cache.layers import add_buffers, drop_buffers
from .cache.own_lists import class_of, hold_lists, release_lists
from .cache.recurrent import REACH, has_states, keeps_states
from .cache.static import fill_static
from .config import PRECISIONS, SelfSpeculativeConfig, SkipConfig
from .config.values import BITWISE, NUMERIC
from .decoding.candidate_generator import self_drafter
from .decoding.loop import DecodingLoop, Request, end_tokens
from .decoding.outputs import SelfSpeculativeOutput
from .decoding.refusals import (
    CannotDraft,
    refuse_beforehand,
    refuse_cache,
    refuse_model,
    refuse_what_cannot_be,
    why_not_in,
)
from .decoding.rows import Rows
from .decoding.statistics import SpeculationStatistics  # transformers evaluates the annotations of its model classes
from .drafting.drafter import CheckedDrafter, Drafter
from .drafting.policy import CostAwarePolicy, DraftPolicy, make_policy
from .forward.adapters import weights_in_use
from .forward.forward import Forward
from .forward.module_states import module_states
from .forward.offloaded import is_offloaded, why_unreadable
from .forward.sublayers import input_device, layout_of
from .forward.weights import WeightWatch, forget_stale
from .support.display import visible
from .support.messages import clipped, shown
from .support.model_state import state_of
from .support.once import looking_once
from .support.versions import CACHE, UNTRIED, cache_argument, is_untried
from .tuning.automatic import automatic_config, check_budget
from .tuning.costs import costs_of, rows_measured
from .tuning.exactness import invariant_of, invariant_to_check, wants_own_kernels
from .tuning.measuring import describe_machine
from .tuning.model_check import ForcedText, ModelCheck, ScriptedDrafts, check_model
from .tuning.refinement import WINDOW, Refinement

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

__all__ = [
    "SelfSpeculativeMixin",
    "SelfSpeculativeRequest",
    "disable_self_speculative",
    "enable_self_speculative",
    "is_self_speculative",
    "refinement_of",
    "require_drafts",
    "why_no_drafts",
]

SelfSpeculativeRequest = (
    SelfSpeculativeConfig | SkipConfig | Drafter | Mapping[str, Any] | str | os.PathLike[str] | bool
)
"""What `generate(self_speculative=…)` takes: a config, a skip set, either as a dictionary, the path or Hub id of a
saved config, `"auto"` (measure this machine once, draft by whatever pays), or `True` for the default stored in
`model.generation_config.self_speculative`; or a `Drafter`, to draft in a way of your own."""

_ModelT = TypeVar("_ModelT", bound=torch.nn.Module)

# Rows of a batch may lead by so many tokens when a sliding window's cache is to be put back (see decoding.py).
_HISTORY = 160


@dataclass
class _Call:
    """A self-speculative `generate` call under way on this thread.

    Attributes:
        model: the target model.
        config: what to draft with; `None` where nothing can be drafted, or a drafter is given.
        drafter: what drafts, if not the model by a config: the user's own, or the script of a check.
        is_check: whether the call checks the model.
        exactness: of such a call: what was asked for, as in `invariant_of`.
        refusal: why nothing can be drafted with this model.
        in_step: for such a call, as in `Request`.
        cache_is_returned: whether the caller sees the KV cache afterwards.
        static: the static cache that it sees then, where one was asked for.
    """

    model: PreTrainedModel
    config: SelfSpeculativeConfig | None = None
    drafter: Drafter | None = None
    is_check: bool = False
    exactness: str | None = None
    refusal: str | None = None
    in_step: bool = False
    cache_is_returned: bool = False
    static: StaticCache | None = None


_CALL: ContextVar[_Call | None] = ContextVar("ssd_generation_call", default=None)


class SelfSpeculativeMixin:
    """Adds `self_speculative=` to `generate`. Put in front of a model's class by `enable_self_speculative`."""

    last_speculation: SpeculationStatistics | None
    """Statistics of the last self-speculative call that ended on this model; `None` before the first."""

    def generate(
        self,
        *args: Any,
        self_speculative: SelfSpeculativeRequest | None = None,
        draft_memory: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate, drafting with the model itself where `self_speculative` is given; else exactly as in transformers.

        Args:
            *args: as in transformers' `generate`.
            self_speculative: a `SelfSpeculativeConfig`, a `SkipConfig`, a dictionary of either, the path or Hub id of a
                saved config, `"auto"`, `True` for the default stored in `generation_config.self_speculative`, or a
                `Drafter` of your own. `None` and `False`: plain `generate`. `"auto"` needs no config: the first call
                measures what drafting costs on this machine (seconds, kept on the disk), then every call drafts by what
                pays, or not at all.
            draft_memory: share of the weights' bytes that low-bit copies for drafting may take, 0 (none) to 100. With
                `"auto"` 0.3 where it is not given (0.35 of 16-bit weights); with a config that takes more, an error.
            **kwargs: as in transformers' `generate`.

        Returns:
            As transformers' `generate`. With `return_dict_in_generate=True` the output has the call's statistics under
            `speculation`; they are in `model.last_speculation` in any case.

        Raises:
            ValueError: the config does not fit the model, or something was asked for that self-speculative decoding
                cannot do (see the README); the message says what to do.
            TypeError: `self_speculative` is of another type.
        """
        parent = super().generate  # type: ignore[misc]
        if self_speculative is None or self_speculative is False:
            if draft_memory is not None:
                raise ValueError(
                    f"`draft_memory={shown(draft_memory)}` was given without `self_speculative`. Pass "
                    '`self_speculative="auto"`, or leave it out.'
                )
            if _CALL.get() is None:
                if self_speculative is None:
                    _say_that_nothing_drafts(cast(PreTrainedModel, self), args, kwargs)
                return parent(*args, **kwargs)
            # A plain call from inside a self-speculative one, say from a custom logits processor.
            token = _CALL.set(None)
        else:
            model = cast(PreTrainedModel, self)
            if kwargs.get("assistant_model") is not None:
                raise ValueError(
                    "`self_speculative` and `assistant_model` were both given, but a call drafts either with the model "
                    "itself or with an assistant. Leave one of them out."
                )
            if kwargs.get("custom_generate") is not None:
                raise ValueError(
                    "`self_speculative` and `custom_generate` were both given, but a custom decoding method replaces "
                    "self-speculative decoding. Leave one of them out."
                )
            generation_config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
            prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            refuse_beforehand(model, generation_config, kwargs)
            unreadable = why_unreadable(model)
            if unreadable is not None:
                raise ValueError(unreadable)
            request = _stored(model, generation_config) if self_speculative is True else self_speculative

            drafter = request if isinstance(request, Drafter) else None

            def resolved() -> SelfSpeculativeConfig | None:
                if drafter is not None and draft_memory is None:
                    return None
                config = _resolve(model, request, generation_config, draft_memory, prompt)
                config.validate_for(num_layers=len(layout_of(model)), model_type=_model_type(model))
                return config

            with looking_once():
                # "auto" measures passes over several tokens: the model has to be one that has them.
                config = None if isinstance(request, str) and request == "auto" else resolved()
                exactness = None if config is None else config.exactness
                as_usual = drafter is not None or draft_memory is not None or exactness == BITWISE
                is_short = not as_usual and _is_short(generation_config, model, kwargs)
                if is_short:
                    refusal: str | None = TOO_SHORT
                else:
                    state_of(model).learn_of(weights_in_use(model))
                    tokenizer = kwargs.get("tokenizer")
                    refusal = self._check(is_batch=False, tokenizer=tokenizer, exactness=exactness).refusal
                if config is None and refusal is None:
                    config = resolved()
            token = _CALL.set(_Call(model, config, drafter, refusal=refusal))
        try:
            return parent(*args, **kwargs)
        finally:
            _CALL.reset(token)

    def generate_batch(self, *args: Any, self_speculative: SelfSpeculativeRequest | None = None, **kwargs: Any) -> Any:
        """Generate by continuous batching, as in transformers.

        Raises:
            ValueError: `self_speculative` is given: nothing is drafted there.
        """
        if self_speculative is not None and self_speculative is not False:
            raise CannotDraft(
                "`self_speculative` cannot be combined with `generate_batch` (continuous batching), whose cache has no "
                "room for drafts. Leave it out, or call `generate` with a batch."
            )
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    def _check(self, is_batch: bool, tokenizer: Any = None, exactness: str | None = None) -> ModelCheck:
        """Whether this model's tokens can be verified several at a time (model_check.py)."""
        model = cast(PreTrainedModel, self)

        def decode(tried: PreTrainedModel, text: ForcedText, is_drafted: bool, in_step: bool) -> Any:
            generate = super().generate  # type: ignore[misc]
            script = ScriptedDrafts(text) if is_drafted else None
            call = _Call(tried, drafter=script, is_check=True, exactness=exactness, in_step=in_step)
            token = _CALL.set(call if is_drafted else None)
            try:
                # Whatever the model's own generation config says.
                output = generate(
                    **text.arguments(),
                    max_new_tokens=text.most_tokens,
                    do_sample=False,
                    num_beams=1,
                    num_return_sequences=1,
                    guidance_scale=1.0,
                    use_cache=True,
                    prefill_chunk_size=None,
                    output_attentions=False,
                    output_hidden_states=False,
                    output_scores=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    logits_processor=LogitsProcessorList([text.processor()]),
                    stopping_criteria=StoppingCriteriaList([text.ends]),
                    tokenizer=tokenizer,
                )
            finally:
                _CALL.reset(token)
            return output

        return check_model(model, is_batch, decode, exactness)

    def _active_call(self) -> _Call | None:
        call = _CALL.get()
        return call if call is not None and call.model is self else None

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        if self._active_call() is not None:
            refuse_what_cannot_be(
                cast(PreTrainedModel, self), generation_mode, generation_config, generation_mode_kwargs
            )
        parent = super()._validate_generation_mode  # type: ignore[misc]
        parent(generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        call = self._active_call()
        name = cache_argument(cast(PreTrainedModel, self))
        is_users = model_kwargs.get(name) is not None
        parent = super()._prepare_cache_for_generation  # type: ignore[misc]
        result = parent(generation_config, model_kwargs, *args, **kwargs)
        if call is not None:
            cache = model_kwargs.get(name)
            if call.refusal is None:
                kind = class_of(cast(PreTrainedModel, self))
                if cache is None and kind is not None:
                    cache = model_kwargs[name] = kind()  # as the model itself makes one in its first pass
                if not is_users and isinstance(cache, StaticCache) and not cache.offloading:
                    # Nothing has been allocated for it yet. Passes stand behind a cache of this library's own.
                    config = cast(PreTrainedModel, self).config.get_text_config(decoder=True)
                    call.static, cache = cache, DynamicCache(config=config)
                    model_kwargs[name] = cache
                call.refusal = why_not_in(cache, kind)
                if call.refusal is None:
                    refuse_cache(cast(PreTrainedModel, self), cache)
            call.cache_is_returned = is_users or bool(generation_config.return_dict_in_generate)
        return result

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> torch.LongTensor | SelfSpeculativeOutput | Any:
        call = self._active_call()

        def sample() -> Any:
            return super(SelfSpeculativeMixin, self)._sample(  # type: ignore[misc]
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )

        if call is None:
            return sample()
        model = cast(PreTrainedModel, self)
        refusal, in_step, name = call.refusal, call.in_step, cache_argument(model)
        if refusal is None:
            refusal = _why_not_from_states(model, generation_config)
        if refusal is None and not call.is_check and input_ids.shape[0] > 1:
            check = self._check(is_batch=True)
            refusal, in_step = check.refusal, check.uneven_refusal is not None
        if refusal is not None:
            _warn_of_refusal(model, refusal)
            started = time.perf_counter()
            output = sample()
            seconds = time.perf_counter() - started
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            prompt = input_ids.shape[1]
            self.last_speculation = SpeculationStatistics.of_plain(
                sequences[:, prompt:].tolist(), prompt, end_tokens(stopping_criteria), refusal, seconds
            )
            return output
        cache: Cache = model_kwargs[name]
        batch = input_ids.shape[0]
        hold_lists(model, cache)
        # Recurrent states of all rows stand behind the same number of tokens.
        with_states = any(map(keeps_states, cache.layers))
        in_step = in_step or with_states
        history = REACH if with_states else _HISTORY if batch > 1 and call.cache_is_returned else 0
        states = generation_config.output_attentions or generation_config.output_hidden_states
        returns_states = bool(states and generation_config.return_dict_in_generate)
        forward: Forward | None = None
        request = Request(
            generation_config, logits_processor, stopping_criteria, streamer, call.cache_is_returned, in_step
        )
        # Weights that are offloaded change all along.
        watch = WeightWatch(model, looks=request.has_code_of_the_users and not is_offloaded(model))
        on_modules = module_states(model)
        try:
            add_buffers(cache, history)
            before = None if on_modules is None else on_modules.read()
            with looking_once():
                forget_stale(model)
                forward, reason = _forward_of(call, batch, returns_states)
                drafter, refining = _drafter_of(call, forward, generation_config, batch)
            if on_modules is not None and before is not None:
                on_modules.write(before)  # passes that measure something leave others
            loop = DecodingLoop(forward, drafter, request, watch, after_round=refining)
            output = loop.run(input_ids, model_kwargs)
        finally:
            if on_modules is not None:
                on_modules.end(cache)
            if forward is not None:
                forward.end(cache, keeps=call.cache_is_returned)
            if call.cache_is_returned:
                # A cache that the user passed in is theirs again, whatever happened.
                drop_buffers(cache)
            release_lists(cache)
        if isinstance(output, SelfSpeculativeOutput):
            returned = cast(Cache, output[CACHE])
            if returned is not cache:
                forward.end(returned, keeps=True)
                drop_buffers(returned)
            if call.static is not None:
                output[CACHE] = fill_static(call.static, returned)
        _note_passes(loop.statistics, forward, reason)
        if refining is not None:
            loop.statistics.refinement = refining.refinement.to_dict()
        if not call.is_check:
            self.last_speculation = loop.statistics
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time and cannot be found by its name: pickling and copying go by the original one.
        state = self.__dict__.copy()
        return _rebuild, (_original_class(type(self)),), state


def _why_not_from_states(model: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Why a call cannot be drafted in where a model's cache keeps recurrent states; `None` where it can."""
    if not has_states(model):
        return None
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions and hidden states are asked for of a model that keeps recurrent states"
    return None


def _forward_of(call: _Call, batch: int, returns_states: bool) -> tuple[Forward, str | None]:
    """The model's passes for a call, and why their bits may depend on what is drafted; `None` where they do not."""
    model, invariant = call.model, None
    plays_back = batch == 1 and not returns_states
    if call.is_check:
        reason: str | None = "the model is checked"
        invariant = invariant_to_check(model, call.exactness) if plays_back else None
    elif batch > 1:
        reason = "the rows of a batch go through the model's own code together"
    elif returns_states:
        reason = "attentions and hidden states come from the model's own code"
    else:
        exactness = None if call.config is None else call.config.exactness
        invariant, reason = invariant_of(model, exactness)
        if exactness == BITWISE and reason is not None:
            _warn_once(model, f"{type(model).__name__} cannot decode exactly to the bit here: {reason}.")
    # What is replayed is held against the model's own passes when it is recorded.
    # Who forgoes exact passes in half precision is to have plain's very text.
    asked = call.exactness if call.is_check or call.config is None else call.config.exactness
    forward = Forward(
        model,
        plays_back=plays_back,
        invariant=invariant,
        replays=not call.is_check,
        own_kernels=wants_own_kernels(model, asked),
    )
    return forward, reason


def _note_passes(statistics: SpeculationStatistics, forward: Forward, reason: str | None) -> None:
    """Say in the statistics of a call whether its bits may depend on what was drafted, and what was replayed."""
    if forward.is_bitwise:
        statistics.exactness = BITWISE
    else:
        statistics.exactness = NUMERIC
        statistics.exactness_reason = reason or "a pass was run by the model's own code"
    statistics.replayed_passes, statistics.replay_refusal = forward.replayed_passes, forward.replay_refusal


def _say_that_nothing_drafts(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Once per model, where a generation config asks for drafting but the call does not."""
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    stored = getattr(model.generation_config, "self_speculative", None)
    asked = getattr(given, "self_speculative", None)
    if asked is not None and asked is not False and asked != stored:
        _warn_once(
            model,
            f"The generation config asks for `self_speculative={clipped(shown(asked), 80)}`, but this call decodes "
            "plainly: drafting is asked for in the call, as `generate(..., self_speculative=…)`, or "
            "`self_speculative=True` for what the config says. `self_speculative=False` is plain on purpose.",
            stacklevel=4,
        )


TOO_SHORT = "it asks for so few tokens that none of them can be drafted"
"""Of a call: the first token comes from the prompt, and the last one of a round is the target's own."""

_SHORT = 2


def _is_short(given: GenerationConfig | None, model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call asks for no more tokens than can be had without a draft: preparing one is not worth its time."""
    asked = kwargs.get("max_new_tokens")
    for config in (given, model.generation_config):
        asked = getattr(config, "max_new_tokens", None) if asked is None else asked
    return isinstance(asked, int) and asked <= _SHORT


def _warn_of_refusal(model: PreTrainedModel, refusal: str) -> None:
    if refusal == TOO_SHORT:
        return
    _warn_once(model, f"{type(model).__name__} is decoded without drafts, as transformers decodes it: {refusal}.")


def _warn_once(model: PreTrainedModel, message: str, stacklevel: int = 7) -> None:
    """Once per model and message."""
    given = state_of(model).warnings
    if message not in given:
        given.add(message)
        warnings.warn(message, stacklevel=stacklevel)


def _rebuild(original: type) -> Any:
    cls = _enabled_class(original)
    return object.__new__(cls)


_CLASSES: dict[type, type] = {}


def _enabled_class(original: type) -> type:
    """The class with the mixin in front; same name and module, since pipelines and saved configs go by those."""
    if original not in _CLASSES:
        _CLASSES[original] = type(
            original.__name__,
            (SelfSpeculativeMixin, original),
            {
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__doc__": original.__doc__,
            },
        )
    return _CLASSES[original]


def _original_class(cls: type) -> type:
    return cls.__mro__[cls.__mro__.index(SelfSpeculativeMixin) + 1]


# ----------------------------------------------------------------------------------------------------------------------
# switching on and off


def enable_self_speculative(model: _ModelT, default: SelfSpeculativeRequest | None = None) -> _ModelT:
    """Teach a model `generate(..., self_speculative=…)`.

    The model stays the object it is, with its weights and its class's name; a call without `self_speculative` does
    exactly what it did before. Saving, pickling, copying, pipelines and adapters work as before.

    Args:
        model: a decoder-only transformers model, or a PEFT model around one.
        default: a config, or "auto", to store in `model.generation_config.self_speculative`, used by
            `self_speculative=True`; it is saved and loaded with the generation config.

    Returns:
        The same object.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model cannot draft for itself (an encoder-decoder, a recurrent model, one that hands decoding on
            to a model inside of it), or `default` does not fit it.
    """
    target = _target_of(model)
    if not isinstance(target, SelfSpeculativeMixin):
        refuse_model(target)
        if is_untried():
            warnings.warn(
                f"ssd_generation has not been tried with transformers {transformers.__version__}: texts may be wrong. "
                f"Install one that it has been tried with: pip install 'transformers>=5.18,<{UNTRIED}'.",
                stacklevel=2,
            )
        layout_of(target)
        target.__class__ = _enabled_class(type(target))
        target.last_speculation = None
    if default is not None:
        assert target.generation_config is not None
        if default == "auto":
            target.generation_config.self_speculative = "auto"
        else:
            config = _resolve(target, default, None)
            config.validate_for(num_layers=len(layout_of(target)), model_type=_model_type(target))
            target.generation_config.self_speculative = config.to_dict()
        # Otherwise transformers makes the generation config anew from the model's, and the entry is lost.
        target.generation_config._from_model_config = False
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
        target.__class__ = _original_class(type(target))
        target.__dict__.pop("last_speculation", None)
        state_of(cast(torch.nn.Module, target)).drop()
    return model


def why_no_drafts(model: torch.nn.Module) -> str | None:
    """Why a model's tokens cannot be verified several at a time, so that transformers decodes its texts; else `None`.

    Args:
        model: a decoder-only transformers model, enabled or not.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: it cannot draft for itself, whatever it says (see `enable_self_speculative`).
    """
    target = _target_of(model)
    was_enabled = isinstance(target, SelfSpeculativeMixin)
    refusal: str | None = enable_self_speculative(target)._check(is_batch=False).refusal
    if not was_enabled:
        disable_self_speculative(target)
    return refusal


def require_drafts(model: torch.nn.Module) -> None:
    """See that a model can draft, where drafting is all that was asked for.

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
    """Whether `enable_self_speculative` was called on this model.

    Raises:
        TypeError: `model` is not a transformers model.
    """
    return isinstance(_target_of(model), SelfSpeculativeMixin)


def _target_of(model: Any) -> PreTrainedModel:
    """The transformers model itself, from inside a PEFT wrapper."""
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


# ----------------------------------------------------------------------------------------------------------------------
# requests


def _resolve(
    model: PreTrainedModel,
    request: SelfSpeculativeRequest,
    generation_config: GenerationConfig | None,
    draft_memory: float | None = None,
    prompt: Any = None,
) -> SelfSpeculativeConfig:
    """The config that a request stands for.

    Raises:
        ValueError, TypeError: it stands for none, or its low-bit copies take more than `draft_memory`.
    """
    if request is True:
        request = _stored(model, generation_config)
    if isinstance(request, str) and request == "auto":
        text = prompt if isinstance(prompt, torch.Tensor) and prompt.ndim == 2 and prompt.numel() else None
        # A plain pass over the prompt, which must not be taken for a part of some other call.
        token = _CALL.set(None)
        try:
            return automatic_config(model, text, draft_memory)
        finally:
            _CALL.reset(token)
    if isinstance(request, str) and not os.path.exists(request):
        if request.strip().lower() == "auto":
            raise ValueError(f'`self_speculative={shown(request)}` is written in small letters: "auto".')
        if request in PRECISIONS:
            raise ValueError(
                f"`self_speculative={request!r}` is a precision, not a config. Pass `SelfSpeculativeConfig(precision="
                f'{request!r})`, or "auto".'
            )
    config = _read(request)
    if draft_memory is not None:
        check_budget(model, config, draft_memory)
    return config


def _stored(model: PreTrainedModel, generation_config: GenerationConfig | None) -> SelfSpeculativeRequest:
    for source in (generation_config, model.generation_config):
        stored = getattr(source, "self_speculative", None)
        if stored is None or stored is True:
            continue
        # It came with the model, maybe a stranger's: a path there would have a file of this machine opened and parsed.
        is_config = isinstance(stored, (SelfSpeculativeConfig, SkipConfig, Mapping))
        if is_config or (isinstance(stored, str) and stored == "auto"):
            return stored  # type: ignore[no-any-return]
        raise TypeError(
            '`generation_config.self_speculative` holds the config itself, as its `to_dict()`, or "auto", but got '
            f"{shown(stored)}. Store one with `enable_self_speculative(model, default=…)`, which takes a path too."
        )
    raise ValueError(
        "`self_speculative=True` uses the default stored with the model, but "
        "`model.generation_config.self_speculative` is not set. Store one with "
        "`enable_self_speculative(model, default=config)`, or pass a config."
    )


def _read(request: SelfSpeculativeRequest) -> SelfSpeculativeConfig:
    if isinstance(request, Drafter):
        raise TypeError(
            f"A drafter ({type(request).__name__}) cannot be stored as a default or combined with `draft_memory`: pass "
            "it as `generate(..., self_speculative=drafter)`, alone."
        )
    if isinstance(request, SelfSpeculativeConfig):
        return request
    if isinstance(request, SkipConfig):
        return SelfSpeculativeConfig(skip=request)
    if isinstance(request, Mapping):
        return SelfSpeculativeConfig.from_dict(dict(request))
    if isinstance(request, (str, os.PathLike)):
        return SelfSpeculativeConfig.from_pretrained(request)
    if isinstance(request, type) and issubclass(request, Drafter):
        raise TypeError(f"`self_speculative` takes a drafter, not its class: pass `{request.__name__}(…)`.")
    raise TypeError(
        "`self_speculative` must be a SelfSpeculativeConfig, a SkipConfig, a dict, a path or Hub id, 'auto', True or a "
        f"Drafter, but got {clipped(type(request).__name__, 80)} ({shown(request)})."
    )


def _model_type(model: PreTrainedModel) -> str:
    # Of the language model inside, where the model takes pictures as well: that is what provenance records.
    return str(model.config.get_text_config(decoder=True).model_type)


def _policy_of(model: Any, config: SelfSpeculativeConfig, batch: int) -> DraftPolicy:
    """The draft-length policy of this model and config, with what it learnt in earlier calls where that is carried."""
    policies, key, rows = state_of(model).policies, _policy_key(config, batch), rows_measured(batch)
    if key not in policies or config.drafting.carry_state is False:
        costs = config.costs
        if config.drafting.policy == "cost":
            if costs is not None and costs.measured_on is not None and costs.measured_on != describe_machine(model):
                warnings.warn(
                    f"The costs in this config were measured on another machine, dtype or version "
                    f"({visible(costs.measured_on)}) than this one ({describe_machine(model)}): the draft length may "
                    "not be the best here. Leave `costs` out to have them measured, or store those of "
                    "`ssd_generation.tuning.costs.measure_costs(model, config)`.",
                    stacklevel=3,
                )
            elif costs is None or (rows > 1 and costs.measured_on is not None):
                costs = costs_of(model, config, rows=rows)  # what was measured is of single texts
        policies[key] = make_policy(
            config.drafting,
            costs,
            self_drafts=config.drafts_itself,
            lookup=config.lookup is not None,
            use_confidence=input_device(model).type == "cpu",
        )
    found: DraftPolicy = policies[key]
    return found


def _policy_key(config: SelfSpeculativeConfig, batch: int) -> Any:
    """By what a policy is known: the config, and of a batch about how many rows share its passes."""
    return config if batch == 1 else (config, rows_measured(batch))


def _drafter_of(
    call: _Call, forward: Forward, generation_config: GenerationConfig, batch: int
) -> tuple[Drafter, _Refining | None]:
    """What drafts in a call, and what betters the draft between its rounds where the config asks for that."""
    model = forward.model
    if call.drafter is not None:
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        return CheckedDrafter(call.drafter, vocabulary), None
    assert call.config is not None
    # Of offloaded weights each judgement would read all, where the draft reads none.
    adapts = call.config.adapt and not (call.config.precision and is_offloaded(model))
    refinement = refinement_of(model, call.config) if adapts else None
    config = call.config if refinement is None else refinement.config
    drafter = self_drafter(forward, config, generation_config, _policy_of(model, config, batch), batch)
    return drafter, None if refinement is None else _Refining(model, refinement, drafter.draft_by, batch)


class _Refining:
    """Has drafts judged between the rounds of a call, and exchanges the draft where another one is better."""

    def __init__(
        self,
        model: PreTrainedModel,
        refinement: Refinement,
        draft_by: Callable[[SelfSpeculativeConfig, DraftPolicy], None],
        batch: int,
    ) -> None:
        self.model, self.batch = model, batch
        self.refinement = refinement
        self.draft_by = draft_by
        self.judged = 0  # tokens of the text

    def __call__(self, draft_passes: int, verified: int, rows: Rows) -> None:
        refinement = self.refinement
        refinement.earn(draft_passes, verified)
        length = rows.lengths[0]
        since = length - max(self.judged, rows.prompt_length)
        if not refinement.is_due(since):
            return
        self.judged = length
        text = rows.verified_text(min(since, WINDOW))
        before = refinement.config
        if text is None or not refinement.learn(self.model, text):
            return
        policies, key = state_of(self.model).policies, _policy_key(before, self.batch)
        policy = _policy_of(self.model, refinement.config, self.batch)
        old = policies[key] if before == refinement.base else policies.pop(key)
        if isinstance(policy, CostAwarePolicy) and isinstance(old, CostAwarePolicy):
            policy.take_over(old)  # of the new draft nothing is known
        self.draft_by(refinement.config, policy)


def refinement_of(model: PreTrainedModel, config: SelfSpeculativeConfig) -> Refinement:
    """The refinement of a config's draft, with what it has learnt so far; costs are measured where it is new."""
    refinements: dict[SelfSpeculativeConfig, Refinement] = state_of(model).refinements
    if config not in refinements or config.drafting.carry_state is False:
        costs = config.costs if config.costs is not None else costs_of(model, config)
        refinements[config] = Refinement(model, config, costs)
    return refinements[config]
