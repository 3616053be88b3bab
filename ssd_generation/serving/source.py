"""Folder of a model given as a path, a Hub id or `demo`, and the config stored with it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..config import CONFIG_NAME, SelfSpeculativeConfig
from ..models import fetch_demo
from ..support.display import path_shown
from ..support.hub import identity_of
from ..support.messages import clipped, shown
from ..support.reading import CONFIG, DATA, read_json

__all__ = ["AUTO", "Source", "check_fits", "find_model", "require_no_code", "stored_default"]

AUTO: Final = "auto"

_DEMO = "demo"
_DEMO_NAME = "SmolLM2-135M-Instruct"
_ALLOWED = "Give a folder written by `save_pretrained`, a Hub id (`organisation/model`) or `demo`."

# Weights for other frameworks, which a repository may hold alongside those that transformers reads.
_OTHER_FRAMEWORKS = ("*.h5", "*.msgpack", "*.ot", "*.tflite", "*.onnx*", "onnx/*", "openvino/*", "coreml/*", "*.gguf")
_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Source:
    """A model's folder on this machine.

    Attributes:
        folder: folder with `config.json` and the weights.
        name: the model's name for users and clients: a Hub id, or the name of the folder.
    """

    folder: Path
    name: str


def find_model(model: str) -> Source:
    """Find a model's folder; a model on the Hub is downloaded into the Hub's cache.

    Args:
        model: a folder, a Hub id, or `demo`.

    Raises:
        FileNotFoundError: no such folder, no model in it, or the Hub could not provide it.
        ValueError: a file, or an adapter, which transformers loads in another way.
    """
    if model == _DEMO:
        return Source(fetch_demo(), _DEMO_NAME)
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        _check_folder(path)
        return Source(path.resolve(), identity_of(str(path.resolve()))[0] or "model")
    if path.is_file():
        hint = ""
        if path.suffix.lower() == ".gguf":
            hint = " `load_model` reads a GGUF file; `save_pretrained` of model and tokenizer write a folder."
        raise ValueError(f"{path_shown(model)} is a file, but a model's folder is needed.{hint} {_ALLOWED}")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise FileNotFoundError(f"There is no folder {path_shown(model)}. {_ALLOWED}")
    folder = _downloaded(model)
    _check_folder(folder)
    return Source(folder, model)


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"The folder {path_shown(folder)} holds an adapter, whose model transformers loads from elsewhere. Merge "
            "it (`model.merge_and_unload()` of peft), save the result, and give that folder."
        )
    raise FileNotFoundError(
        f"The folder {path_shown(folder)} holds no config.json, so no transformers model. {_ALLOWED}"
    )


def _downloaded(repo_id: str) -> Path:
    """Download a repository: safetensors if there are any, else PyTorch weights."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        without = [*_OTHER_FRAMEWORKS, *_PICKLED_WEIGHTS]
        folder = Path(huggingface_hub.snapshot_download(repo_id, ignore_patterns=without))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(repo_id, ignore_patterns=list(_OTHER_FRAMEWORKS)))
        return folder
    except (
        errors.EntryNotFoundError,  # its subclass LocalEntryNotFoundError: the Hub cannot be reached
        errors.HFValidationError,
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        OSError,  # a connection error
    ) as error:
        reason = clipped((str(error).strip().splitlines() or [type(error).__name__])[0], most=150)
        raise FileNotFoundError(
            f"{shown(repo_id)} is not a local folder, and the Hub did not provide it: {reason} {_ALLOWED}"
        ) from error


def stored_default(folder: Path) -> SelfSpeculativeConfig | Literal["auto"]:
    """Return the config stored in a model's folder; "auto" where there is none.

    Args:
        folder: the model's folder; in it, `self_speculative_config.json` takes precedence over `self_speculative` in
            `generation_config.json`.

    Raises:
        TypeError, ValueError: an invalid config.
    """
    if (folder / CONFIG_NAME).is_file():
        return SelfSpeculativeConfig.from_json_file(folder / CONFIG_NAME)
    if not (folder / "generation_config.json").is_file():
        return AUTO
    document = read_json(folder / "generation_config.json", CONFIG)
    stored = document.get("self_speculative") if isinstance(document, Mapping) else None
    return SelfSpeculativeConfig.from_dict(stored) if isinstance(stored, Mapping) else AUTO


def check_fits(folder: Path, default: SelfSpeculativeConfig | Literal["auto"]) -> None:
    """Check from a model's `config.json` alone that it can draft, and by this config.

    Args:
        folder: the model's folder.
        default: the drafting config, or "auto".

    Raises:
        ValueError: an encoder-decoder model, or a config made for another model.
    """
    from transformers import AutoConfig

    document: Any = read_json(folder / "config.json", CONFIG)
    if not isinstance(document, Mapping):
        raise ValueError(f"{path_shown(folder / 'config.json')} is not a model's config: it holds no JSON object.")
    if "auto_map" in document:  # a class that comes with the model, whose code is not run for this check
        return
    config = AutoConfig.from_pretrained(folder)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{path_shown(folder)} holds an encoder-decoder model ({shown(config.model_type)}); self-speculative "
            "decoding is for decoder-only models."
        )
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(default, SelfSpeculativeConfig) and layers is not None:
        default.validate_for(num_layers=layers, model_type=text.model_type)


_VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Large files in which transformers looks for no classes."""


def require_no_code(source: Source) -> None:
    """Raise `ValueError` if a model comes with its own code, which loading it would run."""
    for file in sorted(source.folder.glob("*.json")):
        if file.name in _VOCABULARIES or file.name.endswith(".index.json"):
            continue
        document = read_json(file, DATA)  # a tokenizer's config may be larger than a usual one
        if isinstance(document, Mapping) and "auto_map" in document:
            raise ValueError(
                f"{shown(source.name)} comes with code of its own ({file.name} names it). If you trust it, run it with "
                "--trust-remote-code."
            )
