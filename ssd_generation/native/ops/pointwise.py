"""Elementwise operations with broadcasting, as kernels of a list (pointwise_code.py)."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import torch

from ..sequence import Block, Operand, Step
from .kernels import NAMES, bits_of, flags, kernel

__all__ = ["NoKernel", "Part", "likeness", "mean_step", "pointwise_step"]

_SHARE = 4096
"""Elements per work item."""


class NoKernel(Exception):
    """There is no kernel for this operation on these operands."""


@dataclass(frozen=True)
class Part:
    """A part of a block, and a tensor without memory that has its shape and strides, in a storage like the block's."""

    block: Block
    like: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Tell whether its numbers follow each other without gaps."""
        return self.like.is_contiguous()

    def operand(self, is_written: bool = False) -> Operand:
        """Return its place."""
        return Operand(self.block, int(self.like.storage_offset()), is_written)


def pointwise_step(
    what: str, result: Part, operands: Several[Part | torch.Tensor | float], tokens_at: tuple[int, int]
) -> Step:
    """Return the kernel of an elementwise operation.

    Args:
        what: a name in `pointwise_code.OPERATIONS`.
        result: where its result is written.
        operands: tensors of the pass, weights and numbers, which are broadcast to the result's shape.
        tokens_at: the result's dimension that grows with the tokens of a pass, and by how many elements for each.

    Raises:
        NoKernel: the operands lie otherwise than the kernel reads them.
    """
    shape = result.like.shape
    likes = [operand.like if isinstance(operand, Part) else operand for operand in operands]
    tensors = [like.expand(shape) for like in likes if isinstance(like, torch.Tensor)]
    (groups, columns), (ways, *of_tensors) = _in_groups(shape, [result.like, *tensors], tokens_at)
    kinds: list[str] = []
    fields: list[int | Operand] = [result.operand(True), groups, columns, *ways[:2]]
    kind_of_result = NAMES[result.like.dtype]
    if ways[2] != 1 and columns > 1:
        kind_of_result += ":s"
        fields.append(ways[2])
    held: list[torch.Tensor] = []
    others = iter(of_tensors)
    for operand in operands:
        if not isinstance(operand, Part | torch.Tensor):
            kinds.append("float32:n:0")
            fields.append(bits_of(operand))
            continue
        to_row, to_group, to_column = next(others)
        dtype = operand.like.dtype if isinstance(operand, Part) else operand.dtype
        if dtype not in NAMES:
            raise NoKernel
        is_one, has_steps = to_column == 1 or columns == 1, to_column not in (0, 1) and columns > 1
        kinds.append(f"{NAMES[dtype]}:{'x' if isinstance(operand, Part) else 'w'}:{'s' if has_steps else int(is_one)}")
        if isinstance(operand, Part):
            fields += [operand.operand(), to_row, to_group]
        else:
            if to_row:
                raise NoKernel
            held.append(operand)
            fields += [operand.data_ptr(), to_group]
        if has_steps:
            fields.append(to_column)
    if sum(2 if isinstance(entry, Operand) else 1 for entry in fields) > 30:
        raise NoKernel
    address = kernel("pointwise", what, kind_of_result, *kinds)
    how = flags(max(1, result.like.numel() // _SHARE))
    return Step(what, address, how, fields, held)


def mean_step(result: Part, x: Part, tokens_at: tuple[int, int]) -> Step:
    """Return the kernel of a mean over the last dimension.

    Args:
        result: `(…, 1)`, stored row by row without gaps.
        x: `(…, K)`.
        tokens_at: as in `pointwise_step`.

    Raises:
        NoKernel: x lies otherwise than the kernel reads it, or the result does.
    """
    columns = x.like.shape[-1]
    if x.like.stride(-1) != 1 or x.like.dtype not in NAMES:
        raise NoKernel
    one = x.like[..., 0]
    # Groups of the mean are what columns are elsewhere: they follow each other in the result.
    (outer, groups), (written, ways) = _in_groups(one.shape, [result.like[..., 0], one], tokens_at)
    if outer != 1 or written[0] not in (0, groups) or (groups > 1 and written[2] != 1):
        raise NoKernel
    fields: list[int | Operand] = [result.operand(True), groups, columns, x.operand(), ways[0], ways[2]]
    address = kernel("pointwise", "mean", NAMES[result.like.dtype], NAMES[x.like.dtype])
    return Step("mean", address, flags(max(1, x.like.numel() // _SHARE)), fields)


def _in_groups(
    shape: torch.Size, tensors: Several[torch.Tensor], tokens_at: tuple[int, int]
) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
    """Return groups and columns into which a shape falls, and the strides of each tensor: to a row, a group, a column.

    Args:
        shape: a shape.
        tensors: tensors of this shape.
        tokens_at: the dimension that grows with the tokens of a pass, and by how many elements for each.

    Raises:
        NoKernel: there are more dimensions than these.
    """
    at, each = tokens_at
    if not at < len(shape) or shape[at] % each:
        raise NoKernel
    # The stride of a dimension with one element says nothing.
    to_row = [one.stride(at) * each if shape[at] > each else 0 for one in tensors]
    dims = [dim for dim, size in enumerate(shape) if size != 1 and dim != at]
    sizes = [shape[dim] for dim in dims]
    ways = [[one.stride(dim) for dim in dims] for one in tensors]
    if each > 1:  # these lie within a row, where the tokens are
        place = sum(dim < at for dim in dims)
        sizes.insert(place, each)
        for one, way in zip(tensors, ways, strict=True):
            way.insert(place, one.stride(at))
    # Merge neighbouring dimensions that all tensors store as if they were one.
    for place in range(len(sizes) - 1, 0, -1):
        if all(one[place - 1] == one[place] * sizes[place] for one in ways):
            sizes[place - 1 : place + 1] = [sizes[place - 1] * sizes[place]]
            for way in ways:
                del way[place - 1]
    if len(sizes) > 2:
        raise NoKernel
    groups, columns = ([1, 1, *sizes])[-2:]
    pairs = [([0, 0, *one])[-2:] for one in ways]
    found = [(row, to_group, to_column) for row, (to_group, to_column) in zip(to_row, pairs, strict=True)]
    return (groups, columns), found


def likeness(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory, of a shape and type."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
