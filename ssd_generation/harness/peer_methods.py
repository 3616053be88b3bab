"""Names of the methods that other runtimes run, and the model of each."""

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
"""Beginning of the names of OpenVINO's methods that find the prompt in their prefix cache."""

# By kind of method: the file or folder that it needs, the option that names it, and the file's ending.
_NEEDS = {
    LLAMA_CPP: ("a GGUF file", "--gguf", ".gguf"),
    OPENVINO: ("a folder in OpenVINO's format, or a GGUF file,", "--openvino", ""),
}


@dataclass(frozen=True)
class PeerModel:
    """Model of a method that another runtime runs, in a separate process.

    Attributes:
        peer: the runtime, `"llama.cpp"` or `"openvino"`.
        path: file or folder that the runtime loads.
        prefix_cache: whether the runtime finds the prompt of a call in its cache, from an earlier call.
    """

    peer: str
    path: str
    prefix_cache: bool = False


def is_peer(name: str) -> bool:
    """Tell whether another runtime runs the method of that name."""
    return name.startswith(tuple(_NEEDS))


def check_peer_method(name: str, known: Mapping[str, PeerModel]) -> None:
    """Raise if another runtime's method has no model.

    Args:
        name: name of the method.
        known: models by method name.

    Raises:
        ValueError: the method is not among them.
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
    """Raise if a given model is used by none of the methods.

    Args:
        names: names of the methods.
        known: models by method name.

    Raises:
        ValueError: none of a model's methods is among `names`.
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
