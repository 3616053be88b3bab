"""Peak memory of a self-speculative call beside a plain one.

    python -m ssd_generation.benchmark.memory [--model demo] [--context 2000] [--new-tokens 64] [--draft-length 5]

Counts the bytes of all tensors alive at the same time, minus those that were alive before the call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from ..config import DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ..generation import enable_self_speculative
from ..harness.run import peak_bytes
from ..models import load_model
from ..support.versions import CACHE
from ..tuning.automatic import weight_bytes

__all__ = ["measure_memory"]


def measure_memory(
    model: Any, skip: SkipConfig, context: int = 2000, new_tokens: int = 64, draft_length: int = 5
) -> dict[str, Any]:
    """Peak memory of a plain and of a self-speculative call.

    Args:
        model: a transformers model; it is enabled.
        skip: sub-layers that the draft skips.
        context: tokens of the (random) prompt.
        new_tokens: tokens per call; end-of-sequence is off.
        draft_length: tokens per round.

    Returns:
        Bytes: the peaks of both calls (of the whole call, and of decoding after the prompt's pass), their differences,
        the weights, and the differences as a share of these.
    """
    enable_self_speculative(model)
    config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=draft_length))
    generator = torch.Generator(device="cpu").manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (1, context), generator=generator, device="cpu").to(model.device)
    options: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    weights = weight_bytes(model)
    report: dict[str, Any] = {"context": context, "new_tokens": new_tokens, "weights": weights}
    for part in ("whole_call", "decoding"):
        peaks = []
        for request in (None, config):
            extra: dict[str, Any] = {"self_speculative": request}
            if part == "decoding":
                # Without the prompt's pass, which needs the most memory, and the same in both.
                extra[CACHE] = model.generate(
                    ids[:, :-1], **{**options, "max_new_tokens": 1}, return_dict_in_generate=True
                )[CACHE]
            peaks.append(peak_bytes(model, ids, **options, **extra))
        report[part] = {
            "plain": peaks[0],
            "self_speculative": peaks[1],
            "difference": peaks[1] - peaks[0],
            "share_of_weights": (peaks[1] - peaks[0]) / weights,
        }
    return report


def main() -> None:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m ssd_generation.benchmark.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="Hub id, folder, GGUF file or 'demo' (SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument(
        "--attention", type=int, nargs="*", default=[10, 14, 18], help="attention sub-layers that the draft skips"
    )
    parser.add_argument("--mlp", type=int, nargs="*", default=[], help="MLP sub-layers that the draft skips")
    arguments = parser.parse_args()
    model, _ = load_model(arguments.model, dtype=arguments.dtype)
    skip = SkipConfig(attention=arguments.attention, mlp=arguments.mlp)
    report = measure_memory(model, skip, arguments.context, arguments.new_tokens, arguments.draft_length)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
