"""Other runtimes as peers of this library's methods, in separate processes: llama.cpp and OpenVINO GenAI."""

from .llama_cpp import CONTEXT, LlamaCpp
from .models import describe_model, gguf_models, openvino_models
from .openvino import OpenVino
from .peer import Peer

__all__ = ["CONTEXT", "PEERS", "LlamaCpp", "OpenVino", "Peer", "describe_model", "gguf_models", "openvino_models"]

PEERS: dict[str, type[Peer]] = {"llama.cpp": LlamaCpp, "openvino": OpenVino}
"""Runtimes by their name in `PeerModel.peer`."""
