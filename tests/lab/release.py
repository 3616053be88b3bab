"""One model here and in other runtimes: prompts of about 50 and 500 tokens, and four texts at once.

    python -m tests.lab.release --model FOLDER [--dtype bfloat16] [--gguf FILE …] [--openvino FILE …]
                                [--new-tokens 48] [--prompts 3] [--repeats 2] --rows FOLDER [--json]

Single texts, as in `ssd benchmark`: built-in requests, and requests about two of the package's articles. Batches: four
built-in prompts of at most 128 tokens, whole calls; transformers' prompt lookup takes no batches. All methods are
interleaved; a warm-up call of each comes first. The other runtimes run in a process each: OpenVINO GenAI in the model's
dtype, llama.cpp as each GGUF file is stored.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd_generation.benchmark.run_benchmark import BenchmarkSettings, benchmark_arguments, run_benchmark
from ssd_generation.cli.peers import described_models
from ssd_generation.evaluation.articles import built_in_articles
from ssd_generation.harness.methods import PLAIN, UNDRAFTED
from ssd_generation.harness.peer_methods import PeerModel
from ssd_generation.harness.peers import PEERS, gguf_models, openvino_models
from ssd_generation.harness.results import RunFolder
from ssd_generation.harness.results.figures import ratio, round_of, step_seconds, with_plain
from ssd_generation.harness.texts import Prompt, load_prompts
from ssd_generation.models import load_model

from .peer_batches import batches_by_rows
from .program import Program, conditions
from .runtimes import add_runtimes
from .tables import as_markdown, stored_rows

__all__ = ["prompts_by_length"]

_METHODS = (PLAIN, "auto", "auto-free", UNDRAFTED, "prompt-lookup-3")
_BATCH = 4
_SHORT, _LONG = "short", "long"
_REQUESTS = (
    "Summarise each of these two articles in two sentences.",
    "Write a letter to the editor about one of these two articles.",
    "List all names, dates and amounts in these two articles.",
    "Continue the second of these two articles.",
)


def prompts_by_length(count: int) -> list[Prompt]:
    """Return prompts of two categories, `short` and `long`, in turn.

    Args:
        count: number of prompts of each, at most 4.

    Raises:
        ValueError: there are not so many.
    """
    if not 1 <= count <= len(_REQUESTS):
        raise ValueError(f"The number of prompts should be from 1 to {len(_REQUESTS)}, but got {count}.")
    requests = load_prompts(categories=("writing", "code"), limit_per_category=2)
    articles = built_in_articles()
    found = []
    for number, (short, asked) in enumerate(zip(requests[:count], _REQUESTS, strict=False)):
        example, first, second = articles[3 * number : 3 * number + 3]
        about = "\n\n".join([asked, f"Example of our style: {example.reference}", first.text, second.text])
        found += [Prompt(short.id, _SHORT, short.text), Prompt(f"articles-{number + 1}", _LONG, about)]
    return found


def _single_texts(
    model: Any, tokenizer: Any, arguments: Namespace, peers: Mapping[str, PeerModel]
) -> list[Mapping[str, Any]]:
    """Return the rows of a benchmark of single texts, which `arguments.rows` keeps."""
    prompts = prompts_by_length(arguments.prompts)
    settings = BenchmarkSettings(methods=(*_METHODS, *peers), new_tokens=arguments.new_tokens, warm_up=1, memory=False)
    about = {"model": arguments.model, "dtype": arguments.dtype, **described_models(peers)}
    with RunFolder(arguments.rows / "texts", benchmark_arguments(settings, prompts, None, **about), "--rows") as folder:
        run_benchmark(model, tokenizer, prompts, folder, settings, peers=peers)
        return list(folder.rows)


def _figures(rows: Sequence[Mapping[str, Any]], category: str) -> dict[str, dict[str, Any]]:
    """Return for each method the medians over the prompts of a category."""
    of_category = [row for row in rows if row.get("category") == category]
    found: dict[str, dict[str, Any]] = {}
    pairs_of = with_plain(of_category)
    first, *_ = pairs_of.values()
    undrafted = {round_of(row): row["token_ids"] for row, _ in pairs_of[UNDRAFTED]}
    for method, own in {PLAIN: [(plain, plain) for _, plain in first], **pairs_of}.items():
        steps = [step for row, _ in own if (step := step_seconds(row)) is not None]
        found[method] = {
            "speed": statistics.median(ratio(row, plain) for row, plain in own),
            "first": statistics.median(row["prompt_seconds"] for row, _ in own),
            "step": statistics.median(steps),
            "same_texts": sum(row["token_ids"] == plain["token_ids"] for row, plain in own),
            "undrafted_texts": sum(row["token_ids"] == undrafted.get(round_of(row)) for row, _ in own),
            "texts": len(own),
        }
    return found


def _batches(model: Any, tokenizer: Any, arguments: Namespace) -> dict[str, Any]:
    """Return the tokens per second of four texts at once, which `arguments.rows` keeps."""
    about = {name: getattr(arguments, name) for name in ("model", "dtype", "gguf", "openvino", "new_tokens", "repeats")}
    with stored_rows(arguments.rows / "batches", about) as (rows, store):
        if not rows:
            rows = [batches_by_rows(model, tokenizer, [_BATCH], arguments)[_BATCH]]
            store(rows[0])
        return rows[0]


def _table(found: Mapping[str, Any], peers: Mapping[str, PeerModel]) -> list[str]:
    """Return one line for each method.

    Prompts: speed relative to plain decoding, until the first token, per later token, texts of plain decoding and of
    undrafted decoding. Batches: speed and tokens per second.
    """
    in_batches = {UNDRAFTED: "nothing"}
    in_batches |= {name: f"{PEERS[peer.peer].name}, {Path(peer.path).name}" for name, peer in peers.items()}
    plain, lines = found["batch"][PLAIN]["median"], []
    for method in found[_SHORT]:
        cells = [
            f"{figures['speed']:.2f}; {1e3 * figures['first']:.0f} ms, {1e3 * figures['step']:.1f} ms; "
            f"{figures['same_texts']}, {figures['undrafted_texts']} of {figures['texts']}"
            for figures in (found[_SHORT][method], found[_LONG][method])
        ]
        batch = found["batch"].get(in_batches.get(method, method))
        cells.append("–" if batch is None else f"{batch['median'] / plain:.2f}; {batch['median']:.0f} tokens/s")
        lines.append([method, *cells])
    return as_markdown(["", "about 50 tokens", "about 500 tokens", "4 texts at once"], lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("release", __doc__)
    program.add_model(dtype="bfloat16")
    add_runtimes(program)
    program.add_counts(new_tokens=48, prompts=3, repeats=2)
    program.add_rows()
    program.add_json()
    arguments = program.parsed(words)
    if arguments.rows is None:
        program.error("--rows is needed: the calls of single texts are stored there.")
    peers = {**gguf_models(arguments.gguf), **openvino_models(arguments.openvino)}
    peers = {name: peer for name, peer in peers.items() if not peer.prefix_cache}
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    rows = _single_texts(model, tokenizer, arguments, peers)
    found = {length: _figures(rows, length) for length in (_SHORT, _LONG)}
    found["batch"] = _batches(model, tokenizer, arguments)
    if arguments.json:
        print(json.dumps({"conditions": conditions(arguments), "found": found}))
        return
    print("\n".join([conditions(arguments), "", *_table(found, peers)]))


if __name__ == "__main__":
    main()
