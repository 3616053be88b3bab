"""Compilation of the small operations of a model's passes (compiled_ops.py) in a thread, while decoding continues.

Compiling takes seconds for each model (torch stores the code on disk, where the next process finds most of it), so it
begins once a process has decoded for as long. The result replaces the passes in use at the beginning of a later call,
and stays if it is faster.
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

    def compute_alongside(self) -> None:
        """Run all that is to be compiled, in separate memory."""


T = TypeVar("T", bound=_Compiled)


class Fusing(Generic[T]):
    """Compilation of passes in a separate thread, for which a process waits at its end.

    Args:
        passes: the passes to be compiled, of which nothing has been recorded yet.

    Attributes:
        refusal: reason why they could not be compiled; `None` while that is not known.
    """

    def __init__(self, passes: T) -> None:
        self.passes = passes
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="compiles passes")
        self._thread.start()

    def _run(self) -> None:
        try:
            device = self.passes.backend.device
            backend = graph_backend_on(device)  # shares no memory with that of decoding
            assert backend is not None
            with torch.no_grad():
                backend.run_alongside(self.passes.compute_alongside)
        except Exception as error:  # of a compiler, a driver, or a model that changed meanwhile
            self.refusal = f"{type(error).__name__}: {error}"
            logger.info("Small operations are not compiled: %s", self.refusal, exc_info=True)

    @property
    def is_done(self) -> bool:
        """Tell whether compilation has finished."""
        return not self._thread.is_alive()
