"""torch's own threads, for code that is not torch's.

A second pool of threads on the same cores would compete with the first: both wait by spinning. torch's kernels run on
OpenMP, whose library is next to torch's and is found in this process; its entry for a team of threads, which compilers
call for every parallel loop, takes any function.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
from pathlib import Path

import torch

__all__ = ["ENTRIES", "openmp", "openmp_library"]

ENTRIES = ("GOMP_parallel", "omp_get_num_threads", "sched_yield")
"""Functions that this package calls or links to in it: GNU's names, which LLVM's library has as well."""

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.(so|dylib)")


@functools.cache
def openmp_library() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch runs on; `None` where no library has all `ENTRIES`."""
    # A name resolves to what torch is linked with, even if that was loaded before torch's own (`LD_PRELOAD`).
    for path in (None, *_candidates()):
        with contextlib.suppress(OSError, TypeError):  # Windows has no library without a name
            library = ctypes.CDLL(path)
            if all(hasattr(library, name) for name in ENTRIES):
                return library
    return None


def openmp() -> dict[str, int] | None:
    """Return the addresses of `ENTRIES` in that library; `None` where there is none."""
    library = openmp_library()
    return None if library is None else {name: _address(getattr(library, name)) for name in ENTRIES}


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _candidates() -> list[str]:
    """Return the OpenMP libraries that this process has loaded, torch's own first."""
    home = Path(torch.__file__).resolve().parent
    if sys.platform == "linux":
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        paths = {Path(line[line.index("/") :]) for line in lines if "/" in line}
    elif sys.platform == "darwin":
        paths = set((home / "lib").glob("lib*omp*.dylib"))
    else:
        return []
    found = [path for path in paths if _OPENMP.match(path.name)]
    folders = (home, home.with_name("torch.libs"))
    found.sort(key=lambda path: (not any(folder in path.parents for folder in folders), str(path)))
    return [str(path) for path in found]
