"""Rewrites of captured passes, which change a graph in place: fewer operations, faster kernels.

Rewrites that leave every number unchanged are made for all passes: common sub-expressions, results that are not read.
Those that only round differently (a fused norm, a fused rotary embedding) are made in float32, where a pass over n
tokens rounds differently from a pass over one anyway, and in drafts, whose tokens are verified.

What is to be replaced is found by `torch.fx`'s subgraph matcher, on which `torch.fx.replace_pattern` is built; that
function itself compares no shapes, and generates code after each pattern.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher
from torch.nn import functional

from ...native.ops.kernels import NAMES
from ...native.ops.rows import gated_silu, rms_norm, rotary
from ..structure.expert_layers import run_experts
from .fx_graph import CapturedPass

__all__ = [
    "RowFunctions",
    "fuse_norms",
    "fuse_rotary",
    "linear_weight",
    "merge_linears",
    "rotate_together",
    "share_results",
    "swap_experts",
    "swap_linears",
    "use_bfloat16",
    "use_native_rows",
    "use_rows",
    "without_writes",
    "written_nodes",
]


def share_results(captured: CapturedPass) -> None:
    """Compute equal expressions once (such as the rotary tables that every layer reshapes), and unread ones not at all.

    fx's own pass for this (`passes.dialect.common.cse_pass`) is for graphs without writes in place, takes 1 and 1.0 for
    the same, and fails on slices.
    """
    written = written_nodes(captured)
    known: dict[Any, Node] = {}
    for node in captured.nodes:
        if node.op not in ("call_function", "call_method") or node.meta.get("writes"):
            continue
        if written.isdisjoint((node, *node.all_input_nodes)):
            # In it, nodes appear as their names, and numbers with their types.
            key = node.op, node.target, repr((node.args, sorted(node.kwargs.items())))
            if known.setdefault(key, node) is not node:
                node.replace_all_uses_with(known[key])
    captured.eliminate_dead_code()


def written_nodes(captured: CapturedPass) -> set[Node]:
    """Return nodes whose result another one writes into, and all that may share their memory."""
    written: set[Node] = set()
    for node in captured.nodes:
        if node.meta.get("writes"):
            targets = (*node.args[:1], node.kwargs.get("out")) if node.args else node.all_input_nodes
            written.update(target for target in targets if isinstance(target, Node))
    views = [{node, *node.all_input_nodes} for node in captured.nodes if node.meta.get("is_view")]
    known = 0
    while written and known != len(written):
        known = len(written)
        written.update(*(group for group in views if not written.isdisjoint(group)))
    return written


_ANEW: dict[str, Callable[..., Any]] = {
    "div_": torch.div,
    "mul_": operator.mul,
    "add_": operator.add,
}


def without_writes(captured: CapturedPass) -> None:
    """Compute anew what would be written over a result that nothing reads afterwards, such as the sum of its parts."""
    at = {node: place for place, node in enumerate(captured.nodes)}
    for node in captured.nodes:
        if node.op != "call_method" or node.target not in _ANEW or len(node.args) != 2 or node.kwargs:
            continue
        target, other = node.args
        known = _sharing(captured, target, node)
        if any(one.op not in ("call_function", "call_method") for one in known):
            continue
        dtypes = {one.meta.get("dtype") for one in (node, target, other) if isinstance(one, Node)}
        if len(dtypes) == 1 and not any(at[user] > at[node] for one in known for user in one.users):
            _become(node, _ANEW[node.target], target, other)
            node.meta |= {"writes": False, "is_view": False}


def products_to_layers(captured: CapturedPass) -> None:
    """Compute a weight's product with the columns of single tokens, W (C, R) · x (n, R, 1), as a linear layer."""
    for node in captured.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name.strip("_") != "matmul" or len(node.args) != 2 or node.kwargs:
            continue
        weight, x = captured.constant(node.args[0]), node.args[1]
        shape = x.meta.get("shape") if isinstance(x, Node) else None
        if weight is None or weight.ndim != 2 or not shape or len(shape) != 3 or shape[2] != 1:
            continue
        with captured.graph.inserting_before(node):
            row = captured.graph.call_method("transpose", (x, 1, 2))
            row.meta = {**x.meta, "shape": (shape[0], 1, shape[1]), "is_view": True}
            made = captured.graph.call_function(functional.linear, (row, node.args[0], None))
            made.meta = {**node.meta, "shape": (shape[0], 1, weight.shape[0])}
        node.op, node.target, node.args = "call_method", "transpose", (made, 1, 2)
        node.meta["is_view"] = True


_MOST_COPIED = 1 << 22
"""Elements of the largest weight that is copied: the copy is compared with the weight in each call."""


def use_parts_of_weights(captured: CapturedPass) -> None:
    """Make constants of the weights and biases of layers that are parts of the model's, or of small copies of these."""
    for node in captured.nodes:
        if node.op == "call_method" and node.target == "contiguous" and _is_part(captured, node.args[0]):
            if math.prod(node.meta["shape"]) <= _MOST_COPIED and (made := captured.computed_constant(node)) is not None:
                node.replace_all_uses_with(captured.add_constant(node.name, made, node))
        elif node.target is functional.linear:
            for at, arg in enumerate(node.args[1:], start=1):
                if isinstance(arg, Node) and captured.constant(arg) is None and _is_part(captured, arg):
                    made = captured.computed_constant(arg)
                    if made is not None:
                        node.update_arg(at, captured.add_constant(f"{node.name}_part", made, node))


def _is_part(captured: CapturedPass, node: Any) -> bool:
    """Tell whether a node is a weight, or a view of one."""
    if captured.constant(node) is not None:
        return True
    return bool(node.meta.get("is_view")) and all(_is_part(captured, one) for one in node.all_input_nodes)


def _sharing(captured: CapturedPass, node: Any, without: Any) -> set[Any]:
    """Return the nodes whose results may share the memory of a node's, without one of them."""
    known, count = {node}, 0
    while count != len(known):
        count = len(known)
        for one in captured.nodes:
            # Results that one call returns together are separate, unless they are views of something.
            of = [source for source in one.all_input_nodes if not _returns_several(source)]
            if one is not without and one.meta.get("is_view") and not known.isdisjoint((one, *of)):
                known.update((one, *of))
    return known


def _returns_several(node: Any) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and node.meta.get("shape") is None and not node.meta.get("is_view")


def _become(node: Any, target: Callable[..., Any], *args: Any) -> None:
    """Turn a node into the call of another function; its name, its readers and what is known of its result stay."""
    node.op, node.target, node.args, node.kwargs = "call_function", target, args, {}


# ----------------------------------------------------------------------------------------------------------------------
# patterns


def _pattern(names: str, function: Callable[..., Any]) -> Graph:
    """Return the graph of a function of as many arguments, each of which matches any value.

    It is made with proxies, not with `symbolic_trace`, which patches `nn.Module` for all threads.
    """
    graph = Graph()
    graph.output(function(*(Proxy(graph.placeholder(name)) for name in names.split())).node)
    return graph


def _found(captured: CapturedPass, patterns: Sequence[Graph]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Find patterns in a graph, and yield for each match the node of its result, and its arguments.

    Nodes in between have no other readers, and nothing is written into any of them.
    """
    written = written_nodes(captured)
    results: dict[Any, list[Any]] = {}
    for node in captured.nodes:
        results.setdefault(node.target, []).append(node)
    for pattern in patterns:
        (wanted,) = next(iter(reversed(pattern.nodes))).args
        # The matcher goes through the whole graph for each pattern, most of which are in none.
        if not any(_computes(node, wanted) for node in results.get(wanted.target, ())):
            continue
        for match in SubgraphMatcher(pattern).match(captured.graph):
            if written.isdisjoint(value for value in match.nodes_map.values() if isinstance(value, Node)):
                (result,) = match.returning_nodes
                yield result, {node.name: value for node, value in match.nodes_map.items() if node.op == "placeholder"}


def _computes(value: Any, wanted: Any) -> bool:
    """Tell whether a value is computed by the operations of a pattern, whatever they are applied to."""
    if not isinstance(wanted, Node) or wanted.op == "placeholder":
        return True
    return (
        isinstance(value, Node)
        and (value.op, value.target, len(value.args)) == (wanted.op, wanted.target, len(wanted.args))
        and all(map(_computes, value.args, wanted.args))
    )


def _both(operation: Callable[[Any, Any], Any], turned: bool) -> Callable[[Any, Any], Any]:
    return (lambda a, b: operation(b, a)) if turned else operation


def _width(captured: CapturedPass, node: Any) -> int | None:
    """Return the size of the last dimension, where it is known and the same at any length."""
    constant = captured.constant(node)
    shape = constant.shape if constant is not None else isinstance(node, Node) and node.meta.get("shape")
    return shape[-1] if shape and isinstance(shape[-1], int) else None


@cache
def _norms() -> list[Graph]:
    def norm(first: Any, second: Any) -> Graph:
        return _pattern(
            "x weight epsilon",
            lambda x, w, e: first(w, second(x, torch.rsqrt(torch.mean(torch.pow(x, 2), -1, keepdim=True) + e))),
        )

    return [norm(*(_both(operator.mul, turn) for turn in turns)) for turns in product((False, True), repeat=2)]


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    # √d is in the weight already, and ε · d under the root: x w √d / √(Σx² + d ε).
    return (x * weight) / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), epsilon)


def fuse_norms(captured: CapturedPass) -> None:
    """Replace `w · (x · rsqrt(mean(x²) + ε))` by `(w √d) · x / hypot(|x|, √(d ε))`: four operations instead of six.

    (`torch.rms_norm` takes three times as long for a single token on the CPU.)
    """
    for result, found in _found(captured, _norms()):
        weight, epsilon = captured.constant(found["weight"]), found["epsilon"]
        if weight is None or weight.ndim != 1 or not isinstance(epsilon, float):
            continue
        size, name = weight.shape[0], found["weight"].target
        if _width(captured, found["x"]) == size:
            scaled = captured.add_copy(f"{name}_scaled", weight, partial(torch.mul, other=math.sqrt(size)), result)
            added = captured.add_constant("epsilon", weight.new_tensor(math.sqrt(size * epsilon)), result)
            _become(result, _norm, found["x"], scaled, added)
    captured.eliminate_dead_code()


@cache
def _rotations() -> list[Graph]:
    def rotation(add: Any, straight: Any, turned: Any, by_name: bool) -> Graph:
        def function(x: Any, cos: Any, sin: Any, upper: Any, lower: Any) -> Any:
            halves = (-x[upper], x[lower])
            rotated = torch.cat(halves, dim=-1) if by_name else torch.cat(halves, -1)
            return add(straight(x, cos), turned(rotated, sin))

        return _pattern("x cos sin upper lower", function)

    return [
        rotation(_both(operator.add, add), _both(operator.mul, straight), _both(operator.mul, turned), by_name)
        for add, straight, turned, by_name in product((False, True), repeat=4)
    ]


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """Return −sin in the first half and sin in the second: `cat((−x₂, x₁)) · sin = roll(x, half) · this`."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int) -> torch.Tensor:
    return torch.addcmul(x * cos, torch.roll(x, half, -1), sin)


def _rotated(captured: CapturedPass) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Find where `x · cos + cat((−x₂, x₁)) · sin` of halves of x is computed; yield the result, x, cos and sin."""
    for result, found in _found(captured, _rotations()):
        x, cos, sin = (found[name] for name in ("x", "cos", "sin"))
        half = (_width(captured, x) or 0) // 2
        are_halves = (found["upper"], found["lower"]) == ((..., slice(half, None)), (..., slice(None, half)))
        if half and are_halves and {_width(captured, operand) for operand in (x, cos, sin)} == {2 * half}:
            yield result, x, cos, sin


def fuse_rotary(captured: CapturedPass) -> None:
    """Replace the seven operations of `x · cos + cat((−x₂, x₁)) · sin` by three."""
    signed: dict[Node, Node] = {}
    for result, x, cos, sin in _rotated(captured):
        if sin not in signed:
            with captured.graph.inserting_after(sin):
                signed[sin] = captured.graph.call_function(_signed, (sin,))
        _become(result, _rotate, x, cos, signed[sin], (_width(captured, x) or 0) // 2)
    captured.eliminate_dead_code()


@cache
def _half_norms() -> list[Graph]:
    def norm(first: Any, second: Any) -> Graph:
        def function(x: Any, w: Any, e: Any, dtype: Any) -> Any:
            wide = x.to(torch.float32)
            return first(w, second(wide, torch.rsqrt(torch.mean(torch.pow(wide, 2), -1, keepdim=True) + e)).to(dtype))

        return _pattern("x weight epsilon dtype", function)

    return [norm(*(_both(operator.mul, turn) for turn in turns)) for turns in product((False, True), repeat=2)]


@cache
def _gates() -> list[Graph]:
    return [
        _pattern("gates up", lambda gates, up, product=product: product(functional.silu(gates, inplace=False), up))
        for product in (_both(operator.mul, turn) for turn in (False, True))
    ]


@dataclass(frozen=True)
class RowFunctions:
    """Functions that compute each row of a tensor separately, each with its namesake's arguments in native/ops/rows.py.

    Attributes:
        norm: RMSNorm.
        gate: a gated activation.
        rotary: a rotary embedding.
    """

    norm: Callable[..., Any]
    gate: Callable[..., Any]
    rotary: Callable[..., Any]


NATIVE_ROWS = RowFunctions(rms_norm, gated_silu, rotary)
"""JIT-compiled functions. In half precision their numbers are those of the model's own code, to the bit; in float32
they round differently."""


def use_native_rows(captured: CapturedPass) -> None:
    """Compute norms, gated activations and rotary embeddings by `NATIVE_ROWS`."""
    use_rows(captured, NATIVE_ROWS)


def use_rows(captured: CapturedPass, rows: RowFunctions) -> None:
    """Compute norms, gated activations and rotary embeddings by given functions.

    Args:
        captured: the pass.
        rows: the functions.
    """
    for result, found in (*_found(captured, _norms()), *_found(captured, _half_norms())):
        weight, epsilon, x = captured.constant(found["weight"]), found["epsilon"], found["x"]
        if (
            weight is None
            or weight.ndim != 1
            or not isinstance(epsilon, float)
            or not _is_plain(weight.dtype, x, result)
        ):
            continue
        if _width(captured, x) == weight.shape[0] and weight.is_contiguous():
            _become(result, rows.norm, x, found["weight"], epsilon)
    for result, found in _found(captured, _gates()):
        gates, up = found["gates"], found["up"]
        if _is_plain(result.meta["dtype"], gates, up) and gates.meta["shape"] == up.meta["shape"]:
            _become(result, rows.gate, gates, up)
    for result, x, cos, sin in _rotated(captured):
        if _is_plain(result.meta["dtype"], x, cos, sin):
            shape = x.meta["shape"]
            table = (1, 1, *shape[2:])
            if len(shape) == 4 and shape[0] == 1 and cos.meta["shape"] == sin.meta["shape"] == table:
                _become(result, rows.rotary, x, cos, sin)
    captured.eliminate_dead_code()


def _is_plain(dtype: torch.dtype | None, *nodes: Any) -> bool:
    """Tell whether these are computed tensors of one type that has kernels."""
    return dtype in NAMES and all(isinstance(node, Node) and node.meta.get("dtype") == dtype for node in nodes)


# ----------------------------------------------------------------------------------------------------------------------
# linear layers


def linear_weight(captured: CapturedPass, node: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return `(weight, bias)` of an `F.linear` of constants, else `None`."""
    if node.target is not functional.linear:
        return None
    _, its_weight, its_bias = (*node.args, None)[:3]
    weight, bias = captured.constant(its_weight), captured.constant(its_bias)
    if weight is None or weight.ndim != 2 or (bias is None and its_bias is not None):
        return None
    return weight, bias


def swap_linears(
    captured: CapturedPass, swap: Callable[[torch.Tensor, torch.Tensor | None], Callable[..., Any] | None]
) -> None:
    """Give linear layers another kernel.

    Args:
        captured: the pass.
        swap: `(weight (N, K), bias (N,) or None) → x (…, K) ↦ (…, N)`, a function with a name; `None` to leave a layer
            as it is.
    """
    for node in captured.nodes:
        linear = linear_weight(captured, node)
        kernel = None if linear is None else swap(*linear)
        if kernel is not None:
            _become(node, kernel, node.args[0])
    captured.eliminate_dead_code()


def swap_experts(captured: CapturedPass, swap: Callable[[Any], Callable[..., Any] | None]) -> None:
    """Give layers of experts another kernel.

    Args:
        captured: the pass.
        swap: the layer's module → `(x, chosen, weights)` ↦ its output, a function with a name; `None` to leave it.
    """
    for node in captured.nodes:
        kernel = swap(captured.constants[node.args[0].target]) if node.target is run_experts else None
        if kernel is not None:
            _become(node, kernel, *node.args[1:])
    captured.eliminate_dead_code()


def merge_linears(
    captured: CapturedPass,
    group_of: Callable[[torch.Tensor, torch.Tensor | None], Any | None],
    kernel_of: Callable[[Any, Sequence[torch.Tensor]], tuple[Callable[..., Any], Callable[[torch.Tensor], int] | None]],
) -> None:
    """Give linear layers that read the same input, and belong together, one kernel (query, key and value; gate and up).

    Args:
        captured: the pass.
        group_of: weight and bias → the group that they belong to, or `None` to leave the layer as it is.
        kernel_of: `(group, weights)` → the kernel `x (…, K) ↦ tuple of (…, N_i)`, and the index in that tuple by
            weight; for a single layer a kernel `x (…, K) ↦ (…, N)` and `None`.
    """
    members: dict[Any, list[tuple[Any, torch.Tensor, Any]]] = {}
    written = written_nodes(captured)
    for node in captured.nodes:
        linear = linear_weight(captured, node)
        group = None if linear is None else group_of(*linear)
        if linear is not None and group is not None:
            # An input that is written into may not be the same for all: such layers stay separate.
            alone = node if node.args[0] in written else None
            members.setdefault((node.args[0], id(group), alone), []).append((node, linear[0], group))
    for (x, _, _), together in members.items():
        first, _, group = together[0]
        kernel, index_of = kernel_of(group, [weight for _, weight, _ in together])
        if index_of is None:
            _become(first, kernel, x)
            continue
        with captured.graph.inserting_before(first):
            whole = captured.graph.call_function(kernel, (x,))
        for node, weight, _ in together:
            _become(node, operator.getitem, whole, index_of(weight))
    captured.eliminate_dead_code()


def _rotate_together(
    parts: Sequence[torch.Tensor], shape: tuple[int, ...], heads: int, cos: torch.Tensor, sin: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first two of several parts that are adjacent in one row, `shape` together, and split them."""
    first = parts[0]
    size = shape[2] * shape[3]
    both = first.as_strided((1, shape[1], size), first.stride(), first.storage_offset()).view(shape)
    turned = _rotate(both.transpose(1, 2), cos, sin, half)
    return turned.narrow(1, 0, heads), turned.narrow(1, heads, shape[2] - heads)


@cache
def _turned_parts() -> list[Graph]:
    def function(whole: Any, index: Any, cos: Any, sin: Any, half: Any, *shape: Any) -> Any:
        heads = whole[index].view(*shape).transpose(1, 2)
        return Proxy(heads.node.graph.call_function(_rotate, tuple(value.node for value in (heads, cos, sin, half))))

    return [_pattern(f"whole index cos sin half {shape}", function) for shape in ("shape", "one rows heads size")]


def rotate_together(captured: CapturedPass, joined: Callable[[Node], bool]) -> None:
    """Rotate query and key at once where they are adjacent, the first two results of one kernel.

    Args:
        captured: the pass over one token, after `fuse_rotary` and `merge_linears`.
        joined: whether a node is a kernel whose results, adjacent in one tensor, can be rotated before they are
            split.
    """
    parts: dict[Node, dict[int, Any]] = {}
    for turned, found in _found(captured, _turned_parts()):
        parts.setdefault(found["whole"], {})[found["index"]] = turned
    for whole, both in parts.items():
        if set(both) != {0, 1} or not joined(whole):
            continue
        query, key = both[0], both[1]
        (one, heads, rows, size), (_, kv_heads, _, kv_size) = query.meta["shape"], key.meta["shape"]
        if query.args[1:] == key.args[1:] and size == kv_size:
            with captured.graph.inserting_before(query):
                arguments = (whole, (one, rows, heads + kv_heads, size), heads, *query.args[1:])
                pair = captured.graph.call_function(_rotate_together, arguments)
            _become(query, operator.getitem, pair, 0)
            _become(key, operator.getitem, pair, 1)
    captured.eliminate_dead_code()


def use_bfloat16(captured: CapturedPass) -> None:
    """Make the activations of a draft bfloat16, which is what the low-bit kernels take: no casts between layers.

    The embedding's output is cast, and so are small constants (norms, biases); everything else follows from them.
    """
    wide = (torch.float32, torch.float16)

    def follows(node: Node) -> bool:
        return node.target is not functional.embedding and linear_weight(captured, node) is None

    def is_embedded(node: Any) -> bool:
        if node.target == "to" and isinstance(node.args[0], Node):  # of an embedding whose rows are held in bfloat16
            return node.args[0].target is functional.embedding
        return node.target is functional.embedding

    for node in captured.nodes:
        constant = captured.constant(node)
        if constant is not None and constant.ndim == 1 and constant.dtype in wide and constant.numel() > 64:
            if any(map(follows, node.users)):
                narrow = captured.add_copy(f"{node.target}_bfloat16", constant, torch.Tensor.bfloat16, node)
                node.replace_all_uses_with(narrow, follows)
        elif is_embedded(node) and node.meta["dtype"] in wide:
            with captured.graph.inserting_after(node):
                cast = captured.graph.call_method("to", (node, torch.bfloat16))
            cast.meta = {**node.meta, "dtype": torch.bfloat16}
            node.replace_all_uses_with(cast, lambda user, cast=cast: user is not cast)
    captured.eliminate_dead_code()
