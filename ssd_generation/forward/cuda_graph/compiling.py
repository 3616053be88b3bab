"""The small operations of a model's passes are compiled (compiled_ops.py) in a thread, while decoding goes on without.

Compiling takes seconds for each model (torch keeps the code on the disk, where the next process finds most of it), so
it begins once a process has decoded for as long. What comes of it takes the place of the passes in use at the beginning
of a later call, and stays if it is faster.
"""

from __future__ import annotations

import logging
import threading
from typing import Generic, Protocol, TypeVar

import torch

from .graphs import GraphBackend, graph_backend_on

__all__ = ["Fusing"]

logger = logging.getLogger(__name__)


class _Compiled(Protocol):
    backend: GraphBackend

    def compute_beside(self) -> None:
        """Run all that is to be compiled, in memory of its own."""


T = TypeVar("T", bound=_Compiled)


class Fusing(Generic[T]):
    """Compiles passes in a thread of its own, which a process waits for at its end.

    Args:
        passes: those to be compiled, of which nothing has been recorded yet.

    Attributes:
        refusal: why they could not be compiled; `None` while that is not known.
    """

    def __init__(self, passes: T) -> None:
        self.passes = passes
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="compiles passes")
        self._thread.start()

    def _run(self) -> None:
        try:
            device = self.passes.backend.device
            backend = graph_backend_on(device)  # with no memory in common with those that decode
            assert backend is not None
            with torch.no_grad():
                backend.beside(self.passes.compute_beside)
        except Exception as error:  # of a compiler, a driver, or a model that changed meanwhile
            self.refusal = f"{type(error).__name__}: {error}"
            logger.info("Small operations are not compiled: %s", self.refusal, exc_info=True)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._thread.is_alive()
