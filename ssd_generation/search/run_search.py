"""Search from end to end: cost profile, calibration, trials, held-out texts, timed generation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import optuna

from ..config import PRECISIONS, DraftingConfig, LookupConfig, Provenance, SelfSpeculativeConfig
from ..forward.copies.low_bit import drop_copies
from ..generation import require_drafts
from ..harness.texts import Prompt
from ..support.bounds import Integer
from ..support.files import write_whole
from ..support.messages import listed
from ..tuning.acceptance import Acceptance, judge_all
from .calibration import Calibration, calibrate, calibration_prompts, describe_weights, digest_of, encode_all
from .confirm import NOTHING_DRAFTED, Confirmed, confirm
from .cost_profile import CostProfile, measure_profile
from .settings import CalibrationSettings, ResultSettings, SearchSettings
from .space import Space, space_of
from .storage import storage_of, storage_to_read
from .study import ABOUT, SOURCE, Search, check_search, claim, explain_unreadable, open_study, tried_in
from .trials import Found, Tried, acceptance_rate, mean_acceptance, predicted_speedup

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["SearchObserver", "SearchResult", "StoredStudy", "read_study", "retarget", "search"]

logger = logging.getLogger(__name__)

_CONTEXT, _PROVENANCE = "context", "provenance"


class SearchObserver(Protocol):
    """Callbacks for the progress of a search."""

    def stage(self, name: str) -> None:
        """Report that a stage begins."""

    def step(self, text: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the stage are done."""

    def trial(self, found: Found, trials: int) -> None:
        """Report that a trial has ended; `trials` is the number wanted in all."""

    def warn(self, text: str) -> None:
        """Report a deviation from the request."""


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
    """Result of a search.

    Attributes:
        best: the draft with the best value on the calibration texts, or the fastest of those timed.
        config: its config, for `generate(self_speculative=…)`; its expected acceptance rates are those on held-out
            texts, if there are any.
        found: all drafts that were tried.
        space: the search space.
        profile: the costs.
        held_out: the best draft on held-out texts: `{"speedup": …, "draft_length": …, "acceptance": …, "texts": …}`,
            and its figures on the texts it was chosen on under "chosen_on"; `None` if none were held out.
        confirmed: timed generation of the best drafts on the held-out texts (or the others, if there are none).
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
        """Return the figures as JSON types."""
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
    settings: SearchSettings | None = None,
    texts: CalibrationSettings | None = None,
    results: ResultSettings | None = None,
    profile: CostProfile | None = None,
    observer: SearchObserver | None = None,
) -> SearchResult:
    """Search for the best draft of a model: the sub-layers to skip, and the precision of the others.

    Args:
        model: the target model.
        tokenizer: its tokenizer.
        trials: number of drafts to judge in all, 1 to a million; those of other workers and earlier runs on the study
            count. Fewer if the space has fewer.
        settings: settings of the search.
        texts: settings of the texts that drafts are judged on.
        results: destination of the study and the results (`plots.plot_all` draws into that folder), and use of the
            best drafts.
        profile: measured costs; `None`: those of the study, or measured now. If workers begin together, all use the
            costs of the first.
        observer: callback for progress.

    Raises:
        ValueError: a bad argument, a model with nothing to search, a study of something else, or a storage that cannot
            be reached.
        OSError: the folder cannot be written, or the storage fails; finished trials are retained.
    """
    _TRIALS.check("trials", trials)
    settings, texts, results = settings or SearchSettings(), texts or CalibrationSettings(), results or ResultSettings()
    observer = observer or _Silent()
    folder = None if results.output is None else _folder(results.output)
    storage = _storage(results.storage, folder)
    # Errors are raised before anything slow.
    require_drafts(model)
    space = space_of(model, settings.draft_memory, PRECISIONS if settings.precisions is None else settings.precisions)
    check_search(model, space, settings)
    if trials > space.size:
        observer.warn(f"There are {space.size} drafts of this model to try, so these are tried, instead of {trials}.")
        trials = space.size
    chosen, held_back = _prompts(texts, observer)
    encoded = [
        encode_all(model, tokenizer, prompts, texts.new_tokens, texts.use_chat_template)
        for prompts in (chosen, held_back)
    ]
    about = {
        "model": {"type": type(model).__name__, "weights": describe_weights(model)},
        "draft_memory": settings.draft_memory,
        "space": space.describe(),
        "texts": digest_of(encoded[0], texts.new_tokens),
    }
    study = open_study(results.study_name, storage, settings, about)
    known = _profile_of(study, profile)
    profile = profile or known
    if profile is None:
        observer.stage("Measuring costs")
        profile = measure_profile(model, space.precisions, progress=observer.step)

    def continued(prompts: Sequence[Prompt]) -> Calibration:
        def progress(done: int, total: int) -> None:
            observer.step("the model's own text", done, total)

        return calibrate(model, tokenizer, prompts, texts.new_tokens, texts.use_chat_template, progress)

    observer.stage("Generating calibration texts")
    calibration = continued(chosen)
    held_out = continued(held_back) if held_back else None
    if known is None:
        provenance = Provenance.from_model(model).to_dict()
        facts = {"profile": profile.to_dict(), _CONTEXT: calibration.context(), _PROVENANCE: provenance}
        profile = CostProfile.from_dict(claim(study, facts)["profile"])
    for difference in profile.compared_with(model):
        observer.warn(
            f"The costs are not of this machine and model: {difference}. Predicted speed-ups and draft lengths apply "
            "to where they were measured."
        )
    worker = Search(model, calibration, profile, space, study, settings)
    observer.stage("Searching")
    observer.trial(tried_in(study), trials)
    found = worker.run(trials, lambda f: observer.trial(f, trials))
    winners = _Winners(worker, found, held_out, results)
    winners.judge_on_held_out(observer)
    if folder is not None:
        _write(folder, winners.result())  # in case the timing is interrupted
    if results.confirmed:
        winners.time_generation(observer)
    drop_copies(model)
    result = winners.result()
    if folder is not None:
        _write(folder, result)
    return result


def _prompts(texts: CalibrationSettings, observer: SearchObserver) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to judge drafts on, and those held out."""
    chosen = calibration_prompts(texts.prompts, texts.num_prompts)
    held_back: list[Prompt] = []
    if texts.held_out_prompts > 0:
        held_back = calibration_prompts(texts.prompts, texts.held_out_prompts, skip=texts.num_prompts, may_be_none=True)
    for found, wanted, use in (
        (chosen, texts.num_prompts, "judge drafts on"),
        (held_back, texts.held_out_prompts, "hold back"),
    ):
        if len(found) < wanted:
            observer.warn(
                f"There are {len(found)} prompts to {use}, instead of {wanted}."
                + ("" if found else " What is found is reported, and timed, on the texts that it was chosen on.")
            )
    return chosen, held_back


def _storage(url: str | None, folder: Path | None) -> Any:
    if url is None and folder is not None:
        url = str(folder / "study.db")
    return optuna.storages.InMemoryStorage() if url is None else storage_of(url)


def _profile_of(study: optuna.Study, given: CostProfile | None) -> CostProfile | None:
    """Return the costs that a study is searched with; `None` if it has none yet.

    Raises:
        ValueError: they differ from those given.
    """
    known = None if "profile" not in study.user_attrs else CostProfile.from_dict(study.user_attrs["profile"])
    if given is not None and known is not None and known != given:
        raise ValueError(
            f"The study {study.study_name!r} was searched with other costs. To see what is best with these, use `ssd "
            "search --from STUDY --costs PROFILE`; to search with them, choose another name with --study."
        )
    return known


class _Winners:
    """Best drafts of a search: judged on held-out texts, and timed in generation.

    Args:
        worker: the worker that searched.
        found: all drafts that were tried.
        held_out: texts that the drafts were not chosen on.
        results: settings, with the number of drafts to time.
    """

    def __init__(self, worker: Search, found: Found, held_out: Calibration | None, results: ResultSettings) -> None:
        self.worker = worker
        self.found = found
        self.held_out = held_out
        self.results = results
        self.drafts = found.best(max(1, results.confirmed))
        assert self.drafts, "the first draft that is judged is never pruned"
        self.passes = {"calibration": worker.calibration.passes, "trials": sum(found.passes)}
        self.unseen: dict[int, Acceptance] = {}  # acceptance on the held-out texts, by trial
        self.names: dict[str, SelfSpeculativeConfig] = {}
        self.timed: Confirmed | None = None

    def judge_on_held_out(self, observer: SearchObserver) -> None:
        if self.held_out is None:
            return
        observer.stage("Judging the best on held-out texts")
        worker, depth = self.worker, self.worker.settings.depth
        for draft in self.drafts:
            config = worker.space.config(draft.choices)
            self.unseen[draft.number] = judge_all(worker.model, config, self.held_out.texts, depth, depth)
        self.passes["held out"] = self.held_out.passes + sum(acceptance.passes for acceptance in self.unseen.values())

    def time_generation(self, observer: SearchObserver) -> None:
        observer.stage("Timing generation")
        self.names = {_name(draft): self.worker.config_of(draft) for draft in self.drafts}
        compared = {NOTHING_DRAFTED: SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")), **self.names}
        texts = self.held_out or self.worker.calibration
        steps = itertools.count()

        def progress(text: str) -> None:
            observer.step(text, next(steps), (len(compared) + 1) * (len(texts) + 1))

        self.timed = confirm(self.worker.model, compared, texts, progress)

    def result(self) -> SearchResult:
        """Return the best draft, by measured speed if there is any."""
        best, timed = self.drafts[0], self.timed
        if timed is not None:
            best = max(self.drafts, key=lambda draft: timed.median(_name(draft)))
        # The acceptance rates on the texts that the draft was chosen on are biased upwards.
        unseen = self.unseen.get(best.number)
        config = self.worker.config_of(best, unseen, lookup=LookupConfig() if self.results.lookup else None)
        held = None
        if unseen is not None and self.held_out is not None:
            held = _held_out(self.worker, best, unseen, len(self.held_out))
        return SearchResult(
            best, config, self.found, self.worker.space, self.worker.profile, held, timed, self.names, self.passes
        )


def _name(draft: Tried) -> str:
    return f"trial {draft.number}"


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
    speedup, length = predicted_speedup(acceptance, costs)
    return {
        "speedup": speedup,
        "draft_length": length,
        "acceptance": acceptance_rate(acceptance),
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
    """Stored study of a `search`.

    Attributes:
        study: the Optuna study.
        space: the search space.
        profile: the costs that it is searched with.
        context: prefix length of a drafted token.
        provenance: the model, and the machine of the search.
    """

    study: optuna.Study
    space: Space
    profile: CostProfile
    context: int
    provenance: Provenance


def read_study(storage: str, name: str | None = None) -> StoredStudy:
    """Read a study that `search` created, in its current state; nothing is written to its storage.

    Args:
        storage: URL of its storage, a folder that `search` wrote, or an SQLite file.
        name: name of the study; `None`: the only one there.

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
    with explain_unreadable(what):
        names = optuna.get_all_study_names(opened)
    if not names:
        raise ValueError(f"There is no study in {storage!r}. Give a folder of `ssd search`, or its storage URL.")
    if name is None and len(names) != 1:
        raise ValueError(f"{storage!r} holds {len(names)} studies ({listed(names)}). Name one with --study.")
    wanted = name if name is not None else names[0]
    if wanted not in names:
        raise ValueError(f"There is no study {wanted!r} in {storage!r}, but {listed(names)}.")
    with explain_unreadable(what):
        study = optuna.load_study(study_name=wanted, storage=opened)
        facts = study.user_attrs
        about: Any = facts.get(ABOUT)
        is_ours = about is not None and "space" in about and facts.keys() >= {"profile", _CONTEXT, _PROVENANCE}
    if not is_ours:
        raise ValueError(f"The study {wanted!r} in {storage!r} was not made by `ssd search`.")
    with explain_unreadable(what):
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
    """Rank the drafts of a study by theoretical speed-up with other costs, best first; no forward pass is needed.

    Pruned drafts are included, with the acceptance counted until they were pruned (see `pruned`): where drafting costs
    less, they may be the best.

    Args:
        storage: see `read_study`.
        profile: costs on the other machine.
        name: name of the study.
        context: prefix length of a drafted token; `None`: as in the study.

    Returns:
        The drafts with their figures for that machine, and the study with this context.

    Raises:
        ValueError: as in `read_study`; a profile of another model; no draft is covered by these costs.
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
        speedup, length = predicted_speedup(t.acceptance, costs)
        cost = costs.draft_step / costs.plain_step
        again.append(Tried(t.number, t.choices, t.acceptance, cost, speedup, length, t.origin, t.pruned))
    if not again:
        raise ValueError("The study has no draft that these costs cover. Search again on that machine.")
    return sorted(again, key=lambda t: (-t.speedup, t.number)), stored
