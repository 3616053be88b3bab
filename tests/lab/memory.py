"""Peak memory of a self-speculative call, compared with a plain one.

    python -m tests.lab.memory [--model demo] [--context 2000] [--new-tokens 64] [--draft-length 5]

Counts the bytes of all tensors alive at the same time, minus those that were alive before the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ssd_generation.config import DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.run import peak_bytes
from ssd_generation.models import load_model
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.automatic import weight_bytes

from .program import Program
from .side_by_side import greedy_options

__all__ = ["measure_memory"]


def measure_memory(
    model: Any, skip: SkipConfig, context: int = 2000, new_tokens: int = 64, draft_length: int = 5
) -> dict[str, Any]:
    """Measure the peak memory of a plain and of a self-speculative call.

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
    options = greedy_options(new_tokens)
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


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("memory", __doc__)
    program.add_model()
    program.add_counts(context=2000, new_tokens=64, draft_length=5)
    program.add_argument(
        "--attention", type=int, nargs="*", default=[10, 14, 18], help="attention sub-layers that the draft skips"
    )
    program.add_argument("--mlp", type=int, nargs="*", default=[], help="MLP sub-layers that the draft skips")
    arguments = program.parsed(words)
    model, _ = load_model(arguments.model, dtype=arguments.dtype)
    skip = SkipConfig(attention=arguments.attention, mlp=arguments.mlp)
    report = measure_memory(model, skip, arguments.context, arguments.new_tokens, arguments.draft_length)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
