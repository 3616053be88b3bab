"""Winners of exponential races among all scores by a JIT-compiled kernel (race_code.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .kernels import NAMES, bits_of, flags, kernel, record, run_once

__all__ = ["race"]

_LANES = 16


def race(scores: torch.Tensor, noise: Sequence[torch.Tensor], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Race with scores against noise.

    Args:
        scores: `(N, V)` of one of the three floating point types, without gaps.
        noise: of each place, `(V,)` float32, without gaps.
        temperature: divisor of the scores.

    Returns:
        The two largest s / T − ln e of each place, `(N, 2)` float32, and the token of the largest, `(N,)`; a key is NaN
        where one of the place's is.

    Raises:
        RuntimeError: no code can be compiled here.
    """
    count = len(scores)
    places = (ctypes.c_int64 * count)(*(row.data_ptr() for row in noise))
    found = torch.empty((count, 3, _LANES), dtype=torch.int32, device="cpu")
    own = record(
        kernel("race", NAMES[scores.dtype]),
        flags(count, 4),
        scores.data_ptr(),
        ctypes.addressof(places),
        found.data_ptr(),
        scores.shape[1],
        bits_of(temperature),
    )
    run_once()(ctypes.addressof(own), count, 0, 0, 0, 0, min(torch.get_num_threads(), count))
    keys, indexes = found[:, :2].view(torch.float32), found[:, 2]
    best, lane = keys[:, 0].max(dim=1)
    others = keys[:, 0].scatter(1, lane[:, None], keys[:, 1].gather(1, lane[:, None]))
    second = others.amax(dim=1)
    return torch.stack((best, second), dim=1), indexes.gather(1, lane[:, None])[:, 0].long()
