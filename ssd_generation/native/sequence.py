"""Lists of kernels that run as one call: what a pass computes between two things that only torch can do."""

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
"""Places of the table that are no operands': rows, the memory for what comes between, and the cache's own table."""


class _Attention(Protocol):
    def table(self) -> int:
        """The address of the cache's table (cache_table.py)."""


@dataclass(eq=False)
class Block:
    """Memory that kernels read or write.

    Attributes:
        shape: of the tensor that it holds, without gaps.
        source: which of the list's inputs it is; `None` where a kernel writes it.
    """

    shape: tuple[int, ...]
    source: int | None = None

    def count(self) -> int:
        """Numbers in it."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Operand:
    """A place in a block.

    Attributes:
        block: which.
        offset: numbers before it.
        is_written: whether the kernel writes there.
    """

    block: Block
    offset: int = 0
    is_written: bool = False


@dataclass
class Step:
    """A kernel and what it is given.

    Attributes:
        name: of what it computes, such as "linear" or "norm".
        kernel: its address.
        how: it is run, as `flags` gives it.
        fields: its record from 2 on; an operand stands for two numbers.
        held: what must live as long as the kernel may run.
    """

    name: str
    kernel: int
    how: int
    fields: list[int | Operand]
    held: Any = None

    def operands(self) -> list[Operand]:
        """Those among the fields."""
        return [entry for entry in self.fields if isinstance(entry, Operand)]


@dataclass(eq=False)
class KernelList:
    """Kernels that run one after the other: `(attention, inputs …) → the outputs`, one as it is, several as a tuple.

    Attributes:
        rows: tokens of the pass.
        dtype: of all tensors.
        outputs: shapes of the results.
        bytes: of memory for what comes between.
        steps: the kernels.
    """

    rows: int
    dtype: torch.dtype
    outputs: list[tuple[int, ...]]
    bytes: int
    steps: list[Step] = field(repr=False)
    _records: Any = field(repr=False)

    __name__ = "kernels"  # in the code of a pass

    def __post_init__(self) -> None:
        self._address, self._count = ctypes.addressof(self._records), len(self.steps)
        self._run = run_list()

    def only(self, chosen: Several[int]) -> KernelList:
        """Some of the kernels, by number, one after the other, on whatever lies where others would have written.

        To measure how long they take: they are called as the whole list is.
        """
        records = (Record * len(chosen))()
        for place, at in enumerate(chosen):
            records[place][:] = self._records[at][:]
            records[place][1] |= 1  # all threads meet
        return dataclasses.replace(self, steps=[self.steps[at] for at in chosen], _records=records)

    def __call__(self, attention: _Attention | None, *inputs: torch.Tensor) -> Any:
        """Run them.

        Args:
            attention: what holds the cache; `None` where no kernel reads it.
            inputs: of the shapes that the blocks have; their type is changed where it is another.
        """
        dtype = self.dtype
        # Each is held by a name until the kernels are through.
        given = [(one if one.dtype is dtype else one.to(dtype)).contiguous() for one in inputs]
        results = [torch.empty(shape, dtype=dtype, device="cpu") for shape in self.outputs]
        between = torch.empty(self.bytes, dtype=torch.uint8, device="cpu")
        cache = 0 if attention is None else attention.table()
        numbers = [self.rows, between.data_ptr(), cache]
        numbers += [tensor.data_ptr() for tensor in (*given, *results)]
        table = (ctypes.c_int64 * len(numbers))(*numbers)
        self._run(self._address, self._count, ctypes.addressof(table), torch.get_num_threads())
        return results[0] if len(results) == 1 else tuple(results)


def make_list(steps: Several[Step], outputs: Several[Block], inputs: int, rows: int, dtype: torch.dtype) -> KernelList:
    """Kernels as one call.

    Threads meet between two steps where one reads what the other wrote, or writes where the other read or wrote.

    Args:
        steps: in order.
        outputs: blocks that are results.
        inputs: how many tensors are given.
        rows: tokens of the pass.
        dtype: of all tensors.
    """
    places, total = _places(steps, outputs, dtype.itemsize)
    for at, block in enumerate(outputs):
        places[block] = _FIRST + inputs + at, 0
    records = (Record * len(steps))()
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for at, step in enumerate(steps):
        numbers: list[int] = []
        # Where it lies counts, not what it is: blocks take each other's place.
        its_read: set[tuple[int, int]] = set()
        its_written: set[tuple[int, int]] = set()
        for entry in step.fields:
            if isinstance(entry, Operand):
                source = entry.block.source
                slot, offset = places[entry.block] if source is None else (_FIRST + source, 0)
                numbers += [slot, offset + entry.offset * dtype.itemsize]
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
    return KernelList(rows, dtype, [block.shape for block in outputs], total, list(steps), records)


def _places(steps: Several[Step], outputs: Several[Block], itemsize: int) -> tuple[dict[Block, tuple[int, int]], int]:
    """Where each block that only the kernels see lies, and how many bytes they take together.

    A block's memory is free again behind the last step that reads it; another takes it only if it is as large, so that
    two that are partly the same never have to be told apart.
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
            size = -(-block.count() * itemsize // _ALIGNMENT) * _ALIGNMENT
            if free.get(size):
                offset = free[size].pop()
            else:
                offset, total = total, total + size
            places[block] = 1, offset
        for block in {operand.block for operand in step.operands()}:
            if block in places and last[block] == at:
                size = -(-block.count() * itemsize // _ALIGNMENT) * _ALIGNMENT
                free.setdefault(size, []).append(places[block][1])
    return places, total
