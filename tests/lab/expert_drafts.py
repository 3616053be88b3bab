"""Low-bit drafts of mixtures of experts, with random weights of known shapes that an int4 copy nearly holds.

    python -m tests.lab.expert_drafts [--only NAME ...] [--dtype bfloat16] [--new-tokens 64] [--prompt 32] [--repeats 3]
                                      [--rows FOLDER] [--json]

Drafts of random weights are not accepted, since quantisation moves their logits by more than these differ. So the
weights are rounded to 16 steps for each 32 of them, as an int4 copy does, up to a share of a step. Experts are chosen
by random routers. The costs are measured: a draft step and verification of several tokens, in steps of one token with
nothing drafted. What drafts would gain with other acceptance rates follows from them.
"""

from __future__ import annotations

import dataclasses
import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from ssd_generation.config import DraftingConfig, PrecisionConfig, SelfSpeculativeConfig
from ssd_generation.forward.copies.copied_layers import estimated_bytes
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import spread
from ssd_generation.support.machine import cpu_name
from ssd_generation.tuning.automatic import weight_bytes
from ssd_generation.tuning.costs import costs_of
from ssd_generation.tuning.speedup import theoretical_speedup

from .experts import print_by_shape, random_model
from .program import Program
from .side_by_side import METHODS, compare, greedy_options, with_range
from .tables import as_markdown, versions

__all__ = ["main", "round_to_int4"]

_GROUP = 32
_LENGTHS = 2, 4, 8
_ACCEPTANCE = 0.9, 0.96


def round_to_int4(model: Any) -> None:
    """Round all matrices to numbers that an int4 copy nearly holds.

    Args:
        model: a model with plain weights.
    """
    by_input = {id(p) for m in model.modules() if getattr(m, "is_transposed", False) for p in m.parameters()}
    for parameter in model.parameters():
        if parameter.ndim < 2:
            continue
        with torch.no_grad():
            for matrix in parameter if parameter.ndim == 3 else [parameter]:
                weight = matrix.T if id(parameter) in by_input else matrix
                if weight.shape[1] % _GROUP:
                    continue
                for rows in weight.split(4096):
                    groups = rows.float().unflatten(1, (-1, _GROUP))
                    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
                    step = ((most - least) / 15).clamp(min=1e-9).bfloat16().float()
                    offset = least.bfloat16().float()
                    rows.copy_((((groups - offset) / step).round_().clamp_(0, 15) * step + offset).flatten(1))


def _measured(name: str, arguments: Namespace) -> dict[str, Any]:
    model = random_model(name, getattr(torch, arguments.dtype))
    round_to_int4(model)
    enable_self_speculative(model)
    generator = torch.Generator(device="cpu").manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (1, arguments.prompt), generator=generator, device="cpu")
    precision = PrecisionConfig(default="int4", head="int4")
    config = SelfSpeculativeConfig(precision=precision, drafting=DraftingConfig(policy="cost"))
    costs = costs_of(model, config)
    config = dataclasses.replace(config, costs=costs)
    methods = {"plain": None, "nothing": METHODS["nothing"], "int4": config, "auto": "auto"}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = greedy_options(arguments.new_tokens)
    compared = compare(model, inputs, options, arguments.repeats, methods=methods)
    rates = [rate for one in compared.statistics["int4"] if (rate := one.acceptance_rate) is not None]
    return {
        "name": name,
        "step": costs.plain_step,
        "draft": costs.draft_step / costs.plain_step,
        "verify": {n: costs.verify_seconds(n) / costs.plain_step for n in _LENGTHS},
        "predicted": {a: theoretical_speedup([a], costs) for a in _ACCEPTANCE},
        "memory": estimated_bytes(model, config.skip, precision) / weight_bytes(model),
        "speedups": {m: spread(compared.timings.ratios(m)) for m in methods if m != "plain"},
        "acceptance": statistics.mean(rates) if rates else None,
        "length": statistics.mean(one.drafted_tokens / max(1, one.rounds) for one in compared.statistics["int4"]),
        "same": torch.equal(compared.texts["int4"], compared.texts["nothing"]),
    }


def _as_page(found: Sequence[dict[str, Any]], arguments: Namespace) -> str:
    costs, calls = [], []
    for row in found:
        verified = [f"{row['verify'][n]:.2f}" for n in row["verify"]]
        gains = [f"{speedup:.2f} ({length})" for speedup, length in row["predicted"].values()]
        share = f"{100 * row['memory']:.0f} %"
        costs.append([row["name"], f"{1e3 * row['step']:.1f}", f"{row['draft']:.2f}", *verified, *gains, share])
        its = [with_range(speedup) for speedup in row["speedups"].values()]
        drafts = row["acceptance"] is not None
        rate = f"{row['acceptance']:.2f}, {row['length']:.1f} tokens a round" if drafts else "nothing was drafted"
        calls.append([row["name"], *its, rate, "the same" if row["same"] else "another"])
    lengths = [f"{n} tokens" for n in _LENGTHS]
    gains = [f"gain at {a:g} (draft length)" for a in _ACCEPTANCE]
    lines = [
        f"{versions()}; {arguments.dtype}, {cpu_name()}, {torch.get_num_threads()} threads.",
        "",
        *as_markdown(["shape", "step, ms", "draft", *lengths, *gains, "copies' bytes"], costs),
        "",
        *as_markdown(["shape", "nothing drafted", "int4", "`auto`", "accepted", "text of nothing drafted"], calls),
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("expert_drafts", __doc__)
    program.add_counts(new_tokens=64, prompt=32, repeats=3)
    print_by_shape(program, words, _measured, _as_page)


if __name__ == "__main__":
    main()
