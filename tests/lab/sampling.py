"""Milliseconds that sampling takes for each token, outside the model's passes: this library and transformers' own way.

    python -m tests.lab.sampling [--vocabulary 49152 151936] [--rows 1 8 64] [--repeats 7] [--json]

Random logits of 16 bits, and the noise of one step: drawn by PyTorch and by the kernel; then a token of each row by
temperature 0.7, top-k and top-p or from all, by transformers' processors and by this library. Medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ssd_generation.decoding.choice import SampledChoice
from ssd_generation.decoding.processors import PureProcessors
from ssd_generation.native.ops.exponentials import draw_exponentials
from ssd_generation.support.machine import cpu_name

from .program import Program
from .tables import as_markdown, versions

__all__ = ["measure_sampling"]

_SPREAD = 4.0
"""Standard deviation of the logits: some tens of tokens make up most of the mass."""

_SETTINGS: dict[str, list[LogitsProcessor]] = {
    "top-k 20, top-p 0.8": [TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
    "top-k 50": [TopKLogitsWarper(50)],
    "top-p 0.9": [TopPLogitsWarper(0.9)],
    "all tokens": [],
}


def measure_sampling(vocabulary: int, rows: int, repeats: int = 7) -> dict[str, tuple[float, float]]:
    """Time the parts of sampling.

    Args:
        vocabulary: number of logits, V.
        rows: number of texts.
        repeats: number of times that each is timed.

    Returns:
        By part: milliseconds of transformers' way and of this library's.
    """
    device = torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.empty((rows, vocabulary), device=device)
    logits = torch.randn((rows, 1, vocabulary), generator=generator, device=device).mul_(_SPREAD).bfloat16()
    ids, steps = torch.zeros((rows, 1), dtype=torch.long, device=device), [0] * rows
    choice = SampledChoice(rows, device)
    found = {
        "random numbers": (
            _milliseconds(lambda: noise.exponential_(generator=generator), repeats),
            _milliseconds(lambda: draw_exponentials(noise, generator), repeats),
        )
    }
    try:
        for name, last in _SETTINGS.items():
            pure = PureProcessors([TemperatureLogitsWarper(0.7), *last])
            truncation = pure.truncation

            def theirs(pure: PureProcessors = pure) -> Any:
                return choice.choose(pure.once(ids, logits[:, 0].float())[:, None], steps)

            def ours(truncation: Any = truncation) -> Any:
                return choice.draw(truncation, logits, steps)

            found[name] = _milliseconds(theirs, repeats), _milliseconds(ours, repeats)
    finally:
        choice.end(0)
    return found


def _milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median of a function's times, after a first call."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("sampling", __doc__)
    program.add_argument("--vocabulary", nargs="+", type=int, default=[49152, 151936], metavar="V", help="logits")
    program.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64], metavar="N", help="texts")
    program.add_counts(repeats=7)
    program.add_json()
    arguments = program.parsed(words)
    found = [
        {"rows": rows, "vocabulary": vocabulary, **measure_sampling(vocabulary, rows, arguments.repeats)}
        for vocabulary in arguments.vocabulary
        for rows in arguments.rows
    ]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{versions()}; {cpu_name()}, {torch.get_num_threads()} threads. Milliseconds, transformers → this library.\n"
    )
    table = [
        [f"{value[0]:.2f} → {value[1]:.2f}" if isinstance(value, tuple) else str(value) for value in row.values()]
        for row in found
    ]
    print("\n".join(as_markdown(list(found[0]), table)))


if __name__ == "__main__":
    main()
