"""A forward pass over a few tokens, captured from the model's own code as a `torch.fx.Graph`.

A small model spends more time in Python (modules, keyword arguments, masks, cache objects) than in its matrices. A pass
over n tokens that continues a KV cache always does the same operations on the same shapes, so it is captured once and
compiled (fx_graph.py). Nothing is known about model families: what is captured are the torch functions that the
model's `forward` calls.

The nodes are made by a torch function mode of our own. fx's symbolic tracer cannot follow the models (branches on
shapes and on the cache), and while it traces, it patches `nn.Module` for every thread. Dynamo and `torch.export` follow
them, but take seconds per model, and guard on what is examined here once.

A pass can be captured where it is a pure function of token ids, positions and the cache, and where it attends through
transformers' attention interface. A layer of experts is one node (expert_layers.py). Everything else is refused with
`CannotCapture`, and the caller runs the model itself.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils, modeling_utils
from transformers.cache_utils import Cache

from ...cache.recurrent import has_states_alone, layers_without_keys
from ...config import SkipConfig
from ...support.forks import ForkSafeRLock, undone_in_child
from ...support.versions import cache_argument
from ..structure.skip_mode import SkipMode
from .conditions import EAGER, layers_that_attend
from .expert_layers import experts_of, run_experts
from .fx_graph import CapturedPass
from .latent_attention import EXPANSION, from_latent, into_latent
from .pretend_cache import CacheLength, CannotCapture, PretendLayer, pretend_states
from .replacing import modules_with, own_functions, own_methods
from .state_steps import (
    STATE_OF,
    StatePlace,
    StateStep,
    bound_step,
    layers_with_steps,
    own_steps,
    run_step,
    state_at,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CannotCapture", "capture_pass", "own_attention"]

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

_INPUTS = {"input_ids", "position_ids"}

_WARNING = "warn_if_padding_and_no_attention_mask"
"""Method of transformers' models that reads token ids, only to warn."""

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


class _Capture(TorchFunctionMode):
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


def _are_of_experts(shapes: Sequence[torch.Size]) -> bool:
    """Tell whether these are the shapes of hidden states `(n, H)`, chosen experts `(n, k)` and their weights."""
    if len(shapes) != 3 or any(len(shape) != 2 for shape in shapes):
        return False
    hidden, chosen, weights = shapes
    return chosen == weights and chosen[0] == hidden[0]


@dataclass(frozen=True)
class Expanded:
    """Keys and values of all heads that a layer computes from latents.

    Attributes:
        key: tensor that represents the keys, `(1, H, n, D)`.
        value: tensor that represents the values.
        held: the cache's latents and rotated keys.
        weight: matrices of keys and values, as in `into_latent`.
        size: size of a head's keys that are not rotated.
    """

    key: torch.Tensor
    value: torch.Tensor
    held: tuple[torch.Tensor, torch.Tensor]
    weight: torch.Tensor
    size: int


_LOCK = ForkSafeRLock()


@contextmanager
def own_attention(
    make: Callable[[Callable[..., Any]], Callable[..., Any]], own_mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Replace this thread's sdpa attention by a function of this library; other threads see no difference.

    Args:
        make: makes the replacement from the original function.
        own_mask: function that makes masks, also of eager attention; `None`: transformers' own.
    """
    owner = threading.get_ident()
    attention, masks = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == owner else original)(*args, **kwargs)

    def mask(name: str, *args: Any, **kwargs: Any) -> Any:
        if own_mask is not None and threading.get_ident() == owner:
            return own_mask(*args, **kwargs)
        return original_masks[name](*args, **kwargs)

    places: list[tuple[Any, str, Any]] = [(attention._local_mapping, "sdpa", forward)]
    if own_mask is not None:
        places += [(masks._local_mapping, name, partial(mask, name)) for name in ("sdpa", "eager")]
    with _LOCK:
        # Looked up here: earlier, it may be that of another thread's capture.
        original, original_masks = attention["sdpa"], {name: masks[name] for name in ("sdpa", "eager")}
        function = make(original)
        before = [mapping.get(name) for mapping, name, _ in places]

        def restore() -> None:
            for (mapping, name, _), known in zip(places, before, strict=True):
                if known is None:
                    mapping.pop(name, None)
                else:
                    mapping[name] = known

        with undone_in_child(restore):
            try:
                for mapping, name, replacement in places:
                    mapping[name] = replacement
                yield
            finally:
                restore()


def capture_pass(
    model: PreTrainedModel,
    length: int,
    behind: int,
    windows: Sequence[int | None] = (),
    states: Mapping[StatePlace, torch.Tensor] = MappingProxyType({}),
) -> CapturedPass:
    """Capture a pass over `length` tokens after a cache that holds `behind`.

    The large products are not computed: a capture takes the time of the model's Python code and little more.

    Args:
        model: the target model, in skip mode or not.
        length: n ≥ 1.
        behind: tokens in the cache, ≥ 1. The captured pass must not depend on it: see `same_pass`.
        windows: sliding window of each layer that the attention of the captured pass knows about.
        states: zeros in the form of each recurrent state of the cache.

    Raises:
        CannotCapture: the pass is not a pure function of ids, positions and cache.
    """
    config = model.config.get_text_config(decoder=True)
    device = model.get_input_embeddings().weight.device
    capture = _Capture({id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())})
    keys: dict[int, tuple[int, Any, Any]] = {}
    expanded: dict[int, Expanded] = {}  # by id of the keys
    masks: list[torch.Tensor] = []
    of_states, without_keys = {place.layer for place in states}, layers_without_keys(model) if states else ()
    layers: list[Any] = [
        PretendLayer(index, CacheLength(behind, length), keys) for index in range(int(config.num_hidden_layers))
    ]
    for index in of_states:
        beside = None if index in without_keys else layers[index]
        layers[index] = pretend_states(index, beside, states, length, capture.states)
    cache = Cache(layers=layers)

    def mask(*_: Any, allow_is_causal_skip: bool = True, **__: Any) -> torch.Tensor | None:
        """Return a mask that the attention recognises where the model needs one, to compute another from it."""
        if allow_is_causal_skip:
            return None
        with torch._C.DisableTorchFunction():
            masks.append(torch.zeros((1, 1, length, behind + length), device=device))
        return masks[-1]

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        of_latents = expanded.get(id(key))
        key, value = (key, value) if of_latents is None or value is not of_latents.value else of_latents.held
        if id(key) not in keys or id(value) not in keys or keys[id(key)][0] != keys[id(value)][0]:
            raise CannotCapture("an attention reads keys or values that did not come from the cache of one layer")
        unknown = ("position_bias", "sinks", "indices", "sliding_window", "cache")
        layer = keys[id(key)][0]
        if layer < len(windows) and windows[layer] is not None and kwargs.get("sliding_window") == windows[layer]:
            kwargs["sliding_window"] = None
        odd = [name for name in unknown if kwargs.get(name) is not None]
        if any(attention_mask is known for known in masks):
            attention_mask = None
        if odd or attention_mask is not None or dropout or is_causal is False:
            raise CannotCapture(f"an unsupported attention ({', '.join(odd) or 'mask, dropout or not causal'})")
        if s_aux is not None and tuple(s_aux.shape) != (query.shape[1],):
            raise CannotCapture("an attention with sinks of an unsupported shape")
        if query.ndim != 4 or query.shape[0] != 1 or query.shape[2] != length or query.shape[1] % key.shape[1]:
            raise CannotCapture("an attention with unsupported shapes")
        if of_latents is not None:
            is_windowed = layer < len(windows) and windows[layer] is not None
            if softcap is not None or s_aux is not None or is_windowed:
                raise CannotCapture("an unsupported attention (latents)")
            with torch._C.DisableTorchFunction():
                return attend_latents(of_latents, query, keys[id(key)], keys[id(value)], scaling), None
        with torch._C.DisableTorchFunction():
            result = query.new_zeros((1, length, query.shape[1], value.shape[3]))
            (_, _, new_key), (_, _, new_value) = keys[id(key)], keys[id(value)]
            scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
            tensors = map(capture.argument, (query, new_key, new_value))
            options = () if softcap is None and s_aux is None else (softcap, capture.argument(s_aux))
            made = capture.graph.call_method("attend", (attend, *tensors, layer, scale, *options))
            capture.noted(made, result, writes=True)  # into the cache, which `attend` represents
        return result, None

    def attend_directly(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        """Make the node of attention whose function the model calls itself; `None` where it is over other keys."""
        if id(key) not in keys:
            return None
        is_causal = is_causal or length == 1 or attn_mask is not None
        result, _ = attention(model, query, key, value, attn_mask, dropout_p, scale, is_causal)
        with torch._C.DisableTorchFunction():
            turned = result.transpose(1, 2)
            made = capture.graph.call_method("transpose", (capture.argument(result), 1, 2))
            capture.noted(made, turned, is_view=True)
        return turned

    def expand(module: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors that represent the keys and values of all heads, which a captured pass does not compute."""
        layer = module.kv_b_proj
        if type(layer) is not nn.Linear or layer.bias is not None:
            raise CannotCapture(f"latents are expanded by {type(layer).__name__}, or with a bias")
        if (latent.shape[1], rotated.shape[1]) != (1, 1):
            raise CannotCapture("an attention with unsupported shapes")
        with torch._C.DisableTorchFunction():
            size, values = module.qk_nope_head_dim, module.v_head_dim
            heads = layer.weight.shape[0] // (size + values)
            key = latent.new_zeros((1, heads, length, size + rotated.shape[3]))
            value = latent.new_zeros((1, heads, length, values))
        expanded[id(key)] = Expanded(key, value, (latent, rotated), layer.weight, size)
        return key, value

    def attend_latents(
        of_latents: Expanded, query: torch.Tensor, latent: Any, rotated: Any, scaling: float | None
    ) -> torch.Tensor:
        """Make the nodes of latent attention (latent_attention.py)."""
        size, values = of_latents.size, of_latents.value.shape[3]
        whole = capture.argument(query)
        states = []
        for at, part in ((0, query[..., :size]), (size, query[..., size:])):
            made = capture.graph.call_method("narrow", (whole, 3, at, part.shape[3]))
            states.append(capture.noted(made, part, is_view=True))
        weight = capture.argument(of_latents.weight)
        absorbed = query.new_zeros((*query.shape[:3], of_latents.held[0].shape[3]))
        made = capture.graph.call_function(into_latent, (states[0], weight, values))
        states[0] = capture.noted(made, absorbed)
        states += [capture.argument(given) for _, _, given in (latent, rotated)]
        scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
        made = capture.graph.call_method("attend_latents", (attend, *states, latent[0], scale))
        capture.noted(made, torch.zeros_like(absorbed), writes=True)
        result = query.new_zeros((*query.shape[:3], values))
        made = capture.noted(capture.graph.call_function(from_latent, (made, weight, values)), result)
        result = result.transpose(1, 2)
        capture.noted(capture.graph.call_method("transpose", (made, 1, 2)), result, is_view=True)
        return result

    def experts(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes = [argument.shape for argument in args if isinstance(argument, torch.Tensor)]
        if kwargs or len(args) != 3 or not _are_of_experts(shapes):
            return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]
        with torch._C.DisableTorchFunction():
            result = torch.zeros_like(args[0])
            made = capture.graph.call_function(run_experts, tuple(map(capture.argument, (module, *args))))
            capture.noted(made, result)
        return result

    def by_token(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a layer of states on a pass's tokens as rows of a batch, of one token each."""
        hidden = args[0] if args else kwargs.pop("hidden_states")
        result = type(module).forward(module, hidden.transpose(0, 1), *args[1:], **kwargs)
        if not isinstance(result, tuple):
            return result.transpose(0, 1)
        return (result[0].transpose(0, 1), *result[1:])

    def step(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state, tensors, others = bound_step(name, function, args, kwargs)
        if id(state) not in capture.states:
            raise CannotCapture(f"{name} is called with something other than a state of the cache")
        with torch._C.DisableTorchFunction():
            place, represented = capture.states[id(state)]
            nodes = {key: capture.argument(tensor) for key, tensor in tensors.items()}
            of_token = {key: not capture.is_constant(node) for key, node in nodes.items()}
            # Over one token, for the form of the result.
            first = {key: tensor[:1] if of_token[key] else tensor for key, tensor in tensors.items()}
            result = function(**first, **{STATE_OF[name]: torch.zeros_like(states[place])}, **others)
            gives_state = isinstance(result, tuple)
            result = result[0] if gives_state else result
            result = result.new_zeros((length, *result.shape[1:]))
            form, rows = state_at(place, states), tuple(of_token.values())
            dtypes = tuple(tensor.dtype for tensor in tensors.values())
            made = StateStep(name, function, place, form, tuple(nodes), dtypes, rows, tuple(sorted(others.items())))
            node = capture.graph.call_function(run_step, (attend, capture.argument(made), *nodes.values()))
            capture.noted(node, result, writes=True)  # into the cache, which `attend` represents
        return (result, represented) if gives_state else result

    its_attention = layers_that_attend(model) if config._attn_implementation == "eager" else []
    # On a GPU, operations of experts are recorded one by one, and recordings are replayed.
    its_experts = experts_of(model) if device.type == "cpu" else []
    its_states = layers_with_steps(model) if states else []
    patched = [(module, partial(experts, module)) for module in its_experts]
    # Those that a draft skips are replaced already.
    patched += [(module, partial(by_token, module)) for module in its_states if "forward" not in module.__dict__]
    with (
        SkipMode(model, SkipConfig(), patched) if patched else nullcontext(),
        own_steps(its_states, lambda name, function: partial(step, name, function)) if its_states else nullcontext(),
        torch.inference_mode(),
        own_attention(lambda original: attention, mask),
        own_functions(its_attention, EAGER, lambda name, original: attention) if its_attention else nullcontext(),
        own_methods(modules_with(model, EXPANSION), EXPANSION, lambda module: partial(expand, module)),
        own_methods(modules_with(model, _WARNING), _WARNING, lambda module: lambda *_, **__: None),
    ):
        ids = torch.zeros((1, length), dtype=torch.long, device=device)
        positions = torch.arange(behind, behind + length, device=device)[None]
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=length,
            attention_mask=None,
            position_ids=positions,
            **{cache_argument(model): cache},
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0  # all; some models put a number of their own there
        extra = {key for key, value in inputs.items() if isinstance(value, torch.Tensor)} - _INPUTS
        if extra or not isinstance(inputs.get("input_ids"), torch.Tensor):
            raise CannotCapture(f"the model takes further tensors: {', '.join(sorted(extra))}")
        counts = inputs.get("position_ids")
        if counts is None and not has_states_alone(model):
            raise CannotCapture("the model takes no position ids")
        capture.input("ids", inputs["input_ids"])
        capture.input("positions", positions if counts is None else counts)
        capture.attend = attend_directly
        attend = capture.attention = capture.noted(capture.graph.placeholder("attention"), None)
        with capture:
            logits = model(**inputs, return_dict=True).logits
        made = capture.node_of(logits)
        if made is None or tuple(logits.shape[:2]) != (1, length):
            raise CannotCapture("the logits are not a result of the captured operations, one row per token")
    capture.noted(capture.graph.output(made), None)
    captured = CapturedPass(capture.graph, capture.constants, length)
    captured.eliminate_dead_code()
    return captured
