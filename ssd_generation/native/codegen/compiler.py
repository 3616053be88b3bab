"""Makes functions of LLVM's language, once per machine: what was compiled is stored on the disk.

Stored code is executed. So it is read as `support.trusted` says, from files that only this user or root can have
written. The digest in front of it covers the key as well: code that lies under the name of other code is refused, like
code that is damaged.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
from collections.abc import Callable
from typing import Any

from ...support.display import path_shown
from ...support.files import default_cache_dir
from ...support.forks import ForkSafeRLock
from ...support.messages import clipped
from ...support.reading import CODE, read_bytes
from ...support.trusted import UntrustedFolderError, say_not_stored, say_once, store
from .pool import openmp

__all__ = ["address_of", "adds_bfloat16", "integer_products", "registers", "why_not"]

logger = logging.getLogger(__name__)

_lock = ForkSafeRLock()
_engines: dict[str, Any] = {}
"""What holds compiled code in memory, by key."""

_replaced: list[Any] = []
"""Engines that lacked a function. Addresses in their code may be in use."""

_X86 = ("x86_64", "amd64")

_FORMAT = 2
"""Changes with the form of a stored file, and so its name: files of another form are never read."""

_FOLDER = "code"
"""The folder of the cache in which code is stored."""

_DIGEST = hashlib.sha256().digest_size


@functools.cache
def why_not() -> str | None:
    """Why no code can be made here; `None`: it can."""
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
        return f"there is none for processors of the kind {platform.machine()}"
    if openmp() is None:
        return "torch's threads are not those of an OpenMP library that takes other code"
    return None


def registers() -> int:
    """Vector registers of the processor, counted by 16 float32 numbers: AVX2's and NEON's are 8, AVX-512's 32."""
    return 32 if "+avx512f" in _features() else 8


def adds_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 numbers and adds them up by twos, 32 at a time."""
    return "+avx512bf16" in _features()


def integer_products() -> str:
    """Whose instructions add up products of 8-bit integers: `"avx512"` (VNNI), `"avx2"`, or `""`: there are none."""
    if "+avx512vnni" in _features():
        return "avx512"
    return "avx2" if platform.machine().lower() in _X86 else ""


def address_of(name: str, described: str, text: Callable[[], str], function: str = "run", unrolls: bool = True) -> int:
    """The address of a function of a module.

    Args:
        name: of the module, part of its file's name.
        described: everything that its text depends on.
        text: the module, in LLVM's language; asked for where it has not been compiled here.
        function: its name.
        unrolls: whether LLVM may make loops hold more than they do: not where they hold as much as registers do.

    Raises:
        RuntimeError: LLVM cannot compile it, it has no such function, or no code can be made here.
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
    """Object code, which is stored for the next process."""
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
    """Return what was stored; `None` where there is nothing, or not what was written, or nothing to be trusted."""
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
        say_once(logger, "Compiling again", f"{path_shown(path)} holds something else than the code stored there.")
        return None
    return code


def _load(code: bytes) -> Any:
    import llvmlite.binding as llvm

    # An engine owns its target machine, so each has one of its own.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _new_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine
