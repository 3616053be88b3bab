"""Configs and methods that the options name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .layer_lists import parse_layers
from .options import AUTO, DEMO, DEMO_PRESET

if TYPE_CHECKING:
    from ..config import SelfSpeculativeConfig
    from ..harness.peer_methods import PeerModel
    from .generate_options import DraftLengthOptions, DraftOptions
    from .options import ConfigOptions, MethodOptions


def requested_config(
    options: ConfigOptions, precision: str | None = None, lookup: bool | None = None
) -> SelfSpeculativeConfig | None:
    """Return the config that the options name; `None` where they name none (`--no-lookup` alone names none).

    Args:
        options: options that name a config or a skip set.
        precision: precision of the copies, which replaces the config's own; `None`: the config's.
        lookup: whether to use prompt lookup; `None`: as the config says.

    Raises:
        ValueError, TypeError, FileNotFoundError: the options contradict one another, or the config cannot be read.
    """
    from ..config import PrecisionConfig, SelfSpeculativeConfig, SkipConfig

    parts: dict[str, Any] = {}
    if precision is not None:
        parts["precision"] = PrecisionConfig.named(precision)
    names_layers = options.skip_attention is not None or options.skip_mlp is not None
    if options.config is not None:
        if names_layers:
            raise ValueError("--config and --skip-attention/--skip-mlp both say what to skip. Leave one of them out.")
        found = SelfSpeculativeConfig.from_pretrained(options.config, name=options.config_name)
        found = dataclasses.replace(found, **parts)
        return found if lookup is None else with_lookup(found, lookup)
    if options.config_name is not None:
        raise ValueError(f"--config-name {options.config_name} needs --config, the file that holds configs by name.")
    if not names_layers and precision is None and not lookup:
        return None
    skip = SkipConfig(
        attention=parse_layers("--skip-attention", options.skip_attention),
        mlp=parse_layers("--skip-mlp", options.skip_mlp),
    )
    return SelfSpeculativeConfig(skip=skip, lookup=lookup, **parts)


def requested_draft(draft: DraftOptions, length: DraftLengthOptions) -> SelfSpeculativeConfig | None:
    """Return the config that a drafting command's options name; `None` where they name none.

    Args:
        draft: options that name a config or its parts; `auto` names none.
        length: options of the draft length; checked here, not applied.

    Raises:
        ValueError, TypeError, FileNotFoundError: as `requested_config`; an invalid `length`.
    """
    is_auto = draft.config == AUTO
    named = dataclasses.replace(draft, config=None) if is_auto else draft
    config = requested_config(named, draft.precision, draft.lookup)
    if is_auto and config is not None:
        raise ValueError(
            "--config auto chooses what to draft with, but --precision, --lookup, --skip-attention and --skip-mlp set "
            "it. Leave one or the other out."
        )
    with_drafting(config, length.policy, length.draft_length)  # raises where policy or length is invalid
    return config


def config_to_compare(options: ConfigOptions, model: str) -> SelfSpeculativeConfig | None:
    """Return the config that the options name, or else the default of the model's name; see `requested_config`."""
    chosen = requested_config(options)
    return default_config(model, None) if chosen is None else chosen


def requested_methods(
    options: MethodOptions,
    config: SelfSpeculativeConfig | None,
    default: Callable[[SelfSpeculativeConfig | None, bool], tuple[str, ...]],
    peers: Mapping[str, PeerModel] | None = None,
) -> tuple[str, ...]:
    """Return the methods of `--methods`, plain decoding among them; where it is not given, those of `default`.

    Args:
        options: options that name the methods and the assistant.
        config: config of the methods that need one.
        default: function of a config and whether there is an assistant that returns the default methods.
        peers: models of other runtimes, by method name; by default their methods follow the others.

    Raises:
        ValueError: an unknown name, or a method that lacks the config, assistant or file that it needs.
    """
    from ..harness.methods import check_methods

    has_assistant = options.assistant is not None
    if options.methods is None:
        return *default(config, has_assistant), *(peers or {})
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    return check_methods(names, config, has_assistant, peers)


def with_lookup(config: SelfSpeculativeConfig, lookup: bool) -> SelfSpeculativeConfig:
    """Return a config with prompt lookup (its own settings, where it has them), or without.

    Raises:
        ValueError: without prompt lookup the config has nothing to draft with.
    """
    if lookup:
        return config if config.lookup is not None else dataclasses.replace(config, lookup=True)  # type: ignore[arg-type]
    if config.lookup is not None and not config.skip and not config.precision:
        raise ValueError(
            "--no-lookup: this config drafts by prompt lookup alone, so nothing would be left to draft with. Leave it "
            "out, or add --precision or --skip-attention."
        )
    return dataclasses.replace(config, lookup=None)


def default_config(model_name: str, generation_config: Any) -> SelfSpeculativeConfig | None:
    """Return the default config of a model, if there is one: the demo model's, or the one stored with the model."""
    from ..config import SelfSpeculativeConfig

    if model_name == DEMO:
        return SelfSpeculativeConfig.preset(DEMO_PRESET)
    return stored_config(generation_config)


def stored_config(generation_config: Any) -> SelfSpeculativeConfig | None:
    """Return the config stored by `enable_self_speculative(model, default=…)`; `None` for none and for "auto"."""
    from ..config import SelfSpeculativeConfig

    stored = getattr(generation_config, "self_speculative", None)
    if isinstance(stored, Mapping):
        return SelfSpeculativeConfig.from_dict(stored)
    if isinstance(stored, str) and stored != AUTO:
        return SelfSpeculativeConfig.from_pretrained(stored)
    return None


def with_drafting(
    config: SelfSpeculativeConfig | None, policy: str | None, draft_length: int | None
) -> SelfSpeculativeConfig:
    """Set the draft-length policy and the draft length of a config (by default an empty one), where given.

    Raises:
        ValueError: an unknown policy, or an invalid length.
    """
    from ..config import SelfSpeculativeConfig

    config = SelfSpeculativeConfig() if config is None else config
    changes: dict[str, Any] = {}
    if policy is not None:
        changes["policy"] = policy
    if draft_length is not None:
        changes["max_draft_length"] = draft_length
    if not changes:
        return config
    drafting = dataclasses.replace(config.drafting, **changes)
    # Without drafts there is nothing to adapt.
    return dataclasses.replace(config, drafting=drafting, adapt=config.adapt and drafting.policy != "none")
