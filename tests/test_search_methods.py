"""Comparison of search methods."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from lab.search_methods import __main__ as command
from lab.search_methods.__main__ import main
from lab.search_methods.methods import METHODS, ComparisonSettings, SearchMethod, compare_methods
from lab.search_methods.page import table
from search_worker import calibration, cost_profile
from ssd_generation.models import load_model
from ssd_generation.tuning.measuring import describe_machine
from test_cli import folder as folder  # the fixture
from tiny_models import tiny_model


def test_methods_are_compared_on_the_same_terms(tmp_path: Path) -> None:
    model = tiny_model()
    texts, held_out = calibration(model, texts=2), calibration(model, texts=1)
    names = ["skip-only", "forward", "random", "paper"]
    said: list[str] = []
    costs = cost_profile(measured_on=describe_machine(model))
    arguments = (model, texts, held_out, costs, f"{tmp_path}/s.db")
    rows, founds = compare_methods(*arguments, ComparisonSettings(names, 4), said.append)
    assert list(rows) == names
    for name, row in rows.items():
        assert row["trials"] == round(4 * METHODS[name].share) == len(founds[name].tried)
        assert row["passes"] == sum(founds[name].passes) > 0
        assert row["identical"] == row["texts"] == 1
        assert row["measured"] > 0 and row["held_out_speedup"] > 0
    # Timed generation takes a pass per token, a judged draft one or two per text.
    assert rows["paper"]["passes"] / rows["paper"]["trials"] > 8 * rows["random"]["passes"] / rows["random"]["trials"]
    assert any("random: 4 of 4 drafts" in text for text in said)
    best = max(rows.values(), key=lambda row: row["speedup"])
    for name, row in rows.items():
        for other, spent in row["passes_to_reach"].items():
            # The paper's search chooses by timing, so its choice need not have the highest estimated speed-up.
            assert name == "paper" or (spent is None) == (row["speedup"] < rows[other]["speedup"]), (name, other)
    assert list(best["passes_to_reach"]) == names and all(best["passes_to_reach"].values())

    # Again, with all results stored.
    again, _ = compare_methods(*arguments, ComparisonSettings(names, 4, timed=False))
    assert [row["speedup"] for row in again.values()] == [row["speedup"] for row in rows.values()]
    lines = table({**again, "paper": rows["paper"]}).splitlines()
    assert len(lines) == 2 + len(names) and lines[2].startswith("| skip-only (")
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert "| – |" in lines[2] and "| – |" not in lines[-1]
    reached = [line.split("|")[4].strip() for line in lines]
    assert reached[0] == "until as good as paper"
    wanted = [again[name]["passes_to_reach"]["paper"] for name in names[:-1]]
    assert reached[2:5] == ["never" if spent is None else str(spent) for spent in wanted]
    assert "until as good" not in table({"random": again["random"]})


@pytest.fixture
def run(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a finished run of the command."""
    model, _ = load_model(folder)
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    in_low_bits = {
        "attention": {"keep": (0.08,), "int8": (0.05,), "int4": (0.04,)},
        **{part: {"keep": 0.16, "int8": 0.1, "int4": 0.08} for part in ("mlp", "head", "overhead")},
    }
    cost_profile(measured_on=describe_machine(model), **in_low_bits).save(tmp_path / "out" / "profile.json")
    few = ["--trials", "2", "--num-prompts", "1", "--held-out", "1", "--new-tokens", "4", "--no-timing"]
    monkeypatch.setattr(sys, "argv", ["methods", "--model", folder, "-o", str(tmp_path / "out"), *few])
    main()
    assert (tmp_path / "out" / "methods.md").read_text() in capsys.readouterr().out
    return tmp_path / "out"


def test_the_command_runs_all_methods_that_can_run(run: Path) -> None:
    written = (run / "methods.md").read_text()
    left_out = {"paper"} if importlib.util.find_spec("scipy") else {"paper", "gp"}
    assert {name for name in METHODS if f"| {name} (" in written} == set(METHODS) - left_out
    assert (run / "methods.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_runs_on_one_page(
    run: Path, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    output = run.parent / "both"
    monkeypatch.setattr(sys, "argv", ["methods", "--compare", str(run), str(run), "-o", str(output)])
    main()
    page = (output / "methods.md").read_text()
    assert page in capsys.readouterr().out
    assert page.count((run / "methods.md").read_text()) == 2 and page.count(f"## {Path(folder).name}\n") == 2
    assert (output / "methods.png").read_bytes().startswith(b"\x89PNG")
    # Text from other files is data.
    said = json.loads((run / "methods.json").read_text(encoding="utf-8"))
    said |= {"model": "$\\frac{a|b<script>", "measured_on": "\x1b[2J"}
    (run / "methods.json").write_text(json.dumps(said), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["methods", "--compare", str(run), "-o", str(output)])
    main()
    assert "a\\|b&lt;script&gt;" in (output / "methods.md").read_text() and "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["methods", "--compare", str(run.parent), "-o", str(output)])
    with pytest.raises(SystemExit):
        main()
    assert "holds no finished comparison" in capsys.readouterr().err


def test_a_method_that_cannot_run_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def says(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["methods", "--model", "nowhere", "-o", str(tmp_path), *more])
        with pytest.raises(SystemExit):
            main()
        return capfd.readouterr().err

    assert "no search method 'best'" in says("--methods", "default,best")
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert "pip install 'ssd_generation[gp]'" in says("--methods", "default,gp")
    monkeypatch.setattr(command, "load_model", lambda *_, **__: sys.exit("was to load it"))
    assert "left out" not in says("--methods", "default")
    assert "pip install 'ssd_generation[gp]' (left out)" in says()


def test_an_unknown_method(tmp_path: Path) -> None:
    model = tiny_model()
    texts = calibration(model, texts=1)
    with pytest.raises(ValueError, match="no search method 'best'"):
        compare_methods(model, texts, texts, cost_profile(), f"{tmp_path}/s.db", ComparisonSettings(["best"], 4))


def test_every_method_has_settings_of_its_own() -> None:
    described = [dataclasses.astuple(method)[1:] for method in METHODS.values()]
    assert len({repr(entry) for entry in described}) == len(METHODS)
    assert isinstance(METHODS["paper"], SearchMethod) and METHODS["paper"].skip_only
