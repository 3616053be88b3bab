"""Self-speculative decoding inside transformers' `generate()`: the model drafts for itself.

```python
from ssd_generation import SkipConfig, enable_self_speculative

model = enable_self_speculative(model)
model.generate(**inputs, self_speculative=SkipConfig(attention=[5, 7], mlp=[9]))
```
"""

from .candidate_generator import SelfSpeculativeCandidateGenerator
from .config import Costs, DraftingConfig, Provenance, SelfSpeculativeConfig, SkipConfig
from .decoding import SelfSpeculativeOutput
from .generation import disable_self_speculative, enable_self_speculative, is_self_speculative
from .models import fetch_demo, load_demo, load_model
from .skip_mode import draft_mode
from .statistics import SpeculationStatistics

__version__ = "0.1.0"

__all__ = [
    "Costs",
    "DraftingConfig",
    "Provenance",
    "SelfSpeculativeCandidateGenerator",
    "SelfSpeculativeConfig",
    "SelfSpeculativeOutput",
    "SkipConfig",
    "SpeculationStatistics",
    "__version__",
    "disable_self_speculative",
    "draft_mode",
    "enable_self_speculative",
    "fetch_demo",
    "is_self_speculative",
    "load_demo",
    "load_model",
]
