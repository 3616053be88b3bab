"""The candidate generator: the target model drafts for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from ..cache.layers import DraftCache, add_spare_room
from ..drafting.draft_length import NO_MATCH, DraftPolicy, Match, make_policy
from ..drafting.lookup import NGramIndex
from ..forward.passes import draft_of
from ..forward.sublayers import input_device, locate_sublayers
from ..support.timing import Stopwatch
from .verification import argmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = ["Draft", "Drafter", "SelfSpeculativeCandidateGenerator"]

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

Step = Callable[[torch.Tensor, int], torch.Tensor]
"""`(token (B, 1), depth) → logits (B, 1, V)`."""

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(drafted tokens so far (B, i), logits (B, V)) → scores (B, V)`."""


@dataclass
class Draft:
    """What one round drafted: tokens of the model in skip mode, and behind them tokens that lookup copied.

    Attributes:
        tokens: `(B, k)` drafted tokens.
        scores: `(B, k, V)` scores after all logits processors, whose softmax the tokens were drawn from; all of it on
            one token where that was looked up (q = 1). `None` under greedy decoding or where k = 0.
        lengths: tokens drafted per row, 0 … k; what stands behind them in `tokens` is to be ignored.
        self_lengths: how many of them the model drafted itself, per row.
        matches: what lookup offered behind those, per row.
        complete: per row, whether the model drafted as far as the policy said at first.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None
    lengths: list[int]
    self_lengths: list[int]
    matches: list[Match]
    complete: list[bool]


class Drafter(Protocol):
    """What the decoding loop asks of the one who drafts for it; see `SelfSpeculativeCandidateGenerator`."""

    policy: Any
    draft_passes: int
    stopwatch: Stopwatch

    def new_index(self) -> NGramIndex | None:
        """An empty index for prompt lookup, or `None` without."""

    def draft(
        self,
        last_token: torch.Tensor,
        cache: Cache,
        *,
        limits: Sequence[int],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        model_kwargs: dict[str, Any],
        process: Processor | None,
        indexes: Sequence[NGramIndex | None] | None = None,
    ) -> Draft:
        """The draft of one round."""
        ...

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:
        """How a round went."""


class SelfSpeculativeCandidateGenerator(CandidateGenerator):
    """Candidate generator whose draft is the target model itself: sub-layers left out, in low bits, by prompt lookup.

    Implements transformers' candidate-generator interface, and works in transformers' own assisted decoding loop
    unmodified. The target fills its cache with the prompt alone; from then on each round drafts some tokens in skip
    mode. The draft reads the target's keys and values in place, never writes to them, and keeps its own only until the
    end of the round.

    `generate(..., self_speculative=config)` makes one by itself. transformers has no argument that takes one; where its
    own loop is wanted, a subclass of the model hands it over:

    ```python
    class WithGenerator(type(model)):
        def _get_candidate_generator(self, generation_config, logits_processor, **kwargs):
            config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=4))
            return SelfSpeculativeCandidateGenerator(self, config, generation_config, logits_processor)


    model.__class__ = WithGenerator
    model.generate(**inputs, assistant_model=model)  # any: it only leads there
    ```

    Args:
        model: the target model.
        config: what to draft with and how far.
        generation_config: the prepared generation config of the call (`do_sample`, `max_length`, end-of-sequence
            tokens).
        logits_processor: the processors of the call, applied to the draft's logits exactly as to the target's.
        policy: draft-length policy; by default a new one made from `config.drafting` and `config.costs`. Pass one to
            carry its state on.

    Raises:
        ValueError: the config does not fit the model, low-bit copies cannot be made of it, or the policy goes by costs
            and the config has none (`generate` measures them).
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
        if policy is None:
            policy = make_policy(
                config.drafting, config.costs, self_drafts=config.drafts_itself, lookup=config.lookup is not None
            )
        self.draft_by(config, policy)
        self.logits_processor = logits_processor if logits_processor is not None else LogitsProcessorList()
        self.do_sample = bool(generation_config.do_sample)
        self.max_length = int(generation_config.max_length)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos_token_ids = frozenset(eos.tolist()) if eos is not None else frozenset()
        self.draft_passes = 0
        self.stopwatch = Stopwatch(input_device(model))
        self._last_draft: Draft | None = None
        self._index: NGramIndex | None = None

    def draft_by(self, config: SelfSpeculativeConfig, policy: DraftPolicy) -> None:
        """Draft by this config from the next round on.

        Args:
            config: what to skip; its lookup is that of the config before.
            policy: draft-length policy.
        """
        self.config = config
        self.policy = policy
        self.skip_mode, self.flat = draft_of(self.model, config)
        self.skipped_attention = frozenset(config.skip.attention)
        self._draft_cache: DraftCache | None = None

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
        self._last_draft = None
        cache = (model_kwargs or {}).get("past_key_values")
        limit = self.max_length - input_ids.shape[1] - 1
        if is_first_iteration or cache is None or limit < 1:
            return input_ids, None
        add_spare_room(cache)
        model_kwargs = model_kwargs or {}
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if self._index is None:
            self._index = self.new_index()
        if self._index is not None:
            self._index.extend(input_ids[0, len(self._index) :].tolist())

        def process(drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return self.logits_processor(torch.cat((input_ids, drafted), dim=1), logits)  # type: ignore[no-any-return]

        draft = self.draft(
            input_ids[:, -1:],
            cache,
            limits=[limit],
            attention_mask=mask,
            position_ids=None if positions is None else positions[..., -1:],
            model_kwargs=model_kwargs,
            process=process if len(self.logits_processor) else None,
            indexes=None if self._index is None else [self._index],
        )
        self._last_draft = draft
        if draft.tokens.shape[1] == 0:
            return input_ids, None
        return torch.cat((input_ids, draft.tokens), dim=1), draft.scores  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Tell the draft-length policy how the last round went.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): the text so far.
            scores: the target's scores; not used.
            num_matches: drafted tokens accepted.
        """
        if self._last_draft is not None:
            self.learn(self._last_draft, [int(num_matches)], rows=[0])

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:
        """Tell the draft-length policy how a round went.

        Args:
            draft: what was drafted.
            accepted: drafted tokens accepted, per row of the batch.
            rows: the rows that drafted.
        """
        for row in rows:
            self.policy.update(
                draft.self_lengths[row],
                min(accepted[row], draft.lengths[row]),
                reached_end=draft.complete[row],
                looked_up=draft.lengths[row] - draft.self_lengths[row],
                match=draft.matches[row],
            )

    def new_index(self) -> NGramIndex | None:
        """An empty index for prompt lookup, or `None` where the config asks for none."""
        lookup = self.config.lookup
        if lookup is None:
            return None
        return NGramIndex(max_ngram=lookup.max_ngram, min_ngram=lookup.min_ngram, max_tokens=lookup.max_tokens)

    # ------------------------------------------------------------------------------------------------------------------
    # the draft loop

    def draft(
        self,
        last_token: torch.Tensor,
        cache: Cache,
        *,
        limits: Sequence[int],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        model_kwargs: dict[str, Any],
        process: Processor | None,
        indexes: Sequence[NGramIndex | None] | None = None,
    ) -> Draft:
        """Draft for one round: as far as the policy says, and at most `limits`.

        Args:
            last_token (`torch.LongTensor` of shape `(B, 1)`): the last token of each row, which is not in the cache
                yet.
            cache: the target's cache.
            limits: the most tokens that are of use, per row; 0 for a row that rests.
            attention_mask (`torch.LongTensor` of shape `(B, slots + 1)`, *optional*): mask of the cached slots and the
                last token.
            position_ids (`torch.LongTensor` of shape `(B, 1)`, *optional*): position of the last token.
            model_kwargs: further keyword arguments of the model's passes.
            process: applies the logits processors; `None` where there are none.
            indexes: the text of each row, for prompt lookup; `None` without.

        Returns:
            The draft.
        """
        self.stopwatch.start()
        policy, batch = self.policy, last_token.shape[0]
        rows = [row for row in range(batch) if limits[row] > 0]

        def match_of(row: int, tail: Sequence[int] = ()) -> Match:
            index = None if indexes is None else indexes[row]
            if index is None:
                return NO_MATCH
            found, length = index.find(tail)
            return Match(len(found), length)

        wanted = [0] * batch
        for row in rows:
            wanted[row] = policy.draft_length(limits[row], match_of(row))
            if not self.config.drafts_itself:  # the policies "fixed" and "confidence" do not know
                wanted[row] = 0
        lengths = list(wanted)
        length = max(wanted, default=0)
        tokens: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        tails: list[list[int]] = [[] for _ in range(batch)]
        # Reading a token back makes the host wait for the device; on the CPU that costs nothing.
        on_cpu = last_token.device.type == "cpu"
        reads_tokens = on_cpu and (bool(self.eos_token_ids) or indexes is not None)
        if length:
            step = self._stepper(last_token, cache, length, attention_mask, position_ids, model_kwargs)
            token = last_token
            with self._drafting(step):
                for depth in range(length):
                    logits = step(token, depth)[:, -1].to(dtype=torch.float32, device=last_token.device)
                    if process is not None:
                        self._pause(step)
                        drafted = torch.cat(tokens, dim=1) if tokens else token[:, :0]
                        # A copy, since processors may write into their input, which may be a view of the model's
                        # output.
                        logits = process(drafted, logits.clone())
                        self._resume(step)
                    token, probability = self._choose(logits)
                    tokens.append(token)
                    if self.do_sample:
                        scores.append(logits)
                    if reads_tokens:
                        for row, number in enumerate(token.squeeze(1).tolist()):
                            tails[row].append(number)
                    if depth + 1 < length and (reads_tokens or probability is not None):
                        confidence = probability.tolist() if probability is not None else [1.0] * batch
                        for row in rows:
                            if lengths[row] <= depth + 1:
                                continue
                            ended = reads_tokens and tails[row][-1] in self.eos_token_ids
                            match = match_of(row, tails[row]) if reads_tokens and not ended else NO_MATCH
                            if ended or not policy.keep_drafting(depth + 1, confidence[row], match):
                                lengths[row] = depth + 1
                        if max(lengths) <= depth + 1:
                            break
        self.draft_passes += len(tokens)
        draft = Draft(
            tokens=torch.cat(tokens, dim=1) if tokens else last_token[:, :0],
            scores=torch.stack(scores, dim=1) if scores else None,
            lengths=lengths,
            self_lengths=list(lengths),
            matches=[NO_MATCH] * batch,
            complete=[made == asked for made, asked in zip(lengths, wanted, strict=True)],
        )
        if indexes is not None:
            self._look_up(draft, indexes, rows, limits, tails)
        self.stopwatch.stop()
        return draft

    def _look_up(
        self,
        draft: Draft,
        indexes: Sequence[NGramIndex | None],
        rows: Sequence[int],
        limits: Sequence[int],
        tails: list[list[int]],
    ) -> None:
        """Append looked-up tokens to each row's own, as many as the policy says."""
        own = draft.tokens.shape[1]
        copied: list[list[int]] = [[] for _ in draft.lengths]
        for row in rows:
            index, drafted = indexes[row], draft.self_lengths[row]
            if index is None:
                continue
            tail = tails[row] if len(tails[row]) == own else draft.tokens[row].tolist()
            tail = tail[:drafted]
            if tail and tail[-1] in self.eos_token_ids:
                continue
            found, length = index.find(tail)
            draft.matches[row] = Match(len(found), length)
            count = self.policy.lookup_length(drafted, draft.matches[row], limits[row] - drafted)
            found = found[:count]
            ends = [place for place, token in enumerate(found) if token in self.eos_token_ids]
            copied[row] = found[: ends[0] + 1] if ends else found
            draft.lengths[row] = drafted + len(copied[row])
        if not any(copied):
            return
        total = max(draft.lengths)
        tokens = torch.nn.functional.pad(draft.tokens[:, :total], (0, max(total - own, 0)))
        for row, found in enumerate(copied):
            if found:
                first = draft.self_lengths[row]
                tokens[row, first : first + len(found)] = torch.tensor(found, device=tokens.device)
        if self.do_sample:
            # Nothing but the copied token could have been drawn: q = 1.
            vocabulary = self._vocabulary
            certain = tokens.new_full((*tokens.shape, vocabulary), -torch.inf, dtype=torch.float32)
            certain.scatter_(2, tokens[..., None], 0.0)
            if draft.scores is not None:
                for row, count in enumerate(draft.self_lengths):
                    certain[row, :count] = draft.scores[row, :count]
            draft.scores = certain
        draft.tokens = tokens

    @property
    def _vocabulary(self) -> int:
        head = self.model.get_output_embeddings()
        known = getattr(head, "out_features", None)
        return int(known if known is not None else self.model.config.get_text_config(decoder=True).vocab_size)

    # ------------------------------------------------------------------------------------------------------------------
    # one drafting pass

    def _stepper(
        self,
        last_token: torch.Tensor,
        cache: Cache,
        length: int,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        model_kwargs: dict[str, Any],
    ) -> Step:
        """`(token (B, 1), depth) → logits (B, 1, V)`: the next pass of this round's draft."""
        passed_on = {key: value for key, value in model_kwargs.items() if key not in _NOT_FOR_DRAFTS}
        if self._can_be_flat(last_token, attention_mask, position_ids, passed_on):
            flat = self.flat
            assert flat is not None and position_ids is not None
            positions = position_ids + torch.arange(length, device=position_ids.device)

            def flat_step(token: torch.Tensor, depth: int) -> torch.Tensor:
                logits = flat.run(cache, token, positions[:, depth : depth + 1], drafted=depth, ahead=length)
                assert logits is not None
                return logits

            if flat.can_run(cache, 1):
                return flat_step
        if self._draft_cache is None or self._draft_cache.target is not cache:
            self._draft_cache = DraftCache(cache, self.skipped_attention)
        else:
            self._draft_cache.rewind()
        slots = 0
        if attention_mask is not None:
            # One mask for all steps; each sees the left part of it.
            slots = attention_mask.shape[1]
            attention_mask = torch.nn.functional.pad(attention_mask, (0, length), value=1)

        def step(token: torch.Tensor, depth: int) -> torch.Tensor:
            inputs = self.model.prepare_inputs_for_generation(
                token,
                past_key_values=self._draft_cache,
                attention_mask=None if attention_mask is None else attention_mask[:, : slots + depth],
                position_ids=None if position_ids is None else position_ids + depth,
                **passed_on,
            )
            return self.model(**inputs, return_dict=True).logits  # type: ignore[no-any-return]

        step.runs_model = True  # type: ignore[attr-defined]
        return step

    def _can_be_flat(
        self,
        last_token: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        passed_on: dict[str, Any],
    ) -> bool:
        return (
            self.flat is not None
            and last_token.shape[0] == 1
            and position_ids is not None
            and position_ids.ndim == 2
            and (attention_mask is None or bool(attention_mask.all()))
            and not any(isinstance(value, torch.Tensor) for value in passed_on.values())
        )

    @contextmanager
    def _drafting(self, step: Step) -> Iterator[None]:
        """For the steps of a round, however they end: what is held of the cache for them is let go."""
        try:
            with self.skip_mode if getattr(step, "runs_model", False) else nullcontext():
                yield
        finally:
            if self.flat is not None:
                self.flat.end_round()

    def _pause(self, step: Step) -> None:
        if getattr(step, "runs_model", False):
            self.skip_mode.pause()

    def _resume(self, step: Step) -> None:
        if getattr(step, "runs_model", False):
            self.skip_mode.resume()

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
