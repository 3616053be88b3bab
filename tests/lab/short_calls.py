"""Time of calls for very few tokens: classification, yes or no, the choice of a tool.

    python -m tests.lab.short_calls [--model FOLDER] [--dtype bfloat16] [--prompt 400] [--new-tokens 1 2 3 5]

Each call has a prompt of its own: instructions, three quarters of it, which all prompts share, and a text. Methods are
interleaved: plain `generate`, this library with nothing drafted, and `"auto"`, all greedy; then the same with
`prefix_cache`, which reads the instructions once. Reports milliseconds of plain `generate` and, for the others, their
speed relative to it: median, least and most; and how many of the texts are plain `generate`'s.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ssd_generation.config import DraftingConfig, SelfSpeculativeConfig
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import Timings, spread
from ssd_generation.harness.run import interleaved, timed
from ssd_generation.models import load_model

from .program import Program, conditions
from .prompts import tokens_of
from .side_by_side import greedy_options, with_range
from .tables import as_markdown

__all__ = ["measure"]

_METHODS: dict[str, Any] = {
    "plain": None,
    "nothing drafted": SelfSpeculativeConfig(drafting=DraftingConfig(policy="none")),
    "auto": "auto",
}


def measure(
    model: Any, tokenizer: Any, prompt: int, new_tokens: int, repeats: int, separates: bool
) -> dict[str, dict[str, Any]]:
    """Time calls for so many new tokens.

    Args:
        model: the target model, enabled.
        tokenizer: its tokenizer.
        prompt: tokens of each prompt.
        new_tokens: new tokens of each call.
        repeats: number of timed calls of each method.
        separates: whether the model has a prefix cache, in which the methods must not find each other's prompts.

    Returns:
        By method, `seconds` of each call, the `speed` relative to plain `generate`, as `spread` returns it, and
        `texts`, the number of texts that are plain `generate`'s.
    """
    ids, shared = tokens_of(tokenizer, prompt * (repeats + 3)), 3 * prompt // 4
    timings, outputs = Timings(_METHODS, "plain"), {name: list[torch.Tensor]() for name in _METHODS}
    for turn in interleaved(list(_METHODS), repeats):
        text = ids[:, prompt * (turn.round + 2 - turn.is_warm_up) :][:, : prompt - shared]
        asked = torch.cat((ids[:, :shared], text), dim=1)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(asked), **greedy_options(new_tokens)}
        if _METHODS[turn.method] is not None:
            options["self_speculative"] = _METHODS[turn.method]
            if separates:
                options["cache_salt"] = turn.method
        output, seconds = timed(model.device, model.generate, asked, **options)
        if not turn.is_warm_up:
            timings.add(turn.method, new_tokens, seconds)
            outputs[turn.method].append(output)
    return {
        name: {
            "seconds": timings.seconds(name),
            "speed": spread(timings.ratios(name)),
            "texts": sum(map(torch.equal, outputs[name], outputs["plain"])),
        }
        for name in _METHODS
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("short_calls", __doc__)
    program.add_model(dtype="bfloat16")
    program.add_argument("--new-tokens", type=int, nargs="+", default=[1, 2, 3, 5], help="new tokens of the calls")
    program.add_counts(prompt=400, repeats=7)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    model = enable_self_speculative(model.eval())
    model.generate(  # measurements that are made once per machine
        tokenizer("One, two, three", return_tensors="pt").input_ids, max_new_tokens=32, self_speculative="auto"
    )
    found: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}
    for name, cache in (("without a prefix cache", False), ("prefix_cache", "1GB")):
        found[name] = {}
        for new in arguments.new_tokens:
            for size in (False, cache):  # an empty one
                enable_self_speculative(model, prefix_cache=size)
            found[name][new] = measure(model, tokenizer, arguments.prompt, new, arguments.repeats, bool(cache))
    if arguments.json:
        print(json.dumps({"conditions": conditions(arguments), "prompt": arguments.prompt, "found": found}))
        return
    rows = []
    for name, by_length in found.items():
        for new, by_method in by_length.items():
            plain = 1000 * statistics.median(by_method["plain"]["seconds"])
            others = [by_method[method] for method in _METHODS if method != "plain"]
            texts = ", ".join(str(other["texts"]) for other in others)
            speeds = [with_range(other["speed"]) for other in others]
            rows.append([name, str(new), f"{plain:.0f}", *speeds, f"{texts} of {arguments.repeats}"])
    print(conditions(arguments), end="\n\n")
    print("\n".join(as_markdown(["", "new tokens", "plain, ms", *list(_METHODS)[1:], "texts of plain"], rows)))


if __name__ == "__main__":
    main()
