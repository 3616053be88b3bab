"""Tiny seeded random models of families whose passes over several tokens differ from passes over one, at least in some
layouts. The model check (model_check.py) has to find this out by running the model."""

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
    """Return a maker of the decoder of an encoder-decoder family, as a language model of its own."""

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


def _prophetnet() -> PreTrainedModel:
    config = tf.ProphetNetConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_encoder_layers=3,  # its name for the number of layers
        num_decoder_layers=3,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        is_decoder=True,
        is_encoder_decoder=False,
        add_cross_attention=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return tf.ProphetNetForCausalLM(config)


def _moshi(window: int) -> Callable[[], PreTrainedModel]:
    """Return a maker of a Moshi: its mask is that of full attention, but its cache retains only a window."""

    def make() -> PreTrainedModel:
        text = {key: value for key, value in _SMALL.items() if key != "intermediate_size"}
        return tf.MoshiForCausalLM(tf.MoshiConfig(**text, ffn_dim=48, head_dim=8, sliding_window=window))

    return make


def _doge_dense() -> PreTrainedModel:
    model = tf.DogeForCausalLM(tf.DogeConfig(**_SMALL, keep_window_size=24))
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    return model


_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 8,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}


def _kosmos2_5() -> PreTrainedModel:
    text = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "embed_dim": 32,
        "layers": 3,
        "ffn_dim": 48,
        "attention_heads": 4,
        "dropout": 0.0,
        "scale_embedding": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 16,
        "patch_embed_hidden_size": 12,
        "intermediate_size": 16,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_num_patches": 8,
    }
    config = tf.Kosmos2_5Config(text_config=text, vision_config=vision, latent_query_num=4, tie_word_embeddings=False)
    return tf.Kosmos2_5ForConditionalGeneration(config)


def _exaone4_5() -> PreTrainedModel:
    text = {"model_type": "exaone4", **_SMALL, "head_dim": 8, "sliding_window": None}
    config = tf.Exaone4_5_Config(
        text_config={**text, "layer_types": ["full_attention"] * 4},
        vision_config=_VISION,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
    )
    return tf.Exaone4_5_ForConditionalGeneration(config)


def _hyperclovax_vision_v2() -> PreTrainedModel:
    config = tf.HyperCLOVAXVisionV2Config(
        text_config={"model_type": "hyperclovax", **_SMALL, "head_dim": 8},
        vision_config={"model_type": "qwen2_5_vl_vision", **_VISION},
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
    )
    return tf.HyperCLOVAXVisionV2ForConditionalGeneration(config)


def _moss_transcribe_diarize() -> PreTrainedModel:
    audio = {
        "num_mel_bins": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "hidden_size": 16,
        "max_source_positions": 8,
    }
    config = tf.MossTranscribeDiarizeConfig(
        text_config={"model_type": "qwen3", **_SMALL, "head_dim": 8}, audio_config=audio, audio_token_id=VOCAB - 1
    )
    return tf.MossTranscribeDiarizeForConditionalGeneration(config)


def _unlimited_ocr(window: int) -> Callable[[], PreTrainedModel]:
    """Return a maker of an Unlimited-OCR: its sliding cache retains nothing that a crop could restore."""

    def make() -> PreTrainedModel:
        encoder = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        }
        sam = {
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "window_size": 2,
            "global_attn_indexes": [0],
            "mlp_dim": 16,
            "downsample_channels": [8, 16],
        }
        text = {
            **_SMALL,
            "num_key_value_heads": 4,
            "sliding_window": window,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
        }
        config = tf.UnlimitedOcrConfig(
            text_config=text, vision_config={"sam_config": sam, "encoder_config": encoder}, image_token_id=VOCAB - 1
        )
        return tf.UnlimitedOcrForConditionalGeneration(config)

    return make


def _paligemma() -> PreTrainedModel:
    """Make a PaliGemma: it adds one to its positions outside the pass, where a captured pass misses it."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "vision_use_head": False,
    }
    config = tf.PaliGemmaConfig(
        vision_config=vision,
        text_config=tf.GemmaConfig(**_SMALL, head_dim=8, tie_word_embeddings=False),
        image_token_index=VOCAB - 1,
        projection_dim=32,
        hidden_size=32,
        tie_word_embeddings=False,
    )
    return tf.PaliGemmaForConditionalGeneration(config)


# Families that this version of transformers does not have yet.
_MISSING = {
    name
    for name, config in {
        "exaone4_5": "Exaone4_5_Config",
        "hyperclovax_vision_v2": "HyperCLOVAXVisionV2Config",
        "kosmos-2.5": "Kosmos2_5Config",
        "moss_transcribe_diarize": "MossTranscribeDiarizeConfig",
        "unlimited_ocr": "UnlimitedOcrConfig",
        "unlimited_ocr, longer than its window": "UnlimitedOcrConfig",
    }.items()
    if not hasattr(tf, config)
}


def _there(models: dict[str, Callable[[], PreTrainedModel]]) -> dict[str, Callable[[], PreTrainedModel]]:
    return {name: make for name, make in models.items() if name not in _MISSING}


# Positions are counted from the length of the cache: all rows of a batch have to take the same number of tokens.
COUNT_FROM_THE_CACHE = _there(
    {
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
        "exaone4_5": _exaone4_5,
        "hyperclovax_vision_v2": _hyperclovax_vision_v2,
        "kosmos-2.5": _kosmos2_5,
        "moss_transcribe_diarize": _moss_transcribe_diarize,
    }
)
# A pass over several tokens computes another function than passes over one, or is not supported.
NOT_SEVERAL_AT_ONCE = _there(
    {
        "doge": _doge_dense,
        "doge with experts": _doge,
        "moshi": _moshi(8),
        "moshi, longer than its window": _moshi(64),
        "openai-gpt": _openai_gpt,
        "prophetnet": _prophetnet,
        "unlimited_ocr": _unlimited_ocr(8),
        "unlimited_ocr, longer than its window": _unlimited_ocr(64),
    }
)
# Correct except for captured passes.
NOT_RECORDED: dict[str, Callable[[], PreTrainedModel]] = {"paligemma": _paligemma}


def odd_model(make: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """Make a model whose random weights make its text varied and every layer matter."""
    torch.manual_seed(seed)
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                std = 0.5 if any(part in name for part in ("embed", "wte", "wpe")) else 1.5 / parameter.shape[-1] ** 0.5
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
