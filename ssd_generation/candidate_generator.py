"""The candidate generator: the target model drafts for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from .cache import DraftCache, add_spare_room
from .drafting import DraftPolicy, make_policy
from .skip_mode import SkipMode
from .sublayers import locate_sublayers
from .timing import Stopwatch
from .verification import argmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import SelfSpeculativeConfig

__all__ = ["Draft", "SelfSpeculativeCandidateGenerator"]

# What a drafting pass has no use for, or is given anew in each pass.
_NOT_FOR_DRAFTS = frozenset(
    (
        "past_key_values",
        "attention_mask",
        "position_ids",
        "inputs_embeds",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "token_type_ids",
        "mm_token_type_ids",
        "next_sequence_length",
        "is_first_iteration",
    )
)

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(drafted tokens so far (B, i), logits (B, V)) → scores (B, V)`."""


@dataclass
class Draft:
    """What one round drafted.

    Attributes:
        tokens: `(B, k)` drafted tokens.
        scores: `(B, k, V)` scores after all logits processors, whose softmax the tokens were drawn from; `None` under
            greedy decoding or where k = 0.
        lengths: tokens drafted per row, 0 … k; what stands behind them in `tokens` is to be ignored.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None
    lengths: list[int]


class SelfSpeculativeCandidateGenerator(CandidateGenerator):
    """Candidate generator whose draft is the target model itself, with chosen sub-layers left out.

    Implements transformers' candidate-generator interface, and works in transformers' own assisted decoding loop
    unmodified. The target fills its cache with the prompt alone; from then on each round drafts some tokens in skip
    mode. The draft reads the target's keys and values in place, never writes to them, and keeps its own only until the
    end of the round.

    Args:
        model: the target model.
        config: what to skip and how far to draft.
        generation_config: the prepared generation config of the call (`do_sample`, `max_length`, end-of-sequence
            tokens).
        logits_processor: the processors of the call, applied to the draft's logits exactly as to the target's.
        policy: draft-length policy; by default a new one made from `config.drafting`. Pass one to carry its state on.

    Raises:
        ValueError: the config does not fit the model.
    """

    requires_model_outputs = True

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        layout = locate_sublayers(model)
        model_type = model.config.get_text_config(decoder=True).model_type
        config.validate_for(num_layers=len(layout), model_type=model_type)
        self.model = model
        self.config = config
        self.policy = policy if policy is not None else make_policy(config.drafting)
        self.skip_mode = SkipMode(model, config.skip)
        self.skipped_attention = frozenset(config.skip.attention)
        self.logits_processor = logits_processor if logits_processor is not None else LogitsProcessorList()
        self.do_sample = bool(generation_config.do_sample)
        self.max_length = int(generation_config.max_length)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos_token_ids = frozenset(eos.tolist()) if eos is not None else frozenset()
        self.draft_passes = 0
        self.stopwatch = Stopwatch(model.device)
        self._draft_cache: DraftCache | None = None
        self._last_round = 0, 0

    # ------------------------------------------------------------------------------------------------------------------
    # transformers' interface

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Nothing is asked of the target's passes beyond what they do anyway."""
        return {}

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft a continuation of `input_ids`.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far; the cache holds all but its
            last
                token.
            model_kwargs: the target's keyword arguments, with its cache under `past_key_values`.
            model_outputs: outputs of the target's last pass; not used.
            is_first_iteration: whether the target has not seen the prompt yet. Nothing is drafted then.
            n_last_matches: drafted tokens accepted in the last round; not used, `update_candidate_strategy` gets it
                too.

        Returns:
            `torch.LongTensor` of shape `(1, sequence_length + k)`, and the scores that the k tokens were drawn from, of
            shape `(1, k, vocab_size)`; `None` for the scores under greedy decoding or where nothing was drafted.
        """
        self._last_round = 0, 0
        cache = (model_kwargs or {}).get("past_key_values")
        limit = self.max_length - input_ids.shape[1] - 1
        if is_first_iteration or cache is None or limit < 1:
            return input_ids, None
        length = self.policy.draft_length(limit)
        if length == 0:
            return input_ids, None
        add_spare_room(cache)
        model_kwargs = model_kwargs or {}
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")

        def process(drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return self.logits_processor(torch.cat((input_ids, drafted), dim=1), logits)  # type: ignore[no-any-return]

        draft = self.draft(
            input_ids[:, -1:],
            cache,
            length=length,
            row_limits=[length],
            attention_mask=mask,
            position_ids=None if positions is None else positions[..., -1:],
            model_kwargs=model_kwargs,
            process=process if len(self.logits_processor) else None,
        )
        self._last_round = draft.tokens.shape[1], length
        return torch.cat((input_ids, draft.tokens), dim=1), draft.scores  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Tell the draft-length policy how the last round went.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far.
            scores: the target's scores; not used.
            num_matches: drafted tokens accepted.
        """
        drafted, asked = self._last_round
        self.policy.update(drafted, min(int(num_matches), drafted), reached_end=drafted == asked)

    # ------------------------------------------------------------------------------------------------------------------
    # the draft loop

    def draft(
        self,
        last_token: torch.Tensor,
        cache: Cache,
        *,
        length: int,
        row_limits: Sequence[int],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        model_kwargs: dict[str, Any],
        process: Processor | None,
    ) -> Draft:
        """Draft up to `length` tokens per row in skip mode.

        Args:
            last_token (`torch.LongTensor` of shape `(B, 1)`): the last token of each row, which is not in the cache
            yet.
            cache: the target's cache.
            length: the most tokens to draft, ≥ 1.
            row_limits: the most tokens that are of use, per row.
            attention_mask (`torch.LongTensor` of shape `(B, slots + 1)`, *optional*): mask of the cached slots and the
            last
                token.
            position_ids (`torch.LongTensor` of shape `(B, 1)`, *optional*): position of the last token.
            model_kwargs: further keyword arguments of the model's passes.
            process: applies the logits processors; `None` where there are none.

        Returns:
            The draft.
        """
        self.stopwatch.start()
        if self._draft_cache is None or self._draft_cache.target is not cache:
            self._draft_cache = DraftCache(cache, self.skipped_attention)
        else:
            self._draft_cache.rewind()
        passed_on = {key: value for key, value in model_kwargs.items() if key not in _NOT_FOR_DRAFTS}
        if attention_mask is not None:
            # One mask for all steps; each sees the left part of it.
            attention_mask = torch.nn.functional.pad(attention_mask, (0, length), value=1)
            slots = attention_mask.shape[1] - length
        policy = self.policy
        batch = last_token.shape[0]
        # Reading a token back makes the host wait for the device; on the CPU that costs nothing.
        watches_eos = bool(self.eos_token_ids) and last_token.device.type == "cpu"
        tokens: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        lengths = [min(limit, length) for limit in row_limits]
        token = last_token

        with self.skip_mode:
            for depth in range(length):
                inputs = self.model.prepare_inputs_for_generation(
                    token,
                    past_key_values=self._draft_cache,
                    attention_mask=None if attention_mask is None else attention_mask[:, : slots + depth],
                    position_ids=None if position_ids is None else position_ids + depth,
                    **passed_on,
                )
                outputs = self.model(**inputs, return_dict=True)
                logits = outputs.logits[:, -1].to(dtype=torch.float32, device=last_token.device)
                if process is not None:
                    self.skip_mode.pause()
                    drafted = torch.cat(tokens, dim=1) if tokens else token[:, :0]
                    # A copy, since processors may write into their input, which may be a view of the model's output.
                    logits = process(drafted, logits.clone())
                    self.skip_mode.resume()
                token, probability = self._choose(logits)
                tokens.append(token)
                if self.do_sample:
                    scores.append(logits)
                if depth + 1 < length and (watches_eos or probability is not None):
                    ends = token.squeeze(1).tolist() if watches_eos else [None] * batch
                    confidence = probability.tolist() if probability is not None else [1.0] * batch
                    for row in range(batch):
                        if lengths[row] > depth + 1 and (
                            ends[row] in self.eos_token_ids or not policy.keep_drafting(depth + 1, confidence[row])
                        ):
                            lengths[row] = depth + 1
                    if max(lengths) <= depth + 1:
                        break
        count = len(tokens)
        self.draft_passes += count
        self.stopwatch.stop()
        return Draft(
            tokens=torch.cat(tokens, dim=1),
            scores=torch.stack(scores, dim=1) if scores else None,
            lengths=[min(n, count) for n in lengths],
        )

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next drafted token, `(B, 1)`, and its probability, `(B,)`, where the policy wants it."""
        if self.do_sample:
            probabilities = scores.softmax(dim=-1)
            token = torch.multinomial(probabilities, num_samples=1)
            if not self.policy.needs_probability:
                return token, None
            return token, probabilities.gather(1, token).squeeze(1)
        if not self.policy.needs_probability:
            return argmax(scores)[:, None], None
        token = argmax(scores)[:, None]
        # softmax of the largest score alone
        return token, torch.exp(scores.gather(1, token).squeeze(1) - torch.logsumexp(scores, dim=-1))
