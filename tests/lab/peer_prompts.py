"""Prompts here and in other runtimes: time to the first token of a new and of a repeated prompt, and of a chat.

    python -m tests.lab.peer_prompts --model FOLDER [--gguf FILE …] [--openvino FOLDER …] [--lengths 64 256 500 2000]
                                     [--document 2000] [--turns 10]

The prompts are those of `prompts`, as tokens. Each runtime, llama.cpp (xllamacpp) from a GGUF file or OpenVINO GenAI
from an exported folder, keeps what it has read by its own means, as it does for its users: llama.cpp by `cache_prompt`
in one slot, OpenVINO by `enable_prefix_caching`. First tokens: calls for one new token; median of `--repeats` prompts
that begin differently, each asked twice. The chat: as in `prompts`, seconds of all turns, of the first, and of the
others on average. This library drafts by `"auto"` with `prefix_cache`; plain `generate` reads each prompt anew. Methods
run one after the other, the other runtimes in a process each.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.run import Child
from ssd_generation.models import load_model

from .program import Program, conditions
from .prompts import NEW_TOKENS, generate_greedily, questions, tokens_of
from .runtimes import add_runtimes, answer_of, runtimes
from .tables import as_markdown

__all__ = ["measure"]

_CONTEXT = 8192
"""Tokens of llama.cpp's context."""


Ask = Callable[[list[int], int], list[int]]
"""`(prompt, new tokens)` → the new tokens."""


def measure(ask: Ask, tokenizer: Any, lengths: Sequence[int], repeats: int, document: int, turns: int) -> Any:
    """Time first tokens and a chat.

    Args:
        ask: decodes greedily.
        tokenizer: tokenizer of the model.
        lengths: prompt lengths in tokens.
        repeats: number of prompts of each length.
        document: length of the chat's document in tokens.
        turns: number of turns.

    Returns:
        `first` and `second`: seconds to the first token, by length; `chat`: seconds of each turn.
    """

    def timed(ids: list[int], new_tokens: int) -> tuple[float, list[int]]:
        began = time.perf_counter()
        tokens = ask(ids, new_tokens)
        return time.perf_counter() - began, tokens

    found: dict[str, Any] = {"first": {}, "second": {}, "chat": []}
    ask(tokens_of(tokenizer, 64)[0].flip(0).tolist(), 4)
    text = tokens_of(tokenizer, max([*lengths, document]) + 100 * repeats)[0].tolist()
    for length in lengths:
        times: dict[str, list[float]] = {"first": [], "second": []}
        for repeat in range(repeats):
            asked = text[97 * (repeat + 1) + length % 31 :][:length]
            for seconds in times.values():
                took, _ = timed(asked, 1)
                seconds.append(took)
        for which, seconds in times.items():
            found[which][length] = statistics.median(seconds)
    said = text[:document]
    for question in questions(tokenizer, turns):
        asked = [*said, *question]
        took, answer = timed(asked, NEW_TOKENS)
        said = [*asked, *answer]
        found["chat"].append(took)
    return found


def _asking(model: Any, request: str | None) -> Ask:
    """Return a way to ask a model of transformers."""

    def ask(ids: list[int], new_tokens: int) -> list[int]:
        given = torch.tensor([ids], device="cpu")
        options = {} if request is None else {"self_speculative": request}
        text = generate_greedily(model, given, new_tokens, **options)
        return text[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    return ask


def _asking_of(child: Child) -> Ask:
    """Return a way to ask another runtime, which has a model."""

    def ask(ids: list[int], new_tokens: int) -> list[int]:
        return list(answer_of(child, "call", input_ids=ids, new_tokens=new_tokens)["token_ids"])

    return ask


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("peer_prompts", __doc__)
    program.add_model(dtype="bfloat16")
    add_runtimes(program)
    program.add_argument("--lengths", type=int, nargs="*", default=[64, 256, 500, 2000], help="tokens of prompts")
    program.add_counts(repeats=3, turns=10, document=2000)
    program.add_json()
    arguments = program.parsed(words)
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    model, _ = load_model(arguments.model, dtype=arguments.dtype)
    model = enable_self_speculative(model.eval(), prefix_cache="2GB")
    counts = arguments.lengths, arguments.repeats, arguments.document, arguments.turns
    _asking(model, "auto")(tokens_of(tokenizer, 64)[0].tolist(), NEW_TOKENS)  # measures once per machine
    found = {
        "plain `generate`": measure(_asking(model, None), tokenizer, *counts),
        '`"auto"`, `prefix_cache`': measure(_asking(model, "auto"), tokenizer, *counts),
    }
    del model
    with contextlib.ExitStack() as children:
        for name, child in runtimes(arguments, children, context=_CONTEXT, prefix_cache=True):
            found[name] = measure(_asking_of(child), tokenizer, *counts)
            children.close()  # one at a time: they leave their memory to the next
    if arguments.json:
        print(json.dumps({"conditions": conditions(arguments), "found": found}))
        return
    print(conditions(arguments) + "\n")
    head = ["seconds to the first token: asked first, again", *map(str, arguments.lengths), "chat (first turn; others)"]
    rows = []
    for name, one in found.items():
        cells = [f"{one['first'][n]:.2f}, {one['second'][n]:.2f}" for n in arguments.lengths]
        chat = one["chat"]
        others = statistics.mean(chat[1:]) if len(chat) > 1 else float("nan")
        rows.append([name, *cells, f"{sum(chat):.1f} ({chat[0]:.1f}; {others:.2f})"])
    print("\n".join(as_markdown(head, rows)))


if __name__ == "__main__":
    main()
