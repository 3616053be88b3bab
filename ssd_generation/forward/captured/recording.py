"""Torch function mode that runs a model's code and makes a node of each function that it calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .pretend_cache import CacheLength, CannotCapture
from .state_steps import StatePlace

__all__ = ["Recording"]

_LARGE = 1 << 16
"""Elements from which on a linear layer's product is not computed during capture: only shapes matter then."""

# Names of functions and methods that would bring a tensor's values into Python, where the capture cannot follow, that
# give a result whose shape depends on values, or that draw random numbers.
_NAMES = (
    "item tolist numpy __bool__ __int__ __float__ __index__ __contains__ __iter__ __array__ __complex__ data_ptr "
    "nonzero argwhere equal allclose is_nonzero unique unique_consecutive bincount masked_select "
    "rand randn rand_like randn_like randint randint_like randperm normal normal_ poisson multinomial bernoulli "
    "bernoulli_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ gumbel_softmax"
)
_DEPENDS_ON_VALUES = frozenset(_NAMES.split())

# One target per operation, so that a rewrite's pattern has one form; Python's operators where there are such, as
# `torch.fx` traces them.
_SAME: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.Tensor, name): operator.mul for name in ("mul", "__mul__", "__rmul__")},
    **{getattr(torch.Tensor, name): operator.add for name in ("add", "__add__", "__radd__")},
    **{getattr(torch.Tensor, name): operator.neg for name in ("neg", "__neg__")},
    **{getattr(torch.Tensor, name): torch.pow for name in ("pow", "__pow__")},
    torch.mul: operator.mul,
    torch.add: operator.add,
    torch.neg: operator.neg,
    torch.concat: torch.cat,
    torch.Tensor.rsqrt: torch.rsqrt,
    torch.Tensor.mean: torch.mean,
    torch.Tensor.__getitem__: operator.getitem,
}
_OPERANDS = {operator.mul: 2, operator.add: 2, operator.neg: 1, operator.getitem: 2}

# Types that the generated code can write as literals; anything else is a constant of the graph.
_LITERALS = frozenset(
    {type(None), bool, int, float, complex, str, type(Ellipsis), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)


def _has_size_of_values(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether the shape of the result depends on the values in the arguments."""
    if name == "where":
        return len(args) == 1
    if name in ("arange", "linspace"):
        return any(isinstance(argument, torch.Tensor) for argument in args)
    if name == "repeat_interleave":
        return any(isinstance(argument, torch.Tensor) for argument in args[1:])
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8) for entry in index)
    return False


def _drops(p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> bool:
    """Tell whether `functional.dropout` is random, by the arguments that follow its input."""
    return training and p > 0


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:  # noqa: A002, the names that torch has
    """Return the arguments of `functional.linear` in their order."""
    return input, weight, bias


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a function writes into one of its arguments."""
    return (
        name == "__setitem__"
        or kwargs.get("out") is not None
        or kwargs.get("inplace") is True
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"))
    )


def _is_index(entry: Any) -> bool:
    """Tell whether an entry of an index is a list of numbers."""
    return isinstance(entry, list) and bool(entry) and all(type(number) is int for number in entry)


@lru_cache(maxsize=256)
def _index(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return indices as a tensor, the same one in each capture."""
    with torch._C.DisableTorchFunction():
        return torch.tensor(numbers, device=device)


def _storages(tree: Any) -> set[int]:
    """Return the addresses of the memory of all tensors in a tree."""
    found = set()

    def visit(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            found.add(leaf.untyped_storage().data_ptr())

    map_aggregate(tree, visit)
    return found


class Recording(TorchFunctionMode):
    """Mode that runs each function and makes a node of it; `names` gives those of parameters and buffers by id."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.graph = Graph()
        self.attention: Node | None = None
        self.attend: Callable[..., torch.Tensor | None] | None = None  # torch's function, where it is called directly
        self.constants: dict[str, Any] = {}
        self._names = names
        # Results are held weakly: the model drops them as it proceeds, and all together would take much memory.
        self._nodes: Any = WeakTensorKeyDictionary()
        self._outside: dict[int, Node] = {}  # ids are valid as long as their objects live: `constants` holds these
        self.states: dict[int, tuple[StatePlace, torch.Tensor]] = {}  # by id: states of the cache

    def input(self, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor as an argument of the pass."""
        self.noted(self.graph.placeholder(name), tensor)

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        """Return the node that made a tensor; `None` for those from outside the pass."""
        node: Node | None = self._nodes.get(tensor)
        return node

    def noted(self, node: Node, result: Any, writes: bool = False, is_view: bool = False) -> Node:
        """Record the form of a node's result for the rewrites, and the result's node for later arguments."""
        node.meta |= {"shape": None, "dtype": None, "writes": writes, "is_view": is_view}
        if isinstance(result, torch.Tensor):
            node.meta |= {"shape": tuple(result.shape), "dtype": result.dtype}
            self._nodes[result] = node
        return node

    def is_constant(self, node: Node) -> bool:
        """Tell whether a node's result is the same in every pass: it is computed from what is outside alone."""
        return node.op == "get_attr" or (node.op != "placeholder" and all(map(self.is_constant, node.all_input_nodes)))

    def argument(self, leaf: Any) -> Any:
        """Return what represents an argument in the graph: the node that made it, itself, or a constant's node."""
        if isinstance(leaf, CacheLength):
            return int(leaf)
        if isinstance(leaf, torch.Tensor):
            node = self.node_of(leaf)
            if node is not None:
                return node
            if id(leaf) in self.states:
                raise CannotCapture("a layer computes with its state itself")
        elif type(leaf) in _LITERALS:
            return leaf
        if id(leaf) not in self._outside:
            name = self._names.get(id(leaf), f"constant_{len(self.constants)}").replace(".", "_")
            while name in self.constants:
                name += "_"
            self.constants[name] = leaf
            self._outside[id(leaf)] = self.noted(self.graph.get_attr(name), None)
        return self._outside[id(leaf)]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is nn.functional.linear and kwargs:
            args, kwargs = _of_linear(*args, **kwargs), {}
        if name in _DEPENDS_ON_VALUES or _has_size_of_values(name, args):
            raise CannotCapture(f"the pass depends on values: it calls {name}")
        if name == "__set__":
            raise CannotCapture("the pass assigns to an attribute of a tensor")
        writes = _writes(name, kwargs)
        if writes:
            for target in (args[0] if args else None, kwargs.get("out")):
                if isinstance(target, torch.Tensor) and self.node_of(target) is None:
                    raise CannotCapture(f"the pass writes into a tensor that outlives it: it calls {name}")
        if func is nn.functional.scaled_dot_product_attention and self.attend is not None:
            attended = self.attend(*args, **kwargs)
            if attended is not None:
                return attended
        if func is nn.functional.linear and args[1].numel() >= _LARGE:
            result = args[0].new_zeros((*args[0].shape[:-1], args[1].shape[0]))
        elif func is nn.functional.dropout and not _drops(*args[1:], **kwargs):
            return args[0]
        elif name in ("dropout", "alpha_dropout"):
            raise CannotCapture("the pass draws random numbers: dropout")
        else:
            result = func(*args, **kwargs)
        if any(isinstance(argument, CacheLength) for argument in args) and self._is_of_slots(result, args):
            return result
        several = isinstance(result, (tuple, list)) and any(isinstance(entry, torch.Tensor) for entry in result)
        if not writes and not several and not isinstance(result, torch.Tensor):
            return result  # a shape, a dtype, a device
        if not writes and any(result is argument for argument in args):
            return result  # such as `.to` of a tensor that needs no change
        self.add(func, name, args, kwargs, result, writes)
        return result

    def transposed(self, result: torch.Tensor) -> torch.Tensor:
        """Make the node of a result with its second and third dimension exchanged; return it."""
        turned = result.transpose(1, 2)
        self.noted(self.graph.call_method("transpose", (self.argument(result), 1, 2)), turned, is_view=True)
        return turned

    def _is_of_slots(self, result: Any, args: tuple[Any, ...]) -> bool:
        """Make the node of a result that is the slots of the pass's tokens in the cache, of which there are `args`."""
        length = next(argument for argument in args if isinstance(argument, CacheLength))
        with torch._C.DisableTorchFunction():
            if not isinstance(result, torch.Tensor) or result.dtype != torch.int64 or result.ndim != 1:
                return False
            expected = torch.arange(length.tokens, length.tokens + len(result), device=result.device)
            if len(result) != length.width or not torch.equal(result, expected):
                return False
            self.noted(self.graph.call_method("slots", (self.attention, length.width)), result)
        return True

    def add(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, writes: bool
    ) -> None:
        """Make the node of a call, and one more for each of several results."""
        op, target = "call_function", _SAME.get(func, func)
        if target in _OPERANDS and (kwargs or len(args) != _OPERANDS[target] or not isinstance(args[0], torch.Tensor)):
            target = func  # such as the `alpha` of an addition
        if name == "__get__":
            target, args = getattr, (args[0], func.__self__.__name__)
        elif target is getattr(torch.Tensor, name, None):
            op, target = "call_method", name
        if target is operator.getitem and isinstance(args[1], tuple):
            # torch would make a tensor of a list of indices in each pass, which no CUDA graph may.
            entries = [_index(tuple(one), args[0].device) if _is_index(one) else one for one in args[1]]
            args = (args[0], tuple(entries))
        is_view = not _storages(result).isdisjoint(_storages((args, kwargs)))
        made = self.graph.create_node(op, target, *map_aggregate((args, kwargs), self.argument))
        self.noted(made, result, writes, is_view)
        if isinstance(result, (tuple, list)):
            for index, entry in enumerate(result):
                if isinstance(entry, torch.Tensor):
                    self.noted(self.graph.call_function(operator.getitem, (made, index)), entry, is_view=True)
