"""The passes of one model: whole, and as its own draft. Which way a pass is run is decided in `runners.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ..config import SelfSpeculativeConfig
from .captured.prompt_passes import prompt_passes
from .context import Context
from .cuda_graph.single_pass import Tokens
from .draft_passes import DraftForward, DraftPasses
from .pass_plan import PassPlan
from .runners import CapturedRunner, EagerRunner, GraphRunner, WholeText
from .structure.sublayers import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Context", "DraftPasses", "Forward"]

_BY_DEFAULT = PassPlan()


class Forward:
    """The passes of one model: whole (`target`), and as its own draft (`draft`).

    Args:
        model: the target model.
        config: what to draft with; `None` where the model does not draft.
        plan: how passes are run.

    Attributes:
        is_bitwise: whether the bits of all passes of the target so far did not depend on their width.
        has_read_prompt: whether the kernels that decode have read the prompt.

    Raises:
        ValueError: the skip set does not fit the model, or low-bit copies cannot be made of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig | None = None,
        plan: PassPlan = _BY_DEFAULT,
    ) -> None:
        self.model, self.plan = model, plan
        self.device = input_device(model)
        self.is_bitwise = plan.batch_invariance is not None
        self.has_read_prompt = False
        self._graph: GraphRunner | None = None
        self._make_runners()
        self._config = config
        self._draft: DraftForward | None = None
        if config is not None:
            self.draft_by(config)

    def _make_runners(self) -> None:
        self._eager = EagerRunner(self.model, self.plan)
        if self._graph is None and self.plan.graph:
            graph = GraphRunner(self.model, self._eager)
            self._graph = graph if graph.is_there else None
        # Where there are CUDA graphs, what is captured is replayed as one or not at all.
        self._captured = CapturedRunner(self.model, self.plan, self._eager) if self._graph is None else None

    def draft_by(self, config: SelfSpeculativeConfig) -> None:
        """Draft by this config from now on.

        Args:
            config: what the draft leaves out, and its precision.

        Raises:
            ValueError: as the constructor.
        """
        self._config = config
        self._draft = DraftForward(self.model, config, None if self._graph is None else self._graph.graphs)

    def renew(self) -> None:
        """Go on with other weights, as after an adapter was switched.

        Raises:
            ValueError: as the constructor.
        """
        self._make_runners()
        if self._graph is not None:
            self._graph.renew(self._eager)
        if self._config is not None:
            self.draft_by(self._config)

    # ------------------------------------------------------------------------------------------------------------------

    def target(
        self,
        tokens: torch.Tensor,
        context: Context,
        whole: WholeText | None = None,
        going: Sequence[int] | None = None,
    ) -> Any:
        """The whole model's pass over the pending token of each row and the drafted ones behind it.

        Args:
            tokens (`torch.LongTensor` of shape `(B, n)`): the pending token and n − 1 drafted ones.
            context: what they follow. Their keys and values are appended to its cache; where the model starts a new
                cache, that one takes its place.
            whole: tokens and positions of the whole text, `(B, text)` each, for a pass in which the model may want to
                compute its cache anew.
            going: rows whose logits count; `None`: all. For the others nothing may be computed, and nothing be written
                into the slots that they are given.

        Returns:
            The model's outputs, with `logits` of shape `(B, ≥ n, V)`.
        """
        passed = self._graph.run(tokens, context, whole) if self._graph is not None else None
        if passed is None and self._captured is not None:
            passed = self._captured.run(tokens, context, whole, going)
        if passed is None:
            passed = self._eager.run(tokens, context, whole)
        self.is_bitwise = self.is_bitwise and passed.is_batch_invariant
        return passed.outputs

    def read_prompt(
        self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor | None:
        """Read tokens of a text, or whole prompts with padding, by the kernels that decode.

        Args:
            cache: with buffers; it is empty where there are several texts, or padding. The tokens are appended to it.
            ids (`torch.LongTensor` of shape `(B, n)`): the tokens, those of several texts padded at the left.
            positions (`torch.LongTensor` of shape `(B, n)`): theirs.
            starts: by row, the first token that is no padding.

        Returns:
            The logits of the last ones, `(B, 1, V)`; `None` where the plan has it otherwise, or these passes cannot be
            run: nothing has happened then.
        """
        logits = None
        if self.plan.prompts and (passes := prompt_passes(self.model, self.plan.batch_invariance)) is not None:
            is_one = list(starts) == [0]
            logits = passes.read(cache, ids, positions) if is_one else passes.read_rows(cache, ids, positions, starts)
        self.has_read_prompt = logits is not None
        return logits

    def draft(self, context: Context, rows: int, length: int) -> DraftPasses:
        """The passes of one round's draft, to be entered with `with`.

        Args:
            context: what they follow. Its cache is read in place; the draft's own keys and values are kept until the
                end of the round.
            rows: of the batch, B.
            length: tokens to draft at the most.
        """
        assert self._draft is not None, "no config to draft by"
        return self._draft.passes(context, rows, length)

    def end(self, cache: Cache, keeps: bool) -> None:
        """End a call.

        Args:
            cache: what its passes stood behind.
            keeps: whether anybody will look at what it holds.
        """
        if self._graph is not None:
            self._graph.end(cache, keeps)

    # ------------------------------------------------------------------------------------------------------------------
    # CUDA graphs

    def replayed_logits(self, tokens: Tokens, context: Context) -> torch.Tensor | None:
        """Logits `(1, n, V)` of the whole model's pass over n tokens, good until the next one.

        Args:
            tokens, context: as in `choices`.

        Returns:
            `None` where the pass is not replayed, and nothing has happened then.
        """
        found = None if self._graph is None else self._graph.replay(tokens, context)
        return None if found is None else found[0]

    def choices(self, tokens: Tokens, context: Context) -> tuple[list[int], list[int]] | None:
        """The tokens that the whole model takes greedily after each of some, where its passes are replayed.

        One copy to the device, and one wait for it.

        Args:
            tokens: the pending one of a single row, and drafted ones behind it.
            context: as in `target`.

        Returns:
            The tokens themselves, and as many that it takes; `None` where the pass is not replayed, and nothing has
            happened then.
        """
        found = None if self._graph is None else self._graph.replay(tokens, context)
        if found is None:
            return None
        if tokens.others is None:
            return list(tokens.known), found[1].tolist()
        both: list[int] = torch.cat((tokens.others[0], found[1])).tolist()
        others = tokens.others.shape[1]
        return [*tokens.known, *both[:others]], both[others:]

    @property
    def replays(self) -> bool:
        """Whether passes of the target are replayed by now, where they have been recorded."""
        return self._graph is not None and self._graph.is_ready

    @property
    def is_trying_to_replay(self) -> bool:
        """Whether passes of the target are to be replayed, and have not been found to be right yet."""
        return self._graph is not None and self._graph.is_trying

    @property
    def replayed_passes(self) -> int:
        """Passes of the target that were replayed so far."""
        return 0 if self._graph is None else self._graph.passes

    @property
    def replay_refusal(self) -> str | None:
        """Why passes are not replayed where they might be; `None` where they are, or this device has no graphs."""
        return None if self._graph is None else self._graph.refusal
