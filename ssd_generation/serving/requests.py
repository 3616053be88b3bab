"""Requests of a served model: each drafts, is logged, and ends when the server does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SelfSpeculativeConfig
from ..decoding.statistics import SpeculationStatistics
from ..generation import enable_self_speculative, is_self_speculative
from ..support.messages import clipped

__all__ = ["LOG", "enable", "end_requests", "log_line", "serve_request"]

LOG = logging.getLogger("uvicorn.error")
"""Log of uvicorn, the server that transformers runs; in spite of its name, not for errors alone."""

_ENDING = threading.Event()
_RUNNING = threading.Lock()  # transformers' server runs one request of a model at a time
_PATIENCE = 5.0  # seconds to wait for a request to end: longer than a pass


class ServerEnds(RuntimeError):
    """Error that ends a request because the server ends."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


def enable(model: PreTrainedModel, default: Mapping[str, Any] | str) -> None:
    """Make a model draft in every call of its `generate`.

    Args:
        model: the target model.
        default: a config as a dict (`to_dict()`), or "auto".
    """
    if not is_self_speculative(model):
        config = default if isinstance(default, str) else SelfSpeculativeConfig.from_dict(default)
        enable_self_speculative(model, default=config, always=True)


def serve_request(
    model: PreTrainedModel, default: Mapping[str, Any] | str, inputs: Sequence[Any], arguments: Mapping[str, Any]
) -> Any:
    """Generate for a request, and log its tokens, time and acceptance rate.

    Args:
        model: the target model.
        default: as in `enable`.
        inputs: positional arguments of `generate`.
        arguments: its keyword arguments.

    Returns:
        The result of `generate`.
    """
    enable(model, default)
    stream = _stream_of(arguments)
    if stream is not None:
        arguments = {**arguments, "streamer": stream}
    before, started, result = model.last_speculation, time.perf_counter(), None
    problem: Exception | None = None
    try:
        with _RUNNING:
            if _ENDING.is_set():
                raise ServerEnds
            result = type(model).generate(model, *inputs, **arguments)
            return result
    except ServerEnds as error:
        problem = error
        if stream is None or stream.client is not None:  # a streaming client receives the error
            raise
        return stream.text_so_far(arguments["input_ids"])
    except Exception as error:
        problem = error
        raise
    finally:
        statistics = model.last_speculation if model.last_speculation is not before else None
        seconds, tokens = time.perf_counter() - started, _new_tokens(arguments, stream, result)
        level = logging.INFO if problem is None or _is_cancelled(problem) else logging.ERROR
        LOG.log(level, log_line(tokens, seconds, statistics, problem))


def end_requests() -> None:
    """End the running request, and refuse those that wait."""
    _ENDING.set()
    if _RUNNING.acquire(timeout=_PATIENCE):
        _RUNNING.release()


def log_line(
    tokens: int, seconds: float, statistics: SpeculationStatistics | None, problem: Exception | None = None
) -> str:
    """Return the log line of a request.

    Args:
        tokens: number of new tokens.
        seconds: time they took.
        statistics: statistics of the call; `None` where it was not self-speculative.
        problem: error that ended it, if any.
    """
    amount = "1 token" if tokens == 1 else f"{tokens} tokens"
    took = f"{amount} in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)"
    if problem is not None:
        what = "cancelled" if _is_cancelled(problem) else f"failed: {clipped(problem)}"
        return f"{took}, {what}"
    if statistics is None:
        return f"{took}, decoded without drafts"
    if statistics.reused_tokens:
        took += f", {statistics.reused_tokens} of {statistics.prompt_tokens} prompt tokens cached"
    if statistics.acceptance_rate is None:
        why = f": {clipped(statistics.refusal)}" if statistics.refusal else ""
        return f"{took}, nothing drafted{why}"
    return (
        f"{took}, acceptance rate {statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens, "
        f"{statistics.tokens_per_round or 1:.2f} tokens per round"
    )


class _Stream(BaseStreamer):
    """Streamer that counts tokens, and ends the request when the server ends.

    Args:
        client: streamer of the client; `None` for a request that is answered in one piece.
    """

    def __init__(self, client: Any = None) -> None:
        self.client = client
        self.pieces: list[torch.Tensor] = []  # the first is the prompt

    @property
    def new_tokens(self) -> int:
        """Number of new tokens so far."""
        return sum(piece.numel() for piece in self.pieces[1:])

    def put(self, value: torch.Tensor) -> None:
        if _ENDING.is_set():
            raise ServerEnds
        if self.client is not None:
            self.client.put(value)
        self.pieces.append(value.cpu())

    def end(self) -> None:
        if self.client is not None:
            self.client.end()

    def text_so_far(self, prompt: torch.Tensor) -> torch.Tensor:
        """Return the sequence that `generate` would return if it ended here."""
        return torch.cat([prompt.cpu(), *(piece.reshape(1, -1) for piece in self.pieces[1:])], dim=-1)


def _stream_of(arguments: Mapping[str, Any]) -> _Stream | None:
    """Return a streamer that replaces the request's own; `None` for beam search, where transformers allows none."""
    beams = [arguments.get("num_beams"), getattr(arguments.get("generation_config"), "num_beams", None)]
    return None if any(count not in (None, 1) for count in beams) else _Stream(arguments.get("streamer"))


def _new_tokens(arguments: Mapping[str, Any], stream: _Stream | None, result: Any) -> int:
    if stream is not None:
        return stream.new_tokens
    return int(result.shape[-1] - arguments["input_ids"].shape[-1]) if result is not None else 0


def _is_cancelled(problem: Exception) -> bool:
    # transformers raises an exception that it does not export from the streamer of a client that disconnected.
    return isinstance(problem, ServerEnds) or type(problem).__name__ == "_GenerationCancelled"
