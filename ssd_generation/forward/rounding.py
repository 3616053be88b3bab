"""Comparison of the logits of two ways to run a pass: equal but for rounding, or not.

Two distances, each for its purpose: the greatest difference, where one pass is compared with another in the same state
of the cache; and the root mean square per token, where texts are compared whose caches have been rounded differently.
Both are in standard deviations of the logits, since those of a model have no scale of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["agree", "agree_on_average", "distances", "moved_embeddings"]

_GREATEST, _GREATEST_HALF = 1e-3, 0.1
_AVERAGE, _AVERAGE_HALF = 1e-3, 0.15
"""Standard deviations by which logits may differ, in float32 and in half precision."""


def agree(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Tell whether logits `(1, n, V)` of two ways to run a pass differ by rounding at most, by the greatest difference.

    Args:
        one, other: the logits.
        dtype: type that they were computed in; by default their own.
    """
    most = _GREATEST if (dtype or other.dtype) == torch.float32 else _GREATEST_HALF
    one, other = one.float(), other.float()
    return one.shape == other.shape and bool((one - other).abs().max() <= most * other.std())


def agree_on_average(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether logits of two ways to run a pass differ by rounding at most, by the root mean square.

    Args:
        got, expected: the logits; entries that are not finite must be so in both.
    """
    tolerance = _AVERAGE if expected.dtype == torch.float32 else _AVERAGE_HALF
    got, expected = got.float(), expected.float()
    if not bool(expected.isfinite().all()):
        return torch.equal(got.isfinite(), expected.isfinite())
    return bool((got - expected).square().mean().sqrt() <= tolerance * expected.std())


def distances(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the distance between the logits of two runs, per step and row, as a root mean square.

    Args:
        one, other: logits `(B, V)` of each step.

    Returns:
        `(steps, B)`, in standard deviations; infinite where entries are finite in one of the two alone.
    """
    found = []
    for mine, theirs in zip(one, other, strict=True):
        finite = mine.isfinite()
        same = (finite == theirs.isfinite()).all(dim=-1)
        a, b = (torch.where(finite, logits, 0.0).double() for logits in (mine, theirs))
        distance = (a - b).square().mean(dim=-1).sqrt() / a.std(dim=-1).clamp(min=1e-6)
        found.append(torch.where(same, distance.nan_to_num(torch.inf), torch.inf))
    return torch.stack(found)


def moved_embeddings(model: PreTrainedModel, ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return embeddings of tokens `(B, n)`, rounded differently: by a unit in the last place at most.

    Args:
        model: the target model.
        ids: the tokens.
        seed: seed of the rounding.
    """
    embedded: torch.Tensor = model.get_input_embeddings()(ids)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.rand(embedded.shape, generator=generator, device="cpu").to(embedded.device) * 2 - 1
    return (embedded * (1 + torch.finfo(model.dtype).eps * noise).to(torch.float32)).to(model.dtype)
