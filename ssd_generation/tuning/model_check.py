"""Check of the model itself: may its tokens be verified several at a time?

Drafting rests on one property: a pass over several tokens after a cache gives for each of them the logits that passes
over one at a time would have given. Not every model has it (experts chosen for a whole pass, positions counted from the
length of the cache), and no list of names covers future models. So a model is tried before it first drafts, once per
layout (a single text, a batch): a forced text is decoded by transformers' own loop, and again by this library's with
drafts that are alternately right and wrong, and the logits of every step are compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LogitsProcessor
from transformers.cache_utils import Cache

from ..cache.recurrent import has_states, slots_of
from ..decoding.refusals import NO_CACHE, CannotDraft
from ..drafting.drafter import Draft, Drafter, Texts
from ..forward.captured.conditions import (
    does_something,
    forbid_batch_capture,
    forbid_capture,
    has_patched_forward,
    why_not_captured,
)
from ..forward.eager import row_by_row, state_layers
from ..forward.eager.row_by_row import least_needed, run_row_by_row, ways
from ..forward.rounding import distances, moved_embeddings
from ..forward.structure import linears
from ..forward.structure.dropout import active_dropout
from ..forward.structure.offloaded import CannotStandIn, is_offloaded, stand_in
from ..forward.structure.sublayers import input_device
from ..support.attributes import left_as_it_was
from ..support.measurements import cached_measurement
from ..support.model_state import Part, state_of
from ..support.source_code import code_of
from ..support.structure import modules_of
from ..support.versions import CACHE
from .measuring import describe_adapters, describe_model
from .plan_passes import plan_passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ChecksPart", "ForcedText", "ModelCheck", "ScriptedDrafts", "check_model"]

_PROMPT = 5
_NEW = 8
_PADDING = 2
"""Number of padding slots at the left of a batch's second row."""

_WIDE = 12
"""Number of drafted tokens in the widest pass: the maximum of a round unless a config changes it."""

# Tokens that a round drafts for a row: (right ones, wrong ones after them). Rows diverge in length and meet again.
_SCRIPTS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((3, 0), (1, _WIDE - 1), (0, 0)),
    ((0, 2), (3, 0), (1, 0)),
)

_CHECKED = "the model's own code is checked"

_TOLERANCE = 2e-3
"""Highest root mean square of the logits' difference over their standard deviation; rounding stays far below."""
_TOLERANCE_HALF = 0.02
_MOST_HALF = 0.1
"""Upper bound of the tolerance in half precision. Up to it the tolerance is `_TIMES_ROUNDING` times the effect of
rounding, measured by decoding the text in several identical rows, or with embeddings rounded differently."""
_TIMES_ROUNDING = 4.0

_PLAIN_FAILS = "plain decoding of a few tokens fails"


@dataclass(frozen=True)
class ModelCheck:
    """Result of checking a model in one layout.

    Attributes:
        refusal: reason why nothing may be drafted; `None` where drafts can be verified.
        capture_refusal: reason why its passes in this layout must not be captured; `None` where they may be.
        uneven_refusal: for a batch, reason why rows have to advance in lockstep; `None` where each may run at its own
            speed.
        row_by_row: part done for each token separately in passes of the model's own code (eager/row_by_row.py).
    """

    refusal: str | None = None
    capture_refusal: str | None = None
    uneven_refusal: str | None = None
    row_by_row: str | None = None


class ChecksPart(Part):
    """Check results of a model, by layout and by everything that identifies the model."""

    def __init__(self) -> None:
        self.checks: dict[Any, ModelCheck] = {}


@dataclass
class ForcedText:
    """A text that a call is forced to decode, whatever the model predicts.

    Attributes:
        inputs: keyword arguments of `generate`: prompt and mask.
        cache: cache of all of the prompt but its last tokens, where it is not to be computed; not to be written to.
        tokens (`torch.LongTensor` of shape `(B, new tokens)`): the tokens to decode.
        wrong (`torch.LongTensor` of shape `(B, new tokens)`): other tokens, for drafts.
        wrong_too (`torch.LongTensor` of shape `(B, new tokens)`): a second set of other tokens.
        is_drafted: whether its script drafts anything.
    """

    inputs: dict[str, torch.Tensor]
    tokens: torch.Tensor
    wrong: torch.Tensor
    wrong_too: torch.Tensor
    cache: Cache | None = None
    is_drafted: bool = True

    def arguments(self) -> dict[str, Any]:
        """Return the inputs for one call, with a cache to write to."""
        if self.cache is None:
            return {**self.inputs, "cache_implementation": "dynamic"}  # whatever the model's own generation config says
        return {**self.inputs, CACHE: copy.deepcopy(self.cache)}

    def repeated(self, times: int) -> ForcedText:
        """Return the text with each row several times: the same tokens, by kernels for other shapes.

        Args:
            times: copies of each row.
        """
        inputs = {name: value.repeat_interleave(times, dim=0) for name, value in self.inputs.items()}
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            cache.batch_repeat_interleave(times)
        tokens, *drafts = (ids.repeat_interleave(times, dim=0) for ids in (self.tokens, self.wrong, self.wrong_too))
        return ForcedText(inputs, tokens, drafts[0], drafts[1], cache)

    def without_drafts(self) -> ForcedText:
        """Return the same text, to be decoded in passes over one token."""
        return replace(self, is_drafted=False)

    def with_other_drafts(self) -> ForcedText:
        """Return the same text, with other tokens in the drafts where they are wrong."""
        return replace(self, wrong=self.wrong_too)

    def processor(self) -> LogitsProcessor:
        """Return a logits processor that leaves only the text's own token possible."""
        return _Forcing(self)

    @property
    def most_tokens(self) -> int:
        """Number of new tokens to request: more than the text has, so that a round near its end is as wide as any."""
        return self.tokens.shape[1] + _WIDE

    def ends(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.Tensor:
        """Stop at the end of the text (a stopping criterion)."""
        length = self.inputs["input_ids"].shape[1] + self.tokens.shape[1]
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= length, device=input_ids.device)


class _Forcing(LogitsProcessor):
    supports_speculation = True  # rows of a batch are to run at their own speed where they can

    def __init__(self, text: ForcedText) -> None:
        self.tokens = text.tokens
        self.prompt = text.inputs["input_ids"].shape[1]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        step = min(input_ids.shape[1] - self.prompt, self.tokens.shape[1] - 1)
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, self.tokens[:, step : step + 1].to(scores.device), 0.0)  # type: ignore[return-value]


class ScriptedDrafts(Drafter):
    """Drafts after a script, right and wrong ones.

    Args:
        text: the text that is decoded.
    """

    def __init__(self, text: ForcedText) -> None:
        self.text = text
        self._rounds = 0

    def propose(self, texts: Texts, limits: Sequence[int]) -> Draft:
        """Draft the tokens of the next round."""
        if not self.text.is_drafted:
            return Draft.none(texts.batch)
        prompt = self.text.inputs["input_ids"].shape[1]
        drafts: list[list[int]] = []
        for row, (script, limit) in enumerate(zip(_SCRIPTS, limits, strict=False)):
            right, wrong = script[self._rounds] if self._rounds < len(script) else (1, 1)
            at = len(texts.text(row)) - prompt
            tokens = self.text.tokens[row, at : at + right].tolist()
            if wrong and at + right < _NEW:
                tokens += self.text.wrong[row].roll(-at - right).repeat(2)[:wrong].tolist()
            drafts.append(tokens[:limit])
        self._rounds += 1
        # All rows of the batch: rows beyond the scripts draft nothing.
        return Draft.of_tokens([*drafts, *[[] for _ in limits[len(drafts) :]]], texts.pending.device)


_DecodeText = Callable[[ForcedText, bool, bool], Any]
Decode = Callable[["PreTrainedModel", ForcedText, bool, bool], Any]
"""`(model, text, drafted, lockstep) → output of generate`, with logits, by transformers' loop or by this library's."""


def check_model(model: PreTrainedModel, is_batch: bool, decode: Decode, exactness: str | None = None) -> ModelCheck:
    """Check a model, or recall its result; forbid capture from here on of passes that may not be captured.

    The answer is stored with the measurements of this machine, unless it depends on this process's modules (hooks,
    patched forwards).

    Args:
        model: the target model.
        is_batch: whether there is more than one row.
        decode: decodes the forced text.
        exactness: the requested exactness, for planning the passes that are tried, as in `plan_passes`.
    """
    if (refusal := active_dropout(model)) is not None:
        return ModelCheck(refusal=refusal)  # no two passes agree
    if torch.is_autocast_enabled(input_device(model).type):
        # Layers round to fewer bits than the model has, and differently in passes of another width: near-ties flip.
        return ModelCheck(refusal="autocast is on, under which passes over several tokens round differently")
    fingerprint, installed = _seen(model)
    memory: dict[Any, ModelCheck] = state_of(model).get(ChecksPart).checks
    seen = (is_batch, exactness, installed, fingerprint)
    found = memory.get(seen)
    if found is None:
        if installed:
            found = _tried(model, is_batch, decode, exactness)
        else:
            described = {
                "what": "check",
                "layout": "batch" if is_batch else "single",
                **describe_model(model),
                "captured": why_not_captured(model, even_forbidden=True) is None,
                "code": code_of(model),
                "checked by": _own_code(),
                "exactness": exactness,
                "by": "stand-in" if is_offloaded(model) else "model",
                "default device": str(torch.get_default_device()),  # where some models' own code makes tensors
            }
            found = _read(
                cached_measurement(
                    model, described, lambda: asdict(_tried(model, is_batch, decode, exactness)), use=_read
                )
            )
        for other in [key for key in memory if key[:2] == seen[:2]]:
            del memory[other]  # the model has changed since
        memory[seen] = found
    (forbid_batch_capture if is_batch else forbid_capture)(model, found.capture_refusal)
    run_row_by_row(model, is_batch, found.row_by_row)
    return found


def _read(answer: Any) -> ModelCheck:
    if not all(value is None or isinstance(value, str) for value in answer.values()):
        raise ValueError(f"reasons are strings, but got {answer!r:.200}")
    return ModelCheck(**answer)


def _tried(model: PreTrainedModel, is_batch: bool, decode: Decode, exactness: str | None) -> ModelCheck:
    """Check a model; where weights are offloaded, check a replacement model with the same code and without them."""
    if is_offloaded(model):
        with contextlib.suppress(CannotStandIn), stand_in(model) as (other, _):
            forbid_capture(other, "its weights are offloaded")  # nor are the model's own passes captured
            found = _check(other, is_batch, partial(decode, other), exactness)
            if found.refusal is None or not found.refusal.startswith(_PLAIN_FAILS):  # the stand-in may cause that
                return found
    return _check(model, is_batch, partial(decode, model), exactness)


def _check(model: PreTrainedModel, is_batch: bool, decode: _DecodeText, exactness: str | None) -> ModelCheck:
    text = _forced_text(model, 2 if is_batch else 1)
    run_row_by_row(model, is_batch, None)
    with _quiet(), left_as_it_was(model):
        try:
            output = decode(text, False, False)
        except CannotDraft:
            raise
        except Exception as error:  # whatever a model's code raises
            return ModelCheck(refusal=f"{_PLAIN_FAILS} ({_said(error)})")
        if isinstance(output[CACHE], Cache) and slots_of(output[CACHE], otherwise=1) == 0:
            return ModelCheck(refusal=f"it {NO_CACHE}")
        plain = output.logits
        if not all(bool(step.isfinite().any(dim=-1).all()) and not bool(step.isnan().any()) for step in plain):
            return ModelCheck()  # no usable logits, so nothing to compare
        if is_batch:
            captured = _captured_difference_of_rows(model, text, plain, decode, exactness)
            return replace(_check_rows(model, text, plain, decode), capture_refusal=captured)
        forbid_capture(model, None)
        is_captured = why_not_captured(model) is None
        captured, how = _difference(model, text, plain, decode) if is_captured else None, None
        if captured is not None or not is_captured or has_states(model):
            # Models with states run by their own code in some places, and drafts of theirs do.
            forbid_capture(model, captured or (_CHECKED if is_captured else None))
            own, how = _least_difference(model, text, plain, decode, is_batch, least_needed(model))
            if own is not None:
                return ModelCheck(refusal=own)
        after_window = _after_a_window(model, text, output[CACHE])
        if after_window is not None:
            if plan_passes(model, 1, exactness, is_check=True).batch_invariance is None:
                forbid_capture(model, captured or _CHECKED)  # batches may run by the model's own code there
            with contextlib.suppress(Exception):  # such a cache may be one that this model cannot continue from
                output = decode(after_window, False, False)
                far = _difference(model, after_window, output.logits, decode)
                if far is not None:
                    return ModelCheck(refusal=f"after a text that is longer than its window, {far}")
        return ModelCheck(capture_refusal=captured, row_by_row=how)


def _captured_difference_of_rows(
    model: PreTrainedModel,
    text: ForcedText,
    plain: Sequence[torch.Tensor],
    decode: _DecodeText,
    exactness: str | None,
) -> str | None:
    """Return `_difference` of captured passes over several rows, where there may be any; none are made afterwards."""
    forbid_batch_capture(model, None)
    is_captured = plan_passes(model, len(text.tokens), exactness, is_check=True).captured
    found = _difference(model, text, plain, decode) if is_captured else None
    forbid_batch_capture(model, _CHECKED)
    return found


def _check_rows(
    model: PreTrainedModel, text: ForcedText, plain: Sequence[torch.Tensor], decode: _DecodeText
) -> ModelCheck:
    """Check passes over several rows by the model's own code."""
    needed, uneven = least_needed(model), "its activations are quantised to few bits, so that masked slots affect them"
    if needed is None:
        parts, how = _least_difference(model, text, plain, decode, True)
        if parts is None:
            return ModelCheck(row_by_row=how)
        uneven = parts
    even, how = _least_difference(model, text, plain, decode, True, needed, lockstep=True)
    return ModelCheck(refusal=even) if even is not None else ModelCheck(uneven_refusal=uneven, row_by_row=how)


def _least_difference(
    model: PreTrainedModel,
    text: ForcedText,
    plain: Sequence[torch.Tensor],
    decode: _DecodeText,
    is_batch: bool,
    needed: str | None = None,
    lockstep: bool = False,
) -> tuple[str | None, str | None]:
    """Find the smallest part done for each token separately under which `_difference` finds rounding alone.

    Args:
        needed: the smallest part to try.

    Returns:
        `(None, the part)`; or, where no part is enough, the difference with the smallest and `None`.
    """
    first = None
    for way in ways(model, needed):
        run_row_by_row(model, is_batch, way)
        parts = _difference(model, text, plain, decode, lockstep)
        if parts is None:
            return None, way
        first = first or parts
    run_row_by_row(model, is_batch, None)
    return first, None


def _difference(
    model: PreTrainedModel, text: ForcedText, plain: Sequence[torch.Tensor], decode: _DecodeText, lockstep: bool = False
) -> str | None:
    """Describe how logits `(B, V)` per step, decoded with drafts, differ from plain ones; `None` for rounding alone."""
    try:
        drafted = decode(text, True, lockstep).logits
    except CannotDraft:
        raise
    except Exception as error:
        return f"its pass over several tokens after a cached prefix fails ({_said(error)})"
    if len(drafted) != len(plain):
        return f"its passes over several tokens gave {len(drafted)} tokens instead of {len(plain)}"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return _too_far(model, distances(plain, drafted).max(), _TOLERANCE)
    # In half precision rounding makes logits differ between widths. It does not explain differences at equal width: a
    # token's logits do not depend on the tokens after it (except that an expert may get more of them).
    others = distances(drafted, decode(text.with_other_drafts(), True, lockstep).logits).max()
    # Where rounding decides between two experts, single tokens may be far apart.
    apart = distances(plain, drafted).median(dim=0).values.max()
    if others <= _TOLERANCE and apart <= _TOLERANCE_HALF:
        return None
    if not distances(plain, decode(text, False, False).logits).max() <= _TOLERANCE:
        return "the same passes over the same tokens give different logits from call to call"

    def rounding(times: int) -> torch.Tensor:
        several = decode(text.repeated(times), False, False).logits
        return distances(plain, [step[::times] for step in several])

    def allowed(least: float, rounding: torch.Tensor, times: float = _TIMES_ROUNDING) -> float:
        return min(max(times * float(rounding), least), _MOST_HALF)

    in_pairs = rounding(2)
    reason = _too_far(model, others, allowed(_TOLERANCE, in_pairs.max()))
    if reason is not None:
        return reason
    reason = _too_far(model, apart, allowed(_TOLERANCE_HALF, in_pairs.median(dim=0).values.max()))
    if reason is None:
        return None
    # A GPU's product of a dozen rows adds up in another order than one of two: the more, the larger the matrices are.
    if apart <= allowed(_TOLERANCE_HALF, rounding(1 + _WIDE).median(dim=0).values.max()):
        return None
    moved = _moved_by_rounding(model, text).median(dim=0).values.max()
    within = allowed(_TOLERANCE_HALF, moved)
    if apart > max(within, float(moved)):
        return reason
    # On some processors torch rounds a single row differently from the same row next to others, whatever these are.
    # Then this library's own passes over one token are the ones to compare with. Rounding by width moves logits no
    # further than rounding the embeddings does.
    by_width = distances(decode(text.without_drafts(), True, lockstep).logits, drafted)
    if by_width.max() <= _TOLERANCE:
        return None  # the width changes nothing: kernels alone round differently from plain decoding
    narrow = allowed(_TOLERANCE_HALF, moved, times=1.0)
    return None if apart <= within and by_width.median(dim=0).values.max() <= narrow else reason


def _moved_by_rounding(model: PreTrainedModel, text: ForcedText) -> torch.Tensor:
    """Return the change of logits, per step and row, where embeddings are rounded otherwise; 0 where not possible."""
    prompt, new = text.inputs["input_ids"].shape[1], text.tokens.shape[1]
    mask = functional.pad(text.inputs["attention_mask"], (0, new), value=1)
    ids = torch.cat((text.inputs["input_ids"], text.tokens), dim=1)
    try:
        with torch.no_grad():
            embedded = (model.get_input_embeddings()(ids), moved_embeddings(model, ids))
            found = [model(inputs_embeds=one, attention_mask=mask).logits[:, prompt - 1 :].float() for one in embedded]
    except Exception:  # for example, a model that needs ids as well
        return torch.zeros((new, len(ids)), device="cpu")
    one, other = (list(logits.unbind(1))[:new] for logits in found)
    return distances(one, other).to("cpu", torch.float64)


def _too_far(model: nn.Module, apart: torch.Tensor, allowed: float) -> str | None:
    """Describe the difference of two runs, `apart` standard deviations of the logits; `None` if it is allowed."""
    if apart <= allowed:
        return None
    reason = "its pass over several tokens after a cached prefix gives different logits from passes over one"
    return f"{_quantised_by_pass(model)}{reason} (they lie {float(apart):.2g} standard deviations apart)"


def _quantised_by_pass(model: nn.Module) -> str:
    """Describe quantised activations, scaled by their maximum over a pass, which make a wider pass another function."""
    for module in model.modules():
        kind = type(module)
        if "quantized.dynamic" in kind.__module__:
            of = kind.__module__.split(".modules")[0]
            return f"its activations are quantised per pass, all tokens alike ({of}.{kind.__name__}), so that "
    return ""


def _said(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings, since the user did not make these calls."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("generation", "modeling_utils", "models")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)


def _forced_text(model: PreTrainedModel, rows: int) -> ForcedText:
    """Build a prompt and a text of arbitrary tokens, none of which ends a text or represents an image."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    # Some embeddings have rows beyond the tokens that can be generated (molmo2).
    vocabulary = min(vocabulary, getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or vocabulary)
    named: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
        for name, value in (vars(config) if config is not None else {}).items():
            if "token" in name:
                named.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if type(v) is int)
    count = rows * (_PROMPT + 3 * _NEW)
    usual = [token for token in range(3, min(vocabulary, count + 99)) if token not in named] or [0]
    ids = torch.tensor([usual[(7 * place + 1) % len(usual)] for place in range(count)], device="cpu").view(rows, -1)
    ids = ids.to(input_device(model))
    prompt, text, wrong, wrong_too = torch.split_with_sizes(ids, (_PROMPT, _NEW, _NEW, _NEW), dim=1)
    mask = torch.ones_like(prompt)
    if rows > 1:
        mask[1, :_PADDING] = 0
    wrong, wrong_too = (torch.where(ids == text, ids - 1, ids) for ids in (wrong, wrong_too))
    return ForcedText({"input_ids": prompt.contiguous(), "attention_mask": mask}, text, wrong, wrong_too)


_LONGEST_WINDOW = 8192
_SHARE_OF_WEIGHTS = 0.1
"""Most memory for keys and values of a text longer than a window, as a share of the weights' bytes."""


def _after_a_window(model: PreTrainedModel, text: ForcedText, cache: Any) -> ForcedText | None:
    """Place the text after so many tokens that the model no longer sees the first of them.

    Nothing is computed for these: keys and values of the short text are repeated in their place. Some noise makes the
    keys differ each time; if they were equal, a wrong choice among them would go unnoticed.

    Returns:
        The text; `None` where the model sees all of a text, has a window too large to try, or a cache class of its own.
    """
    config = model.config.get_text_config(decoder=True)
    windows = [
        value
        for name, value in vars(config).items()
        if type(value) is int and re.search("window|topk|chunk", name) and not name.endswith("layers")
    ]
    windows += [w for layer in getattr(cache, "layers", ()) if type(w := getattr(layer, "sliding_window", None)) is int]
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST_WINDOW
    within = [window for window in windows if _PROMPT < window <= min(_LONGEST_WINDOW, longest - 4 * _PROMPT)]
    if not within:
        return None
    generator = torch.Generator(device="cpu").manual_seed(0)
    length = max(within) + 1
    try:
        layers = [(layer.keys[:, :, -_PROMPT:], layer.values[:, :, -_PROMPT:]) for layer in cache.layers]
        size = sum(x.nbytes for pair in layers for x in pair) / _PROMPT * length
        if size > max(_SHARE_OF_WEIGHTS * sum(p.nbytes for p in model.parameters()), 2**25):
            return None
        for index, pair in enumerate(layers):
            keys, values = (x.repeat(1, 1, -(-length // x.shape[2]), 1)[:, :, :length] for x in pair)
            noise = torch.randn(keys.shape, generator=generator, device="cpu").to(keys) * keys.std() * 0.1
            cache.update(keys + noise, values, index)
        seen = int(cache.get_seq_length())
    except Exception:  # a cache class of the model's own
        return None
    ids = text.inputs["input_ids"]
    prompt = ids.repeat(1, -(-seen // ids.shape[1]) + 1)[:, : seen + 2]
    return replace(text, inputs={"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, cache=cache)


# ----------------------------------------------------------------------------------------------------------------------
# identity of the model


def _seen(model: PreTrainedModel) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return all that changes with the model within this process; and its hooks and patched forwards.

    Called in every call: the modules are traversed once.
    """
    modules: list[Any] = []
    installed: list[int] = []
    offloaded = is_offloaded(model)
    for module in modules_of(model):
        modules.append(id(module))
        modules.append(type(module).forward)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                installed += [id(hook) for hook in hooks.values() if does_something(hook)]
        patched = module.__dict__.get("forward")
        if patched is not None and not has_patched_forward(module):
            patched = None
        if patched is not None and offloaded and "_hf_hook" in module.__dict__:
            patched = None  # accelerate's, which loads weights into memory
        if patched is not None and not hasattr(patched, "is_ours"):  # another thread's skip mode
            installed.append(id(patched))
    weights = model.get_input_embeddings().weight
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    adapters = json.dumps(describe_adapters(model)) if getattr(model, "peft_config", None) else ""
    autocast = torch.is_autocast_enabled("cpu")
    rest = (attention, weights.dtype, weights.device, adapters, autocast, torch.get_default_device())
    return (tuple(modules), *rest), tuple(installed)


@functools.cache
def _own_code() -> str:
    """Return a fingerprint of the code of the check: another version of this library may find another answer."""
    files = [Path(module.__file__ or "") for module in (row_by_row, state_layers, linears)]
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in (*files, Path(__file__)))).hexdigest()
    except OSError:  # not installed as files
        return version(__name__.partition(".")[0])
