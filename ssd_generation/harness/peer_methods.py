"""Names of the methods that other runtimes run, each by a file of its own, and what a run tells these runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "LLAMA_CPP",
    "OPENVINO",
    "OPENVINO_PREFIX_CACHE",
    "PeerModel",
    "check_peer_method",
    "check_unused",
    "is_peer",
]

LLAMA_CPP = "llama.cpp-"
"""Beginning of the names of llama.cpp's methods; the name of a GGUF file follows."""
OPENVINO = "openvino-"
"""Beginning of the names of OpenVINO's methods; the name of a folder or file follows."""
OPENVINO_PREFIX_CACHE = OPENVINO + "prefix-cache-"
"""Beginning of the names of those that find the prompt in their prefix cache."""

# What a method needs, and the option that names it.
_NEEDS = {
    LLAMA_CPP: ("a GGUF file", "--gguf", ".gguf"),
    OPENVINO: ("a folder in OpenVINO's format, or a GGUF file,", "--openvino", ""),
}


@dataclass(frozen=True)
class PeerModel:
    """Model of a method that another runtime runs, in a process of its own.

    Attributes:
        peer: the runtime, `"llama.cpp"` or `"openvino"`.
        path: the file or folder that it loads.
        prefix_cache: whether it finds the prompt of a call in its cache, from an earlier call.
    """

    peer: str
    path: str
    prefix_cache: bool = False


def is_peer(name: str) -> bool:
    """Tell if another runtime runs the method of that name."""
    return name.startswith(tuple(_NEEDS))


def check_peer_method(name: str, known: Mapping[str, PeerModel]) -> None:
    """Raise if another runtime's method has no model.

    Args:
        name: of the method.
        known: the models, by the method's name.

    Raises:
        ValueError: it is not among them.
    """
    if name in known:
        return
    kind = _kind(name)
    what, option, ending = _NEEDS[kind]
    others = [other for other in known if _kind(other) == kind]
    there = f"; those of {option} here: {', '.join(others)}" if others else ""
    stem = name.removeprefix(OPENVINO_PREFIX_CACHE).removeprefix(kind) or "NAME"
    raise ValueError(
        f"The method {name!r} needs {what} of that name{there}. Name it in `ssd benchmark` with {option} "
        f"…/{stem}{ending}."
    )


def check_unused(names: Sequence[str], known: Mapping[str, PeerModel]) -> None:
    """Raise if a model was given for no method: nobody gives a file for nothing.

    Args:
        names: of the methods.
        known: the models, by the method's name.

    Raises:
        ValueError: none of a model's methods is among them.
    """
    methods: dict[tuple[str, str], list[str]] = {}
    for name, model in known.items():
        methods.setdefault((model.peer, model.path), []).append(name)
    for own in methods.values():
        if not any(name in names for name in own):
            option = _NEEDS[_kind(own[0])][1]
            raise ValueError(
                f"The method {' or '.join(map(repr, own))} of {option} is not among --methods. Name it there, or leave "
                f"{option} out."
            )


def _kind(name: str) -> str:
    return next(kind for kind in _NEEDS if name.startswith(kind))
