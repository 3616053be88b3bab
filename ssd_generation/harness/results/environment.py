"""Conditions that a run's times depend on: the machine, versions, the model's own settings, other processes."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...config import Provenance
from ...support.machine import cpu_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["commit_of", "describe_environment", "load_average", "own_settings", "run_environment"]

_CHECKOUT = Path(__file__).resolve().parents[3]
# Settings of a generation config that do not affect the choice of tokens, or are given with each call.
_NOT_ABOUT_TOKENS = {
    *("transformers_version", "use_cache", "cache_implementation", "return_dict_in_generate", "self_speculative"),
    *("max_length", "max_new_tokens", "do_sample"),
}
_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}


def describe_environment(model: PreTrainedModel) -> dict[str, Any]:
    """Describe the environment of a measurement: model, number format, device and library versions.

    Args:
        model: the loaded model.
    """
    provenance = Provenance.from_model(model)
    versions = dict(provenance.versions or {})
    device = model.device
    environment: dict[str, Any] = {
        "model": provenance.model_id,
        "model_type": provenance.model_type,
        "dtype": provenance.dtype,
        "attention_implementation": provenance.attention_implementation,
        "device": provenance.device,
        "versions": versions,
    }
    if device.type == "cpu":
        environment["cpu"] = cpu_name()
        environment["threads"] = torch.get_num_threads()
    return environment


def run_environment(model: Any) -> dict[str, Any]:
    """Add to `describe_environment` the number of CPUs, the system and the commit of this checkout."""
    return {
        **describe_environment(model),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit_of(_CHECKOUT),
    }


def load_average() -> float | None:
    """Return the load average of the last minute; `None` where the system does not report it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def own_settings(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own generation settings that affect the choice of tokens, such as a repetition penalty.

    They apply wherever a call does not set them, and differ between copies of a model: GGUF files have none.

    Args:
        model: the target model.
        options: arguments of the calls, `do_sample` among them.
    """
    silent = _NOT_ABOUT_TOKENS | set(options) | (set() if options.get("do_sample") else _OF_SAMPLING)
    return {
        key: value
        for key, value in sorted(model.generation_config.to_diff_dict().items())
        if value is not None and key not in silent and not key.startswith(("_", "output_"))
        if not key.endswith("token_id")
    }


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, with `-dirty` where tracked files differ from it; `None` where there is none."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
