"""Tiny seeded random models of every supported family, made in milliseconds and offline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from ssd_generation.support import model_state
from ssd_generation.support.measurements import MeasurementsPart
from ssd_generation.tuning.model_check import ChecksPart

VOCAB = 64
LAYERS = 4
WINDOW = 8

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def small(**changes: Any) -> dict[str, Any]:
    """Return the sizes of these models, with changes; `None` leaves one out."""
    merged = {**_SMALL, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def _gpt2(**changes: Any) -> Any:
    return tf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=512,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


# family → config; a suffix after a dash names a variant of the layers
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**small()),
    "mistral": lambda: tf.MistralConfig(**small(sliding_window=WINDOW)),
    "qwen2": lambda: tf.Qwen2Config(**small()),
    "qwen2-sliding": lambda: tf.Qwen2Config(
        **small(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    ),
    "qwen3": lambda: tf.Qwen3Config(**small(head_dim=8)),
    "gemma2": lambda: tf.Gemma2Config(**small(head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8)),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **small(head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=_ALTERNATING)
    ),
    "phi3": lambda: tf.Phi3Config(**small()),
    "granite": lambda: tf.GraniteConfig(**small(residual_multiplier=0.22, embedding_multiplier=2.0)),
    "olmo2": lambda: tf.Olmo2Config(**small()),
    "smollm3": lambda: tf.SmolLM3Config(**small()),
    "mixtral": lambda: tf.MixtralConfig(**small(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **small(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "gpt2": _gpt2,
    "gpt_neox": lambda: tf.GPTNeoXConfig(**small(num_key_value_heads=None)),
    "gpt_neox-sequential": lambda: tf.GPTNeoXConfig(**small(num_key_value_heads=None, use_parallel_residual=False)),
    "cohere": lambda: tf.CohereConfig(**small()),
    "falcon": lambda: tf.FalconConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "falcon-new": lambda: tf.FalconConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "falcon-alibi": lambda: tf.FalconConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        alibi=True,
        parallel_attn=False,
        multi_query=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "opt-post-norm": lambda: tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=512,
        do_layer_norm_before=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "bloom": lambda: tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=LAYERS, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
    "bloom-post-residual": lambda: tf.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        n_layer=LAYERS,
        n_head=4,
        apply_residual_connection_post_layernorm=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **small(
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **small(
            num_key_value_heads=4,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    ),
    "mpt": lambda: tf.MptConfig(
        vocab_size=VOCAB, d_model=32, n_layers=LAYERS, n_heads=4, max_seq_len=512, expansion_ratio=2
    ),
    "gptj": lambda: tf.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=512,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **small(
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=WINDOW,
            no_rope_layers=[1, 1, 1, 0],
        )
    ),
}
FAMILIES = sorted(CONFIGS)


def tiny_model(
    family: str = "llama", seed: int = 0, attn_implementation: str | None = None, **overrides: Any
) -> PreTrainedModel:
    """Make a random model of a family, with weights large enough for its layers to disagree with one another."""
    config = CONFIGS[family]()
    # With tied embeddings a random model repeats its input for ever.
    config.tie_word_embeddings = False
    for key, value in overrides.items():
        setattr(config, key, value)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Weights this large make the text varied and let every sub-layer matter.
                std = 1.0 if any(part in name for part in ("embed", "wte", "wpe")) else 1.5 / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, std, generator=generator)
            elif "bias" in name or "sinks" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    model.eval()
    assert model.generation_config is not None
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.generation_config.use_cache = True  # mpt's config says False
    return model


# Sizes that are multiples of the vector width, as those of real models are.
EVEN: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
EVEN_OF: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"qk_rope_head_dim": 32, "head_dim": 32},
    **{family: {} for family in ("falcon", "falcon-alibi", "falcon-new")},
    "gpt2": {"n_embd": 128, "n_inner": 128},
    "opt": {"hidden_size": 128, "ffn_dim": 128, "word_embed_proj_dim": 128},
}


def even_model(family: str, **changes: Any) -> PreTrainedModel:
    """Make a tiny model whose sizes are multiples of the vector width, as those of real models are."""
    return tiny_model(family, **(EVEN_OF.get(family, EVEN) | changes))


def prompt(length: int = 12, rows: int = 1, seed: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    """Return random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (rows, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Return a batch of random prompts of different lengths, padded at the left."""
    ids = prompt(max(lengths), len(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def forget_measurements() -> None:
    """Forget measurements in memory, as in a new process; those on the disk remain."""
    for state in list(model_state._STATES.values()):
        state.get(MeasurementsPart).measurements.clear()
        state.get(ChecksPart).checks.clear()
