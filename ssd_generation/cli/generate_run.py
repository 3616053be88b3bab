"""What `ssd generate` does: load, choose a draft, answer, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .configs import stored_config, with_drafting, with_lookup
from .console import err, measuring, progress
from .options import AUTO

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

    from ..config import SelfSpeculativeConfig
    from ..harness.results import Comparison, TokenOrigins
    from ..tuning.automatic import AutomaticChoice
    from .generate_options import AnswerOptions, DecodingOptions, DraftLengthOptions, DraftOptions, ShowOptions
    from .options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """How to answer, checked as far as that goes without the model.

    Attributes:
        config: that the options name, before `length`; `None` where they name none.
        seed: of the sampling.
        model: the options' groups, from here on.
        draft: …
        length: …
        decoding: …
    """

    config: SelfSpeculativeConfig | None
    seed: int
    model: ModelOptions
    draft: DraftOptions
    length: DraftLengthOptions
    decoding: AnswerOptions

    @property
    def is_sampling(self) -> bool:
        """Whether the answer is sampled, not decoded greedily."""
        return bool(self.decoding.temperature)

    @property
    def generate_arguments(self) -> dict[str, Any]:
        """The arguments of `generate` that say how to decode."""
        arguments: dict[str, Any] = {"max_new_tokens": self.decoding.max_new_tokens, "do_sample": self.is_sampling}
        if self.is_sampling:
            sampling = {name: getattr(self.decoding, name) for name in ("temperature", "top_k", "top_p")}
            arguments |= {name: value for name, value in sampling.items() if value is not None}
        return arguments


@dataclass(frozen=True, kw_only=True)
class Request(AnswerRequest):
    """What was asked for.

    Attributes:
        prompt: what the model is to answer.
        is_example: whether that is the example, and not the user's.
        decoding: …
        show: …
    """

    prompt: str
    is_example: bool
    decoding: DecodingOptions
    show: ShowOptions


def some_seed(asked: int | None) -> int:
    """The seed that was asked for, or any."""
    return secrets.randbelow(2**31) if asked is None else asked


@dataclass(frozen=True)
class Draft:
    """What the model drafts with.

    Attributes:
        config: the whole of it, ready to be used.
        choice: how `auto` came to it, if it did.
        weight_bytes: memory of the model's weights.
        copy_bytes: memory of their low-bit copies.
    """

    config: SelfSpeculativeConfig
    choice: AutomaticChoice | None
    weight_bytes: int
    copy_bytes: int


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        request: that it answers.
        tokenizer: of the model.
        draft: what it was drafted with.
        prompt_tokens: length of the encoded prompt.
        token_ids: the new tokens.
        seconds: that they took, the prompt's pass included.
        speculation: the statistics of the call.
        origins: where each token came from.
        comparison: with plain decoding, where that was asked for.
        environment: the machine and the versions.
    """

    request: Request
    tokenizer: PreTrainedTokenizerBase
    draft: Draft
    prompt_tokens: int
    token_ids: list[int]
    seconds: float
    speculation: Any
    origins: TokenOrigins
    comparison: Comparison | None
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        request, draft = self.request, self.draft
        document: dict[str, Any] = {
            "model": request.model.model,
            "prompt": request.prompt,
            "prompt_tokens": self.prompt_tokens,
            "text": self.tokenizer.decode(self.token_ids, skip_special_tokens=True),
            "token_ids": self.token_ids,
            "token_origins": self.origins.to_dicts(),
            "seconds": self.seconds,
            "tokens_per_second": len(self.token_ids) / self.seconds,
            "decoding": request.generate_arguments | ({"seed": request.seed} if request.is_sampling else {}),
            "config": draft.config.to_dict(),
            "auto": None if draft.choice is None else draft.choice.to_dict(),
            "memory": {
                "weight_bytes": draft.weight_bytes,
                "copy_bytes": draft.copy_bytes,
                "copy_share": draft.copy_bytes / max(draft.weight_bytes, 1),
            },
            "speculation": self.speculation.to_dict(),
            "environment": self.environment,
        }
        if self.comparison is not None:
            document["comparison"] = self.comparison.to_dict()
        return document


def run(request: Request, begin: Callable[[Request, PreTrainedTokenizerBase], TextStreamer | None]) -> Answer:
    """Answer a request.

    Args:
        request: what was asked for.
        begin: called when the answer begins, with the model's tokenizer; gives the streamer that shows it.
    """
    import torch

    from ..generation import enable_self_speculative
    from ..harness.results import TokenOrigins, describe_environment
    from .loading import encode, load

    target, tokenizer = load(request.model)
    target = enable_self_speculative(target)
    encoded = encode(tokenizer, request.prompt, request.decoding.system, not request.decoding.no_chat_template)
    inputs = {name: tensor.to(target.device) for name, tensor in encoded.items()}
    config, choice = choose_draft(request, target, inputs["input_ids"])

    streamer = begin(request, tokenizer)
    if request.is_sampling:
        torch.manual_seed(request.seed)
    with progress("Generating") if request.show.as_json else contextlib.nullcontext():
        started = time.perf_counter()
        output: torch.Tensor = target.generate(
            **inputs, **request.generate_arguments, self_speculative=config, streamer=streamer
        )
        length = inputs["input_ids"].shape[1]
        new = output[0, length:].tolist()
        seconds = time.perf_counter() - started
    speculation = target.last_speculation
    origins = TokenOrigins.from_ids(tokenizer, new, speculation.token_sources[0])
    comparison = _compare(request, target, inputs, config) if request.show.compare else None
    return Answer(
        request=request,
        tokenizer=tokenizer,
        draft=draft_of(target, config, choice),
        prompt_tokens=length,
        token_ids=new,
        seconds=seconds,
        speculation=speculation,
        origins=origins,
        comparison=comparison,
        environment=describe_environment(target),
    )


def _compare(
    request: Request, target: PreTrainedModel, inputs: dict[str, torch.Tensor], config: SelfSpeculativeConfig
) -> Comparison:
    """The same request by each method, in turns."""
    from ..harness.run import compare, methods_of

    repeats = request.show.repeats or 3
    calls = len(methods_of(config)) * (1 + repeats + request.is_sampling)
    with progress("Comparing", total=calls) as advance:
        return compare(
            target,
            inputs,
            config,
            repeats=repeats,
            seed=request.seed,
            advance=advance,
            **request.generate_arguments,
        )


# ----------------------------------------------------------------------------------------------------------------------
# the draft


def draft_of(target: Any, config: SelfSpeculativeConfig, choice: AutomaticChoice | None) -> Draft:
    """What the model drafts with, and its memory.

    Args:
        target: the model.
        config: the whole of it.
        choice: how `auto` came to it, if it did.
    """
    from ..forward.copies.low_bit import copy_bytes
    from ..tuning.automatic import weight_bytes

    return Draft(config, choice, weight_bytes(target), copy_bytes(target) if config.precision else 0)


def choose_draft(
    request: AnswerRequest, target: PreTrainedModel, prompt: torch.Tensor
) -> tuple[SelfSpeculativeConfig, AutomaticChoice | None]:
    """What to draft with: as the options say, as is stored with the model, or whatever pays.

    Args:
        request: what was asked for.
        target: the model, after `enable_self_speculative`.
        prompt: token ids of shape `(1, prompt_length)`, for what has to be measured.

    Returns:
        The config, and how it was chosen where that was left to the library.

    Raises:
        ValueError: the config does not fit the model, or takes more memory than it may.
    """
    from ..config import SelfSpeculativeConfig
    from ..config.values import BITWISE
    from ..generation import why_no_drafts
    from ..tuning.call_drafter import refinement_of

    draft, length = request.draft, request.length
    config, policy, adapt = request.config, length.policy, draft.adapt
    refusal = why_no_drafts(target)
    if refusal is not None:
        name = type(target).__name__
        err().print(f"{name} is decoded without drafts, as transformers decodes it: {refusal}.", style="yellow")
        config, policy, adapt = SelfSpeculativeConfig(), "none", False
    elif config is None and draft.config != AUTO:
        config = stored_config(target.generation_config)
        if config is not None and draft.lookup is False:
            config = with_lookup(config, False)
    choice: AutomaticChoice | None = None
    if config is None:
        choice = _automatic(target, prompt, draft.draft_memory)
        config = choice.config if draft.lookup is not False else _without_lookup(choice.config)
    if adapt is not None:
        config = dataclasses.replace(config, adapt=adapt)
    if request.decoding.exact and config.exactness != BITWISE:
        config = dataclasses.replace(config, exactness=BITWISE, costs=None)  # of other passes
    config = _ready(target, with_drafting(config, policy, length.draft_length), draft.draft_memory)
    if config.adapt:
        with measuring():
            refinement_of(target, config)
    return config, choice


def _automatic(target: Any, prompt: torch.Tensor, draft_memory: float | None) -> AutomaticChoice:
    """What pays for this model on this machine."""
    from ..tuning.automatic import automatic_choice

    with measuring():
        return automatic_choice(target, prompt, draft_memory)


def _without_lookup(config: SelfSpeculativeConfig) -> SelfSpeculativeConfig:
    """What `auto` chose without prompt lookup; where nothing else pays, nothing is drafted."""
    drafting = config.drafting if config.precision else dataclasses.replace(config.drafting, policy="none")
    return dataclasses.replace(config, lookup=None, drafting=drafting, adapt=config.adapt and bool(config.precision))


def _ready(target: Any, config: SelfSpeculativeConfig, draft_memory: float | None) -> SelfSpeculativeConfig:
    """A config that fits the model, with the costs by which its draft length is chosen.

    Raises:
        ValueError: it does not fit, or takes more memory than it may.
    """
    from ..forward.copies.resident import check_copies
    from ..forward.structure.sublayers import layout_of
    from ..tuning.automatic import check_budget
    from ..tuning.costs import costs_of
    from ..tuning.measuring import describe_machine

    layout = layout_of(target)
    config.validate_for(num_layers=len(layout), model_type=target.config.get_text_config(decoder=True).model_type)
    layout.stubs(config.skip)  # raises where a sub-layer cannot be skipped
    if config.precision:
        check_copies(target)
    if draft_memory is not None:
        check_budget(target, config, draft_memory)
    if config.drafting.policy != "cost":
        return config
    if config.costs is None:
        with measuring():
            return dataclasses.replace(config, costs=costs_of(target, config))
    made_on = config.costs.measured_on
    if made_on is not None and made_on != describe_machine(target):
        err().print(
            f"The costs in this config were measured elsewhere ({made_on}), so the draft length may not be the best "
            "here. Take `costs` out of it to have them measured.",
            style="yellow",
        )
    return config
