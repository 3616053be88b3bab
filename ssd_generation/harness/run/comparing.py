"""Plain decoding, the draft alone and self-speculative decoding on one prompt: texts compared, times side by side."""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...cache.buffered_layers import spare_slots
from ...config import DraftingConfig, SelfSpeculativeConfig
from ...forward.copies.low_bit import copies_of, copy_bytes
from ...forward.copies.resident import drafting_model
from ...forward.structure.skip_mode import draft_mode_with
from ...forward.structure.sublayers import layout_of
from ...support.versions import CACHE
from ...tuning.automatic import weight_bytes
from ..methods import PLAIN, Method
from ..results import Comparison, MethodResult, ratio
from ..texts import Prompt, SamplingCheck
from .calls import Caller, TimedCall
from .engine import Engine, InMemory
from .interleaving import rotated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["COMPARED", "compare", "methods_of"]

DRAFT, SELF_SPECULATIVE = "draft alone", "self-speculative"
COMPARED = (PLAIN, DRAFT, SELF_SPECULATIVE)
"""Names of the methods that `compare` runs."""

_WARM_UP_TOKENS = 16


def methods_of(config: SelfSpeculativeConfig) -> tuple[str, ...]:
    """Return the methods that `compare` runs: the draft alone only where it is a cheaper version of the model."""
    has_draft = config.drafts_itself and (bool(config.skip) or bool(config.precision))
    return COMPARED if has_draft else (PLAIN, SELF_SPECULATIVE)


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

    Each repeat runs all methods (see `methods_of`), interleaved. All get the same arguments; where they sample, all
    methods of a repeat start from the same seed.

    Args:
        model: the target model, after `enable_self_speculative`.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        config: the config of self-speculative decoding; its skip set and low-bit copies make the draft.
        repeats: number of repeats, ≥ 1.
        seed: seed of the first repeat, one more for each that follows. Sets torch's global random state when sampling.
        advance: callback with a description of the next step: for each method once to warm up, once per repeat, and
            once to check its samples when sampling.
        **generate_kwargs: arguments of `generate`.

    Raises:
        ValueError: more than one prompt, fewer than one repeat, or a config that does not fit the model.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, but got {repeats}.")
    if inputs["input_ids"].shape[0] != 1:
        raise ValueError(f"One prompt can be compared at a time, but got {inputs['input_ids'].shape[0]}.")
    sampling = bool(generate_kwargs.get("do_sample", getattr(model.generation_config, "do_sample", False)))
    run = _OnePrompt(model, inputs, config, generate_kwargs, seed if sampling else None, advance)
    run.call_all(repeats)
    layout = layout_of(model)
    extra_bytes = run.extra_bytes()
    drafting = drafting_model(model, config)
    results = {name: run.result(name) for name in methods_of(config)}
    draft_cost, verify_cost = _costs(results[PLAIN], results[SELF_SPECULATIVE])
    return Comparison(
        plain=results[PLAIN],
        draft=results.get(DRAFT),
        self_speculative=results[SELF_SPECULATIVE],
        sampling=sampling,
        skipped_sublayers=len(config.skip),
        sublayers=sum(sub is not None for layer in layout.layers for sub in (layer.attention, layer.mlp)),
        parameters=layout.num_parameters,
        skipped_parameters=layout.skipped_parameters(config.skip) / max(layout.num_parameters, 1),
        draft_cost=draft_cost,
        verify_cost=verify_cost,
        extra_bytes=extra_bytes,
        extra_bytes_measured=run.on_cuda,
        weight_bytes=weight_bytes(model),
        copy_bytes=copy_bytes(model) if config.precision else 0,
        left_as_loaded=tuple(copies_of(drafting, config.skip, config.precision).left) if config.precision else (),
        costs=config.costs,
    )


class _OnePrompt(Engine):
    """Calls of a comparison.

    Args:
        model, inputs, config, advance: those of `compare`.
        arguments: arguments of `generate`.
        seed: seed of the first repeat; `None` under greedy decoding.
    """

    goes_on = False

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, torch.Tensor],
        config: SelfSpeculativeConfig,
        arguments: Mapping[str, Any],
        seed: int | None,
        advance: Callable[[str], None] | None,
    ) -> None:
        requests: dict[str, Any] = {SELF_SPECULATIVE: {"self_speculative": config}}
        super().__init__(
            # With the model's own policies, which the user's calls have trained.
            Caller(model, shared=True),
            [Method(name, requests.get(name, {})) for name in methods_of(config)],
            [Prompt("prompt", "", "")],
            arguments,
            InMemory(),
            None if advance is None else lambda progress: advance(progress.step),
        )
        self.config = config
        self.seed = seed
        self.repeats = 0
        self.on_cuda = model.device.type == "cuda"
        self._inputs = dict(inputs)

    def call_all(self, repeats: int) -> None:
        """Call all methods: once to warm up, then `repeats` times."""
        self.repeats = repeats
        self.warm_up(self.methods, 1)
        for repeat in range(repeats):
            self.run_round(0, repeat, rotated(self.methods, repeat))

    def inputs(self, index: int) -> dict[str, torch.Tensor]:
        return self._inputs

    def seed_of(self, index: int, repeat: int) -> int | None:
        return None if self.seed is None else self.seed + repeat

    def step(self, index: int, repeat: int) -> str:
        return f"repeat {repeat + 1} of {self.repeats}"

    def short_options(self) -> dict[str, Any]:
        most = self.options.get("max_new_tokens") or _WARM_UP_TOKENS
        short = {key: value for key, value in self.options.items() if key != "max_length"}
        return {**short, "max_new_tokens": min(_WARM_UP_TOKENS, most)}

    def make_call(
        self, method: Method, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any], seed: int | None
    ) -> TimedCall:
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        if method.name != DRAFT:
            return super().make_call(method, inputs, options, seed)
        model, skip, precision = drafting_model(self.model, self.config), self.config.skip, self.config.precision
        copies = copies_of(model, skip, precision).forwards() if precision else ()
        with draft_mode_with(model, skip, copies):
            return Caller(model, shared=True).call(DRAFT, {}, inputs, options, seed)

    def after_call(self, method: Method, index: int, call: TimedCall) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated(self.model.device) if self.on_cuda else None
        return {"peak_bytes": peak, "statistics": self.model.last_speculation}

    def calls(self, name: str) -> list[Mapping[str, Any]]:
        """Return the rows of a method, one for each repeat."""
        return [row for row in self.rows if row["method"] == name]

    def result(self, name: str) -> MethodResult:
        """Summarise one method, and compare its texts."""
        own = self.calls(name)
        return MethodResult(
            name=name,
            token_ids=tuple(tuple(row["token_ids"]) for row in own),
            seconds=tuple(row["seconds"] for row in own),
            ratios=tuple(map(ratio, own, self.calls(PLAIN))),
            speculation=tuple(row["statistics"] for row in own) if name == SELF_SPECULATIVE else (),
            peak_bytes=self._peak_bytes(name) if self.on_cuda else None,
            **self._diverged(name),
            **self._judged(name),
        )

    def _peak_bytes(self, name: str) -> int:
        peak: int = max(row["peak_bytes"] for row in self.calls(name))
        return peak

    def _diverged(self, name: str) -> dict[str, Any]:
        """Find where a text first diverges from plain decoding's, and for this library's own, the cause."""
        pairs = zip(self.calls(PLAIN), self.calls(name), strict=True)
        plain, own = next((pair for pair in pairs if pair[0]["token_ids"] != pair[1]["token_ids"]), (None, None))
        if plain is None or own is None:
            return {}
        found: dict[str, Any] = {"difference": self.difference(plain, own["token_ids"])}
        if name == SELF_SPECULATIVE:
            request = {"self_speculative": _undrafted(self.config)}
            seed = self.seed_of(0, plain["repeat"])
            undrafted = self.caller.call("undrafted", request, self.inputs(0), self.options, seed).token_ids
            found["undrafted_difference"] = self.difference(plain, undrafted)
            found["is_as_undrafted"] = undrafted == own["token_ids"]
        return found

    def _judged(self, name: str) -> dict[str, Any]:
        """Compare a method's sampled tokens with the model's distributions."""
        if self.seed is None:
            return {}
        self.report_progress(f"judging the draws, {name}")
        try:
            return {"draws": sum(map(self.draws_of, self.calls(name)), SamplingCheck())}
        except Exception as error:  # the timings are worth more than this check
            return {"draws_error": f"{type(error).__name__}: {error}"}

    def extra_bytes(self) -> int:
        """Return the memory of a self-speculative call beyond a plain one and copies: measured on CUDA, or computed."""
        if self.on_cuda:
            return max(self._peak_bytes(SELF_SPECULATIVE) - self._peak_bytes(PLAIN), 0)
        new_tokens = max(len(row["token_ids"]) for row in self.calls(SELF_SPECULATIVE))
        return _extra_bytes(self.model, self._inputs, self.config, new_tokens)


def _undrafted(config: SelfSpeculativeConfig) -> SelfSpeculativeConfig:
    """Make the config of undrafted decoding by this library's passes, with the exactness of another config."""
    return SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness=config.exactness)


def _costs(plain: MethodResult, own: MethodResult) -> tuple[float | None, float | None]:
    """Return the costs of a draft step and of a verification pass, in plain steps; `None` where there were none."""
    plain_steps = [
        # The pass over the prompt takes as long in both.
        (whole - statistics.prompt_seconds) / (len(ids) - 1)
        for whole, ids, statistics in zip(plain.seconds, plain.token_ids, own.speculation, strict=True)
        if len(ids) > 1
    ]
    draft_steps = [s.draft_seconds / s.draft_passes for s in own.speculation if s.draft_passes]
    verify_steps = [s.verify_seconds / (s.target_passes - 1) for s in own.speculation if s.target_passes > 1]
    return _cost(draft_steps, plain_steps), _cost(verify_steps, plain_steps)


def _cost(steps: Sequence[float], plain_steps: Sequence[float]) -> float | None:
    if not steps or not plain_steps or averages.median(plain_steps) <= 0:
        return None
    return averages.median(steps) / averages.median(plain_steps)


def _extra_bytes(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], config: SelfSpeculativeConfig, new_tokens: int
) -> int:
    """Compute the memory of a self-speculative call beyond a plain one: slots of the KV cache, and a round's logits.

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
