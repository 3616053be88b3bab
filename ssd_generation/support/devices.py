"""Devices that compute while the host continues: telling them apart, and waiting for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["is_asynchronous", "sent", "wait_for"]

ASYNCHRONOUS = {"cuda"}
"""Types of devices that `torch.cuda` serves. The tests add that of their mock GPU."""


def is_asynchronous(device: torch.device) -> bool:
    """Tell whether the host runs ahead of a device, so that its own clock does not time it."""
    return device.type in ASYNCHRONOUS


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished its queued work; return at once where the host does not run ahead of it."""
    if is_asynchronous(device):
        torch.cuda.synchronize(device)


def sent(numbers: torch.Tensor | Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to a device, without waiting for its queued work.

    A copy from pageable memory makes the host wait for the device; one from pinned memory is queued on the device.
    torch does not reuse that memory before the copy is done.

    Args:
        numbers: a tensor on any device, or whole numbers.
        device: target device.
    """
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.tensor(numbers, dtype=torch.long, device="cpu")
    if numbers.device.type == "cpu" and is_asynchronous(device):
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)
