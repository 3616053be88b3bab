"""First token at which a text diverges from that of plain decoding, and the logit margin there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...support.unasked import only_asked_drafts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Difference", "find_difference", "first_difference"]


@dataclass(frozen=True)
class Difference:
    """First token at which a text differs from that of plain decoding.

    Attributes:
        token: number of the token among the new ones, from 1.
        plain_token: id of plain decoding's token; `None` where the plain text has ended.
        other_token: id of the other text's token; `None` where that one has ended.
        logit_margin: logit of plain decoding's token minus that of the other, after the logits processors and under
            sampling with the step's noise (the log of each exponential taken off); `None` where a text has ended or a
            token was forbidden. Near zero means a near tie, which rounding can reverse.
    """

    token: int
    plain_token: int | None
    other_token: int | None
    logit_margin: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Find the first token that differs.

    Returns:
        Its index, from 0; the shorter length where one text is the beginning of the other; `None` where they are equal.
    """
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def find_difference(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    plain: Sequence[int],
    other: Sequence[int],
    seed: int | None = None,
    **generate_kwargs: Any,
) -> Difference | None:
    """Find the first difference of a text to that of plain decoding, with the logit margin there.

    One pass of the target model over prompt and common prefix gives the margin.

    Args:
        model: the target model.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        plain: new tokens of plain decoding.
        other: new tokens of the other method.
        seed: seed of both, where they were sampled; `None` where they are greedy. Torch's random state is preserved.
        **generate_kwargs: arguments of `generate` that change logits, such as `repetition_penalty`.

    Returns:
        The difference, or `None` where the two are equal.
    """
    index = first_difference(plain, other)
    if index is None:
        return None
    if index == len(plain) or index == len(other):
        return Difference(
            token=index + 1,
            plain_token=plain[index] if index < len(plain) else None,
            other_token=other[index] if index < len(other) else None,
            logit_margin=None,
        )
    scores = _scores_after(model, inputs, plain[:index], seed, generate_kwargs)
    margin = float(scores[plain[index]] - scores[other[index]])
    return Difference(index + 1, plain[index], other[index], margin if abs(margin) < float("inf") else None)


def _scores_after(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    common: Sequence[int],
    seed: int | None,
    generate_kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Return the scores that choose the next token, of shape `(V,)`: logits; under sampling, with that step's noise."""
    prompt = inputs["input_ids"]
    prefix = {"input_ids": torch.cat((prompt, prompt.new_tensor([list(common)])), dim=1)}
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        prefix["attention_mask"] = torch.cat((mask, mask.new_ones((1, len(common)))), dim=1)
    others = {key: value for key, value in generate_kwargs.items() if key not in ("max_length", "streamer")}
    # Through `generate`, so that the logits processors of the call apply.
    asked = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    if seed is None:
        with only_asked_drafts():
            greedy: torch.Tensor = model.generate(**prefix, **{**others, **asked}).scores[0][0].double()
        return greedy
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), only_asked_drafts():
        scores: torch.Tensor = model.generate(**prefix, **{**others, **asked, "do_sample": True}).scores[0]
        torch.manual_seed(seed)
        noise = torch.empty_like(scores)
        for _ in range(len(common) + 1):  # as torch.multinomial draws it, step by step
            noise.exponential_()
    return (scores.double() - noise.double().log())[0]
