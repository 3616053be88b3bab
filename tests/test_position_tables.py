"""Position tables: texts are as long as plain `generate`'s, and the library reads no position after the last row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.passes import captured_target
from ssd_generation.forward.structure.positions import cut_to_table, most_positions
from ssd_generation.tuning.acceptance import why_not_judged
from tiny_models import FAMILIES, VOCAB, left_padded, prompt, tiny_model

ROWS = 40
FIXED = DraftingConfig(policy="fixed", max_draft_length=5)
REQUESTS: dict[str, Any] = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
    "nothing left out": SelfSpeculativeConfig(SkipConfig(), FIXED),  # all drafts are accepted, so they reach the limit
    "lookup": SelfSpeculativeConfig(lookup=True),
    "auto": "auto",
}
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_OTHERS: dict[str, Callable[[int], Any]] = {
    "gpt_neo": lambda rows: tf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        max_position_embeddings=rows,
        window_size=8,
    ),
    "codegen": lambda rows: tf.CodeGenConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=rows, n_ctx=rows, rotary_dim=4
    ),
    "biogpt": lambda rows: tf.BioGptConfig(**_SIZES, intermediate_size=48, max_position_embeddings=rows),
    "bert": lambda rows: tf.BertConfig(**_SIZES, intermediate_size=48, max_position_embeddings=rows, is_decoder=True),
    "roberta": lambda rows: tf.RobertaConfig(
        **_SIZES, intermediate_size=48, max_position_embeddings=rows + 1, is_decoder=True, pad_token_id=0
    ),
    "gpt_bigcode": lambda rows: tf.GPTBigCodeConfig(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=rows),
    "xglm": lambda rows: tf.XGLMConfig(
        vocab_size=VOCAB, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4, max_position_embeddings=rows
    ),
}
_LENGTH = {"gpt2": "n_positions", "gptj": "n_positions", "mpt": "max_seq_len"}
TABLES = (
    "gpt2",
    "opt",
    "opt-post-norm",
    "gptj",
    "mpt",
    "gpt_neo",
    "codegen",
    "biogpt",
    "bert",
    "roberta",
    "gpt_bigcode",
)


def of_rows(family: str, rows: int = ROWS) -> Any:
    if family in _OTHERS:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(_OTHERS[family](rows)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.5)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return enable_self_speculative(model)
    return enable_self_speculative(tiny_model(family, **{_LENGTH.get(family, "max_position_embeddings"): rows}))


class Written:
    """A streamer that stores the tokens it receives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("family", sorted({*FAMILIES, *_OTHERS}))
def test_tables_are_recognised(family: str) -> None:
    model = of_rows(family)
    most = most_positions(model)
    assert (most == ROWS) if family in TABLES else (most is None)
    if most is not None:
        with torch.no_grad():
            model(prompt(most))
            with pytest.raises((IndexError, RuntimeError)):
                model(prompt(most + 1))
        assert (cut_to_table(model, 64), cut_to_table(model, 64, 32), cut_to_table(model, 8, 32)) == (ROWS, 8, 8)
    else:
        assert cut_to_table(model, 64, 32) == 64


@pytest.mark.parametrize("family", TABLES)
def test_text_up_to_the_last_row(family: str) -> None:
    model = of_rows(family)
    for name, request in REQUESTS.items():
        for inputs in ({"input_ids": prompt(7).repeat(1, 2)}, {"input_ids": prompt(14, rows=2)}):
            # The last token has not been read, so it needs no position.
            options = {**inputs, "max_new_tokens": ROWS - 14 + 1, "do_sample": False}
            plain = model.generate(**options)
            assert plain.shape[1] == ROWS + 1
            assert torch.equal(plain, model.generate(**options, self_speculative=request)), name
            assert model.last_speculation.refusal is None
            if name == "nothing left out":
                assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "gpt_neo", "mpt"])
def test_beyond_it_the_error_is_plains(family: str) -> None:
    model = of_rows(family)
    for request in (None, *REQUESTS.values()):
        written = Written()
        with pytest.raises((IndexError, RuntimeError)) as raised:
            options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "streamer": written}
            model.generate(prompt(14), **options, self_speculative=request)
        if request is None:
            kind, before = raised.type, written.tokens
        else:
            assert raised.type is kind and written.tokens == before and len(before) == ROWS + 1


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "mpt"])
def test_ragged_batches(family: str) -> None:
    """Rows in the lead wait at the end of the table, since the passes of the others include them."""
    model = of_rows(family)
    for lengths in ([12, 7, 10], [5, 12]):
        options = {**left_padded(lengths), "max_new_tokens": ROWS - 12 + 1, "do_sample": False}
        plain = model.generate(**options)
        for request in REQUESTS.values():
            assert torch.equal(plain, model.generate(**options, self_speculative=request))
        ends = {**options, "eos_token_id": plain[0, -9:].tolist(), "pad_token_id": 0}
        assert torch.equal(model.generate(**ends), model.generate(**ends, self_speculative=REQUESTS["skip"]))


def test_rotary_positions_go_on() -> None:
    model = of_rows("llama")
    options = {"input_ids": prompt(14), "max_new_tokens": 60, "do_sample": False}
    plain = model.generate(**options)
    assert torch.equal(plain, model.generate(**options, self_speculative=REQUESTS["nothing left out"]))
    assert model.last_speculation.acceptance_rate == 1.0 and model.last_speculation.target_passes < 15


@pytest.mark.measures
@pytest.mark.parametrize("rows", [40, 50, 72])
def test_what_is_measured_ends_at_the_last_row(rows: int) -> None:
    model = of_rows("gpt2", rows)
    options = {"input_ids": prompt(14), "max_new_tokens": 20, "do_sample": False}
    plain = model.generate(**options)
    for request in ("auto", SelfSpeculativeConfig(SkipConfig(attention=[1]), exactness="bitwise")):
        assert torch.equal(plain, model.generate(**options, self_speculative=request))
    assert why_not_judged(model) is None


def test_short_tables_are_captured() -> None:
    model = of_rows("gpt2")
    passes = captured_target(model)
    assert passes is not None
    for length in (1, 2, 5, 24, 33):
        assert passes.program(length) is not None, passes.refusal
