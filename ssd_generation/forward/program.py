"""A recorded pass turned into straight-line Python, and the rewrites that make it shorter.

Rewrites that leave every number as it is are made for all passes: common sub-expressions, results nobody uses. Those
that only round otherwise (a fused norm, a fused rotary embedding) are made in float32, where a pass over n tokens
rounds otherwise than a pass over one anyway, and in drafts, whose tokens are verified.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from .recording import Operation, Recording, Value, attend, needed

__all__ = [
    "Program",
    "compile_recording",
    "fuse_norms",
    "fuse_rotary",
    "merge_linears",
    "rotate_together",
    "share_results",
    "swap_linears",
    "use_bfloat16",
]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]

_MUL = frozenset({torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul})
_ADD = frozenset({torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add})
_NEG = frozenset({torch.Tensor.neg, torch.Tensor.__neg__, torch.neg})
_CAT = frozenset({torch.cat, torch.concat})
_POW = frozenset({torch.Tensor.pow, torch.Tensor.__pow__, torch.pow})
_RSQRT = frozenset({torch.rsqrt, torch.Tensor.rsqrt})
_MEAN = frozenset({torch.Tensor.mean, torch.mean})
_GETITEM = torch.Tensor.__getitem__


@dataclass(frozen=True)
class Program:
    """A pass that can be run.

    Attributes:
        run: `(ids (1, n), positions (1, n), attend) → logits (1, n, V)`. `attend` appends keys and values to the cache.
        length: n.
        operations: how many there are.
        source: the Python code of `run`, for the curious.
        folded: weights whose numbers `run` has copies of: it is good only as long as they do not change.
    """

    run: Callable[[torch.Tensor, torch.Tensor, Attend], torch.Tensor]
    length: int
    operations: int
    source: str
    folded: tuple[torch.Tensor, ...] = ()


def compile_recording(recording: Recording) -> Program:
    """Straight-line Python for a recording, with results let go as soon as nothing reads them."""
    namespace: dict[str, Any] = {}
    bound: dict[int, str] = {}
    bound_things: list[Any] = []  # an id is good only as long as its object lives

    def bind(prefix: str, thing: Any) -> str:
        name = bound.get(id(thing))
        if name is None:
            name = bound[id(thing)] = f"{prefix}{len(bound)}"
            namespace[name] = thing
            bound_things.append(thing)
        return name

    names: dict[Value, str] = {recording.ids: "ids", recording.positions: "positions"}
    last_use: dict[Value, int] = {}
    for index, operation in enumerate(recording.operations):
        for value in operation.inputs():
            last_use[value] = index
    last_use[recording.logits] = len(recording.operations)

    def source_of(tree: Any) -> str:
        if isinstance(tree, Value):
            return bind("c", tree.tensor) if tree.tensor is not None else names[tree]
        if isinstance(tree, tuple):
            return "(" + "".join(f"{source_of(entry)}, " for entry in tree) + ")"
        if isinstance(tree, list):
            return "[" + ", ".join(source_of(entry) for entry in tree) + "]"
        if isinstance(tree, slice):
            return f"slice({source_of(tree.start)}, {source_of(tree.stop)}, {source_of(tree.step)})"
        if tree is None or isinstance(tree, (bool, int, str)):
            return repr(tree)
        if isinstance(tree, float) and math.isfinite(tree):
            return repr(tree)
        return bind("o", tree)

    lines = ["def run(ids, positions, attend):"]
    free: list[str] = []
    fresh = 0
    for index, operation in enumerate(recording.operations):
        target = "attend" if operation.target is attend else bind("f", operation.target)
        arguments = [source_of(argument) for argument in operation.args]
        arguments += [f"{key}={source_of(value)}" for key, value in operation.kwargs.items()]
        # Names of values that end here are used again: their tensors are freed when the next result takes the name.
        for value in {id(v): v for v in operation.inputs()}.values():
            if value.tensor is None and last_use[value] == index and names[value] not in ("ids", "positions"):
                free.append(names[value])
        if operation.output not in last_use:
            lines.append(f"    {target}({', '.join(arguments)})")
            continue
        if free:
            name = free.pop()
        else:
            name, fresh = f"v{fresh}", fresh + 1
        names[operation.output] = name
        lines.append(f"    {name} = {target}({', '.join(arguments)})")
    lines.append(f"    return {source_of(recording.logits)}")
    source = "\n".join(lines) + "\n"
    exec(compile(source, "<recorded pass>", "exec"), namespace)
    return Program(
        run=namespace["run"],
        length=recording.length,
        operations=len(recording.operations),
        source=source,
        folded=tuple(recording.folded),
    )


# ----------------------------------------------------------------------------------------------------------------------
# rewriting


def _substituted(tree: Any, changes: dict[Value, Value]) -> Any:
    if isinstance(tree, Value):
        return changes.get(tree, tree)
    if isinstance(tree, tuple):
        return tuple(_substituted(entry, changes) for entry in tree)
    if isinstance(tree, list):
        return [_substituted(entry, changes) for entry in tree]
    if isinstance(tree, dict):
        return {key: _substituted(entry, changes) for key, entry in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_substituted(entry, changes) for entry in (tree.start, tree.stop, tree.step)))
    return tree


def _written(recording: Recording) -> set[Value]:
    """Values that an operation writes into, and all that may share their memory."""
    written = {
        value
        for operation in recording.operations
        if operation.has_effect
        for value in ((*operation.args[:1], operation.kwargs.get("out")) if operation.args else operation.inputs())
        if isinstance(value, Value)
    }
    views = [{operation.output, *operation.inputs()} for operation in recording.operations if operation.is_view]
    known = 0
    while written and known != len(written):
        known = len(written)
        written.update(*(group for group in views if not written.isdisjoint(group)))
    return written


def _key(tree: Any) -> Any:
    if isinstance(tree, Value):
        return id(tree)
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *(_key(entry) for entry in tree))
    if isinstance(tree, dict):
        return tuple((name, _key(entry)) for name, entry in sorted(tree.items()))
    if isinstance(tree, slice):
        return ("slice", _key(tree.start), _key(tree.stop), _key(tree.step))
    return (type(tree).__name__, repr(tree))


def share_results(recording: Recording) -> Recording:
    """Compute the same thing once (such as the rotary tables that every layer reshapes), and nothing for nobody."""
    written = _written(recording)
    known: dict[Any, Value] = {}
    changes: dict[Value, Value] = {}
    operations = []
    for operation in recording.operations:
        args, kwargs = _substituted(operation.args, changes), _substituted(operation.kwargs, changes)
        pure = not operation.has_effect and operation.target is not attend
        reads_written = any(value in written for value in operation.inputs()) or operation.output in written
        if pure and not reads_written:
            key = (id(operation.target), _key(args), _key(kwargs))
            if key in known:
                changes[operation.output] = known[key]
                continue
            known[key] = operation.output
        operations.append(replace(operation, args=args, kwargs=kwargs))
    logits = changes.get(recording.logits, recording.logits)
    return _without_unused(replace(recording, operations=operations, logits=logits))


def _without_unused(recording: Recording) -> Recording:
    return replace(recording, operations=needed(recording.operations, recording.logits))


class _Graph:
    """Who makes a value and how many read it."""

    def __init__(self, recording: Recording) -> None:
        self.made = {operation.output: operation for operation in recording.operations}
        self.uses = Counter(value for operation in recording.operations for value in operation.inputs())
        self.uses[recording.logits] += 1
        self.written = _written(recording)

    def maker(self, value: Any, targets: frozenset[Any]) -> Operation | None:
        """The operation that makes `value`, if it is one of `targets` and its result is read only once."""
        if not isinstance(value, Value) or value in self.written:
            return None
        operation = self.made.get(value)
        if operation is None or operation.target not in targets or self.uses[value] != 1:
            return None
        return operation

    def width(self, value: Any) -> int | None:
        """Size of the last dimension, where it is known and nothing writes into the value."""
        if not isinstance(value, Value) or value in self.written:
            return None
        shape = value.tensor.shape if value.tensor is not None else getattr(self.made.get(value), "shape", None)
        return int(shape[-1]) if shape else None

    def pair(self, operation: Operation | None) -> tuple[Any, Any] | None:
        if operation is None or len(operation.args) != 2 or operation.kwargs:
            return None
        return operation.args[0], operation.args[1]


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    # √d is in the weight already, and ε · d under the root: x w √d / √(Σx² + d ε).
    return (x * weight) / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), epsilon)


def fuse_norms(recording: Recording) -> Recording:
    """`w · (x · rsqrt(mean(x²) + ε))` becomes `(w √d) · x / hypot(|x|, √(d ε))`: four operations instead of six.

    (`torch.rms_norm` takes three times as long for a single token on the CPU.)
    """
    graph = _Graph(recording)
    replaced: dict[Value, Operation] = {}
    for operation in recording.operations:
        if operation.target not in _MUL or operation.output in graph.written:
            continue
        for weight, scaled in _both_ways(graph.pair(operation)):
            if not isinstance(weight, Value) or weight.tensor is None or weight.tensor.ndim != 1:
                continue
            for x, inverse in _both_ways(graph.pair(graph.maker(scaled, _MUL))):
                found = _mean_square(graph, inverse)
                size = weight.tensor.shape[0]
                if found is not None and found[0] is x and graph.width(x) == size:
                    recording.folded.append(weight.tensor)
                    scaled_weight = Value(f"{weight.name} · √d", weight.tensor * math.sqrt(size))
                    epsilon = Value("√(d ε)", weight.tensor.new_tensor(math.sqrt(size * found[1])))
                    replaced[operation.output] = replace(
                        operation, target=_norm, args=(x, scaled_weight, epsilon), kwargs={}
                    )
    if not replaced:
        return recording
    operations = [replaced.get(operation.output, operation) for operation in recording.operations]
    return _without_unused(replace(recording, operations=operations))


def _both_ways(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
    return () if pair is None else (pair, pair[::-1])


def _mean_square(graph: _Graph, value: Any) -> tuple[Value, float] | None:
    """`(x, ε)` where `value` is rsqrt(mean(x², −1, keepdim) + ε)."""
    inverse = graph.maker(value, _RSQRT)
    if inverse is None or len(inverse.args) != 1:
        return None
    for mean, eps in _both_ways(graph.pair(graph.maker(inverse.args[0], _ADD))):
        made = graph.maker(mean, _MEAN)
        if made is None or not isinstance(eps, float) or made.args[1:] != (-1,) or made.kwargs != {"keepdim": True}:
            continue
        square = graph.pair(graph.maker(made.args[0], _POW))
        if square is not None and square[1] == 2 and isinstance(square[0], Value):
            return square[0], eps
    return None


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """−sin in the first half and sin in the second: `cat((−x₂, x₁)) · sin = roll(x, half) · this`."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int) -> torch.Tensor:
    return torch.addcmul(x * cos, torch.roll(x, half, -1), sin)


def fuse_rotary(recording: Recording) -> Recording:
    """`x · cos + cat((−x₂, x₁)) · sin` becomes three operations instead of seven."""
    graph = _Graph(recording)
    replaced: dict[Value, list[Operation]] = {}
    signed: dict[Value, Value] = {}
    for operation in recording.operations:
        if operation.target not in _ADD or operation.output in graph.written:
            continue
        for straight, turned in _both_ways(graph.pair(operation)):
            for x, cos in _both_ways(graph.pair(graph.maker(straight, _MUL))):
                for rotated, sin in _both_ways(graph.pair(graph.maker(turned, _MUL))):
                    half = _half_turn(graph, rotated, x)
                    if (
                        half is None
                        or operation.output in replaced
                        or {graph.width(sin), graph.width(cos)} != {2 * half}
                    ):
                        continue
                    new = []
                    if sin not in signed:
                        signed[sin] = Value(f"{sin.name}_signed")
                        new.append(Operation(_signed, (sin,), {}, signed[sin]))
                    new.append(replace(operation, target=_rotate, args=(x, cos, signed[sin], half), kwargs={}))
                    replaced[operation.output] = new
    if not replaced:
        return recording
    operations = [new for old in recording.operations for new in replaced.get(old.output, [old])]
    return _without_unused(replace(recording, operations=operations))


def _half_turn(graph: _Graph, rotated: Any, x: Any) -> int | None:
    """Half the last dimension, where `rotated` is `cat((−x[half:], x[:half]))`."""
    joined = graph.maker(rotated, _CAT)
    if joined is None or not isinstance(x, Value) or not isinstance(joined.args[0], (tuple, list)):
        return None
    axis = joined.kwargs.get("dim", joined.args[1] if len(joined.args) > 1 else 0)
    width = graph.width(x)
    if axis != -1 or len(joined.args[0]) != 2 or width is None or width % 2:
        return None
    negated = graph.maker(joined.args[0][0], _NEG)
    if negated is None:
        return None
    upper = graph.maker(negated.args[0], frozenset({_GETITEM}))
    lower = graph.maker(joined.args[0][1], frozenset({_GETITEM}))
    if upper is None or lower is None or upper.args[0] is not x or lower.args[0] is not x:
        return None
    half = width // 2
    if upper.args[1] != (Ellipsis, slice(half, None, None)) or lower.args[1] != (Ellipsis, slice(None, half, None)):
        return None
    return half


def _rotate_together(
    both: torch.Tensor, sizes: tuple[int, int], cos: torch.Tensor, sin: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key heads side by side, `(1, n, H + G, D)`, to `(1, H, n, D)` and `(1, G, n, D)`."""
    turned = _rotate(both.transpose(1, 2), cos, sin, half)
    return turned.narrow(1, 0, sizes[0]), turned.narrow(1, sizes[0], sizes[1])


def rotate_together(recording: Recording, joined: Callable[[Operation], bool]) -> Recording:
    """Turn query and key in one go where they lie side by side, the first two results of one kernel.

    Args:
        recording: the pass, after `fuse_rotary` and `merge_linears`.
        joined: whether an operation is a kernel whose results, side by side in one tensor, are float32 enough to be
            turned before they are taken apart.
    """
    graph = _Graph(recording)
    turns: dict[Value, list[tuple[int, Operation, tuple[int, ...]]]] = {}
    for operation in recording.operations:
        if operation.target is not _rotate:
            continue
        shaped = graph.maker(operation.args[0], frozenset({torch.Tensor.transpose}))
        viewed = None if shaped is None else graph.maker(shaped.args[0], frozenset({torch.Tensor.view}))
        item = None if viewed is None else graph.maker(viewed.args[0], frozenset({operator.getitem}))
        if shaped is None or viewed is None or item is None or shaped.args[1:] != (1, 2) or viewed.shape is None:
            continue
        turns.setdefault(item.args[0], []).append((item.args[1], operation, viewed.shape))
    replaced: dict[Value, list[Operation]] = {}
    for whole, found in turns.items():
        found.sort(key=lambda entry: entry[0])
        made = graph.made.get(whole)
        if [index for index, _, _ in found] != [0, 1] or made is None or not joined(made):
            continue
        (_, first, q_shape), (_, second, k_shape) = found
        if first.args[1:] != second.args[1:] or q_shape[:2] != k_shape[:2] or q_shape[3] != k_shape[3]:
            continue
        pair = Value(f"{first.output.name}_both")
        sizes = (q_shape[2], k_shape[2])
        replaced[first.output] = [
            Operation(_take_both, (whole, (*q_shape[:2], sum(sizes), q_shape[3])), {}, Value(f"{pair.name}_whole")),
        ]
        replaced[first.output].append(
            Operation(_rotate_together, (replaced[first.output][0].output, sizes, *first.args[1:]), {}, pair)
        )
        replaced[first.output].append(replace(first, target=operator.getitem, args=(pair, 0), kwargs={}))
        replaced[second.output] = [replace(second, target=operator.getitem, args=(pair, 1), kwargs={})]
    if not replaced:
        return recording
    operations = [new for old in recording.operations for new in replaced.get(old.output, [old])]
    return _without_unused(replace(recording, operations=operations))


def _take_both(parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The first two of several parts that lie side by side in one row, as one tensor."""
    first = parts[0]
    size = shape[2] * shape[3]
    return first.as_strided((1, shape[1], size), first.stride(), first.storage_offset()).view(shape)


def swap_linears(
    recording: Recording, swap: Callable[[torch.Tensor, torch.Tensor | None], Callable[..., Any] | None]
) -> Recording:
    """Give linear layers another kernel.

    Args:
        recording: the pass.
        swap: `(weight (N, K), bias (N,) or None) → x (…, K) ↦ (…, N)`, or `None` to leave a layer as it is.
    """
    operations = []
    for operation in recording.operations:
        weight = linear_weight(operation)
        kernel = None if weight is None else swap(weight[0], weight[1])
        if kernel is not None:
            operation = replace(operation, target=kernel, args=operation.args[:1], kwargs={})
        operations.append(operation)
    return replace(recording, operations=operations)


def linear_weight(operation: Operation) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """`(weight, bias)` of an `F.linear` by constants, else `None`."""
    if operation.target is not functional.linear or not isinstance(operation.args[0], Value):
        return None
    weight = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("weight")
    bias = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("bias")
    if not isinstance(weight, Value) or weight.tensor is None or weight.tensor.ndim != 2:
        return None
    if bias is not None and (not isinstance(bias, Value) or bias.tensor is None):
        return None
    return weight.tensor, None if bias is None else bias.tensor


def merge_linears(
    recording: Recording,
    group_of: Callable[[torch.Tensor], Any | None],
    kernel_of: Callable[[Any, Sequence[torch.Tensor]], tuple[Callable[..., Any], Callable[[torch.Tensor], int] | None]],
) -> Recording:
    """Give linear layers that read the same input, and belong together, one kernel (query, key and value; gate and up).

    Args:
        recording: the pass.
        group_of: weight → what it belongs to, or `None` to leave the layer as it is.
        kernel_of: `(group, weights)` → the kernel `x (…, K) ↦ tuple of (…, N_i)`, and the index in that tuple by
            weight; for a single layer a kernel `x (…, K) ↦ (…, N)` and `None`.
    """
    members: dict[Any, list[Operation]] = {}
    written = _written(recording)
    for operation in recording.operations:
        if (linear := linear_weight(operation)) is not None and (group := group_of(linear[0])) is not None:
            # An input that is written into may not be the same for all: those come one by one.
            alone = operation if operation.args[0] in written else None
            members.setdefault((operation.args[0], id(group), alone), []).append(operation)
    operations = []
    done: set[Value] = set()
    for operation in recording.operations:
        if operation.output in done:
            continue
        linear = linear_weight(operation)
        group = None if linear is None else group_of(linear[0])
        if group is None:
            operations.append(operation)
            continue
        together = members[operation.args[0], id(group), operation if operation.args[0] in written else None]
        weights = [linear_weight(member)[0] for member in together]  # type: ignore[index]
        kernel, index_of = kernel_of(group, weights)
        if index_of is None:
            operations.append(replace(operation, target=kernel, args=operation.args[:1], kwargs={}))
            continue
        whole = Value(f"{operation.output.name}_all")
        operations.append(Operation(kernel, operation.args[:1], {}, whole))
        for member, weight in zip(together, weights, strict=True):
            operations.append(replace(member, target=operator.getitem, args=(whole, index_of(weight)), kwargs={}))
            done.add(member.output)
    return replace(recording, operations=operations)


def use_bfloat16(recording: Recording) -> Recording:
    """Let the activations of a draft be bfloat16, which is what the low-bit kernels take: no casts between layers.

    The embedding's output is cast, and small constants (norms, biases) are; everything else follows from them.
    """
    narrowed: dict[Value, Value] = {}
    operations = []
    changes: dict[Value, Value] = {}
    for operation in recording.operations:
        is_table = operation.target is functional.embedding
        if not is_table and linear_weight(operation) is None:
            for value in operation.inputs():
                tensor = value.tensor
                if tensor is None or tensor.ndim != 1 or tensor.dtype not in (torch.float32, torch.float16):
                    continue
                if value not in narrowed and tensor.numel() > 64:
                    recording.folded.append(tensor)
                    narrowed[value] = Value(f"{value.name} in bfloat16", tensor.to(torch.bfloat16))
        replacements = {**changes, **narrowed}
        new = replace(
            operation,
            args=_substituted(operation.args, replacements),
            kwargs=_substituted(operation.kwargs, replacements),
        )
        operations.append(new)
        if is_table and operation.dtype in (torch.float32, torch.float16):
            changes[operation.output] = Value(f"{operation.output.name}_bfloat16")
            operations.append(
                Operation(
                    torch.Tensor.to,
                    (operation.output, torch.bfloat16),
                    {},
                    changes[operation.output],
                    False,
                    operation.shape,
                    torch.bfloat16,
                )
            )
    return replace(recording, operations=operations, logits=changes.get(recording.logits, recording.logits))
