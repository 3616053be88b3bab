"""Passes of a model's own code over several tokens that give each token the result of a pass over it alone.

Where activations are rounded to a few bits on their way (quantised models), another order of sums has large effects: a
number is rounded the other way, and the logits of a whole model diverge by a tenth of their spread. Attention sums in
another order for another number of tokens; it costs little to compute for each token separately, with the very call
that a pass over that token makes. In linear layers of some makes the result for a token depends on the other tokens
(they look for outliers in all of them): then they, too, run for each token separately, which takes as long as so many
steps, but for what comes between. And some layers of states have a scan of their own for several tokens, which is
another function (state_layers.py).

The model's check finds out which of these it needs (tuning/model_check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import SkipConfig
from ...support.model_state import Part, state_of
from ..captured.replacing import own_attention
from ..structure.linears import features, is_foreign, linears, mixes_rows, rounds_activations
from ..structure.skip_mode import SkipMode, forward_of
from .state_layers import StateLayer, state_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ATTENTION",
    "EVERYTHING",
    "STATES",
    "RowByRowPart",
    "has_scans_of_its_own",
    "least_needed",
    "row_by_row",
    "run_row_by_row",
    "ways",
]

STATES, ATTENTION, EVERYTHING = "layers of states", "attention", "attention and linear layers"
"""Parts of a model that run for each token separately."""
_WIDTHS = (2, 5, 12)
_NUMBERS = 2**17
"""Numbers of a linear layer's output that are compared: in half precision one of 20,000 may be rounded differently."""


class RowByRowPart(Part):
    """Part of a model's state: what passes of its own code run for each token separately, as its check found necessary.

    Attributes:
        state_layers: its layers of states, where these may have to run token by token.
        row_by_row: one of `ways`, for a batch (`True`) and for a single text.
    """

    def __init__(self) -> None:
        self.state_layers: list[StateLayer] | None = None
        self.row_by_row: dict[bool, str | None] = {}

    def drop(self) -> None:
        self.state_layers = None


def run_row_by_row(model: PreTrainedModel, is_batch: bool, what: str | None) -> None:
    """Set how passes of a model's own code over several tokens run from now on.

    Args:
        model: the target model.
        is_batch: whether this is for several texts, or for a single one.
        what: one of `ways(model)`.
    """
    state_of(model).get(RowByRowPart).row_by_row[is_batch] = what


def ways(model: PreTrainedModel, least: str | None) -> list[str | None]:
    """Return what may run for each token separately, the cheapest first: `None` is nothing.

    Args:
        model: the target model.
        least: cheapest way to return.
    """
    found = [None, *([STATES] if _state_layers(model) else []), ATTENTION, EVERYTHING]
    return found[found.index(least) :]


def _state_layers(model: PreTrainedModel) -> list[StateLayer]:
    state = state_of(model).get(RowByRowPart)
    if state.state_layers is None:
        state.state_layers = state_layers(model)
    return state.state_layers


def least_needed(model: PreTrainedModel) -> str | None:
    """Return the least that must run for each token separately, by tests of the linear layers.

    A check on a short text may miss it. One layer of each class is tested. With quantised or third-party layers in half
    precision no pass is captured, and attention runs for each token. That does not help if linear layers round a token
    differently next to other tokens: then they run for each token as well.
    """
    classes = {(type(m), type(getattr(m, "weight", None))): m for m in linears(model) if is_foreign(m)}
    needed = ATTENTION if classes and model.dtype in (torch.bfloat16, torch.float16) else None
    for module in classes.values():
        try:
            if mixes_rows(module, model.dtype):
                return EVERYTHING
            if rounds_activations(module, model.dtype):
                needed = ATTENTION
        except Exception:  # not a layer like others: the check decides
            continue
    return EVERYTHING if needed is not None and _any_depends_on_width(model) else needed


def _any_depends_on_width(model: PreTrainedModel) -> bool:
    """Tell whether a linear layer's bits for a token depend on other tokens: one of each make and shape is tested.

    In float32 the last layer does not count, whose last bits nothing after it amplifies.
    """
    head = model.get_output_embeddings() if model.dtype is torch.float32 else None
    tops = {(type(m), type(getattr(m, "weight", None)), features(m)): m for m in linears(model, False) if m is not head}
    for module in tops.values():
        try:
            if _depends_on_width(module, model.dtype):
                return True
        except Exception:  # not a layer like others: the check decides
            continue
    return False


def _depends_on_width(module: nn.Module, dtype: torch.dtype) -> bool:
    columns, outputs = features(module) or (0, 1)
    generator = torch.Generator(device="cpu").manual_seed(0)
    widest = max(_WIDTHS)
    with torch.no_grad():
        for _ in range(-(-_NUMBERS // (widest * outputs))):
            x = torch.randn((1, widest, columns), generator=generator, device="cpu").to(dtype)
            alone = torch.cat([module(row.contiguous()) for row in torch.split(x, 1, dim=1)], dim=1)
            if any(not torch.equal(module(x[:, :width].contiguous()), alone[:, :width]) for width in _WIDTHS):
                return True
    return False


def has_scans_of_its_own(model: PreTrainedModel, texts: int) -> bool:
    """Tell whether the model's own code over several tokens of `texts` texts was found to treat states differently."""
    return state_of(model).get(RowByRowPart).row_by_row.get(texts > 1) == STATES


@contextmanager
def row_by_row(model: PreTrainedModel, texts: int) -> Iterator[None]:
    """Run passes over several tokens of each of `texts` texts token by token, as far as that was found necessary."""
    what = state_of(model).get(RowByRowPart).row_by_row.get(texts > 1)
    if what is None:
        yield
        return
    if what == STATES:
        with SkipMode(model, SkipConfig(), [patch for layer in _state_layers(model) for patch in layer.patches()]):
            yield
        return
    with own_attention(_token_by_token):
        if what == ATTENTION:
            yield
            return
        tops = list(linears(model, wrapped=False))
        with SkipMode(model, SkipConfig(), [(module, _each_row(module)) for module in tops]):
            yield


def _each_row(module: nn.Module) -> Callable[..., Any]:
    forward = forward_of(module)

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        place = 1 if x.ndim > 2 else 0
        if x.ndim < 2 or x.shape[place] == 1:
            return forward(x, *args, **kwargs)
        rows = torch.split(x, 1, dim=place)
        return torch.cat([forward(row.contiguous(), *args, **kwargs) for row in rows], dim=place)

    return run


def _token_by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function that calls another one for each token, with the keys that the token sees."""
    seen: list[Any] = [None, []]  # the last mask, and what was derived from it: layers share one

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        count, slots = query.shape[2], key.shape[2]
        if attention_mask is None or count == 1 or attention_mask.shape[-2:] != (count, slots):
            return original(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        if seen[0] is not attention_mask:
            seen[:] = attention_mask, _visible(attention_mask)
        parts = []
        for token, (start, end, mask) in enumerate(seen[1]):
            one, keys, values = query[:, :, token : token + 1], key[:, :, start:end], value[:, :, start:end]
            parts.append(original(module, one, keys, values, mask, **kwargs)[0])
        return torch.cat(parts, dim=1), None

    return attention


def _visible(mask: torch.Tensor) -> list[tuple[int, int, torch.Tensor | None]]:
    """Return where the keys that each token sees begin and end, and the mask over these, if it hides any of them.

    Args:
        mask (`torch.BoolTensor` or `torch.FloatTensor` of shape `(B, 1 or H, tokens, keys)`): mask; its numbers, where
            it has any, are added to scores.
    """
    is_seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    by_anyone = is_seen.flatten(0, 1).any(dim=0).int()  # of several texts, one may see more than another
    starts = by_anyone.argmax(dim=1).tolist()
    ends = (by_anyone.shape[1] - by_anyone.flip(1).argmax(dim=1)).tolist()
    found = []
    for token, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = mask[:, :, token : token + 1, start:end]
        says_nothing = bool(own.all()) if mask.dtype is torch.bool else not bool(own.any())
        found.append((start, end, None if says_nothing else own))
    return found
