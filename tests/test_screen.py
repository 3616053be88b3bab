"""Text from outside cannot control the terminal, act as markup, or crash a command."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from search_worker import cost_profile
from ssd_generation import Costs, Provenance, SelfSpeculativeConfig, SkipConfig
from ssd_generation.cli import console
from ssd_generation.cli.benchmark_view import benchmark_view, live_progress, runs_view
from ssd_generation.cli.console import Screen, print_error, print_json, styled
from ssd_generation.cli.generate_view import answer_streamer
from ssd_generation.cli.search_view import View, bar
from ssd_generation.harness.run import Progress
from ssd_generation.support.display import visible
from test_cli import Run, tiny_tokenizer
from test_cli import folder as folder  # the fixture
from test_cli import ssd as ssd  # the fixture
from tiny_models import prompt, tiny_model

ACTING = ["\x1b]0;pwned\x07", "\x1b[2J", "\x9b31m", "\r", "\u202eabc", "\u2066a\u2028b"]
MARKUP = [
    "[/red]",
    "[bold",
    "[link=http:x]y",
    ":smile:",
    "a|b<script>",
    "$\\frac{",
    "$x$ and $\\y$",
    "\\[/red]",
    "%s",
]
SHORT = [*ACTING, *MARKUP]
NASTY = [*SHORT, "x" * 10_000]
TOGETHER = ["".join(ACTING), "[/red]", "".join(MARKUP)]  # for slow tests
HALF = "\ud800"
NOT_UTF8 = "\udcff"  # Python's reading of a command-line byte that is not UTF-8


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)


def check_calm(text: str) -> None:
    """Assert that a text contains no control characters but line breaks."""
    for line in text.split("\n"):
        assert visible(line) == line


def check(run: Run, status: int = 0) -> None:
    assert run.status == status, run.err
    check_calm(run.out)
    check_calm(run.err)
    if status:
        assert run.out == "" and run.err.startswith("error: ") and run.err.count("\n") == 1


def written(file: str, *lines: Any) -> str:
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


# --- the console ----------------------------------------------------------------------------------


def screen(**options: Any) -> Screen:
    return Screen(file=io.StringIO(), width=20_100, **options)


def shown_on(console: Any) -> str:
    return str(console.file.getvalue())


@pytest.mark.parametrize("text", [*NASTY, HALF, NOT_UTF8])
def test_strings_are_data_to_the_console(text: str) -> None:
    table = Table(title=text, caption=text)
    table.add_column(text)
    table.add_column("b")
    table.add_row(text, styled("in ", (text, "bold")))
    for what in (text, styled((text, "red")), table):
        shown = screen()
        shown.print(what, style="dim")
        check_calm(shown_on(shown))
        # All of the text but tabs and line breaks is visible.
        assert shown_on(shown).count(visible(text)) == (1 if what is not table else 5)
    row = shown_on(shown).splitlines()[3:6]
    assert len({len(line) for line in row}) == 1, "the columns are as wide as what is in them"


@given(st.text())
def test_only_the_consoles_own_codes_reach_a_terminal(text: str) -> None:
    shown = screen(force_terminal=True, color_system="truecolor")
    table = Table(text)
    table.add_row(text)
    shown.print(table)
    shown.print(styled((text, "bold red"), text))
    shown.print(text, style="green", soft_wrap=True)
    check_calm(re.sub(r"\x1b\[[\d;]*m", "", shown_on(shown)))


def test_rich_texts_pass_the_same_door() -> None:
    """Texts not made by `styled` may lose characters, but cannot act either."""
    from rich.text import Text

    for text in (*NASTY, HALF):
        shown = screen()
        shown.print(Text(text))
        check_calm(shown_on(shown))


@pytest.mark.parametrize("text", [*SHORT, HALF])
def test_progress_in_a_terminal(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(force_terminal=True, color_system="standard")
    monkeypatch.setattr(console, "err", lambda: shown)
    with console.progress(text, total=3) as step:
        step(text)
    with live_progress() as observe:
        observe(Progress(1, 3, text, {text: 1.0}))
    with bar() as said:
        said(text, 1, 3)
    with View() as view:
        view.stage(text)
        view.step(text, 1, 3)
        view.warn(text)
    # The progress bar moves the cursor and clears lines; it never sets a title, a screen or a column.
    own = re.sub(r"\x1b\[(?:[\d;]*m|\?25[lh]|\d*[AK])|\r", "", shown_on(shown))
    check_calm(own)
    if "\r" not in text:
        assert visible(text) in own


@pytest.mark.parametrize("text", [*NASTY, HALF])
def test_progress_in_a_log_file(text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "_PATIENCE", 0.0)
    monkeypatch.setattr(console, "_BETWEEN_LINES", 0.0)
    with console.progress(text) as step, live_progress() as observe, bar() as said, View() as view:
        step(text)
        observe(Progress(1, 3, text, {text: 1.0}))
        said(text, 1, 3)
        view.step(text, 1, 3)
    out, err = capfd.readouterr()
    check_calm(err)
    assert out == "" and err.count("\n") == 4


@pytest.mark.parametrize("text", [*NASTY, HALF, NOT_UTF8])
def test_errors(text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SSD_DEBUG", raising=False)
    for debugging in ("0", "1"):
        monkeypatch.setenv("SSD_DEBUG", debugging)
        assert print_error(ValueError(f"no such thing: {text}."))
        out, err = capfd.readouterr()
        check_calm(err)
        assert out == ""
        said, shown = err.splitlines()[-1], f"error: no such thing: {visible(text)}."
        if len(shown) < 1_500:
            assert said == shown
        else:  # an overlong argument
            assert len(said) < 1_600 and said[:1_000] == shown[:1_000] and said[-200:] == shown[-200:]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_is_the_same_document(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {text: [text, {"é": text}] for text in (*NASTY, HALF, "\U000e0041", "\n\t\x7f")}
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="")
    monkeypatch.setattr("sys.stdout", stream)
    print_json(document)
    stream.seek(0)
    text = stream.read()
    check_calm(text)
    assert json.loads(text) == document
    assert ("é" in text) == (encoding == "utf-8")


def test_answers_in_a_terminal_and_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "".join(ACTING) + "a\n\tb"
    for is_terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)  # noqa: B023
        monkeypatch.setattr("sys.stdout", stream)
        answer_streamer(tiny_tokenizer()).on_finalized_text(answer, stream_end=True)
        said = stream.getvalue()
        assert said == (visible(answer, "\n\t") if is_terminal else answer) + "\n"


# --- the commands ---------------------------------------------------------------------------------

BENCH = ("--methods", "plain-loop", "--new-tokens", "2", "--warm-up", "0", "--no-memory")


@pytest.fixture(scope="module")
def ran(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of a run with hostile category names."""
    from ssd_generation.cli import main

    place = tmp_path_factory.mktemp("ran")
    prompts = written(str(place / "p.jsonl"), *({"prompt": "rain", "category": text} for text in NASTY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_GENERATION_CACHE", str(place / "cache"))
        with pytest.raises(SystemExit) as left:
            main(["benchmark", "-m", folder, "--prompts", prompts, *BENCH, "-o", str(place / "r")])
    assert left.value.code == 0
    summary: dict[str, Any] = json.loads((place / "r" / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["prompts_per_category"]) == set(NASTY)
    return summary


def test_categories(ssd: Callable[..., Run], folder: str) -> None:
    prompts = written("p.jsonl", *({"prompt": "rain", "category": text} for text in NASTY))
    run = ssd("benchmark", "-m", folder, "--prompts", prompts, *BENCH, "-o", "r")
    check(run)
    assert "[/red]" in run.out and ":smile:" in run.out and "<script>" in run.out and "\\x1b" in run.out
    as_json = ssd("benchmark", "-m", folder, "--prompts", prompts, *BENCH, "-o", "r", "--json")
    check(as_json)
    assert set(as_json.json["prompts_per_category"]) == set(NASTY)
    for text in (*NASTY, HALF, NOT_UTF8):
        # No prompt has such a category.
        check(ssd("benchmark", "-m", folder, "--prompts", prompts, "--category", f"{text}?", *BENCH), 2)
    chat = ssd("evaluate", "chat", "-m", folder, "--data", prompts, *BENCH, "-o", "e")
    check(chat)


def test_prompt_files(ssd: Callable[..., Run], folder: str) -> None:
    files = []
    for text in SHORT:
        file = Path(f"{text}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("rain\n", encoding="utf-8")
        files.append(str(file))
    check(ssd("benchmark", "-m", folder, *(f"--prompts={file}" for file in files), *BENCH, "-o", "r"))
    for text in (*NASTY, HALF, NOT_UTF8):
        check(ssd("benchmark", "-m", folder, f"--prompts={text}/nowhere.txt", *BENCH, "-o", "r"), 2)


@pytest.mark.parametrize("text", TOGETHER)
def test_folders_of_results(ssd: Callable[..., Run], folder: str, text: str, ran: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")  # the report includes a plot
    Path("prompts.txt").write_text("rain\n", encoding="utf-8")
    place = f"o/{text}"
    run = ssd("benchmark", "-m", folder, "--prompts", "prompts.txt", *BENCH, "-o", place)
    check(run)
    assert run.err.count(visible(Path(place))) == 2
    check(ssd("report", place, "-o", f"{place}/report"))
    run = ssd("benchmark", "-m", folder, "--prompts", "prompts.txt", *BENCH, "--seed", "1", "-o", place)
    check(run, 2)
    check(ssd("report", f"nowhere/{text}"), 2)


@pytest.mark.parametrize("text", ["x" * 10_000, HALF])
def test_folders_that_cannot_be(ssd: Callable[..., Run], text: str) -> None:
    check(ssd("benchmark", "-m", "nowhere", *BENCH, "-o", text), 2)
    check(ssd("report", text), 2)


@pytest.mark.parametrize("text", NASTY)
def test_reports_of_others(ssd: Callable[..., Run], text: str, ran: dict[str, Any]) -> None:
    """Strings of a summary cannot do harm, whatever they contain."""
    pytest.importorskip("matplotlib")  # the report includes a plot
    summary = json.loads(json.dumps(ran))
    (entry,) = summary["methods"].values()
    summary["methods"] = {text: entry}
    entry["errors"] = [text]
    for key in ("model", "dtype", "device", "attention_implementation", "cpu", "commit"):
        summary["environment"][key] = text
    summary["environment"]["versions"] = dict.fromkeys(summary["environment"]["versions"], text)
    summary["arguments"]["task"] = text
    summary["arguments"]["style"] = text
    place = Path(text[:100])
    place.mkdir(parents=True)
    (place / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    run = ssd("report", str(place), "-o", "all")
    check(run)
    shown = ssd("report", str(place), "--json")
    check(shown)
    assert list(shown.json.values()) == [summary]
    # The view during the run.
    for view in (benchmark_view(summary, 100), runs_view({text: summary})):
        said = screen()
        said.print(view)
        check_calm(shown_on(said))


@pytest.mark.parametrize("text", [*TOGETHER, "x" * 300])
def test_configs_of_others(ssd: Callable[..., Run], folder: str, text: str) -> None:
    costs = Costs(plain_step=1.0, draft_step=0.5, verify=[(1, 1.0), (4, 1.2)], measured_on=text)
    config = SelfSpeculativeConfig(SkipConfig(attention=[1]), costs=costs, provenance=Provenance(model_id=text))
    Path("mine.json").write_text(config.to_json_string(), encoding="utf-8")
    common = ["generate", "rain", "-m", folder, "--max-new-tokens", "4"]
    run = ssd(*common, "--config", "mine.json")
    assert run.status == 0, run.err
    check_calm(run.err)
    if len(text) < 200:
        assert f"({visible(text)})" in run.err.replace("\n", " ")
    as_json = ssd(*common, "--config", "mine.json", "--json")
    check(as_json)
    assert as_json.json["config"]["costs"]["measured_on"] == text
    other = SelfSpeculativeConfig(SkipConfig(attention=[1]), provenance=Provenance(model_id=text, num_layers=99))
    Path("other.json").write_text(other.to_json_string(), encoding="utf-8")
    check(ssd(*common, "--config", "other.json"), 2)
    check(ssd("inspect", folder, "--config", "other.json"), 2)


@pytest.mark.parametrize("text", TOGETHER)
def test_models(ssd: Callable[..., Run], folder: str, text: str) -> None:
    model = f"models/{text}"
    shutil.copytree(folder, model)
    run = ssd("inspect", model, "--skip-mlp", "1")
    check(run)
    assert visible(model) in run.out
    skip = ["--skip-attention", "1", "--max-new-tokens", "4", "--html", f"{model}/x.html"]
    run = ssd("generate", "rain", "-m", model, *skip, "--compare", "--repeats", "1", "--show-draft")
    assert run.status == 0, run.err
    check_calm(run.err)
    # The answer itself, before the table, goes to a file unchanged.
    check_calm(run.out[run.out.index("method ") :])
    assert visible(text.rpartition("/")[2]) in html.unescape(Path(model, "x.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", [*TOGETHER, "x" * 10_000, f"a{HALF}", f"a{NOT_UTF8}"])
def test_arguments(ssd: Callable[..., Run], folder: str, text: str) -> None:
    generate = ["generate", "rain", "-m", folder]
    for arguments in (
        [text],
        ["generate", f"--{text}"],
        [*generate, "--skip-mlp", text],
        [*generate, "--config", f"nowhere/{text}"],
        [*generate, "--config-name", text],
        [*generate, "--policy", text, "--skip-mlp", "1"],
        [*generate, "--precision", text],
        [*generate, "--dtype", text],
        [*generate, "--device", text, "--skip-mlp", "1"],
        [*generate, "--seed", text],
        [*generate, "--html", f"nowhere/{text}/x.html"],
        ["inspect", f"./nowhere/{text}"],
        ["profile", folder, "--contexts", text],
        ["profile", folder, "-o", f"nowhere/{text}/x"],
        ["benchmark", "-m", folder, "--methods", text],
        ["benchmark", "-m", folder, "--paired", text],
        ["evaluate", text],
        ["evaluate", "code", "--k", text],
        ["search", folder, "--sampler", text],
        ["search", folder, "--objective", text],
        ["search", folder, "--costs", text],
        ["search", "--from", f"./{text}", "--costs", text],
    ):
        check(ssd(*arguments), 2)


def test_search(ssd: Callable[..., Run], folder: str) -> None:
    short = ["--num-prompts", "1", "--held-out", "0", "--new-tokens", "4", "--trials", "4", "--skip-only"]
    text = TOGETHER[0] + TOGETHER[2].replace("{", "")
    place = f"o/{text}"
    check(ssd("profile", folder, "--contexts", "16", "--repeats", "1", "-o", "costs.json"))
    profile = json.loads(Path("costs.json").read_text(encoding="utf-8"))
    profile["measured_on"] = text
    written("costs.json", profile)
    Path(f"{place}.txt").parent.mkdir(parents=True)
    Path(f"{place}.txt").write_text("rain falls\n", encoding="utf-8")
    run = ssd("search", folder, "--costs", "costs.json", "--prompts", f"{place}.txt", "-o", place, *short)
    check(run)
    assert visible(text) in run.out and run.err.count(visible(text)) == 3
    run = ssd("search", "--from", place, "--costs", "costs.json", "-o", f"{place}/there")
    check(run)
    assert f"For {visible(text)}:" in run.out and visible(text) in run.err
    check(ssd("search", "--from", place, "--costs", "costs.json", "--json"))
    assert os.path.isfile(f"{place}/there/self_speculative_config.json")


# --- the library ----------------------------------------------------------------------------------


def test_the_warning_of_other_costs(folder: str) -> None:
    from transformers import AutoModelForCausalLM

    from ssd_generation import enable_self_speculative

    model = enable_self_speculative(AutoModelForCausalLM.from_pretrained(folder))
    costs = Costs(plain_step=1.0, draft_step=0.5, verify=[(1, 1.0)], measured_on="a\x1b[2J\u202eb")
    config = SelfSpeculativeConfig(SkipConfig([1]), costs=costs)
    with pytest.warns(UserWarning, match=r"\(a\\x1b\[2J\\u202eb\)"):
        model.generate(prompt(5), max_new_tokens=3, self_speculative=config)


def test_profiles_of_other_machines() -> None:
    profile = cost_profile(measured_on=TOGETHER[0], model_type=TOGETHER[0])
    first, second = profile.compared_with(tiny_model())
    check_calm(first)
    check_calm(second)
    assert visible(TOGETHER[0]) in first and visible(TOGETHER[0]) in second


@pytest.mark.parametrize("text", [*NASTY, HALF])
def test_plots(text: str, ran: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lab.search_methods.page import plot_methods
    from ssd_generation.evaluation.report import plot_runs
    from ssd_generation.harness.results import plot_summary
    from ssd_generation.search.study import Found

    (entry,) = ran["methods"].values()
    ratio = entry["ratio"]["categories"]["\r"]
    for method, category in ((text, "a"), ("own", text)):
        few = {"categories": {category: ratio, "b": ratio}, "geometric_mean": 1.0}
        summary = {
            **ran,
            "methods": {method: {**entry, "ratio": {**entry["ratio"], **few}}},
            "prompts_per_category": {category: 1, "b": 1},
            "environment": {**ran["environment"], "model": text, "dtype": text, "device": text},
        }
        plot_summary(summary, tmp_path / "summary.png")
        plot_runs({category: summary, "b": summary}, tmp_path / "runs.png")
    plot_methods({text: {text: Found()}}, tmp_path / "methods.png")
    for name in ("summary", "runs", "methods"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_plain_rich_console_takes_no_notes_for_markup(ran: dict[str, Any]) -> None:
    (entry,) = ran["methods"].values()
    summary = {**ran, "methods": {"m": {**entry, "errors": ["[/red]"]}}, "environment": {**ran["environment"]}}
    for category in ran["prompts_per_category"]:
        # Which category is the slowest differs from run to run.
        entry["ratio"]["worst_category"] = category
        file = io.StringIO()
        Console(file=file, width=100).print(benchmark_view(summary, 100))
        assert "[/red]" in file.getvalue()
