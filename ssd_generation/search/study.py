"""The search: an Optuna study whose trials are drafts, judged in a pass or two of the model per calibration text.

Any number of workers, on one machine or several, may run on one study; a worker that dies takes nothing with it, since
its trial is found by the others, or when the search is started again. A trial is counted once: what a sampler proposes
a second time is told the value that is known, without a pass of the model, and does not count towards the number that
was asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from ..config import DraftingConfig, Provenance, SelfSpeculativeConfig
from ..support.messages import shown
from ..tuning.acceptance import Acceptance, judge, why_not_judged
from ..tuning.speedup import theoretical_speedup
from .layerwise import layerwise_skips
from .proposals import Worth, next_proposals
from .space import SKIP, Space
from .storage import quiet, storage_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .calibration import Calibration
    from .profile import CostProfile

__all__ = [
    "OBJECTIVES",
    "PRIOR",
    "SAMPLERS",
    "SOURCE",
    "Found",
    "Search",
    "SearchSettings",
    "Tried",
    "check_search",
    "claim",
    "open_study",
    "tried_in",
    "understood",
]

SAMPLERS: Mapping[str, str] = {
    "tpe": "tree-structured Parzen estimator",
    "gp": "Gaussian process (needs scipy)",
    "nsga2": "NSGA-II on two objectives, acceptance and draft cost",
    "random": "at random, a baseline",
    "forward": "greedy forward selection, a baseline: the best single addition to the best set so far",
}
OBJECTIVES: Mapping[str, str] = {
    "speedup": "theoretical speed-up at the best draft length, free of timing noise",
    "acceptance": "acceptance among drafts that keep to a cost (--budget)",
    "tokens-per-second": "measured, of timed generation, as in the paper",
}

PRIOR = 4.0
"""How many observations the depth before counts for in acceptance by depth."""

SOURCE = "ssd search"
_ABOUT = "ssd_generation"
_CLAIM = "claims"
_UNKNOWN_WORKER_SECONDS = 30.0
_BEAT_SECONDS = 60.0
"""How often a worker tells that it lives. (Optuna sees to that in databases alone, and sooner.)"""
_SILENT_SECONDS = 900.0
"""A worker that has not told so for this long is dead: no text takes as long."""
_POLL_SECONDS = 0.5
_REPEATS_IN_A_ROW = 3


@dataclass(frozen=True)
class SearchSettings:
    """How a search goes.

    Args:
        objective: one of `OBJECTIVES`.
        sampler: one of `SAMPLERS`.
        warm_start: propose uniform precisions, each sub-layer on its own, and the sets that these promise, before the
            sampler has its say.
        prune: give a draft up as soon as it is behind the best by more than chance.
        depth: tokens of a round in which drafts are judged, ≥ 1.
        exact_depth: so many of these are judged exactly, at so many times the cost; 1 to `depth`, see `judge`.
        budget: for the objective "acceptance": the greatest cost of a draft step, relative to a plain one.
        seed: of sampler and proposals.

    Raises:
        ValueError: an unknown name, or a number out of range.
    """

    objective: str = "speedup"
    sampler: str = "tpe"
    warm_start: bool = True
    prune: bool = True
    depth: int = 6
    exact_depth: int = 1
    budget: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        for value, allowed, what in (
            (self.objective, OBJECTIVES, "objective"),
            (self.sampler, SAMPLERS, "sampler"),
        ):
            if value not in allowed:
                raise ValueError(f"There is no {what} {value!r}. Choose from {', '.join(allowed)}.")
        if self.depth < 1:
            raise ValueError(f"Rounds need a depth of at least 1, but got {self.depth}.")
        if not 1 <= self.exact_depth <= self.depth:
            raise ValueError(f"Rounds are judged exactly up to token 1 to {self.depth}, but got {self.exact_depth}.")
        if self.sampler == "nsga2" and self.objective != "speedup":
            raise ValueError(
                f"The sampler nsga2 looks for the best acceptance at every cost, so it cannot go by the objective "
                f"{self.objective!r}. Choose another sampler, or leave the objective out."
            )
        if not 0 < self.budget <= 1:
            raise ValueError(f"The budget is a share of a plain step, above 0 and up to 1, but got {self.budget}.")

    @property
    def worth(self) -> Worth:
        """What drafts are proposed and given up by; where speed is measured, the theoretical speed-up."""
        return Worth(self.budget if self.objective == "acceptance" else None)

    @property
    def directions(self) -> list[Any]:
        """Of the study's values, as optuna has them."""
        return ["maximize", "minimize"] if self.sampler == "nsga2" else ["maximize"]


def check_sampler(sampler: str) -> None:
    """That the packages of a sampler are installed.

    Raises:
        ImportError: one is not.
    """
    if sampler == "gp":
        try:
            import scipy  # noqa: F401
        except ImportError as error:
            raise ImportError("The sampler gp needs scipy: pip install 'ssd_generation[gp]'") from error


@dataclass(frozen=True)
class Tried:
    """A draft that was judged.

    Attributes:
        number: of the trial.
        choices: what becomes of each sub-layer.
        acceptance: by depth, counted.
        draft_cost: a draft step / a plain step.
        speedup: the theoretical speed-up.
        draft_length: that it is reached with.
        origin: what proposed it.
        pruned: whether it was given up early.
        value: of the objective; `None` where it was given up.
    """

    number: int
    choices: Mapping[str, str]
    acceptance: Acceptance
    draft_cost: float
    speedup: float
    draft_length: int
    origin: str
    pruned: bool
    value: float | None = None


@dataclass(frozen=True)
class Found:
    """What a search has come to.

    Attributes:
        tried: every draft that was judged, in the order of the trials.
        passes: forward passes of the model, by trial, calibration left out.
    """

    tried: Sequence[Tried] = field(default_factory=tuple)
    passes: Sequence[int] = field(default_factory=tuple)

    def best(self, count: int = 1) -> list[Tried]:
        """The drafts with the best values of the objective, that were not given up."""
        whole = [t for t in self.tried if not t.pruned]
        return sorted(whole, key=lambda t: (-(t.speedup if t.value is None else t.value), t.number))[:count]

    def frontier(self) -> list[Tried]:
        """The drafts that no other beats in both acceptance and cost, by ascending cost."""
        frontier: list[Tried] = []
        for t in sorted((t for t in self.tried if not t.pruned), key=lambda t: (t.draft_cost, -mean_acceptance(t))):
            if not frontier or mean_acceptance(t) > mean_acceptance(frontier[-1]):
                frontier.append(t)
        return frontier


def mean_acceptance(tried: Tried) -> float:
    """Accepted / drafted tokens of all rounds, each ending at its first rejection."""
    drafted = sum(tried.acceptance.tried)
    return sum(tried.acceptance.accepted) / drafted if drafted else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# studies


def open_study(name: str, storage: Any, settings: SearchSettings, about: Mapping[str, Any]) -> optuna.Study:
    """The study of that name, new or continued.

    Args:
        name: of the study.
        storage: as `storage.storage_of` gives it.
        settings: how the search goes.
        about: what the study is of, as plain JSON types; another study is refused.

    Raises:
        ValueError: there is such a study of another model, space, objective, or other texts, or one that cannot be
            read.
        OSError: the storage fails.
    """
    wanted = json.loads(json.dumps({**about, "settings": _of_values(settings)}))
    with quiet(), understood(f"The study {name!r}"), storage_errors(name):
        study = optuna.create_study(
            study_name=name, storage=storage, directions=settings.directions, load_if_exists=True
        )
        before = study.user_attrs.get(_ABOUT)
        trials = study.get_trials(deepcopy=False)
        changed = _differences(before or {}, wanted)
        if not changed:
            tried_in(study)
    if before is None and not trials:
        with storage_errors(name):
            study.set_user_attr(_ABOUT, wanted)
        return study
    if changed:
        raise ValueError(
            f"The study {name!r} was made for something else ({'; '.join(changed)}). Choose another name with --study, "
            "or repeat the arguments to go on with it."
        )
    return study


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """While a study is read: what is wrong with its contents is an error that names it."""
    try:
        yield
    except OSError:  # where it is kept
        raise
    except Exception as error:  # Optuna, too, trusts what it finds to be what it has written
        raise ValueError(
            f"{what} cannot be understood ({type(error).__name__}: {shown(str(error))}): it was spoilt, or not made "
            "by `ssd search`."
        ) from error


def claim(study: optuna.Study, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts by which all workers on a study go: those of the worker that came first.

    Optuna's attributes of a study are written by whoever comes last, but the numbers of its trials are given one by
    one. So each worker that knows of no facts yet leaves its own in a trial that counts for nothing, and the lowest
    number has it.

    Args:
        study: as `open_study` gives it.
        facts: what this worker would go by, as plain JSON types.

    Returns:
        What to go by.
    """
    with quiet(), storage_errors(study.study_name):
        if not _claims(study):
            study.add_trial(
                optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={_CLAIM: dict(facts), "dropped": _CLAIM})
            )
        first = _claims(study)[0]
        for key, value in first.items():
            if key not in study.user_attrs:
                study.set_user_attr(key, value)
        return first


def _claims(study: optuna.Study) -> list[Mapping[str, Any]]:
    trials = sorted(study.get_trials(deepcopy=False, states=(TrialState.FAIL,)), key=lambda t: t.number)
    return [t.user_attrs[_CLAIM] for t in trials if _CLAIM in t.user_attrs]


def _of_values(settings: SearchSettings) -> dict[str, Any]:
    """The settings that values hang on; samplers may differ from worker to worker."""
    return {
        "objective": settings.objective,
        "depth": settings.depth,
        **({} if settings.objective == "tokens-per-second" else {"exact_depth": settings.exact_depth}),
        "values": len(settings.directions),
        **({"budget": settings.budget} if settings.objective == "acceptance" else {}),
    }


def _differences(before: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in {**before, **wanted}:
        old, new = before.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and len(old) + len(new) < 24:
            found += _differences(old, new, f"{prefix}{key}: ")
        elif old != new:
            texts = [json.dumps(value) for value in (old, new)]
            shown = [text if len(text) < 60 else "other values" for text in texts]
            found.append(f"{prefix}{key} was {shown[0]} and is {shown[1]}")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# reading trials


def _counted(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that count: of those that ended with the same draft judged, the one with the lowest number.

    Two workers may begin on one draft at the same moment, so that this is settled where trials are read, not where they
    are written.
    """
    first: dict[str, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda t: t.number):
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and "acceptance" in trial.user_attrs:
            first.setdefault(trial.user_attrs["key"], trial)
    return list(first.values())


def tried_in(study: optuna.Study) -> Found:
    """What the trials of a study have come to."""
    trials = _counted(study.get_trials(deepcopy=False))
    return Found(tuple(_tried(t) for t in trials), tuple(int(t.user_attrs["acceptance"]["passes"]) for t in trials))


def _tried(trial: FrozenTrial) -> Tried:
    attrs = trial.user_attrs
    single = trial.state is TrialState.COMPLETE and len(trial.values) == 1
    return Tried(
        number=trial.number,
        choices=attrs["choices"],
        acceptance=Acceptance.from_dict(attrs["acceptance"]),
        draft_cost=float(attrs["draft_cost"]),
        speedup=float(attrs["speedup"]),
        draft_length=int(attrs["draft_length"]),
        origin=str(attrs.get("origin", "sampler")),
        pruned=trial.state is TrialState.PRUNED,
        value=float(trial.values[0]) if single else None,
    )


# ----------------------------------------------------------------------------------------------------------------------
# searching


class _NotCountedError(Exception):
    """The trial is taken back: there were enough already, or it is no draft."""


def check_search(
    model: PreTrainedModel, space: Space, settings: SearchSettings, configs: Sequence[SelfSpeculativeConfig] = ()
) -> list[dict[str, str]]:
    """What can be known before anything is measured or generated.

    Args:
        model: the target model.
        space: what is to be searched.
        settings: how.
        configs: drafts to try first.

    Returns:
        The choices of these.

    Raises:
        ValueError: drafts of this model cannot be judged, or a config is not in the space.
        ImportError: the sampler needs a package that is not installed.
    """
    reason = why_not_judged(model)
    if reason is not None:
        raise ValueError(f"Drafts of {type(model).__name__} cannot be judged: {reason}.")
    check_sampler(settings.sampler)
    return [space.from_config(config) for config in configs]


class Search:
    """A worker on a study.

    Args:
        model: the target model.
        calibration: the texts that drafts are judged on.
        profile: what the parts of a draft step cost.
        space: what is searched.
        study: as `open_study` gives it.
        settings: how the search goes.
        configs: drafts to try first.

    Raises:
        ValueError: drafts of this model cannot be judged, or a config is not in the space.
        ImportError: the sampler needs a package that is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        profile: CostProfile,
        space: Space,
        study: optuna.Study,
        settings: SearchSettings,
        configs: Sequence[SelfSpeculativeConfig] = (),
    ) -> None:
        self.given = check_search(model, space, settings, configs)
        self.model = model
        self.calibration = calibration
        self.profile = profile
        self.space = space
        self.study = study
        self.settings = settings
        self.context = calibration.context()

    def run(self, trials: int, observe: Callable[[Found], None] | None = None) -> Found:
        """Work until the study has so many trials, those of other workers and of earlier runs counted.

        Args:
            trials: in all, ≥ 1; of a space with fewer drafts, all of these.
            observe: told after each trial what there is, and meanwhile where only others are at work.

        Raises:
            ValueError: `trials` is below 1.
            OSError: the storage fails; what was judged before is kept.
        """
        if trials < 1:
            raise ValueError(f"A search needs at least one trial, but got {trials}.")
        trials = min(trials, self.space.size)
        tell = observe or (lambda found: None)
        with quiet(), storage_errors(self.study.study_name):
            while self._has_room(trials, tell):
                self._propose()
                self.study.sampler = self._sampler()
                try:
                    self.study.optimize(
                        lambda trial: self._objective(trial, trials), n_trials=1, catch=(_NotCountedError,)
                    )
                except (ValueError, optuna.exceptions.UpdateFinishedTrialError) as error:
                    # This process was suspended, and taken for dead: another has the draft now.
                    if isinstance(error, ValueError) and not str(error).startswith("Cannot tell a "):
                        raise
                tell(tried_in(self.study))
            return tried_in(self.study)

    # -- whose turn it is ----------------------------------------------------------------------------------------------

    def _has_room(self, trials: int, tell: Callable[[Found], None]) -> bool:
        """Whether another trial is wanted, once those that others are at have ended, or their workers have."""
        while True:
            self._recover()
            all_trials = self.study.get_trials(deepcopy=False)
            counted = len(_counted(all_trials))
            running = sum(t.state is TrialState.RUNNING for t in all_trials)
            if counted >= trials or counted + running < trials:
                return counted < trials
            tell(tried_in(self.study))
            time.sleep(_POLL_SECONDS)

    def _recover(self) -> None:
        """End the trials of workers that are no more, and put what they were at into the queue again."""
        optuna.storages.fail_stale_trials(self.study)  # where optuna has heartbeats: in a database
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state is not TrialState.RUNNING:
                continue
            worker = trial.user_attrs.get("worker")
            began = trial.datetime_start.timestamp() if trial.datetime_start else time.time()
            silent = time.time() - max(began, float(trial.user_attrs.get("alive", 0.0)))
            if worker is None:
                is_dead = silent > _UNKNOWN_WORKER_SECONDS
            else:
                is_dead = worker["host"] == socket.gethostname() and not _is_alive(worker)
            if is_dead or silent > _SILENT_SECONDS:
                with contextlib.suppress(Exception):  # another worker was quicker
                    self.study.tell(trial.number, state=TrialState.FAIL)
        retried = {t.user_attrs.get("retry_of") for t in trials}
        for trial in self.study.get_trials(deepcopy=False):
            lost = trial.state is TrialState.FAIL and "dropped" not in trial.user_attrs
            fixed = trial.system_attrs.get("fixed_params")
            # What a sampler had proposed it will propose again.
            if lost and fixed and trial.number not in retried:
                attrs = {key: value for key, value in trial.user_attrs.items() if key in ("origin",)}
                self.study.enqueue_trial(fixed, user_attrs={**attrs, "retry_of": trial.number})

    def _propose(self) -> None:
        """Put the next proposals into the queue, unless there are some."""
        trials = self.study.get_trials(deepcopy=False)
        if any(t.state is TrialState.WAITING for t in trials):
            return
        known = {t.user_attrs["key"] for t in trials if "key" in t.user_attrs and t.state is not TrialState.FAIL}
        proposals = [("given", choices) for choices in self.given]
        done = list(tried_in(self.study).tried)
        if self.settings.warm_start or self.settings.sampler == "forward":
            strategy = "forward" if self.settings.sampler == "forward" else "warm"
            layerwise = self._layerwise() if strategy == "warm" else []
            proposals += next_proposals(
                strategy, self.space, self.profile, done, self.context, layerwise, self.settings.worth
            )
        last = [t for t in trials if t.state.is_finished()][-_REPEATS_IN_A_ROW:]
        # By key: the same draft may be proposed by several.
        fresh: dict[str, tuple[str, dict[str, str]]] = {}
        for origin, choices in proposals:
            if _key(self.space, choices) not in known and self.space.is_possible(choices):
                fresh.setdefault(_key(self.space, choices), (origin, choices))
        queue = list(fresh.values())
        if not queue and len(last) == _REPEATS_IN_A_ROW and not {t.number for t in last} & {t.number for t in done}:
            queue = self._neighbour(done, known, len(trials))
        for origin, choices in queue:
            self.study.enqueue_trial(self._params(choices), user_attrs={"origin": origin})

    def _layerwise(self) -> list[dict[str, str]]:
        """Skip sets of a dynamic programme over hidden states, worked out by the first worker."""
        known = self.study.user_attrs.get("layerwise")
        if known is None:
            skips = layerwise_skips(self.model, self.calibration.texts[0])
            known = [skip.to_dict() for skip in skips]
            self.study.set_user_attr("layerwise", known)
        choices = []
        for skip in known:
            names = [f"{kind}.{layer}" for kind in ("attention", "mlp") for layer in skip[kind]]
            choices.append(self.space.complete(dict.fromkeys(names, SKIP)))
        return choices

    def _neighbour(self, done: list[Tried], known: set[str], count: int) -> list[tuple[str, dict[str, str]]]:
        """The best draft with one sub-layer changed: for a sampler that goes round in circles."""
        best = Found(tuple(done)).best()
        start = dict(best[0].choices) if best else self.space.uniform("keep")
        generator = random.Random(f"{self.settings.seed} {count}")
        for changes in range(1, 1000):
            choices = dict(start)
            for name in generator.sample(sorted(choices), min(1 + changes // 100, len(choices))):
                choices[name] = generator.choice(self.space.choices[name])
            if _key(self.space, choices) not in known and self.space.is_possible(choices):
                return [("neighbour", choices)]
        return []

    def _params(self, choices: Mapping[str, str]) -> dict[str, str]:
        return {name: choices[name] for name, allowed in self.space.choices.items() if len(allowed) > 1}

    def _sampler(self) -> Any:
        """A sampler whose proposal hangs on the seed and on what is in the storage, and on nothing else."""
        ended = [
            t
            for t in self.study.get_trials(deepcopy=False)
            if t.state in (TrialState.COMPLETE, TrialState.PRUNED) or "dropped" in t.user_attrs
        ]
        seed = random.Random(f"{self.settings.seed} {len(ended)}").randrange(2**31)
        kind = self.settings.sampler
        if kind == "gp":
            return optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)
        if kind == "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=24)
        if kind in ("random", "forward"):
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed)

    # -- one trial -----------------------------------------------------------------------------------------------------

    def _objective(self, trial: optuna.Trial, trials: int) -> float | tuple[float, ...]:
        trial.set_user_attr("worker", _this_worker())
        before = [t for t in self.study.get_trials(deepcopy=False) if t.number < trial.number]
        if len(_counted(before)) + sum(t.state is TrialState.RUNNING for t in before) >= trials:
            self._take_back(trial, "surplus")
        choices = {
            name: allowed[0] if len(allowed) == 1 else trial.suggest_categorical(name, list(allowed))
            for name, allowed in self.space.choices.items()
        }
        if not self.space.is_possible(choices):
            self._take_back(trial, "leaves out all attention")
        key = _key(self.space, choices)
        trial.set_user_attr("key", key)
        other = self._same(trial, key)
        if other is not None and other.state is TrialState.RUNNING:
            self._take_back(trial, "another worker is at it")
        if other is not None:
            trial.set_user_attr("repeats", other.number)
            if other.state is TrialState.PRUNED:
                raise optuna.TrialPruned
            return other.values[0] if len(other.values) == 1 else tuple(other.values)
        trial.set_user_attr("choices", choices)
        return self._judge(trial, choices)

    def _same(self, trial: optuna.Trial, key: str) -> FrozenTrial | None:
        """Another trial of the same draft that is counted, or one with a lower number that may yet be."""
        same = [t for t in self.study.get_trials(deepcopy=False) if t.user_attrs.get("key") == key]
        for other in _counted(same):
            return other
        for other in same:
            running = other.state is TrialState.RUNNING and "dropped" not in other.user_attrs
            if running and other.number < trial.number:
                return other
        return None

    def _take_back(self, trial: optuna.Trial, why: str) -> None:
        trial.set_user_attr("dropped", why)
        raise _NotCountedError(why)

    def _judge(self, trial: optuna.Trial, choices: Mapping[str, str]) -> float | tuple[float, ...]:
        config = self.space.config(choices)
        costs = self.profile.costs(config, self.context)
        draft_cost = costs.draft_step / costs.plain_step
        started = time.perf_counter()
        if self.settings.objective == "tokens-per-second":
            from .confirm import tokens_per_second

            measured, acceptance = tokens_per_second(self.model, config, self.calibration)
            speedup, length = theoretical_speedup(acceptance.by_depth(PRIOR), costs)
            self._note(trial, acceptance, draft_cost, speedup, length, time.perf_counter() - started)
            return measured
        worth = self.settings.worth
        best = max((worth.found(t) for t in tried_in(self.study).tried if not t.pruned), default=-math.inf)
        acceptance = Acceptance()
        told = time.monotonic()
        for index, text in enumerate(self.calibration.texts):
            if time.monotonic() - told > _BEAT_SECONDS:
                told = time.monotonic()
                trial.set_user_attr("alive", time.time())
            acceptance.add(judge(self.model, config, text, self.settings.depth, self.settings.exact_depth))
            is_last = index == len(self.calibration.texts) - 1
            if self.settings.prune and not is_last and worth.within_chance(acceptance, costs, 3.0) < best:
                speedup, length = theoretical_speedup(acceptance.by_depth(PRIOR), costs)
                self._note(trial, acceptance, draft_cost, speedup, length, time.perf_counter() - started)
                raise optuna.TrialPruned
        speedup, length = theoretical_speedup(acceptance.by_depth(PRIOR), costs)
        self._note(trial, acceptance, draft_cost, speedup, length, time.perf_counter() - started)
        rate = sum(acceptance.accepted) / max(1, sum(acceptance.tried))
        if self.settings.sampler == "nsga2":
            return rate, draft_cost
        return speedup if worth.budget is None else worth.of(rate, costs)

    @staticmethod
    def _note(
        trial: optuna.Trial, acceptance: Acceptance, cost: float, speedup: float, length: int, seconds: float
    ) -> None:
        trial.set_user_attr("draft_cost", cost)
        trial.set_user_attr("speedup", speedup)
        trial.set_user_attr("draft_length", length)
        trial.set_user_attr("seconds", round(seconds, 3))
        trial.set_user_attr("acceptance", acceptance.to_dict())

    # -- what comes out ------------------------------------------------------------------------------------------------

    def config_of(self, tried: Tried, acceptance: Acceptance | None = None, **others: Any) -> SelfSpeculativeConfig:
        """The config of a draft, with its acceptance, its costs on this machine, and where it came from.

        Args:
            tried: the draft.
            acceptance: what drafting starts from; `None`: as on the texts that the draft was judged on.
            others: further fields of the config.
        """
        provenance = dataclasses.replace(Provenance.from_model(self.model), source=SOURCE)
        return found_config(self.space, tried, self.profile, self.context, provenance, acceptance, **others)


def found_config(
    space: Space,
    tried: Tried,
    profile: CostProfile,
    context: int,
    provenance: Provenance | None = None,
    acceptance: Acceptance | None = None,
    **others: Any,
) -> SelfSpeculativeConfig:
    """The config of a draft that was tried, with its acceptance as what drafting starts from, and costs."""
    config = space.config(tried.choices)
    rates = [round(min(max(rate, 0.0), 1.0), 4) for rate in (acceptance or tried.acceptance).by_depth(PRIOR)]
    return dataclasses.replace(
        config,
        drafting=DraftingConfig(acceptance=rates),
        costs=profile.costs(config, context),
        provenance=provenance,
        **others,
    )


def _key(space: Space, choices: Mapping[str, str]) -> str:
    """A draft in a short string: a letter for each sub-layer's choice."""
    letters = {"keep": "k", "skip": "s", "int8": "8", "int4": "4"}
    return "".join(letters[choices[name]] for name in space.choices)


def _this_worker() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _is_alive(worker: Mapping[str, Any]) -> bool:
    if os.name == "nt":
        return True  # signal 0 would end it there
    try:
        os.kill(int(worker["pid"]), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is somebody else's, and there
    # A number is used again by another process sooner or later.
    return worker.get("started") is None or _started(int(worker["pid"])) == worker["started"]


def _started(pid: int) -> str | None:
    """When a process began, as the system counts it; `None` where that cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A process that has ended and was not waited for is a zombie: dead.
    return None if fields[0] == "Z" else fields[19]
