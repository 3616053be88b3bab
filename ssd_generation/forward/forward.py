"""The passes of one model, as the target and as its own draft. `runners.py` decides how each pass is run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ..config import SelfSpeculativeConfig
from .captured.prompt_passes import RowPrefixes, prompt_passes
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
    """The passes of one model: as the target (`target`), and as its own draft (`draft`).

    Args:
        model: the target model.
        config: the drafting config; `None` where the model does not draft.
        plan: how passes are run.

    Attributes:
        is_bitwise: whether the bits of all passes of the target so far did not depend on their width.
        has_read_prompt: whether the kernels that decode have read the prompt.
        prefixes: earlier texts' keys and values, for the prompts of a batch; `None`: none.

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
        self.prefixes: RowPrefixes | None = None
        self._graph: GraphRunner | None = None
        self._make_runners()
        self._config = config
        self._draft: DraftForward | None = None
        if config is not None:
            self.draft_by(config)

    def _make_runners(self) -> None:
        self._eager = EagerRunner(self.model, self.plan)
        if self._graph is None and self.plan.graph:
            graph = GraphRunner(self.model, self._eager, self.plan.rows)
            self._graph = graph if graph.is_there else None
        # Where there are CUDA graphs, a captured pass is replayed as a graph or not used at all.
        self._captured = CapturedRunner(self.model, self.plan, self._eager) if self._graph is None else None
        self._prompts = prompt_passes(self.model, self.plan.batch_invariance) if self.plan.prompts else None

    def draft_by(self, config: SelfSpeculativeConfig) -> None:
        """Draft with this config from now on.

        Args:
            config: sub-layers that the draft leaves out, and its precision.

        Raises:
            ValueError: as in the constructor.
        """
        self._config = config
        graphs = None if self._graph is None else self._graph.graphs
        self._draft = DraftForward(self.model, config, graphs, self._eager.few_rows)

    def renew(self) -> None:
        """Continue with other weights, such as after an adapter was switched.

        Raises:
            ValueError: as in the constructor.
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
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Run the target model over the pending token of each row and the drafted ones after it.

        Args:
            tokens (`torch.LongTensor` of shape `(B, n)`): the pending token and n − 1 drafted ones.
            context: the state that they follow. Their keys and values are appended to its cache; where the model starts
                a new cache, that one replaces it.
            whole: tokens and positions of the whole text, `(B, text)` each, for a pass in which the model may want to
                compute its cache anew.
            counts: number of tokens of each row whose logits count, from the left; `None`: all. Others may be left
                uncomputed, and their slots unwritten.

        Returns:
            The model's outputs, with `logits` of shape `(B, ≥ n, V)`.
        """
        passed = self._graph.run(tokens, context, whole) if self._graph is not None else None
        if passed is None and self._captured is not None:
            passed = self._captured.run(tokens, context, whole, counts)
        if passed is None:
            passed = self._eager.run(tokens, context, whole)
        self.is_bitwise = self.is_bitwise and passed.is_batch_invariant
        return passed.outputs

    def save_states(self, tokens: int, rows: int, context: Context) -> None:
        """Prepare a pass of which tokens may be rejected: save recurrent states, or make room for it to save them.

        Args:
            tokens: number of tokens of each row.
            rows: number of rows, B.
            context: the state that they follow.

        Raises:
            NoRoomForStates: there is no memory for a copy of the states.
        """
        assert context.checkpoint is not None
        if self._captured is not None and self._captured.continues_from_states(tokens, rows, context):
            context.checkpoint.reserve(context.cache)
        else:
            context.checkpoint.save(context.cache, context.length)

    def read_prompt(
        self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, starts: Sequence[int] | None
    ) -> torch.Tensor | None:
        """Read tokens of one text, or whole prompts of a batch, with the kernels used for decoding.

        Args:
            cache: cache with buffers, empty where prompts are those of a batch. The tokens are appended to it.
            ids (`torch.LongTensor` of shape `(B, n)`): the tokens, those of several texts padded at the left.
            positions (`torch.LongTensor` of shape `(B, n)`): positions of the tokens.
            starts: index of the first token of each row that is not padding; `None`: a single text, without any.

        Returns:
            The logits of the last tokens, `(B, 1, V)`; `None` where the plan does not read prompts this way, or these
            passes cannot be run: nothing has happened then.
        """
        logits = None
        if self._prompts is not None:
            if starts is None:
                logits = self._prompts.read(cache, ids, positions)
            else:
                logits = self._prompts.read_rows(cache, ids, positions, starts, self.prefixes)
        self.has_read_prompt = logits is not None
        return logits

    def draft(self, context: Context, rows: int, length: int) -> DraftPasses:
        """Return the passes of one round's draft, to be entered with `with`.

        Args:
            context: the state that they follow. Its cache is read in place; the draft's own keys and values are
                retained until the end of the round.
            rows: number of rows, B.
            length: most tokens to draft.
        """
        assert self._draft is not None, "no config to draft by"
        return self._draft.passes(context, rows, length)

    def end(self, cache: Cache, keeps: bool) -> None:
        """End a call.

        Args:
            cache: the cache that its passes used.
            keeps: whether the contents of the cache will be read again.
        """
        if self._graph is not None:
            self._graph.end(cache, keeps)

    # ------------------------------------------------------------------------------------------------------------------
    # CUDA graphs

    def replayed_logits(self, tokens: Tokens, context: Context) -> torch.Tensor | None:
        """Replay the target's pass over n tokens and return logits `(1, n, V)`, valid until the next one.

        Args:
            tokens, context: as in `choices`.

        Returns:
            The logits; `None` where the pass is not replayed, in which case nothing has happened.
        """
        found = None if self._graph is None else self._graph.replay(tokens, context)
        return None if found is None else found[0]

    def choices(self, tokens: Tokens, context: Context) -> tuple[list[int], list[int]] | None:
        """Return the target's greedy choices after each of some tokens, where its passes are replayed.

        Takes one copy to the device, and one wait for it.

        Args:
            tokens: the pending token of a single row, and the drafted ones after it.
            context: as in `target`.

        Returns:
            The tokens themselves, and the choice after each; `None` where the pass is not replayed, in which case
            nothing has happened.
        """
        found = None if self._graph is None else self._graph.replay(tokens, context)
        if found is None:
            return None
        if tokens.others is None:
            return list(tokens.known), found[1].tolist()
        both: list[int] = torch.cat((tokens.others[0], found[1])).tolist()
        others = tokens.others.shape[1]
        return [*tokens.known, *both[:others]], both[others:]

    def most_drafted(self, context: Context) -> int:
        """Return the most tokens to draft for each row of the next pass, for the sake of its replay.

        Args:
            context: the state that it follows.

        Returns:
            The greatest number whose pass is replayed; 0 while passes over several rows are checked; `sys.maxsize`
            where passes over a single text, or none, are replayed.
        """
        return sys.maxsize if self._graph is None else self._graph.most_drafted(context)

    @property
    def replays(self) -> bool:
        """Tell whether passes of the target that have been recorded are replayed by now."""
        return self._graph is not None and self._graph.is_ready

    @property
    def is_trying_to_replay(self) -> bool:
        """Tell whether passes of the target are to be replayed, but have not passed their check yet."""
        return self._graph is not None and self._graph.is_trying

    @property
    def replayed_passes(self) -> int:
        """Number of passes of the target replayed so far."""
        return 0 if self._graph is None else self._graph.passes

    @property
    def replay_refusal(self) -> str | None:
        """Reason why passes are not replayed where they might be; `None` where they are, or there are no graphs."""
        return None if self._graph is None else self._graph.refusal
