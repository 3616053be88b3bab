"""Attributes that a model's own code sets on its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["left_as_it_was"]

_LEFT = (type(None), bool, int, float, str, tuple, torch.Tensor)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore the state that calls leave on a model for the next one, such as the position of text after an image."""
    before = [
        (
            module,
            {key: value for key, value in vars(module).items() if isinstance(value, _LEFT)},
            dict(module._buffers)
            if isinstance(module._buffers, dict)
            else {},  # compressed-tensors has a class of its own
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).update(attributes)
            module._buffers.update(buffers)
