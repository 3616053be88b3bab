"""The plan by which the passes of a model are run."""

from __future__ import annotations

from dataclasses import dataclass, field

from .captured.batch_invariance import BatchInvariance

__all__ = ["EAGER", "PassPlan"]


@dataclass(frozen=True)
class PassPlan:
    """Plan by which passes over a given number of rows are run. Made by `tuning.plan_passes`.

    Attributes:
        captured: whether captured passes may run: not where hidden states or attentions are requested, which a captured
            pass does not return; with more than one row only by batch-invariant JIT-compiled kernels.
        graph: whether they may be replayed as CUDA graphs, where this device has them.
        batch_invariance: means by which the bits of a token's logits do not depend on the width of its pass; `None`:
            they may depend on it.
        prompts: whether captured passes, with the kernels used for decoding, read prompts as well.
        longest_prompt: number of tokens up to which they do; `None`: any.
        prompt_part: number of tokens in the parts in which the model's own code reads the prompt of each text,
            beginning at multiples of it; `None`: at once. A part has the same bits whether those before it were read by
            this call or an earlier one.
        own_kernels: whether passes that run the model's own code use its own kernels for linear layers, too.
        rows: number of rows of the passes that are replayed.
        reason: why bits may depend on the width of a pass; `None` where they do not, or were not required not to.
    """

    captured: bool = True
    graph: bool = True
    batch_invariance: BatchInvariance | None = None
    prompts: bool = False
    longest_prompt: int | None = None
    prompt_part: int | None = None
    own_kernels: bool = False
    rows: int = field(default=1, kw_only=True)
    # For reports only: it does not affect how passes are run.
    reason: str | None = field(default=None, compare=False)


EAGER = PassPlan(captured=False, graph=False)
"""The model's own code, with fast kernels for few rows."""
