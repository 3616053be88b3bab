"""Small tensor functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["argmax", "fingerprint_of", "inner_tensors", "place_of", "rest_of", "stored_bytes", "version_of"]


_ROWS = 8
"""Rows of scores that are converted at a time."""


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return `scores.argmax(dim=-1)`, the first of equals.

    On the CPU NumPy's is used, which has the same rule for equals and NaN and takes a tenth of the time: over a large
    vocabulary torch's costs as much as a small layer. Numbers of 16 bits are converted some rows at a time, into memory
    that is used again.
    """
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return scores.argmax(dim=-1)
    scores = scores.detach()
    if scores.dtype == torch.float32:
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    rows = scores.reshape(-1, scores.shape[-1])
    parts = [torch.from_numpy(part.float().numpy().argmax(axis=-1)) for part in torch.split(rows, _ROWS)]
    return torch.cat(parts).view(scores.shape[:-1])


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors inside one of a subclass (torchao's, quanto's), or any other tensor itself."""
    names = _parts(tensor)[0]
    if not names:
        yield tensor
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from inner_tensors(inner)


def _parts(tensor: torch.Tensor) -> tuple[list[str], Any]:
    """Return the names of the tensors inside, and the remaining state, by torch's protocol for subclasses."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [], None
    names, rest = flatten()
    return list(names), rest


def rest_of(tensor: torch.Tensor) -> Any:
    """Return the state of a subclass's tensor besides the tensors inside: settings; `None` for any other tensor."""
    return _parts(tensor)[1]


_PLAIN = (torch.nn.Parameter, torch.Tensor)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return place and layout of a tensor's numbers: address, shape, strides, type and device.

    It changes where a kernel that was given the tensor before would read other numbers than the tensor has now. For a
    tensor that holds others, those of all of them.
    """
    if type(tensor) not in _PLAIN and _parts(tensor)[0]:
        return tuple(map(place_of, inner_tensors(tensor)))
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a class that has no numbers at an address
        address = 0
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of writes into a tensor that torch knows of; -1 where it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def fingerprint_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that changes with a tensor's identity, place or layout, and with every write into it."""
    return id(tensor), place_of(tensor), version_of(tensor)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes, whatever its shape and type are declared to be."""
    return sum(inner.numel() * inner.element_size() for inner in inner_tensors(tensor))
