"""Models of other runtimes that the options name, to decode alongside this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..harness.peer_methods import PeerModel
    from .options import MeasuredModelOptions


def peer_models(
    model: MeasuredModelOptions, gguf: Sequence[str] | None, openvino: Sequence[str] | None, is_paired: bool
) -> dict[str, PeerModel]:
    """Return the models of `--gguf` and `--openvino`, by method name.

    Args:
        model: options of the model's placement.
        gguf: files of `--gguf`.
        openvino: folders and files of `--openvino`.
        is_paired: whether two checkouts are compared.

    Raises:
        ValueError: invalid files, or options that leave other runtimes no place.
        FileNotFoundError: a file or folder is missing.
        ImportError: a runtime is not installed.
    """
    if not (gguf or openvino):
        return {}
    import torch

    from ..harness.peers import LlamaCpp, OpenVino, gguf_models, openvino_models

    models: dict[str, PeerModel] = {}
    device = model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for option, paths, peer, models_of in (
        ("--gguf", gguf, LlamaCpp, gguf_models),
        ("--openvino", openvino, OpenVino, openvino_models),
    ):
        if not paths:
            continue
        if is_paired:
            raise ValueError(
                f"{option} and --paired: two checkouts run this library's own methods. Leave one of them out."
            )
        if model.device_map is None and not device.startswith("cpu"):
            raise ValueError(
                f"{option}: {peer.name} runs on the CPU here, but the model on {device!r}. Add --device cpu."
            )
        models |= models_of(paths)
        peer.check_installed()
    return models


def described_models(models: Mapping[str, PeerModel]) -> dict[str, Any]:
    """Describe the models by path, size and digest, by option name, for the arguments of a run."""
    if not models:
        return {"gguf": None}
    from ..harness.peers import describe_model

    described: dict[str, Any] = {}
    for option, peer in (("gguf", "llama.cpp"), ("openvino", "openvino")):
        paths = dict.fromkeys(known.path for known in models.values() if known.peer == peer)
        described[option] = [describe_model(path) for path in paths] or None
    return described
