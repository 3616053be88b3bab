"""Model files of other runtimes: the methods that they define, and descriptions that identify them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..peer_methods import LLAMA_CPP, OPENVINO, OPENVINO_PREFIX_CACHE, PeerModel

__all__ = ["describe_model", "gguf_models", "model_bytes", "openvino_models"]

_MAGIC = b"GGUF"
_IR = ("openvino_model.xml", "openvino_model.bin")


def gguf_models(files: Sequence[str | os.PathLike[str]]) -> dict[str, PeerModel]:
    """Return the methods that GGUF files define: `llama.cpp-NAME` for `…/NAME.gguf`, and its model.

    Args:
        files: paths of the files; `~` is the home folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not a GGUF file, or two define methods of one name.
    """
    methods: dict[str, PeerModel] = {}
    for file in files:
        given = os.fspath(file)
        path = Path(os.path.expanduser(given))
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file {given!r}. Name one that llama.cpp can load.")
        _check_gguf(path, given)
        _add(methods, LLAMA_CPP + path.stem, PeerModel("llama.cpp", str(path)))
    return methods


def openvino_models(paths: Sequence[str | os.PathLike[str]]) -> dict[str, PeerModel]:
    """Return the methods of OpenVINO's models: `openvino-NAME` for `…/NAME`, and `openvino-prefix-cache-NAME`.

    Args:
        paths: folders that optimum-intel has exported, or GGUF files (`…/NAME.gguf`); `~` is the home folder.

    Raises:
        FileNotFoundError: there is no such folder or file, or a file of the folder is missing.
        ValueError: a file is not a GGUF file, or two define methods of one name.
    """
    methods: dict[str, PeerModel] = {}
    for entry in paths:
        given = os.fspath(entry)
        path = Path(os.path.expanduser(given))
        if path.is_file():
            _check_gguf(path, given)
            name = path.stem
        elif path.is_dir():
            name = path.resolve().name
            for part in _IR:
                if not (path / part).is_file():
                    raise FileNotFoundError(
                        f"There is no {part} in {given!r}. Name a folder of `optimum-cli export openvino`."
                    )
        else:
            raise FileNotFoundError(
                f"There is no {given!r}. Name a folder of `optimum-cli export openvino`, or a GGUF file."
            )
        _add(methods, OPENVINO + name, PeerModel("openvino", str(path)))
        _add(methods, OPENVINO_PREFIX_CACHE + name, PeerModel("openvino", str(path), prefix_cache=True))
    return methods


def describe_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a file or folder so that its model can be identified: `path`, `bytes` and `sha256`."""
    digest = hashlib.sha256()
    for part in _parts(path):
        with part.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return {"path": os.fspath(path), "bytes": model_bytes(path), "sha256": digest.hexdigest()}


def model_bytes(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of a model's file, or of the files of its folder."""
    return sum(part.stat().st_size for part in _parts(path))


def _parts(path: str | os.PathLike[str]) -> list[Path]:
    whole = Path(path)
    return [whole / part for part in _IR] if whole.is_dir() else [whole]


def _check_gguf(path: Path, given: str) -> None:
    with path.open("rb") as stream:
        magic = stream.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ValueError(f"{given!r} is not a GGUF file: it starts with {magic!r}, not with {_MAGIC!r}.")


def _add(methods: dict[str, PeerModel], name: str, model: PeerModel) -> None:
    if name in methods:
        raise ValueError(
            f"{methods[name].path!r} and {model.path!r} would both be the method {name!r}. Rename one of them, or "
            "leave it out."
        )
    methods[name] = model
