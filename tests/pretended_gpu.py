"""Mock GPU: a device on a CPU that treats tensors, streams and graphs as a GPU does, refusals included.

Tensors "on" the device `pretended` store their numbers in the host's memory, but may be used only as on a GPU:

- operations that mix them with tensors of the host are refused, as torch does on CUDA;
- every read of a value by the host is a wait, which is counted;
- host memory that an asynchronous copy reads may not change before the next wait;
- while a graph is captured nothing is computed for good: its floating-point results are NaN until a replay, and a wait
  is an error. A replay runs the recorded operations at the addresses of the capture, whatever Python would do now, and
  is an error where no tensor exists at such an address any more;
- a pool of memory is freed with the last of its graphs;
- after a failed capture no random numbers can be drawn before the generator is given another state.

`set_up` replaces functions and classes of `torch.cuda`, so that `CudaGraphs` itself runs.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ssd_generation.forward.captured import conditions as capturable
from ssd_generation.forward.cuda_graph import graphs as replay
from ssd_generation.forward.structure import linears
from ssd_generation.support import devices
from ssd_generation.tuning import measuring

NAME = "pretended"
aten = torch.ops.aten

_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operations whose result, or its shape, the host has to wait for."""

_MIXED = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
"""Operations that take tensors of the host alongside those of the device."""


class Graph:
    """Mock CUDA graph: the operations of its capture, which a replay runs again."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self.replays = 0
        self._made: set[int] = set()
        self._read: set[int] = set()

    def add(self, function: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Add a captured operation."""
        self.steps.append((function, args, kwargs, results))
        self._read |= {given.untyped_storage()._cdata for given in _tensors((args, kwargs))} - self._made
        self._made |= {new.untyped_storage()._cdata for new in results if not _is_view_of(new, (args, kwargs))}

    def made(self, tensor: torch.Tensor) -> bool:
        """Tell whether the memory of a tensor was allocated during the capture."""
        return tensor.untyped_storage()._cdata in self._made

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        assert all(device.holders.get(address) for address in self._read), "memory that a graph reads has been freed"
        for function, args, kwargs, results in self.steps:
            found = function(*args, **kwargs)
            for result, new in zip(results, _tensors(found), strict=True):
                # A result in the memory of an argument has been written in place.
                if result.untyped_storage()._cdata != new.untyped_storage()._cdata and not _is_view_of(new, args):
                    result.copy_(new)


class Device:
    """State of the mock device.

    Attributes:
        waits: number of times the host has waited for the device.
        graphs: graphs that were captured and not freed.
        graph: graph that is being captured; `None` if there is none.
        launches: number of operations launched one by one; views do not count.
    """

    def __init__(self) -> None:
        self.waits = 0
        self.launches = 0
        self.graph: Graph | None = None
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.pinned: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self.holders: dict[int, weakref.WeakValueDictionary[int, OnDevice]] = {}
        self.pools: dict[object, weakref.WeakSet[Graph]] = {}
        self.used_pools: set[object] = set()
        self.is_generator_broken = False

    def wait(self, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        self.waits += 1
        self._look_at_pinned()
        self.pinned.clear()

    def _look_at_pinned(self) -> None:
        for where, was in self.pinned:
            now = where()
            assert now is None or torch.equal(now, was), "memory of the host was changed while a copy may read it"

    def reads(self, source: torch.Tensor) -> None:
        """Register an asynchronous copy from host memory, which may not change before the next wait."""
        self._look_at_pinned()
        self.pinned.append((weakref.ref(source), source.clone()))


device = Device()


class OnDevice(torch.Tensor):
    """Tensor on the device."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        with torch.inference_mode(False):  # torch cannot have views of other tensors that are made in that mode
            made: OnDevice = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device(NAME, 0),
                requires_grad=False,
            )
        made.inner = inner
        storage = inner.untyped_storage()
        device.holders.setdefault(storage._cdata, weakref.WeakValueDictionary())[id(made)] = made
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        device.wait("tolist")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    def __deepcopy__(self, memo: dict[int, Any]) -> OnDevice:
        made = OnDevice(self.inner.clone())
        made.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})


class OnHostAndDevice(TorchDispatchMode):
    """Mode in which factories that name the device make tensors there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _is_pinned(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "is_pretended_to_be_pinned")


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_pretended_to_be_pinned = True  # type: ignore[attr-defined]
    return tensor


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, like torch's own `tree_leaves`, which takes five times as long."""
    if isinstance(tree, tuple | list):
        return [leaf for each in tree for leaf in _leaves(each)]
    return _leaves(list(tree.values())) if isinstance(tree, dict) else [tree]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)([_map(function, each) for each in tree])
    if isinstance(tree, dict):
        return {key: _map(function, each) for key, each in tree.items()}
    return function(tree)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]


def _histogram(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a histogram of whole numbers, which exists on a GPU but not on a CPU."""
    return torch.histc(values.float(), *args, **kwargs).to(values.dtype)


def _pack_int4(both: torch.Tensor, tiles: int) -> torch.Tensor:
    """Pack `(N, K / 2)` bytes, in an order of this module that only `_linear_int4` knows."""
    rows, half = both.shape
    if both.dtype != torch.uint8 or rows % 8 or half * 2 % (16 * tiles):
        raise RuntimeError("expected bytes, n % 8 == 0 and k % (innerKTiles * 16) == 0")
    whole = both.reshape(rows, half // 4, 4).view(torch.int32)
    return whole.reshape(rows // 8, half * 2 // (tiles * 16), 32, tiles // 2)


def _linear_int4(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    assert x.dtype is torch.bfloat16 and scales.dtype is torch.bfloat16 and x.ndim == 2
    both = packed.reshape(packed.shape[0] * 8, -1).view(torch.uint8).int()
    numbers = torch.stack((both >> 4, both & 15), dim=-1).flatten(1).float()
    scale, offset = (scales[..., at].float().T.repeat_interleave(group, 1) for at in (0, 1))
    return (x.float() @ ((numbers - 8) * scale + offset).T).bfloat16()


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes to."""
    writes = _writes(func)
    if not writes:
        return []
    return _tensors([args[at] if at < len(args) else kwargs.get(name) for at, name in writes])


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write]


_ONLY_THERE: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histogram,
    aten._convert_weight_to_int4pack.default: _pack_int4,
    aten._weight_int4pack_mm.default: _linear_int4,
}
"""Operations that do not exist on a CPU, or not in this form."""


def _bare(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.inner if isinstance(leaf, OnDevice) else leaf


def _is_view_of(result: torch.Tensor, args: Any) -> bool:
    storage = result.untyped_storage()._cdata
    return any(storage == arg.untyped_storage()._cdata for arg in _tensors(args))


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = _leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    mine = [leaf for leaf in given if isinstance(leaf, OnDevice)]
    places = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    asked = places[0].type == NAME if places else None
    if not mine and not asked:
        if func is aten.is_pinned.default:
            return _is_pinned(args[0])
        if func in (aten._pin_memory.default, aten.pin_memory.default):
            return _pin(args[0].clone())
        pins = kwargs.pop("pin_memory", False) and func is not aten._to_copy.default
        result = func(*args, **kwargs)
        return _pin(result) if pins else result
    to_host = asked is False or (func is aten.copy_.default and not isinstance(args[0], OnDevice))
    if func in _READS or (to_host and mine):
        device.wait(str(func))
    elif func not in _MIXED and mine:
        strangers = [leaf for leaf in given if not isinstance(leaf, OnDevice) and leaf.ndim > 0]
        if strangers:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got some on {NAME}:0 and on cpu "
                f"({[tuple(leaf.shape) for leaf in strangers]})"
            )
    elif func in _MIXED:
        source = args[1] if func is aten.copy_.default else args[0]
        source = None if isinstance(source, OnDevice) else source
        if isinstance(source, torch.Tensor) and func in (aten.copy_.default, aten._to_copy.default):
            if _is_pinned(source) and (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                device.reads(source)
            elif source.ndim > 0 or func is aten._to_copy.default:
                device.wait("blocking copy")
    bare_args, bare_kwargs = _map(_bare, (args, kwargs))
    does = _ONLY_THERE.get(func, func)
    if device.is_generator_broken and torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
    with torch.inference_mode(False), torch.no_grad():
        # A captured operation is not executed for good: what it writes to memory from before the capture is restored.
        written = [] if device.graph is None else _written(func, bare_args, bare_kwargs)
        kept = [(each, each.clone()) for each in written if device.graph is not None and not device.graph.made(each)]
        result = does(*bare_args, **bare_kwargs)
        for each, before in kept:
            each.copy_(before)
    if func is aten._local_scalar_dense.default or to_host:
        return result
    if _written(func, bare_args, bare_kwargs) or not all(
        _is_view_of(made, (bare_args, bare_kwargs)) for made in _tensors(result)
    ):
        device.launches += 1
    if device.graph is not None:
        results = _tensors(result)
        device.graph.add(does, bare_args, bare_kwargs, results)
        for made in results:
            if not _is_view_of(made, (bare_args, bare_kwargs)) and made.is_floating_point():
                made.fill_(torch.nan)
    known = {id(leaf.inner): leaf for leaf in mine}
    return _map(lambda leaf: _there(leaf, known), result)


def _there(leaf: Any, known: dict[int, OnDevice]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return known[id(leaf)] if id(leaf) in known else OnDevice(leaf)


# ----------------------------------------------------------------------------------------------------------------------


class _Stream:
    def __init__(self, device: int = 0) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        if device.graph is not None:
            raise RuntimeError("an event in a graph")
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        device.wait("synchronize")

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


class _Module:
    """Module that `torch.get_device_module` returns for the device."""

    def __init__(self) -> None:
        self.default_generators = (torch.default_generator,)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, where: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()


class _Generator:
    """Generator of the device, which a failed capture leaves unusable until it is given a state."""

    def clone_state(self) -> None:
        pass

    def graphsafe_set_state(self, state: None) -> None:
        device.is_generator_broken = False


def _new_pool() -> object:
    handle = object()
    device.pools[handle] = weakref.WeakSet()
    return handle


@contextlib.contextmanager
def _capturing(graph: Graph, pool: Any, stream: Any, capture_error_mode: str = "global") -> Iterator[None]:
    assert device.graph is None and capture_error_mode == "thread_local"
    if pool in device.used_pools and not device.pools[pool]:
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
    device.graph = graph
    try:
        yield
    except BaseException:
        device.is_generator_broken = True
        raise
    finally:
        device.graph = None
    device.graphs.add(graph)
    device.pools[pool].add(graph)
    device.used_pools.add(pool)


@contextlib.contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def set_up() -> None:
    """Register the device with torch, which cannot be undone: call it in a process of its own."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    generator = torch.Generator

    class Generators(generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator("cpu" if torch.device(device).type == NAME else device)

    torch._C._set_only_lift_cpu_tensors(True)  # so that `torch.tensor` copies its numbers by an operation
    cuda: Any = torch.cuda
    stand_ins: dict[str, Any] = {
        "device": _nothing,
        "graph_pool_handle": _new_pool,
        "default_generators": [_Generator()],
        "current_device": lambda: 0,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": _nothing,
        "CUDAGraph": Graph,
        "graph": _capturing,
        "Event": _Event,
        "synchronize": lambda where=None: device.wait("synchronize"),
        "get_device_name": lambda where=None: "a pretended GPU",
        "mem_get_info": lambda where=None: (2**34, 2**34),
    }
    for name, stand_in in stand_ins.items():
        setattr(cuda, name, stand_in)
    torch.Generator = Generators  # type: ignore[misc, assignment]
    devices.ASYNCHRONOUS.add(NAME)
    replay.KINDS[NAME] = replay.CudaGraphs
    is_plain = linears.is_plain
    for module in (capturable, linears, measuring):
        vars(module)["is_plain"] = lambda tensor: isinstance(tensor, OnDevice) or is_plain(tensor)
