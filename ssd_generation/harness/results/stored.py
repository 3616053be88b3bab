"""Checks of a run's files when they are read again: rows, sessions, summaries. Everything that is used is checked.

A folder may come from elsewhere, or have been edited. So all contents go through `check_rows`, `check_sessions` or
`check_summary`, whose errors name the file, the place in it and what belongs there. Fields that nothing depends on, and
those of later versions, are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...config import Costs
from .checks import (
    Check,
    anything,
    both,
    by_name,
    count,
    fields,
    flag,
    list_of,
    number,
    optional,
    positive,
    quoted,
    string,
)
from .run_folder import damaged_row

__all__ = ["check_rows", "check_sessions", "check_summary"]

# ----------------------------------------------------------------------------------------------------------------------
# rows

_KEY: Mapping[str, Check] = {"prompt": string, "method": string, "repeat": count}
_CALL: Mapping[str, Check] = {**_KEY, "session": count, "category": string}


def _costs(value: Any) -> str | None:
    try:
        Costs.from_dict(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _histogram(value: Any) -> str | None:
    if wrong := by_name(count)(value):
        return wrong
    odd = [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 6 and int(key))]
    return f"{quoted(odd[0])} is not a number of tokens that a round can add" if odd else None


_SPECULATION = fields(
    {
        **dict.fromkeys(("rounds", "drafted_tokens", "accepted_tokens"), count),
        **dict.fromkeys(("drafted_by_depth", "judged_by_depth", "accepted_by_depth"), list_of(count)),
        **dict.fromkeys(("draft_seconds", "verify_seconds"), number),
        "tokens_per_round_histogram": _histogram,
    },
    {"looked_up_tokens": count},
)
_MEASURED = fields(
    {
        "token_ids": list_of(count, least=1),
        "seconds": positive,
        "prompt_seconds": number,
        "speculation": optional(_SPECULATION),
    },
    {
        "assisted": optional(fields(dict.fromkeys(("target_passes", "drafted_tokens", "accepted_tokens"), count))),
        "costs": optional(_costs),
    },
)


def _measured(value: Any) -> str | None:
    """Check a call, whose counts must agree, since figures divide by them and index up to them."""
    if wrong := _MEASURED(value):
        return wrong
    done = value["speculation"]
    if done is None:
        return None
    if not sum(done["tokens_per_round_histogram"].values()) == done["rounds"] <= len(value["token_ids"]):
        return "\"speculation\": the rounds do not match 'token_ids' and 'tokens_per_round_histogram'"
    if len(done["judged_by_depth"]) != len(done["accepted_by_depth"]):
        return "\"speculation\": 'judged_by_depth' and 'accepted_by_depth' differ in length"
    if done.get("looked_up_tokens", 0) > sum(done["drafted_by_depth"]):
        return '"speculation": more tokens were looked up than drafted'
    if done["rounds"] and not (done["verify_seconds"] > 0 and done["draft_seconds"] >= 0):
        return '"speculation": rounds without time for them'
    return None


# By kind: a check of every row, and a further one of rows without an error.
_ROWS: Mapping[str, tuple[Check, Check]] = {
    "call": (fields(_CALL, {"conversation": string}), _measured),
    "pair": (fields(_CALL), fields({"here": _measured, "there": _measured})),
    "memory": (fields({"method": string}), fields({"peak_bytes": count, "persistent_bytes": count})),
    "difference": (fields(_KEY), fields({}, {"logit_margin": optional(number)})),
    "draws": (
        fields({**_KEY, "session": count}),
        fields({"tokens": count, "impossible": count, "excess": number, "variance": number}),
    ),
    "verdict": (
        fields(_KEY),
        fields({"status": string, "detail": string, "program": string, "seconds": optional(number)}),
    ),
    "config": (fields({"method": string}), fields({"config": by_name(anything)})),
    "failed": (fields({"method": string}), fields({"error": string})),
}


def check_rows(
    rows: Iterable[Mapping[str, Any]],
    file: Path,
    methods: Collection[str],
    items: Collection[str],
    more: Mapping[str, Check] | None = None,
) -> None:
    """Check the rows of a run before they are used.

    Args:
        rows: rows as `run_folder` has read them, from the first one on.
        file: file that they come from.
        methods: names of the run's methods.
        items: names of the run's items.
        more: checks of further fields that a finished call needs.

    Raises:
        ValueError: a row that a run cannot have written; the message names the line.
    """
    finished_call = fields(more or {})
    for line, row in enumerate(rows, start=1):
        wrong = _wrong_in_row(row, finished_call) or _unknown(row, methods, items)
        if wrong is not None:
            raise damaged_row(file, line, wrong)


def _wrong_in_row(row: Mapping[str, Any], finished_call: Check) -> str | None:
    if wrong := fields({"kind": string})(row):
        return wrong
    if row["kind"] not in _ROWS:
        return None
    every, finished = _ROWS[row["kind"]]
    if wrong := every(row):
        return wrong
    if "error" in row:
        return fields({"error": string})(row)
    return finished(row) or (finished_call(row) if row["kind"] == "call" else None)


def _unknown(row: Mapping[str, Any], methods: Collection[str], items: Collection[str]) -> str | None:
    if row["kind"] not in _ROWS:
        return None
    if row["method"] not in methods:
        return f"this run has no method {quoted(row['method'])}"
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt not in items:
        return f"this run has no prompt called {quoted(prompt)}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# sessions

_ENVIRONMENT = fields(
    {
        **dict.fromkeys(("model", "dtype", "attention_implementation", "device"), optional(string)),
        "versions": fields(dict.fromkeys(("torch", "transformers", "ssd_generation"), string), {"xllamacpp": string}),
    },
    {
        **dict.fromkeys(("cpu", "commit"), optional(string)),
        **dict.fromkeys(("threads", "cpu_count"), optional(count)),
        "generation_config": by_name(anything),
    },
)


def _environment(value: Any) -> str | None:
    if wrong := _ENVIRONMENT(value):
        return wrong
    if "cpu" in value and not {"threads", "cpu_count"} <= value.keys():
        return "'threads' or 'cpu_count' is missing"
    return None


_SESSIONS = fields({"sessions": list_of(both(_environment, fields({}, {"session": optional(count)})))})


def check_sessions(document: Any, file: Path) -> None:
    """Check the contents of environment.json.

    Raises:
        ValueError: a run cannot have written them.
    """
    if wrong := _SESSIONS(document):
        raise ValueError(f"{str(file)!r} was not written by a run: {wrong}. Remove the file, or choose another.")


# ----------------------------------------------------------------------------------------------------------------------
# summaries

_INTERVAL = dict.fromkeys(("mean", "low", "high"), number)
_METHOD = fields(
    {},
    {
        "ratio": optional(
            fields(
                {
                    "geometric_mean": number,
                    "overall": optional(fields({"min": number, "max": number})),
                    "categories": by_name(fields({"median": number})),
                }
            )
        ),
        "text": optional(fields({"identical": count, "calls": count})),
        "draws": optional(fields({"z": optional(number), "impossible": count})),
    },
)
_SUMMARY = fields(
    {
        "arguments": fields(
            {"do_sample": flag, "repeats": count, "new_tokens": count},
            {
                **dict.fromkeys(("task", "style"), string),
                **dict.fromkeys(("temperature", "top_p"), optional(number)),
                "shots": optional(count),
            },
        ),
        "environment": optional(_environment),
        "prompts_per_category": by_name(count),
        "methods": by_name(_METHOD),
    },
    {
        "other_environments": optional(list_of(_environment)),
        "plain": _METHOD,
        "quality": by_name(by_name(fields(_INTERVAL, {"difference": fields(_INTERVAL)}))),
        "complete": flag,
    },
)


def check_summary(document: Any) -> None:
    """Check the parts of a summary of methods that are used to put runs side by side.

    Raises:
        ValueError: a run cannot have written the summary, or it compares checkouts.
    """
    wrong = fields({"kind": string})(document)
    if wrong is None and document["kind"] != "methods":
        wrong = f"it is of the kind {quoted(document['kind'])}, which compares checkouts, not methods"
    if wrong := wrong or _SUMMARY(document):
        raise ValueError(wrong)
