"""Sandbox for code that a language model wrote: a process with almost no permissions.

A program (for HumanEval: prompt, completion, tests and the call of the check) runs in its own Python process, which has
the standard library only. Before the program begins, that process permanently drops all permissions that a program with
tests does not need. On Linux (x86-64 or ARM64) the kernel enforces this:

    time              the parent kills its session at the limit; processor time is limited too; it dies with its parent
    memory            a limit on its address space, and no shared memory
    threads           counted by the parent every 20 ms
    processes         none but its own: seccomp refuses fork, vfork, and every clone but a thread
    programs          none: seccomp refuses execve; Landlock grants no file to be executed
    writing           nothing anywhere: seccomp refuses to open for writing, and every call that makes, removes, renames
                      or changes files; Landlock grants none of it; a file could not grow beyond 0 bytes either
    reading           Landlock: nothing but the standard library, system libraries and time zones
    network           seccomp refuses every kind of socket, Unix sockets too
    other processes   seccomp refuses signals to and debugging of others; Landlock does from its version 6 on
    environment       empty but for the language, the time zone and library paths; nothing of /proc can be read
    output            counted by the parent, and not stored
    privileges        root's are dropped, none can be gained

System calls are filtered by an allowlist, not by a denylist. A denylist has a hole for each forgotten call and for each
that a later kernel adds (io_uring was one); a gap in an allowlist is a program that fails with "Operation not
permitted", and the tests check for that. The list is short because nothing is written: some ninety calls. Landlock is
needed too because the filter sees numbers only, not paths.

Not covered:

- Bugs in the kernel, and side channels such as timing, caches or the load of the machine.
- Processor time and memory up to the limits: run no more programs at once than the machine can take.
- Whether a file exists, its size and its dates, and the target of a link: Landlock does not restrict these queries.
- The standard library, and what is installed inside its folder, can be read.
- The verdict. It is written by the process that the program runs in, with a random secret for each run, after the
  program has run to its end: printing, `sys.exit(0)` or `os._exit(0)` do not pass. But a program that searches the
  stack frames above its own finds the secret, and one whose results compare equal to everything needs no secret. The
  same is true of HumanEval's own harness: it measures models, not adversaries.
- An empty folder remains when the parent is killed.
- Programs that need what is refused: writing files (`os.devnull` too), sockets (`asyncio` makes one), subprocesses.

Elsewhere (macOS, other processors, Linux before 5.13 or with these facilities off) nothing runs unless the caller
allows it with `allow_weaker`: then the kernel enforces resource limits only, and Python's audit hook refuses the rest.
This stops accidents; a malicious program can bypass it. On Windows nothing runs.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import marshal
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from . import _inside

__all__ = ["DEFAULT_LIMITS", "Limits", "Outcome", "Status", "protections", "run_program", "run_programs"]

Status = Literal["passed", "failed", "timed out", "not Python", "stopped"]

# Enough for the interpreter to start.
LEAST_MEMORY = 64 << 20
# Seconds between two checks of the process: while it may write something, and once it has closed its pipes.
LOOK_EVERY, WAIT_EVERY = 0.02, 0.001
# Maximum bytes of the verdict; the process itself writes fewer than 1000.
MOST_VERDICT = 8192


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program.

    Attributes:
        seconds: wall-clock time, including some 0.05 to start Python. Processor time is limited to one more.
        memory_bytes: address space, including the interpreter (some 30 MiB) and 8 MiB for the stack of each thread.
            At least 64 MiB.
        output_bytes: bytes printed, to both streams together.
        threads: threads at the same time, including the main one.

    Raises:
        ValueError: a value that is not allowed.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    threads: int = 64

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be positive and finite, but got {self.seconds!r}.")
        for name, least in (("memory_bytes", LEAST_MEMORY), ("output_bytes", 0), ("threads", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
                raise ValueError(f"{name} must be a whole number of at least {least}, but got {value!r}.")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        status: `passed`, it ran to its end; `failed`, it raised an exception or exited early; `timed out`;
            `not Python`, it cannot be compiled; `stopped`, by a limit (of memory or depth, also during compilation)
            or a signal.
        detail: the error or the reason, in one line of at most 300 characters; empty when passed.
        seconds: wall-clock time, the start of Python included.
    """

    status: Status
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Tell whether the program ran to its end."""
        return self.status == "passed"


# --- What is allowed -----------------------------------------------------------------------------------------------


class _Kernel(NamedTuple):
    seccomp: bool
    landlock: int  # its version; 0: none


@functools.cache
def _kernel() -> _Kernel:
    """Return the sandboxing features of this machine's kernel."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return _Kernel(seccomp=False, landlock=0)
    known = os.uname().machine in _ARCHITECTURES
    return _Kernel(seccomp=known and _inside.has_seccomp(), landlock=_inside.landlock_version())


# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64, and the column of their call numbers below.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_O_TMPFILE = 0o20000000  # without the bit for "folder" that Python's constant has
_OPENS_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | _O_TMPFILE
# Flags of C libraries: VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED.
_CLONES_A_THREAD, _CLONE_THREAD = 0x7D0F00, 0x10000

# Calls with their numbers on the two processors (None: it has no such call) and checks of (kind, argument, value).
_CALLS: dict[str, tuple[int | None, int | None, list[tuple[str, int, Any]]]] = {
    # Open files: nothing but three pipes and an empty input.
    "read": (0, 63, []),
    "readv": (19, 65, []),
    "pread64": (17, 67, []),
    "write": (1, 64, []),
    "writev": (20, 66, []),
    "close": (3, 57, []),
    "lseek": (8, 62, []),
    "dup": (32, 23, []),
    "dup2": (33, None, []),
    "dup3": (292, 24, []),
    "pipe": (22, None, []),
    "pipe2": (293, 59, []),
    "poll": (7, None, []),
    "ppoll": (271, 73, []),
    "select": (23, None, []),
    "pselect6": (270, 72, []),
    "epoll_create": (213, None, []),
    "epoll_create1": (291, 20, []),
    "epoll_ctl": (233, 21, []),
    "epoll_wait": (232, None, []),
    "epoll_pwait": (281, 22, []),
    "eventfd2": (290, 19, []),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not F_SETOWN: it sends signals to others.
    "fcntl": (72, 25, [("one of", 1, [0, 1, 2, 3, 4, 1030])]),
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    "ioctl": (16, 29, [("one of", 1, [0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])]),
    # Files, to read.
    "open": (2, None, [("none of the bits", 1, _OPENS_FOR_WRITING)]),
    "openat": (257, 56, [("none of the bits", 2, _OPENS_FOR_WRITING)]),
    "stat": (4, None, []),
    "fstat": (5, 80, []),
    "lstat": (6, None, []),
    "newfstatat": (262, 79, []),
    "statx": (332, 291, []),
    "access": (21, None, []),
    "faccessat": (269, 48, []),
    "readlink": (89, None, []),
    "readlinkat": (267, 78, []),
    "getcwd": (79, 17, []),
    "getdents64": (217, 61, []),
    # Its own memory.
    "mmap": (9, 222, []),
    "munmap": (11, 215, []),
    "mprotect": (10, 226, []),
    "mremap": (25, 216, []),
    "madvise": (28, 233, []),
    "brk": (12, 214, []),
    "membarrier": (324, 283, []),
    # Its own threads, and its exit.
    "clone": (56, 220, [("bit", 0, _CLONE_THREAD), ("none of the bits", 0, ~_CLONES_A_THREAD & 0xFFFFFFFF)]),
    "futex": (202, 98, []),
    "set_robust_list": (273, 99, []),
    "set_tid_address": (218, 96, []),
    "rseq": (334, 293, []),
    "sched_yield": (24, 124, []),
    "sched_getaffinity": (204, 123, []),
    "getcpu": (309, 168, []),
    "exit": (60, 93, []),
    "exit_group": (231, 94, []),
    "restart_syscall": (219, 128, []),
    # Signals to itself.
    "rt_sigaction": (13, 134, []),
    "rt_sigprocmask": (14, 135, []),
    "rt_sigreturn": (15, 139, []),
    "rt_sigpending": (127, 136, []),
    "rt_sigtimedwait": (128, 137, []),
    "rt_sigsuspend": (130, 133, []),
    "sigaltstack": (131, 132, []),
    "pause": (34, None, []),
    "alarm": (37, None, []),
    "getitimer": (36, 102, []),
    "setitimer": (38, 103, []),
    "kill": (62, 129, [("own process", 0, None)]),
    "tgkill": (234, 131, [("own process", 0, None)]),
    # Clocks, random numbers, identity and machine.
    "time": (201, None, []),
    "gettimeofday": (96, 169, []),
    "times": (100, 153, []),
    "clock_gettime": (228, 113, []),
    "clock_getres": (229, 114, []),
    "clock_nanosleep": (230, 115, []),
    "nanosleep": (35, 101, []),
    "getrandom": (318, 278, []),
    "getpid": (39, 172, []),
    "gettid": (186, 178, []),
    "getppid": (110, 173, []),
    "getpgrp": (111, None, []),
    "getuid": (102, 174, []),
    "geteuid": (107, 175, []),
    "getgid": (104, 176, []),
    "getegid": (108, 177, []),
    "getgroups": (115, 158, []),
    "getresuid": (118, 148, []),
    "getresgid": (120, 150, []),
    "getrusage": (98, 165, []),
    "getrlimit": (97, 163, []),
    "prlimit64": (302, 261, [("one of", 0, [0]), ("null", 2, None)]),  # to query, not to set
    "uname": (63, 160, []),
    "sysinfo": (99, 179, []),
}

# Folders from which modules of the standard library load files; its own folder is added before them.
_READABLE = [
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo"),
]

# Environment variables that Python may need to find its libraries. No others are passed on.
_PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONHOME")


def _environment() -> dict[str, str]:
    # A fixed hash seed: the same program iterates over sets in the same order.
    fixed = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "TZ": "UTC"}
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | fixed


def _uncovered(kernel: _Kernel) -> list[str]:
    """Return the properties that only Python's audit hook would enforce."""
    by_calls = [] if kernel.seccomp else ["processes", "programs", "writing", "network", "other processes"]
    return by_calls + ([] if kernel.landlock else ["reading"])


def _settings(limits: Limits, kernel: _Kernel, folder: str) -> dict[str, Any]:
    """Return the restrictions of the process."""
    seconds = math.ceil(limits.seconds) + 1
    resources = {"AS": limits.memory_bytes, "CPU": seconds, "FSIZE": 0, "NOFILE": 64, "CORE": 0, "MEMLOCK": 0}
    seccomp: dict[str, Any] = {}
    if kernel.seccomp:
        architecture, column = _ARCHITECTURES[os.uname().machine]
        calls = {call[column]: call[2] for call in _CALLS.values() if call[column] is not None}
        seccomp = {"architecture": architecture, "calls": calls}
    else:
        resources["NPROC"] = 0  # does not apply to root; on Linux it rules out threads too
    landlock: dict[str, Any] = {}
    if version := kernel.landlock:
        # Execute, read and write; in later versions move between folders, truncate, send commands to devices.
        files = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
        # Bind and connect TCP; abstract Unix sockets and signals.
        network, scope = 3 * (version >= 4), 3 * (version >= 6)
        landlock = {"version": version, "files": files, "network": network, "scope": scope}
    own_libraries = [os.path.join(sys.base_exec_prefix, name) for name in ("lib", "lib64")]
    return {
        "limits": resources,
        "drop privileges": True,
        "landlock": landlock,
        "seccomp": seccomp,
        "hook": _uncovered(kernel),
        "readable": [folder, *_READABLE, *own_libraries, *_searched_libraries()],
    }


def _searched_libraries() -> list[str]:
    """Return the libraries in LD_LIBRARY_PATH: files rather than folders, since such a folder may hold anything."""
    folders = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path)]
    return [file for path in folders for file in sorted(glob.glob(os.path.join(glob.escape(path), "*.so*")))]


def protections() -> dict[str, str]:
    """Return the mechanism that enforces each property on this system.

    "Python's audit hook only" is no protection against a malicious program; `run_program` then needs `allow_weaker`.

    Raises:
        RuntimeError: programs cannot be confined on this system.
    """
    _need_posix()
    kernel = _kernel()
    hook = "Python's audit hook only"
    landlock = f"kernel: Landlock (version {kernel.landlock})"
    linux = sys.platform == "linux"

    def held(by: str, name: str) -> str:
        return hook if name in _uncovered(kernel) else by

    both = f"kernel: seccomp and Landlock (version {kernel.landlock})" if kernel.landlock else "kernel: seccomp"
    return {
        "time": "the parent's clock; kernel: resource limit on processor time",
        "memory": "kernel: resource limit on address space" + ("" if linux else ", as far as this system enforces it"),
        "threads": "counted by the parent" if linux else "none",
        "processes": held("kernel: seccomp", "processes"),
        "programs": held(both, "programs"),
        "writing": held(both, "writing"),
        "file size": "kernel: resource limit of 0 bytes",
        "reading": held(landlock, "reading"),
        "network": held(both if kernel.landlock >= 4 else "kernel: seccomp", "network"),
        "other processes": held(both if kernel.landlock >= 6 else "kernel: seccomp", "other processes"),
        "environment": "empty; " + held(f"of others: {landlock}", "reading"),
        "output": "counted by the parent",
        "privileges": "kernel: no new ones, and none of root's" if linux else "none",
    }


def _need_posix() -> None:
    if os.name != "posix" or not sys.executable:
        raise RuntimeError(
            "Programs written by a model run on Linux only, where the kernel can confine them (or, weaker, on macOS); "
            f"this is {sys.platform!r}. Run the evaluation there, or in a container."
        )


def _usable_kernel(allow_weaker: bool) -> _Kernel:
    _need_posix()
    kernel = _kernel()
    if (uncovered := _uncovered(kernel)) and not allow_weaker:
        raise RuntimeError(
            f"The kernel of this machine cannot confine a program fully: {', '.join(uncovered)} would be guarded "
            "by Python's audit hook only, which stops accidents and not a program that means harm (seccomp: "
            f"{'yes' if kernel.seccomp else 'no'}, Landlock: {'yes' if kernel.landlock else 'no'}; Linux has both "
            "from 5.13 on, some containers switch them off). Run it elsewhere, or pass allow_weaker=True."
        )
    return kernel


# --- Running -------------------------------------------------------------------------------------------------------

# The folder is last on the path: nothing in it can shadow a module of the standard library.
_START = """
import sys
sys.path[:] = [path for path in sys.path if path]
sys.path.append(sys.argv[1])
import _inside
del sys.path[-1], sys.argv[1:]
_inside.main()
"""


def run_program(source: str, limits: Limits = DEFAULT_LIMITS, allow_weaker: bool = False) -> Outcome:
    """Run a program in the sandbox, see this module's docstring.

    Hash seed, time zone and language are fixed. Random numbers are not.

    Args:
        source: the whole program. It passes if it runs to its end.
        limits: limits of time, memory, output and threads.
        allow_weaker: run it even where the kernel enforces only some properties (see `protections`).

    Raises:
        RuntimeError: the system has no protection, or only partial protection, or the sandbox does not start.
        OSError: no process or temporary folder can be created.
    """
    kernel = _usable_kernel(allow_weaker)
    started = time.monotonic()
    folder = tempfile.mkdtemp(prefix="ssd_sandbox_")
    try:
        os.chmod(folder, 0o500)
        status, detail = _run_in(folder, source, limits, kernel, started + limits.seconds)
    finally:
        _remove(folder)
    return Outcome(status, _one_line(detail), time.monotonic() - started)


def run_programs(
    sources: Sequence[str],
    limits: Limits = DEFAULT_LIMITS,
    allow_weaker: bool = False,
    workers: int = 1,
    observe: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Run many programs, each in its own sandbox.

    Args:
        sources: the programs.
        limits: limits of each. Time is wall-clock time, so there should not be more workers than processor cores.
        allow_weaker: see `run_program`.
        workers: number of programs at the same time, ≥ 1.
        observe: callback in this thread with the index of a program and its outcome, as each ends.

    Returns:
        The outcomes, in the order of the programs.

    Raises:
        ValueError: fewer than one worker.
        RuntimeError: see `run_program`.
        OSError: see `run_program`.
    """
    if workers < 1:
        raise ValueError(f"Programs need at least one worker, but got workers={workers}.")
    _usable_kernel(allow_weaker)
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(run_program, source, limits, allow_weaker): i for i, source in enumerate(sources)}
        try:
            for done in as_completed(waiting):
                outcomes[waiting[done]] = done.result()
                if observe is not None:
                    observe(waiting[done], outcomes[waiting[done]])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [outcomes[i] for i in range(len(sources))]


def _run_in(folder: str, source: str, limits: Limits, kernel: _Kernel, deadline: float) -> tuple[Status, str]:
    token = secrets.token_hex(16)
    receive, send = os.pipe()
    with open(receive, "rb", buffering=0) as channel:
        try:
            settings = _settings(limits, kernel, folder)
            settings |= {"token": token, "channel": send, "parent": os.getpid(), "source": source}
            # Not JSON, whose import would take longer than starting Python; both ends run the same interpreter.
            process = _start(folder, marshal.dumps(settings), send)
        finally:
            os.close(send)
        with process:
            try:
                reason, received, printed = _watch(process, channel.fileno(), limits, deadline)
            finally:
                _end(process)
    return _judge(reason, received, token, process.returncode, printed)


def _start(folder: str, message: bytes, send: int) -> subprocess.Popen[bytes]:
    # A file and not a pipe: a process that does not read cannot block this one.
    with tempfile.TemporaryFile() as stdin:
        stdin.write(message)
        stdin.seek(0)
        return subprocess.Popen(
            # Without the packages of the user or the installation, which could run code at startup.
            [sys.executable, "-s", "-S", "-B", "-X", "utf8", "-c", _START, str(Path(_inside.__file__).parent)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(),
            pass_fds=(send,),
            start_new_session=True,
        )


def _watch(
    process: subprocess.Popen[bytes], channel: int, limits: Limits, deadline: float
) -> tuple[tuple[Status, str] | None, bytes, bytes]:
    """Wait until the process has ended, or has to be killed.

    Returns:
        The reason to kill it, or None; the bytes received through the channel; the end of its output.
    """
    assert process.stdout is not None
    received, tail, printed = b"", b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            # Checked first: after its end, all that it wrote is in the pipes, even if another process has them open.
            ended = _has_ended(process)
            left = max(0.0, deadline - time.monotonic())
            pause = LOOK_EVERY if selector.get_map() else WAIT_EVERY
            ready = selector.select(0.0 if ended else min(left, pause))
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fd == channel:
                    received += data
                else:
                    printed += len(data)
                    tail = (tail + data)[-2000:]
            if printed > limits.output_bytes:
                return ("stopped", f"it printed more than {limits.output_bytes} bytes"), received, tail
            if len(received) > MOST_VERDICT:
                return ("stopped", "it wrote to the channel of the verdict"), received, tail
            if ended and not ready:
                return None, received, tail
            if time.monotonic() >= deadline:
                return ("timed out", f"it ran longer than {limits.seconds:g} s"), received, tail
            if not ended and _threads_of(process.pid) > limits.threads:
                return ("stopped", f"it had more than {limits.threads} threads"), received, tail


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process has ended, without releasing its process id, which is also the id of its session."""
    if not hasattr(os, "waitid"):  # macOS
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # with SIGCHLD ignored, there are no children to wait for
        return True


def _threads_of(pid: int) -> int:
    """Return the number of threads of a process; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[17])
    except (OSError, ValueError, IndexError):
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.wait()


_VERDICTS: tuple[Status, ...] = ("passed", "failed", "not Python", "stopped")


def _judge(
    reason: tuple[Status, str] | None, received: bytes, token: str, code: int, printed: bytes
) -> tuple[Status, str]:
    """Return the verdict; only one with the token counts.

    Raises:
        RuntimeError: the sandbox did not start.
    """
    if reason is not None:
        return reason
    ready = f"{token} ready\n".encode()
    if not received.startswith(ready):
        received = received.removeprefix(f"{token} unprotected\n".encode()) or printed
        text = _one_line(received.decode("utf-8", "replace").strip()[-300:])
        raise RuntimeError(f"The sandbox did not start (exit code {code}), so nothing was run: {text}")
    received = received[len(ready) :]
    first, _, detail = received.partition(b"\n")
    for status in _VERDICTS:
        if secrets.compare_digest(first, f"{token} {status}".encode()):
            return status, detail.decode("utf-8", "replace")
    if received:
        return "failed", "it wrote to the channel of the verdict"
    if code < 0:
        with contextlib.suppress(ValueError):
            return "stopped", f"killed by {signal.Signals(-code).name}"
        return "stopped", f"killed by signal {-code}"
    return "failed", f"it ended itself, with exit code {code}, before it had run to its end"


def _one_line(text: str) -> str:
    """Return untrusted text as one line, without control characters."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= 300 else text[:299] + "…"


def _remove(folder: str) -> None:
    """Remove a folder and everything in it, including folders that are not writable."""
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError):
            os.chmod(waiting[-1], 0o700)
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(folder, ignore_errors=True)
