"""llama.cpp as a peer: the same prompts, as tokens, decoded from a GGUF file by the wheel `xllamacpp`.

It runs in a process of its own for each file (see `worker.py`), with as many threads as PyTorch has here, and waits
while other methods are called.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..run import Child, TimedCall
from . import worker

__all__ = ["CONTEXT", "LlamaCpp", "llama_cpp_version"]

CONTEXT = 4096
"""Tokens that there is room for, of prompt and answer together."""


def llama_cpp_version() -> str:
    """Return the version of `xllamacpp`.

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
            new_tokens: how many. The end of sequence is not among them: llama.cpp leaves it out where it must continue.

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

        The latter include the process itself, its context, and whatever copies llama.cpp makes of weights. Processes
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

    def versions(self) -> dict[str, str]:
        """Return the versions of what runs there, for the environment of a run."""
        return {"xllamacpp": llama_cpp_version()}

    def close(self) -> None:
        """End all processes."""
        while self._children:
            self._children.popitem()[1].close()

    def _load(self, path: str) -> None:
        """Start the process of a file, unless it runs."""
        if path not in self._children:
            self._children[path] = Child(f"llama.cpp, {Path(path).name}", Path(worker.__file__).resolve())
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
            # The row of this call has room for one line.
            error = RuntimeError("; ".join(line.strip() for line in str(error).splitlines()))
            self._end(path)
            raise error from None
        if "error" in answer:
            raise RuntimeError(f"llama.cpp cannot {do} {path!r}: {answer['error']}")
        return answer
