"""Quality of generated texts, alongside speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..support.lazy_names import lazy_names

if TYPE_CHECKING:
    from ..harness.results import read_rows, sampling_notes
    from .evaluate_model import CodeExecution, EvaluationSettings, run_evaluation
    from .sandbox import Limits, protections, run_program
    from .tasks import make_task

__all__ = [
    "CodeExecution",
    "EvaluationSettings",
    "Limits",
    "make_task",
    "protections",
    "read_rows",
    "run_evaluation",
    "run_program",
    "sampling_notes",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".evaluate_model": ["CodeExecution", "EvaluationSettings", "run_evaluation"],
        ".sandbox": ["Limits", "protections", "run_program"],
        ".tasks": ["make_task"],
        "..harness.results": ["read_rows", "sampling_notes"],
    },
)
