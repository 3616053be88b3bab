"""Reading of files from outside."""

from __future__ import annotations

import gzip
import os
import socket
from pathlib import Path

import pytest

from ssd_generation.support.reading import (
    CONFIG,
    DATA,
    Kind,
    filled_lines,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)

SMALL = Kind("a small file", 2**20)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "deeper than 64"),
        ("[" * 70 + "]" * 70, "deeper than 64"),
        ("9" * 400, "400 digits"),
        ("9" * 5000, "5000 digits"),
        ("[1e999]", "too large"),
        ("NaN", "not a number in JSON"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"\\udfff": 1}', "lone surrogate"),
        ('{"a": 1,\n"a" 2}', "line 2, column 5"),
        ("", "malformed"),
    ],
)
def test_what_is_no_json(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_json(text)
    file = tmp_path / "some.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_json(file, CONFIG)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_is_json() -> None:
    deep = "[" * 64 + "]" * 64
    assert parse_json(deep) is not None
    assert parse_json('{"a": [1, -2.5e3, "\\ud83d\\ude00"]}') == {"a": [1, -2500.0, "😀"]}
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="'a' occurs twice"):
        parse_json('{"a": 1, "a": 2}', unique_keys=True)


def test_only_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name in ("pipe", "device", "round", "socket", "n" * 300, "a\0b", "."):
            with pytest.raises(ValueError, match=r"is a|cannot be") as caught:
                read_bytes(tmp_path / name, SMALL)
            # The message shows the name by its repr.
            assert repr(str(tmp_path / name))[-40:] in str(caught.value)
    for name in ("missing", "device/below"):
        with pytest.raises(FileNotFoundError, match="There is no file"):
            read_bytes(tmp_path / name, SMALL)


def test_size_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b" " * SMALL.most_bytes)
    assert len(read_bytes(file, SMALL)) == SMALL.most_bytes
    file.write_bytes(b" " * (SMALL.most_bytes + 1))
    with pytest.raises(ValueError, match="at most 1 MiB"):
        read_bytes(file, SMALL)
    packed = tmp_path / "bomb.gz"
    packed.write_bytes(gzip.compress(b" " * 20 * SMALL.most_bytes))
    assert packed.stat().st_size < SMALL.most_bytes
    with pytest.raises(ValueError, match="at most 1 MiB"):
        read_text(packed, SMALL)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"text")[:-3], gzip.compress(b"t" * 99)[:-9] + b"x" * 9],
    ids=["empty", "text", "cut", "spoilt"],  # gzip stores the time, which differs between workers
)
def test_spoilt_gzip(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "data.gz"
    file.write_bytes(content)
    if not content:  # an empty file is an empty gzip file
        assert read_text(file, DATA) == ""
        return
    with pytest.raises(ValueError, match="not a whole gzip file"):
        read_text(file, DATA)


def test_lines(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes("\ufeffone\r\n\n two\u2028\x0c\nthree".encode())
    assert list(filled_lines(file, DATA)) == [(1, "one\r"), (3, " two\u2028\x0c"), (4, "three")]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        filled_lines(file, DATA)
