"""`pipeline("text-generation")` with `self_speculative`, set per call or at construction: prompts, chats, batches,
streamers."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, TextStreamer, pipeline

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from tiny_models import tiny_model

CONFIG = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), DraftingConfig(policy="fixed", max_draft_length=4))
CHARACTERS = "#abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789"
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }} {{ message['content'] }} {% endfor %}"
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="#", padding_side="left")
    tokenizer.chat_template = TEMPLATE
    return {"model": enable_self_speculative(tiny_model()), "tokenizer": tokenizer}


CHAT = [{"role": "user", "content": "How are you"}]


@pytest.mark.parametrize("prompt", ["one prompt", ["several prompts", "of", "unequal length"], CHAT, [CHAT, CHAT]])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_at_call_and_at_construction(parts: dict[str, Any], prompt: Any, batch_size: int) -> None:
    pipe = pipeline("text-generation", **parts)
    expected = pipe(prompt, batch_size=batch_size, **GREEDY)
    parts["model"].last_speculation = None
    assert pipe(prompt, batch_size=batch_size, self_speculative=CONFIG, **GREEDY) == expected
    assert parts["model"].last_speculation.drafted_tokens > 0
    parts["model"].last_speculation = None
    constructed = pipeline("text-generation", **parts, self_speculative=CONFIG.to_dict())
    assert constructed(prompt, batch_size=batch_size, **GREEDY) == expected
    assert parts["model"].last_speculation.drafted_tokens > 0


def test_streaming(parts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline("text-generation", **parts)
    printed = []
    for request in (None, CONFIG):
        pipe("a prompt", streamer=TextStreamer(parts["tokenizer"]), self_speculative=request, **GREEDY)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_the_pipelines_own_default_is_sampling(parts: dict[str, Any]) -> None:
    pipe = pipeline("text-generation", **parts)
    texts = {
        pipe("a prompt", max_new_tokens=16, do_sample=True, self_speculative=CONFIG)[0]["generated_text"]
        for _ in range(4)
    }
    assert len(texts) > 1
