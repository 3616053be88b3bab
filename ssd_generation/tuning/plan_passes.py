"""The one answer to the question how the passes of a call are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..config.values import BITWISE, NUMERIC
from ..forward.captured.batch_invariance import NATIVE, WIDTHS, BatchInvariance
from ..forward.captured.conditions import why_no_batch_captured, why_not_captured
from ..forward.cuda_graph.graph_passes import target_graphs
from ..forward.pass_plan import PassPlan
from ..support.warn import warn_once
from .exactness import batch_invariance_of_captured, batch_invariance_of_graphs, is_free
from .prompt_kernels import reads_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["batch_invariance_of", "batch_invariance_to_check", "plan_passes", "runs_own_code"]


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
    captured = not returns_states and (rows == 1 or _captures_batches(model, exactness))
    # With "numeric" in half precision the model's own kernels run, so that the text is plain `generate`'s.
    own_kernels = exactness == NUMERIC and model.dtype in (torch.bfloat16, torch.float16)
    if is_check:
        batch_invariance = batch_invariance_to_check(model, exactness) if captured else None
        return PassPlan(captured, False, batch_invariance, False, own_kernels, "the model is checked")
    batch_invariance, reason = batch_invariance_of(model, exactness) if captured else (None, None)
    if rows > 1 and (batch_invariance is None or batch_invariance.linear != NATIVE):
        captured = False
    if not captured:
        if returns_states:
            reason = "attentions and hidden states come from the model's own code"
        elif reason is None:
            reason = "the rows of a batch go through the model's own code together"
        return PassPlan(False, False, None, False, own_kernels, reason)
    if exactness == BITWISE and reason is not None:
        warn_once(model, f"{type(model).__name__} cannot decode exactly to the bit here: {reason}.")
    return PassPlan(True, rows == 1, batch_invariance, reads_prompts(model, batch_invariance), own_kernels, reason)


def _captures_batches(model: PreTrainedModel, exactness: str | None) -> bool:
    """Whether passes over several rows may be captured: those of kernels whose bits do not depend on their width."""
    return exactness != NUMERIC and why_no_batch_captured(model) is None and is_free(model)


def batch_invariance_of(model: PreTrainedModel, exactness: str | None) -> tuple[BatchInvariance | None, str | None]:
    """Return how passes over a single text keep their bits from depending on their width, or `None` and why not.

    Args:
        model: the target model.
        exactness: what was asked for; `None`: to the bit where that is nearly free.
    """
    if exactness == NUMERIC:
        return None, "it was asked for"
    graphs = target_graphs(model)
    if graphs is not None:
        return batch_invariance_of_graphs(model, graphs)
    refusal = why_not_captured(model)
    if refusal is not None:
        return None, f"its passes run by the model's own code: {refusal}"
    return batch_invariance_of_captured(model, exactness)


def batch_invariance_to_check(model: PreTrainedModel, exactness: str | None) -> BatchInvariance | None:
    """Return what `batch_invariance_of` will, as far as that is known before bits are compared.

    In half precision, too: there torch's kernels may round one token otherwise than several, which says nothing of
    passes whose bits do not depend on their width.

    Args:
        model: the target model.
        exactness: what was asked for.
    """
    if exactness == NUMERIC or why_not_captured(model) is not None:
        return None
    return BatchInvariance(NATIVE, WIDTHS) if is_free(model) else None


def runs_own_code(model: PreTrainedModel) -> bool:
    """Tell whether passes over a single text run by the model's own code, neither captured nor replayed as graphs.

    Args:
        model: the target model.
    """
    return target_graphs(model) is None and why_not_captured(model) is not None
