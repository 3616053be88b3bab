"""Devices that compute while the host goes on: what waits for them, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["is_asynchronous", "sent", "wait_for"]

ASYNCHRONOUS = {"cuda"}
"""Types of devices that `torch.cuda` speaks to. The tests add one that they pretend to have."""


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, so that its own clock does not time it."""
    return device.type in ASYNCHRONOUS


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; at once where the host does not run ahead of it."""
    if is_asynchronous(device):
        torch.cuda.synchronize(device)


def sent(numbers: torch.Tensor | Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers of the host on a device, without waiting for what it is doing.

    A copy from any memory makes the host wait for the device; one from pinned memory takes its place among what the
    device has to do. torch does not use that memory again before.

    Args:
        numbers: a tensor, wherever it is, or whole numbers.
        device: where they are to be.
    """
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.tensor(numbers, dtype=torch.long, device="cpu")
    if numbers.device.type == "cpu" and is_asynchronous(device):
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)
