"""Speed-up predicted from acceptance by depth and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import Costs, SelfSpeculativeConfig

__all__ = ["expected_tokens", "seconds_saved", "share_within_chance", "speedup_within_chance", "theoretical_speedup"]

LONGEST_DRAFT = 12


def expected_tokens(acceptance: Sequence[float], draft_length: int) -> float:
    """Return the expected tokens of a round, the target's own one included: `1 + Σ_d Π_{i ≤ d} α_i`.

    With one α for all depths this is `(1 − α^(k+1)) / (1 − α)` (Leviathan et al., arXiv 2211.17192, equation 1).

    Args:
        acceptance: α by depth, given that all tokens before were accepted; the last one holds for all greater depths.
        draft_length: k ≥ 0.
    """
    total, reached = 1.0, 1.0
    for depth in range(draft_length):
        reached *= acceptance[min(depth, len(acceptance) - 1)] if acceptance else 0.0
        total += reached
    return total


def theoretical_speedup(acceptance: Sequence[float], costs: Costs, longest: int = LONGEST_DRAFT) -> tuple[float, int]:
    """Return the greatest `E[tokens] · plain / (k · draft + verify(k + 1))` over k = 1 … `longest`, and that k.

    It is below 1 where drafting does not pay; by how much tells a search which way to go.

    (Theorem 3.8 of Leviathan et al., with measured costs of verification in place of 1.)

    Args:
        acceptance: acceptance by depth, as for `expected_tokens`.
        costs: costs of a draft step and of verification.
        longest: length of the longest draft.
    """
    best, length = 0.0, 1
    for k in range(1, longest + 1):
        seconds = k * costs.draft_step + costs.verify_seconds(k + 1)
        speedup = expected_tokens(acceptance, k) * costs.plain_step / seconds
        if speedup > best:
            best, length = speedup, k
    return best, length


def seconds_saved(config: SelfSpeculativeConfig) -> float:
    """Return the seconds that a config with costs is predicted to save per new token; 0 for lookup alone.

    Args:
        config: a config with costs, evaluated at the acceptance that it expects.
    """
    if config.costs is None or not config.precision:
        return 0.0
    speedup = theoretical_speedup(config.drafting.acceptance, config.costs)[0]
    return config.costs.plain_step * max(0.0, 1 - 1 / speedup) if speedup else 0.0


def share_within_chance(tried: float, accepted: float, errors: float) -> float:
    """Return `accepted / tried`, moved by so many standard errors.

    Two observations are added, one of each kind, so that few observations leave much to chance (the rule of Agresti and
    Coull for the interval of a proportion, The American Statistician 52, 1998).

    Args:
        tried: number of trials.
        accepted: number of accepted ones.
        errors: standard errors to move by, upwards where positive.
    """
    share = (accepted + 1) / (tried + 2)
    return min(1.0, max(0.0, share + errors * math.sqrt(share * (1 - share) / (tried + 2))))


def speedup_within_chance(
    tried: Sequence[int | float], accepted: Sequence[int | float], costs: Costs, errors: float
) -> tuple[float, int]:
    """Return `theoretical_speedup` with every acceptance moved by so many standard errors (`share_within_chance`).

    Args:
        tried: by depth, number of drafts that got as far.
        accepted: by depth, number of accepted tokens.
        costs: costs of a draft step and of verification.
        errors: standard errors to move by, upwards where positive.
    """
    moved = [share_within_chance(n, k, errors) for n, k in zip(tried, accepted, strict=True)]
    return theoretical_speedup(moved, costs)
