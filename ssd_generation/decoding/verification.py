"""Which drafted tokens to keep, and which token follows them: pure tensor functions.

B rows, k drafted tokens at most, V words. One pass of the target over the token before the draft and the k drafted ones
gives k + 1 distributions p_1 … p_{k+1}: p_i judges drafted token i, and p_{k+1} is free. Row r drafted `lengths[r] ≤ k`
tokens; what stands in its other columns is ignored.
"""

from __future__ import annotations

import torch

from ..drafting.drafter import Draft
from ..support.tensors import argmax

__all__ = ["accept", "accept_greedy", "accept_sampled"]


def accept(draft: Draft, scores: torch.Tensor, do_sample: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a draft: greedily, or by speculative sampling.

    Args:
        draft: k drafted tokens per row at the most.
        scores (`torch.FloatTensor` of shape `(B, k + 1, V)`): the target's scores after all logits processors.
        do_sample: whether tokens are drawn.

    Returns:
        The number of drafted tokens kept, and the token that follows them; each of shape `(B,)`.
    """
    batch, drafted = draft.tokens.shape
    if not drafted:
        kept = torch.zeros(batch, dtype=torch.long, device=scores.device)
        if do_sample:
            return kept, torch.multinomial(scores[:, 0].softmax(dim=-1), num_samples=1).squeeze(1)
        return kept, argmax(scores[:, 0])
    lengths = torch.tensor(draft.lengths, device=scores.device)
    if do_sample:
        return accept_sampled(draft.tokens, draft.distributions(scores.shape[-1]), scores, lengths)  # type: ignore[arg-type]
    return accept_greedy(draft.tokens, scores, lengths)  # type: ignore[arg-type]


def _leading(accepted: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of accepted tokens, of shape `(B,)`."""
    inside = torch.arange(accepted.shape[1], device=accepted.device) < lengths[:, None]
    return (accepted & inside).long().cumprod(dim=1).sum(dim=1)


def accept_greedy(
    drafted: torch.LongTensor, scores: torch.Tensor, lengths: torch.LongTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy verification: keep drafted tokens while they are the target's own choice.

    Args:
        drafted (`torch.LongTensor` of shape `(B, k)`): drafted tokens.
        scores (`torch.FloatTensor` of shape `(B, k + 1, V)`): the target's scores after all logits processors.
        lengths (`torch.LongTensor` of shape `(B,)`): tokens drafted per row, 0 … k.

    Returns:
        The number of drafted tokens kept, n, and the token that follows them, the argmax of the scores behind the last
        kept token; each of shape `(B,)`.
    """
    choices = argmax(scores)
    kept = _leading(drafted == choices[:, :-1], lengths)
    return kept, choices.gather(1, kept[:, None]).squeeze(1)


def accept_sampled(
    drafted: torch.LongTensor,
    draft_scores: torch.Tensor | None,
    scores: torch.Tensor,
    lengths: torch.LongTensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Token x_i, drawn from q_i, is kept with probability min(1, p_i(x_i) / q_i(x_i)). Behind the n kept ones, the next
    token is drawn from norm(max(0, p_{n+1} − q_{n+1})) after a rejection, else from p_{n+1}. So the tokens are
    distributed exactly as if each had been drawn from p.

    Args:
        drafted (`torch.LongTensor` of shape `(B, k)`): drafted tokens.
        draft_scores (`torch.FloatTensor` of shape `(B, k, V)`): the scores, after all logits processors, whose softmax
        q each
            token was drawn from. `None` where nothing was drafted.
        scores (`torch.FloatTensor` of shape `(B, k + 1, V)`): the target's scores after all logits processors.
        lengths (`torch.LongTensor` of shape `(B,)`): tokens drafted per row, 0 … k.

    Returns:
        The number of drafted tokens kept, n, and the token that follows them; each of shape `(B,)`.
    """
    p = scores.softmax(dim=-1)
    batch, length = drafted.shape
    if draft_scores is None or length == 0:
        return lengths.new_zeros(batch), torch.multinomial(p[:, 0], num_samples=1).squeeze(1)
    q = draft_scores.softmax(dim=-1)

    p_x = p[:, :-1].gather(2, drafted[..., None]).squeeze(2)
    q_x = q.gather(2, drafted[..., None]).squeeze(2)
    # u < p/q, without the division: q may be 0 in columns that are ignored.
    kept = _leading(torch.rand_like(p_x) * q_x < p_x, lengths)

    rows = torch.arange(batch, device=drafted.device)
    p_next = p[rows, kept]
    q_next = q[rows, kept.clamp(max=length - 1)]
    rejected = (kept < lengths)[:, None]
    residual = torch.where(rejected, (p_next - q_next).clamp(min=0), p_next)
    # p = q up to rounding leaves nothing to draw from; then p itself is the right distribution, since such a token is
    # never rejected in exact arithmetic.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_next)
    return kept, torch.multinomial(residual, num_samples=1).squeeze(1)
