"""CUDA graphs of a model's passes, one for each width and each bucket of slots: their recording and replay.

graph_passes.py decides which of them a text needs, and whether they may be used at all.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...cache.arena import BUCKETS, Arena
from ..captured.any_length import PassCapture, Rewrites
from ..captured.conditions import windows_of
from ..captured.fx_graph import CapturedPass, Program, compile_pass
from ..captured.rewrites import share_results, use_rows
from ..structure.skip_mode import SkipMode
from .compiled_ops import fused_rows
from .fixed_attention import FixedAttention
from .graphs import GraphBackend, Results
from .single_pass import BatchInputs, ChainInputs, Inputs, RowPlaces, Tokens, compute_pass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GraphTable"]

_REPEATS = 3
"""Runs of a pass that is timed; the fastest counts."""


class GraphTable:
    """CUDA graphs by width and bucket, recorded when they are first run.

    Args:
        model: the target model.
        arena: arena with the keys and values of the text, or of the rows of a batch.
        backend: backend that records and replays passes.
        skip_mode: mode that leaves out the sub-layers of a draft; `None`: the target model.
        fuses: parts of passes to compile, as in `graph_passes.FUSES`.

    Attributes:
        graphs: graphs by width and bucket.
        inputs: inputs of the passes, by width.
        recording_seconds: time of the last recording of a graph; before that, the backend's estimate.
    """

    def __init__(
        self, model: PreTrainedModel, arena: Arena, backend: GraphBackend, skip_mode: SkipMode | None, fuses: str | None
    ) -> None:
        self.graphs: dict[tuple[int, int], Callable[[], Results]] = {}
        self.inputs: dict[int, Any] = {}  # `Inputs`, or `BatchInputs` of a batch
        self.recording_seconds = backend.seconds
        self._model = weakref.ref(model)
        self._arena, self._backend, self._fuses = arena, backend, fuses
        self._windows = windows_of(model)
        self._capture = PassCapture(skip_mode, knows_windows=True)
        self._is_draft = skip_mode is not None
        self._programs: dict[int, Program] = {}
        self._version = arena.version

    @property
    def is_stale(self) -> bool:
        """Tell whether the arena's addresses are no longer those that were recorded."""
        return self._version != self._arena.version

    def forget(self) -> None:
        """Free all graphs and inputs."""
        self._version = self._arena.version
        self.graphs.clear()
        self.inputs.clear()

    def drop_other_widths(self, widths: Collection[int]) -> None:
        """Free the graphs of all widths but these."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] in widths}

    def run(self, width: int, bucket: int, tokens: Tokens | None, slot: int, position: int | RowPlaces) -> Results:
        """Replay a pass, and record it first where it has not been.

        Args:
            width: width of the pass, in tokens of a row.
            bucket: slots that it reads.
            tokens: at most `width` tokens; `None`: those that the previous pass left.
            slot: slot of the first token.
            position: position of the first token; of a batch, the places of its rows.

        Returns:
            As in `compute_pass`.
        """
        inputs: Any = self.inputs.get(width)
        if inputs is None:
            inputs = self.inputs[width] = self._new_inputs(width)
        if tokens is not None:
            inputs.set(tokens, slot, position)
        graph = self.graphs.get((width, bucket))
        if graph is None:
            given = inputs.all.clone()
            graph = self._record(width, bucket, inputs)
            inputs.all.copy_(given)
        return graph()

    def seconds_of(self, width: int, bucket: int, tokens: Tokens, slot: int, position: int | RowPlaces) -> float:
        """Time a pass; arguments as in `run`."""
        run = partial(self.run, width, bucket, tokens, slot, position)
        return min(self._backend.seconds_of(run) for _ in range(_REPEATS))

    def compute_alongside(self, widths: Collection[int]) -> None:
        """Run passes in separate buffers, so that their parts are compiled: in another thread.

        Args:
            widths: widths of the passes.
        """
        model = self._model()
        if model is None:
            return
        device = self._backend.device
        arena = self._arena.alike(BUCKETS[0])
        for width in widths:
            program = self._programs[width] = self._program(model, width)
            with torch.inference_mode(False):
                inputs = Inputs(width, device)
            inputs.set(Tokens((), torch.zeros((1, 1), dtype=torch.long, device=device)), 0, 0)
            attention = FixedAttention(arena, BUCKETS[0], inputs.slots, self._windows)
            with torch.inference_mode():
                attention.begin()
                program.run(inputs.ids, inputs.positions, attention)

    def _new_inputs(self, width: int) -> Inputs | BatchInputs:
        device = self._arena.keys[0].device
        with torch.inference_mode(False):  # written in any mode
            if self._arena.rows > 1:
                return BatchInputs(self._arena.rows, width, device)
            return ChainInputs(device, self._arena.capacity) if self._is_draft else Inputs(width, device)

    def _record(self, width: int, bucket: int, inputs: Inputs | BatchInputs) -> Callable[[], Results]:
        began = time.perf_counter()
        model = self._model()
        assert model is not None
        if width not in self._programs:
            self._programs[width] = self._program(model, width)
        attention = FixedAttention(self._arena, bucket, inputs.slots, self._windows, inputs.starts)
        compute = partial(compute_pass, self._programs[width], attention, inputs)
        made = self.graphs[width, bucket] = self._backend.record(compute)
        if self._backend.seconds:
            self.recording_seconds = time.perf_counter() - began
        return made

    def _program(self, model: PreTrainedModel, width: int) -> Program:
        program = compile_pass(
            self._capture.at(model, self._arena.rows * width, _FUSED if self._fuses == "rows" else _SHARED)
        )
        if self._fuses == "whole":
            return replace(program, run=torch.compile(program.run, dynamic=False, fullgraph=True))
        return program


def _fuse(captured: CapturedPass) -> None:
    use_rows(captured, fused_rows())


_SHARED = Rewrites((share_results,))
_FUSED = Rewrites((share_results, _fuse))
