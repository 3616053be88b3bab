"""Plain decoding, the draft alone and self-speculative decoding on one prompt: texts compared, times side by side."""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..cache.layers import spare_slots
from ..config import DraftingConfig, SelfSpeculativeConfig
from ..decoding.statistics import SpeculationStatistics
from ..forward.low_bit import copies_of, copy_bytes
from ..forward.resident import drafting_model
from ..forward.skip_mode import draft_mode_with
from ..forward.sublayers import layout_of
from ..support.versions import CACHE
from ..tuning.automatic import weight_bytes
from .interleaved import interleaved, timed
from .methods import PLAIN
from .results import Comparison, MethodResult, Timings
from .texts import Difference, SamplingCheck, check_sampling, find_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compare", "methods_of"]

DRAFT, SELF_SPECULATIVE = "draft alone", "self-speculative"
METHODS = (PLAIN, DRAFT, SELF_SPECULATIVE)
_WARM_UP_TOKENS = 16


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
