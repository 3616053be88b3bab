"""Functions of tensors that are recorded once and replayed at the same addresses.

A pass of a model on a GPU takes as long as the host needs to launch its kernels. Recorded as a CUDA graph it is one
launch. A graph knows addresses and shapes, no values: its inputs are copied to these addresses before it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

__all__ = ["CudaGraphs", "GraphBackend", "Results", "graph_backend_on"]

Results = tuple[torch.Tensor, ...]
"""Results of a recorded function: the same tensors each time, whose values are valid until the next run."""


class GraphBackend(Protocol):
    """Backend that records and replays functions.

    Attributes:
        device: device on which the functions compute.
        seconds: estimated time to record a pass, until it is known; so long that recording makes no short text slower.
        compiles: whether compiling small operations pays there.
        memory: bytes of memory that the device has.
    """

    device: torch.device
    seconds: float
    compiles: bool
    memory: int

    def run_alongside(self, function: Callable[[], object]) -> None:
        """Run a function as another thread may while passes run, and wait for it."""

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Record a function without arguments, which may run several times meanwhile.

        Returns:
            A function that does the same again, on the tensors that `function` read and wrote then. It retains
            `function`, and with it the tensors to which only that refers.

        Raises:
            RuntimeError: it cannot be recorded (torch's own error), or memory is short.
        """

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the seconds of a run, by the device's own clock."""


@cache
def _stream_of(device: int) -> Any:
    """Return the stream on which passes are recorded: one for all models, since cuBLAS needs 32 MB for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass
class _Recorded:
    """A graph, with its inputs and results: both must live as long as it may be replayed."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], Results]
    results: Results

    def __call__(self) -> Results:
        self.graph.replay()
        return self.results


class CudaGraphs:
    """CUDA graphs, all with one pool of memory: they never run at the same time.

    Args:
        device: a CUDA device.
    """

    seconds = 1.0
    compiles = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = int(torch.cuda.mem_get_info(device)[1])
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: object = None

    def run_alongside(self, function: Callable[[], object]) -> None:
        """Run a function alongside passes, as in `GraphBackend`."""
        with torch.cuda.device(self.device):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                function()
            stream.synchronize()

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Record a function, as in `GraphBackend`."""
        with torch.cuda.device(self.device):
            stream = _stream_of(torch.cuda.current_device())
            if not self._graphs:  # a pool is gone with the last of its graphs
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries initialise at first use, which no graph may contain
                for _ in range(2):
                    function()
            current.wait_stream(stream)
            return self._captured(function, stream)

    def _captured(self, function: Callable[[], Results], stream: object) -> Callable[[], Results]:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        options: Any = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **options):  # other threads may continue to use the device meanwhile
                results = function()
        except BaseException:
            # The generator may still consider itself captured, and would then draw nothing for the whole process.
            generator.graphsafe_set_state(state)
            raise
        self._graphs.add(graph)
        return _Recorded(graph, function, results)

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Time a run, as in `GraphBackend`."""
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


KINDS: dict[str, Callable[[torch.device], GraphBackend]] = {} if torch.version.hip else {"cuda": CudaGraphs}
"""Backends by type of device. Elsewhere, on ROCm, MPS and CPUs, nothing is replayed."""


def graph_backend_on(device: torch.device) -> GraphBackend | None:
    """Return the backend for a device; `None` where there is none."""
    kind = KINDS.get(device.type)
    return None if kind is None else kind(device)
