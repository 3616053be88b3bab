"""Padding at the left of the rows of a batch."""

from __future__ import annotations

import torch

__all__ = ["padding_at_left"]


def padding_at_left(mask: torch.Tensor) -> list[int] | None:
    """Return how many tokens of each row are masked, where these are at its left.

    Args:
        mask (`torch.Tensor` of shape `(B, n)`): 0 where a token is masked.

    Returns:
        The counts; `None` where other tokens are masked, too, or the last one is.
    """
    if mask.ndim != 2:
        return None
    seen = mask != 0
    if not bool((seen[:, 1:] >= seen[:, :-1]).all() & seen[:, -1].all()):
        return None
    padding: list[int] = (~seen).sum(dim=1).tolist()
    return padding
