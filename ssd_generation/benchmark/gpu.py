"""Costs of passes on a GPU and the gain of replaying them, in one process and a given time.

    python -m ssd_generation.benchmark.gpu [--model demo | --shape 1.5b] [--seconds 400] [--new-tokens 128]
        [--fused none|rows|whole] [--methods plain,lookup] [--rows 8]

Reports milliseconds of a pass by width and bucket, by the model's own code and replayed (CUDA graphs), also of a draft
step with half of the sub-layers skipped; whether a token's bits depend on its place; bytes of the arena and of device
memory in use. It also times whole calls, interleaved: plain `generate`, with a static cache that transformers compiles,
undrafted, by lookup, and "auto", once everything compiled in the background is in use; and reports whether drafted
texts equal undrafted ones, the slowest call of each method and the graphs that were captured in it, the first calls,
and the host time of a round. A shape has random weights, whose texts mean nothing: nothing drafts there unless
`--methods` says so. It lists the measurements that did not fit into the time, or failed.
With `--rows` the calls are of batches, and passes over a single text are not timed.
`ssd benchmark --device cuda --methods auto,lookup,plain-loop,static` makes the long version of that table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig
from transformers.cache_utils import DynamicCache

from ..cache.arena import Arena
from ..cache.buffered_layers import add_buffers
from ..config import SkipConfig
from ..decoding.loop import DecodingLoop
from ..forward.cuda_graph import graph_passes
from ..forward.cuda_graph.graph_passes import GraphPart, GraphPasses
from ..forward.cuda_graph.graphs import graph_backend_on
from ..forward.cuda_graph.single_pass import Tokens
from ..forward.eager.module_states import fill_cache
from ..forward.structure.skip_mode import SkipMode
from ..forward.structure.sublayers import locate_sublayers
from ..generation import enable_self_speculative
from ..harness.methods import PLAIN, UNDRAFTED, make_methods, random_half
from ..harness.texts import built_in_prompts, encode_prompt
from ..models import load_model
from ..support.devices import is_asynchronous, wait_for
from ..support.model_state import state_of
from ..support.unasked import only_asked_drafts
from ..support.versions import CACHE
from ..tuning.measuring import describe_machine

__all__ = ["SHAPES", "measure_calls", "measure_passes"]

_SMALL = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
SHAPES: dict[str, Any] = {
    "tiny": lambda: LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    ),
    "1.5b": lambda: Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        **_SMALL,
    ),
    "8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
    "30b-a3b": lambda: Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=8192,
    ),
}
"""Shapes of models with random weights, for timing passes: a mixture of experts is among them."""

_WIDTHS = (1, 4, 8, 16)
_CACHED = (128, 1500)
"""Cached tokens that passes follow: in the first bucket and in the fourth."""
_REPEATS = 20
_METHODS = (PLAIN, "static", UNDRAFTED, "lookup", "auto")
_METHODS_OF_SHAPES = (PLAIN, "static", UNDRAFTED)
_RANDOM_PROMPTS, _RANDOM_TOKENS = 4, 60


@dataclass
class Clock:
    """Time limit of a run.

    Attributes:
        seconds: the limit.
        missing: measurements that failed or that there was no time for, with the reason.
    """

    seconds: float
    missing: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self.seconds - (time.perf_counter() - self._began)

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """Run one part and return its result; `None` if no time is left, or it fails."""
        if self.left <= 0:
            self.missing.append(f"{what}: no time was left")
            return None
        try:
            return call()
        except Exception as error:
            self.missing.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
            return None


def measure_passes(model: Any, clock: Clock, fuses: str | None = None) -> list[dict[str, Any]]:
    """Time passes by the model's own code and replayed, by width and tokens in the cache.

    Args:
        model: a transformers model, enabled.
        clock: time limit.
        fuses: parts of passes to compile, as in `forward.cuda_graph.graph_passes.FUSES`.

    Returns:
        For each width and number of cached tokens a dictionary: `width`, `cached` (tokens in the cache), `eager` and
        `replayed` in seconds (`None` where not measured), and `recording`, the seconds of the capture. A draft step
        with a random half of the sub-layers skipped has `what="half"`.
    """
    device = model.get_input_embeddings().weight.device
    backend = graph_backend_on(device)
    if backend is None:
        clock.missing.append(f"replayed passes: nothing is replayed on {device.type}")
    half = random_half(locate_sublayers(model), 0)
    rows = []
    for what, widths in (("model", _WIDTHS), ("half", (1,))):
        arena = Arena()
        mode = SkipMode(model, half) if what == "half" else None
        passes = None
        if backend is not None:
            passes = GraphPasses(model, arena, backend, mode, _WIDTHS, fuses)
        for cached in _CACHED:
            for width in widths:
                name = f"{what}, {width} after {cached}"
                row = clock.attempt(name, partial(_row, model, passes, width, cached, half if what == "half" else None))
                if row is not None:
                    rows.append(row)
        if passes is not None and passes.refusal is not None:
            clock.missing.append(f"replayed passes ({what}): {passes.refusal}")
    return rows


def _row(model: Any, passes: GraphPasses | None, width: int, cached: int, half: SkipConfig | None) -> dict[str, Any]:
    device = model.get_input_embeddings().weight.device
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(
        0, vocabulary, (1, cached + width), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu"
    ).to(device)
    row: dict[str, Any] = {"what": "model" if half is None else "half", "width": width, "cached": cached}
    row |= {"eager": None, "replayed": None, "recording": None}
    with torch.inference_mode():
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        fill_cache(model, ids[:, :cached], cache)
        add_buffers(cache)

        def eager() -> None:
            model(input_ids=ids[:, cached:], use_cache=True, **{CACHE: cache}).logits[0].argmax(-1).tolist()
            cache.crop(-width)

        if half is None:  # an eager draft has another cache
            row["eager"] = _median(eager)
        if passes is not None:
            began = time.perf_counter()
            found = passes.run(cache, Tokens((), ids[:, cached:]), cached, cached, records=True)
            row["recording"] = time.perf_counter() - began

            def replay() -> None:
                results = passes.run(cache, Tokens((), ids[:, cached:]), cached, cached)
                assert results is not None
                results[1].tolist()

            if found is not None:
                row["replayed"] = _median(replay)
            passes.arena.take_back(cache, keeps=False)
    return row


def _median(call: Callable[[], None], repeats: int = _REPEATS) -> float:
    """Return the median seconds on the host's clock; each call waits for the device at its end."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_calls(
    model: Any,
    tokenizer: Any,
    clock: Clock,
    new_tokens: int,
    methods_wanted: Sequence[str] = _METHODS,
    batch: int = 1,
) -> dict[str, Any]:
    """Time whole calls of `generate`, interleaved, over the package's prompts, until the time is up.

    Args:
        model: a transformers model, enabled.
        tokenizer: its tokenizer; `None`: prompts of random tokens.
        clock: time limit.
        new_tokens: number of new tokens in each call; end of sequence is off.
        methods_wanted: names of methods, as in `make_methods`.
        batch: number of prompts of each call, B.

    Returns:
        `first`: seconds of a process's first two calls, by method; `calls`: for each prompt its category and by method
        seconds and, for methods of this library, tokens per pass, graphs captured, why nothing more is replayed, and
        whether the text equals the undrafted one; `host`: host seconds in a round.
    """
    methods = {method.name: dict(method.request) for method in make_methods(methods_wanted, model)}
    drafting = [name for name, request in methods.items() if "self_speculative" in request and name != UNDRAFTED]
    categories, encoded = _prompts(model, tokenizer, batch)

    def call(name: str, at: int) -> tuple[float, list[list[int]]]:
        wait_for(model.device)
        began = time.perf_counter()
        with only_asked_drafts():
            text = model.generate(
                **encoded[at],
                max_new_tokens=new_tokens,
                min_new_tokens=None,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **methods[name],
            )
        wait_for(model.device)
        return time.perf_counter() - began, text.tolist()

    def first_two(name: str) -> list[float]:
        return [call(name, 0)[0] for _ in range(2)]

    first = {}
    for name in sorted(methods, key=lambda name: name == "static"):  # it takes longest
        found = clock.attempt(f"first call, {name}", partial(first_two, name))
        if found is None:
            methods.pop(name)
        else:
            first[name] = found
    if UNDRAFTED in methods and batch == 1:
        _wait_until_compiled(model, lambda: call(UNDRAFTED, 0), clock)
    host = None
    if batch == 1 and is_asynchronous(model.device):
        timed = "lookup" if "lookup" in methods else UNDRAFTED
        if timed in methods:
            host = clock.attempt("host time", lambda: _host_seconds(lambda: call(timed, 0)))
    elif batch == 1:
        clock.missing.append("host time in a round: on a CPU it cannot be separated from the time of the pass")
    calls: list[dict[str, Any]] = []
    for at, category in enumerate(categories):
        if clock.left <= 0:
            clock.missing.append(f"whole calls: {at} of {len(categories)} prompts fitted into the time")
            break
        row: dict[str, Any] = {"category": category, "prompt_tokens": int(encoded[at]["input_ids"].shape[1])}
        texts = {}
        for name in methods:
            graphs = _graphs(model)
            found = clock.attempt(f"{name}, prompt {at}", partial(call, name, at))
            if found is not None:
                row[name], texts[name] = found
                if name in (*drafting, UNDRAFTED):
                    about = model.last_speculation
                    row[f"{name}: tokens a pass"] = about.generated_tokens / about.target_passes
                    row[f"{name}: exactness"] = about.exactness
                    row[f"{name}: replayed"] = about.replayed_passes / max(about.target_passes - 1, 1)
                    row[f"{name}: refusal"] = about.replay_refusal
                    row[f"{name}: captured"] = len(_graphs(model) - graphs)
        for name in drafting:
            if name in texts and UNDRAFTED in texts:
                row[f"{name}: text as undrafted"] = texts[name] == texts[UNDRAFTED]
        for name, said in ((UNDRAFTED, "undrafted"), ("static", "static")):
            if name in texts and PLAIN in texts:
                row[f"{said} text as plain's"] = texts[name] == texts[PLAIN]
        calls.append(row)
    return {"first": first, "calls": calls, "host": host}


def _wait_until_compiled(model: Any, call: Callable[[], Any], clock: Clock) -> None:
    """Decode until what is compiled in the background is in use, or found not to pay off: texts may change with it."""
    state = state_of(model).get(GraphPart)
    while clock.left > 0 and (passes := state.passes.get(None)) is not None:
        fusing = state.fusing
        if passes.refusal is not None or passes.fuses is not None or not passes.backend.compiles:
            if passes.rival is None or passes.refusal is not None:
                return
        elif fusing is not None and fusing.is_done and (fusing.refusal or fusing.passes.refusal):
            return
        call()


def _prompts(model: Any, tokenizer: Any, batch: int) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Return the categories of the prompts, and their tokens on the model's device, of `batch` prompts together."""
    if tokenizer is None:
        size = (_RANDOM_PROMPTS, batch, _RANDOM_TOKENS)
        generator = torch.Generator(device="cpu").manual_seed(0)
        rows = torch.randint(0, model.config.vocab_size, size, generator=generator, device="cpu").to(model.device)
        return ["random"] * len(rows), [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]
    prompts = [prompt for at in range(8) for prompt in _each_category(at)]
    encoded = [encode_prompt(tokenizer, prompt.text, True) for prompt in prompts]
    if batch > 1:
        parts = [encoded[at : at + batch] for at in range(0, len(encoded) - batch + 1, batch)]
        return ["mixed"] * len(parts), [
            {key: value.to(model.device) for key, value in _padded(part).items()} for part in parts
        ]
    return [prompt.category for prompt in prompts], [
        {key: value.to(model.device) for key, value in each.items()} for each in encoded
    ]


def _padded(encoded: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return encoded prompts as one batch, padded at the left."""
    longest = max(each["input_ids"].shape[1] for each in encoded)
    return {
        key: torch.cat([pad(each[key], (longest - each[key].shape[1], 0)) for each in encoded])
        for key in ("input_ids", "attention_mask")
    }


def _graphs(model: Any) -> set[int]:
    """Return the identities of the graphs that are held for a model."""
    state = state_of(model).get(GraphPart)
    every = (*state.passes.values(), *state.batches.values())
    return {id(graph) for passes in every for graph in passes.table.graphs.values()}


def _each_category(at: int) -> Iterator[Any]:
    by_category: dict[str, list[Any]] = {}
    for prompt in built_in_prompts():
        by_category.setdefault(prompt.category, []).append(prompt)
    for prompts in by_category.values():
        if at < len(prompts):
            yield prompts[at]


def _host_seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of a round without its pass and the wait for it."""
    seconds: list[float] = []
    waiting = [0.0]
    round_of, replay_of = DecodingLoop._round, GraphPasses.run

    def timed_round(self: DecodingLoop, *args: Any) -> bool:
        waiting[0] = 0.0
        began = time.perf_counter()
        result = round_of(self, *args)
        seconds.append(time.perf_counter() - began - waiting[0])
        return result

    def timed_run(self: GraphPasses, *args: Any, **kwargs: Any) -> Any:
        results = replay_of(self, *args, **kwargs)
        if results is not None:
            began = time.perf_counter()
            results[1].tolist()
            waiting[0] += time.perf_counter() - began
        return results

    DecodingLoop._round = timed_round  # type: ignore[method-assign, assignment]
    GraphPasses.run = timed_run  # type: ignore[method-assign]
    try:
        call()
    finally:
        DecodingLoop._round, GraphPasses.run = round_of, replay_of  # type: ignore[method-assign]
    return statistics.median(seconds)


# ----------------------------------------------------------------------------------------------------------------------


def _loaded(arguments: argparse.Namespace) -> tuple[Any, Any]:
    dtype = getattr(torch, arguments.dtype)
    if arguments.shape is None:
        model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
        return enable_self_speculative(model.to(arguments.device).eval()), tokenizer
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(SHAPES[arguments.shape](), dtype=dtype)
    return enable_self_speculative(model.eval()), None


def _tables(report: dict[str, Any]) -> Iterator[str]:
    yield report["machine"]
    yield ""
    if report["passes"]:
        yield f"{'milliseconds of a pass':34}{'own code':>12}{'replayed':>12}{'capture':>12}"
    for row in report["passes"] or ():
        what = "" if row["what"] == "model" else "half left out, "
        cells = [row["eager"], row["replayed"], row["recording"]]
        shown = "".join(f"{'-' if value is None else f'{1e3 * value:.2f}':>12}" for value in cells)
        yield f"{what + str(row['width']) + ' after ' + str(row['cached']):34}{shown}"
    if calls := (report["calls"] or {}).get("calls"):
        yield ""
        yield f"{'whole calls':34}{'x plain':>12}{'least':>12}{'greatest':>12}{'x static':>12}"
        methods = [name for name in report["calls"]["first"] if name != PLAIN]
        for name in methods:
            ratios = [row[PLAIN] / row[name] for row in calls if name in row and PLAIN in row]
            of_static = [row["static"] / row[name] for row in calls if name in row and "static" in row]
            if ratios:
                cells = [statistics.geometric_mean(ratios), min(ratios), max(ratios)]
                cells += [statistics.geometric_mean(of_static)] if of_static else []
                yield f"{name:34}" + "".join(f"{value:12.2f}" for value in cells)
        for key in (
            *(f"{name}: text as undrafted" for name in methods),
            "undrafted text as plain's",
            "static text as plain's",
        ):
            known = [row[key] for row in calls if key in row]
            if known:
                yield f"{key:34}{sum(known):>12} of {len(known)}"
        bitwise = [row["lookup: exactness"] == "bitwise" for row in calls if "lookup: exactness" in row]
        if bitwise:
            yield f"{'lookup: exactness is bitwise':34}{sum(bitwise):>12} of {len(bitwise)}"
        for key in (f"{name}: {what}" for what in ("replayed", "tokens a pass") for name in methods):
            known = [row[key] for row in calls if key in row]
            if known:
                yield f"{key:34}{statistics.mean(known):12.2f}"
        for name in methods:
            known = [row for row in calls if f"{name}: captured" in row and PLAIN in row]
            if known:
                yield _slowest(name, known)
        first = report["calls"]["first"]
        yield "seconds of the first two calls: " + ", ".join(f"{k} {a:.2f} {b:.2f}" for k, (a, b) in first.items())
        if report["calls"]["host"] is not None:
            yield f"host time in a round: {1e3 * report['calls']['host']:.3f} ms"
    yield ""
    if report["keeps_bits"] is not None:
        yield f"bitwise, whatever the width of the pass: {report['keeps_bits']}"
    yield f"keys and values at fixed addresses: {report['arena_bytes'] / 1e6:.0f} MB"
    if report["reserved_bytes"] is not None:
        yield f"memory of the device in use: {report['reserved_bytes'] / 1e9:.2f} GB"
    for line in report["missing"]:
        yield f"not measured: {line}"


def _slowest(name: str, calls: Sequence[dict[str, Any]]) -> str:
    """Return a line about the call of a method that gained least."""
    row = min(calls, key=lambda row: float(row[PLAIN] / row[name]))
    line = (
        f"slowest call, {name}: {row[PLAIN] / row[name]:.2f} x plain ({row[PLAIN]:.2f} s), {row['category']}, "
        f"{row[f'{name}: tokens a pass']:.2f} tokens a pass, {row[f'{name}: replayed']:.0%} of the passes replayed, "
        f"{row[f'{name}: captured']} graphs captured"
    )
    return line if row[f"{name}: refusal"] is None else f"{line}; {row[f'{name}: refusal']}"


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m ssd_generation.benchmark.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="Hub id, folder, GGUF file or 'demo' (SmolLM2-135M-Instruct)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=400.0, help="time limit of the run, loading not included")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--fused",
        choices=["none", "rows", "whole"],
        help="what to compile before passes are captured: none, rows (norms, gated activations, rotary embeddings) or "
        "whole (all of a pass); default: as in decoding, which compiles rows in a thread and uses them if faster",
    )
    parser.add_argument(
        "--methods",
        help=f"of whole calls; default: {','.join(_METHODS)}, and with --shape {','.join(_METHODS_OF_SHAPES)}",
    )
    parser.add_argument("--rows", type=int, default=1, help="prompts of each call; default: 1")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.new_tokens) < 1:
        parser.error("--rows and --new-tokens take 1 and more")
    model, tokenizer = _loaded(arguments)
    clock = Clock(arguments.seconds)
    if arguments.fused is not None:
        graph_passes.FUSES = arguments.fused
    methods = arguments.methods.split(",") if arguments.methods else _METHODS_OF_SHAPES if arguments.shape else _METHODS
    calls_clock = Clock(arguments.seconds * 0.7, clock.missing)
    calls = measure_calls(model, tokenizer, calls_clock, arguments.new_tokens, methods, arguments.rows)
    state = state_of(model).get(GraphPart)
    target = state.passes.get(None)
    arenas = [state.arena, *(passes.arena for passes in state.batches.values())]
    report = {
        "machine": describe_machine(model),
        "arguments": vars(arguments),
        "calls": calls,
        "passes": measure_passes(model, clock, arguments.fused) if arguments.rows == 1 else [],
        "keeps_bits": None if target is None else target.keeps_bits,
        "arena_bytes": sum(arena.bytes for arena in arenas if arena is not None),
        "reserved_bytes": torch.cuda.memory_reserved() if is_asynchronous(model.device) else None,
        "missing": clock.missing,
    }
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_tables(report)))


if __name__ == "__main__":
    main()
