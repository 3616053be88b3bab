"""Worker on a study of a tiny model, in this process or (`work`) in one of its own."""

from __future__ import annotations

from typing import Any

import torch

from forked import Saying
from ssd_generation.search.calibration import Calibration
from ssd_generation.search.cost_profile import CostProfile
from ssd_generation.search.space import Space, space_of
from ssd_generation.search.storage import storage_of
from ssd_generation.search.study import Search, SearchSettings, open_study
from ssd_generation.tuning.acceptance import verify_text
from tiny_models import LAYERS, prompt, tiny_model


def cost_profile(**changes: Any) -> CostProfile:
    """Return a profile in which skipping an MLP saves twice as much as skipping attention."""
    values: dict[str, Any] = {
        "contexts": (64,),
        "plain_step": (1.0,),
        "attention": {"keep": (0.08,)},
        "mlp": {"keep": 0.16},
        "head": {"keep": 0.02},
        "overhead": {"keep": 0.02},
        "verify": ((1, 1.0), (8, 1.05)),
        "spread": 1.0,
        "checked": {},
        "measured_on": "a machine of the tests",
        "model_type": "llama",
        "hidden_size": 64,
        "num_layers": LAYERS,
        "shares": {"attention": (1.0,) * LAYERS, "mlp": (1.0,) * LAYERS},
    }
    return CostProfile(**{**values, **changes})


def calibration(model: Any, texts: int = 3, new: int = 24) -> Calibration:
    verified = []
    for seed in range(texts):
        ids = prompt(10, seed=seed)
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        verified.append(verify_text(model, whole, 10))
    return Calibration(tuple(verified), texts, "digest")


def worker(
    storage: Any,
    settings: SearchSettings | None = None,
    name: str = "s",
    about: dict[str, Any] | None = None,
    new: int = 24,
    layers: int = LAYERS,
    **more: Any,
) -> tuple[Search, Space]:
    settings = settings or SearchSettings(depth=3)
    model = tiny_model(num_hidden_layers=layers)
    space = space_of(model)
    study = open_study(name, storage, settings, about or {"of": "a test"})
    profile = cost_profile(num_layers=layers, shares={"attention": (1.0,) * layers, "mlp": (1.0,) * layers})
    return Search(model, calibration(model, new=new), profile, space, study, settings, **more), space


def work(saying: Saying, storage: str, trials: int, waits: bool) -> None:
    """Run so many trials and report each; with `waits`, report readiness first and begin at the test's signal."""
    torch.set_num_threads(1)
    search, _ = worker(storage_of(storage))
    if waits:
        saying.say("ready")
        saying.wait()
    search.run(trials, lambda found: saying.say(len(found.tried)))
