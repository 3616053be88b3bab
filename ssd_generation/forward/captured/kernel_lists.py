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
from torch.nn import functional

from ...native.ops.experts import NativeExperts
from ...native.ops.kernels import NAMES, bits_of, flags, kernel
from ...native.ops.linear import NativeLinear
from ...native.ops.pointwise import NoKernel as _No
from ...native.ops.pointwise import Part, likeness, mean_step, pointwise_step
from ...native.ops.rows import gated_silu, rms_norm, rotary
from ...native.ops.states import STEPS
from ...native.sequence import Block, Operand, Step, make_list
from ..copies.layer_copy import LowBitCopy
from .fx_graph import CapturedPass
from .latent_attention import HeadLayers
from .rewrites import written_nodes
from .state_steps import StateStep, run_step

__all__ = ["use_kernel_lists"]

_NAMES = (
    "view reshape transpose unsqueeze squeeze permute contiguous flatten unflatten narrow to float expand split chunk"
)
_VIEWS = frozenset(_NAMES.split())
"""Operations whose result may share the memory of their argument; torch says whether it does."""

_OF_TWO = frozenset({"add", "sub", "mul", "div"})
_OF_ONE = frozenset({"neg", "exp", "sigmoid", "silu", "softplus", "tanh", "sqrt", "rsqrt", "relu", "square", "to"})

_POINTWISE = {
    **{name: name for name in _OF_ONE | _OF_TWO},
    "truediv": "div",
    "float": "to",
    "type_as": "to",
}
"""Elementwise operations that there are kernels for, by the name of torch's function."""

_ELEMENTWISE = {*_OF_ONE, *_OF_TWO, "cube", "gelu_tanh", "scale"}

_ROUNDED = {"exp", "sigmoid", "silu", "softplus", "tanh", "gelu_tanh", "sqrt", "rsqrt", "cube", "mean"}
"""Steps that round otherwise than torch."""

_FEW = 6
"""Elementwise operations from which on a list of nothing else is faster than torch."""

_OF_SCANS = ("A", "D", "dt_bias")
"""Weights of a selective scan, which its kernel reads as float32."""

_SHARE = 4096
"""Elements per work item of a kernel between two linear layers."""


_LARGEST = torch.finfo(torch.float32).max
"""Bound on factors, which kernels read as float32 numbers."""


class _Value(Part):
    """Part of a block, as a result of the list or an input of it."""

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
    rounded: set[str] = field(default_factory=set)

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
        if node.op == "call_method" and node.target == "attend":
            self._attend(captured, node)
        elif node.op == "call_method" and node.target == "attend_latents":
            self._attend_latents(node)
        elif node.target is run_step:
            self._state(captured, node)
        else:
            name = _name_of(node)
            if node.target is operator.getitem or name in _VIEWS:
                try:
                    self._view(node, name)
                    return  # no kernel
                except _No:
                    pass
            try:
                self._fused(captured, node)
            except _No:
                self._elementwise(captured, node, name)
        self.nodes[node] = None

    def _fused(self, captured: CapturedPass, node: Any) -> None:
        """Add a layer, or operations that have one kernel together."""
        target, args = node.target, node.args
        if isinstance(target, NativeLinear):
            self._linear(captured, node, target)
        elif isinstance(target, NativeExperts):
            self._experts(node, target)
        elif isinstance(target, HeadLayers):
            self._heads(node, target)
        elif isinstance(of := getattr(target, "__self__", None), LowBitCopy) and of.native is not None:
            self._linear(captured, node, of.native)
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
        elif target is functional.layer_norm:
            self._layer_norm(captured, node)
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

    def _layer_norm(self, captured: CapturedPass, node: Any) -> None:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        x, sizes = self._value(given["input"]), tuple(given["normalized_shape"])
        columns = int(x.like.shape[-1])
        of_all = x.like.numel() // columns
        weights: list[torch.Tensor] = []
        addresses = []
        for name in ("weight", "bias"):
            one = given.get(name)
            if one is None:
                addresses.append(0)
                continue
            weight = captured.constant(one)
            if (
                weight is None
                or weight.dtype is not self.dtype
                or tuple(weight.shape) != sizes
                or not weight.is_contiguous()
            ):
                raise _No
            weights.append(weight.detach())  # an alias, as `NativeLinear` holds
            addresses.append(weight.data_ptr())
        if sizes != (columns,) or of_all % self.rows:
            raise _No
        width, stride = x.rows_and_stride(of_all)
        if width != columns:
            raise _No
        fields = [*addresses, columns, bits_of(given.get("eps", 1e-5)), of_all // self.rows, stride]
        self._step(node, "layer_norm", [x.operand()], tuple(x.like.shape), fields, weights)
        self.rounded.add(node.name)

    def _elementwise(self, captured: CapturedPass, node: Any, name: str) -> None:
        """Add an elementwise operation, a mean, or a copy."""
        args, shape, tokens_at = node.args, node.meta.get("shape"), node.meta.get("tokens at")
        if shape is None or tokens_at is None or node in self.written or node.meta.get("writes"):
            raise _No
        if name in _POINTWISE:
            what = _POINTWISE[name]
            count = 2 if what in _OF_TWO else 1
            if count == 1 and not _is_default(node, name):
                raise _No
            operands = [self._operand(captured, arg) for arg in args[:count]]
            if len(operands) != count or not any(isinstance(one, Part) for one in operands):
                raise _No
        elif name == "gelu" and (*args[1:], *node.kwargs.values()) == ("tanh",):
            what, operands = "gelu_tanh", [self._operand(captured, args[0])]
        elif name == "pow" and args[1] in (2, 2.0):
            what, operands = "mul", [self._operand(captured, args[0])] * 2
        elif name == "pow" and args[1] in (3, 3.0):
            what, operands = "cube", [self._operand(captured, args[0])]
        elif name == "mean" and node.args[1:] in ((-1,), ([-1],)) and node.kwargs == {"keepdim": True}:
            result, x = self._result(node, shape), self._operand(captured, args[0])
            self._add(node, mean_step(result, _part(x), tokens_at), result)
            return
        elif name in ("cat", "stack"):
            self._cat(captured, node, name == "stack")
            return
        elif name in ("contiguous", "reshape", "clone"):
            x = _part(self._operand(captured, args[0]))
            source = args[0].meta.get("tokens at")
            copied = self._result(node, x.like.shape, source)
            if source is None or not copied.is_whole:
                raise _No
            step = pointwise_step("to", copied, [x], source)
            self._add(node, step, _Value(copied.block, copied.like.reshape(shape)))
            return
        elif node.target is gated_silu:  # of another type than the list's
            gates, up = (_part(self._operand(captured, arg)) for arg in args)
            activated, result = self._result(node, shape), self._result(node, shape)
            step = pointwise_step("mul", result, [activated, up], tokens_at)
            self.steps.append(pointwise_step("silu", activated, [gates], tokens_at))
            self.rounded.add(node.name)
            self._add(node, step, result)
            return
        else:
            raise _No
        result = self._result(node, shape)
        self._add(node, pointwise_step(what, result, operands, tokens_at), result)

    def _cat(self, captured: CapturedPass, node: Any, is_stack: bool) -> None:
        """Add the kernels that copy tensors next to each other in the last dimension, or interleave them in it."""
        shape = node.meta["shape"]
        others = (*node.args[1:], *node.kwargs.values())
        if others not in ((-1,), (len(shape) - 1,)):
            raise _No
        result, at = self._result(node, shape), 0
        steps = []
        for arg in node.args[0]:
            x = _part(self._operand(captured, arg))
            size = 1 if is_stack else x.like.shape[-1]
            place = result.like[..., at] if is_stack else result.like[..., at : at + size]
            steps.append(pointwise_step("to", _Value(result.block, place), [x], node.meta["tokens at"]))
            at += size
        self.steps += steps[:-1]
        self._add(node, steps[-1], result)

    def _state(self, captured: CapturedPass, node: Any) -> None:
        """Add a step of recurrent states."""
        attention, made, *tensors = node.args
        step: StateStep = captured.constants[made.target]
        values: list[Any] = []
        for name, of_token, tensor in zip(step.tensors, step.of_token, tensors, strict=True):
            if of_token:
                values.append(_part(self._operand(captured, tensor)))
            else:
                values.append(captured.computed_constant(tensor, as_float=name in _OF_SCANS))
        result = self._result(node, node.meta["shape"])
        self._add(node, STEPS[step.name](step.state, step.given(values), result), result)
        self.attention = attention

    def _result(self, node: Any, shape: Any, tokens_at: tuple[int, int] | None = None) -> _Value:
        """Return a new block for the result of a node, of its type; `tokens_at` where the shape is another."""
        dtype = node.meta["dtype"]
        if self.dtype is not self.cached and dtype is self.cached:
            dtype = self.dtype  # a draft computes in a type of its own
        if dtype not in NAMES:
            raise _No
        own = None if dtype is self.dtype else dtype
        is_turned = (tokens_at or node.meta.get("tokens at")) == (2, 1) and len(shape) == 4 and shape[0] == 1
        if is_turned:  # heads before tokens: stored by token
            shape = (1, shape[2], shape[1], shape[3])
            return _Value(Block(shape, dtype=own), likeness(shape, dtype).transpose(1, 2))
        return _Value(Block(tuple(shape), dtype=own), likeness(shape, dtype))

    def _add(self, node: Any, step: Step, result: _Value) -> None:
        self.steps.append(step)
        if step.name in _ROUNDED:
            self.rounded.add(node.name)
        self.values[node] = result

    def _operand(self, captured: CapturedPass, arg: Any) -> Any:
        """Return an operand as it is: a part of a block, a weight, or a number."""
        if isinstance(arg, (int, float)) and not isinstance(arg, bool) and abs(arg) < _LARGEST:
            return float(arg)
        if not isinstance(arg, Node):
            raise _No
        if arg not in self.values and arg not in self.inputs:
            weight = captured.computed_constant(arg)
            if weight is not None:
                if weight.dtype not in NAMES or weight.device.type != "cpu":
                    raise _No
                return weight
            if arg.meta.get("dtype") not in NAMES or arg.op == "get_attr":
                raise _No
            return self._routing(arg)
        return self.values.get(arg) or self.inputs[arg]

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
        if not isinstance(value, _Value) or value.like.dtype is not self.dtype:
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

    def _linear(self, captured: CapturedPass, node: Any, layer: NativeLinear) -> None:
        is_usual = layer.activation is self.dtype  # an adapter may compute in float32
        x = self._value(node.args[0]) if is_usual else _part(self._operand(captured, node.args[0]))
        if x.like.dtype is not layer.activation or not x.is_whole or x.like.numel() != self.rows * layer.columns:
            raise _No
        block = Block((*x.like.shape[:-1], layer.rows), dtype=None if is_usual else layer.activation)
        address, how, inner = layer.parts()
        self.steps.append(Step("linear", address, how, [inner, x.operand(), Operand(block, 0, True)], layer))
        self.values[node] = _Value(block, likeness(block.shape, layer.activation))

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
        """Return an input of the list that is never cast, such as the experts that were chosen, or their weights."""
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

    def _attend(self, captured: CapturedPass, node: Any) -> None:
        attention, *states, layer, scale, softcap, sink = (*node.args, None, None)[:8]
        sinks = captured.computed_constant(sink, as_float=True)
        if sink is not None and (sinks is None or not sinks.is_contiguous()):
            raise _No
        query, key, value = (self._value(state) for state in states)
        (_, heads, rows, size), (_, kv_heads, kv_rows, kv_size) = query.like.shape, key.like.shape
        strides = [state.like.stride() for state in (query, key, value)]
        if value.like.shape[:3] != key.like.shape[:3] or heads % kv_heads or any(stride[3] != 1 for stride in strides):
            raise _No
        if (rows, kv_rows, kv_size) != (self.rows, self.rows, size):
            raise _No
        cache, names = self._append(key, value, layer)
        block = Block((1, rows, heads, names[2]))
        fields = [layer, heads, heads // kv_heads, strides[0][2], strides[0][1], bits_of(scale)]
        fields += [bits_of(softcap or 0.0), 0 if sinks is None else sinks.data_ptr()]
        attended = [query.operand(), Operand(block, 0, True), *fields, Operand(cache)]
        address = kernel("attention", "attend", *names, softcap is not None, sinks is not None)
        self.steps.append(Step("attend", address, flags(rows * heads, 4), attended, sinks))
        self.values[node] = self._whole(block)
        self.attention = attention

    def _append(self, key: _Value, value: _Value, layer: int) -> tuple[Block, tuple[Any, ...]]:
        """Add the kernel that writes keys and values into the cache.

        Returns:
            A block that represents the cache, since what is written there is not seen here; and the arguments of the
            kernels' module that follow from the tensors.
        """
        cache, kv_heads = Block((1,)), key.like.shape[1]
        ways = [number for one in (key, value) for number in (one.like.stride(2), one.like.stride(1))]
        fields: list[int | Operand] = [key.operand(), value.operand(), layer, kv_heads, *ways, Operand(cache, 0, True)]
        names = NAMES[self.dtype], NAMES[self.cached], int(value.like.shape[3]), int(key.like.shape[3])
        self.steps.append(Step("append", kernel("attention", "append", *names), flags(), fields))
        return cache, names

    def _attend_latents(self, node: Any) -> None:
        attention, *states, layer, scale = node.args
        query, turned, latent, rotated = (self._value(state) for state in states)
        _, heads, rows, size = query.like.shape
        if rows != self.rows or any(one.like.stride(3) != 1 for one in (query, turned, latent, rotated)):
            raise _No
        cache, names = self._append(latent, rotated, layer)
        block, ways = (
            Block((1, heads, rows, size)),
            [(one.like.stride(2), one.like.stride(1)) for one in (query, turned)],
        )
        attended = [query.operand(), Operand(block, 0, True), layer, heads, heads, *ways[0], bits_of(scale), 0, 0]
        attended += [turned.operand(), *ways[1], Operand(cache)]
        address = kernel("attention", "attend", *names[:2], size, size, False, False, names[2])
        self.steps.append(Step("attend", address, flags(rows * heads, 4), attended))
        self.values[node] = self._whole(block)
        self.attention = attention

    def _heads(self, node: Any, layers: HeadLayers) -> None:
        """Add the kernels of a linear layer of each head, whose tokens follow each other without gaps."""
        x, (_, heads, rows, size) = self._value(node.args[0]), node.meta["shape"]
        if rows != self.rows or x.like.shape[3] != layers.columns or layers.layers[0].activation is not self.dtype:
            raise _No
        if not x.is_whole:
            copied = self._whole(Block(tuple(x.like.shape)))
            self.steps.append(pointwise_step("to", copied, [x], (2, 1)))
            x = copied
        block, first = Block((1, heads, rows, size)), int(x.like.storage_offset())
        for head, layer in enumerate(layers.layers):
            address, how, inner = layer.parts()
            places = Operand(x.block, first + head * rows * layers.columns), Operand(block, head * rows * size, True)
            self.steps.append(Step("linear", address, how, [inner, *places], layer))
        self.values[node] = self._whole(block)

    def _whole(self, block: Block) -> _Value:
        return _Value(block, likeness(block.shape, self.dtype))

    def _view(self, node: Any, name: str) -> None:
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
        else:
            like = getattr(source.like, name)(*node.args[1:], **node.kwargs)
        several = isinstance(like, (tuple, list))
        for one in like if several else (like,):
            if one.dtype is not source.like.dtype:
                raise _No
            if one.untyped_storage()._cdata != source.like.untyped_storage()._cdata:
                raise _No
        made = [_Value(source.block, one) for one in (like if several else (like,))]
        self.values[node] = tuple(made) if several else made[0]

    # ------------------------------------------------------------------------------------------------------------------

    def knows(self, node: Any) -> bool:
        """Tell whether something that a node reads is computed in the list."""
        return any(source in self.values for source in node.all_input_nodes)

    def close(self, captured: CapturedPass) -> set[str]:
        """Replace the nodes by the list, where that saves anything.

        Returns:
            The names of the nodes that are rounded otherwise from now on than by torch.
        """
        if self.attention is None and len(self.steps) < (_FEW if self._is_elementwise() else 2):
            return set()
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
            result = last = self._in_its_shape(captured, node, result, last)
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
        return self.rounded

    def _in_its_shape(self, captured: CapturedPass, node: Any, result: Any, last: Any) -> Any:
        """Return a node that gives a result of the list in the shape that the graph knows, after the node `last`."""
        value = self.values[node]
        if isinstance(value, tuple):
            return result
        shape, stored = tuple(value.like.shape), tuple(value.block.shape)
        # Not by shapes alone: there may be as many heads as tokens.
        is_turned = value.like.ndim == 4 and not value.is_whole
        if shape == stored and not is_turned:
            return result
        with captured.graph.inserting_after(last):
            how = ("transpose", 1, 2) if is_turned else ("view", *shape)
            made = captured.graph.call_method(how[0], (result, *how[1:]))
        assert not is_turned or shape == (stored[0], stored[2], stored[1], stored[3])
        made.meta = {**node.meta, "is_view": True}
        return made

    def _is_elementwise(self) -> bool:
        """Tell whether no step does more than one of torch's elementwise operations."""
        return all(step.name in _ELEMENTWISE for step in self.steps)

    def _block_of(self, node: Any) -> Block:
        value = self.values[node]
        return (value[0] if isinstance(value, tuple) else value).block  # type: ignore[no-any-return]

    def _is_read_outside(self, node: Any) -> bool:
        """Tell whether anything but the list's kernels reads a result, directly or through a view."""
        return any(
            user not in self.values or (user not in self.nodes and self._is_read_outside(user)) for user in node.users
        )


def _name_of(node: Any) -> str:
    """Return the name of what a node calls."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).strip("_")


def _is_default(node: Any, name: str) -> bool:
    """Tell whether an operation with one operand has no further arguments that change what it computes."""
    others = {**dict(enumerate(node.args[1:])), **node.kwargs}
    if name == "type_as":
        return True
    if name == "to":
        return all(isinstance(other, torch.dtype) for other in others.values())
    defaults = {"softplus": (1, 1.0, 20, 20.0)}.get(name, (False,))
    return all(not isinstance(other, Node) and other in defaults for other in others.values())


def _part(operand: Any) -> Part:
    if not isinstance(operand, Part):
        raise _No
    return operand


def use_kernel_lists(captured: CapturedPass, dtype: torch.dtype, cached: torch.dtype) -> frozenset[str]:
    """Merge neighbouring nodes that there are kernels for into one call.

    Args:
        captured: the pass, with its final linear layers.
        dtype: type of its activations.
        cached: type of the cache. Where it differs from that of the activations, what comes from outside is cast.

    Returns:
        The names of the nodes that are rounded otherwise than by torch, which must be the same at all lengths of a pass
        whose bits do not depend on its length.
    """
    written, rounded = written_nodes(captured), set[str]()

    def begun() -> _List:
        return _List(captured.length, dtype, cached, written)

    current = begun()
    for node in captured.nodes:
        if node.op not in ("call_function", "call_method", "output"):
            continue
        if node.op != "output" and current.take(captured, node):
            continue
        if current.knows(node):
            rounded |= current.close(captured)
            current = begun()
            if node.op != "output":
                current.take(captured, node)
    captured.eliminate_dead_code()
    return frozenset(rounded)
