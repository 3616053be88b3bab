"""Statistics of self-speculative decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config.values import BITWISE, NUMERIC

if TYPE_CHECKING:
    from ..forward.forward import Forward

__all__ = ["SpeculationStatistics"]


@dataclass
class SpeculationStatistics:
    """Counts and times of one `generate` call.

    A *round* is one pass of the target over what was drafted, after the pass over the prompt. In a batch each row that
    still generates counts for itself: two rows in one pass are two rounds here, and one in `target_passes`.

    Attributes:
        batch_size: rows generated at once.
        prompt_tokens: tokens of the prompt, padding included, per row.
        generated_tokens: new tokens, summed over rows; those of the prompt pass included, padding not.
        target_passes: passes of the target model, the prompt's included.
        draft_passes: passes of the model in skip mode (one drafted token per row each).
        drafted_by_depth: how often a token was drafted as the first, second, … of its round.
        judged_by_depth: how often all tokens before it were accepted, so that it was judged.
        accepted_by_depth: how often that token was accepted.
        looked_up_tokens: drafted tokens that prompt lookup copied; the others the model drafted itself.
        accepted_looked_up_tokens: how many of them the target accepted.
        round_accepted: per row and round, how many drafted tokens were accepted and taken; the round added one token
            more (unless a stop cut it short). Where all rows of a batch have to take the same number, one that accepted
            more takes no more.
        round_looked_up: per row and round, how many of the accepted tokens were looked up: the last ones.
        new_tokens: per row, the new tokens, padding not counted.
        draft_seconds: time in drafting.
        verify_seconds: time in the target's passes after the prompt's.
        prompt_seconds: time in the target's pass over the prompt.
        total_seconds: time of the whole decoding loop, the prompt's pass included.
        policy_state: what the draft-length policy had learnt at the end.
        refinement: where the draft is refined online (`adapt`): passes that judged drafts, seconds that they took,
            changes of the draft, all since the first call, why the model's drafts cannot be judged (`reason`, `None`
            where they can), and the config with the draft as it is now; else `None`.
        refusal: why nothing could be drafted with this model, so that transformers decoded the text; else `None`.
        reused_tokens: tokens of the prompt whose keys and values an earlier call had computed (`prefix_cache`).
        exactness: "bitwise": the bits of the target's logits did not depend on what was drafted. "numeric": they may
            have, by rounding.
        exactness_reason: why it is not "bitwise"; else `None`.
        replayed_passes: how many of the target's passes were replayed as CUDA graphs.
        replay_refusal: why passes that might be replayed were not; else `None`.
    """

    batch_size: int = 1
    prompt_tokens: int = 0
    generated_tokens: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    judged_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    looked_up_tokens: int = 0
    accepted_looked_up_tokens: int = 0
    round_accepted: list[list[int]] = field(default_factory=list)
    round_looked_up: list[list[int]] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prompt_seconds: float = 0.0
    total_seconds: float = 0.0
    policy_state: dict[str, float] = field(default_factory=dict)
    refinement: dict[str, Any] | None = None
    refusal: str | None = None
    reused_tokens: int = 0
    exactness: str = "numeric"
    exactness_reason: str | None = None
    replayed_passes: int = 0
    replay_refusal: str | None = None

    @classmethod
    def of_batch(cls, batch: int, prompt_tokens: int) -> SpeculationStatistics:
        """Create the statistics of a call that begins.

        Args:
            batch: number of rows, B.
            prompt_tokens: number of tokens of each row's prompt, padding included.
        """
        return cls(
            batch_size=batch,
            prompt_tokens=prompt_tokens,
            round_accepted=[[] for _ in range(batch)],
            new_tokens=[0] * batch,
        )

    @classmethod
    def of_plain(
        cls, texts: Sequence[Sequence[int]], prompt: int, ends: frozenset[int], refusal: str, seconds: float = 0.0
    ) -> SpeculationStatistics:
        """Create the statistics of texts that transformers decoded, since nothing could be drafted.

        Args:
            texts: new tokens of each row, followed by padding.
            prompt: number of tokens of the prompt, padding included.
            ends: the tokens that end a text.
            refusal: why nothing could be drafted.
            seconds: time that it took.
        """
        new = [next((i + 1 for i, token in enumerate(text) if token in ends), len(text)) for text in texts]
        return cls(
            batch_size=len(texts),
            prompt_tokens=prompt,
            generated_tokens=sum(new),
            target_passes=max(new, default=0),
            new_tokens=new,
            round_accepted=[[0] * max(count - 1, 0) for count in new],
            round_looked_up=[[0] * max(count - 1, 0) for count in new],
            verify_seconds=seconds,
            total_seconds=seconds,
            refusal=refusal,
        )

    def note_passes(self, forward: Forward, reason: str | None, reused: int = 0, keeps_bits: bool = True) -> None:
        """Note how the passes of a call were run, and whether the bits of its text may depend on what was drafted.

        Args:
            forward: the passes.
            reason: why the bits may, from the `PassPlan`.
            reused: number of prompt tokens whose keys and values an earlier call had computed.
            keeps_bits: whether these have the bits that this call would have computed.
        """
        self.reused_tokens = reused
        self.exactness = BITWISE if forward.is_bitwise else NUMERIC
        self.exactness_reason = None if forward.is_bitwise else reason or "a pass was run by the model's own code"
        self.replayed_passes, self.replay_refusal = forward.replayed_passes, forward.replay_refusal
        if reused and not keeps_bits:
            self.exactness, self.exactness_reason = NUMERIC, "an earlier call computed the beginning of its prompt"

    def record_round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        rows: Sequence[int],
        self_drafted: Sequence[int] | None = None,
        added: Sequence[int] | None = None,
    ) -> None:
        """Add one verified round.

        Args:
            drafted: tokens drafted, per row of the batch.
            accepted: how many of them were accepted, per row of the batch.
            rows: the rows that took part.
            self_drafted: how many of the drafted tokens, the first ones, the model drafted itself, per row of the
                batch; by default all.
            added: tokens that the round added, per row of the batch, where that may be fewer than were accepted and one
                more.
        """
        self.round_looked_up += [[] for _ in range(len(self.round_looked_up), len(self.round_accepted))]
        for row in rows:
            looked_up, taken = 0, accepted[row] if added is None else min(accepted[row], added[row] - 1)
            if self_drafted is not None:
                looked_up = max(taken - self_drafted[row], 0)
                self.looked_up_tokens += drafted[row] - self_drafted[row]
                self.accepted_looked_up_tokens += max(accepted[row] - self_drafted[row], 0)
            self.round_looked_up[row].append(looked_up)
            while len(self.drafted_by_depth) < drafted[row]:
                self.drafted_by_depth.append(0)
                self.judged_by_depth.append(0)
                self.accepted_by_depth.append(0)
            for depth in range(drafted[row]):
                self.drafted_by_depth[depth] += 1
                self.judged_by_depth[depth] += depth <= accepted[row]
                self.accepted_by_depth[depth] += depth < accepted[row]
            self.round_accepted[row].append(taken)

    @property
    def rounds(self) -> int:
        """Number of rounds, summed over rows."""
        return sum(len(row) for row in self.round_accepted)

    @property
    def drafted_tokens(self) -> int:
        """Number of tokens drafted."""
        return sum(self.drafted_by_depth)

    @property
    def self_drafted_tokens(self) -> int:
        """Number of tokens that the model drafted itself, each in a pass; looked-up ones are free."""
        return self.drafted_tokens - self.looked_up_tokens

    @property
    def accepted_tokens(self) -> int:
        """Number of drafted tokens that the target accepted."""
        return sum(self.accepted_by_depth)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; `None` where nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Probability that the first, second, … token of a round is accepted, given that those before it were.

        A token after a rejected one is not judged, so each depth counts only the rounds that reached it.
        """
        return [
            accepted / judged if judged else 0.0
            for accepted, judged in zip(self.accepted_by_depth, self.judged_by_depth, strict=True)
        ]

    @property
    def tokens_per_round(self) -> float | None:
        """Mean number of tokens a round added; `None` where there was no round."""
        return 1 + sum(map(sum, self.round_accepted)) / self.rounds if self.rounds else None

    @property
    def tokens_per_round_histogram(self) -> dict[int, int]:
        """Number of rounds that added 1, 2, … tokens."""
        return dict(sorted(Counter(n + 1 for row in self.round_accepted for n in row).items()))

    @property
    def token_sources(self) -> list[list[str]]:
        """Source of each new token, per row: "drafted" by the model itself, "looked up", or decided by the "target"."""
        sources = []
        for row, tokens in enumerate(self.new_tokens):
            names = ["target"]  # the prompt's pass gives the first token
            rounds = zip(self.round_accepted[row], self.round_looked_up[row], strict=True) if self.rounds else ()
            for accepted, looked_up in rounds:
                names += ["drafted"] * (accepted - looked_up) + ["looked up"] * looked_up + ["target"]
            sources.append(names[:tokens])
        return sources

    def theoretical_speedup(self, draft_cost: float, verify_cost: float) -> float | None:
        """Return the speed-up over plain decoding that this acceptance allows at given costs, overheads left out.

        `S = mean tokens per round / (mean self-drafted tokens per round · c + v)` (the measured form of Leviathan et
        al., arXiv 2211.17192, theorem 3.8, for a varying draft length).

        Args:
            draft_cost: c, one draft step / one plain step.
            verify_cost: v, one verification pass / one plain step.

        Returns:
            S, or `None` where there was no round.
        """
        if not self.rounds or self.tokens_per_round is None:
            return None
        return self.tokens_per_round / (self.self_drafted_tokens / self.rounds * draft_cost + verify_cost)

    def __str__(self) -> str:
        """Summarise the call in a sentence."""
        summary = f"{self.generated_tokens} tokens in {self.target_passes} passes of the target model"
        if not self.drafted_tokens:
            why = f": {self.refusal}" if self.refusal else ""
            return f"{summary}, {self.total_seconds:.2f} s; nothing was drafted{why}."
        looked_up = f" ({self.looked_up_tokens} of them looked up)" if self.looked_up_tokens else ""
        return (
            f"{summary} and {self.draft_passes} of the draft, {self.total_seconds:.2f} s: {self.drafted_tokens} tokens "
            f"drafted{looked_up}, {self.accepted_tokens} accepted ({self.acceptance_rate:.0%}), "
            f"{self.tokens_per_round:.2f} tokens per round."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, times and derived figures, as plain JSON types."""
        return {
            "batch_size": self.batch_size,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "target_passes": self.target_passes,
            "draft_passes": self.draft_passes,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "looked_up_tokens": self.looked_up_tokens,
            "accepted_looked_up_tokens": self.accepted_looked_up_tokens,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_depth": self.acceptance_by_depth,
            "tokens_per_round": self.tokens_per_round,
            "tokens_per_round_histogram": {str(k): v for k, v in self.tokens_per_round_histogram.items()},
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "prompt_seconds": self.prompt_seconds,
            "total_seconds": self.total_seconds,
            "policy_state": dict(self.policy_state),
            "reused_tokens": self.reused_tokens,
            "exactness": self.exactness,
            **({} if self.exactness_reason is None else {"exactness_reason": self.exactness_reason}),
            **({} if self.refinement is None else {"refinement": self.refinement}),
            **({} if self.refusal is None else {"refusal": self.refusal}),
        }
