"""Search as an Optuna study whose trials are drafts, judged in one or two forward passes per calibration text.

Any number of workers, on one machine or several, may run on one study. The trial of a worker that dies is repeated by
the others, or when the search is started again. A draft counts once: a trial that proposes it again fails without a
forward pass. Exactly the requested number of trials is finished in the end, whatever the number of workers, and none is
waiting: those left in the queue fail as well, and are queued again when the search continues.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import optuna
from optuna.trial import FrozenTrial, TrialState

from ..config import Costs, DraftingConfig, Provenance, SelfSpeculativeConfig
from ..support.messages import shown
from ..tuning.acceptance import Acceptance, judge, why_not_judged
from .layerwise import layerwise_skips
from .proposals import next_proposals
from .settings import OBJECTIVES, SAMPLERS, SearchSettings, check_sampler
from .space import SKIP, Space
from .storage import quiet, storage_errors
from .trials import PRIOR, Found, Tried, acceptance_rate, mean_acceptance, predicted_speedup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .calibration import Calibration
    from .cost_profile import CostProfile

__all__ = [
    "ABOUT",
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
    "explain_unreadable",
    "found_config",
    "mean_acceptance",
    "open_study",
    "tried_in",
]

SOURCE = "ssd search"
ABOUT = "ssd_generation"
"""Study attribute that describes the model, space, texts and settings of the study."""
_CLAIM = "claims"
_DECIDES = "decides"
"""Attribute of a trial that has been judged and is about to count."""
_LEFT_OVER = "left over"
"""Reason for discarding a trial that waited in the queue when the search ended."""
_UNKNOWN_WORKER_SECONDS = 30.0
_HEARTBEAT_SECONDS = 60.0
"""Interval of a worker's heartbeats. (Optuna's own, in databases only, are more frequent.)"""
_SILENT_SECONDS = 900.0
"""A worker without a heartbeat for this long is dead: no text takes as long."""
_POLL_SECONDS = 0.5
_REPEATS_IN_A_ROW = 3


# ----------------------------------------------------------------------------------------------------------------------
# studies


def open_study(name: str, storage: Any, settings: SearchSettings, about: Mapping[str, Any]) -> optuna.Study:
    """Create a study, or open it to continue.

    Args:
        name: name of the study.
        storage: storage from `storage.storage_of`.
        settings: settings of the search.
        about: model, space and texts of the study, as JSON types.

    Raises:
        ValueError: the study was created for another model, space, objective, or other texts, or cannot be read.
        OSError: the storage fails.
    """
    wanted = json.loads(json.dumps({**about, "settings": _settings_of_values(settings)}))
    with quiet(), explain_unreadable(f"The study {name!r}"), storage_errors(name):
        study = optuna.create_study(
            study_name=name, storage=storage, directions=settings.directions, load_if_exists=True
        )
        before = study.user_attrs.get(ABOUT)
        trials = study.get_trials(deepcopy=False)
        changed = _differences(before or {}, wanted)
        if not changed:
            tried_in(study)
    if before is None and not trials:
        with storage_errors(name):
            study.set_user_attr(ABOUT, wanted)
        return study
    if changed:
        raise ValueError(
            f"The study {name!r} was made for something else ({'; '.join(changed)}). Choose another name with --study, "
            "or repeat the arguments to continue it."
        )
    return study


@contextlib.contextmanager
def explain_unreadable(what: str) -> Iterator[None]:
    """Convert errors while reading a study to a ValueError that names it."""
    try:
        yield
    except OSError:  # the storage fails
        raise
    except Exception as error:  # Optuna, too, assumes that it wrote the contents itself
        raise ValueError(
            f"{what} cannot be understood ({type(error).__name__}: {shown(str(error))}): it was damaged, or not made "
            "by `ssd search`."
        ) from error


def claim(study: optuna.Study, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts that all workers on a study share: those of the first worker.

    The last writer of an attribute of an Optuna study wins, but trial numbers are unique and ascending. So each
    worker that finds no facts stores its own in a trial that does not count, and the one with the lowest number wins.

    Args:
        study: study from `open_study`.
        facts: facts of this worker, as JSON types.

    Returns:
        The facts to use.
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


def _settings_of_values(settings: SearchSettings) -> dict[str, Any]:
    """Return the settings that the values of trials depend on; workers may use different samplers."""
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
    """Return the trials that count: of finished trials of the same draft, the one with the lowest number.

    Two workers may begin the same draft at the same moment, so duplicates are resolved when trials are read, not when
    they are written.
    """
    first: dict[str, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda t: t.number):
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and "acceptance" in trial.user_attrs:
            first.setdefault(trial.user_attrs["key"], trial)
    return list(first.values())


def tried_in(study: optuna.Study) -> Found:
    """Return the drafts that were tried in a study."""
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


class _DiscardedTrialError(Exception):
    """Trial that does not count: there are enough already, the draft is invalid, or another worker has it."""


def check_search(model: PreTrainedModel, space: Space, settings: SearchSettings) -> list[dict[str, str]]:
    """Check a search before anything is measured or generated.

    Args:
        model: the target model.
        space: the search space.
        settings: settings of the search.

    Returns:
        The choices of the drafts to try first.

    Raises:
        ValueError: drafts of this model cannot be judged, or a draft to try first is not in the space.
        ImportError: the sampler needs a package that is not installed.
    """
    reason = why_not_judged(model)
    if reason is not None:
        raise ValueError(f"Drafts of {type(model).__name__} cannot be judged: {reason}.")
    check_sampler(settings.sampler)
    return [space.from_config(config) for config in settings.start_from]


class Search:
    """Worker on a study.

    Args:
        model: the target model.
        calibration: the texts that drafts are judged on.
        profile: costs of the parts of a draft step.
        space: the search space.
        study: study from `open_study`.
        settings: settings of the search.

    Raises:
        ValueError: drafts of this model cannot be judged, or a draft to try first is not in the space.
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
    ) -> None:
        self.start_from = check_search(model, space, settings)
        self.model = model
        self.calibration = calibration
        self.profile = profile
        self.space = space
        self.study = study
        self.settings = settings
        self.context = calibration.context()

    def run(self, trials: int, observe: Callable[[Found], None] | None = None) -> Found:
        """Work until the study has this many trials, those of other workers and of earlier runs included.

        Args:
            trials: number of trials in all, ≥ 1; fewer if the space has fewer drafts.
            observe: callback with the results so far, after each trial, and while waiting for other workers.

        Raises:
            ValueError: `trials` is below 1.
            OSError: the storage fails; finished trials are retained.
        """
        if trials < 1:
            raise ValueError(f"A search needs at least one trial, but got {trials}.")
        trials = min(trials, self.space.size)
        report = observe or (lambda found: None)
        with quiet(), storage_errors(self.study.study_name):
            while self._needs_trial(trials, report):
                self._propose()
                self.study.sampler = self._sampler()
                try:
                    self.study.optimize(
                        lambda trial: self._objective(trial, trials), n_trials=1, catch=(_DiscardedTrialError,)
                    )
                except (ValueError, optuna.exceptions.UpdateFinishedTrialError) as error:
                    # This process was suspended and considered dead: another worker has the draft now.
                    if isinstance(error, ValueError) and not str(error).startswith("Cannot tell a "):
                        raise
                report(tried_in(self.study))
            self._empty_queue()
            return tried_in(self.study)

    # -- scheduling ----------------------------------------------------------------------------------------------------

    def _needs_trial(self, trials: int, report: Callable[[Found], None]) -> bool:
        """Tell whether another trial is needed; wait while those that other workers run might suffice."""
        while True:
            self._recover()
            all_trials = self.study.get_trials(deepcopy=False)
            counted = len(_counted(all_trials))
            running = sum(t.state is TrialState.RUNNING for t in all_trials)
            if counted >= trials or counted + running < trials:
                return counted < trials
            report(tried_in(self.study))
            time.sleep(_POLL_SECONDS)

    def _recover(self) -> None:
        """Fail the trials of dead workers, and queue their drafts again."""
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
            # A draft that a sampler proposed is not queued: the sampler will propose it again.
            if lost and fixed and trial.number not in retried:
                self._enqueue_again(trial)

    def _empty_queue(self) -> None:
        """Discard queued trials that no worker will run; `_propose` queues them again if the search continues."""
        self.study.sampler = optuna.samplers.RandomSampler()  # nothing is to be sampled
        while self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            # Taken from the queue first, which only one worker can do.
            self.study.optimize(
                lambda trial: self._discard(trial, _LEFT_OVER), n_trials=1, catch=(_DiscardedTrialError,)
            )

    def _enqueue_again(self, trial: FrozenTrial) -> None:
        attrs = {key: value for key, value in trial.user_attrs.items() if key in ("origin",)}
        self.study.enqueue_trial(trial.system_attrs["fixed_params"], user_attrs={**attrs, "retry_of": trial.number})

    def _propose(self) -> None:
        """Queue the next proposals if the queue is empty: first of all those that were left over."""
        trials = self.study.get_trials(deepcopy=False)
        if any(t.state is TrialState.WAITING for t in trials):
            return
        retried = {t.user_attrs.get("retry_of") for t in trials}
        left_over = [t for t in trials if _is_left_over(t) and "fixed_params" in t.system_attrs]
        if left_over := [t for t in left_over if t.number not in retried]:
            for trial in left_over:
                self._enqueue_again(trial)
            return
        trials = [t for t in trials if not _is_left_over(t)]
        known = {t.user_attrs["key"] for t in trials if "key" in t.user_attrs and t.state is not TrialState.FAIL}
        proposals = [("given", choices) for choices in self.start_from]
        done = list(tried_in(self.study).tried)
        if self.settings.warm_start or self.settings.sampler == "forward":
            strategy = "forward" if self.settings.sampler == "forward" else "warm"
            layerwise = self._layerwise() if strategy == "warm" else []
            proposals += next_proposals(
                strategy, self.space, self.profile, done, self.context, layerwise, self.settings.scoring
            )
        last = [t for t in trials if t.state.is_finished()][-_REPEATS_IN_A_ROW:]
        # By key: several strategies may propose the same draft.
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
        """Return the skip sets of a dynamic programme over hidden states, computed by the first worker."""
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
        """Return the best draft with one or more sub-layers changed, for a sampler that repeats itself."""
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

    def _sampler(self) -> optuna.samplers.BaseSampler:
        """Return a sampler whose proposal depends only on the seed and on the trials in the storage."""
        return _KnowingRepeats(self._own_sampler())

    def _own_sampler(self) -> optuna.samplers.BaseSampler:
        ended = [
            t
            for t in self.study.get_trials(deepcopy=False)
            if t.state in (TrialState.COMPLETE, TrialState.PRUNED)
            or ("dropped" in t.user_attrs and not _is_left_over(t))
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
        self._check_needed(trial, trials, begins=True)
        choices = {
            name: allowed[0] if len(allowed) == 1 else trial.suggest_categorical(name, list(allowed))
            for name, allowed in self.space.choices.items()
        }
        if not self.space.is_possible(choices):
            self._discard(trial, "leaves out all attention")
        key = _key(self.space, choices)
        trial.set_user_attr("key", key)
        self._check_unique(trial, key, begins=True)
        trial.set_user_attr("choices", choices)
        try:
            value = self._evaluate(trial, choices)
        except optuna.TrialPruned:
            self._decide(trial, key, trials)
            raise
        self._decide(trial, key, trials)
        return value

    def _decide(self, trial: optuna.Trial, key: str, trials: int) -> None:
        """Check a judged trial once more, and discard it unless it is to count.

        A trial that another worker began may not have been in the storage before. Of two at the same moment, the one
        with the lower number counts, unless the other has come here before it began: each first writes what it is, and
        then looks for others, so at least one of the two sees the other.
        """
        trial.set_user_attr(_DECIDES, True)
        self._check_unique(trial, key)
        self._check_needed(trial, trials)

    def _check_needed(self, trial: optuna.Trial, trials: int, begins: bool = False) -> None:
        """Discard a trial if there are enough: those that count, and running ones that precede it."""
        others = self.study.get_trials(deepcopy=False)
        running = sum(t.state is TrialState.RUNNING and _precedes(t, trial, begins) for t in others)
        if len(_counted(others)) + running >= trials:
            self._discard(trial, "surplus")

    def _check_unique(self, trial: optuna.Trial, key: str, begins: bool = False) -> None:
        """Discard a trial if its draft was judged before, or is being judged in a trial that precedes it."""
        other = self._same_draft(trial, key, begins)
        if other is not None and other.state is TrialState.RUNNING:
            self._discard(trial, "another worker is judging it")
        if other is not None:
            trial.set_user_attr("repeats", other.number)
            self._discard(trial, "repeats another")

    def _same_draft(self, trial: optuna.Trial, key: str, begins: bool) -> FrozenTrial | None:
        """Return another trial of the same draft that counts, or a running one that precedes it."""
        same = [t for t in self.study.get_trials(deepcopy=False) if t.user_attrs.get("key") == key]
        for other in _counted(same):
            return other
        for other in same:
            running = other.state is TrialState.RUNNING and "dropped" not in other.user_attrs
            if running and _precedes(other, trial, begins):
                return other
        return None

    def _discard(self, trial: optuna.Trial, why: str) -> NoReturn:
        trial.set_user_attr("dropped", why)
        raise _DiscardedTrialError(why)

    def _evaluate(self, trial: optuna.Trial, choices: Mapping[str, str]) -> float | tuple[float, ...]:
        config = self.space.config(choices)
        costs = self.profile.costs(config, self.context)
        started = time.perf_counter()
        if self.settings.objective == "tokens-per-second":
            from .confirm import tokens_per_second

            measured, acceptance = tokens_per_second(self.model, config, self.calibration)
            self._record(trial, acceptance, costs, started)
            return measured
        scoring = self.settings.scoring
        best = max((scoring.score_of(t) for t in tried_in(self.study).tried if not t.pruned), default=-math.inf)
        acceptance = Acceptance()
        last_heartbeat = time.monotonic()
        for index, text in enumerate(self.calibration.texts):
            if time.monotonic() - last_heartbeat > _HEARTBEAT_SECONDS:
                last_heartbeat = time.monotonic()
                trial.set_user_attr("alive", time.time())
            acceptance.add(judge(self.model, config, text, self.settings.depth, self.settings.exact_depth))
            is_last = index == len(self.calibration.texts) - 1
            if self.settings.prune and not is_last and scoring.optimistic_score(acceptance, costs, 3.0) < best:
                self._record(trial, acceptance, costs, started)
                raise optuna.TrialPruned
        speedup = self._record(trial, acceptance, costs, started)
        rate = acceptance_rate(acceptance)
        if self.settings.sampler == "nsga2":
            return rate, costs.draft_step / costs.plain_step
        return speedup if scoring.budget is None else scoring.score(rate, costs)

    @staticmethod
    def _record(trial: optuna.Trial, acceptance: Acceptance, costs: Costs, started: float) -> float:
        """Store the results of a trial, and return the theoretical speed-up."""
        speedup, length = predicted_speedup(acceptance, costs)
        trial.set_user_attr("draft_cost", costs.draft_step / costs.plain_step)
        trial.set_user_attr("speedup", speedup)
        trial.set_user_attr("draft_length", length)
        trial.set_user_attr("seconds", round(time.perf_counter() - started, 3))
        trial.set_user_attr("acceptance", acceptance.to_dict())
        return speedup

    # -- results -------------------------------------------------------------------------------------------------------

    def config_of(self, tried: Tried, acceptance: Acceptance | None = None, **others: Any) -> SelfSpeculativeConfig:
        """Return the config of a draft, with its acceptance, its costs on this machine, and its provenance.

        Args:
            tried: the draft.
            acceptance: expected acceptance rates; `None`: those on the texts that the draft was judged on.
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
    """Return the config of a draft that was tried, with its expected acceptance rates and its costs."""
    config = space.config(tried.choices)
    rates = [round(min(max(rate, 0.0), 1.0), 4) for rate in (acceptance or tried.acceptance).by_depth(PRIOR)]
    return dataclasses.replace(
        config,
        drafting=DraftingConfig(acceptance=rates),
        costs=profile.costs(config, context),
        provenance=provenance,
        **others,
    )


class _KnowingRepeats(optuna.samplers.BaseSampler):
    """Sampler that sees a trial that repeats a draft as finished, with the value of that draft.

    Such trials fail, so that they are not counted. A sampler that ignored them would propose the same draft again.

    Args:
        sampler: the sampler that proposes.
    """

    def __init__(self, sampler: optuna.samplers.BaseSampler) -> None:
        self._sampler = sampler

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, Any]:
        return self._sampler.infer_relative_search_space(_WithRepeats.of(study), trial)

    def sample_relative(self, study: Any, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return self._sampler.sample_relative(_WithRepeats.of(study), trial, search_space)

    def sample_independent(self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        return self._sampler.sample_independent(_WithRepeats.of(study), trial, param_name, param_distribution)

    def before_trial(self, study: Any, trial: FrozenTrial) -> None:
        self._sampler.before_trial(_WithRepeats.of(study), trial)

    def after_trial(self, study: Any, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self._sampler.after_trial(_WithRepeats.of(study), trial, state, values)


class _WithRepeats:
    """View of a study that `_KnowingRepeats` gives to its sampler."""

    def __init__(self, study: optuna.Study) -> None:
        self._shown = study

    @classmethod
    def of(cls, study: optuna.Study) -> Any:
        return cls(study)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)

    def get_trials(self, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        return self._get_trials(deepcopy, states)

    def _get_trials(self, deepcopy: bool = True, states: Any = None, use_cache: bool = False) -> list[FrozenTrial]:
        trials = self._shown._get_trials(deepcopy=deepcopy, use_cache=use_cache)
        by_number = {t.number: t for t in trials}
        shown = []
        for trial in trials:
            first = by_number.get(trial.user_attrs.get("repeats", -1))
            if first is not None and trial.state is TrialState.FAIL:
                finished = copy.copy(trial)
                finished.state, finished.values = first.state, first.values
                trial = finished
            shown.append(trial)
        return [t for t in shown if states is None or t.state in states]


def _precedes(other: FrozenTrial, trial: optuna.Trial, begins: bool) -> bool:
    """Tell whether a running trial counts before this one does, which only `begins` if it has not been judged."""
    return other.number < trial.number or (begins and _DECIDES in other.user_attrs)


def _is_left_over(trial: FrozenTrial) -> bool:
    return trial.user_attrs.get("dropped") == _LEFT_OVER


def _key(space: Space, choices: Mapping[str, str]) -> str:
    """Return a short string that identifies a draft: a character for each sub-layer's choice."""
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
        pass  # the process exists, and belongs to another user
    # Process ids are reused sooner or later.
    return worker.get("started") is None or _started(int(worker["pid"])) == worker["started"]


def _started(pid: int) -> str | None:
    """Return the start time of a process, in the system's units; `None` if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A process that has ended and was not waited for is a zombie: dead.
    return None if fields[0] == "Z" else fields[19]
