"""Captures of a model's passes, a few of which give the passes of any length."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from ...cache.recurrent import has_states
from ..structure.positions import cut_to_table
from ..structure.skip_mode import SkipMode
from ..structure.weights import fingerprint
from .capture import CannotCapture, capture_pass
from .conditions import is_chunked, windows_of
from .fx_graph import CapturedPass, at_length, of_any_length, same_pass
from .state_steps import StatePlace, states_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["LONGEST", "PassCapture", "Rewrites", "WholeCapture"]

LONGEST = 33
"""Tokens of the longest captured pass; longer ones are rare, and Python takes a small part of their time."""


class Rewrites(NamedTuple):
    """Rewrites of captured passes that hold for any length.

    Attributes:
        alike: rewrites made for all passes of a model.
        further: rewrites made after these.
    """

    alike: tuple[Callable[[CapturedPass], object], ...] = ()
    further: tuple[Callable[[CapturedPass], object], ...] = ()


class WholeCapture:
    """Pass of any length of a model with nothing left out: captured once, for all that run it.

    Args:
        model: the model to capture.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._of, self._found = fingerprint(model), dict[tuple[Any, ...], CapturedPass | None]()

    def is_of(self, model: PreTrainedModel) -> bool:
        """Tell whether the model is still the one that was captured."""
        return self._of == fingerprint(model)

    def get(self, rewrites: tuple[Any, ...], make: Callable[[], CapturedPass | None]) -> CapturedPass | None:
        """Return the pass with these rewrites, made on first use; `None` where there is none of any length."""
        if rewrites not in self._found:
            self._found[rewrites] = make()
        return self._found[rewrites]


class PassCapture:
    """Capture of the passes of one model.

    Args:
        skip_mode: mode that leaves out the sub-layers of a draft; `None`: the target model.
        knows_windows: whether the attention of the captured passes knows about sliding windows.
        whole: captures of the target model that others may share; `None` where something is left out.
        does_one: whether a pass over a single token is treated like others. Many models have a separate case for it,
            which computes the same.
    """

    def __init__(
        self,
        skip_mode: SkipMode | None,
        knows_windows: bool,
        whole: WholeCapture | None = None,
        does_one: bool = False,
    ) -> None:
        self._skip_mode = skip_mode
        self._knows_windows = knows_windows
        self._whole, self._does_one = whole, does_one
        self._longer: CapturedPass | None = None
        self._longer_known = False

    def at(self, model: PreTrainedModel, length: int, rewrites: Rewrites) -> CapturedPass:
        """Return the pass over `length` tokens.

        Args:
            model: the target model.
            length: n ≥ 1.
            rewrites: rewrites to make, once where a pass of any length is found.

        Raises:
            CannotCapture: the pass is no pure function of ids, positions and cache, or depends on the text's length.
        """
        windows = windows_of(model) if self._knows_windows else []
        if not windows and is_chunked(model):
            raise CannotCapture("its attention is chunked")
        states = states_of(model) if has_states(model) else {}
        with nullcontext() if self._skip_mode is None else self._skip_mode:
            if length > 1 or self._does_one:
                if not self._longer_known:
                    self._longer_known = True
                    self._longer = self._of_any_length(model, windows, states, rewrites)
                if self._longer is not None:
                    return at_length(self._longer, length)
            far = cut_to_table(model, 19, length)
            one, other = (capture_pass(model, length, cached, windows, states) for cached in (min(7, far - 1), far))
        if not same_pass(one, other):
            raise CannotCapture("the pass depends on the length of the text")
        _rewrite(one, *rewrites.alike, *rewrites.further)
        return one

    def digest_of(self, captured: CapturedPass) -> str:
        """Return a digest of a pass, as `at` returned it: the same for all lengths that come from one capture."""
        if self._longer is not None and (captured.length > 1 or self._does_one):
            return self._longer.digest()
        return f"{captured.digest()}, {captured.length} tokens"

    def _of_any_length(
        self,
        model: PreTrainedModel,
        windows: list[int | None],
        states: Mapping[StatePlace, torch.Tensor],
        rewrites: Rewrites,
    ) -> CapturedPass | None:
        def made() -> CapturedPass | None:
            with contextlib.suppress(Exception):  # such as a context that is shorter
                longest = cut_to_table(model, LONGEST, 11)
                lengths = ((2, 7), (3, 19), (longest, 11))
                common = of_any_length([capture_pass(model, n, cached, windows, states) for n, cached in lengths])
                if common is not None:
                    _rewrite(common, *rewrites.alike)
                return common
            return None

        if self._whole is None:
            common = made()
        else:
            common = self._whole.get(rewrites.alike, made)
            if common is not None and rewrites.further:
                common = common.copy(common.length, lambda leaf: leaf)
        if common is not None:
            _rewrite(common, *rewrites.further)
        return common


def _rewrite(captured: CapturedPass, *rewrites: Callable[[CapturedPass], object]) -> None:
    for rewrite in rewrites:
        rewrite(captured)
