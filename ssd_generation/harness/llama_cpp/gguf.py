"""GGUF files: the methods that they make, and what tells one from another."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..methods import LLAMA_CPP

__all__ = ["describe_gguf", "gguf_methods"]

_MAGIC = b"GGUF"


def gguf_methods(files: Sequence[str | os.PathLike[str]]) -> dict[str, str]:
    """Return the methods that GGUF files make: `llama.cpp-NAME` of `…/NAME.gguf`, and the path as a string.

    Args:
        files: their paths; `~` is the home folder.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: `xllamacpp` is not installed.
        ValueError: a file is not a GGUF file, or two make methods of one name.
    """
    methods: dict[str, str] = {}
    for file in files:
        given = os.fspath(file)
        path = Path(os.path.expanduser(given))
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file {given!r}. Name one that llama.cpp can load.")
        with path.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
        if magic != _MAGIC:
            raise ValueError(f"{given!r} is not a GGUF file: it starts with {magic!r}, not with {_MAGIC!r}.")
        name = LLAMA_CPP + path.stem
        if name in methods:
            raise ValueError(
                f"{methods[name]!r} and {given!r} would both be the method {name!r}. Rename one of them, or leave it "
                "out."
            )
        methods[name] = str(path)
    if methods and importlib.util.find_spec("xllamacpp") is None:
        raise ImportError("llama.cpp comes in the package xllamacpp, which is not installed: pip install xllamacpp")
    return methods


def describe_gguf(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a GGUF file by what tells it from another one: `path`, `bytes` and `sha256`."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"path": os.fspath(path), "bytes": os.path.getsize(path), "sha256": digest.hexdigest()}
