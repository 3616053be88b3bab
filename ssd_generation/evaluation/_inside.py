"""Process in which `sandbox.py` runs a program: it drops its permissions, runs the program, reports the outcome.

It implements mechanisms only; the policy comes from `sandbox.py`, on the standard input. It imports the standard
library only, and as little of it as possible: every program pays for that. `sandbox.py` imports it too, to query the
kernel, so it has to be importable without such a kernel.
"""

from __future__ import annotations

import builtins
import marshal
import os
import struct
import sys
import types

TYPE_CHECKING = False  # importing `typing` takes as long as Python's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["has_seccomp", "landlock_version", "main"]

Instruction = tuple[int, int, int, int]

# --- seccomp: calls that the kernel accepts from this process (linux/filter.h, linux/seccomp.h) --------------------
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE: Instruction = (_RETURN, 0, 0, 0x00050000 | 1)  # EPERM
_UNKNOWN: Instruction = (_RETURN, 0, 0, 0x00050000 | 38)  # ENOSYS
_KILL: Instruction = (_RETURN, 0, 0, 0x80000000)
_CALL, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
# From here on the numbers are the same on all architectures. No such call is needed; a program, or a C library that has
# a fallback, sees a kernel older than these calls. The calls of the x32 interface have even higher numbers.
_NEWER_CALLS = 424


def _check(kind: str, argument: int, value: Any) -> list[Instruction]:
    """Return instructions that refuse a call unless its argument is allowed; otherwise the next instructions follow.

    Both processors are little-endian. The kernel itself reads only the lower half of an argument that is an `int`.
    """
    lower, upper = _ARGUMENTS + 8 * argument, _ARGUMENTS + 8 * argument + 4
    if kind == "one of":
        jumps = [(_EQUAL, len(value) - i, 0, choice) for i, choice in enumerate(value)]
        return [(_LOAD, 0, 0, lower), *jumps, _REFUSE]
    if kind == "own process":
        return _check("one of", argument, [os.getpid()])
    if kind == "none of the bits":
        return [(_LOAD, 0, 0, lower), (_ANY_BIT, 0, 1, value), _REFUSE]
    if kind == "bit":
        return [(_LOAD, 0, 0, lower), (_ANY_BIT, 1, 0, value), _REFUSE]
    if kind == "null":
        return [(_LOAD, 0, 0, lower), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, upper), (_EQUAL, 1, 0, 0), _REFUSE]
    raise ValueError(f"There is no check {kind!r}.")


def build_filter(architecture: int, calls: dict[int, list[tuple[str, int, Any]]]) -> list[Instruction]:
    """Return the program that the kernel runs before each call: a listed call passes if all its checks hold, no other.

    Args:
        architecture: AUDIT_ARCH_… of the calls; a call of another one, with other numbers, ends the process.
        calls: number of each allowed call, with its checks: kind, argument, value.
    """
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), _KILL, (_LOAD, 0, 0, _CALL)]
    for number, checks in calls.items():
        steps = [step for check in checks for step in _check(*check)]
        program += [(_EQUAL, 0, len(steps) + 1, number), *steps, _ALLOW]
    return [*program, (_AT_LEAST, 0, 1, _NEWER_CALLS), _UNKNOWN, _REFUSE]


def _library() -> Any:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def _call(function: Any, *arguments: int) -> int:
    """Call a function of the C library that returns −1 on failure.

    Raises:
        OSError: the function failed.
    """
    import ctypes

    result = int(function(*map(ctypes.c_ulong, arguments)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, value: int, second: int = 0) -> None:
    _call(_library().prctl, option, value, second, 0, 0)


def has_seccomp() -> bool:
    """Tell whether the kernel can filter calls. Linux only."""
    import ctypes

    action = ctypes.c_uint32(_REFUSE[3] & 0xFFFF0000)
    seccomp, get_action_avail = {"x86_64": 317, "aarch64": 277}[os.uname().machine], 2
    try:
        _call(_library().syscall, seccomp, get_action_avail, 0, ctypes.addressof(action))
    except OSError:
        return False
    return True


def _filter_calls(architecture: int, calls: dict[int, list[tuple[str, int, Any]]]) -> None:
    import ctypes

    steps = [struct.pack("=HBBI", *step) for step in build_filter(architecture, calls)]
    code = ctypes.create_string_buffer(b"".join(steps), 8 * len(steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    set_seccomp, mode_filter = 22, 2
    _prctl(set_seccomp, mode_filter, ctypes.addressof(program))


# --- Landlock: accessible files (linux/landlock.h) -----------------------------------------------------------------
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3


def landlock_version() -> int:
    """Return the kernel's version of Landlock, or 0. Linux only."""
    ask_version = 1
    try:
        return _call(_library().syscall, _CREATE_RULESET, 0, 0, ask_version)
    except OSError:
        return 0


def _restrict_files(version: int, files: int, network: int, scope: int, readable: list[str]) -> None:
    import ctypes

    if not (files or network or scope):
        return
    # An older kernel knows the first fields only.
    size = 8 if version < 4 else 16 if version < 6 else 24
    rights = ctypes.create_string_buffer(struct.pack("=QQQ", files, network, scope)[:size], size)
    library = _library()
    rules = _call(library.syscall, _CREATE_RULESET, ctypes.addressof(rights), size, 0)
    for path in readable:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # this system has no such folder
            continue
        allowed = files & (_READ_FILE | _READ_FOLDER if os.path.isdir(path) else _READ_FILE)
        if allowed:
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, opened))
            path_beneath = 1
            _call(library.syscall, _ADD_RULE, rules, path_beneath, ctypes.addressof(rule), 0)
        os.close(opened)
    _call(library.syscall, _RESTRICT_SELF, rules, 0)
    os.close(rules)


# --- Without the kernel: Python's audit hook -----------------------------------------------------------------------
# Events, or prefixes of their names, by the property they would break.
_EVENTS = {
    "processes": ("os.fork", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"),
    "programs": ("os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"),
    "network": ("socket.",),
    "writing": (
        *("os.chflags", "os.chmod", "os.chown", "os.link", "os.lockf", "os.mkdir", "os.remove", "os.rename"),
        *("os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime", "shutil."),
    ),
    "other processes": ("os.kill", "signal.pthread_kill", "resource.prlimit", "fcntl."),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _audit(properties: list[str], readable: list[str]) -> None:
    """Refuse in Python what the kernel does not refuse."""
    # Foreign functions bypass every hook.
    refused = ("ctypes.", *(name for held in properties for name in _EVENTS.get(held, ())))
    no_writing, no_reading = "writing" in properties, "reading" in properties
    roots = tuple(os.path.join(os.path.realpath(path), "") for path in readable)
    real_path, decode, join, own = os.path.realpath, os.fsdecode, os.path.join, os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(refused) and (event != "os.kill" or arguments[0] != own):
            raise PermissionError(1, f"{event} is not allowed here")
        if event not in ("open", "os.listdir", "os.scandir"):
            return
        path = arguments[0]
        if event == "open" and no_writing and arguments[2] & _WRITING:
            raise PermissionError(1, "writing is not allowed here", path)
        if no_reading and not isinstance(path, int):
            real = real_path("." if path is None else decode(path))
            if not join(real, "").startswith(roots):
                raise PermissionError(1, "reading is not allowed here", path)

    sys.addaudithook(hook)


# --- The process ---------------------------------------------------------------------------------------------------


def _set_limits(limits: dict[str, int]) -> None:
    import resource

    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(which)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):
            if sys.platform == "linux":
                raise


def _protect(settings: dict[str, Any]) -> None:
    """Drop permissions permanently, as the settings specify.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    readable = [*sys.path, *settings["readable"]]
    _set_limits(settings["limits"])
    if sys.platform == "linux":
        set_parent_death_signal, set_dumpable, set_no_new_privileges, kill = 1, 4, 38, 9
        _prctl(set_parent_death_signal, kill)
        if os.getppid() != settings["parent"]:  # the parent died before that
            os._exit(1)
        _prctl(set_no_new_privileges, 1)
        _prctl(set_dumpable, 0)  # a core dump would go to the system's collector, whatever its size limit
        if settings["drop privileges"]:
            import ctypes

            version_3 = 0x20080522
            header = ctypes.create_string_buffer(struct.pack("=Ii", version_3, 0))
            nothing = ctypes.create_string_buffer(24)
            _call(_library().capset, ctypes.addressof(header), ctypes.addressof(nothing))
        if settings["landlock"]:
            _restrict_files(readable=readable, **settings["landlock"])
        if settings["seccomp"]:
            _filter_calls(**settings["seccomp"])
    if settings["hook"]:
        _audit(settings["hook"], readable)


def _read_everything() -> bytes:
    parts = []
    while part := os.read(0, 1 << 20):  # not `sys.stdin`, whose buffer would retain it
        parts.append(part)
    return b"".join(parts)


def _named(error: BaseException) -> str:
    """Return an exception as one line, with the line number of the program that raised it."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:  # raised by its __str__
        text = ""
    name = type(error).__name__ + (f": {text}" if text else "")
    return name[:400] + (f" (line {line})" if line else "")


def _run(source: str, say: Callable[[str, str], None], out_of_memory: Callable[[], None]) -> None:
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
    except MemoryError:  # Python's parser also raises it for code nested deeper than its stack
        out_of_memory()
        return
    except (SyntaxError, ValueError) as error:  # ValueError: invalid or null characters
        say("not Python", _named(error))
        return
    except BaseException as error:  # RecursionError, or SystemError, where memory ran out unnoticed
        say("stopped", f"while it was compiled: {_named(error)}")
        return
    # Code that looks up its own module, as a dataclass does, finds the program instead of this one.
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except MemoryError:
        out_of_memory()
    except BaseException as error:
        say("failed", _named(error))
    else:
        say("passed", "")


def main() -> None:
    """Read the settings and the program, run it, and write the verdict to the pipe that the settings name."""
    # The program may replace these functions.
    write, leave = os.write, os._exit
    settings = marshal.loads(_read_everything())
    source, token, channel = settings["source"], settings["token"], settings["channel"]
    # Otherwise the program could read those bytes again; it needs no input.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    too_much = f"{token} stopped\nMemoryError: it may have {settings['limits'].get('AS', 0) >> 20} MiB".encode()

    def say(status: str, detail: str) -> None:
        write(channel, f"{token} {status}\n{detail}".encode("utf-8", "backslashreplace"))

    def out_of_memory() -> None:
        write(channel, too_much)

    try:
        _protect(settings)
    except BaseException as error:
        say("unprotected", _named(error))
        leave(1)
    write(channel, f"{token} ready\n".encode())
    del settings
    try:
        _run(source, say, out_of_memory)
    finally:
        leave(0)
