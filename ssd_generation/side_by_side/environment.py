"""What a run's times depend on: the machine, the versions, what else was running."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..comparison import describe_environment
from ..run_folder import ENVIRONMENT, RunFolder
from .calls import load_average

__all__ = ["run_environment", "start_session"]


def start_session(folder: RunFolder, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Note in environment.json that a session begins, and on what machine."""
    session = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": load_average(),
        **environment,
    }
    before = folder.read_json(ENVIRONMENT)
    sessions = before["sessions"] if isinstance(before, dict) and isinstance(before.get("sessions"), list) else []
    folder.write_json(ENVIRONMENT, {"sessions": [*sessions, session]})
    return session


def run_environment(model: Any) -> dict[str, Any]:
    """What the times depend on: `describe_environment`, the number of CPUs, the system, the commit of this checkout."""
    return {
        **describe_environment(model),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(Path(__file__).resolve().parents[2]),
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
