"""One self-speculative call of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

from ..cache.recurrent import has_states
from ..decoding.loop import DecodingLoop
from ..decoding.loop_request import LoopRequest
from ..decoding.outputs import SelfSpeculativeOutput
from ..decoding.refusals import CannotDraft
from ..forward.forward import Forward
from ..support.once import looking_once
from ..support.versions import cache_argument
from ..tuning.call_drafter import call_drafter, store_of
from ..tuning.plan_passes import plan_passes
from .loan import Loan, suited_cache
from .plain import decode_plainly
from .prefixes import Prefix, reuses_prefixes
from .request import Request
from .room import why_no_room

if TYPE_CHECKING:
    from ..config import SelfSpeculativeConfig
    from ..drafting.drafter import Drafter
    from ..tuning.model_check import ModelCheck

__all__ = ["Call"]


class Meanwhile(Protocol):
    """Preparation of drafts while a text is decoded plainly (first_call.py)."""

    def decode(self, sample: Callable[..., Any]) -> Any:
        """Decode the text by transformers' own loop, and prepare between its tokens."""

    def finish(self) -> None:
        """Prepare the rest, after the text has ended."""


@dataclass
class Call:
    """A self-speculative `generate` call under way on this thread.

    Attributes:
        model: the target model.
        request: request of the user; `None` where the library checks a model.
        check_batch: function that checks the model with more than one row.
        script: drafter where the library checks a model.
        exactness: exactness of that check, as in `plan_passes`.
        refusal: why nothing can be drafted; `None` where drafting is possible.
        first: the preparation of drafts between the tokens of this call, where it is the model's first one here.
        is_unasked: whether the model drafts `always`, without a request of the call: then nothing is an error.
        has_run: whether the call reached transformers' loop for greedy decoding and sampling.
        lockstep: whether all rows take the same number of tokens in each round.
        cache_is_returned: whether the caller sees the KV cache afterwards.
        static: static cache that the caller sees instead, where one was requested.
        salt: key that separates the stored keys and values of different users.
    """

    model: PreTrainedModel
    request: Request | None = None
    check_batch: Callable[[], ModelCheck] | None = None
    script: Drafter | None = None
    exactness: str | None = None
    refusal: str | None = None
    first: Meanwhile | None = None
    is_unasked: bool = False
    has_run: bool = False
    lockstep: bool = False
    cache_is_returned: bool = False
    static: StaticCache | None = None
    salt: str | None = None

    def prepare_cache(self, given: dict[str, Any], name: str, is_users: bool, config: GenerationConfig) -> None:
        """Check the cache that transformers has prepared, and replace one from which tokens cannot be removed.

        Args:
            given: keyword arguments of the model, including the cache.
            name: name of the cache among these.
            is_users: whether the user passed the cache in.
            config: generation config of the call.

        Raises:
            ValueError: nothing can be drafted with this cache.
        """
        self.cache_is_returned = is_users or bool(config.return_dict_in_generate)
        with self.refusals_noted():
            if self.refusal is None:
                given[name], self.static, self.refusal = suited_cache(self.model, given.get(name), is_users)

    @contextmanager
    def refusals_noted(self) -> Iterator[None]:
        """Record a `CannotDraft` error as the call's refusal where drafts were not requested; else let it pass."""
        try:
            yield
        except CannotDraft as error:
            if not self.is_unasked:
                raise
            self.refusal = str(error).rstrip(".")

    def run(
        self,
        input_ids: torch.LongTensor,
        request: LoopRequest,
        model_kwargs: dict[str, Any],
        sample: Callable[..., Any],
    ) -> torch.LongTensor | SelfSpeculativeOutput | Any:
        """Decode, with drafts where possible.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts.
            request: request that transformers' loop would have got.
            model_kwargs: the model's keyword arguments, with the cache.
            sample: transformers' own loop, with the same arguments; it takes another streamer.

        Returns:
            Output of transformers' loop, or a `SelfSpeculativeOutput` in place of its dictionary.
        """
        self.has_run = True
        refusal = self.refusal or self._why_not_for(request.generation_config, input_ids.shape[0])
        if refusal is not None and self.first is not None:
            output = decode_plainly(self.model, input_ids, request, partial(self.first.decode, sample), refusal)
            self.first.finish()
            return output
        if refusal is not None:
            return decode_plainly(self.model, input_ids, request, sample, refusal)
        return self._decode_with_drafts(input_ids, request, model_kwargs)

    def _why_not_for(self, config: GenerationConfig, batch: int) -> str | None:
        """Return why nothing can be drafted for these rows, or `None`; record whether they run in lockstep."""
        if _asks_for_states(config) and has_states(self.model):
            return "attentions or hidden states were requested from a model with recurrent states"
        if self.check_batch is None or batch == 1:
            return None
        found = self.check_batch()
        self.lockstep = found.uneven_refusal is not None
        config_of_drafts = None if self.request is None else self.request.config
        if found.refusal is None and config_of_drafts is not None:
            return why_no_room(self.model, config_of_drafts, batch)
        return found.refusal

    def _decode_with_drafts(
        self, input_ids: torch.LongTensor, request: LoopRequest, model_kwargs: dict[str, Any]
    ) -> torch.LongTensor | SelfSpeculativeOutput:
        model, batch, config = self.model, input_ids.shape[0], request.generation_config
        draft_by, is_check = self._draft_by(), self.request is None
        asked = self.exactness if self.request is None else self.request.exactness
        cache = model_kwargs[cache_argument(model)]
        with Loan(model, cache, request, batch, self.cache_is_returned, self.static) as loan:
            with looking_once():
                loan.forget_stale()
                plan = plan_passes(
                    model,
                    batch,
                    asked,
                    returns_states=_asks_for_states(config),
                    reuses=reuses_prefixes(model),
                    is_check=is_check,
                )
                forward = loan.forward = Forward(model, plan=plan)
                drafter, between = call_drafter(forward, draft_by, config, batch)
            loan.restore_states()
            # Recurrent states of all rows cover the same number of tokens.
            lockstep = self.lockstep or loan.has_states
            request = replace(request, cache_is_returned=self.cache_is_returned, lockstep=lockstep)
            prefix = Prefix(forward, cache, input_ids, model_kwargs, config, self.salt)
            if not is_check:
                prefix.fill()
            loop = DecodingLoop(forward, drafter, request, loan.watch, after_round=between)
            output = loop.run(input_ids, model_kwargs)
            if not is_check:
                sequences = output.sequences if isinstance(output, SelfSpeculativeOutput) else output
                prefix.keep(sequences, loop.context)
                if (store := store_of(model, None if self.request is None else self.request.config)) is not None:
                    for text in sequences.tolist():
                        store.add(text)
        if isinstance(output, SelfSpeculativeOutput):
            loan.deliver(output)
        loop.statistics.note_passes(forward, plan.reason, prefix.reused, prefix.keeps_bits)
        if between is not None:
            loop.statistics.refinement = between.refinement.to_dict()
        if not is_check:
            model.last_speculation = loop.statistics
        return output

    def _draft_by(self) -> SelfSpeculativeConfig | Drafter:
        """Return the drafter of the call, or the config by which the model drafts."""
        found = self.script if self.request is None else self.request.drafter or self.request.config
        assert found is not None
        return found


def _asks_for_states(config: GenerationConfig) -> bool:
    """Tell whether attentions or hidden states are to be returned."""
    return bool(config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states))
