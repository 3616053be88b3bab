"""Acceptance rate of a draft, judged on text that the target has already generated.

Real drafting goes round by round: after the verified prefix, whose keys and values are the target's, each drafted token
sees the target's prefix and the draft's own keys and values of the tokens drafted in that round. Under greedy decoding
a drafted token counts only while all before it in the round were right, so the draft reads the target's own tokens all
along. Hence whole rounds can be laid out next to each other in *one* pass: tokens of the text as inputs, and a mask
under which the token at depth d of a round sees the target's keys and values up to the start of the round, and the
draft's own for the d tokens since. That is exact for greedy decoding, at every depth, for any number of rounds; nothing
is decoded.

Where rounds start matters: after the token with which the target ended the previous round, hence most often where the
text is hard to guess. With an answer for each token of the text, the rounds of a generation are replayed. The cheapest
way predicts each token only as the first of a round, with as many inputs as the text has tokens: deeper tokens, which
see a few keys and values of the draft's own, then count as right where they are right as a first token. With rounds at
fixed places (at every fourth token, or at each) predictions are less accurate, see docs/search.md.

(A pass with the draft's keys and values for the whole past, as in SWIFT, arXiv 2410.06916, is the case of a single
round as long as the text.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..cache.recurrent import has_states
from ..config import SkipConfig
from ..decoding.verified_text import VerifiedText
from ..forward.captured.passes import skip_mode_of
from ..forward.eager.module_states import fill_cache
from ..forward.eager.prompt_mode import prompt_mode
from ..forward.rounding import agree
from ..forward.structure.positions import cut_to_table
from ..forward.structure.skip_mode import SkipMode
from ..forward.structure.sublayers import input_device
from ..support.model_state import Part, state_of
from ..support.versions import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = [
    "Acceptance",
    "JudgingPart",
    "agreements",
    "judge",
    "judge_all",
    "judge_rounds",
    "replay",
    "round_inputs",
    "verify_text",
    "why_not_judged",
]

_MOST_TOKENS = 256
"""Most inputs of one judging pass; the logits of a large vocabulary take half a megabyte each."""


@dataclass
class Acceptance:
    """Acceptance by depth, counted.

    Attributes:
        tried: at index d, number of drafts that reached token d + 1.
        accepted: at index d, how often that token was accepted as well.
        passes: number of forward passes made to find out.
        tokens: number of inputs of these passes.
    """

    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    passes: int = 0
    tokens: int = 0

    def add_rounds(self, matches: torch.Tensor) -> None:
        """Count rounds of drafting.

        Args:
            matches: `(rounds, depth)`: 1 where the draft predicts the target's token, 0 where not, −1 beyond the text.
        """
        known = matches >= 0
        right = matches.clamp(min=0).cumprod(dim=1)
        reached = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), dim=1) * known
        self.add(Acceptance(reached.sum(0).tolist(), (right * known).sum(0).tolist()))

    def add(self, other: Acceptance) -> None:
        """Add another's counts to these."""
        for depth, (tried, accepted) in enumerate(zip(other.tried, other.accepted, strict=True)):
            if depth == len(self.tried):
                self.tried.append(0)
                self.accepted.append(0)
            self.tried[depth] += tried
            self.accepted[depth] += accepted
        self.passes += other.passes
        self.tokens += other.tokens

    def by_depth(self, prior: float = 0.0) -> list[float]:
        """Return the share of drafted tokens accepted at each depth, given that all before were.

        Where a depth was seldom reached, its rate is drawn towards that of the depth before.

        Args:
            prior: number of observations that the depth before counts for; 0: counts alone, and a depth never reached
                has rate 0.
        """
        rates: list[float] = []
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            before = rates[-1] if rates else 0.5
            weight = prior if rates else min(prior, 1.0)
            rates.append((accepted + weight * before) / (tried + weight) if tried + weight else 0.0)
        return rates

    def first(self) -> float:
        """Return the acceptance rate of the first drafted token."""
        return self.accepted[0] / self.tried[0] if self.tried and self.tried[0] else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON types."""
        return {
            "tried": list(self.tried),
            "accepted": list(self.accepted),
            "passes": self.passes,
            "tokens": self.tokens,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Acceptance:
        """Build an `Acceptance` from `to_dict`'s result."""
        return cls(list(data["tried"]), list(data["accepted"]), int(data["passes"]), int(data["tokens"]))


def verify_text(model: PreTrainedModel, ids: torch.Tensor, prompt_length: int) -> VerifiedText:
    """Run one pass of the target model over a text, for its keys and values.

    Args:
        model: the target model.
        ids (`torch.LongTensor` of shape `(1, T)`): prompt and the target's own continuation.
        prompt_length: prompt length in tokens, 1 ≤ `prompt_length` < T.

    Raises:
        ValueError: there is no prompt or no continuation, or the text is longer than the model's context.
    """
    length = int(ids.shape[1])
    if not 1 <= prompt_length < length:
        raise ValueError(
            "A draft is judged on a continuation of at least one token after a prompt of at least one, but got "
            f"{length} tokens with prompt_length={prompt_length}."
        )
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise ValueError(f"The text has {length} tokens, but the model's context has {longest}. Shorten the prompt.")
    cache = DynamicCache()  # without a config: layers with a sliding window retain all keys and values, too
    with torch.no_grad(), prompt_mode(model, length - 1):
        fill_cache(model, ids[:, :-1], cache)
    return VerifiedText(ids, prompt_length, cache)


def agreements(
    model: PreTrainedModel,
    draft: SkipMode,
    text: VerifiedText,
    starts: Sequence[int],
    depth: int,
) -> tuple[torch.Tensor, int, int]:
    """Compare a draft's predictions with a text, in rounds that start at given tokens, in one pass (or a few, if many).

    Args:
        model: the target model.
        draft: mode that turns the model into the draft.
        text: the target's text.
        starts: first tokens of the rounds, as indices into the continuation, 0 … N − 1.
        depth: number of tokens drafted in each round, ≥ 1.

    Returns:
        Whether the draft predicts the target's token, `(len(starts), depth)` (1 yes, 0 no, −1 beyond the text); the
        number of passes; the number of their inputs.
    """
    matches = torch.full((len(starts), depth), -1, dtype=torch.long, device="cpu")
    rounds = max(1, _MOST_TOKENS // depth)
    passes = tokens = 0
    for first in range(0, len(starts), rounds):
        chunk = torch.tensor(starts[first : first + rounds], device="cpu")
        index = chunk[:, None] + torch.arange(depth, device="cpu")  # (rounds, depth): tokens that are predicted
        inside = index < len(text)
        which = torch.arange(len(chunk), device="cpu")[:, None].expand_as(index)
        logits = _logits(model, draft, text, which[inside], chunk[:, None].expand_as(index)[inside], index[inside])
        predicted = text.choose(logits, index[inside])
        generated = text.ids[0, text.prompt_length :].to(predicted.device)
        right = predicted == generated[index[inside].to(predicted.device)]
        part = torch.full_like(index, -1)
        part[inside] = right.long().cpu()
        matches[first : first + rounds] = part
        passes += 1
        tokens += int(inside.sum())
    return matches, passes, tokens


def _logits(
    model: PreTrainedModel,
    draft: SkipMode,
    text: VerifiedText,
    which: torch.Tensor,
    start: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """Return the draft's logits `(Q, V)` for tokens `index` of the continuation; see `round_inputs`."""
    with torch.no_grad(), prompt_mode(model, int(index.numel())), draft:
        output = model(**round_inputs(model, text, which, start, index), use_cache=True)
    return output.logits[0]  # type: ignore[no-any-return]


def round_inputs(
    model: PreTrainedModel, text: VerifiedText, which: torch.Tensor, start: torch.Tensor, index: torch.Tensor
) -> dict[str, Any]:
    """Return the arguments of a pass in which rounds of drafting are laid out next to each other.

    Args:
        model: the target model.
        text: the target's text.
        which (`torch.LongTensor` of shape `(Q,)`): identifier of the round.
        start (`torch.LongTensor` of shape `(Q,)`): token of the continuation that the round drafts first.
        index (`torch.LongTensor` of shape `(Q,)`): token of the continuation that is predicted.
    """
    device = text.ids.device
    position = (index + text.prompt_length - 1).to(device)  # positions of the inputs, each before the predicted token
    since = (start + text.prompt_length - 1).to(device)
    return {
        "input_ids": text.ids[:, position],
        "position_ids": position[None],
        "attention_mask": _masks(model, which.to(device), position, since, int(text.ids.shape[1]) - 1),
        # A copied layer aliases its tensors, and appending to it makes new ones: the text's own stay as they are.
        CACHE: Cache(layers=[copy.copy(layer) for layer in text.cache.layers]),
    }


def _masks(
    model: PreTrainedModel, which: torch.Tensor, position: torch.Tensor, since: torch.Tensor, length: int
) -> Any:
    """Return additive masks `(1, 1, Q, length + Q)`: the target's keys before the round, and the round's own so far.

    One mask, or one per kind of layer where the model has layers of more than one kind.
    """
    config = model.config.get_text_config(decoder=True)
    key_position = torch.cat((torch.arange(length, device=position.device), position))
    distance = position[:, None] - key_position  # ≥ 0: not in the token's future
    visible = torch.cat((key_position[:length] < since[:, None], which[:, None] == which[None, :]), dim=1) & (
        distance >= 0
    )
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    masks = {}
    for kind in kinds:
        seen = visible & (distance < window) if kind == "sliding_attention" and window is not None else visible
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=position.device)
        masks[kind] = mask.masked_fill_(~seen, torch.finfo(model.dtype).min)[None, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def judge(
    model: PreTrainedModel,
    config: SelfSpeculativeConfig,
    text: VerifiedText,
    depth: int = 4,
    exact_depth: int = 1,
) -> Acceptance:
    """Return acceptance by depth of a config's draft on one text, in the rounds in which generation would draft.

    Args:
        model: the target model.
        config: sub-layers that the draft skips, and its precision.
        text: the target's text.
        depth: number of tokens of a round, ≥ 1.
        exact_depth: number of tokens of a round that are judged after exactly what generation would have there; deeper
            ones as if they were the last of these; 1 to `depth`. The pass has so many inputs per token of the text.

    Raises:
        ValueError: the config does not fit the model, or a depth is out of range.
    """
    if not 1 <= exact_depth <= depth:
        raise ValueError(
            f"Rounds of at least one token are judged exactly up to one of these, but got depth={depth} and "
            f"exact_depth={exact_depth}."
        )
    # The pass over the prompt gives the first token: the first round drafts the second.
    return judge_rounds(model, config, text, range(1, len(text)), exact_depth, lambda matches: replay(matches, depth))


def judge_rounds(
    model: PreTrainedModel,
    config: SelfSpeculativeConfig,
    text: VerifiedText,
    starts: Sequence[int],
    depth: int,
    arranged: Callable[[torch.Tensor], torch.Tensor] = lambda matches: matches,
) -> Acceptance:
    """Return acceptance by depth of a config's draft on one text, in rounds that start at given tokens.

    Args:
        model: the target model.
        config: sub-layers that the draft skips, and its precision.
        text: the target's text.
        starts: first tokens of the rounds, as for `agreements`.
        depth: number of tokens of each round, ≥ 1.
        arranged: maps the matches of `agreements` to the rounds that are counted; the identity by default.

    Raises:
        ValueError: the config does not fit the model.
    """
    draft, _ = skip_mode_of(model, config)
    matches, passes, tokens = agreements(model, draft, text, starts, depth)
    result = Acceptance(passes=passes, tokens=tokens)
    result.add_rounds(arranged(matches))
    return result


def replay(matches: torch.Tensor, depth: int) -> torch.Tensor:
    """Replay the rounds of a generation, from the draft's predictions at each token of the text.

    Args:
        matches: `(N, E)`, as from `agreements`, with a round starting at each token. Beyond E tokens a round continues
            with the last predictions of later ones.
        depth: number of tokens of a round, ≥ E.

    Returns:
        `(rounds, depth)`, for `Acceptance.add_rounds`. The first round starts at the first token, each other one after
        the token with which the target ends the one before.
    """
    count, exact = matches.shape
    deeper = torch.full((count, depth - exact), -1, dtype=matches.dtype, device=matches.device)
    for beyond in range(min(depth - exact, count - 1)):
        deeper[: count - 1 - beyond, beyond] = matches[beyond + 1 :, exact - 1]
    rounds = torch.cat((matches, deeper), dim=1)
    accepted = rounds.clamp(min=0).cumprod(dim=1).sum(dim=1).tolist()
    starts, at = [], 0
    while at < count:
        starts.append(at)
        at += accepted[at] + 1
    return rounds[starts]


def judge_all(
    model: PreTrainedModel,
    config: SelfSpeculativeConfig,
    texts: Sequence[VerifiedText],
    depth: int = 4,
    exact_depth: int = 1,
) -> Acceptance:
    """Return acceptance by depth of a config's draft on several texts together; see `judge`."""
    total = Acceptance()
    for text in texts:
        total.add(judge(model, config, text, depth, exact_depth))
    return total


class JudgingPart(Part):
    """Reason why drafts of a model cannot be judged on a text, or `None`, in a tuple that is empty until tried."""

    def __init__(self) -> None:
        self.judging_refusal: tuple[str | None, ...] = ()


def why_not_judged(model: PreTrainedModel) -> str | None:
    """Return why drafts of this model cannot be judged in one pass; `None` where they can. Tried out once.

    The target model, laid out in rounds like a draft, must give the same logits as in sequence.
    """
    state = state_of(model).get(JudgingPart)
    if not state.judging_refusal:
        state.judging_refusal = (_try_out(model),)
    return state.judging_refusal[0]


def _try_out(model: PreTrainedModel) -> str | None:
    if has_states(model):
        return "it has recurrent states, which process a text token by token"
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"its attention implementation {attention} does not accept custom masks"
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator(device="cpu").manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, cut_to_table(model, 24)), generator=generator, device="cpu").to(
        input_device(model)
    )
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            text = verify_text(model, ids, 8)
            index = torch.arange(len(text), device="cpu")
            whole = SkipMode(model, SkipConfig())
            in_rounds = _logits(model, whole, text, index // 3, index - index % 3, index)
    except Exception as error:  # whatever a model's code makes of such a mask
        return f"{type(error).__name__}: {error}"
    if not agree(in_rounds, logits[7:-1], model.dtype):
        return "a text laid out in rounds gives different logits from the same text in sequence"
    return None
