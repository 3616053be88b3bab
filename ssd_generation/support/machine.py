"""Name and vendor of this machine's processor."""

from __future__ import annotations

import functools
import platform

__all__ = ["cpu_name", "is_intel"]


@functools.cache
def _described() -> dict[str, str]:
    """Return Linux's description of the first processor; nothing elsewhere."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if value.strip():
                    found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return found


def cpu_name() -> str:
    """Return the system's name for the processor."""
    found = _described()
    named = (found.get(key) for key in ("model name", "Model", "Hardware"))
    return next(filter(None, named), None) or platform.processor() or platform.machine()


def is_intel() -> bool:
    """Tell whether the processor is Intel's; MKL has other, slower paths for other vendors' processors."""
    return "GenuineIntel" in (_described().get("vendor_id") or platform.processor())
