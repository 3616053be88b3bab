"""Sentences about a run: its conditions, its problems, and the distribution of its samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..methods import PLAIN
from ..peer_methods import LLAMA_CPP, OPENVINO, OPENVINO_PREFIX_CACHE
from ..texts import z_figure
from .cells import NONE

__all__ = ["conditions", "problems", "sampling_notes"]


def conditions(summary: Mapping[str, Any]) -> list[str]:
    """Describe the measurement, and the machines and versions, in sentences."""
    lines = [_calls(summary)]
    if summary["environment"]:
        lines.append(_place(summary["environment"]))
    if others := summary.get("other_environments"):
        lines.append(
            "Part of it was measured in earlier sessions elsewhere, or by another version (ratios are taken within a "
            f"session): {' '.join(map(_place, others))}"
        )
    if summary["kind"] == "paired":
        lines.append("Ratios above 1 mean that this checkout is faster than the other.")
    else:
        lines.append(
            "Ratios are tokens per second relative to plain decoding of the same prompt and repeat; above 1 is faster. "
            "The geometric mean is that of the categories' medians."
        )
    return lines + _peers(summary["methods"])


def _peers(names: Collection[str]) -> list[str]:
    """Describe the part of other runtimes in the run."""
    lines = []
    if any(name.startswith(LLAMA_CPP) for name in names):
        lines.append(
            "llama.cpp runs in a process of its own, receives the prompts as tokens, and rounds in its own way, with "
            "the weights of its GGUF file."
        )
    if any(name.startswith(OPENVINO) for name in names):
        lines.append(
            "OpenVINO GenAI runs in a process of its own, receives the prompts as tokens, and rounds in its own way, "
            "with the weights of its folder or file."
        )
    if cached := [name for name in names if name.startswith(OPENVINO_PREFIX_CACHE)]:
        lines.append(
            f"{', '.join(cached)}: the prompt is in the prefix cache, from a call that is not timed, so that the call "
            "hardly pays for it; all other methods pay for the whole prompt. Compare decoding alone."
        )
    return lines


def _calls(summary: Mapping[str, Any]) -> str:
    """Describe the prompts, the repeats, and the decoding."""
    arguments = summary["arguments"]
    prompts, count = sum(summary["prompts_per_category"].values()), len(summary["prompts_per_category"])
    decoding = "greedy"
    if arguments["do_sample"]:
        decoding = "sampling" + "".join(
            f", {name} {arguments[name]:g}" for name in ("temperature", "top_p") if arguments.get(name) is not None
        )
    asked = ""
    if "style" in arguments:
        asked = f" (style {arguments['style']!r}"
        if shots := arguments.get("shots"):
            asked += f", {shots} {'example' if shots == 1 else 'examples'} before each"
        asked += ")"
    repeats, one = arguments["repeats"], arguments["repeats"] == 1
    if "task" in arguments:  # an evaluation
        length = f"up to {arguments['new_tokens']} new tokens"
        often = f"{repeats} {'answer' if one else 'answers'} each"
    else:
        length = f"{arguments['new_tokens']} new tokens (end of sequence off)"
        often = f"{repeats} {'repeat' if one else 'repeats'}"
    return (
        f"{prompts} prompts in {count} {'category' if count == 1 else 'categories'}{asked}, {often}, {length}, "
        f"{decoding}, methods interleaved prompt by prompt."
    )


def _place(environment: Mapping[str, Any]) -> str:
    """Describe a machine, and the versions on it."""
    versions = environment["versions"]
    place = environment["device"]
    if "cpu" in environment:
        place = f"{environment['cpu']}, {environment['threads']} of {environment['cpu_count']} CPUs"
    commit, dirty, _ = (environment.get("commit") or "").partition("-dirty")
    commit = f" ({commit[:10]}{dirty})" if commit else ""
    peers = "".join(f", {name} {versions[name]}" for name in ("xllamacpp", "openvino-genai") if name in versions)
    own = ", ".join(f"{key} {value}" for key, value in environment.get("generation_config", {}).items())
    settings = f" The model's own generation config sets {own}." if own else ""
    return (
        f"{environment['model']} in {environment['dtype']} ({environment['attention_implementation']}) on {place}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}, ssd_generation "
        f"{versions['ssd_generation']}{commit}{peers}.{settings}"
    )


def problems(summary: Mapping[str, Any]) -> list[str]:
    """Name the methods that failed, and those whose texts differ from plain decoding's."""
    failures: dict[tuple[str, str], list[str]] = defaultdict(list)
    plain = {PLAIN: summary["plain"]} if "plain" in summary else {}
    for name, entry in {**plain, **summary["methods"]}.items():
        for error in entry["errors"]:
            failures["failed at times" if entry["calls"] else "cannot run here", error].append(name)
    lines = [f"{', '.join(names)}: {what}: {error}" for (what, error), names in failures.items()]
    for name, entry in summary["methods"].items():
        text = entry.get("text")
        if text and text["differences"]:
            first = text["differences"][0]
            margin = text["largest_margin"]
            known = "" if margin is None else f"; the largest logit margin is {margin:.3g}"
            lines.append(
                f"{name} differs from plain decoding in {len(text['differences'])} of {text['calls']} texts, first at "
                f"token {first['token']} of {first['prompt']}{known}." + _cause(text["differences"])
            )
    return lines


def _cause(differences: Sequence[Mapping[str, Any]]) -> str:
    """State whether drafting or a kernel made texts diverge, where undrafted decoding was run alongside."""
    known = [entry["undrafted_parts_too"] for entry in differences if "undrafted_parts_too" in entry]
    if not known:
        return ""
    return (
        f" In {sum(known)} of these, undrafted decoding diverges there or before: because of a kernel, not of drafting."
    )


def sampling_notes(summary: Mapping[str, Any]) -> list[str]:
    """Compare the samples with the model's distribution, in sentences; empty under greedy decoding."""
    entries = {PLAIN: summary.get("plain", {}), **summary["methods"]}
    lines = []
    for name, entry in entries.items():
        draws = entry.get("draws")
        if draws is None:
            continue
        per_token = draws["excess"] / max(draws["tokens"] - draws["impossible"], 1)
        z = z_figure(draws["z"], 0) or NONE
        line = f"{name}: {draws['tokens']:,} tokens, {per_token:+.4f} a token, z = {z}."
        if draws["impossible"]:
            line += f" {draws['impossible']} of them the model itself could not have drawn; z is that of the others."
        lines.append(line)
    if lines:
        lines.insert(
            0,
            "Drawn as the model draws? For each token: its log-probability under the model's own distribution, after "
            "temperature, top-p and all else, plus that distribution's entropy. For tokens drawn from it, that is 0 on "
            "average; above 0, a method draws likelier tokens than the model does. z is their sum in standard "
            "deviations, by chance beyond ±2 in one run of 20.",
        )
    return lines
