"""Other runtimes, llama.cpp and OpenVINO GenAI, each in a process of its own, for `peer_prompts` and `peer_batches`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ssd_generation.harness.peers import LlamaCpp, OpenVino
from ssd_generation.harness.run import Child

from .program import Program

__all__ = ["add_runtimes", "answer_of", "runtimes"]

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
"""OpenVINO's names of types."""


def add_runtimes(program: Program) -> None:
    """Add the options for the files of other runtimes."""
    program.add_argument("--gguf", nargs="*", default=[], help="files for llama.cpp")
    program.add_argument("--openvino", nargs="*", default=[], help="folders for OpenVINO GenAI")


def runtimes(
    arguments: argparse.Namespace, children: contextlib.ExitStack, **settings: Any
) -> Iterator[tuple[str, Child]]:
    """Yield the name and the process of each runtime that was asked for, with its model.

    Args:
        arguments: parsed options, those of `add_runtimes` and `dtype` among them.
        children: stack that ends the processes.
        settings: further fields of the message that loads the model.

    Raises:
        SystemExit: a model cannot be loaded.
    """
    precision = _PRECISIONS[arguments.dtype]
    for runtime, files in ((LlamaCpp, arguments.gguf), (OpenVino, arguments.openvino)):
        for file in files:
            name = f"{runtime.name}, {Path(file).name}"
            child = children.enter_context(Child(name, runtime.worker))
            try:
                answer_of(child, "load", file=file, threads=torch.get_num_threads(), precision=precision, **settings)
            except RuntimeError as error:
                sys.exit(f"{name} cannot be loaded: {error}")
            yield name, child


def answer_of(child: Child, do: str, **message: Any) -> dict[str, Any]:
    """Return a runtime's answer to a request.

    Raises:
        RuntimeError: it answers with an error, or has ended.
    """
    answer = child.request(do, **message)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer
