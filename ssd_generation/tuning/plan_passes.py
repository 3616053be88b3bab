"""Planning of the passes of a call, decided in this module alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.recurrent import has_states
from ..config.values import BITWISE, NUMERIC
from ..forward.captured.batch_invariance import NATIVE, WIDTHS, BatchInvariance
from ..forward.captured.conditions import why_no_batch_captured, why_not_captured, windows_of
from ..forward.cuda_graph.graph_passes import target_graphs
from ..forward.pass_plan import PassPlan
from ..support.warn import warn_once
from .exactness import batch_invariance_of_captured, batch_invariance_of_graphs, is_free
from .prompt_kernels import longest_by_kernels, part_of_prompts, reads_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["batch_invariance_of", "batch_invariance_to_check", "plan_passes", "runs_own_code"]

_TOGETHER = "the rows of a batch go through the model's own code together"


def plan_passes(
    model: PreTrainedModel,
    rows: int = 1,
    exactness: str | None = None,
    *,
    returns_states: bool = False,
    reuses: bool = False,
    is_check: bool = False,
) -> PassPlan:
    """Decide how the passes of a call are run.

    Args:
        model: the target model.
        rows: number of rows, B.
        exactness: exactness that the config requests; `None`: bitwise where that costs next to nothing.
        returns_states: whether attentions or hidden states are requested.
        reuses: whether later calls reuse the keys and values of this one.
        is_check: whether the library is checking the model, before it is known what its passes can do.

    Warns:
        Bitwise exactness was requested and is not available, with the reason.
    """
    # With "numeric" in half precision the model's own kernels run, so that the text is plain `generate`'s.
    own_kernels = exactness == NUMERIC and model.dtype in (torch.bfloat16, torch.float16)
    refusal = _why_by_own_code(model, rows, exactness, returns_states)
    if is_check:
        batch_invariance = batch_invariance_to_check(model, exactness) if refusal is None else None
        return PassPlan(
            refusal is None, False, batch_invariance, own_kernels=own_kernels, reason="the model is checked"
        )
    batch_invariance, reason = (None, refusal) if refusal is not None else batch_invariance_of(model, exactness)
    if exactness == BITWISE and reason is not None and not returns_states:
        warn_once(model, f"{type(model).__name__} cannot decode bitwise here: {reason}.")
    if refusal is None and rows > 1 and (batch_invariance is None or not batch_invariance.is_native):
        refusal = reason or _TOGETHER
    if refusal is not None:
        replays = rows > 1 and not (own_kernels or returns_states) and target_graphs(model, rows) is not None
        return PassPlan(False, replays, own_kernels=own_kernels, reason=refusal, rows=rows if replays else 1)
    part: int | None = None
    longest: int | None = None
    if not reuses:
        longest = longest_by_kernels(model, batch_invariance)
        prompts = longest != 0
    else:
        prompts = reads_prompts(model, batch_invariance)
        # A single text in float32 is plain's on all that was tried, with reused keys and values of torch's as well.
        # Recurrent states are stored between parts.
        if not prompts and (rows > 1 or model.dtype != torch.float32 or has_states(model)):
            # Rows of several lengths have their windows at other slots.
            is_whole = rows == 1 or not any(windows_of(model))
            part = part_of_prompts(model) if is_whole and not own_kernels else None
            prompts = part is None and reads_prompts(model, batch_invariance, even_if_slower=True)
    return PassPlan(True, rows == 1, batch_invariance, prompts, longest or None, part, own_kernels, reason)


def _why_by_own_code(model: PreTrainedModel, rows: int, exactness: str | None, returns_states: bool) -> str | None:
    """Return why no pass of a call is captured, whatever the bits of passes turn out to be; `None` where some may be.

    Passes over several rows are captured where JIT-compiled kernels, whose bits do not depend on the width, do all of a
    layer.
    """
    if returns_states:
        return "attentions and hidden states come from the model's own code"
    if rows == 1:
        return None
    if exactness == NUMERIC:
        return 'exactness="numeric" was requested'
    if (refusal := why_no_batch_captured(model)) is not None:
        return f"its passes run by the model's own code: {refusal}"
    return None if is_free(model) else _TOGETHER


def batch_invariance_of(model: PreTrainedModel, exactness: str | None) -> tuple[BatchInvariance | None, str | None]:
    """Return how passes over a single text keep their bits independent of their width, or `None` and why they do not.

    Args:
        model: the target model.
        exactness: the requested exactness; `None`: bitwise where that is nearly free.
    """
    if exactness == NUMERIC:
        return None, 'exactness="numeric" was requested'
    graphs = target_graphs(model)
    if graphs is not None:
        return batch_invariance_of_graphs(model, graphs)
    refusal = why_not_captured(model)
    if refusal is not None:
        return None, f"its passes run by the model's own code: {refusal}"
    return batch_invariance_of_captured(model, exactness)


def batch_invariance_to_check(model: PreTrainedModel, exactness: str | None) -> BatchInvariance | None:
    """Return the answer of `batch_invariance_of`, as far as it is known before bits are compared.

    This includes half precision: torch's kernels may round one token differently from several there, which says nothing
    about passes whose bits do not depend on their width.

    Args:
        model: the target model.
        exactness: the requested exactness.
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
