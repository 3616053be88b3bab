"""Draft-length policies: how many tokens to draft in a round. Numbers in, a decision out."""

from .base import NO_MATCH, DraftPolicy, Match
from .confidence import ConfidencePolicy
from .cost_aware import CostAwarePolicy
from .fixed import FixedPolicy, NoDraftPolicy
from .making import make_policy

__all__ = [
    "NO_MATCH",
    "ConfidencePolicy",
    "CostAwarePolicy",
    "DraftPolicy",
    "FixedPolicy",
    "Match",
    "NoDraftPolicy",
    "make_policy",
]
