"""Process of a tensor-parallel group: writes its outputs by each way of drafting to a file, as a line of JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.tuning.costs import costs_of

SKIP, FIXED = SkipConfig([1], [2]), DraftingConfig(policy="fixed", max_draft_length=3)
WAYS = {
    "plain": None,
    "skip": SelfSpeculativeConfig(SKIP, FIXED),
    "lookup": SelfSpeculativeConfig(drafting=FIXED, lookup=True),
    "cost": SelfSpeculativeConfig(SKIP),
    "auto": "auto",
    "int8": SelfSpeculativeConfig(precision="int8"),
}


def main() -> None:
    rank = os.environ["RANK"]
    # A cache of its own, as on another machine: measurements of one process have to be sent to the others.
    os.environ["SSD_GENERATION_CACHE"] = os.path.join(sys.argv[2], f"cache-{rank}")
    model = enable_self_speculative(AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto"))
    ids = torch.tensor([[5, 6, 7, 8, 9] * 4])
    said: dict[str, object] = {"tp_size": model.tp_size}
    for name, request in WAYS.items():
        more = {} if request is None else {"self_speculative": request}
        try:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, **more
            )
        except ValueError as error:
            said[name] = str(error)
        else:
            done = model.last_speculation
            said[name] = [out[0].tolist(), None if done is None else done.drafted_tokens]
    said["costs"] = costs_of(model, SelfSpeculativeConfig(SKIP)).to_dict()
    with open(os.path.join(sys.argv[2], f"said-{rank}"), "w", encoding="utf-8") as file:
        json.dump(said, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
