"""OpenVINO GenAI as a peer: the same prompts, as tokens, decoded by its `LLMPipeline` on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..peer_methods import PeerModel
from .peer import Peer

__all__ = ["OpenVino"]

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class OpenVino(Peer):
    """Processes of OpenVINO, see `Peer`. A model with a prefix cache has another process than one without."""

    name, package, module, extra = "OpenVINO GenAI", "openvino-genai", "openvino_genai", "openvino"
    worker = Path(__file__).resolve().with_name("openvino_worker.py")

    def settings(self, model: PeerModel) -> dict[str, Any]:
        return {"prefix_cache": model.prefix_cache, "precision": None if self.dtype is None else _NAMES.get(self.dtype)}
