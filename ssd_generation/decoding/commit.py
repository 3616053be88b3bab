"""Commit steps that all rows have taken, in the order and with the calls of plain `generate`."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ..forward.forward import Forward
from ..forward.structure.weights import WeightWatch
from .batch_rows import Rows
from .ends import KnownEnds
from .loop_request import LoopRequest
from .outputs import StepOutputs
from .random_use import is_foreign, no_draws
from .statistics import SpeculationStatistics

__all__ = ["Committer"]


def _weights_changed(when: str) -> RuntimeError:
    return RuntimeError(
        f"The weights of the model, or its adapters, were changed in the middle of a call: {when}. Tokens verified "
        "before the change cannot be told apart from later ones: change weights between calls, or generate without "
        "`self_speculative`."
    )


class Committer:
    """Commits steps: calls the stopping criteria, feeds the streamer, and follows changes of the weights.

    Args:
        forward: the target's passes.
        request: request of `generate`.
        watch: watch over the model's weights.
        statistics: statistics of the call.
    """

    def __init__(
        self, forward: Forward, request: LoopRequest, watch: WeightWatch, statistics: SpeculationStatistics
    ) -> None:
        self._forward, self._request, self._watch, self._statistics = forward, request, watch, statistics
        self._ends = KnownEnds.of(request.criteria)
        users = (*request.criteria, *(() if request.streamer is None else (request.streamer,)))
        # Otherwise what another thread changes is seen before the next step.
        self._calls_users_code = self._ends is None or request.streamer is not None
        # Under sampling: the user's objects that see each token, and must not draw random numbers.
        self._watched = [user for user in users if is_foreign(user)] if request.generation_config.do_sample else []

    def commit(self, rows: Rows, outputs: StepOutputs) -> bool:
        """Commit every step that all unfinished rows have reached, one after the other.

        Args:
            rows: the texts.
            outputs: recorded outputs of their steps.

        Returns:
            Whether to continue.

        Raises:
            RuntimeError: weights were changed, and tokens verified with the old ones cannot be rolled back.
        """
        if all(rows.finished):  # committed during verification
            return False
        if self._watch.has_changed(adapters_alone=not rows.has_processors):
            if max(rows.lengths) > rows.columns + 1:
                raise _weights_changed("while tokens were verified, by a logits processor or another thread")
            self.renew(rows, takes_back=False)
        rows.rest_known_ends()
        while rows.take_step():
            _, has_changed = self.step(rows, outputs, looks=self._calls_users_code)
            if all(rows.finished):
                return False
            if has_changed:
                # By a streamer or a criterion: tokens beyond this one were verified with the old weights.
                self.renew(rows)
                outputs.take_back()
        return True

    def step(self, rows: Rows, outputs: StepOutputs, looks: bool = True) -> tuple[bool, bool]:
        """Call the criteria and feed the streamer for a step that all rows have taken.

        Args:
            rows, outputs: as in `commit`.
            looks: whether to look for changes of the weights.

        Returns:
            Whether all rows are finished, or one has just ended and is padded from here on; and whether the model's
            weights have changed.
        """
        for row, is_finished in enumerate(rows.finished):
            self._statistics.new_tokens[row] += not is_finished
        outputs.commit()
        with no_draws(self._watched) if self._watched else nullcontext():
            done = self._done(rows, outputs)
            if self._request.streamer is not None:
                self._request.streamer.put(torch.tensor(rows.last_committed(), device="cpu"))
        ended = rows.finish(done)
        if rows.limits.stops_at_eos:
            for row in ended:
                outputs.drop(row)
        is_over = all(rows.finished) or (rows.limits.stops_at_eos and bool(ended))
        return is_over, looks and not all(rows.finished) and self._watch.has_changed()

    def _done(self, rows: Rows, outputs: StepOutputs) -> list[bool]:
        """Return, per row, whether the stopping criteria end its committed text."""
        if self._ends is not None and not self._ends.warns(rows.columns):
            return self._ends.done(rows.columns, rows.last_committed())
        return self._request.criteria(rows.committed_ids(), outputs.scores).tolist()  # type: ignore[no-any-return]

    def check_weights(self, rows: Rows) -> None:
        """Raise `RuntimeError` where weights were changed while a draft was made."""
        if self._watch.has_changed(adapters_alone=not rows.has_processors):
            raise _weights_changed("while a draft was made, by a logits processor or another thread")

    def renew(self, rows: Rows, takes_back: bool = True) -> None:
        """Continue with weights that a processor, a criterion or a streamer has changed.

        Args:
            rows: the texts.
            takes_back: whether tokens that are not committed were verified with the old weights.

        Raises:
            RuntimeError: the new weights are of another kind, or tokens verified with the old ones cannot be rolled
                back.
        """
        if not self._watch.are_of_a_kind:
            raise _weights_changed(
                f"after {rows.committed} new tokens, to weights of another dtype, device or vocabulary"
            )
        if takes_back and not rows.roll_back_ahead():
            raise _weights_changed(
                f"after {rows.committed} new tokens, by a logits processor, a streamer or a stopping criterion. Such a "
                "change is supported for a single text only, without recurrent states and within the windows of the "
                "cache"
            )
        self._forward.renew()
