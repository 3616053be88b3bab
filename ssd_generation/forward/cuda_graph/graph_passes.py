"""Passes of a model that are replayed at fixed addresses (graphs.py) over an arena (cache/arena.py).

A pass is captured from the model's own code (capture.py), as on the CPU, and then recorded once for each width and each
bucket of slots. Between two replays nothing but inputs changes: ids, positions and slots are copied to the addresses
that the pass reads; mask and choice of tokens are part of it. A pass over fewer tokens is filled up; the tokens that
fill it are written into slots after the text, which the next pass overwrites.

Recording takes about as long as some tens of tokens of plain decoding, so it waits until it pays: until the tokens that
may still come, or those that were decoded without it, have taken as long.
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
from ...support.recent import recent
from ..captured.conditions import is_chunked, why_not_on
from ..rounding import agree_on_average
from ..structure.skip_mode import SkipMode
from ..structure.weights import fingerprint
from .compiling import Fusing
from .graph_table import GraphTable
from .graphs import KINDS, GraphBackend, Results, graph_backend_on
from .single_pass import LONGEST_CHAIN, ChainInputs, RowPlaces, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GraphPart", "GraphPasses", "draft_graphs", "target_graphs", "why_no_graphs"]

logger = logging.getLogger(__name__)

WIDTHS = (16,)
"""Widths of a target's passes. Sixteen tokens take 1.1 to 1.2 times as long as one on a GPU, and with a single width a
token's bits do not depend on what was drafted."""

_WIDTHS_OF_BATCH = (1, 2, 4, 8, 16)
"""Widths of passes over several rows, in tokens of a row: each further one is a token more of every row."""

_MOST_TOKENS = 1024
"""Most tokens of a pass over several rows: its logits lie in memory as long as its graph."""

_MOST_BATCHES = 2
"""Batch sizes whose passes are retained, with buffers of their own for keys and values."""

_RETAINED = 1 / 16
"""Largest share of a device's memory that the keys and values of a batch take after a call. Beyond it they are freed,
since a training step may follow, and the next call captures its passes anew."""

NARROWER = 1
"""Tokens of a narrower pass, for passes without drafted tokens: used only where it is faster and has the same bits."""

FUSES: str | None = None
"""Parts of passes that are compiled before they are recorded: `"none"`, `"rows"` (norms, gated activations and rotary
embeddings, each once for all layers, compiled_ops.py), or `"whole"` (all of a pass, most of a minute for each bucket).
`None`: rows, in a thread (compiling.py), and only if that turns out to be faster."""

_FUSING_AFTER = 3.0
"""Seconds that replayed passes have taken in a process when compilation begins: about what that takes."""

_PAYS = 0.95
"""Highest time of a replayed pass relative to the model's own code, and of a narrower pass relative to a full one."""

_FIRST_TRIES = 3
"""Passes that are compared with the model's own before the first one counts; two have to agree."""

_AHEAD = 2048
"""Largest number of slots that an arena reserves beyond those in use."""

_HALF = 0.5
"""Share of the model's own time for the rest of a text that replaying is assumed to save."""


class GraphPasses:
    """Passes of one model, whole or as a draft of a single text, over the rows of an arena.

    Args:
        model: the target model.
        arena: arena with the keys and values of a single text, or of a batch.
        backend: backend that records and replays passes.
        skip_mode: mode that leaves out the sub-layers of a draft; `None`: the target model.
        widths: widths of the passes, in tokens of a row, ascending.
        fuses: parts to compile, as in `FUSES`.

    Attributes:
        table: the graphs.
        refusal: reason why nothing is replayed any more; `None` while it may be.
        is_checked: whether passes were found to give the model's own logits.
        keeps_bits: whether a token's bits were found not to depend on its place in a pass; `None`: not tried yet
            (tuning/exactness.py).
        seconds: times of a pass by its width, as far as they were measured.
        fuses: parts that are compiled, as in `FUSES`.
        copies: copies of weights that a draft computes from; `None`: it has none.
        rival: the same passes without compiled parts, while it is not known which are faster.
        narrower_saves: seconds that a narrower pass over one token saves, where such passes may be used; 0 where not.
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
        """Tell whether the model is still the recorded one; weights may have changed in place."""
        return self._fingerprint == fingerprint(model)

    @property
    def in_use(self) -> GraphPasses:
        """These passes, or those without compiled operations where these were given up."""
        return self if self.refusal is None or self.rival is None else self.rival

    @property
    def is_checked(self) -> bool:
        """Tell whether passes were found to give the model's own logits."""
        return sum(self._tries) >= _FIRST_TRIES - 1

    # ------------------------------------------------------------------------------------------------------------------

    def run(
        self,
        cache: Cache,
        tokens: Tokens | None,
        slot: int,
        position: int | RowPlaces,
        records: bool = False,
        expected: int = 0,
    ) -> Results | None:
        """Run a pass. The cache's layers do not count its tokens.

        Args:
            cache: cache of the texts.
            tokens: n tokens of each row. `None`: the one that the previous pass, a draft's, chose after its own.
            slot: slot of the first token: how many slots of the cache are in use.
            position: position of the first token; of a batch, the places of its rows.
            records: whether to record the pass where it has not been; otherwise it is not run then.
            expected: slots that the text is expected to fill, for an arena that is made now.

        Returns:
            Logits `(1, n, V)` and the tokens with the largest, `(n,)`, of a batch `(B, n, V)` and `(B, n)`, valid until
            the next pass; `None` where it is not replayed, and nothing has happened that counts.
        """
        count = 1 if tokens is None else len(tokens)
        width = self.width_of(count)
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
            # Whatever a driver reports, or a model's code does, that is not known here: its own passes continue.
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self._runs += 1
        return logits[:, :count], choices[..., :count]

    def width_of(self, count: int) -> int | None:
        """Return the width that a pass over `count` tokens of a row is filled up to; `None` where it is too wide."""
        return next((width for width in self.widths if width >= count), None)

    def _is_narrower_here(self, bucket: int, tokens: Tokens, slot: int, position: int | RowPlaces) -> bool:
        """Tell whether a narrower pass may run instead: where it was wanted as often as pays, and has the same bits."""
        known = self._narrower.get(bucket)
        if known is None and self.narrower_saves:
            self._might_have_saved[bucket] += 1
            if self._might_have_saved[bucket] * self.narrower_saves >= self.table.recording_seconds:
                known = self._narrower[bucket] = self._has_same_bits(bucket, tokens, slot, position)
        return bool(known)

    def _has_same_bits(self, bucket: int, tokens: Tokens, slot: int, position: int | RowPlaces) -> bool:
        """Tell whether a narrower pass gives the logits of the usual one, to the bit."""
        count, width = len(tokens), self.widths[-1]
        usual = self.table.run(width, bucket, tokens, slot, position)[0][:, :count].clone()
        # The device's own copy of the tokens: the host has not waited in between.
        given = Tokens((), self.table.inputs[width].ids[:, :count].clone())
        return torch.equal(usual, self.table.run(NARROWER, bucket, given, slot, position)[0][:, :count])

    def consider_narrower(self, cache: Cache, tokens: Tokens, slot: int) -> bool:
        """Tell whether a narrower pass over one token is faster than the usual one.

        Args:
            cache: cache of a single text, with `slot` slots in use.
            tokens: one token, on the device.
            slot: slot of the token.
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
        """Allow or forbid narrower passes over one token, which `consider_narrower` found to be faster.

        Args:
            uses: whether to use them, once they have been seen to have the same bits in a bucket.
            buckets: buckets in which they are used without that check.
        """
        self.narrower_saves = self.seconds[self.widths[-1]] - self.seconds[NARROWER] if uses else 0.0
        self._narrower = dict.fromkeys(buckets, True)
        self._might_have_saved.clear()
        if not uses:
            self.table.drop_other_widths(self.widths)

    def chain(self, cache: Cache, first: int, slot: int, position: int, length: int) -> torch.Tensor | None:
        """Draft a greedy chain of tokens: nothing but replays, and no wait.

        Args:
            cache: cache of a single text, for whose last pass the host has waited.
            first: the token that they follow.
            slot, position: slot and position of that token.
            length: length of the chain, at most 64.

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

    def compute_alongside(self) -> None:
        """Run a pass of each width in separate buffers, so that its parts are compiled: in another thread."""
        self.table.compute_alongside((self.widths[-1], NARROWER))

    def fused(self, model: PreTrainedModel) -> GraphPasses | None:
        """Return the same passes, to be compiled; `None` while that does not pay, or where it is not wanted.

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
            logger.warning("Passes of %s are no longer replayed as CUDA graphs: %s", self._model_name, reason)
        else:
            logger.info("Compiled passes of %s are not used: %s", self._model_name, reason)

    def forget(self) -> None:
        """Free all graphs."""
        self.table.forget()
        self._narrower.clear()

    def end(self, cache: Cache, keeps: bool) -> None:
        """End a call, and free the arena where it may not be retained; arguments as in `Arena.take_back`."""
        self.arena.take_back(cache, keeps)
        is_large = self.arena.rows > 1 and self.arena.bytes > _RETAINED * self.backend.memory
        if is_large:
            self.forget()
        if is_large or self.refusal is not None:
            self.arena.free()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Tell whether passes by the model's own code have been timed."""
        return self._eager_tokens > 0

    def is_worth_it(self, most_tokens: int) -> bool:
        """Tell whether recording pays, by the tokens that may still come or those that were decoded without it.

        Args:
            most_tokens: most tokens that may still follow in the text.
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
        """Count a pass by the model's own code, and the time that it took."""
        self._eager_seconds += seconds
        self._eager_tokens += 1

    def try_alongside(
        self, cache: Cache, ids: torch.Tensor, position: int | RowPlaces, logits: torch.Tensor, most_tokens: int
    ) -> None:
        """Record a pass that the model's own code has just run, and check that it gives the same logits.

        Args:
            cache: cache whose last tokens are those of the pass.
            ids (`torch.LongTensor` of shape `(B, n)`): these tokens.
            position: position of the first one; of a batch, the places of its rows.
            logits (`torch.FloatTensor` of shape `(B, ≥ n, V)`): the model's own logits.
            most_tokens: most tokens that may still follow in the text.
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
            return  # a cache layer that holds nothing
        # While it is not known to be right, nothing that it writes stays.
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
            self._give_up("they give different logits from the model's")
        elif self.is_checked and self.backend.seconds:
            self._see_that_it_pays(ids, slot, position)

    def _see_that_it_pays(self, ids: torch.Tensor, slot: int, position: int | RowPlaces) -> None:
        """Give up where a pass takes as long as by the model's own code (a large model on a slow device)."""
        own = self._eager_seconds / self._eager_tokens
        width = self.width_of(ids.shape[1])
        assert width is not None
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

    def _measured(self, bucket: int, ids: torch.Tensor, slot: int, position: int | RowPlaces) -> float:
        """Return the seconds of a pass, measured now where it is recorded, else as measured elsewhere."""
        width = self.width_of(ids.shape[1])
        assert width is not None
        if (width, bucket) in self.table.graphs and not self.table.is_stale:
            self.seconds[width] = self.table.seconds_of(width, bucket, Tokens((), ids), slot, position)
        return self.seconds[width]


# ----------------------------------------------------------------------------------------------------------------------


class GraphPart(Part):
    """Part of a model's state: its passes as CUDA graphs.

    Attributes:
        passes: passes by skip set and precision, `None` for the target model.
        backend: backend that records and replays them.
        arena: the keys and values that they read and write.
        fusing: compilation of passes.
        batches: passes of the target model over several rows, by their number, each with an arena of its own.
    """

    def __init__(self) -> None:
        self.passes: dict[Hashable, GraphPasses] = {}
        self.backend: GraphBackend | None = None
        self.arena: Arena | None = None
        self.fusing: Fusing[GraphPasses] | None = None
        self.batches: dict[int, GraphPasses] = {}

    def drop(self) -> None:
        self.passes, self.backend, self.arena, self.fusing, self.batches = {}, None, None, None, {}

    def backend_on(self, device: torch.device) -> GraphBackend:
        """Return the backend on the model's device; with another than before, all that was recorded is dropped."""
        if self.backend is None or self.backend.device != device:
            self.drop()
            self.backend = graph_backend_on(device)
        assert self.backend is not None
        return self.backend

    def drop_copies(self) -> None:
        self.passes = {kind: passes for kind, passes in self.passes.items() if passes.copies is None}


def target_graphs(model: PreTrainedModel, rows: int = 1) -> GraphPasses | None:
    """Return the target model's passes, captured anew when it has changed; `None` where they may not be replayed.

    Args:
        model: the target model.
        rows: number of rows, B.
    """
    if rows > 1:
        return _of_batch(model, rows)
    return _known(model, None, lambda arena, backend: GraphPasses(model, arena, backend, widths=WIDTHS))


def draft_graphs(
    model: PreTrainedModel, kind: Hashable, skip_mode: SkipMode, copies: object = None
) -> GraphPasses | None:
    """Return a draft's passes over one token, or `None`, as in `target_graphs`.

    Args:
        model: the target model.
        kind: key that distinguishes the draft from others.
        skip_mode: skip mode of the draft.
        copies: copies of weights that it computes from.
    """

    def make(arena: Arena, backend: GraphBackend) -> GraphPasses:
        made = GraphPasses(model, arena, backend, skip_mode, widths=(1,))
        made.copies = copies
        return made

    return _known(model, kind, make, copies)


def _fused_or_not(model: PreTrainedModel, passes: GraphPasses) -> GraphPasses:
    """Return the passes to continue with: those compiled in the meantime, while they are not known to be slower."""
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
        backend = state.backend_on(model.get_input_embeddings().weight.device)
        if state.arena is None:
            state.arena = Arena()
        if kind is None:
            state.fusing = None
        passes = state.passes[kind] = make(state.arena, backend)
    return passes


def _of_batch(model: PreTrainedModel, rows: int) -> GraphPasses | None:
    widths = [width for width in _WIDTHS_OF_BATCH if rows * width <= _MOST_TOKENS]
    if not widths or why_no_graphs(model) is not None:
        return None
    state = state_of(model).get(GraphPart)
    backend = state.backend_on(model.get_input_embeddings().weight.device)
    if rows in state.batches and not state.batches[rows].is_current(model):
        del state.batches[rows]
    return recent(state.batches, rows, lambda: GraphPasses(model, Arena(rows), backend, widths=widths), _MOST_BATCHES)


def why_no_graphs(model: PreTrainedModel) -> str | None:
    """Return why passes of this model are not replayed at fixed addresses (graphs.py); `None` where they may be."""
    device = model.get_input_embeddings().weight.device
    if device.type not in KINDS:
        return f"nothing is replayed on {device.type}"
    if is_chunked(model):
        return "its attention is chunked"
    return why_not_on(model, device, "it is spread over several devices")
