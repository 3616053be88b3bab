"""All that the library knows about one model, in one place."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from .forks import ForkSafeRLock

__all__ = ["ModelState", "state_of"]


_MOST_WEIGHTS = 16
"""Sets of weights, as adapters are switched, of which what was learnt is kept."""


class ModelState:
    """What the library knows about one model, for as long as the model lives. Nothing of it is on the model itself.

    The packages that fill an entry are named beside it; none of them holds the model.

    Attributes:
        lock: held while the model's modules are patched (forward/skip_mode.py).
        structure: its modules, the kinds of its weights, and what follows from these (support/structure.py).
        layout: its attention and MLP sub-layers (forward/sublayers.py).
        state_layers: its layers of states, where these may have to be run token by token (forward/row_by_row.py).
        module_states: the states that its modules keep, or `None`, in a tuple once that is known
            (forward/module_states.py).
        few_rows: its linear layers, and what stands in for their `forward` in passes over few rows
            (forward/few_rows.py).
        low_bit_copies: copies of weights, by weights and precision (forward/low_bit.py).
        resident: the draft of a model with offloaded weights, which has all of its own in memory (forward/resident.py).
        low_bit_drafts: the copies that a draft computes from, by skip set and precision (forward/low_bit.py).
        unread: of classes of linear layers, why their weights cannot be had, or `None` (forward/low_bit.py).
        made_of: fingerprint of the modules and weights that captures were made of (forward/weights.py).
        captured_targets: captured passes of the whole model, by the kernel that keeps their bits the same
            (forward/passes.py).
        captured_drafts: captured passes of its drafts, by skip set (forward/passes.py).
        replayed: passes that are replayed at fixed addresses, by skip set, `None` for the whole model
            (forward/replayed.py).
        replays, arena: how they are run again, and the keys and values that they read and write (forward/replayed.py).
        fusing: what compiles them (forward/fusing.py).
        recorded_choice: sampling from their logits, as it is run again (decoding/recorded_choice.py).
        row_by_row: what is done for each token by itself in passes of the model's own code, as the check of the model
            found it to be needed, for a single text and for a batch (forward/row_by_row.py).
        capture_refusal: why no pass may be captured, as the check of the model found (forward/capturable.py).
        measurements: what was measured of it, by a fingerprint (support/measurements.py).
        has_noisy_measurements: whether some of that was measured while the machine was busy.
        exactness: how passes are run that are exact to the bit, by what was asked for (tuning/exactness.py).
        checks: what the check of the model found, by layout (tuning/model_check.py).
        judging_refusal: a reason why drafts cannot be judged on a text, or `None`, in a tuple; empty while not tried
            (tuning/acceptance.py).
        policies: draft-length policies with what they have learnt of the weights in use, by config (generation.py).
        refinements: drafts that better themselves, by config, of the weights in use as well (generation.py).
        warnings: warnings that were given once (generation.py).
    """

    def __init__(self) -> None:
        self.lock = ForkSafeRLock()
        self.measurements: dict[str, Any] = {}
        self.has_noisy_measurements = False
        self.exactness: dict[Any, Any] = {}
        self.checks: dict[Any, Any] = {}
        self.judging_refusal: tuple[str | None, ...] = ()
        self.capture_refusal: str | None = None
        self.row_by_row: dict[bool, str | None] = {}
        self.drop()

    def drop(self) -> None:
        """Free what takes memory, and forget what was learnt; what was measured and found out stays."""
        self.structure: Any = None
        self.layout: Any = None
        self.state_layers: Any = None
        self.module_states: Any = None
        self.made_of: Any = None
        self.drop_captures()
        self.replayed: dict[Any, Any] = {}
        self.drop_copies()
        self.replays: Any = None
        self.arena: Any = None
        self.fusing: Any = None
        self.recorded_choice: Any = None
        self.policies: dict[Any, Any] = {}
        self.refinements: dict[Any, Any] = {}
        self._learnt: dict[Any, tuple[dict[Any, Any], dict[Any, Any]]] = {}  # of other weights than those in use
        self._learnt_of: tuple[Any, ...] = ()  # the weights in use; empty before the first call
        self.warnings: set[str] = set()

    def learn_of(self, weights: Any) -> None:
        """Go on with what was learnt of these weights (with the adapters in use); of new ones nothing was.

        Args:
            weights: what tells them apart.
        """
        if self._learnt_of == (weights,):
            return
        found = self.policies, self.refinements
        if self._learnt_of:
            self._learnt[self._learnt_of[0]] = found
            found = self._learnt.pop(weights, ({}, {}))
            while len(self._learnt) >= _MOST_WEIGHTS:
                del self._learnt[next(iter(self._learnt))]
        self.policies, self.refinements = found
        self._learnt_of = (weights,)

    def drop_captures(self) -> None:
        """Forget captured passes and kernels, which hold the weights that they were made of."""
        self.captured_targets: dict[Any, Any] = {}
        self.captured_drafts: dict[Any, Any] = {}
        self.few_rows: dict[Any, Any] = {}
        self.low_bit_drafts: dict[Any, Any] = {}  # copies of layers that are still there are found again

    def drop_copies(self) -> None:
        """Free the low-bit copies."""
        self.low_bit_copies: dict[Any, Any] = {}
        self.low_bit_drafts = {}
        self.replayed = {kind: passes for kind, passes in self.replayed.items() if passes.copies is None}
        self.resident: Any = None
        self.unread: dict[Any, str | None] = {}


_STATES: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
_GUARD = ForkSafeRLock()


def state_of(model: nn.Module) -> ModelState:
    """What is known about a model; empty at first."""
    state = _STATES.get(model)
    if state is None:
        with _GUARD:
            state = _STATES.setdefault(model, ModelState())
    return state
