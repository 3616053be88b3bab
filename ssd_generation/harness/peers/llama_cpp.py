"""llama.cpp as a peer: the same prompts, as tokens, decoded from a GGUF file by the wheel `xllamacpp`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..peer_methods import PeerModel
from .peer import Peer

__all__ = ["CONTEXT", "LlamaCpp"]

CONTEXT = 4096
"""Size of the context in tokens, prompt and answer together."""


class LlamaCpp(Peer):
    """Processes of llama.cpp, see `Peer`. To continue, it excludes the end of sequence from the choice of tokens.

    Args:
        dtype: unused: the GGUF file determines the computation.
        context: size of the context in tokens, prompt and answer together.
    """

    name, package, module, extra = "llama.cpp", "xllamacpp", "xllamacpp", "llama-cpp"
    worker = Path(__file__).resolve().with_name("llama_cpp_worker.py")

    def __init__(self, dtype: torch.dtype | None = None, context: int = CONTEXT) -> None:
        super().__init__(dtype)
        self.context = context

    def settings(self, model: PeerModel) -> dict[str, Any]:
        return {"context": self.context, "prefix_cache": model.prefix_cache}

    def check_room(self, prompt: Sequence[int], new_tokens: int) -> None:
        if len(prompt) + new_tokens > self.context:
            raise ValueError(
                f"The prompt has {len(prompt)} tokens, which leaves no room for {new_tokens} new ones in the "
                f"{self.context} of llama.cpp's context."
            )
