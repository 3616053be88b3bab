"""The mixin that adds `self_speculative=` to a model's `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from ..decoding.loop_request import LoopRequest
from ..decoding.outputs import SelfSpeculativeOutput
from ..decoding.refusals import CannotDraft, refuse_what_cannot_be
from ..decoding.statistics import SpeculationStatistics  # transformers evaluates the annotations of its model classes
from ..support.versions import cache_argument
from .always import drafts_always, note_continuous_batching, note_undrafted
from .current import current_call, under_way
from .prepare import check, prepare, prepare_unasked
from .request import Request, SelfSpeculativeRequest, refuse_without_drafts, warn_if_nothing_drafts

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from ..tuning.model_check import ModelCheck
    from .call import Call

__all__ = ["SelfSpeculativeMixin", "enabled_class", "original_class"]


class SelfSpeculativeMixin:
    """Mixin that adds `self_speculative=` to `generate`; put in front of a class by `enable_self_speculative`."""

    last_speculation: SpeculationStatistics | None
    """Statistics of the last self-speculative call that ended on this model; `None` before the first."""

    def generate(
        self,
        *args: Any,
        self_speculative: SelfSpeculativeRequest | None = None,
        draft_memory: float | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate, drafting with the model itself where `self_speculative` is given; else exactly as in transformers.

        Args:
            *args: as in transformers' `generate`.
            self_speculative: a `SelfSpeculativeConfig`, a `SkipConfig`, a dictionary of either, the path or Hub id of a
                saved config, `"auto"`, `True` for the default stored in `generation_config.self_speculative`, or a
                `Drafter` of your own. `None` and `False`: plain `generate`. `"auto"` needs no config: the first call
                measures what drafting costs on this machine (seconds, stored on the disk; between tokens where the text
                is streamed); every call then picks the fastest way to draft, or none. On a model that drafts `always`,
                `None` is the stored default.
            draft_memory: share of the weights' bytes that low-bit copies for drafting may take, 0 (none) to 100. With
                `"auto"`, by default 0.3 (0.35 of 16-bit weights); a config that takes more is an error.
            cache_salt: with `prefix_cache`: the call reuses prefixes of calls with the same salt only.
            **kwargs: as in transformers' `generate`.

        Returns:
            As transformers' `generate`. With `return_dict_in_generate=True` the output has the call's statistics under
            `speculation`; they are in `model.last_speculation` in any case.

        Raises:
            ValueError: the config does not fit the model, or the call requests something that self-speculative decoding
                cannot do (see the README); the message says what to do.
            TypeError: `self_speculative` is of another type.
        """
        generate, model = super().generate, cast(PreTrainedModel, self)  # type: ignore[misc]
        call: Call | None = None
        if self_speculative is None and drafts_always(model, args, kwargs):
            call = prepare_unasked(model, draft_memory, args, kwargs, _generate_of)
        elif self_speculative is None or self_speculative is False:
            refuse_without_drafts(draft_memory, cache_salt)
            if self_speculative is None and current_call() is None:
                warn_if_nothing_drafts(model, args, kwargs)
        else:
            call = prepare(Request(model, self_speculative, draft_memory, args, kwargs), _generate_of)
        if call is not None:
            call.salt = cache_salt
        with under_way(call):
            output = generate(*args, **kwargs)
        if call is not None and call.refusal is not None and not call.has_run:
            note_undrafted(call, output, args, kwargs)
        return output

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

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Begin continuous batching, as in transformers: nothing is drafted there."""
        note_continuous_batching(cast(PreTrainedModel, self))
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def _check(self, is_batch: bool = False) -> ModelCheck:
        """Find out whether tokens of this model can be verified several at a time."""
        with under_way(None):
            return check(cast(PreTrainedModel, self), _generate_of, is_batch)

    def _active_call(self) -> Call | None:
        call = current_call()
        return call if call is not None and call.model is self else None

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        call = self._active_call()
        if call is not None and not (call.is_unasked and call.refusal is not None):
            with call.refusals_noted():
                refuse_what_cannot_be(
                    cast(PreTrainedModel, self), generation_mode, generation_config, generation_mode_kwargs
                )
        parent = super()._validate_generation_mode  # type: ignore[misc]
        parent(generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        name = cache_argument(cast(PreTrainedModel, self))
        is_users = model_kwargs.get(name) is not None
        parent = super()._prepare_cache_for_generation  # type: ignore[misc]
        result = parent(generation_config, model_kwargs, *args, **kwargs)
        if (call := self._active_call()) is not None:
            call.prepare_cache(model_kwargs, name, is_users, generation_config)
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
        def sample(streamer: BaseStreamer | None = streamer) -> Any:
            return super(SelfSpeculativeMixin, self)._sample(  # type: ignore[misc]
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )

        call = self._active_call()
        if call is None:
            return sample()
        asked = LoopRequest(generation_config, logits_processor, stopping_criteria, streamer)
        return call.run(input_ids, asked, model_kwargs, sample)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time and cannot be found by its name: pickling and copying name the original one.
        state = self.__dict__.copy()
        return _rebuild, (original_class(type(self)),), state


def _generate_of(model: Any) -> Any:
    """Return the `generate` of an enabled model's own class."""
    return super(SelfSpeculativeMixin, model).generate


def _rebuild(original: type) -> Any:
    """Create an empty enabled model. Pickles name this function as `ssd_generation.generation._rebuild`."""
    cls = enabled_class(original)
    return object.__new__(cls)


_rebuild.__module__ = __package__

_CLASSES: dict[type, type] = {}


def enabled_class(original: type) -> type:
    """Return the class with the mixin in front; its name and module, which identify it to pipelines, are the same.

    Args:
        original: a model's own class.
    """
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


def original_class(cls: type) -> type:
    """Return the model's own class, given one that `enabled_class` made."""
    return cls.__mro__[cls.__mro__.index(SelfSpeculativeMixin) + 1]
