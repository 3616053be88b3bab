"""Plain decoding, the draft alone and self-speculative decoding on one prompt: texts compared, times side by side."""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..cache.layers import spare_slots
from ..config import Costs, DraftingConfig, Provenance, SelfSpeculativeConfig
from ..decoding.statistics import SpeculationStatistics
from ..forward.copies.low_bit import copies_of, copy_bytes
from ..forward.copies.resident import drafting_model
from ..forward.structure.skip_mode import draft_mode_with
from ..forward.structure.sublayers import layout_of
from ..support.machine import cpu_name
from ..support.versions import CACHE
from ..tuning.automatic import weight_bytes
from .interleaved import Timings, interleaved, timed
from .sampling_check import SamplingCheck, check_sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Comparison",
    "Difference",
    "MethodResult",
    "compare",
    "describe_environment",
    "find_difference",
    "first_difference",
    "methods_of",
]

PLAIN, DRAFT, SELF_SPECULATIVE = "plain", "draft alone", "self-speculative"
METHODS = (PLAIN, DRAFT, SELF_SPECULATIVE)
_WARM_UP_TOKENS = 16


# ----------------------------------------------------------------------------------------------------------------------
# the first difference of two texts


@dataclass(frozen=True)
class Difference:
    """The first token at which a text differs from that of plain decoding.

    Attributes:
        token: its number among the new tokens, from 1.
        plain_token: id of plain decoding's token; `None` where the plain text has ended.
        other_token: id of the other text's token; `None` where that one has ended.
        logit_margin: logit of plain decoding's token minus that of the other, after the logits processors and under
            sampling with the step's noise (the log of each exponential taken off); `None` where a text has ended or a
            token was forbidden. Near zero means a near tie, which rounding can reverse.
    """

    token: int
    plain_token: int | None
    other_token: int | None
    logit_margin: float | None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "token": self.token,
            "plain_token": self.plain_token,
            "other_token": self.other_token,
            "logit_margin": self.logit_margin,
        }


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, from 0; the shorter length where one is the beginning of the other.

    Returns:
        The index, or `None` where the two are equal.
    """
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def find_difference(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    plain: Sequence[int],
    other: Sequence[int],
    seed: int | None = None,
    **generate_kwargs: Any,
) -> Difference | None:
    """The first difference of a text to that of plain decoding, with the logit margin there.

    One pass of the whole model over prompt and common prefix gives the margin.

    Args:
        model: the target model.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        plain: new tokens of plain decoding.
        other: new tokens of the other method.
        seed: of both, where they were sampled; `None` where they are greedy. Torch's random state stays as it is.
        **generate_kwargs: those of `generate` that change logits, such as `repetition_penalty`.

    Returns:
        The difference, or `None` where the two are equal.
    """
    index = first_difference(plain, other)
    if index is None:
        return None
    if index == len(plain) or index == len(other):
        return Difference(
            token=index + 1,
            plain_token=plain[index] if index < len(plain) else None,
            other_token=other[index] if index < len(other) else None,
            logit_margin=None,
        )
    prompt = inputs["input_ids"]
    common = prompt.new_tensor([list(plain[:index])])
    prefix = {"input_ids": torch.cat((prompt, common), dim=1)}
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        prefix["attention_mask"] = torch.cat((mask, mask.new_ones((1, index))), dim=1)
    others = {key: value for key, value in generate_kwargs.items() if key not in ("max_length", "streamer")}
    # Through `generate`, so that the logits processors of the call apply.
    asked = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    if seed is None:
        scores = model.generate(**prefix, **{**others, **asked}).scores[0][0].double()
    else:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            scores = model.generate(**prefix, **{**others, **asked, "do_sample": True}).scores[0]
            torch.manual_seed(seed)
            noise = torch.empty_like(scores)
            for _ in range(index + 1):  # as torch.multinomial draws it, step by step
                noise.exponential_()
        scores = (scores.double() - noise.double().log())[0]
    margin = float(scores[plain[index]] - scores[other[index]])
    return Difference(index + 1, plain[index], other[index], margin if abs(margin) < float("inf") else None)


# ----------------------------------------------------------------------------------------------------------------------
# results


@dataclass(frozen=True)
class MethodResult:
    """Results of one method, over all repeats.

    Attributes:
        name: "plain", "draft alone" or "self-speculative".
        token_ids: per repeat, the new tokens.
        seconds: per repeat, wall-clock time of the whole `generate` call, the pass over the prompt included.
        ratios: per repeat, tokens per second relative to plain decoding of the same repeat.
        speculation: per repeat, the statistics (self-speculative decoding only).
        difference: the first difference to plain decoding (from the same seed) in any repeat; `None` where there is
            none.
        undrafted_difference: where there is one, that of this library's undrafted text to plain's, of the same repeat.
        is_as_undrafted: where there is one, whether the text is that of this library's undrafted decoding.
        peak_bytes: highest memory allocated on the CUDA device during the calls; `None` elsewhere.
        draws: under sampling, how the tokens of all repeats compare with the model's distributions; else `None`.
        draws_error: why they could not be judged.
    """

    name: str
    token_ids: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    speculation: tuple[SpeculationStatistics, ...] = ()
    difference: Difference | None = None
    undrafted_difference: Difference | None = None
    is_as_undrafted: bool | None = None
    peak_bytes: int | None = None
    draws: SamplingCheck | None = None
    draws_error: str | None = None

    @property
    def new_tokens(self) -> float:
        """New tokens: the median over the repeats (which differ under sampling only)."""
        return averages.median(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Median over the repeats."""
        return averages.median(len(ids) / s for ids, s in zip(self.token_ids, self.seconds, strict=True))

    @property
    def ratio(self) -> float:
        """Median over the repeats of the ratio to plain decoding; above 1 is faster."""
        return averages.median(self.ratios)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens over all repeats; `None` where nothing was drafted."""
        drafted = sum(s.drafted_tokens for s in self.speculation)
        return sum(s.accepted_tokens for s in self.speculation) / drafted if drafted else None

    @property
    def self_drafted_tokens(self) -> float | None:
        """Tokens that the model drafted itself, per call on average; `None` where the method does not draft."""
        return averages.mean(s.self_drafted_tokens for s in self.speculation) if self.speculation else None

    @property
    def looked_up_tokens(self) -> float | None:
        """Tokens that prompt lookup drafted, per call on average; `None` where the method does not draft."""
        return averages.mean(s.looked_up_tokens for s in self.speculation) if self.speculation else None

    @property
    def self_drafted_acceptance(self) -> float | None:
        """Acceptance of what the model drafted itself, over all repeats; `None` where that is nothing."""
        drafted = sum(s.self_drafted_tokens for s in self.speculation)
        accepted = sum(s.accepted_tokens - s.accepted_looked_up_tokens for s in self.speculation)
        return accepted / drafted if drafted else None

    @property
    def looked_up_acceptance(self) -> float | None:
        """Acceptance of what prompt lookup drafted, over all repeats; `None` where that is nothing."""
        drafted = sum(s.looked_up_tokens for s in self.speculation)
        return sum(s.accepted_looked_up_tokens for s in self.speculation) / drafted if drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens that a round added on average, over all repeats; `None` where there was no round."""
        rounds = sum(s.rounds for s in self.speculation)
        return sum(s.accepted_tokens + s.rounds for s in self.speculation) / rounds if rounds else None


@dataclass(frozen=True)
class Comparison:
    """Plain decoding, the draft alone and self-speculative decoding of one prompt.

    Attributes:
        plain: plain decoding.
        draft: the draft alone; `None` where the draft is no cheaper version of the model: prompt lookup, nothing left
            out, or nothing drafted.
        self_speculative: self-speculative decoding.
        sampling: whether tokens were sampled: then they are judged by the model's distributions, too
            (`MethodResult.draws`).
        skipped_sublayers: how many sub-layers the draft leaves out.
        sublayers: how many there are.
        parameters: how many parameters the model has.
        skipped_parameters: share of them that the draft does not read, 0 … 1.
        draft_cost: one draft step / one plain step; `None` where nothing was drafted or too few tokens were generated.
        verify_cost: one verifying pass / one plain step, averaged over passes of all lengths; `None` likewise.
        extra_bytes: memory that self-speculative decoding needs beyond plain decoding and its low-bit copies: measured
            on a CUDA device, else computed (see `extra_bytes_measured`).
        extra_bytes_measured: whether `extra_bytes` was measured.
        weight_bytes: memory of the weights.
        copy_bytes: memory of the low-bit copies kept for drafting.
        left_as_loaded: layers that were to draft from low-bit copies and stay as they are, with the reason.
        costs: the costs that the draft length went by, where the config has them.
    """

    plain: MethodResult
    draft: MethodResult | None
    self_speculative: MethodResult
    sampling: bool
    skipped_sublayers: int
    sublayers: int
    parameters: int
    skipped_parameters: float
    draft_cost: float | None
    verify_cost: float | None
    extra_bytes: int
    extra_bytes_measured: bool
    weight_bytes: int
    copy_bytes: int = 0
    left_as_loaded: tuple[str, ...] = ()
    costs: Costs | None = None

    @property
    def methods(self) -> tuple[MethodResult, ...]:
        """All that were run, plain first."""
        return tuple(m for m in (self.plain, self.draft, self.self_speculative) if m is not None)

    @property
    def copy_share(self) -> float:
        """Memory of the low-bit copies / memory of the weights."""
        return self.copy_bytes / max(self.weight_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """All figures, raw and derived, as plain JSON types."""
        return {
            "sampling": self.sampling,
            "skipped_sublayers": self.skipped_sublayers,
            "sublayers": self.sublayers,
            "parameters": self.parameters,
            "skipped_parameters": self.skipped_parameters,
            "draft_cost": self.draft_cost,
            "verify_cost": self.verify_cost,
            "extra_bytes": self.extra_bytes,
            "extra_bytes_measured": self.extra_bytes_measured,
            "weight_bytes": self.weight_bytes,
            "copy_bytes": self.copy_bytes,
            "copy_share": self.copy_share,
            "left_as_loaded": list(self.left_as_loaded),
            "costs": None if self.costs is None else self.costs.to_dict(),
            "methods": {method.name: self._method_dict(method) for method in self.methods},
        }

    def _method_dict(self, method: MethodResult) -> dict[str, Any]:
        data: dict[str, Any] = {
            "new_tokens": [len(ids) for ids in method.token_ids],
            "seconds": list(method.seconds),
            "tokens_per_second": method.tokens_per_second,
            "ratio_to_plain": method.ratio,
            "ratios_to_plain": list(method.ratios),
            "token_ids": list(method.token_ids[0]),
        }
        if method.peak_bytes is not None:
            data["peak_bytes"] = method.peak_bytes
        if method is not self.plain:
            data["identical_to_plain"] = method.difference is None
            data["first_difference"] = None if method.difference is None else method.difference.to_dict()
        if method.is_as_undrafted is not None:
            undrafted = method.undrafted_difference
            data["identical_to_undrafted"] = method.is_as_undrafted
            data["first_difference_of_undrafted"] = None if undrafted is None else undrafted.to_dict()
        if method.draws is not None:
            data["draws"] = {**method.draws.to_dict(), "z": method.draws.z}
        if method.draws_error is not None:
            data["draws_error"] = method.draws_error
        if method.speculation:
            data["acceptance_rate"] = method.acceptance_rate
            data["self_drafted_tokens"] = method.self_drafted_tokens
            data["self_drafted_acceptance"] = method.self_drafted_acceptance
            data["looked_up_tokens"] = method.looked_up_tokens
            data["looked_up_acceptance"] = method.looked_up_acceptance
            data["tokens_per_round"] = method.tokens_per_round
            data["speculation"] = [statistics.to_dict() for statistics in method.speculation]
        return data


# ----------------------------------------------------------------------------------------------------------------------
# the comparison


def methods_of(config: SelfSpeculativeConfig) -> tuple[str, ...]:
    """The methods that `compare` runs: the draft alone only where it is a cheaper version of the model."""
    has_draft = config.drafts_itself and (bool(config.skip) or bool(config.precision))
    return METHODS if has_draft else (PLAIN, SELF_SPECULATIVE)


def compare(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    config: SelfSpeculativeConfig,
    *,
    repeats: int = 3,
    seed: int = 0,
    advance: Callable[[str], None] | None = None,
    **generate_kwargs: Any,
) -> Comparison:
    """Decode one prompt by each method, several times over, and compare texts and times.

    Each repeat runs all methods (see `methods_of`), in turns (see `interleaved`). All get the same arguments; where
    they sample, all methods of a repeat start from the same seed.

    Args:
        model: the target model, after `enable_self_speculative`.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        config: the config of self-speculative decoding; its skip set and low-bit copies make the draft.
        repeats: how often, ≥ 1.
        seed: of the first repeat, and one more for each that follows. Sets torch's global random state when sampling.
        advance: callback with a description of the next step: once per method for the warm-up, once per repeat, and
            once to check its samples when sampling.
        **generate_kwargs: passed on to `generate`.

    Raises:
        ValueError: more than one prompt, fewer than one repeat, or a config that does not fit the model.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, but got {repeats}.")
    if inputs["input_ids"].shape[0] != 1:
        raise ValueError(f"One prompt can be compared at a time, but got {inputs['input_ids'].shape[0]}.")
    sampling = bool(generate_kwargs.get("do_sample", getattr(model.generation_config, "do_sample", False)))
    advance = advance or (lambda step: None)
    calls = _Calls(model, inputs, config, generate_kwargs, seed if sampling else None)
    calls.run(repeats, advance)
    layout = layout_of(model)
    if calls.on_cuda:
        extra = max(calls.peaks[SELF_SPECULATIVE] - calls.peaks[PLAIN], 0)
    else:
        extra = _extra_bytes(model, inputs, config, max(map(len, calls.texts[SELF_SPECULATIVE])))
    draft_cost, verify_cost = calls.costs()
    drafting = drafting_model(model, config)
    return Comparison(
        plain=calls.result(PLAIN, advance),
        draft=calls.result(DRAFT, advance) if DRAFT in calls.methods else None,
        self_speculative=calls.result(SELF_SPECULATIVE, advance),
        sampling=sampling,
        skipped_sublayers=len(config.skip),
        sublayers=sum(sub is not None for layer in layout.layers for sub in (layer.attention, layer.mlp)),
        parameters=layout.num_parameters,
        skipped_parameters=layout.skipped_parameters(config.skip) / max(layout.num_parameters, 1),
        draft_cost=draft_cost,
        verify_cost=verify_cost,
        extra_bytes=extra,
        extra_bytes_measured=calls.on_cuda,
        weight_bytes=weight_bytes(model),
        copy_bytes=copy_bytes(model) if config.precision else 0,
        left_as_loaded=tuple(copies_of(drafting, config.skip, config.precision).left) if config.precision else (),
        costs=config.costs,
    )


class _Calls:
    """The calls of a comparison.

    Args:
        model, inputs, config: as of `compare`.
        arguments: of `generate`.
        seed: of the first repeat; `None` under greedy decoding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, torch.Tensor],
        config: SelfSpeculativeConfig,
        arguments: Mapping[str, Any],
        seed: int | None,
    ) -> None:
        self.model, self.inputs, self.config, self.arguments, self.seed = model, inputs, config, arguments, seed
        self.on_cuda = model.device.type == "cuda"
        self.methods = methods_of(config)
        self.texts: dict[str, list[list[int]]] = {name: [] for name in self.methods}
        self.timings = Timings(self.methods, PLAIN)
        self.speculation: list[SpeculationStatistics] = []
        self.peaks = dict.fromkeys(self.methods, 0)

    def run(self, repeats: int, advance: Callable[[str], None]) -> None:
        """All methods in turns."""
        most = self.arguments.get("max_new_tokens") or _WARM_UP_TOKENS
        short = {key: value for key, value in self.arguments.items() if key != "max_length"}
        short["max_new_tokens"] = min(_WARM_UP_TOKENS, most)
        for turn in interleaved(self.methods, repeats):
            if turn.is_warm_up:
                advance(f"warm-up, {turn.method}")
                _run(self.model, self.inputs, self.config, turn.method, short)
            else:
                advance(f"repeat {turn.round + 1} of {repeats}, {turn.method}")
                self._once(turn.method, turn.round)

    def _once(self, name: str, repeat: int) -> None:
        device = self.model.device
        if self.seed is not None:
            torch.manual_seed(self.seed + repeat)
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        tokens, seconds = timed(device, _run, self.model, self.inputs, self.config, name, self.arguments)
        self.texts[name].append(tokens)
        self.timings.add(name, len(tokens), seconds)
        if self.on_cuda:
            self.peaks[name] = max(self.peaks[name], torch.cuda.max_memory_allocated(device))
        if name == SELF_SPECULATIVE:
            statistics: Any = self.model.last_speculation
            self.speculation.append(statistics)

    def result(self, name: str, advance: Callable[[str], None]) -> MethodResult:
        """What came of one method, its texts compared."""
        return MethodResult(
            name=name,
            token_ids=tuple(map(tuple, self.texts[name])),
            seconds=self.timings.seconds(name),
            ratios=self.timings.ratios(name),
            speculation=tuple(self.speculation) if name == SELF_SPECULATIVE else (),
            peak_bytes=self.peaks[name] if self.on_cuda else None,
            **self._parted(name),
            **self._judged(name, advance),
        )

    def _parted(self, name: str) -> dict[str, Any]:
        """Where a text first parts from plain decoding's, and for this library's own, what did it."""
        pairs = zip(self.texts[PLAIN], self.texts[name], strict=True)
        parted = next((number for number, (plain, own) in enumerate(pairs) if plain != own), None)
        if parted is None:
            return {}
        plain, own = self.texts[PLAIN][parted], self.texts[name][parted]
        seed = None if self.seed is None else self.seed + parted

        def against_plain(tokens: list[int]) -> Difference | None:
            return find_difference(self.model, self.inputs, plain, tokens, seed, **self.arguments)

        found: dict[str, Any] = {"difference": against_plain(own)}
        if name == SELF_SPECULATIVE:
            if seed is not None:
                torch.manual_seed(seed)
            undrafted = _run(self.model, self.inputs, _undrafted(self.config), name, self.arguments)
            found |= {"undrafted_difference": against_plain(undrafted), "is_as_undrafted": undrafted == own}
        return found

    def _judged(self, name: str, advance: Callable[[str], None]) -> dict[str, Any]:
        """How a method's sampled tokens compare with the model's distributions."""
        if self.seed is None:
            return {}
        advance(f"judging the draws, {name}")
        try:
            checks = (check_sampling(self.model, self.inputs, ids, **self.arguments) for ids in self.texts[name])
            return {"draws": sum(checks, SamplingCheck())}
        except Exception as error:  # what was measured is worth more
            return {"draws_error": f"{type(error).__name__}: {error}"}

    def costs(self) -> tuple[float | None, float | None]:
        """A draft step and a verifying pass, each in plain steps; `None` where there were none."""
        own = self.speculation
        plain_steps = [
            # The pass over the prompt takes as long in both.
            (whole - statistics.prompt_seconds) / (len(ids) - 1)
            for whole, ids, statistics in zip(self.timings.seconds(PLAIN), self.texts[PLAIN], own, strict=True)
            if len(ids) > 1
        ]
        draft_steps = [s.draft_seconds / s.draft_passes for s in own if s.draft_passes]
        verify_steps = [s.verify_seconds / (s.target_passes - 1) for s in own if s.target_passes > 1]
        return _cost(draft_steps, plain_steps), _cost(verify_steps, plain_steps)


def _undrafted(config: SelfSpeculativeConfig) -> SelfSpeculativeConfig:
    """Decoding by this library's passes, as a config has them, with nothing drafted."""
    return SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness=config.exactness)


def _run(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    config: SelfSpeculativeConfig,
    method: str,
    generate_kwargs: Mapping[str, Any],
) -> list[int]:
    """The new tokens of one call."""
    mode: AbstractContextManager[Any] = nullcontext()
    if method == DRAFT:
        model = drafting_model(model, config)
        copies = copies_of(model, config.skip, config.precision) if config.precision else None
        mode = draft_mode_with(model, config.skip, () if copies is None else copies.forwards())
    extra = {"self_speculative": config} if method == SELF_SPECULATIVE else {}
    with mode:
        sequences = model.generate(**inputs, **generate_kwargs, **extra)
    if not isinstance(sequences, torch.Tensor):
        sequences = sequences.sequences
    new: list[int] = sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return new


def _cost(steps: Sequence[float], plain_steps: Sequence[float]) -> float | None:
    if not steps or not plain_steps or averages.median(plain_steps) <= 0:
        return None
    return averages.median(steps) / averages.median(plain_steps)


def _extra_bytes(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], config: SelfSpeculativeConfig, new_tokens: int
) -> int:
    """Memory of a self-speculative call beyond a plain one, computed: slots of the KV cache, and a round's logits.

    The cache has slots for a round's drafted tokens and spare ones; the verification pass gives logits for all drafted
    tokens.
    """
    with torch.no_grad():
        outputs = model(**{key: value[:, :1] for key, value in inputs.items()}, use_cache=True)
    per_slot = sum(
        tensor.nbytes
        for layer in outputs[CACHE].layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    )
    drafted = config.longest_draft
    length = inputs["input_ids"].shape[1] + new_tokens
    scores = outputs.logits.shape[-1] * 4  # float32
    return int((drafted + spare_slots(length)) * per_slot + drafted * scores)


# ----------------------------------------------------------------------------------------------------------------------
# the machine


def describe_environment(model: PreTrainedModel) -> dict[str, Any]:
    """The environment of a measurement: model, number format, device and library versions.

    Args:
        model: the loaded model.
    """
    provenance = Provenance.from_model(model)
    versions = dict(provenance.versions or {})
    device = model.device
    environment: dict[str, Any] = {
        "model": provenance.model_id,
        "model_type": provenance.model_type,
        "dtype": provenance.dtype,
        "attention_implementation": provenance.attention_implementation,
        "device": provenance.device,
        "versions": versions,
    }
    if device.type == "cpu":
        environment["cpu"] = cpu_name()
        environment["threads"] = torch.get_num_threads()
    return environment
