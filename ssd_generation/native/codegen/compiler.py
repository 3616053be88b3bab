"""Compilation of functions in LLVM IR, once per machine: compiled code is stored on the disk.

Stored code is executed. So it is read as defined in `support.trusted`, from files that only this user or root can have
written. The digest in front of it covers the key as well: code stored under the name of other code is refused, like
code that is damaged.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
from collections.abc import Callable
from typing import Any

from ...support.display import path_shown
from ...support.files import default_cache_dir
from ...support.forks import ForkSafeRLock
from ...support.machine import is_intel
from ...support.messages import clipped
from ...support.reading import CODE, read_bytes
from ...support.trusted import UntrustedFolderError, say_not_stored, say_once, store
from .pool import openmp

__all__ = ["AMX", "address_of", "bfloat16_sums", "integer_products", "may_use_tiles", "registers", "why_not"]

logger = logging.getLogger(__name__)

_lock = ForkSafeRLock()
_engines: dict[str, Any] = {}
"""Engines that hold compiled code in memory, by key."""

_replaced: list[Any] = []
"""Engines that lacked a function, retained since addresses in their code may be in use."""

AMX = "SSD_GENERATION_AMX"
"""Environment variable: with `0` AMX is not used."""

_X86 = ("x86_64", "amd64")

_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18
"""Linux' system call that permits a state of the processor, and the number of AMX's."""

_FORMAT = 2
"""Version of the form of a stored file, part of its name: files of another form are never read."""

_FOLDER = "code"
"""Subfolder of the cache in which code is stored."""

_DIGEST = hashlib.sha256().digest_size


@functools.cache
def why_not() -> str | None:
    """Return why no code can be compiled here; `None` where it can."""
    try:
        import llvmlite.binding as llvm
    except Exception as error:  # whatever a broken installation raises
        missing = isinstance(error, ModuleNotFoundError)
        return (
            "llvmlite is not installed (extra `fast`)" if missing else f"llvmlite cannot be imported ({clipped(error)})"
        )
    if platform.machine().lower() in _X86:
        features = llvm.get_host_cpu_features()
        if not (features.get("avx2") and features.get("fma")):
            return "the processor has no AVX2"
    elif platform.machine().lower() not in ("aarch64", "arm64"):
        return f"there are none for processors of the kind {platform.machine()}"
    if openmp() is None:
        return "torch's OpenMP library cannot run other code on its threads"
    return None


def registers() -> int:
    """Return the number of vector registers, in units of 16 float32 numbers: 8 for AVX2 and NEON, 32 for AVX-512."""
    return 32 if "+avx512f" in _features() else 8


def bfloat16_sums() -> str:
    """Return how products of bfloat16 numbers are added.

    By AMX (`"tiles"`, in an order of its own); by AVX-512's instruction for pairs of them (`"dots"`); or by two
    multiply-adds (`"pairs"`), which give the same bits as that: Intel's processors have it at half their rate.
    """
    if os.environ.get(AMX) != "0" and may_use_tiles():
        return "tiles"
    return "dots" if "+avx512bf16" in _features() and not is_intel() else "pairs"


@functools.cache
def may_use_tiles() -> bool:
    """Tell whether the processor has AMX, and ask Linux for the permission to use it, which each process needs."""
    features = _features().split(",")
    if not {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(features) or platform.system() != "Linux":
        return False
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return int(libc.syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA)) == 0
    except (OSError, AttributeError):
        return False


def integer_products() -> str:
    """Return which instructions sum products of 8-bit integers: `"avx512"` (VNNI), `"avx2"`, or `""` for none."""
    if "+avx512vnni" in _features():
        return "avx512"
    return "avx2" if platform.machine().lower() in _X86 else ""


def address_of(name: str, described: str, text: Callable[[], str], function: str = "run", unrolls: bool = True) -> int:
    """Return the address of a function of a module.

    Args:
        name: name of the module, part of its file's name.
        described: everything that its text depends on.
        text: returns the module in LLVM IR; called where it has not been compiled here.
        function: name of the function.
        unrolls: whether LLVM may unroll loops further: not where a loop body already fills the registers.

    Raises:
        RuntimeError: LLVM cannot compile it, it has no such function, or no code can be compiled here.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    with _lock:
        machine = _machine()
        parts = (_FORMAT, described, machine.triple, _cpu(), _features(), *_versions())
        key = f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"
        if key not in _engines:
            code = _read(key)
            _engines[key] = _load(_compile(key, text(), machine, unrolls) if code is None else code)
        address = int(_engines[key].get_function_address(function))
        if not address:
            say_once(logger, "Compiling again", f"The stored code of {name} has no function {function!r}.")
            _replaced.append(_engines[key])
            _engines[key] = _load(_compile(key, text(), machine, unrolls))
            address = int(_engines[key].get_function_address(function))
            if not address:
                raise RuntimeError(f"the code of {name} has no function {function!r}")
        return address


@functools.cache
def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for entry, address in (openmp() or {}).items():
        llvm.add_symbol(entry, address)
    return _new_machine()


def _new_machine() -> Any:
    import llvmlite.binding as llvm

    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=_cpu(), features=_features(), opt=3, jit=True)


@functools.cache
def _cpu() -> str:
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())


@functools.cache
def _features() -> str:
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_features().flatten())


def _versions() -> tuple[str, ...]:
    import llvmlite
    import llvmlite.binding as llvm

    return llvmlite.__version__, repr(llvm.llvm_version_info)


def _compile(key: str, text: str, machine: Any, unrolls: bool) -> bytes:
    """Compile a module to object code, and store that for the next process."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = unrolls
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    try:
        cache = default_cache_dir()
        store(cache / _FOLDER / f"{key}.o", _digest(key, code) + code, cache)
    except (OSError, ValueError) as error:
        say_not_stored(logger, error)
    return code


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + code).digest()


def _read(key: str) -> bytes | None:
    """Return stored code; `None` where there is none, or it is not what was written, or not to be trusted."""
    try:
        cache = default_cache_dir()
    except ValueError as error:
        say_not_stored(logger, error)
        return None
    path = cache / _FOLDER / f"{key}.o"
    try:
        content = read_bytes(path, CODE, within=cache)
    except FileNotFoundError:
        return None
    except UntrustedFolderError as error:
        say_not_stored(logger, error)
        return None
    except ValueError as error:
        say_once(logger, "Compiling again", error)
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    if not code or digest != _digest(key, code):
        say_once(logger, "Compiling again", f"{path_shown(path)} holds something other than the code stored there.")
        return None
    return code


def _load(code: bytes) -> Any:
    import llvmlite.binding as llvm

    # An engine owns its target machine, so each one needs a new one.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _new_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine
