"""Whether a sampled text was drawn from the model's own distribution, judged token by token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Draws", "judge_draws"]


@dataclass(frozen=True)
class Draws:
    """How tokens that were drawn compare with the distributions that they should have been drawn from.

    Token x_t should come from p_t, the model's distribution behind the tokens before it, after all logits processors.
    Then log p_t(x_t) + H(p_t), with the entropy H(p) = −Σ p log p, has the mean 0 whatever stands before. So the sum
    over all tokens of a text, or of many, is a martingale: divided by the root of its variance, Σ Var(log p_t), it is
    normal in the limit, with mean 0 and variance 1. Sums of texts add up.

    Attributes:
        tokens: that were judged.
        excess: Σ (log p_t(x_t) + H(p_t)), in nats. Above 0: likelier tokens than the model draws; below: unlikelier.
        variance: Σ Var(log p_t), what chance makes of `excess`.
        impossible: tokens with p_t(x_t) = 0, left out of the sums. In float32 there are none, except where rounding
            moves one over the edge of top-p.
    """

    tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0
    impossible: int = 0

    def __add__(self, other: Draws) -> Draws:
        return Draws(
            self.tokens + other.tokens,
            self.excess + other.excess,
            self.variance + other.variance,
            self.impossible + other.impossible,
        )

    @property
    def z(self) -> float | None:
        """The sum in standard deviations: beyond ±2 once in 20 by chance. `None` where nothing was left to chance."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@torch.no_grad()
def judge_draws(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], new_ids: Sequence[int], **generate_kwargs: Any
) -> Draws:
    """Judge the tokens of one sampled text by the model's own distributions, see `Draws`.

    One pass of the model over prompt and text, by its own `forward`, and the logits processors that transformers makes
    of the arguments: nothing that drafted or verified has a part in it.

    Args:
        model: the target model.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        new_ids: the tokens that were drawn, up to the end of sequence.
        **generate_kwargs: those of the `generate` call, `do_sample=True` among them.

    Raises:
        ValueError: more than one prompt, or greedy decoding, which draws nothing.
    """
    prompt = inputs["input_ids"]
    if prompt.shape[0] != 1:
        raise ValueError(f"One text can be judged at a time, but got {prompt.shape[0]} prompts.")
    if not generate_kwargs.get("do_sample", getattr(model.generation_config, "do_sample", False)):
        raise ValueError("Greedy decoding draws nothing that could be judged. Pass do_sample=True, as in the call.")
    processors: list[Any] = []

    def look(_model: Any, input_ids: torch.Tensor, logits_processor: Any = None, **_: Any) -> torch.Tensor:
        processors.append(logits_processor)
        return input_ids

    judged = Draws()
    if not new_ids:
        return judged
    length = {} if "max_length" in generate_kwargs else {"max_new_tokens": len(new_ids)}
    model.generate(**inputs, **{**length, **generate_kwargs, "custom_generate": look})
    text = torch.cat((prompt, prompt.new_tensor([list(new_ids)])), dim=1)
    arguments: dict[str, Any] = {"input_ids": text[:, :-1], "use_cache": False}
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        arguments["attention_mask"] = torch.cat((mask, mask.new_ones((1, len(new_ids) - 1))), dim=1)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = len(new_ids)
    logits = model(**arguments).logits[:, -len(new_ids) :]
    for n, token in enumerate(new_ids):
        seen = text[:, : prompt.shape[1] + n]
        scores = processors[0](seen, logits[:, n].to(torch.float32, copy=True))
        judged += _judge(scores[0].double().log_softmax(dim=-1), token)
    return judged


def _judge(log_p: torch.Tensor, token: int) -> Draws:
    """One token, by the log-probabilities of shape `(V,)` that it should have been drawn from."""
    own = float(log_p[token])
    if own == -math.inf:
        return Draws(1, impossible=1)
    possible = log_p[log_p > -math.inf]
    p = possible.exp()
    mean = float((p * possible).sum())
    return Draws(1, own - mean, float((p * (possible - mean) ** 2).sum()))
