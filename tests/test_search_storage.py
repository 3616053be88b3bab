"""Storages of studies: files that hold anything else are never written to, and reading writes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sqlite3
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from lab.search_methods import __main__ as methods
from search_worker import cost_profile
from ssd_generation.search.run_search import read_study, retarget
from ssd_generation.search.space import Space
from ssd_generation.search.storage import storage_of, storage_to_read
from ssd_generation.search.study import SearchSettings, claim, open_study
from test_cli import ssd as ssd  # the fixture

LAYERS = 4
KINDS = ("sqlite", "journal")


def url_of(kind: str, path: Path) -> str:
    return str(path) if kind == "sqlite" else f"journal:{path}"


def make_study(url: str, trials: int = 3) -> None:
    """Create a study like a search's, without a model."""
    choices = {f"{kind}.{i}": ("keep", "skip") for i in range(LAYERS) for kind in ("attention", "mlp")}
    space = Space(choices, tuple(name for name in choices if name.startswith("attention")), 32)
    study = open_study("s", storage_of(url), SearchSettings(depth=3), {"space": space.describe()})
    claim(study, {"profile": cost_profile().to_dict(), "context": 64, "provenance": {}})
    for number in range(trials):
        chosen = {name: "skip" if name == f"mlp.{number}" else "keep" for name in choices}
        attrs = {
            "key": str(number),
            "choices": chosen,
            "acceptance": {"tried": [9, 8], "accepted": [8, 7], "passes": 3, "tokens": 20},
            "draft_cost": 0.8,
            "speedup": 1.1,
            "draft_length": 2,
        }
        study.add_trial(optuna.trial.create_trial(value=1.1, user_attrs=attrs))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the file contents of a study by kind of storage."""
    folder = tmp_path_factory.mktemp("kept")
    for kind in KINDS:
        make_study(url_of(kind, folder / kind))
    return {kind: (folder / kind).read_bytes() for kind in KINDS}


class Untouched:
    """A check that nothing in a folder has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = self.look()

    def look(self) -> dict[str, Any]:
        found = {}
        for path in sorted(self.folder.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
        return found

    def check(self) -> None:
        assert self.look() == self.before


def notes(path: Path, wal: bool = False, table: str = "notes") -> None:
    """Create a user's unrelated database."""
    connection = sqlite3.connect(path)
    if wal:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"CREATE TABLE {table} (id INTEGER, text TEXT)")
    connection.execute(f"INSERT INTO {table} VALUES (1, 'buy milk')")
    connection.commit()
    connection.close()


# ----------------------------------------------------------------------------------------------------------------------
# files that are no storages

BEGINNING = b'{"op_code":0,"worker_id":"w","study_name":"s","directions":[1]}\n'
NO_JOURNALS = {
    "JSON without an end of line": b'{"skip": {"attention": [1]}}',
    "JSON": b'{"skip": {"attention": [1]}}\n',
    "JSON over lines": b'{\n  "a": 1\n}\n',
    "a list": b"[]\n",
    "another line of JSON": BEGINNING + b"[]\n",
    "no such operation": b'{"op_code":99,"worker_id":"w"}\n',
    "an operation by name": b'{"op_code":"0","worker_id":"w"}\n',
    "an operation that is none": b'{"op_code":true,"worker_id":"w"}\n',
    "no worker": b'{"op_code":0,"study_name":"s","directions":[1]}\n',
    "no fields": BEGINNING + b'{"op_code":4,"worker_id":"w"}\n',
    "wrong fields": BEGINNING + b'{"op_code":4,"worker_id":"w","study_id":0,"datetime_start":[]}\n',
    "no directions": b'{"op_code":0,"worker_id":"w","study_name":"s","directions":["up"]}\n',
    "a cut line after no such operation": b'{"op_code":99,"worker_id":"w"}\n{"op_code":5,"wor',
    "a note after a line": BEGINNING + b"do not delete",
    "deep": b"[" * 100_000 + b"\n",
    "deep in a line": BEGINNING + b'{"op_code":2,"worker_id":"w","a":' + b"[" * 99_999 + b"\n",
    "a long number": b'{"op_code":' + b"9" * 5000 + b',"worker_id":"w"}\n',
    "a long line": b'{"a":"' + b"x" * 10**6 + b'"}\n',
    "no UTF-8": b"\xff\xfe\n",
    "a picture": b"\x89PNG\r\n\x1a\n\x00\x00",
    "blank": b"\n\n",
}


@pytest.mark.parametrize("content", NO_JOURNALS.values(), ids=NO_JOURNALS)
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(content)
    untouched = Untouched(tmp_path)
    for opened in (storage_of, storage_to_read, read_study):
        with pytest.raises(ValueError, match=r"no study in .*mine\.json.*left as it is") as raised:
            opened(f"journal:{file}")
        assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)
        untouched.check()


def test_blank_lines_without_end_take_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "blank.log"
    file.write_bytes(b"\n" * (64 << 20))
    tracemalloc.start()
    with pytest.raises(ValueError, match="line 1 is not a line of a journal"):
        storage_to_read(f"journal:{file}")
    assert tracemalloc.get_traced_memory()[1] < 400 << 20
    tracemalloc.stop()


def test_a_database_is_no_journal(tmp_path: Path) -> None:
    make_study(str(tmp_path / "study.db"))
    untouched = Untouched(tmp_path)
    for opened in (storage_of, read_study):
        with pytest.raises(ValueError, match=r"no study in .*study\.db"):
            opened(f"journal:{tmp_path}/study.db")
    untouched.check()


@pytest.mark.parametrize("kind", ["notes", "WAL", "a table of that name", "no tables", "text", "spoilt"])
def test_a_database_of_something_else_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "notes.db"
    notes(file, wal=kind == "WAL", table="studies" if kind == "a table of that name" else "notes")
    if kind == "no tables":
        connection = sqlite3.connect(file)
        connection.execute("DROP TABLE notes")
        connection.close()
    if kind == "text":
        file.write_text("milk, eggs\n")
    if kind == "spoilt":
        file.write_bytes(file.read_bytes()[:100] + b"\xff" * 9000)
    untouched = Untouched(tmp_path)
    for opened in (storage_of, storage_to_read, read_study):
        for url in (str(file), f"sqlite:///{file}"):
            with pytest.raises(ValueError, match=r"no study in .*notes\.db.*left as it is"):
                opened(url)
            untouched.check()


def test_the_command_line_leaves_foreign_files_as_they_are(ssd: Any, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    cost_profile().save(costs)
    (tmp_path / "mine.json").write_text('{"a": 1}')
    notes(tmp_path / "notes.db")
    make_study(str(tmp_path / "study.db"))
    untouched = Untouched(tmp_path)
    for source in ("journal:mine.json", "notes.db", "journal:study.db", "journal:notes.db", "mine.json", "costs.json"):
        run = ssd("search", "--from", source.replace(source.split(":")[-1], f"{tmp_path}/{source.split(':')[-1]}"),
                  "--costs", str(costs))  # fmt: skip
        assert run.status == 2 and run.err.count("\n") == 1 and "no study in" in run.err
        untouched.check()


@pytest.fixture
def no_files(tmp_path: Path) -> Iterator[list[Path]]:
    """Yield paths where a file is expected and something else is."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        yield [tmp_path / name for name in ("pipe", "round", "device", "folder", "socket", "n" * 300, "n\0n")]


def test_what_is_no_file_is_no_storage(no_files: list[Path], tmp_path: Path) -> None:
    untouched = Untouched(tmp_path)
    for path in no_files:
        for url in (str(path), f"sqlite:///{path}", f"journal:{path}"):
            for opened in (storage_of, storage_to_read):
                with pytest.raises(ValueError, match=r"is a|cannot be"):
                    opened(url)
            with pytest.raises((ValueError, FileNotFoundError)):
                read_study(url)
    untouched.check()


# ----------------------------------------------------------------------------------------------------------------------
# reading a study


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_study_writes_nothing(tmp_path: Path, kept: dict[str, bytes], kind: str) -> None:
    file = tmp_path / "study"
    file.write_bytes(kept[kind] + (b'{"op_code":5,"worker_id"' if kind == "journal" else b""))
    untouched = Untouched(tmp_path)
    found, stored = retarget(url_of(kind, file), cost_profile())
    assert [t.number for t in found] == [1, 2, 3] and stored.context == 64
    untouched.check()
    # A journal is continued without its incomplete last line.
    storage_of(url_of(kind, file))
    if kind == "journal":
        assert file.read_bytes() == kept[kind]
        untouched = Untouched(tmp_path)
        with pytest.raises(OSError, match="opened to be read"):
            stored.study.set_user_attr("a", 1)
    else:
        stored.study.set_user_attr("a", 1)  # in memory
    untouched.check()


def test_the_first_line_of_a_journal_may_have_been_cut(tmp_path: Path) -> None:
    file = tmp_path / "s.log"
    file.write_bytes(BEGINNING[:30])
    storage_of(f"journal:{file}")
    assert file.read_bytes() == b""


def test_an_empty_file_becomes_a_storage(tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind).touch()
        with pytest.raises(ValueError, match="no study in"):
            read_study(url_of(kind, tmp_path / kind))
        assert (tmp_path / kind).stat().st_size == 0
        make_study(url_of(kind, tmp_path / kind))
        assert len(retarget(url_of(kind, tmp_path / kind), cost_profile())[0]) == 3


def test_a_worker_that_was_killed_while_it_wrote(tmp_path: Path, kept: dict[str, bytes]) -> None:
    file = tmp_path / "study.db"
    file.write_bytes(kept["sqlite"])
    pid = os.fork()
    if pid == 0:
        connection = sqlite3.connect(file, isolation_level=None)
        connection.execute("PRAGMA cache_size = 2")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM trials")
        for _ in range(200):
            connection.execute("INSERT INTO studies (study_name) VALUES (?)", (str(random.random()) + "x" * 400,))
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "study.db-journal").stat().st_size > 0 and file.read_bytes() != kept["sqlite"]
    untouched = Untouched(tmp_path)
    assert len(retarget(str(file), cost_profile())[0]) == 3
    untouched.check()
    storage_of(str(file))
    assert len(retarget(str(file), cost_profile())[0]) == 3


def test_a_study_whose_database_writes_ahead(tmp_path: Path, kept: dict[str, bytes]) -> None:
    file = tmp_path / "study.db"
    file.write_bytes(kept["sqlite"])
    other = sqlite3.connect(file)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("UPDATE studies SET study_name = 'renamed'")
    other.commit()
    untouched = Untouched(tmp_path)
    assert read_study(str(file), "renamed").context == 64
    untouched.check()
    other.close()


@pytest.mark.parametrize("name", ["what?.db", "50%.db", "#1.db", "{x}.db", "a b.db"])
def test_a_name_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    make_study(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(retarget(str(tmp_path / name), cost_profile())[0]) == 3


def test_options_of_sqlite(tmp_path: Path) -> None:
    make_study(f"sqlite:///{tmp_path}/s.db?timeout=30")
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]
    with pytest.raises(ValueError, match="named by its path alone"):
        storage_of(f"sqlite:///file:{tmp_path}/s.db?uri=true")


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_that_was_spoilt_is_told(tmp_path: Path, kept: dict[str, bytes], kind: str) -> None:
    generator = random.Random(kind)
    content = kept[kind]
    told: list[str] = []
    for number in range(40):
        file = tmp_path / str(number)
        start = generator.randrange(len(content))
        noise = generator.choice([b"\xff" * 4096, b"\0" * 100, b"[" * 3000, b'"', generator.randbytes(700), b"9"])
        file.write_bytes(content[:start] + noise + content[start + len(noise) :])
        untouched = Untouched(tmp_path)
        try:
            retarget(url_of(kind, file), cost_profile())
        except ValueError as error:
            told.append(str(error))
        untouched.check()
        with contextlib.suppress(ValueError, OSError):  # OSError: the storage fails midway
            make_study(url_of(kind, file), trials=1)
    assert len(told) > 8 and max(map(len, told)) < 700


@pytest.mark.parametrize(
    "change",
    [
        {"ssd_generation": 5},
        {"ssd_generation": {"space": []}},
        {"ssd_generation": {"space": {"choices": {"a": 1}, "group_size": 32}}},
        {"context": "many"},
        {"provenance": {"date": "yesterday"}},
        {"profile": {"version": 2}},
        {"profile": [[]]},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_study_with_other_contents_is_told(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    url = url_of(kind, tmp_path / "study")
    make_study(url)
    study = optuna.load_study(study_name="s", storage=storage_of(url))
    for key, value in change.items():
        study.set_user_attr(key, value)
    with pytest.raises(ValueError, match=r"cannot be understood|not made by"):
        read_study(url)


def test_a_comparison_of_methods_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(folder: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["methods", "--compare", str(folder), "-o", str(tmp_path / "out")])
        with pytest.raises(SystemExit):
            methods.main()
        return capsys.readouterr().err

    one = tmp_path / "one"
    one.mkdir()
    notes(one / "studies.db")
    for content, expected in (("[" * 100_000, "deeper"), ("[]", "no study in"), ('{"methods": 3}', "no study in")):
        (one / "methods.json").write_text(content)
        untouched = Untouched(one)
        assert expected in told(one)
        untouched.check()
    (one / "studies.db").unlink()
    make_study(str(one / "studies.db"))
    contents: list[Any] = [[], {"methods": 3}, {"methods": {"s": {}}, "texts": []}, {"methods": {"other": {}}}]
    for said in contents:
        (one / "methods.json").write_text(json.dumps(said))
        assert "cannot be understood" in told(one)
