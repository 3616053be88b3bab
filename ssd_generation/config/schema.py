"""What to skip, how to draft, and where a config came from: parameters that check themselves and are stored as JSON."""

from __future__ import annotations

import bisect
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields
from datetime import date, datetime, timezone
from itertools import islice, pairwise
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ..support.bounds import (
    DRAFT_LENGTH,
    NGRAM,
    SHARE,
    Entries,
    Integer,
    Number,
    Text,
    checked_fields,
    index_of,
)
from ..support.display import path_shown
from ..support.files import write_whole
from ..support.messages import clipped, did_you_mean, either, listed, shown
from ..support.reading import CONFIG, read_json

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from transformers import PreTrainedModel

__all__ = [
    "CONFIG_NAME",
    "FORMAT_VERSION",
    "POLICIES",
    "PRECISIONS",
    "PRESETS",
    "Costs",
    "DraftingConfig",
    "LookupConfig",
    "PrecisionConfig",
    "Provenance",
    "SelfSpeculativeConfig",
    "SkipConfig",
]

CONFIG_NAME = "self_speculative_config.json"
FORMAT_VERSION = 1
POLICIES = ("cost", "confidence", "fixed", "none")
PRECISIONS = ("int8", "int4")
GROUP_SIZES = (32, 64, 128, 256)

# The largest model that a config can name, and what it may say of it: a config within these bounds is made, written and
# read back in less than a second, in less than a mebibyte of JSON.
NUM_LAYERS = Integer(1, 10_000)
LAYERS = Entries(NUM_LAYERS.most, Integer(0, NUM_LAYERS.most - 1))
SECONDS = Number(1e-9, 1e6, "a number of seconds", "Measure it again.")
VERIFIED_TOKENS = Integer(1, 1_000_000)
VERIFY_PAIRS = Entries(1_000, VERIFIED_TOKENS)
ACCEPTANCE = Entries(DRAFT_LENGTH.most, SHARE)
EXPLORATION = Number(0, 0.5)
NAME = Text(300)
FREE_TEXT = Text(10_000)
VERSIONS = Entries(50, NAME)
MODELS = Entries(1_000, NAME)
VERSION_NUMBER = Integer(1, 1_000_000)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# What `from_pretrained` hands on to `huggingface_hub.hf_hub_download`. Checked for local paths too, so that a misspelt
# keyword never passes in silence.
_HUB_KEYWORDS = (
    "cache_dir",
    "endpoint",
    "etag_timeout",
    "force_download",
    "headers",
    "local_dir",
    "local_files_only",
    "subfolder",
    "token",
    "user_agent",
)


# ----------------------------------------------------------------------------------------------------------------------
# Skip set
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SkipConfig:
    """The sub-layers that the draft leaves out.

    `len(skip)` is the number of skipped sub-layers, so an empty skip set is false.

    Args:
        attention: layers whose attention sub-layer is skipped, counted from 0, up to 9,999; any sequence or set of
            integers. Stored as a sorted tuple.
        mlp: the same for the MLP sub-layers.

    Raises:
        TypeError: not a sequence, or an entry that is not an integer (a bool is none).
        ValueError: a layer out of range, or a repeated one.
    """

    attention: tuple[int, ...] = field(default=(), metadata=LAYERS.metadata)
    mlp: tuple[int, ...] = field(default=(), metadata=LAYERS.metadata)

    if TYPE_CHECKING:
        # Construction takes more than the fields hold; dataclasses would otherwise tie the two types together.
        def __init__(self, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention", _layers("attention", self.attention))
        object.__setattr__(self, "mlp", _layers("mlp", self.mlp))

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def validate_for(self, num_layers: int) -> None:
        """Check the skip set against a model.

        Args:
            num_layers: decoder layers of the model, 1 to 10,000.

        Raises:
            ValueError: a layer that the model does not have, or no attention sub-layer is left.
        """
        num_layers = NUM_LAYERS.check("num_layers", num_layers)
        for kind, layers in (("attention", self.attention), ("mlp", self.mlp)):
            outside = [layer for layer in layers if layer >= num_layers]
            if outside:
                raise ValueError(
                    f"The skip set names {kind} {listed(outside)}, but the model has {num_layers} layers (0 to "
                    f"{num_layers - 1}). Use a skip set that was made for this model."
                )
        if len(self.attention) == num_layers:
            raise ValueError(
                f"The skip set leaves out all {num_layers} attention sub-layers: the draft would not see the context. "
                "Keep at least one."
            )

    def to_dict(self) -> dict[str, list[int]]:
        """`{"attention": [...], "mlp": [...]}`, the format of the Draft & Verify code."""
        return {"attention": list(self.attention), "mlp": list(self.mlp)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str | None = None) -> SkipConfig:
        """Read `{"attention": [...], "mlp": [...]}`, or `"attn"` for `"attention"`.

        Args:
            data: one skip set, or several keyed by model name (the file of the Draft & Verify code).
            name: which of several.

        Raises:
            TypeError, ValueError: an unknown key, or a bad value.
        """
        data = _without_version(_choose(data, name))
        if data.keys() & set(_PARTS):
            raise ValueError(
                f"This is a whole config (keys {listed(data)}), not a skip set. Read it with "
                "SelfSpeculativeConfig.from_dict and take its `.skip`."
            )
        _check_keys(data, ("attention", "mlp"), "a skip set", aliases=("attn",))
        if "attention" in data and "attn" in data:
            raise ValueError("The skip set has both 'attention' and 'attn', two names of one thing. Keep 'attention'.")
        return cls(attention=data.get("attention", data.get("attn", ())), mlp=data.get("mlp", ()))

    @classmethod
    def preset(cls, name: str) -> SkipConfig:
        """A published skip set; see `PRESETS`.

        Raises:
            ValueError: no preset of that name.
        """
        return _preset(name).skip


# ----------------------------------------------------------------------------------------------------------------------
# Precision
# ----------------------------------------------------------------------------------------------------------------------


class _FrozenMapping(Mapping[_Key, _Value]):
    """A mapping that can be hashed, pickled and not changed; equal to a dict of the same items."""

    def __init__(self, items: Mapping[_Key, _Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: _Key) -> _Value:
        return self._items[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class PrecisionConfig:
    """The sub-layers that draft from low-bit copies of their own weights.

    Only the draft computes from the copies; verification uses the weights as loaded, so the text stays the target's.
    Whether a sub-layer is kept at all is for the skip set to say. A precision config is false if nothing in it is
    low-bit.

    Args:
        default: precision of every kept sub-layer that is not named below: "int8" (weight-only, a scale per output
            channel), "int4" (weight-only, a scale per group of input channels), or None for the weights as loaded.
        attention: exceptions by layer, counted from 0, up to 9,999: {3: "int8", 5: None}. The layers may be strings, as
            JSON has them. Stored sorted.
        mlp: the same for the MLP sub-layers.
        head: precision of the LM head.
        group_size: input channels that share a scale under int4: 32, 64, 128 or 256.

    Raises:
        TypeError: a field of the wrong type, or a layer that is not an integer.
        ValueError: an unknown precision, a layer out of range, a repeated layer, or another group size.
    """

    default: str | None = None
    attention: Mapping[int, str | None] = field(default_factory=dict, metadata=LAYERS.metadata)
    mlp: Mapping[int, str | None] = field(default_factory=dict, metadata=LAYERS.metadata)
    head: str | None = None
    group_size: int = 32

    if TYPE_CHECKING:

        def __init__(
            self,
            default: str | None = None,
            attention: Mapping[int, str | None] | Mapping[str, str | None] = ...,
            mlp: Mapping[int, str | None] | Mapping[str, str | None] = ...,
            head: str | None = None,
            group_size: int = 32,
        ) -> None: ...

    def __post_init__(self) -> None:
        _check_precision("default", self.default)
        object.__setattr__(self, "attention", _exceptions("attention", self.attention))
        object.__setattr__(self, "mlp", _exceptions("mlp", self.mlp))
        _check_precision("head", self.head)
        group_size = index_of(self.group_size)
        if group_size not in GROUP_SIZES:
            kind = TypeError if group_size is None else ValueError
            raise kind(
                f"group_size must be {either(GROUP_SIZES)}, but got {shown(self.group_size)}. The kernels take no "
                "other."
            )
        object.__setattr__(self, "group_size", group_size)

    def __bool__(self) -> bool:
        everything = (self.default, self.head, *self.attention.values(), *self.mlp.values())
        return any(precision is not None for precision in everything)

    def of(self, kind: str, layer: int) -> str | None:
        """The precision that a kept sub-layer drafts in.

        Args:
            kind: "attention" or "mlp".
            layer: counted from 0.

        Returns:
            One of `PRECISIONS`, or None for the weights as loaded.

        Raises:
            ValueError: another kind of sub-layer.
        """
        if kind not in ("attention", "mlp"):
            raise ValueError(
                f"There are sub-layers of kind 'attention' and 'mlp', but got {shown(kind)}. Choose one of them."
            )
        exceptions: Mapping[int, str | None] = getattr(self, kind)
        return exceptions.get(layer, self.default)

    def validate_for(self, num_layers: int) -> None:
        """Check the exceptions against a model.

        Args:
            num_layers: decoder layers of the model, 1 to 10,000.

        Raises:
            ValueError: a layer that the model does not have.
        """
        num_layers = NUM_LAYERS.check("num_layers", num_layers)
        for kind, exceptions in (("attention", self.attention), ("mlp", self.mlp)):
            outside = [layer for layer in exceptions if layer >= num_layers]
            if outside:
                raise ValueError(
                    f"The draft precision names {kind} {listed(outside)}, but the model has {num_layers} layers (0 to "
                    f"{num_layers - 1}). Use a config that was made for this model."
                )

    @classmethod
    def named(cls, name: str) -> PrecisionConfig:
        """Every kept sub-layer in one precision, and the LM head in int8 under either name.

        Args:
            name: "int8" or "int4".

        Raises:
            TypeError, ValueError: no such precision.
        """
        if not isinstance(name, str):
            raise TypeError(f"The name of a precision is {either(PRECISIONS)}, but got {shown(name)}.")
        if name not in PRECISIONS:
            raise ValueError(
                f"There is no precision {shown(name)}; use {either(PRECISIONS)}.{did_you_mean(name, PRECISIONS)}"
            )
        return cls(default=name, head="int8")

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, the layers of the exceptions as strings, as JSON wants its keys."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        for kind in ("attention", "mlp"):
            data[kind] = {str(layer): precision for layer, precision in data[kind].items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionConfig:
        """The inverse of `to_dict`; a missing field keeps its default.

        Raises:
            TypeError, ValueError: an unknown key or a bad value.
        """
        return cls(**_checked(cls, data, "'precision'"))


# ----------------------------------------------------------------------------------------------------------------------
# Drafting
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookupConfig:
    """Prompt lookup: the draft continues as the context did after the last tokens' earlier occurrence.

    After A. Saxena, Prompt Lookup Decoding (2023), whose form in transformers is `prompt_lookup_num_tokens`.

    Args:
        max_ngram: how many of the last tokens are looked for first, from `min_ngram` to 16.
        min_ngram: how few are still looked for, one fewer at a time, 1 to 16.
        max_tokens: the most tokens taken from what followed, 1 to 128.

    Raises:
        TypeError: a field that is not an integer.
        ValueError: a field out of range, or `min_ngram` above `max_ngram`.
    """

    max_ngram: int = field(default=4, metadata=NGRAM.metadata)
    min_ngram: int = field(default=1, metadata=NGRAM.metadata)
    max_tokens: int = field(default=12, metadata=DRAFT_LENGTH.metadata)

    def __post_init__(self) -> None:
        checked_fields(self)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram must be at most max_ngram ({shown(self.max_ngram)}), but got {shown(self.min_ngram)}. "
                "Lower it, or raise max_ngram."
            )

    def to_dict(self) -> dict[str, int]:
        """All fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LookupConfig:
        """The inverse of `to_dict`; a missing field keeps its default.

        Raises:
            TypeError, ValueError: an unknown key or a bad value.
        """
        return cls(**_checked(cls, data, "'lookup'"))


@dataclass(frozen=True)
class DraftingConfig:
    """How many tokens to draft in a round.

    The constants of the policy "confidence" are those of Draft & Verify (Zhang et al., ACL 2024, arXiv 2309.08168),
    with its symbols.

    Args:
        policy: "cost": each round the draft length with the most expected tokens per second, from the acceptance so far
            and the measured costs. "confidence": adaptive draft exiting; drafting stops after a token whose draft
            probability is below a threshold, which follows the acceptance rate. "fixed": always `max_draft_length`
            tokens. "none": nothing is drafted, every step is a plain one.
        max_draft_length: tokens per round: exactly (fixed) or at most (cost, confidence), 1 to 128.
        threshold: γ at the start, in [0, 1]; of the policy "confidence", as the next four.
        target_acceptance: α, the acceptance rate aimed at, in [0, 1].
        acceptance_smoothing: β1, weight of the old moving average of the acceptance rate, in [0, 1].
        threshold_smoothing: β2, weight of the old threshold, in [0, 1].
        threshold_step: ε, how far one round moves the threshold before smoothing, in [0, 1].
        acceptance: how likely the first, second, … drafted token is accepted if those before it were, each in [0, 1],
            the last standing for all further ones: what the policy "cost" starts from. At most 128; () for a cautious
            default.
        exploration: the largest share of the time that the policy "cost" spends on trying drafts again after they had
            stopped to pay, in [0, 0.5].
        carry_state: whether what the policy has learnt is carried from one call to the next. None: under greedy
            decoding, whose text does not hang on it; a sampled text then hangs on its seed alone.

    Raises:
        TypeError: a parameter of the wrong type.
        ValueError: a parameter out of range, or an unknown policy.
    """

    policy: str = "cost"
    max_draft_length: int = field(default=12, metadata=DRAFT_LENGTH.metadata)
    threshold: float = field(default=0.6, metadata=SHARE.metadata)
    target_acceptance: float = field(default=0.9, metadata=SHARE.metadata)
    acceptance_smoothing: float = field(default=0.5, metadata=SHARE.metadata)
    threshold_smoothing: float = field(default=0.9, metadata=SHARE.metadata)
    threshold_step: float = field(default=0.01, metadata=SHARE.metadata)
    acceptance: tuple[float, ...] = field(default=(), metadata=ACCEPTANCE.metadata)
    exploration: float = field(default=0.01, metadata=EXPLORATION.metadata)
    carry_state: bool | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            policy: str = "cost",
            max_draft_length: int = 12,
            threshold: float = 0.6,
            target_acceptance: float = 0.9,
            acceptance_smoothing: float = 0.5,
            threshold_smoothing: float = 0.9,
            threshold_step: float = 0.01,
            acceptance: Iterable[float] = (),
            exploration: float = 0.01,
            carry_state: bool | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise TypeError(f"policy must be {either(POLICIES)}, but got {shown(self.policy)}.")
        if self.policy not in POLICIES:
            raise ValueError(
                f"Unknown draft-length policy {shown(self.policy)}; use {either(POLICIES)}."
                f"{did_you_mean(self.policy, POLICIES)}"
            )
        checked_fields(self)
        # Not a set: the order says which token is meant.
        if isinstance(self.acceptance, (str, bytes, Mapping, Set)) or not isinstance(self.acceptance, Iterable):
            raise TypeError(
                "acceptance must be a sequence of probabilities, such as [0.9, 0.85] (() for the default), but got "
                f"{shown(self.acceptance)}."
            )
        entries = enumerate(ACCEPTANCE.take("acceptance", self.acceptance), start=1)
        acceptance = tuple(SHARE.check(f"acceptance of drafted token {place}", value) for place, value in entries)
        object.__setattr__(self, "acceptance", acceptance)
        if self.carry_state is not None and not isinstance(self.carry_state, bool):
            raise TypeError(f"carry_state must be True, False or None, but got {shown(self.carry_state)}.")

    def to_dict(self) -> dict[str, Any]:
        """All parameters by name; `acceptance` as a list."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"acceptance": list(self.acceptance)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DraftingConfig:
        """The inverse of `to_dict`; a missing parameter keeps its default.

        Raises:
            TypeError, ValueError: an unknown key or a bad value.
        """
        return cls(**_checked(cls, data, "'drafting'"))


@dataclass(frozen=True)
class Costs:
    """What steps cost, measured on one machine.

    Args:
        plain_step: seconds of one plain decoding step, between 1e-9 and 1e6.
        draft_step: seconds of one draft step, in the same range.
        verify: pairs (tokens in the verify pass, 1 to 1,000,000; seconds, as above), ascending in tokens; 1 to 1,000
            pairs.
        measured_on: where they were measured, as `ssd_generation.tuning.costs.describe_machine(model)` says it, such as
            "cpu (AMD EPYC, 2 threads), float32, sdpa, torch 2.13.0", at most 300 characters; `generate` warns where it
            stands on another. None holds everywhere.

    Raises:
        TypeError: a value that is not a number, `verify` is not a sequence of pairs, or `measured_on` not a string.
        ValueError: a time or a token count out of range, token counts that are not ascending, or too much of something.
    """

    plain_step: float = field(metadata=SECONDS.metadata)
    draft_step: float = field(metadata=SECONDS.metadata)
    verify: tuple[tuple[int, float], ...] = field(metadata=VERIFY_PAIRS.metadata)
    measured_on: str | None = field(default=None, metadata=NAME.metadata)

    if TYPE_CHECKING:

        def __init__(
            self,
            plain_step: float,
            draft_step: float,
            verify: Iterable[Sequence[float]],
            measured_on: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        checked_fields(self)
        expected = "a sequence of (tokens, seconds) pairs, such as [(1, 0.031), (4, 0.035)]"
        if isinstance(self.verify, (str, bytes, Mapping)) or not isinstance(self.verify, Iterable):
            raise TypeError(f"verify must be {expected}, but got {shown(self.verify)}.")
        verify: list[tuple[int, float]] = []
        for pair in VERIFY_PAIRS.take("verify", self.verify):
            if isinstance(pair, (str, bytes, Mapping, set, frozenset)) or not isinstance(pair, Iterable):
                raise TypeError(f"verify must be {expected}, but it has {shown(pair)}.")
            entry: tuple[Any, ...] = tuple(islice(pair, 3))
            if len(entry) != 2:
                raise ValueError(f"verify must be {expected}, but it has {shown(pair)}.")
            tokens = VERIFIED_TOKENS.check("A token count in verify", entry[0])
            if verify and tokens <= verify[-1][0]:
                raise ValueError(
                    f"The token counts in verify must ascend, each once, but {tokens} comes after {verify[-1][0]}. "
                    "Sort the pairs by tokens and keep one per count."
                )
            verify.append((tokens, SECONDS.check(f"The time of verifying {tokens} tokens", entry[1])))
        if not verify:
            raise ValueError(
                f"verify must be {expected}, but it is empty. Measure at least one verify pass, or leave out the costs."
            )
        object.__setattr__(self, "verify", tuple(verify))

    def verify_seconds(self, tokens: int) -> float:
        """How long a verify pass over so many tokens takes.

        Linear between the measured counts, where a plain step stands for one token unless that was measured too. Beyond
        the last count it goes on as between the last two, but never falls; with a single count it stays.

        Args:
            tokens: in the verify pass, 1 to 1,000,000.

        Raises:
            TypeError, ValueError: `tokens` is not an integer, or out of range.
        """
        tokens = VERIFIED_TOKENS.check("tokens", tokens)
        points = self.verify if self.verify[0][0] == 1 else ((1, self.plain_step), *self.verify)
        if len(points) == 1:
            return points[0][1]
        # The last point at or before `tokens`; beyond the last of all, the line through the last two.
        below = bisect.bisect_right([count for count, _ in points], tokens) - 1
        beyond = below == len(points) - 1
        (start, early), (end, late) = points[-2:] if beyond else points[below : below + 2]
        if beyond:
            return late + max(late - early, 0.0) * ((tokens - end) / (end - start))
        return early + (late - early) * ((tokens - start) / (end - start))

    def to_dict(self) -> dict[str, Any]:
        """All costs by name; `verify` as lists of two; `measured_on` only if it is known."""
        data: dict[str, Any] = {
            "plain_step": self.plain_step,
            "draft_step": self.draft_step,
            "verify": [[tokens, seconds] for tokens, seconds in self.verify],
        }
        return data if self.measured_on is None else {**data, "measured_on": self.measured_on}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """The inverse of `to_dict`.

        Raises:
            TypeError, ValueError: an unknown or missing key, or a bad value.
        """
        values = _checked(cls, data, "'costs'")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise ValueError(f"'costs' lacks {listed(missing)}. Measure them too, or leave out 'costs'.")
        return cls(**values)


# ----------------------------------------------------------------------------------------------------------------------
# Provenance
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provenance:
    """Where a config came from: on which model, with what, and when. All of it is optional.

    Strings have at most 300 characters, `source` at most 10,000.

    Args:
        model_id: Hub id of the model, or the name of its folder.
        model_type: its architecture, such as "llama", as in the config of its text model.
        num_layers: its number of decoder layers, 1 to 10,000.
        revision: commit of its weights on the Hub.
        dtype: of its weights, such as "bfloat16".
        attention_implementation: such as "sdpa".
        device: such as "cpu" or "cuda (NVIDIA H200)".
        versions: library to version, of at most 50.
        date: day in UTC, YYYY-MM-DD.
        source: free text, such as a citation.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a number out of range, a string or `versions` too long, or a date that is none.
    """

    model_id: str | None = field(default=None, metadata=NAME.metadata)
    model_type: str | None = field(default=None, metadata=NAME.metadata)
    num_layers: int | None = field(default=None, metadata=NUM_LAYERS.metadata)
    revision: str | None = field(default=None, metadata=NAME.metadata)
    dtype: str | None = field(default=None, metadata=NAME.metadata)
    attention_implementation: str | None = field(default=None, metadata=NAME.metadata)
    device: str | None = field(default=None, metadata=NAME.metadata)
    versions: Mapping[str, str] | None = field(default=None, metadata=VERSIONS.metadata)
    date: str | None = field(default=None, metadata=NAME.metadata)
    source: str | None = field(default=None, metadata=FREE_TEXT.metadata)

    def __post_init__(self) -> None:
        checked_fields(self)
        if self.versions is not None:
            expected = "versions must map names to version strings, such as {'torch': '2.13.0'}"
            if not isinstance(self.versions, Mapping):
                raise TypeError(f"{expected}, but got {shown(self.versions)}.")
            versions = dict(VERSIONS.take("versions", self.versions.items()))
            if not all(isinstance(text, str) for entry in versions.items() for text in entry):
                raise TypeError(f"{expected}, but got {shown(self.versions)}.")
            for name, version in versions.items():
                NAME.check("A name in versions", name)
                NAME.check(f"The version of {shown(name)}", version)
            object.__setattr__(self, "versions", _FrozenMapping(versions))
        if self.date is not None:
            try:
                canonical = date.fromisoformat(self.date).isoformat() == self.date
            except ValueError:
                canonical = False
            if not canonical:
                raise ValueError(
                    f"date must be a day written YYYY-MM-DD, such as '2025-01-31', but got {shown(self.date)}."
                )

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Provenance:
        """Describe a loaded model and the libraries it runs on.

        A model loaded from a local folder is named by that folder alone (from the Hub's cache: by its Hub id), so that
        a shared config tells nothing of the machine's directories.

        Args:
            model: the target model.
        """
        import torch
        import transformers

        config = model.config
        text_config = config.get_text_config(decoder=True)
        model_id, revision = _model_identity(getattr(config, "_name_or_path", None) or "")
        device = torch.device(model.device)
        described = device.type
        if device.type == "cuda":
            described = f"cuda ({torch.cuda.get_device_name(device)})"
        return cls(
            model_id=model_id,
            model_type=text_config.model_type,
            num_layers=text_config.num_hidden_layers,
            revision=getattr(config, "_commit_hash", None) or revision,
            dtype=str(model.dtype).removeprefix("torch."),
            attention_implementation=getattr(text_config, "_attn_implementation", None),
            device=described,
            versions={
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
                "ssd_generation": _own_version(),
            },
            date=datetime.now(timezone.utc).date().isoformat(),
        )

    def __repr__(self) -> str:
        known = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in known if v is not None)})"

    def to_dict(self) -> dict[str, Any]:
        """The known fields by name."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if self.versions is not None:
            known["versions"] = dict(self.versions)
        return known

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """The inverse of `to_dict`.

        Raises:
            TypeError, ValueError: an unknown key or a bad value.
        """
        return cls(**_checked(cls, data, "'provenance'"))


def _model_identity(name_or_path: str) -> tuple[str | None, str | None]:
    """Hub id (or folder name) and, if the path tells it, revision of what `from_pretrained` was given."""
    parts = PureWindowsPath(name_or_path).parts  # splits at both kinds of slash
    for position, part in enumerate(parts):
        # The Hub's cache: …/models--org--name/snapshots/<commit>
        if part.startswith("models--"):
            hub_id = "/".join(part.removeprefix("models--").split("--", 1))
            below = parts[position + 1 :]
            return hub_id, below[1] if len(below) > 1 and below[0] == "snapshots" else None
    if _looks_like_path(name_or_path) or os.path.isdir(name_or_path):
        # `or None`: the root of a file system has no name.
        name = os.path.basename(os.path.abspath(os.path.expanduser(name_or_path.replace("\\", "/"))))
        # What the file system has there need not be UTF-8.
        return name.encode("utf-8", errors="replace").decode() or None, None
    return name_or_path or None, None


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ssd_generation")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return str(getattr(sys.modules.get("ssd_generation"), "__version__", "unknown"))


# ----------------------------------------------------------------------------------------------------------------------
# The whole
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelfSpeculativeConfig:
    """Everything `generate(self_speculative=…)` needs to know.

    Args:
        skip: the sub-layers that the draft leaves out.
        drafting: how many tokens to draft in a round.
        precision: the sub-layers that draft from low-bit copies of their weights, or None for none. A name ("int8" or
            "int4", see `PrecisionConfig.named`) and a mapping of its fields are taken too.
        lookup: draft by prompt lookup too, where the context offers something, or None. True (the default lookup),
            False (none) and a mapping of its fields are taken too.
        costs: measured costs of the steps, or None.
        adapt: whether the draft goes on improving while it is used: under greedy decoding of a single text, sub-layers
            are left out or taken back by how often the draft would have said what was just verified. That takes at most
            2 % of the time and never changes the text; what was learnt is kept from call to call
            (`SpeculationStatistics.refinement`).
        provenance: where the config came from, or None. Where it names a model type or a number of layers, the config
            refuses any other model.

    Raises:
        TypeError: a part of the wrong type.
        ValueError: a skip set or precision that does not fit the number of layers in `provenance`, a precision for a
            sub-layer that is skipped, or a bad value.
    """

    skip: SkipConfig = field(default_factory=SkipConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    precision: PrecisionConfig | None = None
    lookup: LookupConfig | None = None
    costs: Costs | None = None
    provenance: Provenance | None = None
    adapt: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            skip: SkipConfig = ...,
            drafting: DraftingConfig = ...,
            precision: PrecisionConfig | str | Mapping[str, Any] | None = None,
            lookup: LookupConfig | bool | Mapping[str, Any] | None = None,
            costs: Costs | None = None,
            provenance: Provenance | None = None,
            adapt: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _precision(self.precision))
        object.__setattr__(self, "lookup", _lookup(self.lookup))
        for name, kind in (
            ("skip", SkipConfig),
            ("drafting", DraftingConfig),
            ("costs", Costs),
            ("provenance", Provenance),
        ):
            value = getattr(self, name)
            if isinstance(value, kind) or (value is None and name in ("costs", "provenance")):
                continue
            hint = " To read dicts, use SelfSpeculativeConfig.from_dict." if isinstance(value, Mapping) else ""
            raise TypeError(f"{name} must be a {kind.__name__}, but got {shown(value)}.{hint}")
        if not isinstance(self.adapt, bool):
            raise TypeError(f"adapt must be True or False, but got {shown(self.adapt)}.")
        if self.adapt and self.drafting.policy == "none":
            raise ValueError('adapt=True improves the draft, but the draft-length policy "none" never drafts.')
        if self.precision is not None:
            for sublayers, skipped, exceptions in (
                ("attention", self.skip.attention, self.precision.attention),
                ("mlp", self.skip.mlp, self.precision.mlp),
            ):
                both = [layer for layer in skipped if layer in exceptions]
                if both:
                    raise ValueError(
                        f"The draft skips {sublayers} {listed(both)}, and the draft precision names the same. Leave "
                        "them out of one of the two."
                    )
        if self.provenance is not None and self.provenance.num_layers is not None:
            self._check_layers(self.provenance.num_layers)

    def _check_layers(self, num_layers: int) -> None:
        self.skip.validate_for(num_layers)
        if self.precision is not None:
            self.precision.validate_for(num_layers)

    @property
    def drafts_itself(self) -> bool:
        """Whether the model drafts for itself.

        Not so where prompt lookup is all there is (nothing skipped, nothing low-bit), and where nothing is drafted.
        """
        if self.drafting.policy == "none":
            return False
        return self.lookup is None or bool(self.skip) or bool(self.precision)

    @property
    def longest_draft(self) -> int:
        """Tokens that a round can draft at the most, looked-up ones behind the model's own included."""
        longest = self.drafting.max_draft_length if self.drafts_itself else 0
        if self.lookup is not None and self.drafting.policy != "none":
            longest += self.lookup.max_tokens
        return longest

    def validate_for(self, num_layers: int, model_type: str | None = None) -> None:
        """Check the config against a model.

        Args:
            num_layers: decoder layers of the model, 1 to 10,000.
            model_type: `model.config.get_text_config(decoder=True).model_type`, as `Provenance.from_model` records it
                (in multimodal models it differs from `model.config.model_type`), or None not to check it.

        Raises:
            ValueError: the config was made for a model of another type or number of layers, or its skip set or
                precision does not fit.
        """
        num_layers = NUM_LAYERS.check("num_layers", num_layers)
        made_for = self.provenance
        if made_for is not None:
            named = f" ({shown(made_for.model_id)[1:-1]})" if made_for.model_id else ""
            advice = "Use a config that was made for this model."
            if model_type is not None and made_for.model_type not in (None, model_type):
                raise ValueError(
                    f"This config was made for a model of type {shown(made_for.model_type)}{named}, but the model is "
                    f"of type {shown(model_type)}. {advice}"
                )
            if made_for.num_layers not in (None, num_layers):
                raise ValueError(
                    f"This config was made for a model with {made_for.num_layers} layers{named}, but the model has "
                    f"{num_layers}. {advice}"
                )
        self._check_layers(num_layers)

    @classmethod
    def preset(cls, name: str) -> SelfSpeculativeConfig:
        """A published config; see `PRESETS`.

        Raises:
            ValueError: no preset of that name.
        """
        return _preset(name)

    # -- dict and JSON -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """A dict that JSON can hold; `precision`, `lookup`, `costs` and `provenance` only where there are any."""
        data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "skip": self.skip.to_dict(),
            "drafting": self.drafting.to_dict(),
        }
        for name in ("precision", "lookup", "costs", "provenance"):
            part = getattr(self, name)
            if part is not None:
                data[name] = part.to_dict()
        if self.adapt:
            data["adapt"] = True
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str | None = None) -> SelfSpeculativeConfig:
        """Read a config.

        Args:
            data: what `to_dict` gives (parts may be missing), a skip set alone as `SkipConfig.from_dict` reads it, or
                several of either keyed by model name.
            name: which of several.

        Raises:
            TypeError, ValueError: an unknown key, a newer format, or a bad value.
        """
        data = _without_version(_choose(data, name))
        if data.keys() & set(_SKIP_KEYS) and not data.keys() & set(_PARTS):
            return cls(skip=SkipConfig.from_dict(data))
        flat = [key for key in _SKIP_KEYS if key in data]
        if flat:
            raise ValueError(f"The config has {listed(flat)} beside its other parts. Put {listed(flat)} under 'skip'.")
        _check_keys(
            data,
            ("format_version", *_PARTS),
            "a config (which can also be a skip set alone: 'attention' and 'mlp')",
            aliases=_SKIP_KEYS,
        )
        # The optional parts may be null, the others may not: an explicit null there is more likely a mistake.
        return cls(
            skip=SkipConfig.from_dict(data["skip"]) if "skip" in data else SkipConfig(),
            drafting=DraftingConfig.from_dict(data["drafting"]) if "drafting" in data else DraftingConfig(),
            precision=data.get("precision"),
            lookup=data.get("lookup"),
            costs=Costs.from_dict(data["costs"]) if data.get("costs") is not None else None,
            provenance=Provenance.from_dict(data["provenance"]) if data.get("provenance") is not None else None,
            adapt=data.get("adapt", False),
        )

    def to_json_string(self) -> str:
        """The config as JSON, layer lists on one line, with a final newline."""
        return _pretty(self.to_dict()) + "\n"

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str], name: str | None = None) -> SelfSpeculativeConfig:
        """Read a JSON file in any format of `from_dict`.

        Args:
            path: the file.
            name: which of several configs in the file.

        Raises:
            FileNotFoundError: no such file.
            TypeError, ValueError: no regular file of at most 1 MiB, malformed JSON (the message names file and line),
                an unknown key, or a bad value.
        """
        file = os.path.expanduser(os.fspath(path))
        if os.path.isdir(file):
            raise ValueError(f"{path_shown(file)} is a folder, not a JSON file. Use from_pretrained for folders.")
        data = read_json(file, CONFIG, unique_keys=True)
        # Which file was wrong is what a user needs first; the parsers below know only the dict.
        try:
            return cls.from_dict(data, name)
        except TypeError as error:
            raise TypeError(f"{path_shown(file)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path_shown(file)}: {error}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__} {_pretty(self.to_dict())}"

    __str__ = __repr__

    # -- folders and the Hub -------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained: str | os.PathLike[str],
        name: str | None = None,
        revision: str | None = None,
        **hub_kwargs: Any,
    ) -> SelfSpeculativeConfig:
        """Load a config from a folder, a JSON file or the Hub.

        What exists on disk comes first; then the names of `PRESETS`; then the Hub, unless the string looks like a path.

        Args:
            pretrained: a folder that holds `self_speculative_config.json`, a JSON file (any format of `from_dict`), a
                preset's name, or a Hub id.
            name: which config, where the file holds several.
            revision: branch, tag or commit on the Hub; of no effect on local files.
            **hub_kwargs: `token`, `cache_dir`, `local_files_only`, `subfolder`, … for
                `huggingface_hub.hf_hub_download`. `subfolder` works for a local folder too.

        Raises:
            FileNotFoundError: there is no such file or folder, the folder holds no config, or the Hub could not give
                one.
            TypeError, ValueError: the file is malformed, or a keyword is unknown.
        """
        unknown = [key for key in hub_kwargs if key not in _HUB_KEYWORDS]
        if unknown:
            raise TypeError(
                f"from_pretrained got an unknown keyword {shown(unknown[0])}; allowed are name, revision, "
                f"{', '.join(_HUB_KEYWORDS)}.{did_you_mean(unknown[0], ('name', 'revision', *_HUB_KEYWORDS))}"
            )
        if not isinstance(pretrained, (str, os.PathLike)) or not isinstance(os.fspath(pretrained), str):
            raise TypeError(
                f"from_pretrained takes a folder, a JSON file or a Hub id, but got {shown(pretrained)}. To read a "
                "dict, use SelfSpeculativeConfig.from_dict."
            )
        given = os.fspath(pretrained)
        path = os.path.expanduser(given)
        if os.path.isdir(path):
            subfolder = hub_kwargs.get("subfolder")
            return cls.from_json_file(_config_in(os.path.join(path, subfolder) if subfolder else path), name)
        if os.path.exists(path):
            return cls.from_json_file(path, name)
        if given in PRESETS and isinstance(pretrained, str):
            if name is not None:
                raise ValueError(f"{given!r} is a preset and holds a single config. Leave out name={shown(name)}.")
            return PRESETS[given]
        if not isinstance(pretrained, str) or not given or _looks_like_path(given):
            raise FileNotFoundError(
                f"There is no file or folder {path_shown(given)}. Give a folder that holds {CONFIG_NAME}, a JSON file, "
                "or a Hub id such as 'user/repo'."
            )
        return cls.from_json_file(_download(given, revision, hub_kwargs), name)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_kwargs: Any,
    ) -> Path:
        """Write `self_speculative_config.json` into a folder, whole or not at all.

        Args:
            folder: made if it does not exist.
            push_to_hub: also upload the config.
            repo_id: where to; the folder's name if None.
            **push_kwargs: `private`, `token`, `commit_message`, … for `push_to_hub`.

        Returns:
            The path of the file.

        Raises:
            ValueError: `folder` is a file or cannot be written to, or `repo_id` or `push_kwargs` are given without
                `push_to_hub=True`.
        """
        if not push_to_hub and (repo_id is not None or push_kwargs):
            given = [*(["repo_id"] if repo_id is not None else []), *push_kwargs]
            raise ValueError(f"{listed(given)} has an effect only when pushing. Add push_to_hub=True, or leave it out.")
        target = Path(os.path.expanduser(os.fspath(folder)))
        if str(target).startswith("~"):
            raise ValueError(
                f"{path_shown(target)} begins with the home folder of somebody who has none here. Give the whole path, "
                "or put './' in front of a folder that is called so."
            )
        if os.path.exists(target) and not os.path.isdir(target):
            raise ValueError(
                f"save_pretrained needs a folder, but {path_shown(target)} is a file. Give the folder it lies in."
            )
        path = target / CONFIG_NAME
        content = self.to_json_string()
        try:
            target.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = clipped(getattr(error, "strerror", None) or error)
            raise ValueError(
                f"The config cannot be written into {path_shown(target)}: {reason}. Give another folder."
            ) from error
        if push_to_hub:
            self.push_to_hub(repo_id if repo_id is not None else target.absolute().name, **push_kwargs)
        return path

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload self-speculative decoding config",
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Upload the config to a model repository on the Hub, which is made if it does not exist.

        Args:
            repo_id: such as "user/repo".
            private: whether a new repository is private; None for the account's default.
            token: of the Hub; None for the one of `hf auth login`.
            commit_message: of the commit.
            revision: branch to commit to; None for the main one.
            create_pr: propose the change instead, as for a model that is someone else's.

        Returns:
            What the Hub says of the commit.
        """
        import huggingface_hub

        api = huggingface_hub.HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_file(
            path_or_fileobj=self.to_json_string().encode(),
            path_in_repo=CONFIG_NAME,
            repo_id=repo.repo_id,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def _precision(value: Any) -> PrecisionConfig | None:
    if value is None or isinstance(value, PrecisionConfig):
        return value
    if isinstance(value, str):
        return PrecisionConfig.named(value)
    if isinstance(value, Mapping):
        return PrecisionConfig.from_dict(value)
    raise TypeError(
        f"precision must be a PrecisionConfig, {either(PRECISIONS)}, a dict of its fields, or None for the weights as "
        f"loaded, but got {shown(value)}."
    )


def _lookup(value: Any) -> LookupConfig | None:
    if value is None or value is False:
        return None
    if value is True:
        return LookupConfig()
    if isinstance(value, LookupConfig):
        return value
    if isinstance(value, Mapping):
        return LookupConfig.from_dict(value)
    raise TypeError(
        "lookup must be a LookupConfig, True, a dict of its fields, or None for no prompt lookup, but got "
        f"{shown(value)}."
    )


_SKIP_KEYS = ("attention", "attn", "mlp")
_PARTS = ("skip", "drafting", "precision", "lookup", "costs", "provenance", "adapt")


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------


def _looks_like_path(text: str) -> bool:
    """Whether a string cannot be meant as a Hub id ("name" or "user/name")."""
    return (
        text.endswith((".json", "/"))
        or text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or bool(PureWindowsPath(text).drive)
    )


def _config_in(folder: str) -> str:
    path = os.path.join(folder, CONFIG_NAME)
    if os.path.exists(path):
        return path
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"There is no folder {path_shown(folder)}. Check `subfolder`.")
    try:
        others = sorted(entry for entry in os.listdir(folder) if entry.endswith(".json"))
    except OSError as error:
        raise ValueError(f"The folder {path_shown(folder)} cannot be read: {error.strerror}.") from error
    found = f"; its JSON files are {listed(others)}" if others else ""
    raise FileNotFoundError(
        f"The folder {path_shown(folder)} holds no {CONFIG_NAME}{found}. Give the path of the JSON file itself, or "
        "write a config there with save_pretrained."
    )


def _download(repo_id: str, revision: str | None, hub_kwargs: Mapping[str, Any]) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return str(huggingface_hub.hf_hub_download(repo_id, CONFIG_NAME, revision=revision, **hub_kwargs))
    except (
        errors.EntryNotFoundError,  # its subclass LocalEntryNotFoundError: the Hub cannot be reached
        errors.HFValidationError,
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        OSError,  # of the cache's folder
    ) as error:
        reason = clipped((str(error).strip().splitlines() or [type(error).__name__])[0], most=150)
        at = f" (revision {shown(revision)})" if revision is not None else ""
        raise FileNotFoundError(
            f"Found no config {shown(repo_id)}: there is no folder and no JSON file of that name here, it is no preset "
            f"({', '.join(PRESETS)}), and as a Hub id{at} it gave no {CONFIG_NAME}: {reason} Check the spelling; for "
            "the Hub, also the connection and, if the repository is private or gated, `token`."
        ) from error


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with objects spread over lines and lists on one."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = indent + "  "
    items = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {_pretty(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


# ----------------------------------------------------------------------------------------------------------------------
# Reading dicts
# ----------------------------------------------------------------------------------------------------------------------


def _choose(data: Any, name: str | None) -> Mapping[str, Any]:
    """The one config that is meant, out of a dict that may hold several keyed by model name."""
    if not isinstance(data, Mapping):
        raise TypeError(
            f"A config is a JSON object (a dict), such as {{'attention': [3, 5], 'mlp': [6]}}, but got {shown(data)}."
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be the name of a model in the config, but got {shown(name)}.")
    MODELS.take("A config", data)
    # A dict of dicts without any key of ours, one of which has a skip set: the last condition keeps a misspelt key, as
    # in {"drafing": {…}} or {"precison": {"mlp": {…}}}, from passing for a model's name.
    several = (
        not data.keys() & {"format_version", *_SKIP_KEYS, *_PARTS}
        and all(isinstance(entry, Mapping) for entry in data.values())
        and any("skip" in entry or _has_layers(entry) for entry in data.values())
    )
    if not several:
        if name is not None:
            raise ValueError(f"This is a single config, not several keyed by model name. Leave out name={shown(name)}.")
        return data
    if name is None:
        if len(data) > 1:
            raise ValueError(f"There are configs for several models: {listed(data)}. Choose one with name=….")
        (entry,) = data.values()
    elif name in data:
        entry = data[name]
    else:
        raise ValueError(f"There is no config named {shown(name)}; there are {listed(data)}.{did_you_mean(name, data)}")
    chosen: Mapping[str, Any] = entry
    return chosen


def _has_layers(entry: Mapping[str, Any]) -> bool:
    return any(key in entry and not isinstance(entry[key], Mapping) for key in _SKIP_KEYS)


def _without_version(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if "format_version" not in data:
        return data
    version = VERSION_NUMBER.check("format_version", data["format_version"])
    if version > FORMAT_VERSION:
        raise ValueError(
            f"The config is in format_version {version}, but this ssd_generation reads up to {FORMAT_VERSION}. Update "
            "the package, or save the config with the version installed here."
        )
    return {key: value for key, value in data.items() if key != "format_version"}


def _checked(cls: type[Any], data: Any, what: str) -> dict[str, Any]:
    """The keyword arguments of a dataclass, out of a dict."""
    names = tuple(f.name for f in fields(cls))
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{what} must be a JSON object (a dict) with keys of {', '.join(names)}, but got {shown(data)}."
        )
    _check_keys(data, names, what)
    return dict(data)


def _check_keys(data: Mapping[str, Any], allowed: Sequence[str], what: str, aliases: Sequence[str] = ()) -> None:
    for key in data:
        if key not in allowed and key not in aliases:
            raise ValueError(
                f"Unknown key {shown(key)} in {what}; allowed are {listed(allowed, most=20)}."
                f"{did_you_mean(key, (*allowed, *aliases))}"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Values and messages
# ----------------------------------------------------------------------------------------------------------------------


def _layers(kind: str, value: Any) -> tuple[int, ...]:
    try:
        entries = None if isinstance(value, (str, bytes, Mapping)) else LAYERS.take(kind, value)
    except TypeError:
        entries = None
    if entries is None:
        raise TypeError(
            f"{kind} must be a sequence of layer numbers, such as [3, 5] ([] to skip none), but got {shown(value)}."
        )
    layers: list[int] = []
    for entry in entries:
        layer = index_of(entry)
        if layer is None:
            raise TypeError(
                f"{kind} has {shown(entry)}, which is not an integer. Give the numbers of the layers to skip, counted "
                "from 0."
            )
        layers.append(_layer(kind, layer))
    layers.sort()
    for layer, following in pairwise(layers):
        if layer == following:
            raise ValueError(f"{kind} has layer {layer} more than once. Name each layer once, counted from 0.")
    return tuple(layers)


def _layer(kind: str, layer: int) -> int:
    if layer < 0:
        raise ValueError(
            f"{kind} has the negative layer {shown(layer)}. Layers are counted from 0; give the number itself."
        )
    last = NUM_LAYERS.most - 1
    if layer > last:
        raise ValueError(f"{kind} has layer {shown(layer)}, but layers are counted from 0 to {last:,} at the most.")
    return layer


def _check_precision(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value in PRECISIONS):
        return
    message = f"{name} must be {either(PRECISIONS)}, or None for the weights as loaded, but got {shown(value)}."
    if not isinstance(value, str):
        raise TypeError(message)
    raise ValueError(message + did_you_mean(value, PRECISIONS))


def _exceptions(kind: str, value: Any) -> _FrozenMapping[int, str | None]:
    """Precisions by layer, sorted; JSON has the layers as strings."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{kind} must map layers to precisions, such as {{3: 'int8', 5: None}} ({{}} for no exceptions), but got "
            f"{shown(value)}."
        )
    precisions: dict[int, str | None] = {}
    for key, precision in LAYERS.take(kind, value.items()):
        layer = int(key) if isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key) else index_of(key)
        if layer is None:
            raise TypeError(
                f"{kind} has the layer {shown(key)}, which is not an integer. Give the numbers of the layers, counted "
                "from 0."
            )
        layer = _layer(kind, layer)
        if layer in precisions:
            raise ValueError(f"{kind} has layer {layer} more than once. Name each layer once, counted from 0.")
        _check_precision(f"The precision of {kind} {layer}", precision)
        precisions[layer] = precision
    return _FrozenMapping(dict(sorted(precisions.items())))


# ----------------------------------------------------------------------------------------------------------------------
# Published skip sets
# ----------------------------------------------------------------------------------------------------------------------

_DRAFT_AND_VERIFY = (
    "Zhang et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding, ACL 2024, "
    "arXiv 2309.08168; https://github.com/dilab-zju/self-speculative-decoding"
)


def _published(model_id: str, num_layers: int, attention: str, mlp: str) -> SelfSpeculativeConfig:
    return SelfSpeculativeConfig(
        skip=SkipConfig(attention=map(int, attention.split()), mlp=map(int, mlp.split())),
        provenance=Provenance(model_id=model_id, model_type="llama", num_layers=num_layers, source=_DRAFT_AND_VERIFY),
    )


#: The skip sets that Draft & Verify published, by the names of its authors, and the demo model's.
PRESETS: Mapping[str, SelfSpeculativeConfig] = MappingProxyType(
    {
        "llama-2-13b": _published(
            "llama-2-13b",
            40,
            attention="3 5 6 8 10 11 14 15 18 22 23 24 25 26 27 28 29 30 31 33 34 35 36 37",
            mlp="6 9 10 11 15 24 25 27 28 35",
        ),
        "llama-2-13b-chat": _published(
            "llama-2-13b-chat",
            40,
            attention="7 8 9 10 11 14 15 18 22 23 24 26 27 28 29 30 31 32 33 34 35 36 37 38",
            mlp="7 10 11 14 27 30 32 33 37 38",
        ),
        "codellama-13b": _published(
            "codellama-13b",
            40,
            attention="5 6 9 10 11 14 15 16 21 23 24 26 27 28 29 30 31 32 34 35 36 37",
            mlp="10 11 12 14 15 25 26 27 30 32 33 34",
        ),
        "llama-2-70b": _published(
            "llama-2-70b",
            80,
            attention=(
                "10 11 13 14 16 18 19 20 21 22 25 27 28 29 30 31 35 41 43 45 46 47 48 49 50 51 52 53 54 55 56 57 58 60 "
                "61 62 63 65 66 67 68 69 70 74 75 78 79"
            ),
            mlp=(
                "2 4 9 10 13 14 16 20 21 22 24 25 26 27 28 29 31 34 37 41 47 48 49 50 53 54 55 57 58 60 62 63 66 "
                "67 68 70 76"
            ),
        ),
        # The demo model has little to spare (README, "Measured"): the attention sub-layers whose absence changes its
        # choices least.
        "smollm2-135m-instruct": SelfSpeculativeConfig(
            skip=SkipConfig(attention=(6, 9, 26)),
            provenance=Provenance(
                model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
                model_type="llama",
                num_layers=30,
                source="ssd_generation: greedy choice by agreement with the whole model's continuations of six prompts",
            ),
        ),
    }
)


def _preset(name: str) -> SelfSpeculativeConfig:
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"There is no preset {shown(name)}; there are {listed(PRESETS)}.{did_you_mean(name, PRESETS)}")
    return PRESETS[name]
