"""Parts of a config: skip set, draft length, low-bit copies, prompt lookup, costs. Each validates its own values."""

from __future__ import annotations

import bisect
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..support.bounds import DRAFT_LENGTH, NGRAM, SHARE
from ..support.devices import is_asynchronous
from ..support.hub import identity_of
from ..support.messages import did_you_mean, listed, shown
from ..support.parameters import Parameters, Part, check_keys
from . import values
from .stored_parameters import FORMAT_VERSION, PARTS, PUBLISHED, SKIP_KEYS, StoredParameters, single
from .values import LAYERS, NAME, NUM_LAYERS, PRECISION, SECONDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _BySublayer(Parameters):
    """Settings of attention and MLP sub-layers, by layer number."""

    _who = ""
    attention: Collection[int]
    mlp: Collection[int]

    def validate_for(self, num_layers: int) -> None:
        """Check the layer numbers against a model of `num_layers` layers (1 to 10,000).

        Raises:
            ValueError: a layer that the model does not have; for a skip set, also if no attention sub-layer is left.
        """
        num_layers = NUM_LAYERS.check("num_layers", num_layers)
        for kind, layers in (("attention", self.attention), ("mlp", self.mlp)):
            if outside := [layer for layer in layers if layer >= num_layers]:
                has = f"but the model has {num_layers} layers (0 to {num_layers - 1})"
                raise ValueError(f"{self._who} names {kind} {listed(outside)}, {has}. Use one made for this model.")


@dataclass(frozen=True)
class SkipConfig(_BySublayer, title="a skip set"):
    """Sub-layers that the draft skips.

    `len(skip)` is the number of skipped sub-layers, so an empty skip set is false.

    Args:
        attention: layers whose attention sub-layer is skipped, counted from 0, up to 9,999; any sequence or set of
            integers. Stored as a sorted tuple.
        mlp: the same for the MLP sub-layers.

    Raises:
        TypeError, ValueError: not a sequence of integers (a bool is not one), or a layer out of range or repeated.
    """

    _who = "The skip set"
    attention: tuple[int, ...] = field(default=(), metadata=LAYERS.metadata)
    mlp: tuple[int, ...] = field(default=(), metadata=LAYERS.metadata)

    if TYPE_CHECKING:  # the constructor accepts more types than the fields store

        def __init__(self, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> None: ...

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def validate_for(self, num_layers: int) -> None:
        super().validate_for(num_layers)
        if len(self.attention) == num_layers:
            problem = f"The skip set leaves out all {num_layers} attention sub-layers: the draft would see no context."
            raise ValueError(f"{problem} Keep at least one.")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str | None = None) -> SkipConfig:
        """Read `{"attention": [...], "mlp": [...]}`, or `"attn"` for `"attention"`.

        Args:
            data: one skip set, or several keyed by model name (the file of the Draft & Verify code).
            name: key of the one to read, where there are several.

        Raises:
            TypeError, ValueError: an unknown key, or a bad value.
        """
        data = single(data, name)
        if data.keys() & set(PARTS):
            problem = f"This is a whole config (keys {listed(data)}), not a skip set."
            raise ValueError(f"{problem} Read it with SelfSpeculativeConfig.from_dict and take its `.skip`.")
        check_keys(data, ("attention", "mlp"), cls._title, aliases=("attn",))
        if "attention" in data and "attn" in data:
            raise ValueError("The skip set has both 'attention' and 'attn', two names of one key. Keep 'attention'.")
        return cls(attention=data.get("attention", data.get("attn", ())), mlp=data.get("mlp", ()))

    @classmethod
    def preset(cls, name: str) -> SkipConfig:
        """Return a published skip set; see `PRESETS`. ValueError: no preset has this name."""
        return SelfSpeculativeConfig.preset(name).skip


@dataclass(frozen=True)
class PrecisionConfig(_BySublayer, title="'precision'"):
    """Sub-layers that draft from low-bit copies of their own weights: of linear layers, and of experts on a CPU.

    Only the draft computes from the copies; verification uses the weights as loaded, so the text stays the target's.
    The skip set decides which sub-layers the draft runs at all. A precision config is false if nothing in it is
    low-bit.

    Args:
        default: precision of every sub-layer neither skipped nor named below: "int8" (weight-only, a scale per output
            channel), "int4" (weight-only, a scale per group of input channels), or None for the weights as loaded.
        attention: exceptions by layer, counted from 0, up to 9,999: {3: "int8", 5: None}. The layers may be strings, as
            in JSON. Stored sorted.
        mlp: the same for the MLP sub-layers.
        head: precision of the LM head.
        group_size: input channels that share a scale under int4: 32, 64, 128 or 256.

    Raises:
        TypeError, ValueError: an unknown precision, a layer out of range or repeated, or another group size.
    """

    _who = "The draft precision"
    default: str | None = field(default=None, metadata=PRECISION.metadata)
    attention: Mapping[Any, str | None] = field(default_factory=dict, metadata=values.EXCEPTIONS.metadata)
    mlp: Mapping[Any, str | None] = field(default_factory=dict, metadata=values.EXCEPTIONS.metadata)
    head: str | None = field(default=None, metadata=PRECISION.metadata)
    group_size: int = field(default=32, metadata=values.GROUP_SIZE.metadata)

    def __bool__(self) -> bool:
        return any((self.default, self.head, *self.attention.values(), *self.mlp.values()))

    def of(self, kind: str, layer: int) -> str | None:
        """Return the precision in which a sub-layer drafts: one of `PRECISIONS`, or None for the weights as loaded.

        Args:
            kind: "attention" or "mlp".
            layer: counted from 0.

        Raises:
            ValueError: another kind of sub-layer.
        """
        if kind not in ("attention", "mlp"):
            problem = f"There are sub-layers of kind 'attention' and 'mlp', but got {shown(kind)}."
            raise ValueError(f"{problem} Choose one of them.")
        return {"attention": self.attention, "mlp": self.mlp}[kind].get(layer, self.default)

    @classmethod
    def named(cls, name: str) -> PrecisionConfig:
        """Return a config of all sub-layers in "int8" or "int4", head in int8. TypeError, ValueError: another name."""
        return cls(default=values.PRECISION_NAME.check("The name of a precision", name), head="int8")


@dataclass(frozen=True)
class LookupConfig(Parameters, title="'lookup'"):
    """Prompt lookup: the draft copies what followed an earlier occurrence of the last tokens in the context.

    After A. Saxena, Prompt Lookup Decoding (2023), whose form in transformers is `prompt_lookup_num_tokens`.

    Args:
        max_ngram: length of the longest n-gram of last tokens to match, tried first; from `min_ngram` to 16.
        min_ngram: length of the shortest one, reached one token fewer at a time; 1 to 16.
        max_tokens: maximum number of tokens copied from what followed, 1 to 128.
        store: whether to search the texts of earlier calls on the model as well, used where their match is longer.
            They stay in memory as long as the model does, and only from calls with such a config.

    Raises:
        TypeError, ValueError: not an integer, one out of range, or `min_ngram` above `max_ngram`; `store` is not a
            bool.
    """

    max_ngram: int = field(default=4, metadata=NGRAM.metadata)
    min_ngram: int = field(default=1, metadata=NGRAM.metadata)
    max_tokens: int = field(default=12, metadata=DRAFT_LENGTH.metadata)
    store: bool = field(default=False, metadata=values.SWITCH.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name; without `store` where it is off, since earlier versions do not know it."""
        found = super().to_dict()
        return found if self.store else {name: value for name, value in found.items() if name != "store"}

    def _check_together(self) -> None:
        if self.min_ngram > self.max_ngram:
            problem = f"min_ngram must be at most max_ngram ({self.max_ngram}), but got {self.min_ngram}."
            raise ValueError(f"{problem} Lower it, or raise max_ngram.")


@dataclass(frozen=True)
class DraftingConfig(Parameters, title="'drafting'"):
    """Draft length: the number of tokens to draft in each round.

    The constants of the policy "confidence" are those of Draft & Verify (Zhang et al., ACL 2024, arXiv 2309.08168),
    with its symbols.

    Args:
        policy: "cost": in each round the draft length with the most expected tokens per second, from the acceptance so
            far and the measured costs. "confidence": adaptive draft exiting; drafting stops after a token whose draft
            probability is below a threshold, which follows the acceptance rate. "fixed": always `max_draft_length`
            tokens. "none": nothing is drafted, every step is a plain one.
        max_draft_length: tokens per round: exactly (fixed) or at most (cost, confidence), 1 to 128.
        threshold: initial γ, in [0, 1]; for the policy "confidence", like the next four.
        target_acceptance: α, the target acceptance rate, in [0, 1].
        acceptance_smoothing: β1, weight of the old moving average of the acceptance rate, in [0, 1].
        threshold_smoothing: β2, weight of the old threshold, in [0, 1].
        threshold_step: ε, the change of the threshold in one round before smoothing, in [0, 1].
        acceptance: probability that the first, second, … drafted token is accepted if those before it were, each in
            [0, 1], the last also for all further ones: initial estimate of the policy "cost". At most 128, stored as a
            tuple; () for a cautious default.
        exploration: largest share of the time that the policy "cost" spends on retrying drafts after they stopped
            paying off, in [0, 0.5].
        carry_state: whether the policy's estimates are carried from one call to the next. No text depends on it. None
            means True.

    Raises:
        TypeError, ValueError: a parameter of the wrong type or out of range, or an unknown policy.
    """

    policy: str = field(default="cost", metadata=values.POLICY.metadata)
    max_draft_length: int = field(default=12, metadata=DRAFT_LENGTH.metadata)
    threshold: float = field(default=0.6, metadata=SHARE.metadata)
    target_acceptance: float = field(default=0.9, metadata=SHARE.metadata)
    acceptance_smoothing: float = field(default=0.5, metadata=SHARE.metadata)
    threshold_smoothing: float = field(default=0.9, metadata=SHARE.metadata)
    threshold_step: float = field(default=0.01, metadata=SHARE.metadata)
    acceptance: Sequence[float] = field(default=(), metadata=values.ACCEPTANCE.metadata)
    exploration: float = field(default=0.01, metadata=values.EXPLORATION.metadata)
    carry_state: bool | None = field(default=None, metadata=values.SWITCH_OR_NONE.metadata)


@dataclass(frozen=True)
class Costs(Parameters, title="'costs'", omits_defaults=True):
    """Costs of decoding steps, measured on one machine.

    Args:
        plain_step: seconds of one plain decoding step, between 1e-9 and 1e6.
        draft_step: seconds of one draft step, in the same range.
        verify: pairs (tokens in the verification pass, 1 to 1,000,000; seconds, as above), ascending in tokens; 1 to
            1,000 pairs, stored as tuples.
        measured_on: machine of the measurement, as `ssd_generation.tuning.describe_machine(model)` returns
            it, such as "cpu (AMD EPYC, 2 threads), float32, sdpa, torch 2.13.0", at most 300 characters; `generate`
            warns on any other. None is valid on all machines.

    Raises:
        TypeError, ValueError: a time or a token count out of range, or `verify` not ascending pairs.
    """

    plain_step: float = field(metadata=SECONDS.metadata)
    draft_step: float = field(metadata=SECONDS.metadata)
    verify: Sequence[tuple[int, float]] = field(metadata=values.VERIFY.metadata)
    measured_on: str | None = field(default=None, metadata=NAME.metadata)

    def verify_seconds(self, tokens: int) -> float:
        """Return the seconds of a verification pass over `tokens` tokens (1 to 1,000,000).

        Linear between the measured counts; the plain step is the time of one token unless that was measured too.
        Extrapolated beyond the last count from the last two, but never falling; constant with a single count.
        """
        tokens = values.VERIFIED_TOKENS.check("tokens", tokens)
        points = self.verify if self.verify[0][0] == 1 else ((1, self.plain_step), *self.verify)
        if len(points) == 1:
            return points[0][1]
        # The last point at or before `tokens`; beyond the last point of all, the line through the last two.
        below = bisect.bisect_right([count for count, _ in points], tokens) - 1
        beyond = below == len(points) - 1
        (start, early), (end, late) = points[-2:] if beyond else points[below : below + 2]
        if beyond:
            return late + max(late - early, 0.0) * ((tokens - end) / (end - start))
        return early + (late - early) * ((tokens - start) / (end - start))


@dataclass(frozen=True)
class Provenance(Parameters, title="'provenance'", omits_defaults=True):
    """Origin of a config: the model, the libraries and the date. Every field is optional.

    Strings have at most 300 characters, `source` at most 10,000.

    Args:
        model_id: Hub id of the model, or the name of its folder.
        model_type: its architecture, such as "llama", as in the config of its text model.
        num_layers: its number of decoder layers, 1 to 10,000.
        revision: commit of its weights on the Hub.
        dtype: type of its weights, such as "bfloat16".
        attention_implementation: its attention, such as "sdpa".
        device: its device, such as "cpu" or "cuda (NVIDIA H200)".
        versions: version by library, at most 50.
        date: day in UTC, YYYY-MM-DD.
        source: free text, such as a citation.

    Raises:
        TypeError, ValueError: a number out of range, a string or `versions` too long, or an invalid date.
    """

    model_id: str | None = field(default=None, metadata=NAME.metadata)
    model_type: str | None = field(default=None, metadata=NAME.metadata)
    num_layers: int | None = field(default=None, metadata=NUM_LAYERS.metadata)
    revision: str | None = field(default=None, metadata=NAME.metadata)
    dtype: str | None = field(default=None, metadata=NAME.metadata)
    attention_implementation: str | None = field(default=None, metadata=NAME.metadata)
    device: str | None = field(default=None, metadata=NAME.metadata)
    versions: Mapping[str, str] | None = field(default=None, metadata=values.VERSIONS.metadata)
    date: str | None = field(default=None, metadata=NAME.metadata)
    source: str | None = field(default=None, metadata=values.FREE_TEXT.metadata)

    def _check_together(self) -> None:
        try:
            canonical = self.date if self.date is None else date.fromisoformat(self.date).isoformat()
        except ValueError:
            canonical = None
        if self.date != canonical:
            problem = "date must be a day written YYYY-MM-DD, such as '2025-01-31'"
            raise ValueError(f"{problem}, but got {shown(self.date)}.")

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Provenance:
        """Describe a loaded target model and the libraries it runs on.

        A model loaded from a local folder is named by that folder alone (from the Hub's cache: by its Hub id), so that
        a shared config does not reveal the machine's directories.
        """
        import torch
        import transformers

        libraries, config = (torch, transformers, sys.modules["ssd_generation"]), model.config
        text_config = config.get_text_config(decoder=True)
        model_id, revision = identity_of(getattr(config, "_name_or_path", None) or "")
        device = torch.device(model.device)
        return cls(
            model_id=model_id,
            model_type=text_config.model_type,
            num_layers=text_config.num_hidden_layers,
            revision=getattr(config, "_commit_hash", None) or revision,
            dtype=str(model.dtype).removeprefix("torch."),
            attention_implementation=getattr(text_config, "_attn_implementation", None),
            device=f"cuda ({torch.cuda.get_device_name(device)})" if is_asynchronous(device) else device.type,
            versions={"python": platform.python_version(), **{m.__name__: str(m.__version__) for m in libraries}},
            date=datetime.now(timezone.utc).date().isoformat(),
        )

    def validate_for(self, num_layers: int, model_type: str | None = None) -> None:
        """Raise ValueError if the config was made for a model of another type (if given) or number of layers."""
        named = f" ({shown(self.model_id)[1:-1]})" if self.model_id else ""
        advice = "Use a config made for this model."
        if model_type is not None and self.model_type not in (None, model_type):
            problem = f"This config was made for a model of type {shown(self.model_type)}{named}"
            raise ValueError(f"{problem}, but the model is of type {shown(model_type)}. {advice}")
        if self.num_layers not in (None, num_layers):
            problem = f"This config was made for a model with {self.num_layers} layers{named}"
            raise ValueError(f"{problem}, but the model has {num_layers}. {advice}")

    def __repr__(self) -> str:
        known = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in known if v is not None)})"


def _part(kind: type[Parameters], form: str = "", short: type | None = None, read: Any = None) -> dict[str, Any]:
    return dict(Part(kind, form, short, read, "To read dicts, use SelfSpeculativeConfig.from_dict.").metadata)


_NAME_OR_DICT = ", 'int8' or 'int4', a dict of its fields, or None for the weights as loaded"
_TRUE_OR_DICT = ", True, a dict of its fields, or None for no prompt lookup"


@dataclass(frozen=True, repr=False)
class SelfSpeculativeConfig(
    StoredParameters, title="a config (which can also be a skip set alone: 'attention' and 'mlp')", omits_defaults=True
):
    """Config of `generate(self_speculative=…)`.

    Args:
        skip: the sub-layers that the draft skips.
        drafting: number of tokens to draft in each round.
        precision: the sub-layers that draft from low-bit copies of their weights, or None for none. A name ("int8" or
            "int4", see `PrecisionConfig.named`) and a mapping of its fields are accepted too.
        lookup: prompt lookup, used as well wherever the context has a match, or None. True (the default lookup),
            False (none) and a mapping of its fields are accepted too.
        costs: measured costs of the steps, or None.
        adapt: whether to refine the draft while it is used: in calls with a single text, sub-layers are skipped or
            restored by how often the draft would have predicted the tokens just verified. That takes at most 2 % of
            the time and never changes the text; the result is carried from call to call
            (`SpeculationStatistics.refinement`).
        provenance: origin of the config, or None. If it names a model type or a number of layers, the config refuses
            any other model.
        exactness: "bitwise": the target's passes give a token the same bits at every width, where the machine supports
            that (see `SpeculationStatistics.exactness`); "numeric": rounding may depend on the width; None: bitwise
            where that costs at most 2 % of the time in float32, 5 % in half precision.

    Raises:
        TypeError, ValueError: a part of the wrong type, a skip set or precision that does not fit the number of layers
            in `provenance`, or a precision for a sub-layer that is skipped.
    """

    skip: SkipConfig = field(default_factory=SkipConfig, metadata=_part(SkipConfig))
    drafting: DraftingConfig = field(default_factory=DraftingConfig, metadata=_part(DraftingConfig))
    precision: PrecisionConfig | None = field(
        default=None, metadata=_part(PrecisionConfig, _NAME_OR_DICT, str, PrecisionConfig.named)
    )
    lookup: LookupConfig | None = field(
        default=None, metadata=_part(LookupConfig, _TRUE_OR_DICT, bool, lambda on: LookupConfig() if on else None)
    )
    costs: Costs | None = field(default=None, metadata=_part(Costs))
    provenance: Provenance | None = field(default=None, metadata=_part(Provenance))
    adapt: bool = field(default=False, metadata=values.SWITCH.metadata)
    exactness: str | None = field(default=None, metadata=values.EXACTNESS.metadata)

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
            exactness: str | None = None,
        ) -> None: ...

    def _check_together(self) -> None:
        if self.adapt and self.drafting.policy == "none":
            raise ValueError('adapt=True improves the draft, but the draft-length policy "none" never drafts.')
        for kind in ("attention", "mlp") if self.precision is not None else ():
            exceptions = getattr(self.precision, kind)
            if both := [layer for layer in getattr(self.skip, kind) if layer in exceptions]:
                problem = f"The draft skips {kind} {listed(both)}, and the draft precision names the same."
                raise ValueError(f"{problem} Leave them out of one of the two.")
        if self.provenance is not None and self.provenance.num_layers is not None:
            self.validate_for(self.provenance.num_layers)

    @property
    def drafts_itself(self) -> bool:
        """Tell whether the model drafts for itself: not with prompt lookup alone, nor where nothing is drafted."""
        return self.drafting.policy != "none" and (self.lookup is None or bool(self.skip) or bool(self.precision))

    @property
    def longest_draft(self) -> int:
        """Maximum number of tokens drafted in a round, looked-up ones after the model's own included."""
        longest = self.drafting.max_draft_length if self.drafts_itself else 0
        looked_up = self.lookup.max_tokens if self.lookup is not None and self.drafting.policy != "none" else 0
        return longest + looked_up

    def validate_for(self, num_layers: int, model_type: str | None = None) -> None:
        """Check the config against a model.

        Args:
            num_layers: decoder layers of the model, 1 to 10,000.
            model_type: `model.config.get_text_config(decoder=True).model_type`, as `Provenance.from_model` records it
                (in multimodal models it differs from `model.config.model_type`), or None not to check it.

        Raises:
            ValueError: the config was made for a model of another type or size, or its skip set or precision does not
                fit.
        """
        num_layers = NUM_LAYERS.check("num_layers", num_layers)
        if self.provenance is not None:
            self.provenance.validate_for(num_layers, model_type)
        self.skip.validate_for(num_layers)
        if self.precision is not None:
            self.precision.validate_for(num_layers)

    @classmethod
    def preset(cls, name: str) -> SelfSpeculativeConfig:
        """Return a published config; see `PRESETS`. ValueError: no preset has this name."""
        if not isinstance(name, str) or name not in PRESETS:
            problem = f"There is no preset {shown(name)}; there are {listed(PRESETS)}."
            raise ValueError(f"{problem}{did_you_mean(name, PRESETS)}")
        return PRESETS[name]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; besides `skip` and `drafting`, only values other than the defaults."""
        return {"format_version": FORMAT_VERSION, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str | None = None) -> SelfSpeculativeConfig:
        """Read a config.

        Args:
            data: a dict from `to_dict` (parts may be missing), a skip set alone as `SkipConfig.from_dict` reads it, or
                several of either keyed by model name.
            name: key of the one to read, where there are several.

        Raises:
            TypeError, ValueError: an unknown key, a newer format, or a bad value.
        """
        parts = single(data, name)
        flat = [key for key in SKIP_KEYS if key in parts]
        if flat and not parts.keys() & set(PARTS):
            return cls(skip=SkipConfig.from_dict(parts))
        if flat:
            raise ValueError(f"The config has {listed(flat)} next to its parts. Put {listed(flat)} under 'skip'.")
        check_keys(parts, ("format_version", *PARTS), cls._title, aliases=SKIP_KEYS)
        # Optional parts may be null; a null for the others is more likely a mistake.
        parts |= {key: kind.from_dict(parts[key]) for key, kind in _NEEDED.items() if key in parts}
        parts |= {key: kind.from_dict(parts[key]) for key, kind in _OPTIONAL.items() if parts.get(key) is not None}
        return cls(**parts)


_NEEDED: dict[str, type[Parameters]] = {"skip": SkipConfig, "drafting": DraftingConfig}
_OPTIONAL: dict[str, type[Parameters]] = {"costs": Costs, "provenance": Provenance}

#: The skip sets that Draft & Verify published, under the names its authors gave them, and the demo model's.
PRESETS: Mapping[str, SelfSpeculativeConfig] = MappingProxyType(
    {name: SelfSpeculativeConfig.from_dict(data) for name, data in PUBLISHED.items()}
)
