"""Low-bit copies of a model's own linear layers and experts, for drafting.

The target never computes with a copy, so the text is the target's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ...support.model_state import Part, state_of
from ...support.once import looked_at_once
from ...support.recent import recent
from ...support.tensors import place_of
from ..structure.linears import (
    CannotRead,
    identity,
    is_plain_linear,
    sample,
    tensors_of,
)
from .copied_layers import (
    AnyCopy,
    Place,
    check_precision,
    copied_modules,
    copy_of,
    key_of,
    keyed,
    places_of,
    values_of,
)
from .experts_copy import ExpertsCopy
from .layer_copy import LowBitCopy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...config import PrecisionConfig, SkipConfig

__all__ = [
    "MOST_DRIFT",
    "CopiesPart",
    "LowBitCopies",
    "copies_of",
    "copy_bytes",
    "drop_copies",
    "keep_only",
    "missing_copies",
    "rewrite_copies",
]

_MOST_DRAFTS = 8
"""Drafts with different skip sets or precisions that are retained; copies that they share are made once."""

MOST_DRIFT = 0.1
"""Share of their size by which weights may move while their copies still draft: beyond it, the copies are stale."""


class LowBitCopies:
    """The copies that one draft computes with.

    Attributes:
        by_module: `(copy, index of the layer in it)` by id of the linear layer.
        by_weight: the same by id of the weight, or of what replaces it in captured passes (`stand_ins`).
        experts: copies of experts, by id of their layer.
        modules: the layers, in the order of the model.
        others: further `(module, forward)` pairs that the draft computes with.
        left: requested sub-layers and layers that stay as they are, with the reason.
        passes: passes captured with these copies, by adapters (captured/passes.py); stored here, they are freed with
            the copies.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        skip: SkipConfig,
        precision: PrecisionConfig,
        make: Callable[[Sequence[str], Sequence[Any], str, int], AnyCopy] | None = None,
    ) -> None:
        """Make the copies for one draft.

        Args:
            model: the model whose layers are copied.
            skip: sub-layers that the draft leaves out.
            precision: precision of its layers.
            make: `(names, layers, precision, group size)` → the copy of these layers; by default of their weights.

        Raises:
            ValueError: see `check_precision`.
        """
        check_precision(model, precision)
        on_cpu = next(model.parameters()).device.type in ("cpu", "meta")
        self.others: list[tuple[nn.Module, Any]] = []
        self.by_module: dict[int, tuple[LowBitCopy, int]] = {}
        self.by_weight: dict[int, tuple[LowBitCopy, int]] = {}
        self.experts: dict[int, ExpertsCopy] = {}
        self.modules: list[nn.Module] = []
        self.passes: dict[Any, Any] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._copied: list[tuple[AnyCopy, list[nn.Module]]] = []
        places, self.left = places_of(model, skip, precision)
        store = state_of(model).get(CopiesPart).low_bit_copies
        for group, key, _, reason in keyed(places, precision.group_size, on_cpu):
            if reason is None and key not in store:
                try:
                    if make is None:
                        store[key] = copy_of(model, group, precision.group_size)
                    else:
                        given = [p.name for p in group], [p.module for p in group]
                        store[key] = make(*given, group[0].precision, precision.group_size)
                except CannotRead as error:  # unlike the layer of this class that was tested
                    reason = str(error)
            if reason is not None:
                self.left += [f"{place.name} ({reason})" for place in group]
                continue
            copy, modules = store[key], [place.module for place in group]
            self._copied.append((copy, modules))
            self.modules += modules
            if isinstance(copy, ExpertsCopy):
                self.experts[id(modules[0])] = copy
                continue
            for index, place in enumerate(group):
                module = place.module
                self.by_module[id(module)] = copy, index
                weight: Any = module.weight
                if not is_plain_linear(module):
                    # It takes no memory: it serves to be recognised.
                    zero = torch.zeros(1, dtype=model.dtype, device="cpu")
                    weight = self._stand_ins[id(module)] = zero.expand(place.shape)
                self.by_weight[id(weight)] = copy, index
        self._note(model)

    def _note(self, model: PreTrainedModel) -> None:
        """Record the weights that the copies are made of."""
        self._layers = [id(module) for module in copied_modules(model)]
        self._identities = [identity(module) for module in self.modules]
        self._places = list(map(_place, self.modules))
        self._sample = sample(self.modules)

    def is_current(self, model: PreTrainedModel) -> bool:
        """Tell whether these are the model's layers, and still hold the weights that were copied."""
        return (
            self._layers == [id(module) for module in copied_modules(model)]
            and self._identities == [identity(module) for module in self.modules]
            and torch.equal(self._sample, sample(self.modules))
        )

    @looked_at_once
    def drift(self, model: PreTrainedModel) -> float:
        """Return how far the weights have moved since they were copied, as a share of their size.

        0 where the copies are current, infinite where there are other layers, or weights in another place. A few
        numbers of each weight are compared: torch does not count what fused optimizers write.
        """
        if self.is_current(model):
            return 0.0
        if (
            not self._sample.numel()
            or self._layers != [id(module) for module in copied_modules(model)]
            or self._places != list(map(_place, self.modules))
        ):
            return math.inf
        moved = (sample(self.modules).double() - self._sample.double()).norm() / self._sample.double().norm()
        return float(moved) if math.isfinite(moved) else math.inf

    def rewrite(self, model: PreTrainedModel) -> None:
        """Quantise weights that have moved again, in place, and record that the copies are made of these.

        Raises:
            CannotRead: weights of a layer can no longer be obtained.
        """
        for copy, modules in self._copied:
            copy.rewrite(values_of(modules, model.dtype))
        self._note(model)

    def by_key(self) -> dict[Any, AnyCopy]:
        """Return the copies by weights and precision, as `CopiesPart` has them."""
        return {key_of(modules, copy.precision, copy.group_size): copy for copy, modules in self._copied}

    def num_weights(self) -> int:
        """Count the numbers that quantising all of them takes in."""
        return sum(copy.num_weights for copy, _ in self._copied)

    def num_bytes(self) -> int:
        """Return the memory of the copies in bytes."""
        return sum(copy.num_bytes() for copy in self.by_key().values())

    def precisions(self) -> set[str]:
        """Return the precisions of the copies."""
        return {copy.precision for copy, _ in self._copied}

    def forwards(self) -> list[tuple[nn.Module, Any]]:
        """Return the `(module, forward)` pairs with which the layers compute from their copies."""
        return [*self.others, *((module, self._forward(module)) for module in self.modules)]

    def _forward(self, module: nn.Module) -> Any:
        if id(module) in self.experts:
            return self.experts[id(module)].forward_of(module)
        copy, index = self.by_module[id(module)]

        def forward(x: torch.Tensor) -> torch.Tensor:
            return copy.one(x, index).to(x.dtype)

        return forward

    def stand_ins(self) -> list[tuple[nn.Module, Any]]:
        """Return the `(module, forward)` pairs with which a capture sees layers of other makes as torch's."""

        def forward(weight: torch.Tensor) -> Any:
            return lambda x: nn.functional.linear(x, weight)

        return [(m, forward(self._stand_ins[id(m)])) for m in self.modules if id(m) in self._stand_ins]


def _place(module: nn.Module) -> list[Any]:
    """Return the tensors of a layer and their places: unlike `identity`, the same after they were written into."""
    return [(id(tensor), place_of(tensor)) for tensor in tensors_of(module)]


class Resident(Protocol):
    """Draft of a model with offloaded weights (resident.py), as far as it is used here."""

    def is_of(self, model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> bool:
        """Tell whether it is the draft of these, with the current weights."""

    def num_bytes(self) -> int:
        """Return the memory, in bytes, of all that the draft has for itself."""


class CopiesPart(Part):
    """Part of a model's state: the low-bit copies of its weights.

    Attributes:
        low_bit_copies: copies, by weights and precision.
        low_bit_drafts: copies that a draft computes from, by skip set and precision.
        resident: draft of a model with offloaded weights, whose own are all in memory.
    """

    def __init__(self) -> None:
        self.low_bit_copies: dict[Any, AnyCopy] = {}
        self.low_bit_drafts: dict[tuple[SkipConfig, PrecisionConfig | None], LowBitCopies] = {}
        self.resident: Resident | None = None

    def drop_copies(self) -> None:
        self.low_bit_copies, self.low_bit_drafts, self.resident = {}, {}, None

    drop = drop_copies

    def drop_captures(self) -> None:
        self.low_bit_drafts = {}  # copies of layers that are still there are found again


def copies_of(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> LowBitCopies:
    """Return the low-bit copies of a model, made once and shared by all configs that need the same.

    Copies of weights that have moved a little since, as in training, still draft: `rewrite_copies` updates them.

    Raises:
        ValueError: see `check_precision`.
    """
    state, part = state_of(model), state_of(model).get(CopiesPart)
    known: LowBitCopies | None = part.low_bit_drafts.get((skip, precision))
    if known is not None and known.drift(model) > MOST_DRIFT:
        state.drop_copies()  # of weights that no longer exist

    def made() -> LowBitCopies:
        _drop_of_others(model)
        return LowBitCopies(model, skip, precision)

    return recent(part.low_bit_drafts, (skip, precision), made, _MOST_DRAFTS)


def missing_copies(
    model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig
) -> list[tuple[int, Callable[[], None]]]:
    """Return what `copies_of` would have to make, in parts: the number of weights, and a function that copies them.

    Args:
        model: the target model.
        skip, precision: as in `copies_of`.

    Raises:
        ValueError: see `check_precision`.
    """
    check_precision(model, precision)
    on_cpu = next(model.parameters()).device.type in ("cpu", "meta")
    store = state_of(model).get(CopiesPart).low_bit_copies

    def make(key: Any, group: Sequence[Place]) -> None:
        if key not in store:
            with contextlib.suppress(CannotRead):
                store[key] = copy_of(model, group, precision.group_size)

    groups = keyed(places_of(model, skip, precision)[0], precision.group_size, on_cpu)
    return [
        (weights, partial(make, key, group))
        for group, key, weights, reason in groups
        if reason is None and key not in store
    ]


def rewrite_copies(model: PreTrainedModel, copies: LowBitCopies) -> None:
    """Quantise weights that have moved again, into the memory of the copies that one draft computes with.

    Args:
        model: the target model.
        copies: copies whose `drift` is neither 0 nor infinite.
    """
    part = state_of(model).get(CopiesPart)
    try:
        copies.rewrite(model)
    except CannotRead:
        state_of(model).drop_copies()
        return
    # Other drafts find the copies that they share when they are next used.
    part.low_bit_copies = copies.by_key()
    part.low_bit_drafts = {asked: other for asked, other in part.low_bit_drafts.items() if other is copies}


def _drop_of_others(model: PreTrainedModel) -> None:
    """Free copies of layers that the model no longer has, or of weights that these no longer have."""
    store, drafts = state_of(model).get(CopiesPart).low_bit_copies, state_of(model).get(CopiesPart).low_bit_drafts
    for asked in [asked for asked, copies in drafts.items() if not copies.is_current(model)]:
        del drafts[asked]
    now = {identity(module) for module in copied_modules(model)} if store else set()
    for key in [key for key in store if not now.issuperset(key[0])]:
        del store[key]


def copy_bytes(model: nn.Module) -> int:
    """Return the bytes of all low-bit copies of a model; where its weights are offloaded, of all that its draft has."""
    part = state_of(model).get(CopiesPart)
    kept: int = sum(copy.num_bytes() for copy in part.low_bit_copies.values())
    return kept if part.resident is None else kept + int(part.resident.num_bytes())


def keep_only(model: nn.Module, copies: LowBitCopies | None) -> None:
    """Free all low-bit copies of a model but these."""
    if copies is None:
        drop_copies(model)
        return
    wanted = {id(copy) for copy in copies.by_key().values()}
    store = state_of(model).get(CopiesPart).low_bit_copies
    for key in [key for key, copy in store.items() if id(copy) not in wanted]:
        del store[key]
    known = state_of(model).get(CopiesPart).low_bit_drafts
    for key in [key for key, other in known.items() if other is not copies]:
        del known[key]


def drop_copies(model: nn.Module) -> None:
    """Free the low-bit copies of a model."""
    state_of(model).drop_copies()
