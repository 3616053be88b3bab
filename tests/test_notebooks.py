"""The notebooks: their stored outputs are fit to be read, and each still runs from top to bottom."""

from __future__ import annotations

import ast
import importlib
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test_models import CHAT_TEMPLATE, tiny_tokenizer, vocabulary
from tiny_models import tiny_model

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

# Settings that make a notebook short; each notebook reads those it knows.
SMALL = {
    "SSD_NOTEBOOK_LIMIT": "1",
    "SSD_NOTEBOOK_REPEATS": "1",
    "SSD_NOTEBOOK_SAMPLES": "500",
    "SSD_NOTEBOOK_TOKENS": "8",
    "SSD_NOTEBOOK_TRIALS": "4",
}

# The notebooks that a reader runs first run with the real model, unchanged; the others run with a tiny one.
REAL = ("quickstart", "how_it_works")

# A path on the machine where the notebook ran.
PLACE = re.compile(r"/(?:root|home|work|Users|tmp)/|[A-Z]:\\")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind and "".join(cell["source"]).strip()]


def outputs(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each output, with the first line of its cell."""
    for cell in cells(path, "code"):
        for output in cell["outputs"]:
            yield "".join(cell["source"]).partition("\n")[0], output


def texts(output: dict[str, Any]) -> str:
    """Return all text that a reader may see of an output, without pictures."""
    parts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if not k.startswith("image/"))]
    return "\n".join("".join(part) if isinstance(part, list) else str(part) for part in parts)


# --- Stored outputs of the last run ---------------------------------------------------------------


@each
def test_was_run_once_from_top_to_bottom(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), (
        "restart the kernel, run all cells and save"
    )
    assert any(cell["outputs"] for cell in code)


@each
def test_outputs_are_fit_to_be_read(path: Path) -> None:
    for first_line, output in outputs(path):
        where = f"{path.name}, the cell that begins with {first_line!r}"
        assert output["output_type"] != "error", f"{where} ended with an error"
        assert output.get("name") != "stderr", f"{where} warns: {texts(output)[:500]}"
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {}), f"{where} shows a widget"
        assert "\r" not in texts(output), f"{where} shows a progress bar"
        assert PLACE.search(texts(output)) is None, f"{where} names a folder of this machine: {texts(output)[:500]}"


@each
def test_any_python_3_kernel_will_do(path: Path) -> None:
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    assert metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


@each
def test_prose_is_english_under_one_title(path: Path) -> None:
    prose = ["".join(cell["source"]) for cell in cells(path, "markdown")]
    assert prose[0].startswith("# ")
    without_code = re.sub(r"```.*?```", "", "\n".join(prose), flags=re.DOTALL)
    assert len(re.findall(r"^# ", without_code, flags=re.MULTILINE)) == 1
    # Greek letters are used in formulas; emoji are "other symbols".
    strange = {
        character
        for character in without_code
        if not character.isascii()
        and (
            unicodedata.category(character) == "So"
            or (character.isalpha() and not unicodedata.name(character).startswith("GREEK"))
        )
    }
    assert strange == set()


@each
def test_imports_public_names_only(path: Path) -> None:
    """Public are the names that the package, and some packages of it, list as such (`__all__`)."""
    code = "\n".join("".join(cell["source"]) for cell in cells(path, "code"))
    tree = ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in code.splitlines()))
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ssd_generation"):
            found += 1
            home = importlib.import_module(str(node.module))
            assert Path(str(home.__file__)).name == "__init__.py", f"{node.module} is a module, not a package"
            assert {alias.name for alias in node.names} <= set(home.__all__), node.module
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("ssd_generation.") for alias in node.names)
    assert found


@each
def test_follows_the_format(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(path, as_version=4))


# --- It still runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model with a chat template, and room for an article of one-character tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(vocab_size=len(vocabulary()), max_position_embeddings=8192).save_pretrained(folder)
    tokenizer = tiny_tokenizer(bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@each
def test_runs_with_small_values(
    path: Path, tiny: Path, real_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    for name in ("SSD_NOTEBOOK_MODEL", "SSD_NOTEBOOK_ASSISTANT"):
        monkeypatch.setenv(name, "demo" if path.stem in REAL else str(tiny))
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(real_model_folder))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend draws into the notebook
    # History and settings of the kernel stay out of the user's home directory.
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    folder = tmp_path / "folder"
    folder.mkdir()
    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        kernel_name="python3",
        timeout=600,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()  # raises CellExecutionError with the cell and its error
