"""What to draft with."""

from .schema import (
    CONFIG_NAME,
    FORMAT_VERSION,
    POLICIES,
    PRECISIONS,
    PRESETS,
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    Provenance,
    SelfSpeculativeConfig,
    SkipConfig,
)

__all__ = [
    "CONFIG_NAME",
    "FORMAT_VERSION",
    "POLICIES",
    "PRECISIONS",
    "PRESETS",
    "Costs",
    "DraftingConfig",
    "LookupConfig",
    "PrecisionConfig",
    "Provenance",
    "SelfSpeculativeConfig",
    "SkipConfig",
]
