"""How the passes of a model are run."""

from __future__ import annotations

from dataclasses import dataclass, field

from .captured.batch_invariance import BatchInvariance

__all__ = ["EAGER", "PassPlan"]


@dataclass(frozen=True)
class PassPlan:
    """How passes over so many rows are run, and why not otherwise. Made by `tuning.plan_passes`.

    Attributes:
        captured: whether passes may run as they were captured: not where hidden states or attentions are asked for,
            which a captured pass does not return, nor with more than one row.
        graph: whether they may be replayed as CUDA graphs, where this device has them.
        batch_invariance: how the bits of a token's logits are kept from depending on the width of its pass; `None`:
            they may depend on it.
        prompts: whether prompts are read by captured passes as well, by the kernels that decode.
        own_kernels: whether passes that run the model's own code compute its linear layers by its own kernels, too.
        reason: why bits may depend on the width of a pass; `None` where they do not, or nobody asked.
    """

    captured: bool = True
    graph: bool = True
    batch_invariance: BatchInvariance | None = None
    prompts: bool = False
    own_kernels: bool = False
    # Says no more about how passes are run.
    reason: str | None = field(default=None, compare=False)


EAGER = PassPlan(captured=False, graph=False)
"""The model's own code, with fast kernels for few rows."""
