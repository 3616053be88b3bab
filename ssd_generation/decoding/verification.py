"""Which drafted tokens to keep, and which token follows them: pure tensor functions.

B rows, k drafted tokens at most. One pass of the target over the token before the draft and the k drafted ones gives
k + 1 tokens of its own (`Choice.choose`): the i-th judges drafted token i, and the last one is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..support.devices import sent
from .choice import IMPOSSIBLE

__all__ = ["accept"]


def accept(drafted: torch.Tensor, lengths: Sequence[int], choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep drafted tokens while they are the target's own.

    Args:
        drafted (`torch.LongTensor` of shape `(B, k)`): k drafted tokens per row at the most.
        lengths: row r drafted `lengths[r] ≤ k`, what stands in its other columns is ignored.
        choices (`torch.LongTensor` of shape `(B, k + 1)`): the target's own tokens, greedy or sampled.

    Returns:
        The number of drafted tokens kept, n, and the token that follows them, the target's behind the last kept one;
        each of shape `(B,)`. Where that one is impossible, a row stops a token earlier; where nothing comes before it,
        the token is `IMPOSSIBLE`.
    """
    batch, most = drafted.shape
    if not most:
        return torch.zeros(batch, dtype=torch.long, device=choices.device), choices[:, 0]
    inside = torch.arange(most, device=choices.device) < sent(lengths, choices.device)[:, None]
    kept = ((drafted == choices[:, :-1]) & inside).long().cumprod(dim=1).sum(dim=1)
    following = choices.gather(1, kept[:, None]).squeeze(1)
    # The tokens before come first: plain decoding fails with them committed.
    kept = kept - ((following == IMPOSSIBLE) & (kept > 0)).long()
    return kept, choices.gather(1, kept[:, None]).squeeze(1)
