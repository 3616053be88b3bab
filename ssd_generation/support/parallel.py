"""Processes that compute one model together (tensor parallelism)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["broadcast", "mesh_of"]


def mesh_of(model: nn.Module) -> Any:
    """Return the `DeviceMesh` that a model's weights are sharded over (tensor parallelism); `None` without one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def broadcast(model: nn.Module, value: Any) -> Any:
    """Return the value of the first of the processes that compute one model together: they have to draft alike."""
    mesh = mesh_of(model)
    if mesh is None:
        return value
    group = mesh.get_group(mesh.ndim - 1)
    values = [value]
    torch.distributed.broadcast_object_list(values, torch.distributed.get_global_rank(group, 0), group)
    return values[0]
