"""The decoding loop: draft, verify, accept, commit.

transformers' own assisted loop looks at the stopping criteria once per round, takes one row only, and feeds a continued
cache its prompt again. This loop commits token by token, in the order in which plain decoding would have: the criteria,
the streamer and the recorded scores see the same calls with the same arguments. Rows of a batch run at their own speed;
a step is committed when all unfinished rows have reached it.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..cache.layers import add_buffers, reaches_back, trim_windows
from ..cache.recurrent import Checkpoint, NoRoomForStates, knows_its_length, slots_of
from ..drafting.drafter import Draft, Drafter
from ..forward.forward import Context, Forward
from ..forward.module_states import module_states
from ..forward.positions import most_positions
from ..forward.prompt_mode import prompt_mode
from ..forward.recorded_pass import Tokens
from ..forward.row_by_row import has_scans_of_its_own
from ..forward.weights import WeightWatch
from ..native.waiting import ThreadsAtWork
from ..support.devices import sent
from ..support.timing import Stopwatch
from ..support.versions import CACHE, cache_argument
from .choice import IMPOSSIBLE, Choice, SampledChoice
from .outputs import SelfSpeculativeOutput, StepOutputs
from .processors import Processors
from .random_use import is_foreign, no_draws
from .recorded_choice import RecordedChoice, recorded_choice
from .rotary import RotarySwitch
from .rows import Limits, Rows
from .statistics import SpeculationStatistics
from .verification import accept

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

__all__ = ["DecodingLoop", "Request", "end_tokens"]

_WORTH_RECORDING = 16
"""Tokens that a call may come to, for recording how they are sampled to be worth its time."""


@dataclass(frozen=True)
class Request:
    """What `generate` asks of the loop.

    Attributes:
        generation_config: prepared config of the call.
        processors: logits processors of the call.
        criteria: stopping criteria of the call.
        streamer: gets each committed step, or `None`.
        cache_is_returned: whether the caller sees the KV cache afterwards.
        in_step: whether all rows take the same number of tokens in each round, for models that count positions from the
            length of the cache.
    """

    generation_config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None = None
    cache_is_returned: bool = False
    in_step: bool = False

    @property
    def has_code_of_the_users(self) -> bool:
        """Whether code that is not transformers' runs in the middle of the call."""
        users = (*self.processors, *self.criteria, *(() if self.streamer is None else (self.streamer,)))
        return any(map(is_foreign, users))

    @property
    def limits(self) -> Limits:
        """Where texts end."""
        length = self.criteria.max_length  # a criterion that the user passed in takes the place of the config's
        pad = getattr(self.generation_config, "_pad_token_tensor", None)
        return Limits(
            max_length=sys.maxsize if length is None else int(length),
            stops_at_eos=any(hasattr(criterion, "eos_token_id") for criterion in self.criteria),
            eos_token_ids=end_tokens(self.criteria),
            pad_token_id=0 if pad is None else int(pad),
        )


@dataclass(frozen=True)
class KnownEnds:
    """Stopping criteria of transformers that look at no more than the length and the last token of a text.

    They are asked here of numbers that the host has: their own code computes on the device, and waits for it.
    """

    max_length: int
    tokens: frozenset[int]
    positions: int

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> KnownEnds | None:
        """Those of a call; `None` where there are others among them."""
        if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria):
            return None
        lengths = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        positions = [known for one in lengths if (known := one.max_position_embeddings) is not None]
        return cls(
            min((int(one.max_length) for one in lengths), default=sys.maxsize),
            end_tokens(criteria),
            min(positions, default=sys.maxsize),
        )

    def warns(self, columns: int) -> bool:
        """Whether transformers' own criteria have a word to say about a text as long as this."""
        return columns > self.positions

    def done(self, columns: int, last: list[int]) -> list[bool]:
        """Per row, whether a text of so many tokens that ends in this one has come to its end."""
        return [columns >= self.max_length or token in self.tokens for token in last]


def _columns_of(kwargs: dict[str, Any], before: dict[str, torch.Size]) -> dict[str, tuple[torch.Tensor, int]]:
    """Takes out of the model's arguments those that have a column for each token: which grew by one for the next.

    Behind the prompt only their last column is looked at.

    Args:
        kwargs: the arguments, as transformers has brought them up to date behind the prompt.
        before: shapes that they had.

    Returns:
        The next token's column of each, which is that of any token behind it, and the dimension of the tokens.
    """
    columns = {}
    for key, value in list(kwargs.items()):
        if not isinstance(value, torch.Tensor) or len(before.get(key, ())) != value.ndim:
            continue
        grown = [dim for dim in range(value.ndim) if value.shape[dim] != before[key][dim]]
        if len(grown) == 1 and value.shape[grown[0]] == before[key][grown[0]] + 1:
            columns[key] = (value.narrow(grown[0], -1, 1), grown[0])
        elif key.endswith("token_type_ids"):  # of whose tokens the model speaks in the prompt alone
            columns[key] = (value.new_zeros((len(value), 1)), 1)
        else:
            continue
        del kwargs[key]
    return columns


def end_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The tokens that end a text; a criterion that the user passed in takes the place of the config's here, too."""
    ends = [criterion.eos_token_id for criterion in criteria if hasattr(criterion, "eos_token_id")]
    return frozenset(number for end in ends for number in torch.as_tensor(end, device="cpu").flatten().tolist())


def _weights_changed(when: str) -> RuntimeError:
    return RuntimeError(
        f"The weights of the model, or its adapters, were changed in the middle of a call: {when}. Tokens that were "
        "verified with those of before cannot be told from others: change them between calls, or generate without "
        "`self_speculative`."
    )


class DecodingLoop:
    """One call of the decoding loop.

    Args:
        forward: the target model's passes.
        drafter: drafts for it.
        request: what `generate` asks for.
        watch: of the model's weights, made before anything of the call was.
        after_round: called between rounds with the passes made for the draft, the tokens verified, and the rows.
    """

    def __init__(
        self,
        forward: Forward,
        drafter: Drafter,
        request: Request,
        watch: WeightWatch,
        after_round: Callable[[int, int, Rows], None] | None = None,
    ) -> None:
        self.forward = forward
        self.drafter = drafter
        self.request = request
        self.after_round = after_round
        users = (*request.criteria, *(() if request.streamer is None else (request.streamer,)))
        # Under sampling: what of the user's sees each token, and must not draw random numbers.
        self._watched = [user for user in users if is_foreign(user)] if request.generation_config.do_sample else []
        self._watch = watch
        self._may_record = False
        self._recorded: RecordedChoice | None = None
        self._ends = KnownEnds.of(request.criteria)
        self.statistics = SpeculationStatistics()
        self.drafting = Stopwatch(forward.device)
        self.verifying = Stopwatch(forward.device)

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
        started, request = time.perf_counter(), self.request
        batch, prompt_length = input_ids.shape
        self.statistics = SpeculationStatistics(
            batch_size=batch,
            prompt_tokens=prompt_length,
            round_accepted=[[] for _ in range(batch)],
            new_tokens=[0] * batch,
        )
        outputs = StepOutputs(request.generation_config, batch)
        sampled = bool(request.generation_config.do_sample)
        choice = SampledChoice(batch, input_ids.device) if sampled else Choice()
        rows: Rows | None = None
        try:
            with ThreadsAtWork(self.forward.device) as threads:
                rows = self._read_prompt(input_ids, model_kwargs, outputs, choice)
                running = self._commit(rows, outputs)
                self.statistics.prompt_seconds = time.perf_counter() - started
                while running:
                    running = self._round(rows, outputs)
                    threads.look()
                if request.cache_is_returned:
                    self._complete_cache(rows)
        except BaseException:
            # Whoever cancels, say from a streamer, goes on from what was committed.
            if request.cache_is_returned and rows is not None:
                rows.take_back()
                if not knows_its_length(rows.context.cache) or has_scans_of_its_own(self.forward.model, rows.batch):
                    # Nobody could tell how far the states have got, or go on over several tokens: as far as the text.
                    with contextlib.suppress(Exception):
                        self._complete_cache(rows)
            raise
        finally:
            choice.end(0 if rows is None else rows.committed)
        self._sum_up(started)
        if request.streamer is not None:
            request.streamer.end()
        sequences = rows.tokens[:, : prompt_length + rows.committed].clone()
        if not request.generation_config.return_dict_in_generate:
            return sequences  # type: ignore[return-value]
        return SelfSpeculativeOutput(
            sequences=sequences,
            scores=outputs.scores,
            logits=outputs.logits,
            attentions=outputs.attentions,
            hidden_states=outputs.hidden_states,
            speculation=self.statistics,
            **{CACHE: rows.context.cache},
        )

    # ------------------------------------------------------------------------------------------------------------------

    def _read_prompt(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], outputs: StepOutputs, choice: Choice
    ) -> Rows:
        """The target's pass over the prompt; the rows with their first tokens behind it."""
        model, request, batch = self.forward.model, self.request, input_ids.shape[0]
        model_kwargs.pop("tokenizer", None)
        name = cache_argument(model)
        new = input_ids.shape[1] - slots_of(model_kwargs.get(name))
        with prompt_mode(model, batch * new):
            answer = model._prefill(input_ids, request.generation_config, model_kwargs, is_first_iteration=True)
        self.statistics.target_passes += 1
        shapes = {key: value.shape for key, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
        kwargs = model._update_model_kwargs_for_generation(answer, model_kwargs, is_encoder_decoder=False)
        cache = kwargs.pop(name)
        if (states := module_states(model)) is not None:
            states.take(cache)
        add_buffers(cache)  # a cache that was made without a config has got its layers just now
        trim_windows(cache)
        kwargs.pop("inputs_embeds", None)
        mask, positions = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
        length = slots_of(cache, otherwise=input_ids.shape[1])
        context = Context(
            cache,
            length=length,
            mask=mask,
            positions=positions,
            columns=_columns_of(kwargs, shapes),
            arguments=kwargs,
            limit=request.limits.max_length,
            checkpoint=Checkpoint.of(cache, length),
        )
        processors = Processors(request.processors, choice.draws)
        few_tokens = request.limits.max_length - input_ids.shape[1] < _WORTH_RECORDING
        is_recordable = processors.are_pure and processors.pure.setting is not None
        self._may_record = choice.draws and is_recordable and not few_tokens
        rotary = RotarySwitch(model)
        limits = replace(request.limits, most_positions=most_positions(model) or sys.maxsize)
        in_step = request.in_step or (batch > 1 and not processors.are_pure)
        rows = Rows(input_ids, context, processors, choice, limits, rotary, in_step, request.cache_is_returned)
        raw, logits = outputs.float_logits(answer, 1, rows.device, processed=len(processors) > 0)
        scores = processors.at_step(input_ids, logits[:, 0].contiguous())[:, None]
        outputs.add_prompt(answer, raw, scores)
        first = rows.choose(scores)
        known: list[list[int]] = first.tolist()
        if [IMPOSSIBLE] in known:
            choice.fail(scores[:, 0])
        rows.append(known, first)
        return rows

    def _round(self, rows: Rows, outputs: StepOutputs) -> bool:
        """One round; returns whether to go on."""
        # Draft: as far as is of use to each row.
        active = rows.active()
        limits = rows.draft_limits(active)
        passes, before = self.drafter.draft_passes, rows.lengths
        self.drafting.start()
        draft = self._draft(rows, limits) if max(limits) > 0 else Draft.none(rows.batch)
        self.drafting.stop()
        if self._watch.has_changed(adapters_alone=not rows.has_processors):
            raise _weights_changed("while a draft was made, by a logits processor or another thread")

        # Verify: one pass of the target over the pending token and the drafted ones.
        self.verifying.start()
        accepted = self._verify_by_replay(rows, draft) if outputs.keeps_nothing and active[0] else None
        if accepted is None:
            verify = self._verify if rows.processors.are_pure else self._verify_in_order
            accepted = verify(rows, draft, outputs, active)
        self.verifying.stop()

        # Learn, and commit what all rows have reached.
        going = [row for row in range(rows.batch) if active[row]]
        self.statistics.target_passes += 1
        added = [rows.lengths[row] - before[row] for row in range(rows.batch)]
        self.statistics.record_round(draft.lengths, accepted, going, draft.self_lengths, added)
        if max(limits) > 0:
            self.drafter.learn(draft, accepted, [row for row in range(rows.batch) if limits[row] > 0])
        running = self._commit(rows, outputs)
        if self.after_round is not None and running:
            self.after_round(self.drafter.draft_passes - passes, draft.tokens.shape[1] + 1, rows)
        return running

    def _draft(self, rows: Rows, limits: list[int]) -> Draft:
        """What the drafter proposes, with the states that rejected tokens are taken back to copied, if there are any.

        Where these find no room, nothing is drafted in this call any more.
        """
        context = rows.context
        try:
            draft = self.drafter.propose(rows, limits)
            if context.checkpoint is not None and draft.tokens.shape[1]:
                context.checkpoint.save(context.cache, context.length)
        except NoRoomForStates as error:
            assert context.checkpoint is not None
            context.checkpoint.has_no_room = True
            limits[:] = [0] * len(limits)
            warnings.warn(f"This text is decoded without drafts from here on: {error}.", stacklevel=2)
            return Draft.none(rows.batch)
        return draft

    def _verify_by_replay(self, rows: Rows, draft: Draft) -> list[int] | None:
        """`_verify` of a single text where passes are replayed, and what follows them is, too, or nothing does."""
        if not self.forward.replays or rows.batch > 1 or not rows.processors.are_pure:
            return None
        if not (rows.are_greedy or self._may_record):
            return None
        if rows.whole_text() is not None:
            return None
        tokens = Tokens(rows.text(0, rows.lengths[0] - 1))
        if draft.tokens.device.type == "cpu":
            tokens = Tokens([*tokens.known, *draft.tokens.numpy()[0].tolist()])
        else:
            tokens = Tokens(tokens.known, draft.tokens)
        found = self.forward.choices(tokens, rows.context) if rows.are_greedy else self._sample(rows, tokens)
        if found is None:
            return None
        (_, *drafted), choices = found
        length = draft.lengths[0]
        kept = next((place for place in range(length) if drafted[place] != choices[place]), length)
        if choices[kept] == IMPOSSIBLE:
            kept -= 1  # the tokens before come first: plain decoding fails with them committed
        rows.advance([choices[: kept + 1]])  # those kept are the target's own
        return [kept]

    def _sample(self, rows: Rows, tokens: Tokens) -> tuple[list[int], list[int]] | None:
        """As `Forward.choices`, of the tokens that sampling takes; the first of these is possible."""
        logits = self.forward.replayed_logits(tokens, rows.context)
        if logits is None:
            return None
        model, choice, processors = self.forward.model, rows.choice, rows.processors.pure
        assert isinstance(choice, SampledChoice)
        if self._recorded is None:
            self._recorded = recorded_choice(model, processors, choice, logits)
        step = rows.lengths[0] - rows.prompt_length
        found = None if self._recorded is None else self._recorded.choose(processors, logits, choice, step)
        self._may_record = found is not None

        def scores() -> torch.Tensor:
            return processors.block(rows.tokens, rows.lengths, rows.pending, logits.to(torch.float32, copy=True))

        if found is None:
            found = rows.choose(scores())[0]
        given = tokens.others
        both: list[int] = (found if given is None else torch.cat((given[0], found))).tolist()
        others = 0 if given is None else given.shape[1]
        if both[others] == IMPOSSIBLE:
            choice.fail(scores()[:, 0])
        return [*tokens.known, *both[:others]], both[others:]

    def _run_target(self, rows: Rows, draft: Draft) -> tuple[torch.Tensor, list[int], Any]:
        """The target's pass over the pending token of each row and its draft.

        Returns:
            The drafted tokens `(B, k)`, the rows that have ended and get padding instead, and the model's outputs.
        """
        tokens = sent(draft.tokens, rows.device)
        # Rows that have ended go along in step, as they do in plain decoding: padding follows padding.
        padded = [row for row in range(rows.batch) if rows.is_padded(row)] if rows.in_step else []
        if padded:
            tokens = tokens.clone()
            tokens[padded] = rows.limits.pad_token_id
        block = torch.cat((rows.pending, tokens), dim=1) if tokens.shape[1] else rows.pending
        return tokens, padded, self.forward.target(block, rows.context, rows.whole_text())

    def _verify(self, rows: Rows, draft: Draft, outputs: StepOutputs, active: list[bool]) -> list[int]:
        """The target's pass; the rows take in what it accepts and one token of its own. How many drafted ones it kept.

        Drafted tokens are accepted from the left, as long as they are the target's own.
        """
        tokens, padded, outcome = self._run_target(rows, draft)
        drafted, processors = tokens.shape[1], rows.processors.pure
        if drafted and not processors.are_blind:
            rows.write_ahead(tokens)
        raw, logits = outputs.float_logits(outcome, drafted + 1, rows.device, processed=rows.has_processors)
        scores = processors.block(rows.tokens, rows.lengths, rows.pending, logits)

        choices = rows.choose(scores)
        kept, following = accept(tokens, draft.lengths, choices)
        if padded:
            following[padded] = rows.limits.pad_token_id
        new = following[:, None]
        if drafted:
            new = torch.cat((tokens, new), dim=1).scatter(1, kept[:, None], new)
        # The one place where the host waits for the device.
        answers: list[list[int]] = torch.cat((kept[:, None], new), dim=1).tolist()
        accepted = [answer[0] for answer in answers]
        if any(active[row] and answer[1 + answer[0]] == IMPOSSIBLE for row, answer in enumerate(answers)):
            rows.choice.fail(scores[:, 0])
        added = [count + 1 if active[row] else 0 for row, count in enumerate(accepted)]
        if rows.in_step:
            added = [_in_step(rows, answers, added)] * rows.batch
        for row, count in enumerate(added):
            if active[row]:
                outputs.add_round(outcome, raw, scores, rows, row, count)
        del outcome
        known = [answer[1 : 1 + count] for answer, count in zip(answers, added, strict=True)]
        rows.advance(known, new)
        return accepted

    def _verify_in_order(self, rows: Rows, draft: Draft, outputs: StepOutputs, active: list[bool]) -> list[int]:
        """`_verify` for processors that are called as plain decoding calls them: once for each committed token.

        Place by place: processors, choice, criteria, streamer. It ends at the first token that is not the drafted one,
        and where plain decoding would go on with other tokens than the pass had. All rows take the same number.
        """
        tokens, padded, outcome = self._run_target(rows, draft)
        width = tokens.shape[1] + 1
        raw, logits = outputs.float_logits(outcome, width, rows.device, processed=True)
        drafted: list[list[int]] = [row[:length] for row, length in zip(tokens.tolist(), draft.lengths, strict=True)]
        going = set(range(rows.batch)) - set(padded)
        accepted, taken, goes_on = [0] * rows.batch, 0, True
        while goes_on:
            scores = rows.processors.at_step(rows.committed_ids().clone(), logits[:, taken].contiguous())
            chosen = rows.choose(scores[:, None])
            known: list[list[int]] = chosen.tolist()
            if [IMPOSSIBLE] in known:
                rows.choice.fail(scores)
            if padded:
                chosen[padded] = rows.limits.pad_token_id
                known = [[rows.limits.pad_token_id] if row in padded else token for row, token in enumerate(known)]
            for row in range(rows.batch):
                if active[row]:
                    of_row = None if raw is None else raw[row, taken]
                    outputs.add_place(outcome, of_row, scores[row], rows, row, (taken, width))
            rows.append(known, chosen)
            rows.take_step()
            is_over, has_changed = self._commit_step(rows, outputs)
            right = {row for row in going if known[row] == drafted[row][taken : taken + 1]}
            for row in right:
                accepted[row] += 1
            taken += 1
            goes_on = right == going and not is_over and not has_changed
        del outcome
        rows.move_on([taken] * rows.batch)
        if has_changed:
            self._renew(rows)
        return accepted

    def _commit(self, rows: Rows, outputs: StepOutputs) -> bool:
        """Commit every step that all unfinished rows have reached, as plain decoding would have, one after the other.

        Returns:
            Whether to go on.
        """
        if all(rows.finished):  # committed while they were verified
            return False
        if self._watch.has_changed(adapters_alone=not rows.has_processors):
            if max(rows.lengths) > rows.columns + 1:
                raise _weights_changed("while tokens were verified, by a logits processor or another thread")
            self._renew(rows, takes_back=False)
        rows.rest_known_ends()
        while rows.take_step():
            _, has_changed = self._commit_step(rows, outputs)
            if all(rows.finished):
                return False
            if has_changed:
                # By a streamer or a criterion: what was verified beyond this token was so with those of before.
                self._renew(rows)
                outputs.take_back()
        return True

    def _commit_step(self, rows: Rows, outputs: StepOutputs) -> tuple[bool, bool]:
        """Ask the criteria and feed the streamer, for a step that all rows have taken, as plain decoding does.

        Returns:
            Whether nothing follows, or padding in a row that had none; and whether the model's weights have changed.
        """
        for row, is_finished in enumerate(rows.finished):
            self.statistics.new_tokens[row] += not is_finished
        outputs.commit()
        with no_draws(self._watched) if self._watched else nullcontext():
            done = self._is_done(rows, outputs)
            if self.request.streamer is not None:
                self.request.streamer.put(torch.tensor(rows.last_committed(), device="cpu"))
        ended = rows.finish(done)
        if rows.limits.stops_at_eos:
            for row in ended:
                outputs.drop(row)
        is_over = all(rows.finished) or (rows.limits.stops_at_eos and bool(ended))
        return is_over, not all(rows.finished) and self._watch.has_changed()

    def _renew(self, rows: Rows, takes_back: bool = True) -> None:
        """Go on with weights that a processor, a criterion or a streamer has changed.

        Args:
            rows: the texts.
            takes_back: whether tokens that are not committed were verified with the weights of before.

        Raises:
            RuntimeError: tokens that were verified with those of before cannot be taken back.
        """
        if not self._watch.are_of_a_kind:
            raise _weights_changed(
                f"after {rows.committed} new tokens, to others of another type, device or vocabulary"
            )
        if takes_back and not rows.take_back_ahead():
            raise _weights_changed(
                f"after {rows.committed} new tokens, by a logits processor, a streamer or a stopping criterion. That "
                "can be followed in a single text, where no recurrent states are kept and windows reach back"
            )
        self.forward.renew()

    def _is_done(self, rows: Rows, outputs: StepOutputs) -> list[bool]:
        """What the stopping criteria say of the committed texts."""
        criteria = self.request.criteria
        if self._ends is not None and not self._ends.warns(rows.columns):
            return self._ends.done(rows.columns, rows.last_committed())
        return criteria(rows.committed_ids(), outputs.scores).tolist()  # type: ignore[no-any-return]

    def _complete_cache(self, rows: Rows) -> None:
        """Leave the cache as plain decoding leaves it: all tokens but the last one, in the columns of the output.

        Plain decoding goes on with padding in rows that ended before others, none of it masked; these have rested here,
        so that their passes are made up for. (A sliding window that no longer reaches back as far stays as it is.)
        """
        rows.align()
        length = rows.committed_slots
        before = rows.prompt_length - rows.prompt_slots  # columns of the output that the cache has no slots for
        if (checkpoint := rows.context.checkpoint) is not None:
            again = checkpoint.begin(rows.context.cache, length, may_fail=False)
            if again is not None:
                rows.go_to(checkpoint.length, rows.context.mask)
                self.forward.target(again, rows.context, rows.whole_text())
                self.statistics.target_passes += 1
            return
        start = min(rows.last_columns) - before
        if start >= length or not reaches_back(rows.context.cache, length - start):
            return
        # A pass may not reach across the length at which a rotary embedding changes.
        block = 1 if rows.rotary else length - start
        for layer in rows.context.cache.layers:
            layer.crop(start - length)
        mask = rows.context.mask
        for slot in range(start, length, block):
            rows.go_to(slot, mask)
            column = slot + before
            self.forward.target(rows.tokens[:, column : column + block], rows.context, rows.whole_text())
            self.statistics.target_passes += 1

    def _sum_up(self, started: float) -> None:
        statistics = self.statistics
        statistics.generated_tokens = sum(statistics.new_tokens)
        statistics.draft_passes = self.drafter.draft_passes
        statistics.draft_seconds = self.drafting.seconds()
        statistics.verify_seconds = self.verifying.seconds()
        statistics.policy_state = self.drafter.state()
        statistics.total_seconds = time.perf_counter() - started


def _in_step(rows: Rows, answers: list[list[int]], added: list[int]) -> int:
    """Tokens that all rows take: as many as each has, and none behind one that ends a text."""
    going = [answer for answer, count in zip(answers, added, strict=True) if count]
    most = min(count for count in added if count)
    ends = (place for answer in going for place in range(most) if answer[1 + place] in rows.limits.eos_token_ids)
    return min(ends, default=most - 1) + 1
