"""Which of the model families that the installed transformers knows can be decoded, and in which ways.

    python -m tests.lab.families [--only NAME ...] [--json] [--rows FOLDER] [-o docs/models.md]

Each family is built as a tiny random model from its config class, and its text with `self_speculative=` is held against
that of plain `generate`. What is tried are a family's layers, cache and masks, not trained weights, and nothing is
timed. It takes minutes; each family is tried in a child process, so that one that crashes or hangs ends only its row.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ssd_generation.config import Costs, DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.forward.sublayers import layout_of
from ssd_generation.generation import enable_self_speculative
from ssd_generation.support.display import for_markdown
from ssd_generation.support.files import write_whole
from ssd_generation.support.messages import clipped

from .pictures import Picture, find_picture
from .program import Program
from .tables import CRASHED, WRONG, YES, Notes, counted, is_refusal, judged, kept_rows, kind_of, short, versions

__all__ = ["COLUMNS", "Row", "build", "known_families", "page", "prompts", "tiny_config", "try_families", "try_family"]

VOCABULARY = 96
LAYERS = 4
FIRST_RESERVED = 72
"""Tokens from here on may stand for pictures and the like, by a config: no prompt holds them beside a picture."""
_SPECIAL = (
    "image_token_id image_token_index video_token_id video_token_index audio_token_id image_start_token_id "
    "image_end_token_id vision_start_token_id vision_end_token_id video_start_token_id video_end_token_id"
)
SPECIAL_TOKENS = {name: VOCABULARY - 1 - place for place, name in enumerate(_SPECIAL.split())}

MOST_PARAMETERS = 8_000_000
"""A model with more was not made small: nothing is allocated for it."""

PROMPT, NEW_TOKENS = 12, 28
"""Long enough for sliding windows and chunks of attention (8 tokens) to be passed, in the prompt and behind it."""

SECONDS = 150.0
"""A family that takes longer hangs."""

Kind = Literal["causal", "image-text"]
KINDS_OF_MODELS: tuple[Kind, ...] = ("causal", "image-text")
_MAKERS = {"causal": AutoModelForCausalLM, "image-text": AutoModelForImageTextToText}
_CLASSES = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "image-text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}

PICTURES = (YES, "in both")

COLUMNS = {
    "nothing": "nothing drafted",
    "lookup": "lookup",
    "low bits": "low bits",
    "skipping": "skipping",
    "batch": "batch",
    "sampling": "sampling",
}
"""What is tried with each family, and the heading of its column."""

# What a size-like argument of a config class becomes, by its name. Arguments whose default is None or 0 are left
# alone: the class works them out, or has no such part.
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
SIZES: dict[str, int] = {name: size for size, names in _NAMES for name in names.split()}

# What a class needs beside these, or has under the name of something else.
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
    # What is below takes pictures.
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


def known_families(kind: Kind = "causal") -> list[str]:
    """The model types of which the installed transformers has a causal language model, or one of pictures and text."""
    return sorted(_CLASSES[kind])


def _small_arguments(config_class: type[Any], family: str) -> dict[str, Any]:
    """Arguments that make a config of this class small, the configs inside it included."""
    arguments: dict[str, Any] = {}
    parts = getattr(config_class, "sub_configs", {})
    whole = config_class() if parts else None
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        default = parameter.default
        if name in parts:
            part = getattr(whole, name, None)
            kind: Any = parts[name] if part is None and name == "vision_config" else type(part)
            if part is not None or (name == "vision_config" and kind.model_type):
                arguments[name] = kind(**_small_arguments(kind, f"{family}.{name}"))
        elif name in SIZES and isinstance(default, int) and not isinstance(default, bool):
            size = SIZES[name]
            if default > size or (name in _DEPTHS.split() and default > 0):
                arguments[name] = size
        elif name == "pad_token_id":
            arguments[name] = 0
        elif name == "bos_token_id":
            arguments[name] = 1
        elif name == "eos_token_id":
            arguments[name] = 2
        elif name in SPECIAL_TOKENS and default is not None:
            arguments[name] = SPECIAL_TOKENS[name]
        elif re.search("token_(id|index)$", name) and isinstance(default, int) and default >= VOCABULARY:
            arguments[name] = FIRST_RESERVED
        elif name == "is_decoder":
            arguments[name] = True
        elif name == "tie_word_embeddings":
            # With tied embeddings a random model repeats its input for ever.
            arguments[name] = False
    if "kv_lora_rank" in arguments and "num_key_value_heads" in arguments:
        # Keys and values are made from a latent for each head.
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    arguments.update(EXCEPTIONS.get(family, {}))
    return {**arguments, **_all_kinds(config_class, arguments)}


def _all_kinds(config_class: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Lists of layer kinds in which each kind of a full-sized model occurs, where few layers would lose one."""
    lists: dict[str, Any] = {}
    try:
        full, few = config_class(), config_class(**arguments)
    except Exception:  # told by whoever makes the config
        return lists
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(full, name, None) or ()))
        if name not in arguments and not set(kinds) <= set(getattr(few, name, None) or kinds):
            lists[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    return lists


def tiny_config(family: str) -> Any:
    """A config of the family for a model of a few layers and few parameters.

    Args:
        family: a model type, such as "llama".

    Returns:
        The config. Sizes that the table does not know keep the value that the class gives them.
    """
    config_class = CONFIG_MAPPING[family]
    config = config_class(**_small_arguments(config_class, family))
    for part in (config, config.get_text_config(decoder=True)):
        rope: dict[str, Any] = getattr(part, "rope_parameters", None) or {}
        ignored = getattr(part, "ignore_keys_at_rope_validation", ())
        has_axes = rope and not any(isinstance(value, dict) for value in rope.values())
        if has_axes and (rope.get("mrope_section") or "mrope_section" in ignored):
            # Time, height and width have a share each of what is turned of a head.
            size = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            turned = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
            rope["mrope_section"] = [turned // 3, turned // 3, turned - 2 * (turned // 3)]
    return config


def build(family: str, kind: Kind = "causal") -> PreTrainedModel:
    """A tiny model of the family with seeded random weights, on the CPU in float32.

    Args:
        family: a model type, such as "llama".

    Returns:
        The model. Its weights are large enough for the layers to matter and for the text to be varied.

    Raises:
        ValueError: the model would have more than `MOST_PARAMETERS` parameters.
    """
    maker: Any = _MAKERS[kind]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in maker.from_config(tiny_config(family)).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"a small config makes {parameters:,} parameters, which is not small")
    torch.manual_seed(0)
    model: Any = maker.from_config(tiny_config(family), dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == 1 and not parameter.any():
                parameter.fill_(0.5)  # a gate that is shut until training opens it
            # Decays and convolutions of recurrent layers are not matrices, and keep what the class gives them.
            if parameter.dim() < 2 or not parameter.is_floating_point() or re.search("A_log|conv|decay", name):
                continue
            is_embedding = re.search("emb|wte|wpe", name) is not None
            parameter.normal_(0.0, 1.0 if is_embedding else 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    model.eval()
    settings = getattr(model, "generation_config", None)
    if settings is None:
        raise ValueError("it cannot generate text")
    settings.pad_token_id, settings.eos_token_id, settings.use_cache = 0, None, True
    return model


def prompts(picture: Picture | None = None, in_both: bool = False) -> dict[str, torch.Tensor]:
    """Two random prompts of unlike lengths, the shorter one padded at the left.

    Args:
        picture: what the first one holds; `None`: text alone.
        in_both: the second one holds it as well.
    """
    generator = torch.Generator(device="cpu").manual_seed(1)
    ids = torch.randint(3, FIRST_RESERVED, (2, PROMPT), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    ids[1, :5] = mask[1, :5] = 0
    if picture is None:
        return {"input_ids": ids, "attention_mask": mask}
    first = picture.prompt(ids[:1, :4], ids[:1, 4:])
    if in_both:
        second = picture.prompt(ids[1:, 5:8], ids[1:, 8:])
        arguments = {name: torch.cat((value, value)) for name, value in picture.arguments.items()}
        picture = replace(picture, arguments=arguments)
    else:
        second = ids[1:, 5:]
    padding = first.shape[1] - second.shape[1]
    ids = torch.cat((first, functional.pad(second, (padding, 0))))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return picture.inputs(ids, mask)


@dataclass
class Row:
    """What was found of one family.

    Attributes:
        family: its model type.
        name: the class of the model.
        cells: by column of `COLUMNS`: "yes", "WRONG", "crashed: …", or why the library refuses.
        untried: why nothing could be tried, if so: no tiny model can be made, or its plain `generate` fails.
        drafted: by column, the tokens that were drafted.
        kind: "causal" or "image-text".
        picture: of an image-text model, which prompts held a picture: "yes" (in the batch one of two), "in both" (in
            the batch in both of them), or why none did.
    """

    family: str
    name: str
    cells: dict[str, str] = field(default_factory=dict)
    untried: str | None = None
    drafted: dict[str, int] = field(default_factory=dict)
    kind: Kind = "causal"
    picture: str | None = None

    def count(self, kind: str) -> int:
        """How many cells are of a kind: "yes", "refused", "WRONG" or "crashed"."""
        return sum(kind_of(cell) == kind for cell in self.cells.values())


def _skipped(model: Any) -> SkipConfig:
    """One attention (or what is in its place) and one MLP of a model; where there are none to skip, what is refused."""
    attentions, mlps = ([at % LAYERS for at in range(first, first + LAYERS)] for first in (1, 2))
    both = [SkipConfig(attention=[one], mlp=[other]) for one, other in itertools.product(attentions, mlps)]
    alone = [SkipConfig(**{kind: [one]}) for kind, ones in (("attention", attentions), ("mlp", mlps)) for one in ones]
    for skip in (*both, *alone):
        with contextlib.suppress(ValueError):
            layout_of(model).stubs(skip)
            return skip
    return both[0]


def _requests(low_bits: bool, skip: SkipConfig) -> dict[str, tuple[SelfSpeculativeConfig, dict[str, Any]]]:
    """By column: what is drafted, and what else the call is given. Costs are told, so that none are measured."""
    costs = Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)])
    fixed = DraftingConfig(policy="fixed", max_draft_length=4)
    lookup = LookupConfig()

    def config(**fields: Any) -> SelfSpeculativeConfig:
        # Exact bits are tried out at length where they are not declined. A text does not hang on them but at a tie.
        return SelfSpeculativeConfig(**{"drafting": fixed, "costs": costs, "exactness": "numeric", **fields})

    greedy = {"do_sample": False}
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 0}
    return {
        "nothing": (config(drafting=DraftingConfig(policy="none")), greedy),
        "lookup": (config(lookup=lookup), greedy),
        "low bits": (config(precision="int8"), greedy),
        "skipping": (config(skip=skip), greedy),
        "batch": (config(lookup=lookup), greedy),
        # Low-bit drafts are often right, so that both ways out of a round are taken.
        "sampling": (config(precision="int8", lookup=lookup) if low_bits else config(lookup=lookup), sampled),
    }


def try_family(family: str, columns: Sequence[str] = tuple(COLUMNS), kind: Kind = "causal") -> Row:
    """Build a family's tiny model and hold its self-speculative texts against its plain ones, in this process.

    Args:
        family: a model type, such as "llama".
        columns: what is tried, of `COLUMNS`.
        kind: which of its classes.

    Returns:
        The row. What goes wrong is told in its cells; nothing is raised.
    """
    row = Row(family, str(_CLASSES[kind][family]), kind=kind)
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    plain: dict[str, torch.Tensor] = {}

    def text(column: str, **extra: Any) -> torch.Tensor:
        inputs = both if column == "batch" else single
        torch.manual_seed(2)
        return model.generate(**inputs, **options, **extra)  # type: ignore[no-any-return]

    problem = "no tiny model can be built"
    try:
        if (refusal := _refusal_of_class(family, kind)) is not None:
            row.cells = dict.fromkeys(columns, refusal)
            return row
        model: Any = build(family, kind)
        single, both = _inputs(model, row)
        problem = "plain `generate` fails"
        first = model.generate(**single, **options, do_sample=False, output_logits=True, return_dict_in_generate=True)
        problem = "nothing can be compared"
        if any(logits.isnan().any() for logits in first.logits):
            raise ValueError("the logits of its random weights are not numbers")
        if not torch.equal(first.sequences, text("nothing", do_sample=False)):
            raise ValueError("plain `generate` does not give the same text twice")
    except Exception as error:
        # What a validator was told is of interest, not its name.
        said = re.sub(r"^.*ValueError: ", "", f"{type(error).__name__}: {error}", flags=re.DOTALL)
        row.untried = f"{problem}: {short(said)}"
        return row
    skip = _skipped(model) if "skipping" in columns else SkipConfig()
    for column in columns:
        request, extra = _requests(row.cells.get("low bits", YES) == YES, skip)[column]
        try:
            plain[column] = text(column, **extra)
        except Exception as error:  # padding is beyond some models
            row.cells[column] = "plain `generate` fails: " + short(f"{type(error).__name__}: {error}")
            continue

        def decode(extra: dict[str, Any] = extra, column: str = column, request: Any = request) -> torch.Tensor:
            enable_self_speculative(model)
            return text(column, **extra, self_speculative=request)

        row.cells[column], row.drafted[column] = judged(model, plain[column], decode)
    return row


def _refusal_of_class(family: str, kind: Kind) -> str | None:
    """Why a class is refused whatever its sizes are, where it is an encoder-decoder; `None` for all others."""
    config = tiny_config(family)
    if not config.is_encoder_decoder:
        return None
    maker: Any = _MAKERS[kind]
    try:
        with torch.device("meta"):
            enable_self_speculative(maker.from_config(config))
    except ValueError as error:
        return short(error) if is_refusal(error) else None
    return None


def _inputs(model: Any, row: Row) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a single call and a batch are given. The row says whether there is a picture in it."""
    picture = None
    if row.kind == "image-text":
        try:
            picture = find_picture(model)
        except ValueError as error:
            row.picture = short(error)
    both = prompts(picture)
    if picture is None:
        return {key: value[:1] for key, value in both.items()}, both
    along = ("input_ids", "attention_mask", *picture.along)
    single = {key: value[:1] if key in along else value for key, value in both.items()}
    row.picture = YES
    try:
        model.generate(**both, max_new_tokens=1, do_sample=False)
    except Exception:  # each row has to have one
        both, row.picture = prompts(picture, in_both=True), "in both"
    return single, both


# --- Child processes ------------------------------------------------------------------------------


def _work(pipe: Connection) -> None:
    """What a child does: a row for each family that it is told, until it is killed."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # some models print
        while True:
            family, kind = pipe.recv()
            pipe.send(try_family(family, kind=kind))


class _Child:
    """A process that tries one family after the other; another takes its place when it dies or hangs."""

    def __init__(self) -> None:
        self.family: tuple[str, Kind] | None = None
        self.since = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, family: str, kind: Kind = "causal") -> None:
        self.family, self.since = (family, kind), time.monotonic()
        self.pipe.send(self.family)

    def outcome(self) -> Row | None:
        """The row of the family that it has, once there is one: what a child that died left unsaid, included."""
        assert self.family is not None
        (family, kind), row = self.family, None
        problem = None
        try:
            if self.pipe.poll():
                self.family, row = None, self.pipe.recv()
                assert isinstance(row, Row)
                return row
        except (EOFError, OSError):
            self.process.join()
            problem = f"its process ended with exit code {self.process.exitcode}"
        if problem is None and time.monotonic() - self.since > SECONDS:
            problem = f"no end within {SECONDS:.0f} s"
        if problem is None:
            return None
        row = Row(family, str(_CLASSES[kind][family]), dict.fromkeys(COLUMNS, CRASHED + problem), kind=kind)
        self.family = None
        self.stop()
        self._start()
        return row

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def try_families(families: Sequence[tuple[str, Kind]], processes: int = 2) -> Iterator[Row]:
    """`try_family` of each, in child processes.

    Args:
        families: model types, and which of their classes.
        processes: how many at the same time.

    Yields:
        Rows, as they are ready. A family whose process crashes or hangs has a row that says so.
    """
    waiting = list(reversed(families))
    children = [_Child() for _ in range(min(processes, len(waiting)))]
    try:
        while waiting or any(child.family is not None for child in children):
            for child in children:
                if child.family is None and waiting:
                    child.give(*waiting.pop())
            busy = [child for child in children if child.family is not None]
            wait([child.pipe for child in busy], timeout=1.0)
            for child in busy:
                row = child.outcome()
                if row is not None:
                    yield row
    finally:
        for child in children:
            child.stop()


# --- The page -------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Models

Every family of causal language models and of image-text models that transformers knows, as a tiny random model: is its
text with `self_speculative=` that of plain `generate`? This page is written by a command, and a later transformers or
another version of this library may give another one:

```bash
python -m tests.lab.families -o docs/models.md
```

A family is built from its config class with {layers} layers and sizes of a few dozen, in float32 on a CPU. That tries
its layers, its cache and its masks, with windows and chunks of attention that are shorter than the text. It says
nothing of speed, which trained weights decide. Models are recognised by the shape of their layers, not by name, and
[checked](how-it-works.md#the-check-of-the-model) before they first draft; [limits.md](limits.md) has what does not work
with any model.

Image-text models (`AutoModelForImageTextToText`) are given a prompt with a random picture in it, where pixels in one of
the shapes that are known here make a difference to what the model says. A family that transformers has in both lists is
in both tables; among the causal ones it is given text alone.

The columns, {tokens} new tokens each:

- **nothing drafted**: every token is a plain step of this library's loop.
- **lookup**: drafts from what the text holds already.
- **low bits**: drafts from int8 copies of the weights.
- **skipping**: the draft leaves out one attention, or what is in its place, and one MLP, if any.
- **batch**: lookup, with two prompts of unlike lengths, padded at the left.
- **sampling**: drafts from int8 copies and lookup, the same seed in both calls. Where there are no int8 copies, lookup.

`yes`: nothing was refused, and the text is the same to the token. `no`, with the number of a note below: the library
refuses, by an error or by leaving the text to transformers with a warning. `WRONG`: the text is another one. `crashed`:
any other error.
"""


def _reason(row: Row, cell: str) -> str:
    """What a cell says, without the names that differ from family to family."""
    text = cell.replace(row.name, "The model")
    text = re.split(r"\.? This model cannot be skipped in|: skipping it would not be safe", text)[0]
    text = re.sub(r" \([A-Z]\w+\)| \(they lie .* apart\)", "", text)
    text = re.sub(r"one list of \d+ decoder layers", "one list of its decoder layers", text)
    text = text.replace("Layer 0 has parts", "A layer has parts").rstrip(".")
    return text[:1].upper() + text[1:]


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=\w\w)\. ", text)[0]
    return clipped(sentence).rstrip(".")


def page(rows: Sequence[Row]) -> str:
    """All that was found, as a page of Markdown.

    Args:
        rows: a row for each family, in any order.

    Returns:
        The page: introduction, versions, counts, a table for each kind of models, their notes, which prompts held no
        picture, and the families that could not be tried.
    """
    rows = sorted(rows, key=lambda row: (row.kind, row.family))
    tried = [row for row in rows if row.untried is None]
    notes = Notes()

    def number_of(*columns: str, of: Sequence[Row] = tried) -> int:
        return sum(all(row.cells.get(column) == YES for column in columns) for row in of)

    known = {kind: len(known_families(kind)) for kind in KINDS_OF_MODELS}
    asked = "" if len(rows) == sum(known.values()) else f" Only {len(rows)} were asked for."
    refused = sum(row.count("refused") == len(COLUMNS) for row in tried)
    shown = [row for row in tried if row.picture in PICTURES]
    lossless = {(row.family, row.name) for row in tried if row.cells.get("lookup") == row.cells.get("batch") == YES}
    lines = [
        _INTRODUCTION.format(layers=LAYERS, tokens=NEW_TOKENS),
        "## Counts",
        "",
        f"{versions()}. This transformers knows {known['causal']} families of causal and {known['image-text']} of "
        f"image-text models.{asked}",
        "",
        f"- Tried: {len(tried)}. Not tried, since there is no tiny model of it or plain `generate` fails: "
        f"{len(rows) - len(tried)}.",
        f"- The same text, one prompt: {number_of('nothing', 'lookup')} with lookup; "
        f"{number_of(*COLUMNS)} in every column.",
        f"- The same text, a batch: {number_of('batch')}.",
        f"- The same text, one prompt and a batch, a class that is in both lists counted once: {len(lossless)}.",
        f"- With a picture in the prompt: {len(shown)} tried; the same text with lookup: "
        f"{number_of('lookup', of=shown)}, in a batch: {number_of('batch', of=shown)}.",
        f"- Refused in every column: {refused}.",
        f"- Families with another text (`WRONG`): {sum(row.count(WRONG) > 0 for row in tried)}; with a crash: "
        f"{sum(row.count('crashed') > 0 for row in tried)}.",
        "",
        *counted(COLUMNS, [row.cells for row in tried]),
        "",
        "## Families",
        "",
        *_table([row for row in tried if row.kind == "causal"], notes),
        "",
        "## Image-text families",
        "",
        "**picture**: whether there was one in the prompt. In the batch it is in one row of two; `in both`: the model "
        "wants one in each row.",
        "",
        *_table([row for row in tried if row.kind == "image-text"], notes),
    ]
    if lines_of_notes := notes.lines("Families"):
        lines += ["", "## Notes", "", *lines_of_notes]
    without = [row for row in tried if row.kind == "image-text" and row.picture not in (*PICTURES, None)]
    if without:
        lines += ["", "## Without a picture", ""]
        lines.append(
            f"Given text alone, since no shape of pixels is known here: {', '.join(row.family for row in without)}."
        )
    untried = [row for row in rows if row.untried is not None]
    if untried:
        lines += ["", "## Not tried", ""]
        lines += [
            f"- {row.family} ({row.name}): {for_markdown(_first_sentence(row.untried or ''))}." for row in untried
        ]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row], notes: Notes) -> list[str]:
    """The lines of a table. Reasons are added to the notes, with the families that they hold for."""
    with_picture = any(row.kind == "image-text" for row in rows)
    headings = ["family", "class", *(["picture"] if with_picture else []), *COLUMNS.values()]
    table = [f"| {' | '.join(headings)} |", "|---|" + "---|" * (len(headings) - 1)]
    for row in rows:
        shown = [row.family, row.name]
        if with_picture:
            shown.append(row.picture or "" if row.picture in (*PICTURES, None) else "no")
        cells = [row.cells.get(column, "") for column in COLUMNS]
        shown += [notes.shown(cell, _reason(row, cell), row.family) for cell in cells]
        table.append(f"| {' | '.join(shown)} |")
    return table


def main(words: Sequence[str] | None = None) -> None:
    """The command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.

    Raises:
        SystemExit: of status 1 where a text is another one, so that nobody overlooks it.
    """
    program = Program("families", __doc__)
    program.add_argument("--only", nargs="+", metavar="NAME", help="these model types, instead of all")
    program.add_json("all rows with all reasons as JSON, instead of a page")
    program.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to the terminal")
    program.add_argument(
        "--rows",
        type=Path,
        metavar="FOLDER",
        help="keep rows there; the same command goes on after an interruption",
    )
    arguments = program.parsed(words)
    families = [(family, kind) for kind in KINDS_OF_MODELS for family in known_families(kind)]
    if arguments.only is not None:
        known = {family for family, _ in families}
        if unknown := [family for family in dict.fromkeys(arguments.only) if family not in known]:
            program.error(f"transformers {transformers.__version__} has no model type {', '.join(unknown)}")
        families = [(family, kind) for family, kind in families if family in arguments.only]
    rows = []
    with contextlib.ExitStack() as stack:
        try:
            what = {"benchmark": "families", "families": [list(each) for each in families]}
            found, keep = stack.enter_context(kept_rows(arguments.rows, what))
        except (OSError, ValueError) as error:
            program.error(str(error))
        rows += [Row(**row) for row in found]
        done = {(row.family, row.kind) for row in rows}
        # The children read these: nothing is fetched, and what is measured of tiny models is forgotten.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ.update(HF_HUB_OFFLINE="1", SSD_GENERATION_CACHE=folder, OMP_NUM_THREADS="1")
        for row in try_families([each for each in families if each not in done]):
            keep(asdict(row))
            rows.append(row)
            wrong = " ".join(f"{key}: {cell}" for key, cell in row.cells.items() if kind_of(cell) in (WRONG, "crashed"))
            print(f"{len(rows)}/{len(families)} {row.family} {wrong}".rstrip(), file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row.kind, row.family))
    text = json.dumps([asdict(row) for row in rows], indent=2) + "\n" if arguments.json else page(rows)
    if arguments.output is None:
        print(text, end="")
    else:
        write_whole(arguments.output, text)
    if any(row.count(WRONG) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
