"""Search for the best draft of a model: which sub-layers to skip, and the precision of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..support.lazy_names import lazy_names

if TYPE_CHECKING:
    from .confirm import NOTHING_DRAFTED
    from .cost_profile import CostProfile, measure_profile
    from .plots import plot_frontier, plot_map, plot_progress
    from .run_search import search
    from .settings import CalibrationSettings, ResultSettings, SearchSettings

__all__ = [
    "NOTHING_DRAFTED",
    "CalibrationSettings",
    "CostProfile",
    "ResultSettings",
    "SearchSettings",
    "measure_profile",
    "plot_frontier",
    "plot_map",
    "plot_progress",
    "search",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".confirm": ["NOTHING_DRAFTED"],
        ".cost_profile": ["CostProfile", "measure_profile"],
        ".plots": ["plot_frontier", "plot_map", "plot_progress"],
        ".run_search": ["search"],
        ".settings": ["CalibrationSettings", "ResultSettings", "SearchSettings"],
    },
)
