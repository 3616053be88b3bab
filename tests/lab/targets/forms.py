"""Forms of a model's weights: quantised by each library, read from a GGUF file, with adapters."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """Form of the model's weights.

    Attributes:
        name: name in the table.
        make: function that loads it from a folder or a GGUF file.
        needs: packages that it needs.
        states: states of a model with adapters: functions by name that bring the model to them.
        reads_gguf: whether it is loaded from a GGUF file.
        has_folder: whether a folder stores the form; how a model is spread over devices or the disk is chosen as it is
            loaded.
    """

    name: str
    make: Callable[[str], Any]
    needs: tuple[str, ...] = ()
    states: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    reads_gguf: bool = False
    has_folder: bool = True


def _load(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _quantised(dtype: torch.dtype, config: Callable[[], Any]) -> Callable[[str], Any]:
    def make(folder: str) -> Any:
        return _load(folder, dtype=dtype, quantization_config=config(), device_map={"": "cpu"})

    return make


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**options)


def _torchao(kind: str, **options: Any) -> Callable[[], Any]:
    def config() -> Any:
        from torchao import quantization

        return transformers.TorchAoConfig(getattr(quantization, kind)(**options))

    return config


def _torchao_int4() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    int4: Any = vars(torch)["int4"]  # unknown to type checkers
    return transformers.TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32)))


def _compressed(bits: int) -> Callable[[str], Any]:
    def make(folder: str) -> Any:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )

        model = _load(folder, dtype=torch.float32)
        weights = QuantizationArgs(num_bits=bits, strategy="channel", symmetric=True)
        config = QuantizationConfig(
            config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)},
            ignore=["lm_head"],
            quantization_status="frozen",
            format="pack-quantized",
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                scale = module.weight.detach().abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
                module.weight_scale.data.copy_(scale)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)
        with tempfile.TemporaryDirectory() as made:
            model.save_pretrained(made)
            compressor.update_config(made)
            return _load(made, dtype=torch.float32)

    return make


def _gguf(file: str) -> Any:
    return _load(str(Path(file).parent), gguf_file=Path(file).name, dtype=torch.float32)


def _offloaded(where: str) -> Callable[[str], Any]:
    """Return a maker of a model whose weights lie elsewhere while they are not used: in memory, or on the disk."""

    def make(folder: str) -> Any:
        import accelerate

        if where == "memory":
            return accelerate.cpu_offload(_load(folder, dtype=torch.float32), execution_device="cpu")
        kept = tempfile.mkdtemp(prefix="offloaded-")
        model = _on_the_disk(folder, kept) if where == "map" else _load(folder, dtype=torch.float32)
        weakref.finalize(model, shutil.rmtree, kept, ignore_errors=True)
        return model if where == "map" else accelerate.disk_offload(model, kept, execution_device="cpu")

    return make


def _on_the_disk(folder: str, kept: str) -> Any:
    """Load a model with every other layer on the disk."""
    layers = transformers.AutoConfig.from_pretrained(folder).num_hidden_layers
    places = {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(layers)}
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return _load(folder, dtype=torch.float32, device_map={**others, **places}, offload_folder=kept)


def _with_adapters(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a maker that adds two LoRA adapters of random weights, with `first` in use."""

    def make_both(folder: str) -> Any:
        import peft

        def lora(*modules: str) -> Any:
            return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(modules), r=8, lora_alpha=16)

        model = peft.get_peft_model(make(folder), lora("q_proj", "v_proj"), adapter_name="first")
        model.add_adapter("second", lora("up_proj", "down_proj"))
        generator = torch.Generator(device="cpu").manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05, generator=generator)
        return model.eval()

    return make_both


def _off(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def _use(*names: str) -> Callable[[Any], Any]:
    def use(model: Any) -> Any:
        model.base_model.enable_adapter_layers()
        model.base_model.set_adapter(list(names))
        return model

    return use


def _merged(model: Any) -> Any:
    _use("first")(model).merge_adapter(["first"])
    return model


def _merged_for_good(model: Any) -> Any:
    model.unmerge_adapter()
    return _use("second")(model).merge_and_unload()


_STATES: dict[str, Callable[[Any], Any]] = {
    "on": _use("first"),
    "off": _off,
    "switched": _use("second"),
    "two at once": _use("first", "second"),
    "merged": _merged,
    "merged for good": _merged_for_good,
}


def _float32(folder: str) -> Any:
    return _load(folder, dtype=torch.float32)


_BNB, _CT, _AO = ("bitsandbytes",), ("compressed-tensors",), ("torchao",)
_F32, _BF16 = torch.float32, torch.bfloat16
_AO8 = _quantised(_F32, _torchao("Int8WeightOnlyConfig"))
TARGETS = [
    Target("float32", _float32),
    Target("bitsandbytes 8-bit", _quantised(_F32, _bitsandbytes(load_in_8bit=True)), _BNB),
    Target(
        "bitsandbytes 8-bit, no outliers apart (threshold 0)",
        _quantised(_F32, _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0)),
        _BNB,
    ),
    Target(
        "bitsandbytes 4-bit NF4, float32",
        _quantised(_F32, _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        _BNB,
    ),
    Target(
        "bitsandbytes 4-bit NF4, bfloat16",
        _quantised(_BF16, _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=_BF16)),
        _BNB,
    ),
    Target("torchao int8 weights", _AO8, _AO),
    Target("torchao int8 weights, bfloat16", _quantised(_BF16, _torchao("Int8WeightOnlyConfig")), _AO),
    Target(
        "torchao int8 weights and activations", _quantised(_F32, _torchao("Int8DynamicActivationInt8WeightConfig")), _AO
    ),
    Target("torchao int4 weights", _quantised(_F32, _torchao_int4), _AO),
    Target("compressed-tensors, 8 bits packed", _compressed(8), _CT),
    Target("compressed-tensors, 4 bits packed", _compressed(4), _CT),
    Target("quanto int8", _quantised(_F32, lambda: transformers.QuantoConfig(weights="int8")), ("optimum-quanto",)),
    Target("quanto int4", _quantised(_F32, lambda: transformers.QuantoConfig(weights="int4")), ("optimum-quanto",)),
    Target("GGUF file, dequantised by transformers", _gguf, ("gguf",), reads_gguf=True),
    Target("offloaded to memory (accelerate)", _offloaded("memory"), ("accelerate",), has_folder=False),
    Target("offloaded to the disk (accelerate)", _offloaded("disk"), ("accelerate",), has_folder=False),
    Target("every other layer on the disk (`device_map`)", _offloaded("map"), ("accelerate",), has_folder=False),
    Target("LoRA on float32", _with_adapters(_float32), ("peft",), _STATES),
    Target("LoRA on torchao int8", _with_adapters(_AO8), ("peft", *_AO), {"on": _use("first"), "off": _off}),
    Target(
        "LoRA on bitsandbytes 4-bit",
        _with_adapters(_quantised(_F32, _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"))),
        ("peft", *_BNB),
        {"on": _use("first"), "off": _off},
    ),
]
