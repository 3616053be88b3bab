"""The draft of a model with offloaded weights: everything that it reads is in memory.

A second model is made of the first (`clone_without_hooks`) that has low-bit copies in place of its linear layers and
experts, the embedding in bfloat16, and everything else (norms, biases, routers) unchanged. It has no hooks, so that its
passes are captured like those of any draft, and none of them reads an offloaded weight. The copies are made a few
layers at a time, each written to the offload folder when it is made: the next process reads them, even where this one
is killed in the middle.
"""

from __future__ import annotations

import contextlib
import copy as copying
import dataclasses
import hashlib
import logging
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from ...config import SkipConfig
from ...support.files import is_temporary
from ...support.memory import available_bytes
from ...support.messages import clipped
from ...support.model_state import state_of
from ...support.progress import progress_bar
from ...support.tensors import fingerprint_of
from ...support.trusted import UntrustedFolderError, check_folder, name_of_open, opened, storing
from ..structure.adapters import has_adapters
from ..structure.expert_layers import is_experts, names_of_experts
from ..structure.offloaded import (
    CannotStandIn,
    Source,
    clone_without_hooks,
    is_offloaded,
    replace_tensor,
    sources_of,
    why_unreadable,
)
from ..structure.sublayers import LayoutPart, input_device, layout_of
from .copied_layers import AnyCopy, check_precision, estimated_bytes, places_of
from .experts_copy import ExpertsCopy, matrices_of_experts
from .layer_copy import LowBitCopy, packing
from .low_bit import CopiesPart, LowBitCopies

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...config import PrecisionConfig, SelfSpeculativeConfig

__all__ = [
    "FOLDER",
    "ResidentDraft",
    "check_copies",
    "check_memory",
    "drafting_model",
    "resident_bytes",
    "why_not_resident",
]

logger = logging.getLogger(__name__)

FOLDER = "ssd_low_bit"
"""The folder for copies in the offload folder."""

_FORMAT = 1
_COPY = re.compile(r"[0-9a-f]{24}-[0-9a-f]{24}\.safetensors")
"""Names of the files; no others are ever deleted."""

_OLD_SECONDS = 3600.0
"""Age from which a file that was being written counts as abandoned."""


def drafting_model(model: PreTrainedModel, config: SelfSpeculativeConfig) -> PreTrainedModel:
    """Return the model that drafts with a config: the model itself, or one with all that a draft reads in memory.

    Args:
        model: the target model.
        config: the drafting config.

    Raises:
        ValueError: low-bit copies of offloaded weights were requested and cannot be made here; or a file of these
            weights is gone.
    """
    if not config.precision or not is_offloaded(model):
        return model
    return _resident(model, config.skip, config.precision).model


def check_copies(model: PreTrainedModel) -> None:
    """Check that `generate` can draft from low-bit copies of this model, here, its weights offloaded or not.

    Raises:
        ValueError: it cannot; see `check_precision`.
    """
    if not is_offloaded(model):
        check_precision(model)
        return
    reason = why_not_resident(model)
    if reason is not None:
        raise ValueError(
            f"No low-bit copies can be made of the offloaded weights of {type(model).__name__}: {reason}. Leave "
            "`precision` out there: skipping sub-layers and prompt lookup work."
        )


def why_not_resident(model: PreTrainedModel) -> str | None:
    """Return why a model with offloaded weights has no draft in memory; `None` where it can have one."""
    device = input_device(model)
    others = {p.device.type for p in model.parameters()} - {"meta", "cpu"}
    if device.type != "cpu" or others:
        return f"low-bit drafts run on the CPU only, but its passes run on {', '.join(sorted({device.type, *others}))}"
    if has_adapters(model):
        return "adapters are loaded"
    try:
        other, _ = clone_without_hooks(model)
        _replace_offloaded(other, sources_of(model))
        check_precision(other)
    except CannotStandIn as error:
        return str(error)
    except ValueError as error:
        return str(error).split(":")[0]
    return None


def resident_bytes(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> int:
    """Estimate the bytes of the draft of a model with offloaded weights, before it is made."""
    draft = state_of(model).get(CopiesPart).resident
    if draft is not None and draft.is_of(model, skip, precision):
        return int(draft.num_bytes())
    embedding = model.get_input_embeddings()
    total = estimated_bytes(model, skip, precision)
    if type(embedding) is nn.Embedding:
        total += 2 * embedding.weight.numel()
    places, _ = places_of(model, skip, precision)
    copied = {id(p) for place in places for p in place.module.parameters()}
    copied |= {id(m.weight) for m in model.modules() if type(m) is nn.Linear}
    for parameter in model.parameters():
        if parameter.device.type == "meta" and id(parameter) not in copied and parameter is not embedding.weight:
            total += parameter.numel() * parameter.element_size()
    return total


def check_memory(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> str | None:
    """Return why the draft does not fit into memory next to the largest layer of a pass; `None` where it does."""
    draft = state_of(model).get(CopiesPart).resident
    if draft is not None and draft.is_of(model, skip, precision):
        return None
    available = available_bytes()
    largest = max(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "meta")
    needed = resident_bytes(model, skip, precision) + largest
    if available is not None and needed > available:
        needs, left = f"{needed / 1e9:.2f} GB", f"{available / 1e9:.2f} GB"
        return f"next to the largest layer of a pass they take {needs}, but {left} of memory are free"
    return None


def _resident(model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> ResidentDraft:
    state = state_of(model).get(CopiesPart)
    unreadable = why_unreadable(model)
    if unreadable is not None:
        raise ValueError(unreadable)
    if state.resident is None or not state.resident.is_of(model, skip, precision):
        check_copies(model)
        reason = check_memory(model, skip, precision)
        if reason is not None:
            raise ValueError(
                f"The low-bit copies of the offloaded weights of {type(model).__name__} do not fit into memory: "
                f'{reason}. Take `precision="int4"` with `head="int4"`, which is the smallest, or leave `precision` '
                "out: prompt lookup needs no copies."
            )
        state.resident = None  # before another one is made
        state.resident = ResidentDraft(model, skip, precision)
    return cast("ResidentDraft", state.resident)


class ResidentDraft:
    """A model that drafts for another one with offloaded weights.

    Args:
        model: the target model.
        skip: sub-layers that the draft leaves out.
        precision: precision of its layers.

    Attributes:
        model: the model that drafts. Its low-bit copies are known to `copies_of`.
        made: number of copies that were made, not read.
        read: number of copies that were read from the offload folder.
        folder: folder in which the copies are stored; `None` where they are not.

    Raises:
        OSError: a file of the weights is gone.
    """

    def __init__(self, model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> None:
        self._asked = (skip, precision)
        self._sources = sources_of(model)
        named = model.named_parameters(remove_duplicate=False)
        self._original = {name: tensor for name, tensor in named if tensor.device.type != "meta"}
        self._identity = _identity(model, self._sources)
        self.made = self.read = 0
        self.folder = _folder_of(self._sources)
        self._may_write = self.folder is not None
        self.model, modules = clone_without_hooks(model)
        # Values of layers that have a copy are never read: all have their shape and type at once, and no memory.
        offloaded = _replace_offloaded(self.model, self._sources)
        layout = layout_of(model)
        state_of(self.model).get(LayoutPart).layout = dataclasses.replace(
            layout, layers=tuple(layer.of_modules(modules) for layer in layout.layers)
        )
        layers = [m for m in self.model.modules() if type(m) is nn.Linear or is_experts(m)]
        with progress_bar(len(layers), "Quantising the offloaded weights, once") as bar:
            self._bar = bar
            copies = LowBitCopies(self.model, skip, precision, make=self._copy)
            del self._bar
        state_of(self.model).get(CopiesPart).low_bit_drafts[skip, precision] = copies
        # A copy has its biases, too. It is identified by the module's tensors: none may be replaced from here on.
        covered = {id(tensor) for module in copies.modules for tensor in module.parameters()}
        self._resident: int = 0
        embedding = self.model.get_input_embeddings()
        for name, (module, key) in offloaded.items():
            held = getattr(module, key)
            if id(held) in covered:
                continue
            if module is embedding and type(module) is nn.Embedding and key == "weight" and module.max_norm is None:
                copies.others.append((module, self._embedding(name, module)))
                continue
            value = self._sources[name].load().to("cpu")
            replace_tensor(module, key, value)
            self._resident += value.nbytes
        self._clean_up()

    def is_of(self, model: PreTrainedModel, skip: SkipConfig, precision: PrecisionConfig) -> bool:
        """Tell whether it is the draft of these, and the weights are those that were copied."""
        if (skip, precision) != self._asked:
            return False
        try:
            return bool(self._identity == _identity(model, sources_of(model)))
        except OSError:
            return False

    def num_bytes(self) -> int:
        """Return the memory, in bytes, of all that the draft has for itself."""
        copies: dict[Any, AnyCopy] = state_of(self.model).get(CopiesPart).low_bit_copies
        return self._resident + sum(copy.num_bytes() for copy in copies.values())

    # ------------------------------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> torch.Tensor:
        return self._original[name].detach() if name in self._original else self._sources[name].load()

    def _copy(self, names: Sequence[str], layers: Sequence[Any], precision: str, group_size: int) -> AnyCopy:
        experts = layers[0] if is_experts(layers[0]) else None
        if experts is None:
            weights = [layer.weight for layer in layers]
            wanted = [f"{name}.{key}" for name in names for key in ("weight", "bias")]
            packed = packing(weights[0], precision)
        else:
            weights = [weight[0] for weight, _ in matrices_of_experts(experts)]
            wanted = [f"{names[0]}.{key}" for pair in names_of_experts(experts) for key in pair if key is not None]
            packed = ", ".join(packing(weight, precision) for weight in weights)
        what = (tuple(names), precision, group_size, packed)
        found = self._stored(what, wanted)
        copy: AnyCopy | None = None
        if found is not None:
            try:
                copy = (
                    LowBitCopy.of_tensors(found, weights, precision, group_size)
                    if experts is None
                    else ExpertsCopy.of_tensors(found, experts, precision, group_size)
                )
                self.read += 1
            except (KeyError, ValueError) as error:
                logger.warning("A low-bit copy in %s cannot be used (%s); making it again.", self.folder, error)
        if copy is None:
            copy = self._quantised(names, layers, precision, group_size)
            self.made += 1
            self._store(what, wanted, copy.tensors())
        self._bar.update(len(layers))
        return copy

    def _quantised(self, names: Sequence[str], layers: Sequence[Any], precision: str, group_size: int) -> AnyCopy:
        """Make the copy of layers of these names, whose weights are read for it."""
        if not is_experts(layers[0]):
            pairs = [
                (self._weight(f"{name}.weight"), None if layer.bias is None else self._weight(f"{name}.bias"))
                for name, layer in zip(names, layers, strict=True)
            ]
            return LowBitCopy(pairs, precision, group_size)
        read = copying.copy(layers[0])  # the same layer with its weights in memory, as long as it is quantised
        keys = [key for pair in names_of_experts(read) for key in pair if key is not None]
        read._parameters = {**read._parameters, **{key: self._weight(f"{names[0]}.{key}") for key in keys}}
        return ExpertsCopy(matrices_of_experts(read), layers[0], precision, group_size)

    def _embedding(self, name: str, module: nn.Embedding) -> Any:
        """Return a replacement of the embedding's forward: its rows in bfloat16, in which a draft computes."""
        what = ((name,), "bfloat16", 0, "")
        found = self._stored(what, [name])
        weight = None if found is None else found.get("weight")
        if weight is None or weight.shape != module.weight.shape or weight.dtype is not torch.bfloat16:
            weight = self._sources[name].load().to("cpu", torch.bfloat16)
            self._store(what, [name], {"weight": weight})
        self._resident += weight.nbytes
        rows, dtype = weight, module.weight.dtype

        def forward(ids: torch.Tensor) -> torch.Tensor:
            return functional.embedding(ids, rows).to(dtype)

        return forward

    # ------------------------------------------------------------------------------------------------------------------
    # on disk

    def _path(self, what: tuple[Any, ...], names: Sequence[str]) -> Path:
        """Return the path of a file, named by its contents and by the files of the weights that it was made of."""
        assert self.folder is not None
        known: dict[Path, tuple[int, int]] = {}
        of = [self._sources[name].identity(known) for name in names if name in self._sources]
        shapes = [tuple(self._original[name].shape) for name in names if name in self._original]
        return self.folder / f"{_digest((_FORMAT, *what))}-{_digest((of, shapes))}.safetensors"

    def _is_kept(self, names: Sequence[str]) -> bool:
        """Tell whether all weights come from files, by which the copy would be recognised again."""
        weights = [name for name in names if name.endswith("weight")]
        return self.folder is not None and all(
            name in self._sources and self._sources[name].file() is not None for name in weights
        )

    def _stored(self, what: tuple[Any, ...], names: Sequence[str]) -> Mapping[str, torch.Tensor] | None:
        if not self._is_kept(names):
            return None
        path = self._path(what, names)
        try:
            with opened(path) as stored, safe_open(name_of_open(stored, path), framework="pt") as file:
                # Copied out of the mapped file, whose pages the system may reclaim at any time.
                return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (FileNotFoundError, UntrustedFolderError):  # `_store` reports such a folder
            return None
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("A low-bit copy, %s, cannot be read (%s); making it again.", path, clipped(error))
            return None

    def _store(self, what: tuple[Any, ...], names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a copy, whole or not at all."""
        if not self._may_write or not self._is_kept(names):
            return
        path = self._path(what, names)
        try:
            with storing(path) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        except (OSError, ValueError, SafetensorError) as error:
            self._may_write = False
            warnings.warn(
                f"Low-bit copies of offloaded weights could not be stored in {path.parent}: they are in memory for "
                "this process, and the next one makes them again, which takes about a pass of the model. "
                f"{clipped(error, 1000)}",
                stacklevel=2,
            )

    def _clean_up(self) -> None:
        """Delete copies of weights that no longer exist, and what a killed process left."""
        if self.folder is None or not self._may_write or not self.made:
            return
        with contextlib.suppress(OSError, ValueError):
            check_folder(self.folder)
            ours = (path for path in self.folder.iterdir() if is_temporary(path.name) or _COPY.fullmatch(path.name))
            written = sorted((path.lstat().st_mtime, path) for path in ours)
            newest = {path.name.partition("-")[0]: path for _, path in written if not is_temporary(path.name)}
            for when, path in written:
                if is_temporary(path.name):
                    is_old = time.time() - when > _OLD_SECONDS
                else:
                    is_old = newest[path.name.partition("-")[0]] != path
                if is_old:
                    path.unlink(missing_ok=True)


def _replace_offloaded(other: nn.Module, sources: Mapping[str, Source]) -> dict[str, tuple[nn.Module, str]]:
    """Replace offloaded tensors by zeros of the same shape and type that take no memory."""
    places = {}
    for name in sources:
        prefix, _, key = name.rpartition(".")
        module = other.get_submodule(prefix)
        meta = getattr(module, key)
        replace_tensor(module, key, torch.zeros((), dtype=meta.dtype, device="cpu").expand(meta.shape))
        places[name] = module, key
    return places


def _identity(model: nn.Module, sources: Mapping[str, Source]) -> tuple[Any, ...]:
    """Return a value that changes when weights or modules do.

    Raises:
        OSError: a file is gone.
    """
    known: dict[Path, tuple[int, int]] = {}
    read = tuple((name, id(source.weights_map), source.identity(known)) for name, source in sources.items())
    held = tuple(fingerprint_of(p) for p in model.parameters() if p.device.type != "meta")
    return tuple(map(id, model.modules())), read, held


def _folder_of(sources: Mapping[str, Source]) -> Path | None:
    """Return the folder for copies: in the folder that was named for offloading."""
    found = next((folder for source in sources.values() if (folder := source.folder()) is not None), None)
    return None if found is None else found / FOLDER


def _digest(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]
