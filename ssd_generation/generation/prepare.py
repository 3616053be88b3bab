"""Preparation of a call: what it drafts with, and whether its model can draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..forward.structure.sublayers import input_device
from ..native.ahead import compile_ahead
from ..support.model_state import state_of
from ..support.once import looking_once
from ..tuning.learnt import LearntPart
from ..tuning.model_check import ForcedText, ModelCheck, ScriptedDrafts, check_model
from ..tuning.moving_weights import weights_in_use
from .call import Call
from .current import under_way
from .first_call import FirstCall, is_first_call, is_not_worth_measuring
from .plain import MEASURED_MEANWHILE, NOT_MEASURED, TOO_SHORT
from .request import Request

__all__ = ["check", "prepare", "prepare_unasked"]


GenerateOf = Callable[[PreTrainedModel], Callable[..., Any]]
"""Function from a model to the `generate` of its own class."""


def prepare_unasked(
    model: PreTrainedModel,
    draft_memory: float | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    generate_of: GenerateOf,
) -> Call:
    """Prepare a call of a model that drafts `always`, by its stored default; record what it cannot do as its refusal.

    Args:
        model: the target model.
        draft_memory: share of the weights' bytes that low-bit copies may take, as in `Request`.
        args: positional arguments of `generate`.
        kwargs: its keyword arguments.
        generate_of: returns the `generate` of a model's own class.

    Raises:
        ValueError, TypeError: the generation config of the call names a config that does not fit.
    """
    call = Call(model, is_unasked=True)
    with call.refusals_noted():
        call = prepare(Request(model, True, draft_memory, args, kwargs), generate_of)
        call.is_unasked = True
    return call


def prepare(request: Request, generate_of: GenerateOf) -> Call:
    """Find out what a call drafts with, and whether its model can draft.

    Args:
        request: request of the call.
        generate_of: returns the `generate` of a model's own class.

    Raises:
        ValueError, TypeError: as in `Request.resolve`.
    """
    model, tokenizer = request.model, request.kwargs.get("tokenizer")
    call = Call(model, request, check_batch=partial(check, model, generate_of, is_batch=True))
    # Measurements and checks made here are no part of a call that is under way.
    with under_way(None), looking_once():
        if not request.is_auto:
            request.resolve()
        if request.is_short:
            call.refusal = TOO_SHORT
            return call
        if is_not_worth_measuring(request):
            call.refusal = NOT_MEASURED
            return call
        if is_first_call(request):
            call.first = FirstCall(request, partial(check, model, generate_of, tokenizer=tokenizer))
            call.refusal = MEASURED_MEANWHILE
            return call
        if request.is_auto and input_device(model).type == "cpu":
            compile_ahead(model.dtype)
        state_of(model).get(LearntPart).learn_of(weights_in_use(model))
        call.refusal = check(model, generate_of, tokenizer=tokenizer, exactness=request.exactness).refusal
        if request.is_auto and call.refusal is None:
            request.resolve()
            if request.is_found_short:
                call.refusal = TOO_SHORT
    return call


def check(
    model: PreTrainedModel,
    generate_of: GenerateOf,
    is_batch: bool = False,
    tokenizer: Any = None,
    exactness: str | None = None,
) -> ModelCheck:
    """Find out whether tokens of a model can be verified several at a time (tuning/model_check.py).

    Args:
        model: the target model.
        generate_of: returns the `generate` of a model's own class; another model may be tried in this one's place.
        is_batch: whether to check more than one row.
        tokenizer: tokenizer of the call, for models whose `generate` needs one.
        exactness: the requested exactness.
    """

    def decode(tried: PreTrainedModel, text: ForcedText, is_drafted: bool, lockstep: bool) -> Any:
        script = ScriptedDrafts(text) if is_drafted else None
        call = Call(tried, script=script, exactness=exactness, lockstep=lockstep)
        with under_way(call if is_drafted else None):
            # These override the model's own generation config.
            return generate_of(tried)(
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
