"""Lists of layers and skip sets: parsed from options, and formatted for display."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import SkipConfig


def parse_layers(option: str, text: str | None) -> list[int]:
    """Parse a list of layer numbers such as `5,7,10-12`.

    Args:
        option: name of the option, for the error message.
        text: the list; `None` or empty for no layers.

    Raises:
        ValueError: the text is not such a list.
    """
    layers: list[int] = []
    for part in re.split(r"[,\s]+", (text or "").strip(" ,")):
        match = re.fullmatch(r"(\d+)(?:[-–](\d+))?", part)
        if part and match is None:
            raise ValueError(
                f"{option}: {part!r} is not a layer. Write layer numbers, counted from 0, and ranges, with commas "
                "between them: 5,7,10-12."
            )
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"{option}: the range {part!r} runs backwards. Write {last}-{first}.")
            if last > 100_000:
                raise ValueError(f"{option}: no model has a layer {last}.")
            layers += range(first, last + 1)
    return layers


def describe_layers(layers: Sequence[int]) -> str:
    """Format layer numbers as a list, the reverse of `parse_layers`, with runs of three and more as ranges."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown: list[str] = []
    for run in runs:
        shown += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(layer) for layer in run]
    return ", ".join(shown)


def describe_skip(skip: SkipConfig) -> str:
    """Format a skip set in words, such as "attention 5, 7, 10–12 and MLP 9"."""
    kinds = (("attention", skip.attention), ("MLP", skip.mlp))
    return " and ".join(f"{kind} {describe_layers(layers)}" for kind, layers in kinds if layers)
