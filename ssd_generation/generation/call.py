"""One self-speculative call of `generate`, from what it asks for to its text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, StaticCache

from ..cache.own_lists import class_of
from ..cache.recurrent import has_states
from ..decoding.ends import end_tokens
from ..decoding.loop import DecodingLoop
from ..decoding.loop_request import LoopRequest
from ..decoding.outputs import SelfSpeculativeOutput
from ..decoding.refusals import refuse_cache, why_not_in
from ..decoding.statistics import SpeculationStatistics
from ..drafting.drafter import CheckedDrafter, Drafter
from ..forward.adapters import weights_in_use
from ..forward.forward import Forward
from ..forward.offloaded import is_offloaded
from ..forward.plan import PassPlan
from ..forward.weights import WeightWatch, forget_stale
from ..support.model_state import state_of
from ..support.once import looking_once
from ..support.versions import cache_argument
from ..support.warn import warn_once
from ..tuning.call_drafter import BetweenRounds, call_drafter
from ..tuning.learnt import LearntPart
from ..tuning.model_check import ForcedText, ModelCheck, ScriptedDrafts, check_model
from ..tuning.plan import plan_passes
from .loan import Loan
from .request import Request

__all__ = ["TOO_SHORT", "Call", "check", "current_call", "prepare", "under_way"]

TOO_SHORT = "it asks for so few tokens that none of them can be drafted"


@dataclass
class Call:
    """A self-speculative `generate` call under way on this thread.

    Attributes:
        model: the target model.
        generate: the `generate` of its own class.
        request: what the user asked for; `None` where the library checks a model.
        script: what drafts where the library checks a model.
        exactness: how bits are kept from depending on the width of a pass, as in `plan_passes`.
        refusal: why nothing can be drafted; `None` where it can.
        in_step: whether all rows take the same number of tokens in each round.
        cache_is_returned: whether the caller sees the KV cache afterwards.
        static: the static cache that it sees then, where one was asked for.
    """

    model: PreTrainedModel
    generate: Callable[..., Any]
    request: Request | None = None
    script: Drafter | None = None
    exactness: str | None = None
    refusal: str | None = None
    in_step: bool = False
    cache_is_returned: bool = False
    static: StaticCache | None = None

    @property
    def is_check(self) -> bool:
        """Whether the library checks a model, instead of a user's call."""
        return self.request is None

    # ------------------------------------------------------------------------------------------------------------------

    def prepare_cache(self, given: dict[str, Any], name: str, is_users: bool, config: GenerationConfig) -> None:
        """See what cache transformers has prepared, and exchange one that rejected tokens cannot be taken out of.

        Args:
            given: keyword arguments of the model, the cache among them.
            name: of the cache among these.
            is_users: whether the user passed the cache in.
            config: generation config of the call.

        Raises:
            ValueError: nothing can be drafted with this cache.
        """
        self.cache_is_returned = is_users or bool(config.return_dict_in_generate)
        if self.refusal is not None:
            return
        cache, kind = given.get(name), class_of(self.model)
        if cache is None and kind is not None:
            cache = given[name] = kind()  # as the model itself makes one in its first pass
        if not is_users and isinstance(cache, StaticCache) and not cache.offloading:
            # Nothing has been allocated for it yet. Passes stand behind a cache of this library's own.
            text_config = self.model.config.get_text_config(decoder=True)
            self.static, cache = cache, DynamicCache(config=text_config)
            given[name] = cache
        self.refusal = why_not_in(cache, kind)
        if self.refusal is None:
            refuse_cache(self.model, cache)

    def run(
        self,
        input_ids: torch.LongTensor,
        request: LoopRequest,
        model_kwargs: dict[str, Any],
        sample: Callable[[], Any],
    ) -> torch.LongTensor | SelfSpeculativeOutput | Any:
        """Decode, with drafts where there can be any.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts.
            request: what transformers' loop would have been asked for.
            model_kwargs: the model's keyword arguments, with the cache.
            sample: transformers' own loop, with the same.

        Returns:
            What transformers' loop returns, or a `SelfSpeculativeOutput` in the place of its dictionary.
        """
        refusal = self.refusal or self._why_not_for(request.generation_config, input_ids.shape[0])
        if refusal is not None:
            return self._decode_plainly(input_ids, request, sample, refusal)
        return self._decode_with_drafts(input_ids, request, model_kwargs)

    def _why_not_for(self, config: GenerationConfig, batch: int) -> str | None:
        """Why nothing can be drafted for these rows; notes whether they go in lockstep."""
        if _asks_for_states(config) and has_states(self.model):
            return "attentions and hidden states are asked for of a model that keeps recurrent states"
        if self.is_check or batch == 1:
            return None
        found = check(self.model, self.generate, is_batch=True)
        self.in_step = found.uneven_refusal is not None
        return found.refusal

    def _decode_plainly(
        self, input_ids: torch.LongTensor, request: LoopRequest, sample: Callable[[], Any], refusal: str
    ) -> Any:
        if refusal != TOO_SHORT:
            name = type(self.model).__name__
            warn_once(self.model, f"{name} is decoded without drafts, as transformers decodes it: {refusal}.")
        started, prompt = time.perf_counter(), input_ids.shape[1]
        output = sample()
        seconds = time.perf_counter() - started
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.model.last_speculation = SpeculationStatistics.of_plain(  # type: ignore[assignment]
            sequences[:, prompt:].tolist(), prompt, end_tokens(request.criteria), refusal, seconds
        )
        return output

    def _decode_with_drafts(
        self, input_ids: torch.LongTensor, request: LoopRequest, model_kwargs: dict[str, Any]
    ) -> torch.LongTensor | SelfSpeculativeOutput:
        model, batch = self.model, input_ids.shape[0]
        cache = model_kwargs[cache_argument(model)]
        # Weights that are offloaded change all along.
        watch = WeightWatch(model, looks=request.has_code_of_the_users and not is_offloaded(model))
        with Loan(model, cache, batch, self.cache_is_returned, self.static) as loan:
            with looking_once():
                forget_stale(model)
                plan = self._plan(batch, _asks_for_states(request.generation_config))
                forward = loan.forward = Forward(model, plan=plan)
                drafter, between = self._drafter(forward, request.generation_config, batch)
            loan.restore_states()
            # Recurrent states of all rows stand behind the same number of tokens.
            in_step = self.in_step or loan.has_states
            asked = replace(request, cache_is_returned=self.cache_is_returned, in_step=in_step)
            loop = DecodingLoop(forward, drafter, asked, watch, after_round=between)
            output = loop.run(input_ids, model_kwargs)
        if isinstance(output, SelfSpeculativeOutput):
            loan.deliver(output)
        loop.statistics.note_passes(forward, plan.reason)
        if between is not None:
            loop.statistics.refinement = between.refinement.to_dict()
        if not self.is_check:
            model.last_speculation = loop.statistics  # type: ignore[assignment]
        return output

    def _plan(self, batch: int, returns_states: bool) -> PassPlan:
        config = None if self.request is None else self.request.config
        asked = self.exactness if config is None else config.exactness
        return plan_passes(self.model, batch, asked, returns_states=returns_states, is_check=self.is_check)

    def _drafter(
        self, forward: Forward, generation_config: GenerationConfig, batch: int
    ) -> tuple[Drafter, BetweenRounds | None]:
        """The drafter of the call, and what improves its draft between rounds where the config asks for that."""
        own = self.script if self.request is None else self.request.drafter
        if own is not None:
            return CheckedDrafter(own, int(self.model.get_input_embeddings().weight.shape[0])), None
        assert self.request is not None and self.request.config is not None
        return call_drafter(forward, self.request.config, generation_config, batch)


def _asks_for_states(config: GenerationConfig) -> bool:
    """Whether attentions or hidden states are to be returned."""
    return bool(config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states))


# ----------------------------------------------------------------------------------------------------------------------
# which call is under way, and how one begins

_CALL: ContextVar[Call | None] = ContextVar("ssd_generation_call", default=None)


def current_call() -> Call | None:
    """The call under way on this thread."""
    return _CALL.get()


@contextmanager
def under_way(call: Call | None) -> Iterator[None]:
    """Have a call under way; `None`: a plain call, maybe from inside of another, such as from a logits processor."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def prepare(request: Request, generate: Callable[..., Any]) -> Call:
    """Find out what a call drafts with, and whether its model can draft.

    Args:
        request: what was asked for.
        generate: the `generate` of the model's own class.

    Raises:
        ValueError, TypeError: as `Request.resolve`.
    """
    model = request.model
    # What is measured or checked here is no part of a call that is under way.
    with under_way(None), looking_once():
        if not request.is_auto:
            request.resolve()
        if request.is_short:
            return Call(model, generate, request, refusal=TOO_SHORT)
        state_of(model).get(LearntPart).learn_of(weights_in_use(model))
        tokenizer = request.kwargs.get("tokenizer")
        refusal = check(model, generate, tokenizer=tokenizer, exactness=request.exactness).refusal
        if request.is_auto and refusal is None:
            request.resolve()
    return Call(model, generate, request, refusal=refusal)


def check(
    model: PreTrainedModel,
    generate: Callable[..., Any],
    is_batch: bool = False,
    tokenizer: Any = None,
    exactness: str | None = None,
) -> ModelCheck:
    """Find out whether tokens of a model can be verified several at a time (tuning/model_check.py).

    Args:
        model: the target model.
        generate: the `generate` of its own class.
        is_batch: more than one row.
        tokenizer: of the call, for models whose `generate` wants one.
        exactness: that was asked for.
    """

    def decode(tried: PreTrainedModel, text: ForcedText, is_drafted: bool, in_step: bool) -> Any:
        script = ScriptedDrafts(text) if is_drafted else None
        call = Call(tried, generate, script=script, exactness=exactness, in_step=in_step)
        with under_way(call if is_drafted else None):
            # Whatever the model's own generation config says.
            return generate(
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

    return check_model(model, is_batch, decode, exactness)
