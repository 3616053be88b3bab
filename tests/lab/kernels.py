"""Milliseconds of a pass by kind of kernel, and the speed at which kernels read weights, compared with torch's.

    python -m tests.lab.kernels [--model demo] [--dtype float32] [--rows 1 2 4 8] [--repeats 7] [--json]

Passes of the target model and of drafts in int8 and int4 (LM head included), over so many tokens after a prefix of 64.
Each is timed as a whole and then in parts: all kernels of one kind in a row, without the others. The rest of a pass is
Python, and what torch computes between lists of kernels. Times are medians. "Memory" is the speed at which torch sums a
large tensor, measured between the passes: on a shared machine it may change within minutes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from ssd_generation.config import PrecisionConfig, SelfSpeculativeConfig
from ssd_generation.forward.captured.batch_invariance import WIDTHS, BatchInvariance
from ssd_generation.forward.captured.passes import CapturedPasses, captured_target, draft_of
from ssd_generation.generation import enable_self_speculative
from ssd_generation.models import load_model
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops.linear import NativeLinear
from ssd_generation.native.sequence import KernelList
from ssd_generation.tuning.costs import Passes
from ssd_generation.tuning.measuring import describe_machine

from .program import Program

__all__ = ["measure_kernels"]

_LARGE = 1 << 28
"""Bytes of the tensor that is summed: more than any cache holds."""

_HEAD = "LM head"

_ENOUGH = 1 << 27
"""Bytes of weights that torch's kernels run over, so that they come from memory as they do in a pass."""


def measure_kernels(model: Any, rows: list[int], repeats: int = 7) -> dict[str, Any]:
    """Time passes and their parts.

    Args:
        model: a transformers model on the CPU, enabled.
        rows: numbers of tokens in a pass, each 1 to 24.
        repeats: number of times each pass is timed.

    Returns:
        `passes`, one for each kind of weights and number of tokens: `seconds` of the pass; `in_kernels`, those within
        lists of kernels; `parts` of these lists with their `seconds`, and for linear layers `bytes`, `layers` and
        `torch`, the seconds that torch's kernels take for the same layers; and `memory`, the speed of memory meanwhile,
        in bytes per second. The `memory` of the whole is the median over the passes.

    Raises:
        ValueError: no kernels are compiled for this processor, or the model's passes do not run by them.
    """
    reason = why_not()
    if reason is not None:
        raise ValueError(f"There are no kernels to measure: {reason}")
    passes = []
    with torch.inference_mode():
        cache = Passes(model, None).cache
        for weights in (str(model.dtype).removeprefix("torch."), "int8", "int4"):
            captured = _captured(model, weights)
            passes += [{"weights": weights, "rows": count, **_pass(captured, cache, count, repeats)} for count in rows]
    memory = statistics.median(one["memory"] for one in passes)
    return {"machine": describe_machine(model), "memory": memory, "passes": passes}


def _captured(model: Any, weights: str) -> CapturedPasses:
    if weights in ("int8", "int4"):
        config = SelfSpeculativeConfig(precision=PrecisionConfig.named(weights))
        captured = draft_of(model, config)[1]
    else:
        captured = captured_target(model, BatchInvariance("native", WIDTHS))
    if captured is None or captured.program(1) is None:
        refusal = None if captured is None else captured.refusal or captured.uneven
        raise ValueError(f"The passes of {type(model).__name__} do not run by these kernels: {refusal}")
    return captured


def _pass(captured: CapturedPasses, cache: Cache, count: int, repeats: int) -> dict[str, Any]:
    at = cache.get_seq_length()
    ids = torch.arange(10, 10 + count, device="cpu")[None]
    positions = torch.arange(at, at + count, device="cpu")[None]

    def run() -> None:
        captured.run(cache, ids, positions, ahead=count, width=count)
        if captured.is_draft:
            captured.end_round()
        else:
            cache.crop(-count)

    run()
    large = torch.ones(_LARGE // 4, device="cpu")
    whole, lists, sums = [], list[float](), [_seconds(large.sum)]
    parts: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        sums.append(_seconds(large.sum))
        whole.append(_seconds(run))
        with _taken_apart(parts) as in_kernels:
            run()
        lists.append(sum(in_kernels))
    for part in parts.values():
        part["seconds"] = statistics.median(part["seconds"])
    return {
        "seconds": statistics.median(whole),
        "in_kernels": statistics.median(lists),
        "memory": _LARGE / statistics.median(sums[1:]),
        "parts": parts,
    }


@contextmanager
def _taken_apart(parts: dict[str, dict[str, Any]]) -> Iterator[list[float]]:
    """Time lists of kernels, and then their parts, whose seconds are added up over the lists of a pass."""
    original, seconds, sums = KernelList.__call__, list[float](), dict[str, float]()

    def timed(self: KernelList, attention: Any, *inputs: torch.Tensor) -> Any:
        began = time.perf_counter()
        result = original(self, attention, *inputs)
        seconds.append(time.perf_counter() - began)
        for name, chosen in _by_part(self).items():
            few = self.only(chosen)
            took = _seconds(lambda few=few: original(few, attention, *inputs))  # type: ignore[misc]
            sums[name] = sums.get(name, 0.0) + took
            if name not in parts:
                parts[name] = {"seconds": [], **_about_linears(few)}
        return result

    KernelList.__call__ = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        KernelList.__call__ = original  # type: ignore[method-assign]
    for name, took in sums.items():
        parts[name]["seconds"].append(took)


def _by_part(kernels: KernelList) -> dict[str, list[int]]:
    """Return the indices of a list's kernels by what they compute: linear layers by shape, the LM head separately."""
    found: dict[str, list[int]] = {}
    for at, step in enumerate(kernels.steps):
        name = {"append": "attention", "attend": "attention"}.get(step.name, step.name)
        if isinstance(step.held, NativeLinear):
            name = f"{step.held.rows} x {step.held.columns}"
            if at == len(kernels.steps) - 1 and kernels.outputs[-1][0][-1] == step.held.rows:
                name = f"{_HEAD}, {name}"
        found.setdefault(name, []).append(at)
    return found


def _about_linears(kernels: KernelList) -> dict[str, Any]:
    """Return bytes read, number and torch's seconds of linear layers of one shape; nothing for other kernels."""
    layers = [step.held for step in kernels.steps if isinstance(step.held, NativeLinear)]
    if not layers:
        return {}
    read = sum(tensor.nbytes for layer in layers for tensor in layer.held[:3] if tensor is not None)
    x = torch.ones((kernels.rows, layers[0].columns), dtype=layers[0].activation, device="cpu")
    few = [_of_torch(layer, x) for layer in layers[: max(1, _ENOUGH // layers[0].held[0].nbytes)]]

    def run() -> None:
        for call in few:
            call()

    run()
    seconds = statistics.median(_seconds(run) for _ in range(3)) * len(layers) / len(few)
    return {"bytes": read, "layers": len(layers), "torch": seconds}


def _of_torch(layer: NativeLinear, x: torch.Tensor) -> Callable[[], Any]:
    """Return a function that computes the same layer by torch's own kernel."""
    weight, bias, scales = layer.held[:3]
    if scales is None:
        return lambda: functional.linear(x, weight, bias)
    scales = scales.to(torch.bfloat16)
    if scales.ndim == 1:
        weight = weight.view(torch.int8)  # in its packed order: torch takes as long over any numbers
        return lambda: torch._weight_int8pack_mm(x, weight, scales)
    group = layer.columns // scales.shape[1]
    packed = torch._convert_weight_to_int4pack_for_cpu(
        torch.ones((layer.rows, layer.columns), dtype=torch.int32, device="cpu"), 1
    )
    steps = torch.ones((layer.columns // group, layer.rows, 2), dtype=torch.bfloat16, device="cpu")
    return lambda: torch._weight_int4pack_mm_for_cpu(x, packed, group, steps)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ----------------------------------------------------------------------------------------------------------------------


def _tables(report: dict[str, Any]) -> Iterator[str]:
    speeds_of_memory = [one["memory"] / 1e9 for one in report["passes"]]
    least, most = min(speeds_of_memory), max(speeds_of_memory)
    yield f"{report['machine']}; memory {report['memory'] / 1e9:.1f} GB/s ({least:.1f} to {most:.1f} from pass to pass)"
    yield ""
    titles = ("whole pass", "layers", "LM head", "attention", "other kernels", "Python, torch", "weights / memory")
    yield f"{'milliseconds':20}" + "".join(f"{title:>18}" for title in titles)
    for one in report["passes"]:
        linear = {name: part for name, part in one["parts"].items() if "bytes" in part}
        head = next((name for name in linear if name.startswith(_HEAD)), None)
        read = sum(part["bytes"] for part in linear.values())
        values = (
            one["seconds"],
            sum(part["seconds"] for name, part in linear.items() if name != head),
            linear[head]["seconds"] if head is not None else 0.0,
            one["parts"].get("attention", {}).get("seconds", 0.0),
            sum(p["seconds"] for name, p in one["parts"].items() if name not in linear and name != "attention"),
            one["seconds"] - one["in_kernels"],
            read / one["memory"],
        )
        yield f"{one['weights'] + ', ' + str(one['rows']):20}" + "".join(f"{1e3 * value:18.2f}" for value in values)
    yield ""
    rows = sorted({one["rows"] for one in report["passes"]})
    yield f"{'GB/s, ours / torch':28}" + "".join(f"{f'{count} rows':>16}" for count in rows)
    speeds: dict[tuple[str, str], dict[int, str]] = {}
    for one in report["passes"]:
        for name, part in one["parts"].items():
            if "bytes" in part:
                ours, of_torch = (part["bytes"] / part[key] / 1e9 for key in ("seconds", "torch"))
                speeds.setdefault((one["weights"], name), {})[one["rows"]] = f"{ours:.1f} / {of_torch:.1f}"
    for (weights, name), by_rows in speeds.items():
        yield f"{weights + ' ' + name:28}" + "".join(f"{by_rows.get(count, ''):>16}" for count in rows)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("kernels", __doc__)
    program.add_model()
    program.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="tokens of the passes")
    program.add_counts(repeats=7)
    program.add_json()
    arguments = program.parsed(words)
    model, _ = load_model(arguments.model, dtype=arguments.dtype)
    report = measure_kernels(enable_self_speculative(model.eval()), arguments.rows, arguments.repeats)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_tables(report)))


if __name__ == "__main__":
    main()
