"""Table of `ssd generate --compare`, and its interpretation in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from ..support.display import byte_size
from .console import styled
from .layer_lists import describe_skip

if TYPE_CHECKING:
    from ..config import Costs, SelfSpeculativeConfig
    from ..harness.results import Comparison, MethodResult
    from ..harness.texts import Difference
    from .generate_run import Answer, Draft

_NONE = "–"
_VERIFY_LENGTHS = (2, 4, 8)  # tokens of the verification passes whose costs are shown
_MOST_NAMES = 3
_SMALL = 3e9  # parameters
_MORE_THAN_ROUNDING = 1.0  # a few steps of bfloat16 at the magnitude of logits
_MORE_THAN_CHANCE = 4.0  # standard deviations


def comparison_view(answer: Answer) -> RenderableType:
    """Build everything that is printed below a compared answer.

    Raises:
        ValueError: the answer was not compared.
    """
    comparison, draft = answer.comparison, answer.draft
    if comparison is None:
        raise ValueError("This answer was not compared with anything. Ask for it with --compare.")
    parts: list[RenderableType] = []
    if comparison.self_speculative.difference is not None:
        text = answer.tokenizer.decode(comparison.plain.token_ids[0], skip_special_tokens=True)
        parts += [styled(("Plain decoding gives:", "dim")), styled(text), styled()]
    parts.append(_table(comparison))
    parts += [styled(line) for line in _verdict(comparison, draft)]
    parts.append(styled())
    parts += [styled((line, "dim")) for line in _conditions(comparison, answer)]
    return Group(*parts)


def _table(comparison: Comparison) -> Table:
    # This box separates columns by one space, so that the table fits into 80 characters.
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("method", no_wrap=True)
    for header in (
        "new\ntokens",
        "tokens\nper s",
        "ratio\nto plain",
        "drafted/\nlooked up",
        "accep-\ntance",
        "tokens/\nround",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column()  # a gap
    table.add_column("identical\nto plain; z" if comparison.sampling else "identical\nto plain", min_width=13)
    for method in comparison.methods:
        is_result = method is comparison.self_speculative
        table.add_row(
            method.name,
            f"{method.new_tokens:g}",
            f"{method.tokens_per_second:.1f}",
            "1" if method is comparison.plain else _ratio(method),
            _drafted(method),
            _NONE if method.acceptance_rate is None else f"{method.acceptance_rate:.1%}",
            _NONE if method.tokens_per_round is None else f"{method.tokens_per_round:.2f}",
            "",
            _identity(comparison, method),
            style="bold" if is_result else None,
        )
    return table


def _ratio(method: MethodResult) -> str:
    if len(method.ratios) == 1:
        return f"{method.ratio:.2f}"
    return f"{method.ratio:.2f}\n{min(method.ratios):.2f}–{max(method.ratios):.2f}"


def _drafted(method: MethodResult) -> str:
    if method.self_drafted_tokens is None or method.looked_up_tokens is None:
        return _NONE
    counts = (method.self_drafted_tokens, method.looked_up_tokens)  # averages over the repeats
    return "/".join(f"{count:.0f}" if count >= 10 else f"{count:.2g}" for count in counts)


def _identity(comparison: Comparison, method: MethodResult) -> str:
    text = "" if method is comparison.plain else _sameness(method.difference)
    if method.draws is not None:
        from ..harness.texts import z_figure

        z = z_figure(method.draws.z, method.draws.impossible)
        text = "; ".join(part for part in (text, z) if part)
    return text or _NONE


def _sameness(difference: Difference | None) -> str:
    if difference is None:
        return "yes"
    where = f"differs at token {difference.token}"
    if difference.logit_margin is not None:
        return f"{where}, logit margin {difference.logit_margin:.3g}"
    if difference.plain_token is None or difference.other_token is None:
        return f"{where}, where one text ends"
    return where


def _verdict(comparison: Comparison, draft: Draft) -> list[str]:
    """Interpret the figures, in a short paragraph each."""
    config, result = draft.config, comparison.self_speculative
    lines = _text_verdict(comparison) + _exactness_verdict(comparison) + _sampling_verdict(comparison)
    if config.drafts_itself and not config.skip and not config.precision:
        lines.append("The draft leaves out nothing, so it costs as much as the target: no speed-up is possible.")
        return lines
    lines.append(_speed_verdict(comparison, config))
    if result.ratio < 1 and config.drafting.policy != "none":
        lines.append(_why_slower(comparison, draft))
    return lines


def _text_verdict(comparison: Comparison) -> list[str]:
    """Explain why the text differs from plain decoding's; empty where it does not."""
    result = comparison.self_speculative
    difference = result.difference
    if difference is None:
        return []
    line = f"The text differs from plain decoding at token {difference.token}."
    undrafted = result.undrafted_difference
    if difference.logit_margin is not None and difference.logit_margin > _MORE_THAN_ROUNDING:
        line += " The logit margin is larger than rounding explains: please report it, with the model's name."
    elif result.is_as_undrafted:
        line += (
            " Drafting has no part in it: undrafted decoding by this library gives the same text. Its kernels round "
            "differently from the model's own, which can flip a near tie: look at the logit margin."
        )
    elif undrafted is not None and undrafted.token == difference.token:
        line += (
            " Undrafted decoding by this library diverges from plain decoding at the same token: its kernels round "
            "differently from the model's own, which can flip a near tie. Further on, drafted and undrafted text "
            "diverge."
        )
    else:
        line += (
            " Verifying several tokens in one pass rounds differently from one at a time, which can flip a near tie: "
            "look at the logit margin. With --exact it does not, where this machine can; in float32 it is rare."
        )
    return [line]


def _exactness_verdict(comparison: Comparison) -> list[str]:
    """State whether the logits depend on the draft."""
    from ..config.values import BITWISE
    from ..tuning.exactness import HOW_TO_ASK

    last = comparison.self_speculative.speculation[-1]
    if last.exactness == BITWISE:
        return ["Bitwise exact: the logits are those of undrafted decoding by this library, whatever was drafted."]
    reason = (last.exactness_reason or "").replace(HOW_TO_ASK, "--exact requests them")
    return [f"Not bitwise exact: {reason}."] if reason else []


def _sampling_verdict(comparison: Comparison) -> list[str]:
    """State whether sampled tokens follow the model's distribution."""
    lines = []
    draws = comparison.self_speculative.draws
    if draws is not None:
        line = (
            "z: how much likelier the tokens are under the model's own distribution than tokens drawn from it would "
            "be, in standard deviations. Chance alone takes it beyond ±2 once in 20."
        )
        if draws.impossible:
            line += " Impossible: tokens that the model itself could not have drawn there."
        by_rounding = 0 if comparison.plain.draws is None else 1 + 2 * comparison.plain.draws.impossible
        if abs(draws.z or 0.0) > _MORE_THAN_CHANCE or draws.impossible > by_rounding:
            line += " This is more than chance explains: please report it, with the model's name."
        lines.append(line)
    lines += [f"{m.name}: its draws could not be judged: {m.draws_error}" for m in comparison.methods if m.draws_error]
    return lines


def _speed_verdict(comparison: Comparison, config: SelfSpeculativeConfig) -> str:
    """State the speed-up, and the costs and acceptance that explain it."""
    result = comparison.self_speculative
    if min(result.ratios) > 1:
        line = f"Self-speculative decoding is {result.ratio:.2f} times as fast as plain decoding here."
    elif max(result.ratios) < 1:
        line = f"Self-speculative decoding is slower than plain decoding here: {result.ratio:.2f} times its speed."
    else:
        line = "The difference in speed to plain decoding lies within the spread of the repeats."
    if comparison.verify_cost is not None and config.drafting.policy != "none":
        check = f"{comparison.verify_cost:.2f}"
        if comparison.draft_cost is None:
            line += f" In these runs a verification pass cost {check} of a plain step"
        else:
            drafted = f"{comparison.draft_cost:.2f}"
            line += f" In these runs a drafted token cost {drafted} of a plain step, a verification pass {check}"
        line += f"; that gave {result.tokens_per_round:.2f} tokens per round." if result.tokens_per_round else "."
    if result.self_drafted_acceptance is not None and result.looked_up_acceptance is not None:
        line += (
            f" Acceptance rate: {result.self_drafted_acceptance:.0%} of the tokens that the model drafted itself, "
            f"{result.looked_up_acceptance:.0%} of those that prompt lookup drafted."
        )
    return line


def _why_slower(comparison: Comparison, draft: Draft) -> str:
    """Name the likely cause of a slowdown, and what to try."""
    config = draft.config
    if draft.choice is not None:
        return (
            "`auto` drafts only where the costs that it measured say that drafting pays. A slowdown beyond the spread "
            "means that they do not hold now, most often because other work ran on the machine, then or now."
        )
    if config.skip and not config.precision and comparison.parameters < _SMALL:
        return (
            "This is typical of small models: layer skipping alone gains them little or nothing. The published gains "
            "are mostly for models of 8 billion parameters and more. Try it without the skip options, or --config auto."
        )
    if config.drafting.policy != "cost":
        return "Try --policy cost, which drafts only as far as it pays, or --config auto."
    return "Try --config auto, which measures what pays here."


def _reasons(draft: Draft, costs: Costs | None) -> list[str]:
    """Explain the choice of draft: what `auto` chose and why, or the measured costs alone."""
    config, choice = draft.config, draft.choice
    measured = "" if costs is None else _measured(costs, config.drafts_itself)
    if choice is None:
        return [f"Draft length by cost. Measured here beforehand: {measured}."] if measured else []
    expected = choice.expected
    if choice.precision is None:
        what = "prompt lookup alone" if config.lookup is not None else "nothing: no draft but prompt lookup pays here"
    else:
        what = f"copies in {_named(choice.precision)}" + (" and prompt lookup" if config.lookup is not None else "")
    line = f"`auto` chose {what}."
    if measured:
        line += f" Measured here beforehand: {measured}."
    if choice.precision is not None:
        line += f" Expected of the copies alone: {expected[choice.precision]:.2f} times plain speed"
    elif expected:
        line += " Low-bit copies would gain too little"
    others = [f"{_named(name)} {speedup:.2f}" for name, speedup in expected.items() if name != choice.precision]
    if expected:
        line += f" ({', '.join(others)})." if others else "."
    if choice.draft_memory == 0:
        line += " Low-bit copies were not allowed (draft_memory 0)."
    elif choice.ruled_out:
        # A reason that several precisions share is printed once.
        reasons: dict[str, list[str]] = {}
        for name, reason in choice.ruled_out.items():
            reasons.setdefault(reason, []).append(_named(name))
        line += "".join(f" Not tried: {', '.join(names)}: {reason.rstrip('.')}." for reason, names in reasons.items())
    return [line]


def _measured(costs: Costs, drafts_itself: bool) -> str:
    """Format costs: "a draft step costs 0.45 of a plain one, verifying 2, 4, 8 tokens 1.02, 1.10, 1.31"."""
    lengths = [n for n, _ in costs.verify if n in _VERIFY_LENGTHS] or [costs.verify[-1][0]]
    checks = ", ".join(f"{costs.verify_seconds(n) / costs.plain_step:.2f}" for n in lengths)
    draft = f"a draft step costs {costs.draft_step / costs.plain_step:.2f} of a plain one, " if drafts_itself else ""
    return f"{draft}verifying {', '.join(map(str, lengths))} tokens {'' if draft else 'costs '}{checks}"


def _conditions(comparison: Comparison, answer: Answer) -> list[str]:
    """Describe the measurement, and the machine and versions."""
    config, environment = answer.draft.config, answer.environment
    repeats = len(comparison.plain.seconds)
    count = "one run" if repeats == 1 else f"median of {repeats} interleaved runs"
    versions = environment["versions"]
    place = environment["device"]
    if "cpu" in environment:
        place = (
            f"{environment['cpu']}, {environment['threads']} {'thread' if environment['threads'] == 1 else 'threads'}"
        )
    return [
        *_reasons(answer.draft, comparison.costs),
        f"{_draft(comparison, config)} {_length(config)}".strip(),
        *_without_copies(comparison),
        _memory(comparison, config),
        f"{'Sampling' if comparison.sampling else 'Greedy'}, prompt of {answer.prompt_tokens} tokens, {count} each "
        f"after a warm-up{', below the ratio its least and greatest' if repeats > 1 else ''}; speeds include the pass "
        "over the prompt.",
        f"{environment['model']} in {environment['dtype']} ({environment['attention_implementation']}) on {place}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"ssd_generation {versions['ssd_generation']}.",
    ]


def _draft(comparison: Comparison, config: SelfSpeculativeConfig) -> str:
    """Describe what makes the draft cheap."""
    if not config.drafts_itself:
        return ""
    parts = []
    if config.skip:
        parts.append(
            f"leaves out {comparison.skipped_sublayers} of {comparison.sublayers} sub-layers: "
            f"{describe_skip(config.skip)} ({comparison.skipped_parameters:.1%} of the parameters)"
        )
    if config.precision:
        parts.append(f"computes from copies of the weights in {_bits(config)}")
    return f"The draft {' and '.join(parts)}." if parts else "The draft is the target model itself."


def _bits(config: SelfSpeculativeConfig) -> str:
    precision = config.precision
    if precision is None or precision.default is None or precision.attention or precision.mlp:
        return "low bits"
    return f"{precision.default} (head too)" if precision.head == precision.default == "int4" else precision.default


def _named(precision: str) -> str:
    """Format the name of a precision that `auto` tried."""
    return precision.replace(", head int4", " (head too)")


def _length(config: SelfSpeculativeConfig) -> str:
    """Describe how many tokens a round drafts."""
    drafting = config.drafting
    if drafting.policy == "none":
        return "Nothing is drafted: every step is a plain one."
    longest = drafting.max_draft_length
    tokens = f"{longest} {'token' if longest == 1 else 'tokens'}"
    parts = []
    if config.drafts_itself:
        how_many = {
            "cost": f"as many tokens per round as pay, up to {longest}",
            "confidence": f"up to {tokens} per round, fewer where it is unsure",
        }
        parts.append(f"drafts {how_many.get(drafting.policy, f'{tokens} per round')}")
    if config.lookup is not None:
        longest = config.lookup.max_tokens
        parts.append(f"copies from the text {'as many as pay, ' if drafting.policy == 'cost' else ''}up to {longest}")
    return f"It {', and '.join(parts)}."


def _without_copies(comparison: Comparison) -> list[str]:
    left = comparison.left_as_loaded
    if not left:
        return []
    more = f" and {len(left) - _MOST_NAMES} more" if len(left) > _MOST_NAMES else ""
    return [f"In the draft as they were loaded, without a copy: {', '.join(left[:_MOST_NAMES])}{more}."]


def _memory(comparison: Comparison, config: SelfSpeculativeConfig) -> str:
    share = comparison.extra_bytes / max(comparison.weight_bytes, 1)
    memory = f"{byte_size(comparison.extra_bytes)}, {share:.1%} of the weights" if comparison.extra_bytes else "none"
    basis = "measured" if comparison.extra_bytes_measured else "computed"
    line = "No second model, no second KV cache."
    if config.precision:
        line += (
            f" Low-bit copies: {byte_size(comparison.copy_bytes)}, {comparison.copy_share:.1%} of the weights' "
            f"{byte_size(comparison.weight_bytes)}."
        )
    return f"{line} {'Other extra' if config.precision else 'Extra'} memory ({basis}): {memory}."


def drafts_from(draft: Draft) -> str:
    """Describe what a call drafts from, and its memory, in one line."""
    config = draft.config
    if config.drafting.policy == "none":
        return "Nothing drafted."
    parts = []
    if config.skip:
        parts.append(f"leaving out {describe_skip(config.skip)}")
    if config.precision:
        share = draft.copy_bytes / max(draft.weight_bytes, 1)
        size = f" ({byte_size(draft.copy_bytes)}, {share:.0%} of them)" if draft.copy_bytes else ""  # not made yet
        parts.append(f"copies of the weights in {_bits(config)}{size}")
    if config.lookup is not None:
        parts.append("prompt lookup")
    return f"Drafted by {' and '.join(parts) if parts else 'the target model itself'}."
