"""The study: counting and resuming of trials, and several workers at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileSymlinkLock
from optuna.trial import TrialState, create_trial
from sqlalchemy import event

from forked import forked
from search_worker import calibration, cost_profile, work, worker
from ssd_generation import SelfSpeculativeConfig, SkipConfig
from ssd_generation.config import Provenance
from ssd_generation.search.proposals import forward_selection, warm_start
from ssd_generation.search.run_search import read_study, retarget
from ssd_generation.search.space import SKIP, space_of
from ssd_generation.search.storage import storage_of
from ssd_generation.search.study import (
    Found,
    Search,
    SearchSettings,
    Tried,
    _DiscardedTrialError,
    claim,
    mean_acceptance,
    open_study,
    tried_in,
)
from ssd_generation.search.trials import Scoring
from ssd_generation.tuning.acceptance import Acceptance
from ssd_generation.tuning.acceptance import judge as judge_really
from tiny_models import tiny_model

TESTS = Path(__file__).parent


def memory() -> Any:
    return optuna.storages.InMemoryStorage()


def letters(found: Found) -> list[str]:
    return ["".join(c[0] for c in t.choices.values()) for t in found.tried]


def test_as_many_trials_as_asked_for_each_of_another_draft() -> None:
    search, _ = worker(memory())
    seen: list[int] = []
    found = search.run(40, lambda f: seen.append(len(f.tried)))
    assert len(found.tried) == 40
    assert len(set(letters(found))) == 40
    assert seen[-1] == 40
    assert Counter(t.origin for t in found.tried)["single"] == 8
    best = found.best()[0]
    assert best.speedup == max(t.speedup for t in found.tried if not t.pruned)
    # The estimates follow from the counts.
    config = search.config_of(best)
    assert config.costs is not None and config.costs.draft_step == pytest.approx(best.draft_cost)
    assert config.skip == search.space.config(best.choices).skip
    assert config.provenance is not None and config.provenance.source == "ssd search"
    assert len(config.drafting.acceptance) == len(best.acceptance.tried)


def test_going_on_changes_nothing() -> None:
    whole, _ = worker(memory())
    expected = letters(whole.run(36))
    storage = memory()
    for trials in (3, 4, 20, 36):
        search, _ = worker(storage)
        found = search.run(trials)
        assert len(found.tried) == trials
    assert letters(found) == expected
    assert letters(search.run(10)) == expected  # the study already has more


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_seed_and_storage_the_same_trials(sampler: str) -> None:
    def run(seed: int) -> list[str]:
        search, _ = worker(memory(), SearchSettings(depth=3, sampler=sampler, warm_start=False, seed=seed))
        return letters(search.run(15))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_sampler_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SearchSettings(depth=3, sampler="gp", warm_start=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy", None)
        with pytest.raises(ImportError, match=r"pip install 'ssd_generation\[gp\]'"):
            worker(memory(), settings)
    pytest.importorskip("scipy")
    search, _ = worker(memory(), settings)
    assert len(search.run(12).tried) == 12


def test_nsga2_keeps_a_frontier() -> None:
    settings = SearchSettings(depth=3, sampler="nsga2", warm_start=False)
    search, _ = worker(memory(), settings)
    found = search.run(30)
    frontier = found.frontier()
    assert len(found.tried) == 30
    for one in frontier:
        for other in found.tried:
            better = other.draft_cost <= one.draft_cost and mean_acceptance(other) >= mean_acceptance(one)
            same = (other.draft_cost, mean_acceptance(other)) == (one.draft_cost, mean_acceptance(one))
            assert not better or same


def test_forward_selection_takes_the_best_addition() -> None:
    settings = SearchSettings(depth=3, sampler="forward", prune=False)
    search, space = worker(memory(), settings)
    found = search.run(8 + 7)
    first, second = found.tried[:8], found.tried[8:15]
    assert all(sum(c == SKIP for c in t.choices.values()) == 1 for t in first)
    chosen = max(first, key=lambda t: t.speedup)
    kept = [name for name, choice in chosen.choices.items() if choice == SKIP]
    assert all(t.choices[kept[0]] == SKIP and sum(c == SKIP for c in t.choices.values()) == 2 for t in second)
    assert forward_selection(space, found.tried)


def test_acceptance_within_a_budget() -> None:
    settings = SearchSettings(depth=3, objective="acceptance", budget=0.8)
    search, _ = worker(memory(), settings)
    best = search.run(40).best()[0]
    assert best.draft_cost <= 0.8
    within = [mean_acceptance(t) for t in tried_in(search.study).tried if t.draft_cost <= 0.8 and not t.pruned]
    assert best.value == pytest.approx(max(within))


def test_measured_tokens_per_second() -> None:
    settings = SearchSettings(depth=3, objective="tokens-per-second", warm_start=False)
    search, _ = worker(memory(), settings)
    found = search.run(2)
    assert all(t.value is not None and t.value > 0 and t.acceptance.passes > 24 for t in found.tried)


def test_given_configs_come_first_and_must_fit() -> None:
    config = SelfSpeculativeConfig(SkipConfig([2], [1, 3]))
    search, space = worker(memory(), SearchSettings(depth=3, start_from=(config,)))
    assert space.config(search.run(1).tried[0].choices).skip == config.skip
    with pytest.raises(ValueError, match="is not available"):
        worker(memory(), SearchSettings(depth=3, start_from=(SelfSpeculativeConfig(precision="int8"),)))


def test_hopeless_drafts_are_given_up_and_counted() -> None:
    search, _ = worker(memory(), new=90)
    pruned = [t for t in search.run(30).tried if t.pruned]
    assert pruned
    everything = len(search.calibration)
    assert all(t.acceptance.passes < everything for t in pruned)
    thorough, _ = worker(memory(), SearchSettings(depth=3, prune=False), new=90)
    assert not any(t.pruned for t in thorough.run(30).tried)


def test_no_trials_is_no_search() -> None:
    search, _ = worker(memory())
    with pytest.raises(ValueError, match="at least one trial, but got 0"):
        search.run(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "speed"}, "no objective 'speed'"),
        ({"sampler": "cma"}, "no sampler 'cma'"),
        ({"depth": 0}, "at least 1, but got 0"),
        ({"exact_depth": 0}, "1 to 6, but got 0"),
        ({"depth": 2, "exact_depth": 3}, "1 to 2, but got 3"),
        ({"budget": 1.5}, "up to 1, but got 1.5"),
        ({"sampler": "nsga2", "objective": "acceptance"}, "cannot optimise the objective 'acceptance'"),
        ({"sampler": "nsga2", "objective": "tokens-per-second"}, "cannot optimise the objective 'tokens-per-second'"),
    ],
)
def test_settings_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchSettings(**arguments)


def test_a_study_of_something_else_is_refused() -> None:
    storage = memory()
    worker(storage, about={"model": {"weights": "abc"}, "texts": "one"})
    with pytest.raises(ValueError, match='model: weights was "abc" and is "def"'):
        worker(storage, about={"model": {"weights": "def"}, "texts": "one"})
    with pytest.raises(ValueError, match="depth was 3 and is 5"):
        worker(storage, SearchSettings(depth=5), about={"model": {"weights": "abc"}, "texts": "one"})
    optuna.create_study(study_name="other", storage=storage).add_trial(
        optuna.trial.create_trial(value=1.0, params={}, distributions={})
    )
    with pytest.raises(ValueError, match="made for something else"):
        worker(storage, name="other")


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_small_space_is_searched_to_its_end(warm_start: bool) -> None:
    search, space = worker(memory(), SearchSettings(depth=3, warm_start=warm_start), layers=2)
    drafts = [dict(zip(space.choices, c, strict=True)) for c in itertools.product(*space.choices.values())]
    assert space.size == sum(map(space.is_possible, drafts)) == 12
    assert len(search.run(40).tried) == 12


def test_drafts_are_given_to_a_study_that_goes_on() -> None:
    storage = memory()
    worker(storage)[0].run(2)
    config = SelfSpeculativeConfig(SkipConfig([1, 2], [0, 3]))
    search, space = worker(storage, SearchSettings(depth=3, start_from=(config,)))
    found = search.run(12)
    assert [t.choices for t in found.tried if t.origin == "given"] == [space.from_config(config)]


def test_all_go_by_what_the_first_has_claimed() -> None:
    storage = memory()
    studies = [worker(storage)[0].study for _ in range(2)]
    first, second = {"profile": {"a": 1}, "context": 5}, {"profile": {"a": 2}, "context": 6}
    assert claim(studies[0], first) == first and claim(studies[1], second) == first
    assert studies[1].user_attrs["profile"] == first["profile"] and studies[1].user_attrs["context"] == 5
    # Both claim at the same moment, neither having seen the other's.
    late, _ = worker(memory(), name="late")
    for facts in (first, second):
        late.study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"claims": facts, "dropped": "claims"}))
    assert claim(late.study, second) == first
    # Claims do not count as drafts.
    assert len(late.run(3).tried) == 3


def running(study: optuna.Study, host: str, began: float, key: str | None = None) -> None:
    """Add a trial that another worker is, or was, running."""
    worker = {"host": host, "pid": 1, "started": None}
    attrs = {"worker": worker, "choices": {}} | ({} if key is None else {"key": key})
    trial = create_trial(state=TrialState.RUNNING, user_attrs=attrs)
    trial.datetime_start = datetime.fromtimestamp(began)
    study.add_trial(trial)


def test_a_worker_elsewhere_that_is_silent_is_taken_for_dead() -> None:
    search, _ = worker(memory())
    running(search.study, "elsewhere", time.time() - 2 * 900, key="skkkkkkk")
    found = search.run(9)
    assert len(found.tried) == 9
    # This worker judges the dead one's draft.
    assert len({t.number for t in found.tried if t.origin == "single"}) == 8


def test_the_last_trials_of_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = worker(memory())
    search.run(2)
    running(search.study, "elsewhere", time.time())
    waited: list[int] = []

    def sleep(seconds: float) -> None:
        waited.append(len(tried_in(search.study).tried))
        assert len(waited) < 5
        if len(waited) == 3:
            (theirs,) = [t.number for t in search.study.trials if t.state is TrialState.RUNNING]
            search.study.tell(theirs, state=TrialState.FAIL)

    monkeypatch.setattr("ssd_generation.search.study.time.sleep", sleep)
    told: list[int] = []
    assert len(search.run(3, lambda found: told.append(len(found.tried))).tried) == 3
    assert waited == [2, 2, 2] and told == [2, 2, 2, 3]


def test_a_worker_that_was_taken_for_dead_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = worker(memory())
    suspended: list[int] = []

    def judge(*args: Any) -> Any:
        if not suspended:
            (mine,) = [t.number for t in search.study.get_trials() if t.state is TrialState.RUNNING]
            suspended.append(mine)
            search.study.tell(mine, state=TrialState.FAIL)
        return judge_really(*args)

    monkeypatch.setattr("ssd_generation.search.study.judge", judge)
    found = search.run(9)
    assert len(found.tried) == 9 and suspended == [0]
    assert Counter(t.origin for t in found.tried)["single"] == 8, "the draft was judged after all"


def test_what_is_wrong_with_a_draft_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*args: Any) -> Any:
        raise ValueError("no such draft")

    monkeypatch.setattr("ssd_generation.search.study.judge", judge)
    with pytest.raises(ValueError, match="no such draft"):
        worker(memory())[0].run(2)


def test_a_storage_that_fails_in_the_middle_is_told(tmp_path: Path) -> None:
    search, _ = worker(storage_of(f"{tmp_path}/s.db"))
    search.run(2)

    def full(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE")):
            raise sqlite3.OperationalError("database or disk is full")

    engine = search.study._storage._backend.engine  # type: ignore[attr-defined]
    event.listen(engine, "before_cursor_execute", full)
    with pytest.raises(OSError, match=r"storage of the study 's' fails: .*disk is full.*judged before are stored"):
        search.run(4)
    event.remove(engine, "before_cursor_execute", full)
    assert len(worker(storage_of(f"{tmp_path}/s.db"))[0].run(4).tried) == 4


def test_a_journal_whose_last_line_was_cut_short_can_be_read(tmp_path: Path) -> None:
    journal = tmp_path / "s.log"
    expected = letters(worker(storage_of(f"journal:{journal}"))[0].run(3))
    with journal.open("ab") as file:
        file.write(b'{"op_code":5,"worker_id"')
    found = worker(storage_of(f"journal:{journal}"))[0].run(4)
    assert letters(found)[:3] == expected and len(found.tried) == 4
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize("url", ["postgresql://ann:secret@127.0.0.1:1/x", "sqlite:////nowhere/at/all.db", "what://x"])
def test_a_storage_that_cannot_be_reached(url: str) -> None:
    with pytest.raises(ValueError, match="cannot be reached") as raised:
        storage_of(url)
    assert "secret" not in str(raised.value)


# ----------------------------------------------------------------------------------------------------------------------
# workers that die


def check_counted_once(storage: str, trials: int) -> Found:
    study = optuna.load_study(study_name="s", storage=storage_of(storage))
    found = tried_in(study)
    assert len(found.tried) == trials
    assert len(set(letters(found))) == trials
    # The requested number of trials, also when the study is read by Optuna's own functions.
    states = Counter(t.state for t in study.get_trials())
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == trials
    assert states[TrialState.RUNNING] == states[TrialState.WAITING] == 0
    for t in study.get_trials():
        if t.state is TrialState.FAIL and "dropped" not in t.user_attrs and "fixed_params" in t.system_attrs:
            # A trial taken from the queue and lost is queued again.
            again = [o for o in study.get_trials() if o.user_attrs.get("retry_of") == t.number]
            assert len(again) == 1
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a private PostgreSQL server and yield its URL."""
    psycopg2 = pytest.importorskip("psycopg2")
    if os.name == "nt" or shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("there is no PostgreSQL here")
    # Not under pytest's own folder, which other users may not enter.
    folder = Path(tempfile.mkdtemp(prefix="ssd-postgres-"))
    account: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        try:
            shutil.chown(folder, "postgres")
        except LookupError:
            pytest.skip("PostgreSQL does not run as root, and there is no account for it")
        account["user"] = "postgres"

    def program(*arguments: str) -> None:
        # To a file: the server inherits pg_ctl's output, and a pipe would never end.
        with (folder / "log").open("ab") as log:
            subprocess.run(arguments, check=True, stdout=log, stderr=log, **account)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data, options = str(folder / "data"), f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
    try:
        program("initdb", "-D", data, "-U", "ssd", "-A", "trust", "-E", "UTF8", "--no-sync")
        program("pg_ctl", "-D", data, "-o", options, "-w", "start")
        try:
            with contextlib.closing(psycopg2.connect(f"postgresql://ssd@127.0.0.1:{port}/postgres")) as connection:
                connection.autocommit = True
                for name in ("killed", "two"):
                    connection.cursor().execute(f"CREATE DATABASE {name}")
            yield f"postgresql+psycopg2://ssd@127.0.0.1:{port}"
        finally:
            program("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


STORAGES = ["sqlite", "journal", "postgresql"]


def storage_at(kind: str, name: str, request: pytest.FixtureRequest) -> str:
    folder = request.getfixturevalue("tmp_path")
    if kind == "postgresql":
        return f"{request.getfixturevalue('server')}/{name}"
    return f"sqlite:///{folder}/{name}.db" if kind == "sqlite" else f"journal:{folder}/{name}.log"


@pytest.mark.filterwarnings("ignore:The existing lock file has not been released")
def test_the_lock_of_a_killed_worker_does_not_hold_the_others_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JournalFileSymlinkLock.__init__, "__defaults__", (3,))  # seconds, not 30
    journal = tmp_path / "study.log"
    journal.touch()
    (tmp_path / "study.log.lock").symlink_to(journal)
    search, _ = worker(storage_of(f"journal:{journal}"), SearchSettings(depth=3))
    assert len(search.run(2).tried) == 2


@pytest.mark.parametrize("kind", STORAGES)
def test_killed_workers_lose_nothing(request: pytest.FixtureRequest, kind: str) -> None:
    storage = storage_at(kind, "killed", request)
    generator = random.Random(kind)
    for _ in range(2):
        with forked(work, storage, 30, False) as one:
            for _ in range(generator.randrange(1, 5)):
                one.hear()
            time.sleep(generator.random() * 0.05)
            one.process.kill()
            one.process.join()
    with forked(work, storage, 30, False) as last:
        last.ends_well()
    check_counted_once(storage, 30)


@pytest.mark.parametrize("kind", STORAGES)
def test_two_workers_on_one_study(request: pytest.FixtureRequest, kind: str) -> None:
    storage = storage_at(kind, "two", request)
    with forked(work, storage, 30, True) as one, forked(work, storage, 30, True) as other:
        for process in (one, other):
            assert process.hear() == "ready"
        for process in (one, other):
            process.pipe.send("go on")
        one.ends_well()
        other.ends_well()
    found = check_counted_once(storage, 30)
    study = optuna.load_study(study_name="s", storage=storage_of(storage))
    workers = {t.user_attrs["worker"]["pid"] for t in study.get_trials() if "acceptance" in t.user_attrs}
    assert len(workers) == 2
    assert len(found.best()) == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_trial_that_another_worker_begins_late_does_not_count_twice(same: bool) -> None:
    """Two trials overlap: the later number decides before the earlier one says what it is."""
    search, space = worker(memory())
    draft = space.uniform("keep") | {"attention.1": SKIP}
    study = search.study
    for choices in (draft, draft if same else draft | {"mlp.1": SKIP}):
        study.enqueue_trial(search._params(choices))
    needed = 30
    if not same:  # a trial is taken from the queue after the other one was created
        needed, queued = 1, study.get_trials(states=(TrialState.WAITING,))
        later = optuna.trial.Trial(study, study._storage.create_new_trial(study._study_id))
        study.sampler = optuna.samplers.RandomSampler(seed=0)
        search._objective(later, needed)
        earlier = study.ask()
        assert earlier.number == queued[0].number < later.number
    else:
        earlier, later = study.ask(), study.ask()
        search._objective(later, needed)  # judged, but not told yet
    with pytest.raises(_DiscardedTrialError, match="another worker" if same else "surplus"):
        search._objective(earlier, needed)


def test_sqlite_gives_a_trial_to_one_worker_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (storage_of(f"{tmp_path}/s.db") for _ in range(2))
    optuna.create_study(study_name="s", storage=one).enqueue_trial({})
    check = type(one).check_trial_is_updatable
    taken = []

    def take() -> None:
        taken.append(other.set_trial_state_values(1, TrialState.RUNNING))

    thread = threading.Thread(target=take)

    def checked(self: Any, *args: Any) -> None:
        check(self, *args)
        if self is one:  # its trial has been read and not yet written
            thread.start()
            thread.join(timeout=0.5)

    monkeypatch.setattr(type(one), "check_trial_is_updatable", checked)
    taken.append(one.set_trial_state_values(1, TrialState.RUNNING))
    thread.join()
    assert sorted(taken) == [False, True]


def test_tables_that_another_worker_makes_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy.exc import IntegrityError

    made = optuna.storages.RDBStorage
    errors = [IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed")), RuntimeError("table already exists")]

    def making(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return made(*args, **kwargs)

    monkeypatch.setattr(optuna.storages, "RDBStorage", making)
    storage_of(f"{tmp_path}/s.db")
    assert not errors


def test_a_queue_that_is_left_over_comes_back() -> None:
    search, _ = worker(memory())
    search.run(4)  # the uniform drafts are judged, and single sub-layers wait
    states = Counter(t.state for t in search.study.get_trials())
    left_over = [t for t in search.study.get_trials() if t.user_attrs.get("dropped") == "left over"]
    assert states[TrialState.FAIL] == len(left_over) == len(search.study.trials) - 4
    assert len(left_over) > 3 and {t.user_attrs["origin"] for t in left_over} == {"single"}
    search.run(4)  # no trial is missing, so none is queued again
    assert len(search.study.trials) == 4 + len(left_over)
    search.run(6)
    again = [t for t in search.study.get_trials() if "retry_of" in t.user_attrs]
    assert [t.user_attrs["retry_of"] for t in again] == [t.number for t in left_over]
    assert [t.state.is_finished() for t in again] == [True] * len(left_over)
    assert sum("acceptance" in t.user_attrs for t in again) == 2


def test_a_draft_that_another_worker_finished_meanwhile_is_not_judged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # This worker's trial has the lower number, but its draft was not in the storage when the other one checked.
    search, _ = worker(memory(), SearchSettings(depth=3, prune=False))
    search.run(3)
    evaluate, mine = Search._evaluate, list[int]()

    def evaluating(self: Search, trial: optuna.Trial, choices: Any) -> Any:
        value = evaluate(self, trial, choices)
        if not mine:
            mine.append(trial.number)
            twin = create_trial(value=value, user_attrs=dict(trial.user_attrs), state=TrialState.COMPLETE)
            self.study.add_trial(twin)
        return value

    monkeypatch.setattr(Search, "_evaluate", evaluating)
    found = search.run(5)
    states = Counter(t.state for t in search.study.get_trials())
    assert states[TrialState.COMPLETE] == len(found.tried) == 5
    assert search.study.trials[mine[0]].user_attrs["dropped"] == "repeats another"


def test_a_trial_that_others_made_needless_meanwhile_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = worker(memory(), SearchSettings(depth=3, prune=False))
    search.run(3)
    evaluate, mine = Search._evaluate, list[int]()

    def evaluating(self: Search, trial: optuna.Trial, choices: Any) -> Any:
        value = evaluate(self, trial, choices)
        mine.append(trial.number)
        other = {**trial.user_attrs, "key": "another"}
        self.study.add_trial(create_trial(value=value, user_attrs=other, state=TrialState.COMPLETE))
        return value

    monkeypatch.setattr(Search, "_evaluate", evaluating)
    assert len(search.run(4).tried) == 4 and len(mine) == 1
    states = Counter(t.state for t in search.study.get_trials())
    assert states[TrialState.COMPLETE] == 4
    assert search.study.trials[mine[0]].user_attrs["dropped"] == "surplus"


def test_a_draft_judged_by_two_workers_at_once_counts_once() -> None:
    search, _ = worker(memory())
    search.run(3)
    for trial in search.study.get_trials()[:2]:
        search.study.add_trial(trial)
    assert [t.number for t in tried_in(search.study).tried] == [0, 1, 2]
    assert len(search.run(5).tried) == 5


# ----------------------------------------------------------------------------------------------------------------------
# proposals and other machines


def tried(number: int, choices: dict[str, str], right: int, wrong: int, speedup: float) -> Tried:
    return Tried(number, choices, Acceptance([right + wrong], [right]), 0.5, speedup, 2, "x", pruned=False)


def test_warm_start_goes_for_what_costs_least() -> None:
    space = space_of(tiny_model())
    profile = cost_profile()
    proposals = warm_start(space, profile, [], 64)
    assert [origin for origin, _ in proposals] == ["single"] * 8
    # Skipping MLP 3 or attention 2 loses no acceptance; skipping any other loses nearly all.
    done = []
    for number, (_, choices) in enumerate(proposals):
        free = choices["mlp.3"] == SKIP or choices["attention.2"] == SKIP
        done.append(tried(number, choices, 99 if free else 5, 1 if free else 95, 1.1 if free else 1.0))
    sets = warm_start(space, profile, done, 64)
    assert {origin for origin, _ in sets} == {"set"}
    first = {name for name, choice in sets[0][1].items() if choice == SKIP}
    assert first == {"mlp.3", "attention.2"}


def test_proposals_keep_to_a_budget() -> None:
    space, profile, scoring = space_of(tiny_model()), cost_profile(), Scoring(0.8)

    def cost(choices: Mapping[str, str]) -> float:
        return profile.costs(space.config(choices), 64).draft_step

    # By speed-up, nothing would be skipped: each sub-layer loses more than it saves, an attention least.
    singles = [c for _, c in warm_start(space, profile, [], 64, scoring=scoring)]
    losses = {"attention.0": 20, "attention.1": 15, "attention.2": 10, "attention.3": 40} | {
        f"mlp.{i}": 25 + i for i in range(4)
    }
    done = []
    for number, choices in enumerate(singles):
        lost = losses[next(name for name, choice in choices.items() if choice == SKIP)]
        done.append(dataclasses.replace(tried(number, choices, 100 - lost, lost, 0.9), value=0.8 - cost(choices)))
    sets = [c for origin, c in warm_start(space, profile, done, 64, scoring=scoring) if origin == "set"]
    # 0.2 must be saved: an attention saves 0.08, an MLP 0.16. The best set of each size within the budget comes first.
    assert {name for name, c in sets[0].items() if c == SKIP} == {"attention.2", "mlp.0"}
    assert cost(sets[0]) <= 0.8 < cost(singles[0])
    # Sets at the limit of the budget are varied by exchanges.
    done += [
        dataclasses.replace(
            tried(9 + i, c, 70, 30, 0.9), value=(0.7 if i == 0 else 0.1) if cost(c) <= 0.8 else 0.8 - cost(c)
        )
        for i, c in enumerate(sets)
    ]
    moves = warm_start(space, profile, done, 64, scoring=scoring)
    assert {origin for origin, _ in moves} == {"move"}
    assert {"attention.1", "mlp.0"} in [{name for name, c in choices.items() if c == SKIP} for _, choices in moves]
    assert all(cost(choices) <= 0.8 for _, choices in moves)


def test_what_a_budget_rules_out_is_given_up() -> None:
    settings = SearchSettings(depth=3, objective="acceptance", budget=0.8)
    search, _ = worker(memory(), settings, new=90)
    found = search.run(40)
    everything = len(search.calibration)
    best = found.best()[0].value
    assert best is not None and 0 < best <= 1
    pruned = [t for t in found.tried if t.pruned]
    assert pruned and all(t.acceptance.passes < everything for t in pruned)
    # Some are pruned for their acceptance, not for their cost alone.
    assert any(t.draft_cost <= 0.8 for t in pruned)


def test_few_trials_for_many_sublayers() -> None:
    space = space_of(tiny_model(num_hidden_layers=12))
    profile = cost_profile(num_layers=12, shares={"attention": (1.0,) * 12, "mlp": (1.0,) * 12})
    proposals = warm_start(space, profile, [], 64, most_singles=8)
    alone = [name for _, choices in proposals for name, choice in choices.items() if choice == SKIP]
    assert alone == [f"{kind}.{i}" for kind in ("attention", "mlp") for i in (0, 3, 6, 9)]
    # Skipping attention 6 loses no acceptance; untested neighbours are assumed to be alike.
    done = [
        tried(i, c, 99 if c["attention.6"] == SKIP else 5, 1 if c["attention.6"] == SKIP else 95, 1.0)
        for i, (_, c) in enumerate(proposals)
    ]
    best = warm_start(space, profile, done, 64, most_singles=8)[0][1]
    assert {name for name, choice in best.items() if choice == SKIP} <= {f"attention.{i}" for i in (5, 6, 7)}


def test_retarget_needs_no_model(tmp_path: Path) -> None:
    storage = f"{tmp_path}/s.db"
    search, space = worker(storage_of(storage))
    provenance = Provenance.from_model(search.model)
    facts = {"profile": cost_profile().to_dict(), "context": 64, "provenance": provenance.to_dict()}
    claim(search.study, facts)
    search.study.set_user_attr(
        "ssd_generation", {**search.study.user_attrs["ssd_generation"], "space": space.describe()}
    )
    before = search.run(40).best()[0]
    same, stored = retarget(storage, cost_profile())
    assert (same[0].number, stored.context) == (before.number, 64)
    assert stored.provenance == dataclasses.replace(provenance, source="ssd search")
    assert same[0].speedup == pytest.approx(before.speedup)
    # Where only attention has a cost, skipping MLPs saves nothing.
    other = cost_profile(attention={"keep": (0.24,)}, mlp={"keep": 0.0})
    there, read = retarget(storage, other)
    assert read.space.choices == space.choices
    expected = max(there, key=lambda t: (t.speedup, -t.number))
    assert there[0] == expected
    assert any(name.startswith("attention") and c == SKIP for name, c in there[0].choices.items())
    with pytest.raises(ValueError, match="Profile the same model"):
        retarget(storage, cost_profile(num_layers=7))
    with pytest.raises(
        ValueError, match="of 4 layers and width 64, but the costs are of a llama of 4 layers and width 8"
    ):
        retarget(storage, cost_profile(hidden_size=8))
    with pytest.raises(ValueError, match="no study 'b'"):
        read_study(storage, "b")
    with pytest.raises(FileNotFoundError, match="no study in"):
        read_study(f"{tmp_path}/nothing.db")
    for url in (f"sqlite:///{tmp_path}/typo.db", f"journal:{tmp_path}/typo.log"):
        with pytest.raises(FileNotFoundError, match="no study in"):
            read_study(url)
    assert not list(tmp_path.glob("typo*"))


def test_what_one_machine_gave_up_another_may_want(tmp_path: Path) -> None:
    storage = f"{tmp_path}/s.db"
    search, _ = worker(storage_of(storage), new=90, about={"space": space_of(tiny_model()).describe()})
    facts = {"profile": cost_profile().to_dict(), "context": 64, "provenance": {}}
    claim(search.study, facts)
    tried = search.run(30).tried
    assert any(t.pruned for t in tried)
    there, _ = retarget(storage, cost_profile())
    assert {t.number: t.pruned for t in there} == {t.number: t.pruned for t in tried}


def test_the_queue_is_in_the_study_not_in_the_worker() -> None:
    storage = memory()
    first, _ = worker(storage)
    first.run(1)
    second, _ = worker(storage)
    assert [t.origin for t in second.run(3).tried] == ["single"] * 3
    study = open_study("s", storage, SearchSettings(depth=3), {"of": "a test"})
    assert len(tried_in(study).tried) == 3


def test_calibration_of_tests_is_the_same_each_time() -> None:
    model = tiny_model()
    assert calibration(model).texts[0].ids.tolist() == calibration(model).texts[0].ids.tolist()
