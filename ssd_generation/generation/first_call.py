"""The first streamed `"auto"` call for a model on a machine, in which costs are measured between tokens.

A reader wants to see the first token at once. So the text is decoded as transformers decodes it, each token is handed
on, and what drafting needs (the check of the model, compiled kernels, costs, low-bit copies) is made in parts: some
between tokens, for about a third of the time, and the rest at the end. The next call drafts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..cache.recurrent import has_states
from ..forward.eager.module_states import module_states
from ..forward.structure.offloaded import is_offloaded
from ..native.ahead import compile_ahead
from ..support.attributes import left_as_it_was
from ..support.forks import ForkSafeRLock
from ..support.model_state import Part, state_of
from ..support.once import looking_once
from ..support.parallel import mesh_of
from ..support.progress import without_bars
from ..tuning.automatic import choose_in_parts, is_chosen
from ..tuning.plan_passes import batch_invariance_to_check, plan_passes
from ..tuning.short_calls import FEW
from .current import under_way
from .request import Request, prompt_of

if TYPE_CHECKING:
    from ..tuning.model_check import ModelCheck

__all__ = ["FirstCall", "FirstCallPart", "is_first_call", "is_not_worth_measuring"]

logger = logging.getLogger(__name__)

_SHORT_CALLS = 16
"""Calls for up to `FEW` tokens in a process before costs are measured for such calls: by then plain decoding has taken
about as long as measuring does."""


class FirstCallPart(Part):
    """State of a model's first call in this process.

    Attributes:
        lock: held by the thread that prepares drafts between the tokens of a text.
        is_over: whether all was prepared, by this process or an earlier one, or failed; later calls measure what they
            lack beforehand.
        short_calls: number of calls that were too short to measure for.
    """

    def __init__(self) -> None:
        self.lock = ForkSafeRLock()
        self.is_over = False
        self.short_calls = 0


def is_first_call(request: Request) -> bool:
    """Tell whether a call decodes plainly while it measures: its text is streamed, and nothing is known yet.

    Other calls measure beforehand: their text is complete sooner that way. So do batches, and calls of models that are
    spread over processes or devices, or hold recurrent states, which passes in the middle of a text could touch.

    Args:
        request: request of the call.
    """
    model, prompts = request.model, prompt_of(request.args, request.kwargs)
    return (
        request.kwargs.get("streamer") is not None
        and prompts is not None
        and len(prompts) == 1
        and module_states(model) is None
        and not has_states(model)
        and _has_to_measure(request)
    )


def is_not_worth_measuring(request: Request) -> bool:
    """Tell whether a call requests so few tokens that it does not wait for measurements; count it if so.

    A process that makes many such calls measures after `_SHORT_CALLS` of them, or in its first longer one.

    Args:
        request: request of the call.
    """
    few, part = request.few_tokens, state_of(request.model).get(FirstCallPart)
    is_short = few is not None and few <= FEW and not request.reads_less and part.short_calls < _SHORT_CALLS
    if not (is_short and _has_to_measure(request)):
        return False
    part.short_calls += 1
    return True


def _has_to_measure(request: Request) -> bool:
    """Tell whether a call on a CPU drafts by `"auto"`, which nothing is known for yet."""
    model, part = request.model, state_of(request.model).get(FirstCallPart)
    may_have_to = (
        request.is_auto
        and not part.is_over
        and next(model.parameters()).device.type == "cpu"
        and mesh_of(model) is None
        and not is_offloaded(model)
    )
    if may_have_to:
        part.is_over = is_chosen(model, request.draft_memory)
    return may_have_to and not part.is_over


class FirstCall:
    """Preparation of drafts in parts, next to a text that is decoded plainly.

    Args:
        request: request of the call.
        check: function that checks the model.
    """

    def __init__(self, request: Request, check: Callable[[], ModelCheck]) -> None:
        self._request = request
        self._check = check
        self._parts: Iterator[None] | None = self._in_parts()
        self._began = 0.0
        self._spent = 0.0

    def decode(self, sample: Callable[[BaseStreamer], Any]) -> Any:
        """Decode the text, and prepare between its tokens.

        Args:
            sample: transformers' own loop, which takes the streamer to hand tokens to.

        Returns:
            The output of the loop.
        """
        streamer = self._request.kwargs["streamer"]
        with self._alone() as is_alone:
            self._began = time.perf_counter()
            return sample(_Watched(streamer, self._go_on) if is_alone else streamer)

    def finish(self) -> None:
        """Prepare the rest, after the text has ended."""
        with self._alone() as is_alone:
            while is_alone and self._parts is not None:
                self._next()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep other threads from preparing the same; yield `False` where one does already."""
        lock = state_of(self._request.model).get(FirstCallPart).lock
        is_alone = lock.acquire(blocking=False)
        try:
            yield is_alone
        finally:
            if is_alone:
                lock.release()

    def _go_on(self) -> None:
        """Do the next part, unless parts have taken more than a third of the time so far."""
        if self._parts is not None and 3 * self._spent <= time.perf_counter() - self._began:
            with without_bars():
                self._next()

    def _next(self) -> None:
        """Do the next part. After an error the next call measures beforehand."""
        assert self._parts is not None
        started = time.perf_counter()
        try:
            # Preparing must not change the text: random numbers and the state of the modules are restored.
            with (
                under_way(None),
                looking_once(),
                torch.random.fork_rng(devices=[]),
                left_as_it_was(self._request.model),
            ):
                next(self._parts)
        except StopIteration:
            self._end()
        except Exception:
            logger.info("Preparing drafts between tokens failed; the next call prepares them.", exc_info=True)
            self._end()
        self._spent += time.perf_counter() - started

    def _end(self) -> None:
        self._parts = None
        state_of(self._request.model).get(FirstCallPart).is_over = True

    def _in_parts(self) -> Iterator[None]:
        model = self._request.model
        compile_ahead(model.dtype)
        yield
        batch_invariance_to_check(model, None)  # which captures passes and compiles their kernels
        yield
        if self._check().refusal is not None:
            return
        yield
        plan_passes(model)
        yield
        yield from choose_in_parts(
            model, prompt_of(self._request.args, self._request.kwargs), self._request.draft_memory
        )


class _Watched(BaseStreamer):
    """Streamer that hands on what it gets, and calls a function after each token."""

    def __init__(self, streamer: BaseStreamer, after_token: Callable[[], None]) -> None:
        self._streamer = streamer
        self._after_token = after_token

    def put(self, value: torch.Tensor) -> None:
        self._streamer.put(value)
        self._after_token()

    def end(self) -> None:
        self._streamer.end()
