"""Drafter that uses the model itself, and continues its draft by n-gram lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..config import LookupConfig, SelfSpeculativeConfig
from ..forward.forward import Forward
from ..forward.structure.sublayers import layout_of
from ..support.devices import sent
from .drafter import Draft, Drafter, Texts
from .lookup import NGramIndex
from .ngram_store import NGramStore, RememberingIndex
from .policy import NO_MATCH, DraftPolicy, Match, make_policy

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["SelfDrafter", "self_drafter"]


class SelfDrafter(Drafter):
    """Drafter by the model in skip mode or from low-bit copies of its weights, by n-gram lookup, or by both.

    The model's own draft comes first; the tokens that lookup finds after it are appended.

    Args:
        forward: the model's passes; its draft is set to that of the config.
        config: config of the draft.
        policy: draft-length policy.
        eos_token_ids: tokens after which nothing is drafted.
        batch: number of rows, B.
        keeps_scores: whether drafts come with the scores that their tokens were drawn from.
        store: texts of earlier calls, searched by lookup as well; `None` for none.
        prepare: makes a part of what the model needs for its own drafts, and returns whether all is there: called when
            it would draft next. Until then lookup drafts alone. `None`: it is made beforehand.

    Raises:
        ValueError: the skip set does not fit the model, or low-bit copies cannot be made of it.
    """

    def __init__(
        self,
        forward: Forward,
        config: SelfSpeculativeConfig,
        policy: DraftPolicy,
        eos_token_ids: frozenset[int],
        batch: int = 1,
        keeps_scores: bool = False,
        store: NGramStore | None = None,
        prepare: Callable[[], bool] | None = None,
    ) -> None:
        self.forward = forward
        self._prepare = prepare
        self.eos_token_ids = eos_token_ids
        self.keeps_scores = keeps_scores
        self.draft_passes = 0
        self.indexes = None if config.lookup is None else [_new_index(config.lookup, store) for _ in range(batch)]
        self.draft_by(config, policy)

    def draft_by(self, config: SelfSpeculativeConfig, policy: DraftPolicy) -> None:
        """Draft by this config from the next round on.

        Args:
            config: config of the draft; its lookup is that of the previous config.
            policy: draft-length policy.
        """
        self.config = config
        self.policy = policy
        if self.is_prepared:
            self.forward.draft_by(config)

    @property
    def is_prepared(self) -> bool:
        """True if the model can draft itself now."""
        return self._prepare is None

    def _prepare_more(self) -> bool:
        """Make a part of what the model's own drafts need; return whether all is there."""
        if self._prepare is not None and self._prepare():
            self._prepare = None
            self.forward.draft_by(self.config)
        return self.is_prepared

    def state(self) -> dict[str, float]:
        """Return what the draft-length policy has learnt."""
        return self.policy.state()

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:
        """Update the draft-length policy with the outcome of a round; arguments as in `Drafter.learn`."""
        for row in rows:
            self.policy.update(
                draft.self_lengths[row],
                min(accepted[row], draft.lengths[row]),
                reached_end=draft.complete[row],
                looked_up=draft.lengths[row] - draft.self_lengths[row],
                match=draft.matches[row],
            )

    # ------------------------------------------------------------------------------------------------------------------

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        """Draft as far as the policy says, at most `limits` tokens; see `Drafter.propose`."""
        rows = [row for row, limit in enumerate(limits) if limit > 0]
        if texts.batch > 1 and rows:
            packed = texts.batch if self.forward.plan.captured and not texts.lockstep else 0
            self.policy.begin_round([texts.lengths[row] for row in rows], packed)
            # All texts take as many rounds as the slowest one.
            shortest = min(texts.lengths[row] for row in rows)
            rows = [row for row in rows if texts.lengths[row] <= shortest + self.policy.lead]
        if self.indexes is not None:
            for row in rows:
                self.indexes[row].extend(texts.text(row, len(self.indexes[row])))
        wanted, offers = [0] * texts.batch, {row: self._offer(row) for row in rows}
        for row in rows:
            length = self.policy.draft_length(limits[row], Match(len(offers[row][0]), offers[row][1]))
            wanted[row] = length if self.config.drafts_itself else 0  # "fixed" and "confidence" do not check this
        if any(wanted) and not self._prepare_more():
            wanted = [0] * texts.batch
        draft, read = self._draft(texts, rows, wanted)
        if self.indexes is not None:
            self._look_up(draft, read, offers, limits)
        return draft

    def _offer(self, row: int, drafted: Sequence[int] = ()) -> tuple[list[int], int]:
        """Return the tokens that lookup offers after a row's drafted ones, and the length of the match."""
        return ([], 0) if self.indexes is None else self.indexes[row].find(drafted)

    def _draft(self, texts: Texts, rows: list[int], wanted: list[int]) -> tuple[Draft, list[list[int]]]:
        """Draft with the model; return the draft and, per row, its tokens that were read back from the device."""
        length, lengths = max(wanted, default=0), list(wanted)
        tokens: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        read: list[list[int]] = [[] for _ in wanted]
        if length:
            # Reading a token back makes the host wait for the device; on the CPU that costs nothing.
            on_cpu = self.forward.device.type == "cpu"
            reads = on_cpu and (bool(self.eos_token_ids) or self.indexes is not None)
            looks = reads or self.keeps_scores or self.policy.needs_probability or not texts.are_greedy
            with self.forward.draft(texts.context, texts.batch, length) as passes:
                chain = None if looks else passes.chain(texts.text(0, texts.lengths[0] - 1)[0], length)
                if chain is not None:
                    self.draft_passes += length
                    return self._drafted(chain, None, lengths, wanted), read
                token = pending = texts.pending
                for depth in range(length):
                    logits = passes(token, depth)[:, -1].to(dtype=torch.float32, device=pending.device)
                    drawn, wants = None, self.policy.needs_probability
                    if texts.has_processors:
                        with passes.paused():
                            drafted = torch.cat(tokens, dim=1) if tokens else pending[:, :0]
                            drawn = None if self.keeps_scores else texts.draw(drafted, logits)
                            # A copy: processors may write into their input, which may be a view of the model's output.
                            logits = logits if drawn is not None else texts.process(drafted, logits.clone())
                    token = (texts.choose(logits, depth) if drawn is None else drawn[0])[:, None]
                    tokens.append(token)
                    probability = None
                    if wants:
                        probability = _probability(logits, token) if drawn is None else drawn[1]
                    if self.keeps_scores:
                        scores.append(logits)
                    if reads:
                        for row, number in enumerate(token.squeeze(1).tolist()):
                            read[row].append(number)
                    if depth + 1 < length and (reads or probability is not None):
                        self._end_rows(rows, lengths, depth + 1, probability, read if reads else None)
                        if max(lengths) <= depth + 1:
                            break
        self.draft_passes += len(tokens)
        # Where nothing is drafted here, the tokens that lookup adds are known to the host, and stay there.
        drafted = torch.cat(tokens, dim=1) if tokens else torch.zeros((texts.batch, 0), dtype=torch.long, device="cpu")
        return self._drafted(drafted, torch.stack(scores, dim=1) if scores else None, lengths, wanted), read

    @staticmethod
    def _drafted(tokens: torch.Tensor, scores: torch.Tensor | None, lengths: list[int], wanted: list[int]) -> Draft:
        return Draft(
            tokens=tokens,
            scores=scores,
            lengths=lengths,
            self_lengths=list(lengths),
            matches=[NO_MATCH] * len(wanted),
            complete=[made == asked for made, asked in zip(lengths, wanted, strict=True)],
        )

    def _end_rows(
        self,
        rows: list[int],
        lengths: list[int],
        depth: int,
        probability: torch.Tensor | None,
        read: list[list[int]] | None,
    ) -> None:
        """Cut the draft of rows that end here: after an end of sequence, or where the policy stops."""
        confidence = probability.tolist() if probability is not None else [1.0] * len(lengths)
        for row in rows:
            if lengths[row] <= depth:
                continue
            ended = read is not None and read[row][-1] in self.eos_token_ids
            found, length = self._offer(row, read[row]) if read is not None and not ended else ([], 0)
            match = Match(len(found), length)
            if ended or not self.policy.keep_drafting(depth, confidence[row], match):
                lengths[row] = depth

    def _look_up(
        self,
        draft: Draft,
        read: list[list[int]],
        offers: dict[int, tuple[list[int], int]],
        limits: Sequence[int],
    ) -> None:
        """Append looked-up tokens to each row's own, as many as the policy says.

        Args:
            draft: the rows' own tokens; looked-up ones are added.
            read: per row, its tokens that were read back from the device.
            offers: `_offer` of each row that drafts, before its own tokens.
            limits: per row, the most tokens to draft.
        """
        width = draft.tokens.shape[1]
        copied: list[list[int]] = [[] for _ in draft.lengths]
        for row, offer in offers.items():
            drafted = draft.self_lengths[row]
            own = (read[row] if len(read[row]) == width else draft.tokens[row].tolist())[:drafted]
            if own and own[-1] in self.eos_token_ids:
                continue
            found, length = self._offer(row, own) if own else offer
            draft.matches[row] = Match(len(found), length)
            found = found[: self.policy.lookup_length(drafted, draft.matches[row], limits[row] - drafted)]
            end = next((place + 1 for place, token in enumerate(found) if token in self.eos_token_ids), len(found))
            copied[row] = found[:end]
            draft.lengths[row] = drafted + len(copied[row])
        if not any(copied):
            return
        total = max(draft.lengths)
        tokens = torch.nn.functional.pad(draft.tokens[:, :total], (0, max(total - width, 0)))
        for row, found in enumerate(copied):
            if found:
                first = draft.self_lengths[row]
                tokens[row, first : first + len(found)] = sent(found, tokens.device)
        draft.tokens = tokens


def _probability(scores: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores `(B, V)` at one token `(B, 1)` alone, of shape `(B,)`."""
    return torch.exp(scores.gather(1, token).squeeze(1) - torch.logsumexp(scores, dim=-1))


def _new_index(lookup: LookupConfig, store: NGramStore | None) -> NGramIndex:
    sizes = lookup.max_ngram, lookup.min_ngram, lookup.max_tokens
    return NGramIndex(*sizes) if store is None else RememberingIndex(store, *sizes)


def self_drafter(
    forward: Forward,
    config: SelfSpeculativeConfig,
    generation_config: GenerationConfig,
    policy: DraftPolicy | None = None,
    batch: int = 1,
    keeps_scores: bool = False,
    store: NGramStore | None = None,
    prepare: Callable[[], bool] | None = None,
) -> SelfDrafter:
    """Build the drafter of a config for a call.

    Args:
        forward: the model's passes.
        config: config of the draft and its length.
        generation_config: the prepared generation config of the call.
        policy: draft-length policy; by default a new one.
        batch: number of rows, B.
        keeps_scores, store, prepare: as in `SelfDrafter`.

    Raises:
        ValueError: as `SelfSpeculativeCandidateGenerator`.
    """
    model = forward.model
    config.validate_for(
        num_layers=len(layout_of(model)), model_type=model.config.get_text_config(decoder=True).model_type
    )
    if policy is None:
        policy = make_policy(
            config.drafting, config.costs, self_drafts=config.drafts_itself, lookup=config.lookup is not None
        )
    eos = getattr(generation_config, "_eos_token_tensor", None)
    ends = frozenset(eos.tolist()) if eos is not None else frozenset()
    return SelfDrafter(forward, config, policy, ends, batch, keeps_scores, store, prepare)
