"""The table of `ssd generate --compare`, and what it means in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .options import describe_skip

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..comparison import Comparison, MethodResult
    from ..config import SelfSpeculativeConfig

_NONE = "–"
_SMALL = 3e9  # parameters
_MORE_THAN_ROUNDING = 1.0  # a few steps of bfloat16 at the size that logits have


def comparison_view(
    comparison: Comparison,
    config: SelfSpeculativeConfig,
    environment: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
) -> RenderableType:
    """Everything that is printed below the answer."""
    parts: list[RenderableType] = []
    result = comparison.self_speculative
    if result.difference is not None:
        text = tokenizer.decode(comparison.plain.token_ids[0], skip_special_tokens=True)
        parts += [Text("Plain decoding says:", style="dim"), Text(text), Text()]
    parts.append(_table(comparison))
    parts += [Text(line) for line in _verdict(comparison)]
    parts.append(Text())
    parts += [Text(line, style="dim") for line in _conditions(comparison, config, environment, prompt_tokens)]
    return Group(*parts)


def _table(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("method", no_wrap=True)
    for header in ("new\ntokens", "tokens\nper s", "ratio\nto plain", "accep-\ntance", "tokens/\nround"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("identical\nto plain", min_width=16)
    for method in comparison.methods:
        is_result = method is comparison.self_speculative
        table.add_row(
            method.name,
            f"{method.new_tokens:g}",
            f"{method.tokens_per_second:.1f}",
            "1" if method is comparison.plain else _ratio(method),
            _NONE if method.acceptance_rate is None else f"{method.acceptance_rate:.1%}",
            _NONE if method.tokens_per_round is None else f"{method.tokens_per_round:.2f}",
            _identity(comparison, method),
            style="bold" if is_result else None,
        )
    return table


def _ratio(method: MethodResult) -> str:
    if len(method.ratios) == 1:
        return f"{method.ratio:.2f}"
    return f"{method.ratio:.2f}\n{min(method.ratios):.2f}–{max(method.ratios):.2f}"


def _identity(comparison: Comparison, method: MethodResult) -> str:
    if method is comparison.plain:
        return _NONE
    if comparison.sampling:
        return "sampled"
    difference = method.difference
    if difference is None:
        return "yes"
    where = f"differs at token {difference.token}"
    if difference.logit_margin is not None:
        return f"{where}, logit margin {difference.logit_margin:.3g}"
    if difference.plain_token is None or difference.other_token is None:
        return f"{where}, where one text ends"
    return where


def _verdict(comparison: Comparison) -> list[str]:
    """What the figures mean, a short paragraph each."""
    result = comparison.self_speculative
    lines = []
    difference = result.difference
    if difference is not None:
        line = f"The text differs from plain decoding at token {difference.token}."
        if difference.logit_margin is not None and difference.logit_margin > _MORE_THAN_ROUNDING:
            line += " The logit margin is larger than rounding explains: please report it, with the model's name."
        elif difference.logit_margin is not None:
            line += (
                " Checking several tokens in one pass rounds differently from one at a time, which can turn a near tie "
                "over: look at the logit margin. In float32 that is rare (--dtype float32)."
            )
        lines.append(line)
    if not comparison.skipped_sublayers:
        lines.append("The draft leaves out nothing, so it costs what the model costs: no speed-up can come of that.")
        return lines
    if min(result.ratios) > 1:
        line = f"Self-speculative decoding is {result.ratio:.2f} times as fast as plain decoding here."
    elif max(result.ratios) < 1:
        line = f"Self-speculative decoding is slower than plain decoding here: {result.ratio:.2f} times its speed."
    else:
        line = "The difference in speed to plain decoding lies within the spread of the repeats."
    if comparison.draft_cost is not None and comparison.verify_cost is not None:
        line += (
            f" A drafted token costs {comparison.draft_cost:.2f} of a plain step, a check "
            f"{comparison.verify_cost:.2f}; that gives {result.tokens_per_round:.2f} tokens per round."
        )
    if result.ratio < 1:
        if comparison.parameters < _SMALL:
            line += (
                " That is how small models are: layer skipping alone gains them little or nothing. The published gains "
                "are mostly for models of 8 billion parameters and more."
            )
        else:
            line += " Try another skip set, another --policy or a shorter --draft-length."
    lines.append(line)
    return lines


def _conditions(
    comparison: Comparison, config: SelfSpeculativeConfig, environment: dict[str, Any], prompt_tokens: int
) -> list[str]:
    """What was measured, and on what."""
    drafting = config.drafting
    length = f"{drafting.max_draft_length} {'token' if drafting.max_draft_length == 1 else 'tokens'}"
    if drafting.policy == "fixed":
        how = f"It drafts {length} per round."
    else:
        how = f"It drafts up to {length} per round, fewer where it is unsure."
    share = comparison.extra_bytes / max(comparison.weight_bytes, 1)
    memory = f"{_size(comparison.extra_bytes)}, {share:.1%} of the weights" if comparison.extra_bytes else "none"
    basis = "measured" if comparison.extra_bytes_measured else "computed"
    repeats = len(comparison.plain.seconds)
    count = "one run" if repeats == 1 else f"median of {repeats} interleaved runs"
    versions = environment["versions"]
    place = environment["device"]
    if "cpu" in environment:
        place = (
            f"{environment['cpu']}, {environment['threads']} {'thread' if environment['threads'] == 1 else 'threads'}"
        )
    return [
        f"The draft leaves out {comparison.skipped_sublayers} of {comparison.sublayers} sub-layers: "
        f"{describe_skip(config.skip) or 'none'} ({comparison.skipped_parameters:.1%} of the parameters). {how}",
        f"No second model, no second KV cache. Extra memory ({basis}): {memory}.",
        f"{'Sampling' if comparison.sampling else 'Greedy'}, prompt of {prompt_tokens} tokens, {count} each after a "
        f"warm-up{', below the ratio its least and greatest' if repeats > 1 else ''}; speeds include the pass over the "
        "prompt.",
        f"{environment['model']} in {environment['dtype']} ({environment['attention_implementation']}) on {place}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"ssd_generation {versions['ssd_generation']}.",
    ]


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
