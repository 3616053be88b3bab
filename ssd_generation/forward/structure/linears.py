"""Linear layers of any make: how they are recognised, and which weights they compute with.

A quantiser replaces a linear layer by a class of its own, or the weight inside by one; an adapter wraps the layer. None
of them is known here by name. A linear layer states its input and output features, and its weights are its outputs for
unit vectors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...support.once import looked_at_once
from ...support.structure import follows_from_structure
from ...support.tensors import fingerprint_of

__all__ = [
    "CannotRead",
    "dense",
    "features",
    "few_of",
    "has_foreign",
    "identity",
    "is_foreign",
    "is_plain",
    "is_plain_linear",
    "linears",
    "linears_of",
    "mixes_rows",
    "rounds_activations",
    "sample",
    "tensors_of",
]

_ROWS = 1024
"""Unit vectors that pass through a layer at a time."""

_TOLERANCE = 0.1
"""Greatest relative error of products with weights that were read, compared with those of the layer. The layer may
round activations to 8 bits; drafts are verified."""


class CannotRead(Exception):
    """The weights that a layer computes with cannot be obtained; the message says why."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a weight is an ordinary tensor: numbers at an address, no class of its own (torchao, DTensor)."""
    return (type(tensor) is nn.Parameter or type(tensor) is torch.Tensor) and tensor.device.type != "meta"


def is_plain_linear(module: nn.Module) -> bool:
    """Tell whether a module is torch's own layer, with weights that are floating-point numbers at an address."""
    weight = getattr(module, "weight", None) if type(module) is nn.Linear else None  # some create it later
    return weight is not None and is_plain(weight) and weight.is_floating_point()


def is_foreign(module: nn.Module) -> bool:
    """Tell whether a linear layer is a quantiser's or a third party's: not torch's, nor one of a model's own code."""
    weight = getattr(module, "weight", None)
    is_usual = isinstance(weight, torch.Tensor) and is_plain(weight) and weight.is_floating_point()
    return not (is_usual and type(module).__module__.startswith(("torch.nn.", "transformers.models.")))


def features(module: nn.Module) -> tuple[int, int] | None:
    """Return the input and output channels of a linear layer, `(K, N)`; `None` where a module does not state them."""
    found = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if all(type(count) is int and count > 0 for count in found):
        return found  # type: ignore[return-value]
    return None


def linears(top: nn.Module, wrapped: bool = True) -> Iterator[nn.Module]:
    """Yield the linear layers of a module, of any make, in its order.

    Args:
        top: the module; it may be one itself.
        wrapped: whether a layer with another one of its shape inside, an adapter's, gives the inner one. The adapter's
            own small layers are never given.
    """
    shape = features(top)
    if shape is None:
        for child in top.children():
            yield from linears(child, wrapped)
        return
    inside = next((module for module in top.modules() if module is not top and features(module) == shape), None)
    if inside is None or not wrapped:
        yield top
    else:
        yield from linears(inside)


@looked_at_once
def linears_of(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of a whole model, as `linears` gives them."""
    return [module for reference in _linears_of(model) if (module := reference()) is not None]


@follows_from_structure
def _linears_of(model: nn.Module) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(module) for module in linears(model)]


@follows_from_structure
def has_foreign(model: nn.Module) -> bool:
    """Tell whether any linear layer of a model is a quantiser's or a third party's."""
    return any(map(is_foreign, linears_of(model)))


def identity(module: nn.Module) -> tuple[Any, ...]:
    """Return a value that changes with a layer's weights, so that nothing made of old ones is used for new ones."""
    return (id(module), *map(fingerprint_of, tensors_of(module)))


def sample(modules: list[nn.Module]) -> torch.Tensor:
    """Return a few numbers of the weights of each layer.

    They change with weights that are overwritten in a way that torch does not count, such as by merging an adapter
    into them (`weight.data += …`).
    """
    few = []
    for module in modules:
        own: list[Any] = [tensor for tensor in module._parameters.values() if tensor is not None and tensor.ndim > 2]
        for weight in own or [getattr(module, "weight", None)]:  # matrices of experts, or one
            if isinstance(weight, torch.Tensor) and is_plain(weight) and weight.numel():
                few.append(few_of(weight, 8))
    return torch.cat(few) if few else torch.zeros(0, device="cpu")


def few_of(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return some numbers of a tensor, spread over it: a view, where it has no gaps."""
    tensor, total = tensor.detach(), tensor.numel()
    if tensor.is_contiguous():
        step = max(total // most, 1)  # in one operation: each call reads some numbers of all layers
        return tensor.as_strided((min(most, -(-total // step)),), (step,))
    # A tensor with gaps, or an expanded one, is not copied whole.
    flat = tensor[..., 0].reshape(-1)
    return flat[:: max(len(flat) // most, 1)][:most]


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a layer, and of the layers inside it."""
    if not module._modules:  # as most are
        for tensors in (module._parameters, module._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)
        return
    yield from module.parameters()
    yield from module.buffers()


def dense(module: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights that a linear layer computes with, and its bias.

    Weights that a class gives itself (`dequantize`) are used where the layer agrees with them on random inputs. The
    weights of other layers are their outputs for unit vectors: two times K²·N operations.

    Args:
        module: a linear layer of any make.
        dtype: type of the activations that it takes.

    Returns:
        Weights `(N, K)`, floating point numbers, and the bias `(N,)` or `None`.

    Raises:
        CannotRead: the layer is not linear, or fails.
    """
    if is_plain_linear(module):
        return module.weight, module.bias  # type: ignore[return-value]
    shape = features(module)
    name = _name(module)
    if shape is None:
        raise CannotRead(f"{name} is not known to be a linear layer: it has no in_features and out_features")
    columns, rows = shape
    with torch.no_grad():
        bias = getattr(module, "bias", None)
        bias = bias.detach() if isinstance(bias, torch.Tensor) and is_plain(bias) and bias.numel() == rows else None
        generator = torch.Generator(device="cpu").manual_seed(0)
        # Small numbers, as after a norm: greater ones may be taken for outliers.
        probe = torch.randn((8, columns), generator=generator, device="cpu").to(dtype)
        try:
            expected = module(probe).float()
        except Exception as error:
            raise CannotRead(f"{name} fails for random inputs ({type(error).__name__}: {error})") from error
        for weight in _said_by_itself(module, rows, columns):
            if _agrees(weight, bias, probe, expected):
                return weight, bias
        try:
            weight = _of_unit_vectors(module, rows, columns, dtype, bias)
        except Exception as error:
            raise CannotRead(f"{name} fails for unit vectors ({type(error).__name__}: {error})") from error
        if not _agrees(weight, bias, probe, expected):
            raise CannotRead(f"{name} is not linear: its outputs for unit vectors do not add up")
    return weight, bias


def rounds_activations(module: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a layer rounds its input to fewer bits than it has.

    It may round to a smaller floating-point type, which loses the last bits of float32, or to integers, which lose
    small numbers next to large ones.

    Args:
        module: a linear layer of any make.
        dtype: type of the activations that it takes.

    Raises:
        Exception: whatever the layer raises.
    """
    columns, _ = features(module) or (0, 0)
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.rand((1, columns), generator=generator, device="cpu") - 0.5
    even = noise.sign() * 1.5  # exact in all types
    large, small = torch.zeros_like(noise), noise * 0.005
    large[0, 0], small[0, 0] = 1, 1
    pairs = [(large, small)]
    if dtype is torch.float32:
        pairs.append((even, even * (1 + 1e-5 * noise)))
    with torch.no_grad():
        return any(torch.equal(module(one.to(dtype)), module(other.to(dtype))) for one, other in pairs)


def mixes_rows(module: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a layer's output for a row depends on the other rows: on a large number in one of them.

    Args:
        module: a linear layer of any make.
        dtype: type of the activations that it takes.

    Raises:
        Exception: whatever the layer raises.
    """
    columns, _ = features(module) or (0, 0)
    rows = torch.randn((2, columns), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu").clamp(-3, 3)
    rows[0, 0] = 5
    with torch.no_grad():
        before = module(rows.to(dtype)[None])[:, 0].clone()  # kernels are chosen by shapes, which are the same here
        rows[1, 0] = 60
        return not torch.equal(before, module(rows.to(dtype)[None])[:, 0])


def _name(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    kind = type(module).__name__
    if isinstance(weight, torch.Tensor) and not is_plain(weight):
        kind += f" with {type(weight).__name__}"
    return kind


def _said_by_itself(module: nn.Module, rows: int, columns: int) -> Iterator[torch.Tensor]:
    own = getattr(module, "weight", None)
    if isinstance(own, torch.Tensor) and is_plain(own) and own.is_floating_point() and own.shape == (rows, columns):
        yield own
    for owner in (own, module):
        method = getattr(type(owner), "dequantize", None)
        if method is None or method is torch.Tensor.dequantize:
            continue
        try:
            weight = method(owner)
        except Exception:  # whatever its class raises
            continue
        if isinstance(weight, torch.Tensor) and is_plain(weight) and weight.is_floating_point():
            if tuple(weight.shape) == (rows, columns):
                yield weight
            if tuple(weight.shape) == (columns, rows):
                yield weight.T


def _of_unit_vectors(
    module: nn.Module, rows: int, columns: int, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    weight = torch.empty((rows, columns), device="cpu")
    for start in range(0, columns, _ROWS):
        count = min(_ROWS, columns - start)
        units = torch.zeros((count, columns), dtype=dtype, device="cpu")
        units[torch.arange(count, device="cpu"), torch.arange(start, start + count, device="cpu")] = 1
        products = module(units).float()
        weight[:, start : start + count] = (products if bias is None else products - bias.float()).T
    return weight


def _agrees(weight: torch.Tensor, bias: torch.Tensor | None, probe: torch.Tensor, expected: torch.Tensor) -> bool:
    found = functional.linear(probe.float(), weight.float(), None if bias is None else bias.float())
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm())
