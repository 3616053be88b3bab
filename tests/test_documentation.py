"""README, docs and notebooks are accurate: links, commands, options, modules, and Python that runs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ssd_generation
from ssd_generation.cli import main
from test_cli import tiny_tokenizer
from test_notebooks import NOTEBOOKS, cells
from tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ssd_generation"
LAB = ROOT / "tests" / "lab"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FOR_MAINTAINERS = [ROOT / "CONTRIBUTING.md", LAB / "README.md"]
RESULTS = sorted((ROOT / "tests" / "lab" / "results").glob("*.md"))
MARKDOWN = [*PAGES, *FOR_MAINTAINERS, *RESULTS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]

COMMANDS = (
    "generate", "chat", "benchmark", "evaluate", "report", "search", "profile", "inspect", "presets", "export", "serve",
)  # fmt: skip


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[path.relative_to(ROOT).as_posix() for path in paths])


def prose(path: Path) -> str:
    """Return the text of a page, or of a notebook's text cells, without HTML comments."""
    if path.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    else:
        text = path.read_text(encoding="utf-8")
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> Iterator[str]:
    """Yield the text between backticks, with line breaks replaced by spaces."""
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", without_blocks):
        yield " ".join(span.split())


def commands(path: Path) -> Iterator[list[str]]:
    """Yield each command line of a page, split into words: those of bash blocks and those between backticks."""
    # Commands that do not exist yet are in comments.
    text = prose(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.startswith("    ")]
    for line in [*lines, *spans(text)]:
        for command in re.split(r"&&|;", line):
            if re.match(r"\s*(?:ssd|python -m|accelerate launch) ", command):
                yield shlex.split(command)


# --- The README is short --------------------------------------------------------------------------


def test_readme_shows_code_early_and_ends_soon() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") <= 30


def test_readme_leads_to_every_page_and_notebook() -> None:
    text = README.read_text(encoding="utf-8")  # a notebook that does not exist yet is linked in a comment
    there = {path.relative_to(ROOT).as_posix() for path in [*PAGES[1:], *NOTEBOOKS]}
    assert {name for name in there if f"]({name})" not in text} == set()


# --- Links ----------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    without_blocks = re.sub(r"^```.*?^```$", "", prose(path), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", without_blocks, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each([*MARKDOWN, *NOTEBOOKS])
def test_links_lead_somewhere(path: Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert lost == []


# --- Names ----------------------------------------------------------------------------------------


@each([*PAGES, *FOR_MAINTAINERS, *NOTEBOOKS])
def test_modules_and_files_that_are_named_exist(path: Path) -> None:
    lost = []
    for span in spans(prose(path)):
        for name in re.findall(r"\b(?:ssd_generation|tests\.lab)(?:\.\w+)+", span):
            try:
                is_module = importlib.util.find_spec(as_imported_here(name)) is not None
            except ModuleNotFoundError:  # a parent package is missing
                is_module = False
            if not is_module and not hasattr(ssd_generation, name.rpartition(".")[2]):
                lost.append(name)
        if re.fullmatch(r"[\w/]+\.(?:py|ipynb)", span):
            places = (ROOT / span, ROOT / "notebooks" / span)
            if not any(place.exists() for place in places) and not any(PACKAGE.rglob(span)):
                lost.append(span)
    assert lost == []


def as_imported_here(name: str) -> str:
    """Return the name under which a module is importable here: the tests' own folder is on the path, not its parent."""
    return name.removeprefix("tests.")


def program(name: str) -> Any:
    """Import the module that `python -m` runs."""
    spec = importlib.util.find_spec(as_imported_here(name))
    assert spec is not None, f"there is no {name}"
    within = "" if spec.submodule_search_locations is None else ".__main__"
    return importlib.import_module(spec.name + within)


def test_the_laboratory_says_what_each_module_is_for() -> None:
    told = set(spans((LAB / "README.md").read_text(encoding="utf-8")))
    assert {path.stem for path in LAB.iterdir() if path.suffix in (".py", "")} - {"__init__", "__pycache__"} <= told


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """Return a cache of help texts, by command or program."""
    return {}


@pytest.fixture
def options_of(
    known: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    monkeypatch.setenv("COLUMNS", "200")

    def options(name: str) -> str:
        if name not in known:
            monkeypatch.setattr(sys, "argv", [name, "--help"])
            with pytest.raises(SystemExit):
                if name in COMMANDS:
                    main([name, "--help"])
                else:
                    program(name).main()
            known[name] = capfd.readouterr().out
        return known[name]

    return options


@each([*PAGES, *FOR_MAINTAINERS, *NOTEBOOKS])
def test_commands_have_the_options_they_are_shown_with(path: Path, options_of: Callable[[str], str]) -> None:
    lost = []
    for words in commands(path):
        if "ssd_generation" in words:  # python -m ssd_generation, accelerate launch -m ssd_generation
            words = ["ssd", *words[words.index("ssd_generation") + 1 :]]
        if words[0] == "ssd":
            name, rest = words[1], words[2:]
            if name not in COMMANDS:
                lost.append(name)
                continue
        else:
            name, rest = words[2], words[3:]
        missing = [word for word in rest if word.startswith("--") and not re.search(rf"{word}\b", options_of(name))]
        lost += [f"{name} {word}" for word in missing]
    assert lost == []


@each([*PAGES, *NOTEBOOKS])
def test_options_that_are_named_exist(path: Path, options_of: Callable[[str], str]) -> None:
    names = {word for span in spans(prose(path)) if span.startswith("--") for word in span.split() if word[:2] == "--"}
    of_lab = re.findall(r"^\| `(\w+)` \|", (LAB / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    places = [*COMMANDS, "ssd_generation.benchmark.gpu", *(f"tests.lab.{program}" for program in of_lab)]
    told = "\n".join(map(options_of, places)) if names else ""
    assert {name for name in names if not re.search(rf"{name}\b", told)} == set()


# --- Python ---------------------------------------------------------------------------------------


@each([path for path in PAGES if blocks(path.read_text(encoding="utf-8"), "python")])
def test_python_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page from top to bottom, with a tiny model of as many layers in place of the demo."""
    tokenizer = tiny_tokenizer()
    # Groups of 32 weights, as in 4-bit files.
    model = tiny_model(vocab_size=len(tokenizer), num_hidden_layers=30, intermediate_size=64)

    def load_demo(*args: Any, **kwargs: Any) -> Any:
        return model, tokenizer

    monkeypatch.setattr(ssd_generation, "load_demo", load_demo)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(path.read_text(encoding="utf-8"), "python"):
        exec(compile(block, path.name, "exec"), names)


def test_the_version_is_the_newest_of_the_changelog_and_the_one_to_cite() -> None:
    versions = re.findall(r"^## \[(\d[^]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    cited = dict(
        re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    )
    assert versions[0] == (ssd_generation.__version__, cited["date-released"])
    assert cited["version"] == ssd_generation.__version__
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="a source distribution has no docs")
def test_other_programs_are_tried_at_the_versions_that_the_page_names() -> None:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    pinned = re.findall(r"^(\S+)==(\S+)$", (ROOT / ".ci" / "other-programs.txt").read_text(encoding="utf-8"), re.M)
    assert len(pinned) >= 6
    assert [f"{name} {version}" for name, version in pinned if f"{name} {version}" not in text] == []
