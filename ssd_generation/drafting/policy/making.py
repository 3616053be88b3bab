"""Construction of the draft-length policy of a config."""

from __future__ import annotations

from ...config import Costs, DraftingConfig
from .base import DraftPolicy
from .confidence import ConfidencePolicy
from .cost_aware import DEFAULT_PRIOR, CostAwarePolicy
from .fixed import FixedPolicy, NoDraftPolicy

__all__ = ["make_policy"]


def make_policy(
    drafting: DraftingConfig,
    costs: Costs | None = None,
    *,
    self_drafts: bool = True,
    lookup: bool = False,
    use_confidence: bool = True,
) -> DraftPolicy:
    """Make the policy that a `DraftingConfig` describes.

    Args:
        drafting: policy and its parameters.
        costs: a `Costs`, for the policy "cost".
        self_drafts: whether there is a draft alongside lookup; for the policy "cost", like the next two.
        lookup: whether there is prompt lookup.
        use_confidence: whether the policy may ask for the draft's probabilities.

    Raises:
        ValueError: "cost" without costs.
    """
    if drafting.policy == "cost":
        if costs is None:
            raise ValueError(
                "The draft-length policy 'cost' needs the costs of a draft step and of verification on this machine, "
                "but there are none. Measure them (`ssd profile`), or choose the policy 'confidence' or 'fixed'."
            )
        return CostAwarePolicy(
            costs,
            max_length=drafting.max_draft_length,
            prior=drafting.acceptance or DEFAULT_PRIOR,
            exploration=drafting.exploration,
            self_drafts=self_drafts,
            lookup=lookup,
            use_confidence=use_confidence,
            prior_is_measured=bool(drafting.acceptance),
        )
    if drafting.policy == "confidence":
        return ConfidencePolicy(
            max_length=drafting.max_draft_length,
            threshold=drafting.threshold,
            target_acceptance=drafting.target_acceptance,
            acceptance_smoothing=drafting.acceptance_smoothing,
            threshold_smoothing=drafting.threshold_smoothing,
            step=drafting.threshold_step,
        )
    if drafting.policy == "fixed":
        return FixedPolicy(drafting.max_draft_length)
    return NoDraftPolicy()
