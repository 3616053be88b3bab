"""Backend that runs functions again where there are no CUDA graphs: on any device, with the results of graphs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ssd_generation.forward.cuda_graph.graphs import Results


class Again:
    """Backend whose replay calls the function itself, on the same tensors and into the same results, as a graph."""

    seconds = 0.0
    compiles = False
    memory = 2**34

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run_alongside(self, function: Callable[[], object]) -> None:
        """Run a function alongside passes, as in `GraphBackend`."""
        function()

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Record a function, as in `GraphBackend`."""
        with torch.inference_mode(False):  # results are written in any mode
            results = tuple(torch.zeros(r.shape, dtype=r.dtype, device=r.device) for r in function())

        def replay() -> Results:
            for place, result in zip(results, function(), strict=True):
                place.copy_(result)
            return results

        return replay

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Time a run, as in `GraphBackend`."""
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
