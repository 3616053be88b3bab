"""Tiny model and tokenizer for other programs, and a record of the calls of `generate` that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ssd_generation import DraftingConfig, PrecisionConfig, SelfSpeculativeConfig, enable_self_speculative
from test_cli import tiny_tokenizer
from tiny_models import even_model

__all__ = ["DRAFTS", "Recorded", "plain_and_drafting", "save_tiny", "tiny_pair"]

# With these copies a tiny model's drafts are mostly accepted, and lookup finds something too.
DRAFTS = SelfSpeculativeConfig(
    precision=PrecisionConfig("int8", head="int8"),
    lookup=True,
    drafting=DraftingConfig(policy="fixed", max_draft_length=3),
)


def tiny_pair() -> tuple[Any, Any]:
    """Return a model and its tokenizer, with the same weights each time."""
    tokenizer = tiny_tokenizer()
    state = torch.random.get_rng_state()
    model = even_model("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    torch.random.set_rng_state(state)
    model.config._name_or_path = "tiny"
    return model, tokenizer


def plain_and_drafting() -> tuple[Any, Any, Any]:
    """Return the same model twice, the second one drafting in every call, and the tokenizer."""
    (model, tokenizer), (other, _) = tiny_pair(), tiny_pair()
    return model, enable_self_speculative(other, default=DRAFTS, always=True), tokenizer


def save_tiny(folder: Path) -> str:
    """Save the tiny model and its tokenizer to a folder; return its path."""
    model, tokenizer = tiny_pair()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Recorded:
    """Record of all calls of a model's `generate`: the texts returned, and numbers of drafted and accepted tokens."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.texts: list[Any] = []
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.refusals: list[str | None] = []
        generate = model.generate

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = generate(*args, **kwargs)
            tokens = output if isinstance(output, torch.Tensor) else output.sequences
            self.texts.append(tokens.tolist())
            last = getattr(model, "last_speculation", None)
            if last is not None:
                self.drafted.append(last.drafted_tokens)
                self.accepted.append(last.accepted_tokens)
                self.refusals.append(last.refusal)
            return output

        model.generate = recorded

    @property
    def all_drafted(self) -> bool:
        return bool(self.drafted) and all(self.drafted) and not any(self.refusals)
