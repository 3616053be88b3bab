"""Measurements of one model on this machine, and what drafting has learnt of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..support.lazy_names import lazy_names

if TYPE_CHECKING:
    from ..forward.copies.low_bit import copy_bytes
    from .acceptance import judge_all, verify_text
    from .automatic import automatic_choice, weight_bytes
    from .costs import costs_of, measure_costs
    from .measuring import describe_machine
    from .speedup import expected_tokens, theoretical_speedup

__all__ = [
    "automatic_choice",
    "copy_bytes",
    "costs_of",
    "describe_machine",
    "expected_tokens",
    "judge_all",
    "measure_costs",
    "theoretical_speedup",
    "verify_text",
    "weight_bytes",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".acceptance": ["judge_all", "verify_text"],
        ".automatic": ["automatic_choice", "weight_bytes"],
        ".costs": ["costs_of", "measure_costs"],
        ".measuring": ["describe_machine"],
        ".speedup": ["expected_tokens", "theoretical_speedup"],
        "..forward.copies.low_bit": ["copy_bytes"],
    },
)
