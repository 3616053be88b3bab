"""What a run has written, when it is read again: rows, sessions, summaries. Everything that is used later is looked at.

A folder may come from elsewhere, or have been edited. So whatever is read from one goes through `check_rows`,
`check_sessions` or `check_summary`, which name the file, the place in it and what belongs there. Fields that nothing
hangs on, and those of later versions, pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import Costs
from .run_folder import damaged_row

__all__ = ["Check", "check_rows", "check_sessions", "check_summary", "string"]

Check = Callable[[Any], "str | None"]
"""Says what is wrong with a value, if anything is."""

_LARGEST = 1e15  # of bytes, seconds, tokens, ratios


def _shown(value: Any) -> str:
    found = json.dumps(value)
    return found if len(found) <= 60 else f"{found[:60]}…"


def string(value: Any) -> str | None:
    """A string."""
    return None if isinstance(value, str) else f"a text is needed, but it is {_shown(value)}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"true or false is needed, but it is {_shown(value)}"


def _number(value: Any) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return None
    return f"a number of at most {_LARGEST:g} is needed, but it is {_shown(value)}"


def _positive(value: Any) -> str | None:
    return _number(value) or (None if value > 0 else f"a number above 0 is needed, but it is {_shown(value)}")


def _count(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
        return None
    return f"a number of things, 0 or more, is needed, but it is {_shown(value)}"


def _anything(value: Any) -> str | None:
    return None


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _list_of(check: Check, least: int = 0) -> Check:
    def found(value: Any) -> str | None:
        if not isinstance(value, list) or len(value) < least:
            return f"a list of at least {least} is needed, but it is {_shown(value)}"
        return next((wrong for entry in value if (wrong := check(entry))), None)

    return found


def _by_name(check: Check) -> Check:
    def found(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"an object is needed, but it is {_shown(value)}"
        return next((_at(key, wrong) for key, entry in value.items() if (wrong := check(entry))), None)

    return found


def _fields(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """An object that has the needed fields and, if it has them, more."""

    def found(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"an object is needed, but it is {_shown(value)}"
        for key, check in needed.items():
            if key not in value:
                return f"{key!r} is missing"
            if wrong := check(value[key]):
                return _at(key, wrong)
        return next(
            (_at(key, wrong) for key, check in (more or {}).items() if key in value and (wrong := check(value[key]))),
            None,
        )

    return found


def _at(key: str, wrong: str) -> str:
    return f"{_shown(key)}: {wrong}"


# ----------------------------------------------------------------------------------------------------------------------
# rows

_KEY: Mapping[str, Check] = {"prompt": string, "method": string, "repeat": _count}
_CALL: Mapping[str, Check] = {**_KEY, "session": _count, "category": string}


def _costs(value: Any) -> str | None:
    try:
        Costs.from_dict(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _histogram(value: Any) -> str | None:
    if wrong := _by_name(_count)(value):
        return wrong
    odd = [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 6 and int(key))]
    return f"{_shown(odd[0])} is no number of tokens that a round can add" if odd else None


_SPECULATION = _fields(
    {
        **dict.fromkeys(("rounds", "drafted_tokens", "accepted_tokens"), _count),
        **dict.fromkeys(("drafted_by_depth", "judged_by_depth", "accepted_by_depth"), _list_of(_count)),
        **dict.fromkeys(("draft_seconds", "verify_seconds"), _number),
        "tokens_per_round_histogram": _histogram,
    },
    {"looked_up_tokens": _count},
)
_MEASURED = _fields(
    {
        "token_ids": _list_of(_count, least=1),
        "seconds": _positive,
        "prompt_seconds": _number,
        "speculation": _optional(_SPECULATION),
    },
    {
        "assisted": _optional(_fields(dict.fromkeys(("target_passes", "drafted_tokens", "accepted_tokens"), _count))),
        "costs": _optional(_costs),
    },
)


def _measured(value: Any) -> str | None:
    """A call, whose counts go together: figures divide by them, and count up to them."""
    if wrong := _MEASURED(value):
        return wrong
    done = value["speculation"]
    if done is None:
        return None
    if not sum(done["tokens_per_round_histogram"].values()) == done["rounds"] <= len(value["token_ids"]):
        return "\"speculation\": the rounds do not go with 'token_ids' and 'tokens_per_round_histogram'"
    if len(done["judged_by_depth"]) != len(done["accepted_by_depth"]):
        return "\"speculation\": 'judged_by_depth' and 'accepted_by_depth' are not of one length"
    if done.get("looked_up_tokens", 0) > sum(done["drafted_by_depth"]):
        return '"speculation": more tokens were looked up than drafted'
    if done["rounds"] and not (done["verify_seconds"] > 0 and done["draft_seconds"] >= 0):
        return '"speculation": rounds without time for them'
    return None


def _both(first: Check, second: Check) -> Check:
    return lambda value: first(value) or second(value)


# By kind: what every row has, and what one has that did not end in an error.
_ROWS: Mapping[str, tuple[Check, Check]] = {
    "call": (_fields(_CALL), _measured),
    "pair": (_fields(_CALL), _fields({"here": _measured, "there": _measured})),
    "memory": (_fields({"method": string}), _fields({"peak_bytes": _count, "persistent_bytes": _count})),
    "difference": (_fields(_KEY), _fields({}, {"logit_margin": _optional(_number)})),
    "draws": (
        _fields({**_KEY, "session": _count}),
        _fields({"tokens": _count, "impossible": _count, "excess": _number, "variance": _number}),
    ),
    "verdict": (
        _fields(_KEY),
        _fields({"status": string, "detail": string, "program": string, "seconds": _optional(_number)}),
    ),
    "config": (_fields({"method": string}), _fields({"config": _by_name(_anything)})),
    "failed": (_fields({"method": string}), _fields({"error": string})),
}


def check_rows(
    rows: Iterable[Mapping[str, Any]],
    file: Path,
    methods: Collection[str],
    items: Collection[str],
    more: Mapping[str, Check] | None = None,
) -> None:
    """Look at the rows of a run before anything is made of them.

    Args:
        rows: as `run_folder` has read them, from the first one on.
        file: that they come from.
        methods: of the run.
        items: what the methods are asked, by name.
        more: fields that a finished call needs besides.

    Raises:
        ValueError: a row that a run cannot have written; the message names the line.
    """
    finished_call = _fields(more or {})
    for number, row in enumerate(rows, start=1):
        wrong = _wrong_in_row(row, finished_call) or _unknown(row, methods, items)
        if wrong is not None:
            raise damaged_row(file, number, wrong)


def _wrong_in_row(row: Mapping[str, Any], finished_call: Check) -> str | None:
    if wrong := _fields({"kind": string})(row):
        return wrong
    if row["kind"] not in _ROWS:
        return None
    every, finished = _ROWS[row["kind"]]
    if wrong := every(row):
        return wrong
    if "error" in row:
        return _fields({"error": string})(row)
    return finished(row) or (finished_call(row) if row["kind"] == "call" else None)


def _unknown(row: Mapping[str, Any], methods: Collection[str], items: Collection[str]) -> str | None:
    if row["kind"] not in _ROWS:
        return None
    if row["method"] not in methods:
        return f"this run has no method {_shown(row['method'])}"
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt not in items:
        return f"this run asks nothing that is called {_shown(prompt)}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# sessions

_ENVIRONMENT = _fields(
    {
        **dict.fromkeys(("model", "dtype", "attention_implementation", "device"), _optional(string)),
        "versions": _fields(dict.fromkeys(("torch", "transformers", "ssd_generation"), string), {"xllamacpp": string}),
    },
    {
        **dict.fromkeys(("cpu", "commit"), _optional(string)),
        **dict.fromkeys(("threads", "cpu_count"), _optional(_count)),
        "generation_config": _by_name(_anything),
    },
)


def _environment(value: Any) -> str | None:
    if wrong := _ENVIRONMENT(value):
        return wrong
    if "cpu" in value and not {"threads", "cpu_count"} <= value.keys():
        return "'threads' or 'cpu_count' is missing"
    return None


_SESSIONS = _fields({"sessions": _list_of(_both(_environment, _fields({}, {"session": _optional(_count)})))})


def check_sessions(document: Any, file: Path) -> None:
    """Look at what environment.json holds.

    Raises:
        ValueError: it is not what a run has written.
    """
    if wrong := _SESSIONS(document):
        raise ValueError(f"{str(file)!r} is not what a run has written: {wrong}. Take the file out, or choose another.")


# ----------------------------------------------------------------------------------------------------------------------
# summaries

_INTERVAL = dict.fromkeys(("mean", "low", "high"), _number)
_METHOD = _fields(
    {},
    {
        "ratio": _optional(
            _fields(
                {
                    "geometric_mean": _number,
                    "overall": _optional(_fields({"min": _number, "max": _number})),
                    "categories": _by_name(_fields({"median": _number})),
                }
            )
        ),
        "text": _optional(_fields({"identical": _count, "calls": _count})),
        "draws": _optional(_fields({"z": _optional(_number), "impossible": _count})),
    },
)
_SUMMARY = _fields(
    {
        "arguments": _fields(
            {"do_sample": _flag, "repeats": _count, "new_tokens": _count},
            {
                **dict.fromkeys(("task", "style"), string),
                **dict.fromkeys(("temperature", "top_p"), _optional(_number)),
                "shots": _optional(_count),
            },
        ),
        "environment": _optional(_environment),
        "prompts_per_category": _by_name(_count),
        "methods": _by_name(_METHOD),
    },
    {
        "other_environments": _optional(_list_of(_environment)),
        "plain": _METHOD,
        "quality": _by_name(_by_name(_fields(_INTERVAL, {"difference": _fields(_INTERVAL)}))),
        "complete": _flag,
    },
)


def check_summary(document: Any) -> None:
    """Look at a summary of methods, as far as runs are put side by side by it.

    Raises:
        ValueError: it is not what a run has written.
    """
    wrong = _fields({"kind": string})(document)
    if wrong is None and document["kind"] != "methods":
        wrong = f"it is of the kind {_shown(document['kind'])}, which compares checkouts, not methods"
    if wrong := wrong or _SUMMARY(document):
        raise ValueError(wrong)
