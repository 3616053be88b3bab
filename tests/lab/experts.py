"""Mixtures of experts: time of their layers, and of whole calls, with random weights of the shapes of known models.

    python -m tests.lab.experts [--only NAME ...] [--dtype bfloat16] [--new-tokens 32] [--prompt 4] [--repeats 5]
                                                [--rows FOLDER] [--json]

A layer's time is compared with the bytes of the chosen experts over the speed at which a large dense layer is read, and
with transformers' own (`grouped_mm`, its default); not where the model's own code computes them (Llama 4). Which
experts a token takes is random, as are weights: drafts would not be accepted, and whole calls show what the rest gains.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssd_generation.forward.structure.expert_layers import experts_of, native_experts, run_experts
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import spread
from ssd_generation.native.ops.linear import native_linear
from ssd_generation.support.machine import cpu_name

from .program import Program
from .random_models import random_model as of_family
from .side_by_side import compare, drafting_methods, greedy_options, with_range
from .tables import as_markdown, measured_rows, versions

__all__ = ["SHAPES", "main", "measure_layers", "print_by_shape", "random_model"]

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Granite 1B-A400M": (
        "granitemoe",
        {
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_hidden_layers": 12,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 2,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Mixtral-8x7B": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "DeepSeek-V3, 32 of 256 experts": (
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "n_routed_experts": 32,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "Llama 4 Scout": (
        "llama4_text",
        {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 1,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}
"""Family and settings by name; some layers of each model, as many as fit into 8 GB."""

_TOKENS = (1, 2, 4, 8, 64)
_SLOW = 2.0
"""Seconds of transformers' layer from which on wider passes are not run by it."""


def random_model(name: str, dtype: torch.dtype) -> Any:
    """Build a model of `SHAPES` with random weights.

    Args:
        name: name of the shape.
        dtype: type of its weights.
    """
    return of_family(*SHAPES[name], dtype)


def _seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def speed_of_memory(dtype: torch.dtype, repeats: int) -> float:
    """Return bytes per second of a dense layer's kernel for one token, 4,096 × 4,096, from memory.

    Args:
        dtype: type of the weights.
        repeats: timed runs.
    """
    count = 2**29 // (2**24 * dtype.itemsize)
    weights = [torch.randn((4096, 4096), device="cpu").to(dtype) for _ in range(count)]
    layers = [native_linear(weight, None) for weight in weights]
    x = torch.randn((1, 4096), device="cpu").to(dtype)
    taken = _seconds(lambda: [layer(x) for layer in layers if layer is not None], repeats)
    return sum(weight.nbytes for weight in weights) / taken


def measure_layers(model: Any, repeats: int) -> list[dict[str, Any]]:
    """Time a model's layers of experts, for several numbers of tokens.

    Args:
        model: a model with layers of experts.
        repeats: timed runs.

    Returns:
        For each number of tokens: seconds of a layer by kernels and by transformers, and bytes of the experts read;
        nothing where experts do not run through transformers' interface.
    """
    layers: list[Any] = experts_of(model)
    if not layers:
        return []
    kernels = [native_experts(layer) for layer in layers]
    first, slots = layers[0], int(model.config.num_experts_per_tok)
    dtype = first.down_proj.dtype
    rows = []
    torchs: float | None = 0.0
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            parameter.detach().sum()  # memory that was just written is slow when it is first read
    for tokens in _TOKENS:
        x = torch.randn((tokens, model.config.hidden_size), device="cpu").to(dtype)
        weights = torch.rand((tokens, slots), device="cpu").to(dtype)
        chosen = [[_chosen(first.num_experts, tokens, slots) for _ in layers] for _ in range(repeats + 1)]
        one = sum(parameter.nbytes for parameter in first.parameters(recurse=False)) / first.num_experts
        read = statistics.mean(len(set(routing.flatten().tolist())) * one for turn in chosen for routing in turn)
        turns = iter(chosen)

        def ours() -> None:
            for kernel, routing in zip(kernels, next(turns), strict=True):  # noqa: B023 - run in this turn
                assert kernel is not None
                kernel(x, routing, weights)  # noqa: B023

        with torch.inference_mode():
            taken = _seconds(ours, repeats) / len(layers)
            if torchs is not None:
                turns = iter(chosen)
                torchs = _seconds(lambda: run_experts(first, x, next(turns)[0], weights), min(repeats, 2))  # noqa: B023
            rows.append({"tokens": tokens, "ours": taken, "torch": torchs, "bytes": read})
            torchs = None if torchs is None or torchs > _SLOW else torchs
    return rows


def _chosen(experts: int, tokens: int, slots: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts, device="cpu")[:slots] for _ in range(tokens)])


def _measured(name: str, arguments: Namespace) -> dict[str, Any]:
    model = random_model(name, getattr(torch, arguments.dtype))
    memory = speed_of_memory(model.dtype, arguments.repeats)
    found: dict[str, Any] = {"name": name, "memory": memory, "layers": measure_layers(model, arguments.repeats)}
    enable_self_speculative(model)
    generator = torch.Generator(device="cpu").manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (1, arguments.prompt), generator=generator, device="cpu")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = greedy_options(arguments.new_tokens)
    compared = compare(model, inputs, options, arguments.repeats)
    found["plain"] = statistics.median(compared.timings.seconds("plain"))
    found["speedups"] = {method: spread(compared.timings.ratios(method)) for method in drafting_methods()}
    found["texts"] = {
        method: torch.equal(compared.texts[method], compared.texts["plain"]) for method in drafting_methods()
    }
    return found


def _as_page(found: Sequence[dict[str, Any]], arguments: Namespace) -> str:
    layers, calls = [], []
    for row in found:
        for layer in row["layers"]:
            speed = layer["bytes"] / layer["ours"]
            torchs = "—" if layer["torch"] is None else f"{1e3 * layer['torch']:.1f}"
            share = f"{100 * speed / row['memory']:.0f} %"
            took = f"{1e3 * layer['ours']:.2f}"
            layers.append([row["name"], str(layer["tokens"]), took, f"{speed / 1e9:.1f}", share, torchs])
        texts = ", ".join("the same" if same else "another" for same in row["texts"].values())
        gains = [with_range(speedup) for speedup in row["speedups"].values()]
        calls.append([row["name"], f"{1e3 * row['plain'] / arguments.new_tokens:.1f}", *gains, texts])
    head = ["shape", "tokens", "ms a layer", "GB/s", "of a dense layer's", "transformers, ms"]
    methods = ["nothing drafted", "lookup", "`auto`"]
    lines = [
        f"{versions()}; {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads.",
        "",
        *as_markdown(head, layers),
        "",
        *as_markdown(["shape", "plain `generate`, ms a token", *methods, "texts"], calls),
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("experts", __doc__)
    program.add_counts(new_tokens=32, prompt=4, repeats=5)
    print_by_shape(program, words, _measured, _as_page)


def print_by_shape(
    program: Program,
    words: Sequence[str] | None,
    measure: Callable[[str, Namespace], dict[str, Any]],
    as_page: Callable[[Sequence[dict[str, Any]], Namespace], str],
) -> None:
    """Run a program that measures models of `SHAPES`, and print its page.

    Args:
        program: the program, with the options that are its own.
        words: as in `main`.
        measure: as in `measured_rows`.
        as_page: rows and options ↦ the page.
    """
    program.add_argument("--only", nargs="+", metavar="NAME", choices=SHAPES, default=list(SHAPES), help="these shapes")
    program.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    program.add_rows()
    program.add_json()
    arguments = program.parsed(words)
    found = measured_rows(arguments, measure)
    print(json.dumps(found, indent=2) if arguments.json else as_page(found, arguments))


if __name__ == "__main__":
    main()
