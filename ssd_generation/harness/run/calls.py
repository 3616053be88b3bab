"""Timed `generate` call, and the worker that makes such calls for a comparison of two checkouts.

The worker's process (see `child.py`) loads this file alone, and imports the package of one of two checkouts, which may
be older than this file. So nothing of the package is imported at the top, and below only what all versions have, or
with a fallback.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Caller", "TimedCall"]


@dataclass(frozen=True)
class TimedCall:
    """Result of one call.

    Attributes:
        token_ids: the new tokens.
        seconds: wall-clock time of the whole `generate` call.
        prompt_seconds: part of `seconds` until the end of the model's first pass. In plain and self-speculative
            decoding that is the pass over the prompt alone; assisted decoding has drafted before it and verifies the
            draft in it, and with the model's own first layers as assistant it is a pass of these.
        speculation: counts and times of self-speculative decoding, as `SpeculationStatistics.to_dict` gives them,
            with `drafted_by_depth`, `judged_by_depth` and `accepted_by_depth`; else `None`.
        assisted: `target_passes`, `drafted_tokens` and `accepted_tokens` of transformers' assisted decoding, from the
            lengths of the model's passes; else `None`.
    """

    token_ids: list[int]
    seconds: float
    prompt_seconds: float
    speculation: dict[str, Any] | None
    assisted: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


class Caller:
    """Caller of one model by several methods, each as if it were alone with the model.

    Every method has separate draft-length policies, which continue to learn from call to call, and finds the model's
    config unchanged.

    Args:
        model: the target model, after `enable_self_speculative`.
        assistant: the model for `"assistant_model": true` in a request, or `None`.
        peers: the other runtimes for requests with `"peer"`, by name; each a `Peer`.
        shared: whether all methods use, and continue to train, the policies that the model itself has.
    """

    def __init__(self, model: Any, assistant: Any = None, peers: Any = None, *, shared: bool = False) -> None:
        self.model = model
        self.assistant = assistant
        self.peers: Mapping[str, Any] = peers or {}
        self.shared = shared
        self._learnt: dict[str, tuple[Any, ...]] = {}

    def call(
        self,
        method: str,
        request: Mapping[str, Any],
        inputs: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        seed: int | None = None,
    ) -> TimedCall:
        """Generate once.

        Args:
            method: the method whose policies are used.
            request: arguments that this method adds to those of `generate`; `"assistant_model": True` represents the
                assistant, and a request with `"peer"` goes to that runtime.
            inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
            options: `generate`'s other arguments.
            seed: seed of torch's random state; `None` leaves it unchanged.

        Raises:
            Whatever `generate`, or the peer, raises.
        """
        if "peer" in request:
            asked = request["peer"]
            called: TimedCall = self.peers[asked.peer].call(asked, inputs["input_ids"], options["max_new_tokens"])
            return called
        model, arguments = self.model, {**options, **self.arguments(request)}
        if seed is not None:
            torch.manual_seed(seed)
        # Passes of a model with a hook are not replayed, so this library's calls have their own clock.
        is_own = arguments.get("self_speculative") is not None
        passes = None if is_own else _Passes(model, only_first=not request)
        with passes or contextlib.nullcontext(), self.alone(method), _only_asked_drafts():
            _wait_for(model)
            started = time.perf_counter()
            output = model.generate(**inputs, **arguments)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            # Reading the tokens back waits for the device.
            tokens = sequences[0, inputs["input_ids"].shape[1] :].tolist()
            seconds = time.perf_counter() - started
            statistics = model.last_speculation
        prompt_seconds, speculation, assisted = 0.0, None, None
        if statistics is not None:
            # Everything but the rounds.
            prompt_seconds = seconds - (statistics.total_seconds - statistics.prompt_seconds)
            speculation = _speculation(statistics)
        elif passes is not None and passes.first_ended is not None:
            prompt_seconds = passes.first_ended - started
        if request and passes is not None and passes.lengths:
            assisted = _assisted(passes.lengths, inputs["input_ids"].shape[1], len(tokens))
        return TimedCall(tokens, seconds, prompt_seconds, speculation, assisted)

    def arguments(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Turn a request into arguments of `generate`."""
        arguments = dict(request)
        if arguments.get("assistant_model") is True:
            if self.assistant is None:
                raise ValueError("The method 'assistant' needs an assistant model.")
            arguments["assistant_model"] = self.assistant
        if isinstance(arguments.get("self_speculative"), Mapping):
            from ssd_generation.config import SelfSpeculativeConfig

            arguments["self_speculative"] = SelfSpeculativeConfig.from_dict(arguments["self_speculative"])
        return arguments

    def config_of(self, method: str) -> Any:
        """Return the config that a method last drafted by, even if chosen by the library; `None` where it has none."""
        # The newest key of its policies.
        policies: dict[Any, Any] = self._learnt[method][0] if method in self._learnt else {}
        return next(reversed(policies), None)

    @contextlib.contextmanager
    def alone(self, method: str, learn: bool = True) -> Iterator[None]:
        """Give the model a method's policies (unless `shared`), and restore its own afterwards.

        Args:
            method: the method whose policies are used.
            learn: whether the policies retain what they learn meanwhile.
        """
        known = self._learnt.get(method, ({}, {}))
        others = () if self.shared else _exchange_learnt(self.model, known if learn else copy.deepcopy(known))
        self.model.last_speculation = None
        # transformers' early exit lowers the number of layers while it drafts and, if that fails, leaves it so.
        config = getattr(self.model, self.model.base_model_prefix, self.model).config
        layers = getattr(config, "num_hidden_layers", None)
        try:
            yield
        finally:
            if layers is not None:
                config.num_hidden_layers = layers
            if not self.shared:
                learnt = _exchange_learnt(self.model, others)
                if learn:
                    self._learnt[method] = learnt


def _exchange_learnt(model: Any, entries: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a model draft by these policies and refinements, each by config; return those that it had."""
    names = "policies", "refinements"
    owner: Any
    try:
        from ssd_generation.support.model_state import state_of
        from ssd_generation.tuning.learnt import LearntPart

        owner = state_of(model).get(LearntPart)
    except ImportError:  # an older checkout, which --paired runs
        try:
            owner = state_of(model)
        except NameError:
            owner, names = model, ("_speculation_policies", "_speculation_refinements")
    before = tuple(getattr(owner, name, {}) for name in names)
    for name, entry in zip(names, entries, strict=True):
        setattr(owner, name, entry)
    return before


class _Passes:
    """Passes of a model during a call, recorded by a hook: the end of the first one, and their lengths.

    Args:
        model: the target model.
        only_first: whether to remove the hook after the first pass, and record no lengths.
    """

    def __init__(self, model: Any, only_first: bool) -> None:
        self.model = model
        self.only_first = only_first
        self.first_ended: float | None = None
        self.lengths: list[int] = []
        # Early exit drafts with fewer layers.
        self._config = getattr(model, model.base_model_prefix, model).config
        self._layers = self._layers_now()

    def __enter__(self) -> None:
        self._handle = self.model.register_forward_hook(self._note, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        if self.first_ended is None:
            _wait_for(self.model)
            self.first_ended = time.perf_counter()
        if self.only_first:
            self._handle.remove()
        elif self._layers_now() == self._layers:
            ids = kwargs.get("input_ids", args[0] if args else None)
            self.lengths.append(0 if ids is None else ids.shape[1])

    def _layers_now(self) -> int | None:
        return getattr(self._config, "num_hidden_layers", None)


def _only_asked_drafts() -> contextlib.AbstractContextManager[None]:
    """Have a model that drafts `always` decode the baselines plainly."""
    try:
        from ssd_generation.support.unasked import only_asked_drafts
    except ImportError:  # an older checkout, which drafts only where it is asked to
        return contextlib.nullcontext()
    return only_asked_drafts()


def _wait_for(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _speculation(statistics: Any) -> dict[str, Any]:
    """Return the statistics of a call as plain JSON types, by depth too."""
    by_depth = ("drafted_by_depth", "judged_by_depth", "accepted_by_depth")
    return {**statistics.to_dict(), **{name: list(getattr(statistics, name)) for name in by_depth}}


def _assisted(lengths: list[int], prompt_length: int, new_tokens: int) -> dict[str, int]:
    """Count what assisted decoding drafted and accepted, from the lengths of the model's passes.

    After the prompt, each pass takes the last committed token and the drafted ones; it accepts some of these and adds a
    token of its own.
    """
    drafted = max(lengths[0] - prompt_length + sum(length - 1 for length in lengths[1:]), 0)
    accepted = min(max(new_tokens - len(lengths), 0), drafted)
    return {"target_passes": len(lengths), "drafted_tokens": drafted, "accepted_tokens": accepted}


# ----------------------------------------------------------------------------------------------------------------------
# the worker


class Worker:
    """Worker that makes the calls of one of two checkouts that are compared, see `child.py`."""

    def __init__(self) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.caller: Caller | None = None
        self.tokenizer: Any = None

    def do_load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load `model` and, where there is one, `assistant`."""
        from ssd_generation.generation import enable_self_speculative
        from ssd_generation.models import load_model

        if message.get("threads"):
            torch.set_num_threads(message["threads"])

        def load(name: str) -> tuple[Any, Any]:
            model, tokenizer = load_model(name, dtype=message["dtype"], device_map=message.get("device_map"))
            return (model if message.get("device_map") else model.to(message["device"])), tokenizer

        model, self.tokenizer = load(message["model"])
        assistant = load(message["assistant"])[0] if message.get("assistant") else None
        self.caller = Caller(enable_self_speculative(model), assistant)
        return {
            # Shows which of the two checkouts was imported.
            "package": os.path.dirname(os.path.abspath(str(sys.modules["ssd_generation"].__file__))),
            "pad_token_id": getattr(model.generation_config, "pad_token_id", None),
        }

    def do_prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the requests of the methods, the tokens of the prompts and the environment.

        Only called in this file's own checkout: in the other one, `harness` may be laid out differently.
        """
        from ssd_generation.config import SelfSpeculativeConfig
        from ssd_generation.harness.methods import make_methods, portable
        from ssd_generation.harness.results import run_environment
        from ssd_generation.harness.texts import encode_prompt

        assert self.caller is not None
        config = SelfSpeculativeConfig.from_dict(message["config"]) if message.get("config") else None
        methods = make_methods(message["methods"], self.caller.model, config, message["seed"])
        return {
            "requests": {method.name: portable(method.request) for method in methods},
            "input_ids": [
                encode_prompt(self.tokenizer, text, message["chat_template"])["input_ids"][0].tolist()
                for text in message["texts"]
            ],
            "environment": run_environment(self.caller.model),
        }

    def do_call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Make a call by `method` with the arguments of `request` and `options`."""
        assert self.caller is not None
        ids = torch.tensor([message["input_ids"]], device=self.caller.model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self.caller.call(
            message["method"], message["request"], inputs, message["options"], message.get("seed")
        ).to_dict()
