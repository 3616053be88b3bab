"""Sampling by temperature, top-k, top-p and min-p, computed for the few tokens that can be drawn.

transformers sorts the whole vocabulary for each token, which with 150,000 entries takes as long as a third of a pass of
a small model. Here the largest scores are found by the maxima of groups, and everything else is computed of these. The
arithmetic rounds differently from transformers', so a token counts only where that cannot matter: no comparison is
closer than rounding is. Anywhere else, and where too many tokens can be drawn, transformers' own processors decide. So
the tokens are always theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process

__all__ = ["APART", "Drawn", "Truncation"]

_GROUPS = 2048
_SPARE = 32
"""Tokens beyond top-k that are looked at: scores in 16 bits are often equal."""

_NUCLEUS = 224
"""Tokens that are looked at where top-k does not limit them."""

_SMALL = 8
"""Least size of a vocabulary, relative to the tokens that are looked at, for which this is worth its calls."""

APART = 5e-5
"""Least difference that counts: of logarithms of probabilities, which float32 changes by less than 6e-6 (arguments of
the exponential reach down to −88), and of sums of probabilities."""


class Drawn(NamedTuple):
    """Tokens drawn for N places.

    Attributes:
        tokens (`torch.LongTensor` of shape `(N,)`): the tokens.
        probabilities (`torch.DoubleTensor` of shape `(N,)`): theirs after truncation.
        are_sure (`torch.BoolTensor` of shape `(N,)`): whether the token is certainly the one that transformers' own
            processors lead to; else it means nothing.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor
    are_sure: torch.Tensor


@dataclass(frozen=True)
class Truncation:
    """Settings of the processors that come last in a call that samples; without any, all tokens can be drawn.

    Attributes:
        temperature: divisor of the scores, or `None`.
        top_k: number of largest scores that are retained, with those that equal the last one; or `None`.
        top_p: mass that the retained tokens reach, the most probable first; or `None`.
        min_p: least probability, relative to the largest one; or `None`.
        least: number of tokens that are retained in any case.
        count: number of the processors.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    least: int
    count: int

    @property
    def is_none(self) -> bool:
        """True if no token is left out."""
        return self.top_k is None and self.top_p is None and self.min_p is None

    @classmethod
    def of(cls, processors: Sequence[object]) -> Truncation:
        """Return the settings of the last processors, of those that are called in the order of `generate`."""
        found: dict[str, Any] = {}
        least, count = [1], 0
        for kind, name in reversed(_KINDS):
            if count < len(processors) and type(processors[-1 - count]) is getattr(logits_process, kind, None):
                settings = vars(processors[-1 - count])
                if name != "temperature":
                    if settings.get("filter_value") != -math.inf:
                        break
                    least.append(settings.get("min_tokens_to_keep", 1))
                found[name] = settings[name]
                count += 1
        return cls(**{name: found.get(name) for _, name in _KINDS}, least=max(least), count=count)

    def draw(self, scores: torch.Tensor, noise_of: Callable[[torch.Tensor], torch.Tensor]) -> Drawn | None:
        """Draw a token for each of N places, as the processors, softmax and a race against noise do (choice.py).

        Args:
            scores (`(N, V)`, float32 or of 16 bits): scores before the processors, which float32 holds exactly.
            noise_of: function from tokens `(N, m)` to their noise `(N, m)`.

        Returns:
            `None` where the vocabulary is too small.
        """
        wanted = (self.top_k or _NUCLEUS) + _SPARE
        if scores.dtype.itemsize > 4 or scores.shape[1] < _SMALL * wanted:
            return None
        found, tokens, limit = _largest(scores, wanted)
        largest, bound = found.float(), limit.float()
        if self.temperature is not None:
            largest, bound = largest / self.temperature, bound / self.temperature
        sure = largest[:, 0].isfinite()
        logs = largest.double() - largest[:, :1].double()  # of weights relative to the first one's
        certain = torch.ones_like(largest, dtype=torch.bool)  # retained
        possible = certain  # retained, or too close to call
        are_all = torch.zeros_like(sure)  # whether no other token can be retained
        if self.top_k is not None:
            last = largest[:, self.top_k - 1 : self.top_k]
            certain = possible = largest >= last
            are_all = bound < last[:, 0]
        if self.top_p is not None or self.min_p is not None:
            # Equal scores are sorted in any order: one of them may be the first or the last.
            place, place_if_last = _of_equals(largest, torch.arange(wanted, device=scores.device).expand_as(largest))
        if self.top_p is not None:
            weights = logs.exp() * possible
            if self.top_k is None:
                total = self._mass(scores, largest[:, :1])
            else:
                total = weights.sum(dim=1, keepdim=True)
                sure &= are_all  # else more tokens equal the last one than are looked at
            above = (weights.cumsum(dim=1) - weights) / total
            above, above_if_last = _of_equals(largest, above)
            certain = certain & ((above_if_last < self.top_p - APART) | (place_if_last < self.least))
            possible = possible & ((above < self.top_p + APART) | (place < self.least))
            are_all |= (weights * (largest > bound[:, None])).sum(dim=1) / total[:, 0] > self.top_p + APART
        if self.min_p is not None:
            smallest = math.log(self.min_p) if self.min_p else -math.inf
            certain = certain & ((logs > smallest + APART) | (place_if_last < self.least))
            possible = possible & ((logs > smallest - APART) | (place < self.least))
            are_all |= bound.double() - largest[:, 0].double() < smallest - APART
        race, winners = (logs - noise_of(tokens).double().log()).masked_fill_(~possible, -math.inf).topk(2)
        first = winners[:, :1]
        sure &= are_all & certain.gather(1, first)[:, 0] & (race[:, 0] - race[:, 1] > APART)
        logs = logs.masked_fill_(~possible, -math.inf)
        chances = (logs.gather(1, first) - logs.logsumexp(dim=1, keepdim=True)).exp()
        return Drawn(tokens.gather(1, first)[:, 0], chances[:, 0], sure)

    def _mass(self, scores: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return the sum of all e^(s − largest), `(N, 1)`."""
        scores = scores.float()
        if self.temperature is not None:
            scores = scores / self.temperature
        return (scores - largest).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)


_KINDS = (
    ("TemperatureLogitsWarper", "temperature"),
    ("TopKLogitsWarper", "top_k"),
    ("TopPLogitsWarper", "top_p"),
    ("MinPLogitsWarper", "min_p"),
)
"""Classes of transformers, in the order in which `generate` calls them, and the attribute that each is set by."""


def _of_equals(sorted_scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values `(N, m)`, which grow from score to score, at the first and at the last of equal scores `(N, m)`."""
    differs = sorted_scores[:, 1:] != sorted_scores[:, :-1]
    is_first, is_last = (torch.nn.functional.pad(differs, side, value=True) for side in ((1, 0), (0, 1)))
    firsts = values.masked_fill(~is_first, 0).cummax(dim=1).values
    most = math.inf if values.is_floating_point() else values.shape[1]
    return firsts, values.masked_fill(~is_last, most).flip(1).cummin(dim=1).values.flip(1)


def _largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find large scores by the maxima of groups: at most as many groups as scores have to be opened.

    Args:
        scores: the scores, `(N, V)`.
        count: number of scores to be found.

    Returns:
        Scores `(N, count)` in descending order, their tokens, and a bound `(N,)`: no other score is greater.
    """
    groups = max(_GROUPS, 2 * count)
    groups = min(groups, scores.shape[1] // 2)
    size = scores.shape[1] // groups
    grouped = scores[:, : size * groups].reshape(-1, size, groups)
    best, opened = grouped.amax(dim=1).topk(count)
    of_groups = grouped.gather(2, opened[:, None].expand(-1, size, -1)).flatten(1)
    tokens = (opened[:, None] + torch.arange(size, device=scores.device)[:, None] * groups).flatten(1)
    rest = torch.arange(size * groups, scores.shape[1], device=scores.device)
    candidates = torch.cat((of_groups, scores[:, size * groups :]), dim=1)
    tokens = torch.cat((tokens, rest.expand(len(scores), -1)), dim=1)
    found, at = candidates.topk(count)
    return found, tokens.gather(1, at), torch.maximum(best[:, -1], found[:, -1])
