"""Search by each method on the same terms, then judge and time the best draft of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssd_generation.forward.copies.low_bit import drop_copies
from ssd_generation.search.calibration import Calibration, describe_weights
from ssd_generation.search.confirm import confirm
from ssd_generation.search.cost_profile import CostProfile
from ssd_generation.search.settings import SearchSettings, check_sampler
from ssd_generation.search.space import Space, space_of
from ssd_generation.search.storage import storage_of
from ssd_generation.search.study import Search, found_config, open_study
from ssd_generation.search.trials import Found, Tried, acceptance_rate, mean_acceptance, predicted_speedup
from ssd_generation.tuning.acceptance import judge_all
from ssd_generation.tuning.automatic import DRAFT_MEMORY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["METHODS", "ComparisonSettings", "SearchMethod", "check_methods", "compare_methods"]


@dataclass(frozen=True)
class SearchMethod:
    """Search method.

    Attributes:
        what: description in a few words.
        settings: settings of the search.
        skip_only: whether sub-layers are only skipped or not, never in low bits.
        share: number of trials relative to the requested one; the paper's search takes many.
    """

    what: str
    settings: SearchSettings
    skip_only: bool = True
    share: float = 1.0


def _cold(**settings: Any) -> SearchSettings:
    return SearchSettings(warm_start=False, prune=False, **settings)


METHODS: Mapping[str, SearchMethod] = {
    "default": SearchMethod("what `ssd search` does", SearchSettings(), skip_only=False),
    "skip-only": SearchMethod("the same, without low-bit copies", SearchSettings()),
    "exact": SearchMethod("the same, whole rounds judged exactly", SearchSettings(exact_depth=SearchSettings().depth)),
    "gp": SearchMethod("the same, Gaussian process", SearchSettings(sampler="gp")),
    "nsga2": SearchMethod("the same, NSGA-II on acceptance and cost", SearchSettings(sampler="nsga2")),
    "forward": SearchMethod("greedy forward selection", SearchSettings(sampler="forward", prune=False)),
    "tpe": SearchMethod("TPE from nothing", _cold()),
    "random": SearchMethod("at random", _cold(sampler="random")),
    "paper": SearchMethod(
        "Draft & Verify: measured tokens per second, from nothing", _cold(objective="tokens-per-second"), share=2.5
    ),
    "paper-judged": SearchMethod(
        "the paper's number of trials from nothing, drafts judged instead of timed", _cold(), share=2.5
    ),
}


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a comparison.

    Args:
        methods: names in `METHODS`.
        trials: number of trials of each method, to be multiplied by its share, ≥ 1.
        draft_memory: share of the weights' bytes that low-bit copies may take, where a method makes any.
        timed: whether the winners are timed in generation.
    """

    methods: Sequence[str]
    trials: int = 120
    draft_memory: float = DRAFT_MEMORY
    timed: bool = True


def compare_methods(
    model: PreTrainedModel,
    texts: Calibration,
    held_out: Calibration,
    profile: CostProfile,
    storage: str,
    settings: ComparisonSettings,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], dict[str, Found]]:
    """Search by each method, then judge and time the best draft of each.

    Args:
        model: the target model.
        texts: texts that drafts are judged on.
        held_out: texts that the best drafts are judged and timed on.
        profile: cost profile of the model.
        storage: URL of the storage of the studies.
        settings: settings of the comparison.
        progress: callback with a line of text.

    Returns:
        By method: trials, forward passes, the theoretical speed-up of the best draft on both sets of texts and its
        measured one, and the passes until it was as good as the best of each other method; and everything that was
        tried.

    Raises:
        ImportError: a package that one of the methods needs is not installed.
        ValueError: an unknown method.
    """
    check_methods(settings.methods)
    founds: dict[str, Found] = {}
    winners: dict[str, tuple[Tried, Space]] = {}
    for name in settings.methods:
        method = METHODS[name]
        space = space_of(model, 0.0 if method.skip_only else settings.draft_memory)
        about = {"method": name, "weights": describe_weights(model), "texts": texts.digest, "space": space.describe()}
        study = open_study(name, storage_of(storage), method.settings, about)
        search = Search(model, texts, profile, space, study, method.settings)
        wanted = max(1, round(settings.trials * method.share))

        def observe(found: Found, name: str = name, wanted: int = wanted) -> None:
            best = max((t.speedup for t in found.tried if not t.pruned), default=0.0)
            progress(f"{name}: {len(found.tried)} of {wanted} drafts, {sum(found.passes)} passes, best {best:.3f}×")

        found = search.run(wanted, observe)
        founds[name] = found
        winners[name] = found.best()[0], space
    rows: dict[str, Any] = {}
    configs = {}
    for name, (best, space) in winners.items():
        config = configs[name] = found_config(space, best, profile, texts.context())
        again = judge_all(model, config, held_out.texts, SearchSettings().depth, SearchSettings().depth)
        costs = profile.costs(config, texts.context())
        rows[name] = {
            "what": METHODS[name].what,
            "trials": len(founds[name].tried),
            "passes": sum(founds[name].passes),
            "speedup": best.speedup,
            "draft_length": best.draft_length,
            "draft_cost": best.draft_cost,
            "acceptance": mean_acceptance(best),
            "held_out_speedup": predicted_speedup(again, costs)[0],
            "held_out_acceptance": acceptance_rate(again),
            "skip": config.skip.to_dict(),
            "passes_to_reach": {other: _passes_until(founds[name], row[0].speedup) for other, row in winners.items()},
        }
    if settings.timed:
        result = confirm(model, configs, held_out, progress)
        for name, ratios in result.ratios.items():
            rows[name] |= {
                "measured": result.median(name),
                "measured_from": min(ratios),
                "measured_to": max(ratios),
                "identical": result.identical[name],
                "texts": len(ratios),
            }
    drop_copies(model)
    return rows, founds


def check_methods(methods: Sequence[str]) -> None:
    """Check the names of methods, and that the packages that they need are installed.

    Raises:
        ImportError: a package that one of them needs is not installed.
        ValueError: there is no such method.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"There is no search method {unknown[0]!r}. Choose from {', '.join(METHODS)}.")
    for name in methods:
        check_sampler(METHODS[name].settings.sampler)


def _passes_until(found: Found, speedup: float) -> int | None:
    """Return the forward passes until a draft had this theoretical speed-up; `None` if none had it."""
    spent = 0
    for t, passes in zip(found.tried, found.passes, strict=True):
        spent += passes
        if not t.pruned and t.speedup >= speedup:
            return spent
    return None
