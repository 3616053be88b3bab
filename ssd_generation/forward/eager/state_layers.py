"""Layers of states that take the tokens of a pass one at a time, and read their weights once for all of them.

After a cache, some layers compute another function over several tokens than over one at a time: their scan begins with
an empty state there (mamba, falcon_mamba and jamba in transformers 5.23). Given each token separately, a layer computes
what plain decoding does. Its weights would make that as expensive as so many steps: so a linear layer that is given the
layer's own input takes all tokens at the first of them, and the one whose result is the layer's takes them all at the
last. What comes between (a convolution, gates, a step of the scan) runs for each token, by the layer's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache.recurrent import layers_without_keys
from ..structure.linears import features, linears
from ..structure.skip_mode import forward_of
from .module_states import holders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StateLayer", "state_layers"]


class StateLayer:
    """A layer of states, run token by token in passes over several.

    Args:
        layer: module that takes hidden states `(B, tokens, H)`, as its first argument or as `hidden_states`, and gives
            as many, alone or first in a tuple.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._linears = list(linears(layer, wrapped=False))
        self._last: nn.Module | None = None  # the linear layer whose result is the layer's, once that has been seen
        self._end_pass()

    def _end_pass(self) -> None:
        self._whole: torch.Tensor | None = None  # the hidden states of all tokens
        self._row: torch.Tensor | None = None  # and of the token that is processed
        self._token = 0
        self._ahead: dict[nn.Module, torch.Tensor] = {}  # by linear layer: the results of all tokens
        self._waiting: list[torch.Tensor] = []  # by token: input of the last linear layer
        self._latest: tuple[nn.Module, torch.Tensor] | None = None  # a linear layer, and what it gave

    def patches(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Return modules, with replacements of their `forward` for one pass."""
        return [
            (self._layer, partial(self._run, forward_of(self._layer))),
            *((linear, partial(self._run_linear, linear, forward_of(linear))) for linear in self._linears),
        ]

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        whole = args[0] if args else kwargs["hidden_states"]
        count = whole.shape[1]
        if count == 1:
            return forward(*args, **kwargs)
        self._whole, results = whole, []
        try:
            for self._token in range(count):
                waited, self._latest = len(self._waiting), None
                self._row = whole[:, self._token : self._token + 1].contiguous()
                named = {name: self._of_token(value, count) for name, value in kwargs.items()}
                result = forward(*(self._of_token(value, count) for value in args), **named)
                hidden = result[0] if isinstance(result, tuple) else result
                made_by, made = self._latest or (None, None)
                if len(self._waiting) == waited == 0:
                    results.append(hidden)
                    if hidden is made:
                        self._last = made_by
                elif hidden is not made or len(self._waiting) != waited + 1:
                    raise RuntimeError(f"{type(self._layer).__name__} makes its results in more ways than one.")
            if self._waiting:
                assert self._last is not None
                waiting, self._whole = torch.cat(self._waiting, dim=1), None
                results.append(self._last(waiting))
        finally:
            self._end_pass()
        hidden = torch.cat(results, dim=1)
        return (hidden, *result[1:]) if isinstance(result, tuple) else hidden

    def _of_token(self, value: Any, count: int) -> Any:
        """Return an argument as a pass over the token alone would be given it."""
        if value is self._whole:
            return self._row
        if isinstance(value, torch.Tensor) and value.ndim in (1, 2) and value.shape[-1] >= count:
            # Positions or a mask: of this pass's tokens, or of all of the text up to them.
            end = value.shape[-1] - count + self._token + 1
            return value[..., end - 1 : end] if value.shape[-1] == count else value[..., :end]
        return value

    def _run_linear(self, linear: nn.Module, forward: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
        if self._whole is None or args:
            return forward(x, *args)
        if x is self._row:
            if linear not in self._ahead:
                self._ahead[linear] = forward(self._whole)
            return self._ahead[linear][:, self._token : self._token + 1].contiguous()
        if linear is self._last:
            self._waiting.append(x)
            made = x.new_zeros((*x.shape[:-1], (features(linear) or (0, 0))[1]))
        else:
            made = forward(x)
        self._latest = linear, made
        return made


def state_layers(model: PreTrainedModel) -> list[StateLayer]:
    """Return the layers of which the model's cache holds states alone.

    They are the innermost modules that know their place in it, or those that store states themselves.
    """
    places = layers_without_keys(model)
    found = [StateLayer(holder.module) for holder in holders(model) if next(linears(holder.module), None) is not None]
    for module in model.modules():
        if getattr(module, "layer_idx", None) in places and next(linears(module), None) is not None:
            inside = (other for other in module.modules() if other is not module)
            if not any(isinstance(getattr(other, "layer_idx", None), int) for other in inside):
                found.append(StateLayer(module))
    return found
