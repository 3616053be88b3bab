"""The folder of a run: recovery after a kill, refusals, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import forked
from lock_worker import enter_and_leave
from ssd_generation.harness.results import RunFolder, read_rows
from ssd_generation.support import files
from ssd_generation.support.files import Lock, replacing

ARGUMENTS = {"model": "tiny", "new_tokens": 8, "methods": ("plain", "auto")}


def names(folder: Path) -> list[str]:
    """Return the names in a folder, without the lock."""
    return sorted(set(os.listdir(folder)) - {".lock"})


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return all files below a folder, with their modification times."""
    return {
        str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_rows_are_on_disk_when_they_are_appended(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", ARGUMENTS) as folder:
        folder.append({"a": 1})
        assert (tmp_path / "run" / "rows.jsonl").read_text() == '{"a": 1}\n'
        folder.append({"b": "ü"})
    with RunFolder(tmp_path / "run", ARGUMENTS) as folder:
        assert folder.rows == [{"a": 1}, {"b": "ü"}]
    assert names(tmp_path / "run") == ["config.json", "rows.jsonl"]


def test_a_row_cut_off_anywhere_is_dropped(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS) as folder:
        folder.append({"a": 1})
        folder.append({"b": 2})
    whole = (tmp_path / "rows.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        (tmp_path / "rows.jsonl").write_bytes(whole[:cut])
        with RunFolder(tmp_path, ARGUMENTS) as folder:
            assert folder.rows == [{"a": 1}]
            folder.append({"c": 3})
        assert (tmp_path / "rows.jsonl").read_bytes() == whole[:first] + b'{"c": 3}\n'


def test_a_damaged_row_is_not_passed_over(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS):
        pass
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(ValueError, match="line 2 is damaged"), RunFolder(tmp_path, ARGUMENTS):
        pass
    with pytest.raises(ValueError, match="line 2 is damaged"), RunFolder(tmp_path, ARGUMENTS):
        pass  # the lock was released


def test_other_arguments_are_refused_and_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS):
        pass
    with RunFolder(tmp_path, {**ARGUMENTS, "methods": ["plain", "auto"]}):
        pass  # a tuple becomes a list in JSON
    with pytest.raises(ValueError, match=r"other arguments \(new_tokens: 8 there, 9 now\)"):
        RunFolder(tmp_path, {**ARGUMENTS, "new_tokens": 9})


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FileExistsError, match=r"is a file. Choose another folder with --output"):
        RunFolder(file, ARGUMENTS)
    file.unlink()
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds rows.jsonl without a config.json"):
        RunFolder(tmp_path, ARGUMENTS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON that can be read: line 1"):
        RunFolder(tmp_path, ARGUMENTS)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match=r"cannot be written to .*Choose another folder with --output"):
        RunFolder(file / "below", ARGUMENTS)

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(PermissionError, match=r"cannot be written to .*: Permission denied"):
        RunFolder(tmp_path / "run", ARGUMENTS)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path, ARGUMENTS),
        pytest.raises(ValueError, match="Another run is in progress"),
        RunFolder(tmp_path, ARGUMENTS),
    ):
        pass
    with RunFolder(tmp_path, ARGUMENTS):
        pass


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS) as folder:
        folder.write_json("summary.json", {"a": 1})
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.write_json("summary.json", {"a": float("nan")})
        with pytest.raises(KeyboardInterrupt), replacing(folder.path / "summary.json") as path:
            path.write_text("half of")
            raise KeyboardInterrupt
        assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
        folder.append({"a": 1})
    assert names(tmp_path) == ["config.json", "rows.jsonl", "summary.json"]
    assert json.loads((tmp_path / "config.json").read_text())["methods"] == ["plain", "auto"]


def test_a_new_folder_without_a_single_row_is_taken_away(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunFolder(tmp_path / "new", ARGUMENTS):
        raise KeyError
    assert os.listdir(tmp_path) == []
    with RunFolder(tmp_path, ARGUMENTS):  # a folder that existed before stays
        pass
    assert names(tmp_path) == ["config.json"]


# --- folders with other contents ------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["summary.md", "environment.json", "plot.png", "parts/1/rows.jsonl", ".hidden", "config.json"]
)
def test_a_folder_of_somebody_else_is_left_as_it_is(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text('{"mine": true}\n')
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"without a config.json|other arguments") as caught:
        RunFolder(tmp_path, ARGUMENTS)
    assert "--output" in str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", ["[]", "3", "[" * 9999, '{"a": 1e999}', "null"])
def test_a_config_that_no_run_has_written(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json.* Choose another folder"):
        RunFolder(tmp_path, ARGUMENTS)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    for name in ("config.json", "rows.jsonl"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        if name != "config.json":
            (folder / "config.json").write_text(json.dumps(ARGUMENTS))
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match="is a pipe"), RunFolder(folder, ARGUMENTS):
            pass
    with pytest.raises(OSError, match="cannot be written"):
        RunFolder(tmp_path / ("n" * 300), ARGUMENTS)
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(OSError, match=r"cannot be written|is a file"):
        RunFolder(tmp_path / "round", ARGUMENTS)


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    left = [".ssd-" + 32 * "a" + ".png", "." + 32 * "0" + ".plot.png", "." + 32 * "0" + ".config.json"]
    kept = [".hidden.png", "." + 31 * "0" + ".png", "ssd.png"]
    for name in left:
        (tmp_path / name).touch()
    with RunFolder(tmp_path, ARGUMENTS) as folder:  # such a folder counts as empty
        assert names(tmp_path) == ["config.json"]
        folder.append({"a": 1})
    for name in left + kept:
        (tmp_path / name).touch()
    with RunFolder(tmp_path, ARGUMENTS):
        assert names(tmp_path) == sorted([*kept, "config.json", "rows.jsonl"])


def test_arguments_are_compared_when_the_folder_is_held(tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run", {**ARGUMENTS, "new_tokens": 9})
    with RunFolder(tmp_path / "run", ARGUMENTS) as folder:
        folder.append({"a": 1})
    with pytest.raises(ValueError, match="other arguments"), late:
        pass
    assert read_rows(tmp_path / "run") == [{"a": 1}]
    with RunFolder(tmp_path / "run", ARGUMENTS):  # it was released
        pass


# --- a full disk ----------------------------------------------------------------------------------


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_the_first_row(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="too large"),
        RunFolder(tmp_path / "run", ARGUMENTS) as folder,
        no_file_beyond(200),
    ):
        folder.append({"a": "x" * 300})
    with RunFolder(tmp_path / "run", ARGUMENTS) as folder:
        folder.append({"a": 1})
    assert read_rows(tmp_path / "run") == [{"a": 1}]


def test_a_row_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS) as folder:
        folder.append({"a": 1})
        with pytest.raises(OSError, match="too large"), no_file_beyond(200):
            folder.append({"a": "x" * 300})
        folder.append({"b": 2})
        assert folder.rows == [{"a": 1}, {"b": 2}] == read_rows(tmp_path)


def test_a_disk_that_is_full_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too large"), no_file_beyond(5), RunFolder(tmp_path / "run", ARGUMENTS):
        pass
    assert os.listdir(tmp_path) == []


def test_half_a_character_can_be_read_again(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS) as folder:
        folder.append({"error": "no file \udcff", "text": "a\u2028b\x0cc\x85d"})
    with RunFolder(tmp_path, ARGUMENTS) as folder:
        assert folder.rows == [{"error": "no file ?", "text": "a\u2028b\x0cc\x85d"}]


@pytest.mark.parametrize("suffix", ["", ".json", "." + "s" * 100])
def test_names_of_any_length_can_be_replaced(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / ("n" * (255 - len(suffix)) + suffix)
    files.write_whole(file, "text")
    assert os.listdir(tmp_path) == [file.name] and file.read_text() == "text"
    with replacing(file) as path:
        assert path.suffix == (suffix if len(suffix) < 10 else "") and len(path.name) < 60
        path.touch()


# --- one holder -----------------------------------------------------------------------------------


def test_a_lock_that_was_taken_away_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (Lock(tmp_path / "lock") for _ in range(3))
    assert first.acquire() and not second.acquire()
    real = files._try_to_lock

    def gone_meanwhile(descriptor: int) -> bool:
        """Let the holder remove the file between opening and locking, and a third process create another."""
        monkeypatch.setattr(files, "_try_to_lock", real)
        (tmp_path / "lock").unlink()
        first.release()
        assert third.acquire()
        return real(descriptor)

    monkeypatch.setattr(files, "_try_to_lock", gone_meanwhile)
    assert not second.acquire()
    third.release()
    assert second.acquire() and (tmp_path / "lock").exists()
    second.release()


def test_a_folder_goes_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Path.unlink, []

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name == ".lock" or (self.parent / ".lock").exists():
            other = Lock(self.parent / ".lock")
            seen.append((self.name, other.acquire()))
            other.release()
        real(self, missing_ok)

    folder = RunFolder(tmp_path / "run", ARGUMENTS)
    with folder:
        monkeypatch.setattr(Path, "unlink", unlink)
    assert ("config.json", False) in seen and seen[-1] == (".lock", False) and not any(held for _, held in seen)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", ["nothing", "rows", "taken away"])
def test_there_are_never_two_holders(tmp_path: Path, way: str) -> None:
    """Processes enter and leave as fast as they can; SSD_LOCK_SECONDS and SSD_LOCK_PROCESSES extend the test."""
    seconds = float(os.environ.get("SSD_LOCK_SECONDS", "0.8"))
    count = int(os.environ.get("SSD_LOCK_PROCESSES", "4"))
    entries = violations = 0
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(forked(enter_and_leave, tmp_path, seconds, way)) for _ in range(count)]
        for worker in workers:
            assert worker.hear() == "ready"
        for worker in workers:
            worker.pipe.send("go on")
        for worker in workers:
            entered, met = worker.ends_well()
            entries, violations = entries + entered, violations + met
    print(f"{way}: {count} processes, {seconds} s, {entries} entries, {violations} met another holder")
    assert violations == 0 and entries > 0
    if way == "taken away":
        assert not (tmp_path / "run").exists()
    if way == "rows":
        assert len(read_rows(tmp_path / "run")) > 0
