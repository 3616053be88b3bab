"""Estimates of the acceptance: by depth, by the draft's confidence, and of looked-up tokens.

Each is the mean of a Beta distribution: observations are counted, with a prior that is worth a number of them. Counts
are discounted, so that estimates follow a change of topic (Raj and Kalyani, "Taming Non-stationary Bandits: A Bayesian
Approach", arXiv 1707.09727).
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence

from .base import Match
from .prices import LONGEST_COPY

__all__ = ["NO_CONFIDENCE", "ConfidenceEstimates", "CopyEstimates", "DepthEstimates", "confidence_bin", "shrunk"]

# Confidence bins: [0, .3), [.3, .5), … [.995, 1], and the probability assumed for a token in each.
_BIN_EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
_BIN_CENTRES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.965, 0.988, 0.998)

NO_CONFIDENCE = -1
"""Bin of a token whose probability is not known."""

# Acceptance of a looked-up token before any observation, by n-gram length (1, 2, 3, 4 and more) and place in the copy
# (1st, 2nd–3rd, 4th–7th, 8th on), if those before it were accepted.
_COPY_PRIOR = (
    (0.20, 0.45, 0.70, 0.80),
    (0.40, 0.60, 0.80, 0.85),
    (0.55, 0.75, 0.85, 0.90),
    (0.65, 0.80, 0.88, 0.92),
)
_PLACES = (0, 1, 1, 2, 2, 2, 2, *[3] * (LONGEST_COPY - 7))

# Factors by which the weight of an observation shrinks with each later one of its kind (depths: each later draft).
_DEPTH_DISCOUNT = 0.98
_BIN_DISCOUNT = 0.985
_COPY_DISCOUNT = 0.95
_MATCH_DISCOUNT = 0.95

# Number of observations that a prior is worth.
_PRIOR_WEIGHT = 8.0
_DEPTH_WEIGHT = 16.0
_BIN_WEIGHT = 3.0
_COPY_WEIGHT = 4.0


def shrunk(
    priors: Sequence[float], seen: Sequence[float], accepted: Sequence[float], expected: float, weight: float
) -> list[float]:
    """Return Beta means whose priors are scaled together, by how often their failures occur.

    The failures that each prior expects are scaled by the ratio of observed to expected failures, of all counts
    together; then each count, shrunk towards its scaled prior, gives an estimate.

    Args:
        priors: acceptance before any observation.
        seen: number of observations of each.
        accepted: how many of these were accepted.
        expected: initial number of failures in the ratio, both expected and observed; > 0.
        weight: number of observations that a scaled prior is worth.
    """
    failures = expected
    for prior, tried, right in zip(priors, seen, accepted, strict=True):
        expected += tried * (1.0 - prior)
        failures += tried - right
    scale = failures / expected
    return [
        (right + weight * max(1.0 - (1.0 - prior) * scale, 0.0)) / (tried + weight)
        for prior, tried, right in zip(priors, seen, accepted, strict=True)
    ]


class DepthEstimates:
    """Acceptance of the self-drafted token at each depth, given that those before it were accepted.

    Args:
        prior: acceptance by depth before any observation, for all depths, in (0, 1).

    Attributes:
        seen: discounted observations, by depth.
        accepted: how many of them were accepted.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = prior
        self.seen, self.accepted = [0.0] * len(prior), [0.0] * len(prior)

    def observe(self, drafted: int, kept: int) -> None:
        """Count a draft of which the first `kept` tokens were accepted; nothing is known of those after the next."""
        # The depths not reached are discounted as well: their observations age.
        self.seen = [count * _DEPTH_DISCOUNT for count in self.seen]
        self.accepted = [count * _DEPTH_DISCOUNT for count in self.accepted]
        for i in range(min(kept + 1, drafted)):
            self.seen[i] += 1.0
        for i in range(kept):
            self.accepted[i] += 1.0

    def estimate(self) -> list[float]:
        """Return the acceptance by depth, from the first token on."""
        return shrunk(self.prior, self.seen, self.accepted, _PRIOR_WEIGHT * (1.0 - self.prior[0]), _DEPTH_WEIGHT)


def confidence_bin(probability: float) -> int:
    """Return the confidence bin of a probability."""
    return bisect_right(_BIN_EDGES, probability)


class ConfidenceEstimates:
    """Acceptance of a self-drafted token by the draft's confidence in it: a calibration by histogram binning.

    (Zadrozny and Elkan, "Obtaining calibrated probability estimates from decision trees and naive Bayesian
    classifiers", ICML 2001; here with discounted counts, and bins that are narrow where most tokens lie.)

    Attributes:
        seen: discounted observations, by bin.
        accepted: how many of them were accepted.
    """

    def __init__(self) -> None:
        self.seen, self.accepted = [0.0] * len(_BIN_CENTRES), [0.0] * len(_BIN_CENTRES)

    def observe(self, bins: Sequence[int], kept: int) -> None:
        """Count a draft, given by the bins of its tokens, of which the first `kept` were accepted."""
        for i, place in enumerate(bins[: kept + 1]):
            if place != NO_CONFIDENCE:
                self.seen[place] = self.seen[place] * _BIN_DISCOUNT + 1.0
                self.accepted[place] = self.accepted[place] * _BIN_DISCOUNT + (i < kept)

    def estimate(self) -> list[float]:
        """Return the acceptance by bin; the prior of a bin is its centre."""
        return shrunk(_BIN_CENTRES, self.seen, self.accepted, _BIN_WEIGHT, _BIN_WEIGHT)


class CopyEstimates:
    """Acceptance of looked-up tokens by n-gram length and place in the copy, and frequencies of lookup's offers.

    Attributes:
        seen: discounted observations, by n-gram length (1, 2, 3, 4 and more) and place (1st, 2nd–3rd, 4th–7th, 8th on).
        accepted: how many of them were accepted.
        offers: how often lookup offers nothing, a 1-gram, 2-gram, 3-gram, longer; discounted, not normalised.
    """

    def __init__(self) -> None:
        self.seen = [[0.0] * len(places) for places in _COPY_PRIOR]
        self.accepted = copy.deepcopy(self.seen)
        self.offers = [1.0, 0.0, 0.0, 0.0, 0.0]
        self._gains: dict[int, Sequence[float]] = {}  # missing entries have to be recomputed

    def notice(self, match: Match) -> None:
        """Count what lookup offers a row at the beginning of its round."""
        self.offers = [count * _MATCH_DISCOUNT for count in self.offers]
        self.offers[min(match.length, 4) if match.tokens else 0] += 1.0

    def observe(self, match: Match, copied: int, right: int) -> None:
        """Count a copy from this match, of which the first `right` tokens were accepted."""
        length = self.row(match)
        seen, accepted = self.seen[length], self.accepted[length]
        self._gains.pop(length, None)
        for i in range(min(right + 1, copied)):
            place = _PLACES[i]
            seen[place] = seen[place] * _COPY_DISCOUNT + 1.0
            accepted[place] = accepted[place] * _COPY_DISCOUNT + (i < right)

    def gains(self) -> list[Sequence[float]]:
        """Return the expected accepted tokens of a copy of 0, 1, … `LONGEST_COPY` tokens, by n-gram length."""
        for length in range(len(self.seen)):
            if length not in self._gains:
                self._gains[length] = self._gains_of(length)
        return [self._gains[length] for length in range(len(self.seen))]

    @staticmethod
    def row(match: Match) -> int:
        """Return the row of the counts that holds matches of this length."""
        return min(max(match.length, 1), 4) - 1

    def _gains_of(self, length: int) -> Sequence[float]:
        estimates = [
            (right + _COPY_WEIGHT * prior) / (tried + _COPY_WEIGHT)
            for prior, tried, right in zip(_COPY_PRIOR[length], self.seen[length], self.accepted[length], strict=True)
        ]
        gains, gain, survival = [0.0], 0.0, 1.0
        for place in _PLACES:
            survival *= estimates[place]
            gain += survival
            gains.append(gain)
        return gains
