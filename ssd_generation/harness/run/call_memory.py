"""Memory of a method: the bytes that it holds between calls, and the peak during a call.

The peak counts all tensors that are alive at once: on CUDA by the allocators of all devices that hold a part of the
model (the sum of their peaks), on the CPU by tracking every tensor that PyTorch makes. Resident memory is too noisy
there: it differs by tens of megabytes from one run to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...forward.copies.low_bit import copy_bytes, drop_copies
from ...support.unasked import only_asked_drafts
from ...tuning.automatic import weight_bytes
from ..methods import Method
from .calls import Caller

__all__ = ["peak_bytes", "persistent_bytes"]


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracker of the storages that operators return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak: int = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in inputs and storage not in self._known:
                    self._known.add(storage)
                    size = storage.nbytes()
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def peak_bytes(model: Any, ids: torch.Tensor, **options: Any) -> int:
    """Measure the most bytes of tensors that were alive at once during a `generate` call, above those before it.

    On the CPU, tracking the tensors slows the call down: nothing can be timed meanwhile.

    Args:
        model: a transformers model.
        ids: the prompt, of shape `(1, prompt_length)`.
        **options: arguments of `generate`.
    """
    if model.device.type == "cuda":
        # A model may span several devices, and none of them need be the current one.
        models = [m for m in (model, options.get("assistant_model")) if m is not None]
        devices = {p.device for m in models for p in m.parameters() if p.device.type == "cuda"}
        start = 0
        for device in devices:
            torch.cuda.synchronize(device)
            start += torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        with only_asked_drafts():
            model.generate(ids, **options)
        return sum(torch.cuda.max_memory_allocated(device) for device in devices) - start
    live = _LiveBytes()
    with live, only_asked_drafts():
        model.generate(ids, **options)
    return live.peak


def persistent_bytes(
    caller: Caller, method: Method, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> int:
    """Return the bytes that a method holds between calls: low-bit copies, or another model.

    Args:
        caller: caller of the method.
        method: a method of `generate`, not of another runtime.
        inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
        options: arguments of `generate`.
    """
    if method.name == "assistant":
        return weight_bytes(caller.assistant)
    if not method.is_own:
        return 0
    # Methods share their copies, so each starts without any.
    drop_copies(caller.model)
    with caller.alone(method.name, learn=False):
        # A shorter call drafts nothing, and makes no copies.
        caller.model.generate(**inputs, **{**options, "max_new_tokens": 3, **caller.arguments(method.request)})
    return copy_bytes(caller.model)
