"""Folder from which transformers drafts: a model's files, copied or linked, with `custom_generate/` next to them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import CONFIG_NAME, SelfSpeculativeConfig
from ..support.display import path_shown
from ..support.files import is_temporary, temporary_name
from ..support.reading import CODE, read_text
from .card import CardError, write_card
from .code import generate_code, is_ours, requirements
from .source import Source

__all__ = ["Export", "export_model", "fill"]

_CODE_FOLDER = "custom_generate"
_CARD = "README.md"
# Folders of git, of the Hub's client and of Python: not part of a model.
_NO_PART = (".git", ".cache", "__pycache__")


@dataclass(frozen=True)
class Export:
    """Result of an export: the folder that was written.

    Attributes:
        folder: its path.
        files: number of files in it.
        bytes: total size of those that are not links.
        card_problem: reason why the model card lacks the tag `custom_generate`; `None` if it has it.
    """

    folder: Path
    files: int
    bytes: int
    card_problem: str | None = None


def export_model(
    source: Source,
    output: Path,
    default: SelfSpeculativeConfig | Literal["auto"],
    *,
    only: bool = False,
    link: bool = False,
    force: bool = False,
    advance: Callable[[str], None] = lambda name: None,
) -> Export:
    """Write a folder from which transformers drafts, all of it or nothing.

    Args:
        source: the model.
        output: the folder, created if missing.
        default: its drafting config.
        only: leave the model's own files out.
        link: link to the model's files instead of copying them.
        force: write into a folder that is not empty, and replace its files of the same names.
        advance: callback with the name of each of the model's files before it is copied.

    Raises:
        ValueError: `output` is a file, not empty, in the model's folder, or cannot be written to; or the model has a
            `custom_generate/` that this library did not write.
    """
    output = output.absolute()
    _check_output(source.folder, output, force)
    if not only:
        _check_code(source.folder)
    with _appearing(output) as staged:
        if not only:
            copy_or_link(source.folder, staged, link, advance)
        fill(staged, default, generate_code(default))
        problem = None
        try:
            write_card(staged / _CARD, source.name, default, only)
        except CardError as error:
            problem = str(error)
        files = [path for path in staged.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files if not path.is_symlink() and path.stat().st_nlink == 1)
    return Export(output, len(files), size, problem)


def fill(folder: Path, default: SelfSpeculativeConfig | Literal["auto"], code: str) -> None:
    """Write `custom_generate/` and the config into a folder.

    Args:
        folder: the folder.
        default: its drafting config.
        code: content of `custom_generate/generate.py`.
    """
    within = folder / _CODE_FOLDER
    within.mkdir()
    (within / "generate.py").write_text(code, encoding="utf-8", newline="\n")
    (within / "requirements.txt").write_text(requirements(), encoding="utf-8", newline="\n")
    if isinstance(default, SelfSpeculativeConfig):
        (folder / CONFIG_NAME).write_text(default.to_json_string(), encoding="utf-8", newline="\n")


def model_files(folder: Path) -> list[Path]:
    """List a model's files, relative to its folder, without those that an export writes itself."""
    found = []
    for root, folders, names in os.walk(folder):
        here = Path(root).relative_to(folder)
        is_top = here == Path()
        folders[:] = sorted(n for n in folders if n not in _NO_PART and not (is_top and n == _CODE_FOLDER))
        for name in sorted(names):
            if not (is_temporary(name) or (is_top and name == CONFIG_NAME)) and (Path(root) / name).is_file():
                found.append(here / name)
    return found


def copy_or_link(source: Path, folder: Path, link: bool, advance: Callable[[str], None] = lambda name: None) -> None:
    """Copy a model's files into a folder, or link to them; the model card is always copied.

    Args:
        source: the model's folder.
        folder: empty folder to fill.
        link: link to the files instead of copying them.
        advance: callback with each file's name before it is copied or linked.

    Raises:
        ValueError: links cannot be created on this file system.
    """
    for file in model_files(source):
        advance(str(file))
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if link and file != Path(_CARD):
            _link((source / file).resolve(), target)  # a snapshot of the Hub's cache is itself made of links
        else:
            shutil.copyfile(source / file, target)


def _link(file: Path, target: Path) -> None:
    try:
        target.symlink_to(file)
    except OSError:  # on Windows, without the right to create them
        try:
            target.hardlink_to(file)
        except OSError as error:
            raise ValueError(
                f"No link to {path_shown(file)} can be made here: {error.strerror}. Copy the model instead (`ssd "
                "export` without --link)."
            ) from error


# ----------------------------------------------------------------------------------------------------------------------
# output folder


def _check_output(model: Path, output: Path, force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"{path_shown(output)} is a file. Give a folder for the output.")
    resolved = output.resolve()
    if resolved == model or model in resolved.parents:
        raise ValueError(
            f"{path_shown(output)} is the model's own folder, or in it. Give another folder for the output."
        )
    if not force and output.is_dir() and any(output.iterdir()):
        raise ValueError(
            f"The folder {path_shown(output)} is not empty. Give a new one, or --force to replace its files of the "
            "same names."
        )


def _check_code(model: Path) -> None:
    code = model / _CODE_FOLDER / "generate.py"
    if code.is_file() and not is_ours(read_text(code, CODE)):
        raise ValueError(
            f"The model has a generate of its own ({path_shown(code)}), which the exported one would replace. --only "
            "writes the `custom_generate/` repository alone."
        )


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Yield an empty folder whose files are moved to `output` once it is complete."""
    staged = output.with_name(temporary_name(""))
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{path_shown(output)} cannot be written: {error.strerror}. Give another folder.") from error
    try:
        yield staged
        if not output.exists():
            staged.rename(output)
            return
        for path in sorted(staged.rglob("*")):
            target = output / path.relative_to(staged)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                os.replace(path, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
