"""Request of a call: `self_speculative=` and `draft_memory=`, validated and resolved to a config once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..config import PRECISIONS, DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ..config.values import BITWISE
from ..decoding.refusals import CannotDraft, refuse_beforehand
from ..drafting.drafter import Drafter
from ..forward.structure.offloaded import why_unreadable
from ..forward.structure.sublayers import layout_of
from ..support.messages import clipped, shown
from ..support.warn import warn_once
from ..tuning.automatic import automatic_config, check_budget
from ..tuning.short_calls import is_known_short, is_short_for
from .prefixes import FEWEST, reuses_prefixes

__all__ = [
    "AUTO",
    "Request",
    "SelfSpeculativeRequest",
    "generation_config_of",
    "prompt_of",
    "refuse_without_drafts",
    "resolve",
    "stored_default",
    "warn_if_nothing_drafts",
]

SelfSpeculativeRequest = (
    SelfSpeculativeConfig | SkipConfig | Drafter | Mapping[str, Any] | str | os.PathLike[str] | bool
)
"""Type of `generate(self_speculative=…)`: a config, a skip set, either as a dictionary, the path or Hub id of a saved
config, `"auto"` (measure this machine once, then draft in the fastest way), or `True` for the default stored in
`model.generation_config.self_speculative`; or a `Drafter`, to draft in a way of your own."""

AUTO = "auto"

_SHORT = 2
"""Largest number of new tokens for which none can be drafted: the first comes from the prompt's pass, and the last
token of a round is the target model's own."""

_NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))


@dataclass
class Request:
    """Value of `self_speculative=` in one call, with the other arguments of that call.

    Args:
        model: the target model.
        asked: value of `self_speculative`; neither `None` nor `False`.
        draft_memory: share of the weights' bytes that low-bit copies may take; `None` for the usual share.
        args: positional arguments of `generate`.
        kwargs: its keyword arguments.

    Attributes:
        drafter: the user's own drafter, or `None`.
        config: config to draft by; `None` before `resolve`, and with a drafter of the user's own.

    Raises:
        ValueError, TypeError: the call requests something that self-speculative decoding cannot do.
    """

    model: PreTrainedModel
    asked: SelfSpeculativeRequest
    draft_memory: float | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    drafter: Drafter | None = field(init=False)
    config: SelfSpeculativeConfig | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for other, what in (
            ("assistant_model", "a call drafts either with the model itself or with an assistant"),
            ("custom_generate", "a custom decoding method replaces self-speculative decoding"),
        ):
            if self.kwargs.get(other) is not None:
                raise ValueError(
                    f"`self_speculative` and `{other}` were both given, but {what}. Leave one of them out."
                )
        refuse_beforehand(self.model, self.generation_config, self.kwargs)
        if (unreadable := why_unreadable(self.model)) is not None:
            raise CannotDraft(unreadable)
        if self.asked is True:
            self.asked = stored_default(self.model, self.generation_config)
        self.drafter = self.asked if isinstance(self.asked, Drafter) else None
        if self.is_auto and (few := self.few_tokens) is not None and few <= _SHORT and self.reads_less:
            self.asked = _NOTHING  # a prefix is reused; nothing has to be measured for that

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Generation config that the call was given."""
        return generation_config_of(self.args, self.kwargs)

    @property
    def is_auto(self) -> bool:
        """True if the config is found by measurements, which need a model that can run passes over several tokens."""
        return isinstance(self.asked, str) and self.asked == AUTO

    @property
    def exactness(self) -> str | None:
        """Exactness that the config requests."""
        return None if self.config is None else self.config.exactness

    @property
    def few_tokens(self) -> int | None:
        """Number of new tokens that the call requests; `None` if unknown, or if it requests more than a text.

        More than a text: a drafter of the user's own, a memory budget, bitwise exactness.
        """
        if self.drafter is not None or self.draft_memory is not None or self.exactness == BITWISE:
            return None
        asked = self.kwargs.get("max_new_tokens")
        for config in (self.generation_config, self.model.generation_config):
            asked = getattr(config, "max_new_tokens", None) if asked is None else asked
        return asked if isinstance(asked, int) else None

    @property
    def reads_less(self) -> bool:
        """True if an earlier call may have read a part of the prompt, which saves time however few the new tokens."""
        prompt = prompt_of(self.args, self.kwargs)
        return prompt is not None and prompt.shape[1] > FEWEST and reuses_prefixes(self.model)

    @property
    def is_short(self) -> bool:
        """True if it is known beforehand that preparing drafts costs more than they save."""
        few = self.few_tokens
        if few is None or self.reads_less:
            return False
        return few <= _SHORT or (self.is_auto and is_known_short(self.model, few))

    @property
    def is_found_short(self) -> bool:
        """True if the same is known after `"auto"` has found its config."""
        few = self.few_tokens
        if few is None or self.config is None or self.reads_less:
            return False
        return is_short_for(self.model, self.config, few)

    def resolve(self) -> None:
        """Find the config.

        Raises:
            ValueError, TypeError: there is none, it does not fit the model, or its low-bit copies take more than
                `draft_memory`.
        """
        if self.drafter is not None and self.draft_memory is None:
            return
        if self.is_auto:
            config = automatic_config(self.model, prompt_of(self.args, self.kwargs), self.draft_memory)
            _check_fits(self.model, config)
        else:
            config = resolve(self.model, self.asked, self.draft_memory)
        self.config = config


def resolve(
    model: PreTrainedModel, asked: SelfSpeculativeRequest, draft_memory: float | None = None
) -> SelfSpeculativeConfig:
    """Return the config that was requested, other than by `"auto"` and `True`.

    Args:
        model: the target model.
        asked: a `SelfSpeculativeRequest`.
        draft_memory: share of the weights' bytes that its low-bit copies may take; `None` for any.

    Raises:
        ValueError, TypeError: there is none, it does not fit the model, or its copies take more.
    """
    if isinstance(asked, str) and not os.path.exists(asked):
        if asked.strip().lower() == AUTO:
            raise ValueError(f'`self_speculative={shown(asked)}` is written in lower case: "auto".')
        if asked in PRECISIONS:
            raise ValueError(
                f"`self_speculative={asked!r}` is a precision, not a config. Pass `SelfSpeculativeConfig(precision="
                f'{asked!r})`, or "auto".'
            )
    config = _read(asked)
    if draft_memory is not None:
        check_budget(model, config, draft_memory)
    _check_fits(model, config)
    return config


def _check_fits(model: PreTrainedModel, config: SelfSpeculativeConfig) -> None:
    # The type of the inner language model, where the model takes images as well: provenance records that one.
    kind = str(model.config.get_text_config(decoder=True).model_type)
    config.validate_for(num_layers=len(layout_of(model)), model_type=kind)


def generation_config_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GenerationConfig | None:
    """Return the generation config that `generate` was given with these arguments."""
    return kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)


def prompt_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the prompts that `generate` was given, of shape `(B, prompt_length)`; `None` without any tokens."""
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    has_text = isinstance(prompt, torch.Tensor) and prompt.ndim == 2 and prompt.numel() > 0
    return prompt if has_text else None


def stored_default(model: PreTrainedModel, generation_config: GenerationConfig | None = None) -> SelfSpeculativeRequest:
    """Return what `self_speculative=True` means: a config, or "auto".

    Args:
        model: the target model.
        generation_config: generation config of the call, which takes precedence over the model's own.

    Raises:
        ValueError: nothing is stored.
        TypeError: what is stored is neither.
    """
    for source in (generation_config, model.generation_config):
        stored = getattr(source, "self_speculative", None)
        if stored is None or stored is True:
            continue
        # It came with the model, maybe from an untrusted source: a path would make this machine open and parse a file.
        is_config = isinstance(stored, (SelfSpeculativeConfig, SkipConfig, Mapping))
        if is_config or (isinstance(stored, str) and stored == AUTO):
            return stored  # type: ignore[no-any-return]
        raise TypeError(
            '`generation_config.self_speculative` must be the config itself, as its `to_dict()`, or "auto", but got '
            f"{shown(stored)}. Store one with `enable_self_speculative(model, default=…)`, which takes a path too."
        )
    raise ValueError(
        "`self_speculative=True` uses the default stored with the model, but "
        "`model.generation_config.self_speculative` is not set. Store one with "
        "`enable_self_speculative(model, default=config)`, or pass a config."
    )


def _read(asked: SelfSpeculativeRequest) -> SelfSpeculativeConfig:
    if isinstance(asked, Drafter):
        raise TypeError(
            f"A drafter ({type(asked).__name__}) cannot be stored as a default or combined with `draft_memory`: pass "
            "it as `generate(..., self_speculative=drafter)`, alone."
        )
    if isinstance(asked, SelfSpeculativeConfig):
        return asked
    if isinstance(asked, SkipConfig):
        return SelfSpeculativeConfig(skip=asked)
    if isinstance(asked, Mapping):
        return SelfSpeculativeConfig.from_dict(dict(asked))
    if isinstance(asked, (str, os.PathLike)):
        return SelfSpeculativeConfig.from_pretrained(asked)
    if isinstance(asked, type) and issubclass(asked, Drafter):
        raise TypeError(f"`self_speculative` takes a drafter, not its class: pass `{asked.__name__}(…)`.")
    raise TypeError(
        "`self_speculative` must be a SelfSpeculativeConfig, a SkipConfig, a dict, a path or Hub id, 'auto', True or a "
        f"Drafter, but got {clipped(type(asked).__name__, 80)} ({shown(asked)})."
    )


# ----------------------------------------------------------------------------------------------------------------------
# calls that do not request drafts


def refuse_without_drafts(draft_memory: float | None, cache_salt: str | None) -> None:
    """Raise `ValueError` for an argument that has no effect in a call that does not draft."""
    for name, given in (("draft_memory", draft_memory), ("cache_salt", cache_salt)):
        if given is not None:
            raise ValueError(
                f"`{name}={shown(given)}` was given without `self_speculative`. Pass "
                '`self_speculative="auto"`, or leave it out.'
            )


def warn_if_nothing_drafts(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Warn once per model where a generation config requests drafting but the call does not."""
    stored = getattr(model.generation_config, "self_speculative", None)
    asked = getattr(generation_config_of(args, kwargs), "self_speculative", None)
    if asked is not None and asked is not False and asked != stored:
        warn_once(
            model,
            f"The generation config asks for `self_speculative={clipped(shown(asked), 80)}`, but this call decodes "
            "plainly: drafting must be requested in the call, as `generate(..., self_speculative=…)`, or "
            "`self_speculative=True` for what the config says. `self_speculative=False` decodes plainly without this "
            "warning.",
        )
