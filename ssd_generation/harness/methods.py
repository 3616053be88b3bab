"""Methods to compare: plain decoding, this library's modes, and those of transformers and other runtimes."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import DraftingConfig, LookupConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig
from ..forward.structure.layouts import DecoderLayout
from ..forward.structure.sublayers import locate_sublayers
from ..support.devices import is_asynchronous
from .peer_methods import PeerModel, check_peer_method, check_unused, is_peer

__all__ = [
    "METHODS",
    "PLAIN",
    "UNDRAFTED",
    "Method",
    "check_methods",
    "default_methods",
    "make_methods",
    "of_config",
    "portable",
    "random_half",
]

PLAIN, UNDRAFTED = "plain", "plain-loop"

METHODS: Mapping[str, str] = {
    PLAIN: "transformers' own decoding; always there",
    "auto": 'self_speculative="auto": the fastest way to draft on this machine',
    "auto-free": "the same without low-bit copies: lookup, and layer skipping once it pays",
    "lookup": "this library, drafting by prompt lookup alone",
    "skip": "this library, the skip set of --config alone, draft length by cost",
    "int8": "this library, all linear layers in int8 while drafting",
    "int4": "this library, all linear layers in int4 while drafting",
    "config": "this library, --config as it is",
    "random-half": "this library, a random half of all sub-layers left out while drafting",
    UNDRAFTED: "this library's loop with nothing drafted",
    "paper": "the skip set of --config and Draft & Verify's own rule for the draft length",
    "static": "transformers' own decoding with a static cache, which it compiles on a GPU",
    "prompt-lookup-N": "transformers' prompt lookup of N tokens",
    "assistant": "transformers' assisted decoding by --assistant",
    "early-exit-N": "transformers' assisted decoding by the model's own first N layers",
    "llama.cpp-NAME": "llama.cpp by the GGUF file --gguf …/NAME.gguf",
    "openvino-NAME": "OpenVINO GenAI by the folder --openvino …/NAME",
    "openvino-prefix-cache-NAME": "the same, with the prompt in its prefix cache from an earlier call",
}
"""Names and their meanings; N represents a number, NAME the name of a file."""

_NUMBERED = {"prompt-lookup": "prompt_lookup_num_tokens", "early-exit": "assistant_early_exit"}
_NEEDS_CONFIG = ("skip", "config", "paper")
_NEEDS_SKIP = ("skip", "paper")


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: name as in `METHODS`, with a number for N.
        request: arguments that it adds to those of `generate`; `"assistant_model": True` represents the assistant. For
            a method that another runtime runs: its model, `"peer": PeerModel`.
    """

    name: str
    request: Mapping[str, Any]

    @property
    def is_own(self) -> bool:
        """True for methods of this library's loop."""
        return "self_speculative" in self.request

    @property
    def config(self) -> SelfSpeculativeConfig | None:
        """Config of the method, if it has one."""
        request = self.request.get("self_speculative")
        return request if isinstance(request, SelfSpeculativeConfig) else None


def of_config(config: SelfSpeculativeConfig | None) -> tuple[str, ...]:
    """Return the methods that compare a config; `paper` needs a skip set."""
    return () if config is None else ("config", "paper") if config.skip else ("config",)


def default_methods(config: SelfSpeculativeConfig | None, has_assistant: bool) -> tuple[str, ...]:
    """Return the methods that are compared by default."""
    return (
        PLAIN,
        "auto",
        "auto-free",
        *of_config(config),
        UNDRAFTED,
        "prompt-lookup-2",
        "prompt-lookup-3",
        "prompt-lookup-10",
        *(("assistant",) if has_assistant else ()),
    )


def check_methods(
    names: Sequence[str],
    config: SelfSpeculativeConfig | None,
    has_assistant: bool,
    peers: Mapping[str, PeerModel] | None = None,
) -> tuple[str, ...]:
    """Check the names of methods before a model is loaded, and return them, plain decoding first.

    Args:
        names: names of methods, see `METHODS`.
        config: config of the methods that need one.
        has_assistant: whether there is a model for `assistant`.
        peers: models of other runtimes, by method name. Each has to be used, see `check_unused`.

    Raises:
        ValueError: an unknown or repeated name, nothing to compare with plain decoding, or a method without what it
            needs.
    """
    models = peers or {}
    for name in names:
        kind = _number_of(name)[0]
        if is_peer(name):
            check_peer_method(name, models)
        elif (kind not in METHODS or kind.endswith("-N")) and kind not in _NUMBERED:
            raise ValueError(f"There is no method {name!r}. Choose from {', '.join(METHODS)}.")
        if kind in _NUMBERED and _number_of(name)[1] < 1:
            raise ValueError(f"The method {kind}-N needs a number of at least 1, such as {kind}-3, but got {name!r}.")
        _check_config(name, config)
        if name == "assistant" and not has_assistant:
            raise ValueError("The method 'assistant' needs an assistant model. Name one with --assistant.")
        if names.count(name) > 1:
            raise ValueError(f"The method {name!r} was named more than once. Name it once.")
    check_unused(names, models)
    others = tuple(name for name in names if name != PLAIN)
    if not others:
        raise ValueError(f"There is nothing to compare with plain decoding. Name a method: {', '.join(METHODS)}.")
    return PLAIN, *others


def make_methods(
    names: Sequence[str],
    model: Any,
    config: SelfSpeculativeConfig | None = None,
    seed: int = 0,
    peers: Mapping[str, PeerModel] | None = None,
) -> list[Method]:
    """Make the methods of the given names for a model.

    Args:
        names: names of methods, see `METHODS`.
        model: the target model, enabled.
        config: config of `skip`, `config` and `paper`.
        seed: seed of `random-half`.
        peers: models of other runtimes, by method name.

    Raises:
        ValueError: a method without the config or the other runtime's model that it needs.
    """
    models = peers or {}
    return [
        Method(name, _of_peer(name, models) if is_peer(name) else _request(name, model, config, seed)) for name in names
    ]


def _of_peer(name: str, models: Mapping[str, PeerModel]) -> dict[str, Any]:
    check_peer_method(name, models)
    return {"peer": models[name]}


def _request(name: str, model: Any, config: SelfSpeculativeConfig | None, seed: int) -> dict[str, Any]:
    kind, number = _number_of(name)
    if kind in _NUMBERED:
        return {_NUMBERED[kind]: number}
    if name == PLAIN:
        return {}
    if name == "static":
        return {"cache_implementation": "static"}
    if name == "assistant":
        return {"assistant_model": True}
    if name == "auto":
        return {"self_speculative": "auto"}
    if name == "auto-free":
        return {"self_speculative": "auto", "draft_memory": 0.0}
    return {"self_speculative": _mode_config(name, model, config, seed)}


def _mode_config(name: str, model: Any, config: SelfSpeculativeConfig | None, seed: int) -> SelfSpeculativeConfig:
    """Make the config of one of this library's modes."""
    _check_config(name, config)
    if config is not None and name in _NEEDS_CONFIG:
        if name == "config":
            return config
        if name == "paper":
            return SelfSpeculativeConfig(
                skip=config.skip, drafting=DraftingConfig(policy="confidence", max_draft_length=12)
            )
        by_cost = dataclasses.replace(config.drafting, policy="cost")
        return dataclasses.replace(config, drafting=by_cost, precision=None, lookup=None)
    if name == "lookup":
        return SelfSpeculativeConfig(lookup=LookupConfig())
    if name in ("int8", "int4"):
        if name == "int4" and is_asynchronous(model.device):  # the head's copy is in int8 otherwise
            return SelfSpeculativeConfig(precision=PrecisionConfig(default=name, head=name))
        return SelfSpeculativeConfig(precision=name)
    if name == "random-half":
        return SelfSpeculativeConfig(skip=random_half(locate_sublayers(model), seed))
    assert name == UNDRAFTED, name
    return SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))


def _check_config(name: str, config: SelfSpeculativeConfig | None) -> None:
    if name in _NEEDS_CONFIG and config is None:
        raise ValueError(f"The method {name!r} needs a config. Name one with --config.")
    if name in _NEEDS_SKIP and config is not None and not config.skip:
        raise ValueError(
            f"The method {name!r} drafts by a skip set alone, but this config skips nothing. Name another one with "
            "--config, or layers with --skip-attention and --skip-mlp."
        )


def _number_of(name: str) -> tuple[str, int]:
    """Split a name into kind and number, such as `prompt-lookup-3`; any other name, and 0."""
    match = re.fullmatch(r"(prompt-lookup|early-exit)-(\d{1,6})", name)
    return (match[1], int(match[2])) if match else (name, 0)


def random_half(layout: DecoderLayout, seed: int) -> SkipConfig:
    """Choose a random half of all sub-layers that can be skipped; at least one attention sub-layer remains.

    Args:
        layout: layout of the model.
        seed: seed of the choice; the same seed gives the same half.
    """
    attention = [layer.index for layer in layout.layers if layer.attention and layer.index not in layout.shares_kv]
    mlp = [layer.index for layer in layout.layers if layer.mlp]
    generator = random.Random(seed)
    kept = generator.choice(attention) if attention else None
    candidates = [("attention", i) for i in attention if i != kept] + [("mlp", i) for i in mlp]
    half = generator.sample(candidates, min((len(attention) + len(mlp)) // 2, len(candidates)))
    return SkipConfig(
        attention=[i for kind, i in half if kind == "attention"], mlp=[i for kind, i in half if kind == "mlp"]
    )


def portable(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write a request as JSON for another checkout, without defaults, which that one may not know yet."""
    data = dict(request)
    config = data.get("self_speculative")
    if isinstance(config, SelfSpeculativeConfig):
        written = config.to_dict()
        default = DraftingConfig().to_dict()
        written["drafting"] = {
            key: value
            for key, value in written["drafting"].items()
            if key in ("policy", "max_draft_length") or value != default[key]
        }
        data["self_speculative"] = written
    return data
