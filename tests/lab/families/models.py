"""Tiny random models of the families that the installed transformers knows, and prompts for them."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from .pictures import Picture
from .sizes import DEPTHS, EXCEPTIONS, FIRST_RESERVED, LAYERS, SIZES, SPECIAL_TOKENS, VOCABULARY

__all__ = ["KINDS_OF_MODELS", "Kind", "build", "class_name", "known_families", "on_meta", "prompts", "tiny_config"]

MOST_PARAMETERS = 8_000_000
"""Most parameters of a model: one with more was not made small, and no memory is allocated for it."""

PROMPT = 12
"""Length of a prompt in tokens: more than a sliding window or a chunk of attention (8 tokens) holds."""

Kind = Literal["causal", "image-text"]
KINDS_OF_MODELS: tuple[Kind, ...] = ("causal", "image-text")
_MAKERS = {"causal": AutoModelForCausalLM, "image-text": AutoModelForImageTextToText}
_CLASSES = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "image-text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def known_families(kind: Kind = "causal") -> list[str]:
    """Return the model types of which the installed transformers has a causal or an image-text model."""
    return sorted(_CLASSES[kind])


def class_name(family: str, kind: Kind = "causal") -> str:
    """Return the name of the class of a family's models."""
    return str(_CLASSES[kind][family])


def _small_arguments(config_class: type[Any], family: str) -> dict[str, Any]:
    """Return arguments that make a config of this class small, the configs inside it included."""
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
            if default > size or (name in DEPTHS and default > 0):
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
    """Return lists of layer kinds with every kind of a full-sized model, where the few layers would lack one."""
    lists: dict[str, Any] = {}
    try:
        full, few = config_class(), config_class(**arguments)
    except Exception:  # raised again where the config is made
        return lists
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(full, name, None) or ()))
        if name not in arguments and not set(kinds) <= set(getattr(few, name, None) or kinds):
            lists[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    return lists


def tiny_config(family: str) -> Any:
    """Make a config of the family for a model of a few layers and few parameters.

    Args:
        family: a model type, such as "llama".

    Returns:
        The config. Sizes that are not in the table keep the value that the class gives them.
    """
    config_class = CONFIG_MAPPING[family]
    config = config_class(**_small_arguments(config_class, family))
    for part in (config, config.get_text_config(decoder=True)):
        rope: dict[str, Any] = getattr(part, "rope_parameters", None) or {}
        ignored = getattr(part, "ignore_keys_at_rope_validation", ())
        has_axes = rope and not any(isinstance(value, dict) for value in rope.values())
        if has_axes and (rope.get("mrope_section") or "mrope_section" in ignored):
            # Time, height and width each have a share of the rotated part of a head.
            size = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            turned = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
            rope["mrope_section"] = [turned // 3, turned // 3, turned - 2 * (turned // 3)]
    return config


def on_meta(family: str, kind: Kind = "causal") -> Any:
    """Make a tiny model of the family without memory for its weights."""
    maker: Any = _MAKERS[kind]
    with torch.device("meta"):
        return maker.from_config(tiny_config(family))


def build(family: str, kind: Kind = "causal") -> PreTrainedModel:
    """Build a tiny model of the family with seeded random weights, on the CPU in float32.

    Args:
        family: a model type, such as "llama".
        kind: kind of model: which of the family's classes.

    Returns:
        The model. Its weights are large enough for the layers to matter and for the text to be varied.

    Raises:
        ValueError: the model would have more than `MOST_PARAMETERS` parameters.
    """
    parameters = sum(p.numel() for p in on_meta(family, kind).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"a small config makes {parameters:,} parameters, which is not small")
    maker: Any = _MAKERS[kind]
    torch.manual_seed(0)
    model: Any = maker.from_config(tiny_config(family), dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == 1 and not parameter.any():
                parameter.fill_(0.5)  # a gate that is shut until training opens it
            # Decays and convolutions of recurrent layers are not matrices, and keep the values of the class.
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
    """Return two random prompts of different lengths, the shorter one padded at the left.

    Args:
        picture: picture in the first prompt; `None`: text alone.
        in_both: whether the second prompt has it as well.
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
