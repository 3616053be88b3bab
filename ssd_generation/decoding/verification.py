"""Verification of drafts: one pass of the target, which accepts the drafted tokens that are its own.

There are B rows and at most k drafted tokens. One pass of the target over the token before the draft and the k drafted
ones gives k + 1 tokens of its own (`Choice.choose`): the i-th judges drafted token i, and the last one is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..drafting.drafter import Draft
from ..forward.cuda_graph.single_pass import Tokens
from ..forward.forward import Forward
from ..support.devices import sent
from .batch_rows import Rows
from .choice import IMPOSSIBLE, SampledChoice
from .choice_graph import ChoiceGraph, choice_graph
from .commit import Committer
from .outputs import StepOutputs

__all__ = ["Verifier", "accept", "accept_known"]

_WORTH_RECORDING = 16
"""Shortest call, in new tokens, for which recording the sampler pays off."""


def accept(drafted: torch.Tensor, lengths: Sequence[int], choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafted tokens while they are the target's own.

    Args:
        drafted (`torch.LongTensor` of shape `(B, k)`): at most k drafted tokens per row.
        lengths: number of tokens drafted per row, at most k; the other columns of a row are ignored.
        choices (`torch.LongTensor` of shape `(B, k + 1)`): the target's own tokens, greedy or sampled.

    Returns:
        The number of drafted tokens accepted, n, and the target's own token that follows them; each of shape `(B,)`.
        Where that one is impossible, a row stops a token earlier; where nothing comes before it, the token is
        `IMPOSSIBLE`.
    """
    batch, most = drafted.shape
    if not most:
        return torch.zeros(batch, dtype=torch.long, device=choices.device), choices[:, 0]
    inside = torch.arange(most, device=choices.device) < sent(lengths, choices.device)[:, None]
    kept = ((drafted == choices[:, :-1]) & inside).long().cumprod(dim=1).sum(dim=1)
    following = choices.gather(1, kept[:, None]).squeeze(1)
    # The tokens before it come first: plain decoding commits them before it fails.
    kept = kept - ((following == IMPOSSIBLE) & (kept > 0)).long()
    return kept, choices.gather(1, kept[:, None]).squeeze(1)


def accept_known(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """Accept drafted tokens of a single row that the host knows, as `accept` does.

    Args:
        drafted: k drafted tokens.
        choices: the target's own k + 1 tokens.

    Returns:
        The number of drafted tokens accepted, n; `choices[n]` follows them.
    """
    kept = next((place for place, token in enumerate(drafted) if token != choices[place]), len(drafted))
    return kept - 1 if choices[kept] == IMPOSSIBLE and kept else kept


class _Verified(NamedTuple):
    """Verification pass.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, k)`): the drafted tokens.
        padded: rows that have ended and get padding instead.
        outcome: outputs of the model.
    """

    tokens: torch.Tensor
    padded: list[int]
    outcome: Any


class Verifier:
    """Verifier of a call's drafts.

    Args:
        forward: the target's passes.
        committer: committer of the call's steps.
        rows: the texts, with their first tokens.
    """

    def __init__(self, forward: Forward, committer: Committer, rows: Rows) -> None:
        self._forward, self._committer = forward, committer
        processors, limits = rows.processors, rows.limits
        is_recordable = processors.are_pure and processors.pure.setting is not None
        is_long = limits.max_length - rows.prompt_length >= _WORTH_RECORDING
        self._may_record = rows.choice.draws and is_recordable and is_long
        self._recorded: ChoiceGraph | None = None

    def verify(self, rows: Rows, draft: Draft, outputs: StepOutputs, active: list[bool]) -> list[int]:
        """Run the target, and extend rows by the drafted tokens that are its own and the one that follows them.

        Drafted tokens are accepted from the left.

        Args:
            rows: the texts.
            draft: draft of each row.
            outputs: records the outputs of the pass for the tokens that rows take.
            active: per row, whether it is active in this round.

        Returns:
            Number of drafted tokens accepted, per row.
        """
        if outputs.keeps_nothing and active[0] and (kept := self._by_graph(rows, draft)) is not None:
            return [kept]
        verified = self._run_target(rows, draft, active)
        judge = self._at_once if rows.processors.are_pure else self._in_order
        return judge(rows, draft, outputs, active, verified)

    # ------------------------------------------------------------------------------------------------------------------
    # one row, whose pass and choices are replayed as CUDA graphs

    def _by_graph(self, rows: Rows, draft: Draft) -> int | None:
        """Verify a single row by a replayed pass; return `None` where the pass or its sampling cannot be replayed."""
        if not self._forward.replays or rows.batch > 1 or not rows.processors.are_pure:
            return None
        if not (rows.are_greedy or self._may_record) or rows.whole_text() is not None:
            return None
        tokens = Tokens(rows.text(0, rows.lengths[0] - 1))
        if draft.tokens.device.type == "cpu":
            tokens = Tokens([*tokens.known, *draft.tokens.numpy()[0].tolist()])
        else:
            tokens = Tokens(tokens.known, draft.tokens)
        found = self._forward.choices(tokens, rows.context) if rows.are_greedy else self._sample(rows, tokens)
        if found is None:
            return None
        (_, *drafted), choices = found
        kept = accept_known(drafted[: draft.lengths[0]], choices)
        rows.advance([choices[: kept + 1]])  # accepted tokens are the target's own
        return kept

    def _sample(self, rows: Rows, tokens: Tokens) -> tuple[list[int], list[int]] | None:
        """Return what `Forward.choices` does, for sampled tokens; raise if the first of these is impossible."""
        logits = self._forward.replayed_logits(tokens, rows.context)
        if logits is None:
            return None
        model, choice, processors = self._forward.model, rows.choice, rows.processors.pure
        assert isinstance(choice, SampledChoice)
        if self._recorded is None:
            self._recorded = choice_graph(model, processors, choice, logits)
        step = rows.lengths[0] - rows.prompt_length
        found = None if self._recorded is None else self._recorded.choose(processors, logits, choice, step)
        self._may_record = found is not None

        def scores() -> torch.Tensor:
            return processors.block(rows.tokens, rows.lengths, rows.pending, logits.to(torch.float32, copy=True))

        if found is None:
            found = rows.choose(scores())[0]
        given = tokens.others
        both: list[int] = (found if given is None else torch.cat((given[0], found))).tolist()
        others = 0 if given is None else given.shape[1]
        if both[others] == IMPOSSIBLE:
            choice.fail(scores()[:, 0])
        return [*tokens.known, *both[:others]], both[others:]

    # ------------------------------------------------------------------------------------------------------------------
    # any rows

    def _run_target(self, rows: Rows, draft: Draft, active: Sequence[bool]) -> _Verified:
        """Run the target over the pending token of each row and its draft.

        Rows that wait for others, or have ended, take nothing from it.
        """
        tokens = sent(draft.tokens, rows.device)
        # In lockstep, rows that have ended take part as they do in plain decoding: padding follows padding.
        padded = [row for row in range(rows.batch) if rows.is_padded(row)] if rows.lockstep else []
        if padded:
            tokens = tokens.clone()
            tokens[padded] = rows.limits.pad_token_id
        block = torch.cat((rows.pending, tokens), dim=1) if tokens.shape[1] else rows.pending
        counts = None if rows.lockstep else [(1 + n) * goes for n, goes in zip(draft.lengths, active, strict=True)]
        return _Verified(tokens, padded, self._forward.target(block, rows.context, rows.whole_text(), counts))

    def _at_once(
        self,
        rows: Rows,
        draft: Draft,
        outputs: StepOutputs,
        active: list[bool],
        verified: _Verified,
    ) -> list[int]:
        """Judge all places of a pass together."""
        tokens, padded, outcome = verified
        drafted, processors = tokens.shape[1], rows.processors.pure
        if drafted and not processors.are_blind:
            rows.write_ahead(tokens)
        draws = outputs.keeps_nothing and rows.may_draw
        is_unprocessed = not rows.has_others if draws else rows.are_greedy and rows.device.type == "cpu"
        if outputs.keeps_nothing and is_unprocessed:
            raw, scores = None, outcome.logits[:, -drafted - 1 :].to(rows.device)
        else:
            raw, scores = outputs.float_logits(outcome, drafted + 1, rows.device, processed=processors.may_write)
        if draws:
            choices, first_scores = rows.choose_drawn(scores)
        else:
            scores = processors.block(rows.tokens, rows.lengths, rows.pending, scores)
            choices, first_scores = rows.choose(scores), lambda: scores[:, 0]
        kept, following = accept(tokens, draft.lengths, choices)
        if padded:
            following[padded] = rows.limits.pad_token_id
        new = following[:, None]
        if drafted:
            new = torch.cat((tokens, new), dim=1).scatter(1, kept[:, None], new)
        # The one place where the host waits for the device.
        answers: list[list[int]] = torch.cat((kept[:, None], new), dim=1).tolist()
        accepted = [answer[0] for answer in answers]
        if any(active[row] and answer[1 + answer[0]] == IMPOSSIBLE for row, answer in enumerate(answers)):
            rows.choice.fail(first_scores())
        added = [count + 1 if active[row] else 0 for row, count in enumerate(accepted)]
        if rows.lockstep:
            added = [_in_lockstep(rows, answers, added)] * rows.batch
        for row, count in enumerate(added):
            if active[row]:
                outputs.add_round(outcome, raw, scores, rows, row, count)
        rows.advance([answer[1 : 1 + count] for answer, count in zip(answers, added, strict=True)], new)
        return accepted

    def _in_order(
        self,
        rows: Rows,
        draft: Draft,
        outputs: StepOutputs,
        active: list[bool],
        verified: _Verified,
    ) -> list[int]:
        """Judge a pass place by place, for processors that are called once for each committed token, in order.

        At each place: processors, choice, criteria, streamer. It ends at the first token that is not the drafted one,
        and where plain decoding would continue with other tokens than the pass had. All rows take the same number.
        """
        tokens, padded, outcome = verified
        width = tokens.shape[1] + 1
        raw, logits = outputs.float_logits(outcome, width, rows.device, processed=True)
        drafted: list[list[int]] = [row[:length] for row, length in zip(tokens.tolist(), draft.lengths, strict=True)]
        going = set(range(rows.batch)) - set(padded)
        accepted, taken, goes_on = [0] * rows.batch, 0, True
        while goes_on:
            scores = rows.processors.at_step(rows.committed_ids().clone(), logits[:, taken].contiguous())
            chosen = rows.choose(scores[:, None])
            known: list[list[int]] = chosen.tolist()
            if [IMPOSSIBLE] in known:
                rows.choice.fail(scores)
            if padded:
                chosen[padded] = rows.limits.pad_token_id
                known = [[rows.limits.pad_token_id] if row in padded else token for row, token in enumerate(known)]
            for row in range(rows.batch):
                if active[row]:
                    of_row = None if raw is None else raw[row, taken]
                    outputs.add_place(outcome, of_row, scores[row], rows, row, (taken, width))
            rows.append(known, chosen)
            rows.take_step()
            is_over, has_changed = self._committer.step(rows, outputs)
            right = {row for row in going if known[row] == drafted[row][taken : taken + 1]}
            for row in right:
                accepted[row] += 1
            taken += 1
            goes_on = right == going and not is_over and not has_changed
        rows.move_on([taken] * rows.batch)
        if has_changed:
            self._committer.renew(rows)
        return accepted


def _in_lockstep(rows: Rows, answers: list[list[int]], added: list[int]) -> int:
    """Return the number of tokens that all rows take: as many as each has, and none after one that ends a text."""
    going = [answer for answer, count in zip(answers, added, strict=True) if count]
    most = min(count for count in added if count)
    ends = (place for answer in going for place in range(most) if answer[1 + place] in rows.limits.eos_token_ids)
    return min(ends, default=most - 1) + 1
