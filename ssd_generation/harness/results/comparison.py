"""Results of `compare`: those of each method for one prompt, and their comparison."""

from __future__ import annotations

import statistics as averages
from dataclasses import dataclass
from typing import Any

from ...config import Costs
from ...decoding.statistics import SpeculationStatistics
from ..methods import PLAIN
from ..texts import Difference, SamplingCheck

__all__ = ["Comparison", "MethodResult"]


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
        undrafted_difference: first difference of this library's undrafted text to plain's in the repeat of
            `difference` (self-speculative decoding only).
        is_as_undrafted: whether the text with `difference` equals that undrafted text; `None` where not compared.
        peak_bytes: highest memory allocated on the CUDA device during the calls; `None` elsewhere.
        draws: comparison of all repeats' tokens with the model's distributions under sampling; else `None`.
        draws_error: reason why the draws could not be judged.
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
        """Median speed over the repeats."""
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
        """Acceptance of the tokens that the model drafted itself, over all repeats; `None` where there are none."""
        drafted = sum(s.self_drafted_tokens for s in self.speculation)
        accepted = sum(s.accepted_tokens - s.accepted_looked_up_tokens for s in self.speculation)
        return accepted / drafted if drafted else None

    @property
    def looked_up_acceptance(self) -> float | None:
        """Acceptance of the tokens that prompt lookup drafted, over all repeats; `None` where there are none."""
        drafted = sum(s.looked_up_tokens for s in self.speculation)
        return sum(s.accepted_looked_up_tokens for s in self.speculation) / drafted if drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens that a round added on average, over all repeats; `None` where there was no round."""
        rounds = sum(s.rounds for s in self.speculation)
        return sum(s.accepted_tokens + s.rounds for s in self.speculation) / rounds if rounds else None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, raw and derived, as plain JSON types."""
        data: dict[str, Any] = {
            "new_tokens": [len(ids) for ids in self.token_ids],
            "seconds": list(self.seconds),
            "tokens_per_second": self.tokens_per_second,
            "ratio_to_plain": self.ratio,
            "ratios_to_plain": list(self.ratios),
            "token_ids": list(self.token_ids[0]),
        }
        if self.peak_bytes is not None:
            data["peak_bytes"] = self.peak_bytes
        if self.name != PLAIN:
            data["identical_to_plain"] = self.difference is None
            data["first_difference"] = None if self.difference is None else self.difference.to_dict()
        if self.is_as_undrafted is not None:
            undrafted = self.undrafted_difference
            data["identical_to_undrafted"] = self.is_as_undrafted
            data["first_difference_of_undrafted"] = None if undrafted is None else undrafted.to_dict()
        if self.draws is not None:
            data["draws"] = {**self.draws.to_dict(), "z": self.draws.z}
        if self.draws_error is not None:
            data["draws_error"] = self.draws_error
        if self.speculation:
            data["acceptance_rate"] = self.acceptance_rate
            data["self_drafted_tokens"] = self.self_drafted_tokens
            data["self_drafted_acceptance"] = self.self_drafted_acceptance
            data["looked_up_tokens"] = self.looked_up_tokens
            data["looked_up_acceptance"] = self.looked_up_acceptance
            data["tokens_per_round"] = self.tokens_per_round
            data["speculation"] = [statistics.to_dict() for statistics in self.speculation]
        return data


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
        skipped_sublayers: number of sub-layers that the draft leaves out.
        sublayers: number of all sub-layers.
        parameters: number of the model's parameters.
        skipped_parameters: share of them that the draft does not read, 0 … 1.
        draft_cost: one draft step / one plain step; `None` where nothing was drafted or too few tokens were generated.
        verify_cost: one verification pass / one plain step, averaged over passes of all lengths; `None` likewise.
        extra_bytes: memory that self-speculative decoding needs beyond plain decoding and its low-bit copies: measured
            on a CUDA device, else computed (see `extra_bytes_measured`).
        extra_bytes_measured: whether `extra_bytes` was measured.
        weight_bytes: memory of the weights.
        copy_bytes: memory of the low-bit copies for drafting.
        left_as_loaded: layers that draft as loaded, not from low-bit copies as configured, with the reason.
        costs: the costs that the draft length depended on, where the config has them.
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
        """Methods that were run, plain first."""
        return tuple(m for m in (self.plain, self.draft, self.self_speculative) if m is not None)

    @property
    def copy_share(self) -> float:
        """Memory of the low-bit copies / memory of the weights."""
        return self.copy_bytes / max(self.weight_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, raw and derived, as plain JSON types."""
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
            "methods": {method.name: method.to_dict() for method in self.methods},
        }
