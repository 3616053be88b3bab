"""llama.cpp as a peer: the same prompts, as tokens, decoded from a GGUF file by the wheel `xllamacpp`.

It runs in a process of its own for each file (see `llama_cpp_worker.py`), with as many threads as PyTorch has here, and
waits while the other methods have their turn.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import llama_cpp_worker
from .calls import TimedCall
from .child import Child
from .methods import LLAMA_CPP

__all__ = ["CONTEXT", "LlamaCpp", "describe_gguf", "gguf_methods", "llama_cpp_version"]

CONTEXT = 4096
"""Tokens that there is room for, of prompt and answer together."""

_MAGIC = b"GGUF"


def gguf_methods(files: Sequence[str | os.PathLike[str]]) -> dict[str, str]:
    """The methods that GGUF files make: `llama.cpp-NAME` of `…/NAME.gguf`, and the path as a string.

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
    """What tells a GGUF file from another one: `path`, `bytes` and `sha256`."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"path": os.fspath(path), "bytes": os.path.getsize(path), "sha256": digest.hexdigest()}


def llama_cpp_version() -> str:
    """The version of `xllamacpp`.

    Raises:
        ImportError: it is not installed.
    """
    return importlib.metadata.version("xllamacpp")


class LlamaCpp:
    """llama.cpp's processes, one for each GGUF file, each started when it is first needed. Call `close` at the end.

    A process that has died is started again by the next call.

    Args:
        context: tokens that there is room for, of prompt and answer together.
    """

    def __init__(self, context: int = CONTEXT) -> None:
        self.context = context
        self._children: dict[str, Child] = {}

    def call(self, path: str, input_ids: torch.Tensor, new_tokens: int) -> TimedCall:
        """Decode once, greedily. The file is loaded before the clock starts.

        Args:
            path: the GGUF file.
            input_ids: the prompt, of shape `(1, prompt_length)`.
            new_tokens: how many. The end of sequence is not among them: llama.cpp leaves it out where it must go on.

        Raises:
            RuntimeError: the process has ended, or llama.cpp cannot load the file or decode the prompt.
            ValueError: the prompt leaves no room for the new tokens.
        """
        prompt = input_ids[0].tolist()
        if len(prompt) + new_tokens > self.context:
            raise ValueError(
                f"The prompt has {len(prompt)} tokens, which leaves no room for {new_tokens} new ones in the "
                f"{self.context} of llama.cpp's context."
            )
        self._load(path)
        started = time.perf_counter()
        answer = self._request(path, "call", input_ids=prompt, new_tokens=new_tokens)
        seconds = time.perf_counter() - started
        tokens = answer["token_ids"]
        if len(tokens) != new_tokens:
            raise RuntimeError(f"llama.cpp was asked for {new_tokens} tokens, but gave {len(tokens)}.")
        return TimedCall(tokens, seconds, answer["prompt_seconds"], None)

    def memory(self, path: str) -> dict[str, int]:
        """Bytes that a file's process needs: those of the file, `persistent_bytes`, and the most beyond, `peak_bytes`.

        The latter hold the process itself, its context, and whatever copies llama.cpp makes of weights. Processes
        that have not been called yet are started.

        Raises:
            RuntimeError: as `call`.
        """
        self._load(path)
        size = os.path.getsize(path)
        # The file is mapped into memory, and so counted among what is resident.
        return {
            "persistent_bytes": size,
            "peak_bytes": max(self._request(path, "memory")["peak_bytes"] - size, 0),
        }

    def close(self) -> None:
        """End all processes."""
        while self._children:
            self._children.popitem()[1].close()

    def _load(self, path: str) -> None:
        """Start the process of a file, unless it is there."""
        if path not in self._children:
            self._children[path] = Child(f"llama.cpp, {Path(path).name}", Path(llama_cpp_worker.__file__).resolve())
            try:
                self._request(path, "load", file=path, context=self.context, threads=torch.get_num_threads())
            except BaseException:
                self._end(path)
                raise

    def _end(self, path: str) -> None:
        if path in self._children:
            self._children.pop(path).close()

    def _request(self, path: str, do: str, **message: Any) -> Mapping[str, Any]:
        child = self._children[path]
        try:
            answer = child.request(do, **message)
        except RuntimeError as error:
            # The row of this call keeps one line.
            error = RuntimeError("; ".join(line.strip() for line in str(error).splitlines()))
            self._end(path)
            raise error from None
        if "error" in answer:
            raise RuntimeError(f"llama.cpp cannot {do} {path!r}: {answer['error']}")
        return answer
