"""Passes of a model over a few tokens behind its cache, captured and played back where that is possible.

A pass is captured (capture.py) from the model's own code and used as long as the model is the one captured: same
modules, same weights, no hooks, nothing patched. Where a pass cannot be captured, the caller runs the model itself.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from transformers.cache_utils import Cache, DynamicCache

from ..cache.layers import SpareRoomLayer, add_spare_room
from ..config import SkipConfig
from ..support.machine import is_intel
from .capture import CannotCapture, capture_pass
from .captured import CapturedPass, Program, at_length, compile_pass, of_any_length, same_pass
from .kernels import fastest_kernels, linear_of_few_rows
from .low_bit import LowBitCopies, LowBitCopy, copies_of, is_plain
from .rewrites import (
    fuse_norms,
    fuse_rotary,
    linear_weight,
    merge_linears,
    rotate_together,
    share_results,
    swap_linears,
    use_bfloat16,
)
from .skip_mode import SkipMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = [
    "CapturedPasses",
    "captured_draft",
    "captured_target",
    "does_something",
    "draft_of",
    "forbid_capture",
    "prompt_mode",
    "skip_mode_of",
    "why_not_captured",
]

logger = logging.getLogger(__name__)

_MANY_ROWS = 256
_LARGE = 2**21

_LONGEST = 33
"""The longest pass that is captured; longer ones are rare, and their Python is a small part of them."""


# ----------------------------------------------------------------------------------------------------------------------
# is it still the model that was captured?


_FORBIDDEN: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def forbid_capture(model: PreTrainedModel, reason: str | None) -> None:
    """Have no pass of this model captured, or played back, from now on.

    Args:
        model: the target model.
        reason: what its captured passes were found to do wrong; `None`: they may be captured again.
    """
    if reason is None:
        _FORBIDDEN.pop(model, None)
    else:
        _FORBIDDEN[model] = reason


def why_not_captured(model: PreTrainedModel, even_forbidden: bool = False) -> str | None:
    """Why passes of this model are not captured; `None` where they may be.

    Args:
        model: the target model.
        even_forbidden: do not count what `forbid_capture` said.
    """
    if not even_forbidden and model in _FORBIDDEN:
        return _FORBIDDEN[model]
    if getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None) != "sdpa":
        return "its attention implementation is not sdpa"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None) is not None:
        return "adapters are loaded"
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return "global module hooks are installed"
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is not None and tensor.device.type != "cpu":
                return "it is not on the CPU"  # nothing in the way; not measured yet
            if tensor is not None and not is_plain(tensor):
                return "its weights are not plain tensors"
        hooks = module._forward_hooks or module._forward_pre_hooks  # most modules have none
        if hooks and any(map(does_something, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
            return f"a hook is installed on {type(module).__name__}"
        if "forward" in module.__dict__ or module._compiled_call_impl is not None:
            return f"the forward of {type(module).__name__} is patched or compiled"
        if module.training:
            return "it is in training mode"
        if not type(module).__module__.startswith(("torch.nn.", "transformers.")):
            return f"{type(module).__name__} is not a class of torch or transformers"
    return None


def does_something(hook: Any) -> bool:
    """Whether a hook is more than what transformers leaves behind once a call has asked for hidden states.

    That one does nothing until the next such call, whose passes are not played back.
    """
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


_SCALARS = frozenset({bool, int, float, str})


def _fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    return (
        tuple(
            # Numbers such as an attention's scale are written into the graph.
            (id(module), type(module).forward, [v for v in module.__dict__.values() if type(v) in _SCALARS])
            for module in model.modules()
        ),
        # Numbers that a forward takes from the config are written into it as well.
        [(k, v) for k, v in model.config.get_text_config(decoder=True).__dict__.items() if type(v) in _SCALARS],
        tuple((id(parameter), parameter.data_ptr()) for parameter in model.parameters()),
        tuple(id(buffer) for buffer in model.buffers()),
    )


# ----------------------------------------------------------------------------------------------------------------------
# the pass over a prompt


def prompt_mode(model: PreTrainedModel, rows: int) -> AbstractContextManager[Any]:
    """Under this, a model's large linear layers run by the faster kernel for a pass over a prompt, where there is one.

    On processors that are not Intel's, `linear_of_few_rows` is ahead with large weights until the arithmetic takes all
    the time (on an AMD EPYC, 8960 × 1536: 2.7 times as fast at 16 rows, 1.6 at 64, 1.2 at 256, the same beyond). The
    model's own code runs all the same; what is exchanged is put back at the end.

    Drafts are judged under it as well: skip mode goes inside.

    Args:
        model: the target model.
        rows: tokens in the pass, of all rows of the batch.
    """
    if rows > _MANY_ROWS or is_intel() or why_not_captured(model) is not None:
        return nullcontext()
    kernels = [
        (module, linear_of_few_rows(module.weight, module.bias, rows))
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.numel() >= _LARGE
    ]
    exchanged = [(module, kernel) for module, kernel in kernels if kernel is not None]
    return SkipMode(model, SkipConfig(), exchanged) if exchanged else nullcontext()


# ----------------------------------------------------------------------------------------------------------------------
# attention over the rooms of a cache


class _CacheAttention:
    """Writes keys and values into the spare slots of a cache and attends to all before them.

    One row; shapes as in `captured.Attention`. Query heads that share a key head are treated as further queries, so
    that no key is repeated.
    """

    __slots__ = ("at", "count", "key_rooms", "mask", "value_rooms")

    def __init__(self) -> None:
        self.mask: dict[Any, torch.Tensor] = {}

    def begin(self, layers: Sequence[Any], at: int, count: int) -> None:
        """For a pass over `count` tokens at slots `at …` of the rooms, which must be large enough."""
        self.key_rooms: list[Any] = [getattr(layer, "key_room", None) for layer in layers]
        self.value_rooms: list[Any] = [getattr(layer, "value_room", None) for layer in layers]
        self.move_to(at, count)

    def move_to(self, at: int, count: int) -> None:
        self.at, self.count = at, count
        self.mask.clear()

    def let_go(self) -> None:
        """Hold no tensor of a cache any longer: it may be about to grow, or to be dropped."""
        self.key_rooms = self.value_rooms = []
        self.mask.clear()

    def _mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive, `(groups · n, slots)`: token i sees the slots before it and its own."""
        known = self.mask.get((groups, dtype))
        if known is None:
            known = torch.full((self.count, self.at + self.count), float("-inf"), dtype=dtype).triu_(self.at + 1)
            known = self.mask[groups, dtype] = known.repeat(groups, 1)
        return known

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        at, count = self.at, self.count
        key_room, value_room = self.key_rooms[layer], self.value_rooms[layer]
        key_room.narrow(2, at, count).copy_(key)
        value_room.narrow(2, at, count).copy_(value)
        keys, values = key_room.narrow(2, 0, at + count), value_room.narrow(2, 0, at + count)
        if query.dtype is not keys.dtype:
            query = query.to(keys.dtype)
        heads, kv_heads = query.shape[1], keys.shape[1]
        groups = heads // kv_heads
        if count == 1:
            query = query.reshape(1, kv_heads, groups, -1)
            result = functional.scaled_dot_product_attention(query, keys, values, scale=scaling)
            return result.reshape(1, 1, heads, -1)
        query = query.reshape(1, kv_heads, groups * count, -1)
        mask = self._mask(groups, query.dtype)
        result = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        return result.reshape(1, heads, count, -1).transpose(1, 2)


def _live_layers(cache: Cache, skipped: frozenset[int]) -> list[SpareRoomLayer] | None:
    """The layers that a pass writes to, or `None` where one is not of the plain kind."""
    live = [layer for index, layer in enumerate(cache.layers) if index not in skipped]
    if any(type(layer) is not SpareRoomLayer or not layer.is_initialized or layer.start != 0 for layer in live):
        return None
    return live


# ----------------------------------------------------------------------------------------------------------------------
# passes


class CapturedPasses:
    """Passes of one model, whole or as a draft, over one row of a batch.

    Args:
        model: the target model.
        skip_mode: for a draft: what leaves the sub-layers out. `None`: the whole model.
        skipped_attention: layers whose attention the draft leaves out.
        copies: low-bit copies that the draft computes from, or `None`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        skip_mode: SkipMode | None = None,
        skipped_attention: frozenset[int] = frozenset(),
        copies: LowBitCopies | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._skip_mode = skip_mode
        self._skipped = skipped_attention
        # Not held: the copies hold their passes, and are to go when they are dropped.
        self._copies = None if copies is None else weakref.ref(copies)
        self._programs: dict[int, Program | None] = {}
        self._longer: CapturedPass | None = None
        self._longer_known = False
        self._attention = threading.local()
        self._fingerprint = _fingerprint(model)
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.refusal: str | None = None

    @property
    def is_draft(self) -> bool:
        """Whether these are drafting passes, whose tokens are verified."""
        return self._skip_mode is not None

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether the model is still what was captured."""
        return self._fingerprint == _fingerprint(model) and all(
            torch.equal(tensor, then) for tensor, then in self._copied.values()
        )

    def program(self, length: int) -> Program | None:
        """The pass over `length` tokens; `None` where it cannot be captured."""
        if self.refusal is not None or not 1 <= length <= _LONGEST:
            return None
        if length not in self._programs:
            model = self._model()
            assert model is not None
            try:
                self._programs[length] = self._make(model, length)
            except Exception as error:
                # Whatever a model's code does that the capture does not know: its passes are then run as they are.
                self.refusal = f"{type(error).__name__}: {error}"
                self._programs[length] = None
                level = logging.DEBUG if isinstance(error, CannotCapture) else logging.INFO
                logger.log(level, "Passes of %s are not captured: %s", type(model).__name__, error)
        return self._programs[length]

    def can_run(self, cache: Cache, length: int) -> bool:
        """Whether `run` can play back a pass over `length` tokens behind this cache."""
        return self.program(length) is not None and bool(_live_layers(cache, self._skipped))

    def run(
        self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, drafted: int = 0, ahead: int = 0
    ) -> torch.Tensor | None:
        """Run a pass.

        Args:
            cache: the target's cache. The whole model's tokens are appended to it; a draft's are written behind it and
                not counted.
            ids (`torch.LongTensor` of shape `(1, n)`): the tokens.
            positions (`torch.LongTensor` of shape `(1, n)`): their positions.
            drafted: tokens of this round's draft that are behind the cache already.
            ahead: tokens that this round's draft will have in all, to make room for them at once.

        Returns:
            Logits `(1, n, V)`, or `None` where the pass cannot be played back: nothing has happened then.
        """
        count = ids.shape[1]
        program = self.program(count)
        if program is None:
            return None
        attention: _CacheAttention | None = getattr(self._attention, "value", None)
        if attention is None:
            attention = self._attention.value = _CacheAttention()
        if self.is_draft and drafted:
            attention.move_to(attention.at + attention.count, count)
        else:
            live = _live_layers(cache, self._skipped)
            if not live:
                return None
            for layer in live:
                layer.reserve(max(count, ahead))
            attention.begin(cache.layers, live[0].end, count)
        try:
            with torch.inference_mode():
                logits = program.run(ids, positions, attention)
        except BaseException:
            attention.let_go()
            raise
        if not self.is_draft:
            attention.let_go()
            for layer in cache.layers:
                layer.end += count
        return logits

    def end_round(self) -> None:
        """No further step of this round's draft: what is held of the cache is let go."""
        attention: _CacheAttention | None = getattr(self._attention, "value", None)
        if attention is not None:
            attention.let_go()

    # ------------------------------------------------------------------------------------------------------------------

    def _make(self, model: PreTrainedModel, length: int) -> Program:
        captured = self._captured(model, length)
        copies = None
        if self._copies is not None:
            copies = self._copies()
            if copies is None:
                raise CannotCapture("the low-bit copies were dropped")
            _use_copies(captured, copies)
        elif model.dtype == torch.float32:
            layers = [layer for node in captured.nodes if (layer := linear_weight(captured, node)) is not None]
            swap_linears(captured, fastest_kernels(model, layers, length))
        program = compile_pass(captured)
        for tensor in program.copied_weights:  # unlike others, these would not be seen to change in place
            self._copied.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        if self.is_draft:
            _try_out(model, program)
        elif not any(self._programs.values()):
            _compare(model, program, length)
        return program

    def _captured(self, model: PreTrainedModel, length: int) -> CapturedPass:
        with nullcontext() if self._skip_mode is None else self._skip_mode:
            if length > 1 and not self._longer_known:
                self._longer_known = True
                # A single token is a case of its own in many models; beyond that, one is like another.
                with contextlib.suppress(Exception):  # such as a context that is shorter
                    common = of_any_length([capture_pass(model, n, at) for n, at in ((2, 7), (3, 19), (_LONGEST, 11))])
                    if common is not None:
                        self._simplify(model, common)
                        self._longer = common
            if length > 1 and self._longer is not None:
                return at_length(self._longer, length)
            one, other = (capture_pass(model, length, behind) for behind in (7, 19))
        if not same_pass(one, other):
            raise CannotCapture("the pass depends on the length of the text")
        self._simplify(model, one)
        return one

    def _simplify(self, model: PreTrainedModel, captured: CapturedPass) -> None:
        share_results(captured)
        if self.is_draft or model.dtype == torch.float32:
            fuse_norms(captured)
            fuse_rotary(captured)


def _use_copies(captured: CapturedPass, held: LowBitCopies) -> None:
    """Let a draft's linear layers compute from their low-bit copies."""
    copies = held.by_weight

    def group_of(weight: torch.Tensor) -> LowBitCopy | None:
        return copies[id(weight)][0] if id(weight) in copies else None

    def kernel_of(
        group: LowBitCopy, weights: Sequence[torch.Tensor]
    ) -> tuple[Callable[..., Any], Callable[[torch.Tensor], int] | None]:
        if len(group.sizes) == 1:
            return group.whole, None
        return group.apart, lambda weight: copies[id(weight)][1]

    merge_linears(captured, group_of, kernel_of)
    use_bfloat16(captured)
    if captured.length == 1:
        rotate_together(captured, lambda node: getattr(node.target, "__func__", None) is LowBitCopy.apart)
    swap_linears(captured, _mixed)


def _mixed(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., Any]:
    """A layer that stays as it is in a draft whose activations are bfloat16."""
    faster = linear_of_few_rows(weight, bias, 1)

    def linear(x: torch.Tensor) -> torch.Tensor:
        x = x.to(weight.dtype)
        return (functional.linear(x, weight, bias) if faster is None else faster(x)).to(torch.bfloat16)

    return linear


def _try_out(model: PreTrainedModel, program: Program) -> None:
    """Play a draft back without a cache. What it says is verified later; that it can be run must be known before.

    A model may mix what a draft computes in bfloat16 with weights of its own in a way that torch refuses.
    """

    class Nothing:
        def attend(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
        ) -> torch.Tensor:
            shape = (1, query.shape[1], program.length, value.shape[3])
            return query.new_zeros(shape, dtype=model.dtype).transpose(1, 2)

    ids = torch.zeros((1, program.length), dtype=torch.long)
    with torch.inference_mode():
        program.run(ids, torch.arange(9, 9 + program.length)[None], Nothing())


def _compare(model: PreTrainedModel, program: Program, length: int) -> None:
    """Play a pass back on a small cache beside the model's own: a wrong capture must never decide a token.

    Raises:
        CannotCapture: the logits differ by more than rounding.
    """
    with torch.inference_mode():
        vocabulary = model.get_input_embeddings().weight.shape[0]
        prompt = torch.arange(1, 10)[None] % vocabulary
        ids = (torch.arange(length) * 7 + 11)[None] % vocabulary
        positions = torch.arange(9, 9 + length)[None]
        own = DynamicCache()
        model(input_ids=prompt, past_key_values=own, use_cache=True, logits_to_keep=1)
        room = copy.deepcopy(own)
        add_spare_room(room)
        expected = model(input_ids=ids, position_ids=positions, past_key_values=own, use_cache=True).logits.float()
        live = _live_layers(room, frozenset())
        if not live:
            raise CannotCapture("its cache has layers of a kind of their own")
        for layer in live:
            layer.reserve(length)
        attention = _CacheAttention()
        attention.begin(room.layers, 9, length)
        got = program.run(ids, positions, attention).float()
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    if got.shape != expected.shape or not (got - expected).abs().max() <= tolerance * expected.std():
        raise CannotCapture("the captured pass gives other logits than the model")


_DRAFTS: weakref.WeakKeyDictionary[nn.Module, dict[SkipConfig, CapturedPasses]] = weakref.WeakKeyDictionary()


def captured_draft(model: PreTrainedModel, skip: SkipConfig, copies: LowBitCopies | None) -> CapturedPasses | None:
    """A draft's passes, or `None` where they may not be captured; made once, and anew when the model changed."""
    if why_not_captured(model) is not None:
        return None
    known = _DRAFTS.setdefault(model, {})
    passes: CapturedPasses | None = known.get(skip) if copies is None else copies.passes
    if passes is None or not passes.is_current(model):
        passes = CapturedPasses(model, SkipMode(model, skip), frozenset(skip.attention), copies)
        if copies is None:
            known[skip] = passes
        else:
            copies.passes = passes
    return passes


def draft_of(model: PreTrainedModel, config: SelfSpeculativeConfig) -> tuple[SkipMode, CapturedPasses | None]:
    """What makes a model the draft of a config: its skip mode, low-bit copies in place, and its captured passes.

    Raises:
        ValueError: the skip set does not fit the model, or low-bit copies cannot be made of it.
    """
    skip_mode, copies = skip_mode_of(model, config)
    return skip_mode, captured_draft(model, config.skip, copies) if config.drafts_itself else None


def skip_mode_of(model: PreTrainedModel, config: SelfSpeculativeConfig) -> tuple[SkipMode, LowBitCopies | None]:
    """The skip mode of a config, with its low-bit copies in place, and these.

    Raises:
        ValueError: as `draft_of`.
    """
    copies = copies_of(model, config.skip, config.precision) if config.precision else None
    return SkipMode(model, config.skip, () if copies is None else copies.forwards()), copies


_TARGETS: weakref.WeakKeyDictionary[nn.Module, CapturedPasses] = weakref.WeakKeyDictionary()


def captured_target(model: PreTrainedModel) -> CapturedPasses | None:
    """The whole model's passes, or `None` where they may not be captured; made anew when the model changed."""
    if why_not_captured(model) is not None:
        return None
    passes = _TARGETS.get(model)
    if passes is None or not passes.is_current(model):
        passes = _TARGETS[model] = CapturedPasses(model)
    return passes
