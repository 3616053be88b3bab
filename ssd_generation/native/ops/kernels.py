"""Kernels JIT-compiled for this processor, and the records that they are called with.

Threads of a team call a kernel with its record and a table of addresses (`builder.Task`); one call runs a whole list of
kernels (`codegen/teams.py`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import platform
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..codegen.compiler import address_of
from ..codegen.teams import RECORD, flags, team_module

__all__ = ["NAMES", "Record", "bits_of", "digest_of_kernels", "flags", "kernel", "record", "run_list", "run_once"]

NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_SHARED = (
    "cache_table.py",
    "codegen/builder.py",
    "ops/products_code.py",
    "ops/tiles_code.py",
    "ops/linear_code.py",
    "ops/int4_code.py",
    "ops/int8_code.py",
)
"""Files that the code of all kernels is built from."""

_WITH_ROOM = (("experts", "int4"), ("experts", "int8"))
"""Kernels of experts whose loops leave registers free."""

Record = ctypes.c_int64 * RECORD


@functools.cache
def _source(*names: str) -> str:
    """Return what the code of a module depends on: a digest of the files that build it."""
    folder = Path(__file__).parents[1]
    files = ((folder / name).read_bytes() for name in names)
    return hashlib.sha256(b"".join(files)).hexdigest()


@functools.cache
def digest_of_kernels() -> str:
    """Return a digest of the code of all kernels, for results that depend on their bits."""
    folder = Path(__file__).parents[1]
    return _source(*sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")))


@functools.cache
def kernel(kind: str, *parts: Any) -> int:
    """Return the address of a kernel.

    Args:
        kind: name of the module that builds the text, without `_code`: `"linear"`, `"int4"`, `"quantise"` and so on.
        parts: the arguments of the function that returns the module's text: `linear_module`, `int4_module` and so on.

    Raises:
        RuntimeError: no code can be compiled here.
    """

    def text() -> str:
        module = importlib.import_module(f".{kind}_code", __package__)
        return str(getattr(module, f"{kind}_module")(*parts))

    fills_registers = kind in ("linear", "experts") and (kind, *parts[:1]) not in _WITH_ROOM
    name = "-".join((kind, *map(str, parts)))
    described = f"{name} {_source(*_SHARED, f'ops/{kind}_code.py')}"
    return address_of(name, described, text, unrolls=not fills_registers)


def record(address: int, how: int, *fields: int) -> Any:
    """Build the record of a kernel, whose own fields begin at 2; `how` is the value of `flags`."""
    return Record(address, how, *fields)


def bits_of(number: float) -> int:
    """Return a float32 number in the form in which a record holds it."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


@functools.cache
def _team(function: str, *arguments: Any) -> Callable[..., None]:
    pauses = platform.machine().lower() in ("x86_64", "amd64")
    address = address_of("team", f"team {_source('codegen/teams.py')}", lambda: team_module(pauses), function)
    # A prototype of this kind releases Python's lock while the function runs.
    prototype: Callable[..., Callable[..., None]] = ctypes.CFUNCTYPE(None, *arguments)
    return prototype(address)


def run_list() -> Callable[..., None]:
    """Return `(address of the records, count, address of the table, threads)`, which runs kernels in order."""
    return _team("run", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)


def run_once() -> Callable[..., None]:
    """Return `(address of the record, rows, four operands' addresses, threads)`, which runs a single kernel."""
    return _team("once", ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int32)
