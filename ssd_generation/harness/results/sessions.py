"""Sessions of a run, in environment.json: when each began, and on what machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...support.reading import RESULT, read_json
from .environment import load_average
from .run_folder import ENVIRONMENT, RunFolder
from .stored import check_sessions

__all__ = ["sessions_of", "start_session", "take_over_sessions", "where_measured"]

_OF_SESSION = ("session", "started", "load_average")


def start_session(folder: RunFolder, environment: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> int:
    """Record in environment.json that a session begins, and on what machine.

    Args:
        folder: folder of the run.
        environment: environment of the machine.
        rows: rows of earlier sessions.

    Returns:
        The number of the session, as in its rows.
    """
    number = max((row.get("session", 0) for row in rows), default=0) + 1
    session = {
        "session": number,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": load_average(),
        **environment,
    }
    folder.write_json(ENVIRONMENT, {"sessions": [*sessions_of(folder.path), session]})
    return number


def sessions_of(folder: Path) -> list[dict[str, Any]]:
    """Read the sessions from environment.json of a run, the earliest first; none where there is no such file.

    Raises:
        ValueError: the file is not what a run has written.
    """
    try:
        document = read_json(folder / ENVIRONMENT, RESULT)
    except FileNotFoundError:
        return []
    check_sessions(document, folder / ENVIRONMENT)
    sessions: list[dict[str, Any]] = document["sessions"]
    return sessions


def take_over_sessions(folder: RunFolder, part: Path) -> None:
    """Record the sessions of a part of a run as the run's own."""
    known = sessions_of(folder.path)
    folder.write_json(ENVIRONMENT, {"sessions": known + [s for s in sessions_of(part) if s not in known]})


def where_measured(sessions: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the machines and versions of the sessions that rows come from, each once, the last first.

    A session that only rewrote the summary has measured nothing. (Sessions without a number were written by earlier
    versions: they are included.)
    """
    measured = {row["session"] for row in rows if "session" in row}
    found: list[dict[str, Any]] = []
    for session in reversed(sessions):
        environment = {key: value for key, value in session.items() if key not in _OF_SESSION}
        if session.get("session") in {None, *measured} and environment not in found:
            found.append(environment)
    return found
