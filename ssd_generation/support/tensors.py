"""Small tensor functions."""

from __future__ import annotations

import torch

__all__ = ["argmax"]


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(dim=-1)`, the first of equals.

    On the CPU NumPy's is used, which has the same rule for equals and NaN and takes a tenth of the time: over a large
    vocabulary torch's costs as much as a small layer.
    """
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        return torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)
