"""Time of the first `"auto"` calls on a machine that knows nothing of a model yet, and of the next process.

    python -m tests.lab.first_calls [--model FOLDER] [--dtype bfloat16] [--new-tokens 64] [--calls 3] [--json]

Each process loads the model, calls plain `generate` twice and `"auto"` `--calls` times, greedily, for the same prompt.
Two processes stream the text, as a chat does; two more take it when the call returns. The first of each two begins with
an empty folder for measurements. Loading and importing do not count. Reports seconds to the first token, to the last
one, and until the call returns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ssd_generation.generation import enable_self_speculative
from ssd_generation.models import load_model

from .program import Program, conditions
from .side_by_side import greedy_options
from .tables import as_markdown

__all__ = ["measure_process", "measure_processes"]

_PROMPT = "Write a story about a river and the people who live by it. " * 3
_CHILD = "SSD_LAB_FIRST_CALLS"
"""Environment variable that makes the program one of the processes that it measures."""

_HEADER = ("process", "call", "first token", "last token", "returns", "text is plain's")


class _Clock(BaseStreamer):
    """Notes when tokens arrive; the prompt is put first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def measure_process(name: str, dtype: str, new_tokens: int, calls: int, streams: bool) -> list[dict[str, Any]]:
    """Time calls in this process.

    Args:
        name: model for `load_model`.
        dtype: type of its weights.
        new_tokens: tokens of each call.
        calls: number of `"auto"` calls.
        streams: whether the text is streamed.

    Returns:
        Of each call: its name, seconds to the first token and to the last one (`None` where the text is not streamed)
        and until it returns, and whether its text is plain `generate`'s.
    """
    model, tokenizer = load_model(name, dtype=dtype)
    model = enable_self_speculative(model.eval())
    inputs = {**tokenizer(_PROMPT, return_tensors="pt")}
    plain: torch.Tensor | None = None
    rows = []
    for number in range(-2, calls):
        clock = _Clock()
        options: dict[str, Any] = {"streamer": clock} if streams else {}
        if number >= 0:
            options["self_speculative"] = "auto"
        began = time.perf_counter()
        text = model.generate(**inputs, **greedy_options(new_tokens), **options)
        returned = time.perf_counter() - began
        plain = text if plain is None else plain
        first, last = (clock.times[1] - began, clock.times[-1] - began) if streams else (None, None)
        rows.append(
            {
                "call": "plain" if number < 0 else f"auto, {number + 1}",
                "first": first,
                "last": last,
                "returns": returned,
                "same": bool(torch.equal(text, plain)),
            }
        )
    return rows[1:]


def measure_processes(name: str, dtype: str, new_tokens: int, calls: int) -> dict[str, list[dict[str, Any]]]:
    """Time calls in new processes, with arguments as in `measure_process`; return their rows by process."""
    found = {}
    for streams in (True, False):
        with tempfile.TemporaryDirectory(prefix="ssd-first-calls-") as folder:
            os.chmod(folder, 0o700)
            for number, which in enumerate(("on this machine", "after it")):
                asked = {"name": name, "dtype": dtype, "new_tokens": new_tokens, "calls": calls, "streams": streams}
                environment = {**os.environ, "SSD_GENERATION_CACHE": folder, _CHILD: json.dumps(asked)}
                command = [sys.executable, "-m", "tests.lab.first_calls"]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                how = "streamed" if streams else "not streamed"
                rows = json.loads(done.stdout.splitlines()[-1])
                found[f"{how}, {'first' if number == 0 else 'next'} process {which}"] = rows
    return found


def _cells(process: str, row: dict[str, Any]) -> list[str]:
    seconds = ("–" if row[key] is None else f"{row[key]:.2f}" for key in ("first", "last", "returns"))
    return [process, row["call"], *seconds, "yes" if row["same"] else "no"]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    if (asked := os.environ.get(_CHILD)) is not None:
        print(json.dumps(measure_process(**json.loads(asked))))
        return
    program = Program("first_calls", __doc__)
    program.add_model()
    program.add_counts(new_tokens=64, calls=3)
    program.add_json()
    arguments = program.parsed(words)
    found = measure_processes(arguments.model, arguments.dtype, arguments.new_tokens, arguments.calls)
    if arguments.json:
        print(json.dumps({"conditions": conditions(arguments), "processes": found}))
        return
    print(conditions(arguments), end="\n\n")
    lines = [_cells(process, row) for process, rows in found.items() for row in rows]
    print("\n".join(as_markdown(_HEADER, lines)))


if __name__ == "__main__":
    main()
