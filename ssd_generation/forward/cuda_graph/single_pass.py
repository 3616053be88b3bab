"""One pass that is replayed at fixed addresses (graphs.py): its inputs, and the computation that is recorded.

Inputs that differ from run to run are copied to the addresses that the pass reads. A draft's pass over one token leaves
them as the next one needs them, so that a chain of these is replays and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...support.devices import is_asynchronous, sent
from ..captured.fx_graph import Program
from .fixed_attention import FixedAttention
from .graphs import Results

__all__ = ["LONGEST_CHAIN", "BatchInputs", "ChainInputs", "Inputs", "RowPlaces", "Tokens", "compute_pass"]

LONGEST_CHAIN = 64
"""Most tokens in a draft's chain, which needs no help from the host."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pass over a single text, or over B rows.

    Attributes:
        known: first tokens of a single text, which the host knows. If there are any, it must have waited for the pass
            before.
        others (`torch.LongTensor` of shape `(B, n)`): following tokens, on the device; `None`: none.
    """

    known: Sequence[int]
    others: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of all tokens of a row."""
        return len(self.known) + (0 if self.others is None else self.others.shape[1])


class RowPlaces(NamedTuple):
    """Places of the rows of a batch, in the cache and in their texts.

    Attributes:
        positions (`torch.LongTensor` of shape `(B, 1)`): positions of the first tokens.
        lags: slots by which each row ends before the longest; `None`: none does.
        mask (`torch.LongTensor` of shape `(B, ≥ slots)`): mask over the slots, 0 at the left of a row that is padded;
            `None` where nothing is masked.
    """

    positions: torch.Tensor
    lags: Sequence[int] | None
    mask: torch.Tensor | None


class Inputs:
    """Inputs of passes of one width: `ids (1, w)`, `positions (1, w)`, `slots (w,)`."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.all = torch.zeros((4, width), dtype=torch.long, device=device)
        self.ids, self.positions, self.slots = self.all[:1], self.all[1:2], self.all[2]
        self._host = torch.zeros((4, width), dtype=torch.long, pin_memory=is_asynchronous(device), device="cpu")
        self._numbers = self._host.numpy()
        self._steps = torch.arange(width, device=device)
        self.starts: torch.Tensor | None = None

    def set(self, tokens: Tokens, slot: int, position: int) -> None:
        """Set the inputs of a pass over these tokens from a slot and a position on.

        What the host knows takes one copy, which must have finished before the next.

        Args:
            tokens: at most w tokens.
            slot: slot of the first token.
            position: position of the first token; tokens that fill the pass up have that of the last one.
        """
        count, first = len(tokens), len(tokens.known)
        if first:
            numbers = self._numbers
            numbers[0, :first] = tokens.known
            for place in range(self.width):
                numbers[1, place] = position + min(place, count - 1)
                numbers[2, place] = slot + place
            self.all.copy_(self._host, non_blocking=True)
        else:
            torch.add(self._steps, slot, out=self.slots)
            torch.clamp(self._steps, max=count - 1, out=self.positions[0]).add_(position)
        if tokens.others is not None:
            self.ids[:, first:count].copy_(tokens.others)


class BatchInputs:
    """Inputs of passes over w tokens of each of B rows, which follow each other: n = B · w.

    Attributes:
        ids, positions (`torch.LongTensor` of shape `(1, n)`), slots (`(n,)`): as in `Inputs`.
        starts (`torch.LongTensor` of shape `(B,)`): the first slot of each row that is not padding.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width = rows, width
        self.all = torch.zeros((3 * width + 1) * rows, dtype=torch.long, device=device)
        parts = self.all[:-rows].view(3, -1)
        self.ids, self.positions, self.slots = parts[:1], parts[1:2], parts[2]
        self.starts = self.all[-rows:]
        self._steps = torch.arange(width, device=device)

    def set(self, tokens: Tokens, slot: int, places: RowPlaces) -> None:
        """Set the inputs of a pass, on the device.

        Args:
            tokens: at most w tokens of each row.
            slot: slot of the first token of the rows that do not lag.
            places: places of the rows. Tokens that fill the pass up have the position of the last one.
        """
        assert tokens.others is not None
        count = len(tokens)
        self.ids.view(self.rows, -1)[:, :count].copy_(tokens.others)
        torch.add(places.positions, self._steps.clamp(max=count - 1), out=self.positions.view(self.rows, -1))
        slots = self.slots.view(self.rows, -1)
        slots.copy_((self._steps + slot).expand_as(slots))
        if places.lags is not None:
            slots.sub_(sent(places.lags, slots.device)[:, None])
        if places.mask is None:
            self.starts.zero_()
        else:
            self.starts.copy_(places.mask.argmax(dim=1))


class ChainInputs(Inputs):
    """Inputs of a draft's passes over one token, each of which leaves them as the next one needs them.

    Attributes:
        chain (`torch.LongTensor` of shape `(1, LONGEST_CHAIN)`): the tokens that they chose, one after the other.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        super().__init__(1, device)
        self._at = self.all[3]  # 0 where a chain begins: the host never writes another number
        self._last = capacity - 1
        self.chain = torch.zeros((1, LONGEST_CHAIN), dtype=torch.long, device=device)

    def go_on(self, choices: torch.Tensor) -> None:
        """Make a chosen token, `(1,)`, the next input; part of what is recorded."""
        self.chain.index_copy_(1, self._at, choices[None])
        self.ids.copy_(choices[None])
        self.positions.add_(1)
        # During recording, a pass may be run more often than there is room for.
        self.slots.add_(1).clamp_(max=self._last)
        self._at.add_(1).clamp_(max=LONGEST_CHAIN - 1)


def compute_pass(program: Program, attention: FixedAttention, inputs: Inputs | BatchInputs) -> Results:
    """Compute a pass of one width, w, over one bucket; this is what is recorded.

    Args:
        program: the model's pass.
        attention: attention over the bucket.
        inputs: inputs of the pass.

    Returns:
        Logits `(1, w, V)` and the tokens with the largest logits, `(w,)`; of a batch `(B, w, V)` and `(B, w)`.
    """
    with torch.inference_mode():
        attention.begin()
        logits = program.run(inputs.ids, inputs.positions, attention)
        if isinstance(inputs, BatchInputs):
            logits = logits.view(inputs.rows, inputs.width, -1)
            return logits, logits.argmax(dim=-1)
        choices = logits[0].argmax(dim=-1)
        if isinstance(inputs, ChainInputs):
            inputs.go_on(choices)
        return logits, choices
