"""Reading of a results folder: entries that no run has written are named in an error and never cause a crash."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_generation.evaluation.report import plot_runs, read_summaries, runs_markdown
from ssd_generation.harness.results import (
    check_rows,
    check_summary,
    markdown,
    ratios_so_far,
    sessions_of,
    string,
    summarise,
    summarise_pairs,
    where_measured,
)
from test_cli import Run
from test_cli import ssd as ssd  # the fixture
from test_side_by_side_report import ARGUMENTS, ENVIRONMENT, call, rows

METHODS, ITEMS = ("plain", "own", "broken"), ("a-1", "a-2", "b-1")
FILE = Path("run/rows.jsonl")
COSTS = {"plain_step": 2.0, "draft_step": 0.4, "verify": [[1, 2.0], [2, 2.0]]}


def all_rows() -> list[dict[str, Any]]:
    key = {"prompt": "a-1", "method": "own", "repeat": 0}
    return [
        *rows(),
        call("own", "a-1", "a", 2.4, costs=COSTS, assisted=dict.fromkeys(COUNTED, 1)),
        {"kind": "draws", **key, "session": 1, "tokens": 5, "impossible": 0, "excess": 0.1, "variance": 0.2},
        {"kind": "verdict", **key, "status": "passed", "detail": "", "program": "00", "seconds": 0.1},
        {"kind": "config", "method": "own", "config": {}},
        {**call("own", "b-1", "b", 1.0), "error": "ValueError: no"},
    ]


COUNTED = ("target_passes", "drafted_tokens", "accepted_tokens")


def all_pairs() -> list[dict[str, Any]]:
    sides = {side: call("own", "a-1", "a", 2.4) for side in ("here", "there")}
    return [{"kind": "pair", "session": 1, "category": "a", "prompt": "a-1", "method": "own", "repeat": 0, **sides}]


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of a document."""
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (key,)
        yield from ((key, *below) for below in places(entry))


BAD: tuple[Any, ...] = (..., None, "x", "", -1, 0, 10**30, 1e300, True, [], {}, [[]], ["x"], {"x": []})


def spoilt(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a document with one entry replaced or removed."""
    for place in places(document):
        for value in BAD:
            found = copy.deepcopy(document)
            inner: Any = found
            for key in place[:-1]:
                inner = inner[key]
            if value is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            yield f"{place} = {value!r}", found


def complaint_of(check: Callable[..., Any], *arguments: Any) -> str | None:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["methods", "paired"])
def test_rows_are_refused_or_can_be_summed_up(kind: str) -> None:
    good = all_rows() if kind == "methods" else all_pairs()
    sum_up: Callable[..., dict[str, Any]] = summarise if kind == "methods" else summarise_pairs
    check_rows(good, FILE, METHODS, ITEMS)
    refused = 0
    for what, found in spoilt(good):
        if not all(isinstance(row, dict) for row in found):
            continue  # `run_folder` has refused these already
        if complaint := complaint_of(check_rows, found, FILE, METHODS, ITEMS):
            assert "'run/rows.jsonl', line " in complaint and len(complaint) < 400, what
            refused += 1
            continue
        for sampling in (False, True):
            try:
                arguments = {**ARGUMENTS, "do_sample": sampling}
                ratios_so_far(found)
                where_measured([ENVIRONMENT], found)
                markdown(
                    sum_up(found, arguments, [ENVIRONMENT], 10_000) if kind == "methods" else sum_up(found, arguments),
                    "x",
                )
            except Exception as error:
                raise AssertionError(what) from error
    assert refused > 500


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({}, "'kind' is missing"),
        ({"kind": 3}, '"kind": a text is needed, but it is 3'),
        ({"kind": "call"}, "'prompt' is missing"),
        (call("own", "a-1", "a", 0.0), '"seconds": a number above 0 is needed, but it is 0.0'),
        (call("own", "a-1", "a", 1.0, ()), '"token_ids": a list of at least 1 is needed'),
        (call("other", "a-1", "a", 1.0), 'this run has no method "other"'),
        (call("plain", "x" * 300, "a", 1.0), 'this run has no prompt called "xxx'),
        (call("plain", "a-1", "a", 1.0, costs={"plain_step": 1}), "lacks 'draft_step'"),
    ],
)
def test_a_row_that_no_run_has_written_is_named(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match="line 11 is damaged") as caught:
        check_rows([*rows(), row], FILE, METHODS, ITEMS)
    assert complaint in str(caught.value)
    check_rows([{"kind": "of a later version"}], FILE, METHODS, ITEMS)
    with pytest.raises(ValueError, match="'text' is missing"):
        check_rows(rows(), FILE, METHODS, ITEMS, {"text": string})


def test_counts_that_do_not_go_together() -> None:
    good = call("own", "a-1", "a", 1.0)
    for change in (
        {"rounds": 1},
        {"rounds": 10**9, "tokens_per_round_histogram": {"1": 10**9}},
        {"tokens_per_round_histogram": {"99999999": 2}},
        {"tokens_per_round_histogram": {"0": 2}},
        {"judged_by_depth": [1]},
        {"looked_up_tokens": 99},
        {"verify_seconds": 0.0},
    ):
        row = {**good, "speculation": {**good["speculation"], **change}}
        with pytest.raises(ValueError, match="line 1 is damaged"):
            check_rows([row], FILE, METHODS, ITEMS)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"sessions": 3}', '{"sessions": [3]}', '{"sessions": [{"session": []}]}', "[" * 9999, "\0"],
)
def test_sessions_that_no_run_has_written(tmp_path: Path, content: str) -> None:
    assert sessions_of(tmp_path) == []
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(ValueError, match=r"environment\.json"):
        sessions_of(tmp_path)


def test_sessions_are_refused_or_can_be_told(tmp_path: Path) -> None:
    file = tmp_path / "environment.json"
    for what, found in spoilt({"sessions": [{"session": 1, "started": "now", "load_average": 0.1, **ENVIRONMENT}]}):
        file.write_text(json.dumps(found))
        if complaint_of(sessions_of, tmp_path):
            continue
        try:
            markdown(summarise(rows(), ARGUMENTS, where_measured(sessions_of(tmp_path), rows())), "x")
        except Exception as error:
            raise AssertionError(what) from error


# --- summaries and reports ------------------------------------------------------------------------

INTERVAL = {"mean": 0.5, "low": 0.4, "high": 0.6}


def summary() -> dict[str, Any]:
    arguments = {**ARGUMENTS, "task": "chat", "style": "chat", "shots": None, "temperature": 1.0, "top_p": None}
    found = summarise(all_rows(), arguments, [ENVIRONMENT, {**ENVIRONMENT, "commit": None}])
    quality = {"rouge1": {**INTERVAL, "questions": 3, "difference": INTERVAL, "same": 1, "compared": 3}}
    return {**found, "quality": {"plain": quality, "own": quality}, "complete": True}


def test_summaries_are_refused_or_can_be_put_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    check_summary(summary())
    refused = 0
    for what, found in spoilt(summary()):
        if complaint := complaint_of(check_summary, found):
            assert len(complaint) < 400, what
            refused += 1
            continue
        try:
            runs_markdown({"r": found})
        except Exception as error:
            raise AssertionError(what) from error
    assert refused > 300


@pytest.mark.parametrize(
    "content",
    [
        *("", "3", "[]", "{}", "[" * 100_000, "null", '"kind"', "NaN", "9" * 5000),
        *('{"kind": []}', '{"kind": "methods"}', '{"kind": "methods", "methods": {"x": 3}}'),
    ],
)
def test_a_summary_that_no_run_has_written(content: str, ssd: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "summary.json").write_text(content)
    done = ssd("report", str(folder))
    assert done.status == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert "summary.json" in done.err


@pytest.mark.parametrize("change", [{"quality": 0}, {"plain": None}, {"methods": []}, {"environment": {"cpu": "x"}}])
def test_reports_name_the_field_that_is_wrong(change: dict[str, Any], ssd: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "summary.json").write_text(json.dumps({**summary(), **change}))
    done = ssd("report", str(tmp_path / "r"))
    assert done.status == 2 and done.err.count("\n") == 1 and f'"{next(iter(change))}"' in done.err


def test_reports_of_what_is_no_folder(ssd: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "summary.json")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for name in ("round", "pipe", "socket", "n" * 300, "~nobody-of-that-name"):
            done = ssd("report", name if name.startswith("~") else str(tmp_path / name))
            assert done.status == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err


def test_what_a_report_shows_is_only_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bad = "a|b<script>\n# *x* \x1b[2J$\\frac$" + "n" * 300
    found = summary()
    text = json.dumps(found).replace('"own"', json.dumps(bad)).replace('"tiny"', json.dumps("# " + bad))
    text = text.replace('"b"', json.dumps(bad)).replace('"a-2"', json.dumps(bad)).replace("ValueError: no", "# <b>|")
    found = json.loads(text)
    folder = tmp_path / "a|b<script>"
    folder.mkdir()
    (folder / "summary.json").write_text(text)
    summaries = read_summaries([folder])
    for page in (markdown(found, "Benchmark"), runs_markdown(summaries)):
        assert "<" not in page and "\x1b" not in page and "a\\|b&lt;script&gt;\\\\n# \\*x\\*" in page
        lines = page.splitlines()
        for header, line in ((header, line) for header in lines if header.startswith("| method") for line in lines):
            if line.startswith("|") and lines.index(line) > lines.index(header):
                cells = line.replace("\\|", "").count("|")
                assert cells in {one.replace("\\|", "").count("|") for one in lines if one.startswith(("| m", "| r"))}
        assert all(line.startswith(("# Benchmark", "# Runs", "## ")) for line in lines if line.startswith("#"))
        assert not any(line.startswith("- #") for line in lines)
    plot_runs(summaries, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
