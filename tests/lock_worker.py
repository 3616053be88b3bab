"""Process that takes and releases a folder's lock as fast as it can."""

from __future__ import annotations

import os
import time
from pathlib import Path

from forked import Saying
from ssd_generation.harness.results import RunFolder


def enter_and_leave(saying: Saying, base: Path, seconds: float, way: str) -> tuple[int, int]:
    """Return how often the lock was taken, and how often another process held it at the same time."""
    saying.say("ready")
    saying.wait()
    entries = violations = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with RunFolder(base / "run", {"a": 1}) as folder:
                entries += 1
                try:
                    os.close(os.open(base / "inside", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    violations += 1
                    continue
                if way == "rows" and entries % 5 == 0:
                    folder.append({"n": entries})
                if way == "taken away":
                    folder.done_with()
                time.sleep(0.0005)
                os.unlink(base / "inside")
        except ValueError as error:
            if "Another run is in progress" not in str(error):
                raise
    return entries, violations
