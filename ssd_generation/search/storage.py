"""Storages of studies: SQLite files, journals, and database servers.

An existing file is checked before anything is written. A file that holds anything but studies is left unchanged, and
reading a study changes nothing, neither in its file nor next to it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sqlite3
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileSymlinkLock

from ..support.messages import listed, shown
from ..support.reading import DATABASE, JOURNAL, check_file, parse_json, read_bytes

__all__ = ["quiet", "storage_errors", "storage_of", "storage_to_read"]

_ATTEMPTS = 8
_LOCKED_SECONDS = 60.0
"""Timeout for another worker's lock on an SQLite file."""
_LINE_BEGINS = b'{"op_code":'
_FORMS = "Give a file, an RDB URL such as sqlite:///study.db or postgresql://user@host/name, or journal:PATH."


def storage_of(url: str) -> Any:
    """Open a storage to search in; it is created if there is none.

    Args:
        url: an RDB URL (`sqlite:///study.db`, `postgresql://…`, `mysql://…`), or `journal:PATH` for a file that workers
            on one file system append to. A plain path is an SQLite file.

    Raises:
        ValueError: the storage cannot be reached, the URL is invalid, or the file holds something else.
    """
    journal = _journal_of(url)
    if journal is not None:
        return _journal_to_write(journal, url)
    with _connection_errors(url):
        file = _sqlite_of(url)
    if file is not None:
        with contextlib.suppress(FileNotFoundError):  # then it is created
            _check_is_ours(file.path)
    with _connection_errors(url), quiet():
        storage = _open_database(url, file)
        if file is not None:
            _lock_from_the_beginning(storage.engine)
            weakref.finalize(storage, storage.engine.dispose)
        return storage


def storage_to_read(url: str) -> Any:
    """Open a storage to read; for a file, a snapshot of its contents. Nothing is written to it.

    Args:
        url: as in `storage_of`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the storage cannot be reached, the URL is invalid, or there is no study.
    """
    journal = _journal_of(url)
    if journal is not None:
        lines, _ = _lines_of(journal)
        return _journal_storage(journal, lines)
    with _connection_errors(url):
        file = _sqlite_of(url)
    if file is not None:
        content = _in_memory(file.path)
        with _connection_errors(url), quiet():
            try:
                storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=_shared_connection(content))
            except BaseException:
                content.close()
                raise
        weakref.finalize(storage, content.close)  # Python 3.13 warns of a connection that is never closed
        return storage
    with _connection_errors(url), quiet():
        _check_has_tables(url)
        return optuna.storages.RDBStorage(url)


@contextlib.contextmanager
def storage_errors(study_name: str) -> Iterator[None]:
    """Convert errors of a storage during the search to an OSError that suggests a remedy."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        # Optuna's own message is generic; the database's message states the cause.
        chain = (error.__cause__, error.__context__, error)
        message = next((str(e).splitlines()[0] for e in chain if e is not None and str(e)), type(error).__name__)
        raise OSError(
            f"The storage of the study {study_name!r} fails: {_without_password(message)}. Is the disk full, or the "
            "database gone? Drafts judged before are stored; the same command continues from there."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's log messages and warnings."""
    before = optuna.logging.get_verbosity()
    # A discarded trial is not a failure to warn of; real failures are raised.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Heartbeats and GPSampler are "experimental" in optuna; the parts used here are tested.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextlib.contextmanager
def _connection_errors(url: str) -> Iterator[None]:
    try:
        yield
    except _NoStudyError:
        raise
    except Exception as error:  # from sqlalchemy, from the driver, or for a driver that is not installed
        reason = str(error).splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"The storage {_without_password(url)!r} cannot be reached: {_without_password(reason[:300])}. {_FORMS}"
        ) from error


class _NoStudyError(ValueError):
    """File or database that holds something other than studies."""

    def __init__(self, shown: str, why: str) -> None:
        super().__init__(f"There is no study in {shown}: {why}. It is left as it is. {_FORMS}")


def _without_password(text: str) -> str:
    import re

    return re.sub(r"://([^:@/\s]+):[^@/\s]+@", r"://\1:…@", text)


# ----------------------------------------------------------------------------------------------------------------------
# journals


def _journal_of(url: str) -> Path | None:
    """Return the path in the URL of a journal; `None` for other URLs."""
    if not url.startswith("journal:"):
        return None
    return Path(os.path.expanduser(url.removeprefix("journal:").removeprefix("//")))


def _journal_to_write(path: Path, url: str) -> Any:
    try:
        lock = JournalFileSymlinkLock(str(path))
        try:
            _, unfinished = _lines_of(path)
            if unfinished:
                _cut_unfinished_line(path, lock)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        with _journal_errors(path):
            return JournalStorage(JournalFileBackend(str(path), lock))
    except OSError as error:
        raise ValueError(f"The storage {url!r} cannot be opened: {error.strerror or error}.") from error


def _lines_of(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """Return the lines of a journal, and the unfinished last line that a full disk has left.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a journal.
    """
    content = read_bytes(path, JOURNAL)
    unfinished = content[content.rfind(b"\n") + 1 :]
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(io.BytesIO(content[: len(content) - len(unfinished)]), start=1):
        try:
            log = parse_json(line.decode("utf-8"))
        except ValueError as error:
            raise _NoStudyError(repr(str(path)), f"line {number} is not a line of a journal ({error})") from error
        # Every line that Optuna writes has these.
        if not (isinstance(log, dict) and type(log.get("op_code")) is int and isinstance(log.get("worker_id"), str)):
            raise _NoStudyError(repr(str(path)), f"line {number} is not a line of a journal, but {shown(log)}")
        lines.append(log)
    if unfinished and not (unfinished.startswith(_LINE_BEGINS) or (lines and _LINE_BEGINS.startswith(unfinished))):
        raise _NoStudyError(repr(str(path)), f"its end is not a line of a journal, but {shown(unfinished)}")
    return lines, unfinished


def _cut_unfinished_line(path: Path, lock: Any) -> None:
    """Remove an unfinished last line: once another line follows it, the journal is no longer readable."""
    with quiet():
        lock.acquire()
    try:
        lines, unfinished = _lines_of(path)  # now that no other worker is writing
        _journal_storage(path, lines)
        if unfinished:
            os.truncate(path, path.stat().st_size - len(unfinished))
    finally:
        lock.release()


class _ReadOnlyJournal(BaseJournalBackend):
    """Snapshot of the lines of a journal."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    def read_logs(self, log_number_from: int) -> Any:
        return iter(self.lines[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        raise io.UnsupportedOperation("This journal was opened to be read.")


def _journal_storage(path: Path, lines: list[dict[str, Any]]) -> Any:
    with _journal_errors(path):
        return JournalStorage(_ReadOnlyJournal(lines))


@contextlib.contextmanager
def _journal_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # Optuna assumes that it wrote every line itself
        raise _NoStudyError(
            repr(str(path)), f"its lines are not those of a journal ({type(error).__name__}: {shown(str(error))})"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# databases


class _SQLite(NamedTuple):
    """SQLite file, and options of its connections."""

    path: Path
    options: Mapping[str, Any]


def _sqlite_of(url: str) -> _SQLite | None:
    """Return the SQLite file of a path or URL; `None` for databases in memory or on a server."""
    from sqlalchemy.engine import URL, make_url

    # Not through a string: a `?` in a path would begin the options.
    parsed = make_url(url) if "://" in url else URL.create("sqlite", database=url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    dialect = parsed.get_dialect()()
    (_, options) = dialect.create_connect_args(parsed)
    if options.pop("uri", False):
        raise ValueError("a file of SQLite is named by its path alone, without `uri`")
    return _SQLite(Path(os.path.expanduser(parsed.database)).absolute(), options)


def _check_is_ours(path: Path) -> None:
    """Check that an SQLite file is empty or a storage of Optuna.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is something else.
    """
    if check_file(path, DATABASE):
        with _read_only(path):
            pass


def _in_memory(path: Path) -> sqlite3.Connection:
    """Return an in-memory copy of a storage of Optuna.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is something else.
    """
    with _read_only(path) as connection:
        content = sqlite3.connect(":memory:", check_same_thread=False)
        connection.backup(content)
        return content


@contextlib.contextmanager
def _read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a storage of Optuna that changes nothing, neither in its file nor next to it."""
    check_file(path, DATABASE)
    shown = repr(str(path))
    try:
        with tempfile.TemporaryDirectory(prefix="ssd_study_") as folder, _reader(path, Path(folder)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            # Not all of them: another worker may be creating the tables.
            if not any(
                name in tables and columns <= {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
                for name, columns in _TABLES.items()
            ):
                why = f"its tables are {listed(sorted(tables))}" if tables else "it has no tables"
                raise _NoStudyError(shown, why)
            yield connection
    except (sqlite3.Error, OSError, MemoryError) as error:
        raise _NoStudyError(shown, f"it cannot be read as a database of SQLite ({error})") from error


_TABLES = {"studies": {"study_id", "study_name"}, "version_info": {"schema_version", "library_version"}}
"""Tables that Optuna creates first, with columns that all of its versions have."""


def _reader(path: Path, folder: Path) -> contextlib.closing[sqlite3.Connection]:
    with path.open("rb") as file:
        header = file.read(20)
    if 2 not in header[18:20]:  # not in WAL mode, in which SQLite writes next to the file even to read
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=_LOCKED_SECONDS)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
            return contextlib.closing(connection)
        except sqlite3.Error:
            connection.close()
            if not os.path.exists(f"{path}-journal"):
                raise
            # A worker was killed while it wrote; its transaction has to be rolled back, which is done in a copy.
    for ending in ("", "-journal", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            check_file(f"{path}{ending}", DATABASE)
            shutil.copyfile(f"{path}{ending}", folder / f"study{ending}")
    return contextlib.closing(sqlite3.connect(folder / "study"))


def _shared_connection(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the options with which SQLAlchemy uses this one connection."""
    from sqlalchemy.pool import StaticPool

    return {"creator": lambda: connection, "poolclass": StaticPool}


def _connections_to_file(file: _SQLite) -> dict[str, Any]:
    """Return the options with which SQLAlchemy connects to this file."""
    from sqlalchemy.pool import QueuePool

    options = {"timeout": _LOCKED_SECONDS, "check_same_thread": False, **file.options}
    return {"creator": lambda: sqlite3.connect(file.path, **options), "poolclass": QueuePool}


def _check_has_tables(url: str) -> None:
    """Check that a database has Optuna's tables, which Optuna would otherwise create."""
    from sqlalchemy import create_engine, inspect

    engine = create_engine(url)
    try:
        if not inspect(engine).has_table("studies"):
            raise _NoStudyError(repr(_without_password(url)), "the database has no table of studies")
    finally:
        engine.dispose()


def _open_database(url: str, file: _SQLite | None) -> Any:
    """Open the storage, and create its tables if there are none. Another worker may create them at the same moment."""
    from sqlalchemy.exc import IntegrityError

    if file is not None:
        url = "sqlite://"
    engine = None if file is None else _connections_to_file(file)
    for attempt in range(_ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=engine, heartbeat_interval=30, grace_period=180)
        except Exception as error:
            made_meanwhile = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not made_meanwhile or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.1)
    raise AssertionError


def _lock_from_the_beginning(engine: Any) -> None:
    """Make SQLite take its lock at the beginning of each transaction.

    Optuna takes a trial from the queue by reading its state `FOR UPDATE` and then writing it. SQLite ignores this
    clause, so that two workers could take the same trial.
    """
    from sqlalchemy import event

    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # Python's module would begin its own transactions, too late

    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    engine.dispose()  # earlier connections
