"""Models with recurrent states, or with latents, caps or sinks in attention: time of whole calls and of prompts.

    python -m tests.lab.hybrids [--only NAME ...] [--dtype bfloat16] [--new-tokens 64] [--prompt 16] [--repeats 5]
                                                [--document 0] [--turns 6] [--rows FOLDER] [--json]

By default those with states. Weights are random, so drafts would not be accepted: whole calls show what faster passes
gain. Prompts are read by transformers' own pass and by this library's, of 64 and 512 tokens. With `--document` a chat
of `--turns` calls about that many random tokens is timed instead, as in `tests.lab.prompts`: the methods one after the
other, each call with 20 more tokens and 32 new ones.
"""

from __future__ import annotations

import json
import operator
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ssd_generation.forward.eager.prompt_mode import prompt_mode
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import spread
from ssd_generation.support.machine import cpu_name
from ssd_generation.support.versions import cache_argument

from .program import Program
from .prompts import measure_series
from .random_models import random_model
from .side_by_side import compare, drafting_methods, greedy_options, with_range
from .tables import as_markdown, measured_rows, versions

__all__ = ["ATTENTIONS", "SHAPES", "main", "measure_prompts"]

_ATTENTION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "mamba_expand": 2,
}
_DELTA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_TWELVE = {"num_hidden_layers": 12}

ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3, dense": (
        "deepseek_v3",
        {
            **_ATTENTION,
            **_TWELVE,
            "num_key_value_heads": 16,
            "first_k_dense_replace": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 768,
        },
    ),
    "Gemma 2": ("gemma2", {**_ATTENTION, **_TWELVE, "head_dim": 128, "num_attention_heads": 8, "sliding_window": 1024}),
    "gpt-oss": (
        "gpt_oss",
        {**_ATTENTION, **_TWELVE, "head_dim": 64, "intermediate_size": 512, "num_local_experts": 16},
    ),
}
"""Shapes of models without states, by name."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen 3.5": ("qwen3_5_text", {**_ATTENTION, **_DELTA, **_TWELVE}),
    "Qwen3-Next": (
        "qwen3_next",
        {
            **_ATTENTION,
            **_DELTA,
            **_TWELVE,
            "linear_num_value_heads": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "decoder_sparse_step": 1,
        },
    ),
    "Granite 4": (
        "granitemoehybrid",
        {
            **_ATTENTION,
            **_MAMBA,
            **_TWELVE,
            "layer_types": (["mamba"] * 5 + ["attention"]) * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 2816,
        },
    ),
    "Falcon-H1": ("falcon_h1", {**_ATTENTION, **_MAMBA, "num_hidden_layers": 10, "mamba_d_ssm": 2048, "head_dim": 64}),
    "LFM2": (
        "lfm2",
        {
            **_ATTENTION,
            **_TWELVE,
            "layer_types": ["conv", "conv", "full_attention"] * 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            **_ATTENTION,
            "layers_block_type": (["mamba", "mlp"] * 3 + ["attention", "mlp"]) * 3,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "chunk_size": 256,
            "head_dim": 64,
        },
    ),
    "RecurrentGemma": (
        "recurrent_gemma",
        {
            **_TWELVE,
            "hidden_size": 1024,
            "intermediate_size": 6144,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "lru_width": 1024,
            "max_position_embeddings": 4096,
        },
    ),
    "Jamba": (
        "jamba",
        {
            **_ATTENTION,
            **_TWELVE,
            "mamba_d_state": 16,
            "mamba_dt_rank": 64,
            "attn_layer_period": 6,
            "attn_layer_offset": 3,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
        },
    ),
    "Mamba 2": (
        "mamba2",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_heads": 32,
            "head_dim": 64,
            "expand": 2,
            "state_size": 128,
            "n_groups": 1,
            "chunk_size": 256,
        },
    ),
}
"""Family and settings by name: layers as in small models of the family, 180 to 400 million weights in all."""

_LENGTHS = (64, 512)
_QUESTION = 20
"""Tokens that each call of a chat adds."""


def _tokens(model: Any, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (1, count), generator=generator, device="cpu")


def _model_of(name: str, arguments: Namespace) -> Any:
    model = random_model(*{**SHAPES, **ATTENTIONS}[name], getattr(torch, arguments.dtype))
    return enable_self_speculative(model)


def measure_prompts(model: Any, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time a prompt's pass by transformers and by this library.

    Args:
        model: the model.
        lengths: tokens of the prompts.
        repeats: timed passes of each.

    Returns:
        For each length: seconds of both.
    """
    rows = []
    for length in lengths:
        generator = torch.Generator(device="cpu").manual_seed(length)
        ids = _tokens(model, length, generator)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(repeats + 1):
            for is_ours, taken in seconds.items():
                cache = DynamicCache(config=model.config)
                with torch.no_grad(), prompt_mode(model, length) if is_ours else nullcontext():
                    began = time.perf_counter()
                    model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
                    taken.append(time.perf_counter() - began)
        plain, ours = (statistics.median(taken[1:]) for taken in seconds.values())
        rows.append({"tokens": length, "plain": plain, "ours": ours})
    return rows


def _measured(name: str, arguments: Namespace) -> dict[str, Any]:
    model, generator = _model_of(name, arguments), torch.Generator(device="cpu").manual_seed(1)
    ids = _tokens(model, arguments.prompt, generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    compared = compare(model, inputs, greedy_options(arguments.new_tokens), arguments.repeats)
    texts = compared.texts
    return {
        "name": name,
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "plain": statistics.median(compared.timings.seconds("plain")),
        "speedups": {method: spread(compared.timings.ratios(method)) for method in drafting_methods()},
        "texts": {method: torch.equal(texts[method], texts["plain"]) for method in drafting_methods()},
        "prompts": measure_prompts(model, _LENGTHS, arguments.repeats),
    }


def _chat(name: str, arguments: Namespace) -> dict[str, Any]:
    model, generator = _model_of(name, arguments), torch.Generator(device="cpu").manual_seed(1)
    begin = _tokens(model, arguments.document, generator)
    added = [_tokens(model, _QUESTION, generator) for _ in range(arguments.turns)]
    return {"name": name, "chat": measure_series(model, begin, added, is_chat=True)}


def _as_page_of_chats(found: Sequence[dict[str, Any]], arguments: Namespace) -> str:
    rows, methods = [], list(found[0]["chat"])
    for row in found:
        plain, cells = row["chat"]["plain"]["texts"], []
        for one in row["chat"].values():
            first, *others = one["seconds"]
            same = sum(map(operator.eq, one["texts"], plain))
            cells.append(f"{sum(one['seconds']):.1f} ({first:.1f}; {statistics.mean(others):.2f}); {same}")
        rows.append([row["name"], *cells])
    about = (
        f"{versions()}; {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads. {arguments.turns} calls "
        f"about {arguments.document} tokens: seconds (of the first; of the others on average); texts of plain."
    )
    return "\n".join([about, "", *as_markdown(["shape", *methods], rows)])


def _as_page(found: Sequence[dict[str, Any]], arguments: Namespace) -> str:
    rows = []
    for row in found:
        gains = [with_range(speedup) for speedup in row["speedups"].values()]
        prompts = [
            f"{1e3 * one['plain']:.0f} → {1e3 * one['ours']:.0f} ({one['plain'] / one['ours']:.1f})"
            for one in row["prompts"]
        ]
        texts = ", ".join("yes" if same else "no" for same in row["texts"].values())
        took = f"{1e3 * row['plain'] / arguments.new_tokens:.1f}"
        rows.append([row["name"], f"{row['bytes'] / 1e6:.0f}", took, *gains, texts, *prompts])
    head = ["shape", "MB", "plain `generate`, ms a token", "nothing drafted", "lookup", "`auto`", "texts of plain"]
    head += [f"prompt of {length}, ms" for length in _LENGTHS]
    about = f"{versions()}; {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads."
    return "\n".join([about, "", *as_markdown(head, rows)])


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("hybrids", __doc__)
    program.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*SHAPES, *ATTENTIONS], default=list(SHAPES), help="these shapes"
    )
    program.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    program.add_counts(new_tokens=64, prompt=16, repeats=5, turns=6)
    program.add_argument("--document", type=int, default=0, help="tokens of the document of a chat; 0: no chat")
    program.add_rows()
    program.add_json()
    arguments = program.parsed(words)
    measured, as_page = (_chat, _as_page_of_chats) if arguments.document else (_measured, _as_page)
    found = measured_rows(arguments, measured)
    print(json.dumps(found, indent=2) if arguments.json else as_page(found, arguments))


if __name__ == "__main__":
    main()
