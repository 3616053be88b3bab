"""The one answer to the question how the passes of a call are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..config.values import BITWISE, NUMERIC
from ..forward.pass_plan import PassPlan
from ..support.warn import warn_once
from .exactness import batch_invariance_of, batch_invariance_to_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["plan_passes"]


def plan_passes(
    model: PreTrainedModel,
    rows: int = 1,
    exactness: str | None = None,
    *,
    returns_states: bool = False,
    is_check: bool = False,
) -> PassPlan:
    """Decide how the passes of a call are run.

    Args:
        model: the target model.
        rows: of the batch, B.
        exactness: what the config asks for; `None`: to the bit where that costs next to nothing.
        returns_states: whether attentions or hidden states are asked for.
        is_check: whether the library checks the model, before it is known what its passes can do.

    Warns:
        Exactness to the bit was asked for and cannot be had, with the reason.
    """
    captured = rows == 1 and not returns_states
    # With "numeric" in half precision the model's own kernels run, so that the text is plain `generate`'s.
    own_kernels = exactness == NUMERIC and model.dtype in (torch.bfloat16, torch.float16)
    if is_check:
        batch_invariance = batch_invariance_to_check(model, exactness) if captured else None
        return PassPlan(captured, False, batch_invariance, own_kernels, "the model is checked")
    if not captured:
        reason: str | None = "attentions and hidden states come from the model's own code"
        if rows > 1:
            reason = "the rows of a batch go through the model's own code together"
        return PassPlan(False, False, None, own_kernels, reason)
    batch_invariance, reason = batch_invariance_of(model, exactness)
    if exactness == BITWISE and reason is not None:
        warn_once(model, f"{type(model).__name__} cannot decode exactly to the bit here: {reason}.")
    return PassPlan(True, True, batch_invariance, own_kernels, reason)
