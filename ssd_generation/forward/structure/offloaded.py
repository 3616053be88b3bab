"""Models whose weights accelerate brings into memory for each pass: where these are, and a stand-in without them.

Offloaded weights are on the meta device; a hook on their module (`_hf_hook`, accelerate's `AlignDevicesHook`) has a map
from their names to what is read for a pass: from a file, or from CPU memory.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...support.once import looked_at_once
from ...support.structure import follows_from_structure
from ...support.tensors import fingerprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "CannotStandIn",
    "Source",
    "clone_without_hooks",
    "is_offloaded",
    "replace_tensor",
    "sources_of",
    "stand_in",
    "streamed_bytes",
    "why_unreadable",
]

_ModelT = TypeVar("_ModelT", bound=nn.Module)

SMALL = 1 << 18
"""Elements up to which a tensor (a norm's weight, a bias, a router) is read unchanged for a stand-in."""

_ROWS = 64
"""Distinct rows of the large matrices of a stand-in; the others repeat them."""


class CannotStandIn(Exception):
    """A model cannot be copied without its hooks; the message says why."""


# ----------------------------------------------------------------------------------------------------------------------
# where the weights are


@dataclass(frozen=True)
class Source:
    """Location from which one offloaded tensor is read.

    Attributes:
        weights_map: the hook's map.
        key: the tensor's name in that map.
    """

    weights_map: Mapping[str, torch.Tensor]
    key: str

    def load(self) -> torch.Tensor:
        """Read the tensor, as a pass does.

        Raises:
            OSError, KeyError: the tensor is no longer there.
        """
        return self.weights_map[self.key].detach()

    def _innermost(self) -> tuple[Any, str]:
        """Return the map without accelerate's views of parts of it, and the tensor's name in it."""
        found, key = self.weights_map, self.key
        while hasattr(found, "dataset") and hasattr(found, "prefix"):
            key, found = f"{found.prefix}{key}", found.dataset
        return found, key

    def file(self) -> Path | None:
        """Return the file that it is read from; `None` where it is in memory, or where that is not known."""
        found, key = self._innermost()
        if isinstance(found, dict) or key in getattr(found, "state_dict", ()):
            return None
        entry = (getattr(found, "index", None) or {}).get(key)
        if entry is None:
            return None
        stored, folder = entry.get("safetensors_file"), getattr(found, "save_folder", None)
        if stored is not None:
            return Path(stored)
        return None if folder is None else Path(folder) / f"{key}.dat"

    def folder(self) -> Path | None:
        """Return the folder that was named for offloading."""
        folder = getattr(self._innermost()[0], "save_folder", None)
        return None if folder is None else Path(folder)

    def identity(self, known: dict[Path, tuple[int, int]]) -> tuple[Any, ...]:
        """Return a value that changes when the stored tensor does.

        Args:
            known: size and time of files that were examined just now; filled here.

        Raises:
            OSError: the file is no longer there.
        """
        path = self.file()
        if path is not None:
            if path not in known:
                seen = os.stat(path)
                known[path] = seen.st_size, seen.st_mtime_ns
            found, key = self._innermost()
            entry = found.index[key]
            named = (entry.get("weight_name", key), entry.get("dtype"), entry.get("shape"))
            return (os.path.abspath(path), *known[path], *named)
        found, key = self._innermost()
        held = found.get(key) if isinstance(found, dict) else getattr(found, "state_dict", {}).get(key)
        if isinstance(held, torch.Tensor):
            return fingerprint_of(held)
        return (id(found), key)


@looked_at_once
def is_offloaded(model: nn.Module) -> bool:
    """Tell whether weights of a model are brought into memory for each pass."""
    return _has_unreal(model) and bool(sources_of(model))


@follows_from_structure
def _has_unreal(model: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def _offloading_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module that bring its weights into memory."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", None) or (hook,):
        if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None:
            yield each


def sources_of(model: nn.Module) -> dict[str, Source]:
    """Return the sources of the offloaded parameters and buffers of a model, by name."""
    found: dict[str, Source] = {}
    for prefix, module in model.named_modules():
        for hook in _offloading_hooks(module):
            recurse = bool(getattr(hook, "place_submodules", False))
            for key, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
                if tensor.device.type == "meta":
                    found[f"{prefix}.{key}" if prefix else key] = Source(hook.weights_map, key)
    return found


def streamed_bytes(model: nn.Module) -> int:
    """Count the bytes that each pass brings into memory."""
    return sum(
        tensor.numel() * tensor.element_size()
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.device.type == "meta"
    )


def why_unreadable(model: nn.Module) -> str | None:
    """Return why a pass cannot read the offloaded weights: a file is gone; `None` where all files are there."""
    if not is_offloaded(model):
        return None
    for path in dict.fromkeys(source.file() for source in sources_of(model).values()):
        if path is not None and not os.access(path, os.R_OK):
            return (
                f"Weights of {type(model).__name__} are offloaded to {path}, which is missing or cannot be read, so "
                "the model cannot run. Restore the file, or load the model again."
            )
    return None


# ----------------------------------------------------------------------------------------------------------------------
# a model without its hooks


def clone_without_hooks(model: _ModelT) -> tuple[_ModelT, dict[int, nn.Module]]:
    """Clone a model without its hooks; the clone shares parameters and buffers with it.

    Returns:
        The clone, and its modules by id of the model's.

    Raises:
        CannotStandIn: the forward of a module is patched by something other than accelerate.
    """
    made: dict[int, nn.Module] = {}

    def clone(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        attributes = dict(module.__dict__)
        if "_hf_hook" in attributes:
            if getattr(attributes.pop("_old_forward", None), "__func__", None) is not type(module).forward:
                raise CannotStandIn(f"the forward of {type(module).__name__} is patched")
            for name in ("_hf_hook", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"):
                attributes.pop(name, None)
        elif "forward" in attributes:
            raise CannotStandIn(f"the forward of {type(module).__name__} is patched")
        attributes.pop("hf_device_map", None)
        new = type(module).__new__(type(module))
        new.__dict__.update(attributes)
        made[id(module)] = new
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            new.__dict__[name] = attributes[name].copy()
        for name in attributes:
            if name.startswith(("_forward_", "_backward_", "_state_dict_", "_load_state_dict_")) and "hooks" in name:
                new.__dict__[name] = OrderedDict()
        new.__dict__["_modules"] = {
            name: None if child is None else clone(child) for name, child in attributes["_modules"].items()
        }
        return new

    return clone(model), made  # type: ignore[return-value]


class _FewRows(TorchFunctionMode):
    """Mode that computes linear layers of a stand-in from the first of their rows, which the others repeat."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) > 1 and id(args[1]) in self._weights:
            x, weight, bias = *args[:2], args[2] if len(args) > 2 else kwargs.get("bias")
            y = func(x, weight[:_ROWS].contiguous())
            y = y.repeat(*(1,) * (y.ndim - 1), math.ceil(len(weight) / y.shape[-1]))[..., : len(weight)]
            return y if bias is None else y + bias
        return func(*args, **kwargs)


@contextmanager
def stand_in(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, dict[int, nn.Module]]]:
    """Make a model of the same code and small weights, with random numbers in place of the large ones.

    The wiring of a model's layers, and whether its passes over several tokens equal passes over one, depend on its code
    alone. To test it with offloaded weights would take dozens of passes, each of which reads all of them. The large
    matrices of this model take almost no memory: their rows overlap.

    Yields:
        The model, which computes correctly on this thread and within the context only, and its modules by id of the
        original's.

    Raises:
        CannotStandIn: see `clone_without_hooks`.
    """
    sources = sources_of(model)
    other, made = clone_without_hooks(model)
    generator = torch.Generator(device="cpu").manual_seed(0)
    matrices: set[int] = set()
    for name, source in sources.items():
        prefix, _, key = name.rpartition(".")
        module = other.get_submodule(prefix)
        meta = getattr(module, key)
        if meta.numel() <= SMALL:
            replace_tensor(module, key, source.load().to("cpu"))
        else:
            pretended = _random_rows(meta, generator)
            replace_tensor(module, key, pretended)
            if meta.ndim == 2:
                matrices.add(id(getattr(module, key)))
    with _FewRows(matrices):
        yield other, made


def _random_rows(meta: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Make a tensor of this shape and type whose parts overlap, so that they take little memory.

    Each row of a matrix begins one number after the row before; each of several matrices begins one row after the one
    before (kernels for experts want whole rows).
    """
    columns = meta.shape[-1]
    if meta.ndim > 2:
        rows = sum(meta.shape[:-1]) - meta.ndim + 2
        count, strides = rows * columns, (*(columns,) * (meta.ndim - 1), 1)
    else:
        count, strides = sum(meta.shape) - meta.ndim + 1, (1,) * meta.ndim
    numbers = torch.randn(count, generator=generator, device="cpu") / math.sqrt(columns)
    return numbers.to(meta.dtype).as_strided(meta.shape, strides)


def replace_tensor(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer by another tensor."""
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[name] = value
