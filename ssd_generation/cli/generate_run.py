"""Control flow of `ssd generate`: load, choose a draft, answer, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
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
    """Parsed options of an answer, checked as far as possible without the model.

    Attributes:
        config: config that the options name, before `length` applies; `None` where they name none.
        seed: seed of the sampling.
        model: model options.
        draft: draft options.
        length: draft-length options.
        decoding: decoding options.
    """

    config: SelfSpeculativeConfig | None
    seed: int
    model: ModelOptions
    draft: DraftOptions
    length: DraftLengthOptions
    decoding: AnswerOptions

    @property
    def is_sampling(self) -> bool:
        """True if the answer is sampled, not decoded greedily."""
        return bool(self.decoding.temperature)

    @property
    def generate_arguments(self) -> dict[str, Any]:
        """Decoding arguments of `generate`."""
        arguments: dict[str, Any] = {"max_new_tokens": self.decoding.max_new_tokens, "do_sample": self.is_sampling}
        if self.is_sampling:
            sampling = {name: getattr(self.decoding, name) for name in ("temperature", "top_k", "top_p")}
            arguments |= {name: value for name, value in sampling.items() if value is not None}
        return arguments


@dataclass(frozen=True, kw_only=True)
class Request(AnswerRequest):
    """Parsed request of `ssd generate`.

    Attributes:
        prompt: prompt to answer.
        is_example: whether the prompt is the built-in example, not the user's.
        decoding: decoding options.
        show: display options.
    """

    prompt: str
    is_example: bool
    decoding: DecodingOptions
    show: ShowOptions


def some_seed(asked: int | None) -> int:
    """Return the given seed, or a random one."""
    return secrets.randbelow(2**31) if asked is None else asked


@dataclass(frozen=True)
class Draft:
    """Draft that the model uses, and its memory.

    Attributes:
        config: complete config, ready for use.
        choice: choice of `auto` that led to the config; `None` where it did not choose.
        weight_bytes: bytes of the model's weights.
        copy_bytes: bytes of their low-bit copies.
    """

    config: SelfSpeculativeConfig
    choice: AutomaticChoice | None
    weight_bytes: int
    copy_bytes: int


@dataclass(frozen=True)
class Answer:
    """Answer to a request.

    Attributes:
        request: request that is answered.
        tokenizer: tokenizer of the model.
        draft: draft that was used.
        prompt_tokens: length of the encoded prompt in tokens.
        token_ids: new tokens.
        seconds: time of the call, the pass over the prompt included.
        speculation: statistics of the call.
        origins: origin of each token.
        comparison: comparison with plain decoding; `None` where not requested.
        environment: machine and versions.
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
        """Return the document of `--json`."""
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
        request: request to answer.
        begin: function called when the answer begins, with the model's tokenizer; returns the streamer that shows it.
    """
    import torch

    from ..generation import enable_self_speculative
    from ..harness.results import TokenOrigins, describe_environment
    from .resolve_options import encode, load

    target, tokenizer = load(request.model)
    target = enable_self_speculative(target)
    encoded = encode(tokenizer, request.prompt, request.decoding.system, not request.decoding.no_chat_template)
    inputs = {name: tensor.to(target.device) for name, tensor in encoded.items()}
    measures_meanwhile = _measures_meanwhile(request, target)
    if not measures_meanwhile:
        config, choice = choose_draft(request, target, inputs["input_ids"])

    streamer = begin(request, tokenizer)
    if request.is_sampling:
        torch.manual_seed(request.seed)
    with progress("Generating") if request.show.as_json else contextlib.nullcontext():
        started = time.perf_counter()
        drafting = (
            {"self_speculative": AUTO, "draft_memory": request.draft.draft_memory}
            if measures_meanwhile
            else {"self_speculative": config}
        )
        output: torch.Tensor = target.generate(**inputs, **request.generate_arguments, **drafting, streamer=streamer)
        length = inputs["input_ids"].shape[1]
        new = output[0, length:].tolist()
        seconds = time.perf_counter() - started
    speculation = target.last_speculation
    if measures_meanwhile:
        config, choice = choose_draft(request, target, inputs["input_ids"])
        seconds = speculation.total_seconds  # without what was measured after the text
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


def _measures_meanwhile(request: Request, target: PreTrainedModel) -> bool:
    """Tell whether the machine is measured while the answer appears on the terminal: by the first call of `auto` here.

    Where drafts are to be shown or compared, it is measured beforehand.
    """
    from ..tuning.automatic import is_chosen

    draft, length, show = request.draft, request.length, request.show
    has_options = request.config is not None or draft.lookup is not None or draft.adapt is not None
    has_options |= request.decoding.exact or length.policy is not None or length.draft_length is not None
    if has_options or (draft.config != AUTO and stored_config(target.generation_config) is not None):
        return False
    shows_drafts = show.compare or show.show_draft or show.html is not None or show.as_json
    return sys.stdout.isatty() and not shows_drafts and not is_chosen(target, draft.draft_memory)


def _compare(
    request: Request, target: PreTrainedModel, inputs: dict[str, torch.Tensor], config: SelfSpeculativeConfig
) -> Comparison:
    """Answer the same request by each method, interleaved."""
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
    """Describe the draft that the model uses, and its memory.

    Args:
        target: target model.
        config: complete config.
        choice: choice of `auto` that led to the config; `None` where it did not choose.
    """
    from ..forward.copies.low_bit import copy_bytes
    from ..tuning.automatic import weight_bytes

    return Draft(config, choice, weight_bytes(target), copy_bytes(target) if config.precision else 0)


def choose_draft(
    request: AnswerRequest, target: PreTrainedModel, prompt: torch.Tensor
) -> tuple[SelfSpeculativeConfig, AutomaticChoice | None]:
    """Choose the draft: the one that the options name, the one stored with the model, or the fastest one measured.

    Args:
        request: request to answer.
        target: target model, after `enable_self_speculative`.
        prompt: token ids of shape `(1, prompt_length)`, on which `auto` measures.

    Returns:
        The config, and the choice of `auto` where it chose, else `None`.

    Raises:
        ValueError: the config does not fit the model, or takes more memory than allowed.
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
        config = dataclasses.replace(config, exactness=BITWISE, costs=None)  # measured on other passes
    config = _ready(target, with_drafting(config, policy, length.draft_length), draft.draft_memory)
    if config.adapt:
        with measuring():
            refinement_of(target, config)
    return config, choice


def _automatic(target: Any, prompt: torch.Tensor, draft_memory: float | None) -> AutomaticChoice:
    """Pick the fastest way to draft with this model on this machine, or none."""
    from ..tuning.automatic import automatic_choice

    with measuring():
        return automatic_choice(target, prompt, draft_memory)


def _without_lookup(config: SelfSpeculativeConfig) -> SelfSpeculativeConfig:
    """Remove prompt lookup from the choice of `auto`; without low-bit copies, nothing is then drafted."""
    drafting = config.drafting if config.precision else dataclasses.replace(config.drafting, policy="none")
    return dataclasses.replace(config, lookup=None, drafting=drafting, adapt=config.adapt and bool(config.precision))


def _ready(target: Any, config: SelfSpeculativeConfig, draft_memory: float | None) -> SelfSpeculativeConfig:
    """Check a config against the model, and add the costs that its draft length depends on.

    Raises:
        ValueError: the config does not fit the model, or takes more memory than allowed.
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
