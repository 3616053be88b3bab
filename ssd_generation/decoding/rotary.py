"""Rotary embeddings that change with the length of the text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RotarySwitch"]


class RotarySwitch:
    """Length of text at which a model's rotary embedding changes.

    Beyond that length, `dynamic` changes with every token, and `longrope` changes once (phi3 then recomputes its
    cache). All tokens of a pass get the embedding of its end, so no pass may cross that length.

    Args:
        model: the target model.

    Attributes:
        length: number of tokens; `sys.maxsize` where the embedding never changes.
        changes_once: whether the embedding is constant beyond that length.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or {}
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        self.length = sys.maxsize
        self.changes_once = kind == "longrope"
        if kind in ("dynamic", "longrope"):
            self.length = int(
                getattr(config, "original_max_position_embeddings", None)
                or parameters.get("original_max_position_embeddings")
                or config.max_position_embeddings
            )

    def __bool__(self) -> bool:
        """Tell whether there is such a length."""
        return self.length != sys.maxsize
