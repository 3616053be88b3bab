"""A captured pass: its `torch.fx.Graph` and constants, at one length or at any, and the code that plays it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

__all__ = ["Attention", "CapturedPass", "Program", "at_length", "compile_pass", "of_any_length", "same_pass"]


class Attention(Protocol):
    """What a captured pass attends with."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """Append keys and values to the cache of a layer and attend to all of it, causally.

        Shapes: query `(1, H, n, D)`, key and value `(1, G, n, D)`; the result is `(1, n, H, D)`.
        """


@dataclass(frozen=True)
class CopiedWeight:
    """A weight whose values a constant of a captured pass holds a copy of, in another form.

    Attributes:
        weight: what was copied; it may be a copy itself, of those before it.
        copy: the constant.
        of: makes the values of the copy of those of the weight.
    """

    weight: torch.Tensor
    copy: torch.Tensor
    of: Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class CapturedPass:
    """One captured pass. The rewrites (rewrites.py) change it in place, as those of `torch.fx` do.

    Attributes:
        graph: of the placeholders `ids (1, n)`, `positions (1, n)` and `attention` (an `Attention`); it gives the
            logits `(1, n, V)`. Every node's `meta` says of its result `shape` and `dtype` (`None` where it is not a
            single tensor), `is_view` (it may lie in the memory of an argument), and `writes` (into an argument).
        constants: what `get_attr` nodes stand for, by their target: parameters, buffers, and others from outside.
        length: n; 0 where the graph is of any length.
        copied_weights: weights that are not read anew in each pass, in the order that their copies are made in.
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
        """The tensor that a node stands for, `None` where it is computed or no tensor."""
        value = self.constants.get(node.target) if isinstance(node, Node) and node.op == "get_attr" else None
        return value if isinstance(value, torch.Tensor) else None

    def add_constant(self, name: str, value: torch.Tensor, before: Node) -> Any:
        """A node for a constant of the rewrites' own, whose name a number follows."""
        name = f"{name}_{len(self.constants)}"
        self.constants[name] = value
        with self.graph.inserting_before(before):
            return self.graph.get_attr(name)

    def add_copy(
        self, name: str, weight: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor], before: Node
    ) -> Any:
        """A node for a constant of the rewrites' own that is made of a weight, and made anew when that changes."""
        with torch.no_grad():
            copy = of(weight)
        self.copied_weights.append(CopiedWeight(weight, copy, of))
        return self.add_constant(name, copy, before)

    def eliminate_dead_code(self) -> None:
        """Leave out what computes results that nobody reads."""

        def stays(node: Node) -> bool:
            return node.op in ("placeholder", "output") or bool(node.meta.get("writes"))

        self.graph.eliminate_dead_code(stays)

    def copy(self, length: int, change: Callable[[Any], Any]) -> CapturedPass:
        """The same at another length, with `change` made to all that is not a node: arguments and shapes."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.nodes:
            args, kwargs, shape = map_aggregate(
                (node.args, node.kwargs, node.meta.get("shape")),
                lambda leaf: copies[leaf] if isinstance(leaf, Node) else change(leaf),
            )
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copies[node].meta = {**node.meta, "shape": shape}
        return CapturedPass(graph, dict(self.constants), length, list(self.copied_weights))


# ----------------------------------------------------------------------------------------------------------------------
# playing it back


@dataclass(frozen=True)
class Program:
    """A pass that can be run.

    Attributes:
        run: `(ids (1, n), positions (1, n), attention) → logits (1, n, V)`.
        length: n.
        source: the Python code of `run`, for the curious.
        copied_weights: as of the `CapturedPass`.
    """

    run: Callable[[torch.Tensor, torch.Tensor, Attention], torch.Tensor]
    length: int
    source: str
    copied_weights: tuple[CopiedWeight, ...] = ()

    @property
    def attends_by_kernels(self) -> bool:
        """Whether code made here does all of its attention, of which torch does none."""
        return ".attend(" not in self.source


def _alias(constant: Any) -> Any:
    """A tensor of the same memory: a parameter itself lets its own go when a thread replaces it, even as it is read."""
    return constant.detach() if isinstance(constant, torch.Tensor) else constant


def compile_pass(captured: CapturedPass) -> Program:
    """The code that `torch.fx` generates for a pass, with its constants."""
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
    """Captured passes of several lengths that do not do the same."""


def same_pass(first: CapturedPass, second: CapturedPass) -> bool:
    """Whether two captures of the same length do the same, whatever the cache held.

    A number that the model computed from the cache's length (an offset, a scale) shows as a difference.
    """
    return first.length == second.length and of_any_length([first, second]) is not None


def of_any_length(passes: Sequence[CapturedPass]) -> CapturedPass | None:
    """What the passes over any number of tokens between those of some captures have in common; see `at_length`.

    A number in a graph (of a shape, of a slice) is the same in all of them, or grows with the tokens by the same step.
    Where that is not so, or where the operations are others, there is no such pass.

    Args:
        passes: three or more, of ascending lengths (two for the step, one to see that it holds), and behind caches of
            several lengths, since nothing may depend on these. Of one length, any two.

    Returns:
        A pass of length 0 that does for all between, or `None`.
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
    """The pass over so many tokens, from what `of_any_length` gave; the model's code is not run."""
    return common.copy(length, lambda leaf: leaf.at(length) if isinstance(leaf, _Grows) else leaf)
