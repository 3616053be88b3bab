"""Memory that this process may still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes"]


def available_bytes() -> int | None:
    """Return the bytes that can be taken without swapping, page cache given up; `None` where that is unknown.

    The minimum of what the system has available and what this process's control groups (of either version) leave it.
    """
    found = [value for value in (_of_the_system(), *_of_the_groups()) if value is not None]
    return min(found) if found else None


def _of_the_system() -> int | None:
    fields = _fields(Path("/proc/meminfo"))
    if "MemAvailable" in fields:
        return fields["MemAvailable"] * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows; macOS has no such name
        return None


def _of_the_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield what each control group with a limit leaves, from this process's own up to the topmost."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root if controllers == "" else root / "memory"
        limit, used, cached = (
            ("memory.max", "memory.current", "inactive_file")
            if controllers == ""
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        folder = top / path.lstrip("/")
        while True:
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None:
                stat = _fields(folder / "memory.stat")
                active = stat.get(cached.replace("inactive", "active"), 0)
                yield max(most - now + stat.get(cached, 0) + active, 0)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of the form `name[:] number …`."""
    found: dict[str, int] = {}
    try:
        for line in path.read_text().splitlines():
            name, number, *_ = line.split()
            found[name.rstrip(":")] = int(number)
    except (OSError, ValueError):
        pass
    return found
