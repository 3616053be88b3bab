"""Passes of a model over a few tokens that continue its cache, captured and run where that is possible.

A pass is captured (capture.py) from the model's own code and used as long as the model is the one captured: same
modules, same weights, no hooks, nothing patched. Where a pass cannot be captured, the caller runs the model itself.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from ...cache.buffered_layers import BufferedLayer, append_written
from ...cache.recurrent import PassStates
from ...config import SkipConfig
from ...native.cache_table import ONE_TEXT, TextPlace
from ...native.codegen.compiler import why_not
from ...native.ops.experts import NativeExperts
from ...native.ops.kernels import NAMES
from ...support.attributes import left_as_it_was
from ...support.garbage import no_collections
from ...support.model_state import Part, state_of
from ...support.recent import recent
from ..copies.layer_copy import LowBitCopy
from ..copies.low_bit import LowBitCopies, copies_of
from ..structure.adapters import adapters_in_use
from ..structure.expert_layers import native_experts
from ..structure.skip_mode import SkipMode
from ..structure.sublayers import layout_of
from ..structure.weights import fingerprint
from .any_length import LONGEST, PassCapture, Rewrites, WholeCapture
from .batch_invariance import (
    LINEARS,
    TEXT_WIDTHS,
    BatchInvariance,
    RowAttention,
    live_layers_of_any_window,
    uneven,
)
from .cache_attention import CacheAttention, live_layers
from .capture import CannotCapture
from .conditions import why_not_captured, windows_of
from .fx_graph import CapturedPass, CopiedWeight, Program, compile_pass
from .head import leave_out_head, only_head
from .kernel_lists import use_kernel_lists
from .latent_attention import HeadLayers, use_native_heads
from .linear_kernels import Linear, fastest_kernels, linear_of_few_rows
from .rewrites import (
    fuse_norms,
    fuse_rotary,
    linear_weight,
    merge_linears,
    products_to_layers,
    rotate_together,
    share_results,
    swap_experts,
    swap_linears,
    use_bfloat16,
    use_native_rows,
    use_parts_of_weights,
    without_writes,
)
from .trial import compare_with_model, try_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...config import SelfSpeculativeConfig

__all__ = ["CapturedPart", "CapturedPasses", "captured_draft", "captured_target", "draft_of", "skip_mode_of"]

logger = logging.getLogger(__name__)

_MOST_KINDS = 2 * (1 + len(LINEARS))
"""Kinds of passes of a target model: with any kernel or none, to decode and to read prompts."""

_MOST_FILLED = 2.0
"""Time that filling up wider passes may cost before a width is captured, in passes of that width: capturing takes about
as long (40 ms for 30 layers)."""

_DOUBLES = 16
"""Additional tokens that double the time of a pass over a few tokens, roughly."""

_ROOMY = (4, 8, 16, 32, 64, 128, 256)
"""Widths of `TEXT_WIDTHS` that are captured first where passes become wider."""

_MOST_DRAFTS = _MOST_ADAPTERS = 4
"""Skip sets whose captured drafts, and sets of adapters whose passes are retained: each pass holds code and constants,
some a megabyte."""


class CapturedPasses:
    """Captured passes of one model, whole or as a draft.

    Args:
        model: the target model.
        skip_mode: mode that leaves out the sub-layers of a draft; `None`: the target model.
        skipped_attention: layers whose attention the draft leaves out.
        copies: low-bit copies that the draft computes from, or `None`.
        batch_invariance: means by which the bits of the target model do not depend on the width of a pass; `None`: they
            may.
        of_prompts: whether passes read prompts: these compute no logits.
        leaves_out: whether anything of the model is left out, or runs differently from the target model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        skip_mode: SkipMode | None = None,
        skipped_attention: frozenset[int] = frozenset(),
        copies: LowBitCopies | None = None,
        batch_invariance: BatchInvariance | None = None,
        of_prompts: bool = False,
        leaves_out: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self._of_prompts = of_prompts
        self._cached: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by layer: shapes of keys and values
        self.batch_invariance = batch_invariance
        self._skip_mode = skip_mode
        self._skipped = skipped_attention
        # A weak reference: the copies hold their passes, and must be freed when they are dropped.
        self._copies = None if copies is None else weakref.ref(copies)
        self._programs: dict[int, Program | None] = {}
        self._head: list[Callable[[torch.Tensor], torch.Tensor] | None] = []  # one, as soon as it is known
        self._filled: dict[int, float] = {}  # by width: passes lost to wider ones so far
        self._rounded: frozenset[str] | None = None
        self._experts: dict[int, tuple[Any, NativeExperts | None]] = {}
        self._heads: dict[tuple[int, Any], tuple[CopiedWeight, HeadLayers]] = {}
        self._linears: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None, Linear | None]] = {}
        self._attention = threading.local()
        self._fingerprint = fingerprint(model)
        self._copied: dict[int, tuple[CopiedWeight, torch.Tensor]] = {}
        # Not for passes that run by torch's own kernels.
        may_be = (
            self.is_draft or model.dtype == torch.float32 if batch_invariance is None else batch_invariance.is_native
        )
        self._is_native = may_be and model.dtype in NAMES and why_not() is None
        self._longest = TEXT_WIDTHS[-1] if self._is_native else LONGEST
        self._dtype = model.dtype
        self._windows = windows_of(model)
        self._capture = self._pass_capture(model, leaves_out)
        self.refusal: str | None = None
        self.uneven: str | None = None
        """Operation by which the bits of the last captured pass depend on its width; `None`: there is none."""

    def _pass_capture(self, model: PreTrainedModel, leaves_out: bool) -> PassCapture:
        """Return the capture of the passes; with JIT-compiled kernels, it is shared where nothing is left out."""
        is_alike = self._is_native and not leaves_out and (self._knows_windows or not any(self._windows))
        whole = state_of(model).get(CapturedPart).of(model).whole_of(model) if is_alike else None
        return PassCapture(self._skip_mode, self._knows_windows, whole, does_one=self._is_native)

    @property
    def _knows_windows(self) -> bool:
        """Tell whether the attention of the passes knows about sliding windows."""
        return self.batch_invariance is not None or (self._is_native and any(self._windows))

    @property
    def is_draft(self) -> bool:
        """Tell whether these are drafting passes, whose tokens are verified."""
        return self._skip_mode is not None

    @property
    def has_begun(self) -> bool:
        """Tell whether a pass was captured, or could not be."""
        return bool(self._programs) or self.refusal is not None

    def follow(self, model: PreTrainedModel) -> bool:
        """Renew the copies of weights that have changed; return `False` where the model is another one."""
        if self._fingerprint != fingerprint(model):
            return False
        with torch.inference_mode():
            for copied, then in self._copied.values():
                if not torch.equal(copied.weight, then):
                    then.copy_(copied.weight)
                    copied.copy.copy_(copied.of(copied.weight))
        return True

    def program(self, length: int) -> Program | None:
        """Return the pass over `length` tokens; `None` where it cannot be captured."""
        if self.refusal is not None or not 1 <= length <= self._longest:
            return None
        if length not in self._programs:
            model = self._model()
            assert model is not None
            try:
                self._programs[length] = self._captured(model, length)
            except Exception as error:
                if self.is_draft and self._is_native and not isinstance(error, CannotCapture):
                    # What a model computes next to its linear layers may not suit what JIT-compiled kernels give.
                    self._is_native = False
                    self._capture = self._pass_capture(model, True)
                    return self.program(length)
                # Whatever a model's code does that the capture does not know: its passes then run uncaptured.
                self.refusal = f"{type(error).__name__}: {error}"
                self._programs[length] = None
                level = logging.DEBUG if isinstance(error, CannotCapture) else logging.INFO
                logger.log(level, "Passes of %s are not captured: %s", type(model).__name__, error)
        return self._programs[length]

    def _captured(self, model: PreTrainedModel, length: int, is_head: bool = False) -> Program | None:
        """Capture a pass, or its head by itself."""
        # In the middle of a call the model's own code must not be seen to have run.
        with no_collections(), left_as_it_was(model):
            captured = self._capture.at(model, length, self._rewrites(model))
            return self._make(model, captured, is_head)

    def head(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function that computes the logits `(1, 1, V)` of a token from its input of the head, `(1, 1, H)`.

        Only of passes that read prompts. The bits are those of decoding. `None` where the head is not captured.
        """
        if not self._head:
            model = self._model()
            assert model is not None and self._of_prompts
            program = None
            try:
                program = self._captured(model, 1, is_head=True)
            except Exception as error:
                logger.debug("The head of %s is not captured: %s", type(model).__name__, error)
            run: Any = None if program is None else program.run  # of another argument than whole passes
            self._head.append(None if run is None else torch.inference_mode()(run))
        return self._head[0]

    def can_run(self, cache: Cache, length: int, texts: Sequence[TextPlace] = ONE_TEXT) -> bool:
        """Tell whether `run` can run a captured pass over `length` tokens, of all texts together, after this cache."""
        width = self._width(length, texts)
        return width is not None and self._program_for(width, texts) is not None and self._live(cache) is not None

    def _width(self, total: int, texts: Sequence[TextPlace]) -> int | None:
        """Return the width to which a pass over `total` tokens is filled up; `None` where there is none as wide."""
        if len(texts) > 1:
            own = _width_of_texts(total)
            return own if own is None or own in self._programs else self._wider(own)
        return total if self.batch_invariance is None else self.batch_invariance.width(total)

    def _wider(self, own: int) -> int:
        """Return the width of the pass to run where this width is not captured yet.

        A wider captured pass is filled up until that has cost more than `_MOST_FILLED`; then this width is captured.
        If all captured passes are narrower, a width of `_ROOMY` is captured, since widths vary with the drafts.
        """
        known = [width for width, program in self._programs.items() if program is not None]
        wider = min((width for width in known if width > own), default=None)
        if wider is None:
            return next(width for width in _ROOMY if width >= own) if known else own
        return own if self._filled.get(own, 0.0) + _lost(own, wider) > _MOST_FILLED else wider

    def _program_for(self, width: int, texts: Sequence[TextPlace]) -> Program | None:
        """Return the pass of this width, where it can attend in several rows of a cache or need not."""
        program = self.program(width)
        if program is None or not (program.attends_by_kernels or tuple(texts) == ONE_TEXT):
            return None
        return program

    def _live(self, cache: Cache) -> list[BufferedLayer] | None:
        live = (live_layers_of_any_window if self._knows_windows else live_layers)(cache, self._skipped)
        if live is not None and self._is_native and any(layer.dtype is not self._dtype for layer in live):
            return None  # torch's attention would accept it
        return live

    def begin_cache(self, cache: Cache, rows: int = 1) -> None:
        """Initialise the layers of a new cache for their contents, as a first pass of the model's own would.

        Args:
            cache: cache with buffers.
            rows: number of its rows, B.
        """
        if self.program(1) is None:
            return
        for index, layer in enumerate(cache.layers):
            if not layer.is_initialized and index in self._cached:
                states = [
                    torch.empty((rows, shape[1], 0, shape[3]), dtype=self._dtype, device="cpu")
                    for shape in self._cached[index]
                ]
                layer.lazy_initialization(*states)

    def _new_attention(self) -> CacheAttention:
        return RowAttention(self._windows) if self._knows_windows else CacheAttention()

    def _begin(
        self,
        attention: CacheAttention,
        cache: Cache,
        count: int,
        ahead: int,
        texts: Sequence[TextPlace],
        states: PassStates | None = None,
    ) -> bool:
        """Begin the attention of a pass; `False` where the cache is of another kind. Arguments as in `run`."""
        live = self._live(cache)
        if live is None:
            return False
        for layer in live:
            layer.reserve(max(count, ahead))
        attention.begin(cache.layers, live[0].end if live else 0, count, texts, states)
        return True

    def _attending(self, cache: Cache, count: int) -> CacheAttention | None:
        """Begin the attention of a trial pass over `count` tokens; `None` where `_begin` gives `False`."""
        attention = self._new_attention()
        return attention if self._begin(attention, cache, count, 0, ONE_TEXT) else None

    def run(
        self,
        cache: Cache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        drafted: int = 0,
        ahead: int = 0,
        width: int | None = None,
        texts: Sequence[TextPlace] = ONE_TEXT,
        states: PassStates | None = None,
        appended: int | None = None,
    ) -> torch.Tensor | None:
        """Run a pass.

        Args:
            cache: the target's cache. The target model's tokens are appended to it; a draft's are written after its
                tokens and not counted.
            ids (`torch.LongTensor` of shape `(B, n)`): the tokens of each text.
            positions (`torch.LongTensor` of shape `(B, n)`): their positions.
            drafted: tokens of this round's draft that are written after the cache already.
            ahead: tokens that this round's draft will have in all, to reserve cache for them at once.
            width: width to fill the pass up to; by default that of `batch_invariance`, where there is one.
            texts: place of each text in the cache, in which all end at the same slot.
            states: recurrent states of the pass; `None`: those of the cache, changed in place.
            appended: number of slots that are appended to each row of the cache; `None`: n.

        Returns:
            Logits `(B, n, V)`, or `None` where there is no captured pass to run: nothing has happened then. From passes
            that read prompts, the input of the head, `(B, n, H)`.
        """
        count, total, is_one = ids.shape[1], ids.numel(), len(texts) == 1
        if is_one and self.batch_invariance is not None and count > (widest := self.batch_invariance.widths[-1]):
            for layer in self._live(cache) or ():
                layer.reserve(count)  # at once: a rollback of the window may cover all of it
            parts = zip(torch.split(ids, widest, dim=1), torch.split(positions, widest, dim=1), strict=True)
            found = [self.run(cache, *part, texts=texts) for part in parts]
            return None if found[0] is None else torch.cat([logits for logits in found if logits is not None], dim=1)
        if not is_one and not self.is_draft and total > TEXT_WIDTHS[-1]:
            return self._run_in_groups(cache, ids, positions, texts, count if appended is None else appended)
        width = self._width(total, texts) if width is None else width
        program = None if width is None else self._program_for(width, texts)
        if width is None or program is None:
            return None
        if not is_one and (own := _width_of_texts(total) or width) not in self._programs:
            self._filled[own] = self._filled.get(own, 0.0) + _lost(own, width)
        attention: CacheAttention | None = getattr(self._attention, "value", None)
        if attention is None:
            attention = self._attention.value = self._new_attention()
        if self.is_draft and drafted:
            attention.move_to(attention.at + attention.count, count)
        elif not self._begin(attention, cache, count, max(ahead, appended or 0), texts, states):
            return None
        try:
            logits = _run_filled(program, ids, positions, attention)
        except BaseException:
            attention.let_go()
            raise
        if not self.is_draft:
            attention.let_go()
            append_written(cache, count if appended is None else appended)
        return logits

    def _run_in_groups(
        self,
        cache: Cache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        texts: Sequence[TextPlace],
        appended: int,
    ) -> torch.Tensor | None:
        """Run the target model over more texts than one pass has room for; see `run`."""
        count = ids.shape[1]
        most = max(TEXT_WIDTHS[-1] // count, 1)
        found = []
        for first in range(0, len(ids), most):
            group = slice(first, first + most)
            logits = self.run(cache, ids[group], positions[group], texts=texts[group], appended=appended)
            if logits is None:
                return None
            append_written(cache, -appended)
            found.append(logits)
        append_written(cache, appended)
        return torch.cat(found)

    def write(self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, places: Sequence[TextPlace]) -> bool:
        """Read tokens of prompts into the rows of a cache, which must have room; they are not counted.

        Args:
            cache: cache with buffers, whose layers count nothing yet.
            ids (`torch.LongTensor` of shape `(B, n)`): the prompts.
            positions (`torch.LongTensor` of shape `(B, n)`): their positions.
            places: place of each token to read. Its slot, `before`, is its column in `ids`. Tokens of a prompt come one
                after the other; keys and values of those before the first are in the cache.

        Returns:
            Whether they were read; otherwise nothing has happened.
        """
        assert self.batch_invariance is not None
        widest = self.batch_invariance.widths[-1]
        parts = [places[first : first + widest] for first in range(0, len(places), widest)]
        widths = map(self.batch_invariance.width, map(len, parts))
        programs = [None if width is None else self.program(width) for width in widths]
        if any(program is None or not program.attends_by_kernels for program in programs):
            return False
        attention = self._new_attention()
        for part, program in zip(parts, programs, strict=True):
            assert program is not None
            attention.begin(cache.layers, 0, 1, part)
            where = torch.tensor([(place.row, place.before) for place in part], device="cpu").unbind(1)
            _run_filled(program, ids[where][:, None], positions[where][:, None], attention)
        return True

    def end_round(self) -> None:
        """End this round's draft: what is held of the cache is released."""
        attention: CacheAttention | None = getattr(self._attention, "value", None)
        if attention is not None:
            attention.let_go()

    # ------------------------------------------------------------------------------------------------------------------

    def _make(self, model: PreTrainedModel, captured: CapturedPass, is_head: bool = False) -> Program | None:
        """Return a pass with its kernels, or its head; `None` where its bits depend on its width and must not."""
        length, copies = captured.length, None
        # Passes of prompts are compared with these (tuning/prompt_kernels.py).
        is_compared = not (self.is_draft or self._of_prompts or any(self._programs.values()))
        digest = self._capture.digest_of(captured) if is_compared else ""
        if self._of_prompts:
            (only_head if is_head else leave_out_head)(captured, model.get_output_embeddings())
        for node in captured.nodes:
            if node.op == "call_method" and node.target in ("attend", "attend_latents"):
                key, value, layer = node.args[2:5] if node.target == "attend" else node.args[3:6]
                self._cached[layer] = key.meta["shape"], value.meta["shape"]
        if self._copies is not None:
            copies = self._copies()
            if copies is None:
                raise CannotCapture("the low-bit copies were dropped")
            _use_copies(captured, copies, model.dtype)
        elif self.batch_invariance is not None:
            swap_linears(captured, self._invariant_linear)
        elif self.is_draft or model.dtype == torch.float32:
            layers = [layer for node in captured.nodes if (layer := linear_weight(captured, node)) is not None]
            swap_linears(captured, fastest_kernels(model, layers, length))
        activation = torch.bfloat16 if copies is not None else model.dtype
        if self._is_native:
            swap_experts(captured, lambda module: self._native_experts(module, activation, copies))
            use_native_heads(captured, activation, self._heads)
            if self.is_draft:
                try_out(model, compile_pass(captured))
            rounded = use_kernel_lists(captured, activation, model.dtype)
            if self._rounded is None and not is_head:
                self._rounded = rounded
            is_alike = is_head or rounded == self._rounded
        else:
            is_alike = True
        self.uneven = None if self.batch_invariance is None else uneven(captured)
        if self.batch_invariance is not None and not is_alike:
            self.uneven = "an operation that has a kernel in some passes alone"
        if self.uneven is not None:
            return None
        program = compile_pass(captured)
        for copied in program.copied_weights:  # unlike others, these are not read anew in each pass
            self._copied.setdefault(id(copied.copy), (copied, copied.weight.detach().clone()))
        if self.is_draft:
            if not self._is_native:
                try_out(model, program)
        elif is_compared:
            compare_with_model(model, program, digest, self._attending, self._knows_windows)
        return program

    def _invariant_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        """Return a layer whose bits do not depend on the width of a pass, the same for passes of all lengths."""
        assert self.batch_invariance is not None
        key = id(weight), id(bias)
        if key not in self._linears:
            self._linears[key] = weight, bias, LINEARS[self.batch_invariance.linear](weight, bias)
        return self._linears[key][2]

    def _native_experts(
        self, module: Any, activation: torch.dtype, copies: LowBitCopies | None
    ) -> NativeExperts | None:
        """Return the kernels of a layer of experts, the same for passes of all lengths; `None` where it has none."""
        if copies is not None and id(module) in copies.experts:
            return copies.experts[id(module)].native
        if id(module) not in self._experts:
            self._experts[id(module)] = module, native_experts(module, activation)
        return self._experts[id(module)][1]

    def _rewrites(self, model: PreTrainedModel) -> Rewrites:
        native = products_to_layers, use_parts_of_weights, without_writes, share_results, use_native_rows
        alike = native if self._is_native else (share_results,)
        return Rewrites(alike, (fuse_norms, fuse_rotary) if self.is_draft or model.dtype == torch.float32 else ())


def _lost(own: int, wider: int) -> float:
    """Estimate the extra time of a wider pass, in passes of the own width; a few more tokens cost little."""
    return min(wider / own - 1.0, (wider - own) / _DOUBLES)


def _width_of_texts(total: int) -> int | None:
    """Return the width of a pass over `total` tokens of several texts; `None` where there is none as wide."""
    return next((width for width in TEXT_WIDTHS if width >= total), None)


def _run_filled(
    program: Program, ids: torch.Tensor, positions: torch.Tensor, attention: CacheAttention
) -> torch.Tensor:
    """Return logits `(B, n, V)` of the tokens `(B, n)` of several texts, one text after the other in the pass.

    The results of the tokens that fill the pass up are dropped.
    """
    batch, count = ids.shape
    if batch > 1:
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
    total = batch * count
    if program.length > total:
        fill = (1, program.length - total)
        ids = torch.cat((ids, ids[:, -1:].expand(fill)), dim=1)
        positions = torch.cat((positions, positions[:, -1:].expand(fill)), dim=1)
    with torch.inference_mode():
        logits = program.run(ids, positions, attention)
        if logits.shape[1] > total:
            logits = logits[:, :total]
        return logits if batch == 1 else logits.view(batch, count, -1)


def _use_copies(captured: CapturedPass, held: LowBitCopies, model_dtype: torch.dtype) -> None:
    """Make a draft's linear layers compute from their low-bit copies."""
    copies = held.by_weight

    def group_of(weight: torch.Tensor, bias: torch.Tensor | None) -> LowBitCopy | None:
        group = copies[id(weight)][0] if id(weight) in copies else None
        # Where a model adds a layer's bias itself, the copy, which adds it too, is of no use.
        return None if group is not None and bias is None and group.bias is not None else group

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
    _use_own_weights(captured, model_dtype)


_FEW_WEIGHTS = 1 << 20
"""Elements up to which a layer without a low-bit copy is copied to bfloat16: an adapter's."""


def _use_own_weights(captured: CapturedPass, model_dtype: torch.dtype) -> None:
    """Compute the linear layers of a draft that have no low-bit copies, such as an adapter's, next to bfloat16."""
    others = {torch.float32, torch.float16} - {model_dtype}

    def kernel_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., Any]:
        kernel = linear_of_few_rows(weight, bias, 1)

        def mixed(x: torch.Tensor) -> torch.Tensor:
            x = x.to(weight.dtype)
            return (functional.linear(x, weight, bias) if kernel is None else kernel(x)).to(torch.bfloat16)

        # The model itself casts the input of an adapter that computes in another type than its own.
        return kernel if kernel is not None and weight.dtype in {torch.bfloat16, *others} else mixed

    for node in captured.nodes:
        layer = linear_weight(captured, node)
        if layer is None or layer[1] is not None or layer[0].numel() > _FEW_WEIGHTS:
            continue
        if layer[0].dtype is model_dtype is not torch.bfloat16:
            name = f"{node.args[1].target}_bfloat16"
            node.update_arg(1, captured.add_copy(name, layer[0], torch.Tensor.bfloat16, node))
    swap_linears(captured, kernel_of)


class CapturedPart(Part):
    """Part of a model's state: its captured passes, of each set of adapters that was in use of late."""

    def __init__(self) -> None:
        self._by_adapters: dict[Hashable, Captures] = {}

    def of(self, model: PreTrainedModel) -> Captures:
        """Return the passes with the adapters that are in use; empty where they have none yet."""
        return recent(self._by_adapters, adapters_in_use(model), Captures, _MOST_ADAPTERS)

    def drop(self) -> None:
        self._by_adapters = {}

    drop_captures = drop


class Captures:
    """Captured passes of a model with one set of adapters.

    Attributes:
        targets: passes of the target model, by the kernel that keeps their bits the same; those that read prompts have
            entries of their own.
        drafts: passes of its drafts, by skip set; those with low-bit copies are stored with these.
    """

    def __init__(self) -> None:
        self.targets: dict[str | None, CapturedPasses] = {}
        self.drafts: dict[SkipConfig, CapturedPasses] = {}
        self._whole: WholeCapture | None = None

    def whole_of(self, model: PreTrainedModel) -> WholeCapture:
        """Return the capture that passes share which leave nothing out; made anew when the model has changed."""
        if self._whole is None or not self._whole.is_of(model):
            self._whole = WholeCapture(model)
        return self._whole


def captured_draft(model: PreTrainedModel, skip: SkipConfig, copies: LowBitCopies | None) -> CapturedPasses | None:
    """Return a draft's passes, made once, and anew when the model has changed; `None` where they are not captured."""
    replaced = set() if copies is None else {id(m) for module in copies.modules for m in module.modules()}
    if replaced:
        # Modules that the draft does not run may be of any make.
        layers = layout_of(model).layers
        skipped = [layers[index].attention for index in skip.attention] + [layers[index].mlp for index in skip.mlp]
        replaced.update(id(m) for sub in skipped if sub is not None for top in sub.modules for m in top.modules())
    if why_not_captured(model, replaced=replaced) is not None:
        return None

    def made() -> CapturedPasses:
        others = () if copies is None else (*copies.others, *copies.stand_ins())
        leaves_out = len(skip) > 0 or len(others) > 0
        return CapturedPasses(
            model, SkipMode(model, skip, others), frozenset(skip.attention), copies, leaves_out=leaves_out
        )

    if copies is not None:
        return _followed(copies.passes, adapters_in_use(model), model, made, _MOST_ADAPTERS)
    return _followed(state_of(model).get(CapturedPart).of(model).drafts, skip, model, made, _MOST_DRAFTS)


def _followed(
    known: dict[Any, CapturedPasses],
    key: Hashable,
    model: PreTrainedModel,
    make: Callable[[], CapturedPasses],
    most: int,
) -> CapturedPasses:
    """Return the passes of a key, made anew when the model has changed."""
    if key in known and not known[key].follow(model):
        del known[key]
    return recent(known, key, make, most)


def draft_of(model: PreTrainedModel, config: SelfSpeculativeConfig) -> tuple[SkipMode, CapturedPasses | None]:
    """Return the draft of a config: its skip mode, with low-bit copies in place, and its captured passes.

    Raises:
        ValueError: the skip set does not fit the model, or low-bit copies cannot be made of it.
    """
    skip_mode, copies = skip_mode_of(model, config)
    return skip_mode, captured_draft(model, config.skip, copies) if config.drafts_itself else None


def skip_mode_of(model: PreTrainedModel, config: SelfSpeculativeConfig) -> tuple[SkipMode, LowBitCopies | None]:
    """Return the skip mode of a config, with its low-bit copies in place, and these copies.

    Raises:
        ValueError: as in `draft_of`.
    """
    copies = copies_of(model, config.skip, config.precision) if config.precision else None
    return SkipMode(model, config.skip, () if copies is None else copies.forwards()), copies


def captured_target(
    model: PreTrainedModel, batch_invariance: BatchInvariance | None = None, of_prompts: bool = False
) -> CapturedPasses | None:
    """Return the target model's passes, made anew when it has changed, or `None` where they may not be captured.

    Args:
        model: the target model.
        batch_invariance: means by which bits do not depend on the width of a pass; `None`: they may.
        of_prompts: whether to return the passes that read prompts.
    """
    if why_not_captured(model) is not None:
        return None
    known = state_of(model).get(CapturedPart).of(model).targets
    kind = None if batch_invariance is None else batch_invariance.linear
    if of_prompts:
        kind = f"{kind}, prompts"
    made = partial(CapturedPasses, model, batch_invariance=batch_invariance, of_prompts=of_prompts)
    passes = _followed(known, kind, model, made, _MOST_KINDS)
    passes.batch_invariance = batch_invariance  # the same passes, at fewer widths
    return passes
