"""From options to the models of other runtimes, which decode beside this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..harness.peer_methods import PeerModel
    from .options import MeasuredModelOptions


def peer_models(
    model: MeasuredModelOptions, gguf: Sequence[str] | None, openvino: Sequence[str] | None, is_paired: bool
) -> dict[str, PeerModel]:
    """The models of `--gguf` and `--openvino`, by the method's name.

    Args:
        model: the options that say where the model runs.
        gguf: the files of `--gguf`.
        openvino: the folders and files of `--openvino`.
        is_paired: whether two checkouts are compared.

    Raises:
        ValueError, FileNotFoundError, ImportError: no such files, no place for them, or nothing that runs them.
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
    """What tells these models from others, by the option's name, for the arguments of a run."""
    if not models:
        return {"gguf": None}
    from ..harness.peers import describe_model

    described: dict[str, Any] = {}
    for option, peer in (("gguf", "llama.cpp"), ("openvino", "openvino")):
        paths = dict.fromkeys(known.path for known in models.values() if known.peer == peer)
        described[option] = [describe_model(path) for path in paths] or None
    return described
