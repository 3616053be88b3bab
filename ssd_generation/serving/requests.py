"""One request of a served model: it drafts, is logged, and ends when the server does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SelfSpeculativeConfig
from ..decoding.statistics import SpeculationStatistics
from ..generation import enable_self_speculative, is_self_speculative
from ..support.messages import clipped

__all__ = ["LOG", "enable", "end_requests", "log_line", "serve_request"]

LOG = logging.getLogger("uvicorn.error")
"""The server's own log, in spite of its name: uvicorn's, which transformers runs."""

_ENDING = threading.Event()
_RUNNING = threading.Lock()  # transformers' server runs one request of a model at a time
_PATIENCE = 5.0  # seconds in which a request ends: more than a pass takes


class ServerEnds(RuntimeError):
    """The server ends, and this request with it."""


def enable(model: PreTrainedModel, default: Mapping[str, Any] | str) -> None:
    """Have a model draft, whoever calls its `generate`.

    Args:
        model: the target model.
        default: a config as its `to_dict()`, or "auto".
    """
    if not is_self_speculative(model):
        config = default if isinstance(default, str) else SelfSpeculativeConfig.from_dict(default)
        enable_self_speculative(model, default=config, always=True)


def serve_request(
    model: PreTrainedModel, default: Mapping[str, Any] | str, inputs: Sequence[Any], arguments: Mapping[str, Any]
) -> Any:
    """Generate for a request, and log what it took.

    Args:
        model: the target model.
        default: see `enable`.
        inputs: positional arguments of `generate`.
        arguments: its keyword arguments.

    Returns:
        As `generate`.
    """
    enable(model, default)
    arguments = _with_streamer(arguments)
    before, started, result, problem = model.last_speculation, time.perf_counter(), None, None
    try:
        with _RUNNING:
            if _ENDING.is_set():
                raise ServerEnds("The server ends.")
            result = type(model).generate(model, *inputs, **arguments)
            return result
    except Exception as error:
        problem = error
        raise
    finally:
        statistics = model.last_speculation if model.last_speculation is not before else None
        seconds = time.perf_counter() - started
        line = log_line(_new_tokens(arguments, result), seconds, statistics if problem is None else None, problem)
        LOG.log(logging.INFO if problem is None or _is_cancelled(problem) else logging.ERROR, line)


def end_requests() -> None:
    """End the request under way, and refuse those that wait."""
    _ENDING.set()
    if _RUNNING.acquire(timeout=_PATIENCE):
        _RUNNING.release()


def log_line(
    tokens: int, seconds: float, statistics: SpeculationStatistics | None, problem: Exception | None = None
) -> str:
    """Say what a request took, in a line.

    Args:
        tokens: new ones.
        seconds: that they took.
        statistics: of the call; `None` where it was not self-speculative.
        problem: why it did not end by itself.
    """
    amount = "1 token" if tokens == 1 else f"{tokens} tokens"
    took = f"{amount} in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)"
    if problem is not None:
        what = "cancelled" if _is_cancelled(problem) else f"failed: {clipped(problem)}"
        return f"{took}, {what}"
    if statistics is None:
        return f"{took}, decoded without drafts"
    if statistics.acceptance_rate is None:
        why = f": {clipped(statistics.refusal)}" if statistics.refusal else ""
        return f"{took}, nothing drafted{why}"
    return (
        f"{took}, acceptance rate {statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens, "
        f"{statistics.tokens_per_round or 1:.2f} tokens per round"
    )


class _Stream(BaseStreamer):
    """Streamer of a request that is answered in one piece: it counts, and ends the request when the server ends."""

    def __init__(self) -> None:
        self.total_tokens = -1  # the first tokens are the prompt's

    def put(self, value: Any) -> None:
        if _ENDING.is_set():
            raise ServerEnds("The server ends.")
        self.total_tokens = 0 if self.total_tokens < 0 else self.total_tokens + value.numel()

    def end(self) -> None:
        pass


def _with_streamer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with a streamer, unless there is one or beams are searched, where transformers allows none."""
    beams = [arguments.get("num_beams"), getattr(arguments.get("generation_config"), "num_beams", None)]
    if arguments.get("streamer") is not None or any(count not in (None, 1) for count in beams):
        return dict(arguments)
    return {**arguments, "streamer": _Stream()}


def _new_tokens(arguments: Mapping[str, Any], result: Any) -> int:
    counted = getattr(arguments.get("streamer"), "total_tokens", None)
    if counted is not None:
        return max(int(counted), 0)
    return int(result.shape[-1] - arguments["input_ids"].shape[-1]) if result is not None else 0


def _is_cancelled(problem: Exception) -> bool:
    # transformers raises an exception of its own, which it does not export, from the streamer of a client that hung up.
    return isinstance(problem, ServerEnds) or type(problem).__name__ == "_GenerationCancelled"
