"""Figures as cells of a table, and tables and sentences in Markdown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...support.display import byte_size, for_markdown
from ..texts import z_figure

__all__ = ["LEAST_JUDGED", "NONE", "category_cell", "depth_cell", "figure_cell", "markdown_sentence"]
__all__ += ["markdown_table", "memory_cell", "percent_cell", "sampling_cell", "share_cell", "text_cell"]

NONE = "–"
LEAST_JUDGED = 10  # tokens at a depth whose acceptance is shown; that of fewer is chance


def figure_cell(value: float | None, digits: int = 2) -> str:
    """Format a number with `digits` decimals."""
    return NONE if value is None else f"{value:.{digits}f}"


def percent_cell(value: float | None, digits: int = 0) -> str:
    """Format a share in per cent."""
    return NONE if value is None else f"{value:.{digits}%}"


def share_cell(part: int, whole: int) -> str:
    """Format a count out of a total: `all`, or `3 of 4`."""
    return "all" if part == whole else f"{part} of {whole}"


def category_cell(figures: Mapping[str, float] | None) -> str:
    """Format median, least and greatest value: `1.31 (1.12–1.50)`."""
    if figures is None:
        return NONE
    if figures["n"] == 1:
        return f"{figures['median']:.2f}"
    return f"{figures['median']:.2f} ({figures['min']:.2f}–{figures['max']:.2f})"


def text_cell(text: Mapping[str, Any] | None) -> str:
    """Format the number of texts that equal plain decoding's."""
    return NONE if text is None else share_cell(text["identical"], text["calls"])


def sampling_cell(entry: Mapping[str, Any]) -> str:
    """Format the z of a method's draws against the model's distribution: `+0.6`, with the impossible tokens, if any."""
    draws = entry.get("draws")
    return (draws and z_figure(draws["z"], draws["impossible"])) or NONE


def depth_cell(figures: Mapping[str, Any]) -> str:
    """Format acceptance by depth, as deep as at least `LEAST_JUDGED` tokens were judged."""
    rates = zip(figures["acceptance_by_depth"], figures["judged_by_depth"], strict=True)
    shown = itertools.takewhile(lambda pair: pair[1] >= LEAST_JUDGED, rates)
    return " ".join(figure_cell(rate) for rate, _ in shown) or NONE


def memory_cell(memory: Mapping[str, Any]) -> str:
    """Format extra memory in bytes and as a share of the weights."""
    share = "" if memory["share_of_weights"] is None else f" ({memory['share_of_weights']:.1%})"
    return f"{byte_size(memory['extra_bytes'])}{share}"


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with these header and body cells."""
    return [
        f"| {' | '.join(map(for_markdown, header))} |",
        f"|{'|'.join(['---'] * len(header))}|",
        *(f"| {' | '.join(map(for_markdown, line))} |" for line in lines),
    ]


def markdown_sentence(text: str) -> str:
    """Escape a text at the beginning of a line of Markdown, where `#` or `1.` would make it something else."""
    return re.sub(r"^(\d*)([-+=#.)])", r"\1\\\2", for_markdown(text).lstrip())
