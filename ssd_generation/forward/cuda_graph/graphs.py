"""Functions of tensors that are run again with the addresses they were recorded at.

A pass of a model on a GPU takes as long as the host needs to launch its kernels. Recorded as a CUDA graph it is one
launch. A graph knows addresses and shapes, no values: what it reads is copied to where it reads it, before it runs.
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
"""What a recorded function gives: the same tensors each time, whose values hold until the next run."""


class GraphBackend(Protocol):
    """A way to run functions again.

    Attributes:
        device: where the functions compute.
        seconds: about what it takes to record a pass, until it is known: no text is so short that it would be longer
            for it.
        compiles: whether compiling small operations pays there.
    """

    device: torch.device
    seconds: float
    compiles: bool

    def beside(self, function: Callable[[], object]) -> None:
        """Run a function as another thread may while passes run, and wait for it."""

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Record a function without arguments, which may run some times while that is done.

        Returns:
            A function that does the same again, on the tensors that `function` read and wrote then. It keeps
            `function`, and with it the tensors that only that refers to.

        Raises:
            RuntimeError: it cannot be recorded (torch's own error), or memory is short.
        """

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Seconds of a run, on the device's own clock."""


@cache
def _stream_of(device: int) -> Any:
    """Where passes are recorded: the same for all models, since cuBLAS keeps 32 MB to work in for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass
class _Recorded:
    """A graph, with what it reads and gives: both must live as long as it may be replayed."""

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
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: object = None

    def beside(self, function: Callable[[], object]) -> None:
        """See `GraphBackend`."""
        with torch.cuda.device(self.device):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                function()
            stream.synchronize()

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """See `GraphBackend`."""
        with torch.cuda.device(self.device):
            stream = _stream_of(torch.cuda.current_device())
            if not self._graphs:  # a pool is gone with the last of its graphs
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries set themselves up at first use, which no graph may hold
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
            with torch.cuda.graph(graph, **options):  # other threads may go on using the device meanwhile
                results = function()
        except BaseException:
            # It may still take itself for captured, and would then draw nothing any more, for nobody in the process.
            generator.graphsafe_set_state(state)
            raise
        self._graphs.add(graph)
        return _Recorded(graph, function, results)

    def seconds_of(self, run: Callable[[], object]) -> float:
        """See `GraphBackend`."""
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


KINDS: dict[str, Callable[[torch.device], GraphBackend]] = {} if torch.version.hip else {"cuda": CudaGraphs}
"""By type of device. Elsewhere, on ROCm, MPS and CPUs, nothing is replayed."""


def graph_backend_on(device: torch.device) -> GraphBackend | None:
    """A way to run functions again on a device; `None` where there is none."""
    kind = KINDS.get(device.type)
    return None if kind is None else kind(device)
