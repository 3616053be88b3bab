"""Captures of a model's passes, of which a few give those of any length."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ...cache.recurrent import usual_layers
from ..structure.positions import cut_to_table
from ..structure.skip_mode import SkipMode
from .capture import CannotCapture, capture_pass
from .fx_graph import CapturedPass, at_length, of_any_length, same_pass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LONGEST", "PassCapture", "windows_of"]

LONGEST = 33
"""The longest pass that is captured; longer ones are rare, and their Python is a small part of them."""


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """By layer, how many tokens its attention sees; `None`: all."""
    return [getattr(layer, "sliding_window", None) for layer in usual_layers(model)]


class PassCapture:
    """Captures passes of one model.

    Args:
        skip_mode: for a draft: what leaves the sub-layers out. `None`: the whole model.
        knows_windows: whether the attention of the captured passes knows about sliding windows.
        only_last: whether they give the logits of their last token alone.
    """

    def __init__(self, skip_mode: SkipMode | None, knows_windows: bool, only_last: bool = False) -> None:
        self._skip_mode = skip_mode
        self._knows_windows = knows_windows
        self._only_last = only_last
        self.forget()

    def forget(self) -> None:
        """Capture anew, for other rewrites."""
        self._longer: CapturedPass | None = None
        self._longer_known = False

    def at(
        self, model: PreTrainedModel, length: int, simplify: Callable[[PreTrainedModel, CapturedPass], None]
    ) -> CapturedPass:
        """The pass over `length` tokens.

        Args:
            model: the target model.
            length: n ≥ 1.
            simplify: rewrites that do for any length, done once where a pass of any length is found.

        Raises:
            CannotCapture: it is not a pure function of ids, positions and cache, or depends on the length of the text.
        """
        windows = windows_of(model) if self._knows_windows else []
        with nullcontext() if self._skip_mode is None else self._skip_mode:
            if length > 1 and not self._longer_known:
                self._longer_known = True
                # A single token is a case of its own in many models; beyond that, one is like another.
                with contextlib.suppress(Exception):  # such as a context that is shorter
                    longest = cut_to_table(model, LONGEST, 11)
                    common = of_any_length(
                        [
                            capture_pass(model, n, at, windows, self._only_last)
                            for n, at in ((2, 7), (3, 19), (longest, 11))
                        ]
                    )
                    if common is not None:
                        simplify(model, common)
                        self._longer = common
            if length > 1 and self._longer is not None:
                return at_length(self._longer, length)
            far = cut_to_table(model, 19, length)
            one, other = (
                capture_pass(model, length, behind, windows, self._only_last) for behind in (min(7, far - 1), far)
            )
        if not same_pass(one, other):
            raise CannotCapture("the pass depends on the length of the text")
        simplify(model, one)
        return one
