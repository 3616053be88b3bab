"""Text constrained by third-party libraries: their matchers follow a single text, token by token."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ssd_generation import (
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from tiny_models import VOCAB, prompt, tiny_model

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
DRAFTS: dict[str, Any] = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "int8": SelfSpeculativeConfig(precision=PrecisionConfig(default="int8", head="int8"), drafting=FIXED),
    "lookup": SelfSpeculativeConfig(lookup=LookupConfig(min_ngram=1), drafting=FIXED),
    "auto": "auto",
}
EOS = 2
CHARACTERS = (string.ascii_lowercase + string.digits + '{}[]":,. -_').ljust(VOCAB - 3, "~")
TOKENS = ["<pad>", "<bos>", "<eos>", *(f"{c}{n}" if c == "~" else c for n, c in enumerate(CHARACTERS))]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "sizes": {"type": "array", "items": {"enum": [7, 10, 42]}, "minItems": 2, "maxItems": 3},
        "kind": {"enum": ["cat", "dog", "cow"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


def by_xgrammar() -> LogitsProcessor:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as Matching

    about = xgrammar.TokenizerInfo(TOKENS, vocab_size=VOCAB, stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(about, max_threads=1)
    return Matching(compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False))


def by_outlines() -> LogitsProcessor:
    pytest.importorskip("outlines")
    from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    vocabulary = Vocabulary(EOS, {token: [number] for number, token in enumerate(TOKENS) if number > EOS})
    regex = build_regex_from_schema(json.dumps(SCHEMA), "")
    return OutlinesCoreLogitsProcessor(Index(regex, vocabulary), "torch")


LIBRARIES: dict[str, Callable[[], LogitsProcessor]] = {"xgrammar": by_xgrammar, "outlines": by_outlines}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enable_self_speculative(tiny_model())


def decoded(model: PreTrainedModel, library: str, rows: int, request: Any, **how: Any) -> list[list[int]]:
    torch.manual_seed(1)
    text: list[list[int]] = model.generate(
        prompt(9, rows),
        max_new_tokens=70,
        eos_token_id=EOS,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([LIBRARIES[library]()]),
        self_speculative=request,
        **how,
    )[:, 9:].tolist()
    return text


@pytest.mark.filterwarnings("ignore")  # the libraries' own warnings
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_json_by_a_schema(model: PreTrainedModel, library: str, how: dict[str, Any], rows: int, draft: str) -> None:
    plain = decoded(model, library, rows, None, **how)
    assert decoded(model, library, rows, DRAFTS[draft], **how) == plain
    for row in plain:
        found = json.loads("".join(TOKENS[token] for token in row if token > EOS))
        assert found["kind"] in ("cat", "dog", "cow") and 2 <= len(found["sizes"]) <= 3
