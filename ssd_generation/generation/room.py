"""Memory that the rows of a batch take beyond transformers' own decoding, estimated before they are decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..forward.structure.sublayers import input_device
from ..support.devices import is_asynchronous
from ..support.memory import available_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = ["why_no_room"]

_SCORES = 4
"""Bytes of a score, float32; logits have the model's dtype."""


def why_no_room(model: PreTrainedModel, config: SelfSpeculativeConfig, batch: int) -> str | None:
    """Return why verifying drafts of so many rows would take more memory than there is; `None` where it would not.

    A verification pass gives logits for each drafted token of each row, plain decoding for one token of each. (Buffers
    of the KV cache take 3 % more than transformers' own.)

    Args:
        model: the target model.
        config: the config to draft by.
        batch: number of rows, B.
    """
    available, longest = _available(input_device(model)), config.longest_draft
    if available is None:
        return None
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    needed = batch * longest * vocabulary * (model.dtype.itemsize + _SCORES)
    if needed <= available:
        return None
    return (
        f"logits for {longest} drafted tokens of each of {batch} rows take {needed / 1e9:.1f} GB, and "
        f"{available / 1e9:.1f} GB of memory are free (fewer rows, or a smaller `max_draft_length`, take less)"
    )


def _available(device: torch.device) -> int | None:
    """Return the bytes of memory that are free for tensors on a device; `None` where that is unknown."""
    if device.type == "cuda" and is_asynchronous(device):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_bytes() if device.type == "cpu" else None
