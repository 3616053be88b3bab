"""Captured passes whose nodes become lists of kernels, so that little of a pass is left to Python.

A pass over one token through a small model spends as long between its kernels as in them. Here neighbouring nodes that
there are kernels for become one call; everything else in a model stays between two of these. torch itself follows the
views, on tensors without memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ...native.ops.experts import NativeExperts
from ...native.ops.kernels import NAMES, bits_of, flags, kernel
from ...native.ops.linear import NativeLinear
from ...native.ops.rows import gated_silu, rms_norm, rotary
from ...native.sequence import Block, Operand, Step, make_list
from ..copies.low_bit import LowBitCopy
from .fx_graph import CapturedPass
from .rewrites import written_nodes

__all__ = ["use_kernel_lists"]

_NAMES = "view reshape transpose unsqueeze squeeze permute contiguous flatten unflatten narrow to"
_VIEWS = frozenset(_NAMES.split())
"""Methods whose result may share the memory of their argument; torch says whether it does."""


_SHARE = 4096
"""Elements between two layers that are worth a separate part of the work."""


_LARGEST = torch.finfo(torch.float32).max
"""Bound on factors, which kernels read as float32 numbers."""


class _No(Exception):
    """There is no kernel for this node."""


@dataclass(frozen=True)
class _Value:
    """A part of a block, and a tensor without memory that has its shape and strides, in a storage like the block's."""

    block: Block
    like: torch.Tensor

    @property
    def is_whole(self) -> bool:
        return self.like.is_contiguous()

    def operand(self) -> Operand:
        return Operand(self.block, int(self.like.storage_offset()))

    def rows_and_stride(self, rows: int) -> tuple[int, int]:
        """Return the columns of each of its `rows` rows, and the numbers from one row to the next."""
        like = self.like.flatten(0, -2) if self.like.ndim > 1 else self.like[None]
        if like.untyped_storage()._cdata != self.like.untyped_storage()._cdata or like.stride(1) != 1:
            raise _No
        if like.shape[0] != rows:
            raise _No
        return int(like.shape[1]), int(like.stride(0))


@dataclass
class _List:
    """Nodes that become one list of kernels."""

    rows: int
    dtype: torch.dtype
    cached: torch.dtype
    written: set[Any]
    nodes: dict[Any, None] = field(default_factory=dict)  # in order
    values: dict[Any, Any] = field(default_factory=dict)
    inputs: dict[Any, _Value] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    attention: Any = None

    # ------------------------------------------------------------------------------------------------------------------

    def take(self, captured: CapturedPass, node: Any) -> bool:
        """Add a node; return `False` where there is no kernel for it, and nothing has changed."""
        before = len(self.inputs)
        try:
            self._take(captured, node)
        except _No:
            for known in list(self.inputs)[before:]:
                del self.inputs[known]
            return False
        return True

    def _take(self, captured: CapturedPass, node: Any) -> None:
        target, args = node.target, node.args
        if node.op == "call_method" and target == "attend":
            self._attend(node)
        elif node.op == "call_method" or target is operator.getitem:
            self._view(node)
            return  # no kernel
        elif isinstance(target, NativeLinear):
            self._linear(node, target)
        elif isinstance(target, NativeExperts):
            self._experts(node, target)
        elif isinstance(of := getattr(target, "__self__", None), LowBitCopy) and of.native is not None:
            self._linear(node, of.native)
            if target.__func__ is LowBitCopy.apart:
                self.values[node] = tuple(
                    _Value(self.values[node].block, part)
                    for part in torch.split_with_sizes(self.values[node].like, of.sizes, -1)
                )
        elif target is rms_norm:
            weight = captured.constant(args[1])
            if weight is None or weight.dtype is not self.dtype or not weight.is_contiguous():
                raise _No
            weight = weight.detach()  # an alias, as `NativeLinear` holds
            x, columns = self._value(args[0]), int(weight.shape[0])
            of_all = x.like.numel() // columns
            if of_all % self.rows:
                raise _No
            width, stride = x.rows_and_stride(of_all)
            if width != columns:
                raise _No
            fields = [weight.data_ptr(), columns, bits_of(args[2]), of_all // self.rows, stride]
            self._step(node, "norm", [x.operand()], tuple(x.like.shape), fields, weight)
        elif target is gated_silu:
            gates, up = (self._value(arg) for arg in args)
            (columns, stride), (_, up_stride) = (value.rows_and_stride(self.rows) for value in (gates, up))
            operands = [gates.operand(), up.operand()]
            self._step(node, "gate", operands, tuple(gates.like.shape), [columns, stride, up_stride])
        elif target is rotary:
            x, *tables = (self._value(arg) for arg in args)
            shape, strides = tuple(x.like.shape), x.like.stride()
            if shape[2] != self.rows or strides[3] != 1 or not all(table.is_whole for table in tables):
                raise _No
            operands = [value.operand() for value in (x, *tables)]
            self._step(node, "rotary", operands, shape, [shape[1], shape[3], strides[2], strides[1]])
        elif target is operator.add:
            one, other = (self._value(arg) for arg in args)
            shape = tuple(one.like.shape)
            if shape != tuple(other.like.shape) or not (one.is_whole and other.is_whole):
                raise _No
            if one.like.numel() % self.rows:
                raise _No
            operands = [one.operand(), other.operand()]
            self._step(node, "add", operands, shape, [one.like.numel() // self.rows])
        elif target is operator.mul and isinstance(args[1], (int, float)) and abs(args[1]) < _LARGEST:
            x = self._value(args[0])
            if not x.is_whole or x.like.numel() % self.rows:
                raise _No
            fields = [x.like.numel() // self.rows, bits_of(args[1])]
            self._step(node, "scale", [x.operand()], tuple(x.like.shape), fields)
        else:
            raise _No
        self.nodes[node] = None

    def _value(self, node: Any) -> _Value:
        """Return the tensor of an argument: one of the list's own, or an input of the list."""
        value = self.values.get(node) or self.inputs.get(node)
        if value is None:
            meta = node.meta if isinstance(node, Node) else {}
            dtype, shape = meta.get("dtype"), meta.get("shape")
            if (
                not shape
                or node.op == "get_attr"
                or node in self.written
                or not (dtype is self.dtype or (self.dtype is not self.cached and dtype in NAMES))
            ):
                raise _No
            value = self._whole(Block(tuple(shape), len(self.inputs)))
            self.inputs[node] = value
        if not isinstance(value, _Value):
            raise _No
        return value

    def _step(
        self,
        node: Any,
        what: str,
        operands: list[Operand],
        shape: tuple[int, ...],
        fields: list[int],
        held: Any = None,
    ) -> None:
        """Add a kernel of rows_code.py, whose result follows its other operands (a norm's precedes its weight)."""
        block = Block(shape)
        result = Operand(block, 0, True)
        how = flags(max(1, block.count() // _SHARE))
        address = kernel("rows", what, NAMES[self.dtype])
        self.steps.append(Step(what, address, how, [*operands, result, *fields], held))
        self.values[node] = self._whole(block)

    def _linear(self, node: Any, layer: NativeLinear) -> None:
        x = self._value(node.args[0])
        if layer.activation is not self.dtype or not x.is_whole or x.like.numel() != self.rows * layer.columns:
            raise _No
        block = Block((*x.like.shape[:-1], layer.rows))
        address, how, inner = layer.parts()
        self.steps.append(Step("linear", address, how, [inner, x.operand(), Operand(block, 0, True)], layer))
        self.values[node] = self._whole(block)

    def _experts(self, node: Any, layer: NativeExperts) -> None:
        x, chosen, weights = self._value(node.args[0]), *(self._routing(arg) for arg in node.args[1:])
        if layer.gate is not None or layer.activation is not self.dtype or chosen.block.dtype is not torch.int64:
            raise _No
        if weights.block.dtype not in (self.dtype, torch.float32):
            raise _No
        if not x.is_whole or x.like.ndim != 2 or len(x.like) != self.rows:
            raise _No
        slots = int(chosen.like.shape[1])
        steps, block = layer.steps(x.operand(), chosen.operand(), weights.operand(), self.rows, slots)
        self.steps += steps
        self.values[node] = self._whole(block)

    def _routing(self, node: Any) -> _Value:
        """Return the experts that were chosen, or their weights: an input of the list that is never cast."""
        meta = node.meta if isinstance(node, Node) else {}
        dtype, shape = meta.get("dtype"), meta.get("shape")
        known = self.inputs.get(node)
        if known is not None and known.like.dtype is dtype:
            return known
        if known is not None or node in self.values or node in self.written or not shape:
            raise _No
        block = Block(tuple(shape), len(self.inputs), dtype)
        self.inputs[node] = value = _Value(block, torch.empty(block.shape, dtype=dtype, device="meta"))
        return value

    def _attend(self, node: Any) -> None:
        attention, *states, layer, scale = node.args
        query, key, value = (self._value(state) for state in states)
        (_, heads, rows, size), (_, kv_heads, kv_rows, kv_size) = query.like.shape, key.like.shape
        strides = [state.like.stride() for state in (query, key, value)]
        if value.like.shape != key.like.shape or heads % kv_heads or any(stride[3] != 1 for stride in strides):
            raise _No
        if (rows, kv_rows, kv_size) != (self.rows, self.rows, size):
            raise _No
        names = NAMES[self.dtype], NAMES[self.cached], size
        # What it writes is not seen here: the cache is represented by a separate block.
        cache = Block((1,))
        ways = [number for _, to_head, to_row, _ in strides[1:] for number in (to_row, to_head)]
        appended = [key.operand(), value.operand(), layer, kv_heads, *ways, Operand(cache, 0, True)]
        self.steps.append(Step("append", kernel("attention", "append", *names), flags(), appended))
        block = Block((1, rows, heads, size))
        fields = [layer, heads, heads // kv_heads, strides[0][2], strides[0][1], bits_of(scale)]
        attended = [query.operand(), Operand(block, 0, True), *fields, Operand(cache)]
        self.steps.append(Step("attend", kernel("attention", "attend", *names), flags(rows * heads, 4), attended))
        self.values[node] = self._whole(block)
        self.attention = attention

    def _whole(self, block: Block) -> _Value:
        return _Value(block, torch.empty(block.shape, dtype=self.dtype, device="meta"))

    def _view(self, node: Any) -> None:
        source = self.values.get(node.args[0])
        if source is None:
            raise _No
        if isinstance(source, tuple):
            if node.target is not operator.getitem or not isinstance(node.args[1], int):
                raise _No
            self.values[node] = source[node.args[1]]
            return
        others = (*node.args[1:], *node.kwargs.values())
        if any(isinstance(other, Node) for other in others):
            raise _No
        if node.target is operator.getitem:
            like = source.like[node.args[1]]
        elif node.target in _VIEWS:
            like = getattr(source.like, node.target)(*node.args[1:], **node.kwargs)
        else:
            raise _No
        if like.dtype is not source.like.dtype:
            raise _No
        if like.untyped_storage()._cdata != source.like.untyped_storage()._cdata:
            raise _No
        self.values[node] = _Value(source.block, like)

    # ------------------------------------------------------------------------------------------------------------------

    def knows(self, node: Any) -> bool:
        """Tell whether something that a node reads is computed in the list."""
        return any(source in self.values for source in node.all_input_nodes)

    def close(self, captured: CapturedPass) -> None:
        """Replace the nodes by the list, where that saves anything."""
        if self.attention is None and len(self.steps) < 2:
            return
        wanted = [node for node in self.nodes if self._is_read_outside(node)]
        blocks = [self._block_of(node) for node in wanted]
        made = make_list(self.steps, blocks, len(self.inputs), self.rows, self.dtype)
        graph, last = captured.graph, next(reversed(self.nodes))
        with graph.inserting_after(last):
            call = last = graph.call_function(made, (self.attention, *self.inputs))
        call.meta = {"shape": None, "dtype": None, "writes": self.attention is not None, "is_view": False}
        for at, node in enumerate(wanted):
            result = call
            if len(wanted) > 1:
                with graph.inserting_after(last):
                    result = last = graph.call_function(operator.getitem, (call, at))
                result.meta = {**node.meta, "is_view": True}
            if isinstance(self.values[node], tuple):
                with graph.inserting_after(last):
                    result = last = graph.call_function(
                        torch.split_with_sizes, (result, node.target.__self__.sizes, -1)
                    )
                result.meta = {**node.meta, "is_view": True}
            node.replace_all_uses_with(result)
        for node in reversed(list(self.values)):
            if not node.users:
                graph.erase_node(node)
            else:  # a view, read elsewhere, of a result of the list
                last.append(node)

    def _block_of(self, node: Any) -> Block:
        value = self.values[node]
        return (value[0] if isinstance(value, tuple) else value).block  # type: ignore[no-any-return]

    def _is_read_outside(self, node: Any) -> bool:
        """Tell whether anything but the list's kernels reads a result, directly or through a view."""
        return any(
            user not in self.values or (user not in self.nodes and self._is_read_outside(user)) for user in node.users
        )


def use_kernel_lists(captured: CapturedPass, dtype: torch.dtype, cached: torch.dtype) -> None:
    """Merge neighbouring nodes that there are kernels for into one call.

    Args:
        captured: the pass, with its final linear layers.
        dtype: type of its activations.
        cached: type of the cache. Where it differs from that of the activations, what comes from outside is cast.
    """
    written = written_nodes(captured)

    def begun() -> _List:
        return _List(captured.length, dtype, cached, written)

    current = begun()
    for node in captured.nodes:
        if node.op not in ("call_function", "call_method", "output"):
            continue
        if node.op != "output" and current.take(captured, node):
            continue
        if current.knows(node):
            current.close(captured)
            current = begun()
            if node.op != "output":
                current.take(captured, node)
    captured.eliminate_dead_code()
