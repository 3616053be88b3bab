"""Drafters of the decoding loop: their interface, and the objects exchanged with the loop."""

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
    """Texts of a batch as a drafter sees them: B rows, each with its own length."""

    @property
    def context(self) -> Context:
        """Context that a pass of the model continues: KV cache, mask, positions."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each row, the prompt's and the pending one included."""

    @property
    def batch(self) -> int:
        """Number of rows, B."""

    @property
    def lockstep(self) -> bool:
        """True if all rows take the same number of tokens in each round."""

    @property
    def pending(self) -> torch.Tensor:
        """Last token of each row, `(B, 1)`, not in the KV cache yet."""

    def text(self, row: int, start: int = 0) -> list[int]:
        """Return the tokens of a row from `start` on, including the prompt's and their padding."""

    @property
    def has_processors(self) -> bool:
        """True if the call has logits processors."""

    @property
    def are_greedy(self) -> bool:
        """True if `choose` takes the token with the largest logit."""

    def process(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return scores `(B, V)`: logits `(B, V)` after the drafted tokens `(B, i)`, as processed in the call."""

    def draw(self, drafted: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the tokens of `choose` and their probabilities, `(B,)` each, without processing all scores.

        Args:
            drafted (`torch.LongTensor` of shape `(B, i)`): tokens drafted before.
            logits (`torch.FloatTensor` of shape `(B, V)`): the model's after them.

        Returns:
            `None` where that is not possible. A few tokens may be others than those of `choose`.
        """

    def choose(self, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """Return the tokens `(B,)` that plain decoding would take after `ahead` drafted ones, by scores `(B, V)`.

        Under sampling they are drawn with the very noise with which the target's own token is drawn at that place, so
        that a draft whose scores are close to the target's takes the same token.
        """


@dataclass
class Draft:
    """Drafted tokens of one round.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, k)`): per row, tokens that the model drafted itself, followed by tokens
            that were copied from somewhere; anything beyond `lengths` is ignored. On the model's device, or on the CPU,
            which is better where the host knows them.
        lengths: number of tokens drafted per row, 0 … k.
        self_lengths: how many of them, the first ones, the model drafted itself.
        scores (`torch.FloatTensor` of shape `(B, ≥ max(self_lengths), V)`): scores after all logits processors, from
            whose softmax those were drawn. Only transformers' own assisted loop needs them; else `None`.
        matches: what n-gram lookup offered after them, per row.
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
        """Return a draft without tokens, which makes the round a plain decoding step."""
        return cls.of_tokens([()] * batch, device)

    @classmethod
    def of_tokens(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """Return a draft of tokens that were not drawn from a distribution: copied, guessed, computed.

        Args:
            rows: the tokens of each row; rows may have different numbers of them, or none.
            device: device of the tokens; the CPU is as good as the model's.
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
        """Return the scores `(B, k, V)` from whose softmax the tokens were drawn; a copied token has probability 1."""
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
    """Drafter of tokens for the decoding loop, which has the target model verify them.

    To write one, define `propose`; the rest has defaults. `generate(..., self_speculative=drafter)` takes it:

    ```python
    class RepeatLastToken(Drafter):
        def propose(self, texts, limits):
            return Draft.of_tokens([texts.text(row)[-1:] * min(4, limit) for row, limit in enumerate(limits)])
    ```

    Whatever is drafted, the text is the model's: a drafted token that the target would not have generated is dropped.
    One object serves one call at a time; what it learns may be carried from call to call.

    Attributes:
        draft_passes: number of passes of a model made for drafts so far, for the statistics.
    """

    draft_passes: int = 0

    @abstractmethod
    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        """Return the draft of one round.

        Args:
            texts: the current rows of the batch.
            limits: largest number of useful tokens, per row; 0 for a row that has ended or waits for others. More
                tokens are cut off.

        Returns:
            The draft; one without tokens makes the round a plain decoding step.
        """

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:  # noqa: B027 - may be ignored
        """Learn from the outcome of a round.

        Args:
            draft: the draft of the round.
            accepted: how many of the drafted tokens the target accepted, per row of the batch.
            rows: the rows that drafted.
        """

    def state(self) -> dict[str, Any]:
        """Return what was learnt, as plain numbers, for the statistics of the call."""
        return {}


class CheckedDrafter(Drafter):
    """Wrapper of a user's drafter that checks its drafts before the target model verifies them.

    Args:
        drafter: the drafter.
        vocabulary: size of the model's vocabulary, V.
    """

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.drafter = drafter
        self._vocabulary = vocabulary
        self._passes_before = drafter.draft_passes

    @property
    def draft_passes(self) -> int:  # type: ignore[override]
        """Number of passes made for drafts in this call."""
        return self.drafter.draft_passes - self._passes_before

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        """Return the drafter's own draft, cut to the limits.

        Raises:
            TypeError: it is not a `Draft`.
            ValueError: its tokens are not integers or not known to the model, or it does not fit this batch.
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
        """Pass on to `Drafter.learn` of the drafter."""
        self.drafter.learn(draft, accepted, rows)

    def state(self) -> dict[str, Any]:
        """Return `Drafter.state` of the drafter."""
        return self.drafter.state()
