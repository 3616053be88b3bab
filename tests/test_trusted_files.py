"""Stored files are used only if no other user than this one or root can have written them; otherwise made again."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import random
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_generation.forward.copies.resident import FOLDER, drafting_model
from ssd_generation.models import loading
from ssd_generation.native.codegen import compiler
from ssd_generation.search import calibration
from ssd_generation.support import files, measurements, trusted
from ssd_generation.support.reading import MEASUREMENT, Kind, read_bytes
from test_offloaded import INT4, draft_of, on_disk, on_disk_again
from tiny_models import tiny_model

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other owners and modes")

ROOT = Path(__file__).resolve().parents[1]
OTHER_USER = 54321
MODULE = """
define i64 @run() { ret i64 NUMBER }
"""

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user"
)
compiles = pytest.mark.skipif(compiler.why_not() is not None, reason=f"no code can be made: {compiler.why_not()}")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_said", set())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def anything_allowed() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def give_away(path: Path) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


def by_link(path: Path) -> None:
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILT_FILES = {
    "of another user": pytest.param(give_away, marks=needs_root),
    "writable by the group": lambda path: path.chmod(0o664),
    "writable by all": lambda path: path.chmod(0o646),
    "a link": by_link,
    "a FIFO": as_fifo,
}
SPOILT_FOLDERS = {
    "of another user": pytest.param(give_away, marks=needs_root),
    "writable by the group": lambda path: path.chmod(0o775),
    "writable by all": lambda path: path.chmod(0o757),
    "sticky and writable by all": lambda path: path.chmod(0o1777),
}


def each(cases: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spoil", cases.values(), ids=cases.keys())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def modes(folder: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"folders": set(), "files": set()}
    for path in (folder, *folder.rglob("*")):
        found["folders" if path.is_dir() else "files"].add(stat.S_IMODE(path.lstat().st_mode))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# compiled code


def compilations(monkeypatch: pytest.MonkeyPatch, name: str = "nothing", number: int = 1) -> int:
    """Count how often a new process compiles a module; check that its function returns the right number."""
    count = 0

    def text() -> str:
        nonlocal count
        count += 1
        return MODULE.replace("NUMBER", str(number))

    monkeypatch.setattr(compiler, "_engines", {})
    address = compiler.address_of(name, "of the test", text)
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == number
    return count


@pytest.fixture
def code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of compiled code."""
    if compiler.why_not() is not None:
        pytest.skip(f"no code can be made: {compiler.why_not()}")
    assert compilations(monkeypatch) == 1
    assert compilations(monkeypatch) == 0
    (file,) = (cache / "code").iterdir()
    return file


@each(SPOILT_FILES)
def test_code_that_others_can_have_written_is_compiled_anew(
    code: Path, spoil: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = code.read_bytes()
    spoil(code)
    assert compilations(monkeypatch) == 1
    (said,) = warnings_of(caplog)
    assert "Compiling again" in said and str(code) in said
    assert code.read_bytes() == content and stat.S_IMODE(code.lstat().st_mode) == 0o644 and not code.is_symlink()
    assert code.stat().st_uid == os.geteuid()
    assert compilations(monkeypatch) == 0


@each({**SPOILT_FOLDERS, "a link": by_link})
@pytest.mark.parametrize("which", ["code", "cache"])
def test_nothing_is_taken_from_a_folder_that_others_can_write_to(
    code: Path,
    which: str,
    spoil: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = code.parent if which == "code" else code.parent.parent
    assert measured_anew({"what": "nothing"})
    spoil(folder)
    if spoil is by_link and which == "cache":
        assert compilations(monkeypatch) == 0  # the cache may be on another disk
        return
    before = code.stat()
    for _ in range(2):
        assert compilations(monkeypatch) == 1
        assert measured_anew({"what": "nothing"}) is (which == "cache")
    (said,) = warnings_of(caplog)
    assert str(folder) in said and "SSD_GENERATION_CACHE" in said
    status = folder.lstat()
    is_to_mend = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX
    assert (f"`chmod -R go-w '{folder}'`" in said) is is_to_mend
    assert code.stat().st_mtime_ns == before.st_mtime_ns and len(list(code.parent.iterdir())) == 1


def test_folders_that_others_can_read_are_used(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (code, code.parent, code.parent.parent):
        path.chmod(0o755)
    assert compilations(monkeypatch) == 0


@needs_root
def test_the_files_of_root_are_used_and_no_others(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    assert compilations(monkeypatch) == 0
    give_away(code)
    assert compilations(monkeypatch) == 0
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER + 1)
    assert compilations(monkeypatch) == 1


def test_a_cache_that_cannot_be_written_to_is_read(
    code: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opens = os.open

    def read_only(path: Any, flags: int, *args: Any, **keywords: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opens(path, flags, *args, **keywords)

    monkeypatch.setattr(os, "open", read_only)
    assert compilations(monkeypatch) == 0
    for _ in range(2):
        assert compilations(monkeypatch, "another") == 1
        assert measured_anew({"what": "read only"})
    (said,) = warnings_of(caplog)
    assert str(code.parent.parent) in said and "Read-only file system" in said and "SSD_GENERATION_CACHE" in said


@compiles
@pytest.mark.usefixtures("anything_allowed")
def test_what_is_made_is_writable_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = tmp_path / "made"
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(made / "for" / "this"))
    compilations(monkeypatch)
    assert measured_anew({"what": "umask"}) and not measured_anew({"what": "umask"})
    ids = torch.arange(3, 9)[None]
    assert [calibration._continuation(tiny_model(), "weights", ids, 2)[1] > 0 for _ in range(2)] == [True, False]
    assert len([path for path in made.rglob("*") if path.is_file()]) == 3
    assert modes(made) == {"folders": {0o700}, "files": {0o644}}
    assert warnings_of(caplog) == []


def test_a_relative_cache_folder_is_refused(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSD_GENERATION_CACHE", "cache")
    assert (Path("cache") / "code" / code.name).exists()
    with pytest.raises(ValueError, match=r"SSD_GENERATION_CACHE must be an absolute path, but got 'cache'"):
        files.default_cache_dir()
    with pytest.raises(ValueError, match="must be an absolute path"):
        loading.fetch_demo(progress=False)
    for _ in range(2):
        assert compilations(monkeypatch) == 1
        assert measured_anew({"what": "relative"})
    (said,) = warnings_of(caplog)
    assert "'cache'" in said and "absolute path" in said
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["code"]


def test_a_relative_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSD_GENERATION_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "here")
    with pytest.raises(ValueError, match=r"must be an absolute path, but got 'here/.cache'"):
        files.default_cache_dir()


def naive(code: bytes) -> bytes:
    """Return a file in the first format, whose digest any user can compute for their own code."""
    return hashlib.sha256(code).digest() + code


def mutated(rng: random.Random, contents: list[bytes]) -> bytes:
    """Return the first content, changed as a disk error, a killed process or another user might change it."""
    content, other = contents[0], rng.choice(contents[1:])
    head, code = content[:32], content[32:]
    at, length = rng.randrange(len(content)), rng.randrange(1, 64)
    flipped = bytearray(content)
    for _ in range(rng.randrange(1, 9)):
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return rng.choice(
        [
            lambda: b"",
            lambda: content[:at],
            lambda: content[at:],
            lambda: content + rng.randbytes(length),
            lambda: content[:at] + content[at + length :],
            lambda: content[:at] + rng.randbytes(length) + content[at:],
            lambda: bytes(flipped),
            lambda: naive(bytes(flipped[32:])),
            lambda: naive(code),
            lambda: naive(code[:at]),
            lambda: other,
            lambda: naive(other[32:]),
            lambda: head + other[32:],
            lambda: other[:32] + code,
            lambda: content[:at] + other[at:],
            lambda: bytes(len(content)),
            lambda: rng.randbytes(at),
            lambda: naive(rng.randbytes(at)),
            lambda: naive(b""),
            lambda: hashlib.sha256(b"").digest(),
        ]
    )()


def test_of_a_thousand_mutated_objects_none_is_executed(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = code.name.removesuffix(".o")
    compilations(monkeypatch, "two", 2)
    compilations(monkeypatch, "three", 3)
    original = code.read_bytes()
    contents = [original, *(path.read_bytes() for path in code.parent.iterdir() if path != code)]
    assert len(contents) == 3
    assert compiler._read(key) == original[32:]
    for seed in range(1000):
        rng = random.Random(seed)
        while (content := mutated(rng, contents)) == original:
            pass
        code.write_bytes(content)
        assert compiler._read(key) is None, f"seed {seed}"
    code.write_bytes(original)
    assert compiler._read(key) == original[32:]


CHILD = """
    import ctypes
    import logging
    import sys
    from ssd_generation.native.codegen import compiler

    logging.basicConfig(format="%(message)s")
    for name in sys.argv[1:]:
        counted = []

        def text():
            counted.append(1)
            return "define i64 @run() { ret i64 1 }"

        print(name, end=" ", flush=True)
        for _ in range(2):
            compiler._engines.clear()
            address = compiler.address_of(name, "of the test", text)
            print(ctypes.CFUNCTYPE(ctypes.c_int64)(address)(), len(counted), end=" ", flush=True)
        print()
"""

OTHER_FUNCTION = """
declare void @_exit(i32)
define i64 @other() {
  call void @_exit(i32 9)
  ret i64 0
}
"""


def object_of(text: str) -> bytes:
    import llvmlite.binding as llvm

    compiler._machine()
    made: bytes = compiler._new_machine().emit_object(llvm.parse_assembly(text))
    return made


@compiles
def test_objects_that_crashed_the_process_or_made_it_wait(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = object_of(OTHER_FUNCTION)
    spoilt: dict[str, Callable[[bytes], bytes]] = {
        "fifo": lambda content: content,
        "another": lambda content: naive(other),
        "empty": lambda content: naive(b""),
        "cut": lambda content: content[: len(content) // 2],
        "headless": lambda content: naive(content[32 : len(content) // 2]),
    }
    written: dict[Path, bytes] = {}
    for name, spoil in spoilt.items():
        compilations(monkeypatch, name)
        (code,) = (cache / "code").glob(f"{name}-*.o")
        written[code] = code.read_bytes()
        code.write_bytes(spoil(written[code]))
        if name == "fifo":
            as_fifo(code)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), *spoilt], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines() == [f"{name} 1 1 1 1 " for name in spoilt]
    assert done.stderr.count("Compiling again") == len(spoilt)
    assert all(str(code) in done.stderr and code.read_bytes() == content for code, content in written.items())


def test_code_without_the_function_is_compiled_anew(
    code: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = object_of(OTHER_FUNCTION.replace("call void @_exit(i32 9)", "").replace("declare void @_exit(i32)", ""))
    code.write_bytes(compiler._digest(code.name.removesuffix(".o"), other) + other)
    assert compilations(monkeypatch) == 1
    (said,) = warnings_of(caplog)
    assert "has no function 'run'" in said
    assert compilations(monkeypatch) == 0
    with pytest.raises(RuntimeError, match="has no function 'walk'"):
        compiler.address_of("nothing", "of the test", lambda: MODULE.replace("NUMBER", "1"), "walk")


# ----------------------------------------------------------------------------------------------------------------------
# measurements and calibration texts


def measured_anew(described: dict[str, Any]) -> bool:
    """Tell whether a new process repeats an earlier measurement."""
    calls: list[int] = []

    def measure() -> int:
        calls.append(1)
        return 3

    assert measurements.cached_measurement(torch.nn.Linear(1, 1), described, measure) == 3
    return bool(calls)


@each({**SPOILT_FILES, "a folder": as_folder})
def test_measurements_that_others_can_have_written_are_made_anew(
    cache: Path, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert measured_anew({"what": "test"}) and not measured_anew({"what": "test"})
    (file,) = (cache / "costs").iterdir()
    spoil(file)
    assert measured_anew({"what": "test"})
    assert str(file) in warnings_of(caplog)[0]
    assert measured_anew({"what": "test"}) is (spoil is as_folder)


@each(SPOILT_FOLDERS)
def test_measurements_of_a_folder_that_others_can_write_to(
    cache: Path, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert measured_anew({"what": "test"})
    spoil(cache / "costs")
    for number in range(3):
        assert measured_anew({"what": "test"}) and measured_anew({"what": number})
    (said,) = warnings_of(caplog)
    assert str(cache / "costs") in said


@each(SPOILT_FILES)
def test_continuations_that_others_can_have_written_are_generated_anew(
    cache: Path, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model(), torch.arange(3, 9)[None]
    first, passes = calibration._continuation(model, "weights", ids, 2)
    assert passes > 0
    (file,) = (cache / "calibration").iterdir()
    spoil(file)
    again, passes = calibration._continuation(model, "weights", ids, 2)
    assert torch.equal(first, again) and passes > 0
    assert len(warnings_of(caplog)) == 1
    assert calibration._continuation(model, "weights", ids, 2)[1] == 0


def test_a_continuation_without_a_cache_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", "relative")
    for _ in range(2):
        assert calibration._continuation(tiny_model(), "weights", torch.arange(3, 9)[None], 2)[1] > 0
    (said,) = warnings_of(caplog)
    assert "'relative'" in said


# ----------------------------------------------------------------------------------------------------------------------
# copies of offloaded weights


def counts_of(model: Any) -> tuple[int, int]:
    """Return the number of copies that a new process makes, and the number it reads."""
    drafting_model(model, INT4)
    return draft_of(model).made, draft_of(model).read


@each(SPOILT_FILES)
def test_copies_that_others_can_have_written_are_made_again(
    tmp_path: Path, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = counts_of(on_disk(tmp_path))
    spoil(max((tmp_path / FOLDER).iterdir(), key=lambda path: path.stat().st_size))
    assert sum(counts_of(on_disk_again(tmp_path))) == made
    assert caplog.text.count("making it again") == 1
    assert counts_of(on_disk_again(tmp_path)) == (0, made)
    assert caplog.text.count("making it again") == 1


@each(SPOILT_FOLDERS)
def test_copies_in_a_folder_that_others_can_write_to(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    made, _ = counts_of(on_disk(tmp_path))
    names = sorted((tmp_path / FOLDER).iterdir())
    spoil(tmp_path / FOLDER)
    model = on_disk_again(tmp_path)
    with pytest.warns(UserWarning, match="could not be stored in .*they are in memory for this process") as given:
        assert counts_of(model) == (made, 0)
    assert len(given) == 1 and str(tmp_path / FOLDER) in str(given[0].message)
    assert sorted((tmp_path / FOLDER).iterdir()) == names


@pytest.mark.usefixtures("anything_allowed")
def test_copies_are_writable_by_nobody_else(tmp_path: Path) -> None:
    counts_of(on_disk(tmp_path))
    found = modes(tmp_path / FOLDER)
    assert found["folders"] == {0o700} and found["files"] <= {0o644, 0o600}


def test_only_copies_are_taken_away(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    mine = [folder / name for name in ("report-1.txt", "report-2.txt", "notes.safetensors")]
    for number, path in enumerate(mine):
        path.write_text("mine")
        os.utime(path, (number, number))
    counts_of(on_disk(tmp_path))
    assert all(path.exists() for path in mine)


# ----------------------------------------------------------------------------------------------------------------------
# the demo model


@pytest.fixture
def demo(cache: Path) -> Path:
    folder = cache / loading._DEMO.name
    cache.mkdir(mode=0o755)
    folder.mkdir(mode=0o755)
    (folder / "config.json").write_text("{}")
    loading._write_marker(folder)
    assert loading._is_complete(folder) and loading.fetch_demo() == folder
    return folder


@each({**SPOILT_FILES, "a folder": as_folder})
@pytest.mark.parametrize("name", ["config.json", "COMPLETE"])
def test_a_demo_that_others_can_have_written_is_not_used(
    demo: Path, name: str, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(demo / name)
    assert not loading._is_complete(demo)
    (said,) = warnings_of(caplog)
    assert str(demo / name) in said and "fetched again" in said


@each({**SPOILT_FOLDERS, "a link": by_link})
def test_a_demo_in_a_folder_that_others_can_write_to(demo: Path, spoil: Callable[[Path], Any]) -> None:
    spoil(demo)
    assert not loading._is_complete(demo)


@each(SPOILT_FOLDERS)
def test_a_cache_that_others_can_write_to_holds_no_demo(demo: Path, spoil: Callable[[Path], Any]) -> None:
    spoil(demo.parent)
    with pytest.raises(OSError, match=r"The demo model is stored under .*SSD_GENERATION_CACHE"):
        loading.fetch_demo(progress=False)


def test_a_marker_names_files_of_its_folder_only(demo: Path) -> None:
    (demo.parent / "outside").write_text("{}")
    marker = demo / "COMPLETE"
    marker.write_text(marker.read_text().replace("config.json", "../outside"))
    assert not loading._is_complete(demo)


@pytest.mark.usefixtures("anything_allowed")
def test_a_converted_demo_is_writable_by_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert modes(folder) == {"folders": {0o777}, "files": {0o666}}
    loading._protect(folder)
    assert modes(folder) == {"folders": {0o700}, "files": {0o644}}


# ----------------------------------------------------------------------------------------------------------------------
# the module itself


def test_the_open_file_is_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    trusted.store(file, b"first")
    with trusted.opened(file) as stream:
        name = trusted.name_of_open(stream, file)
        trusted.store(file, b"second")
        assert Path(name).read_bytes() == (b"first" if name != str(file) else b"second")
        assert stream.read() == b"first"
    assert file.read_bytes() == b"second"


def test_stored_files_have_a_size(tmp_path: Path) -> None:
    trusted.store(tmp_path / "file", bytes(101))
    with pytest.raises(ValueError, match="too large"):
        read_bytes(tmp_path / "file", Kind("a file", 100), within=tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", MEASUREMENT, within=tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none" / "none", MEASUREMENT, within=tmp_path)


def test_what_is_not_complete_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), trusted.storing(tmp_path / "new" / "file", tmp_path) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) & 0o022 == 0
        raise KeyboardInterrupt
    assert list((tmp_path / "new").iterdir()) == []


def test_without_owners_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_HAS_OWNERS", False)  # as on Windows
    file = tmp_path / "folder" / "file"
    trusted.store(file, b"content", tmp_path)
    tmp_path.chmod(0o777)
    assert read_bytes(file, MEASUREMENT, within=tmp_path) == b"content"
    as_fifo(file)
    with pytest.raises(trusted.UntrustedError, match="not a regular file"):
        read_bytes(file, MEASUREMENT, within=tmp_path)


def test_a_folder_of_another_user_in_between(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "file"
    trusted.store(file, b"content", tmp_path)
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(trusted.UntrustedFolderError, match=r"/a'.* can be written to by others \(mode 0777\)"):
        read_bytes(file, MEASUREMENT, within=tmp_path)
    (tmp_path / "a").chmod(0o700)
    shutil.move(tmp_path / "a" / "b", tmp_path / "c")
    (tmp_path / "a" / "b").symlink_to(tmp_path / "c")
    with pytest.raises(trusted.UntrustedFolderError, match="a link"):
        read_bytes(file, MEASUREMENT, within=tmp_path)
