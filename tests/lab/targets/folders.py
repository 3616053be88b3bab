"""Trial of one form as a folder: exported and loaded by transformers, and served."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_generation.config import Costs, DraftingConfig, SelfSpeculativeConfig
from ssd_generation.harness.texts import encode_prompt
from ssd_generation.serving import export_model, find_model

from ..served import served, ssd_serve, streamed
from ..tables import CRASHED, WRONG, YES, judged, short

__all__ = ["FOLDERS", "try_folder"]

FOLDERS = {"exported": "exported, `from_pretrained`", "served": "`ssd serve`"}
"""Ways to use a folder, and the headings of their columns."""

_QUESTION, _NEW_TOKENS = "Why is the sky blue?", 48
_CONFIG = SelfSpeculativeConfig(
    lookup=True,
    precision="int4",
    drafting=DraftingConfig(policy="fixed", max_draft_length=4),
    costs=Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)]),
)


def try_folder(model: Any, of_tokenizer: Path) -> dict[str, str]:
    """Save a model, and compare the texts that its folder gives with plain `generate`'s.

    Args:
        model: a transformers model in some form.
        of_tokenizer: folder with its tokenizer.

    Returns:
        Outcomes by column of `FOLDERS`, as in `Row.cells`.
    """
    if hasattr(model, "peft_config"):
        return dict.fromkeys(FOLDERS, "An adapter is no folder of a model: merge it for good")
    with tempfile.TemporaryDirectory() as scratch:
        saved, exported = Path(scratch) / "model", Path(scratch) / "drafting"
        try:
            model.save_pretrained(saved)
            tokenizer: Any = AutoTokenizer.from_pretrained(of_tokenizer)
            tokenizer.save_pretrained(saved)
            plain: Any = AutoModelForCausalLM.from_pretrained(saved, dtype="auto").eval()
        except Exception as error:
            return dict.fromkeys(FOLDERS, f"It cannot be saved and loaded: {short(f'{type(error).__name__}: {error}')}")
        options = {"max_new_tokens": _NEW_TOKENS, "do_sample": False}
        inputs = encode_prompt(tokenizer, _QUESTION, True)
        text = plain.generate(**inputs, **options)
        found = {
            "exported": _caught(lambda: _exported(saved, exported, text, {**inputs, **options})),
            "served": "The extra `serve` is not installed",
        }
        if find_spec("uvicorn") is not None:
            answer = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            found["served"] = _caught(lambda: _served(exported, answer))
        return found


def _caught(call: Callable[[], str]) -> str:
    try:
        return call()
    except Exception as error:
        return short(f"{CRASHED}{type(error).__name__}: {error}")


def _exported(saved: Path, exported: Path, text: torch.Tensor, arguments: dict[str, Any]) -> str:
    export_model(find_model(str(saved)), exported, _CONFIG, link=True)
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype="auto", trust_remote_code=True).eval()
    return judged(model, text, lambda: model.generate(**arguments))[0]


def _served(exported: Path, answer: str) -> str:
    with served(ssd_serve(str(exported))) as server:
        found = streamed(server, exported.name, _QUESTION, _NEW_TOKENS)
        if found != answer:
            return WRONG
        said = server.wait_for("tokens/s)")  # the line of a request follows its answer
        return YES if "drafted tokens" in said else f"Nothing was drafted: {said.strip().splitlines()[-1]}"
