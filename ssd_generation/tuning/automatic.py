"""`self_speculative="auto"`: the fastest way for this model to draft for itself on this machine, without a config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..config import DraftingConfig, LookupConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig
from ..drafting.policy import CostAwarePolicy
from ..forward.captured.conditions import why_not_captured
from ..forward.captured.passes import skip_mode_of
from ..forward.copies.copied_layers import check_precision, estimated_bytes
from ..forward.copies.low_bit import copies_of, copy_bytes, drop_copies, keep_only
from ..forward.copies.resident import check_memory, resident_bytes, why_not_resident
from ..forward.cuda_graph.graph_passes import why_no_graphs
from ..forward.structure.expert_layers import experts_of
from ..forward.structure.linears import has_foreign
from ..forward.structure.offloaded import is_offloaded
from ..support.bounds import Number
from ..support.measurements import NoisyMeasurement, cached_measurement, is_measured, was_noisy
from ..support.model_state import state_of
from ..support.progress import progress_bar
from ..support.structure import follows_from_structure
from ..support.tensors import stored_bytes
from ..support.warn import warn_once
from .costs import costs_of
from .learnt import LearntPart
from .measuring import describe_model
from .moving_weights import origin_of
from .speedup import theoretical_speedup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "DRAFT_MEMORY",
    "DRAFT_MEMORY_OF_HALF",
    "DRAFT_MEMORY_OF_QUANTISED",
    "AutomaticChoice",
    "automatic_choice",
    "automatic_config",
    "check_budget",
    "choose_in_parts",
    "is_chosen",
    "usual_budget",
    "weight_bytes",
]

DRAFT_MEMORY = 0.3
DRAFT_MEMORY_OF_HALF = 0.35
DRAFT_MEMORY_OF_QUANTISED = 0.65
"""Shares of the weights' bytes that low-bit copies may take by default: for float32 weights; for 16-bit weights, of
which an int4 copy takes somewhat more; and for quantised weights: an int4 copy of 8-bit weights."""

_SPEEDUP = Number(0, 1e6)
_SHARE_OF_WEIGHTS = Number(0, 100, "a share of the weights' bytes", "0 allows no copies.")

# Agreement of low-bit drafts with their targets, as measured (PrecisionConfig.named), and its weight in tokens: a short
# prompt says little.
_USUAL_AGREEMENT = {"int8": 0.98, "int4": 0.96, "int4, head int4": 0.945}
_USUAL_WEIGHT = 16
_LOOKED_AT = 96
"""Number of prompt tokens that the candidates are tried on."""

_LEAST_RECORD = 64
"""Number of judged draft tokens from which on they are evidence for other texts."""

_LEAD = 1.05
"""Ratio of predicted speed-ups from which another candidate replaces the chosen one: its copies have to be made."""

_LEAST_GAIN = 1.03
"""Predicted speed-up below which a draft is not worth its memory."""

_LEAST_TIME = 0.8
"""Time of a draft step, in plain steps, as a multiple of its copies' share of the weights' bytes: a lower bound."""


@dataclass(frozen=True)
class AutomaticChoice:
    """The config that `self_speculative="auto"` drafts with, and the reasons for it.

    Attributes:
        config: the config, with the costs measured on this machine.
        draft_memory: share of the weights' bytes that low-bit copies were allowed to take.
        precision: the precision that was chosen; `None` for prompt lookup alone.
        expected: by precision, the speed-up over plain decoding predicted from measured costs, for a text on which the
            draft's agreement is that on the first prompt; prompt lookup left out.
        ruled_out: by precision, why it was not tried.
    """

    config: SelfSpeculativeConfig
    draft_memory: float
    precision: str | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    ruled_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate that the choice assumed; `None` for prompt lookup alone."""
        return None if self.precision is None else self.config.drafting.acceptance[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the choice and its reasons as plain JSON types."""
        return {
            "precision": self.precision,
            "lookup": self.config.lookup is not None,
            "acceptance": self.acceptance,
            "expected_speedup": dict(self.expected),
            "ruled_out": dict(self.ruled_out),
            "draft_memory": self.draft_memory,
        }


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights."""
    return sum(map(stored_bytes, model.parameters()))


@follows_from_structure
def usual_budget(model: torch.nn.Module) -> float:
    """Return the default share of the weights' bytes that low-bit copies may take."""
    if has_foreign(model):
        return DRAFT_MEMORY_OF_QUANTISED
    bits = [p.element_size() for p in model.parameters() if p.is_floating_point()]
    return DRAFT_MEMORY_OF_HALF if bits and max(bits) <= 2 else DRAFT_MEMORY


def check_budget(model: PreTrainedModel, config: SelfSpeculativeConfig, draft_memory: float) -> None:
    """Check that a config's low-bit copies fit a memory budget.

    Args:
        model: the target model.
        config: the config to check.
        draft_memory: share of the weights' bytes that copies may take, 0 to 100.

    Raises:
        TypeError: `draft_memory` is not a number.
        ValueError: it is out of range, or the copies would take more.
    """
    draft_memory = _check_share(draft_memory)
    if not config.precision:
        return
    count = resident_bytes if is_offloaded(model) else estimated_bytes
    share = count(model, config.skip, config.precision) / weight_bytes(model)
    if share > draft_memory:
        raise ValueError(
            f"The low-bit copies that this config drafts from take {share:.3f} of the weights' bytes, but "
            f"`draft_memory={draft_memory:g}` allows no more. Allow more, or choose another `precision`."
        )


def _check_share(draft_memory: Any) -> float:
    return _SHARE_OF_WEIGHTS.check("draft_memory", draft_memory)


def automatic_config(
    model: PreTrainedModel, prompt: torch.Tensor | None = None, draft_memory: float | None = None
) -> SelfSpeculativeConfig:
    """Return the config of `automatic_choice`, where the reasons do not matter."""
    return automatic_choice(model, prompt, draft_memory).config


def automatic_choice(
    model: PreTrainedModel, prompt: torch.Tensor | None = None, draft_memory: float | None = None
) -> AutomaticChoice:
    """Choose the config of greatest predicted speed-up: prompt lookup, with low-bit copies where they pay and fit.

    The first call for a model on a machine tries the candidates (seconds: their cost, and how often they agree with the
    model on `prompt`) and stores the answer on the disk; later calls read it. Tokens accepted from the chosen draft
    since then count as well, each time there are as many as were known before: so another draft may replace it.

    Args:
        model: the target model.
        prompt (`torch.LongTensor` of shape `(B, sequence_length)`, *optional*): text to try the candidates on.
        draft_memory: share of the weights' bytes that low-bit copies may take, 0 to 100; 0 allows none. `None`: that
            of `usual_budget`.

    Raises:
        TypeError: `draft_memory` is not a number.
        ValueError: `draft_memory` is out of range.
    """
    asked = _Question.of(model, draft_memory)
    if is_offloaded(model):
        return _choice_of_offloaded(model, asked.draft_memory)
    if not asked.names:
        # Where passes are graphs, a skipping draft has to be captured to be judged: seconds, in the middle of a call.
        lookup = dataclasses.replace(_candidate(None, 0.0), adapt=why_no_graphs(model) is not None)
        lookup = dataclasses.replace(lookup, costs=costs_of(model, lookup))
        asked.note_answered(model)
        return AutomaticChoice(lookup, asked.draft_memory, ruled_out=asked.ruled_out)
    known = asked.answer(model, lambda: _choose(model, asked.names, prompt))
    choice = _with_costs(model, asked.chosen(known))
    again = _reconsidered(model, known, choice.config)
    if again is not known:
        known = asked.answer(model, lambda: again, again=True)
        choice = _with_costs(model, asked.chosen(known))
    asked.note_answered(model)
    return choice


@dataclass(frozen=True)
class _Question:
    """The candidates of `automatic_choice`.

    Attributes:
        draft_memory: share of the weights' bytes that copies may take.
        names: precisions to choose from.
        ruled_out: reasons why others are not tried, by precision.
        described: key of the answer in the measurement store.
        brief: key of the note that there is one (`is_chosen`).
    """

    draft_memory: float
    names: list[str]
    ruled_out: dict[str, str]
    described: dict[str, Any]
    brief: dict[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel, draft_memory: float | None) -> _Question:
        brief = _described_briefly(model, draft_memory)
        draft_memory = usual_budget(model) if draft_memory is None else _check_share(draft_memory)
        names, ruled_out = ([], {}) if is_offloaded(model) else _allowed(model, draft_memory)
        described = {key: value for key, value in brief.items() if key != "draft_memory"}
        return cls(draft_memory, names, ruled_out, {**described, "what": "auto", "names": names, "format": 5}, brief)

    def chosen(self, answer: Any) -> AutomaticChoice:
        """Return the choice without costs; raise on anything wrong with what was stored."""
        if answer["precision"] not in (None, *self.names):
            raise ValueError(f"there is no precision {answer['precision']!r}")
        return AutomaticChoice(
            _candidate(answer["precision"], answer["acceptance"]),
            self.draft_memory,
            answer["precision"],
            {name: _SPEEDUP.check("speedup", tried["speedup"]) for name, tried in answer["tried"].items()},
            self.ruled_out,
        )

    def answer(self, model: PreTrainedModel, measure: Callable[[], Any], again: bool = False) -> Any:
        """Return the stored answer, or what `measure` returns, which is stored."""
        return cached_measurement(model, self.described, measure, again=again, use=self.chosen)

    def note_answered(self, model: PreTrainedModel) -> None:
        """Record what `is_chosen` tells."""
        noted = NoisyMeasurement(True) if was_noisy(model) else True
        cached_measurement(model, self.brief, lambda: noted)


def is_chosen(model: PreTrainedModel, draft_memory: float | None = None) -> bool:
    """Tell whether `automatic_choice` was made before for this model and budget on this machine.

    It takes a millisecond: candidates are not enumerated.

    Raises:
        TypeError, ValueError: as in `automatic_choice`.
    """
    return is_measured(model, _described_briefly(model, draft_memory))


def _described_briefly(model: PreTrainedModel, draft_memory: float | None) -> dict[str, Any]:
    """Describe a model and a budget; unlike `_Question.described`, without enumerating the candidates."""
    return {
        "what": "auto, chosen",
        "name": getattr(model.config, "_name_or_path", None),
        **describe_model(model),
        "draft_memory": None if draft_memory is None else _check_share(draft_memory),
        "numbers": origin_of(model),
    }


def choose_in_parts(
    model: PreTrainedModel, prompt: torch.Tensor | None = None, draft_memory: float | None = None
) -> Iterator[None]:
    """Try the candidates of `automatic_choice` and store the answer, in parts of some seconds.

    Args:
        model: the target model.
        prompt: as in `automatic_choice`.
        draft_memory: as in `automatic_choice`.

    Yields:
        Nothing, between two parts.
    """
    asked = _Question.of(model, draft_memory)
    if asked.names:
        found = yield from _choosing(model, asked.names, prompt)
        asked.answer(model, lambda: found)
    automatic_choice(model, prompt, draft_memory)


_OFFLOADED = ("int4", "int4, head int4")
"""int4 variants for offloaded models, most accurate first: memory is scarce there."""

_LONGEST_OFFLOADED = 64
"""Longest draft of a round, in tokens, where each pass of the model brings all weights into memory."""


def _choice_of_offloaded(model: PreTrainedModel, draft_memory: float) -> AutomaticChoice:
    """Choose the first candidate of `_OFFLOADED` that fits. No pass of the model is made to choose."""
    ruled_out: dict[str, str] = {}
    reason = why_not_resident(model)
    expected: dict[str, float] = {}
    for name in _OFFLOADED:
        precision = _precision(name)
        share = resident_bytes(model, SkipConfig(), precision) / weight_bytes(model)
        why = reason
        if why is None and share > draft_memory:
            why = f"its copies take {share:.3f} of the weights' bytes, more than draft_memory={draft_memory:g}"
        why = why or check_memory(model, SkipConfig(), precision)
        if why is not None:
            ruled_out[name] = why
            continue
        acceptance = _USUAL_AGREEMENT[name]
        config = _candidate(name, acceptance)
        drafting = dataclasses.replace(config.drafting, max_draft_length=_LONGEST_OFFLOADED)
        config = dataclasses.replace(config, drafting=drafting, adapt=False)  # judging drafts would take further passes
        config = dataclasses.replace(config, costs=costs_of(model, config))
        assert config.costs is not None
        expected[name] = max(1.0, theoretical_speedup([acceptance], config.costs, _LONGEST_OFFLOADED)[0])
        if expected[name] >= _LEAST_GAIN:
            return AutomaticChoice(config, draft_memory, name, expected, ruled_out)
        break
    drop_copies(model)
    if not expected and reason is None:
        warn_once(
            model,
            f"{type(model).__name__}, whose weights are offloaded, drafts by prompt lookup alone: no low-bit copies "
            "fit. " + " ".join(f"{name}: {why}." for name, why in ruled_out.items()),
        )
    lookup = dataclasses.replace(_candidate(None, 0.0), adapt=False)
    lookup = dataclasses.replace(lookup, costs=costs_of(model, lookup))
    return AutomaticChoice(lookup, draft_memory, expected=expected, ruled_out=ruled_out)


def _with_costs(model: PreTrainedModel, choice: AutomaticChoice) -> AutomaticChoice:
    """Return a choice whose config has the costs measured here."""
    return dataclasses.replace(choice, config=dataclasses.replace(choice.config, costs=costs_of(model, choice.config)))


def _allowed(model: PreTrainedModel, draft_memory: float) -> tuple[list[str], dict[str, str]]:
    """Return the precisions that this model, device and budget allow, and why the others are not."""
    try:
        check_precision(model)
    except ValueError as error:
        return [], dict.fromkeys(_USUAL_AGREEMENT, str(error))
    names, ruled_out = [], {}
    for name, share in _shares(model).items():
        if share <= 0:
            ruled_out[name] = "no linear layer of a shape that it takes"
        elif share > draft_memory:
            ruled_out[name] = (
                f"its copies take {share:.3f} of the weights' bytes, more than draft_memory={draft_memory:g}"
            )
        else:
            names.append(name)
    return names, ruled_out


@follows_from_structure
def _shares(model: PreTrainedModel) -> dict[str, float]:
    """Return the share of the weights' bytes that the copies of each candidate would take."""
    total = weight_bytes(model)
    return {name: estimated_bytes(model, SkipConfig(), _precision(name)) / total for name in _USUAL_AGREEMENT}


def _precision(name: str) -> PrecisionConfig:
    """Return the precision of a candidate by its name."""
    if name == "int4, head int4":
        return PrecisionConfig(default="int4", head="int4")
    return PrecisionConfig.named(name)


def _candidate(name: str | None, acceptance: float) -> SelfSpeculativeConfig:
    if name is None:
        return SelfSpeculativeConfig(lookup=LookupConfig(), adapt=True)
    return SelfSpeculativeConfig(
        precision=_precision(name),
        lookup=LookupConfig(),
        drafting=DraftingConfig(acceptance=(acceptance,)),
        adapt=True,
    )


def _choose(model: PreTrainedModel, names: list[str], prompt: torch.Tensor | None) -> Any:
    """Do the work of `_choosing` at once."""
    parts = _choosing(model, names, prompt)
    with progress_bar(len(names), "Trying low-bit drafts of this model, once", bar_format="{desc}: {n}/{total}") as bar:
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value
            bar.update()


def _choosing(
    model: PreTrainedModel, names: list[str], prompt: torch.Tensor | None
) -> Generator[None, None, dict[str, Any] | NoisyMeasurement]:
    """Find the candidate with the greatest theoretical speed-up: `{"precision": …, "acceptance": …, "tried": …}`.

    It yields after each candidate.
    """
    before = copy_bytes(model)
    best: dict[str, Any] = {"precision": None, "acceptance": 0.0, "speedup": _LEAST_GAIN}
    tried: dict[str, Any] = {}
    text = None if prompt is None else prompt[:1, -_LOOKED_AT:]
    choices = None if text is None else _choices(model, text)
    held = None
    for name in _in_turn(model, names):
        bound = _most_gain(model, name)
        if bound < _LEAST_GAIN:
            tried[name] = {"agreed": 0, "of": 0, "speedup": max(1.0, bound)}
            yield
            continue
        # The budget is for one set of copies. (The int4 variants share all but the head.)
        if before == 0 and held is not None and (held == "int8") != (name == "int8"):
            drop_copies(model)
        held = name
        config = _candidate(name, _USUAL_AGREEMENT[name])
        right, seen = 0, 0
        if text is not None and choices is not None:
            with skip_mode_of(model, config)[0]:
                same = _choices(model, text) == choices
            right, seen = int(same.sum()), same.numel()
        acceptance = _acceptance(name, right, seen)
        speedup = max(1.0, theoretical_speedup([acceptance], costs_of(model, config))[0])
        tried[name] = {"agreed": right, "of": seen, "speedup": speedup}
        if speedup > best["speedup"]:
            best = {"precision": name, "acceptance": acceptance, "speedup": speedup}
        yield
    if before == 0 and copy_bytes(model):
        if best["precision"] is None or (best["precision"] == "int8") != (held == "int8"):
            drop_copies(model)  # before other copies are made, when they are needed
        else:
            keep_only(model, copies_of(model, SkipConfig(), _precision(best["precision"])))
    answer = {**best, "tried": tried}
    return NoisyMeasurement(answer) if was_noisy(model) else answer


def _most_gain(model: PreTrainedModel, name: str) -> float:
    """Return a bound on the speed-up of a candidate by its usual agreement, before its copies are made.

    In a mixture of experts, verifying several tokens may take so much longer than a plain step that no draft pays, and
    copies of its experts take minutes and gigabytes. A captured draft takes at least its copies' share of the time.
    """
    if not experts_of(model):
        return math.inf
    costs = costs_of(model, _candidate(None, 0.0))
    share = _LEAST_TIME * _shares(model)[name] if why_not_captured(model) is None else 0.0
    costs = dataclasses.replace(costs, draft_step=share * costs.plain_step)
    return theoretical_speedup([_USUAL_AGREEMENT[name]], costs)[0]


def _in_turn(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Order the candidates for trial: the kind that usually wins comes last, so that its copies are there then."""
    return sorted(names, key=lambda name: (name == "int8") == (model.dtype == torch.float32))


def _reconsidered(model: PreTrainedModel, choice: Any, config: SelfSpeculativeConfig) -> Any:
    """Update a choice with what has been accepted of its draft since; return the same object where that is little."""
    name = choice["precision"]
    tried = choice["tried"].get(name)
    if tried is None:
        return choice
    policy = state_of(model).get(LearntPart).policies.get(config)
    if not isinstance(policy, CostAwarePolicy) or config.costs is None:
        return choice
    judged, right = policy.take_record(max(tried["of"], _LEAST_RECORD))
    if not judged:
        return choice
    tried = {"agreed": tried["agreed"] + right, "of": tried["of"] + judged}
    acceptance = _acceptance(name, **tried)
    tried["speedup"] = max(1.0, theoretical_speedup([acceptance], config.costs)[0])
    found = {**choice["tried"], name: tried}
    best = max(found, key=lambda other: float(found[other]["speedup"]))
    speedup = found[best]["speedup"]
    if speedup < _LEAST_GAIN:
        return {"precision": None, "acceptance": 0.0, "speedup": _LEAST_GAIN, "tried": found}
    if best == name or speedup < _LEAD * tried["speedup"]:
        # The policy's initial acceptance stays as it is: with another one the policy would start from scratch.
        return {**choice, "tried": found}
    acceptance = _acceptance(best, found[best]["agreed"], found[best]["of"])
    return {"precision": best, "acceptance": acceptance, "speedup": speedup, "tried": found}


def _acceptance(name: str, agreed: float, of: float) -> float:
    """Estimate the acceptance of a candidate from its agreement, shrunk towards its usual one."""
    return float((agreed + _USUAL_AGREEMENT[name] * _USUAL_WEIGHT) / (of + _USUAL_WEIGHT))


def _choices(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    """Return the most likely next token at each position of a text, `(1, n)`."""
    with torch.no_grad():
        return model(input_ids=text, use_cache=False).logits.argmax(dim=-1)  # type: ignore[no-any-return]
