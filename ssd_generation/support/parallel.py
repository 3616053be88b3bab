"""Processes that compute one model together (tensor parallel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["broadcast", "mesh_of"]


def mesh_of(model: nn.Module) -> Any:
    """The processes over which the weights of a model are spread (tensor parallel), as a `DeviceMesh`; or `None`."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def broadcast(model: nn.Module, answer: Any) -> Any:
    """The answer of the first of the processes that compute one model together: they have to draft alike."""
    mesh = mesh_of(model)
    if mesh is None:
        return answer
    group = mesh.get_group(mesh.ndim - 1)
    answers = [answer]
    torch.distributed.broadcast_object_list(answers, torch.distributed.get_global_rank(group, 0), group)
    return answers[0]
