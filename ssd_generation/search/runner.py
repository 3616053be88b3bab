"""One search from end to end: profile, calibration, trials, a look at texts that were held back, timed generation."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import optuna

from ..config import DraftingConfig, LookupConfig, Provenance, SelfSpeculativeConfig
from ..forward.low_bit import drop_copies
from ..generation import require_drafts
from ..support.bounds import Integer
from ..support.files import write_whole
from ..support.messages import listed
from ..tuning.acceptance import Acceptance, judge_all
from ..tuning.speedup import theoretical_speedup
from .calibration import calibrate, calibration_prompts, describe_weights, digest_of, encode_all
from .confirm import NOTHING_DRAFTED, Confirmed, confirm
from .profile import CostProfile, measure_profile
from .space import Space, space_of
from .storage import storage_of, storage_to_read
from .study import (
    PRIOR,
    SOURCE,
    Found,
    Search,
    SearchSettings,
    Tried,
    check_search,
    claim,
    mean_acceptance,
    open_study,
    tried_in,
    understood,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["SearchObserver", "SearchResult", "StoredStudy", "read_study", "retarget", "search"]

logger = logging.getLogger(__name__)

_CONTEXT, _PROVENANCE = "context", "provenance"


class SearchObserver(Protocol):
    """Is told how far a search is."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def step(self, text: str, done: int, total: int) -> None:
        """Within a stage, so many of so many steps are done."""

    def trial(self, found: Found, trials: int) -> None:
        """A trial has ended; `trials` are wanted in all."""

    def warn(self, text: str) -> None:
        """Something is not as was asked for."""


class _Silent:
    def stage(self, name: str) -> None:
        pass

    def step(self, text: str, done: int, total: int) -> None:
        pass

    def trial(self, found: Found, trials: int) -> None:
        pass

    def warn(self, text: str) -> None:
        logger.warning(text)


@dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    Attributes:
        best: the draft with the best value on the calibration texts.
        config: its config, for `generate(self_speculative=…)`; what it expects to be accepted at first is what was on
            texts that it was not chosen on, where there are any.
        found: everything that was tried.
        space: what was searched.
        profile: the costs it was searched with.
        held_out: the best draft on texts that it was not chosen on: `{"speedup": …, "draft_length": …, "acceptance": …,
            "texts": …}`, and the same on those it was chosen on under "chosen_on"; `None` where none were held back.
        confirmed: timed generation of the winners on the texts held back (or the others, if there are none).
        names: the configs that were timed.
        passes: forward passes of the model, by stage.
    """

    best: Tried
    config: SelfSpeculativeConfig
    found: Found
    space: Space
    profile: CostProfile
    held_out: Mapping[str, Any] | None = None
    confirmed: Confirmed | None = None
    names: Mapping[str, SelfSpeculativeConfig] = field(default_factory=dict)
    passes: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The figures, as plain JSON types."""
        found = self.found
        return {
            "best": _figures(self.best),
            "config": self.config.to_dict(),
            "trials": len(found.tried),
            "pruned": sum(t.pruned for t in found.tried),
            "frontier": [_figures(t) for t in found.frontier()],
            "held_out": None if self.held_out is None else dict(self.held_out),
            "confirmed": None if self.confirmed is None else self.confirmed.to_dict(),
            "passes": dict(self.passes),
        }


_TRIALS = Integer(1, 1_000_000)


def _figures(tried: Tried) -> dict[str, Any]:
    return {
        "trial": tried.number,
        "speedup": tried.speedup,
        "draft_length": tried.draft_length,
        "draft_cost": tried.draft_cost,
        "acceptance": mean_acceptance(tried),
        "acceptance_by_depth": tried.acceptance.by_depth(),
        "origin": tried.origin,
        "choices": {name: choice for name, choice in tried.choices.items() if choice != "keep"},
    }


def search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trials: int = 120,
    *,
    output: str | Path | None = None,
    storage: str | None = None,
    study_name: str = "search",
    settings: SearchSettings | None = None,
    draft_memory: float = 0.3,
    precisions: Sequence[str] | None = None,
    prompts: str | None = None,
    num_prompts: int = 8,
    held_out_prompts: int = 6,
    new_tokens: int = 32,
    use_chat_template: bool = True,
    profile: CostProfile | None = None,
    configs: Sequence[SelfSpeculativeConfig] = (),
    confirmed: int = 1,
    lookup: bool = True,
    observer: SearchObserver | None = None,
) -> SearchResult:
    """Find what a model is best to leave out, and in which precision to keep the rest, while it drafts.

    Args:
        model: the target model.
        tokenizer: its tokenizer.
        trials: drafts to judge, in all, those of other workers and earlier runs on the study counted, ≥ 1. Where a
            model has fewer, all of these. From 1 to a million.
        output: folder for the config, the figures, and the study where `storage` names none (`plots.plot_all` draws
            into it); `None`: nothing is written, and the study is held in memory.
        storage: URL of the study's storage, see `storage.storage_of`.
        study_name: of the study.
        settings: how the search goes.
        draft_memory: share of the weights' bytes that low-bit copies may take; 0: skipping alone.
        precisions: that are thought of; `None`: those that can be had here.
        prompts: calibration prompts, see `calibration.calibration_prompts`.
        num_prompts: that drafts are judged on.
        held_out_prompts: further prompts that only the best draft is judged on; 0: none.
        new_tokens: of each text, ≥ 2.
        use_chat_template: put the prompts into the tokenizer's chat template, if it has one.
        profile: measured costs; `None`: those of the study, or measured now. Of workers that begin together, the
            costs of the first count.
        configs: drafts to try first.
        confirmed: so many of the best drafts are timed in generation, beside plain decoding; 0: none.
        lookup: let the config that is found draft by prompt lookup too, which costs nothing. Searched and timed is
            without it.
        observer: told how far it is.

    Raises:
        ValueError: a bad argument, a model with nothing to search, a study of something else, or a storage that cannot
            be reached.
        OSError: the folder cannot be written, or the storage fails in the middle; what was judged is kept.
    """
    _TRIALS.check("trials", trials)
    settings = settings or SearchSettings()
    observer = observer or _Silent()
    folder = None if output is None else _folder(output)
    if storage is None and folder is not None:
        storage = str(folder / "study.db")
    opened = optuna.storages.InMemoryStorage() if storage is None else storage_of(storage)
    # What cannot be is said before anything slow begins.
    require_drafts(model)
    space = space_of(model, draft_memory, precisions if precisions is not None else ("int8", "int4"))
    check_search(model, space, settings, configs)
    if trials > space.size:
        observer.warn(f"There are {space.size} drafts of this model to try, so these are tried, instead of {trials}.")
        trials = space.size
    chosen = calibration_prompts(prompts, num_prompts)
    others = _held_back(prompts, num_prompts, held_out_prompts)
    for there, wanted, what in ((chosen, num_prompts, "judge drafts on"), (others, held_out_prompts, "hold back")):
        if len(there) < wanted:
            observer.warn(
                f"There are {len(there)} prompts to {what}, instead of {wanted}."
                + ("" if there else " What is found is reported, and timed, on the texts that it was chosen on.")
            )
    asked = [encode_all(model, tokenizer, these, new_tokens, use_chat_template) for these in (chosen, others)]
    about = {
        "model": {"type": type(model).__name__, "weights": describe_weights(model)},
        "draft_memory": draft_memory,
        "space": space.describe(),
        "texts": digest_of(asked[0], new_tokens),
    }
    study = open_study(study_name, opened, settings, about)
    known = None if "profile" not in study.user_attrs else CostProfile.from_dict(study.user_attrs["profile"])
    if profile is not None and known is not None and known != profile:
        raise ValueError(
            f"The study {study_name!r} was searched with other costs. To see what is best with these, use `ssd search "
            "--from STUDY --costs PROFILE`; to search with them, choose another name with --study."
        )
    profile = profile or known
    passes: dict[str, int] = {}
    if profile is None:
        observer.stage("Measuring costs")
        profile = measure_profile(model, space.precisions, progress=observer.step)
    observer.stage("Generating calibration texts")
    told = lambda done, total: observer.step("the model's own text", done, total)  # noqa: E731
    texts = calibrate(model, tokenizer, chosen, new_tokens, use_chat_template, told)
    passes["calibration"] = texts.passes
    others_texts = calibrate(model, tokenizer, others, new_tokens, use_chat_template, told) if others else None
    if known is None:
        provenance = Provenance.from_model(model).to_dict()
        facts = {"profile": profile.to_dict(), _CONTEXT: texts.context(), _PROVENANCE: provenance}
        profile = CostProfile.from_dict(claim(study, facts)["profile"])
    for difference in profile.compared_with(model):
        observer.warn(
            f"The costs are not of this machine and model: {difference}. Speed-ups are promised for where they were "
            "measured, and draft lengths chosen for it."
        )
    worker = Search(model, texts, profile, space, study, settings, configs)
    observer.stage("Searching")
    observer.trial(tried_in(study), trials)
    found = worker.run(trials, lambda f: observer.trial(f, trials))
    passes["trials"] = sum(found.passes)
    winners = found.best(max(1, confirmed))
    assert winners, "the first draft that is judged cannot be behind another"
    again: dict[int, Acceptance] = {}
    if others_texts is not None:
        observer.stage("Judging the best on texts held back")
        for winner in winners:
            config = space.config(winner.choices)
            again[winner.number] = judge_all(model, config, others_texts.texts, settings.depth, settings.depth)
        passes["held out"] = others_texts.passes + sum(acceptance.passes for acceptance in again.values())

    def result_of(best: Tried, timed: Confirmed | None) -> SearchResult:
        # Those that it was chosen on flatter it.
        unseen = again.get(best.number)
        config = worker.config_of(best, unseen, lookup=LookupConfig() if lookup else None)
        held = None if unseen is None or others_texts is None else _held_out(worker, best, unseen, len(others_texts))
        return SearchResult(best, config, found, space, profile, held, timed, names, passes)

    names: dict[str, SelfSpeculativeConfig] = {}
    timed = None
    if folder is not None:
        _write(folder, result_of(winners[0], None))  # whoever has no time for the timing has this
    if confirmed:
        observer.stage("Timing generation")
        names = {f"trial {t.number}": worker.config_of(t) for t in winners}
        nothing = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
        compared = {NOTHING_DRAFTED: nothing, **names}
        said: list[int] = []

        def step(text: str) -> None:
            said.append(1)
            total = (len(compared) + 1) * (len(others_texts or texts) + 1)
            observer.step(text, len(said) - 1, total)

        timed = confirm(model, compared, others_texts or texts, step)
    best = winners[0]
    if timed is not None:
        best = max(winners, key=lambda t: timed.median(f"trial {t.number}"))
    drop_copies(model)
    result = result_of(best, timed)
    if folder is not None:
        _write(folder, result)
    return result


def _held_back(source: str | None, first: int, count: int) -> list[Any]:
    if count <= 0:
        return []
    return calibration_prompts(source, count, skip=first, may_be_none=True)


def _folder(output: str | Path) -> Path:
    folder = Path(os.path.expanduser(output))
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(
            f"The results need a folder, but {str(folder)!r} is a file. Choose another with --output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _held_out(worker: Search, best: Tried, acceptance: Acceptance, texts: int) -> dict[str, Any]:
    costs = worker.profile.costs(worker.space.config(best.choices), worker.context)
    speedup, length = theoretical_speedup(acceptance.by_depth(PRIOR), costs)
    return {
        "speedup": speedup,
        "draft_length": length,
        "acceptance": sum(acceptance.accepted) / max(1, sum(acceptance.tried)),
        "texts": texts,
        "passes": acceptance.passes,
        "chosen_on": {
            "speedup": best.speedup,
            "acceptance": mean_acceptance(best),
            "texts": len(worker.calibration),
        },
    }


def _write(folder: Path, result: SearchResult) -> None:
    result.config.save_pretrained(folder)
    result.profile.save(folder / "profile.json")
    write_whole(folder / "search.json", json.dumps(result.to_dict(), indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# another machine


class StoredStudy(NamedTuple):
    """A study that `search` made.

    Attributes:
        study: as optuna has it.
        space: that it searches.
        profile: the costs that it is searched with.
        context: tokens before a drafted one.
        provenance: of the model, and where it was searched.
    """

    study: optuna.Study
    space: Space
    profile: CostProfile
    context: int
    provenance: Provenance


def read_study(storage: str, name: str | None = None) -> StoredStudy:
    """A study that `search` made, as it is now; nothing is written where it is kept.

    Args:
        storage: URL of its storage, a folder that `search` wrote, or a file of SQLite.
        name: of the study; `None`: the only one there.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no such study, or more than one, or not one of this library.
    """
    folder = os.path.expanduser(storage)
    if os.path.isdir(folder):
        storage = os.path.join(folder, "study.db")
    try:
        opened = storage_to_read(storage)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is no study in {storage!r}. Give a folder of `ssd search`, or a storage URL."
        ) from error
    what = f"The study in {storage!r}"
    with understood(what):
        names = optuna.get_all_study_names(opened)
    if not names:
        raise ValueError(f"There is no study in {storage!r}. Give a folder of `ssd search`, or its storage URL.")
    if name is None and len(names) != 1:
        raise ValueError(f"{storage!r} holds {len(names)} studies ({listed(names)}). Name one with --study.")
    wanted = name if name is not None else names[0]
    if wanted not in names:
        raise ValueError(f"There is no study {wanted!r} in {storage!r}, but {listed(names)}.")
    with understood(what):
        study = optuna.load_study(study_name=wanted, storage=opened)
        facts = study.user_attrs
        about: Any = facts.get("ssd_generation")
        is_ours = about is not None and "space" in about and facts.keys() >= {"profile", _CONTEXT, _PROVENANCE}
    if not is_ours:
        raise ValueError(f"The study {wanted!r} in {storage!r} was not made by `ssd search`.")
    with understood(what):
        described = about["space"]
        choices = {key: tuple(value) for key, value in described["choices"].items()}
        needed = tuple(key for key in choices if key.startswith("attention."))
        space = Space(choices, needed, int(described["group_size"]))
        provenance = dataclasses.replace(Provenance.from_dict(facts[_PROVENANCE]), source=SOURCE)
        profile = CostProfile.from_dict(facts["profile"])
        tried_in(study)
        return StoredStudy(study, space, profile, int(facts[_CONTEXT]), provenance)


def retarget(
    storage: str, profile: CostProfile, name: str | None = None, context: int | None = None
) -> tuple[list[Tried], StoredStudy]:
    """The drafts of a study by what they promise with other costs, best first: no pass of the model is needed.

    Those that were given up early there take part, with what was counted until then (`pruned` says which): where
    drafting costs less, they may be the best.

    Args:
        storage: see `read_study`.
        profile: of the other machine.
        name: of the study.
        context: tokens before a drafted one; `None`: as in the study.

    Returns:
        The drafts with their figures for that machine, and the study, with its context as asked for.

    Raises:
        ValueError: as `read_study`; a profile of another model; no draft can be had with these costs.
    """
    stored = read_study(storage, name)
    if profile.shape != stored.profile.shape:
        raise ValueError(
            f"The study is of {stored.profile.shape}, but the costs are of {profile.shape}. Profile the same model "
            "with `ssd profile`."
        )
    stored = stored._replace(context=stored.context if context is None else context)
    again = []
    for t in tried_in(stored.study).tried:
        config = stored.space.config(t.choices)
        try:
            costs = profile.costs(config, stored.context)
        except ValueError:
            continue  # a precision that the other machine does not have
        speedup, length = theoretical_speedup(t.acceptance.by_depth(PRIOR), costs)
        cost = costs.draft_step / costs.plain_step
        again.append(Tried(t.number, t.choices, t.acceptance, cost, speedup, length, t.origin, t.pruned))
    if not again:
        raise ValueError("The study has no draft that can be had with these costs. Search again on that machine.")
    return sorted(again, key=lambda t: (-t.speedup, t.number)), stored
