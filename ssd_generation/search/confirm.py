"""Drafts in real generation: timed, interleaved with plain decoding, and their acceptance rates counted."""

from __future__ import annotations

import dataclasses
import statistics as averages
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..config import DraftingConfig, SelfSpeculativeConfig
from ..forward.captured.passes import captured_target
from ..generation import enable_self_speculative
from ..harness.methods import PLAIN
from ..harness.results import Timings
from ..harness.run import interleaved, timed
from ..tuning.acceptance import Acceptance
from ..tuning.plan_passes import plan_passes
from .calibration import generate_greedily

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .calibration import Calibration

__all__ = ["NOTHING_DRAFTED", "Confirmed", "confirm", "generated_acceptance", "tokens_per_second"]

NOTHING_DRAFTED = "nothing drafted"
"""Name of this library's loop without drafting. The theoretical speed-up of a draft is relative to it."""


@dataclass(frozen=True)
class Confirmed:
    """Results of timed generation.

    Attributes:
        ratios: tokens per second relative to plain `generate` on the same text, for each text, by name.
        acceptance: accepted / drafted tokens of all texts, by name.
        identical: number of texts whose tokens equal those of plain decoding, by name.
    """

    ratios: Mapping[str, Sequence[float]]
    acceptance: Mapping[str, float | None]
    identical: Mapping[str, int]

    def median(self, name: str) -> float:
        """Return the median ratio."""
        return averages.median(self.ratios[name])

    def by_the_draft(self, name: str) -> float | None:
        """Return the median ratio to this library's own loop without drafting; `None` if that was not timed.

        This, rather than the ratio to plain `generate`, is what the theoretical speed-up predicts.
        """
        if NOTHING_DRAFTED not in self.ratios:
            return None
        return averages.median(r / n for r, n in zip(self.ratios[name], self.ratios[NOTHING_DRAFTED], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return all results, with medians, as JSON types."""
        return {
            name: {
                "median": self.median(name),
                "least": min(ratios),
                "greatest": max(ratios),
                "ratios": list(ratios),
                "acceptance": self.acceptance[name],
                "identical": self.identical[name],
                "texts": len(ratios),
            }
            for name, ratios in self.ratios.items()
        }


def confirm(
    model: PreTrainedModel,
    configs: Mapping[str, SelfSpeculativeConfig],
    calibration: Calibration,
    progress: Callable[[str], None] | None = None,
) -> Confirmed:
    """Time generation of each text by plain decoding and by each config (see `interleaved`).

    Args:
        model: the target model.
        configs: configs by name.
        calibration: its prompts are continued for as many tokens as its texts have.
        progress: callback with a description of each call.
    """
    enable_self_speculative(model)
    _record_ahead(model, configs.values())
    methods = [PLAIN, *configs]
    timings = Timings(methods, PLAIN)
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in methods}
    drafted, accepted = dict.fromkeys(configs, 0), dict.fromkeys(configs, 0)
    for turn in interleaved(methods, len(calibration)):
        name, text = turn.method, calibration.texts[turn.round]
        if progress is not None:
            warm_up = ", warm-up" if turn.is_warm_up else ""
            progress(f"{name}, text {turn.round + 1} of {len(calibration)}{warm_up}")
        prompt = text.ids[:, : text.prompt_length]
        output, seconds = timed(model.device, _generate, model, configs.get(name), prompt, len(text))
        if turn.is_warm_up:
            continue
        outputs[name].append(output)
        timings.add(name, output.shape[1] - text.prompt_length, seconds)
        if name != PLAIN:
            statistics: Any = model.last_speculation
            drafted[name] += statistics.drafted_tokens
            accepted[name] += statistics.accepted_tokens
    return Confirmed(
        ratios={name: timings.ratios(name) for name in configs},
        acceptance={name: accepted[name] / drafted[name] if drafted[name] else None for name in configs},
        identical={name: sum(map(torch.equal, outputs[name], outputs[PLAIN])) for name in configs},
    )


def _record_ahead(model: PreTrainedModel, configs: Iterable[SelfSpeculativeConfig]) -> None:
    """Capture the verification passes of all lengths in advance: a capture takes as long as several tokens."""
    for config in configs:
        batch_invariance = plan_passes(model, exactness=config.exactness).batch_invariance
        passes = captured_target(model, batch_invariance)
        for length in range(1, config.longest_draft + 2) if passes is not None else ():
            width = length if batch_invariance is None else batch_invariance.width(length)
            if passes is not None and width is not None:
                passes.program(width)


def _generate(
    model: PreTrainedModel, config: SelfSpeculativeConfig | None, ids: torch.Tensor, new_tokens: int
) -> torch.Tensor:
    options = {} if config is None else {"self_speculative": config}
    return generate_greedily(model, ids, new_tokens, **options)


def tokens_per_second(
    model: PreTrainedModel, config: SelfSpeculativeConfig, calibration: Calibration
) -> tuple[float, Acceptance]:
    """Measure tokens per second with Draft & Verify's rule for the draft length (at most 8 tokens, as in its search).

    Returns:
        Tokens per second over all texts, and acceptance by depth with the number of passes.
    """
    enable_self_speculative(model)
    as_in_paper = dataclasses.replace(
        config, drafting=DraftingConfig(policy="confidence", max_draft_length=8), lookup=None
    )
    # Captures and low-bit copies are created once for many drafts, so they are not part of the time.
    first = calibration.texts[0]
    _record_ahead(model, [as_in_paper])
    _generate(model, as_in_paper, first.ids[:, : first.prompt_length], 2)
    acceptance, seconds = timed(model.device, generated_acceptance, model, as_in_paper, calibration)
    return calibration.tokens() / seconds, acceptance


def generated_acceptance(model: PreTrainedModel, config: SelfSpeculativeConfig, calibration: Calibration) -> Acceptance:
    """Measure acceptance by depth in real generation, with the number of passes.

    Args:
        model: the target model, enabled.
        config: config of the draft.
        calibration: its prompts are continued for as many tokens as its texts have.
    """
    total = Acceptance()
    for text in calibration.texts:
        _generate(model, config, text.ids[:, : text.prompt_length], len(text))
        statistics: Any = model.last_speculation
        inputs = statistics.draft_passes + statistics.drafted_tokens + statistics.rounds  # drafting, then verifying
        total.add(
            Acceptance(
                list(statistics.judged_by_depth),
                list(statistics.accepted_by_depth),
                statistics.draft_passes + statistics.target_passes,
                inputs,
            )
        )
    return total
