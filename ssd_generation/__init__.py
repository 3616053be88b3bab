"""Self-speculative decoding inside transformers' `generate()`: the model drafts for itself.

```python
from ssd_generation import SkipConfig, enable_self_speculative

model = enable_self_speculative(model)
model.generate(**inputs, self_speculative="auto")  # the fastest way to draft here: low bits, skipping, lookup, or none
model.generate(**inputs, self_speculative=SkipConfig(attention=[5, 7], mlp=[9]))
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import (
        Costs,
        DraftingConfig,
        LookupConfig,
        PrecisionConfig,
        Provenance,
        SelfSpeculativeConfig,
        SkipConfig,
    )
    from .decoding.candidate_generator import SelfSpeculativeCandidateGenerator
    from .decoding.outputs import SelfSpeculativeOutput
    from .decoding.statistics import SpeculationStatistics
    from .drafting.drafter import Draft, Drafter
    from .forward.structure.skip_mode import draft_mode
    from .generation import disable_self_speculative, enable_self_speculative, is_self_speculative
    from .generation.custom import generate_drafting
    from .generation.lookup_texts import add_lookup_texts, load_lookup_texts, save_lookup_texts
    from .generation.prefix_files import load_prefix_cache, save_prefix_cache
    from .harness.results import TokenOrigins
    from .models import fetch_demo, load_demo, load_model

__version__ = "0.2.0"

__all__ = [
    "Costs",
    "Draft",
    "Drafter",
    "DraftingConfig",
    "LookupConfig",
    "PrecisionConfig",
    "Provenance",
    "SelfSpeculativeCandidateGenerator",
    "SelfSpeculativeConfig",
    "SelfSpeculativeOutput",
    "SkipConfig",
    "SpeculationStatistics",
    "TokenOrigins",
    "__version__",
    "add_lookup_texts",
    "disable_self_speculative",
    "draft_mode",
    "enable_self_speculative",
    "fetch_demo",
    "generate_drafting",
    "is_self_speculative",
    "load_demo",
    "load_lookup_texts",
    "load_model",
    "load_prefix_cache",
    "save_lookup_texts",
    "save_prefix_cache",
]

_HOMES = {
    "SelfSpeculativeCandidateGenerator": ".decoding.candidate_generator",
    "Costs": ".config",
    "Draft": ".drafting.drafter",
    "Drafter": ".drafting.drafter",
    "DraftingConfig": ".config",
    "LookupConfig": ".config",
    "PrecisionConfig": ".config",
    "Provenance": ".config",
    "SelfSpeculativeConfig": ".config",
    "SkipConfig": ".config",
    "SelfSpeculativeOutput": ".decoding.outputs",
    "disable_self_speculative": ".generation",
    "enable_self_speculative": ".generation",
    "is_self_speculative": ".generation",
    "generate_drafting": ".generation.custom",
    "add_lookup_texts": ".generation.lookup_texts",
    "load_lookup_texts": ".generation.lookup_texts",
    "save_lookup_texts": ".generation.lookup_texts",
    "load_prefix_cache": ".generation.prefix_files",
    "save_prefix_cache": ".generation.prefix_files",
    "fetch_demo": ".models",
    "load_demo": ".models",
    "load_model": ".models",
    "TokenOrigins": ".harness.results",
    "draft_mode": ".forward.structure.skip_mode",
    "SpeculationStatistics": ".decoding.statistics",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use: `ssd --help` need not wait for torch and transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
