"""A captured pass: its `torch.fx.Graph` and constants, at one length or at any, and the code that runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

__all__ = ["Attention", "CapturedPass", "Program", "at_length", "compile_pass", "of_any_length", "same_pass"]


class Attention(Protocol):
    """Attention of a captured pass, whose results have no gaps.

    A pass with recurrent states takes a `CacheAttention`, which holds them.
    """

    def slots(self, length: int) -> torch.Tensor:
        """Return, for each token of the pass, the number of tokens and of padding in the cache before it: `(n,)`."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append keys and values to the cache of a layer and attend to all of it, causally.

        Scores beyond `softcap` are limited, cap · tanh(score / cap); `sinks (H,)` are scores of keys without a value.
        Shapes: query `(1, H, n, D)`, key and value `(1, G, n, D)`; the result is `(1, n, H, D)`.
        """

    def attend_latents(
        self,
        query: torch.Tensor,
        query_rotated: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """Append latents and rotated keys to the cache of a layer, and attend to all of it (latent_attention.py).

        Shapes: query `(1, H, n, R)`, its rotated part `(1, H, n, D)`, latent `(1, 1, n, R)`, rotated keys
        `(1, 1, n, D)`; the result is `(1, H, n, R)`.
        """


@dataclass(frozen=True)
class CopiedWeight:
    """Copy of a weight in another form, held as a constant of a captured pass.

    Attributes:
        weight: the tensor that was copied; it may be an earlier copy itself.
        copy: the constant.
        of: computes the values of the copy from those of the weight.
    """

    weight: torch.Tensor
    copy: torch.Tensor
    of: Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class CapturedPass:
    """One captured pass. The rewrites (rewrites.py) change it in place, as those of `torch.fx` do.

    Attributes:
        graph: graph with the placeholders `ids (1, n)`, `positions (1, n)` and `attention` (an `Attention`); it returns
            the logits `(1, n, V)`. Every node's `meta` gives `shape` and `dtype` of its result (`None` where it is not
            a single tensor), `is_view` (it may share the memory of an argument), and `writes` (into an argument). Where
            the pass is of any length made for one, `tokens at` is the dimension that grows with the tokens, and by how
            many elements for each.
        constants: values of `get_attr` nodes by their target: parameters, buffers, and others from outside.
        length: n; 0 where the graph is of any length.
        copied_weights: weights that are not read anew in each pass, in the order in which their copies are made.
    """

    graph: Graph
    constants: dict[Any, Any] = field(default_factory=dict)
    length: int = 1
    copied_weights: list[CopiedWeight] = field(default_factory=list)

    @property
    def nodes(self) -> list[Any]:
        """The graph's nodes as they are now; untyped, since every use would have to narrow fx's types of arguments."""
        return list(self.graph.nodes)

    def constant(self, node: Any) -> torch.Tensor | None:
        """Return the tensor that a node gives as a constant; `None` where it is computed or no tensor."""
        value = self.constants.get(node.target) if isinstance(node, Node) and node.op == "get_attr" else None
        return value if isinstance(value, torch.Tensor) else None

    def computed_constant(self, node: Any, as_float: bool = False) -> torch.Tensor | None:
        """Return what a node gives where it is computed from a single weight; `None` where it is from anything else.

        A view of the weight is returned as such. Anything else is a copy, which holds each number once that is the same
        along a dimension, and which is computed anew when the weight changes.

        Args:
            node: a node of the graph.
            as_float: whether to convert it to float32.
        """
        weights: set[Any] = set()

        def leaves(one: Any) -> bool:
            if one.op == "get_attr":
                weights.add(one)
                return self.constant(one) is not None
            return one.op in ("call_function", "call_method") and all(map(leaves, one.all_input_nodes))

        if not isinstance(node, Node) or not leaves(node) or len(weights) != 1:
            return None
        leaf = weights.pop()
        weight = self.constants[leaf.target].detach()

        value = _computation(node, leaf)

        def compact(of: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = value(of)
            for dim, stride in enumerate(found.stride()):
                if not stride and found.shape[dim]:
                    found = found.narrow(dim, 0, 1)
            return found.float() if as_float else found

        with torch.no_grad():
            whole = value(weight)
            if not isinstance(whole, torch.Tensor):
                return None
            held = compact(weight)
            if held.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                held = held.contiguous()
                self.copied_weights.append(CopiedWeight(weight, held, compact))
            return held.expand(whole.shape)

    def add_constant(self, name: str, value: torch.Tensor, before: Node) -> Any:
        """Add a node for a constant of the rewrites' own; a number is appended to its name."""
        name = f"{name}_{len(self.constants)}"
        self.constants[name] = value
        with self.graph.inserting_before(before):
            return self.graph.get_attr(name)

    def add_copy(
        self, name: str, weight: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor], before: Node
    ) -> Any:
        """Add a node for a constant of the rewrites' own that is computed from a weight, anew when that changes."""
        with torch.no_grad():
            copy = of(weight)
        self.copied_weights.append(CopiedWeight(weight, copy, of))
        return self.add_constant(name, copy, before)

    def digest(self) -> str:
        """Return a digest of the operations and their arguments, of shapes, and of constants that are no tensors."""
        found = hashlib.sha256()
        for node in self.nodes:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", node.target)
            constant = self.constants.get(node.target) if node.op == "get_attr" else None
            if isinstance(constant, torch.Tensor):
                constant = tuple(constant.shape), constant.dtype
            found.update(f"{node.name} {node.op} {name} {node.args} {node.kwargs} {constant}\n".encode())
        return found.hexdigest()

    def eliminate_dead_code(self) -> None:
        """Remove what computes results that are not read."""

        def stays(node: Node) -> bool:
            return node.op in ("placeholder", "output") or bool(node.meta.get("writes"))

        self.graph.eliminate_dead_code(stays)

    def copy(self, length: int, change: Callable[[Any], Any]) -> CapturedPass:
        """Copy the pass at another length, with `change` applied to all that is not a node: arguments and shapes."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.nodes:
            args, kwargs, shape = map_aggregate(
                (node.args, node.kwargs, node.meta.get("shape")),
                lambda leaf: copies[leaf] if isinstance(leaf, Node) else change(leaf),
            )
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copies[node].meta = {**node.meta, "shape": shape}
        return CapturedPass(graph, dict(self.constants), length, list(self.copied_weights))


def _computation(node: Any, leaf: Any) -> Callable[[torch.Tensor], Any]:
    """Return what a node computes from the weight that a leaf gives; the graph may change afterwards."""
    if node is leaf:
        return lambda of: of
    target, is_method = node.target, node.op == "call_method"
    made = {one: _computation(one, leaf) for one in node.all_input_nodes}
    arguments = node.args, node.kwargs

    def value(of: torch.Tensor) -> Any:
        args, kwargs = map_aggregate(arguments, lambda one: made[one](of) if isinstance(one, Node) else one)
        return getattr(args[0], target)(*args[1:], **kwargs) if is_method else target(*args, **kwargs)

    return value


# ----------------------------------------------------------------------------------------------------------------------
# running it


@dataclass(frozen=True)
class Program:
    """A pass that can be run.

    Attributes:
        run: `(ids (1, n), positions (1, n), attention) → logits (1, n, V)`.
        length: n.
        source: the Python code of `run`, for inspection.
        copied_weights: as in `CapturedPass`.
    """

    run: Callable[[torch.Tensor, torch.Tensor, Attention], torch.Tensor]
    length: int
    source: str
    copied_weights: tuple[CopiedWeight, ...] = ()

    @property
    def attends_by_kernels(self) -> bool:
        """Tell whether JIT-compiled kernels compute all of its attention, and torch none."""
        return ".attend(" not in self.source and ".attend_latents(" not in self.source


def _alias(constant: Any) -> Any:
    """Return a tensor of the same memory: a parameter itself releases its own when replaced, even while it is read."""
    return constant.detach() if isinstance(constant, torch.Tensor) else constant


def compile_pass(captured: CapturedPass) -> Program:
    """Compile the code that `torch.fx` generates for a pass, with its constants."""
    code = captured.graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<captured pass>", "exec"), namespace)
    # A `GraphModule` of the same graph takes 4 % (its `forward`) to 7 % (called) more time for one token through two
    # small layers, 2 % through SmolLM2-135M: `nn.Module.__getattr__` looks up each constant. Here they are attributes.
    names = [node.target for node in captured.nodes if node.op == "get_attr"]
    constants = SimpleNamespace(**{name: _alias(captured.constants[name]) for name in names})
    run = MethodType(namespace.pop("forward"), constants)  # not to be held by its own globals
    return Program(run, captured.length, code.src, tuple(captured.copied_weights))


# ----------------------------------------------------------------------------------------------------------------------
# lengths


@dataclass(frozen=True)
class _Grows:
    """A number that grows with the tokens of a pass."""

    start: int
    step: int

    def at(self, length: int) -> int:
        return self.start + self.step * length


class _Differ(Exception):
    """Captured passes of several lengths are not the same."""


def same_pass(first: CapturedPass, second: CapturedPass) -> bool:
    """Tell whether two captures of the same length are the same, whatever the cache held.

    A number that the model computed from the cache's length (an offset, a scale) appears as a difference.
    """
    return first.length == second.length and of_any_length([first, second]) is not None


def of_any_length(passes: Sequence[CapturedPass]) -> CapturedPass | None:
    """Return what passes over any number of tokens between those of some captures have in common; see `at_length`.

    A number in a graph (of a shape, of a slice) is the same in all of them, or grows with the tokens by the same step.
    Where that does not hold, or where the operations differ, there is no such pass.

    Args:
        passes: three or more, of ascending lengths (two for the step, one to check it), captured after caches of
            several lengths, since nothing may depend on these. Of one length, any two.

    Returns:
        A pass of length 0 that holds for all lengths between, or `None`.
    """
    if len({len(captured.graph.nodes) for captured in passes}) > 1:
        return None
    lengths = [captured.length for captured in passes]
    common = passes[0].copy(0, lambda leaf: leaf)
    nodes = common.nodes
    index = {node: at for captured in passes for at, node in enumerate(captured.nodes)}

    def same_leaf(leaves: tuple[Any, ...]) -> Any:
        one = leaves[0]
        if any(type(leaf) is not type(one) for leaf in leaves):
            raise _Differ
        if isinstance(one, Node):
            if len({index[leaf] for leaf in leaves}) == 1:
                return nodes[index[one]]
        elif all(leaf == one for leaf in leaves):
            return one
        elif type(one) is int and lengths[0] != lengths[1]:
            step = (leaves[1] - one) // (lengths[1] - lengths[0])
            grows = _Grows(one - step * lengths[0], step)
            if all(grows.at(length) == leaf for length, leaf in zip(lengths, leaves, strict=True)):
                return grows
        raise _Differ

    def same(trees: Sequence[Any]) -> Any:
        first = map_aggregate(trees[0], lambda leaf: None)
        if any(map_aggregate(tree, lambda leaf: None) != first for tree in trees):
            raise _Differ
        merged: Iterator[Any] = map(same_leaf, zip(*map(_leaves, trees), strict=True))
        return map_aggregate(trees[0], lambda leaf: next(merged))

    def kind(captured: CapturedPass, node: Node) -> Any:
        constant = captured.constant(node)
        value = id(constant) if constant is not None else captured.constants.get(node.target)
        return node.op, node.target, value, *(node.meta[key] for key in ("dtype", "writes", "is_view"))

    try:
        for made, *row in zip(nodes, *(captured.nodes for captured in passes), strict=True):
            if len({kind(captured, node) for captured, node in zip(passes, row, strict=True)}) > 1:
                return None
            made.args, made.kwargs, made.meta["shape"] = same(
                [(node.args, node.kwargs, node.meta["shape"]) for node in row]
            )
    except _Differ:
        return None
    return common


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(tree, found.append)
    return found


def at_length(common: CapturedPass, length: int) -> CapturedPass:
    """Return the pass over `length` tokens, from a result of `of_any_length`; the model's code is not run."""
    made = common.copy(length, lambda leaf: leaf.at(length) if isinstance(leaf, _Grows) else leaf)
    for of_any, node in zip(common.nodes, made.nodes, strict=True):
        shape = of_any.meta.get("shape") or ()
        growing = [(dim, size) for dim, size in enumerate(shape) if isinstance(size, _Grows)]
        # Elementwise kernels depend on this, not on sizes, which may be equal by chance at one of the lengths.
        if len(growing) == 1 and growing[0][1].start == 0:
            node.meta["tokens at"] = growing[0][0], growing[0][1].step
    return made
