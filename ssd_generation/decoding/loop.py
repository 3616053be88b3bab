"""The decoding loop: draft, verify, accept, commit.

transformers' own assisted loop checks the stopping criteria once per round, takes one row only, and feeds a continued
cache its prompt again. This loop commits token by token, in the order of plain decoding: criteria and streamer get the
same calls with the same arguments, and the same scores are recorded. Rows of a batch run at their own speed; a step is
committed when all unfinished rows have reached it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..cache.recurrent import NoRoomForStates, knows_its_length
from ..drafting.drafter import Draft, Drafter
from ..forward.context import Context
from ..forward.eager.row_by_row import has_scans_of_its_own
from ..forward.forward import Forward
from ..forward.structure.weights import WeightWatch
from ..native.waiting import ThreadsAtWork
from ..support.timing import Stopwatch
from ..support.versions import CACHE
from .batch_rows import Rows
from .choice import Choice, SampledChoice
from .commit import Committer
from .completion import complete_cache
from .loop_request import LoopRequest
from .outputs import SelfSpeculativeOutput, StepOutputs
from .prompt import read_prompt
from .statistics import SpeculationStatistics
from .verification import Verifier

__all__ = ["DecodingLoop"]


class DecodingLoop:
    """One call of the decoding loop.

    Args:
        forward: the target model's passes.
        drafter: drafter of the call.
        request: request of `generate`.
        watch: watch over the model's weights, made before anything else of the call.
        after_round: callback between rounds; gets the number of draft passes, of tokens verified, and the rows.

    Attributes:
        statistics: statistics of the call.
        context: state after the last pass; `None` until the prompt was read.
    """

    def __init__(
        self,
        forward: Forward,
        drafter: Drafter,
        request: LoopRequest,
        watch: WeightWatch,
        after_round: Callable[[int, int, Rows], None] | None = None,
    ) -> None:
        self.forward = forward
        self.drafter = drafter
        self.request = request
        self.after_round = after_round
        self._watch = watch
        self.statistics = SpeculationStatistics()
        self.context: Context | None = None
        self._drafting, self._verifying = Stopwatch(forward.device), Stopwatch(forward.device)

    def run(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]
    ) -> torch.LongTensor | SelfSpeculativeOutput:
        """Generate the texts of the call.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.
            model_kwargs: the model's keyword arguments as `generate` prepared them, with the cache.

        Returns:
            The sequences, of shape `(B, prompt_length + new_tokens)`, or a `SelfSpeculativeOutput` if the generation
            config asks for a dictionary.
        """
        started, request, (batch, prompt_length) = time.perf_counter(), self.request, input_ids.shape
        self.statistics = SpeculationStatistics.of_batch(batch, prompt_length)
        self._committer = Committer(self.forward, request, self._watch, self.statistics)
        if (on_statistics := getattr(request.streamer, "on_statistics", None)) is not None:
            on_statistics(self.statistics)  # each token is counted before the streamer gets it
        outputs = StepOutputs(request.generation_config, batch)
        choice = SampledChoice(batch, input_ids.device) if request.generation_config.do_sample else Choice()
        rows: Rows | None = None
        try:
            with ThreadsAtWork(self.forward.device) as threads:
                rows = read_prompt(self.forward, request, input_ids, model_kwargs, outputs, choice)
                self.context = rows.context
                self.statistics.target_passes += 1
                self._verifier = Verifier(self.forward, self._committer, rows)
                running = self._committer.commit(rows, outputs)
                self.statistics.prompt_seconds = time.perf_counter() - started
                while running:
                    running = self._round(rows, outputs)
                    threads.look()
                if request.cache_is_returned:
                    self.statistics.target_passes += complete_cache(self.forward, rows)
        except BaseException:
            if request.cache_is_returned and rows is not None:
                self._roll_back(rows)
            raise
        finally:
            choice.end(0 if rows is None else rows.committed)
        self._sum_up(started)
        if request.streamer is not None:
            request.streamer.end()
        return self._result(rows, outputs)

    def _round(self, rows: Rows, outputs: StepOutputs) -> bool:
        """Draft, verify, learn, commit; return whether to continue."""
        # Draft: no further than is of use to each row.
        active = rows.active()
        most = self.forward.most_drafted(rows.context)
        limits = [min(limit, most) for limit in rows.draft_limits(active)]
        passes, before = self.drafter.draft_passes, rows.lengths
        self._drafting.start()
        draft = self._draft(rows, limits) if max(limits) > 0 else Draft.none(rows.batch)
        self._drafting.stop()
        self._committer.check_weights(rows)

        # Verify: one pass of the target over the pending token and the drafted ones.
        self._verifying.start()
        accepted = self._verifier.verify(rows, draft, outputs, active)
        self._verifying.stop()

        # Learn, and commit what all rows have reached.
        going = [row for row in range(rows.batch) if active[row]]
        self.statistics.target_passes += 1
        added = [rows.lengths[row] - before[row] for row in range(rows.batch)]
        self.statistics.record_round(draft.lengths, accepted, going, draft.self_lengths, added)
        if max(limits) > 0:
            self.drafter.learn(draft, accepted, [row for row in range(rows.batch) if limits[row] > 0])
        running = self._committer.commit(rows, outputs)
        if self.after_round is not None and running:
            self.after_round(self.drafter.draft_passes - passes, draft.tokens.shape[1] + 1, rows)
        return running

    def _draft(self, rows: Rows, limits: list[int]) -> Draft:
        """Have the drafter propose, and save the recurrent states that rejected tokens are rolled back to.

        Where there is no memory for these, nothing more is drafted in this call.
        """
        context = rows.context
        try:
            draft = self.drafter.propose(rows, limits)
            if context.checkpoint is not None and draft.tokens.shape[1]:
                self.forward.save_states(1 + draft.tokens.shape[1], rows.batch, context)
        except NoRoomForStates as error:
            assert context.checkpoint is not None
            context.checkpoint.has_no_room = True
            limits[:] = [0] * len(limits)
            warnings.warn(f"This text is decoded without drafts from here on: {error}.", stacklevel=2)
            return Draft.none(rows.batch)
        return draft

    # ------------------------------------------------------------------------------------------------------------------

    def _roll_back(self, rows: Rows) -> None:
        """Crop the cache to the committed text after an exception, such as a streamer's, to continue from."""
        rows.take_back()
        if not knows_its_length(rows.context.cache) or has_scans_of_its_own(self.forward.model, rows.batch):
            # The caller could not tell which tokens the states cover, or continue over several: complete it.
            with contextlib.suppress(Exception):
                complete_cache(self.forward, rows)

    def _sum_up(self, started: float) -> None:
        statistics = self.statistics
        statistics.generated_tokens = sum(statistics.new_tokens)
        statistics.draft_passes = self.drafter.draft_passes
        statistics.draft_seconds = self._drafting.seconds()
        statistics.verify_seconds = self._verifying.seconds()
        statistics.policy_state = self.drafter.state()
        statistics.total_seconds = time.perf_counter() - started

    def _result(self, rows: Rows, outputs: StepOutputs) -> torch.LongTensor | SelfSpeculativeOutput:
        sequences = rows.tokens[:, : rows.columns].clone()
        if not self.request.generation_config.return_dict_in_generate:
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
