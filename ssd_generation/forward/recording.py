"""A decoding pass as a flat list of tensor operations, recorded from the model's own code.

A small model spends more time in Python (modules, keyword arguments, masks, cache objects) than in its matrices. One
pass over n tokens behind a cache always does the same operations on the same shapes, so it is recorded once and played
back (program.py). What is recorded are the calls that the model's own `forward` makes; nothing is known about families.

A pass can be recorded where it is a pure function of token ids, positions and the cache, and where it attends through
transformers' attention interface. Everything else is refused with `CannotRecord`, and the caller runs the model itself.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils, modeling_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from ..support.forks import ForkSafeRLock, undone_in_child

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "CannotRecord",
    "Operation",
    "Recording",
    "Value",
    "at_length",
    "attend",
    "needed",
    "of_any_length",
    "record_pass",
    "same_recording",
]

_LARGE = 1 << 16
"""Elements from which on a linear layer's product is not computed while recording: only shapes matter then."""

# What would bring a tensor's value into Python, where the recording cannot follow it.
_READS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__contains__,
        torch.Tensor.__iter__,
        torch.Tensor.nonzero,
        torch.nonzero,
        torch.Tensor.__array__,
        torch.Tensor.__complex__,
        torch.Tensor.data_ptr,
        torch.equal,
        torch.Tensor.equal,
        torch.allclose,
        torch.Tensor.allclose,
        torch.is_nonzero,
        torch.Tensor.is_nonzero,
        torch.unique,
        torch.Tensor.unique,
        torch.unique_consecutive,
        torch.Tensor.unique_consecutive,
        torch.argwhere,
        torch.Tensor.argwhere,
        torch.bincount,
        torch.Tensor.bincount,
        torch.Tensor.masked_select,
        torch.masked_select,
    }
)
_RANDOM = frozenset(
    {
        torch.rand,
        torch.randn,
        torch.rand_like,
        torch.randn_like,
        torch.randint,
        torch.randint_like,
        torch.randperm,
        torch.normal,
        torch.poisson,
        torch.multinomial,
        torch.bernoulli,
        torch.Tensor.multinomial,
        torch.Tensor.bernoulli,
        torch.Tensor.bernoulli_,
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.exponential_,
        torch.Tensor.geometric_,
        torch.Tensor.cauchy_,
        torch.Tensor.log_normal_,
        nn.functional.gumbel_softmax,
    }
)
# Without effect where `training` is false; F.dropout, the common one, is then left out of the recording.
_DROPOUTS = frozenset({nn.functional.dropout, torch.dropout, torch.nn.functional.alpha_dropout})


def _has_size_of_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result depends on the values in the arguments."""
    if func in (torch.where, torch.Tensor.where):
        return len(args) == 1
    if func in (torch.arange, torch.linspace):
        return any(isinstance(argument, torch.Tensor) for argument in args)
    if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
        return any(isinstance(argument, torch.Tensor) for argument in args[1:])
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8) for entry in index)
    return False


def _has_effect(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or kwargs.get("out") is not None
        or kwargs.get("inplace") is True
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"))
    )


class CannotRecord(Exception):
    """This pass cannot be played back; the message says why."""


class Value:
    """The result of an operation, an input, or (where `tensor` is set) a constant: a parameter, buffer or the like."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor | None = None) -> None:
        self.name = name
        self.tensor = tensor

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Operation:
    """`outputs = target(*args, **kwargs)`, where the arguments hold `Value`s in place of tensors.

    Attributes:
        target: a torch function, or `attend`.
        args: positional arguments.
        kwargs: keyword arguments.
        output: the result; where the function returns several tensors, the tuple of them as one value.
        has_effect: whether it writes into one of its arguments.
        shape: of the result, `None` where it is not a single tensor.
        dtype: of the result.
        is_view: whether the result may lie in the memory of an argument.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Value
    has_effect: bool = False
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    is_view: bool = False

    def inputs(self) -> Iterator[Value]:
        """The values it reads, repetitions included."""
        yield from _values(self.args)
        yield from _values(self.kwargs)


@dataclass(eq=False)
class Recording:
    """One recorded pass.

    Attributes:
        operations: in order.
        ids: the token ids, `(1, n)`.
        positions: the positions, `(1, n)`.
        logits: `(1, n, V)`.
        constants: tensors that exist outside the pass, by name: parameters, buffers and others.
        length: n.
        folded: constants whose numbers a rewrite has worked into others: good only as long as they do not change.
    """

    operations: list[Operation]
    ids: Value
    positions: Value
    logits: Value
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    length: int = 1
    folded: list[torch.Tensor] = field(default_factory=list)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
    """Stands for: append keys and values to the cache of a layer and attend to all of it, causally.

    Shapes: query `(1, H, n, D)`, key and value `(1, G, n, D)`; the result is `(1, n, H, D)`.
    """
    raise AssertionError("a recorded pass is played back with an attention of its own")


def _values(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from _values(entry)
    elif isinstance(tree, dict):
        for entry in tree.values():
            yield from _values(entry)
    elif isinstance(tree, slice):
        yield from _values((tree.start, tree.stop, tree.step))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from _tensors(entry)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


# ----------------------------------------------------------------------------------------------------------------------
# recording


class _Recorder(TorchFunctionMode):
    def __init__(self, known: Mapping[int, tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.constants: dict[str, torch.Tensor] = {}
        self._known = known
        self._values: dict[int, Value] = {}
        self._made = 0
        # An id is good only as long as its tensor lives. What comes from outside is kept; of results, which the model
        # lets go as it goes along, it is noted when they end, since all of them together would take much memory.
        self._alive: list[torch.Tensor] = []
        self._ends: dict[int, weakref.ref[torch.Tensor]] = {}

    def new_value(self, result: torch.Tensor) -> Value:
        value, key = self.unnamed(), id(result)
        values, ends = self._values, self._ends

        def ended(end: weakref.ref[torch.Tensor]) -> None:
            if ends.get(key) is end:  # and not another tensor in its place
                del ends[key], values[key]

        values[key], ends[key] = value, weakref.ref(result, ended)
        return value

    def unnamed(self) -> Value:
        self._made += 1
        return Value(f"v{self._made}")

    def value_of(self, tensor: torch.Tensor) -> Value:
        value = self._values.get(id(tensor))
        if value is None:
            # Seen for the first time, hence from outside the pass.
            name, _ = self._known.get(id(tensor), (f"constant {len(self.constants)}", tensor))
            value = Value(name, tensor)
            self._alive.append(tensor)
            self._values[id(tensor)] = value
            self.constants[name] = tensor
        return value

    def replaced(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self.value_of(tree)
        if isinstance(tree, (tuple, list)):
            entries = [self.replaced(entry) for entry in tree]
            return tuple(entries) if isinstance(tree, tuple) else entries
        if isinstance(tree, dict):
            return {key: self.replaced(entry) for key, entry in tree.items()}
        if isinstance(tree, slice):
            return slice(self.replaced(tree.start), self.replaced(tree.stop), self.replaced(tree.step))
        return tree

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", func)
        if func in _READS or func in _RANDOM or _has_size_of_values(func, args):
            raise CannotRecord(f"the pass depends on values: it calls {name}")
        if _has_effect(func, kwargs):
            for target in (args[0] if args else None, kwargs.get("out")):
                if isinstance(target, torch.Tensor) and id(target) not in self._values:
                    raise CannotRecord(f"the pass writes into a tensor that outlives it: it calls {name}")
        if func is nn.functional.linear and args[1].numel() >= _LARGE:
            result = args[0].new_zeros((*args[0].shape[:-1], args[1].shape[0]))
        elif func is nn.functional.dropout and not kwargs.get("training", args[2] if len(args) > 2 else True):
            return args[0]
        elif func in _DROPOUTS:
            raise CannotRecord("the pass draws random numbers: dropout")
        else:
            result = func(*args, **kwargs)
        self.add(func, args, kwargs, result)
        return result

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        tensors = isinstance(result, torch.Tensor) or (
            isinstance(result, (tuple, list)) and any(isinstance(entry, torch.Tensor) for entry in result)
        )
        has_effect = _has_effect(func, kwargs)
        if name == "__set__":
            raise CannotRecord("the pass assigns to an attribute of a tensor")
        if not tensors and not has_effect:
            return  # a shape, a dtype, a device
        if isinstance(result, torch.Tensor) and not has_effect and any(result is entry for entry in args):
            return  # such as `.to` of a tensor that is what it should be already
        arguments, keywords = self.replaced(args), self.replaced(kwargs)
        memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        is_view = any(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors(result))
        if isinstance(result, torch.Tensor):
            value = self.new_value(result)
            shape, dtype = tuple(result.shape), result.dtype
            self.operations.append(Operation(func, arguments, keywords, value, has_effect, shape, dtype, is_view))
            return
        value = self.unnamed()
        self.operations.append(Operation(func, arguments, keywords, value, has_effect, is_view=is_view))
        if isinstance(result, (tuple, list)):
            for index, entry in enumerate(result):
                if isinstance(entry, torch.Tensor):
                    item = self.new_value(entry)
                    self.operations.append(
                        Operation(
                            operator.getitem, (value, index), {}, item, False, tuple(entry.shape), entry.dtype, True
                        )
                    )


class _PretendLayer(CacheLayerMixin):
    """A cache layer that claims to hold a prefix, and hands back what it is given."""

    is_sliding = False

    def __init__(self, index: int, length: int, keys: dict[int, tuple[int, Any, Any]]) -> None:
        super().__init__()
        self.index = index
        self.length = length
        self.is_initialized = True
        self._keys = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # New tensor objects, by which the attention knows the layer; outside the recording.
        with torch._C.DisableTorchFunction():
            key, value = key_states.view_as(key_states), value_states.view_as(value_states)
        self._keys[id(key)] = (self.index, key, key_states)
        self._keys[id(value)] = (self.index, value, value_states)
        return key, value

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


_LOCK = ForkSafeRLock()


@contextmanager
def _own_attention(function: Callable[..., Any]) -> Iterator[None]:
    """Let this thread's sdpa attention be `function`, and give it no masks; other threads see no difference."""
    owner = threading.get_ident()
    attention, masks = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == owner else original)(*args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == owner else original_mask(*args, **kwargs)

    places = [(attention._local_mapping, forward), (masks._local_mapping, mask)]
    with _LOCK:
        # Looked up here: before, it may be that of another thread's recording.
        original, original_mask = attention["sdpa"], masks["sdpa"]
        before = [mapping.get("sdpa") for mapping, _ in places]

        def put_back() -> None:
            for (mapping, _), known in zip(places, before, strict=True):
                if known is None:
                    mapping.pop("sdpa", None)
                else:
                    mapping["sdpa"] = known

        with undone_in_child(put_back):
            try:
                for mapping, replacement in places:
                    mapping["sdpa"] = replacement
                yield
            finally:
                put_back()


def record_pass(model: PreTrainedModel, length: int, behind: int) -> Recording:
    """Record a pass over `length` tokens behind a cache that holds `behind`.

    The large products are not computed: what a recording takes is the model's Python code and little more.

    Args:
        model: the target model, in skip mode or not.
        length: n ≥ 1.
        behind: tokens in the cache, ≥ 1. What is recorded must not depend on it: see `same_recording`.

    Raises:
        CannotRecord: the pass is not a pure function of ids, positions and cache.
    """
    config = model.config.get_text_config(decoder=True)
    device = model.get_input_embeddings().weight.device
    known = {id(p): (name, p) for name, p in model.named_parameters()}
    known |= {id(b): (name, b) for name, b in model.named_buffers()}
    recorder = _Recorder(known)
    keys: dict[int, tuple[int, Any, Any]] = {}
    cache = Cache(layers=[_PretendLayer(index, behind, keys) for index in range(int(config.num_hidden_layers))])

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if id(key) not in keys or id(value) not in keys or keys[id(key)][0] != keys[id(value)][0]:
            raise CannotRecord("an attention reads keys or values that did not come from the cache of one layer")
        layer = keys[id(key)][0]
        odd = [
            name
            for name in ("softcap", "s_aux", "position_bias", "sliding_window", "cache")
            if kwargs.get(name) is not None
        ]
        if odd or attention_mask is not None or dropout or is_causal is False:
            raise CannotRecord(f"an attention of its own kind ({', '.join(odd) or 'mask, dropout or not causal'})")
        if query.ndim != 4 or query.shape[0] != 1 or query.shape[2] != length or query.shape[1] % key.shape[1]:
            raise CannotRecord("an attention with shapes of its own")
        with torch._C.DisableTorchFunction():
            # Laid out as when it is played back, where code that needs it otherwise would fail.
            result = query.new_zeros((1, query.shape[1], length, value.shape[3])).transpose(1, 2)
        scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
        recorder.add(attend, (query, keys[id(key)][2], keys[id(value)][2], layer, scale), {}, result)
        return result, None

    with torch.inference_mode(), _own_attention(attention):
        ids = torch.zeros((1, length), dtype=torch.long, device=device)
        positions = torch.arange(behind, behind + length, device=device)[None]
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=length, past_key_values=cache, attention_mask=None, position_ids=positions
        )
        extra = {key for key, value in inputs.items() if isinstance(value, torch.Tensor) and key not in _INPUTS}
        if extra or not isinstance(inputs.get("input_ids"), torch.Tensor):
            raise CannotRecord(f"the model wants further tensors: {', '.join(sorted(extra))}")
        ids, positions = inputs["input_ids"], inputs.get("position_ids")
        if positions is None:
            raise CannotRecord("the model takes no position ids")
        ids_value, positions_value = recorder.new_value(ids), recorder.new_value(positions)
        with recorder:
            outputs = model(**inputs, return_dict=True)
        logits = outputs.logits
        if id(logits) not in recorder._values or tuple(logits.shape[:2]) != (1, length):
            raise CannotRecord("the logits are not what a pass of the model gives")
    return Recording(
        operations=needed(recorder.operations, recorder.value_of(logits)),
        ids=ids_value,
        positions=positions_value,
        logits=recorder.value_of(logits),
        constants=recorder.constants,
        length=length,
    )


_INPUTS = frozenset({"input_ids", "position_ids"})


def needed(operations: list[Operation], result: Value) -> list[Operation]:
    """Without the operations whose results nobody uses."""
    wanted = {result}
    kept = []
    for operation in reversed(operations):
        if operation.output in wanted or operation.has_effect or operation.target is attend:
            kept.append(operation)
            wanted.update(operation.inputs())
    return kept[::-1]


def same_recording(first: Recording, second: Recording) -> bool:
    """Whether two recordings of the same length do the same, whatever the cache held.

    A number that the model computed from the cache's length (an offset, a scale) shows as a difference.
    """
    return first.length == second.length and of_any_length([first, second]) is not None


@dataclass(frozen=True)
class _Grows:
    """A number that grows with the tokens of a pass."""

    start: int
    step: int


class _Differ(Exception):
    """Recordings of several lengths that do not do the same."""


def of_any_length(recordings: Sequence[Recording]) -> Recording | None:
    """What the passes over any number of tokens between those of some recordings have in common; see `at_length`.

    A number in a recording (of a shape, of a slice) is the same in all of them, or grows with the tokens by the same
    step. Where that is not so, or where the operations are others, there is no such recording.

    Args:
        recordings: three or more, of ascending lengths (two for the step, one to see that it holds), and behind caches
            of several lengths, since nothing may depend on these. Of one length, any two.

    Returns:
        A recording of length 0 that does for all between, or `None`.
    """
    first = recordings[0]
    lengths = [recording.length for recording in recordings]
    if len({(len(r.operations), r.logits.name) for r in recordings}) > 1:
        return None
    names: list[dict[Value, Value]] = [{r.ids: first.ids, r.positions: first.positions} for r in recordings]

    def together(leaves: tuple[Any, ...]) -> Any:
        one = leaves[0]
        if any(type(leaf) is not type(one) for leaf in leaves):
            raise _Differ
        if isinstance(one, Value):
            if one.tensor is not None:
                same = all(leaf.tensor is one.tensor for leaf in leaves)
            else:
                same = all(known.get(leaf) is one for known, leaf in zip(names, leaves, strict=True))
        elif isinstance(one, (tuple, list)):
            if len({len(leaf) for leaf in leaves}) > 1:
                raise _Differ
            return type(one)(map(together, zip(*leaves, strict=True)))
        elif isinstance(one, dict):
            if any(leaf.keys() != one.keys() for leaf in leaves):
                raise _Differ
            return {key: together(tuple(leaf[key] for leaf in leaves)) for key in one}
        elif isinstance(one, slice):
            return slice(*(together(tuple(getattr(leaf, part) for leaf in leaves)) for part in _PARTS))
        else:
            same = all(bool(leaf == one) for leaf in leaves)
            if not same and type(one) is int and lengths[0] != lengths[1]:
                step = (leaves[1] - one) // (lengths[1] - lengths[0])
                grows = _Grows(one - step * lengths[0], step)
                if all(_at(length, grows) == leaf for length, leaf in zip(lengths, leaves, strict=True)):
                    return grows
        if not same:
            raise _Differ
        return one

    operations = []
    try:
        for row in zip(*(recording.operations for recording in recordings), strict=True):
            one = row[0]
            if any(
                (o.target, o.dtype, o.has_effect, o.is_view) != (one.target, one.dtype, one.has_effect, one.is_view)
                for o in row
            ):
                return None
            args, kwargs, shape = (
                together(tuple(getattr(o, part) for o in row)) for part in ("args", "kwargs", "shape")
            )
            operations.append(replace(one, args=args, kwargs=kwargs, shape=shape))
            for known, operation in zip(names, row, strict=True):
                known[operation.output] = one.output
    except _Differ:
        return None

    return replace(first, operations=operations, length=0, folded=[])


def at_length(common: Recording, length: int) -> Recording:
    """The recording of a pass over so many tokens, from what `of_any_length` gave; the model's code is not run."""
    made = [
        replace(o, args=_at(length, o.args), kwargs=_at(length, o.kwargs), shape=_at(length, o.shape))
        for o in common.operations
    ]
    return replace(common, operations=made, constants=dict(common.constants), length=length, folded=[])


_PARTS = ("start", "stop", "step")


def _at(length: int, tree: Any) -> Any:
    """Arguments with their numbers for a pass over so many tokens."""
    if isinstance(tree, _Grows):
        return tree.start + tree.step * length
    if isinstance(tree, (tuple, list)):
        return type(tree)(_at(length, entry) for entry in tree)
    if isinstance(tree, dict):
        return {key: _at(length, entry) for key, entry in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_at(length, getattr(tree, part)) for part in _PARTS))
    return tree
