"""The folder of a run: what a kill leaves, what is refused, and what appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ssd_generation.files import replacing
from ssd_generation.run_folder import RunFolder

ARGUMENTS = {"model": "tiny", "new_tokens": 8, "methods": ("plain", "auto")}


def test_rows_are_on_disk_when_they_are_appended(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", ARGUMENTS) as folder:
        folder.append({"a": 1})
        assert (tmp_path / "run" / "rows.jsonl").read_text() == '{"a": 1}\n'
        folder.append({"b": "ü"})
    with RunFolder(tmp_path / "run", ARGUMENTS) as folder:
        assert folder.rows == [{"a": 1}, {"b": "ü"}]
    assert sorted(os.listdir(tmp_path / "run")) == ["config.json", "rows.jsonl"]


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
        pass  # and the lock was let go of


def test_other_arguments_are_refused_and_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ARGUMENTS):
        pass
    with RunFolder(tmp_path, {**ARGUMENTS, "methods": ["plain", "auto"]}):
        pass  # a tuple is a list in JSON
    with pytest.raises(ValueError, match=r"other arguments \(new_tokens: 8 there, 9 now\)"):
        RunFolder(tmp_path, {**ARGUMENTS, "new_tokens": 9})


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FileExistsError, match=r"is a file. Choose another folder with --output"):
        RunFolder(file, ARGUMENTS)
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds rows.jsonl without a config.json"):
        RunFolder(tmp_path, ARGUMENTS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not readable"):
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
        pytest.raises(ValueError, match="Another run is going on"),
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
        assert folder.read_json("summary.json") == {"a": 1}
        assert folder.read_json("nothing.json") is None
        folder.append({"a": 1})
    assert sorted(os.listdir(tmp_path)) == ["config.json", "rows.jsonl", "summary.json"]
    assert json.loads((tmp_path / "config.json").read_text())["methods"] == ["plain", "auto"]


def test_a_new_folder_without_a_single_row_is_taken_away(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunFolder(tmp_path / "new", ARGUMENTS):
        raise KeyError
    assert os.listdir(tmp_path) == []
    with RunFolder(tmp_path, ARGUMENTS):  # one that was there before stays
        pass
    assert os.listdir(tmp_path) == ["config.json"]
