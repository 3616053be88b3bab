"""The decoding loop: draft, verify, commit.

transformers' own assisted loop looks at the stopping criteria once per round, takes one row only, and feeds a continued
cache its prompt again. This loop commits token by token, in the order in which plain decoding would have: the criteria,
the streamer and the recorded scores see the same calls with the same arguments. Rows of a batch run at their own speed;
a step is committed when all unfinished rows have reached it.

Layouts: `tokens` is aligned at the left, as in `generate`'s output: row r holds `lengths[r]` tokens, column t is step t
of every row. The cache is aligned at the right: a row that lags `shifts[r]` slots behind the longest one has as many
masked slots at its left, which every model supports as left padding.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.layers import SpareRoomLayer, SpareRoomSlidingLayer, add_spare_room, move_rows, reaches_back, trim_windows
from ..forward.passes import flat_passes, prompt_mode
from ..forward.sublayers import input_device
from ..support.timing import Stopwatch
from .candidate_generator import Draft, Drafter
from .statistics import SpeculationStatistics
from .verification import accept_greedy, accept_sampled, argmax
from .verified_text import VerifiedText

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

__all__ = ["SelfSpeculativeDecoding", "SelfSpeculativeOutput", "end_tokens"]

Refine = Callable[[int, int, "SelfSpeculativeDecoding"], None]

# Processors that look at the scores alone: all positions of all rows can go through them at once.
_BLIND_PROCESSORS: tuple[type, ...] = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "TopHLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
# Rows of a batch whose cache is returned may run this many tokens ahead of the slowest, so that sliding layers can be
# put back.
_MAX_LEAD = 64


def end_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The tokens that end a text; a criterion that the user passed in takes the place of the config's here, too."""
    ends = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
    return frozenset(number for end in ends for number in torch.as_tensor(end).flatten().tolist())


def _move_mask(mask: torch.Tensor, moves: Sequence[int]) -> None:
    """Move each row of a mask over slots as `move_rows` moves the slots, in place."""
    for row, move in enumerate(moves):
        if move > 0:
            mask[row, move:] = mask[row, :-move].clone()
            mask[row, :move] = 0
        elif move < 0:
            mask[row, :move] = mask[row, -move:].clone()
            mask[row, move:] = 1


class _RowPrefixes(LogitsProcessor):
    """A `prefix_allowed_tokens_fn` for a batch, whose rows are shown drafts that no constraint may have a word for.

    Where transformers' own processor ends the call because nothing is allowed, the row is left without a possible token
    here; `_check_possible` ends the call if it is one that counts.
    """

    def __init__(self, processor: PrefixConstrainedLogitsProcessor) -> None:
        self.allowed = processor._prefix_allowed_tokens_fn
        self.processor = PrefixConstrainedLogitsProcessor(self._ask, num_beams=1)
        self.without: list[int] = []

    def _ask(self, row: int, text: torch.Tensor) -> list[int]:
        allowed = self.allowed(row, text)
        if not len(allowed):
            self.without.append(row)
        return allowed if len(allowed) else [0]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.without = []
        processed = self.processor(input_ids, scores)
        processed[self.without] = -math.inf
        return processed  # type: ignore[no-any-return]


@dataclass
class SelfSpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` gives: `GenerateDecoderOnlyOutput`, and `speculation`.

    Attributes:
        sequences (`torch.LongTensor` of shape `(B, prompt + new tokens)`): prompt and text, as from plain decoding.
        scores, logits, attentions, hidden_states, past_key_values: as from plain decoding, where they were asked for.
        speculation: the statistics of the call, also `model.last_speculation`.
    """

    speculation: SpeculationStatistics | None = None


class SelfSpeculativeDecoding:
    """One call of the decoding loop.

    Args:
        model: the target model.
        generator: drafts for it.
        logits_processor: processors of the call.
        stopping_criteria: criteria of the call.
        generation_config: prepared config of the call.
        streamer: gets each committed step, or `None`.
        cache_is_returned: whether the caller sees the cache afterwards.
        refine: told the draft steps and verified tokens of each round; may then have drafts judged on the text so far.
        same_lengths: whether all rows take the same number of tokens in each round, for models that count positions
            from the length of the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generator: Drafter,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        cache_is_returned: bool,
        refine: Refine | None = None,
        same_lengths: bool = False,
    ) -> None:
        self.model = model
        self.generator = generator
        self.processors = logits_processor
        self.criteria = stopping_criteria
        self.config = generation_config
        self.streamer = streamer
        self.cache_is_returned = cache_is_returned
        self.refine = refine
        self.same_lengths = same_lengths
        self.do_sample = bool(generation_config.do_sample)
        # A criterion that the user passed in takes the place of the config's.
        limit = stopping_criteria.max_length
        self.max_length = int(limit) if limit is not None else sys.maxsize
        # A class derived from one of them may look at anything.
        self.processors_are_blind = all(type(p) in _BLIND_PROCESSORS for p in logits_processor)
        self.stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.eos_token_ids = end_tokens(stopping_criteria)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.pad_token_id = int(pad) if pad is not None else 0
        records = bool(generation_config.return_dict_in_generate)
        self.keep_scores = records and bool(generation_config.output_scores)
        self.keep_logits = records and bool(generation_config.output_logits)
        self.keep_attentions = records and bool(generation_config.output_attentions)
        self.keep_hidden_states = records and bool(generation_config.output_hidden_states)

    # ------------------------------------------------------------------------------------------------------------------

    def run(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]
    ) -> torch.LongTensor | SelfSpeculativeOutput:
        """Generate.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.
            model_kwargs: the model's keyword arguments as `generate` prepared them, with the cache.

        Returns:
            The sequences, of shape `(B, prompt_length + new_tokens)`, or a `SelfSpeculativeOutput` if the generation
            config asks for a dictionary.
        """
        started = time.perf_counter()
        batch, prompt = input_ids.shape
        self.device = input_ids.device
        self.batch = batch
        self.prompt = prompt
        self.steps = 0  # committed steps
        self.lengths = [prompt] * batch
        self.shifts = [0] * batch
        self.finished = [False] * batch  # as plain decoding would say after the committed steps
        self.halted = [False] * batch  # known to finish at a step that is not committed yet
        self.last_columns = [sys.maxsize] * batch  # of rows that padding follows
        self.records: list[list[dict[str, Any]]] = [[] for _ in range(batch)]
        self.scores: tuple[torch.Tensor, ...] | None = () if self.keep_scores else None
        self.raw_logits: tuple[torch.Tensor, ...] | None = () if self.keep_logits else None
        self.attentions: tuple[Any, ...] | None = () if self.keep_attentions else None
        self.hidden_states: tuple[Any, ...] | None = () if self.keep_hidden_states else None
        self.tokens = input_ids.new_zeros((batch, prompt + 64), dtype=torch.long)
        self.is_constrained = batch > 1 and any(type(p) is PrefixConstrainedLogitsProcessor for p in self.processors)
        if self.is_constrained:
            self.processors = LogitsProcessorList(
                [_RowPrefixes(p) if type(p) is PrefixConstrainedLogitsProcessor else p for p in self.processors]
            )
        self.tokens[:, :prompt] = input_ids
        self.statistics = SpeculationStatistics(
            batch_size=batch, prompt_tokens=prompt, round_accepted=[[] for _ in range(batch)], new_tokens=[0] * batch
        )

        indexes = [self.generator.new_index() for _ in range(batch)]
        self.indexes = [index for index in indexes if index is not None] or None
        self.verifying = Stopwatch(input_device(self.model))
        running = self._prefill(input_ids, model_kwargs)
        self.statistics.prompt_seconds = time.perf_counter() - started
        if (
            self.batch > 1
            and self.cache_is_returned
            and any(isinstance(x, SpareRoomSlidingLayer) for x in self.cache.layers)
        ):
            self.max_lead = _MAX_LEAD
        else:
            self.max_lead = self.max_length
        while running:
            running = self._round()
        self._finish(started)

        if self.streamer is not None:
            self.streamer.end()
        sequences = self.tokens[:, : prompt + self.steps].clone()
        if not self.config.return_dict_in_generate:
            return sequences  # type: ignore[return-value]
        return SelfSpeculativeOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.raw_logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            past_key_values=self.cache,
            speculation=self.statistics,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # the prompt

    def _prefill(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> bool:
        """The target's pass over the prompt, and the first token, which it decides alone."""
        model_kwargs.pop("tokenizer", None)
        before = model_kwargs.get("past_key_values")
        tokens = input_ids.shape[1] - (before.get_seq_length() if before is not None else 0)
        with prompt_mode(self.model, self.batch * tokens):
            outputs = self.model._prefill(input_ids, self.config, model_kwargs, is_first_iteration=True)
        self.statistics.target_passes += 1
        model_kwargs = self.model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        self.cache: Cache = model_kwargs.pop("past_key_values")
        add_spare_room(self.cache)  # a cache that was made without a config has got its layers just now
        trim_windows(self.cache)
        self.slots = int(self.cache.get_seq_length())
        self.prompt_slots = self.slots
        mask = model_kwargs.pop("attention_mask", None)
        # Mask over the cached slots and the pending token; `None` while nothing is masked.
        self.mask: torch.Tensor | None = mask
        self.positions: torch.Tensor | None = model_kwargs.pop("position_ids", None)
        self._watch_rope()
        if self.positions is not None:
            self.prompt_positions = self.positions[..., : self.prompt_slots]
            # Of the pending token; the block's follow from it.
            self.positions = self.positions[..., -1:].expand(*self.positions.shape[:-2], self.batch, 1).clone()
        # Only ever looked at for their last column behind the prompt.
        self.token_types = {key: model_kwargs.pop(key) for key in list(model_kwargs) if key.endswith("token_type_ids")}
        model_kwargs.pop("inputs_embeds", None)
        self.model_kwargs = model_kwargs
        self.flat = flat_passes(self.model) if self._can_play_back() else None

        raw, logits = self._logits(outputs, 1)
        scores = self._process(logits, 1)
        self._check_possible(scores, [0] * self.batch, [True] * self.batch)
        if self.do_sample:
            chosen = torch.multinomial(scores[:, 0].softmax(dim=-1), num_samples=1)
        else:
            chosen = argmax(scores[:, 0])[:, None]
        if self.keep_attentions or self.keep_hidden_states:
            prompt_record = {"attentions": outputs.get("attentions"), "hidden_states": outputs.get("hidden_states")}
        for row in range(self.batch):
            record = self._scores_record(raw, scores, row, 0)
            if self.keep_attentions or self.keep_hidden_states:
                record |= {
                    key: None if states is None else tuple(layer[row : row + 1] for layer in states)
                    for key, states in prompt_record.items()
                }
            self.records[row].append(record)
        del outputs
        self._append(chosen, [1] * self.batch)
        return self._commit()

    # ------------------------------------------------------------------------------------------------------------------
    # one round

    def _round(self) -> bool:
        """Draft, verify, commit. Returns whether to go on."""
        active = [not (self.halted[r] or (self.finished[r] and self.stops_at_eos)) for r in range(self.batch)]
        # Tokens that a row may still add; one of them is the target's own.
        room = []
        passes = self.generator.draft_passes
        for row in range(self.batch):
            lead = self.lengths[row] - (self.prompt + self.steps)
            room.append(min(self.max_length - self.lengths[row], self.max_lead - lead))
            active[row] = active[row] and room[row] > 0
        rope_limit = self._wait_for_rope(active)
        limits = [min(room[row] - 1, rope_limit) if active[row] else 0 for row in range(self.batch)]
        draft = self._draft(limits) if max(limits) > 0 else None
        drafting_rows = [row for row in range(self.batch) if limits[row] > 0]
        made = draft
        if draft is not None and draft.tokens.shape[1] == 0:
            draft = None
        count = 0 if draft is None else draft.tokens.shape[1]

        self.verifying.start()
        if draft is not None and not self.processors_are_blind:
            self._write_ahead(draft.tokens)
        outputs = self._verify(None if draft is None else draft.tokens)
        raw, logits = self._logits(outputs, count + 1)
        scores = self._process(logits, count + 1)
        kept, following = self._accept(draft, scores)
        accepted = kept.tolist()  # the one place where the host waits for the device
        self._check_possible(scores, accepted, active)
        self.verifying.stop()
        self.statistics.target_passes += 1

        drafted = [0] * self.batch if draft is None else draft.lengths
        rows = [row for row in range(self.batch) if active[row]]
        added = [accepted[row] + 1 if active[row] else 0 for row in range(self.batch)]
        if self.same_lengths:
            # Rows that have ended go along, as they do in plain decoding.
            added = [min(added[row] for row in rows)] * self.batch
        for row in rows:
            for step in range(added[row]):
                self.records[row].append(
                    self._scores_record(raw, scores, row, step) | self._states_record(outputs, row, step, count + 1)
                )
        del outputs
        new = following[:, None]
        if draft is not None:
            # Drafted tokens up to the kept ones, and behind them the target's.
            new = torch.cat((draft.tokens, new), dim=1).scatter(1, kept[:, None], new)
        self._append(new, added)
        self._move_on(added, count + 1)
        self.statistics.record_round(drafted, accepted, rows, None if draft is None else draft.self_lengths, added)
        if made is not None:
            self.generator.learn(made, accepted, drafting_rows)
        running = self._commit()
        if self.refine is not None and running:
            self.refine(self.generator.draft_passes - passes, count + 1, self)
        return running

    def verified_text(self, tokens: int) -> VerifiedText | None:
        """The last tokens that were committed, with the cache behind them; `None` where it does not hold all of them.

        Args:
            tokens: at the most; none of the prompt.
        """
        length = self.lengths[0]
        tokens = min(tokens, length - self.prompt)
        whole = all(isinstance(layer, SpareRoomLayer) and layer.holds_all(self.slots) for layer in self.cache.layers)
        in_a_row = self.positions is None or bool((self.positions == self.slots).all())
        masked = self.mask is not None and not bool(self.mask.all())
        if self.batch > 1 or tokens < 1 or not whole or masked or not in_a_row or self.rope_switch != sys.maxsize:
            return None
        if self.slots != length - 1:  # a continued cache with tokens that the call was not given
            return None
        return VerifiedText(self.tokens[:, :length], length - tokens, self.cache)

    def _draft(self, limits: list[int]) -> Draft:
        pending = self._pending()
        if self.indexes is not None:
            for row, index in enumerate(self.indexes):
                if limits[row] > 0:
                    index.extend(self.tokens[row, len(index) : self.lengths[row]].tolist())

        def process(drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if self.processors_are_blind:
                return self.processors(pending, logits)  # type: ignore[no-any-return]
            self._write_ahead(drafted)
            return self._process_step(logits, drafted.shape[1])

        return self.generator.draft(
            pending,
            self.cache,
            limits=limits,
            attention_mask=self.mask,
            position_ids=self.positions,
            model_kwargs=self.model_kwargs,
            process=process if len(self.processors) else None,
            indexes=self.indexes,
        )

    def _verify(self, drafted: torch.Tensor | None) -> Any:
        """The target's pass over the pending token and the drafted ones, `(B, k)`."""
        pending = self._pending()
        new = pending if drafted is None else torch.cat((pending, drafted), dim=1)
        block = new.shape[1]
        count = block - 1
        if self.flat is not None and self.slots != self.rope_switch:
            logits = self._play_back(new, block)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits)
        mask = self.mask
        if mask is not None and count:
            mask = torch.nn.functional.pad(mask, (0, count), value=1)
        positions = self.positions
        if positions is not None and count:
            positions = positions + torch.arange(block, device=positions.device)
        ids = new
        if self.slots == self.rope_switch:
            # The model may want the whole text, to compute its cache anew; all rows are equally long here.
            ids = torch.cat((self.tokens[:, : self.lengths[0] - 1], new), dim=1)
            positions = None if positions is None else self._all_positions(positions)
        extra: dict[str, Any] = {
            key: value[:, -1:].expand(-1, block) if key == "token_type_ids" else value.new_zeros((self.batch, block))
            for key, value in self.token_types.items()
        }
        kwargs = {**self.model_kwargs, **extra}
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = block
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=block,
            past_key_values=self.cache,
            attention_mask=mask,
            position_ids=positions,
            **kwargs,
        )
        outputs = self.model(**inputs, return_dict=True)
        if (cache := outputs.get("past_key_values")) is not None and cache is not self.cache:
            # phi3 starts a new cache where its long-context rotary embedding sets in.
            add_spare_room(cache)
            self.cache = cache
        return outputs

    def _play_back(self, new: torch.Tensor, block: int) -> torch.Tensor | None:
        """Logits of the target's pass from its recording, where there is one (passes.py)."""
        assert self.flat is not None
        positions = self.positions
        if positions is None:
            positions = torch.full((1, 1), self.slots, device=self.device)
        if block > 1:
            positions = positions + torch.arange(block, device=positions.device)
        return self.flat.run(self.cache, new, positions)

    def _can_play_back(self) -> bool:
        return (
            self.batch == 1
            and not self.keep_attentions
            and not self.keep_hidden_states
            and not self.token_types
            and (self.mask is None or bool(self.mask.all()))
            and (self.positions is None or self.positions.ndim == 2)
            and not any(isinstance(value, torch.Tensor) for value in self.model_kwargs.values())
        )

    def _accept(self, draft: Draft | None, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if draft is None:
            kept = torch.zeros(self.batch, dtype=torch.long, device=self.device)
            if self.do_sample:
                return kept, torch.multinomial(scores[:, 0].softmax(dim=-1), num_samples=1).squeeze(1)
            return kept, argmax(scores[:, 0])
        lengths = torch.tensor(draft.lengths, device=self.device)
        if self.do_sample:
            return accept_sampled(draft.tokens, draft.scores, scores, lengths)  # type: ignore[arg-type]
        return accept_greedy(draft.tokens, scores, lengths)  # type: ignore[arg-type]

    def _move_on(self, added: list[int], block: int) -> None:
        """Take the rejected tokens out of the cache, and move rows, mask and positions on."""
        # A row's slots end where its accepted tokens do, and all rows end where the longest does.
        lengths = [self.slots - shift + count for shift, count in zip(self.shifts, added, strict=True)]
        slots = max(lengths)
        shifts = [slots - length for length in lengths]
        moves = [new - old for new, old in zip(shifts, self.shifts, strict=True)]
        move_rows(self.cache, moves, slots)
        if self.mask is None and any(moves):
            self.mask = torch.ones((self.batch, self.slots + 1), dtype=torch.long, device=self.device)
        if self.mask is not None:
            # It covers the pending token, too.
            mask = torch.nn.functional.pad(self.mask, (0, slots - self.slots), value=1)
            _move_mask(mask, moves)
            self.mask = mask
        self.slots, self.shifts = slots, shifts
        if self.positions is not None:
            if len(set(added)) == 1:
                self.positions = self.positions + added[0]
            else:
                self.positions = self.positions + torch.tensor(added, device=self.positions.device)[:, None]

    # ------------------------------------------------------------------------------------------------------------------
    # tokens

    def _make_room(self, columns: int) -> None:
        if columns > self.tokens.shape[1]:
            spare = max(64, columns // 8)
            self.tokens = torch.nn.functional.pad(self.tokens, (0, columns + spare - self.tokens.shape[1]))

    def _write_ahead(self, drafted: torch.Tensor) -> None:
        """Put drafted tokens behind each row's own, for the processors to see; accepted ones are written over them."""
        count = drafted.shape[1]
        self._make_room(max(self.lengths) + count)
        for row, length in enumerate(self.lengths):
            if not (self.finished[row] and self.stops_at_eos):  # those hold padding there
                self.tokens[row, length : length + count] = drafted[row]

    def _append(self, new: torch.Tensor, added: list[int]) -> None:
        """Put the first `added[r]` of the new tokens behind row r."""
        self._make_room(max(self.lengths) + new.shape[1])
        if len(set(self.lengths)) == 1 and len(set(added)) == 1:
            self.tokens[:, self.lengths[0] : self.lengths[0] + added[0]] = new[:, : added[0]]
        else:
            for row, count in enumerate(added):
                self.tokens[row, self.lengths[row] : self.lengths[row] + count] = new[row, :count]
        self.lengths = [length + count for length, count in zip(self.lengths, added, strict=True)]

    def _pending(self) -> torch.Tensor:
        """The last token of each row, `(B, 1)`."""
        if len(set(self.lengths)) == 1:
            return self.tokens[:, self.lengths[0] - 1 : self.lengths[0]]
        last = torch.tensor(self.lengths, device=self.device)[:, None] - 1
        return self.tokens.gather(1, last)

    # ------------------------------------------------------------------------------------------------------------------
    # logits processors

    def _process(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """Scores `(B, count, V)`; position i is processed with the row's tokens and the first i drafted ones."""
        if not len(self.processors):
            return logits
        if self.processors_are_blind and count > 1:
            flat = logits.flatten(0, 1)
            ids = self._pending().expand(-1, count).reshape(-1, 1)
            return self.processors(ids, flat).view_as(logits)  # type: ignore[no-any-return]
        for step in range(count):
            scores = self._process_step(logits[:, step], step)
            logits[:, step] = scores
            # Nothing that stands behind a token that cannot be can count, and a constraint may have no word for it.
            if self.batch == 1 and step + 1 < count:
                drafted = int(self.tokens[0, self.lengths[0] + step])
                if float(scores[0, drafted]) == -math.inf:
                    break
        return logits

    def _check_possible(self, scores: torch.Tensor, places: list[int], counts: list[bool]) -> None:
        """As transformers does, where a constraint allows a row nothing: `places` are those that rows go on from."""
        if not self.is_constrained:
            return
        for row, place in enumerate(places):
            if counts[row] and bool((scores[row, place] == -math.inf).all()):
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {row}: the constraint is "
                    "unsatisfiable. Return at least one token for every text that it allows."
                )

    def _process_step(self, logits: torch.Tensor, ahead: int) -> torch.Tensor:
        """Scores `(B, V)` for the token behind the first `ahead` drafted ones, which stand behind each row's tokens."""
        ends = [length + ahead for length in self.lengths]
        if len(set(ends)) == 1:
            return self.processors(self._contiguous(ends[0]), logits)  # type: ignore[no-any-return]
        scores = torch.empty_like(logits)
        for end in sorted(set(ends)):
            # The whole batch each time, since a processor may know its rows by number; only the rows that end here are
            # used.
            rows = [row for row in range(self.batch) if ends[row] == end]
            scores[rows] = self.processors(self._contiguous(end), logits.clone())[rows]
        return scores

    def _contiguous(self, end: int) -> torch.Tensor:
        return self.tokens[:, :end].contiguous()

    def _logits(self, outputs: Any, count: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The last `count` positions' logits in float32: as they are, if they are asked for, and to be processed."""
        raw = outputs.logits[:, -count:].to(dtype=torch.float32, device=self.device)
        # The prompt's logits may be large: what is kept must not keep them.
        logits = raw.clone() if len(self.processors) or self.keep_scores or self.keep_logits else raw
        return (raw.clone() if self.keep_logits else None), logits

    # ------------------------------------------------------------------------------------------------------------------
    # recording

    def _scores_record(self, raw: torch.Tensor | None, scores: torch.Tensor, row: int, step: int) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if self.keep_scores:
            record["scores"] = scores[row, step]
        if raw is not None:
            record["logits"] = raw[row, step]
        return record

    def _states_record(self, outputs: Any, row: int, step: int, block: int) -> dict[str, Any]:
        """Hidden states and attentions of one row and position, cut to what plain decoding gives for that step."""
        record: dict[str, Any] = {}
        if self.keep_hidden_states:
            record["hidden_states"] = tuple(layer[row : row + 1, step : step + 1] for layer in outputs.hidden_states)
        if self.keep_attentions and not outputs.attentions:
            record["attentions"] = outputs.attentions  # sdpa has none to give
        elif self.keep_attentions:
            shift = self.shifts[row]
            seen = self.slots - shift + step + 1  # slots of the row when this token was the newest
            attentions: list[torch.Tensor | None] = []
            for layer, attention in zip(self.cache.layers, outputs.attentions, strict=True):
                if attention is None:
                    attentions.append(None)
                    continue
                stop = attention.shape[-1] - block + step + 1
                window = layer.sliding_window if isinstance(layer, SpareRoomSlidingLayer) else seen
                first = stop - min(seen, window)
                attentions.append(attention[row : row + 1, :, step : step + 1, max(first, 0) : stop])
            record["attentions"] = tuple(attentions)
        return record

    # ------------------------------------------------------------------------------------------------------------------
    # committing

    def _commit(self) -> bool:
        """Commit every step that all unfinished rows have reached, as plain decoding would have, one after the other.

        Returns:
            Whether to go on.
        """
        for row in range(self.batch):
            self._halt_if_known(row)
        while True:
            end = self.prompt + self.steps + 1  # columns after this step
            waiting = [
                row
                for row in range(self.batch)
                if self.lengths[row] < end and not (self.finished[row] and self.stops_at_eos)
            ]
            if waiting:
                return True
            self._make_room(end)
            for row in range(self.batch):
                if self.finished[row] and self.stops_at_eos:
                    self.tokens[row, end - 1] = self.pad_token_id
                elif not self.finished[row]:
                    self.statistics.new_tokens[row] += 1
            self._record_step()
            self.steps += 1
            ids = self._contiguous(end)
            done = self.criteria(ids, self.scores)
            if self.streamer is not None:
                self.streamer.put(ids[:, -1].cpu())
            for row, is_done in enumerate(done.tolist()):
                if is_done and not self.finished[row]:
                    self.finished[row] = True
                    if self.stops_at_eos:
                        self.last_columns[row] = end - 1
                        # What the row holds behind its end was never said.
                        self.records[row].clear()
            if all(self.finished):
                return False

    def _halt_if_known(self, row: int) -> None:
        """Let a row rest that has its end behind the committed steps already."""
        if self.batch == 1 or self.finished[row] or self.halted[row]:
            return
        if self.lengths[row] >= self.max_length:
            self.halted[row] = True
        elif self.eos_token_ids:
            ahead = self.tokens[row, self.prompt + self.steps : self.lengths[row]].tolist()
            self.halted[row] = any(token in self.eos_token_ids for token in ahead)

    def _record_step(self) -> None:
        if not (self.keep_scores or self.keep_logits or self.keep_attentions or self.keep_hidden_states):
            for waiting in self.records:
                waiting.clear()
            return
        records: list[dict[str, Any] | None] = [rows.pop(0) if rows else None for rows in self.records]
        known = next(record for record in records if record is not None)

        def stack(key: str) -> torch.Tensor:
            # A row that has ended has no scores of its own any more.
            like = known[key]
            return torch.stack([like.new_zeros(like.shape) if r is None else r[key] for r in records])

        def join(key: str) -> tuple[Any, ...] | None:
            if known.get(key) is None:
                return None
            layers: list[torch.Tensor | None] = []
            for index, like in enumerate(known[key]):
                if like is None:
                    layers.append(None)
                    continue
                parts = [None if r is None else r[key][index] for r in records]
                filled = [like.new_zeros(like.shape) if part is None else part for part in parts]
                layers.append(filled[0] if len(filled) == 1 else torch.cat(filled))
            return tuple(layers)

        if self.scores is not None:
            self.scores += (stack("scores"),)
        if self.raw_logits is not None:
            self.raw_logits += (stack("logits"),)
        if self.attentions is not None:
            self.attentions += (join("attentions"),)
        if self.hidden_states is not None:
            self.hidden_states += (join("hidden_states"),)

    # ------------------------------------------------------------------------------------------------------------------
    # the end

    def _finish(self, started: float) -> None:
        statistics = self.statistics
        statistics.generated_tokens = sum(statistics.new_tokens)
        statistics.draft_passes = self.generator.draft_passes
        statistics.draft_seconds = self.generator.stopwatch.seconds()
        statistics.verify_seconds = self.verifying.seconds()
        statistics.policy_state = self.generator.policy.state()
        if self.cache_is_returned:
            # As plain decoding leaves it: all tokens but the last one, in the columns of the output.
            length = self._slots_said()
            move_rows(self.cache, [-shift for shift in self.shifts], length)
            self._fill_in_behind_ends(length)
        statistics.total_seconds = time.perf_counter() - started

    def _slots_said(self) -> int:
        """Slots of the prompt and of what was committed; the last token has none yet."""
        return self.prompt_slots + self.steps - 1

    def _fill_in_behind_ends(self, length: int) -> None:
        """Compute what plain decoding has computed of rows that ended before others, which have rested here.

        Plain decoding goes on with padding in them, behind the token that ended them, none of it masked. (A sliding
        window that no longer reaches back as far stays as it is.)
        """
        before = self.prompt - self.prompt_slots  # columns of the output that the cache has no slots for
        start = min(self.last_columns) - before
        if start >= length or not reaches_back(self.cache, length - start):
            return
        whole_mask = self.mask
        if whole_mask is not None:
            _move_mask(whole_mask, [-shift for shift in self.shifts])
        # A pass may not reach across the length at which a rotary embedding changes.
        block = length - start if self.rope_switch == sys.maxsize else 1
        for layer in self.cache.layers:
            layer.crop(start - length)
        self.shifts = [0] * self.batch
        for slot in range(start, length, block):
            self.slots, self.lengths = slot, [slot + before + 1] * self.batch
            if whole_mask is not None:
                self.mask = whole_mask[:, : slot + 1]
            if self.positions is not None:
                self.positions = self.prompt_positions[..., -1:] + (slot - self.prompt_slots + 1)
                self.positions = self.positions.expand(*self.positions.shape[:-2], self.batch, 1)
            self._verify(self.tokens[:, slot + before + 1 : slot + before + block] if block > 1 else None)
            self.statistics.target_passes += 1

    def take_back(self) -> None:
        """After an exception: leave in the cache what was said, and nothing that was to be said next."""
        if not getattr(self, "steps", 0):  # not even the prompt's pass has come to its end
            return
        length = self._slots_said()
        for layer in self.cache.layers:  # each by itself: the exception may have come in the middle of a pass
            if isinstance(layer, SpareRoomLayer):
                layer.move_rows([-shift for shift in self.shifts], length)
            elif layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())

    # ------------------------------------------------------------------------------------------------------------------
    # rotary embeddings that depend on the length of the text

    def _watch_rope(self) -> None:
        """See whether the rotary embedding depends on the length of the text.

        Beyond a length, `dynamic` changes with every token, and `longrope` changes once (phi3 then computes its cache
        anew). All tokens of a pass get the embedding of its end, so no block may reach across that length.
        """
        config = self.model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or {}
        self.rope_kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        self.rope_switch = sys.maxsize
        if self.rope_kind in ("dynamic", "longrope"):
            self.rope_switch = int(
                getattr(config, "original_max_position_embeddings", None)
                or parameters.get("original_max_position_embeddings")
                or config.max_position_embeddings
            )

    def _columns(self, row: int) -> int:
        """Tokens in the text of a row, the pending one and padding included."""
        return self.slots - self.shifts[row] + 1

    def _wait_for_rope(self, active: list[bool]) -> int:
        """Rest rows that must wait for others before the embedding changes; returns the most tokens to draft."""
        if self.rope_switch == sys.maxsize:
            return sys.maxsize
        rows = [row for row in range(self.batch) if active[row]]
        slowest = min(self._columns(row) for row in rows)
        if slowest < self.rope_switch:
            for row in rows:
                active[row] = self._columns(row) < self.rope_switch
            # Resting rows are in the pass as well, and its end is theirs; the one that is ahead may come to rest with a
            # token of the target's own at the switch.
            return max(self.rope_switch - self.slots - (1 if self.batch == 1 else 2), 0)
        padding = 0
        if self.positions is not None:
            padding = min(self._columns(row) - 1 - int(self.positions[..., row, 0].max()) for row in range(self.batch))
        if self.rope_kind == "longrope" and slowest - padding > self.rope_switch + 1:
            return sys.maxsize
        return 0

    def _all_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of the whole text, for a model that computes its cache anew; all rows are equally long then."""
        behind = self.slots + 1 - self.prompt_slots
        later = self.prompt_positions[..., -1:] + torch.arange(1, behind + 1, device=positions.device)
        return torch.cat((self.prompt_positions, later), dim=-1)
