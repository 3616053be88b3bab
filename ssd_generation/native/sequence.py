"""Lists of kernels that run as one call: the part of a pass between two operations that only torch can do."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .ops.kernels import Record, run_list

__all__ = ["Block", "KernelList", "Operand", "Step", "make_list"]

_ALIGNMENT = 64
_FIRST = 3
"""Number of the table's entries before those of operands: rows, memory for intermediate results, the cache's table."""


class _Attention(Protocol):
    def table(self) -> int:
        """Return the address of the cache's table (cache_table.py)."""


@dataclass(eq=False)
class Block:
    """Memory that kernels read or write.

    Attributes:
        shape: shape of the tensor that it holds, without gaps.
        source: index among the list's inputs; `None` where a kernel writes it.
        dtype: type of its numbers; `None`: that of the list.
    """

    shape: tuple[int, ...]
    source: int | None = None
    dtype: torch.dtype | None = None

    def count(self) -> int:
        """Return how many numbers it holds."""
        return int(torch.Size(self.shape).numel())

    def bytes(self, dtype: torch.dtype) -> int:
        """Return its size, in a list of this type."""
        return self.count() * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class Operand:
    """A place in a block.

    Attributes:
        block: the block.
        offset: number of elements before the place.
        is_written: whether the kernel writes there.
    """

    block: Block
    offset: int = 0
    is_written: bool = False


@dataclass
class Step:
    """A kernel and its arguments.

    Attributes:
        name: name of the operation, such as "linear" or "norm".
        kernel: its address.
        how: how it is run, as returned by `flags`.
        fields: its record from 2 on; an operand takes two numbers.
        held: object that must live as long as the kernel may run.
    """

    name: str
    kernel: int
    how: int
    fields: list[int | Operand]
    held: Any = None

    def operands(self) -> list[Operand]:
        """Return the operands among the fields."""
        return [entry for entry in self.fields if isinstance(entry, Operand)]


@dataclass(eq=False)
class KernelList:
    """Kernels that run one after the other: `(attention, inputs …) → outputs`, a tensor alone or several as a tuple.

    Attributes:
        rows: number of tokens of the pass.
        dtype: type of the tensors whose block has no other.
        inputs: types of the inputs.
        outputs: shapes and types of the results.
        bytes: size of the memory for intermediate results.
        steps: the kernels.
    """

    rows: int
    dtype: torch.dtype
    inputs: list[torch.dtype]
    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    bytes: int
    steps: list[Step] = field(repr=False)
    _records: Any = field(repr=False)

    __name__ = "kernels"  # in the generated code of a pass

    def __post_init__(self) -> None:
        self._address, self._count = ctypes.addressof(self._records), len(self.steps)
        self._run = run_list()

    def only(self, chosen: Several[int]) -> KernelList:
        """Return a list of some of the kernels, by index, which run on whatever the memory holds.

        It serves to measure how long they take: they are called as the whole list is.
        """
        records = (Record * len(chosen))()
        for place, at in enumerate(chosen):
            records[place][:] = self._records[at][:]
            records[place][1] |= 1  # all threads meet
        return dataclasses.replace(self, steps=[self.steps[at] for at in chosen], _records=records)

    def __call__(self, attention: _Attention | None, *inputs: torch.Tensor) -> Any:
        """Run the kernels.

        Args:
            attention: holder of the cache; `None` where no kernel reads it.
            inputs: tensors of the shapes that the blocks have; cast where their type differs.
        """
        # Names hold references until the kernels have finished.
        given = [
            (one if one.dtype is kind else one.to(kind)).contiguous()
            for one, kind in zip(inputs, self.inputs, strict=True)
        ]
        results = [torch.empty(shape, dtype=kind, device="cpu") for shape, kind in self.outputs]
        between = torch.empty(self.bytes, dtype=torch.uint8, device="cpu")
        cache = 0 if attention is None else attention.table()
        numbers = [self.rows, between.data_ptr(), cache]
        numbers += [tensor.data_ptr() for tensor in (*given, *results)]
        table = (ctypes.c_int64 * len(numbers))(*numbers)
        self._run(self._address, self._count, ctypes.addressof(table), torch.get_num_threads())
        return results[0] if len(results) == 1 else tuple(results)


def make_list(steps: Several[Step], outputs: Several[Block], inputs: int, rows: int, dtype: torch.dtype) -> KernelList:
    """Combine kernels into one call.

    Threads meet between two steps where one reads what the other wrote, or writes where the other read or wrote.

    Args:
        steps: kernels in order.
        outputs: blocks that are results.
        inputs: number of input tensors.
        rows: number of tokens of the pass.
        dtype: type of all tensors whose block has no other.
    """
    places, total = _places(steps, outputs, dtype)
    for at, block in enumerate(outputs):
        places[block] = _FIRST + inputs + at, 0
    records = (Record * len(steps))()
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for at, step in enumerate(steps):
        numbers: list[int] = []
        # Addresses count, not blocks: blocks reuse each other's memory.
        its_read: set[tuple[int, int]] = set()
        its_written: set[tuple[int, int]] = set()
        for entry in step.fields:
            if isinstance(entry, Operand):
                source = entry.block.source
                slot, offset = places[entry.block] if source is None else (_FIRST + source, 0)
                numbers += [slot, offset + entry.offset * (entry.block.dtype or dtype).itemsize]
                (its_written if entry.is_written else its_read).add((slot, offset))
            else:
                numbers.append(entry)
        if not (its_read.isdisjoint(written) and its_written.isdisjoint(written | read)):
            records[at - 1][1] |= 1  # all threads meet
            read, written = set(), set()
        read |= its_read
        written |= its_written
        for place, number in enumerate((step.kernel, step.how, *numbers)):
            records[at][place] = number
    results = [(block.shape, block.dtype or dtype) for block in outputs]
    kinds = [dtype] * inputs
    for step in steps:
        for block in (operand.block for operand in step.operands()):
            if block.source is not None:
                kinds[block.source] = block.dtype or dtype
    return KernelList(rows, dtype, kinds, results, total, list(steps), records)


def _places(
    steps: Several[Step], outputs: Several[Block], dtype: torch.dtype
) -> tuple[dict[Block, tuple[int, int]], int]:
    """Return the place of each block that only the kernels see, and how many bytes they take together.

    A block's memory is free again after the last step that reads it; another block takes it only if it is as large, so
    that no two blocks overlap partly.
    """
    last = {operand.block: at for at, step in enumerate(steps) for operand in step.operands()}
    places: dict[Block, tuple[int, int]] = {}
    free: dict[int, list[int]] = {}
    total = 0
    for at, step in enumerate(steps):
        for operand in step.operands():
            block = operand.block
            if block.source is not None or block in outputs or block in places:
                continue
            size = -(-block.bytes(dtype) // _ALIGNMENT) * _ALIGNMENT
            if free.get(size):
                offset = free[size].pop()
            else:
                offset, total = total, total + size
            places[block] = 1, offset
        for block in {operand.block for operand in step.operands()}:
            if block in places and last[block] == at:
                size = -(-block.bytes(dtype) // _ALIGNMENT) * _ALIGNMENT
                free.setdefault(size, []).append(places[block][1])
    return places, total
