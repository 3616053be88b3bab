"""What a run's times depend on: the machine, the versions, what else was running."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..support.reading import RESULT, read_json
from .comparison import describe_environment
from .run_folder import ENVIRONMENT, RunFolder
from .stored import check_sessions

__all__ = [
    "load_average",
    "own_settings",
    "run_environment",
    "sessions_of",
    "start_session",
    "take_over_sessions",
    "where_measured",
]

_OF_SESSION = ("session", "started", "load_average")
# Of a generation config: what does not choose tokens, or is said with each call.
_NOT_ABOUT_TOKENS = {
    *("transformers_version", "use_cache", "cache_implementation", "return_dict_in_generate", "self_speculative"),
    *("max_length", "max_new_tokens", "do_sample"),
}
_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}


def start_session(folder: RunFolder, environment: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> int:
    """Note in environment.json that a session begins, and on what machine.

    Args:
        folder: of the run.
        environment: of the machine.
        rows: of the sessions before.

    Returns:
        The number that its rows go by.
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
    """The sessions that environment.json of a run tells of, the earliest first; none where there is no such file.

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
    """Note the sessions of a part of a run as its own."""
    known = sessions_of(folder.path)
    folder.write_json(ENVIRONMENT, {"sessions": known + [s for s in sessions_of(part) if s not in known]})


def where_measured(sessions: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The machines and versions of the sessions that rows come from, each once, the last first.

    A session that only went on with the summary has measured nothing. (Sessions without a number were written by
    earlier versions: they count.)
    """
    measured = {row["session"] for row in rows if "session" in row}
    found: list[dict[str, Any]] = []
    for session in reversed(sessions):
        environment = {key: value for key, value in session.items() if key not in _OF_SESSION}
        if session.get("session") in {None, *measured} and environment not in found:
            found.append(environment)
    return found


def run_environment(model: Any) -> dict[str, Any]:
    """What the times depend on: `describe_environment`, the number of CPUs, the system, the commit of this checkout."""
    return {
        **describe_environment(model),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(Path(__file__).resolve().parents[2]),
    }


def load_average() -> float | None:
    """Processes that wanted to run during the last minute, on average; `None` where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def own_settings(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's generation config adds to the way in which tokens are chosen, such as a repetition penalty.

    It acts wherever a call says nothing else, and differs between copies of a model: GGUF files have none of it.

    Args:
        model: the target model.
        options: what the calls say, `do_sample` among it.
    """
    silent = _NOT_ABOUT_TOKENS | set(options) | (set() if options.get("do_sample") else _OF_SAMPLING)
    return {
        key: value
        for key, value in sorted(model.generation_config.to_diff_dict().items())
        if value is not None and key not in silent and not key.startswith(("_", "output_"))
        if not key.endswith("token_id")
    }


def _commit(checkout: Path) -> str | None:
    """The commit of a checkout, with `-dirty` where tracked files differ from it; `None` where there is none."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
