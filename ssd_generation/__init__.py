"""Self-speculative decoding inside transformers' `generate()`: the model drafts for itself.

```python
from ssd_generation import SkipConfig, enable_self_speculative

model = enable_self_speculative(model)
model.generate(**inputs, self_speculative="auto")  # the fastest way to draft here: low bits, skipping, lookup, or none
model.generate(**inputs, self_speculative=SkipConfig(attention=[5, 7], mlp=[9]))
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .support.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".decoding.candidate_generator": ["SelfSpeculativeCandidateGenerator"],
        ".config": [
            "Costs",
            "DraftingConfig",
            "LookupConfig",
            "PrecisionConfig",
            "Provenance",
            "SelfSpeculativeConfig",
            "SkipConfig",
        ],
        ".drafting.drafter": ["Draft", "Drafter"],
        ".decoding.outputs": ["SelfSpeculativeOutput"],
        ".generation": ["disable_self_speculative", "enable_self_speculative", "is_self_speculative"],
        ".generation.custom": ["generate_drafting"],
        ".generation.lookup_texts": ["add_lookup_texts", "load_lookup_texts", "save_lookup_texts"],
        ".generation.prefix_files": ["load_prefix_cache", "save_prefix_cache"],
        ".models": ["fetch_demo", "load_demo", "load_model"],
        ".harness.results": ["TokenOrigins"],
        ".forward.structure.skip_mode": ["draft_mode"],
        ".decoding.statistics": ["SpeculationStatistics"],
    },
)
