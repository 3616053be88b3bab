"""Check, token by token, whether a sampled text was drawn from the model's own distribution."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...support.versions import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SamplingCheck", "check_sampling", "z_figure"]

_CHUNK = 256  # tokens of a text whose logits are in memory at a time


@dataclass(frozen=True)
class SamplingCheck:
    """Comparison of sampled tokens with the distributions that they should have been drawn from.

    Token x_t should come from p_t, the model's distribution after the tokens before it, all logits processors included.
    Then log p_t(x_t) + H(p_t), with the entropy H(p) = −Σ p log p, has the mean 0 whatever comes before. So the sum
    over all tokens of a text, or of many, is a martingale: divided by the root of its variance, Σ Var(log p_t), it is
    normal in the limit, with mean 0 and variance 1. Sums of texts add up.

    Attributes:
        tokens: number of tokens judged.
        excess: Σ (log p_t(x_t) + H(p_t)), in nats. Above 0: likelier tokens than the model draws; below: unlikelier.
        variance: Σ Var(log p_t), the variance of `excess` by chance alone.
        impossible: number of tokens with p_t(x_t) = 0, left out of the sums: a method that ignores top-p altogether
            shows here, and not in `z`. In float32 there are none, except where rounding moves one across the boundary
            of top-p.
    """

    tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0
    impossible: int = 0

    def __add__(self, other: SamplingCheck) -> SamplingCheck:
        return SamplingCheck(
            self.tokens + other.tokens,
            self.excess + other.excess,
            self.variance + other.variance,
            self.impossible + other.impossible,
        )

    @property
    def z(self) -> float | None:
        """Excess in standard deviations: by chance beyond ±2 once in 20. `None` where the variance is 0.

        A method that draws otherwise shows in `z`, in `impossible`, or in both.
        """
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def z_figure(z: float | None, impossible: int) -> str:
    """Format a `SamplingCheck` for a table: `+0.6`, or `+4.5, 3 impossible`; empty where nothing is known."""
    parts = [] if z is None else [f"{z:+.1f}"]
    return ", ".join(parts + [f"{impossible} impossible"] * bool(impossible))


@torch.no_grad()
def check_sampling(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], new_ids: Sequence[int], **generate_kwargs: Any
) -> SamplingCheck:
    """Judge the tokens of one sampled text by the model's own distributions, see `SamplingCheck`.

    The model's own `forward` reads prompt and text, and the logits processors are those that transformers makes of the
    arguments: no code that drafts or verifies is involved.

    Args:
        model: the target model.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        new_ids: the sampled tokens, up to the end of sequence.
        **generate_kwargs: arguments of the `generate` call, `do_sample=True` among them.

    Raises:
        ValueError: more than one prompt, greedy decoding, which draws nothing, or logits that are not numbers.
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

    judged = SamplingCheck()
    if not new_ids:
        return judged
    length = {} if "max_length" in generate_kwargs else {"max_new_tokens": len(new_ids)}
    model.generate(**inputs, **{**length, **generate_kwargs, "custom_generate": look})
    text = torch.cat((prompt, prompt.new_tensor([list(new_ids)])), dim=1)
    mask = inputs.get("attention_mask", torch.ones_like(prompt))
    mask = torch.cat((mask, mask.new_ones((1, len(new_ids)))), dim=1)
    takes = inspect.signature(model.forward).parameters
    cache, done = None, 0
    # In chunks: the logits of a long text over a large vocabulary take much memory.
    for start in range(0, len(new_ids), _CHUNK):
        tokens = new_ids[start : start + _CHUNK]
        end = prompt.shape[1] + start + len(tokens) - 1
        arguments: dict[str, Any] = {"input_ids": text[:, done:end], CACHE: cache, "use_cache": True}
        arguments["attention_mask"] = mask[:, :end]
        if "position_ids" in takes:
            arguments["position_ids"] = (mask[:, :end].long().cumsum(dim=-1) - 1).clamp(min=0)[:, done:]
        if "logits_to_keep" in takes:
            arguments["logits_to_keep"] = len(tokens)
        out = model(**arguments)
        cache, done = out[CACHE], end
        for n, token in enumerate(tokens):
            seen = text[:, : prompt.shape[1] + start + n]
            logits = out.logits[:, n - len(tokens)]
            judged += _check_token(processors[0](seen, logits.to(torch.float32, copy=True))[0].double(), token)
    return judged


def _check_token(scores: torch.Tensor, token: int) -> SamplingCheck:
    """Judge one token by the scores of shape `(V,)` whose softmax it should have been drawn from."""
    log_p = scores.log_softmax(dim=-1)
    own = float(log_p[token])
    if math.isnan(own):
        raise ValueError("The model's logits are not numbers here, so that nothing can be drawn from them.")
    if own == -math.inf:
        return SamplingCheck(1, impossible=1)
    possible = log_p[log_p > -math.inf]
    p = possible.exp()
    mean = float((p * possible).sum())
    return SamplingCheck(1, own - mean, float((p * (possible - mean) ** 2).sum()))
