"""Search space: the choices for each sub-layer in the draft."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import PRECISIONS, PrecisionConfig, SelfSpeculativeConfig, SkipConfig
from ..forward.copies.copied_layers import check_precision, estimated_bytes
from ..forward.structure.sublayers import locate_sublayers
from ..tuning.automatic import weight_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HEAD", "KEEP", "SKIP", "Space", "space_of"]

KEEP, SKIP = "keep", "skip"
HEAD = "head"

Choices = Mapping[str, str]
"""Choice for each sub-layer, by its name (`attention.3`, `mlp.0`, `head`)."""


@dataclass(frozen=True)
class Space:
    """Sub-layers, and the choices allowed for each.

    Attributes:
        choices: allowed ones of `keep`, `skip`, `int8`, `int4`, by name, in the order of the model.
        needed: names of attention sub-layers of which at least one must not be skipped.
        group_size: group size of int4.
    """

    choices: Mapping[str, tuple[str, ...]]
    needed: tuple[str, ...]
    group_size: int = PrecisionConfig().group_size

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions in the space."""
        return tuple(p for p in PRECISIONS if any(p in choices for choices in self.choices.values()))

    @property
    def skippable(self) -> tuple[str, ...]:
        """Names of the sub-layers that may be skipped."""
        return tuple(name for name, choices in self.choices.items() if SKIP in choices)

    @property
    def size(self) -> int:
        """Number of drafts in the space."""
        impossible = all(SKIP in self.choices[name] for name in self.needed) and bool(self.needed)
        return math.prod(map(len, self.choices.values())) - impossible * math.prod(
            len(choices) for name, choices in self.choices.items() if name not in self.needed
        )

    def complete(self, choices: Choices) -> dict[str, str]:
        """Return choices for all sub-layers: `keep` for those that are not named.

        Raises:
            ValueError: a name or choice that is not in the space.
        """
        for name, choice in choices.items():
            if choice not in self.choices.get(name, ()):
                allowed = ", ".join(self.choices[name]) if name in self.choices else "nothing: it is not searched"
                raise ValueError(f"{choice!r} is not available for {name}; allowed: {allowed}.")
        return {name: choices.get(name, KEEP) for name in self.choices}

    def uniform(self, choice: str, head: str | None = None) -> dict[str, str]:
        """Return the same choice wherever it is allowed, `keep` elsewhere.

        Args:
            choice: choice for the sub-layers.
            head: choice for the LM head; `None`: as for the sub-layers.
        """
        wanted = {name: choice if name != HEAD or head is None else head for name in self.choices}
        return {name: wanted[name] if wanted[name] in allowed else KEEP for name, allowed in self.choices.items()}

    def is_possible(self, choices: Choices) -> bool:
        """Tell whether a draft still has an attention sub-layer, and so depends on the context."""
        return not self.needed or any(choices[name] != SKIP for name in self.needed)

    def config(self, choices: Choices, **others: Any) -> SelfSpeculativeConfig:
        """Return the config of a complete set of choices.

        Args:
            choices: choices for all sub-layers.
            others: further fields of the config.
        """
        skipped: dict[str, list[int]] = {"attention": [], "mlp": []}
        precise: dict[str, dict[int, str]] = {"attention": {}, "mlp": {}}
        for name, choice in choices.items():
            kind, _, layer = name.partition(".")
            if not layer:
                continue
            if choice == SKIP:
                skipped[kind].append(int(layer))
            elif choice != KEEP:
                precise[kind][int(layer)] = choice
        head = choices.get(HEAD, KEEP)
        precision = PrecisionConfig(
            attention=precise["attention"],
            mlp=precise["mlp"],
            head=None if head == KEEP else head,
            group_size=self.group_size,
        )
        return SelfSpeculativeConfig(
            skip=SkipConfig(attention=skipped["attention"], mlp=skipped["mlp"]),
            precision=precision or None,
            **others,
        )

    def from_config(self, config: SelfSpeculativeConfig) -> dict[str, str]:
        """Return the choices of a config, the inverse of `config`.

        Raises:
            ValueError: the config skips or quantises a sub-layer in a way that the space does not allow.
        """
        precision = config.precision or PrecisionConfig()
        choices = {}
        for name in self.choices:
            kind, _, layer = name.partition(".")
            if not layer:
                choices[name] = precision.head or KEEP
            elif int(layer) in getattr(config.skip, kind):
                choices[name] = SKIP
            else:
                choices[name] = precision.of(kind, int(layer)) or KEEP
        known = set(choices)
        outside = [
            f"{kind}.{layer}"
            for kind in ("attention", "mlp")
            for layer in getattr(config.skip, kind)
            if f"{kind}.{layer}" not in known
        ]
        if outside:
            raise ValueError(f"This config skips {', '.join(outside)}, which cannot be skipped in this model.")
        return self.complete(choices)

    def describe(self) -> dict[str, Any]:
        """Return the definition of the space as JSON types: a study can only be continued in the same space."""
        return {"choices": {name: list(c) for name, c in self.choices.items()}, "group_size": self.group_size}


def space_of(model: PreTrainedModel, draft_memory: float = 0.0, precisions: Sequence[str] = PRECISIONS) -> Space:
    """Return the search space of a model.

    Args:
        model: the target model.
        draft_memory: share of the weights' bytes that low-bit copies may take; 0: every sub-layer is kept or skipped.
            A precision is in the space if copies of all sub-layers in it fit.
        precisions: precisions to consider.

    Raises:
        ValueError: the model has fewer than four sub-layers that can be skipped, or `draft_memory` is negative.
    """
    if not draft_memory >= 0:
        raise ValueError(f"draft_memory must be a share of the weights' bytes, 0 or more, but got {draft_memory!r}.")
    layout = locate_sublayers(model)
    fitting = []
    if draft_memory > 0:
        try:
            check_precision(model)
        except ValueError:
            precisions = ()
        for name in precisions:
            everything = PrecisionConfig(default=name, head=name)
            if 0 < estimated_bytes(model, SkipConfig(), everything) <= draft_memory * weight_bytes(model):
                fitting.append(name)
    choices: dict[str, tuple[str, ...]] = {}
    needed = []
    for layer in layout.layers:
        if layer.attention is not None:
            can_go = layer.index not in layout.shares_kv
            choices[f"attention.{layer.index}"] = (KEEP, *((SKIP,) if can_go else ()), *fitting)
            needed.append(f"attention.{layer.index}")
        if layer.mlp is not None:
            choices[f"mlp.{layer.index}"] = (KEEP, SKIP, *fitting)
    if fitting:
        choices[HEAD] = (KEEP, *fitting)
    if sum(SKIP in c for c in choices.values()) < 4:
        raise ValueError(
            f"{type(model).__name__} has {len(layout)} layers with fewer than four sub-layers that can be skipped: "
            "there is nothing to search."
        )
    return Space(choices, tuple(needed))
