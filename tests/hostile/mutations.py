"""Malformed inputs made from sound ones, by a seeded generator, so that a failure can be reproduced."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ODD_STRINGS = [
    "",
    " ",
    "x" * 10_000,
    "\x1b]0;title\x07\x1b[2J",
    "\u202egnirts",
    "half \ud800",
    "nul \x00",
    "[/red]",
    "[bold",
    "a|b<script>",
    "$\\frac{",
    "../../outside",
    "/dev/zero",
    "~nobody-of-that-name/x",
    "auto",
    "int8",
    "1",
    "nan",
    "line\nline\r",
    "%s {0} {x}",
    ":smile:",
]
_ODD_NUMBERS = [0, -1, 1, 2, 31, 2**31, 2**63, -(2**63), 10**40, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324, 1e-9]
_NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]
_OTHERS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: False,
    list,
    dict,
    lambda: [[]],
    lambda: [None],
    lambda: {"": None},
    lambda: nested(100),
    lambda: [0] * 50_000,
    lambda: {str(i): i for i in range(5_000)},
    lambda: [[i, i + 1] for i in range(2_000)],
]


def nested(depth: int) -> Any:
    """Return lists and objects alternately nested in each other."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def odd_value(rng: random.Random) -> Any:
    """Return a value that is hardly valid in the place where it will be put."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(_ODD_STRINGS)
    if kind < 0.7:
        return rng.choice(_ODD_NUMBERS + (_NO_NUMBERS if rng.random() < 0.3 else []))
    return rng.choice(_OTHERS)()


def _places(document: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [place]
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in list(children)[:40]:
        if len(place) < 6:
            found += _places(value, (*place, key))
    return found


def mutated(rng: random.Random, document: Any) -> Any:
    """Return a copy of a document with one to three changes."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(document)
        place = rng.choice(places[1:] or places)
        if not place:
            return odd_value(rng)
        parent = document
        for key in place[:-1]:
            parent = parent[key]
        last, change = place[-1], rng.random()
        if change < 0.55:
            parent[last] = odd_value(rng)
        elif change < 0.7:
            del parent[last]
        elif change < 0.8:
            parent[last] = [parent[last]]
        elif change < 0.9 and isinstance(parent, dict):
            parent[rng.choice([*_ODD_STRINGS, str(last).upper(), f"{last}s"])] = odd_value(rng)
        else:
            other: Any = document
            for key in rng.choice(places):
                other = other[key]
            parent[last] = copy.deepcopy(other)
    return document


def as_bytes(rng: random.Random, document: Any) -> bytes:
    """Return a document as the bytes of a file, often damaged."""
    text = json.dumps(document)
    change = rng.random()
    if change < 0.5:
        return text.encode()
    if change < 0.56:
        return b"\xef\xbb\xbf" + text.encode()
    if change < 0.6:
        return text.encode("utf-16")
    if change < 0.66:
        return text[: rng.randrange(len(text) + 1)].encode()
    if change < 0.7:
        return (text + text).encode()
    if change < 0.74:
        return b"[" * rng.choice([70, 990, 100_000])
    if change < 0.77:
        return b'{"a":' * rng.choice([70, 990, 100_000]) + b"1"
    if change < 0.8:
        return ("9" * rng.choice([400, 5_000, 100_000])).encode()
    if change < 0.83:
        return text.replace("{", '{"skip": {}, "skip": {}, ', 1).encode()
    if change < 0.86:
        return b""
    if change < 0.88:
        return b" " * rng.choice([2**20, 2**21])
    spoilt = bytearray(text.encode())
    for _ in range(rng.randrange(1, 8)):
        if spoilt:
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
    return bytes(spoilt)


def put(rng: random.Random, path: Path, content: bytes) -> Path:
    """Write a file of this content, or now and then create something else there; return the path to use."""
    kind = rng.random()
    if kind < 0.88:
        path.write_bytes(content)
    elif kind < 0.9:
        os.mkfifo(path)
    elif kind < 0.92:
        path.symlink_to(path)
    elif kind < 0.94:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/dev/tty", "/proc/self/mem", "/proc/kcore", "/nowhere"]))
    elif kind < 0.955:
        path.mkdir()
    elif kind < 0.97:
        with socket.socket(socket.AF_UNIX) as server:
            try:
                server.bind(str(path))
            except OSError:  # the path is too long for a socket
                path.write_bytes(content)
    elif kind < 0.985:
        return path.with_name("n" * 300)
    else:
        return Path(str(path) + "\0")
    return path
