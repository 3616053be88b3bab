"""What drafts for the decoding loop: the protocol, and what passes between the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..forward.forward import Context
from ..support.messages import shown
from .policy import NO_MATCH, Match

__all__ = ["CheckedDrafter", "Draft", "Drafter", "Texts"]


class Texts(Protocol):
    """The texts of a batch as a drafter sees them: B rows, each with its own length."""

    @property
    def context(self) -> Context:
        """What a pass of the model follows: KV cache, mask, positions."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row, the prompt's and the pending one included."""

    @property
    def batch(self) -> int:
        """Rows, B."""

    @property
    def pending(self) -> torch.Tensor:
        """The last token of each row, `(B, 1)`, which is not in the KV cache yet."""

    def text(self, row: int, start: int = 0) -> list[int]:
        """The tokens of a row from `start` on, the prompt's (padding included) among them."""

    @property
    def has_processors(self) -> bool:
        """Whether the call has logits processors."""

    @property
    def are_greedy(self) -> bool:
        """Whether the token with the largest logit is the one that `choose` takes."""

    def process(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores `(B, V)`: logits `(B, V)` behind the drafted tokens `(B, i)`, after the call's logits processors."""

    def choose(self, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """The tokens `(B,)` that plain decoding would take by scores `(B, V)` behind the first `ahead` drafted ones.

        Under sampling it draws with the very noise that the target's own token is drawn with at that place, so that a
        draft whose scores come near the target's takes the same token.
        """


@dataclass
class Draft:
    """The drafted tokens of one round.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, k)`): per row, tokens that the model drafted itself and behind them
            tokens that were copied from somewhere; what stands behind `lengths` is ignored. On the model's device, or
            on the CPU, which is better where the host knows them.
        lengths: tokens drafted per row, 0 … k.
        self_lengths: how many of them, the first ones, the model drafted itself.
        scores (`torch.FloatTensor` of shape `(B, ≥ max(self_lengths), V)`): after all logits processors, whose softmax
            those were drawn from. Only transformers' own assisted loop needs them; else `None`.
        matches: what n-gram lookup offered behind them, per row.
        complete: per row, whether the model drafted as far as the policy said at first.
    """

    tokens: torch.Tensor
    lengths: list[int]
    self_lengths: list[int]
    scores: torch.Tensor | None
    matches: list[Match]
    complete: list[bool]

    @classmethod
    def none(cls, batch: int, device: torch.device | str = "cpu") -> Draft:
        """A draft without tokens, which makes the round a plain decoding step."""
        return cls.of_tokens([()] * batch, device)

    @classmethod
    def of_tokens(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """A draft of tokens that were not drawn from a distribution: copied, guessed, computed.

        Args:
            rows: the tokens of each row; rows may have different numbers of them, or none.
            device: where the tokens are to be; the CPU is as good as the model's.
        """
        lengths = [len(row) for row in rows]
        width = max(lengths, default=0)
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        return cls(
            tokens=torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width),
            lengths=lengths,
            self_lengths=[0] * len(rows),
            scores=None,
            matches=[NO_MATCH] * len(rows),
            complete=[True] * len(rows),
        )

    def distributions(self, vocabulary: int) -> torch.Tensor:
        """Scores `(B, k, V)` whose softmax each token was drawn from: all of it on one token where that was copied."""
        batch, length = self.tokens.shape
        if self.scores is not None and self.scores.shape[1] == length and self.lengths == self.self_lengths:
            return self.scores
        certain = self.tokens.new_full((batch, length, vocabulary), -torch.inf, dtype=torch.float32)
        certain.scatter_(2, self.tokens[..., None], 0.0)
        if self.scores is not None:
            for row, count in enumerate(self.self_lengths):
                certain[row, :count] = self.scores[row, :count]
        return certain


class Drafter(ABC):
    """Drafts tokens for the decoding loop, which has the target model verify them.

    To write one, define `propose`; the rest has defaults. `generate(..., self_speculative=drafter)` takes it:

    ```python
    class RepeatLastToken(Drafter):
        def propose(self, texts, limits):
            return Draft.of_tokens([texts.text(row)[-1:] * min(4, limit) for row, limit in enumerate(limits)])
    ```

    Whatever is drafted, the text is the model's: a drafted token that the target would not have generated is dropped.
    One object serves one call at a time; what it learns may be carried from call to call.

    Attributes:
        draft_passes: passes of a model made for drafts so far, for the statistics.
    """

    draft_passes: int = 0

    @abstractmethod
    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        """The draft of one round.

        Args:
            texts: the rows of the batch as they stand.
            limits: the most tokens that are of use, per row; 0 for a row that has ended or waits for others. More are
                cut off.

        Returns:
            The draft; one without tokens makes the round a plain decoding step.
        """

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:  # noqa: B027 - may be ignored
        """How a round went.

        Args:
            draft: what was drafted.
            accepted: how many of the drafted tokens the target accepted, per row of the batch.
            rows: the rows that drafted.
        """

    def state(self) -> dict[str, Any]:
        """What was learnt, as plain numbers, for the statistics of the call."""
        return {}


class CheckedDrafter(Drafter):
    """A drafter of somebody else's making, whose drafts are seen to be drafts before the target model is given them.

    Args:
        drafter: the drafter.
        vocabulary: tokens that the model knows, V.
    """

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.drafter = drafter
        self._vocabulary = vocabulary
        self._passes_before = drafter.draft_passes

    @property
    def draft_passes(self) -> int:  # type: ignore[override]
        """Passes made for drafts in this call."""
        return self.drafter.draft_passes - self._passes_before

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        """The drafter's own, cut to the limits.

        Raises:
            TypeError: it is no `Draft`, or its tokens are no integers.
            ValueError: it is not of this batch, or has tokens that the model does not know.
        """
        draft = self.drafter.propose(texts, limits)
        name = f"{type(self.drafter).__name__}.propose"
        if not isinstance(draft, Draft):
            raise TypeError(f"{name} must return a Draft, but returned {shown(draft)}. Make one with Draft.of_tokens.")
        tokens = draft.tokens
        if tokens.dtype != torch.long or tokens.ndim != 2 or tokens.shape[0] != texts.batch:
            raise ValueError(
                f"{name} must return tokens as a torch.LongTensor of shape ({texts.batch}, drafted tokens), but "
                f"returned {tokens.dtype} of shape {tuple(tokens.shape)}."
            )
        per_row = (draft.lengths, draft.self_lengths, draft.matches, draft.complete)
        if any(len(values) != texts.batch for values in per_row) or not all(
            0 <= own <= length <= tokens.shape[1] for own, length in zip(draft.self_lengths, draft.lengths, strict=True)
        ):
            raise ValueError(
                f"{name} must return lengths of 0 to {tokens.shape[1]} (as many as it has tokens) and self_lengths of "
                f"at most these, one of each per row, but returned lengths {shown(draft.lengths)} and self_lengths "
                f"{shown(draft.self_lengths)} for {texts.batch} rows."
            )
        if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < self._vocabulary):
            raise ValueError(
                f"{name} must return tokens from 0 to {self._vocabulary - 1}, but returned {int(tokens.min())} to "
                f"{int(tokens.max())}."
            )
        lengths = [min(length, max(limit, 0)) for length, limit in zip(draft.lengths, limits, strict=True)]
        return replace(
            draft,
            tokens=tokens[:, : max(lengths)],
            lengths=lengths,
            self_lengths=[min(own, length) for own, length in zip(draft.self_lengths, lengths, strict=True)],
        )

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:
        """As `Drafter.learn`."""
        self.drafter.learn(draft, accepted, rows)

    def state(self) -> dict[str, Any]:
        """As `Drafter.state`."""
        return self.drafter.state()
