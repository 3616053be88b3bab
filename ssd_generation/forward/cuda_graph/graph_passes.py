"""Passes of a model that are replayed at fixed addresses (graphs.py) over an arena (cache/arena.py).

A pass is captured from the model's own code (capture.py), as on the CPU, and then recorded once for each width and each
bucket of slots. Between two recordings nothing but inputs changes: ids, positions and slots are copied to where the
pass reads them, mask and choice of tokens are part of it. A pass over fewer tokens is filled up; what fills it is
written into slots behind the text, which the next pass writes again.

Recording takes about as long as some tens of tokens of plain decoding, so it waits until it is worth that: until the
tokens that may still come, or those that were decoded without it, have taken as long.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ...cache.arena import Arena, bucket_of
from ...support.model_state import Part, state_of
from ..captured.conditions import why_not_on
from ..rounding import agree_on_average
from ..structure.skip_mode import SkipMode
from ..structure.weights import fingerprint
from .compiling import Fusing
from .graph_table import GraphTable
from .graphs import KINDS, GraphBackend, Results, graph_backend_on
from .single_pass import LONGEST_CHAIN, ChainInputs, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GraphPart", "GraphPasses", "draft_graphs", "target_graphs", "why_no_graphs"]

logger = logging.getLogger(__name__)

WIDTHS = (16,)
"""Widths of a target's passes. Sixteen tokens take 1.1 to 1.2 times as long as one on a GPU, and with a single width a
token's bits do not depend on what was drafted."""

NARROWER = 1
"""Tokens of a narrower pass, for those in which nothing is drafted: only where it is faster and has the same bits."""

FUSES: str | None = None
"""What is compiled of passes before they are recorded: `"none"`, `"rows"` (norms, gated activations and rotary
embeddings, each once for all layers, compiled_ops.py), or `"whole"` (all of a pass, most of a minute for each bucket).
`None`: rows, in a thread (compiling.py), and only if that turns out to be faster."""

_FUSING_AFTER = 3.0
"""Seconds that replayed passes have taken in a process when others begin to be compiled: about what that takes."""

_PAYS = 0.95
"""Of the time of a pass by the model's own code, what one that is replayed may take; and of that, a narrower one."""

_FIRST_TRIES = 3
"""Passes that are held against the model's own before the first one counts; two have to agree."""

_AHEAD = 2048
"""Slots that an arena is made for at the most before they are needed."""

_HALF = 0.5
"""Of the time that the rest of a text takes by the model's own code, what replaying saves at the least."""


class GraphPasses:
    """Passes of one model, whole or as a draft, over a single text in an arena.

    Args:
        model: the target model.
        arena: where the text's keys and values lie.
        backend: how passes are run again.
        skip_mode: for a draft: what leaves the sub-layers out. `None`: the whole model.
        widths: of the passes, ascending.
        fuses: as `FUSES`.

    Attributes:
        table: the graphs.
        refusal: why nothing is replayed any more; `None` while it may be.
        is_checked: whether passes were found to give the model's own logits.
        keeps_bits: whether a token's bits were found not to depend on its place in a pass; `None` while not tried
            (tuning/exactness.py).
        seconds: of a pass, by its width, as far as they were seen.
        fuses: what of them is compiled, as `FUSES`.
        copies: of weights, that a draft computes by; `None`: it has none.
        rival: the same passes without what is compiled of these, while it is not known whether these are faster.
        narrower_saves: seconds of a pass over one token, where a narrower one was found to have the same bits; 0 while
            it was not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arena: Arena,
        backend: GraphBackend,
        skip_mode: SkipMode | None = None,
        widths: Sequence[int] = WIDTHS,
        fuses: str | None = None,
    ) -> None:
        self._model_name = type(model).__name__
        self._fingerprint = fingerprint(model)
        self.arena, self.backend, self.widths = arena, backend, tuple(widths)
        self.fuses = FUSES if fuses is None else fuses
        self.table = GraphTable(model, arena, backend, skip_mode, self.fuses)
        self.rival: GraphPasses | None = None
        self.copies: object = None
        self._runs = 0
        self.is_draft = skip_mode is not None
        self._tries: list[bool] = [True] * _FIRST_TRIES if self.is_draft else []  # a draft is verified anyway
        self._eager_seconds = 0.0
        self._eager_tokens = 0
        self.refusal: str | None = None
        self.keeps_bits: bool | None = None
        self.narrower_saves = 0.0
        self._narrower: dict[int, bool] = {}  # by bucket: whether it has the same bits there
        self._might_have_saved: Counter[int] = Counter()  # passes over one token, by bucket
        self.seconds: dict[int, float] = {}  # by width

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether the model is still what was recorded; weights may have changed where they lie."""
        return self._fingerprint == fingerprint(model)

    @property
    def in_use(self) -> GraphPasses:
        """These, or those without compiled operations where these were given up."""
        return self if self.refusal is None or self.rival is None else self.rival

    @property
    def is_checked(self) -> bool:
        """See the class."""
        return sum(self._tries) >= _FIRST_TRIES - 1

    # ------------------------------------------------------------------------------------------------------------------

    def run(
        self,
        cache: Cache,
        tokens: Tokens | None,
        slot: int,
        position: int,
        records: bool = False,
        expected: int = 0,
    ) -> Results | None:
        """Run a pass. The cache's layers do not count its tokens.

        Args:
            cache: of a single text.
            tokens: n of them. `None`: the one that the pass before this one, a draft's, chose behind its own.
            slot: of the first token: how many slots of the cache are in use.
            position: of the first token.
            records: record the pass where it has not been; otherwise it is not run then.
            expected: slots that the text will come to, for an arena that is made now.

        Returns:
            Logits `(1, n, V)` and the tokens with the largest `(n,)`, good until the next pass; `None` where it is not
            replayed, and nothing has happened that counts.
        """
        count = 1 if tokens is None else len(tokens)
        width = next((width for width in self.widths if width >= count), None)
        if self.refusal is not None or width is None:
            return None
        bucket = bucket_of(slot + width)
        if bucket is None or not (records or (width, bucket) in self.table.graphs):
            return None
        try:
            if not self.arena.lend(cache, slot + width, min(expected, slot + _AHEAD)):
                return None
            if self.table.is_stale:
                self.forget()
                if not records:
                    return None
            if tokens is not None and count <= NARROWER and self._is_narrower_here(bucket, tokens, slot, position):
                width = NARROWER
            logits, choices = self.table.run(width, bucket, tokens, slot, position)
        except Exception as error:
            # Whatever a driver says, or a model's code does, that is not known here: its own passes go on.
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self._runs += 1
        return logits[:, :count], choices[:count]

    def _is_narrower_here(self, bucket: int, tokens: Tokens, slot: int, position: int) -> bool:
        """Whether a narrower pass may stand in: where it has been used as often as pays, and has the same bits."""
        known = self._narrower.get(bucket)
        if known is None and self.narrower_saves:
            self._might_have_saved[bucket] += 1
            if self._might_have_saved[bucket] * self.narrower_saves >= self.table.recording_seconds:
                known = self._narrower[bucket] = self._has_same_bits(bucket, tokens, slot, position)
        return bool(known)

    def _has_same_bits(self, bucket: int, tokens: Tokens, slot: int, position: int) -> bool:
        """Whether a narrower pass gives the logits of the usual one, to the bit."""
        count, width = len(tokens), self.widths[-1]
        usual = self.table.run(width, bucket, tokens, slot, position)[0][:, :count].clone()
        # By the device alone: the host has not waited in between.
        given = Tokens((), self.table.inputs[width].ids[:, :count].clone())
        return torch.equal(usual, self.table.run(NARROWER, bucket, given, slot, position)[0][:, :count])

    def consider_narrower(self, cache: Cache, tokens: Tokens, slot: int) -> bool:
        """Whether a pass over one token is faster by a narrower one than by the usual one.

        Args:
            cache: of a single text, with `slot` slots in use.
            tokens: one, of the device.
            slot: its own.
        """
        width = self.widths[-1]
        bucket = bucket_of(slot + width)
        if self.is_draft or width <= NARROWER or self.run(cache, tokens, slot, slot, records=True) is None:
            return False
        assert bucket is not None
        seconds: dict[int, float] = {}
        try:
            for of in (width, NARROWER):
                self.table.run(of, bucket, tokens, slot, slot)
                seconds[of] = self.table.seconds_of(of, bucket, tokens, slot, slot)
        except Exception as error:  # as in `run`
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        self.seconds = seconds
        return seconds[NARROWER] <= _PAYS * seconds[width]

    def use_narrower(self, uses: bool, buckets: Sequence[int] = ()) -> None:
        """Whether passes over one token may be narrower ones, as `consider_narrower` found them to be faster.

        Args:
            uses: once they have been seen to have the same bits where they are.
            buckets: in which they are used without a look.
        """
        self.narrower_saves = self.seconds[self.widths[-1]] - self.seconds[NARROWER] if uses else 0.0
        self._narrower = dict.fromkeys(buckets, True)
        self._might_have_saved.clear()
        if not uses:
            self.table.drop_other_widths(self.widths)

    def chain(self, cache: Cache, first: int, slot: int, position: int, length: int) -> torch.Tensor | None:
        """Tokens that a draft takes greedily one behind the other: nothing but replays, and no wait.

        Args:
            cache: of a single text, for whose last pass the host has waited.
            first: the token that they follow.
            slot, position: its own.
            length: of the chain, at most 64.

        Returns:
            `torch.LongTensor` of shape `(1, length)`; `None` where a pass is not replayed.
        """
        if length > LONGEST_CHAIN:
            return None
        for depth in range(length):
            tokens = None if depth else Tokens([first])
            if self.run(cache, tokens, slot + depth, position + depth, records=True) is None:
                return None
        inputs = self.table.inputs[1]
        assert isinstance(inputs, ChainInputs)
        return inputs.chain[:, :length].clone()

    def compute_beside(self) -> None:
        """Run a pass of each width in buffers of its own, by which all that is compiled of it is: in another thread."""
        self.table.compute_beside((self.widths[-1], NARROWER))

    def fused(self, model: PreTrainedModel) -> GraphPasses | None:
        """The same passes, to be compiled; `None` while that does not pay, or where it is not wanted.

        Args:
            model: the target model.
        """
        taken = self._runs * self.seconds.get(self.widths[-1], 0.0)
        if self.fuses is not None or not self.backend.compiles or taken < _FUSING_AFTER or self.refusal is not None:
            return None
        made = GraphPasses(model, self.arena, self.backend, widths=self.widths, fuses="rows")
        made._eager_seconds, made._eager_tokens, made.rival = self._eager_seconds, self._eager_tokens, self
        return made

    def _give_up(self, reason: str) -> None:
        self.refusal = reason
        self.forget()
        if self.rival is None:
            logger.warning("Passes of %s are not replayed any more: %s", self._model_name, reason)
        else:
            logger.info("Compiled passes of %s are not used: %s", self._model_name, reason)

    def forget(self) -> None:
        """Free what was recorded."""
        self.table.forget()
        self._narrower.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def is_worth_it(self, most_tokens: int) -> bool:
        """Whether recording pays: by the tokens that may still come, or by those that went without it.

        Args:
            most_tokens: that the text may still come to.
        """
        if self.refusal is not None:
            return False
        if not self.table.recording_seconds or self.rival is not None:
            return True
        if not self._eager_tokens:
            return False
        saved = _HALF * most_tokens * self._eager_seconds / self._eager_tokens
        return self._eager_seconds + saved >= self.table.recording_seconds

    def note_eager(self, seconds: float) -> None:
        """A pass was run by the model's own code, and took so long."""
        self._eager_seconds += seconds
        self._eager_tokens += 1

    def try_beside(
        self, cache: Cache, ids: torch.Tensor, position: int, logits: torch.Tensor, most_tokens: int
    ) -> None:
        """After a pass by the model's own code: record it as well, and see that it gives the same logits.

        Args:
            cache: the tokens of the pass are its last ones.
            ids (`torch.LongTensor` of shape `(1, n)`): these.
            position: of the first.
            logits (`torch.FloatTensor` of shape `(1, ≥ n, V)`): the model's own.
            most_tokens: that the text may still come to.
        """
        if len(self._tries) >= _FIRST_TRIES and not self.is_checked:
            return
        count = ids.shape[1]
        slot = int(cache.get_seq_length()) - count
        expected = slot + count + most_tokens
        if len(self._tries) >= _FIRST_TRIES:
            self.run(cache, Tokens((), ids), slot, position, records=True, expected=expected)
            return
        layers: list[Any] = cache.layers
        if any(getattr(layer, "key_buffer", None) is None for layer in layers):
            return  # one that holds nothing
        # While it is not known to be right, what it writes does not stay.
        own = [
            [buffer[:, :, layer.end - count : layer.end].clone() for buffer in (layer.key_buffer, layer.value_buffer)]
            for layer in layers
        ]
        found = self.run(cache, Tokens((), ids), slot, position, records=True, expected=expected)
        for layer, states in zip(layers, own, strict=True):
            layer.write(layer.end - count, *states)
        if found is None:
            return
        self._tries.append(agree_on_average(found[0], logits[:, -count:]))
        if self._tries.count(False) > 1:
            self._give_up("they give other logits than the model")
        elif self.is_checked and self.backend.seconds:
            self._see_that_it_pays(ids, slot, position)

    def _see_that_it_pays(self, ids: torch.Tensor, slot: int, position: int) -> None:
        """Give up where a pass takes as long as by the model's own code (a large model on a device of little speed)."""
        own = self._eager_seconds / self._eager_tokens
        width = self.widths[-1]
        bucket = bucket_of(slot + width)
        assert bucket is not None
        seconds, whose = self._measured(bucket, ids, slot, position), "the model's own"
        if self.rival is not None:
            own, whose = self.rival._measured(bucket, ids, slot, position), "those without compiled operations"
        if seconds > _PAYS * own:
            self._give_up(f"they take {1e3 * seconds:.1f} ms where {whose} take {1e3 * own:.1f}")
        elif self.rival is not None:
            self.rival.forget()
            self.rival = None

    def _measured(self, bucket: int, ids: torch.Tensor, slot: int, position: int) -> float:
        """Seconds of a pass, now where it is recorded, else as it was elsewhere."""
        width = self.widths[-1]
        if (width, bucket) in self.table.graphs and not self.table.is_stale:
            self.seconds[width] = self.table.seconds_of(width, bucket, Tokens((), ids), slot, position)
        return self.seconds[width]


# ----------------------------------------------------------------------------------------------------------------------


class GraphPart(Part):
    """Of a model: its passes as CUDA graphs.

    Attributes:
        passes: by skip set and precision, `None` for the whole model.
        backend: how they are run again.
        arena: the keys and values that they read and write.
        fusing: what compiles them.
    """

    def __init__(self) -> None:
        self.passes: dict[Hashable, GraphPasses] = {}
        self.backend: GraphBackend | None = None
        self.arena: Arena | None = None
        self.fusing: Fusing[GraphPasses] | None = None

    def drop(self) -> None:
        self.passes, self.backend, self.arena, self.fusing = {}, None, None, None

    def drop_copies(self) -> None:
        self.passes = {kind: passes for kind, passes in self.passes.items() if passes.copies is None}


def target_graphs(model: PreTrainedModel) -> GraphPasses | None:
    """The whole model's passes, or `None` where they may not be replayed; recorded anew when the model changed."""
    return _known(model, None, lambda arena, backend: GraphPasses(model, arena, backend, widths=WIDTHS))


def draft_graphs(
    model: PreTrainedModel, kind: Hashable, skip_mode: SkipMode, copies: object = None
) -> GraphPasses | None:
    """A draft's passes over one token, or `None`, as `target_graphs`.

    Args:
        model: the target model.
        kind: what tells the draft from others.
        skip_mode: what makes the model the draft.
        copies: of weights, that it computes by.
    """

    def make(arena: Arena, backend: GraphBackend) -> GraphPasses:
        made = GraphPasses(model, arena, backend, skip_mode, widths=(1,))
        made.copies = copies
        return made

    return _known(model, kind, make, copies)


def _fused_or_not(model: PreTrainedModel, passes: GraphPasses) -> GraphPasses:
    """The passes to go on with: those that were compiled meanwhile, as long as they are not known to be slower."""
    state = state_of(model).get(GraphPart)
    if passes.rival is not None:
        return passes.in_use
    fusing: Fusing[GraphPasses] | None = state.fusing
    if fusing is None:
        if (fused := passes.fused(model)) is not None:
            state.fusing = Fusing(fused)
    elif fusing.passes.rival is passes and fusing.is_done and fusing.refusal is None and fusing.passes.refusal is None:
        return fusing.passes
    return passes


def _known(
    model: PreTrainedModel, kind: Hashable, make: Callable[[Arena, GraphBackend], GraphPasses], copies: object = None
) -> GraphPasses | None:
    if why_no_graphs(model) is not None:
        return None
    state = state_of(model).get(GraphPart)
    passes = state.passes.get(kind)
    if kind is None and passes is not None:
        passes = state.passes[None] = _fused_or_not(model, passes)
    if passes is None or not passes.is_current(model) or passes.copies is not copies:
        device = model.get_input_embeddings().weight.device
        if state.backend is None or state.arena is None or state.backend.device != device:
            state.backend, state.arena = graph_backend_on(device), Arena()
        if kind is None:
            state.fusing = None
        assert state.backend is not None and state.arena is not None
        passes = state.passes[kind] = make(state.arena, state.backend)
    return passes


def why_no_graphs(model: PreTrainedModel) -> str | None:
    """Why passes of this model are not replayed at fixed addresses (graphs.py); `None` where they may be."""
    device = model.get_input_embeddings().weight.device
    if device.type not in KINDS:
        return f"nothing is replayed on {device.type}"
    return why_not_on(model, device, "it is spread over several devices")
