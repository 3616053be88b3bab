"""Gain of a store of earlier texts over lookup alone, in calls whose texts have much in common.

    python -m tests.lab.stores [--model FOLDER] [--dtype bfloat16] [--series edits summaries samples] [--new-tokens 96]

Series: a conversation that edits one file in each turn (`--turns`), with the file in the answer; summaries that quote
the same article (`--summaries`); and samples of the same programming problem (HumanEval's form, `--problems` times
`--samples`, temperature 0.8, one seed for each sample). Methods, interleaved call by call, with the same prompts: plain
`generate`, transformers' own prompt lookup, this library's lookup, the same with `LookupConfig(store=True)`, and
`"auto"`. Reports seconds of all calls relative to plain `generate`, tokens for each pass of the model, and how many
texts are plain `generate`'s. Each series begins with an empty store.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ssd_generation.config import LookupConfig, SelfSpeculativeConfig
from ssd_generation.drafting.ngram_store import StorePart
from ssd_generation.evaluation.articles import built_in_articles
from ssd_generation.evaluation.problems import human_eval
from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.run import rotated, timed
from ssd_generation.harness.texts import encode_prompt
from ssd_generation.models import load_model
from ssd_generation.support.model_state import state_of

from .program import Program, conditions
from .side_by_side import greedy_options
from .tables import as_markdown

__all__ = ["SERIES", "measure"]

SERIES = ("edits", "summaries", "samples")

_FILE = Path(__file__).parent / "random_models.py"
_EDITS = (
    "Rename the function to `new_model`.",
    "Add a blank line after each import.",
    "Shorten the docstring of the function to one line.",
    "Use double quotes for all strings.",
    "Add a parameter `seed` with the default 0.",
    "Add type hints where there are none.",
    "Write the module's docstring in capital letters.",
    "Remove all comments.",
    "Sort the imports by name.",
    "Add an empty function `main` at the end.",
)
_READERS = ("a child", "an engineer", "a tourist", "a journalist", "a historian", "a teacher", "a cook", "a lawyer")
_LOOKUP_TOKENS = 10
_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transformers' prompt lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
    "lookup": {"self_speculative": SelfSpeculativeConfig(lookup=LookupConfig())},
    "lookup with a store": {"self_speculative": SelfSpeculativeConfig(lookup=LookupConfig(store=True))},
    "auto": {"self_speculative": "auto"},
}

Call = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Inputs and options of a call."""


def _edits(tokenizer: Any, turns: int, new_tokens: int) -> Generator[Call, Any, None]:
    """Yield the turns of the conversation; the text of each call is sent back."""
    said: list[tuple[str, str]] = []
    for turn in range(turns):
        file = f"Here is a file.\n```python\n{_FILE.read_text(encoding='utf-8')}```\n" if turn == 0 else ""
        question = f"{file}{_EDITS[turn % len(_EDITS)]} Answer with the whole file."
        inputs = encode_prompt(tokenizer, question, True, said)
        answer = yield inputs, greedy_options(new_tokens)
        said.append((question, tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)))


def _summaries(tokenizer: Any, count: int, new_tokens: int) -> Generator[Call, Any, None]:
    article = built_in_articles()[0].text
    for number in range(count):
        reader = _READERS[number % len(_READERS)]
        question = f"Summarise this article for {reader}, and quote it ({number + 1}).\n\n{article}"
        yield encode_prompt(tokenizer, question, True), greedy_options(new_tokens)


def _samples(tokenizer: Any, problems: int, samples: int, new_tokens: int) -> Generator[Call, Any, None]:
    sampled = {**greedy_options(new_tokens), "do_sample": True, "temperature": 0.8}
    for problem in human_eval()[:problems]:
        for _ in range(samples):
            yield encode_prompt(tokenizer, problem.prompt, False), sampled


def measure(model: Any, calls: Generator[Call, Any, None]) -> dict[str, dict[str, Any]]:
    """Time a series of calls by all methods.

    Args:
        model: the target model, enabled.
        calls: the calls; the text of plain `generate` is sent back after each.

    Returns:
        By method: `seconds` of each call, `passes` of the model, `tokens` generated, and `same`, the number of texts
        that are plain `generate`'s.
    """
    found = {name: {"seconds": list[float](), "passes": 0, "tokens": 0, "same": 0} for name in _METHODS}
    state_of(model).get(StorePart).store.clear()
    number, (inputs, options) = 0, next(calls)
    while True:
        texts = {}
        for name in rotated(list(_METHODS), number):
            asked, passes = {**inputs, **options, **_METHODS[name]}, [0]
            torch.manual_seed(number)
            if name == "transformers' prompt lookup":
                texts[name], seconds, passes[0] = _counting(model, asked)
            else:
                texts[name], seconds = timed(model.device, model.generate, **asked)
                if "self_speculative" in asked:
                    passes[0] = model.last_speculation.target_passes
            new = texts[name].shape[1] - inputs["input_ids"].shape[1]
            found[name]["seconds"].append(seconds)  # type: ignore[attr-defined]
            found[name]["tokens"] += new  # type: ignore[operator]
            found[name]["passes"] += passes[0] or new  # type: ignore[operator]
        for name, text in texts.items():
            found[name]["same"] += torch.equal(text, texts["plain"])  # type: ignore[operator]
        number += 1
        try:
            inputs, options = calls.send(texts["plain"])
        except StopIteration:
            return found


def _counting(model: Any, asked: dict[str, Any]) -> tuple[torch.Tensor, float, int]:
    """Return text, seconds and passes of a call that this library takes no part in."""
    forward, passes = type(model).forward, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    # transformers reads the signature of `forward`.
    counted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    with mock.patch.object(type(model), "forward", counted):
        text, seconds = timed(model.device, model.generate, **asked)
    return text, seconds, passes


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("stores", __doc__)
    program.add_model(dtype="bfloat16")
    program.add_argument("--series", nargs="+", choices=SERIES, default=list(SERIES), help="series of calls")
    program.add_counts(new_tokens=96, turns=10, summaries=40, problems=4, samples=10)
    program.add_json()
    arguments = program.parsed(words)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    model = enable_self_speculative(model.eval())
    warm = tokenizer("One, two, three", return_tensors="pt")
    for options in _METHODS.values():  # measurements that are made once per machine
        model.generate(**warm, **greedy_options(32), **options)
    new = arguments.new_tokens
    series = {
        "edits": lambda: _edits(tokenizer, arguments.turns, new),
        "summaries": lambda: _summaries(tokenizer, arguments.summaries, new),
        "samples": lambda: _samples(tokenizer, arguments.problems, arguments.samples, new),
    }
    found = {name: measure(model, series[name]()) for name in arguments.series}
    if arguments.json:
        print(json.dumps({"conditions": conditions(arguments), "found": found}))
        return
    print(conditions(arguments))
    for name, by_method in found.items():
        rows, plain = [], sum(by_method["plain"]["seconds"])
        for method, one in by_method.items():
            seconds = sum(one["seconds"])
            speed = f"{plain / seconds:.2f}"
            per_pass = f"{one['tokens'] / one['passes']:.2f}"
            rows.append([method, f"{seconds:.1f}", speed, per_pass, f"{one['same']} of {len(one['seconds'])}"])
        head = [
            f"{name}, {len(by_method['plain']['seconds'])} calls",
            "seconds",
            "times plain",
            "tokens a pass",
            "texts",
        ]
        print("\n" + "\n".join(as_markdown(head, rows)))


if __name__ == "__main__":
    main()
