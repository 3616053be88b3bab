"""Configuration of drafting: skip set, draft length, low-bit copies, prompt lookup, costs."""

from .schema import (
    PRESETS,
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    Provenance,
    SelfSpeculativeConfig,
    SkipConfig,
)
from .stored_parameters import CONFIG_NAME, FORMAT_VERSION
from .values import POLICIES, PRECISIONS

__all__ = ["CONFIG_NAME", "FORMAT_VERSION", "POLICIES", "PRECISIONS", "PRESETS", "Costs", "DraftingConfig"]
__all__ += ["LookupConfig", "PrecisionConfig", "Provenance", "SelfSpeculativeConfig", "SkipConfig"]
