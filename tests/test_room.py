"""Batches for which there is not enough memory to verify drafts: decoded as transformers does, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.generation import room
from tiny_models import prompt, tiny_model

SKIP = SelfSpeculativeConfig(SkipConfig(mlp=[1]), DraftingConfig(policy="fixed", max_draft_length=3))
LOOKUP = SelfSpeculativeConfig(lookup=LookupConfig(max_tokens=5), drafting=DraftingConfig(policy="fixed"))
NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
ROWS = 4


@pytest.mark.parametrize(("config", "tokens"), [(SKIP, 3), (LOOKUP, 5), (NOTHING, 0)], ids=["skip", "lookup", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:LlamaForCausalLM is decoded without drafts")
def test_rows_without_room_are_decoded_plainly(
    config: SelfSpeculativeConfig, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = enable_self_speculative(tiny_model("llama").to(dtype))
    needed = ROWS * tokens * model.config.vocab_size * (4 + dtype.itemsize)
    ids = torch.cat([prompt(9).roll(turn, 1) for turn in range(ROWS)])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    for free, fits in ((needed, True), (max(needed - 1, 0), tokens == 0), (None, True)):
        monkeypatch.setattr(room, "available_bytes", lambda free=free: free)
        text = model.generate(ids, **options, self_speculative=config)
        refusal = model.last_speculation.refusal
        assert refusal is None or torch.equal(text, plain)
        assert refusal is None if fits else f"each of {ROWS} rows take" in refusal and "fewer rows" in refusal
        # A single text needs no such room.
        model.generate(prompt(9), **options, self_speculative=config)
        assert model.last_speculation.refusal is None


def test_what_is_free_on_other_devices_is_unknown() -> None:
    assert room._available(torch.device("meta")) is None
    assert room._available(torch.device("cpu")) is not None
