"""Base of the peers: another runtime that decodes the same prompts, as tokens, in separate processes.

Each model has a process (see the workers), with as many threads as PyTorch has here, which waits while other methods
are called.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..peer_methods import PeerModel
from ..run import Child, TimedCall
from .models import model_bytes

__all__ = ["Peer"]


class Peer:
    """Processes of another runtime, one for each model, each started when it is first needed. Call `close` at the end.

    A process that has died is started again by the next call.

    Args:
        dtype: dtype of the model that is measured; a runtime computes in it where it can choose.

    Attributes:
        name: name of the runtime in errors.
        package: package that provides it.
        module: module by which the package is imported.
        extra: extra of this library that installs it.
        worker: file of the class `Worker` of its processes.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]
    extra: ClassVar[str]
    worker: ClassVar[Path]

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._children: dict[PeerModel, Child] = {}

    # -- what subclasses override --------------------------------------------------------------------------------------

    def settings(self, model: PeerModel) -> dict[str, Any]:
        """Return further fields of the worker's `do_load` message, in addition to the path and the threads."""
        return {}

    def check_room(self, prompt: Sequence[int], new_tokens: int) -> None:
        """Raise ValueError if a prompt leaves no room for the new tokens."""

    # -- calls ---------------------------------------------------------------------------------------------------------

    @classmethod
    def check_installed(cls) -> None:
        """Raise if the package is missing.

        Raises:
            ImportError: the package is not installed.
        """
        if importlib.util.find_spec(cls.module) is None:
            raise ImportError(
                f"{cls.name} comes in the package {cls.package} (extra `{cls.extra}`), which is not installed: "
                f"pip install {cls.package}"
            )

    def versions(self) -> dict[str, str]:
        """Return the version of the package, for the environment of a run.

        Raises:
            ImportError: the package is not installed.
        """
        return {self.package: importlib.metadata.version(self.package)}

    def call(self, model: PeerModel, input_ids: torch.Tensor, new_tokens: int) -> TimedCall:
        """Decode once, greedily. The model is loaded before the clock starts.

        With a prefix cache, so is the prompt: an untimed call leaves it in the cache.

        Args:
            model: the model to decode with.
            input_ids: the prompt, of shape `(1, prompt_length)`.
            new_tokens: number of new tokens; the end of sequence is ignored.

        Raises:
            RuntimeError: the process has ended, or the runtime cannot load the model or decode the prompt.
            ValueError: the prompt leaves no room for the new tokens.
        """
        prompt = input_ids[0].tolist()
        self.check_room(prompt, new_tokens)
        self._load(model)
        if model.prefix_cache:
            self._request(model, "call", input_ids=prompt, new_tokens=1)
        started = time.perf_counter()
        answer = self._request(model, "call", input_ids=prompt, new_tokens=new_tokens)
        seconds = time.perf_counter() - started
        tokens = answer["token_ids"]
        if len(tokens) != new_tokens:
            raise RuntimeError(f"{self.name} was asked for {new_tokens} tokens, but gave {len(tokens)}.")
        return TimedCall(tokens, seconds, answer["prompt_seconds"], None)

    def memory(self, model: PeerModel) -> dict[str, int]:
        """Return the bytes that a model's process needs: `persistent_bytes` for its file, `peak_bytes` beyond that.

        The latter include the process itself, its context, and any copies that the runtime makes of weights. A process
        that has not been called yet is started.

        Raises:
            RuntimeError: as `call`.
        """
        self._load(model)
        size = model_bytes(model.path)
        with self._child(model) as child:
            peak = child.peak_bytes()
        # The file is mapped into memory, so the resident memory includes it.
        return {"persistent_bytes": size, "peak_bytes": max(peak - size, 0)}

    def close(self) -> None:
        """End all processes."""
        while self._children:
            self._children.popitem()[1].close()

    def _load(self, model: PeerModel) -> None:
        """Start the process of a model, unless it runs."""
        if model not in self._children:
            self._children[model] = Child(f"{self.name}, {Path(model.path).name}", self.worker)
            try:
                self._request(model, "load", file=model.path, threads=torch.get_num_threads(), **self.settings(model))
            except BaseException:
                self._end(model)
                raise

    def _end(self, model: PeerModel) -> None:
        if model in self._children:
            self._children.pop(model).close()

    def _request(self, model: PeerModel, do: str, **message: Any) -> Mapping[str, Any]:
        with self._child(model) as child:
            answer = child.request(do, **message)
        if "error" in answer:
            raise RuntimeError(f"{self.name} cannot {do} {model.path!r}: {answer['error']}")
        return answer

    @contextlib.contextmanager
    def _child(self, model: PeerModel) -> Iterator[Child]:
        """Yield the process of a model; if it ends, drop it and raise an error of one line."""
        try:
            yield self._children[model]
        except RuntimeError as error:
            # The row of this call has room for one line.
            error = RuntimeError("; ".join(line.strip() for line in str(error).splitlines()))
            self._end(model)
            raise error from None
