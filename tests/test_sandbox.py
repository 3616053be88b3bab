"""Programs in the sandbox: their permissions, and proof that each wall around them holds and is needed.

The hostile programs do no harm if they succeed: twenty children that end at once, files below `tmp_path`, a process
started to be killed.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from ssd_generation.evaluation import _inside, sandbox
from ssd_generation.evaluation.sandbox import Limits, Outcome, protections, run_program, run_programs

resource = pytest.importorskip("resource", reason="programs run on POSIX systems only")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what holds programs elsewhere is not tested")

KERNEL = sandbox._kernel()
needs_seccomp = pytest.mark.skipif(not KERNEL.seccomp, reason="this kernel, or container, does not filter calls")
ROOT = os.geteuid() == 0
# Enough for a busy machine; tests of the time limit set less.
CALM = Limits(seconds=30.0)


def run(program: str, limits: Limits = CALM) -> Outcome:
    # `allow_weaker` changes nothing where the kernel supports all protections.
    return run_program(textwrap.dedent(program), limits, allow_weaker=True)


# --- Harmless programs ---------------------------------------------------------------------------------------------

HUMAN_EVAL = '''
from typing import List

def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if in given list of numbers, are any two numbers closer to each other than given threshold. """
    ordered = sorted(numbers)
    return any(b - a < threshold for a, b in zip(ordered, ordered[1:]))

METADATA = {}

def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False

check(has_close_elements)
'''


def test_a_right_answer_passes() -> None:
    begun = time.monotonic()
    outcome = run(HUMAN_EVAL)
    assert outcome.status == "passed" and outcome.passed and outcome.detail == ""
    assert 0 < outcome.seconds <= time.monotonic() - begun


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        (HUMAN_EVAL.replace("b - a <", "b - a >"), "failed", "AssertionError (line 13)"),
        ("raise ValueError('no')", "failed", "ValueError: no (line 1)"),
        ("def f(n):\n    return f(n + 1)\nf(0)", "failed", "RecursionError: maximum recursion depth exceeded"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero (line 1)"),
        ("input()", "failed", "EOFError: EOF when reading a line (line 1)"),
        ("import numpy", "failed", "ModuleNotFoundError: No module named 'numpy' (line 1)"),
        ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt (line 1)"),
        ("class E(Exception):\n    def __str__(self):\n        raise SystemExit(0)\nraise E", "failed", "E (line 4)"),
        ("x = bytearray(2 << 30)", "stopped", "MemoryError: it may have 1024 MiB"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "stopped", "killed by SIGSEGV"),
        ("def f(:", "not Python", "SyntaxError: "),
        ("x = 1\nIn this function we\n", "not Python", "SyntaxError: invalid syntax (line 2)"),
        ("x = 1\n  y = 2", "not Python", "IndentationError: unexpected indent (line 2)"),
        ("x = '\0'", "not Python", "null byte"),
        ("x = '\ud800'", "not Python", "UnicodeEncodeError: "),
        ("(" * 300 + ")" * 300, "not Python", "SyntaxError: too many nested parentheses (line 1)"),
        # Valid Python beyond the memory limit or the compiler's nesting limit, depending on Python's version.
        ("-" * 100_000 + "1", "stopped", "Error"),
        ("a" + ".b" * 100_000, "stopped", "Error"),
        ("return 1", "not Python", "SyntaxError: 'return' outside function (line 1)"),
    ],
)
def test_how_programs_end(program: str, status: str, detail: str) -> None:
    outcome = run(program)
    assert outcome.status == status and detail in outcome.detail
    assert not outcome.passed


def test_what_answers_import_works() -> None:
    outcome = run(
        """
        from __future__ import annotations
        import bisect, cmath, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, hashlib
        import heapq, io, itertools, json, math, operator, os, pickle, random, re, statistics, string, sys, textwrap
        import time, typing, unittest, uuid, zlib
        from typing import List, Optional, Tuple

        @dataclasses.dataclass
        class Point:
            x: int
            y: Optional[List[int]] = None

        assert typing.get_type_hints(Point)["x"] is int
        assert pickle.loads(pickle.dumps(Point(3, [1]))) == copy.deepcopy(Point(3, [1])), __name__
        assert hashlib.md5(b"").hexdigest() == "d41d8cd98f00b204e9800998ecf8427e"
        assert len(hashlib.new("sha256", b"").hexdigest()) == 64
        assert re.sub("[aeiou]", "", "sandbox") == "sndbx"
        assert collections.Counter("aab").most_common(1) == [("a", 2)] and heapq.nsmallest(1, [3, 1]) == [1]
        assert list(itertools.accumulate([1, 2])) == [1, 3] and functools.reduce(operator.add, [1, 2]) == 3
        assert datetime.datetime.now() > datetime.datetime(2020, 1, 1) and string.ascii_lowercase[0] == "a"
        assert 0 <= random.random() < 1 and math.isqrt(17) == 4 and time.perf_counter() > 0 and len(os.urandom(4)) == 4
        assert fractions.Fraction(1, 2) + decimal.Decimal(1).__int__() == 1.5 and statistics.mean([1, 3]) == 2
        assert os.listdir(".") == [] and os.path.exists("/") and uuid.uuid4() != uuid.uuid4()
        print("printing is allowed", file=sys.stderr)
        """
    )
    assert outcome.passed, outcome


@needs_seccomp
def test_threads_work() -> None:
    outcome = run(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda x: x * x, range(100))) == [x * x for x in range(100)]
        done = threading.Event()
        threading.Thread(target=done.set).start()
        assert done.wait()
        """
    )
    assert outcome.passed, outcome


def test_source_in_any_script() -> None:
    assert run("größe = '日本語 🙂'\nassert len(größe) == 5 and größe.encode()[-4:] == b'\\xf0\\x9f\\x99\\x82'").passed
    assert run("raise ValueError('日本語')").detail == "ValueError: 日本語 (line 1)"
    assert run("# -*- coding: latin-1 -*-\nassert len('ä') == 1").passed
    assert run("x = 1\r\nassert x\r\n").passed


def test_the_same_program_has_the_same_outcome() -> None:
    program = "raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}))"
    assert len({run(program).detail for _ in range(3)}) == 1


def test_nothing_of_a_stranger_reaches_the_terminal() -> None:
    detail = run("raise ValueError('\\x1b[31mred\\nline\\u202e' + 'x' * 10**6)").detail
    assert detail.isprintable() and "red line" in detail and len(detail) == 300


def test_many_programs() -> None:
    programs = ["pass", "1 / 0", "def", "import time; time.sleep(0.3)"]
    seen: dict[int, Outcome] = {}
    outcomes = run_programs(programs, CALM, True, workers=4, observe=seen.__setitem__)
    assert [outcome.status for outcome in outcomes] == ["passed", "failed", "not Python", "passed"]
    assert [seen[i] for i in range(4)] == outcomes
    assert run_programs([], allow_weaker=True) == []
    with pytest.raises(ValueError, match="but got workers=0"):
        run_programs(programs, workers=0)

    def observe(_: int, outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_programs(programs, CALM, True, observe=observe)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"seconds": 0}, "seconds must be positive and finite, but got 0"),
        ({"seconds": float("nan")}, "seconds must be positive and finite, but got nan"),
        ({"seconds": float("inf")}, "seconds must be positive and finite, but got inf"),
        ({"memory_bytes": 1000}, "memory_bytes must be a whole number of at least 67108864, but got 1000"),
        ({"memory_bytes": 1e9}, "memory_bytes must be a whole number of at least 67108864, but got 1000000000.0"),
        ({"output_bytes": -1}, "output_bytes must be a whole number of at least 0, but got -1"),
        ({"threads": True}, "threads must be a whole number of at least 1, but got True"),
    ],
)
def test_limits_that_are_none(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Limits(**arguments)


def test_the_least_limits_are_enough() -> None:
    outcome = run(
        "import re, random, hashlib", Limits(30.0, memory_bytes=sandbox.LEAST_MEMORY, output_bytes=0, threads=1)
    )
    assert outcome.passed, outcome


# --- The verdict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise SystemExit", "SystemExit"),
        ("import os; os._exit(0)", "exit code 0, before it had run to its end"),
        ("import os; print('passed', flush=True); os._exit(0)", "exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import os\nos.closerange(0, 1000)", "exit code 0"),
    ],
)
def test_an_end_before_the_check_is_no_success(program: str, detail: str) -> None:
    outcome = run(f"{program}\nassert False")
    assert not outcome.passed
    # Without its channel even a right program cannot report success.
    assert detail in outcome.detail or "closerange" in program


def test_guessing_at_the_channel_is_no_success() -> None:
    guess = """
        import contextlib, os
        for channel in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(channel, b"0123456789abcdef0123456789abcdef passed\\n")
        """
    for end in ("os._exit(0)", "pass"):
        outcome = run(textwrap.dedent(guess) + end)
        assert (outcome.status, outcome.detail) == ("failed", "it wrote to the channel of the verdict")
    flood = "import os\nwhile True:\n    for channel in range(3, 64):\n        try: os.write(channel, b'x' * 4096)\n"
    outcome = run(flood + "        except OSError: pass")
    assert (outcome.status, outcome.detail) == ("stopped", "it wrote to the channel of the verdict")


def test_the_settings_cannot_be_read_again() -> None:
    assert run(
        "import os, sys\nassert os.pread(0, 1, 0) == b'' and os.read(0, 1) == b'' == sys.stdin.buffer.read()"
    ).passed


def test_what_the_runner_uses_cannot_be_put_in_its_place() -> None:
    assert run("import os\nos.write = os._exit = print = exit = None").passed
    outcome = run("import os\nos._exit = lambda code: None\nassert False")
    assert outcome.status == "failed"


# --- Numeric limits: the same program, stopped by one limit and passed by a greater one ----------------------------


@pytest.mark.parametrize(
    ("program", "tight", "generous", "status", "detail"),
    [
        pytest.param(
            """
            import signal, time
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXCPU):
                signal.signal(number, signal.SIG_IGN)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass
            """,
            *(Limits(seconds=1.0), CALM, "timed out", "it ran longer than 1 s"),
            id="a loop without end",
        ),
        pytest.param(
            "import time\ntime.sleep(1.5)",
            *(Limits(seconds=1.0), CALM, "timed out", "it ran longer than 1 s"),
            id="sleeping",
        ),
        pytest.param(
            "import os, time\nos.close(1); os.close(2); os.close(0)\ntime.sleep(1.5)",
            *(Limits(seconds=1.0), CALM, "timed out", "it ran longer than 1 s"),
            id="sleeping with nothing open",
        ),
        pytest.param(
            "x = bytearray(150 << 20)",
            *(Limits(30.0, memory_bytes=128 << 20), CALM, "stopped", "MemoryError: it may have 128 MiB"),
            id="memory",
        ),
        pytest.param(
            "import mmap\nx = mmap.mmap(-1, 150 << 20)",
            *(Limits(30.0, memory_bytes=128 << 20), CALM, "failed", "Cannot allocate memory"),
            id="shared memory",
        ),
        pytest.param(
            "for _ in range(3000):\n    print('x' * 1000)",
            *(CALM, Limits(30.0, output_bytes=4 << 20), "stopped", "it printed more than 1048576 bytes"),
            id="printing",
        ),
        pytest.param(
            "import os\nfor _ in range(3000):\n    os.write(2, b'x' * 1000)",
            *(CALM, Limits(30.0, output_bytes=4 << 20), "stopped", "it printed more than 1048576 bytes"),
            id="printing past Python",
        ),
        pytest.param(
            """
            import threading, time
            threading.stack_size(1 << 16)
            threads = [threading.Thread(target=time.sleep, args=(0.5,), daemon=True) for _ in range(100)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            """,
            *(CALM, Limits(30.0, threads=200), "stopped", "it had more than 64 threads"),
            marks=needs_seccomp,
            id="threads",
        ),
    ],
)
def test_limits_hold_and_are_needed(program: str, tight: Limits, generous: Limits, status: str, detail: str) -> None:
    begun = time.monotonic()
    held = run(program, tight)
    assert held.status == status and detail in held.detail
    assert held.seconds <= time.monotonic() - begun
    assert held.seconds >= tight.seconds or status != "timed out"
    through = run(program, generous)
    assert through.passed, through


def test_other_resources_are_limited() -> None:
    outcome = run(
        """
        import os, resource, sys
        for name in ("CORE", "FSIZE", "MEMLOCK"):
            assert resource.getrlimit(getattr(resource, "RLIMIT_" + name)) == (0, 0), name
        assert sys.argv == ["-c"]
        opened = 0
        try:
            for opened in range(1000):
                os.pipe()
        except OSError:
            pass
        assert 10 < opened < 32
        """
    )
    assert outcome.passed, outcome


@pytest.mark.parametrize(
    "program", ["x = [" + "1, " * 1_000_000 + "]", "x = '" + "é" * (30 << 20) + "'"], ids=["many", "long"]
)
def test_memory_that_runs_out_while_compiling_is_no_fault_of_the_text(program: str) -> None:
    held = run(program, Limits(60.0, memory_bytes=128 << 20))
    assert held.status == "stopped" and "Error" in held.detail, held
    assert run(program, Limits(60.0, memory_bytes=4 << 30)).passed


def test_output_without_end_is_not_kept() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run("while True:\n    print('x' * 10**6)", Limits(30.0, output_bytes=64 << 20)).status == "stopped"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_processor_time_is_limited_as_well_as_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of = sandbox._settings

    def settings(limits: Limits, *others: Any) -> dict[str, Any]:
        return settings_of(Limits(seconds=0.1), *others)

    monkeypatch.setattr(sandbox, "_settings", settings)
    outcome = run("while True: pass", Limits(seconds=600.0))  # the parent would wait this long: "timed out"
    assert (outcome.status, outcome.detail) == ("stopped", "killed by SIGKILL")


# --- Hostile programs ----------------------------------------------------------------------------------------------

SECRET = "5e3c 8e7"

# System calls outside the allow list, by purpose: numbers on x86-64 and ARM64 (None: no such call).
NUMBERS: dict[str, list[tuple[int | None, int | None]]] = {
    "processes": [(56, 220), (57, None), (58, None), (61, 260), (112, 157)],  # clone, fork, vfork, wait4, setsid
    "programs": [(59, 221), (158, None), (61, 260)],  # execve; arch_prctl, the first call of a program; wait4
    "network": [(41, 198), (42, 203), (44, 206), (49, 200), (50, 201), (51, 204)],  # socket … getsockname
    "writing": [
        *((2, None), (257, 56), (76, 45), (77, 46), (82, None), (83, None), (84, None), (86, None), (87, None)),
        *((88, None), (90, None), (91, 52), (133, None), (258, 34), (259, 33), (263, 35), (264, 38), (265, 37)),
        *((266, 36), (268, 53), (280, 88), (316, 276)),
    ],
    "other processes": [(62, 129), (72, 25), (302, 261)],  # kill, fcntl, prlimit64
}


def _let_calls_through(settings: dict[str, Any], purpose: str) -> None:
    if settings["seccomp"]:
        column = sandbox._ARCHITECTURES[os.uname().machine][1]
        for numbers in NUMBERS[purpose]:
            if numbers[column] is not None:
                settings["seccomp"]["calls"][numbers[column]] = []


def _forget(settings: dict[str, Any], part: str, bits: int) -> None:
    if settings["landlock"]:
        settings["landlock"][part] &= ~bits


EXECUTE, READ = 1, 0b1100
WALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "seccomp: processes": lambda settings: _let_calls_through(settings, "processes"),
    "seccomp: programs": lambda settings: _let_calls_through(settings, "programs"),
    "seccomp: network": lambda settings: _let_calls_through(settings, "network"),
    "seccomp: writing": lambda settings: _let_calls_through(settings, "writing"),
    "seccomp: other processes": lambda settings: _let_calls_through(settings, "other processes"),
    "Landlock 1: programs": lambda settings: _forget(settings, "files", EXECUTE),
    "Landlock 1: reading": lambda settings: _forget(settings, "files", READ),
    "Landlock 1: writing": lambda settings: _forget(settings, "files", 0xFFFF & ~(READ | EXECUTE)),
    "Landlock 3: truncating": lambda settings: _forget(settings, "files", 1 << 14),
    "Landlock 4: network": lambda settings: _forget(settings, "network", 3),
    "Landlock 6: Unix sockets": lambda settings: _forget(settings, "scope", 1),
    "Landlock 6: other processes": lambda settings: _forget(settings, "scope", 2),
    "Landlock 1: at all": lambda settings: settings["landlock"].clear(),
    "seccomp: at all": lambda settings: settings["seccomp"].clear(),
    "file size": lambda settings: settings["limits"].pop("FSIZE"),
    "privileges": lambda settings: settings.update({"drop privileges": False}),
}


def _stands(wall: str) -> bool:
    """Tell whether this machine has that wall."""
    if wall.startswith("Landlock"):
        return int(wall[9]) <= KERNEL.landlock
    return KERNEL.seccomp if wall.startswith("seccomp") else ROOT if wall == "privileges" else True


@dataclass
class World:
    """Targets of the attacks."""

    folder: Path

    def __post_init__(self) -> None:
        self.signals: list[int] = []
        self.file = self.folder / "file.txt"
        self.file.write_text(SECRET)

    @cached_property
    def process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    @cached_property
    def listener(self) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(0)
        return listener

    @cached_property
    def datagrams(self) -> socket.socket:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(0)
        return receiver

    @cached_property
    def unix(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.folder.name + str(os.getpid()))  # paths have a maximum length
        listener.listen()
        listener.settimeout(0)
        return listener

    def names(self, program: str) -> str:
        """Return the program with definitions of the names it uses."""
        values: dict[str, Callable[[], Any]] = {
            "FILE": lambda: str(self.file),
            "FOLDER": lambda: str(self.folder),
            "SECRET": lambda: SECRET,
            "PID": lambda: self.process.pid,
            "PORT": lambda: self.listener.getsockname()[1],
            "DATAGRAMS": lambda: self.datagrams.getsockname()[1],
            "UNIX": lambda: self.unix.getsockname(),
        }
        return "".join(f"{name} = {get()!r}\n" for name, get in values.items() if name in program) + program

    def close(self) -> None:
        made = self.__dict__
        for name in ("listener", "datagrams", "unix"):
            if name in made:
                made[name].close()
        if "process" in made:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: world.signals.append(number))
    try:
        yield world
    finally:
        signal.signal(signal.SIGUSR1, before)
        world.close()


def _was_killed(world: World, _: Outcome) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return world.process.wait(timeout=0.2) == -signal.SIGKILL
    return False


def _heard(name: str) -> Callable[[World, Outcome], bool]:
    def heard(world: World, _: Outcome) -> bool:
        found: socket.socket = getattr(world, name)
        try:
            if name == "datagrams":
                return found.recv(100) == SECRET.encode()
            found.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    return heard


def _lives(pid: int) -> bool:
    """Tell whether such a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _outlived(_: World, outcome: Outcome) -> bool:
    if "pid=" not in outcome.detail:
        return False
    pid = int(outcome.detail.partition("pid=")[2].split()[0])
    lives = _lives(pid)
    if lives:
        os.kill(pid, signal.SIGKILL)
    return lives


def _ran_to_its_end(_: World, outcome: Outcome) -> bool:
    return outcome.passed


@dataclass(frozen=True)
class Attack:
    """A program, the walls against it, each sufficient alone, and the test of its success."""

    program: str
    walls: tuple[str, ...]
    succeeded: Callable[[World, Outcome], bool] = _ran_to_its_end


WRITING = ("seccomp: writing", "Landlock 1: writing")
SIGNALS = ("seccomp: other processes", "Landlock 6: other processes")
NETWORK = ("seccomp: network", "Landlock 4: network")
PROGRAMS = ("seccomp: programs", "Landlock 1: programs", "Landlock 1: reading")

ATTACKS = {
    "fork bomb": Attack(
        """
        import os
        children = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(7)
            children.append(child)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [7] * 20
        """,
        ("seccomp: processes",),
    ),
    "outliving the limit": Attack(
        """
        import os, time
        receive, send = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(send, str(os.getpid()).encode())
                time.sleep(20)
            os._exit(0)
        raise RuntimeError(f"pid={int(os.read(receive, 20))} lives on")
        """,
        ("seccomp: processes",),
        _outlived,
    ),
    "a shell": Attack("import os\nassert os.system('exit 7') == 7 << 8", ("seccomp: processes", *PROGRAMS)),
    "subprocess": Attack(
        "import subprocess\nassert subprocess.run(['/bin/sh', '-c', 'exit 7']).returncode == 7",
        ("seccomp: processes", *PROGRAMS),
    ),
    "another program in its place": Attack(
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 7'])",
        PROGRAMS,
        lambda world, outcome: "exit code 7" in outcome.detail,
    ),
    "making a file": Attack(
        "open(FOLDER + '/made', 'w').close()", WRITING, lambda world, _: (world.folder / "made").exists()
    ),
    "making a file that is only read": Attack(
        "import os\nos.open(FOLDER + '/made', os.O_CREAT | os.O_RDONLY)",
        WRITING,
        lambda world, _: (world.folder / "made").exists(),
    ),
    "a huge file": Attack(
        "with open(FOLDER + '/huge', 'wb') as file:\n    file.write(bytes(8 << 20))",
        (*WRITING, "file size"),
        lambda world, _: (world.folder / "huge").exists() and (world.folder / "huge").stat().st_size > 0,
    ),
    "changing a file": Attack(
        "import os\nos.write(os.open(FILE, os.O_WRONLY), b'0')",
        (*WRITING, "file size"),
        lambda world, _: world.file.read_text() != SECRET,
    ),
    "emptying a file by reading it": Attack(
        "import os\nos.open(FILE, os.O_RDONLY | os.O_TRUNC)",
        ("seccomp: writing", "Landlock 1: reading", "Landlock 3: truncating"),
        lambda world, _: world.file.read_text() == "",
    ),
    "emptying a file": Attack(
        "import os\nos.truncate(FILE, 0)",
        ("seccomp: writing", "Landlock 3: truncating"),
        lambda world, _: world.file.read_text() == "",
    ),
    "a file without a name": Attack("import os\nos.open(FOLDER, os.O_TMPFILE | os.O_WRONLY)", WRITING),
    "deleting": Attack("import os\nos.remove(FILE)", WRITING, lambda world, _: not world.file.exists()),
    "renaming": Attack("import os\nos.rename(FILE, FILE + '2')", WRITING, lambda world, _: not world.file.exists()),
    "making a folder": Attack(
        "import os\nos.mkdir(FOLDER + '/made')", WRITING, lambda world, _: (world.folder / "made").exists()
    ),
    "a link": Attack(
        "import os\nos.symlink(FILE, FOLDER + '/made')", WRITING, lambda world, _: (world.folder / "made").is_symlink()
    ),
    "another name": Attack(
        "import os\nos.link(FILE, FOLDER + '/made')", WRITING, lambda world, _: (world.folder / "made").exists()
    ),
    "permissions": Attack(
        "import os\nos.chmod(FILE, 0o777)",
        ("seccomp: writing",),
        lambda world, _: world.file.stat().st_mode & 0o777 == 0o777,
    ),
    "dates": Attack(
        "import os\nos.utime(FILE, (0, 0))", ("seccomp: writing",), lambda world, _: world.file.stat().st_mtime == 0
    ),
    "reading": Attack("assert open(FILE).read() == SECRET", ("Landlock 1: reading",)),
    "listing": Attack("import os\nassert os.listdir(FOLDER) == ['file.txt']", ("Landlock 1: reading",)),
    "reading past permissions": Attack("assert open(FILE).read() == SECRET", ("Landlock 1: reading", "privileges")),
    "the parent's environment": Attack(
        "import os\nassert len(open(f'/proc/{os.getppid()}/environ', 'rb').read()) > 0",
        ("Landlock 1: at all", *(("privileges",) if ROOT else ())),
    ),
    "connecting": Attack("import socket\nsocket.socket().connect(('127.0.0.1', PORT))", NETWORK, _heard("listener")),
    "listening": Attack("import socket\nsocket.socket().bind(('127.0.0.1', 0))", NETWORK),
    "datagrams": Attack(
        "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(SECRET.encode(), ('127.0.0.1', DATAGRAMS))",
        ("seccomp: network",),
        _heard("datagrams"),
    ),
    "Unix sockets": Attack(
        "import socket\nsocket.socket(socket.AF_UNIX).connect(UNIX)",
        ("seccomp: network", "Landlock 6: Unix sockets"),
        _heard("unix"),
    ),
    "killing another": Attack("import os\nos.kill(PID, 9)", SIGNALS, _was_killed),
    "killing another by a pipe": Attack(
        """
        import fcntl, os
        receive, send = os.pipe()
        fcntl.fcntl(receive, fcntl.F_SETSIG, 9)
        fcntl.fcntl(receive, fcntl.F_SETOWN, PID)
        fcntl.fcntl(receive, fcntl.F_SETFL, os.O_ASYNC)
        os.write(send, b"x")
        """,
        SIGNALS,
        _was_killed,
    ),
    "signals to the parent": Attack(
        "import os, signal\nos.kill(os.getppid(), signal.SIGUSR1)", SIGNALS, lambda world, _: bool(world.signals)
    ),
    "limits of another": Attack(
        "import resource\nresource.prlimit(PID, resource.RLIMIT_NOFILE, (5, 5))",
        ("seccomp: other processes",),
        lambda world, _: resource.prlimit(world.process.pid, resource.RLIMIT_NOFILE) == (5, 5),
    ),
}


def take_away(monkeypatch: pytest.MonkeyPatch, *walls: str) -> None:
    settings_of = sandbox._settings

    def settings(*arguments: Any) -> dict[str, Any]:
        settings = copy.deepcopy(settings_of(*arguments))  # tables are shared
        settings["hook"] = []
        for wall in walls:
            WALLS[wall](settings)
        return settings

    monkeypatch.setattr(sandbox, "_settings", settings)


def attack_that_can_be_made(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Attack, list[str]]:
    """Return the attack and this machine's walls against it; skip the test if there are none."""
    attack = ATTACKS[name]
    walls = [wall for wall in attack.walls if _stands(wall)]
    if not walls:
        pytest.skip(f"nothing here holds it: no {', '.join(attack.walls)} (kernel: {KERNEL})")
    if not KERNEL.seccomp and any(wall.startswith("seccomp") for wall in attack.walls):
        pytest.skip("without a filter of calls, see the tests of what is weaker")
    if "privileges" in attack.walls and attack.program.startswith("assert"):
        if not ROOT:
            pytest.skip("only root reads files whose permissions say that nobody does")
        world.file.chmod(0)
    return attack, walls


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_fail(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, _ = attack_that_can_be_made(name, world, monkeypatch)
    outcome = run(world.names(textwrap.dedent(attack.program)))
    assert not attack.succeeded(world, outcome)
    # A shell that cannot be started is no exception.
    words = ("not permitted", "denied", "not allowed", "AssertionError")
    assert outcome.status == "failed" and any(word in outcome.detail for word in words), outcome


@pytest.mark.parametrize("name", ATTACKS)
def test_each_wall_is_enough(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, walls = attack_that_can_be_made(name, world, monkeypatch)
    for standing in walls:
        with monkeypatch.context() as patch:
            take_away(patch, *(wall for wall in walls if wall != standing))
            outcome = run(world.names(textwrap.dedent(attack.program)))
            assert not attack.succeeded(world, outcome), f"{standing} does not hold it: {outcome}"


@pytest.mark.parametrize("name", ATTACKS)
def test_without_walls_attacks_succeed(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, walls = attack_that_can_be_made(name, world, monkeypatch)
    take_away(monkeypatch, *walls)
    outcome = run(world.names(textwrap.dedent(attack.program)))
    assert attack.succeeded(world, outcome), outcome


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_SECRET", SECRET)
    monkeypatch.setenv("HOME", "/home/someone")
    attack = "import os\nraise ValueError(os.environ.get('SSD_SECRET'), os.environ.get('HOME'), len(os.environ) < 9)"
    assert run(attack).detail == "ValueError: (None, None, True) (line 2)"
    monkeypatch.setattr(sandbox, "_environment", lambda: dict(os.environ))
    assert run(attack).detail.startswith(f"ValueError: ('{SECRET}', '/home/someone'")


@pytest.mark.skipif(not KERNEL.landlock, reason="this kernel, or container, does not hold reading")
def test_of_the_loaders_folders_only_libraries_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deeper").mkdir()
    for name in ("libown.so.1", "key.txt", "deeper/key.txt"):
        (tmp_path / name).write_text(SECRET)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"nowhere:{tmp_path}")
    for name, detail in (
        ("libown.so.1", SECRET),
        ("key.txt", "PermissionError"),
        ("deeper/key.txt", "PermissionError"),
    ):
        outcome = run(f"raise ValueError(open({str(tmp_path / name)!r}).read())")
        assert detail in outcome.detail, name


@needs_seccomp
def test_what_it_started_ends_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "seccomp: processes")
    program = """
        import os, time
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        raise RuntimeError(f"pid={child} lives on")
        """
    outcome = run(program)
    # The parent does not wait for the child, which holds the pipes: that would be "timed out".
    assert "pid=" in outcome.detail and outcome.status == "failed"
    end = time.monotonic() + 120
    while _lives(pid := int(outcome.detail.partition("pid=")[2].split()[0])) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _lives(pid)
    monkeypatch.setattr(os, "killpg", os.kill)  # the process alone, not its session
    assert _outlived(world, run(program))


def test_a_crash_leaves_no_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "seccomp: at all")  # the filter forbids even this query
    get_dumpable = 3
    assert run(f"import ctypes\nassert ctypes.CDLL(None).prctl({get_dumpable}, 0, 0, 0, 0) == 0").passed


@needs_seccomp
@pytest.mark.parametrize(
    "program",
    [
        "import os; os.memfd_create('x')",
        "import os; os.setsid()",
        "import os; os.chdir('/')",
        "import os; os.nice(1)",
        "import os; os.sched_setaffinity(0, {0})",
        "import os; os.pidfd_open(os.getppid())",
        "import os; os.mkfifo('x')",
        "import os; open(os.devnull, 'w')",
        "import os; os.setuid(os.getuid())",
        "import os; os.killpg(0, 9)",
        "import os; os.kill(-1, 0)",
        "import socket; socket.socketpair()",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))",
        "import multiprocessing.shared_memory as m; m.SharedMemory(create=True, size=10)",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import mmap; mmap.mmap(1, 10)",
        "import fcntl; fcntl.ioctl(1, 0x5412, b'x')",
        "import ctypes as c; assert c.CDLL(None).ptrace(16, __import__('os').getppid(), 0, 0) == 0",
        "import ctypes as c; assert c.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes as c; assert c.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",  # survive the parent
        "import ctypes as c; assert c.CDLL(None).mount(b'x', b'/mnt', b'tmpfs', 0, 0) == 0",
        "import ctypes as c; assert c.CDLL(None).syscall(425, 1, c.create_string_buffer(200)) >= 0",  # io_uring
        "import ctypes as c; assert c.CDLL(None).syscall(435, c.create_string_buffer(88), 88) >= 0",  # clone3
    ],
)
def test_other_calls_are_refused(program: str) -> None:
    outcome = run(program)
    assert outcome.status == "failed"
    words = ("AssertionError", "not permitted", "not implemented", "ermission", "Input/output", "not allowed")
    assert any(word in outcome.detail for word in words), outcome


@needs_seccomp
@pytest.mark.skipif(not KERNEL.landlock, reason="this kernel, or container, has no Landlock")
def test_calls_by_the_numbers_of_another_interface_are_refused() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has others")
    # mov eax, 20 (getpid of i386); int 0x80; ret – and getpid of x32.
    i386 = """
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
        """
    outcome = run(i386)
    # A kernel without this interface kills the process.
    assert outcome.status == "stopped" and outcome.detail in ("killed by SIGSYS", "killed by SIGSEGV")
    x32 = "import ctypes\nassert ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39)) > 0"
    assert run(x32).detail == "AssertionError (line 2)"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    # Import the modules without their package, whose import takes seconds.
    code = f"""
        import sys, types
        for name in ("ssd_generation", "ssd_generation.evaluation"):
            module = types.ModuleType(name)
            module.__path__ = [{str(Path(sandbox.__file__).parents[2])!r} + "/" + name.replace(".", "/")]
            sys.modules[name] = module
        from ssd_generation.evaluation import sandbox
        sandbox.run_program("import time; time.sleep(600)", sandbox.Limits(seconds=700), allow_weaker=True)
        """
    # The folder stays, since its owner is killed.
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        end = time.monotonic() + 120
        try:
            while not (found := children.read_text().split()):
                assert parent.poll() is None and time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.3)  # until it has requested a signal at the parent's death
            assert _lives(int(found[0]))
        finally:
            parent.kill()
    while _lives(int(found[0])):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = os.listdir("/proc/self/fd")
    for program in ("pass", "assert False", "import os; os._exit(3)", "while True: pass", "def"):
        run(program, Limits(seconds=0.5) if "while" in program else CALM)
        assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == opened and threading.active_count() < 20


def test_folders_that_may_not_be_written_are_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    folder = tmp_path / "folder"
    deep = folder / "one" / "two"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (folder / "link").symlink_to(kept)
    for path in (deep, deep.parent, folder):
        path.chmod(0o100)
    sandbox._remove(str(folder))
    assert not folder.exists()
    assert kept.stat().st_mode & 0o777 == 0o500, "what a link leads to is left alone"


def test_a_sandbox_that_does_not_come_up_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of = sandbox._settings

    def settings(*arguments: Any) -> dict[str, Any]:
        return settings_of(*arguments) | {"limits": {"NONSENSE": 1}}

    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_settings", settings)
        with pytest.raises(RuntimeError, match=r"did not start .* nothing was run: AttributeError: .*NONSENSE"):
            run("pass")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_START", "raise ImportError('no such thing')")
        with pytest.raises(RuntimeError, match=r"nothing was run: .*ImportError: no such thing"):
            run("pass")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="/nowhere/python"):
        run("pass")


# --- Kernels with fewer protections --------------------------------------------------------------------------------


def test_what_the_kernel_says_of_itself_is_found() -> None:
    """The tests above are skipped only where the kernel lacks the protection."""
    if os.uname().machine in sandbox._ARCHITECTURES and "\nSeccomp_filters:" in Path("/proc/self/status").read_text():
        assert KERNEL.seccomp
    modules = Path("/sys/kernel/security/lsm")
    if modules.exists() and "landlock" in modules.read_text().split(",") and ROOT:
        assert KERNEL.landlock


def test_everything_is_covered_or_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if KERNEL.seccomp and KERNEL.landlock:
        assert run_program("pass").passed
        assert not any("hook" in by for by in protections().values())
    monkeypatch.setattr(sandbox, "_kernel", lambda: sandbox._Kernel(seccomp=True, landlock=0))
    with pytest.raises(RuntimeError, match=r"cannot confine a program fully: reading would be .*allow_weaker=True"):
        run_program("pass")
    assert [name for name, by in protections().items() if "hook" in by] == ["reading", "environment"]
    monkeypatch.setattr(sandbox, "_kernel", lambda: sandbox._Kernel(seccomp=False, landlock=0))
    with pytest.raises(RuntimeError, match="processes, programs, writing, network, other processes, reading would be"):
        run_programs(["pass"])
    monkeypatch.setattr(os, "name", "nt")
    for function in (protections, lambda: run_program("pass", allow_weaker=True)):
        with pytest.raises(RuntimeError, match="on Linux only"):
            function()


@pytest.mark.parametrize("kernel", [sandbox._Kernel(False, 0), sandbox._Kernel(KERNEL.seccomp, 0)])
@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import os; assert os.system('true') == 0",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.kill(PID, 9)",
        "open(FOLDER + '/made', 'w')",
        "import os; os.open(FILE, os.O_TRUNC)",
        "import os; os.remove(FILE)",
        "import shutil; shutil.rmtree(FOLDER)",
        "import os; os.chmod(FILE, 0)",
        "open(FILE).read()",
        "open(FILE.encode()).read()",
        "import pathlib; pathlib.Path(FILE).read_text()",
        "import os; os.listdir(FOLDER)",
        "import os; list(os.scandir(FOLDER))",
        "open('/usr/lib/../../etc/passwd').read()",
        "open('/etc/passwd').read()",
        "import os; open(f'/proc/{os.getppid()}/environ')",
        "import socket; socket.socket().connect(('127.0.0.1', PORT))",
        "import ctypes; ctypes.CDLL(None)",
    ],
)
def test_the_weaker_guard_stops_accidents(
    program: str, kernel: sandbox._Kernel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_kernel", lambda: kernel)
    outcome = run(world.names(program))
    assert outcome.status == "failed" and "Error" in outcome.detail, outcome
    assert "PermissionError" in outcome.detail or "os.system" in program, outcome
    assert world.file.read_text() == SECRET and os.listdir(world.folder) == ["file.txt"]
    assert not _was_killed(world, outcome) if "PID" in program else True


def test_the_weaker_guard_lets_good_programs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_kernel", lambda: sandbox._Kernel(seccomp=False, landlock=0))
    test_a_right_answer_passes()
    test_what_answers_import_works()
    assert run("import os\nassert os.listdir('.') == []").passed
    assert run("while True: pass", Limits(seconds=0.5)).status == "timed out"
    assert run("x = bytearray(2 << 30)").status == "stopped"
    assert run("print('x' * 10**7)").status == "stopped"


# --- The filter of calls, for both processors ----------------------------------------------------------------------

ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def verdict(program: list[_inside.Instruction], number: int, *arguments: int, architecture: int = 1) -> int:
    """Run a filter program as the kernel does, and return its verdict."""
    words = [number, architecture, 0, 0]
    for value in (*arguments, *[0] * (6 - len(arguments))):
        words += [value & 0xFFFFFFFF, value >> 32]
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            accumulator = words[value // 4]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
            at += if_true if holds[operation] else if_false


def test_checks_of_arguments() -> None:
    checks: dict[int, list[tuple[str, int, Any]]] = {
        5: [],
        6: [("one of", 1, [3, 4, 9]), ("null", 2, None)],
        7: [("bit", 0, 8), ("none of the bits", 0, 6)],
        8: [("own process", 5, None)],
    }
    program = _inside.build_filter(1, checks)
    assert verdict(program, 5) == ALLOW and verdict(program, 5, architecture=2) == KILL
    assert [verdict(program, number) for number in (4, 423, 424, 500, 0x40000005)] == [REFUSE] * 2 + [UNKNOWN] * 3
    assert [verdict(program, 6, 0, value) for value in (3, 4, 9, 1 << 32 | 9)] == [ALLOW] * 4
    assert [verdict(program, 6, 0, 3, value) for value in (1, 1 << 32, 1 << 63)] == [REFUSE] * 3
    assert [verdict(program, 6, 0, value) for value in (0, 5, 10)] == [REFUSE] * 3
    assert [verdict(program, 7, value) for value in (8, 9, 0, 1, 10, 12)] == [ALLOW] * 2 + [REFUSE] * 4
    others = (os.getpid() + 1, 0, 0xFFFFFFFF)
    assert verdict(program, 8, 0, 0, 0, 0, 0, os.getpid()) == ALLOW
    assert [verdict(program, 8, 0, 0, 0, 0, 0, other) for other in others] == [REFUSE] * 3


@pytest.mark.parametrize(
    ("call", "arguments", "allowed"),
    [
        ("clone", (0x3D0F00,), True),  # a thread, as glibc makes it
        ("clone", (0x7D0F00,), True),  # the same, as musl makes it
        ("clone", (0,), False),
        ("clone", (17,), False),  # fork
        ("clone", (1 << 32 | 17,), False),
        ("clone", (0x4111,), False),  # vfork
        ("clone", (0x100,), False),  # a process with the same memory
        ("clone", (0x3D0F00 | 0x20000,), False),  # a thread with its own mounts
        ("clone", (0x3D0F00 | 0x2000,), False),  # a traced thread
        ("openat", (0, 0, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NONBLOCK), True),
        *(
            ("openat", (0, 0, flags), False)
            for flags in (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, 0o20000000, os.O_WRONLY | os.O_APPEND)
        ),
        ("fcntl", (1, 3), True),
        *(("fcntl", (1, command), False) for command in (6, 8, 10, 15, 1024, 1031)),  # locks, owners, signals, sizes
        ("ioctl", (1, 0x5401), True),
        ("ioctl", (1, 0x5412), False),  # TIOCSTI
        ("prlimit64", (0, 7, 0, 1), True),
        ("prlimit64", (0, 7, 1, 0), False),
        ("prlimit64", (1, 7, 0, 1), False),
        ("kill", (1, 9), False),
        ("kill", (0, 9), False),
        ("tgkill", (1, 1, 9), False),
    ],
)
@pytest.mark.parametrize("machine", sandbox._ARCHITECTURES)
def test_what_calls_may_do(machine: str, call: str, arguments: tuple[int, ...], allowed: bool) -> None:
    architecture, column = sandbox._ARCHITECTURES[machine]
    calls = {entry[column]: entry[2] for entry in sandbox._CALLS.values() if entry[column] is not None}
    assert len(calls) == sum(entry[column] is not None for entry in sandbox._CALLS.values()), "no number twice"
    number = sandbox._CALLS[call][column]
    assert number is not None
    found = verdict(_inside.build_filter(architecture, calls), number, *arguments, architecture=architecture)
    assert found == (ALLOW if allowed else REFUSE)
    # Calls that would undo all protection are refused (numbers: x86-64, ARM64).
    for refused in ((59, 221), (322, 281), (101, 117), (41, 198), (272, 97), (157, 167), (126, 91), (321, 280)):
        assert verdict(_inside.build_filter(architecture, calls), refused[column], architecture=architecture) == REFUSE
