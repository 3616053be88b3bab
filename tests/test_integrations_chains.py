"""Programs that call a model for their user (pipelines, LangChain, smolagents): the same text, and drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from other_programs import DRAFTS, Recorded, plain_and_drafting, save_tiny
from ssd_generation import enable_self_speculative

pytestmark = pytest.mark.integrations

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


def pipelines() -> tuple[Any, Any]:
    plain, drafting, tokenizer = plain_and_drafting()
    found = []
    for model in (plain, drafting):
        found.append(pipeline("text-generation", model, tokenizer=tokenizer, max_new_tokens=24, do_sample=False))
    return found[0], found[1]


def test_langchain_invokes_and_streams() -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    plain, drafting = pipelines()
    texts: list[list[str]] = []
    for pipe in (plain, drafting):
        calls = Recorded(pipe.model)
        # Arguments that a chain passes to each call, as on LangChain's own pages.
        llm = langchain.HuggingFacePipeline(pipeline=pipe, pipeline_kwargs={"max_new_tokens": 24, "do_sample": False})
        texts.append([llm.invoke("The sky is"), "".join(llm.stream("The sky is")), *llm.batch(["One", "Two, three"])])
    assert texts[0] == texts[1] and all(texts[0])
    assert calls.all_drafted and len(calls.texts) >= 3


def test_langchain_chats() -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    texts = []
    for pipe in pipelines():
        calls = Recorded(pipe.model)
        llm = langchain.HuggingFacePipeline(pipeline=pipe, pipeline_kwargs={"max_new_tokens": 24, "do_sample": False})
        chat = langchain.ChatHuggingFace(llm=llm, tokenizer=pipe.tokenizer)
        texts.append(chat.invoke([("user", "Hello")]).content)
    assert texts[0] == texts[1]
    assert calls.all_drafted


def test_smolagents(tmp_path: Path) -> None:
    smolagents = pytest.importorskip("smolagents")
    folder = save_tiny(tmp_path)
    texts = []
    for draws in (False, True):
        llm = smolagents.TransformersModel(folder, device_map="cpu", torch_dtype="float32", max_new_tokens=24)
        if draws:
            enable_self_speculative(llm.model, default=DRAFTS, always=True)
        calls = Recorded(llm.model)
        said = llm.generate([smolagents.ChatMessage(role="user", content=[{"type": "text", "text": "Hello"}])])
        texts.append(said.content)
    assert texts[0] == texts[1]
    assert calls.all_drafted
