"""Peak memory of a self-speculative call beside a plain one.

    python -m ssd_generation.benchmark.memory [--model demo] [--context 2000] [--new-tokens 64] [--draft-length 5]

Each call runs in a process of its own, after a short call that loads libraries and weights. On CUDA the allocator's
peak above what was allocated before is read, on the CPU (Linux) that of the resident memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ..config import DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ..generation import enable_self_speculative
from ..models import load_model

__all__ = ["measure_memory"]


def _resident() -> int:
    """Resident bytes of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class _Peak:
    """The most resident memory while the block runs, looked at every millisecond."""

    def __enter__(self) -> _Peak:
        self.start = self.peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, _resident())
            time.sleep(0.001)

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _resident())


def _one_call(arguments: dict[str, Any]) -> dict[str, int]:
    model, _ = load_model(arguments["model"], dtype=arguments["dtype"])
    enable_self_speculative(model)
    skip = SkipConfig(attention=arguments["attention"], mlp=arguments["mlp"])
    config = SelfSpeculativeConfig(skip, DraftingConfig(policy="fixed", max_draft_length=arguments["draft_length"]))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (1, arguments["context"]), generator=generator)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    request = config if arguments["self_speculative"] else None
    model.generate(ids[:, :64].to(model.device), max_new_tokens=8, self_speculative=request, **options)
    ids = ids.to(model.device)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.generate(ids, max_new_tokens=arguments["new_tokens"], self_speculative=request, **options)
        used = torch.cuda.max_memory_allocated() - start
    else:
        with _Peak() as peak:
            model.generate(ids, max_new_tokens=arguments["new_tokens"], self_speculative=request, **options)
        used = peak.peak - peak.start
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"peak": used, "weights": weights}


def measure_memory(repeats: int = 3, **arguments: Any) -> dict[str, Any]:
    """Peak memory of both, each call in a process of its own, in turn.

    Args:
        repeats: calls of each.
        **arguments: the command's options.

    Returns:
        Bytes: `plain` and `self_speculative` (medians and all values), their `difference` (median of the pairs), the
            `weights`, and
        the difference as a share of them.
    """
    context = multiprocessing.get_context("spawn")
    runs: dict[bool, list[int]] = {False: [], True: []}
    weights = 0
    for _ in range(repeats):
        for speculative in (False, True):
            with context.Pool(1) as pool:
                result = pool.apply(_one_call, ({**arguments, "self_speculative": speculative},))
            runs[speculative].append(result["peak"])
            weights = result["weights"]
    difference = statistics.median(b - a for a, b in zip(runs[False], runs[True], strict=True))
    return {
        "plain": {"median": statistics.median(runs[False]), "all": runs[False]},
        "self_speculative": {"median": statistics.median(runs[True]), "all": runs[True]},
        "difference": difference,
        "weights": weights,
        "share_of_weights": difference / weights,
    }


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
    parser.add_argument("--attention", type=int, nargs="*", default=[10, 14, 18], help="attention sub-layers left out")
    parser.add_argument("--mlp", type=int, nargs="*", default=[], help="MLP sub-layers left out")
    parser.add_argument("--repeats", type=int, default=3)
    print(json.dumps(measure_memory(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
