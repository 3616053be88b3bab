"""A model with remote code (`trust_remote_code`): its layout is recognised, and every way of drafting works."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils
from transformers.models.llama import configuration_llama, modeling_llama

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from tiny_models import left_padded, prompt, tiny_model

THREE = DraftingConfig(policy="fixed", max_draft_length=3)
REQUESTS = {
    "lookup": SelfSpeculativeConfig(lookup=True, drafting=THREE),
    "int8": SelfSpeculativeConfig(precision="int8", drafting=THREE),
    "skipping": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), drafting=THREE),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model of Llama's code under another name, in files next to the weights."""
    folder, modules = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("modules")
    tiny_model().save_pretrained(folder)
    for kind, module in (("configuration", configuration_llama), ("modeling", modeling_llama)):
        code = Path(module.__file__).read_text(encoding="utf-8").replace("from ...", "from transformers.")
        code = code.replace("from .configuration_llama", "from .configuration_mine").replace("Llama", "Mine")
        code = code.replace('model_type = "llama"', 'model_type = "mine"')
        (folder / f"{kind}_mine.py").write_text(code, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
        patched.setattr(sys, "path", [*sys.path])
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules.")
    return enable_self_speculative(loaded.eval())


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("name", list(REQUESTS))
def test_the_same_text(model: Any, name: str, is_batch: bool) -> None:
    inputs = left_padded([21, 9]) if is_batch else {"input_ids": prompt(9).repeat(1, 3)}
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, self_speculative=REQUESTS[name]), plain)
    done = model.last_speculation
    assert done.refusal is None and done.drafted_tokens > 0
