"""Sampling from the logits of a replayed pass, captured as a CUDA graph as well (cuda_graph/graphs.py).

Logits processors, softmax and the race against noise (choice.py) are some dozens of small operations, and launching
them costs a GPU's host a part of the time of the pass. Where they are functions of tensors alone, they are captured
once for each setting and number of rows. The noise of step t is drawn into a row of a buffer and read from there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from ..forward.cuda_graph.graph_passes import GraphPart
from ..forward.cuda_graph.graphs import GraphBackend
from ..support.forks import ForkSafeRLock
from ..support.model_state import Part, state_of
from ..support.recent import recent
from .choice import SampledChoice, winners
from .processors import PureProcessors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ChoiceGraph", "ChoicePart", "choice_graph"]

logger = logging.getLogger(__name__)

_ROWS = (1, 2, 4, 8, 16)
"""Numbers of places that are captured; fewer places run in the next larger one, the rest of its rows being unused."""

_STEPS = 64
"""Number of steps whose noise the buffer holds."""

_MOST = 8
"""Largest number of processor settings whose captures are retained."""


class ChoiceGraph:
    """Captured sampling of tokens from logits, for one call at a time.

    Args:
        backend: backend that captures and replays.
        vocabulary: size of the model's vocabulary, V.
        dtype: type of the logits.
    """

    def __init__(self, backend: GraphBackend, vocabulary: int, dtype: torch.dtype) -> None:
        device = backend.device
        self.backend, self.vocabulary, self.dtype = backend, vocabulary, dtype
        with torch.inference_mode(False):  # buffers that can be written in any mode
            self._logits = torch.zeros((1, _ROWS[-1], vocabulary), dtype=dtype, device=device)
            self.noise = torch.ones((_STEPS, vocabulary), device=device)
            self._first = torch.zeros((1,), dtype=torch.long, device=device)
        self._recorded: dict[Hashable, dict[int, Callable[[], tuple[torch.Tensor, ...]]]] = {}
        self._borrower: weakref.ref[SampledChoice] | None = None
        self._guard = ForkSafeRLock()
        self.refusal: str | None = None

    def lend(self, choice: SampledChoice) -> bool:
        """Lend the noise buffer to a call; return `False` while another call has it, or where it cannot be used."""
        with self._guard:
            borrower = None if self._borrower is None else self._borrower()
            if self.refusal is not None or (borrower is not None and borrower.ring is self.noise):
                return False
            self._borrower = weakref.ref(choice)
            return choice.draw_into(self.noise)

    def choose(
        self, processors: PureProcessors, logits: torch.Tensor, choice: SampledChoice, step: int
    ) -> torch.Tensor | None:
        """Return the tokens that plain sampling takes at some places of a single text.

        Args:
            processors: processors of the call.
            logits (`torch.FloatTensor` of shape `(1, n, V)`): logits of the model.
            choice: choice that the buffer was lent to.
            step: step of the first place.

        Returns:
            `torch.LongTensor` of shape `(n,)`, valid until the next use, `IMPOSSIBLE` where nothing can be drawn;
            `None` where sampling cannot be captured.
        """
        count = logits.shape[1]
        rows = next((rows for rows in _ROWS if rows >= count), None)
        if rows is None or self.refusal is not None or not choice.draw_up_to(step + count, self.vocabulary):
            return None
        self._logits[:, :count].copy_(logits)
        self._first.fill_(step % _STEPS)
        known = recent(self._recorded, processors.setting, dict, _MOST)
        try:
            if rows not in known:
                known[rows] = self._record(processors, rows)
            return known[rows]()[0][:count]
        except Exception as error:  # any error of a driver or a processor
            self.refusal = f"{type(error).__name__}: {error}"
            self._recorded.clear()
            logger.warning("Sampling is no longer replayed as a CUDA graph: %s", self.refusal)
            return None

    def _record(self, processors: PureProcessors, rows: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        device = self.backend.device
        with torch.inference_mode(False):
            no_text = torch.zeros((rows, 1), dtype=torch.long, device=device)
            places = torch.arange(rows, device=device)
        logits, noise, first = self._logits, self.noise, self._first  # not `self`, which owns the captures

        def compute() -> tuple[torch.Tensor, ...]:
            with torch.inference_mode():
                scores = processors.once(no_text, logits[0, :rows].float())
                race = scores.softmax(dim=-1)
                race /= noise.index_select(0, (places + first) % _STEPS)
                return (winners(race),)

        return self.backend.record(compute)


class ChoicePart(Part):
    """State of a model: captured sampling from its logits."""

    def __init__(self) -> None:
        self.choice_graph: ChoiceGraph | None = None

    def drop(self) -> None:
        self.choice_graph = None


def choice_graph(
    model: PreTrainedModel, processors: PureProcessors, choice: SampledChoice, logits: torch.Tensor
) -> ChoiceGraph | None:
    """Return the captured sampling for a call; `None` where its processors need more than logits or it is in use.

    Args:
        model: model whose passes are replayed.
        processors, choice: those of the call, which has a single text.
        logits (`torch.FloatTensor` of shape `(1, n, V)`): an example of the logits to come.
    """
    backend, state = state_of(model).get(GraphPart).backend, state_of(model).get(ChoicePart)
    if processors.setting is None or backend is None:
        return None
    known = state.choice_graph
    kind = backend, logits.shape[-1], logits.dtype
    if known is None or (known.backend, known.vocabulary, known.dtype) != kind:
        try:
            known = state.choice_graph = ChoiceGraph(*kind)
        except torch.OutOfMemoryError:
            return None
    return known if known.lend(choice) else None
