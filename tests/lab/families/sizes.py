"""Sizes of tiny models: values of the arguments of config classes by name, and the exceptions by family."""

from __future__ import annotations

from typing import Any

__all__ = ["DEPTHS", "EXCEPTIONS", "FIRST_RESERVED", "LAYERS", "SIZES", "SPECIAL_TOKENS", "VOCABULARY"]

VOCABULARY = 96
LAYERS = 4
FIRST_RESERVED = 72
"""First token id that configs may use for pictures and the like: the random tokens of prompts are smaller."""
_SPECIAL = (
    "image_token_id image_token_index video_token_id video_token_index audio_token_id image_start_token_id "
    "image_end_token_id vision_start_token_id vision_end_token_id video_start_token_id video_end_token_id"
)
SPECIAL_TOKENS = {name: VOCABULARY - 1 - place for place, name in enumerate(_SPECIAL.split())}

# Values of the size-like arguments of config classes, by name. Arguments whose default is None or 0 are left alone:
# the class derives them, or has no such part.
_WIDTH, _INNER, _HEADS, _HEAD, _WINDOW, _EXPERTS = 32, 48, 4, 8, 8, 4
_DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks encoder_layers "
    "num_encoder_layers depth layers"
)
_NAMES: list[tuple[int, str]] = [
    (
        _WIDTH,
        "hidden_size d_model n_embd embedding_size input_embedding_size output_embedding_size emb_dim "
        "backbone_hidden_size dim_model_base word_embed_proj_dim attention_hidden_size mamba_d_ssm "
        "index_block_size max_window_layers embed_dim out_hidden_size output_dim vision_output_dim text_hidden_size "
        "vision_hidden_size qformer_hidden_size encoder_hidden_size projection_dim projector_hidden_size "
        "output_hidden_size vision_embed_dim image_embed_dim projector_dim embedding_dim projector_input_dim "
        "projector_output_dim mm_hidden_size downsample_hidden_size output_channels base_channels "
        "projection_hidden_size mm_embed_dim output_proj_dims",
    ),
    (
        _INNER,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff dense_intermediate_size "
        "feed_forward_size ffn_hidden_size intermediate_size_mlp shared_intermediate_size alignment_intermediate_size "
        "mlp_dim",
    ),
    (
        24,
        "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
        "shared_expert_intermediate_size shared_experts_intermediate_size",
    ),
    (LAYERS, _DEPTHS),
    (32, "image_size max_image_size"),
    (8, "patch_size"),
    (4, "mm_tokens_per_image num_query_tokens latent_query_num"),
    (1, "topk_group"),
    (
        2,
        "num_key_value_heads swa_num_key_value_heads num_kv_heads num_kv_shared_layers first_k_dense_replace "
        "num_dense_layers num_experts_per_tok moe_topk moe_k top_k_experts n_group n_groups mamba_n_groups "
        "mamba_ngroups n_shared_experts num_shared_experts num_mel_bins layer_group_size o_groups "
        "index_topk_blocks",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads linear_num_heads linear_num_key_heads linear_num_value_heads mamba_n_heads "
        "mamba_num_heads",
    ),
    (
        _HEAD,
        "head_dim dim_head kv_channels swa_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim "
        "global_head_dim attention_head_size linear_head_dim linear_key_head_dim linear_value_head_dim "
        "mamba_head_dim query_pre_attn_scalar hidden_size_per_layer_input laurel_rank gated_norm_rank "
        "hc_lowrank adapter_rank d_rel state_size mamba_d_state ssm_state_size prompt_mid_dim "
        "router_hidden_size pronunciation_embed_dim shape_embed_dim index_head_dim",
    ),
    (
        _EXPERTS,
        "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num rotary_dim",
    ),
    (
        _WINDOW,
        "sliding_window sliding_window_size keep_window_size attention_chunk_size attention_window_size window_size "
        "chunk_size mamba_chunk_size",
    ),
    (
        16,
        "kv_lora_rank q_lora_rank o_lora_rank index_n_heads index_topk local_attention block_size "
        "local_attention_window_len local_attn_chunk_length lsh_attn_chunk_length",
    ),
    (
        512,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
        "context_length original_max_position_embeddings",
    ),
    (
        VOCABULARY,
        "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size "
        "encoder_hash_byte_group_vocab ngram_vocab_size_base pronunciation_vocab_size shape_vocab_size",
    ),
]
DEPTHS = frozenset(_DEPTHS.split())
"""Numbers of layers."""
SIZES: dict[str, int] = {name: size for size, names in _NAMES for name in names.split()}

# Further arguments that a class needs, or whose names mean something else in it.
_HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
_WINDOWED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_CONVOLVED = ["conv", "full_attention"] * (LAYERS // 2)
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "beam": {**_NO_GROUPS, "num_experts_per_tok": 2},
    "cohere_compass_text": {
        "layer_types": _WINDOWED,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in _WINDOWED},
    },
    "dbrx.attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0},
    "deepseek_v2": {**_NO_GROUPS, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": _EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoe_swa": {"shared_intermediate_size": 24},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "hunyuan_v1_dense": {"head_dim": _HEAD},
    "hunyuan_v1_moe": {"head_dim": _HEAD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _HYBRID},
    "lfm2": {"layer_types": _CONVOLVED},
    "lfm2_moe": {"layer_types": _CONVOLVED},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": _HEAD},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (32, 16)},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2)},
    # The families below take pictures.
    "aria": {"projector_patch_to_query_dict": {16: 4, 4: 2}},
    "blip-2": {"image_token_index": SPECIAL_TOKENS["image_token_index"]},
    "chameleon": {"vocabulary_map": {"<image>": SPECIAL_TOKENS["image_token_id"]}},
    "cosmos3_edge.text_config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    },
    "deepseek_ocr2.text_config": {
        **_NO_GROUPS,
        "mlp_layer_types": ["dense", "sparse"] * (LAYERS // 2),
        "num_experts_per_tok": 2,
    },
    "hunyuan_vl.text_config": {
        "head_dim": _HEAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
    },
    "llama4.vision_config": {"intermediate_size": 128},
    "mllama.vision_config": {"intermediate_layers_indices": [1, 2], "vision_output_dim": 3 * _WIDTH},
    "minicpm_ocr": {"image_token_id": SPECIAL_TOKENS["image_token_id"]},
    "minicpmv4_6": {"image_token_id": SPECIAL_TOKENS["image_token_id"]},
    "minicpmv4_7": {"image_token_id": SPECIAL_TOKENS["image_token_id"]},
    "molmo2.adapter_config": {"vision_feature_layer": [-1, -2]},
    "nemotron_h_omni": {"image_token_id": SPECIAL_TOKENS["image_token_id"]},
    "paddleocr_vl.text_config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": SPECIAL_TOKENS["vision_start_token_id"]},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": SPECIAL_TOKENS["vision_start_token_id"]},
    "instructblip": {"image_token_index": SPECIAL_TOKENS["image_token_index"]},
    "nemotron_h_omni.vision_config": {"video_temporal_patch_size": 2},
    "step3p7.text_config": {"sliding_window": _WINDOW},
    "vipllava": {"vision_feature_layers": [-2, -3]},
}
EXCEPTIONS["cohere_compass.text_config"] = EXCEPTIONS["cohere_compass_text"]
for _name in ("qwen2_5_vl", "qwen2_5_omni_thinker", "exaone4_5", "hyperclovax_vision_v2"):
    EXCEPTIONS[f"{_name}.vision_config"] = {"window_size": 32}
for _name in ("cosmos3_omni", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe"):
    EXCEPTIONS[f"{_name}.vision_config"] = {"deepstack_visual_indexes": [0, 2]}
for _name in ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"):
    EXCEPTIONS[_name] = {"image_grid_pinpoints": [[32, 32], [32, 64]]}
for _name in ("dots3_note.text_config", "dots3_note_text"):
    EXCEPTIONS[_name] = {
        "num_key_value_heads": _HEADS,
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": _HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 2 * _HEAD,
        "swa_qk_nope_head_dim": _HEAD,
        "swa_v_head_dim": _HEAD,
    }
for _name in ("qwen4_exp.text_config", "qwen4_exp_text"):
    EXCEPTIONS[_name] = {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": _HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
    }
