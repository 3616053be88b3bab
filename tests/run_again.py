"""A way to run functions again where there are no CUDA graphs: on any processor, with the results that graphs have."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ssd_generation.forward.cuda_graph.graphs import Results


class Again:
    """The function itself, on the same tensors and into the same results: what a graph does, where there are none."""

    seconds = 0.0
    compiles = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def beside(self, function: Callable[[], object]) -> None:
        """See `GraphBackend`."""
        function()

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """See `GraphBackend`."""
        with torch.inference_mode(False):  # written in any mode
            results = tuple(torch.zeros(r.shape, dtype=r.dtype, device=r.device) for r in function())

        def replay() -> Results:
            for place, result in zip(results, function(), strict=True):
                place.copy_(result)
            return results

        return replay

    def seconds_of(self, run: Callable[[], object]) -> float:
        """See `GraphBackend`."""
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
