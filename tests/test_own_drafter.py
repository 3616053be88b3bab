"""A user's own drafter by the public interface: `Drafter`, `Draft`, `generate(self_speculative=drafter)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ssd_generation import Draft, Drafter, enable_self_speculative, is_self_speculative
from tiny_models import left_padded, prompt, tiny_model

NEW = 24
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0}


class RepeatLastLine(Drafter):
    """A drafter that repeats the last line, that is, the text between the last two line breaks."""

    def __init__(self, line_break: int, longest: int = 8) -> None:
        self.line_break, self.longest = line_break, longest
        self.proposed, self.accepted = 0, 0

    def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
        drafts = []
        for row, limit in enumerate(limits):
            lines: list[list[int]] = [[]]
            for token in texts.text(row):
                lines[-1].append(token)
                if token == self.line_break:
                    lines.append([])
            begun, last = lines[-1], lines[-2] if len(lines) > 1 else []
            goes_on = last[len(begun) :] if last[: len(begun)] == begun else []
            drafts.append(goes_on[: min(self.longest, limit)])
        return Draft.of_tokens(drafts)

    def learn(self, draft: Draft, accepted: Sequence[int], rows: Sequence[int]) -> None:
        self.proposed += sum(draft.lengths[row] for row in rows)
        self.accepted += sum(accepted[row] for row in rows)

    def state(self) -> dict[str, Any]:
        return {"accepted": self.accepted}


class Foresees(Drafter):
    """A drafter that knows the model's text, with a wrong token in every `wrong`th draft."""

    def __init__(self, said: torch.Tensor, wrong: int = 3) -> None:
        self.said, self.wrong, self.rounds = said.tolist(), wrong, 0

    def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
        self.rounds += 1
        rows = []
        for row, limit in enumerate(limits):
            known = self.said[row][len(texts.text(row)) :][: 2 + row + 3]
            if self.rounds % self.wrong == 0 and known:
                known[-1] = (known[-1] + 1) % 60
            rows.append(known[:limit])
        return Draft.of_tokens(rows)


def plain_and_drafted(model: Any, inputs: dict[str, Any], drafter: Drafter, **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    drafted = model.generate(**inputs, **OPTIONS, **options, self_speculative=drafter)
    assert model.last_speculation is not None
    return drafted  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("inputs", [{"input_ids": prompt(9)}, left_padded([12, 7, 10])], ids=["single", "batch"])
def test_the_text_is_the_models(family: str, inputs: dict[str, Any]) -> None:
    model = enable_self_speculative(tiny_model(family))
    plain = model.generate(**inputs, **OPTIONS, do_sample=False)
    for drafter in (RepeatLastLine(int(plain[0, -4])), Foresees(plain)):
        assert torch.equal(plain, plain_and_drafted(model, inputs, drafter, do_sample=False))
    statistics = model.last_speculation
    assert statistics.accepted_tokens > NEW / 2 and statistics.draft_passes == 0
    assert 0 < statistics.acceptance_rate < 1 and statistics.looked_up_tokens == statistics.drafted_tokens


def test_what_it_learns_is_in_the_statistics() -> None:
    model = enable_self_speculative(tiny_model())
    options = {"do_sample": False, "suppress_tokens": list(range(6, 64))}  # few tokens, so that lines recur
    drafter = RepeatLastLine(3)
    for _ in range(2):
        plain_and_drafted(model, {"input_ids": prompt(9, vocab=6)}, drafter, **options)
        statistics = model.last_speculation
        assert statistics.policy_state == {"accepted": drafter.accepted}
    assert drafter.proposed >= drafter.accepted > 0


def test_sampled_tokens_are_the_models_own() -> None:
    # A drafted token is accepted where the target draws it, too: the text is that of the seed.
    model = enable_self_speculative(tiny_model(vocab_size=5))

    class Always3(Drafter):
        def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
            return Draft.of_tokens([[3][:limit] for limit in limits])

    ids = prompt(6, vocab=5).repeat(50, 1)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    plain = model.generate(ids, **options)
    torch.manual_seed(0)
    drafted = model.generate(ids, **options, self_speculative=Always3())
    assert 0 < model.last_speculation.accepted_tokens < model.last_speculation.drafted_tokens
    assert torch.equal(plain, drafted)


def drafts(change: Callable[[Draft], Any]) -> Drafter:
    class Odd(Drafter):
        def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
            draft = Draft.of_tokens([[5, 6]])
            return change(draft) or draft

    return Odd()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda draft: [5, 6], TypeError, r"Odd\.propose must return a Draft, but returned \[5, 6\]"),
        (lambda draft: Draft.of_tokens([[5], [6]]), ValueError, r"shape \(1, drafted tokens\), but returned"),
        (lambda draft: Draft.of_tokens([[-1]]), ValueError, "tokens from 0 to 63, but returned -1 to -1"),
        (lambda draft: Draft.of_tokens([[64]]), ValueError, "tokens from 0 to 63, but returned 64 to 64"),
        (lambda draft: setattr(draft, "lengths", [3]), ValueError, "lengths of 0 to 2"),
        (lambda draft: setattr(draft, "lengths", []), ValueError, "one of each per row"),
        (lambda draft: setattr(draft, "self_lengths", [3]), ValueError, "self_lengths"),
        (lambda draft: setattr(draft, "tokens", draft.tokens.float()), ValueError, "torch.LongTensor"),
    ],
)
def test_drafts_that_are_none(change: Callable[[Draft], Any], kind: type[Exception], words: str) -> None:
    model = enable_self_speculative(tiny_model())
    with pytest.raises(kind, match=words):
        plain_and_drafted(model, {"input_ids": prompt(9)}, drafts(change), do_sample=False)


def test_more_than_is_of_use_is_cut_off() -> None:
    model = enable_self_speculative(tiny_model())
    plain = model.generate(prompt(9), **OPTIONS, do_sample=False)

    class Everything(Drafter):
        def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
            return Draft.of_tokens([[*plain[0, len(texts.text(0)) :].tolist(), 7, 7, 7]])

    assert torch.equal(plain, plain_and_drafted(model, {"input_ids": prompt(9)}, Everything(), do_sample=False))
    assert model.last_speculation.rounds == 1


def test_a_drafter_that_fails_leaves_the_model_as_it_was() -> None:
    model = enable_self_speculative(tiny_model())
    plain = model.generate(prompt(9), **OPTIONS, do_sample=False)

    class Fails(Drafter):
        def propose(self, texts: Any, limits: Sequence[int]) -> Draft:
            raise OSError("no idea")

    with pytest.raises(OSError, match="no idea"):
        model.generate(prompt(9), **OPTIONS, do_sample=False, self_speculative=Fails())
    assert torch.equal(plain, model.generate(prompt(9), **OPTIONS, do_sample=False))


def test_where_a_drafter_is_no_answer() -> None:
    model = tiny_model()
    with pytest.raises(TypeError, match="cannot be stored as a default"):
        enable_self_speculative(model, default=RepeatLastLine(3))
    assert is_self_speculative(model)
    with pytest.raises(TypeError, match="or combined with `draft_memory`"):
        model.generate(prompt(9), **OPTIONS, self_speculative=RepeatLastLine(3), draft_memory=0.3)
    with pytest.raises(TypeError, match=r"not its class: pass `RepeatLastLine\(…\)`"):
        model.generate(prompt(9), **OPTIONS, self_speculative=RepeatLastLine)
