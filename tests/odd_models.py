"""Tiny seeded random models of families whose passes over several tokens are not what passes over one are, or not in
every layout: the check of the model itself (model_check.py) has to find out, nobody tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 64

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "decoder_layers": 3,
    "encoder_layers": 1,
    "num_hidden_layers": 3,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}


def _decoder(name: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    """The decoder of an encoder-decoder family as a language model of its own."""

    def make() -> PreTrainedModel:
        config = getattr(tf, f"{name}Config")(**{**_DECODER, **changes})
        return getattr(tf, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]

    return make


def _trocr() -> PreTrainedModel:
    config = tf.TrOCRConfig(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        cross_attention_hidden_size=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return tf.TrOCRForCausalLM(config)


def _doge() -> PreTrainedModel:
    config = tf.DogeConfig(**_SMALL, keep_window_size=128, is_moe=True, num_experts=16, num_experts_per_tok=4)
    return tf.DogeForCausalLM(config)


def _openai_gpt() -> PreTrainedModel:
    config = tf.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=3, n_head=4)
    return tf.OpenAIGPTLMHeadModel(config)


# Positions are counted from the length of the cache: all rows of a batch have to take the same number of tokens.
COUNT_FROM_THE_CACHE: dict[str, Callable[[], PreTrainedModel]] = {
    "bart": _decoder("Bart"),
    "bigbird_pegasus": _decoder("BigBirdPegasus"),
    "blenderbot": _decoder("Blenderbot"),
    "blenderbot-small": _decoder("BlenderbotSmall"),
    "marian": _decoder("Marian"),
    "mbart": _decoder("MBart"),
    "mvp": _decoder("Mvp"),
    "pegasus": _decoder("Pegasus"),
    "plbart": _decoder("PLBart"),
    "trocr": _trocr,
    "whisper": _decoder(
        "Whisper",
        max_target_positions=128,
        max_source_positions=16,
        num_mel_bins=8,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
}
# A pass over several tokens is another function than passes over one, or there is none.
NOT_SEVERAL_AT_ONCE: dict[str, Callable[[], PreTrainedModel]] = {
    "doge with experts": _doge,
    "openai-gpt": _openai_gpt,
}


def odd_model(make: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """A model whose random weights make its text varied and every layer matter."""
    torch.manual_seed(seed)
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                std = 1.0 if any(part in name for part in ("embed", "wte", "wpe")) else 1.5 / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, std, generator=generator)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    model.eval()
    settings = model.generation_config
    assert settings is not None
    settings.pad_token_id = 0
    settings.use_cache = True
    for name in ("eos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens"):
        setattr(settings, name, None)
    return model
