"""Prefixes of a model's texts in a file, for documents that are asked about in later processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..cache.prefix_cache import PrefixCache, StoredRun
from ..forward.structure.sublayers import input_device
from ..native.ops.kernels import digest_of_kernels
from ..support.display import path_shown
from ..support.files import replacing
from ..support.messages import clipped
from ..support.model_state import state_of
from ..support.reading import Kind, check_file, parse_json
from ..tuning.measuring import describe_model
from .prefixes import PrefixPart, digest_of, follow_weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_prefix_cache", "save_prefix_cache"]

_FORMAT = 3
_FILE = Kind("a file of prefixes", 2**40)
_KEY = (str | None, str, str, int, str)
"""Types of the parts of a key: salt, dtype, device, threads, and how prompts are read."""


def save_prefix_cache(model: PreTrainedModel, path: str | os.PathLike[str]) -> int:
    """Write the prefixes that a model stores to a file, for `load_prefix_cache` in another process.

    The file holds the tokens of earlier texts, their keys and values, and the salts of `generate(cache_salt=…)`:
    protect it like the texts themselves. It is written whole or not at all.

    Args:
        model: a model that was enabled with `prefix_cache`.
        path: the file, by convention `….safetensors`; one that exists is replaced.

    Returns:
        Number of tokens written.

    Raises:
        ValueError: the model stores no prefixes.
        OSError: the file cannot be written.
    """
    follow_weights_of(model)
    runs = _cache_of(model).runs()
    tensors: dict[str, torch.Tensor] = {}
    for number, run in enumerate(runs):
        tensors[f"{number}.tokens"] = run.tokens.contiguous()
        for layer, pair in enumerate(run.states):
            for name, state in zip(("keys", "values"), pair, strict=True):
                tensors[f"{number}.{layer}.{name}"] = state.cpu().contiguous()
        for layer, after in enumerate(run.recurrent):
            for name, state in after.items():
                tensors[f"{number}.{layer}.{name}"] = state.cpu().contiguous()
    about = {
        "format": _FORMAT,
        "made_by": _made_by(model),
        "runs": [[list(run.key), run.above, len(run.states), [list(x) for x in run.recurrent]] for run in runs],  # type: ignore[call-overload]
        "content": _content(tensors),
    }
    with replacing(Path(path)) as temporary:
        save_file(tensors, temporary, metadata={"about": json.dumps(about)})
    return sum(len(run.tokens) for run in runs)


def load_prefix_cache(model: PreTrainedModel, path: str | os.PathLike[str]) -> int:
    """Add the prefixes of a file, written by `save_prefix_cache`, to those that a model stores.

    The same weights, machine and versions must have made them: then texts are the same as without. Load files that you
    trust: keys and values decide what the model generates.

    Args:
        model: a model that was enabled with `prefix_cache`, whose size holds as before.
        path: the file.

    Returns:
        Number of tokens read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model stores no prefixes, or the file is damaged, or of another model, machine or version; the
            message names what differs.
    """
    cache, shown = _cache_of(model), path_shown(path)
    check_file(path, _FILE)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = parse_json((file.metadata() or {}).get("about", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        runs = _runs_of(about, tensors)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{shown} is no file of prefixes, or damaged ({clipped(error)}). Read the texts again and write it anew "
            "with save_prefix_cache."
        ) from error
    here, there = _made_by(model), about["made_by"]
    if differing := [name for name in here if there.get(name) != here[name]]:
        raise ValueError(
            f"{shown} holds prefixes that another model, machine or version computed (they differ in "
            f"{', '.join(differing)}). Read the texts again and save them anew."
        )
    follow_weights_of(model)
    state_of(model).get(PrefixPart).digest = here["weights"]
    texts: list[torch.Tensor] = []
    device = input_device(model)
    for run in runs:
        before = run.tokens[:0] if run.above is None else texts[run.above]
        texts.append(torch.cat((before, run.tokens)))
        on_device = [(keys.to(device), values.to(device)) for keys, values in run.states]
        after = {len(texts[-1]): run.recurrent} if run.recurrent else None
        cache.keep(run.key, texts[-1], on_device, first=len(before), recurrent=after)
    return sum(len(run.tokens) for run in runs)


def _cache_of(model: PreTrainedModel) -> PrefixCache:
    cache = state_of(model).get(PrefixPart).cache
    if cache is None:
        raise ValueError(
            f"{type(model).__name__} stores no prefixes. Enable it first: "
            'enable_self_speculative(model, prefix_cache="1GB").'
        )
    return cache


def _made_by(model: PreTrainedModel) -> dict[str, Any]:
    """Describe everything that the bits of keys and values depend on, except the number of threads, a part of keys."""
    described = {**describe_model(model), "kernels": digest_of_kernels(), "weights": digest_of(model)}
    found: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return found


def _content(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of all numbers, to notice damage."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _runs_of(about: Any, tensors: Mapping[str, torch.Tensor]) -> list[StoredRun]:
    """Return the runs of a file as `PrefixCache.runs` gives them; raise if anything is wrong."""
    if about["format"] != _FORMAT:
        raise ValueError(f"its format is {about['format']!r}, not {_FORMAT}")
    if not isinstance(about["made_by"], Mapping):
        raise TypeError("it does not say what made it")
    if _content(tensors) != about["content"]:
        raise ValueError("its content is not what was written")
    runs: list[StoredRun] = []
    for number, (key, above, layers, names) in enumerate(about["runs"]):
        if len(key) != len(_KEY) or not all(isinstance(part, kind) for part, kind in zip(key, _KEY, strict=True)):
            raise ValueError(f"the key of run {number} is {key!r}")
        if above is not None and not (type(above) is int and 0 <= above < number and runs[above].key == tuple(key)):
            raise ValueError(f"run {number} follows {above!r}")
        tokens = tensors[f"{number}.tokens"]
        states = [(tensors[f"{number}.{layer}.keys"], tensors[f"{number}.{layer}.values"]) for layer in range(layers)]
        recurrent = [{name: tensors[f"{number}.{at}.{name}"] for name in each} for at, each in enumerate(names)]
        runs.append(StoredRun(tuple(key), above, tokens, states, recurrent))
    return runs
